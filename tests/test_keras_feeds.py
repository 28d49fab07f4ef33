"""Replicated models take distributed datasets; what cannot be cut into rows is refused."""

from __future__ import annotations

import jax
import numpy as np
import pytest

import phalanx as px
import phalanx.keras
from phalanx.errors import ArgumentError, StrategyError

import keras  # isort: skip

rng = np.random.default_rng(0)
X = rng.normal(size=(12, 3)).astype(np.float32)
Y = (np.arange(12) % 3 == 0).astype(np.int32)


def model(view=True):
    keras.utils.set_random_seed(1)
    model = keras.Sequential([keras.layers.Dense(1, "sigmoid")])
    strategy = px.Mirrored(jax.devices()[:4])
    model = px.keras.replicate(model, strategy) if view else model
    model.compile("sgd", "binary_crossentropy", weighted_metrics=["accuracy"])
    return model, strategy


@pytest.mark.parametrize("class_weight", [None, {0: 1.0, 1: 5.0}, {1: 0.0}])
def test_a_distributed_dataset_trains_as_the_arrays_do(class_weight):
    view, strategy = model()
    history = view.fit(
        strategy.distribute_dataset((X, Y), batch_size=4), class_weight=class_weight, epochs=2, verbose=0
    )
    plain, _ = model(view=False)
    expected = plain.fit(X, Y, batch_size=4, shuffle=False, class_weight=class_weight, epochs=2, verbose=0)
    for name, values in expected.history.items():
        np.testing.assert_allclose(history.history[name], values, rtol=1e-5)
    data = strategy.distribute_dataset((X, Y), batch_size=4)
    np.testing.assert_allclose(view.evaluate(data, verbose=0), plain.evaluate(X, Y, batch_size=4, verbose=0), rtol=1e-5)
    np.testing.assert_allclose(view.predict(data, verbose=0), plain.predict(X, verbose=0), rtol=1e-5)


def test_weights_of_rows_come_with_the_dataset_or_from_classes_but_not_both():
    view, strategy = model()
    weighted = strategy.distribute_dataset((X, Y, np.arange(12, dtype=np.float32)), batch_size=4)
    plain, _ = model(view=False)
    expected = plain.fit(X, Y, sample_weight=np.arange(12), batch_size=4, shuffle=False, verbose=0).history["loss"]
    assert view.fit(weighted, verbose=0).history["loss"] == pytest.approx(expected, rel=1e-5)
    with pytest.raises(ArgumentError, match="cannot be given together"):
        view.fit(weighted, class_weight={0: 1.0}, verbose=0)


def test_a_dataset_of_another_strategy_is_refused():
    view, _ = model()
    other = px.Mirrored(jax.devices()[:2]).distribute_dataset((X, Y), batch_size=4)
    with pytest.raises(StrategyError, match="the model is on"):
        view.fit(other, verbose=0)


def test_stateful_layers_are_refused_on_several_replicas_and_train_on_one():
    sequences = rng.normal(size=(4, 5, 2)).astype(np.float32)

    def stateful():
        keras.utils.set_random_seed(1)
        layers = [keras.layers.Input(batch_shape=(4, 5, 2)), keras.layers.GRU(2, stateful=True, name="memory")]
        return keras.Sequential(layers)

    plain, one = stateful(), px.keras.replicate(stateful(), px.Mirrored(jax.devices()[:1]))
    for _ in range(2):  # the state goes on
        expected = np.asarray(plain(sequences))
        np.testing.assert_allclose(one.predict(sequences, batch_size=4, verbose=0), expected, rtol=1e-5)
    several = px.keras.replicate(stateful(), px.Mirrored(jax.devices()[:2]))
    several.compile("sgd", "mse")
    for call in (lambda: several.fit(sequences, expected, verbose=0), lambda: several.predict(sequences, verbose=0)):
        with pytest.raises(StrategyError, match=r"Layer 'memory' is stateful.*px.OneDevice"):
            call()


def test_each_compilation_is_logged_with_its_shapes_and_time(caplog):
    view, _ = model()
    with caplog.at_level("INFO", logger="phalanx"):
        view.fit(X, Y, batch_size=8, epochs=2, verbose=0)
        view.evaluate(X, Y, batch_size=12, verbose=0)
    said = [record.getMessage() for record in caplog.records if "compiled in" in record.getMessage()]
    assert [line.split(" compiled in ")[0] for line in said] == ["train_step", "train_step", "test_step"]
    assert "for arrays of shape (4, 2, 3), (4, 2)" in said[0] and "(4, 1, 3)" in said[1]
    view.sync_to_host()
