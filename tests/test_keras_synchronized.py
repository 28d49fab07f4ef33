"""Keras's own option of batch normalisation: ``synchronized=True``."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

import phalanx as px
import phalanx.keras  # before Keras: it chooses the backend

import keras  # isort: skip

rng = np.random.default_rng(0)
X, Y = rng.normal(size=(10, 3)).astype("float32"), rng.normal(size=(10, 1)).astype("float32")


def _layer(**options):
    return keras.layers.BatchNormalization(-1, 0.5, **options)


def test_fit_with_synchronized_layers_does_what_one_device_does():
    def trained(replicate, **options):
        initial = keras.initializers.RandomNormal(seed=1)
        layers = [keras.Input((3,)), keras.layers.Dense(4, kernel_initializer=initial), _layer(**options)]
        model = replicate(keras.Sequential([*layers, keras.layers.Dense(1, kernel_initializer=initial)]))
        model.compile(keras.optimizers.SGD(0.1), "mse")
        model.fit(X, Y, batch_size=4, epochs=2, shuffle=False, verbose=0)  # the last batch does not divide
        return model.get_weights()

    four = px.Mirrored(jax.devices()[:4])
    expected = trained(lambda model: model)
    for found in trained(lambda model: px.keras.replicate(model, four), synchronized=True):
        np.testing.assert_allclose(found, expected.pop(0), rtol=1e-5, atol=1e-6)


def test_synchronized_layers_on_one_device_are_like_others():
    plain, synchronized = _layer(), _layer(synchronized=True)
    for mask in (None, jnp.array([True, True, False, True, True, True, True, False, True, True])):
        found, expected = (layer(X, training=True, mask=mask) for layer in (synchronized, plain))
        np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5)


def test_the_option_is_kept_in_the_configuration():
    layer = _layer(synchronized=True)
    copy = keras.layers.BatchNormalization.from_config(layer.get_config())
    assert (copy.synchronized, copy.momentum, copy.name) == (True, 0.5, layer.name)
    assert _layer().synchronized is False
