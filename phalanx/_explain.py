"""What JAX's own errors mean for somebody who writes variables, replicas and traced functions."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import jax

from phalanx import _jax
from phalanx._packs import stored_array
from phalanx.errors import DeviceError, PhalanxError, StrategyError, TracingError, VariableCreationError

if TYPE_CHECKING:
    from phalanx._traced import Traced
    from phalanx.variables import Variable

_VALUE_NEEDED = (
    jax.errors.ConcretizationTypeError,
    jax.errors.TracerArrayConversionError,
    jax.errors.TracerIntegerConversionError,
    jax.errors.NonConcreteBooleanIndexError,
)
_ABOUT_REPLICAS = re.compile(r"manual ax|manual type|pcast|pvary|out_specs|mismatched varying|\{V:replica\}")
_ABOUT_MESHES = re.compile(r"context mesh|axis_types=\(Manual")


def why_not_traced(name: str, error: Exception) -> PhalanxError | None:
    """A better error for one that came up while `name` was traced, or None to leave it as it is."""
    if isinstance(error, PhalanxError):
        return None
    if isinstance(error, _VALUE_NEEDED):
        return _value_needed(name, error)
    if isinstance(error, jax.errors.UnexpectedTracerError):
        return leaked(name)
    text = str(error)
    if isinstance(error, (TypeError, ValueError)) and _ABOUT_REPLICAS.search(text):
        return TracingError(
            f"{name}: at {_jax.line_of_error(error)} a value that may differ between the replicas meets one that is the"
            f" same on all of them, which jax does not put together: {_first_line(text)} Use px.scan, px.while_loop,"
            " px.cond and px.GradientTape, which do; to a function of a library give arguments that all differ (x + 0 * y)."
        )
    if isinstance(error, ValueError) and _ABOUT_MESHES.search(text):
        return StrategyError(
            f"{name}: at {_jax.line_of_error(error)} jax.shard_map or jax.pmap is called in a replica, which already is"
            " one part of a program for all devices. Compute on this replica's part, and meet the others by"
            " px.get_replica_context().all_reduce, all_gather or merge_call."
        )
    return None


def why_not_run(name: str, traced: Traced, args: Sequence[Any], error: Exception) -> PhalanxError | None:
    """A better error for one that came up when a traced program was called, or None."""
    if isinstance(error, jax.errors.UnexpectedTracerError):
        return leaked(name)
    if isinstance(error, ValueError) and "incompatible devices" in str(error):
        return _scattered(name, traced, args)
    bare = next((v for v, _ in traced.captures if not v.has_storage), None)
    if isinstance(error, TypeError) and bare is not None:
        return without_storage(bare)
    return None


def leaked(name: str) -> TracingError:
    """The error for a traced value that is used when its trace is over."""
    return TracingError(
        f"{name}: a value of another trace was used: a traced value was kept (in a list, an attribute, a global) and"
        " outlived the function that it was computed in. Return it, or keep it in a px.Variable."
    )


def without_storage(variable: Variable) -> VariableCreationError:
    """The error for the value of a variable that has none."""
    return VariableCreationError(
        f"{variable.label} was created at {variable._created_at} in px.abstract(), which gives variables a shape and a"
        " dtype and no storage: px.preflight can compile a step that uses it, and nothing can run. Create it outside of"
        " px.abstract() to train."
    )


def _value_needed(name: str, error: Exception) -> TracingError:
    return TracingError(
        f"{name}: at {_jax.line_of_error(error)} a Python value was asked for where only a traced one exists (while"
        f" tracing, arrays and numbers have no value yet). JAX says: {_first_line(str(error))} Use px.cond or jnp.where"
        " instead of `if`, px.while_loop or px.scan instead of loops over values, or name the argument in"
        " static_argnames."
    )


def _scattered(name: str, traced: Traced, args: Sequence[Any]) -> DeviceError:
    """The error for arrays that lie on devices where the program does not run."""
    named = [(f"argument {i}", x) for i, x in enumerate(args)]
    named += [(v.label, stored_array(v)) for v, _ in traced.captures]
    named += [("an array that the function closes over", x) for x in traced.program.constants]
    places: dict[str, list[str]] = {}
    for label, array in named:
        if isinstance(array, jax.Array) and array.committed:
            devices = sorted(array.devices(), key=lambda d: d.id)
            places.setdefault(_jax.span(devices), []).append(f"{label} ({jax.typeof(array).str_short()})")
    strategy = traced.strategy
    home = "" if strategy is None else f" The replicas of {strategy!r} run on {_jax.span(strategy.devices)}."
    found = "; ".join(f"on {place}: {', '.join(dict.fromkeys(labels))}" for place, labels in places.items())
    return DeviceError(
        f"{name}: its arrays are bound to different devices, {found}.{home} Pass np.asarray(x), or move it with"
        " jax.device_put(x, strategy.sharding(per_replica=False)); an array that was never put on a device is moved by itself."
    )


def _first_line(text: str) -> str:
    line = text.partition("\n")[0][:300].replace("{V:replica}", " (differs)")
    return line.rstrip(" .:") + "."
