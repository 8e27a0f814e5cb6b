"""``on_error="stale"`` within a transaction."""

from __future__ import annotations

import pytest
from asgiref.sync import async_to_sync
from django.db import DatabaseError, IntegrityError, connection, transaction

from tests.support.bank.models import Account
from tests.support.cache_programs import cache_at, never

OPTIONS = {"stale": 30, "on_error": "stale"}
pytestmark = pytest.mark.usefixtures("database")


@pytest.fixture
def cache(redis_url):
    cache = cache_at(redis_url)
    cache.set("k", "old", 25)
    return cache


def fail():
    Account.objects.create(pk=1)  # there is one


def fail_within_a_savepoint():
    with transaction.atomic():
        fail()


def test_an_error_that_has_broken_the_transaction_is_raised_and_says_why(cache):
    with pytest.raises(IntegrityError) as raised, transaction.atomic():
        cache.get_or_set("k", fail, 60, **OPTIONS)
    assert "has broken the transaction of database 'default'" in raised.value.__notes__[0]


def test_the_loop_of_a_synchronous_caller_knows_its_transaction(cache):
    """The loop runs in another thread, which has no connection."""
    with pytest.raises(IntegrityError), transaction.atomic():
        async_to_sync(cache.aget_or_set)("k", fail, 60, **OPTIONS)
    assert async_to_sync(cache.aget_or_set)("k", never, 60, **OPTIONS) == "old"


@pytest.mark.parametrize("database", ["postgresql"], indirect=True)
def test_the_error_of_a_plain_query_breaks_the_transaction_of_postgresql(cache):
    with pytest.raises(DatabaseError, match="no_such_table"), transaction.atomic():
        cache.get_or_set("k", lambda: connection.cursor().execute("SELECT * FROM no_such_table"), 60, **OPTIONS)


def test_the_stale_value_is_returned_where_the_transaction_stands(cache):
    with transaction.atomic():
        assert cache.get_or_set("k", fail_within_a_savepoint, 60, **OPTIONS) == "old"
        Account.objects.create(pk=2)
    assert Account.objects.count() == 2


def test_the_stale_value_is_returned_outside_of_transactions(cache):
    assert cache.get_or_set("k", fail, 60, **OPTIONS) == "old"
