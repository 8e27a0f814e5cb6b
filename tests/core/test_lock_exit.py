"""Locks at the exit of the interpreter, where Python 3.12 starts no thread any more."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from pathlib import Path

import pytest

from django_redislock.core import Lock
from django_redislock.core.keys import lock_keys
from tests.support import wait_until
from tests.support.processes import ROOT

PROGRAM = """
import atexit, logging, sys, threading
from django_redislock.core import Lock
from django_redislock.server_url import client_from_url

logging.basicConfig(stream=sys.stdout)

def at_exit():
    try:
        threading.Thread(target=int, daemon=True).start()
        print("threads start")
    except RuntimeError:
        pass
    lock = Lock(client_from_url(sys.argv[1]), "a")
    with lock:
        print("owned", lock.owned())
    print("released", not lock.locked())

atexit.register(at_exit)
"""


def python():
    """Return a Python that may start no thread at its exit: this one, or one of pyenv's."""
    if sys.version_info >= (3, 12):
        return sys.executable
    for version in ("3.12", "3.13", "3.14"):
        for found in sorted(Path(os.environ.get("PYENV_ROOT") or Path.home() / ".pyenv").glob(f"versions/{version}*")):
            return str(found / "bin/python")
    return None


@pytest.mark.processes
@pytest.mark.skipif(python() is None, reason="no Python 3.12 or later is at hand; the next test does without")
def test_at_the_exit_of_the_interpreter_a_lock_is_taken_and_the_log_says_if_it_cannot_be_renewed(redis_url):
    import django
    import redis

    places = {str(ROOT)} | {str(Path(module.__file__).parents[1]) for module in (django, redis)}
    ended = subprocess.run(
        [python(), "-c", PROGRAM, redis_url],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(places)},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr
    assert "owned True\n" in ended.stdout, ended.stderr
    assert "released True\n" in ended.stdout
    told = "is not renewed any more: the program ends" in ended.stdout
    assert told is ("threads start" not in ended.stdout)
    assert "Traceback" not in ended.stderr


@pytest.mark.parametrize(
    "message", ["can't create new thread at interpreter shutdown", "can't start new thread"], ids=["exit", "exhausted"]
)
def test_only_at_the_exit_a_lock_does_without_its_thread(own_server, monkeypatch, caplog, message):
    def start(run, name):
        raise RuntimeError(message)

    monkeypatch.setattr("django_redislock.core.driver.os_threads.start", start)
    with own_server.client() as client:
        lock = Lock(client, "a")
        if "shutdown" not in message:
            with pytest.raises(RuntimeError, match=message):
                lock.acquire()
            wait_until(lambda: not client.exists(lock_keys("redislock", "a").lock))
            return
        with Lock(client, "b", auto_renewal=False):
            assert not caplog.records, "it needs no thread"
        assert lock.acquire()
        (record,) = [record for record in caplog.records if record.levelno == logging.WARNING]
        assert "It ends by its expiry" in record.getMessage()
        assert message in record.getMessage()
        lock.release()
        assert not lock.locked()


RELEASES_IN_A_DESTRUCTOR = """
import builtins
from django_redislock.core import Lock
from tests.support import client_at

class Holder:
    def __init__(self):
        self.lock = Lock(client_at(args[0]), "a", expire=600)
        self.lock.acquire()

    def __del__(self):
        self.lock.release()

builtins.holder = Holder()  # it is deleted last
with client_at(args[0]) as client:
    client.script_flush()
"""


@pytest.mark.processes
def test_a_destructor_at_the_exit_releases_a_lock_on_a_server_that_forgot_the_scripts(run_python, own_server):
    process = run_python(RELEASES_IN_A_DESTRUCTOR, own_server.url, new=True)
    assert process.wait() == 0
    assert "ImportError" not in process.errors
    with own_server.client() as client:
        assert not client.exists(lock_keys("redislock", "a").lock)
