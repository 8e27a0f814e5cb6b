"""What the processes of the tests do; each says what happens to it in JSON lines."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

from django.db import connection, transaction
from django.test import Client, override_settings

from django_redislock import LockError, lock
from tests.support import Config, say, using_databases

from .models import Account


def deposit_paused_before_the_write(database: Config, fenced: bool) -> None:
    """Deposit 1 under a lock of a short life, and wait for a line when the first UPDATE is about to be sent."""

    def wait(execute: Callable[..., object], sql: str, *args: Any) -> object:
        nonlocal waited
        if sql.startswith("UPDATE") and not waited:
            waited = True
            say(event="writing")
            input()
        return execute(sql, *args)

    waited = False
    with using_databases(default=database):
        held = lock("account:1", expire=1.2)
        held.acquire()
        account = Account.objects.get(pk=1)
        account.balance += 1
        try:
            with connection.execute_wrapper(wait):
                account.save_fenced(held) if fenced else account.save()
            say(event="written")
        except LockError as error:
            say(event="refused", error=type(error).__name__)


def write_when_told(database: Config) -> None:
    """Take the lock, read, and write when a line comes."""
    with using_databases(default=database):
        held = lock("account:1", expire=1.2)
        held.acquire()
        account = Account.objects.get(pk=1)
        say(event="held")
        input()
        try:
            account.save_fenced(held)
            say(event="written")
        except LockError as error:
            say(event="refused", error=type(error).__name__)


def deposit_in_a_transaction(database: Config, until_commit: bool) -> None:
    """Deposit 1 and leave the lock's block; commit when a line comes."""
    with using_databases(default=database):
        with transaction.atomic():
            with lock("account:1", expire=1, until_commit=until_commit):
                account = Account.objects.get(pk=1)
                account.balance += 1
                account.save()
            say(event="left")
            input()
        say(event="committed")


def fork_in_a_transaction(database: Config) -> None:
    """Fork between the end of the lock's block and the commit; the child closes what it inherited."""
    with using_databases(default=database):
        with transaction.atomic():
            with lock("account:1", until_commit=True):
                pass  # writes nothing, for the child would remove SQLite's journal
            child = os.fork()
            if not child:
                connection.close()
                assert connection.closed_in_transaction
                say(who="child", held=lock("account:1").locked())
                os._exit(0)
            os.waitpid(child, 0)
            say(who="parent", held=lock("account:1").locked())
        say(who="parent", held=lock("account:1").locked())


def deposit_by_requests(database: Config, number: int) -> None:
    """Deposit 1 as often as told, each by a request to the site."""
    site = {"ROOT_URLCONF": "tests.support.bank.urls", "ALLOWED_HOSTS": ["testserver"]}
    with using_databases(default=database | {"ATOMIC_REQUESTS": True}), override_settings(**site):
        say(event="ready")
        input()
        for _ in range(number):
            response = Client().post("/deposit/")
            say(event="done", held=response.content.decode())
