"""Django's settings for the tests."""

from __future__ import annotations

import os

SECRET_KEY = "only for tests"
USE_TZ = True
DEFAULT_AUTO_FIELD = "django.db.models.BigAutoField"
ROOT_URLCONF = "tests.urls"
STATIC_URL = "static/"

INSTALLED_APPS = [
    "django.contrib.admin",
    "django.contrib.auth",
    "django.contrib.contenttypes",
    "django.contrib.sessions",
    "django.contrib.messages",
    "django.contrib.staticfiles",
    "django_redislock",
    "tests.support.bank",
]
MIDDLEWARE = [
    "django.middleware.security.SecurityMiddleware",
    "django.contrib.sessions.middleware.SessionMiddleware",
    "django.middleware.common.CommonMiddleware",
    "django.middleware.csrf.CsrfViewMiddleware",
    "django.contrib.auth.middleware.AuthenticationMiddleware",
    "django.contrib.messages.middleware.MessageMiddleware",
]
TEMPLATES = [
    {
        "BACKEND": "django.template.backends.django.DjangoTemplates",
        "APP_DIRS": True,
        "OPTIONS": {
            "context_processors": [
                "django.template.context_processors.request",
                "django.contrib.auth.context_processors.auth",
                "django.contrib.messages.context_processors.messages",
            ]
        },
    }
]
PASSWORD_HASHERS = ["django.contrib.auth.hashers.MD5PasswordHasher"]

DATABASES = {"default": {"ENGINE": "django.db.backends.sqlite3", "NAME": ":memory:"}}

# The session fixture `server` puts the address here and into the environment, where processes started by tests find it.
# Port 1 answers nobody: a test that runs without the fixture fails at once instead of using somebody's own Redis.
CACHES = {
    "default": {
        "BACKEND": "django_redislock.cache.RedisCache",
        "LOCATION": os.environ.get("REDISLOCK_TEST_URL", "redis://127.0.0.1:1/0"),
    }
}
if "REDISLOCK_TEST_CLUSTER_URL" in os.environ:
    CACHES["default"] = {
        "BACKEND": "django_redislock.cache.ClusterCache",
        "LOCATION": os.environ["REDISLOCK_TEST_CLUSTER_URL"],
    }
