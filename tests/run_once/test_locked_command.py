"""`LockedCommand`: a management command of which one process runs at a time."""

from __future__ import annotations

import io
import os
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, ClassVar

import pytest
from django.core.management import call_command
from django.core.management.base import CommandError
from django.utils import translation

from django_redislock import held_locks, lock
from django_redislock.management import LockedCommand
from django_redislock.run_once.command_line import holder_of
from tests.run_once.programs import Command, import_slowly
from tests.support import PythonProcess

pytestmark = pytest.mark.usefixtures("locks_by_url")


def run(command: LockedCommand, *arguments: str, **options: Any) -> str:
    output = io.StringIO()
    call_command(command, *arguments, stdout=output, stderr=output, **options)
    return output.getvalue()


def test_it_runs_under_the_lock_that_its_options_name(capfd: pytest.CaptureFixture[str]) -> None:
    seen = []

    class Looking(Command):
        def handle(self, *args: Any, **options: Any) -> str:
            seen.extend((held.name, held.kind, held.fence, held.label, held.pid) for held in held_locks())
            self.lock.raise_if_lost()
            return super().handle(*args, **options)

    command = Looking()
    assert run(command, "prices") == "imported prices\n"
    [(name, kind, _, label, pid)] = seen
    assert (name, kind, label, pid) == ("import:prices", "command", "test_locked_command", os.getpid())
    assert list(held_locks()) == []


def test_from_the_command_line_its_arguments_are_its_label() -> None:
    seen = []

    class Looking(Command):
        def handle(self, *args: Any, **options: Any) -> None:
            seen.extend(held.label for held in held_locks())

    Looking().run_from_argv(["manage.py", "looking", "big prices"])
    assert seen == ["manage.py looking 'big prices'"]


def test_two_processes_do_not_run_it_at_once_and_the_second_one_names_the_first(
    run_python: Callable[..., PythonProcess], redis_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    process = run_python(import_slowly, redis_url)
    process.wait_for()
    with pytest.raises(CommandError, match=rf"Lock 'import:slow' is held by programs on .* pid {process.pid}") as busy:
        run(Command(), "slow")
    assert busy.value.returncode == 75
    assert "is held by programs on" in run(Command(), "slow", "--skip-if-locked")
    assert run(Command(), "other") == "imported other\n"
    with pytest.raises(CommandError, match="is held by"):
        run(Command(), "slow", "--lock-timeout", "0.1s")
    with pytest.raises(CommandError, match="is held by"):
        run(Command(), "slow", lock_timeout=0.1)
    process.send()
    monkeypatch.setattr("builtins.input", lambda: "")
    assert run(Command(), "slow", "--lock-timeout", "1m") == "imported slow\n"
    process.finish()


def test_a_locked_command_names_the_holder_in_english_whatever_the_language_is() -> None:
    with lock("import:prices"), translation.override("de"), pytest.raises(CommandError, match=r" for \d\.\d s\.$"):
        run(Command(), "prices")


def test_two_threads_that_name_a_holder_keep_their_languages() -> None:
    """One of them went on in the language of the other one."""
    both = threading.Barrier(2)

    class Freed:
        def owner(self) -> None:
            both.wait(10)

    def name_holder(language: str) -> str:
        with translation.override(language):
            both.wait(10)
            assert holder_of(Freed()) == "nobody any more"  # type: ignore[arg-type]
            both.wait(10)
            return translation.get_language()

    languages = ["de", "fr"]
    with ThreadPoolExecutor(2) as pool:
        assert list(pool.map(name_holder, languages)) == languages


def test_without_the_lock_it_runs_beside_the_holder() -> None:
    with lock("import:prices"):
        assert run(Command(), "prices", "--no-lock") == "imported prices\n"
        assert len(list(held_locks())) == 1


def test_without_a_name_the_lock_has_that_of_the_command() -> None:
    class Plain(LockedCommand):
        lock_options: ClassVar = {"expire": 77, "label": "nightly"}

        def handle(self, *args: Any, **options: Any) -> str:
            [held] = held_locks()
            return f"{held.name} {held.expire:g} {held.label}"

    assert run(Plain()) == "test_locked_command 77 nightly\n"


def test_a_name_with_a_field_that_is_no_option() -> None:
    class Wrong(LockedCommand):
        lock_name = "import:{place}"

    with pytest.raises(CommandError, match=r"lock_name 'import:{place}' names 'place', which is no option"):
        run(Wrong())


@pytest.mark.parametrize(("source", "why"), [("x" * 1000, "1 to 1000 bytes"), ("\udcff", "Unicode")])
def test_an_option_of_which_no_name_can_be_made_is_no_traceback(source: str, why: str) -> None:
    with pytest.raises(CommandError, match=why) as refused:
        run(Command(), source)
    assert refused.value.returncode == 2


def test_settings_that_are_wrong_are_no_traceback(settings: Any) -> None:
    settings.DJANGO_REDISLOCK = {"CACHE_ALIAS": "nowhere"}
    with pytest.raises(CommandError, match="the cache 'nowhere' cannot hold locks") as refused:
        run(Command(), "prices")
    assert refused.value.returncode == 2


@pytest.mark.parametrize("notices", [False, True])
def test_a_lock_lost_meanwhile_is_an_error_with_a_status_of_its_own(notices: bool) -> None:
    class Losing(LockedCommand):
        def handle(self, *args: Any, **options: Any) -> None:
            lock("test_locked_command").reset(reason="it hangs")
            if notices:
                self.lock.extend()

    with pytest.raises(CommandError, match="it hangs") as lost:
        run(Losing())
    assert lost.value.returncode == 74


def test_an_error_of_the_command_is_not_hidden_and_frees_the_lock() -> None:
    class Failing(LockedCommand):
        def handle(self, *args: Any, **options: Any) -> None:
            raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        run(Failing())
    assert list(held_locks()) == []


def test_without_redis_it_does_not_run(settings: Any) -> None:
    settings.DJANGO_REDISLOCK = {"URL": "redis://127.0.0.1:1/0", "RETRY_FOR": 0}
    with pytest.raises(CommandError, match="Redis did not answer") as away:
        run(Command(), "prices", "--skip-if-locked")
    assert away.value.returncode == 69


@pytest.mark.parametrize("options", [("--no-lock", "--skip-if-locked"), ("--lock-timeout", "soon")])
def test_bad_options_are_said_before_the_lock_is_taken(options: tuple[str, ...]) -> None:
    with pytest.raises(CommandError, match=r"not allowed with|not a duration"):
        run(Command(), "prices", *options)
