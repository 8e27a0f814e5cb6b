from __future__ import annotations

from django.contrib import admin
from django.urls import path

from clock_changes import views

urlpatterns = [
    path("", views.this_year, name="this-year"),
    path("<int:year>/", views.report_page, name="report"),
    path("<int:year>.json", views.report_json, name="report-json"),
    path("<int:year>/rebuild/", views.rebuild, name="rebuild"),
    path("metrics", views.metrics, name="metrics"),
    path("admin/", admin.site.urls),
]
