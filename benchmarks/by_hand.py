"""Training steps without Phalanx: JAX written by hand, in several ways, and flax NNX."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

from benchmarks.models import LOSSES
from benchmarks.problems import Problem

SMALL = 32 * 1024
"""Bytes up to which the best bucketing by hand puts an array in a bucket."""

_WHOLE, _SPLIT = PartitionSpec(), PartitionSpec("replica")

Step = Callable[[], Any]
Reduce = Callable[[list[Any]], list[Any]]


def jit_step(problem: Problem, tx: Any) -> Step:
    """For one device."""
    return _donating(_update(problem, tx, None), problem, tx, None)


def shard_map_step(replicas: int, problem: Problem, tx: Any, reduce: Reduce) -> Step:
    """For several devices, each with the program of one."""
    mesh = _mesh(replicas)
    return _donating(_on_mesh(mesh, problem, tx, reduce), problem, tx, mesh)


def shard_map_program(replicas: int, problem: Problem, tx: Any, reduce: Reduce) -> tuple[Any, Any]:
    """The same for devices that need not be here: a jitted function, and the types of its arguments."""
    mesh = AbstractMesh((replicas,), ("replica",))

    def typed(tree: Any, spec: PartitionSpec) -> Any:
        sharding = NamedSharding(mesh, spec)
        return jax.tree.map(lambda x: jax.ShapeDtypeStruct(jnp.shape(x), jnp.result_type(x), sharding=sharding), tree)

    p = typed(problem.parameters, _WHOLE)
    arguments = (p, typed(jax.eval_shape(tx.init, p), _WHOLE), *typed(problem.batch, _SPLIT))
    return jax.jit(_on_mesh(mesh, problem, tx, reduce), donate_argnums=(0, 1)), arguments


def sharded_step(replicas: int, problem: Problem, tx: Any) -> Step:
    """For several devices: the program of one device, on a batch that is split; XLA adds what is to be summed."""
    return _donating(_update(problem, tx, None), problem, tx, _mesh(replicas))


def nnx_step(replicas: int, problem: Problem, tx: Any) -> Step:
    """A flax NNX module and optimizer under `nnx.jit`, on a batch that is split."""
    from flax import nnx

    loss_fn, rows = LOSSES[problem.kind], problem.rows

    class Model(nnx.Module):  # type: ignore[misc]
        def __init__(self) -> None:
            self.parameters = nnx.List(nnx.Param(jnp.asarray(p)) for p in problem.parameters)

    model = Model()
    optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)
    batch = problem.batch
    if replicas > 1:
        mesh = _mesh(replicas)
        for part in (model, optimizer):
            nnx.update(part, jax.device_put(nnx.state(part), NamedSharding(mesh, _WHOLE)))
        batch = jax.device_put(batch, NamedSharding(mesh, _SPLIT))
    else:
        batch = jax.device_put(batch)

    @nnx.jit
    def train_step(model: Any, optimizer: Any, batch: Any) -> Any:
        def mean(model: Any) -> Any:
            return loss_fn([p[...] for p in model.parameters], *batch) / rows

        loss, grads = nnx.value_and_grad(mean)(model)
        optimizer.update(model, grads)
        return loss

    return lambda: train_step(model, optimizer, batch).block_until_ready()


def _mesh(replicas: int) -> Mesh:
    return Mesh(np.array(jax.devices()[:replicas]), ("replica",), axis_types=(AxisType.Auto,))


def _on_mesh(mesh: Any, problem: Problem, tx: Any, reduce: Reduce) -> Callable[..., Any]:
    specs = (_WHOLE, _WHOLE, *(_SPLIT for _ in problem.batch))
    return jax.shard_map(_update(problem, tx, reduce), mesh=mesh, in_specs=specs, out_specs=_WHOLE)


def _update(problem: Problem, tx: Any, reduce: Reduce | None) -> Callable[..., Any]:
    loss_fn, rows = LOSSES[problem.kind], problem.rows

    def update(p: Any, o: Any, *batch: Any) -> Any:
        local = p if reduce is None else jax.lax.pcast(p, "replica", to="varying")
        loss, grads = jax.value_and_grad(lambda p: loss_fn(p, *batch) / rows)(local)
        if reduce is not None:
            *grads, loss = reduce([*grads, loss])
        updates, o = tx.update(grads, o, p)
        return optax.apply_updates(p, updates), o, loss

    return update


def _donating(step: Callable[..., Any], problem: Problem, tx: Any, mesh: Mesh | None) -> Step:
    def put(tree: Any, spec: PartitionSpec) -> Any:
        return jax.device_put(tree, jax.devices()[0] if mesh is None else NamedSharding(mesh, spec))

    compiled = jax.jit(step, donate_argnums=(0, 1))
    p = put(problem.parameters, _WHOLE)
    o = put(tx.init(p), _WHOLE)
    batch = put(problem.batch, _SPLIT)

    def run() -> Any:
        nonlocal p, o
        p, o, loss = compiled(p, o, *batch)
        return loss.block_until_ready()

    return run


# ---- ways of summing the gradients over the replicas -----------------------------------------------


def each(arrays: list[Any]) -> list[Any]:
    """One psum for each array."""
    return list(jax.lax.psum(arrays, "replica"))


def _flat(arrays: list[Any]) -> list[Any]:
    total = jax.lax.psum(jnp.concatenate([a.ravel() for a in arrays]), "replica")
    parts = jnp.split(total, np.cumsum([a.size for a in arrays])[:-1])
    return [part.reshape(a.shape) for part, a in zip(parts, arrays)]


def _small_together(arrays: list[Any]) -> list[Any]:
    out = list(arrays)
    small = [i for i, a in enumerate(arrays) if a.nbytes <= SMALL]
    large = [i for i in range(len(arrays)) if i not in small]
    for indices, reduce in ((small, _flat), (large, each)):
        if indices:
            for i, total in zip(indices, reduce([arrays[i] for i in indices])):
                out[i] = total
    return out


REDUCTIONS: dict[str, Reduce] = {"one psum each": each, "one flat psum": _flat, "small ones flat": _small_together}
"""By how the gradients travel."""
