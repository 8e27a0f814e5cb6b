"""Names made from the arguments of a call by a format string, such as ``"report:{user_id}"``."""

from __future__ import annotations

import inspect
import re
import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from datetime import date, datetime, time, timedelta
from decimal import Decimal
from functools import lru_cache, partial
from string import Formatter
from typing import Any
from uuid import UUID
from weakref import WeakKeyDictionary


def signature_of(function: Callable[..., Any]) -> inspect.Signature:
    """Return the signature. Annotations are not evaluated, because their names may exist for type checkers only."""
    if sys.version_info >= (3, 14):
        import annotationlib

        return inspect.signature(function, annotation_format=annotationlib.Format.FORWARDREF)
    return inspect.signature(function)


def fields(template: str) -> Iterator[str]:
    """Yield the parameters in a format string: ``user`` of ``"{user.id}"``, an empty string of ``"{}"``."""
    for _, field, spec, _ in Formatter().parse(template):
        if field is not None:
            yield field.split(".")[0].split("[")[0]
            yield from fields(spec or "")


def check_key(value: object, name: str = "key") -> object:
    """Return the key of a task: a format string, a tuple of parameter names, a callable, or None.

    Raises TypeError and ValueError that name the argument.
    """
    if value == "":
        raise ValueError(f"{name} must not be empty; {name}=[] means one lock for all arguments")
    if isinstance(value, str) and next(fields(value), None) is None:
        raise ValueError(
            f"{name}={value!r} is the same for all arguments: write a parameter in braces, as in "
            f"{name}='{{{value}}}'; {name}=[] means one lock for all arguments"
        )
    if value is None or isinstance(value, str) or callable(value):
        return value
    if isinstance(value, Sequence) and all(isinstance(part, str) for part in value):
        return tuple(value)
    raise TypeError(f"{name} must be a format string, a list of parameter names, a callable or None, not {value!r}")


def check_tenant(value: object, name: str = "tenant") -> object:
    """Return the tenant of a task: a callable, its dotted path, or None. Raises TypeError that names the argument."""
    dotted = isinstance(value, str) and "." in value and all(part.isidentifier() for part in value.split("."))
    if value is None or callable(value) or dotted:
        return value
    raise TypeError(f"{name} must be a callable, the dotted path of one or None, not {value!r}")


def check_parameters(wanted: Iterable[str], function: Callable[..., Any], argument: str) -> None:
    """Raise ValueError that names the argument when one of these names is no parameter of the function.

    A function with ``**kwargs`` has every parameter.
    """
    parameters = signature_of(function).parameters
    if any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters.values()):
        return
    for name in wanted:
        if name not in parameters:
            raise ValueError(
                f"{argument} names {name!r}, which is no parameter of {getattr(function, '__qualname__', function)}: "
                f"{', '.join(parameters) or 'it has none'}"
            )


def name_from(template: str, signature: inspect.Signature, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
    """Return the name for the arguments of a call; the arguments in ``**kwargs`` count by their own names.

    Raises TypeError when the arguments do not fit the function or the template.
    """
    bound = signature.bind(*args, **kwargs)
    bound.apply_defaults()
    return fill(template, by_name(bound))


def by_name(bound: inspect.BoundArguments) -> dict[str, Any]:
    """Return the arguments by name; those that ``**kwargs`` took count by their own names."""
    arguments = dict(bound.arguments)
    for parameter in bound.signature.parameters.values():
        if parameter.kind is inspect.Parameter.VAR_KEYWORD:
            arguments = arguments.pop(parameter.name, {}) | arguments
    return arguments


_of_self: WeakKeyDictionary[Callable[..., Any], str] = WeakKeyDictionary()
"""Methods whose names contain the text of their object."""


def note_self(template: str, method: Callable[..., Any]) -> None:
    """Note for `without_text` that this is the template of a method."""
    if any(field == "self" for _, field, _, _ in Formatter().parse(template)):
        with suppress(TypeError):  # there are no weak references to it
            _of_self[method] = template


def without_text() -> Iterator[tuple[str, str]]:
    """Yield the name and the template of each method whose object has no text of its own."""
    for method, template in sorted(_of_self.items(), key=lambda item: item[0].__qualname__):
        kind: Any = sys.modules.get(method.__module__)
        for name in method.__qualname__.split(".")[:-1]:
            kind = getattr(kind, name, None)
        names = ("__str__", "__repr__", "__format__")
        # What is nested in a function cannot be found.
        if isinstance(kind, type) and all(getattr(kind, name) is getattr(object, name) for name in names):
            yield f"{method.__module__}.{method.__qualname__}", template


def fill(template: str, arguments: Mapping[str, Any], argument: str = "") -> str:
    """Return the format string filled with the arguments. Raises TypeError, which names the `argument`, when they do
    not fit, or when a text of theirs is another one in each process."""
    try:
        text = template.format(**arguments)
        if not _PLAIN.issuperset(map(type, arguments.values())):
            for field, read in _getters(template):
                if type(value := read(arguments)) not in _PLAIN:
                    _check_stable(field, value, text)
        return text
    except (LookupError, AttributeError, TypeError, ValueError) as error:
        where = f"{argument}={template!r}" if argument else repr(template)
        raise TypeError(f"{where} does not fit the arguments: {type(error).__name__}: {error}") from error


# Whose text is another one in each process: with such a name, every process had a lock of its own, and nobody knew.

_PLAIN = {str, int, float, bool, type(None), bytes, UUID, Decimal, date, datetime, time, timedelta}
"""Types whose text is the same everywhere, and their values contain no other ones."""
_ADDRESS = re.compile(r"\bat 0x[0-9a-fA-F]+")
_MOST_PARTS = 1000
"""Most parts of a value that are looked at."""


@lru_cache
def _getters(template: str) -> tuple[tuple[str, Callable[[Mapping[str, Any]], Any]], ...]:
    """Return each field of a format string, and what reads its value: of ``"{user.id}"`` the id alone."""
    found: list[tuple[str, Callable[[Mapping[str, Any]], Any]]] = []
    for _, field, spec, _ in Formatter().parse(template):
        if field is not None:
            found += [(field, partial(_value_of, field)), *_getters(spec or "")]
    return tuple(found)


def _value_of(field: str, arguments: Mapping[str, Any]) -> Any:
    name, _, attribute = field.partition(".")
    if attribute.isidentifier() and name.isidentifier():  # as most often, and five times faster
        return getattr(arguments[name], attribute)
    return arguments[name] if name == field and name in arguments else Formatter().get_field(field, (), arguments)[0]


def _check_stable(field: str, value: Any, text: str) -> None:
    """Raise TypeError when the text contains that of a part of the value which is another one in each process."""
    parts, number = [value], 0
    while parts and number < _MOST_PARTS:
        part = parts.pop()
        number += 1
        if type(part) in _PLAIN or isinstance(part, (str, int, float, bytes)):
            continue
        if isinstance(part, (set, frozenset)):
            if repr(part) in text or str(part) in text:
                raise TypeError(f"{field!r} contains a set, which has no order: give a sorted list")
        elif isinstance(part, Mapping):
            parts += [*part.keys(), *part.values()]
        elif isinstance(part, (list, tuple, deque)):
            parts += part
        else:
            address = f"{id(part):x}"
            for own in (str(part), repr(part)):
                if own in text and (_ADDRESS.search(own) or address in own.lower()):
                    raise TypeError(
                        f"{field!r} contains a {type(part).__qualname__}, which has no text of its own but its address "
                        "in memory: name what identifies it, as in {user.pk}"
                    )
            if "{" in text or "set(" in text:  # a set of its own, as in a model of pydantic or in a dataclass
                parts += _attributes(part)


def _attributes(value: Any) -> list[Any]:
    slots = (vars(kind).get("__slots__", ()) for kind in type(value).__mro__)
    names = {name for each in slots for name in ((each,) if isinstance(each, str) else each)}
    return [*getattr(value, "__dict__", {}).values(), *(getattr(value, name, None) for name in names)]
