"""Operations that an observer watches on their way to the trace below."""

from __future__ import annotations

import threading
from typing import Any

from jax._src import core as _core

from phalanx._jax.closures import WITHOUT_BODIES, NoClosures, open_closures
from phalanx._jax.operations import CustomOperation, LastingOperation, Operation
from phalanx._jax.programs import Tracing, trace_program
from phalanx._jax.traces import Trace, current_trace, is_eager, live, set_trace, using_trace
from phalanx._jax.values import alias


class OperationTrace(_core.Trace):  # type: ignore[misc]
    """A trace that runs every operation on its parent and lets an observer watch it.

    The observer is asked ``wants(args)``; if so ``observe(operation, args)`` must run the operation
    and return the list of its outputs. Without an observer it changes nothing.
    """

    __slots__ = ("observer", "parent_trace")

    def __init__(self, parent: Trace, observer: Any) -> None:
        super().__init__()
        self.parent_trace = parent
        self.observer = observer
        self.requires_low = parent.requires_low  # type: ignore[misc]

    def stage_value(self, val: Any) -> Any:
        # Without the parent's word numpy values become JAX's literal type, which few libraries take.
        return self.parent_trace.stage_value(val)

    def process_primitive(self, primitive: Any, tracers: Any, params: Any, /) -> Any:
        observer = self.observer
        if observer is None:
            return self.parent_trace.process_primitive(primitive, tracers, params)
        if primitive not in WITHOUT_BODIES:
            primitive, tracers, params = open_closures(observer, primitive, tracers, params)
        if not observer.wants(tracers):
            return self.parent_trace.process_primitive(primitive, tracers, params)
        with using_trace(self.parent_trace):
            if primitive.name == "stop_gradient":  # an identity whose result, where nothing flows, is a new value
                return alias(tracers[0])
            outs = observer.observe(Operation(primitive, params), list(tracers))
        return outs if primitive.multiple_results else outs[0]

    def process_call(self, primitive: Any, f: Any, tracers: Any, params: Any, /) -> Any:
        return self._custom(primitive, (f,), tracers, params)

    def process_shard_map(self, primitive: Any, f: Any, tracers: Any, /, **params: Any) -> Any:
        # As one finished equation, with what `f` closes over among its inputs.
        shapes: list[Any] = []

        def staged(tracing: Tracing) -> list[Any]:
            inputs = [tracing.input(_core.typeof(x)) for x in tracers]
            outs = CustomOperation(primitive, (f,), params).bind(*inputs)
            shapes.append(outs)
            return list(outs)

        with using_trace(self.parent_trace):
            program = trace_program(staged, "shard_map", f)
        args = [*(tracers[i] for i in program.used), *program.constants]
        return shapes[0].update(self.process_primitive(*program.equation(args)))

    def process_custom_jvp_call(self, primitive: Any, fun: Any, jvp: Any, tracers: Any, /, **params: Any) -> Any:
        return self._custom(primitive, (fun, jvp), tracers, params)

    def process_custom_vjp_call(
        self, primitive: Any, fun: Any, fwd: Any, bwd: Any, tracers: Any, /, **params: Any
    ) -> Any:
        return self._custom(primitive, (fun, fwd, bwd), tracers, params)

    def _custom(self, primitive: Any, functions: tuple[Any, ...], tracers: Any, params: dict[str, Any]) -> Any:
        observer, args = self.observer, list(tracers)
        if observer is not None and observer.wants(args):
            lasting = LastingOperation.of_call(primitive, functions, params)
            if lasting is not None:
                with using_trace(self.parent_trace):
                    outs = observer.observe(lasting, args)
                lasting.note(functions)
                return outs
        if observer is not None:
            check = NoClosures(observer, functions[0], args)
            functions = tuple(f.wrap(_checked, (check,), None) for f in functions)
        operation = CustomOperation(primitive, functions, params)
        with using_trace(self.parent_trace):
            if observer is not None and observer.wants(args):
                return observer.observe(operation, args)
            return operation(*args)


def _checked(f: Any, check: NoClosures, *args: Any) -> Any:
    with using_trace(OperationTrace(current_trace(), check.given(args))):
        return f(*args)


class _ThreadTraces(threading.local):
    def __init__(self) -> None:
        self.eager: list[OperationTrace] = []
        """One trace for each depth of observers in eager code."""


_thread_traces = _ThreadTraces()


def observe_operations(observer: Any) -> OperationTrace:
    """Put a trace with this observer on top of the current one.

    JAX makes the current trace part of its cache keys. So in eager code the same few objects are used
    again and again: a new one each time would add entries to JAX's caches and never find them.
    """
    close_traces()
    parent, chain = current_trace(), _thread_traces.eager
    if not is_eager(parent) and parent not in chain:
        trace = OperationTrace(parent, observer)
    else:
        depth = 0 if is_eager(parent) else chain.index(parent) + 1
        if depth == len(chain):
            chain.append(OperationTrace(parent, None))
        trace = chain[depth] if chain[depth].observer is None else OperationTrace(parent, None)
        trace.observer = observer
    set_trace(trace)
    return trace


def close_traces() -> None:
    """Take traces that have lost their observer off the top."""
    set_trace(live(current_trace()))
