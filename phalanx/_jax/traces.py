"""The current trace: where JAX hands the operations of this thread."""

from __future__ import annotations

import contextlib
from collections.abc import Hashable, Iterator
from typing import Any, TypeAlias

import jax
from jax._src import config as _config
from jax._src import core as _core
from jax._src import mesh as _mesh
from jax._src.interpreters import partial_eval as _pe
from jax.extend import core as _jex

Trace: TypeAlias = Any


def current_trace() -> Trace:
    """The trace that JAX hands every operation of this thread to."""
    return _core.trace_ctx.trace


def set_trace(trace: Trace) -> None:
    """Make `trace` the current one; whoever calls this restores it."""
    _core.trace_ctx.set_trace(trace)


using_trace = _jex.set_current_trace
"""Context manager: operations go to the given trace."""


def is_eager(trace: Trace | None = None) -> bool:
    """True when operations run at once (no transformation and no tape is active)."""
    return live(trace or current_trace()) is _core.eval_trace


def trace_chain(trace: Trace | None = None) -> Iterator[Trace]:
    """The current trace and those it stands on, innermost first, without the eager floor."""
    link = trace or current_trace()
    while link is not None and link is not _core.eval_trace:
        yield link
        link = getattr(link, "parent_trace", None)


def live(trace: Trace) -> Trace:
    """`trace`, or the one below where its observer has left (only traces of `observe_operations` have one)."""
    while getattr(trace, "observer", trace) is None:
        trace = trace.parent_trace
    return trace


def is_staging(trace: Trace) -> bool:
    """True for a trace that writes a program (jit, scan, cond ...) and computes nothing itself."""
    return isinstance(trace, _pe.DynamicJaxprTrace)


def staged_for(trace: Trace) -> str:
    """What a staging trace is for, in JAX's words: 'jit', 'scan', 'checkpoint / remat' ..."""
    return str(getattr(trace.frame.debug_info, "traced_for", "jit"))  # type: ignore[attr-defined]


def trace_context() -> Hashable:
    """JAX settings that belong to the key of a cached trace (x64, matmul precision ...)."""
    generation = _body_generation.value
    if not generation:
        return _config.trace_context()
    set_body_generation(0)
    try:
        return _config.trace_context()
    finally:
        set_body_generation(generation)


_body_generation = jax.make_user_context(0)


def set_body_generation(number: int) -> None:
    """Let JAX find only bodies that it traced under this number in this place.

    JAX keeps what it traced of a function given to `lax.scan`, `cond`, `checkpoint` ... by the function's
    identity, together with the traced values that the function closed over at the time.
    """
    _body_generation._obj.set_local(number)


@contextlib.contextmanager
def outside_traces() -> Iterator[None]:
    """Run the block eagerly, whatever is being traced around it.

    Inside `shard_map` the axis names and the manual mesh are contexts of their own: without
    resetting them, eager operations would be typed as if they ran on one replica.
    """
    axis_env = _core.trace_ctx.axis_env
    with using_trace(_core.eval_trace):
        _core.trace_ctx.set_axis_env(_core.top_axis_env)
        try:
            with _mesh.use_abstract_mesh(_mesh.empty_abstract_mesh):
                yield
        finally:
            _core.trace_ctx.set_axis_env(axis_env)
