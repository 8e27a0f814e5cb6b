from __future__ import annotations

from importlib import import_module

import redis

from django_redislock.core.driver.effects import Script

HOMES = ["core.scripts", "cache.lease.obtain", "cache.lease.store", "celery.execution_lock"]


def all_scripts() -> list[Script]:
    """Return every script of the package."""
    homes = [vars(import_module(f"django_redislock.{home}")) for home in HOMES]
    return [each for home in homes for each in home.values() if isinstance(each, Script)]


def load_scripts(*servers: redis.Redis) -> None:
    """Let these servers know every script, so that no test depends on what another one has run before.

    A script that a server does not know yet is sent twice, by EVALSHA and by EVAL, and tests count commands or drop
    replies.
    """
    scripts = {each.sha: each.text for each in all_scripts()}
    for server in servers:
        known = server.script_exists(*scripts)
        for text, found in zip(scripts.values(), known, strict=True):
            if not found:
                server.script_load(text)
