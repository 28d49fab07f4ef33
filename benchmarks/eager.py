"""Forward and gradient of a small MLP in eager code: the tape against `jax.value_and_grad`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import phalanx as px
from benchmarks import peers
from benchmarks.harness import Candidate, Case, Contender
from benchmarks.models import mlp_loss
from benchmarks.problems import mlp_parameters, regression_batch

REPLICAS = (1,)
UNIT = "ms"


def cases(replicas: int, quick: bool) -> Iterator[Case]:
    yield Case("MLP 4 x 64, batch 32", lambda: _contenders([64] * 5, 32, quick))


def _contenders(sizes: list[int], rows: int, quick: bool) -> list[Contender]:
    arrays = [jnp.asarray(a) for a in mlp_parameters(sizes)]
    variables = [px.Variable(a) for a in arrays]
    x, y = map(jnp.asarray, regression_batch(rows, sizes[0]))

    def with_tape() -> Any:
        with px.GradientTape() as tape:
            loss = mlp_loss(variables, x, y)
        return jax.block_until_ready((loss, tape.gradient(loss, variables)))

    def with_value_and_grad() -> Any:
        return jax.block_until_ready(jax.value_and_grad(mlp_loss)(arrays, x, y))

    return [
        Candidate("Phalanx: GradientTape", with_tape, lambda: _numbers(*with_tape())),
        Candidate("jax.value_and_grad", with_value_and_grad, lambda: _numbers(*with_value_and_grad())),
        *peers.found({"TensorFlow": "tensorflow", "PyTorch": "torch"}, "eager", {"sizes": sizes, "rows": rows}, quick),
    ]


def _numbers(loss: Any, grads: list[Any]) -> list[float]:
    return [float(loss), *(float(np.abs(g).sum()) for g in grads)]
