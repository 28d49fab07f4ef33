"""Replicated models take distributed datasets; what cannot be cut into rows is refused."""

from __future__ import annotations

import jax
import numpy as np
import pytest

import phalanx as px
import phalanx.keras
from phalanx.errors import ArgumentError, StrategyError
from phalanx.keras.feed import DatasetFeed

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
    expected = plain.fit(
        X, Y, sample_weight=np.arange(12, dtype=np.float32), batch_size=4, shuffle=False, verbose=0
    ).history["loss"]
    assert view.fit(weighted, verbose=0).history["loss"] == pytest.approx(expected, rel=1e-5)
    with pytest.raises(ArgumentError, match="cannot be given at the same time"):
        view.fit(weighted, class_weight={0: 1.0}, verbose=0)


@pytest.mark.parametrize("steps", [2, 3, 4])
def test_several_steps_in_one_run_use_all_of_a_distributed_dataset(steps):
    """Of five batches the last run has fewer, and the last batch fewer rows."""
    found = []
    for with_dataset in (False, True):
        view, strategy = model()
        view.compile(keras.optimizers.SGD(0.1), "binary_crossentropy", metrics=["accuracy"], steps_per_execution=steps)
        x, y = np.concatenate([X, X[:8]]), np.concatenate([Y, Y[:8]])[:, None]

        def data(*arrays, batch=4):
            return strategy.distribute_dataset(arrays, batch_size=batch)

        if with_dataset:
            history = view.fit(data(x, y), validation_data=data(x, y), epochs=2, verbose=0).history
            told, rows = view.evaluate(data(x, y, batch=8), verbose=0), view.predict(data(x), verbose=0)
        else:
            options = {"batch_size": 4, "shuffle": False, "verbose": 0}
            history = view.fit(x, y, validation_data=(x, y), epochs=2, **options).history
            told, rows = view.evaluate(x, y, batch_size=8, verbose=0), view.predict(x, batch_size=4, verbose=0)
        assert int(view.optimizer.iterations.value) == 10
        found.append([*history["loss"], *history["val_loss"], *told, *rows.ravel()])
    np.testing.assert_allclose(found[1], found[0], rtol=1e-5)


def test_gradients_of_several_elements_of_a_dataset_make_one_update():
    weights = []
    for with_dataset in (False, True):
        view, strategy = model()
        view.build((None, 3))
        data = strategy.distribute_dataset((X, Y), batch_size=4)
        options = {} if with_dataset else {"batch_size": 4, "shuffle": False}
        view.fit(*((data,) if with_dataset else (X, Y)), accumulate_steps=2, epochs=2, verbose=0, **options)
        assert int(view.optimizer.iterations.value) == 4  # three elements: two updates in each epoch
        weights.append(view.get_weights())
    for have, want in zip(*weights):
        np.testing.assert_allclose(have, want, rtol=1e-5)


def test_what_is_given_beside_a_distributed_dataset_is_refused():
    view, strategy = model()
    data = strategy.distribute_dataset((X, Y), batch_size=4)
    for name, options in (("y", {"y": Y}), ("sample_weight", {"sample_weight": np.ones(12)})):
        with pytest.raises(ArgumentError, match=f"^{name} was given beside a DistributedDataset"):
            view.fit(data, verbose=0, **options)
        with pytest.raises(ArgumentError, match=f"^{name} was given beside a DistributedDataset"):
            view.evaluate(data, verbose=0, **options)


class Graph(keras.Model):
    """Rows, and nodes that are no rows."""

    def __init__(self):
        super().__init__()
        self.layer = keras.layers.Dense(1)

    def call(self, x):
        return self.layer(x["rows"]) * keras.ops.mean(x["nodes"])


@pytest.mark.parametrize("nodes", [4, 12, 10])
@pytest.mark.parametrize("steps", [1, 2])
def test_arrays_that_differ_in_length_are_not_cut(nodes, steps):
    found = []
    for view in (False, True):
        keras.utils.set_random_seed(0)
        m = Graph()
        m = px.keras.replicate(m, px.Mirrored(jax.devices()[:4])) if view else m
        m.compile("sgd", "mse", steps_per_execution=steps)
        ones = rng.permuted(np.arange(nodes, dtype=np.float32))[:, None]
        batches = [({"rows": X[:8], "nodes": ones}, Y[:8, None].astype(np.float32))] * 4
        history = m.fit((batch for batch in batches), steps_per_epoch=4, shuffle=False, verbose=0).history["loss"]
        found.append([*history, *m.predict(((x,) for x, _ in batches[:2]), steps=2, verbose=0).ravel()])
    np.testing.assert_allclose(found[1], found[0], rtol=1e-5, atol=1e-6)


def test_a_dataset_of_another_strategy_is_refused():
    view, _ = model()
    other = px.Mirrored(jax.devices()[:2]).distribute_dataset((X, Y), batch_size=4)
    with pytest.raises(StrategyError, match="the model is on"):
        view.fit(other, verbose=0)


@pytest.mark.parametrize("layer", [keras.layers.LSTM, keras.layers.GRU])
@pytest.mark.parametrize("n", [1, 4])
def test_stateful_layers_keep_the_state_of_each_row(layer, n):
    sequences = rng.normal(size=(8, 6, 2)).astype(np.float32)

    def stateful():
        keras.utils.set_random_seed(1)
        return keras.Sequential([keras.layers.Input(batch_shape=(8, 2, 2)), layer(2, stateful=True, name="memory")])

    plain, original = stateful(), stateful()
    view = px.keras.replicate(original, px.Mirrored(jax.devices()[:n]))
    for _ in range(2):
        for start in (0, 2, 4):  # the state goes on from part to part
            part = sequences[:, start : start + 2]
            expected = np.asarray(plain(part))
            np.testing.assert_allclose(view.predict(part, batch_size=8, verbose=0), expected, rtol=1e-5, atol=1e-6)
        for a, b in zip(original.layers[0].states, plain.layers[0].states):
            np.testing.assert_allclose(np.asarray(a), np.asarray(b), rtol=1e-5, atol=1e-6)
        for m in (plain, original):
            m.layers[0].reset_state()
    view.compile("sgd", "mse")
    view.fit(sequences[:, :2], expected, batch_size=8, verbose=0)
    with pytest.raises(ValueError, match="Expected batch size"):
        view.predict(sequences[:6, :2], batch_size=6, verbose=0)


def test_a_state_that_the_replicas_cannot_share_is_refused():
    layer = keras.layers.GRU(2, stateful=True)
    uneven = keras.Sequential([keras.layers.Input(batch_shape=(4, 2, 2)), layer])
    view = px.keras.replicate(uneven, px.Mirrored(jax.devices()[:3]))
    with pytest.raises(StrategyError, match="for 4 rows, which 3 replicas cannot share"):
        view.predict(np.ones((4, 2, 2), np.float32), batch_size=4, verbose=0)


def test_each_compilation_is_logged_with_its_shapes_and_time(caplog):
    view, _ = model()
    with caplog.at_level("INFO", logger="phalanx"):
        view.fit(X, Y, batch_size=8, epochs=2, verbose=0)
        view.evaluate(X, Y, batch_size=12, verbose=0)
    said = [record.getMessage() for record in caplog.records if "_step: compiled in" in record.getMessage()]
    assert [line.split(": compiled in ")[0] for line in said] == ["train_step", "train_step", "test_step"]
    assert "arguments of shape (4, 2, 3), (4, 2)" in said[0] and "(4, 1, 3)" in said[1]
    view.sync_to_host()


def test_elements_of_a_run_that_were_drawn_do_not_count_before_all_are_there():
    """So that a program that is asked to stop while it waits for the others trains on them when it goes on."""
    strategy = px.Mirrored(jax.devices()[:4])

    def batches():
        for i in range(4):
            if i == 3:
                raise RuntimeError("asked to stop")
            yield X[:4]

    feed = DatasetFeed(strategy.distribute_dataset(batches, prefetch=0), strategy, steps=2)
    assert feed.position.state_dict()["element"] == 0
    runs, feed.position.in_pass = feed.get_jax_iterator(), True
    next(runs)
    assert feed.position.state_dict()["element"] == 2
    with pytest.raises(RuntimeError, match="asked to stop"):
        next(runs)
    assert feed.position.state_dict()["element"] == 2


def test_on_accelerators_too_no_element_is_drawn_before_its_step(monkeypatch):
    """Keras draws one batch ahead there, which a checkpoint would take for used."""
    monkeypatch.setattr("keras.src.backend.jax.trainer.jax.default_backend", lambda: "gpu")
    view, strategy = model()
    data = strategy.distribute_dataset((X, Y), batch_size=4, prefetch=0)
    drawn = []

    class Looks(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            drawn.append(data.state_dict()["element"])

    view.fit(data, verbose=0, callbacks=[Looks()])
    assert drawn == [1, 2, 3]
