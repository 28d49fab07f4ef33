"""What is saved on any number of replicas goes on anywhere: on others, on one, and in plain Keras."""

from __future__ import annotations

import jax
import numpy as np
import pytest

import phalanx as px
import phalanx.keras

import keras  # isort: skip

pytestmark = pytest.mark.slow

rng = np.random.default_rng(0)
X = rng.normal(size=(20, 3)).astype(np.float32)
Y = X.sum(1, keepdims=True)
PLACES = [None, 1, 8]


def model():
    keras.utils.set_random_seed(1)
    model = keras.Sequential([keras.layers.Input((3,)), keras.layers.Dense(4, "relu"), keras.layers.Dense(1)])
    model.compile(keras.optimizers.Adam(0.05), "mse", metrics=["mae"])
    return model


def on(n, model):
    """On so many replicas, or as it is in plain Keras."""
    return model if n is None else px.keras.replicate(model, px.Mirrored(jax.devices()[:n]))


def train(model):
    return model.fit(X, Y, batch_size=8, epochs=2, shuffle=False, verbose=0).history


@pytest.fixture(scope="module")
def expected():
    """Four epochs of plain Keras."""
    plain = model()
    train(plain)
    return train(plain)["loss"], plain.predict(X, verbose=0)


@pytest.mark.parametrize("then", PLACES)
@pytest.mark.parametrize("first", PLACES)
def test_a_whole_model_goes_on_elsewhere(first, then, expected, tmp_path):
    trained = on(first, model())
    train(trained)
    trained.save(tmp_path / "model.keras")
    loaded = on(then, keras.models.load_model(tmp_path / "model.keras"))
    losses = train(loaded)["loss"]
    np.testing.assert_allclose(losses, expected[0], rtol=1e-5)
    np.testing.assert_allclose(loaded.predict(X, verbose=0), expected[1], rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(("first", "then"), [(8, None), (None, 8), (8, 1)])
def test_weights_go_elsewhere(first, then, tmp_path):
    trained = on(first, model())
    train(trained)
    trained.save_weights(tmp_path / "m.weights.h5")
    other = on(then, model())
    other.optimizer.build(other.trainable_variables)  # Keras fills what is there
    other.load_weights(tmp_path / "m.weights.h5")
    np.testing.assert_allclose(other.predict(X, verbose=0), trained.predict(X, verbose=0), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(("first", "then"), [(8, 1), (1, 8)])
def test_values_in_an_orbax_checkpoint_go_elsewhere(first, then, expected, tmp_path):
    import orbax.checkpoint as ocp

    def values(model):
        return {"model": [v.value for v in model.variables], "optimizer": [v.value for v in model.optimizer.variables]}

    trained = on(first, model())
    train(trained)
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "checkpoint", jax.tree.map(np.asarray, values(trained)))
    other = on(then, model())
    other.optimizer.build(other.trainable_variables)
    with ocp.StandardCheckpointer() as checkpointer:
        found = checkpointer.restore(tmp_path / "checkpoint", jax.tree.map(np.asarray, values(other)))
    for variables, arrays in ((other.variables, found["model"]), (other.optimizer.variables, found["optimizer"])):
        for variable, array in zip(variables, arrays):
            variable.assign(array)
    np.testing.assert_allclose(train(other)["loss"], expected[0], rtol=1e-5)


def values(model):
    return [np.array(v.value) for v in (*model.variables, *model.optimizer.variables)]


@pytest.mark.parametrize(("first", "then"), [(8, None), (None, 8)])
def test_a_checkpoint_goes_elsewhere_bit_for_bit(first, then, expected, tmp_path):
    def kept(model):
        return px.Checkpoint(model=model, optimizer=model.optimizer)

    trained, other = on(first, model()), on(then, model())
    train(trained)
    other.optimizer.build(other.trainable_variables)
    manager = px.CheckpointManager(tmp_path)
    manager.save(kept(trained), step=1)
    manager.wait()
    assert manager.restore_latest(kept(other)) == 1
    assert len(values(other)) == 14  # four weights, two slots for each, how many steps, and the learning rate
    for have, want in zip(values(other), values(trained), strict=True):
        assert have.dtype == want.dtype and have.tobytes() == want.tobytes()
    np.testing.assert_allclose(train(other)["loss"], expected[0], rtol=1e-5)
    np.testing.assert_allclose(other.predict(X, verbose=0), expected[1], rtol=1e-4, atol=1e-6)
    train(trained)
    for have, want in zip(values(other), values(trained), strict=True):
        np.testing.assert_allclose(have, want, rtol=1e-4, atol=1e-6)
