"""Keras models are compiled for devices that are not here, abstract ones too."""

from __future__ import annotations

import os

os.environ["KERAS_BACKEND"] = "jax"

import jax
import keras
import numpy as np
import pytest
from slices import needs_libtpu

import phalanx as px


def classifier(strategy, dense=64):
    keras.utils.set_random_seed(0)
    inputs = keras.Input((16,))
    x = keras.layers.Dense(dense, "relu", name="hidden")(inputs)
    x = keras.layers.BatchNormalization(name="norm")(x)
    x = keras.layers.Dropout(0.1)(x)
    model = px.keras.replicate(keras.Model(inputs, keras.layers.Dense(10, name="scores")(x)), strategy)
    model.compile(
        keras.optimizers.Adam(), keras.losses.SparseCategoricalCrossentropy(from_logits=True), metrics=["accuracy"]
    )
    return model


def count(variables):
    return 4 * sum(int(np.prod(v.shape)) for v in variables)


@needs_libtpu
def test_the_training_step_of_a_model_is_compiled():
    model = classifier(px.Mirrored())
    before = [v.numpy() for v in model.variables]
    report = model.preflight(topology="v5e:2x2", batch_size=64)
    assert report.fits and report.name == "train_step" and report.global_batch == 64
    assert report.bytes.inputs == 4 * (16 * 16 + 16)
    assert report.bytes.slots >= 2 * count(model.trainable_variables)
    assert report.bytes.params >= count(v for v in model.variables if "seed" not in v.name)
    reduced = sum(c.bytes for c in report.collectives if c.source.startswith("gradient"))
    assert reduced == count(model.trainable_variables)
    assert any("hidden/kernel" in c.source for c in report.collectives)
    assert all(np.array_equal(a, v.numpy()) for a, v in zip(before, model.variables))
    model.fit(np.ones((32, 16)), np.zeros(32), batch_size=32, verbose=0)


def test_a_model_that_is_taken_for_a_step_is_told_apart():
    for model in (keras.Sequential([keras.layers.Dense(1)]), classifier(px.Mirrored())):
        with pytest.raises(px.errors.ArgumentTypeError, match=r"replicate\(model, strategy\)\.preflight"):
            px.preflight(model, topology="cpu:1")


def test_an_abstract_model_takes_no_memory_and_needs_the_same():
    strategy = px.Mirrored()
    with px.abstract():
        model = classifier(strategy)
    report = model.preflight(topology="cpu:4", batch_size=64)
    real = classifier(strategy).preflight(topology="cpu:4", batch_size=64)
    assert report.bytes == real.bytes and len(report.collectives) == len(real.collectives)
    with pytest.raises(px.errors.VariableCreationError, match=r"px\.abstract"):
        model.fit(np.ones((32, 16)), np.zeros(32), batch_size=32, verbose=0)


def test_a_model_too_large_for_this_machine_is_compiled():
    with px.abstract():
        model = classifier(px.Mirrored(), dense=2**32)
        assert count(model.variables) > 2**38
    with pytest.raises(px.errors.VariableCreationError):
        model.variables[0].numpy()


def test_a_model_that_does_not_say_what_it_takes_is_told_by_example():
    class Own(keras.Model):
        def __init__(self):
            super().__init__()
            self.dense = keras.layers.Dense(3)

        def call(self, x):
            return self.dense(x)

    model = px.keras.replicate(Own(), px.Mirrored())
    model.compile("sgd", "mse")
    with pytest.raises(px.errors.ArgumentError, match="does not say what it takes"):
        model.preflight(topology="cpu:2")
    x, y = jax.ShapeDtypeStruct((8, 5), "float32"), np.zeros((8, 3))
    report = model.preflight(x, y, topology="cpu:2")
    assert report.bytes.inputs == 4 * (4 * 5 + 4 * 3) and report.global_batch == 8


def test_mistakes_in_the_call_are_explained():
    model = px.keras.replicate(keras.Sequential([keras.Input((4,)), keras.layers.Dense(3)], name="mine"), px.Mirrored())
    with pytest.raises(px.errors.ArgumentError, match=r"model 'mine' has no training step yet: call model\.compile\("):
        model.preflight(topology="cpu:2", batch_size=8)
    model.compile("sgd", "mse")
    for wrong in (0, -1, "8", 1.5, True):
        with pytest.raises(px.errors.ArgumentError, match="batch_size must be a positive int, got"):
            model.preflight(topology="cpu:2", batch_size=wrong)


def test_a_model_with_a_step_of_its_own_is_compiled_too():
    strategy = px.Mirrored()
    with strategy.scope():

        class Doubling(px.keras.Model):
            def __init__(self):
                super().__init__()
                self.dense = keras.layers.Dense(1)

            def call(self, x):
                return self.dense(x)

            def train_step(self, data):
                x, y = data
                with px.GradientTape() as tape:
                    loss = ((self(x) - y) ** 2).mean()
                grads = tape.gradient(loss, self.trainable_variables)
                self.optimizer.apply_gradients(zip(grads, self.trainable_variables))
                return {"loss": loss}

        model = Doubling()
        model.compile("sgd")
    report = model.preflight(np.ones((8, 2), "float32"), np.ones((8, 1), "float32"), topology="cpu:2")
    assert report.fits
    assert sum(c.bytes for c in report.collectives if c.source.startswith("gradient")) == 12
