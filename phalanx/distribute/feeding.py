"""Values that are made outside, one for each replica."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp

from phalanx import _jax, state
from phalanx._checks import as_array, take_apart
from phalanx.distribute.replica import ReplicaContext
from phalanx.distribute.values import PerReplica
from phalanx.errors import ArgumentError

if TYPE_CHECKING:
    from phalanx.distribute.strategy import Strategy


class ValueContext:
    """What the function given to `distribute_values_from_function` is told."""

    def __init__(self, replica_id: int, num_replicas: int) -> None:
        self.replica_id = replica_id
        self.num_replicas = num_replicas

    def __repr__(self) -> str:
        return f"ValueContext(replica_id={self.replica_id}, num_replicas={self.num_replicas})"


def values_from_function(strategy: Strategy, fn: Callable[[ValueContext], Any]) -> Any:
    """`Strategy.distribute_values_from_function`, whose errors it raises."""
    n = strategy.num_replicas
    parts = [fn(ValueContext(i, n)) for i in range(n)]
    leaves = [take_apart(part, "distribute_values_from_function")[0] for part in parts]
    structure = jax.tree.structure(parts[0])
    for i, part in enumerate(parts):
        if jax.tree.structure(part) != structure:
            raise ArgumentError(
                f"distribute_values_from_function: replica {i} gave {jax.tree.structure(part)}, replica 0 {structure}."
            )
    return jax.tree.unflatten(structure, [_stack(strategy, list(column)) for column in zip(*leaves)])


def _stack(strategy: Strategy, parts: list[Any]) -> PerReplica:
    parts = [as_array(p, "distribute_values_from_function") for p in parts]
    types = {(p.shape, p.dtype) for p in parts}
    if len(types) > 1:
        raise ArgumentError(
            "distribute_values_from_function: all replicas run one program, so their values need the same shape and"
            f" dtype, got {sorted(map(str, types))}. Pad them to one shape and give the number of valid rows too."
        )
    if _jax.in_replica_trace():  # in a merge function, where each replica holds its own part
        return PerReplica(jax.lax.dynamic_index_in_dim(jnp.stack(parts), ReplicaContext(strategy).replica_id), strategy)
    if any(map(_jax.is_tracer, parts)):
        return PerReplica(jnp.stack(parts), strategy)
    with state.lifted_out():
        shards = [jax.device_put(jnp.expand_dims(p, 0), d) for p, d in zip(parts, strategy.devices)]
        shape = (strategy.num_replicas, *shards[0].shape[1:])
        return PerReplica(jax.make_array_from_single_device_arrays(shape, _jax.split(strategy.mesh), shards), strategy)
