"""The same program in eager code, in a traced function, and in replicas."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import phalanx as px

REPLICAS = 2


@functools.cache
def strategy() -> px.Mirrored:
    """The strategy of the replicas."""
    return px.Mirrored(jax.devices()[:REPLICAS])


everywhere = pytest.mark.parametrize("mode", ["eager", "function", "replicas", "equal_replicas"])
"""`replicas`: each has inputs of its own; `equal_replicas`: all have the same, and JAX knows."""


def results(mode: str, fn: Callable[..., Any], *inputs: Any) -> list[tuple[Any, Any]]:
    """(inputs, what `fn` gives for them) in this mode: one pair, or one for each replica."""
    if mode == "eager":
        return [(inputs, fn(*inputs))]
    if mode == "function":
        return [(inputs, px.function(fn)(*inputs))]
    if mode == "equal_replicas":
        given = [inputs] * REPLICAS
        outs = strategy().run(fn, args=inputs)
    else:
        given = [jax.tree.map(lambda x: _of_replica(r, x), inputs) for r in range(REPLICAS)]
        outs = strategy().run(fn, args=strategy().distribute_values_from_function(lambda c: given[c.replica_id]))
    return [(given[r], jax.tree.map(lambda x: _part(r, x), outs, is_leaf=_is_parted)) for r in range(REPLICAS)]


def _of_replica(replica: int, x: Any) -> Any:
    return x * jnp.asarray(1 + replica / 4, x.dtype) if jnp.issubdtype(x.dtype, jnp.inexact) else x


def _part(replica: int, x: Any) -> Any:
    return x.values[replica] if _is_parted(x) else x


def _is_parted(x: Any) -> bool:
    return isinstance(x, px.PerReplica)


Case = tuple[Callable[..., jax.Array], list[Any]]
"""A scalar function and the arrays to call it with."""


def tape_gradients(f: Callable[..., jax.Array], xs: list[Any]) -> list[Any]:
    """Gradients of `f` by a tape."""
    with px.GradientTape() as tape:
        tape.watch(xs)
        y = f(*xs)
    return tape.gradient(y, xs)


def check_gradients(mode: str, cases: dict[str, Case], rtol: float = 2e-5, atol: float = 1e-5) -> None:
    """A tape's gradients are those of `jax.grad`, for all cases in one program."""

    def by_tape(inputs: dict[str, list[Any]]) -> dict[str, Any]:
        return {name: tape_gradients(cases[name][0], xs) for name, xs in inputs.items()}

    @jax.jit
    def by_jax(inputs: dict[str, list[Any]]) -> dict[str, Any]:
        return {name: jax.grad(cases[name][0], argnums=tuple(range(len(xs))))(*xs) for name, xs in inputs.items()}

    for (inputs,), found in results(mode, by_tape, {name: xs for name, (_, xs) in cases.items()}):
        for name, expected in by_jax(inputs).items():
            for i, (gradient, reference) in enumerate(zip(found[name], expected)):
                assert gradient.dtype == reference.dtype, name
                np.testing.assert_allclose(
                    np.asarray(gradient, reference.dtype), reference, rtol, atol, err_msg=f"{name}, input {i}"
                )
