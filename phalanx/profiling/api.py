"""`profile`: why is the step slow?"""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from phalanx import _jax, state
from phalanx._checks import check_int
from phalanx._methods import BoundFunction
from phalanx.errors import ArgumentError, ArgumentTypeError, StrategyError
from phalanx.function import Function
from phalanx.profiling.measure import Run, run
from phalanx.profiling.report import Profile, Span

_TRACED_STEPS = 4


def profile(step: Callable[[Any], Any], batches: Iterable[Any], *, steps: int = 20) -> Profile:
    """Run a training step some times, and say where its time goes and what would help most.

    The steps are real ones: variables change as in training. One is done before anything is measured; then some one
    by one, as many as in training (without waiting for each), and a few under JAX's profiler. `batches` starts
    anew when it ends.

    A step may return anything, also nothing: what it computes is waited for, the variables that it updates
    included. One that reads its results (``float(loss)``) waits for them itself, and that time is part of it.

    Args:
        step: a function of one batch, traced or not.
        batches: a distributed dataset, or anything else that can be iterated.
        steps: how many to measure in each way.

    Returns:
        A `Profile`: `print` it, or see its ``verdict``, ``bound_by``, ``shares``, ``to_json()`` and ``save_html(path)``.

    Raises:
        ArgumentError: when there is no batch, or `steps` is no positive int.
        ArgumentTypeError: when `step` is no function or `batches` cannot be iterated.
        StrategyError: inside a traced function, a replica, a tape or another profile.

    Example:
        >>> w = px.Variable(jnp.ones((64, 64)))
        >>> @px.function
        ... def step(x):
        ...     w.assign(jnp.tanh(x @ w))
        ...     return w.value.mean()
        >>> found = px.profile(step, [jnp.ones((64, 64))], steps=5)
        >>> sorted(found.shares)
        ['collectives', 'compilation', 'compute', 'host', 'input']
        >>> found.steps
        5
    """
    if not state.top().is_eager or state.top() is not state.top().base or state.context().in_replica:
        raise StrategyError("profile must be called outside traced functions, replicas and tapes.")
    if not callable(step):
        raise ArgumentTypeError(f"profile: step must be a function, got {type(step).__name__} {step!r:.60}.")
    check_int(steps, "profile: steps")
    endless = _endless(batches)
    first = _first(step, endless)
    alone = run(step, endless, steps, wait=True)
    together = run(step, endless, steps, wait=False)
    traced: list[Run] = []
    few = min(steps, _TRACED_STEPS)
    operations = _jax.device_operations(lambda: traced.append(run(step, endless, few, wait=True)))
    return _profile(step, first, alone, together, traced[0], operations)


def _endless(batches: Any) -> Iterator[Any]:
    try:
        iter(batches)
    except TypeError as error:
        raise ArgumentTypeError(f"profile: batches must be iterable, got {type(batches).__name__}.") from error
    for turn in itertools.count():
        empty = True
        for batch in batches:
            empty = False
            yield batch
        if empty:
            again = " the second time: an iterator can be used once, give what makes it" if turn else ""
            raise ArgumentError(f"profile: batches is empty{again}.")


def _first(step: Callable[[Any], Any], batches: Iterator[Any]) -> float:
    start = time.perf_counter()
    _ = step(next(batches))  # held, so that its results are waited for
    _jax.wait_for_all()
    return time.perf_counter() - start


def _profile(
    step: Any, first: float, alone: Run, together: Run, traced: Run, operations: list[_jax.DeviceOperation]
) -> Profile:
    count = len(together.steps)
    whole = together.seconds / count
    waiting = sum(s.waiting for s in together.steps) / count
    compiling = sum(map(together.compiling, together.steps)) / count
    still = [s for s in alone.steps if not alone.compiling(s)] or alone.steps
    on_device = statistics.median([(s.done or s.returned) - s.returned for s in still])
    calling = statistics.median([s.calling for s in still])
    rest = max(0.0, whole - waiting - compiling)
    # What the devices do while Python is at the next step costs nothing; the rest is Python's.
    busy, collective = _busy(operations, len(traced.steps))
    devices = min(rest, max(on_device, min(busy, on_device + calling)))
    part = collective / busy if busy else 0.0
    seconds = {
        "input": waiting,
        "compilation": compiling,
        "collectives": devices * part,
        "compute": devices * (1 - part),
        "host": rest - devices,
    }
    return Profile(
        steps=count,
        seconds_per_step=whole,
        first_step_seconds=first,
        shares={name: value / whole for name, value in seconds.items()},
        recompiled_steps=sum(together.compiling(s) > 0 for s in together.steps),
        name=getattr(step, "__name__", type(step).__name__),
        is_traced=isinstance(step, (Function, BoundFunction)),
        last_retrace=_last_retrace(step),
        reads_numbers=together.reads_numbers,
        timeline=_timeline(traced, operations),
    )


def _last_retrace(step: Any) -> str | None:
    if not isinstance(step, (Function, BoundFunction)) or step.trace_count < 2:
        return None
    return step.explain_retraces().splitlines()[-1].partition(": ")[2]


def _busy(operations: list[_jax.DeviceOperation], steps: int) -> tuple[float, float]:
    """Seconds per step in which the busiest device computes or meets others, and in which it meets others."""
    by_device: dict[str, list[_jax.DeviceOperation]] = {}
    for operation in operations:
        by_device.setdefault(operation.device, []).append(operation)
    found = [(_covered(ops), _covered([o for o in ops if o.is_collective])) for ops in by_device.values()]
    busy, collective = max(found, default=(0.0, 0.0))
    return busy / steps, collective / steps


def _covered(operations: list[_jax.DeviceOperation]) -> float:
    """Seconds in which at least one of the operations runs."""
    total, until = 0.0, float("-inf")
    for start, end in sorted((o.start, o.start + o.seconds) for o in operations):
        total += max(0.0, end - max(start, until))
        until = max(until, end)
    return total


def _timeline(traced: Run, operations: list[_jax.DeviceOperation]) -> list[Span]:
    """The profiled steps, from their start, host and devices each by their own clock."""
    spans = []
    for step in traced.steps:
        spans.append(Span("host", "input", step.asked - traced.started, step.waiting))
        spans.append(Span("host", "host", step.got - traced.started, step.calling))
    for start, end in traced.compilations:
        spans.append(Span("host", "compilation", start - traced.started, end - start))
    began = min((o.start for o in operations), default=0.0)
    offset = traced.steps[0].got - traced.started
    for o in operations:
        spans.append(
            Span(o.device, "collectives" if o.is_collective else "compute", o.start - began + offset, o.seconds, o.name)
        )
    return spans
