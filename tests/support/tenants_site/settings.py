"""The settings of a site of django-tenants: each tenant has a schema in PostgreSQL, and its own keys in the cache."""

from __future__ import annotations

import json
import os

SECRET_KEY = "only for tests"
USE_TZ = True
ALLOWED_HOSTS = ["*"]
INSTALLED_APPS = ["django.contrib.contenttypes", "django_redislock"]
DATABASES = {"default": {**json.loads(os.environ["TENANTS_DATABASE"]), "ENGINE": "django_tenants.postgresql_backend"}}
CACHES = {
    "default": {
        "BACKEND": f"django_redislock.cache.{os.environ['TENANTS_BACKEND']}",
        "LOCATION": os.environ["TENANTS_REDIS"],
        "KEY_FUNCTION": "django_tenants.cache.make_key",
    }
}
MIDDLEWARE = ["tests.support.tenants_site.site.tenant_middleware"]
ROOT_URLCONF = "tests.support.tenants_site.site"
DJANGO_REDISLOCK = {
    "TENANT": "tests.support.tenants_site.site.schema",
    "ENTER_TENANT": "django_tenants.utils.schema_context",
}
if "TENANTS_UNKNOWN" in os.environ:
    DJANGO_REDISLOCK = {}
