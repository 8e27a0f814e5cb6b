"""The tools of the tests do what the tests rely on."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time

import pytest
import redis

from tests.support import (
    Proxy,
    RedisServer,
    counting,
    find_program,
    fork_server,
    in_a_fork,
    monitoring,
    say,
    wait_until,
)

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


def test_the_cache_of_the_settings_is_the_shared_server(client):
    from django.conf import settings

    assert client.ping()
    assert settings.CACHES["default"]["LOCATION"].endswith(f":{client.connection_pool.connection_kwargs['port']}/0")


class TestFindProgram:
    def test_finds_the_first_that_is_here(self):
        assert find_program("no-such-program", "sh", package="dash").endswith("/sh")

    def test_a_missing_one_skips_and_says_what_to_install(self, monkeypatch):
        monkeypatch.delenv("REDISLOCK_REQUIRE", raising=False)
        with pytest.raises(
            pytest.skip.Exception, match="no-such-program is missing; on Debian: apt-get install nothing"
        ):
            find_program("no-such-program", package="nothing")

    def test_a_missing_one_fails_where_it_is_required(self, monkeypatch):
        monkeypatch.setenv("REDISLOCK_REQUIRE", "redis-server,no-such-program")
        with pytest.raises(pytest.fail.Exception, match="apt-get install nothing"):
            find_program("no-such-program", package="nothing")


class TestProxy:
    def test_forwards(self, through, client):
        through.set("large", b"x" * 1_000_000)
        assert through.get("large") == client.get("large") == b"x" * 1_000_000

    def test_drops_one_reply_of_a_command_that_ran(self, proxy, through, client):
        proxy.drop_next_reply(containing=b"INCR")
        assert through.get("other") is None
        with pytest.raises(redis.ConnectionError):
            through.incr("n")
        assert (client.get("n"), proxy.dropped) == (b"1", 1)
        assert through.incr("n") == 2

    def test_a_client_that_retries_runs_the_command_twice(self, proxy, client):
        proxy.drop_next_reply(containing=b"INCR")
        with redis.Redis.from_url(proxy.url, retry=redis.retry.Retry(redis.backoff.NoBackoff(), 1)) as retrying:
            assert retrying.incr("n") == 2

    def test_drops_as_many_replies_as_asked(self, proxy, through):
        proxy.drop_next_reply(2, containing=b"INCR")
        for _ in range(2):
            with pytest.raises(redis.ConnectionError):
                through.incr("n")
        assert through.incr("n") == 3

    def test_an_earlier_request_is_not_meant(self, proxy, through):
        through.incr("n")
        proxy.drop_next_reply(containing=b"INCR")
        assert through.get("n") == b"1"

    def test_delays_replies(self, proxy, through):
        proxy.delay_replies(0.1)
        before = time.monotonic()
        through.ping()
        assert time.monotonic() - before >= 0.1

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

    def test_cut_ends_a_blocked_command(self, proxy, client):
        with redis.Redis.from_url(proxy.url, retry=None, socket_timeout=30) as waiting:
            failed = threading.Event()

            def wait() -> None:
                with pytest.raises(redis.ConnectionError):
                    waiting.blpop("nothing", 20)
                failed.set()

            thread = threading.Thread(target=wait)
            thread.start()
            wait_until(lambda: client.info("clients")["blocked_clients"])
            proxy.cut()
            assert failed.wait(60)
            thread.join()

    def test_leaves_no_thread(self, redis_url):
        before = threading.active_count()
        with Proxy(redis_url) as proxy, redis.Redis.from_url(proxy.url) as client:
            client.ping()
        assert threading.active_count() <= before, "those of others may end meanwhile"


@pytest.mark.processes
class TestRedisServer:
    def test_kill_loses_data_and_keeps_the_port(self, own_server):
        url = own_server.url
        with own_server.client() as client:
            client.set("a", 1)
            own_server.restart(keep_data=False)
            assert (client.get("a"), own_server.url) == (None, url)

    def test_restart_keeps_data(self, own_server):
        with own_server.client() as client:
            client.set("a", 1)
            own_server.restart()
            assert client.get("a") == b"1"

    def test_pause_answers_nothing_until_resume(self, own_server):
        with own_server.client(**ONE_TRY) as client:
            own_server.pause()
            with pytest.raises(redis.TimeoutError):
                client.ping()
            own_server.resume()
            assert client.ping()

    def test_a_paused_server_can_be_stopped(self, own_server):
        own_server.pause()
        own_server.stop()
        with own_server.client(**ONE_TRY) as client, pytest.raises(redis.ConnectionError):
            client.ping()

    def test_unix_socket(self, own_server):
        with redis.Redis.from_url(own_server.unix_url) as client:
            assert client.ping()

    def test_options(self):
        with RedisServer(cluster_enabled="yes") as server, server.client() as client:
            assert client.info("cluster")["cluster_enabled"] == 1

    def test_a_server_that_cannot_start_says_why(self):
        with pytest.raises(RuntimeError, match="no-such-option"), RedisServer(no_such_option="1"):
            pass


class TestCounts:
    SCRIPT = "redis.call('set', KEYS[1], 1) return redis.call('get', KEYS[1])"

    def test_counting_has_the_commands_of_scripts_too(self, client):
        with counting(client) as counts:
            client.eval(self.SCRIPT, 1, "a")
        assert counts == {"eval": 1, "set": 1, "get": 1}

    def test_monitoring_has_what_clients_sent(self, client):
        with monitoring(client) as commands:
            client.eval("return 1", 0)
            client.get("b")
        assert [command.split()[0] for command in commands] == ["EVAL", "GET"]


def count_to(last: int) -> None:
    for number in range(last):
        say(number=number)


@pytest.mark.processes
class TestPythonProcess:
    def test_runs_a_function(self, run_python):
        assert run_python(count_to, 2).finish() == [{"number": 0}, {"number": 1}]

    def test_runs_code_and_talks(self, run_python):
        process = run_python("say(args=args); say(heard=input())", 1, "b")
        process.wait_for(args=[1, "b"])
        process.send("hello")
        assert process.wait_for(heard="hello")
        process.finish()

    def test_has_the_tests_cache(self, run_python, redis_url):
        process = run_python("from django.conf import settings; say(url=settings.CACHES['default']['LOCATION'])")
        assert process.finish() == [{"url": redis_url}]

    def test_wait_for_tells_why_the_process_ended(self, run_python):
        process = run_python("say(a=1); 1 / 0")
        with pytest.raises(AssertionError, match="ZeroDivisionError"):
            process.wait_for(b=1)

    def test_finish_does_not_overlook_a_failure(self, run_python):
        with pytest.raises(AssertionError, match="ZeroDivisionError"):
            run_python("1 / 0").finish()

    def test_kill(self, run_python):
        process = run_python("say(up=1); input()")
        process.wait_for(up=1)
        process.kill()
        assert process.wait() == -9

    def test_has_the_environment_that_it_is_given_and_no_module_of_ours(self, run_python):
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


class TestForkServer:
    @pytest.mark.slow
    def test_nothing_of_ours_is_imported_before_a_fork(self):
        code = f"""
import runpy, sys
runpy.run_path({fork_server.__file__!r})["import_libraries"]()
from django.conf import settings
assert not settings.configured
assert {{"celery.app.trace", "django.db.models", "redis.asyncio"}} <= sys.modules.keys()
assert not [name for name in sys.modules if name.partition(".")[0] in ("django_redislock", "gevent", "tests")]
"""
        subprocess.run([sys.executable, "-c", code], check=True)


class TestFork:
    def test_what_fails_in_the_child_fails_here(self):
        with pytest.raises(AssertionError, match="ZeroDivisionError"):
            in_a_fork(lambda: 1 / 0)

    def test_a_child_that_dies_fails_here(self):
        with pytest.raises(AssertionError, match="signal 9"):
            in_a_fork(lambda: os.kill(os.getpid(), signal.SIGKILL))

    def test_what_the_child_does_is_its_own(self):
        mine = []
        in_a_fork(lambda: mine.append(1))
        assert mine == []
