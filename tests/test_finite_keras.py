"""A guard around an optimizer of Keras's, in a loop of one's own."""

from __future__ import annotations

import jax
import numpy as np
import pytest

import phalanx as px
import phalanx.keras
from phalanx.errors import NonFiniteError

import keras  # isort: skip

pytestmark = pytest.mark.slow


def make(policy):
    keras.utils.set_random_seed(0)
    strategy = px.Mirrored(jax.devices()[:2])
    with strategy.scope():
        model = keras.Sequential([keras.layers.Dense(3, "relu"), keras.layers.Dense(1)])
        model.build((None, 2))
        guard = px.NonFiniteGuard(keras.optimizers.Adam(0.1), policy)

    @px.function
    def step(x):
        def replica(x):
            with px.GradientTape() as tape:
                loss = (model(x, training=True) ** 2).mean()
            variables = model.trainable_variables
            guard.apply_gradients(zip(tape.gradient(loss, variables), variables), loss=loss, reduce="mean")

        strategy.run(replica, args=(x,))

    def values():
        return [np.asarray(v).tobytes() for v in [*model.variables, *guard.optimizer.variables]]

    def run(bad=False):
        rows = np.ones((4, 2), np.float32)
        rows[3, 1] = np.inf if bad else 1
        step(strategy.split_rows(rows))

    return run, values, guard


def test_a_step_that_is_not_finite_changes_neither_weights_nor_the_optimizers_state():
    run, values, guard = make("skip")
    other, expected, _ = make("skip")
    for bad in (False, True, False):
        run(bad)
        if not bad:
            other()
    assert values() == expected()
    assert guard.skipped == 1


def test_the_weight_is_named_by_its_path():
    run, values, guard = make("raise")
    before = values()
    run(bad=True)
    assert values()[:4] == before[:4]
    with pytest.raises(
        NonFiniteError,
        match=r"At step 1 .*'sequential.*dense.*kernel' (is|are) not finite on replica 1",
    ):
        guard.check()
