"""Whatever counts rows or batches counts them once, also in batches that replicas cannot share equally."""

from __future__ import annotations

import copy

import jax
import numpy as np
import pytest

import phalanx as px
import phalanx.keras
from phalanx.errors import ArgumentError, ArgumentTypeError, StrategyError

import keras  # isort: skip
from keras import layers, ops  # isort: skip

rng = np.random.default_rng(0)
X = rng.normal(size=(31, 4)).astype(np.float32)
Y = (X @ rng.normal(size=(4, 2))).astype(np.float32)
BATCH = 24  # and seven rows, which no number of replicas but one divides


def strategy(n):
    return px.Mirrored(jax.devices()[:n])


def linear():
    keras.utils.set_random_seed(1)
    return keras.Sequential([layers.Input((4,)), layers.Dense(2)])


class Counts(layers.Layer):
    """Counts the rows that it sees, in two ways."""

    def build(self, shape):
        self.summed = self.add_weight(shape=(), dtype="int32", trainable=False, aggregation="sum", initializer="zeros")
        self.own = keras.Variable(0.0, trainable=False, aggregation="sum", synchronization="on_read")

    def call(self, x):
        self.summed.assign_add(ops.shape(x)[0])
        self.own.assign(self.own + ops.shape(x)[0])
        return x


@pytest.mark.parametrize("n", [1, 2, 3])
def test_sums_of_a_layer_count_each_row_once(n):
    counts = Counts()
    view = px.keras.replicate(keras.Sequential([layers.Input((4,)), counts, layers.Dense(2)]), strategy(n))
    view.compile("sgd", "mse")
    view.fit(X, Y, batch_size=BATCH, verbose=0)
    assert (int(counts.summed), float(counts.own)) == (31, 31.0)


def test_metrics_of_one_number_per_batch_count_each_batch_once():
    def difference(y, p):
        return ops.mean(ops.abs(y - p))

    def evaluated(model):
        model.compile("sgd", "mse", metrics=[difference])
        return model.evaluate(X, Y, batch_size=BATCH, verbose=0)

    expected = evaluated(linear())
    for n in (2, 3):
        assert evaluated(px.keras.replicate(linear(), strategy(n))) == pytest.approx(expected, rel=1e-5)


class Own(px.keras.Model):
    """A step of its own around Keras's, with a metric of its own."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.dense = layers.Dense(2, kernel_initializer="ones")
        self.mean = keras.metrics.Mean(name="mean")

    def call(self, x):
        return self.dense(x)

    def train_step(self, data):
        logs = super().train_step(data)
        self.mean.update_state(ops.mean(ops.abs(data[0])))
        return logs | {"double": 2 * logs["loss"], "mean": self.mean.result()}


def test_logs_derived_from_metrics_are_over_all_rows():
    def logs(n):
        with strategy(n).scope():
            model = Own()
        model.compile("sgd", "mse")
        return model.fit(X, Y, batch_size=BATCH, shuffle=False, verbose=0).history

    expected = logs(1)
    assert expected["double"][0] == pytest.approx(2 * expected["loss"][0])
    assert expected["mean"][0] == pytest.approx((np.abs(X[:24]).mean() + np.abs(X[24:]).mean()) / 2, rel=1e-5)
    for n in (2, 3):
        found = logs(n)
        assert {name: value[0] for name, value in found.items()} == pytest.approx(
            {name: value[0] for name, value in expected.items()}, rel=1e-5
        )


def test_predictions_are_one_for_each_row_or_refused():
    x = keras.Input((4,))
    constant = keras.Model(x, layers.Lambda(lambda x: ops.ones((ops.shape(x)[0], 2)), output_shape=(2,))(x))
    assert px.keras.replicate(constant, strategy(2)).predict(X[:6], verbose=0).shape == (6, 2)
    one = keras.Model(x, layers.Lambda(lambda x: ops.sum(x), output_shape=())(x))
    with pytest.raises(ArgumentError, match=r"output has shape \(\) for 3 rows"):
        px.keras.replicate(one, strategy(2)).predict(X[:6], verbose=0)


def test_padded_datasets_are_refused():
    view = px.keras.replicate(linear(), s := strategy(2))
    view.compile("sgd", "mse")
    padded = s.distribute_dataset((X, Y), batch_size=BATCH, remainder="pad", mask=True)
    with pytest.raises(ArgumentError, match="would count these rows"):
        view.fit(padded, verbose=0)
    whole = s.distribute_dataset((X[:24], Y[:24]), batch_size=BATCH)
    for wrong in ({"a": 1}, {}, {-1: 2}, [1, 2]):
        with pytest.raises(ArgumentError, match="class_weight must be a dict"):
            view.fit(whole, class_weight=wrong, verbose=0)


# ---- models of every make ------------------------------------------------------------------------


def test_a_model_of_inputs_and_outputs_trains_on_the_strategy_in_effect_and_spoils_no_other():
    x = keras.Input((4,))
    with strategy(2).scope() as s:
        model = px.keras.Model(x, layers.Dense(2)(x))
    assert model.strategy is s
    model.compile("sgd", "mse")
    model.fit(X, Y, verbose=0)
    assert isinstance(Own(), keras.Model)

    class Functional(px.keras.Model):
        def __init__(self):
            x = keras.Input((4,))
            super().__init__(inputs=x, outputs=layers.Dense(2)(x))

    with pytest.raises(ArgumentError, match="written with call"):
        Functional()
    assert isinstance(Own(), keras.Model)


def test_views_of_views_and_of_own_models_run_where_they_say():
    s, t = strategy(2), strategy(2)
    twice = px.keras.replicate(px.keras.replicate(linear(), s), s)
    own = px.keras.replicate(Own(), s)
    assert twice.strategy is own.strategy is s
    for view in (twice, own):
        view.compile("sgd", "mse")
        view.fit(X, Y, batch_size=BATCH, verbose=0)
    with pytest.raises(StrategyError, match="has trained on another Mirrored.*Make one strategy"):
        other = px.keras.replicate(own, t)
        other.fit(X, Y, verbose=0)
    default = linear()
    assert px.keras.replicate(default).strategy is px.keras.replicate(default).strategy


def test_own_models_are_saved_and_copied_with_their_compiled_settings(tmp_path):
    keras.saving.register_keras_serializable("test")(Own)
    model = Own()
    model.compile(keras.optimizers.Adam(0.01), "mse")
    model.fit(X, Y, batch_size=BATCH, verbose=0)
    model.save(tmp_path / "own.keras")
    loaded = keras.models.load_model(tmp_path / "own.keras")
    for again in (loaded, copy.deepcopy(model)):
        again.fit(X, Y, batch_size=BATCH, verbose=0)
        assert int(again.optimizer.iterations) == 4


def test_what_cannot_run_on_replicas_is_refused_by_name():
    for wrong in ("mirrored", jax.devices(), px.Mirrored):
        with pytest.raises(ArgumentTypeError, match="strategy must be a strategy"):
            px.keras.replicate(linear(), wrong)
    images = np.ones((4, 8, 8, 1), np.float32)
    crop = keras.Sequential(
        [layers.Input((8, 8, 1)), layers.RandomCrop(6, 6, name="crop"), layers.Flatten(), layers.Dense(1)]
    )
    view = px.keras.replicate(crop, strategy(1))
    view.compile("sgd", "mse")
    with pytest.raises(StrategyError, match=r"Layer 'crop' \(RandomCrop\) cannot be compiled"):
        view.fit(images, np.ones((4, 1)), verbose=0)
    view = px.keras.replicate(linear(), strategy(2))
    view.compile("sgd", "mse")
    with keras.distribution.DataParallel(devices=["cpu:0"]).scope(), pytest.raises(StrategyError, match="Unset it"):
        view.fit(X, Y, verbose=0)
    with pytest.raises(ArgumentTypeError, match="path of a folder"):
        view.fit(X, Y, resume=3, verbose=0)
