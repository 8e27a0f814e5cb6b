"""The catalogues: every text of the package, read without gettext's programs.

``python -m tests.support.translations`` brings the .po files up to date with the texts and compiles them; what it
leaves empty or marks fuzzy is to be translated, and then it is run again.
"""

from __future__ import annotations

import io
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path

from babel.messages.catalog import Catalog, Message
from babel.messages.extract import extract
from babel.messages.mofile import write_mo
from babel.messages.pofile import read_po, write_po
from django.utils.translation.template import templatize

import django_redislock

PACKAGE = Path(django_redislock.__file__).parent
FUNCTIONS = {
    "_": None,
    "gettext": None,
    "gettext_lazy": None,
    "gettext_noop": None,
    "ngettext": (1, 2),
    "ngettext_lazy": (1, 2),
    "npgettext": ((1, "c"), 2, 3),
    "pgettext": ((1, "c"), 2),
    "pgettext_lazy": ((1, "c"), 2),
}
LANGUAGES = ("de", "zh_Hans")


def texts() -> Catalog:
    """Return every text that the package's code and templates mark for translation."""
    catalog = Catalog(charset="utf-8", fuzzy=False)
    for name, source in _sources():
        for _, message, _, context in extract("python", io.BytesIO(source.encode()), keywords=FUNCTIONS):
            flags = ["python-format"] if "%(" in str(message) or "%s" in str(message) else []
            catalog.add(message, locations=[(name, None)], flags=flags, context=context)
    return catalog


def _sources() -> Iterator[tuple[str, str]]:
    for path in sorted(PACKAGE.rglob("*.py")):
        yield str(path.relative_to(PACKAGE.parent)), path.read_text()
    for path in sorted(PACKAGE.rglob("*.html")):
        # Python of a kind; its indentation is the template's, and means nothing.
        lines = templatize(path.read_text()).splitlines()
        yield str(path.relative_to(PACKAGE.parent)), "\n".join(line.strip() for line in lines)


def po(language: str) -> Path:
    return PACKAGE / "locale" / language / "LC_MESSAGES" / "django.po"


def read(language: str) -> Catalog:
    with po(language).open("rb") as file:
        return read_po(file, locale=language)


def compiled(catalog: Catalog) -> bytes:
    out = io.BytesIO()
    write_mo(out, catalog)
    return out.getvalue()


def identity(message: Message) -> tuple[object, object]:
    return plain(message.id), message.context


def plain(text: object) -> object:
    return tuple(text) if isinstance(text, list) else text


def update(language: str) -> None:
    path = po(language)
    path.parent.mkdir(parents=True, exist_ok=True)
    catalog = read(language) if path.exists() else Catalog(locale=language, charset="utf-8", fuzzy=False)
    catalog.header_comment = "# The texts of django-redislock."
    catalog.msgid_bugs_address = ""
    catalog.last_translator = catalog.language_team = "the django-redislock developers"
    catalog.revision_date = datetime.now(UTC)
    catalog.update(texts())
    catalog.obsolete.clear()
    with path.open("wb") as file:
        write_po(file, catalog, width=110, sort_output=True)
    path.with_suffix(".mo").write_bytes(compiled(read(language)))


if __name__ == "__main__":
    for language in LANGUAGES:
        update(language)
