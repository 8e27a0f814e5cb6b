"""Names made from the arguments of a call by a format string, such as ``"report:{user_id}"``."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from string import Formatter
from typing import Any


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


def fill(template: str, arguments: Mapping[str, Any], argument: str = "") -> str:
    """Return the format string filled with the arguments. Raises TypeError, which names the `argument`, when they do
    not fit."""
    try:
        return template.format(**arguments)
    except (LookupError, AttributeError, TypeError, ValueError) as error:
        where = f"{argument}={template!r}" if argument else repr(template)
        raise TypeError(f"{where} does not fit the arguments: {type(error).__name__}: {error}") from error
