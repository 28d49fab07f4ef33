"""Derivatives of derivatives: nested tapes, a persistent tape in its own block, and jacobians."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from modes import everywhere, results, tape_gradients

import phalanx as px

X = jnp.array([0.5, -1.25, 2.0])
M = jnp.array([[2.0, 0.5, -0.3], [0.1, 1.5, 0.2], [0.4, -0.6, 1.2]])


@jax.custom_vjp
def twice_backwards(x):
    return x


twice_backwards.defvjp(lambda x: (x, None), lambda _, ct: (2 * ct,))


def scan_sum(x, w):
    carry, rows = jax.lax.scan(lambda c, row: (jnp.sin(c * row + w[0]), c * w), x[0], x)
    return carry + jnp.sum(rows)


@everywhere
def test_second_derivatives(mode):
    functions = {
        "softmax": (lambda x: jnp.sum(jax.nn.softmax(x) * x), X),
        "scan": (lambda x: scan_sum(x, x), X),
        "solve": (lambda a: jnp.sum(jnp.linalg.solve(a, X)), M),
        "checkpoint": (lambda x: jnp.sum(jax.checkpoint(lambda y: jnp.sin(y) * y)(x)), X),
    }

    def squared_gradient(f):
        return lambda x: jnp.sum(tape_gradients(f, [x])[0] ** 2)

    def by_tape(inputs):
        return {name: tape_gradients(squared_gradient(functions[name][0]), [x])[0] for name, x in inputs.items()}

    @jax.jit
    def by_jax(inputs):
        return {
            name: jax.grad(lambda x: jnp.sum(jax.grad(functions[name][0])(x) ** 2))(x) for name, x in inputs.items()
        }

    for (inputs,), found in results(mode, by_tape, {name: x for name, (_, x) in functions.items()}):
        for name, expected in by_jax(inputs).items():
            np.testing.assert_allclose(found[name], expected, 2e-4, 1e-4, err_msg=name)


@everywhere
def test_nested_tapes_to_the_third_derivative(mode):
    def third(x):
        with px.GradientTape() as t1:
            t1.watch(x)
            with px.GradientTape() as t2:
                t2.watch(x)
                with px.GradientTape() as t3:
                    t3.watch(x)
                    y = jnp.sin(x) * x**3
                first = t3.gradient(y, x)
            second = t2.gradient(first, x)
        return t1.gradient(second, x)

    for (x,), found in results(mode, third, jnp.float32(0.7)):
        np.testing.assert_allclose(found, jax.grad(jax.grad(jax.grad(lambda x: jnp.sin(x) * x**3)))(x), 1e-4)


@everywhere
def test_a_persistent_tape_differentiates_gradients_taken_in_its_own_block(mode):
    functions = {
        "power": lambda x: jnp.sum(x**3),
        "jit": lambda x: jnp.sum(jax.jit(lambda x: jnp.tanh(x) * x)(x)),
        "custom_vjp": lambda x: jnp.sum(twice_backwards(x**3)),
    }

    def second(f, x):
        with px.GradientTape(persistent=True) as tape:
            tape.watch(x)
            y = f(x)
            slope = tape.gradient(y, x)
        return tape.gradient(slope, x)

    for (x,), found in results(mode, lambda x: {name: second(f, x) for name, f in functions.items()}, X):
        for name, f in functions.items():
            expected = jax.grad(lambda x: jnp.sum(jax.grad(f)(x)))(x)
            np.testing.assert_allclose(found[name], expected, 1e-4, 1e-5, err_msg=name)


@everywhere
def test_jacobians(mode):
    def f(x):
        return jnp.sin(x[:2]) * jnp.sum(x)

    def by_tape(x, rows):
        with px.GradientTape(persistent=True) as tape:
            tape.watch([x, rows])
            y = f(x)
            per_row = jax.nn.softmax(rows @ M) * jnp.sum(rows, 1, keepdims=True)
        return tape.jacobian(y, {"x": x, "other": rows}), tape.batch_jacobian(per_row, rows)

    for (x, rows), (jacobian, batch) in results(mode, by_tape, X, M[:2]):
        assert jacobian["other"] is None
        np.testing.assert_allclose(jacobian["x"], jax.jacobian(f)(x), 1e-5, 1e-6)
        expected = jax.vmap(jax.jacobian(lambda row: jax.nn.softmax(row @ M) * jnp.sum(row)))(rows)
        np.testing.assert_allclose(batch, expected, 1e-4, 1e-5)
