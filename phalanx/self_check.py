"""`self_check`: does the step do the same on one replica and on all of them?"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from itertools import islice
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from phalanx import state
from phalanx.distribute.strategy import Strategy
from phalanx.distribute.values import PerReplica, is_per_replica
from phalanx.errors import ArgumentError, StrategyError
from phalanx.variables import Variable

_STEPS = 3


def self_check(
    step: Callable[..., Any], batches: Iterable[Any], *, rtol: float = 1e-4, atol: float = 1e-5
) -> str:
    """Run three steps on one replica and on all of them, and compare every variable.

    Args:
        step: a function of one batch, as in training (traced or not).
        batches: at least three elements of a distributed dataset.
        rtol: relative tolerance.
        atol: absolute tolerance.

    Returns:
        ``"equal"``, or a sentence that names the first variable (or result) that differs and by how much.
        All variables are left as they were.

    Raises:
        ArgumentError: when there is no batch, or none with per-replica parts.

    Example:
        >>> strategy = px.Mirrored()
        >>> with strategy.scope():
        ...     total = px.Variable(0.0, aggregation="sum")
        >>> @px.function
        ... def step(x):
        ...     def replica_step(x):
        ...         total.assign_add(x.sum())
        ...     strategy.run(replica_step, args=(x,))
        >>> n = len(jax.devices())
        >>> px.self_check(step, strategy.distribute_dataset(jnp.ones(6 * n), batch_size=2 * n))
        'equal'
    """
    elements = list(islice(iter(batches), _STEPS))
    parts = [leaf for leaf in jax.tree.leaves(elements, is_leaf=is_per_replica) if is_per_replica(leaf)]
    if not parts:
        raise ArgumentError(
            "self_check: batches must be elements of strategy.distribute_dataset (PerReplica values); got"
            f" {len(elements)} elements without any."
        )
    if not state.top().is_eager or state.context().in_replica:
        raise StrategyError("self_check must be called outside traced functions and replicas.")
    strategy: Strategy = parts[0].strategy
    before = {v: v._stored for v in strategy.variables}
    state.Lending.lend(before)
    try:
        everywhere = _run(step, elements, strategy)
        _restore(before)
        with _on_one_device(strategy):
            alone = _run(step, [jax.tree.map(_joined, e, is_leaf=is_per_replica) for e in elements], strategy)
    finally:
        _restore(before)
    return _compare(alone, everywhere, strategy.num_replicas, rtol, atol)


def _run(step: Callable[..., Any], elements: list[Any], strategy: Strategy) -> list[tuple[str, Any]]:
    observed: list[tuple[str, Any]] = []
    for i, element in enumerate(elements):
        result = step(element)
        for path, leaf in jax.tree_util.tree_flatten_with_path(result, is_leaf=is_per_replica)[0]:
            if isinstance(leaf, jax.Array):
                observed.append((f"result{jax.tree_util.keystr(path)} of step {i}", np.asarray(leaf)))
        for v in sorted(strategy.variables, key=lambda v: v.name):
            if not (v.per_replica and v.aggregation == "none"):
                observed.append((f"{v.label} after step {i}", np.asarray(v.value)))
    return observed


def _compare(alone: list[tuple[str, Any]], everywhere: list[tuple[str, Any]], n: int, rtol: float, atol: float) -> str:
    for (name, a), (_, b) in zip(alone, everywhere):
        if a.shape != b.shape:
            return f"{name} has shape {a.shape} on one replica and {b.shape} on {n}."
        if not np.allclose(a, b, rtol=rtol, atol=atol, equal_nan=True):
            worst = float(np.max(np.abs(a.astype(np.float64) - b.astype(np.float64))))
            return f"{name} differs: largest difference {worst:.3g} between one replica and {n}."
    return "equal"


def _restore(values: dict[Variable, Any]) -> None:
    for variable, stored in values.items():
        variable._replace(stored)


def _joined(value: Any) -> Any:
    """A per-replica value with all its rows on one replica."""
    if not is_per_replica(value) or value.stacked.ndim < 2:
        return value
    rows = np.asarray(value.stacked).reshape(1, -1, *value.stacked.shape[2:])
    return PerReplica(jnp.asarray(rows), value.strategy)


@contextmanager
def _on_one_device(strategy: Strategy) -> Iterator[None]:
    """The strategy with its first device only, and its variables there."""
    devices = strategy.devices
    merge = state.CrossReplica(strategy)
    merged = {v: v.value if v.aggregation != "none" or not v.per_replica else v._stored[0] for v in strategy.variables}
    strategy._use_devices(devices[:1])
    try:
        for v, value in merged.items():
            value = jnp.asarray(np.asarray(value))
            v._replace(v._placed(merge.spread(v, value) if v.per_replica else value))
        yield
    finally:
        strategy._use_devices(devices)
