"""What it costs to be safe: a checkpoint next to a step, and an audit next to the hundred steps between two of them.

An audit is compared with the steps directly. One percent of them would drown in the noise of two runs of a hundred
steps, with and without.
"""

from __future__ import annotations

import functools
import itertools
import tempfile
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import phalanx as px
from benchmarks.harness import Candidate, Case
from benchmarks.models import mlp_loss
from benchmarks.problems import mlp_parameters, regression_batch

REPLICAS = (1, 8)
UNIT = "ms"

_AUDIT_EVERY = 100


def cases(replicas: int, quick: bool) -> Iterator[Case]:
    width = 64 if quick else 1024 if replicas == 1 else 512
    yield Case(f"checkpoint, MLP 3 x {width}, Adam", functools.partial(_checkpoint, replicas, width))
    steps = 2 if quick else _AUDIT_EVERY
    yield Case(f"digits: an audit and {steps} steps", functools.partial(_audit, replicas, steps))
    yield Case(f"digits: {steps} steps with a guard", functools.partial(_guard, replicas, steps))


def _checkpoint(replicas: int, width: int) -> list[Candidate]:
    strategy = px.Mirrored(jax.devices()[:replicas])
    sizes, rows = [width] * 4, 64 * replicas
    with strategy.scope():
        variables = [px.Variable(p, name=f"v{i}") for i, p in enumerate(mlp_parameters(sizes))]
        optimizer = px.Optimizer(optax.adam(1e-4))
        optimizer.build(variables)
    batch = tuple(map(strategy.split_rows, regression_batch(rows, width)))

    @px.function
    def step(x: Any, y: Any) -> Any:
        def replica(x: Any, y: Any) -> Any:
            with px.GradientTape() as tape:
                loss = mlp_loss(variables, x, y) / rows
            optimizer.apply_gradients(zip(tape.gradient(loss, variables), variables))
            return loss

        return strategy.reduce("sum", strategy.run(replica, args=(x, y)))

    step(*batch)
    checkpoint = px.Checkpoint(variables=variables, optimizer=optimizer)
    manager = px.CheckpointManager(tempfile.mkdtemp(), keep=1)
    numbers = itertools.count()

    def save() -> None:
        manager.save(checkpoint, step=next(numbers))

    def save_and_wait() -> None:
        save()
        manager.wait()

    def check() -> list[float]:
        save_and_wait()
        before = [np.asarray(v) for v in variables]
        manager.restore_latest(checkpoint)
        return [float(all((a == np.asarray(v)).all() for a, v in zip(before, variables)))]

    def ready() -> None:
        manager.wait()
        jax.block_until_ready(step(*batch))

    return [
        Candidate("Phalanx: save returns", save, check, ready),
        Candidate("save and wait", save_and_wait, check, ready),
        Candidate("one training step", lambda: jax.block_until_ready(step(*batch)), lambda: [1.0]),
    ]


def _digits(replicas: int, guarded: bool = False) -> tuple[Any, Any]:
    from examples import digits

    trainer = digits.Trainer(px.Mirrored(jax.devices()[:replicas]))
    if guarded:
        with trainer.strategy.scope():
            trainer.optimizer = px.NonFiniteGuard(trainer.optimizer)
    learned, _ = digits.load()
    batch = next(iter(trainer.batches(learned)))
    trainer.train_step(batch)
    return trainer, batch


def _steps(trainer: Any, batch: Any, steps: int) -> Any:
    def run() -> Any:
        for _ in range(steps):
            loss = trainer.train_step(batch)
        return jax.block_until_ready(loss)

    return run


def _audit(replicas: int, steps: int) -> list[Candidate]:
    trainer, batch = _digits(replicas)
    auditor = px.Auditor(trainer.strategy, every=1)

    def audit() -> None:
        auditor.after_step()
        auditor.finish()

    def check() -> list[float]:
        return [float(px.audit(trainer.strategy).equal)]

    return [
        Candidate("Phalanx: one audit", audit, check),
        Candidate(f"{steps} training steps", _steps(trainer, batch, steps), lambda: [1.0]),
    ]


def _guard(replicas: int, steps: int) -> list[Candidate]:
    made = {name: _digits(replicas, guarded) for name, guarded in (("with a guard", True), ("without", False))}

    def check(trainer: Any) -> list[float]:
        return [float(jnp.sum(jnp.abs(v.value))) for v in trainer.network.variables]

    return [
        Candidate(f"Phalanx: {name}", _steps(trainer, batch, steps), functools.partial(check, trainer))
        for name, (trainer, batch) in made.items()
    ]
