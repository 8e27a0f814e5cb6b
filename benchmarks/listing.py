"""How long does the admin's list of held locks take: beside a list from SQLite, among many keys, and of many locks?"""

from __future__ import annotations

import os
import statistics
import sys
import time
from uuid import uuid4

import redis
from common import percentile, server, table

os.environ["DJANGO_SETTINGS_MODULE"] = "tests.settings"
ROUNDS = 40
SHOWN = 200
KEYS = (10_000, 1_000_000)  # and those that the command line adds: 10 million need a gigabyte
MANY = 10_000
FILL = "for i = tonumber(ARGV[1]), tonumber(ARGV[2]) do redis.call('set', 'other:' .. i, i) end"


def setup(url: str) -> tuple:
    """Start Django with a table of as many columns as the list of held locks has.

    Return a client that is logged in, and the addresses of both pages.
    """
    os.environ["REDISLOCK_TEST_URL"] = url
    import django

    django.setup()
    from django.conf import settings
    from django.contrib import admin
    from django.contrib.auth.models import User
    from django.core.management import call_command
    from django.db import connection, models
    from django.test import Client

    settings.ALLOWED_HOSTS = ["testserver"]

    class Plain(models.Model):  # noqa: DJ008
        class Meta:
            app_label = "bank"

    columns = [f"column_{number}" for number in range(8)]
    for column in columns:
        Plain.add_to_class(column, models.CharField(max_length=100))
    admin.site.register(Plain, type("PlainAdmin", (admin.ModelAdmin,), {"list_display": columns}))
    call_command("migrate", verbosity=0)
    with connection.schema_editor() as editor:
        editor.create_model(Plain)
    Plain.objects.bulk_create(Plain(**{column: f"{column} of {row}" for column in columns}) for row in range(SHOWN))
    client = Client()
    client.force_login(User.objects.create_superuser("root"))
    return client, "/admin/bank/plain/?all=", "/admin/django_redislock/heldlock/?all="


def hold(client: redis.Redis, number: int, first: int = 0) -> None:
    """Have this many locks held, by writing what a holder writes."""
    from django_redislock.core import Lock

    Lock(client, "pattern", expire=3600, auto_renewal=False).acquire()
    value = client.get(Lock(client, "pattern")._keys.lock).decode()
    Lock(client, "pattern").reset()
    id = value.partition("\n")[0]
    with client.pipeline(transaction=False) as pipe:
        for name in (f"invoice:{n}" for n in range(first, first + number)):
            keys = Lock(client, name)._keys
            other = value.replace(id, uuid4().hex).replace('"label":""', f'"label":"send[{uuid4()}]"')
            pipe.set(keys.lock, other, px=3_600_000).zadd(keys.held, {name: 9e15})
        pipe.execute()


def fill(client: redis.Redis, keys: int) -> None:
    for start in range(client.dbsize(), keys, 100_000):
        client.eval(FILL, 0, start, min(start + 100_000, keys))


def get(web, path: str) -> float:
    started = time.perf_counter()
    response = web.get(path)
    taken = time.perf_counter() - started
    assert response.status_code == 200
    return taken


def ms(values: list[float]) -> list[str]:
    return [f"{statistics.median(values) * 1000:.0f}", f"{percentile(values, 0.95) * 1000:.0f}"]


def main() -> None:
    rows = []
    with server() as url, redis.Redis.from_url(url) as client:
        web, plain, held = setup(url)
        hold(client, SHOWN)
        for keys in (*KEYS, *map(int, sys.argv[1:])):
            fill(client, keys)
            for path in (plain, held):
                get(web, path)
            pairs = [(get(web, plain), get(web, held)) for _ in range(ROUNDS)]
            of_table, of_locks = ([pair[i] for pair in pairs] for i in (0, 1))
            ratio = statistics.median(b / a for a, b in pairs)
            rows.append([f"{SHOWN} rows from SQLite", "", *ms(of_table), ""])
            rows.append([f"{SHOWN} held locks", f"{keys:,}", *ms(of_locks), f"{ratio:.2f}"])
        hold(client, MANY)
        page = held.partition("?")[0]
        get(web, page)
        rows.append([f"100 of {MANY:,} held locks", f"{keys:,}", *ms([get(web, page) for _ in range(ROUNDS)]), ""])
    table("The admin's list", ["", "keys", "median ms", "95 % ms", "to SQLite"], rows)


if __name__ == "__main__":
    main()
