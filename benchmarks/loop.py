"""A hundred training steps on the device in one call: `px.scan` against `jax.lax.scan`."""

from __future__ import annotations

import functools
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

REPLICAS = (1,)
UNIT = "ms"


def cases(replicas: int, quick: bool) -> Iterator[Case]:
    yield Case("100 steps, MLP 4 x 64, batch 32, Adam", functools.partial(_candidates, [64] * 5, 32, 100))


def _candidates(sizes: list[int], rows: int, steps: int) -> list[Candidate]:
    tx = optax.adam(1e-4)
    parameters = mlp_parameters(sizes)
    batches = [np.stack([a] * steps) for a in regression_batch(rows, sizes[0])]
    xs, ys = map(jnp.asarray, batches)
    return [
        Candidate("Phalanx: px.scan", *_with_px(tx, parameters, rows, xs, ys)),
        Candidate("jax.lax.scan", *_with_lax(tx, parameters, rows, xs, ys)),
    ]


def _with_px(tx: Any, parameters: Any, rows: int, xs: Any, ys: Any) -> Any:
    variables = [px.Variable(p) for p in parameters]
    optimizer = px.Optimizer(tx)

    def train_step(_: Any, batch: Any) -> Any:
        with px.GradientTape() as tape:
            loss = mlp_loss(variables, *batch) / rows
        optimizer.apply_gradients(zip(tape.gradient(loss, variables), variables))
        return None, loss

    @px.function
    def many(xs: Any, ys: Any) -> Any:
        return px.scan(train_step, None, (xs, ys))[1]

    def run() -> Any:
        return many(xs, ys).block_until_ready()

    return run, run


def _with_lax(tx: Any, parameters: Any, rows: int, xs: Any, ys: Any) -> Any:
    def train_step(carry: Any, batch: Any) -> Any:
        p, o = carry
        loss, grads = jax.value_and_grad(lambda p: mlp_loss(p, *batch) / rows)(p)
        updates, o = tx.update(grads, o, p)
        return (optax.apply_updates(p, updates), o), loss

    many = jax.jit(lambda carry, xs, ys: jax.lax.scan(train_step, carry, (xs, ys)), donate_argnums=0)
    arrays = [jnp.asarray(p) for p in parameters]
    carry = arrays, tx.init(arrays)

    def run() -> Any:
        nonlocal carry
        carry, losses = many(carry, xs, ys)
        return losses.block_until_ready()

    return run, run
