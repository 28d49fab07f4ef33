"""Stateful recurrent layers in `fit`: each row's state goes on from batch to batch, wherever the row is computed."""

from __future__ import annotations

import jax
import numpy as np
import pytest

import phalanx as px
import phalanx.keras

import keras  # isort: skip

pytestmark = pytest.mark.slow

rng = np.random.default_rng(0)
ROWS, UNITS = 8, 2
X = rng.normal(size=(3 * ROWS, 4, 2)).astype(np.float32)
Y = rng.normal(size=(3 * ROWS, UNITS)).astype(np.float32)


def stateful(n):
    keras.utils.set_random_seed(1)
    memory = keras.layers.LSTM(UNITS, stateful=True)
    model = keras.Sequential([keras.layers.Input(batch_shape=(ROWS, 4, 2)), memory])
    model = model if n is None else px.keras.replicate(model, px.Mirrored(jax.devices()[:n]))
    model.compile(keras.optimizers.SGD(0.5), "mse")
    return model, memory


@pytest.mark.parametrize("n", [1, 4])
def test_one_batch_trains_as_in_plain_keras(n):
    (plain, _), (view, _) = stateful(None), stateful(n)
    losses = [
        m.fit(X[:ROWS], Y[:ROWS], batch_size=ROWS, shuffle=False, verbose=0).history["loss"] for m in (plain, view)
    ]
    np.testing.assert_allclose(losses[1], losses[0], rtol=1e-5)
    for have, want in zip(view.trainable_variables, plain.trainable_variables, strict=True):
        np.testing.assert_allclose(np.asarray(have), np.asarray(want), rtol=1e-5, atol=1e-6)


def handing_states_on(start):
    """Plain Keras, with the states as inputs: losses and weights after each batch, for two epochs."""
    x, h, c = keras.Input((4, 2)), keras.Input((UNITS,)), keras.Input((UNITS,))
    outputs = keras.layers.LSTM(UNITS, return_state=True)(x, initial_state=[h, c])
    trained, stepped = keras.Model([x, h, c], outputs[0]), keras.Model([x, h, c], outputs)
    trained.compile(keras.optimizers.SGD(0.5), "mse")
    trained.set_weights(start)
    states, losses = [np.zeros((ROWS, UNITS), np.float32)] * 2, []
    for _ in range(2):
        for i in range(0, len(X), ROWS):
            batch = [X[i : i + ROWS], *states]
            states = stepped.predict(batch, batch_size=ROWS, verbose=0)[1:]  # by the weights before this step
            losses.append(float(trained.train_on_batch(batch, Y[i : i + ROWS])))
    return np.reshape(losses, (2, 3)).mean(1), trained.get_weights(), states


@pytest.mark.parametrize("n", [1, 4])
def test_states_go_on_from_batch_to_batch_and_from_epoch_to_epoch(n):
    view, memory = stateful(n)
    losses, weights, states = handing_states_on([np.asarray(v) for v in view.trainable_variables])
    history = view.fit(X, Y, batch_size=ROWS, shuffle=False, epochs=2, verbose=0).history["loss"]
    np.testing.assert_allclose(history, losses, rtol=1e-5)
    for have, want in zip([*view.trainable_variables, *memory.states], [*weights, *states], strict=True):
        np.testing.assert_allclose(np.asarray(have), want, rtol=1e-4, atol=1e-6)
    memory.reset_state()
    assert not any(np.asarray(state).any() for state in memory.states)
