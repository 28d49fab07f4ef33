"""Functions with derivatives of their own, under a tape, in a replica and in eager code."""

from __future__ import annotations

import concurrent.futures
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


# ---- jitted functions with a rule, as jax.nn.relu is one ----


def rows_and_total(calls):
    """A jitted function of two results with a rule of its own, which notes its calls."""

    @jax.custom_jvp
    @jax.jit
    def fun(x, y):
        return {"rows": x * y, "total": (x * y).sum()}

    @fun.defjvp
    def rule(primals, tangents):
        calls.append("rule")
        (x, y), (dx, dy) = primals, tangents
        change = dx * y + x * dy
        return fun(x, y), {"rows": 3 * change, "total": change.sum()}

    return fun


def test_a_jitted_function_with_a_rule_is_differentiated_once_for_all_calls():
    calls = []
    fun, x = rows_and_total(calls), px.Variable([1.0, 2.0])
    for factor in (1.0, 2.0, 3.0):
        with px.GradientTape() as tape:
            out = fun(x.value, jnp.float32(factor))
            loss = out["rows"].sum() + out["total"]
        np.testing.assert_allclose(tape.gradient(loss, x), [4 * factor] * 2)
        assert len(set(calls)) == 1
    before = len(calls)
    with px.GradientTape() as tape:
        loss = fun(x.value, jnp.float32(4.0))["total"]
    np.testing.assert_allclose(tape.gradient(loss, x), [4.0] * 2)
    assert len(calls) == before


def test_a_function_with_a_rule_that_is_not_jitted_sees_what_changes_in_python():
    factor = 1.0

    @jax.custom_jvp
    def scaled(x):
        return factor * x

    scaled.defjvp(lambda primals, tangents: (scaled(*primals), factor * tangents[0]))
    x = px.Variable(2.0)
    for factor in (1.0, 5.0):
        with px.GradientTape() as tape:
            loss = scaled(x.value)
        assert (float(loss), float(tape.gradient(loss, x))) == (2 * factor, factor)


def test_a_jitted_function_with_a_rule_may_close_over_what_is_new_in_each_call():
    def loss_of(x, factor):
        @jax.custom_jvp
        @jax.jit
        def scaled(x):
            return factor * x

        scaled.defjvp(lambda primals, tangents: (scaled(*primals), factor * tangents[0]))
        return scaled(x)

    x = px.Variable(2.0)
    for factor in (1.0, 5.0):
        with px.GradientTape() as tape:
            loss = loss_of(x.value, factor)
        assert (float(loss), float(tape.gradient(loss, x))) == (2 * factor, factor)


def test_a_jitted_function_with_a_rule_takes_calls_of_all_kinds(strategy):
    x = px.Variable([-1.0, 0.0, 2.0])

    def gradients():
        with px.GradientTape(persistent=True) as outer:
            with px.GradientTape() as inner:
                loss = (jax.nn.relu(x.value) ** 3).sum() + jax.nn.relu(x.value[:2]).sum()
            first = inner.gradient(loss, x)
        return first, outer.gradient(first, x)

    expected = [0.0, 0.0, 12.0], [0.0, 0.0, 12.0]
    on_replicas = px.function(lambda: strategy.reduce("mean", strategy.run(gradients)))
    for found in (gradients(), px.function(gradients)(), on_replicas()):
        for value, want in zip(found, expected):
            np.testing.assert_allclose(value, want)


def test_threads_may_share_a_jitted_function_with_a_rule():
    fun = rows_and_total([])

    def work(n):
        x = px.Variable(jnp.ones(n))
        for _ in range(10):
            with px.GradientTape() as tape:
                loss = fun(x.value, jnp.float32(2.0))["total"]
            np.testing.assert_allclose(tape.gradient(loss, x), [2.0] * n)

    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        list(pool.map(work, range(1, 9)))
