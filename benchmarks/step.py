"""One training step on 1, 2 and 8 replicas: the same model and optax optimizer, against `jax.shard_map` by hand.

Both sides donate their buffers, hold their batch on the devices, give the loss of the whole batch,
and wait for a step before the next (on a CPU several steps in flight can block each other for ever).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

import phalanx as px
from benchmarks.harness import Candidate, Case
from benchmarks.models import mlp_parameters, regression_batch, squared_error

REPLICAS = (1, 2, 8)
UNIT = "ms"

SMALL = 32 * 1024
"""Bytes up to which the best bucketing by hand puts an array in a bucket."""

_WHOLE, _SPLIT = PartitionSpec(), PartitionSpec("replica")
_CHECKED_STEPS = 4


def cases(replicas: int, quick: bool) -> Iterator[Case]:
    width, depth = (32, 9) if quick else (256, 100)
    for name, sizes, rows in (
        (f"MLP 3 x {width}, batch 256", [width] * 4, 256),
        (f"{depth} x Dense(32), batch 64", [32] * (depth + 1), 64),
    ):
        for optimizer, tx in (("SGD", optax.sgd(1e-3)), ("Adam", optax.adam(1e-3))):
            yield Case(f"{name}, {optimizer}", functools.partial(_candidates, replicas, sizes, rows, tx))


def _candidates(replicas: int, sizes: list[int], rows: int, tx: Any) -> list[Candidate]:
    batch = regression_batch(rows, sizes[0])
    parameters = mlp_parameters(sizes)
    steps = {"Phalanx": phalanx_step(replicas, parameters, batch, tx)}
    if replicas == 1:
        steps["jax.jit"] = jit_step(parameters, batch, tx)
    else:
        for name, reduce in REDUCTIONS.items():
            steps[f"shard_map, {name}"] = shard_map_step(replicas, parameters, batch, tx, reduce)

    def losses(step: Callable[[], Any]) -> list[float]:
        return [float(step()) for _ in range(_CHECKED_STEPS)]

    return [Candidate(name, step, functools.partial(losses, step)) for name, step in steps.items()]


def phalanx_step(replicas: int, parameters: Sequence[Any], batch: tuple[Any, Any], tx: Any) -> Callable[[], Any]:
    """The step as a user of Phalanx writes it."""
    strategy = px.Mirrored(jax.devices()[:replicas])
    with strategy.scope():
        variables = [px.Variable(p) for p in parameters]
    optimizer = px.Optimizer(tx)
    rows = len(batch[0])
    x, y = next(iter(strategy.distribute_dataset(batch, batch_size=rows)))

    def replica_step(x: Any, y: Any) -> Any:
        with px.GradientTape() as tape:
            loss = squared_error(variables, x, y) / rows
        optimizer.apply_gradients(zip(tape.gradient(loss, variables), variables))
        context = px.get_replica_context()
        assert context is not None
        return context.all_reduce("sum", loss)

    @px.function
    def train_step(x: Any, y: Any) -> Any:
        return strategy.run(replica_step, args=(x, y))

    return lambda: train_step(x, y).block_until_ready()


def jit_step(parameters: Sequence[Any], batch: tuple[Any, Any], tx: Any) -> Callable[[], Any]:
    """The step for one device, by hand."""
    return _donating(
        lambda p, o, x, y: _update(tx, p, o, x, y, len(batch[0]), reduce=None), parameters, batch, tx, None
    )


def shard_map_step(
    replicas: int, parameters: Sequence[Any], batch: tuple[Any, Any], tx: Any, reduce: Callable[[list[Any]], list[Any]]
) -> Callable[[], Any]:
    """The step for several devices, by hand."""
    mesh = Mesh(np.array(jax.devices()[:replicas]), ("replica",), axis_types=(AxisType.Auto,))

    def one_replica(p: Any, o: Any, x: Any, y: Any) -> Any:
        return _update(tx, p, o, x, y, len(batch[0]), reduce)

    step = jax.shard_map(one_replica, mesh=mesh, in_specs=(_WHOLE, _WHOLE, _SPLIT, _SPLIT), out_specs=_WHOLE)
    return _donating(step, parameters, batch, tx, mesh)


def _update(tx: Any, p: Any, o: Any, x: Any, y: Any, rows: int, reduce: Any) -> Any:
    local = p if reduce is None else jax.lax.pcast(p, "replica", to="varying")
    loss, grads = jax.value_and_grad(lambda p: squared_error(p, x, y) / rows)(local)
    if reduce is not None:
        *grads, loss = reduce([*grads, loss])
    updates, o = tx.update(grads, o, p)
    return optax.apply_updates(p, updates), o, loss


def _donating(step: Any, parameters: Sequence[Any], batch: Any, tx: Any, mesh: Mesh | None) -> Callable[[], Any]:
    def put(tree: Any, spec: PartitionSpec) -> Any:
        return jax.device_put(tree, jax.devices()[0] if mesh is None else NamedSharding(mesh, spec))

    compiled = jax.jit(step, donate_argnums=(0, 1))
    p = put(list(parameters), _WHOLE)
    o = put(tx.init(p), _WHOLE)
    x, y = put(batch, _SPLIT)

    def run() -> Any:
        nonlocal p, o
        p, o, loss = compiled(p, o, x, y)
        return loss.block_until_ready()

    return run


# ---- ways of summing the gradients over the replicas -----------------------------------------------


def _each(arrays: list[Any]) -> list[Any]:
    return list(jax.lax.psum(arrays, "replica"))


def _flat(arrays: list[Any]) -> list[Any]:
    total = jax.lax.psum(jnp.concatenate([a.ravel() for a in arrays]), "replica")
    parts = jnp.split(total, np.cumsum([a.size for a in arrays])[:-1])
    return [part.reshape(a.shape) for part, a in zip(parts, arrays)]


def _small_together(arrays: list[Any]) -> list[Any]:
    out = list(arrays)
    small = [i for i, a in enumerate(arrays) if a.nbytes <= SMALL]
    large = [i for i in range(len(arrays)) if i not in small]
    for indices, reduce in ((small, _flat), (large, _each)):
        if indices:
            for i, total in zip(indices, reduce([arrays[i] for i in indices])):
                out[i] = total
    return out


REDUCTIONS = {"one psum each": _each, "one flat psum": _flat, "small ones flat": _small_together}
