"""Which executions of a task are the same: a key made from its arguments.

Producer and worker must compute the same key, though the worker has the arguments as the serializer returned them. So
the key is made from the arguments as kombu's JSON returns them: a tuple is a list, the keys of a dict are strings, an
enum that derives from str or int is its value, and datetimes, UUIDs, decimals and bytes are themselves. A value that
JSON cannot carry, such as a plain enum, stays as it is, and has no hash.
"""

from __future__ import annotations

import hashlib
import inspect
import json
import types
import typing
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from django.db.models import Model
from kombu.utils import json as kombu_json

from ..core.keys import OF_MESSAGE, OF_RUN, OF_WAITING
from ..name_template import by_name, fill, signature_of
from ..task_names import escaped

Models = Mapping[str, Callable[[Any], Any]]
"""By parameter: the function that makes a model of its argument."""
NO_MODELS: Models = {}
Key = str | Sequence[str] | Callable[..., str] | None


MAX_TASK, MAX_KEY = 300, 500
"""Bytes of both in the name of a lock. Each is cut by itself, because the bucket of the lock is that of its key."""


def lock_name(task: str, key: str, kind: str = OF_RUN, message: str = "") -> str:
    """Return the name of the lock of a task and a key; an empty key stands for all arguments. `message`: of the runs of
    this message only."""
    task, key = _fitting(escaped(task), MAX_TASK), _fitting(key, MAX_KEY)
    if message:
        return f"{OF_MESSAGE}:{task}:{key}:{message}"
    return f"{kind}:{task}:{key}" if key else f"{kind}:{task}"


def _fitting(text: str, longest: int) -> str:
    """Return a part of a name; one that is too long is cut, and ends with its hash."""
    if type(text) is str and len(text) <= longest and text.isascii():  # nearly all
        return text
    raw = text.encode(errors="backslashreplace")
    if len(raw) <= longest:
        return raw.decode()
    return f"{raw[: longest - 33].decode(errors='ignore')}~{_hash(raw.decode())}"


def waiting_name(task: str, key: str, scope: str) -> str:
    """Return the name of the lock that a message of this scope holds while it waits."""
    return lock_name(task, key, OF_RUN if scope == "job" else OF_WAITING)


def make_key(key: Key, bound: inspect.BoundArguments, models: Models = NO_MODELS) -> str:
    """Return the key of these arguments.

    `key` is a format string over the parameters (``"report:{customer_id}"``), a list of those that count (``[]``: none,
    one lock for the task), a callable that takes what the task takes and returns a string, or None: all arguments
    count. A format string and a callable see the arguments as the body does: as they came with the message, and models
    where `models` has one. Raises TypeError when an argument that counts has no stable form.
    """
    if len(bound.arguments) < len(bound.signature.parameters):
        bound.apply_defaults()
    if callable(key):
        return _text("key", called_as_body(key, bound, models))
    if isinstance(key, str):
        return fill(key, by_name(_as_body_sees(bound, models)), "key")
    arguments = by_name(bound)
    if key is not None:
        for name in key:
            if name not in arguments:
                raise TypeError(
                    f"key={list(key)!r} names {name!r}, which is not one of the arguments {list(arguments)!r}"
                )
        arguments = {name: arguments[name] for name in key}
    if not arguments:  # one lock, with the name of the task
        return ""
    return hash_arguments(arguments)


def called_as_body(function: Callable[..., Any], bound: inspect.BoundArguments, models: Models) -> Any:
    """Return what a function returns for the arguments as the body sees them."""
    bound.apply_defaults()
    seen = _as_body_sees(bound, models)
    return function(*seen.args, **seen.kwargs)


def with_tenant(get_tenant: Callable[[], str] | None, key: str) -> str:
    """Return the key of the current tenant. Raises TypeError when the tenant is no str."""
    if get_tenant is None:
        return key
    tenant = escaped(_text("tenant", get_tenant()))
    return f"{tenant}:{key}" if key else tenant


def hash_arguments(arguments: Mapping[str, Any]) -> str:
    """Return a hash of the arguments: equal if a worker cannot distinguish them, different for 1, "1" and True."""
    try:
        if not _FLAT.issuperset(map(type, arguments.values())):
            arguments = _through_json(arguments, _DigestEncoder)
            if not _FLAT.issuperset(map(type, arguments.values())):
                return _hash(_sorted(arguments))
        return _hash(ascii(sorted(arguments.items())))
    except (TypeError, ValueError) as error:
        raise TypeError(
            f"no key can be made from the arguments {arguments!r}: {error}. Name the parameters that count, as in "
            'key=["customer_id"] or key="{customer_id}", or give a callable.'
        ) from error


def _as_body_sees(bound: inspect.BoundArguments, models: Models) -> inspect.BoundArguments:
    arguments: dict[str, Any] = {}
    for name, value in bound.arguments.items():
        kind = bound.signature.parameters[name].kind
        if kind is inspect.Parameter.VAR_POSITIONAL:
            arguments[name] = tuple(map(_as_worker_sees, value))
        elif kind is inspect.Parameter.VAR_KEYWORD:
            arguments[name] = {other: _as_worker_sees(each) for other, each in value.items()}
        else:
            arguments[name] = models[name](_as_worker_sees(value)) if name in models else _as_worker_sees(value)
    return inspect.BoundArguments(bound.signature, OrderedDict(arguments))


_FLAT = frozenset({str, int, float, bool, type(None)})
"""Types whose values are the same before and after `_through_json`."""
_sorted = json.JSONEncoder(sort_keys=True, separators=(",", ":")).encode


def _through_json(value: object, encoder: type[_Encoder]) -> Any:
    """Return the value as it arrives at a worker, not decoded yet, so that all keys to be sorted are strings."""
    return json.loads(json.dumps(value, cls=encoder))


def _hash(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def _text(argument: str, returned: object) -> str:
    if not isinstance(returned, str):
        raise TypeError(f"the callable given as {argument} must return a str, not {type(returned).__name__}")
    return str.__str__(returned)  # of an enum of strings, a format makes another text than a message's header has


class _Encoder(kombu_json.JSONEncoder):
    def default(self, value: Any) -> Any:
        if hasattr(value, "model_dump"):  # pydantic: Celery dumps it when it publishes
            if _contains_set(value.model_dump(mode="python")):  # whose order is another one in each process
                raise TypeError(f"{type(value).__qualname__} contains a set, which has no order")
            return value.model_dump(mode="json")
        return super().default(value)


def _contains_set(value: object) -> bool:
    if isinstance(value, Mapping):
        return _contains_set([*value.keys(), *value.values()])
    if isinstance(value, (list, tuple)):
        return any(map(_contains_set, value))
    return isinstance(value, (set, frozenset))


class _DigestEncoder(_Encoder):
    """Also encodes values that only pickle can carry."""

    def default(self, value: Any) -> Any:
        if isinstance(value, Model):
            if value.pk is None:
                raise TypeError(f"{value!r} is not saved, so it has no primary key that identifies it")
            return {"__type__": "model", "__value__": [value._meta.label, value.pk]}
        if isinstance(value, (set, frozenset)):
            return {"__type__": "set", "__value__": sorted(hash_arguments({"": member}) for member in value)}
        return super().default(value)


def _as_worker_sees(value: Any) -> Any:
    """Return an argument as a worker sees it; an argument that JSON cannot carry is returned unchanged."""
    try:
        return kombu_json.loads(_sorted(_through_json(value, _Encoder)))
    except (TypeError, ValueError):
        return value


# The arguments of a task with ``pydantic=True``, as its body gets them: Celery makes models of the message's data


def models_of(function: Callable[..., Any], strict: bool, context: Mapping[str, Any]) -> Models:
    """Return the models of this function's arguments. They are found by its annotations, as Celery finds them."""
    try:
        hints = typing.get_type_hints(function)
    except (NameError, AttributeError, TypeError):  # some names may exist for type checkers only
        hints = {}
    found = {}
    for name, parameter in signature_of(function).parameters.items():
        hint = hints.get(name, parameter.annotation)
        model = _without_none(hint)
        several = parameter.kind in (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
        if isinstance(model, type) and hasattr(model, "model_validate") and not several:
            found[name] = partial(_model, partial(model.model_validate, strict=strict, context=context))
    return found


def _without_none(hint: Any) -> Any:
    """Return the type of a hint that also allows None; else the hint. Celery has this function from 5.5 on only."""
    members = typing.get_args(hint) if typing.get_origin(hint) in (typing.Union, types.UnionType) else ()
    one, *others = [member for member in members if member is not types.NoneType] or [hint]
    return hint if others else one


def _model(validate: Callable[[Any], Any], value: object) -> object:
    try:
        return value if value is None else validate(value)
    except ValueError:  # pydantic's error is one; the worker reports it
        return value
