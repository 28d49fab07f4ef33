"""Random programs: any number of replicas does what one does, and components never differ by a bit."""

from __future__ import annotations

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import optax
from hypothesis import given, settings
from hypothesis import strategies as st

import phalanx as px

few = settings(derandomize=True, deadline=None, max_examples=8, database=None)
more = settings(few, max_examples=30)

ACTIVATIONS = {"tanh": jnp.tanh, "relu": jax.nn.relu, "square": jnp.square, "none": lambda x: x}
OPTIMIZERS = {
    "sgd": lambda: optax.sgd(0.05),
    "momentum": lambda: optax.sgd(0.05, momentum=0.9, nesterov=True),
    "adam": lambda: optax.adam(0.05),
    "clipped": lambda: optax.chain(optax.clip_by_global_norm(0.1), optax.sgd(0.5)),
    "rmsprop": lambda: optax.rmsprop(0.01),
    "decayed": lambda: optax.adamw(0.05, weight_decay=0.2),
}

layers = st.lists(st.tuples(st.integers(1, 3), st.sampled_from(sorted(ACTIVATIONS))), min_size=1, max_size=3)


def train(n: int, layers, optimizer: str, reduce: str, rows: int, steps: int) -> list[np.ndarray]:
    """Losses, weights and slots after some steps on n replicas."""
    strategy = px.Mirrored(jax.devices()[:n])
    rng = np.random.default_rng(rows * 10 + steps)
    widths = [2, *(width for width, _ in layers)]
    with strategy.scope():
        weights = [px.Variable(rng.normal(size=shape).astype(np.float32)) for shape in itertools.pairwise(widths)]
        biases = [px.Variable(np.full(width, 0.1, np.float32)) for width in widths[1:]]
        seen = px.Variable(0, aggregation="sum")
    tx = px.Optimizer(OPTIMIZERS[optimizer]())
    scale = rows if reduce == "sum" else rows / n

    @px.function
    def step(x):
        def fn(x):
            with px.GradientTape() as tape:
                y = x
                for w, b, (_, activation) in zip(weights, biases, layers):
                    y = ACTIVATIONS[activation](y @ w + b)
                loss = (y * y).sum() / scale
            variables = [*weights, *biases]
            tx.apply_gradients(zip(tape.gradient(loss, variables), variables), reduce=reduce)
            seen.assign_add(len(x))
            return px.get_replica_context().all_reduce(reduce, loss)

        return strategy.run(fn, args=(x,))

    losses = [step(strategy.split_rows(rng.normal(size=(rows, 2)).astype(np.float32))) for _ in range(steps)]
    assert int(seen) == rows * steps
    return [np.asarray(x) for x in (*losses, *weights, *biases, *tx.variables)]


@few
@given(
    n=st.sampled_from([2, 4]),
    layers=layers,
    optimizer=st.sampled_from(sorted(OPTIMIZERS)),
    reduce=st.sampled_from(["sum", "mean"]),
    parts=st.integers(1, 3),
    steps=st.integers(1, 3),
)
def test_any_number_of_replicas_trains_as_one(n, layers, optimizer, reduce, parts, steps):
    rows = n * parts
    alone = train(1, layers, optimizer, reduce, rows, steps)
    everywhere = train(n, layers, optimizer, reduce, rows, steps)
    for a, b in zip(alone, everywhere):
        np.testing.assert_allclose(a, b, rtol=2e-4, atol=1e-5)


AGGREGATIONS = ("sum", "mean", "only_first_replica")
updates = st.lists(
    st.tuples(
        st.integers(0, 2),  # which variable
        st.sampled_from(["assign", "assign_add", "assign_sub", "at"]),
        st.floats(-1.0, 1.0, width=16),  # a constant
        st.floats(-1.0, 1.0, width=16),  # times the number of the replica
        st.floats(-0.5, 0.5, width=16),  # times the value of another variable
        st.integers(0, 2),
    ),
    min_size=1,
    max_size=6,
)


def merged(aggregation: str, parts: list[np.ndarray]) -> np.ndarray:
    return {"sum": sum(parts), "mean": sum(parts) / len(parts), "only_first_replica": parts[0]}[aggregation]


@more
@given(n=st.sampled_from([1, 2, 3, 8]), sequence=updates, traced=st.booleans(), times=st.integers(1, 2))
def test_components_stay_equal_to_the_bit_whatever_the_replicas_assign(n, sequence, traced, times):
    strategy = px.Mirrored(jax.devices()[:n])
    start = np.array([0.5, -0.25], np.float32)
    with strategy.scope():
        variables = [px.Variable(start, aggregation=a) for a in AGGREGATIONS]

    def fn():
        i = px.get_replica_context().replica_id
        for target, op, constant, slope, factor, other in sequence:
            value = constant + slope * i + factor * variables[other].value
            if op == "at":
                variables[target].at[0].add(value[0])
            else:
                getattr(variables[target], op)(value)

    step = px.function(lambda: strategy.run(fn)) if traced else lambda: strategy.run(fn)
    expected = [start.astype(np.float64) for _ in AGGREGATIONS]
    for _ in range(times):
        step()
        for target, op, constant, slope, factor, other in sequence:
            parts = [constant + slope * i + factor * expected[other] for i in range(n)]
            if op == "at":
                parts = [part * [1.0, 0.0] for part in parts]
            change = merged(AGGREGATIONS[target], parts)
            old = expected[target]
            expected[target] = {"assign": change, "assign_sub": old - change}.get(op, old + change)
    for v, value in zip(variables, expected):
        bits = [np.asarray(c).tobytes() for c in v.components]
        assert len(set(bits)) == 1, "components differ"
        np.testing.assert_allclose(v.numpy(), value, rtol=1e-4, atol=1e-4 * max(1.0, np.abs(value).max()))
