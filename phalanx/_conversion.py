"""What may become the value of a variable, and how."""

from __future__ import annotations

from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np

from phalanx import _jax
from phalanx._as_array import AsArray
from phalanx._checks import as_array, is_numeric, take_apart
from phalanx._explain import leaked
from phalanx.errors import ArgumentError, ArgumentTypeError, AssignmentError, AssignmentTypeError


def is_per_replica(value: Any) -> bool:
    """True for a `PerReplica` (which stands above this module)."""
    return getattr(type(value), "is_per_replica", False)


def to_array(label: str, argument: str, value: Any) -> Any:
    """`value` as a JAX or NumPy array, or an error that names the argument."""
    if isinstance(value, AsArray):
        return value.value
    if _jax.is_leaked(value):
        raise leaked(f"{label}: {argument}, at {_jax.user_line()}")
    if isinstance(value, (jax.Array, np.ndarray, np.generic)):
        if not isinstance(value, jax.Array) and not is_numeric(value.dtype):
            raise ArgumentTypeError(f"{label}: {argument} must be numeric, got an array of dtype {value.dtype}.")
        return value
    leaves, _ = take_apart(value, f"{label}: {argument}")
    if any(_jax.is_tracer(leaf) or isinstance(leaf, AsArray) for leaf in leaves):
        return as_array(value, f"{label}: {argument}")
    try:
        array = np.asarray(value)
    except Exception as error:
        raise ArgumentError(f"{label}: {argument} is not an array: {reason_of(error)}") from error
    if array.dtype.kind == "O" and isinstance(value, int):
        raise ArgumentError(f"{label}: {argument} is an int of {value.bit_length()} bits, too large for any dtype.")
    if not is_numeric(array.dtype):
        raise ArgumentTypeError(f"{label}: {argument} must be numeric, got {type(value).__name__} {value!r:.60}.")
    return array


def is_key(value: Any) -> bool:
    """True for an array of JAX's random keys, or its dtype."""
    return jnp.issubdtype(getattr(value, "dtype", value), jax.dtypes.prng_key)


def to_host(array: Any) -> np.ndarray[Any, Any]:
    """`array` in NumPy; random keys as the numbers they are made of."""
    return np.asarray(jax.random.key_data(array) if is_key(array) else array)


def key_impl(array: Any) -> str | None:
    return str(jax.random.key_impl(array)) if is_key(array) else None


def reason_of(error: Exception) -> str:
    return str(error).partition("\n")[0][:200]


_KINDS = {"b": 0, "u": 1, "i": 1, "f": 2, "V": 2, "c": 3}


def definite(array: Any, dtype: Any) -> jax.Array:
    """`array` in this dtype, and no longer with the weak one of a Python number, which would spread to results."""
    if array.dtype == dtype and not getattr(array, "weak_type", False):
        return cast(jax.Array, array)
    return cast(jax.Array, jax.lax.convert_element_type(array, dtype))


def check_range(label: str, array: np.ndarray[Any, Any], dtype: np.dtype[Any]) -> None:
    """Raise when integers of the host do not fit the variable's integer dtype."""
    if array.size and np.issubdtype(array.dtype, np.integer) and np.issubdtype(dtype, np.integer):
        limits = np.iinfo(dtype)
        if array.min() < limits.min or array.max() > limits.max:
            raise AssignmentError(
                f"{label} has dtype {dtype}, which holds {limits.min} to {limits.max}; got values from {array.min()} to"
                f" {array.max()} at {_jax.user_line()}."
            )


def check_kind(label: str, found: Any, wanted: Any, exact: bool = False) -> None:
    """Raise unless a value of dtype `found` may become `wanted` without losing its kind."""
    if found == wanted:
        return
    fits = not exact and not is_key(found) and not is_key(wanted) and _KINDS[found.kind] <= _KINDS[wanted.kind]
    if not fits:
        raise AssignmentTypeError(
            f"{label} has dtype {wanted}, got a value of dtype {found} at {_jax.user_line()}."
            f" Convert it on purpose with .astype({str(wanted)!r})."
        )


def is_strong(array: Any) -> bool:
    return isinstance(array, jax.Array) and not getattr(array, "weak_type", False)


def weak_type_of(dtype: Any) -> Any:
    """The Python type whose numbers become arrays of this kind."""
    return {"b": bool, "i": int, "u": int, "f": float, "c": complex}[np.dtype(dtype).kind]
