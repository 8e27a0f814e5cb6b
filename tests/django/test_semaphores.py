"""semaphore and asemaphore: with the settings, without Redis, and in the lists, the admin, the command and metrics."""

from __future__ import annotations

import asyncio
import io
import json
import threading
from contextlib import contextmanager

import pytest
from django.core.management import CommandError, call_command
from django.test import override_settings
from prometheus_client import CollectorRegistry

from django_redislock import asemaphore, held_locks, lock, metrics, reset_all, semaphore
from django_redislock.core import Semaphore
from django_redislock.core.keys import slots_keys
from django_redislock.core.listing import contention
from django_redislock.core.memory_server import MemoryServer
from django_redislock.exceptions import AcquireTimeout, LockLost
from django_redislock.inventory import find, force_release, read
from django_redislock.texts import visible
from tests.support import wait_until
from tests.support.admin_pages import LIST, browser, page, page_of, superuser

pytestmark = pytest.mark.usefixtures("locks_by_url")


@pytest.fixture
def held(client):
    """Two of the three slots of a semaphore."""
    held = [semaphore("crm", 3, label=f"caller {number}", expire=600) for number in (1, 2)]
    for slot in held:
        assert slot.acquire()
    return held


def test_a_semaphore_has_the_defaults_of_the_settings_and_its_own_options(server):
    with override_settings(DJANGO_REDISLOCK={"URL": server.url, "EXPIRE": 7}):
        assert (semaphore("crm", 2).expire, semaphore("crm", 2, expire=9).expire) == (7, 9)
    with semaphore("crm", 2, kind="lock", label="import") as slot:
        (info,) = held_locks()
        assert (info.name, info.kind, info.label, info.slot, info.limit) == ("crm", "lock", "import", 1, 2)
        assert info.fence == slot.fence


def test_semaphore_without_a_free_slot_raises_after_its_timeout(held):
    third, other = semaphore("crm", 3), semaphore("crm", 3, timeout=0.05)
    assert third.acquire(blocking=False)
    with pytest.raises(AcquireTimeout), other:
        pass
    assert not semaphore("crm", 3, blocking=False).acquire()


@pytest.mark.parametrize("make", [semaphore, asemaphore])
def test_wrong_limits_and_options_are_refused(make):
    for limit in (0, -1, 101, 10**9):
        with pytest.raises(ValueError, match="limit must be from 1 to 100"):
            make("crm", limit)
    for limit in (1.5, True, "3", None):
        with pytest.raises(TypeError, match="limit must be a whole number"):
            make("crm", limit)
    with pytest.raises(TypeError, match=rf"^{make.__name__}\(\) got an unexpected .*did you mean 'expire'"):
        make("crm", 3, expires=5)
    with pytest.raises(TypeError, match="until_commit"):
        make("crm", 3, until_commit=True)


def test_the_name_of_a_slot_is_no_name_of_a_lock():
    with pytest.raises(ValueError, match="name must be valid Unicode"):
        lock("crm\udcff1")


def test_asemaphore_counts_with_semaphore(client):
    async def take_two():
        async with asemaphore("crm", 2) as slot, asemaphore("crm", 2) as other:
            assert await slot.locked()
            assert slot.fence < other.fence
            assert [info.slot for info in await slot.holders()] == [1, 2]
            assert not semaphore("crm", 2).acquire(blocking=False)
            assert not await asemaphore("crm", 2).acquire(blocking=False)

    asyncio.run(take_two())
    assert not list(client.scan_iter("*:lock:*"))


@contextmanager
def a_waiter(client):
    """Have a thread wait for a slot of three within the block, which frees one at its end."""

    def wait():
        with semaphore("crm", 3, timeout=60):
            pass

    thread = threading.Thread(target=wait)
    thread.start()
    wait_until(lambda: client.zcard(slots_keys("redislock", "crm", 3).queue))
    yield
    thread.join(60)
    assert not thread.is_alive()


# Without Redis


def test_with_enabled_false_every_caller_gets_a_slot():
    off = override_settings(DJANGO_REDISLOCK={"ENABLED": False})
    with off, semaphore("crm", 1) as slot, semaphore("crm", 1) as other:
        assert slot.fence <= other.fence
        slot.extend()
        assert (slot.owned(), slot.ttl(), slot.owner().fence) == (True, 30, slot.fence)
        assert [(info.slot, info.limit, info.fence) for info in slot.holders()] == [(1, 1, slot.fence)]
        assert slot.locked()
    with off:
        assert (slot.owned(), slot.ttl(), slot.owner()) == (False, None, None)
        assert (slot.holders(), slot.locked()) == ([], False)
        with semaphore("crm", 2) as one_of_two:
            assert not one_of_two.locked()


def test_with_enabled_false_a_task_sees_its_own_slot():
    async def see():
        async with asemaphore("crm", 1) as slot:
            assert [info.slot for info in await slot.holders()] == [1]
            assert await slot.locked()
        assert not await slot.locked()

    with override_settings(DJANGO_REDISLOCK={"ENABLED": False}):
        asyncio.run(see())


def test_the_server_of_a_process_gives_as_many_slots_as_the_limit_says():
    server = MemoryServer()
    first, second, third = (Semaphore(server, "crm", 2) for _ in range(3))
    assert first.acquire()
    assert second.acquire()
    assert not third.acquire(blocking=False)
    assert [info.slot for info in third.holders()] == [1, 2]
    first.extend()
    got = []

    def wait():
        with third:
            got.append(third.fence)

    thread = threading.Thread(target=wait)
    thread.start()
    fence = second.fence
    second.release()
    thread.join(60)
    assert got[0] > fence
    assert first.reset()
    with pytest.raises(LockLost):
        first.release()
    assert third.holders() == []


def test_a_given_id_keeps_its_slot_on_the_server_of_a_process_and_releases_it_from_another_object():
    server = MemoryServer()
    mine, first, again = (Semaphore(server, "crm", 2, id=id) for id in ("mine", "first", "mine"))
    assert first.acquire()
    assert mine.acquire()
    first.release()
    assert again.acquire()
    assert [info.slot for info in again.holders()] == [2]
    Semaphore(server, "crm", 2, id="mine").release()
    assert again.holders() == []


# Lists


def test_held_locks_yields_each_slot_with_its_number_and_its_limit(held):
    with lock("crm"):
        found = [(info.name, info.kind, info.slot, info.limit, info.label) for info in held_locks()]
    assert found == [
        ("crm", "lock", 0, 0, ""),
        ("crm", "semaphore", 1, 3, "caller 1"),
        ("crm", "semaphore", 2, 3, "caller 2"),
    ]


def test_reset_all_frees_every_slot(held, client):
    assert reset_all() == 2
    assert not list(client.scan_iter("*:lock:*"))
    for slot in held:
        with pytest.raises(LockLost, match="force-released"):
            slot.release()


def test_force_release_frees_the_slot_of_that_fence_and_no_other(held):
    rows = read().rows
    assert [row.info.slot for row in rows] == [1, 2]
    second = rows[1]
    assert not force_release("url", second.held.name, held[0].fence, "olga")
    assert force_release("url", second.held.name, held[1].fence, "olga", "stuck")
    assert find("url", [row.held.name for row in rows]).keys() == {rows[0].held.name}
    held[0].release()
    with pytest.raises(LockLost, match="olga"):
        held[1].release()


def test_waiters_of_a_semaphore_are_counted_once_and_under_its_name(held, client):
    registry = CollectorRegistry()
    end = metrics.install(registry)
    third = semaphore("crm", 3)
    assert third.acquire()
    with a_waiter(client), semaphore("mail", 20), lock("a"):
        names = ("held_locks", "waiting", "held_slots", "slots")
        counts = [registry.get_sample_value(f"redislock_{name}", {"connection": "url"}) for name in names]
        assert counts == [5, 1, 4, 23]
        wait_until(lambda: third.owner() and third.holders()[0].waiting == 1)
        third.release()
    end()
    (name,) = contention(client).names
    assert visible(name) == "crm"


# The command


def command(*arguments):
    output, errors = io.StringIO(), io.StringIO()
    call_command("redislock", *arguments, stdout=output, stderr=errors)
    return output.getvalue() + errors.getvalue()


def test_list_and_show_tell_the_slots_of_a_semaphore(held):
    text = command("list", "--kind", "semaphore")
    assert "crm [1 of 3]" in text
    assert "crm [2 of 3]" in text
    assert "caller 1" in command("show", "crm")
    assert "caller 2" in command("show", "cr")
    assert [found["slot"] for found in json.loads(command("show", "crm", "--format", "json"))] == [1, 2]


def test_a_slot_is_chosen_by_its_id_also_where_a_lock_has_the_name_of_its_semaphore(held):
    """The lock hid the slots: 'show' had one holder, and 'release --id' said that another id held the lock."""
    with lock("crm") as of_that_name:
        assert "crm [2 of 3]" in command("show", "crm")
        with pytest.raises(CommandError, match=r"3 locks and slots of this name are held\. Choose one with --id"):
            command("release", "crm", "--yes")
        assert "Released crm [2]." in command("release", "crm", "--yes", "--id", held[1].id)
        assert of_that_name.owned()
    assert [info.slot for info in held_locks()] == [1]
    assert "Released crm [1]." in command("release", "crm", "--yes")


# The admin


@pytest.mark.django_db
def test_the_admin_lists_each_slot_has_a_page_for_it_and_releases_it(held):
    web = browser(superuser())
    html = page(web)
    assert html.count("of 3</span>") == 2
    assert "2 locks held" in html
    second = next(row.held.name for row in read().rows if row.info.slot == 2)
    assert "caller 2" in page(web, path=page_of(second))
    value = f"{page_of(second).split('/')[-3]}.{held[1].fence}"
    data = {"action": "force_release", "_selected_action": value}
    assert "caller 2" in web.post(LIST, data).content.decode()
    done = web.post(LIST, data | {"confirmed": "1", "reason": "stuck"}, follow=True).content.decode()
    assert "1 lock was force-released: “crm [2]”" in done
    assert [info.slot for info in held_locks()] == [1]


@pytest.mark.django_db
def test_the_page_of_waits_has_one_row_for_a_semaphore(held, client):
    third = semaphore("crm", 3)
    assert third.acquire()
    web = browser(superuser())
    with a_waiter(client):
        html = page(web, path=LIST + "contention/")
        assert html.count('class="redislock-waiters"') == 1
        third.release()
    assert f'href="{LIST}?q=crm"' in page(web, path=LIST + "contention/")
