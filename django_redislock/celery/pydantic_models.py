"""The arguments of a task with ``pydantic=True``, as its body gets them: Celery makes models of the message's data."""

from __future__ import annotations

import inspect
import typing
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from celery.utils.annotations import get_optional_arg

from ..name_template import signature_of

Models = Mapping[str, Callable[[Any], Any]]
"""By parameter: the function that makes a model of its argument."""


def models_of(function: Callable[..., Any], strict: bool, context: Mapping[str, Any]) -> Models:
    """Return the models of this function's arguments. They are found by its annotations, as Celery finds them."""
    try:
        hints = typing.get_type_hints(function)
    except (NameError, AttributeError, TypeError):  # some names may exist for type checkers only
        hints = {}
    found = {}
    for name, parameter in signature_of(function).parameters.items():
        hint = hints.get(name, parameter.annotation)
        model: Any = get_optional_arg(hint) or hint
        several = parameter.kind in (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
        if isinstance(model, type) and hasattr(model, "model_validate") and not several:
            found[name] = partial(_model, partial(model.model_validate, strict=strict, context=context))
    return found


def _model(validate: Callable[[Any], Any], value: object) -> object:
    try:
        return value if value is None else validate(value)
    except ValueError:  # pydantic's error is one; the worker reports it
        return value
