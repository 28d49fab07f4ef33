"""Checks of what users pass: each raises an error that names the argument, or gives back what can be used."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from phalanx.errors import ArgumentError, ArgumentTypeError


def check_flag(value: Any, label: str) -> None:
    """Raise unless `value` is True or False."""
    if not isinstance(value, bool):
        raise ArgumentTypeError(f"{label} takes True or False, got {value!r:.60}.")


def check_choice(value: Any, label: str, known: Sequence[str]) -> None:
    """Raise unless `value` is one of the known words."""
    if not isinstance(value, str) or value not in known:
        raise ArgumentError(f"{label} must be one of {', '.join(map(repr, known))}, got {value!r:.60}.")


def check_int(value: Any, label: str, least: int = 1, *, optional: bool = False) -> None:
    """Raise unless `value` is an int of at least `least`, or None where that is allowed."""
    if optional and value is None:
        return
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        what = "a positive int" if least == 1 else f"an int from {least} on"
        raise ArgumentError(f"{label} must be {what}{' or None' if optional else ''}, got {value!r:.60}.")


def check_seconds(value: Any, label: str) -> None:
    """Raise unless `value` is a length of time."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < math.inf:
        raise ArgumentError(f"{label} must be a positive number of seconds, got {value!r:.60}.")


def check_function(value: Any, caller: str) -> None:
    """Raise unless `value` can be called."""
    if not callable(value):
        raise ArgumentTypeError(f"{caller} takes a function, got {type(value).__name__} {value!r:.60}.")


def check_axis(ndim: int, axis: Any, caller: str) -> None:
    """Raise unless `axis` is an axis of an array with `ndim` of them."""
    if isinstance(axis, bool) or not isinstance(axis, int):
        raise ArgumentTypeError(f"{caller}: axis must be a Python int, got {axis!r:.60}.")
    if not -ndim <= axis < ndim:
        raise ArgumentError(
            f"{caller}: there is no axis {axis} in a value with {ndim} axes"
            + ("; scalars have none. Use value[None]." if ndim == 0 else ".")
        )


def check_call(args: Any, kwargs: Any, caller: str) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The args and kwargs of a call that is to be made, or an error that says how to write them."""
    if not isinstance(args, (tuple, list)):
        raise ArgumentTypeError(
            f"{caller}, args=...): args must be a tuple, got {type(args).__name__}; write args=(x,)."
        )
    if kwargs is not None and not isinstance(kwargs, dict):
        raise ArgumentTypeError(f"{caller}, kwargs=...): kwargs must be a dict, got {type(kwargs).__name__}.")
    if not all(isinstance(key, str) for key in kwargs or ()):
        raise ArgumentTypeError(
            f"{caller}, kwargs=...): the keys of kwargs must be names of parameters, got {list(kwargs or ())!r:.60}."
        )
    return tuple(args), dict(kwargs or {})


_counterparts: dict[type, Callable[[Any], Any]] = {}


def register_variables(cls: type, counterpart: Callable[[Any], Any]) -> None:
    """Take another library's variables wherever a `Variable` is taken: `counterpart` gives the one that stands for it."""
    _counterparts[cls] = counterpart


def is_foreign_variable(value: Any) -> bool:
    """Whether it is a variable of another library, for which one of ours stands."""
    return isinstance(value, tuple(_counterparts))


def counterparts(values: list[Any]) -> list[Any]:
    """The values, with our variables in place of other libraries'."""
    if not _counterparts:
        return values
    return [next((convert(v) for cls, convert in _counterparts.items() if isinstance(v, cls)), v) for v in values]


def take_apart(tree: Any, label: str, is_leaf: Callable[[Any], bool] | None = None) -> tuple[list[Any], Any]:
    """Leaves and structure of a pytree."""
    try:
        leaves, structure = jax.tree.flatten(tree, is_leaf=is_leaf)
        return counterparts(leaves), structure
    except (TypeError, ValueError) as error:
        raise ArgumentTypeError(f"{label}: JAX cannot take {tree!r:.60} apart: {error} Dict keys must sort.") from error


def packages(value: Any) -> set[str]:
    """The packages that the value's type and its base classes come from."""
    return {base.__module__.partition(".")[0] for base in type(value).__mro__}


ARRAY_LIBRARIES = frozenset({"h5py", "pandas", "tensorflow", "torch"})
"""Libraries whose arrays NumPy can take, and JAX does not know."""


def refuse_foreign_array(value: Any, label: str) -> None:
    """Raise for an array of another library, which would be a constant of the program that gets it."""
    library = next(iter(ARRAY_LIBRARIES & packages(value)), None)
    if library is not None and hasattr(value, "shape") and hasattr(value, "__array__"):
        raise ArgumentTypeError(
            f"{label} is a {type(value).__name__} of {library}, which JAX does not take: pass np.asarray(tensor)."
        )


def is_numeric(dtype: Any) -> bool:
    """True for dtypes that JAX computes with (bfloat16 and the like are of NumPy's kind 'V')."""
    return dtype.kind in "biufc" or (dtype.kind == "V" and not issubclass(dtype.type, np.void))


def as_array(value: Any, label: str) -> jax.Array:
    """An array, a number, a variable or a list of these as a JAX array."""
    if isinstance(value, jax.Array):
        return value
    try:
        return jnp.asarray(value)
    except ArgumentTypeError:  # what is no array has said so
        raise
    except (TypeError, ValueError, OverflowError) as error:
        raise ArgumentTypeError(
            f"{label} takes arrays and numbers, got {type(value).__name__} {value!r:.60}."
        ) from error
