"""Four sites of twenty lines, before and after their migration by the page: what a kill of the holder leaves.

Each runs in processes of its own: a web process, and workers that are killed. What they were before is the recipe of
Celery's cookbook, `cache.lock(timeout=...)`, celery-singleton and celery-once.
"""

from __future__ import annotations

from itertools import count

import pytest
import redis

from tests.support import wait_until

BEGIN = """
import logging, sys
from celery import Celery
from django.conf import settings
from django.core.cache import cache
settings.ROOT_URLCONF = ""
settings.DJANGO_REDISLOCK = {"EXPIRE": 1, "CELERY": {"EXPIRE": 1, "RESCHEDULE_DELAY": 0.1}}
url, queue, is_worker = args
app = Celery("site", broker=f"{url.rpartition('/')[0]}/1", backend="cache+memory://", set_as_current=True)
app.conf.update(
    task_default_queue=queue, worker_prefetch_multiplier=1, worker_redirect_stdouts=False,
    ONCE={"backend": "celery_once.backends.Redis", "settings": {"url": url}}, singleton_backend_url=url,
)


def work(what):
    say(began=what)
    if is_worker:
        input()
    say(ended=what)
    return "done"


@app.task
def ping():
    say(pong=True)
"""
END = """
logging.disable()
say(ready=True)
for line in iter(sys.stdin.readline, ""):
    if line == "worker\\n":
        app.worker_main(["-q", "worker", "--pool=solo", "--loglevel=CRITICAL", "--without-gossip", "--without-mingle"])
    else:
        say(answer=eval(line))
"""

RECIPE = """
import time
from contextlib import contextmanager

LOCK_EXPIRE = 600


@contextmanager
def memcache_lock(lock_id, oid):
    timeout_at = time.monotonic() + LOCK_EXPIRE - 3
    status = cache.add(lock_id, oid, LOCK_EXPIRE)
    try:
        yield status
    finally:
        if time.monotonic() < timeout_at and status:
            cache.delete(lock_id)


@app.task(bind=True)
def import_feed(self, feed_url):
    with memcache_lock(f"lock-{feed_url}", self.app.oid) as acquired:
        if acquired:
            return work(feed_url)
    return "already being imported"
"""
RECIPE_AFTER = """
from django_redislock.celery import single_instance


@app.task
@single_instance(key="{feed_url}", on_conflict="skip", skip_result="already being imported")
def import_feed(feed_url):
    return work(feed_url)
"""

CACHE_LOCK = """
from redis.exceptions import LockError

settings.CACHES["default"]["BACKEND"] = "django_redis.cache.RedisCache"


def rebuild():
    try:
        with cache.lock("rebuild", timeout=900, blocking_timeout=0):
            return work("rebuild")
    except LockError:
        return "is being rebuilt"


def stop():  # at a deploy, because a killed process leaves its lock
    return cache.delete("rebuild")
"""
CACHE_LOCK_BY_LINE = CACHE_LOCK.replace("django_redis.cache", "django_redislock.cache")
CACHE_LOCK_AFTER = """
def rebuild():
    with cache.lock("rebuild", blocking=False).attempt() as held:
        return work("rebuild") if held else "is being rebuilt"


def stop():
    return cache.lock("rebuild").reset()
"""

SINGLETON = """
from celery_singleton import Singleton


class RunAgain(Singleton):
    def after_return(self, status, retval, task_id, args, kwargs, einfo):
        if cache.get(f"again:{args[0]}"):
            self.delay(*args)


@app.task(base=RunAgain, unique_on=["account"], lock_expiry=900)
def refresh(account):
    cache.delete(f"again:{account}")
    work(cache.get("version"))


def changed(account):
    cache.set(f"again:{account}", True)
    return refresh.delay(account).id
"""
SINGLETON_AFTER = """
from django_redislock.celery import single_instance


@app.task
@single_instance(key=["account"], scope="queued+run", on_conflict="reschedule")
def refresh(account):
    work(cache.get("version"))


def changed(account):
    return refresh.delay(account).id
"""

ONCE = """
from celery_once import AlreadyQueued, QueueOnce


@app.task(base=QueueOnce, once={"keys": ["user"], "timeout": 900})
def digest(user):
    work(user)


def ask(user):
    try:
        digest.delay(user)
    except AlreadyQueued as error:
        return error.countdown
"""
ONCE_AFTER = ONCE.replace("celery_once", "django_redislock.celery.drop_in")

numbers = count()


@pytest.fixture
def site(server, client, run_python):
    """``site(code)`` returns functions that start a web process and a worker of the site, with a queue of its own."""

    def make(code):
        queue = f"migrated-{next(numbers)}"
        with redis.Redis.from_url(f"{server.url.rpartition('/')[0]}/1") as broker:
            broker.delete(queue)

        def start(is_worker):
            process = run_python(BEGIN + code + END, server.url, queue, is_worker)
            process.wait_for(ready=True)
            return process

        def web():
            process = start(False)

            def ask(call):
                process.send(call)
                while "answer" not in (line := process.wait_for()):
                    pass
                return line["answer"]

            return ask

        def worker(call="worker"):
            process = start(True)
            process.send(call)
            return process

        return web(), worker

    return make


def until(ask, call, answer):
    """Ask until the answer comes, as a caller does that comes again."""
    wait_until(lambda: ask(call) == answer, 20)


def test_the_recipe(site, client):
    for code, stays in (RECIPE, True), (RECIPE_AFTER, False):
        ask, worker = site(code)
        holder = worker("import_feed.apply(['a']).get()")
        holder.wait_for(began="a")
        assert ask("import_feed.apply(['a']).get()") == "already being imported"
        assert ask("import_feed.apply(['b']).get()") == "done"
        holder.kill()
        if stays:
            assert ask("import_feed.apply(['a']).get()") == "already being imported"
            assert ask("cache.ttl('lock-a')") > 500
        else:
            until(ask, "import_feed.apply(['a']).get()", "done")


def test_cache_lock_with_a_timeout_and_a_delete_of_its_key(site, client):
    for code in CACHE_LOCK, CACHE_LOCK_BY_LINE, CACHE_LOCK_AFTER:
        ask, worker = site(code)
        holder = worker("rebuild()")
        holder.wait_for(began="rebuild")
        assert ask("rebuild()") == "is being rebuilt"
        holder.kill()
        if code is CACHE_LOCK:
            assert ask("rebuild()") == "is being rebuilt"
            assert ask("cache.ttl('rebuild')") > 800
            assert ask("stop()")
        elif code is CACHE_LOCK_BY_LINE:
            assert not ask("stop()")
            assert ask("rebuild()") == "is being rebuilt"
            assert ask("cache.lock('rebuild').ttl()") > 800
            assert "LongTimeoutWarning" in holder.errors
            assert ask("cache.lock('rebuild').reset()")
        else:
            until(ask, "rebuild()", "done")
            holder = worker("rebuild()")
            holder.wait_for(began="rebuild")
            assert ask("stop()"), "a deploy that cannot wait"
        assert ask("rebuild()") == "done"


def test_a_singleton_with_a_flag_to_run_again(site, client):
    for code, loses in (SINGLETON, True), (SINGLETON_AFTER, False):
        ask, worker = site(code)
        first, change = worker(), "(cache.set('version', {0}), changed(7))[1]"
        ask(change.format(1))
        first.wait_for(began=1)
        ask(change.format(2))
        ask(change.format(3))
        first.send()
        first.wait_for(began=3)
        ask(change.format(4))
        first.kill()
        again = worker()
        ask(change.format(5))
        if loses:
            ask("ping.delay().id")
            again.wait_for(pong=True)
            assert not any("began" in line for line in again.lines), "the updates 4 and 5 came"
        else:
            again.wait_for(began=5)
            again.send()
            again.wait_for(ended=5)


def test_celery_once(site, client):
    for code, stays in (ONCE, True), (ONCE_AFTER, False):
        ask, worker = site(code)
        first = worker()
        assert ask("ask(7)") is None
        first.wait_for(began=7)
        assert ask("ask(7)") > 0
        first.kill()
        again = worker()
        if stays:
            assert ask("ask(7)") > 800
        else:
            until(ask, "ask(7)", None)
            again.wait_for(began=7)
