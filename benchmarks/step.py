"""One training step on 1, 2 and 8 replicas: the same model and optax optimizer, against JAX written by hand and against others.

All hold their batch on the devices, give the loss of the whole batch, and wait for a step before the next (on a CPU
several steps in flight can block each other for ever). Where a library lets them, they donate their buffers.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import jax
import optax

import phalanx as px
from benchmarks import by_hand, peers
from benchmarks.harness import Candidate, Case, Contender
from benchmarks.models import LOSSES
from benchmarks.problems import Problem, training_problems

REPLICAS = (1, 2, 8)
UNIT = "ms"

_OPTIMIZERS = {"SGD": optax.sgd(1e-3), "Adam": optax.adam(1e-3)}
_CHECKED_STEPS = 4


def cases(replicas: int, quick: bool) -> Iterator[Case]:
    for problem in training_problems(quick).values():
        for optimizer in _OPTIMIZERS if problem.kind == "mlp" else ("Adam",):
            name = f"{problem.name}, {optimizer}"
            yield Case(name, functools.partial(_contenders, replicas, problem, optimizer, quick))


def _contenders(replicas: int, problem: Problem, optimizer: str, quick: bool) -> list[Contender]:
    tx = _OPTIMIZERS[optimizer]
    steps = {"Phalanx": phalanx_step(replicas, problem, tx)}
    if replicas == 1:
        steps["jax.jit"] = by_hand.jit_step(problem, tx)
    else:
        for name, reduce in by_hand.REDUCTIONS.items():
            steps[f"shard_map, {name}"] = by_hand.shard_map_step(replicas, problem, tx, reduce)
        steps["jax.jit of sharded arrays"] = by_hand.sharded_step(replicas, problem, tx)
    steps["flax NNX"] = by_hand.nnx_step(replicas, problem, tx)

    def losses(step: Callable[[], Any]) -> list[float]:
        return [float(step()) for _ in range(_CHECKED_STEPS)]

    here = [Candidate(name, step, functools.partial(losses, step)) for name, step in steps.items()]
    setting = {"problem": problem.name, "optimizer": optimizer, "replicas": replicas, "quick": quick}
    there = peers.found({"TensorFlow, MirroredStrategy": "tensorflow", "PyTorch, DDP": "torch"}, "step", setting, quick)
    return [*here, *there]


def phalanx_step(replicas: int, problem: Problem, tx: Any) -> Callable[[], Any]:
    """The step on its batch, which waits until it is done."""
    train_step, batch = phalanx_program(replicas, problem, tx)
    return lambda: train_step(*batch).block_until_ready()


def phalanx_program(replicas: int, problem: Problem, tx: Any) -> tuple[Callable[..., Any], Any]:
    """The step as a user of Phalanx writes it, and a batch."""
    loss_fn, rows = LOSSES[problem.kind], problem.rows
    strategy = px.Mirrored(jax.devices()[:replicas])
    with strategy.scope():
        variables = [px.Variable(p) for p in problem.parameters]
    optimizer = px.Optimizer(tx)
    batch = next(iter(strategy.distribute_dataset(problem.batch, batch_size=rows)))

    def replica_step(*batch: Any) -> Any:
        with px.GradientTape() as tape:
            loss = loss_fn(variables, *batch) / rows
        optimizer.apply_gradients(zip(tape.gradient(loss, variables), variables))
        context = px.get_replica_context()
        assert context is not None
        return context.all_reduce("sum", loss)

    @px.function
    def train_step(*batch: Any) -> Any:
        return strategy.run(replica_step, args=batch)

    return train_step, batch
