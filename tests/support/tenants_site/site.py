"""The views of a site of django-tenants, and requests to it through both of Django's handlers."""

from __future__ import annotations

import asyncio
import io
import threading
from collections.abc import Callable
from functools import partial
from typing import Any

from asgiref.sync import sync_to_async
from asgiref.testing import ApplicationCommunicator
from django.core.handlers.asgi import ASGIHandler
from django.core.handlers.wsgi import WSGIHandler
from django.db import connection
from django.http import HttpRequest, HttpResponse
from django.test import RequestFactory
from django.urls import path
from kombu.utils.json import dumps, loads

from django_redislock import tasks
from django_redislock.cache import cached, get_cache, refreshable
from django_redislock.cache.refresh import _workers
from tests.support.processes import say
from tests.support.waiting import until

TENANTS = ("acme", "umbrella")
LIFE = 60


def tenant_middleware(get_response: Callable[[HttpRequest], HttpResponse]) -> Callable[[HttpRequest], HttpResponse]:
    """Set the schema by the host, synchronously, as django-tenants' own middleware does."""

    def middleware(request: HttpRequest) -> HttpResponse:
        connection.set_schema(request.get_host().partition(".")[0])  # type: ignore[attr-defined]
        return get_response(request)

    return middleware


def schema() -> str:
    return connection.schema_name  # type: ignore[attr-defined, no-any-return]


@refreshable
def report(*args: object) -> str:
    """Return the owner of the schema, as the database knows it."""
    with connection.cursor() as cursor:
        cursor.execute("SELECT name FROM owner")
        return str(cursor.fetchone()[0])


@refreshable
async def areport(*args: object) -> str:
    return await sync_to_async(report)()


def reports(keys: list[str]) -> dict[str, str]:
    return {key: report() for key in keys}


decorated = cached(LIFE, key=lambda: f"decorated:{schema()}")(areport)


def sync_view(request: HttpRequest, options: dict[str, Any]) -> HttpResponse:
    return HttpResponse(get_cache().get_or_set(request.GET["key"], report, LIFE, **options))


async def plain_view(request: HttpRequest, options: dict[str, Any]) -> HttpResponse:
    return HttpResponse(await get_cache().aget_or_set(request.GET["key"], report, LIFE, **options))


async def coroutine_view(request: HttpRequest, options: dict[str, Any]) -> HttpResponse:
    return HttpResponse(await get_cache().aget_or_set(request.GET["key"], areport, LIFE, **options))


async def many_view(request: HttpRequest, options: dict[str, Any]) -> HttpResponse:
    key = request.GET["key"]
    return HttpResponse((await get_cache().aget_or_set_many([key], reports, LIFE))[key])


async def decorated_view(request: HttpRequest, options: dict[str, Any]) -> HttpResponse:
    return HttpResponse(await decorated())


async def deleting_view(request: HttpRequest, options: dict[str, Any]) -> HttpResponse:
    return HttpResponse(str([await get_cache().adelete(request.GET["key"]), await decorated.ainvalidate()]))


def old_view(request: HttpRequest, options: dict[str, Any]) -> HttpResponse:
    get_cache().set(request.GET["key"], "old", 25)
    return HttpResponse("old")


def stored_view(request: HttpRequest, options: dict[str, Any]) -> HttpResponse:
    return HttpResponse(get_cache().get(request.GET["key"]))


VIEWS = {
    "sync": sync_view,
    "plain": plain_view,
    "coroutine": coroutine_view,
    "many": many_view,
    "decorated": decorated_view,
    "deleting": deleting_view,
    "old": old_view,
    "stored": stored_view,
}
BY = ("thread", "celery")
urlpatterns = [path(name, view, {"options": {}}) for name, view in VIEWS.items()] + [
    path(f"{name}/{by}", VIEWS[name], {"options": {"stale": 30, "refresh": by}})
    for name in ("sync", "plain", "coroutine")
    for by in BY
]

wsgi, asgi = WSGIHandler(), ASGIHandler()


async def ask_wsgi(tenant: str, address: str, key: str) -> str:
    """Ask in a thread of the WSGI server."""
    environ = RequestFactory().get(f"/{address}?key={key}", headers={"host": f"{tenant}.example"}).environ
    environ["wsgi.input"] = io.BytesIO()
    response = await asyncio.to_thread(in_new_thread, lambda: wsgi(environ, lambda *args: None))
    return str(response.content.decode())


def in_new_thread(function: Callable[[], Any]) -> Any:
    results: list[Any] = []
    thread = threading.Thread(target=lambda: results.append(function()))
    thread.start()
    thread.join()
    return results[0]


async def ask_asgi(tenant: str, address: str, key: str) -> str:
    headers = [(b"host", f"{tenant}.example".encode())]
    scope = {"type": "http", "method": "GET", "path": f"/{address}", "headers": headers}
    scope["query_string"] = f"key={key}".encode()
    application = ApplicationCommunicator(asgi, scope)
    await application.send_input({"type": "http.request"})
    await application.receive_output(30)
    body = await application.receive_output(30)
    await application.wait(30)
    return str(body["body"].decode())


def main() -> None:
    """Ask each view of each tenant through both handlers, and say what it answered."""
    for tenant in TENANTS:
        connection.set_schema_to_public()  # type: ignore[attr-defined]
        with connection.cursor() as cursor:
            cursor.execute(f"CREATE SCHEMA {tenant}")
            cursor.execute(f"CREATE TABLE {tenant}.owner AS SELECT '{tenant}' AS name")
    with connection.cursor() as cursor:
        cursor.execute("CREATE TABLE public.owner AS SELECT 'public' AS name")
    connection.close()
    asyncio.run(ask_all())
    with connection.cursor() as cursor:
        cursor.execute("DROP SCHEMA acme CASCADE; DROP SCHEMA umbrella CASCADE; DROP TABLE public.owner")
    connection.close()


async def ask_all() -> None:
    messages: list[Any] = []
    tasks.refresh.apply_async = lambda args, **options: messages.append(loads(dumps(args)))
    for name, ask in (("wsgi", ask_wsgi), ("asgi", ask_asgi)):
        for view in ("sync", "plain", "coroutine", "many", "decorated"):
            for tenant in TENANTS:
                say(by=name, view=view, tenant=tenant, answers=[await ask(tenant, view, "k") for _ in range(2)])
            say(by=name, view=view, deleted=[await ask(tenant, "deleting", "k") for tenant in TENANTS])
        for view in ("sync", "plain", "coroutine"):
            for by in BY:
                key = f"{name}-{view}-{by}"
                for tenant in TENANTS:
                    await ask(tenant, "old", key)
                answers = [await ask(tenant, f"{view}/{by}", key) for tenant in TENANTS]
                errors = []
                for message in messages:
                    run = partial(in_new_thread, partial(process, message))
                    errors.append(await asyncio.to_thread(run))
                messages.clear()
                await until(lambda: not _workers._known)
                stored = [await ask(tenant, "stored", key) for tenant in TENANTS]
                say(by=name, view=view, refresh=by, answers=answers, stored=stored, errors=errors)


def process(message: Any) -> str:
    """Do the worker's work in this thread; return its error."""
    try:
        tasks.refresh(*message)
    except Exception as error:
        return type(error).__name__
    finally:
        connection.close()
    return ""
