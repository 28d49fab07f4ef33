"""Gradients that tapes and JAX's own transformations take in a replica, of one another."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import phalanx as px

WEIGHTS = [1.0, 2.0]


def _inputs(strategy):
    return strategy.distribute_values_from_function(lambda context: np.float32([context.replica_id + 1, 1.0]))


def _penalty(w, x):
    """Squared norm of the gradient of sum((w * x) ** 3)."""
    return (jax.grad(lambda w: ((w * x) ** 3).sum())(w) ** 2).sum()


def _expected(strategy, argument):
    """Derivatives of the penalty, one for each replica."""
    derivative = jax.grad(_penalty, argument)
    return [derivative(jnp.array(WEIGHTS), jnp.array(np.asarray(x))) for x in _inputs(strategy).values]


def _check(strategy, parts, argument):
    np.testing.assert_allclose(np.stack(parts.values), np.stack(_expected(strategy, argument)), 1e-5)


def _squared_gradient(source, w, x):
    with px.GradientTape() as tape:
        tape.watch(source)
        y = ((w * x) ** 3).sum()
    return (tape.gradient(y, source) ** 2).sum()


def test_tape_around_the_gradient_of_a_watched_array(strategy):
    def fn(x):
        w = jnp.array(WEIGHTS)
        with px.GradientTape(persistent=True) as tape:
            tape.watch([w, x])
            z = _squared_gradient(w, w, x)
        return tape.gradient(z, [w, x])

    dw, dx = strategy.run(fn, args=(_inputs(strategy),))
    _check(strategy, dw, 0)
    _check(strategy, dx, 1)


def test_jax_grad_around_the_gradient_of_a_variable(strategy):
    with strategy.scope():
        w = px.Variable(WEIGHTS)
    dx = strategy.run(jax.grad(lambda x: _squared_gradient(w, w, x)), args=(_inputs(strategy),))
    _check(strategy, dx, 1)


def test_tape_around_run_around_the_gradient_of_a_variable(strategy):
    with strategy.scope():
        w = px.Variable(WEIGHTS)
    with px.GradientTape() as tape:
        parts = strategy.run(lambda x: _squared_gradient(w, w, x), args=(_inputs(strategy),))
        total = strategy.reduce("sum", parts)
    np.testing.assert_allclose(tape.gradient(total, w), sum(_expected(strategy, 0)), 1e-5)


def test_jax_grad_around_the_gradient_of_an_array_that_is_equal_on_all_replicas_is_refused(strategy):
    """JAX would add up over the replicas what stands for one of them, also after a tape took this derivative."""

    def nested(x):
        w = jnp.array(WEIGHTS)
        with px.GradientTape() as tape:
            tape.watch(x)
            z = _squared_gradient(w, w, x)
        return tape.gradient(z, x)

    strategy.run(nested, args=(_inputs(strategy),))
    with pytest.raises(px.errors.TapeError, match=r"second px\.GradientTape"):
        strategy.run(jax.grad(lambda x: _squared_gradient(w := jnp.array(WEIGHTS), w, x)), args=(_inputs(strategy),))
