"""Steps that a Keras model's class writes itself."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
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


def test_a_step_of_its_own_builds_the_layers_it_uses_whatever_call_takes(strategy):
    class Pair(px.keras.Model):
        def __init__(self):
            super().__init__()
            self.draw, self.judge = keras.layers.Dense(2), keras.layers.Dense(1)

        def call(self, noise):  # three numbers for each row, which the data does not have
            return self.draw(noise)

        def train_step(self, rows):
            with px.GradientTape() as tape:
                loss = (self.judge(rows) - self.judge(self(jnp.ones((len(rows), 3))))).mean()
            weights = self.trainable_variables
            self.optimizer.apply_gradients(zip(tape.gradient(loss, weights), weights))
            return {"loss": loss}

    with strategy.scope():
        model = Pair()
    model.compile(optimizer="sgd")
    losses = model.fit(jnp.ones((8, 2)), epochs=3, batch_size=8, verbose=0).history["loss"]
    assert losses[2] < losses[1] < losses[0]
    assert model.predict(jnp.ones((2, 3)), verbose=0).shape == (2, 2)


def test_a_model_without_trainable_weights_trains_to_no_effect(strategy):
    model = _replicated(keras.Sequential, strategy)
    model.trainable = False
    losses = model.fit(jnp.ones((8, 2)), jnp.ones((8, 1)), epochs=2, batch_size=8, verbose=0).history["loss"]
    assert losses == [1.0, 1.0]


def test_metrics_that_only_the_test_step_uses_count_rows_once_also_where_they_do_not_divide(strategy):
    class OwnLoss(px.keras.Model):
        def __init__(self):
            super().__init__()
            self.dense = keras.layers.Dense(1, kernel_initializer="ones")

        def call(self, x):
            return self.dense(x)

        def train_step(self, data):
            with px.GradientTape() as tape:
                loss = 0 * self(data[0]).mean()
            weights = self.trainable_variables
            self.optimizer.apply_gradients(zip(tape.gradient(loss, weights), weights))
            return {"loss": loss + 5}

    with strategy.scope():
        model = OwnLoss()
    model.compile(optimizer="sgd", loss="mse", metrics=["mae"])
    x, y = np.arange(6, dtype="float32").reshape(3, 2), np.ones((3, 1), "float32")
    assert model.fit(x, y, verbose=0).history == {"loss": [5.0]}
    result = model.evaluate(x, y, verbose=0, return_dict=True)
    assert result == pytest.approx({"loss": (0 + 16 + 64) / 3, "mae": 4.0})
