"""Reducing and gathering from outside: the parts of all replicas meet where all of them are seen."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp

from phalanx import _jax, state
from phalanx._checks import as_array, check_axis
from phalanx._launch import in_order
from phalanx.distribute.collectives import all_reduce, countable
from phalanx.distribute.values import PerReplica, is_per_replica
from phalanx.variables import Component, Variable

if TYPE_CHECKING:
    from phalanx.distribute.strategy import Strategy


def is_distributed(value: Any) -> bool:
    """For `jax.tree` functions: stop at what holds values of several replicas."""
    return isinstance(value, (PerReplica, Variable, Component))


def reduce_leaf(strategy: Strategy, op: Any, leaf: Any, axis: int | None) -> Any:
    """`Strategy.reduce` of one leaf of its value."""
    if isinstance(leaf, Variable) and leaf.per_replica:
        leaf = PerReplica(state.borrow(leaf), strategy)
    elif isinstance(leaf, (Variable, Component)):
        leaf = leaf.value
    parted = is_per_replica(leaf)
    if parted:
        strategy.check_owner(leaf, "reduce")
        stacked = leaf.stacked
    else:
        stacked = as_array(leaf, "reduce")[None]
    if axis is not None:
        check_axis(stacked.ndim - 1, axis, "reduce")
    n = strategy.num_replicas
    if parted and state.context().in_merge:
        return _reduce_part(op, leaf.here[0], axis, n, strategy.platform)
    return compute(strategy, _reduce_stacked, stacked, op, axis, 1 if parted else n)


def gather_leaf(strategy: Strategy, x: Any, axis: int) -> Any:
    """`Strategy.gather` of one leaf of its value."""
    if not is_per_replica(x):
        return x.value if isinstance(x, (Variable, Component)) else x
    strategy.check_owner(x, "gather")
    check_axis(x.stacked.ndim - 1, axis, "gather")
    if state.context().in_merge:
        return _jax.all_gather(x.here[0], axis % (x.stacked.ndim - 1), stacked=False)
    return compute(strategy, _gather_stacked, x.stacked, axis)


def compute(strategy: Strategy, fn: Callable[..., Any], stacked: Any, *options: Any) -> Any:
    """Call ``fn(stacked, *options)``, in which replicas meet, outside of them."""
    if not state.top().is_eager or _jax.is_tracer(stacked):
        state.top().base.note_use(strategy)
        result = fn(stacked, *options)
        if _jax.in_replica_trace() or strategy.num_replicas == 1:
            return result
        # Left to itself XLA may leave the result split, and other processes' parts cannot be read.
        return jax.lax.with_sharding_constraint(result, _jax.replicated(strategy.mesh))
    compiled = _jitted(fn, options, _jax.replicated(strategy.mesh))
    return in_order(strategy.in_order, lambda: [compiled(stacked)])[0]


@functools.lru_cache(maxsize=256)
def _jitted(fn: Callable[..., Any], options: tuple[Any, ...], sharding: Any) -> Any:
    return jax.jit(lambda stacked: fn(stacked, *options), out_shardings=sharding)


def _reduce_stacked(stacked: Any, op: str, axis: int | None, times: int) -> Any:
    stacked = countable(stacked, "reduce")
    axes = (0,) if axis is None else (0, axis % (stacked.ndim - 1) + 1)
    if op == "mean":
        return stacked.mean(axes)
    return stacked.sum(axes, dtype=stacked.dtype) * times


def _reduce_part(op: Any, part: Any, axis: int | None, n: int, platform: str) -> Any:
    if axis is not None:
        part = part.mean(axis) if op == "mean" else part.sum(axis)
    return all_reduce(op, [part], n, platform)[0]


def _gather_stacked(stacked: Any, axis: int) -> Any:
    axis = axis % (stacked.ndim - 1)
    shape = list(stacked.shape[1:])
    shape[axis] *= stacked.shape[0]
    return jnp.moveaxis(stacked, 0, axis).reshape(shape)
