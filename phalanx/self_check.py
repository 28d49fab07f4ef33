"""`self_check`: does the step do the same on one replica and on all of them?"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from itertools import islice
from typing import Any

import jax
import numpy as np

from phalanx import state
from phalanx._conversion import to_host
from phalanx.data.dataset import DistributedDataset
from phalanx.distribute.strategy import Strategy
from phalanx.distribute.values import is_per_replica
from phalanx.errors import ArgumentError, ArgumentTypeError, StrategyError
from phalanx.function import not_strict
from phalanx.variables import Variable

_STEPS = 3


def self_check(step: Callable[..., Any], batches: Iterable[Any], *, rtol: float = 1e-4, atol: float = 1e-5) -> str:
    """Run three steps on one replica and on all of them, and compare every variable.

    What the step creates or adopts (an optimizer's state, a model made outside the scope) is made by one
    more step, whose other effects are undone.

    Args:
        step: a function of one batch, as in training (traced or not).
        batches: a distributed dataset, whose next loop starts where it would have, or some of its elements;
            the first three are used.
        rtol: relative tolerance.
        atol: absolute tolerance.

    Returns:
        ``"equal"``, or a sentence that names the first variable (or result) that differs and by how much.
        All variables of the strategy are left as they were.

    Raises:
        ArgumentError: when there is no batch, or none with per-replica rows, or for a wrong tolerance.
        ArgumentTypeError: when `step` is no function or `batches` cannot be iterated.
        StrategyError: inside a traced function, a replica or a tape.

    Example:
        >>> strategy = px.Mirrored()
        >>> with strategy.scope():
        ...     total = px.Variable(0.0, aggregation="sum")
        >>> @px.function
        ... def step(x):
        ...     strategy.run(lambda x: total.assign_add(x.sum()), args=(x,))
        >>> n = len(jax.devices())
        >>> px.self_check(step, strategy.distribute_dataset(jnp.ones(6 * n), batch_size=2 * n))
        'equal'
    """
    if not state.top().is_eager or state.top() is not state.top().base or state.context().in_replica:
        raise StrategyError("self_check must be called outside traced functions, replicas and tapes.")
    for value, label in ((rtol, "rtol"), (atol, "atol")):
        if isinstance(value, bool) or not isinstance(value, (int, float, np.number)) or not value >= 0:
            raise ArgumentError(f"self_check: {label} must be a number from 0 on, got {value!r:.60}.")
    rtol, atol = float(rtol), float(atol)
    elements = _elements(step, batches)
    parts = [leaf for leaf in jax.tree.leaves(elements, is_leaf=is_per_replica) if is_per_replica(leaf)]
    strategy: Strategy = parts[0].strategy
    with _kept(strategy) as before, not_strict():
        step(elements[0])
        for v in strategy.variables:  # whose initial value was computed in the step
            _keep(v, before)
        _restore(before)
        everywhere = _run(step, elements, strategy)
        _restore(before)
        whole = [jax.tree.map(_joined, element, is_leaf=is_per_replica) for element in elements]
        with _on_one_device(strategy):
            split = [jax.tree.map(lambda x: _split(strategy, x), element) for element in whole]
            alone = _run(step, split, strategy)
    return _compare(alone, everywhere, strategy.num_replicas, rtol, atol)


def _elements(step: Any, batches: Any) -> list[Any]:
    if not callable(step):
        raise ArgumentTypeError(f"self_check: step must be a function, got {type(step).__name__} {step!r:.60}.")
    try:
        dataset = isinstance(batches, DistributedDataset)
        elements = batches._peek(_STEPS) if dataset else list(islice(iter(batches), _STEPS))
    except TypeError as error:
        raise ArgumentTypeError(f"self_check: batches must be iterable, got {type(batches).__name__}.") from error
    leaves = [leaf for leaf in jax.tree.leaves(elements, is_leaf=is_per_replica) if is_per_replica(leaf)]
    if not leaves or any(not leaf.shape for leaf in leaves):
        raise ArgumentError(
            "self_check: batches must be elements of strategy.distribute_dataset, PerReplica values with rows along axis"
            f" 0; got {len(elements)} elements with {len(leaves)} such values{' and scalars' if leaves else ''}."
        )
    return elements


def _run(step: Callable[..., Any], elements: list[Any], strategy: Strategy) -> list[tuple[str, Any]]:
    observed: list[tuple[str, Any]] = []
    for i, element in enumerate(elements):
        result = step(element)
        for path, leaf in jax.tree_util.tree_flatten_with_path(result, is_leaf=is_per_replica)[0]:
            if isinstance(leaf, jax.Array):
                observed.append((f"result{jax.tree_util.keystr(path)} of step {i}", to_host(leaf)))
        for v in strategy.variables:
            if not (v.per_replica and v.aggregation == "none"):
                observed.append((f"{v.label} after step {i}", to_host(v.value)))
    return observed


def _compare(alone: list[tuple[str, Any]], everywhere: list[tuple[str, Any]], n: int, rtol: float, atol: float) -> str:
    for (name, a), (_, b) in zip(alone, everywhere):
        if a.shape != b.shape:
            return f"{name} has shape {a.shape} on one replica and {b.shape} on {n}."
        a, b = (x.astype(np.complex128 if x.dtype.kind == "c" else np.float64) for x in (a, b))
        if not np.allclose(a, b, rtol=rtol, atol=atol, equal_nan=True):
            worst = float(np.max(np.abs(a - b)))
            return f"{name} differs: largest difference {worst:.3g} between one replica and {n}."
    return "equal"


# ---- keeping everything as it was ----------------------------------------------------------------


@contextmanager
def _kept(strategy: Strategy) -> Iterator[dict[Variable, Any]]:
    """The values of all variables, also of those that the strategy gets in the block; put back at its end."""
    before: dict[Variable, Any] = {}

    for variable in strategy.variables:
        _keep(variable, before)
    strategy.on_register = functools.partial(_keep, before=before)
    try:
        yield before
    finally:
        strategy.on_register = None
        _restore(before)


def _keep(variable: Variable, before: dict[Variable, Any]) -> None:
    if variable._stored is not None:
        with state.lifted_out():
            before.setdefault(variable, state.borrow(variable))


def _restore(values: dict[Variable, Any]) -> None:
    for variable, stored in values.items():
        variable._replace(stored)


@contextmanager
def _on_one_device(strategy: Strategy) -> Iterator[None]:
    """The strategy with its first device only, and its variables there."""
    devices = strategy.devices
    rules = state.CrossReplica(strategy)
    stored = {v: state.borrow(v) for v in strategy.variables}
    stored = {v: state.merge_components(x, v.aggregation) if v.per_replica else x for v, x in stored.items()}
    strategy._use_devices(devices[:1])
    try:
        with state.lifted_out():
            for v, value in stored.items():
                value = jax.device_put(value, devices[0])
                v._replace(v._placed(rules.spread(v, value) if v.per_replica else value))
        yield
    finally:
        strategy._use_devices(devices)


def _joined(value: Any) -> Any:
    """The rows of all replicas, on the host."""
    if not is_per_replica(value):
        return value
    rows = np.asarray(value.stacked)
    return _Rows(rows.reshape(-1, *rows.shape[2:]))


def _split(strategy: Strategy, value: Any) -> Any:
    return strategy.split_rows(value.rows) if isinstance(value, _Rows) else value


class _Rows:
    """A leaf of an element that was per replica."""

    def __init__(self, rows: np.ndarray[Any, Any]) -> None:
        self.rows = rows
