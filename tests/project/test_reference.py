"""The tables of the reference are those of the code: settings, checks, command, signals, metrics, errors, extras."""

from __future__ import annotations

import ast
import logging
import re
from configparser import ConfigParser
from dataclasses import fields
from pathlib import Path
from typing import get_args

import pytest
from django.core.management import get_commands, load_command_class
from django.dispatch import Signal
from prometheus_client import CollectorRegistry

import django_redislock
from django_redislock import conf, exceptions, metrics, signals
from django_redislock.cache.lease.counters import Tally
from django_redislock.core import events

PACKAGE = Path(django_redislock.__file__).parent
DOCS = PACKAGE.parent / "docs"


def tables(page: str) -> dict[str, str]:
    """Return the rows of all tables of a page, by the title of their section."""
    found: dict[str, str] = {}
    parts = re.split(r"^(.+)\n[-~]{3,}\n", (DOCS / page).read_text(), flags=re.MULTILINE)
    for title, text in zip(parts[1::2], parts[2::2], strict=True):
        found[title] = "".join(re.findall(r"^=[= ]+\n.*\n=[= ]+\n((?:(?!=).*\n)+)=[= ]+\n", text, re.MULTILINE))
    return found


REFERENCE = tables("reference.rst")


def rows(table: str) -> dict[str, str]:
    """Return the rest of each row whose first cell is one literal; the lines of a row follow each other."""
    return dict(re.findall(r"^``([^`]+)`` +(.*(?:\n +.*)*)$", table, re.MULTILINE))


@pytest.mark.parametrize(("section", "part"), [("Settings", None), ("The cache", "cache"), ("Celery", "celery")])
def test_every_setting_is_there_with_its_default(section, part):
    of = conf.Settings() if part is None else getattr(conf.Settings(), part)
    documented = rows(REFERENCE[section])
    assert documented.keys() == {field.name.upper() for field in fields(of)}
    for key, rest in documented.items():
        default = re.match(r"``(.+?)``", rest)
        if default is None:
            assert key in ("CACHE", "CELERY")
            assert rest.startswith("a dict")
        else:
            assert ast.literal_eval(default[1]) == getattr(of, key.lower()), key


def test_every_system_check_is_there():
    used = {id for path in PACKAGE.rglob("*.py") for id in re.findall(r"\"(redislock\.[EWI]\d{3})\"", path.read_text())}
    assert rows(REFERENCE["System checks"]).keys() == used
    assert len(used) > 20


def test_every_option_of_the_command_is_there():
    parser = load_command_class(get_commands()["redislock"], "redislock").create_parser("manage.py", "redislock")
    general = {option for action in parser._actions for option in action.option_strings}
    (subcommands,) = [action for action in parser._actions if action.dest == "action"]
    real = {
        name: {option for action in of._actions for option in action.option_strings} - general
        for name, of in subcommands.choices.items()
    }
    documented = {
        name: set(re.findall(r"``(--[\w-]+)``", rest)) for name, rest in rows(REFERENCE["The command"]).items()
    }
    assert documented == real


def test_every_signal_is_there():
    assert rows(REFERENCE["Signals"]).keys() == {
        name for name, value in vars(signals).items() if isinstance(value, Signal)
    }


def test_every_metric_is_there_with_its_labels():
    registry = CollectorRegistry()
    metrics.Metrics(registry)
    real = {}
    for collector in registry._collector_to_names:
        for metric in collector.describe():
            labels = collector._labelnames if hasattr(collector, "_labelnames") else metric._labelnames
            real[metric.name + ("_total" if metric.type == "counter" else "")] = set(labels)
    documented = {
        name: set(re.findall(r"``(\w+)``", rest)) - {"LossRecord"} for name, rest in rows(REFERENCE["Metrics"]).items()
    }
    assert documented == real


def test_every_count_of_a_cache_is_there():
    assert rows(REFERENCE["The counts of a cache"]).keys() == {field.name for field in fields(Tally)}


def test_every_event_of_the_log_is_there_with_its_level():
    documented = {event: re.match(r"[A-Z]+", rest)[0] for event, rest in rows(REFERENCE["The log"]).items()}
    assert documented == {event: logging.getLevelName(level) for event, level in events.LEVELS.items()}


def test_every_error_is_there():
    errors = {
        name
        for name, value in vars(exceptions).items()
        if isinstance(value, type) and issubclass(value, exceptions.LockError)
    }
    assert rows(REFERENCE["Errors"]).keys() == errors
    assert errors - {name for name in errors if hasattr(django_redislock, name)} == {"ComputationFailed"}


def test_every_code_of_a_loss_is_on_the_page_about_locks():
    documented = tables("lock.rst")["How a lock is renewed"]
    assert rows(documented).keys() == set(get_args(exceptions.LossCode))


def test_every_extra_for_users_is_there():
    setup = ConfigParser()
    setup.read(PACKAGE.parent / "setup.cfg")
    extras = set(setup["options.extras_require"])
    assert rows(REFERENCE["Extras"]).keys() == extras
