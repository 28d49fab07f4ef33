"""Functions with derivatives of their own, under a tape in a replica."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import phalanx as px


@jax.custom_vjp
def scaled(x, c):
    return x * c


scaled.defvjp(lambda x, c: (x * c, (x, c)), lambda saved, upstream: (upstream * saved[1], upstream * saved[0]))


@functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
def named(x, k, c):
    return {"y": x * c * k}


named.defvjp(lambda x, k, c: ({"y": x * c * k}, c), lambda k, c, upstream: (upstream["y"] * c * k, None))


@jax.custom_vjp
def taken(x, rows):
    return x[rows]


taken.defvjp(
    lambda x, rows: (x[rows], (x, rows)),
    lambda saved, upstream: (jnp.zeros_like(saved[0]).at[saved[1]].add(upstream), None),
)

PROGRAMS = {
    "a constant beside the variable": (lambda x: scaled(x, jnp.full(2, 3.0)).sum(), 3.0),
    "inside jit": (jax.jit(lambda x: scaled(x, jnp.full(2, 3.0)).sum()), 3.0),
    "static arguments and no gradient for one": (lambda x: named(x, 2.0, jnp.full(2, 3.0))["y"].sum(), 6.0),
    "integers among the arguments": (lambda x: taken(x, jnp.array([0, 1])).sum(), 1.0),
    "custom_jvp": (lambda x: jax.nn.relu(x).sum(), 1.0),
}


@pytest.mark.parametrize("program", PROGRAMS)
def test_gradient_of_a_variable(program, strategy):
    function, expected = PROGRAMS[program]
    with strategy.scope():
        w = px.Variable([1.0, 2.0])

    def fn():
        with px.GradientTape() as tape:
            y = function(w.value)
        return px.get_replica_context().all_reduce("mean", tape.gradient(y, w))

    np.testing.assert_allclose(strategy.run(fn), [expected, expected])


@pytest.mark.parametrize("program", PROGRAMS)
def test_gradient_of_a_watched_array_that_is_equal_on_all_replicas(program, strategy):
    function, expected = PROGRAMS[program]

    def fn(x):
        with px.GradientTape() as tape:
            tape.watch(x)
            y = function(x)
        return y, px.get_replica_context().all_reduce("mean", tape.gradient(y, x))

    y, gradient = strategy.run(fn, args=(jnp.array([1.0, 2.0]),))
    assert isinstance(y, jax.Array)  # still known to be equal
    np.testing.assert_allclose(gradient, [expected, expected])


def test_wrong_shape_of_a_rule_is_still_found(strategy):
    @jax.custom_vjp
    def wrong(x):
        return x

    wrong.defvjp(lambda x: (x, None), lambda _, upstream: (upstream.sum(),))
    with strategy.scope():
        w = px.Variable([1.0, 2.0])

    def fn():
        with px.GradientTape() as tape:
            y = wrong(w.value).sum()
        return tape.gradient(y, w)

    with pytest.raises(px.errors.TapeError, match=r"of shape \(\) for an argument of shape \(2,\)"):
        strategy.run(fn)
