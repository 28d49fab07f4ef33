"""Tapes, variables and programs that read them; gradients that pass from replica to replica."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from modes import REPLICAS, everywhere, results, strategy

import phalanx as px
from phalanx.errors import TapeError

X = jnp.array([0.5, -1.25, 2.0])


@everywhere
def test_two_variables_that_hold_one_array(mode):
    a, b = px.Variable(X), px.Variable(X)

    def fn(x):
        shared = jnp.ones(3) * 2.0
        a.assign(shared)
        b.assign(shared)
        with px.GradientTape() as tape:
            tape.watch(shared)
            y = jnp.sum(a * b * b * x) + jnp.sum(shared)
        return tape.gradient(y, [a, b, shared])

    for (x,), (da, db, d_shared) in results(mode, fn, X):
        np.testing.assert_allclose(da, 4 * x)
        np.testing.assert_allclose(db, 8 * x)
        np.testing.assert_allclose(d_shared, jnp.ones(3))


def test_a_variable_is_not_the_array_that_was_assigned_to_it():
    w = px.Variable(X)
    w.assign(X)
    with px.GradientTape() as tape:
        y = jnp.sum(w * X)
        with px.GradientTape() as inner:
            z = jnp.sum(w * w.value * X)
    np.testing.assert_allclose(tape.gradient(y, w), X)
    np.testing.assert_allclose(inner.gradient(z, w), 2 * X * X)


@everywhere
def test_each_read_around_an_assignment_counts(mode):
    w = px.Variable(3.0)

    def fn(x):
        w.assign(3.0)
        with px.GradientTape() as tape:
            y = w * w
            w.assign(5.0)
            y = y * w * x
        return y, tape.gradient(y, w)

    for (x,), (y, gradient) in results(mode, fn, jnp.float32(2.0)):
        np.testing.assert_allclose(y, 45.0 * x)
        np.testing.assert_allclose(gradient, (2 * 3.0 * 5.0 + 9.0) * x)


@everywhere
def test_traced_functions_in_a_tape(mode):
    w, calls = px.Variable(X), px.Variable(0)

    @px.function
    def layer(h):
        calls.assign_add(1)
        return jnp.sin(h * w)

    def fn(x):
        with px.GradientTape() as outer:
            outer.watch(x)
            with px.GradientTape() as tape:
                tape.watch(x)
                y = jnp.sum(layer(layer(x)) * w)
            dx, dw = tape.gradient(y, [x, w])
            z = jnp.sum(dx * dx) + jnp.sum(dw)
        return {"first": (dx, dw), "second": outer.gradient(z, [x, w])}

    def first(x, w):
        return jax.grad(lambda x, w: jnp.sum(jnp.sin(jnp.sin(x * w) * w) * w), (0, 1))(x, w)

    def penalty(x, w):
        dx, dw = first(x, w)
        return jnp.sum(dx * dx) + jnp.sum(dw)

    for (x,), found in results(mode, fn, X + 0.5):
        np.testing.assert_allclose(jnp.stack(found["first"]), jnp.stack(first(x, X)), 1e-4, 1e-5)
        np.testing.assert_allclose(jnp.stack(found["second"]), jnp.stack(jax.grad(penalty, (0, 1))(x, X)), 1e-4, 1e-4)
    assert int(calls) == 2


@everywhere
def test_loops_and_branches_that_read_variables(mode):
    w, steps = px.Variable(X), px.Variable(0)

    def fn(x):
        def step(carry, row):
            steps.assign_add(1)
            return jnp.sin(carry * w) + row, jnp.sum(carry * w)

        with px.GradientTape() as tape:
            tape.watch(x)
            carry, sums = px.scan(step, x, jnp.stack([x, 2 * x]))
            y = px.cond(x[0] > 0, lambda: jnp.sum(carry * w), lambda: jnp.sum(w.value)) + jnp.sum(sums)
        return tape.gradient(y, [x, w])

    def plain(x, w):
        carry, total = x, 0.0
        for row in (x, 2 * x):
            carry, total = jnp.sin(carry * w) + row, total + jnp.sum(carry * w)
        return jnp.sum(carry * w) + total

    for (x,), (dx, dw) in results(mode, fn, X):
        expected = jax.grad(plain, (0, 1))(x, X)
        np.testing.assert_allclose(dx, expected[0], 1e-4, 1e-5)
        np.testing.assert_allclose(dw, expected[1], 1e-4, 1e-5)
    assert int(steps) == 2


@everywhere
def test_a_gradient_through_a_while_loop_of_variables_is_refused(mode):
    w = px.Variable(2.0)

    def fn(x):
        with px.GradientTape() as tape:
            y = px.while_loop(lambda v: jnp.abs(v) < 100.0, lambda v: v * w, x)
        return tape.gradient(y, w)

    with pytest.raises(TapeError, match=r"cannot be differentiated backwards.*px\.scan"):
        results(mode, fn, jnp.float32(1.5))


# ---- between replicas ----------------------------------------------------------------------------


def _in_replicas(fn):
    """Results of each replica; `fn` is given its number, from 1, as a float."""
    parts = strategy().run(lambda: fn(px.get_replica_context(), px.get_replica_context().replica_id + 1.0))
    return np.stack([np.asarray(p) for p in parts.values])


COLLECTIVES = {
    # What is computed from the reduced value differs between the replicas: all of it counts.
    "sum": (lambda context, h, r: context.all_reduce("sum", h) * r, lambda r: r * 3.0),
    "mean": (lambda context, h, r: context.all_reduce("mean", h) * r, lambda r: r * 1.5),
    "sum as the target": (lambda context, h, r: context.all_reduce("sum", h), lambda r: r * 2.0),
    "gather": (
        lambda context, h, r: context.all_gather(h[None]) @ jnp.array([r, 10.0 * r]),
        lambda r: r * 3.0 * {1.0: 1.0, 2.0: 10.0}[r],
    ),
    "broadcast": (lambda context, h, r: context.broadcast(h) * r, lambda r: 3.0 if r == 1 else 0.0),
    "sum of a sum": (lambda context, h, r: context.all_reduce("sum", jnp.sin(context.all_reduce("sum", h)) * r), None),
}


@pytest.mark.parametrize("source", ["variable", "array"])
@pytest.mark.parametrize("name", COLLECTIVES)
def test_a_replicas_value_counts_in_the_targets_of_all_replicas(name, source):
    collective, expected = COLLECTIVES[name]
    with strategy().scope():
        variable = px.Variable(2.0)

    def fn(context, r):
        w = variable if source == "variable" else jnp.float32(2.0)
        with px.GradientTape() as tape:
            tape.watch(w)
            y = collective(context, w * r, r)
        return tape.gradient(y, w)

    # The total over h = w * r: each of two replicas has the target sum_r sin(6) r.
    expected = expected or (lambda r: r * 2 * np.cos(6.0) * 3.0)
    np.testing.assert_allclose(_in_replicas(fn), [expected(r) for r in (1.0, 2.0)], 1e-5)


def test_equal_arrays_that_meet_different_data_have_local_gradients():
    """Through everything that keeps the types of what it was traced for."""

    @jax.custom_vjp
    def product(w, x):
        return w * x

    product.defvjp(lambda w, x: (w * x, (w, x)), lambda kept, ct: (ct * kept[1], ct * kept[0]))

    def loss(w, x):
        y = jnp.tanh(w) @ jnp.ones((3, 3)) + x
        y = y + jax.lax.scan(lambda c, v: (c * jnp.sum(w * v), None), x[0], w)[0]
        y = y + jax.checkpoint(lambda v: jnp.sin(v * w) + x)(w)
        y = y + jax.lax.cond(x[0] > 0, lambda v: v * w, lambda v: v, w)
        return jnp.sum(product(w, y) * product(w * w, x))

    def fn(context, r):
        w, x = jnp.array([0.3, -0.2, 0.5]), r * jnp.ones(3)
        with px.GradientTape() as tape:
            tape.watch(w)
            y = loss(w, x)
        return tape.gradient(y, w)

    expected = [jax.grad(loss)(jnp.array([0.3, -0.2, 0.5]), r * jnp.ones(3)) for r in range(1, REPLICAS + 1)]
    np.testing.assert_allclose(_in_replicas(fn), np.stack(expected), 1e-4, 1e-5)
