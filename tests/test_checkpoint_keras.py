"""Keras models, optimizers and seeds in checkpoints, in programs that number their layers differently."""

from __future__ import annotations

import jax
import numpy as np
import pytest

import phalanx as px
import phalanx.keras
from phalanx.checkpoint import files
from phalanx.errors import ArgumentError, CheckpointError

import keras  # isort: skip

pytestmark = pytest.mark.slow

rng = np.random.default_rng(0)
X = rng.normal(size=(16, 4)).astype(np.float32)
Y = X.sum(1, keepdims=True)


def layers():
    return [
        keras.layers.Dense(8, "relu"),
        keras.layers.BatchNormalization(),
        keras.layers.Dropout(0.2),
        keras.layers.Dense(4),
        keras.layers.Dense(1, name="top"),
    ]


def model(seed=1, built=True, n=2):
    keras.utils.set_random_seed(seed)
    view = px.keras.replicate(keras.Sequential(layers()), px.Mirrored(jax.devices()[:n]))
    view.compile(keras.optimizers.Adam(0.01), "mse")
    if built:
        view.build((None, 4))
    return view


def train(view, epochs=1):
    view.fit(X, Y, batch_size=8, epochs=epochs, shuffle=False, verbose=0)


def weights(view):
    return [np.asarray(v) for v in [*view.variables, *view.optimizer.variables]]


def same(a, b):
    return all(x.tobytes() == y.tobytes() for x, y in zip(weights(a), weights(b), strict=True))


def test_a_model_is_kept_with_its_optimizer_and_seeds_and_trains_on_exactly(tmp_path):
    first = model()
    train(first)
    manager = px.CheckpointManager(tmp_path)
    manager.save(px.Checkpoint(model=first), step=1)
    manager.wait()
    second = model(seed=2)  # whose layers Keras gives other numbers
    assert not same(first, second)
    assert manager.restore_latest(px.Checkpoint(model=second)) == 1
    assert same(first, second)
    train(first)
    train(second)
    assert same(first, second)
    names = set(files.read(tmp_path / "1")[0]["entries"])
    assert {"model/sequential/dense/kernel", "model/sequential/dense_1/bias", "model/sequential/top/kernel"} <= names
    assert "model/optimizer/0" in names
    assert any(name.endswith("seed_generator/seed_generator_state") for name in names)


def test_a_model_is_restored_on_another_number_of_replicas(tmp_path):
    first = model(n=2)
    train(first)
    manager = px.CheckpointManager(tmp_path)
    manager.save(px.Checkpoint(model=first), step=1)
    for n in (1, 4):
        other = model(seed=2, n=n)
        manager.restore_latest(px.Checkpoint(model=other))
        for a, b in zip(first.trainable_variables, other.trainable_variables):
            np.testing.assert_array_equal(np.asarray(a), np.asarray(b))
        train(other)


def test_a_custom_loop_keeps_model_optimizer_metric_and_seeds_apart(tmp_path):
    def make(seed):
        keras.utils.set_random_seed(seed)
        network = keras.Sequential([keras.layers.Dense(2)])
        network.build((None, 4))
        optimizer = keras.optimizers.SGD(0.1, momentum=0.9)
        optimizer.build(network.trainable_variables)
        metric = keras.metrics.Mean()
        return {"network": network, "optimizer": optimizer, "metric": metric, "seeds": keras.random.SeedGenerator(seed)}

    here, there = make(1), make(2)
    with px.GradientTape() as tape:
        loss = (here["network"](X) ** 2).mean()
    here["optimizer"].apply(tape.gradient(loss, here["network"].trainable_variables))
    here["metric"].update_state(3.0)
    keras.random.normal((2,), seed=here["seeds"])
    manager = px.CheckpointManager(tmp_path)
    manager.save(px.Checkpoint(**here), step=1)
    manager.restore_latest(px.Checkpoint(**there))
    assert float(there["metric"].result()) == 3.0
    for name in ("network", "optimizer"):
        for a, b in zip(here[name].variables, there[name].variables):
            np.testing.assert_array_equal(np.asarray(a), np.asarray(b))
    draws = [np.asarray(keras.random.normal((2,), seed=made["seeds"])) for made in (here, there)]
    np.testing.assert_array_equal(*draws)


def test_another_architecture_is_refused_by_the_names_of_its_weights(tmp_path):
    first = model()
    manager = px.CheckpointManager(tmp_path)
    manager.save(px.Checkpoint(model=first), step=1)
    keras.utils.set_random_seed(2)
    other = keras.Sequential([*layers()[:-1], keras.layers.Dense(1, name="head")])
    other.build((None, 4))
    before = other.get_weights()
    with pytest.raises(CheckpointError) as caught:
        manager.restore_latest(px.Checkpoint(model=other))
    assert "model/sequential/head/kernel: here, not in the checkpoint" in str(caught.value)
    assert "model/sequential/top/kernel: in the checkpoint, not here" in str(caught.value)
    for a, b in zip(before, other.get_weights()):
        np.testing.assert_array_equal(a, b)


def test_what_is_not_built_is_said_so_in_the_first_run_already(tmp_path):
    manager = px.CheckpointManager(tmp_path)
    for thing, cure in [
        (model(built=False), "Call the model on a batch"),
        (keras.layers.Dense(1), "Call the layer on a batch"),
        (keras.optimizers.SGD(), r"Call optimizer\.build\(model\.trainable_variables\)"),
    ]:
        with pytest.raises(ArgumentError, match=f"'thing' has no variables yet. {cure}"):
            manager.restore_latest(px.Checkpoint(thing=thing))
