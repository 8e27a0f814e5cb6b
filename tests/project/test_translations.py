"""The catalogues are complete, and what is compiled is what they say."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import redis
from babel.messages.mofile import read_mo
from django.utils.translation import override

from tests.support.admin_pages import LIST, browser, hold, superuser
from tests.support.translations import LANGUAGES, identity, plain, po, read, texts

AGAIN = "run: python -m tests.support.translations"


def placeholders(text: str) -> list[str]:
    return sorted(re.findall(r"%\(\w+\)[sd]|%[sd]", text))


def test_the_texts_are_found() -> None:
    ids = {message.id for message in texts()}
    assert "renewing" in ids  # of Python
    assert "Yes, force-release" in ids  # of a template
    assert any(isinstance(id, tuple) for id in ids)  # with a plural


@pytest.mark.parametrize("language", LANGUAGES)
def test_every_text_is_translated(language: str) -> None:
    catalog = read(language)
    wanted = {identity(message) for message in texts() if message.id}
    assert {identity(message) for message in catalog if message.id} == wanted, AGAIN
    for message in catalog:
        strings = message.string if isinstance(message.string, tuple | list) else [message.string]
        assert all(strings), f"{message.id!r} is not translated"
        assert message.id == "" or not message.fuzzy, message.id
        ids = message.id if isinstance(message.id, tuple | list) else [message.id]
        if message.id:
            for string in strings:
                assert placeholders(string) == placeholders(ids[0]), message.id
    assert not catalog.obsolete


@pytest.mark.parametrize("language", LANGUAGES)
def test_what_is_compiled_is_current(language: str) -> None:
    with po(language).with_suffix(".mo").open("rb") as file:
        compiled = read_mo(file)
    expected = {identity(message): plain(message.string) for message in read(language) if message.id}
    assert {identity(message): plain(message.string) for message in compiled if message.id} == expected, AGAIN
    assert compiled.plural_forms == read(language).plural_forms


@pytest.mark.django_db
@pytest.mark.parametrize(
    ("language", "parts"),
    [
        ("de", ("Gehaltene Sperren", "nicht verlängert", "Ausgewählte Sperren zwangsweise freigeben", "10 Min")),
        ("zh-hans", ("持有中的锁", "不续期", "强制释放所选的锁", "10 分")),
    ],
)
def test_the_page_speaks_the_language_of_the_browser(
    settings: Any, client: redis.Redis, redis_url: str, language: str, parts: tuple[str, ...]
) -> None:
    settings.DJANGO_REDISLOCK = {"URL": redis_url}
    settings.MIDDLEWARE = [*settings.MIDDLEWARE, "django.middleware.locale.LocaleMiddleware"]
    hold(client, "a", expire=630)
    with override("en"):  # what the request switches this thread to ends here
        html = browser(superuser()).get(LIST, headers={"accept-language": language}).content.decode()
    for part in parts:
        assert part in html


def test_nothing_else_is_in_the_folder() -> None:
    folder: Path = po("de").parents[2]
    assert {path.name for path in folder.iterdir()} == set(LANGUAGES)
