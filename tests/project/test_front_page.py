"""From the front page of the docs one link leads to the answer of each question that a newcomer asks."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

DOCS = Path(__file__).parents[2] / "docs"
FRONT = (DOCS / "index.rst").read_text()
SCREEN = 30
"""Lines of a page, of at most 120 characters: what a reader sees without scrolling."""


def read(page: str) -> str:
    """Return the text of a page, with the file that it includes."""
    text = (DOCS / f"{page}.rst").read_text()
    if included := re.fullmatch(r"\.\. include:: (\S+)\n", text):
        return (DOCS / included[1]).read_text()
    return text


PAGES = {path.stem: read(path.stem) for path in DOCS.glob("*.rst")}


def links(question: str) -> dict[str, str]:
    """Return what the front page links to in the row of a question: the title, and the first screen below it."""
    (row,) = [row for row in re.split(r"^   \* - ", FRONT, flags=re.MULTILINE)[1:] if row.startswith(question + "\n")]
    found = {}
    for role, target in re.findall(r":(doc|ref):`(?:[^`<]+ <)?([\w-]+)>?`", row):
        if role == "doc":
            rest = PAGES[target]
        else:
            (rest,) = [text.partition(f".. _{target}:\n\n")[2] for text in PAGES.values() if f".. _{target}:\n" in text]
        title, line, text = rest.split("\n", 2)
        assert re.fullmatch(r"([=-])\1+", line), target
        found[title] = "\n".join(text.splitlines()[:SCREEN])
    return found


WHERE = "Does it work with Cluster, Sentinel, TLS, ElastiCache?"


@pytest.mark.parametrize(
    ("question", "title", "answers"),
    [
        (
            "Which Redis?",
            "Which Redis",
            ["Redis 6.2 or Valkey 7.2", "Sentinel", "Redis or Valkey Cluster", "noeviction"],
        ),
        ("How much memory, how many connections?", "How to size", ["400 bytes for a held lock", "maxclients"]),
        (WHERE, "Cluster", ["redis+cluster://"]),
        (WHERE, "Sentinel", ["redis+sentinel://"]),
        (WHERE, "TLS", ["rediss://"]),
        (WHERE, "Managed services", ["ElastiCache", "is tested here"]),
        (
            "What happens when Redis is away?",
            "When Redis is away",
            ["RETRY_FOR", "LockBackendError", "deadline", "get_or_set", "on_backend_error"],
        ),
        ("How do I test my code?", "Testing and tools", ["@unlocked()", "redislock_unlocked"]),
        ("What does Sentry show for a refused task?", "What other tools see", ["Sentry shows no error", "refused"]),
        ("How do I upgrade?", "How to upgrade", ["changelog", "check --tag redislock --deploy", "workers first"]),
        (
            "A lock is stuck. What now?",
            "When something is stuck",
            ["redislock list", "redislock doctor", "redislock release"],
        ),
        ("How fast is it?", "Figures", ["Command:", "``cycle``", "redis-py's Lock"]),
        (
            "Is it safe?",
            "What it guarantees, and what it does not",
            ["lease", "At most one holder", "A frozen holder", "raise_if_lost()", "fence"],
        ),
        ("How do I begin?", "Quick start", ["pip install", "redislock doctor"]),
        ("Lock, decorator, task or cache: which one?", "How-to", ["get_or_set", "@single_instance"]),
        (
            "When is another tool better?",
            "When another tool is better",
            ["advisory lock", "unique constraint", "etcd", "Redisson"],
        ),
        (
            "How do I run a command once in the cluster, or elect a leader?",
            "Run this once in the cluster",
            ["A command under a lock"],
        ),
    ],
)
def test_a_question_of_the_front_page_is_answered_on_the_first_screen_of_its_link(question, title, answers):
    screen = links(question)[title]
    assert [answer for answer in answers if answer not in screen] == []


def test_every_page_is_linked_from_the_front_page():
    listed = set(re.findall(r"^   ([\w-]+)$", FRONT, re.MULTILINE))
    assert listed == PAGES.keys() - {"index"}


def test_every_benchmark_is_named_on_its_page():
    named = re.findall(r"^``(\w+)`` ", PAGES["benchmarks"].partition("Figures\n")[0], re.MULTILINE)
    scripts = {path.stem for path in (DOCS.parent / "benchmarks").glob("*.py")} - {"common", "run"}
    assert set(named) == scripts


def test_every_page_begins_with_what_the_reader_gets():
    for page, text in PAGES.items() - {("changelog", PAGES["changelog"])}:
        _, line, blank, first = text.split("\n", 3)
        assert re.fullmatch("=+", line), page
        assert blank == "", page
        lead = re.sub(r"\A(?:\.\. (?:currentmodule|_).*\n\n)+", "", first)
        assert re.match(r"[A-Z*`:]", lead), f"{page}: {lead[:60]}"


@pytest.mark.parametrize(
    "path",
    [*DOCS.glob("*.rst"), *(DOCS.parent / name for name in ("README.rst", "benchmarks/README.rst"))],
    ids=lambda path: path.name,
)
def test_a_table_has_no_cell_in_its_first_column_that_takes_two_lines(path):
    """A line with text in the first column begins a new row, so the rest of such a cell would be a row of its own."""
    for border, body in re.findall(
        r"^(=+(?: +=+)+)\n(?:.*\n)*?\1\n((?:(?!=).+\n)+)\1\n", path.read_text(), re.MULTILINE
    ):
        columns = [column.start() for column in re.finditer("=+", border)]
        for row in body.splitlines():
            assert row.startswith(" ") or all(row[column:].strip() for column in columns[:2]), row
