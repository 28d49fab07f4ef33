"""Time to trace a loss and its gradient: a tape in `px.function` against `jax.jit(jax.value_and_grad(...))`.

"warm" traces a fresh function when JAX has seen its operations before; "cold" forgets all caches first.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import phalanx as px
from benchmarks.harness import Candidate, Case
from benchmarks.models import LOSSES
from benchmarks.problems import Problem, mlp, transformer

REPLICAS = (1,)
UNIT = "ms"


def cases(replicas: int, quick: bool) -> Iterator[Case]:
    layers = 2 if quick else 12
    problems = (
        mlp("MLP 4 x 64", [64] * 5, 32),
        transformer(f"{layers}-layer transformer", layers, width=64, length=32, rows=2),
    )
    for problem in problems:
        for temperature, prepare in (("warm", None), ("cold", forget)):
            yield Case(f"{problem.name}, {temperature}", functools.partial(_candidates, problem, prepare))


def forget() -> None:
    """Drop every cached trace."""
    jax.clear_caches()


def _candidates(problem: Problem, prepare: Any) -> list[Candidate]:
    loss_fn = LOSSES[problem.kind]
    arrays, batch = jax.tree.map(jnp.asarray, (problem.parameters, problem.batch))
    variables = [px.Variable(a) for a in arrays]

    def function() -> Any:
        @px.function
        def loss_and_gradient(*batch: Any) -> Any:
            with px.GradientTape() as tape:
                loss = loss_fn(variables, *batch)
            return loss, tape.gradient(loss, variables)

        return loss_and_gradient

    def by_hand() -> Any:
        return jax.jit(lambda *args: jax.value_and_grad(loss_fn)(*args))

    return [
        Candidate(
            "Phalanx: tape in px.function",
            lambda: function().get_concrete_function(*batch),
            lambda: _numbers(*function()(*batch)),
            prepare,
        ),
        Candidate(
            "jax.jit(jax.value_and_grad)",
            lambda: by_hand().trace(arrays, *batch),
            lambda: _numbers(*by_hand()(arrays, *batch)),
            prepare,
        ),
    ]


def _numbers(loss: Any, grads: Sequence[Any]) -> list[float]:
    return [float(loss), *(float(np.abs(g).sum()) for g in grads)]
