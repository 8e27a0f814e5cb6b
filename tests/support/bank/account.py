"""The account of which the tests of transactions write, under its lock."""

from __future__ import annotations

from django_redislock import lock
from tests.support.bank.models import Account

NAME = "account:1"


def held():
    return lock(NAME).locked()


def balance():
    return Account.objects.get(pk=1).balance


def deposit():
    account = Account.objects.get(pk=1)
    account.balance += 1
    account.save()


class Mistake(Exception):
    """What the tests raise."""
