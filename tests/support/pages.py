"""Views behind cache_page that note their requests."""

from __future__ import annotations

from django.http import HttpResponse
from django.test import RequestFactory

from django_redislock.cache import cache_page


def get(path="/", **headers):
    return RequestFactory().get(path, headers=headers)


def counted_page(response=lambda request: HttpResponse("page"), **options):
    """Return a view behind cache_page, and the list of its requests."""
    calls = []

    @cache_page(60, **options)
    def view(request):
        calls.append(request)
        return response(request)

    return view, calls


def counted_async_page():
    calls = []

    @cache_page(60)
    async def view(request):
        calls.append(request)
        return HttpResponse("page")

    return view, calls
