"""`ForwardAccumulator`: derivatives along one direction are those of `jax.jvp`."""

from __future__ import annotations

import gc
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from modes import everywhere, results, strategy

import phalanx as px
from phalanx.errors import ArgumentError, ArgumentTypeError, AssignmentError, TapeError

X = jnp.array([0.5, -1.25, 2.0])
V = jnp.array([1.0, 0.5, -2.0])


@jax.custom_jvp
def thrice_forwards(x):
    return x


thrice_forwards.defjvp(lambda primals, tangents: (primals[0], 3 * tangents[0]))


@jax.jit
def swapped(a, b):
    return b, a


FUNCTIONS = {
    "tanh": lambda x: jnp.tanh(x) * x,
    "softmax": lambda x: jax.nn.softmax(x) * x,
    "matmul": lambda x: jnp.ones((3, 3)) @ x + x[jnp.array([0, 0, 2])],
    "custom_jvp": lambda x: thrice_forwards(x * x),
    "identities": lambda x: swapped(x, 2 * x)[0] * swapped(x, 2 * x)[1] * jax.lax.stop_gradient(x),
    "integers": lambda x: x * jnp.arange(3) + jnp.argmax(x),
    "complex": lambda x: jnp.abs(jnp.exp(1j * x) * x + 1),
    "scan": lambda x: jax.lax.scan(lambda c, v: (jnp.sin(c * v), c * x), x[0], x)[1].sum(0),
    "while_loop": lambda x: jax.lax.while_loop(lambda v: jnp.abs(jnp.sum(v)) < 20, lambda v: v * 2.0, x),
    "fori_loop": lambda x: jax.lax.fori_loop(0, jnp.argmax(x), lambda i, v: v * x, x),
    "cond": lambda x: jax.lax.cond(x[0] > 0, jnp.sin, jnp.cos, x),
    "gradient": jax.grad(lambda x: jnp.sum(x**3)),
    "jit that closes over": lambda x: jax.jit(lambda y: y * x)(jnp.ones(3)),
}


@everywhere
def test_derivatives_along_a_direction(mode):
    def by_accumulator(x, v):
        with px.ForwardAccumulator(x, v) as accumulator:
            ys = {name: f(x) for name, f in FUNCTIONS.items()}
        return accumulator.jvp(ys)

    for (x, v), found in results(mode, by_accumulator, X, V):
        for name, f in FUNCTIONS.items():
            np.testing.assert_allclose(found[name], jax.jvp(f, (x,), (v,))[1], 1e-4, 1e-5, err_msg=name)


@everywhere
def test_variables_in_structures_and_programs(mode):
    w, b, other = px.Variable(X), px.Variable(1.0), px.Variable(X)

    @px.function
    def layer(x):
        return px.while_loop(lambda y: jnp.abs(jnp.sum(y)) < 20, lambda y: y * 2 + b, jnp.tanh(w * x))

    def fn(x, v):
        directions = {"w": v, "rest": [jnp.float32(2.0), None]}
        with px.ForwardAccumulator({"w": w, "rest": [b, None]}, directions) as accumulator:
            y = layer(x) * w + other
            z = other * 2.0
        return accumulator.jvp({"y": y, "w": w}), accumulator.jvp(z), accumulator.jvp(z, unconnected_gradients="zero")

    def plain(x, w, b):
        return jax.lax.while_loop(lambda y: jnp.abs(jnp.sum(y)) < 20, lambda y: y * 2 + b, jnp.tanh(w * x)) * w + X

    for (x, v), (found, unconnected, zero) in results(mode, fn, X, V):
        expected = jax.jvp(lambda w, b: plain(x, w, b), (X, jnp.float32(1.0)), (v, jnp.float32(2.0)))[1]
        np.testing.assert_allclose(found["y"], expected, 1e-4, 1e-5)
        np.testing.assert_allclose(found["w"], v)
        assert unconnected is None
        np.testing.assert_array_equal(zero, jnp.zeros(3))


def test_two_variables_that_hold_one_array_have_their_own_directions():
    a, b = px.Variable(X), px.Variable(X)
    shared = jnp.ones(3) * 2.0
    a.assign(shared), b.assign(shared)
    with px.ForwardAccumulator([a, b, shared], [V, 10 * V, 100 * V]) as accumulator:
        y = a + a * b + shared
    np.testing.assert_allclose(accumulator.jvp(y), V + 2 * V + 20 * V + 100 * V)


@everywhere
@pytest.mark.parametrize("order", ["forward over reverse", "reverse over forward"])
def test_hessian_times_vector(mode, order):
    def f(x):
        return jnp.sum(jnp.sin(x) * x**2)

    def forward_over_reverse(x, v):
        with px.ForwardAccumulator(x, v) as accumulator:
            with px.GradientTape() as tape:
                tape.watch(x)
                y = f(x)
            gradient = tape.gradient(y, x)
        return accumulator.jvp(gradient)

    def reverse_over_forward(x, v):
        with px.GradientTape() as tape:
            tape.watch(x)
            with px.ForwardAccumulator(x, v) as accumulator:
                y = f(x)
            derivative = accumulator.jvp(y)
        return tape.gradient(derivative, x)

    chosen = forward_over_reverse if order == "forward over reverse" else reverse_over_forward
    for (x, v), found in results(mode, chosen, X, V):
        np.testing.assert_allclose(found, jax.jvp(jax.grad(f), (x,), (v,))[1], 1e-4, 1e-5)


def test_directions_may_differ_between_replicas_where_primals_do_not():
    def fn(v):
        w = jnp.array([1.0, 2.0])
        with px.ForwardAccumulator(w, v * jnp.ones(2)) as accumulator:
            y = jax.lax.scan(lambda c, row: (c * row, None), jnp.float32(1.0), w)[0]
            total = px.get_replica_context().all_reduce("sum", y)
        return accumulator.jvp(y), accumulator.jvp(total)

    v = strategy().distribute_values_from_function(lambda context: jnp.float32(context.replica_id + 1))
    own, total = strategy().run(fn, args=(v,))
    assert [float(x) for x in own.values] == [3.0, 6.0]
    assert [float(x) for x in total.values] == [9.0, 9.0]


@jax.custom_vjp
def backwards_only(x):
    return x * 2


backwards_only.defvjp(lambda x: (x * 2, None), lambda _, ct: (2 * ct,))


def test_what_has_no_forward_mode_is_an_error_only_where_it_is_asked_for():
    with px.ForwardAccumulator(X, V) as accumulator:
        y = jnp.sum(backwards_only(X) * 3.0)
        z = jnp.sum(X * X)
    np.testing.assert_allclose(accumulator.jvp(z), jnp.sum(2 * X * V), 1e-6)
    with pytest.raises(TapeError, match=r"cannot be differentiated forwards.*custom_vjp.*px\.GradientTape"):
        accumulator.jvp([z, y])


def test_values_go_with_the_accumulator():
    gc.collect()
    gc.disable()
    try:
        with px.ForwardAccumulator(X, V) as accumulator:
            hidden = jnp.exp(X)
            y = jnp.sum(hidden)
            gone, kept = weakref.ref(hidden), weakref.ref(accumulator.jvp(hidden))
            del hidden
            assert gone() is None and kept() is None
        kept = weakref.ref(accumulator.jvp(y))
        del accumulator
        assert kept() is None
    finally:
        gc.enable()


MISUSES = {
    "primals": (lambda a: px.ForwardAccumulator("x", X), ArgumentTypeError, "primals must be .*str 'x'"),
    "numpy primals": (lambda a: px.ForwardAccumulator(np.ones(3), X), ArgumentTypeError, "primals must be .*ndarray"),
    "integer primals": (lambda a: px.ForwardAccumulator(jnp.arange(3), X), ArgumentError, "primals of dtype int32"),
    "no primals": (lambda a: px.ForwardAccumulator([], []), ArgumentError, "primals is empty"),
    "structure": (lambda a: px.ForwardAccumulator([X, X], [X]), ArgumentError, "tangents must have the structure"),
    "no tangents": (lambda a: px.ForwardAccumulator(X, None), ArgumentTypeError, "tangents.*None"),
    "string tangents": (lambda a: px.ForwardAccumulator(X, "up"), ArgumentTypeError, "tangents.*'up'"),
    "shape of tangents": (lambda a: px.ForwardAccumulator(X, jnp.ones(2)), ArgumentError, r"tangents.*\(3,\).*\(2,\)"),
    "complex tangents": (lambda a: px.ForwardAccumulator(X, 1j * X), AssignmentError, "float32.*complex64"),
    "string target": (lambda a: a.jvp("y"), ArgumentTypeError, "target must be .*str 'y'"),
    "number as target": (lambda a: a.jvp([1.0]), ArgumentTypeError, "target must be .*float"),
    "unconnected_gradients": (lambda a: a.jvp(X, "zeros"), ArgumentError, "unconnected_gradients.*'zeros'"),
    "entered twice": (lambda a: a.__enter__(), TapeError, "already recording"),
}


@pytest.mark.parametrize("name", MISUSES)
def test_misuse_is_an_error_that_names_the_argument(name):
    misuse, error, message = MISUSES[name]
    with px.ForwardAccumulator(X, V) as accumulator, pytest.raises(error, match=message):
        misuse(accumulator)


def test_numbers_and_numpy_arrays_are_directions_too():
    w = px.Variable(2.0)
    with px.ForwardAccumulator([w, X], [1, np.ones(3)]) as accumulator:
        y = w * X
    np.testing.assert_allclose(accumulator.jvp(y), X + 2.0)
