"""What one call costs on the host: a function that writes 200 small variables, against raw `jax.jit`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import phalanx as px
from benchmarks.harness import Candidate, Case

REPLICAS = (1,)
UNIT = "us"


def cases(replicas: int, quick: bool) -> Iterator[Case]:
    for n in (1, 200):
        yield Case(f"writing {n} variable{'s' * (n > 1)} of 4 x 4", lambda n=n: _candidates(n))  # type: ignore[misc]


def _candidates(n: int) -> list[Candidate]:
    start = [np.full((4, 4), i, np.float32) for i in range(n)]
    variables = [px.Variable(a) for a in start]
    arrays = [jnp.asarray(a) for a in start]
    one = jnp.float32(1)

    @px.function
    def add(x: Any) -> Any:
        for v in variables:
            v.assign_add(jnp.broadcast_to(x, v.shape))
        return 2 * x

    def with_function() -> None:
        add(one).block_until_ready()

    add_by_hand = jax.jit(lambda arrays, x: ([a + x for a in arrays], 2 * x), donate_argnums=0)

    def with_jit() -> None:
        nonlocal arrays
        arrays, doubled = add_by_hand(arrays, one)
        doubled.block_until_ready()

    def check_function() -> Any:
        with_function()
        return [v.numpy().sum() for v in variables]

    def check_jit() -> Any:
        with_jit()
        return [np.asarray(a).sum() for a in arrays]

    return [Candidate("Phalanx: px.function", with_function, check_function), Candidate("jax.jit", with_jit, check_jit)]
