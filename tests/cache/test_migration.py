"""The page about migration is true of caches: its settings make caches, its code runs, as do deploys as it says."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from django.contrib.sessions.backends.cache import SessionStore
from django.core.cache import caches
from django.http import HttpResponse
from django.template import engines
from django.test import RequestFactory, override_settings
from django.views.decorators.cache import cache_page

from tests.support.cache_programs import held

PAGE = (Path(__file__).parents[2] / "docs" / "migration.rst").read_text()
SECTIONS = [
    (title, text)
    for title, text in re.findall(r"\nFrom (.+)\n-+\n((?:.*\n)*?)(?=\nFrom |\Z)", PAGE)
    if "CACHES = {" in text and "Cluster" not in title
]


def blocks(text):
    found = re.findall(r"\.\. code-block:: python\n\n((?:    .*\n|\n)+)", text)
    return ["\n".join(line[4:] for line in block.splitlines()) for block in found]


def test_the_page_has_its_sections():
    assert [title for title, _ in SECTIONS] == ["django-redis", "Django's Redis backend", "python-redis-lock"]


@pytest.mark.parametrize(("title", "text"), SECTIONS, ids=lambda value: value.split("\n")[0])
def test_its_settings_and_its_code_run(redis_url, client, title, text):
    configuration, *code = blocks(text)
    settings: dict = {}
    exec(configuration, settings)
    settings["CACHES"]["default"]["LOCATION"] = redis_url
    with override_settings(CACHES=settings["CACHES"]):
        for block in code:
            exec(block, {"cache": caches["default"]})
    assert not held(client)


def test_sessions_fragments_and_pages_of_django_work_as_before(redis_url, backend):
    default = {"BACKEND": f"django_redislock.cache.{backend}", "LOCATION": redis_url}
    with override_settings(CACHES={"default": default}):
        session = SessionStore()
        session["user"] = "a"
        session.save()
        assert SessionStore(session.session_key)["user"] == "a"
        session.flush()
        assert not SessionStore().exists(session.session_key)

        fragment = engines["django"].from_string("{% load cache %}{% cache 60 side who %}{{ text }}{% endcache %}")
        assert fragment.render({"who": 1, "text": "first"}) == "first"
        assert fragment.render({"who": 1, "text": "second"}) == "first"
        assert fragment.render({"who": 2, "text": "second"}) == "second"

        pages = []
        view = cache_page(60)(lambda request: HttpResponse(f"page {pages.append(1)}"))
        for _ in range(2):
            view(RequestFactory().get("/"))
        assert len(pages) == 1
