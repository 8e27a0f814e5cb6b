"""The tools of the tests do what the tests rely on, where a test that relies on it would not fail without it."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading

import pytest
import redis

from tests.support import Proxy, RedisServer, counting, find_program, fork_server, in_a_fork, monitoring, wait_until
from tests.support.celery_site.run_log import RunLog
from tests.support.fork_server import ROOT

ONE_TRY = {"retry": None, "socket_timeout": 2}


@pytest.fixture
def through(proxy):
    """A client behind the proxy that tries everything once."""
    with redis.Redis.from_url(proxy.url, **ONE_TRY) as client:
        client.ping()
        yield client


def test_wait_until_says_what_it_waited_for():
    with pytest.raises(AssertionError, match="the moon"):
        wait_until(lambda: 0, timeout=0.05, message="the moon")


def test_a_missing_program_skips_the_test_and_fails_it_where_it_is_required(monkeypatch):
    assert find_program("no-such-program", "sh", package="dash").endswith("/sh")
    monkeypatch.delenv("REDISLOCK_REQUIRE", raising=False)
    with pytest.raises(pytest.skip.Exception, match="no-such-program is missing; on Debian: apt-get install nothing"):
        find_program("no-such-program", package="nothing")
    monkeypatch.setenv("REDISLOCK_REQUIRE", "redis-server,no-such-program")
    with pytest.raises(pytest.fail.Exception, match="apt-get install nothing"):
        find_program("no-such-program", package="nothing")


NEEDY = """
import pytest
from tests.support import find_program

@pytest.fixture
def program():
    return find_program("no-such-program", package="nothing")

def test_one(program): ...
def test_another(program): ...
def test_without_the_fixture(): find_program("no-such-program", package="nothing")
def test_of_something_else(): pytest.skip("something else")
"""


@pytest.mark.processes
def test_the_summary_has_one_line_for_each_missing_program(tmp_path, monkeypatch):
    monkeypatch.delenv("REDISLOCK_REQUIRE", raising=False)
    (tmp_path / "test_needy.py").write_text(NEEDY)
    options = ["-rs", "-p", "tests.support.programs", "-p", "no:cacheprovider", "-c", "/dev/null"]
    run = [sys.executable, "-m", "pytest", *options, "--rootdir", str(tmp_path), str(tmp_path)]
    output = subprocess.run(run, cwd=ROOT, capture_output=True, text=True, check=False).stdout
    missing = "no-such-program is missing; on Debian: apt-get install nothing"
    assert set(re.findall(r"SKIPPED \[(\d)\] \S+ (.*)", output)) == {("3", missing), ("1", "something else")}, output


class TestProxy:
    def test_drops_as_many_replies_as_asked_of_commands_that_ran(self, proxy, through, client):
        through.incr("n")
        proxy.drop_next_reply(2, containing=b"INCR")
        assert through.get("n") == b"1", "neither an earlier request is meant nor another one"
        for _ in range(2):
            with pytest.raises(redis.ConnectionError):
                through.incr("n")
        assert (client.get("n"), proxy.dropped) == (b"3", 2)
        assert through.incr("n") == 4

    @pytest.mark.slow
    def test_black_hole_loses_requests(self, proxy, through, client):
        proxy.black_hole()
        with pytest.raises(redis.TimeoutError):
            through.incr("n")
        proxy.heal()
        assert through.incr("n") == 1

    @pytest.mark.slow
    def test_stall_delivers_requests_late(self, proxy, through, client):
        proxy.stall()
        with pytest.raises(redis.TimeoutError):
            through.incr("n")
        assert client.get("n") is None
        proxy.heal()
        wait_until(lambda: client.get("n") == b"1")

    def test_delivers_a_request_after_its_connection_was_closed(self, proxy, through, client):
        late = proxy.deliver_late(containing=b"INCR")
        with pytest.raises(redis.ConnectionError):
            through.incr("n")
        assert client.get("n") is None
        late.deliver.set()
        assert late.delivered.wait(30)
        assert client.get("n") == b"1"

    def test_subscriptions_are_forgotten_without_a_word_to_the_client(self, proxy, through, client):
        with through.pubsub(ignore_subscribe_messages=True) as pubsub:
            pubsub.subscribe("channel")
            wait_until(lambda: client.pubsub_numsub("channel") == [(b"channel", 1)])
            proxy.forget_subscriptions()
            wait_until(lambda: client.pubsub_numsub("channel") == [(b"channel", 0)])
            assert pubsub.get_message(timeout=0.1) is None, "neither a message nor an error"

    def test_leaves_no_thread(self, redis_url):
        before = threading.active_count()
        with Proxy(redis_url) as proxy, redis.Redis.from_url(proxy.url) as client:
            client.ping()
        assert threading.active_count() <= before, "those of others may end meanwhile"


@pytest.mark.processes
class TestRedisServer:
    def test_restart_keeps_the_port_and_the_data_unless_they_shall_be_lost(self, own_server):
        url = own_server.url
        with own_server.client() as client:
            for keep in (True, False):
                client.set("a", 1)
                own_server.restart(keep_data=keep)
                assert (client.get("a"), own_server.url) == (b"1" if keep else None, url)

    def test_a_paused_server_answers_nothing_and_can_be_stopped(self, own_server):
        with own_server.client(**ONE_TRY) as client:
            own_server.pause()
            with pytest.raises(redis.TimeoutError):
                client.ping()
            own_server.resume()
            assert client.ping()
            own_server.pause()
            own_server.stop()
            with pytest.raises(redis.ConnectionError):
                client.ping()

    def test_a_server_that_cannot_start_says_why(self):
        with pytest.raises(RuntimeError, match="no-such-option"), RedisServer(no_such_option="1"):
            pass


def test_commands_are_counted_also_those_of_scripts_and_monitored_without_them(client):
    with counting(client) as counts, monitoring(client) as commands:
        client.eval("redis.call('set', KEYS[1], 1) return redis.call('get', KEYS[1])", 1, "a")
    assert (counts["eval"], counts["set"], counts["get"]) == (1, 1, 1)
    assert [command.split()[0] for command in commands] == ["EVAL"]


@pytest.mark.processes
class TestPythonProcess:
    def test_wait_for_tells_why_the_process_ended(self, run_python):
        process = run_python("say(a=1); 1 / 0")
        with pytest.raises(AssertionError, match="ZeroDivisionError"):
            process.wait_for(b=1)
        with pytest.raises(AssertionError, match="ZeroDivisionError"):
            process.finish()

    def test_has_the_environment_that_it_is_given(self, run_python):
        code = """
import os, sys
say(given=os.environ["GIVEN"], interpreter=sys.flags.dev_mode, session=os.getsid(0) == os.getpid())
"""
        plain = run_python(code, env={"GIVEN": "a"}).finish()
        assert plain == [{"given": "a", "interpreter": sys.flags.dev_mode, "session": True}]
        own = run_python(code, env={"GIVEN": "b", "PYTHONDEVMODE": "" if sys.flags.dev_mode else "1"}).finish()
        assert own == [{"given": "b", "interpreter": not sys.flags.dev_mode, "session": True}]

    def test_ends_as_an_interpreter_does(self, run_python):
        code = """
import atexit, sys, threading
atexit.register(say, at="exit")
threading.Timer(0.05, say, kwargs={"at": "thread"}).start()
sys.exit(3)
"""
        process = run_python(code)
        assert process.wait() == 3
        assert process.lines == [{"at": "thread"}, {"at": "exit"}]


@pytest.mark.slow
def test_nothing_of_ours_is_imported_before_a_fork():
    code = f"""
import runpy, sys
runpy.run_path({fork_server.__file__!r})["import_libraries"]()
from django.conf import settings
assert not settings.configured
assert {{"celery.app.trace", "django.db.models", "redis.asyncio"}} <= sys.modules.keys()
assert not [name for name in sys.modules if name.partition(".")[0] in ("django_redislock", "gevent", "tests")]
"""
    subprocess.run([sys.executable, "-c", code], check=True)


def test_what_fails_in_a_forked_child_fails_here():
    with pytest.raises(AssertionError, match="ZeroDivisionError"):
        in_a_fork(lambda: 1 / 0)
    with pytest.raises(AssertionError, match="signal 9"):
        in_a_fork(lambda: os.kill(os.getpid(), signal.SIGKILL))


def test_a_run_that_begins_after_another_has_ended_is_not_found_beside_both(tmp_path):
    """Of three runs, at most two at once, the third began as the first one looked for others: three were counted."""
    directory = str(tmp_path)
    second, third = (RunLog("soak", directory).run(None) for _ in range(2))

    class Looking(RunLog):
        looks = 0

        def events(self, event=None):
            found = super().events(event)
            if self.looks == 0:
                second.__exit__(None, None, None)
                third.__enter__()
            self.looks += 1
            return found

    second.__enter__()
    with Looking("soak", directory).run(None):
        third.__exit__(None, None, None)
    assert RunLog("soak", directory).at_once() == 2
