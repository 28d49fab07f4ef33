"""Tapes on what is hard to differentiate: everywhere the gradients are those of `jax.grad`."""

from __future__ import annotations

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec
from modes import check_gradients, everywhere, results, strategy, tape_gradients

import phalanx as px
from phalanx.errors import TapeError

X = jnp.array([0.5, -1.25, 2.0])
M = jnp.array([[2.0, 0.5, -0.3], [0.1, 1.5, 0.2], [0.4, -0.6, 1.2]])


# ---- operations ----------------------------------------------------------------------------------


@jax.jit
def swapped(a, b):
    return b, a, a, a * b


@jax.custom_vjp
def twice_backwards(x):
    return x


twice_backwards.defvjp(lambda x: (x, None), lambda _, ct: (2 * ct,))


@jax.custom_jvp
def thrice_backwards(x):
    return x


thrice_backwards.defjvp(lambda primals, tangents: (primals[0], 3 * tangents[0]))


@everywhere
def test_outputs_that_are_inputs(mode):
    check_gradients(
        mode,
        {
            "stop_gradient": (lambda x: jnp.sum(jax.lax.stop_gradient(x * x) * x), [X]),
            "stop_gradient of the input": (lambda x: jnp.sum(jax.lax.stop_gradient(x) * x), [X]),
            "forwarded by jit": (
                lambda x, y: jnp.sum(swapped(x, y)[0] * swapped(2 * y, x)[1] + swapped(x, y)[2]),
                [X, X + 1],
            ),
            "identity with its own vjp": (lambda x: jnp.sum(twice_backwards(x) * x), [X]),
            "identity with its own jvp": (lambda x: jnp.sum(thrice_backwards(thrice_backwards(x)) * x), [X]),
            "same shape": (lambda x: jnp.sum(jnp.asarray(x).reshape(3).astype(x.dtype) * x), [X]),
            "barrier": (lambda x: jnp.sum(jax.lax.optimization_barrier(x) * x), [X]),
        },
    )


@functools.partial(jax.custom_jvp, nondiff_argnums=(1,))
def scaled_exp(x, scale):
    return scale * jnp.exp(x)


scaled_exp.defjvp(lambda scale, primals, tangents: (scaled_exp(primals[0], scale), 0.5 * tangents[0]))


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 4))
def power(name, x, n, mask, scale):
    return scale * x["base"] ** n


power.defvjp(
    lambda name, x, n, mask, scale: (power(name, x, n, mask, scale), (x, n)),
    lambda name, scale, kept, ct: ({"base": 7.0 * ct * kept[0]["base"] * kept[1]}, None, None),
)


@jax.custom_vjp
def weighted(x, scale):
    return x * scale


# The rule gives what varies between replicas for `scale` too, which is the same on all.
weighted.defvjp(lambda x, scale: (x * scale, (x, scale)), lambda kept, ct: (ct * kept[1], jnp.sum(ct * kept[0])))


@everywhere
def test_rules_of_custom_jvp_and_custom_vjp(mode):
    nn = jax.nn
    activations = nn.relu, nn.gelu, nn.silu, nn.softmax, nn.log_softmax, nn.logsumexp
    cases = {fn.__name__: (lambda x, fn=fn: jnp.sum(fn(x) * x), [X]) for fn in activations}
    cases |= {
        "custom_jvp": (lambda x: jnp.sum(scaled_exp(x, 2.0)), [X]),
        "custom_vjp": (lambda x: jnp.sum(power("p", {"base": x}, 3, None, 2.0)), [X]),
        "of a constant": (lambda x: jnp.sum(weighted(x, jnp.float32(3.0))), [X]),
        "in jit": (lambda x: jnp.sum(jax.jit(lambda x: weighted(jnp.sin(x), 3.0) + thrice_backwards(x))(x)), [X]),
        "in scan": (lambda x: jax.lax.scan(lambda c, v: (weighted(c, v), None), x[0], x)[0], [X]),
    }
    check_gradients(mode, cases)


def scan_sum(x, w):
    def step(carry, row):
        carry = jnp.sin(carry * row + w[0])
        return carry, carry * w

    carry, rows = jax.lax.scan(step, x[0], x, reverse=True)
    return carry + jnp.sum(rows)


@everywhere
def test_loops_and_branches(mode):
    check_gradients(
        mode,
        {
            "scan": (scan_sum, [X, X + 1]),
            "cond": (lambda x: jax.lax.cond(x[0] > 0, lambda y: jnp.sum(y * x), jnp.sum, x), [X]),
            "switch": (lambda x: jax.lax.switch(1, [jnp.sum, lambda y: jnp.sum(y**2 * x)], x), [X]),
            "fori_loop": (lambda x: jnp.sum(jax.lax.fori_loop(0, 3, lambda i, c: c * x, x)), [X]),
            "map": (lambda x, w: jnp.sum(jax.lax.map(lambda row: row * jnp.sum(w), x)), [X, M]),
            "associative_scan": (lambda x: jnp.sum(jax.lax.associative_scan(jnp.multiply, x)), [X]),
            "checkpoint": (lambda x, w: jnp.sum(jax.checkpoint(lambda y: jnp.sin(y * w))(x)), [X, X + 1]),
            "checkpoint with a policy": (
                lambda x: jnp.sum(jax.checkpoint(jnp.exp, policy=jax.checkpoint_policies.nothing_saveable)(x)),
                [X],
            ),
        },
    )


@functools.partial(jax.jit, static_argnames="n")
def static_power(x, n):
    return x**n if n > 2 else x


@everywhere
def test_transformations_inside_the_tape(mode):
    check_gradients(
        mode,
        {
            "vmap": (lambda x, w: jnp.sum(jax.vmap(lambda y: y * jnp.sum(w))(x)), [X, M]),
            "grad": (lambda x: jnp.sum(jax.grad(lambda y: jnp.sum(y**3))(x) * x), [X]),
            "jvp": (lambda x, w: jax.jvp(lambda y: jnp.sum(y**3), (x,), (w,))[1], [X, X + 1]),
            "jit with a static argument": (lambda x: jnp.sum(static_power(x, n=3)), [X]),
            "jit that closes over": (lambda x, w: jnp.sum(jax.jit(lambda y: y * w)(x)), [X, X + 1]),
            "gradient of a solution": (
                lambda m, b: jnp.sum(jax.grad(lambda a: jnp.sum(jnp.linalg.solve(a, b)))(m)),
                [M, X],
            ),
        },
    )


@everywhere
def test_arrays_of_all_kinds(mode):
    picture, kernel = jnp.arange(16.0).reshape(1, 1, 4, 4) / 8, jnp.arange(4.0).reshape(1, 1, 2, 2)
    rows = jnp.array([2, 0, 0])
    check_gradients(
        mode,
        {
            "conv": (lambda x, k: jnp.sum(jax.lax.conv_general_dilated(x, k, (1, 1), "SAME") ** 2), [picture, kernel]),
            "gather": (lambda x: jnp.sum(x[rows] * jnp.arange(3.0)) * x[1] + jnp.sum(x[1:]), [X]),
            "scatter": (lambda x: jnp.sum(jnp.zeros(4).at[rows].add(x).at[3].set(x[0]) ** 2), [X]),
            "sort": (lambda x: jnp.sum(jnp.sort(x) * jnp.arange(3.0)), [X]),
            "cumsum": (lambda x: jnp.sum(jnp.cumsum(x) ** 2), [X]),
            "max": (lambda x: jnp.max(x) * jnp.sum(x), [X]),
            "where": (lambda x: jnp.sum(jnp.where(x > 0, x * x, 0.0)), [X]),
            "complex inside": (lambda x: jnp.sum(jnp.abs(jnp.exp(1j * x) * x + 1)), [X]),
            "complex": (lambda z: jnp.sum(jnp.abs(z**2)), [X + 1j * X[::-1]]),
            "bfloat16": (lambda x: jnp.sum(x * x * 0.5), [X.astype(jnp.bfloat16)]),
            "bfloat16 inside": (lambda x: jnp.sum(x.astype(jnp.bfloat16).astype(jnp.float32) * 2), [X]),
            "integers and bools": (lambda x: jnp.sum(x * jnp.arange(3) * jnp.array([True, False, True])), [X]),
            "random": (lambda x: jnp.sum(x * jax.random.bernoulli(jax.random.key(1), 0.5, x.shape)), [X]),
            "cholesky": (lambda a: jnp.sum(jnp.linalg.cholesky(a @ a.T)), [M]),
        },
    )


# ---- loops without a bound -----------------------------------------------------------------------


def doubled(x):
    """The smallest power of two times `x` whose sum is at least 100 in size."""
    return jax.lax.while_loop(lambda y: jnp.abs(jnp.sum(y)) < 100, lambda y: 2 * y, x)


@everywhere
def test_a_while_loop_is_an_error_only_where_a_gradient_passes_it(mode):
    def beside(x):
        with px.GradientTape() as tape:
            tape.watch(x)
            steps = jnp.sum(doubled(x))
            y = jnp.sum(x * x) + jax.lax.stop_gradient(steps)
        return tape.gradient(y, x)

    for (x,), found in results(mode, beside, X):
        np.testing.assert_allclose(found, 2 * x)
    with pytest.raises(TapeError, match=r"while_loop.*px\.scan.*px\.ForwardAccumulator"):
        results(mode, lambda x: tape_gradients(lambda x: jnp.sum(doubled(x)), [x]), X)


def test_an_operation_without_a_derivative_is_an_error_only_where_a_gradient_passes_it():
    def called_back(x):
        return jax.pure_callback(np.sin, jax.ShapeDtypeStruct(x.shape, x.dtype), x)

    with px.GradientTape(persistent=True) as tape:
        tape.watch(X)
        y = X * called_back(X)
        z = X * 2.0
    np.testing.assert_allclose(tape.gradient(z, X), [2.0] * 3)
    with pytest.raises(TapeError, match=r"cannot be differentiated backwards.*[Cc]allbacks do not support JVP"):
        tape.gradient(y, X)


def test_an_error_of_the_operation_itself_is_raised_as_it_is():
    with px.GradientTape() as tape, pytest.raises(TypeError, match="add") as raised:
        tape.watch(X)
        jax.lax.add(X, M)
    assert raised.value.__context__ is None


# ---- a tape in JAX's transformations -------------------------------------------------------------


def cubed_slope(x):
    """3 x^2, by a tape."""
    with px.GradientTape() as tape:
        tape.watch(x)
        y = x**3
    return tape.gradient(y, x)


@pytest.mark.parametrize("mode", ["eager", "function", "replicas"])
def test_a_tape_in_jax_transformations(mode):
    def transformed(x):
        return {
            "jit": jax.jit(cubed_slope)(x),
            "vmap": jax.vmap(cubed_slope)(x),
            "grad": jax.grad(lambda x: jnp.sum(cubed_slope(x)))(x),
            "jvp": jax.jvp(cubed_slope, (x,), (jnp.ones_like(x),))[1],
            "scan": jax.lax.scan(lambda c, v: (c, cubed_slope(v)), 0, x)[1],
            "checkpoint": jax.checkpoint(cubed_slope)(x),
            "tape in jit in tape": tape_gradients(lambda x: jnp.sum(jax.jit(cubed_slope)(x)), [x])[0],
        }

    for (x,), found in results(mode, transformed, X):
        for name, value in found.items():
            second = name in ("grad", "jvp", "tape in jit in tape")
            np.testing.assert_allclose(value, 6 * x if second else 3 * x**2, 1e-5, err_msg=name)


def test_a_gradient_local_to_a_replica_is_not_differentiated_again_as_if_it_were_global():
    def slope(x):
        with px.GradientTape() as tape:
            tape.watch(x)
            y = x**3 * px.get_replica_context().replica_id
        return tape.gradient(y, x)

    with pytest.raises(TapeError, match=r"same on all replicas.*px\.Variable"):
        strategy().run(jax.grad(slope), args=(jnp.float32(2.0),))
    x = strategy().distribute_values_from_function(lambda context: jnp.float32(2.0))
    assert [float(v) for v in strategy().run(jax.grad(slope), args=(x,)).values] == [0.0, 12.0]


# ---- structures ----------------------------------------------------------------------------------


class Params(NamedTuple):
    w: jax.Array
    b: jax.Array | None


@everywhere
def test_sources_in_structures(mode):
    def by_tape(w, b):
        sources = {"first": Params(w, None), "rest": [b, (w,)]}
        with px.GradientTape() as tape:
            tape.watch(sources)
            y = jnp.sum(sources["first"].w * b) + jnp.sum(b)
        return tape.gradient({"y": y, "nothing": None}, sources)

    for (w, b), found in results(mode, by_tape, X, X + 1):
        assert isinstance(found["first"], Params) and found["first"].b is None
        np.testing.assert_allclose(found["first"].w, b)
        np.testing.assert_allclose(found["rest"][0], w + 1)
        np.testing.assert_allclose(found["rest"][1][0], b)


# ---- happening once ------------------------------------------------------------------------------


@everywhere
def test_random_numbers_are_drawn_once(mode):
    @jax.jit
    def dropout(x, key):
        return x * jax.random.bernoulli(key, 0.5, x.shape)

    def by_tape(x):
        with px.GradientTape() as tape:
            tape.watch(x)
            mask = jax.random.bernoulli(jax.random.key(3), 0.5, x.shape)
            y = x * mask + dropout(x, jax.random.key(4))
        return y, tape.gradient(y, x)

    for (x,), (y, gradient) in results(mode, by_tape, jnp.arange(1.0, 33.0)):
        np.testing.assert_allclose(gradient, y / x, 1e-6)
        assert len(np.unique(gradient)) > 1


@everywhere
def test_callbacks_run_once_and_not_again_for_the_gradient(mode):
    calls = []

    def noted(kind, x):
        jax.debug.callback(lambda _: calls.append(kind), x)
        return x

    @jax.custom_vjp
    def ruled(x):
        return noted("rule", x)

    ruled.defvjp(lambda x: (noted("rule", x), x), lambda x, ct: (ct * x,))

    def by_tape(x):
        with px.GradientTape() as tape:
            tape.watch(x)
            y = noted("plain", x * x)
            y = jax.jit(functools.partial(noted, "jit"))(jnp.sin(y))
            y = jax.lax.scan(lambda c, v: (noted("scan", c * v), None), y[0], y)[0]
            y = ruled(y)
        return tape.gradient(y, x)

    found = results(mode, by_tape, X)
    jax.effects_barrier()
    # What is the same on all replicas may be computed once for all of them, or by each.
    assert {kind: calls.count(kind) / calls.count("plain") for kind in set(calls)} == {
        "plain": 1,
        "jit": 1,
        "scan": 3,
        "rule": 1,
    }
    assert calls.count("plain") in (1, len(found))


# ---- jax.shard_map -------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["eager", "function"])
def test_raw_shard_map(mode):
    mesh = jax.make_mesh((2,), ("rows",), axis_types=(jax.sharding.AxisType.Auto,), devices=jax.devices()[:2])
    rows, whole = PartitionSpec("rows"), PartitionSpec()

    def sharded(x, w):
        body = jax.shard_map(
            lambda x, w: {"y": jnp.sin(x) * w, "total": jax.lax.psum(jnp.sum(x * w), "rows")},
            mesh=mesh,
            in_specs=(rows, whole),
            out_specs={"y": rows, "total": whole},
        )
        out = body(x, w)
        return jnp.sum(out["y"]) * out["total"]

    def closing_over(x, w):
        return jnp.sum(jax.shard_map(lambda x: x * w, mesh=mesh, in_specs=rows, out_specs=rows)(x))

    x = jnp.arange(1.0, 5.0)
    check_gradients(mode, {"shard_map": (sharded, [x, X[0]]), "closure": (closing_over, [x, X[0]])})


# ---- closures ------------------------------------------------------------------------------------


def test_what_a_jitted_function_closes_over_is_differentiated():
    w = px.Variable(X)
    with px.GradientTape() as tape:
        hidden = w * w
        y = jnp.sum(jax.jit(lambda x: x * hidden)(jnp.ones(3))) + jnp.sum(jax.jit(lambda: hidden)())
    np.testing.assert_allclose(tape.gradient(y, w), 4 * X)


def test_what_a_jitted_function_in_a_loop_closes_over_is_refused():
    with px.GradientTape() as tape:
        tape.watch(X)
        hidden = X * X
        with pytest.raises(TapeError, match=r"scan at .*test_tape_hard\.py.*closes over.*as an argument"):
            jax.lax.scan(lambda c, v: (jax.jit(lambda c: c * hidden)(c), v), jnp.ones(3), M)
        np.testing.assert_allclose(jax.lax.scan(lambda c, v: (c + v, v), jnp.zeros(3), M)[0], M.sum(0), 1e-6)


def test_a_custom_rule_that_closes_over_something_watched_is_refused():
    w = px.Variable(2.0)

    @jax.custom_vjp
    def scaled(x):
        return x * w

    scaled.defvjp(lambda x: (scaled(x), None), lambda _, ct: (ct * w.value,))
    with px.GradientTape(), pytest.raises(TapeError, match=r"scaled .*closes over.*Pass it as an argument"):
        scaled(X)
    with px.GradientTape(watch_accessed_variables=False) as tape:
        tape.watch(X)
        y = jnp.sum(scaled(X))
    np.testing.assert_allclose(tape.gradient(y, X), [2.0] * 3)
