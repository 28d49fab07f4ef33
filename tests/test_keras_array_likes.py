"""Keras variables work where arrays work, as those of Phalanx do."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

import phalanx as px
import phalanx.keras  # before Keras: it chooses the backend

import keras  # isort: skip


def test_functions_of_jax_take_keras_variables_in_eager_code():
    v = keras.Variable([1.0, -2.0])
    assert jnp.maximum(v, 0.0).tolist() == [1.0, 0.0]
    assert jax.jit(lambda x: x * 2)(v).tolist() == [2.0, -4.0]
    assert np.asarray(v.value).tolist() == [1.0, -2.0]


def test_functions_of_jax_read_the_newest_value_in_a_traced_function():
    v = keras.Variable([1.0, -2.0])

    @px.function
    def step():
        before = jnp.maximum(v, 0.0)
        v.assign(-v.value)
        return before, jnp.maximum(v, 0.0)

    for expected in ([1.0, 0.0], [0.0, 2.0]), ([0.0, 2.0], [1.0, 0.0]):
        assert [x.tolist() for x in step()] == list(expected)
    assert step.trace_count == 1


def test_tapes_see_functions_of_jax_on_keras_variables(strategy):
    with strategy.scope():
        v = keras.Variable([1.0, -2.0])

    def replica():
        with px.GradientTape() as tape:
            loss = jnp.sum(jnp.square(v)) * (px.get_replica_context().replica_id + 1)
        return tape.gradient(loss, v)

    found = strategy.local_results(strategy.run(replica))
    assert [g.tolist() for g in found] == [[2.0 * (r + 1), -4.0 * (r + 1)] for r in range(len(found))]
    assert len(found) == strategy.num_replicas


def test_a_variable_on_a_strategy_shows_its_value_and_place():
    with px.Mirrored(jax.devices()[:2]).scope():
        v = keras.Variable([1.0, 2.0], name="a")
    assert repr(v) == "Variable(name='a', shape=(2,), dtype=float32, mirrored x2, value=[1. 2.])"
