"""Tapes on programs that nobody thought of: random expressions have the derivatives that JAX gives them."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import phalanx as px

few = settings(derandomize=True, deadline=None, max_examples=25)

N = 3
"""All values of an expression are vectors of this length."""

UNARY = {
    "tanh": jnp.tanh,
    "sin": jnp.sin,
    "exp of something bounded": lambda a: jnp.exp(jnp.sin(a)),
    "square": lambda a: 0.5 * a * a,
    "root": lambda a: jnp.sqrt(1 + a * a),
    "logistic": jax.nn.sigmoid,
    "gelu": jax.nn.gelu,
    "softmax": jax.nn.softmax,
    "log_softmax": jax.nn.log_softmax,
    "cumsum": lambda a: jnp.cumsum(a) / N,
    "reverse": lambda a: a[::-1],
    "rows": lambda a: a[jnp.array([2, 0, 0])],
    "mean": lambda a: a - jnp.mean(a),
    "matmul": lambda a: jnp.array([[0.5, -0.2, 0.1], [0.3, 0.4, -0.6], [-0.1, 0.2, 0.7]]) @ a,
    "sort away from ties": lambda a: jnp.sort(jnp.sin(a) + 3.0 * jnp.arange(N)[::-1]),
    "scan": lambda a: jax.lax.scan(lambda c, v: (jnp.sin(c + v), c * v), jnp.zeros((), a.dtype), a)[1],
    "checkpoint": jax.checkpoint(lambda a: jnp.tanh(a) * a),
    "jit": jax.jit(lambda a: jnp.cos(a) * a),
    "custom_jvp": jax.nn.silu,
    "shield": lambda a: a * jax.lax.stop_gradient(jnp.cos(a)),
}

BINARY = {
    "add": jnp.add,
    "sub": jnp.subtract,
    "mul": jnp.multiply,
    "div": lambda a, b: a / (2 + jnp.sin(b)),
    "power": lambda a, b: (1.5 + jnp.sin(a)) ** jnp.sin(b),
    "where": lambda a, b: jnp.where(jnp.arange(N) % 2 == 0, a, b),
    "maximum away from ties": lambda a, b: jnp.maximum(jnp.sin(a) + 3.0 * (jnp.arange(N) - 0.9), jnp.sin(b)),
    "concatenate": lambda a, b: jnp.concatenate([a[:1], b])[:N] + jnp.stack([a, b], 1).sum(1) / 2,
    "dot": lambda a, b: jnp.dot(a, b) / N * jnp.tanh(a),
    "outer": lambda a, b: jnp.tensordot(jnp.outer(a, b), jnp.ones(N, a.dtype) / N, 1),
    "cond": lambda a, b: jax.lax.cond(jnp.sum(a) > jnp.sum(b) + 100, jnp.sin, lambda v: v * b, a),
}

Graph = list[tuple[str, int, int]]
"""Steps: an operation, and the steps (or inputs) that it takes, counted back from the last one."""

graphs = st.lists(
    st.tuples(st.sampled_from([*UNARY, *BINARY]), st.integers(1, 5), st.integers(1, 5)), min_size=1, max_size=7
)
vectors = st.lists(st.integers(-8, 8).map(lambda n: n / 4 + 0.1), min_size=N, max_size=N)


def evaluate(graph: Graph, x: jax.Array, y: jax.Array) -> jax.Array:
    values = [x, y]
    for name, i, j in graph:
        a, b = values[-min(i, len(values))], values[-min(j, len(values))]
        values.append(UNARY[name](a) if name in UNARY else BINARY[name](a, b))
    return jnp.sum(jnp.sin(values[-1]) * jnp.arange(1.0, N + 1).astype(x.dtype))


def close(found, expected, dtype):
    tolerance = 1e-6 if dtype == jnp.float64 else 1e-5
    scale = 1 + max(float(jnp.max(jnp.abs(e))) for e in expected)
    for a, b in zip(found, expected):
        assert a.dtype == b.dtype == dtype
        np.testing.assert_allclose(a, b, tolerance, tolerance * scale)


@pytest.fixture
def float64():
    with jax.enable_x64(True):
        yield jnp.dtype("float64")


@few
@given(graph=graphs, first=vectors, second=vectors, where=st.sampled_from(["eager", "function"]))
def _first_derivatives(dtype, graph, first, second, where):
    def by_tape(x, y):
        with px.GradientTape() as tape:
            tape.watch([x, y])
            z = evaluate(graph, x, y)
        return tape.gradient(z, [x, y], unconnected_gradients="zero")

    x, y = jnp.array(first, dtype), jnp.array(second, dtype)
    found = by_tape(x, y) if where == "eager" else px.function(by_tape)(x, y)
    close(found, jax.jit(jax.grad(lambda x, y: evaluate(graph, x, y), (0, 1)))(x, y), dtype)


def test_first_derivatives_of_random_expressions():
    _first_derivatives(jnp.dtype("float32"))


def test_first_derivatives_of_random_expressions_in_double_precision(float64):
    _first_derivatives(float64)


@few
@given(graph=graphs, first=vectors, second=vectors, how=st.sampled_from(["nested", "own block", "forward"]))
def _second_derivatives(dtype, graph, first, second, how):
    """Hessian times vector, of the first input."""
    x, y = jnp.array(first, dtype), jnp.array(second, dtype)
    v = jnp.arange(1.0, N + 1).astype(dtype)

    def nested(x, y):
        with px.GradientTape() as outer:
            outer.watch(x)
            with px.GradientTape() as tape:
                tape.watch(x)
                z = evaluate(graph, x, y)
            slope = tape.gradient(z, x, unconnected_gradients="zero")
        return outer.gradient(slope, x, v, unconnected_gradients="zero")

    def own_block(x, y):
        with px.GradientTape(persistent=True) as tape:
            tape.watch(x)
            z = evaluate(graph, x, y)
            slope = tape.gradient(z, x, unconnected_gradients="zero")
        return tape.gradient(slope, x, v, unconnected_gradients="zero")

    def forward(x, y):
        with px.ForwardAccumulator(x, v) as accumulator:
            with px.GradientTape() as tape:
                tape.watch(x)
                z = evaluate(graph, x, y)
            slope = tape.gradient(z, x, unconnected_gradients="zero")
        return accumulator.jvp(slope, unconnected_gradients="zero")

    found = px.function({"nested": nested, "own block": own_block, "forward": forward}[how])(x, y)
    slope = jax.grad(lambda x: evaluate(graph, x, y))
    close([found], [jax.jit(lambda x: jax.jvp(slope, (x,), (v,))[1])(x)], dtype)


def test_second_derivatives_of_random_expressions(float64):
    _second_derivatives(float64)


@few
@given(graph=graphs, first=vectors, second=vectors)
def _jacobians(dtype, graph, first, second):
    def f(x, y):
        return jnp.stack([evaluate(graph, x, y), jnp.sum(x * y)])

    def by_tape(x, y):
        with px.GradientTape() as tape:
            tape.watch([x, y])
            z = f(x, y)
        return tape.jacobian(z, [x, y], unconnected_gradients="zero")

    x, y = jnp.array(first, dtype), jnp.array(second, dtype)
    close(px.function(by_tape)(x, y), jax.jit(jax.jacobian(f, (0, 1)))(x, y), dtype)


def test_jacobians_of_random_expressions(float64):
    _jacobians(float64)


@few
@given(order=st.permutations(range(4)), steps=st.lists(st.integers(0, 3), min_size=4, max_size=12))
def test_tapes_that_overlap_in_any_order_record_their_own_block(order, steps):
    """Four tapes over one product of numbers: each sees the factors that came while it was open."""
    x = jnp.float32(1.5)
    tapes = [px.GradientTape() for _ in range(4)]
    for tape in tapes:
        tape.__enter__()
        tape.watch(x)
    y, seen, closed = x * 1.0, [1] * 4, 0
    for i, factors in enumerate(steps):
        for _ in range(factors):
            y = y * x
        for t in order[closed:]:
            seen[t] += factors
        if i % 3 == 2 and closed < 4:
            tapes[order[closed]].__exit__(None, None, None)
            closed += 1
    for t in order[closed:]:
        tapes[t].__exit__(None, None, None)
    total = 1 + sum(steps)
    for t, tape in enumerate(tapes):
        # A tape that was closed early knows y only if nothing came later.
        gradient = tape.gradient(y, x)
        if seen[t] == total:
            np.testing.assert_allclose(gradient, total * 1.5 ** (total - 1), 1e-5)
        else:
            assert gradient is None
    assert px.GradientTape().watched_variables() == ()
