"""``fit(accumulate_steps=k)`` is training with batches k times as large."""

from __future__ import annotations

import jax
import numpy as np
import pytest

import phalanx as px
import phalanx.keras
from phalanx.errors import ArgumentError

import keras  # isort: skip

pytestmark = pytest.mark.slow

rng = np.random.default_rng(0)
X = rng.normal(size=(50, 4)).astype(np.float32)
Y = (X.sum(1, keepdims=True) > 0).astype(np.float32)


def model():
    keras.utils.set_random_seed(1)
    return keras.Sequential([keras.layers.Dense(8, "relu", kernel_regularizer="l2"), keras.layers.Dense(1, "sigmoid")])


def scheduled():
    schedule = keras.optimizers.schedules.ExponentialDecay(0.1, 2, 0.5)
    return keras.optimizers.SGD(schedule, momentum=0.9, global_clipnorm=0.1)


def scaled():
    return keras.optimizers.LossScaleOptimizer(keras.optimizers.Adam(0.01, clipnorm=0.1), dynamic_growth_steps=3)


def trained(model, optimizer, **fit):
    model.compile(optimizer, "binary_crossentropy", metrics=["accuracy"])
    return model.fit(X, Y, epochs=2, shuffle=False, verbose=0, **fit).history


@pytest.mark.parametrize("optimizer", [scheduled, scaled])
@pytest.mark.parametrize("n", [1, 4])
def test_it_equals_batches_so_many_times_as_large(optimizer, n):
    plain = model()
    expected = trained(plain, optimizer(), batch_size=12)
    original = model()
    replicated = px.keras.replicate(original, px.Mirrored(jax.devices()[:n]))
    history = trained(replicated, optimizer(), batch_size=4, accumulate_steps=3)
    assert history.keys() == expected.keys()
    for name in expected:
        np.testing.assert_allclose(history[name], expected[name], rtol=1e-5)
    for a, b in zip(original.get_weights(), plain.get_weights()):
        np.testing.assert_allclose(a, b, atol=1e-6)
    assert int(replicated.optimizer.iterations) == int(plain.optimizer.iterations) == 2 * 5


def test_the_number_of_batches_is_checked():
    replicated = px.keras.replicate(model(), px.Mirrored(jax.devices()[:2]))
    for wrong in (0, -1, 2.0, True, "2"):
        with pytest.raises(ArgumentError, match="accumulate_steps must be a positive int"):
            trained(replicated, "sgd", accumulate_steps=wrong)
