"""Plain values as JSON and back: numbers, strings, bytes, small arrays, and lists, tuples and dicts of them.

What is read can only become a value of these types: there is nothing in a file that would be run.
"""

from __future__ import annotations

import base64
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from phalanx._conversion import is_key, to_host
from phalanx.errors import ArgumentTypeError, CheckpointError

_NAMED = {"nan", "inf", "-inf"}


def is_plain(value: Any) -> bool:
    """Whether `encode` takes the value, without arrays that have axes: those are kept as arrays."""
    if isinstance(value, (np.ndarray, jax.Array)):
        return value.ndim == 0
    if isinstance(value, dict):
        return type(value) is dict and all(map(is_plain, [*value, *value.values()]))
    if isinstance(value, (list, tuple)):
        return type(value) in (list, tuple) and all(map(is_plain, value))
    return value is None or type(value) in (bool, int, float, complex, str, bytes) or isinstance(value, np.generic)


def encode(value: Any, label: str) -> Any:
    """`value` in what JSON knows.

    Raises:
        ArgumentTypeError: for a value of another type, said to be at `label`.
    """
    if value is None or type(value) in (bool, int, str):
        return value
    if type(value) is float:
        return value if np.isfinite(value) else {"float": str(value)}
    if type(value) is complex:
        return {"complex": [encode(value.real, label), encode(value.imag, label)]}
    if type(value) is bytes:
        return {"bytes": _text(value)}
    if type(value) in (list, tuple):
        items = [encode(item, f"{label}[{i}]") for i, item in enumerate(value)]
        return items if type(value) is list else {"tuple": items}
    if type(value) is dict:
        return {"dict": [[encode(k, label), encode(v, f"{label}[{k!r}]")] for k, v in value.items()]}
    if isinstance(value, (np.ndarray, np.generic, jax.Array)) and value.dtype.kind != "O":
        kind = "jax" if isinstance(value, jax.Array) else "scalar" if isinstance(value, np.generic) else "array"
        host = to_host(value)
        return {
            kind: [str(host.dtype), list(host.shape), _text(np.ascontiguousarray(host).tobytes())],
            **({"key": str(jax.random.key_impl(value))} if is_key(value) else {}),
        }
    raise ArgumentTypeError(
        f"Checkpoint: {label} is a {type(value).__name__}, {value!r:.60}, which cannot be kept. Numbers, strings, bytes,"
        " arrays, and lists, tuples and dicts of them can."
    )


def decode(code: Any) -> Any:
    """The value that `encode` was given.

    Raises:
        CheckpointError: for something that it did not give.
    """
    if isinstance(code, list):
        return [decode(item) for item in code]
    if not isinstance(code, dict):
        return code
    try:
        return _decode(dict(code))
    except (TypeError, ValueError, AttributeError) as error:
        raise CheckpointError(f"The checkpoint holds a value that cannot be read, {code!r:.80}: {error}") from error


def _decode(code: dict[str, Any]) -> Any:
    impl = code.pop("key", None)
    ((kind, held),) = code.items()
    if kind == "float" and held in _NAMED:
        return float(held)
    if kind == "complex":
        return complex(*decode(held))
    if kind == "bytes":
        return base64.b64decode(held, validate=True)
    if kind == "tuple":
        return tuple(decode(held))
    if kind == "dict":
        return {decode(key): decode(value) for key, value in held}
    if kind in ("array", "scalar", "jax"):
        dtype, shape, data = held
        array = np.frombuffer(base64.b64decode(data, validate=True), jnp.dtype(dtype)).reshape(shape).copy()
        if kind == "scalar":
            return array[()]
        if kind == "array":
            return array
        return jnp.asarray(array) if impl is None else jax.random.wrap_key_data(jnp.asarray(array), impl=impl)
    raise ValueError(f"unknown kind {kind!r}")


def _text(data: bytes) -> str:
    return base64.b64encode(data).decode()
