"""Steps that a Keras model's class writes itself."""

from __future__ import annotations

import jax.numpy as jnp
import pytest

import phalanx as px
import phalanx.keras  # before Keras: it chooses the backend

import keras  # isort: skip


def _replicated(cls, strategy):
    model = px.keras.replicate(cls([keras.Input((2,)), keras.layers.Dense(1, kernel_initializer="ones")]), strategy)
    model.compile(optimizer="sgd", loss="mse")
    return model


def test_replicated_models_run_the_steps_of_their_class(strategy):
    class Doubling(keras.Sequential):
        def test_step(self, data):
            x, y = data
            return {"distance": (self(x) * 2 - y).mean()}

        def predict_step(self, data):
            x, _, _ = keras.utils.unpack_x_y_sample_weight(data)
            return self(x) * 2

    model, x = _replicated(Doubling, strategy), jnp.ones((4, 2))
    assert model.predict(x, verbose=0).ravel().tolist() == [4.0] * 4
    assert float(model.evaluate(x, jnp.ones((4, 1)), verbose=0, return_dict=True)["distance"]) == 3.0


def test_a_step_written_for_jax_is_refused_by_name(strategy):
    class Stateless(keras.Sequential):
        def train_step(self, state, data):
            return {}, state

    with pytest.raises(px.errors.ArgumentTypeError, match=r"Stateless\.train_step is written for JAX"):
        _replicated(Stateless, strategy)
