"""A Keras model on replicas computes what it computes on one device: every number of a run is compared."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import numpy as np
import pytest

import phalanx as px
import phalanx.keras  # first, so that Keras runs on JAX

import keras  # isort: skip
from keras import layers, losses, metrics, optimizers  # isort: skip

pytestmark = pytest.mark.slow

REPLICAS = (1, 2, 3, 8)
BATCH = 24  # divides by all of them
DIVIDES = 2 * BATCH
LEFT_OVER = BATCH + 7  # seven rows divide by none but one
TOLERANCE = {"rtol": 1e-5, "atol": 2e-6}

rng = np.random.default_rng(0)
X = rng.normal(size=(DIVIDES, 4)).astype("float32")
Y = (X @ rng.normal(size=(4, 2)) + 0.3).astype("float32")
CLASSES = rng.integers(0, 3, DIVIDES, dtype="int32")
TOKENS = rng.integers(0, 5, (DIVIDES, 6), dtype="int32")
TOKENS[:5] = 0  # rows in which all is masked
WEIGHTS = rng.uniform(0, 2, DIVIDES).astype("float32")


class Numbers(NamedTuple):
    """All numbers of one run."""

    history: dict[str, list[float]]
    evaluated: dict[str, float]
    predicted: Any
    weights: list[Any]
    slots: list[Any]


class Case(NamedTuple):
    """A model, how it is compiled, what it is fed with."""

    model: Callable[[], Any]
    compiled: Callable[[], dict[str, Any]]
    x: Any = X
    y: Any = Y
    rows: int = LEFT_OVER
    fit: dict[str, Any] = {}
    weights: Any = None
    is_masked: bool = False
    """Then metrics of `fit` are not compared: on one device Keras forgets the mask on its way to them."""


def first(tree: Any, rows: int) -> Any:
    return jax.tree.map(lambda array: array[:rows], tree)


def run(case: Case, replicas: int | None) -> Numbers:
    keras.utils.set_random_seed(3)
    model = case.model()
    if replicas is not None:
        model = px.keras.replicate(model, px.Mirrored(jax.devices()[:replicas]))
    model.compile(**case.compiled())
    x, y, weights = (first(tree, case.rows) for tree in (case.x, case.y, case.weights))
    history = model.fit(
        x, y, sample_weight=weights, batch_size=BATCH, epochs=3, shuffle=False, verbose=0, **case.fit
    ).history
    slots = [np.array(v.value) for v in model.optimizer.variables]  # Keras gives them away with averaged weights
    evaluated = model.evaluate(x, y, sample_weight=weights, batch_size=LEFT_OVER, return_dict=True, verbose=0)
    return Numbers(
        {name: values for name, values in history.items() if name == "loss" or not case.is_masked},
        evaluated,
        model.predict(first(x, BATCH), batch_size=BATCH, verbose=0),
        [np.asarray(w) for w in model.get_weights()],
        slots,
    )


def check(case: Case) -> None:
    """Compare runs on replicas with one on one device."""
    expected = run(case, None)
    start = case.model().get_weights()
    for n in REPLICAS:
        got = run(case, n)
        assert got.history.keys() == expected.history.keys()
        assert got.evaluated.keys() == expected.evaluated.keys()
        for name, want, have in zip(Numbers._fields, expected, got):
            assert jax.tree.structure(have) == jax.tree.structure(want), name
            for w, h in zip(jax.tree.leaves(want), jax.tree.leaves(have)):
                np.testing.assert_allclose(h, w, **TOLERANCE, err_msg=f"{name} on {n} replicas")
    moved = [np.abs(b - a).max() for a, b in zip(start, expected.weights) if a.size]
    assert max(moved) > 1e-3, "the weights hardly moved: such a case shows nothing"


# ---- models --------------------------------------------------------------------------------------


def dense(**options: Any) -> Callable[[], Any]:
    return lambda: keras.Sequential([keras.Input((4,)), layers.Dense(2, **options)])


def classifier() -> Any:
    return keras.Sequential([keras.Input((4,)), layers.Dense(5, "tanh"), layers.Dense(3, "softmax")])


def sgd(loss: Any = "mse", **options: Any) -> Callable[[], dict[str, Any]]:
    def compiled() -> dict[str, Any]:
        return {"optimizer": optimizers.SGD(0.05, momentum=0.9), "loss": loss, **options}

    return compiled


def on_tokens(*more: Any) -> Callable[[], Any]:
    return lambda: keras.Sequential(
        [keras.Input((6,), dtype="int32"), layers.Embedding(5, 3, mask_zero=True), *[make() for make in more]]
    )


# ---- weights of rows -----------------------------------------------------------------------------


def weighted_metrics() -> dict[str, Any]:
    return {
        "metrics": ["mae", metrics.RootMeanSquaredError(name="rmse")],
        "weighted_metrics": ["mae", metrics.MeanSquaredError(name="weighted_mse")],
    }


@pytest.mark.parametrize("rows", [DIVIDES, LEFT_OVER, 5])
def test_sample_weights(rows):
    check(Case(dense(), lambda: {**sgd()(), **weighted_metrics()}, rows=rows, weights=WEIGHTS))


def test_class_weights():
    compiled = lambda: {  # noqa: E731
        **sgd("sparse_categorical_crossentropy")(),
        "metrics": ["accuracy", metrics.SparseTopKCategoricalAccuracy(2, name="top2")],
        "weighted_metrics": ["accuracy"],
    }
    check(Case(classifier, compiled, y=CLASSES, fit={"class_weight": {0: 0.2, 1: 1.0, 2: 3.0}}))


@pytest.mark.parametrize("weights", [None, WEIGHTS], ids=["unweighted", "weighted"])
@pytest.mark.parametrize("reduction", ["sum", "mean_with_sample_weight"])
def test_reductions_of_losses(reduction, weights):
    def compiled() -> dict[str, Any]:
        loss = losses.MeanSquaredError(reduction=reduction)
        return {"optimizer": optimizers.SGD(0.002), "loss": loss, "metrics": ["mse"]}

    if reduction == "mean_with_sample_weight":
        compiled = sgd(losses.MeanSquaredError(reduction=reduction))
    check(Case(dense(), compiled, weights=weights))


class OneNumber(losses.Loss):
    """The mean over rows, taken by the loss itself."""

    def call(self, y_true: Any, y_pred: Any) -> Any:
        return keras.ops.mean(keras.ops.square(y_true - y_pred))


@pytest.mark.parametrize("reduction", ["sum", "mean"])
def test_losses_that_are_one_number_for_all_rows(reduction):
    check(Case(dense(), sgd(OneNumber(reduction=reduction)), rows=DIVIDES))


@pytest.mark.filterwarnings("ignore:Explicitly requested dtype int64")  # by Keras
def test_metrics_count_all_rows():
    def compiled() -> dict[str, Any]:
        kinds = [
            metrics.AUC(20, name="auc"),
            metrics.Precision(name="precision"),
            metrics.Recall(name="recall"),
            metrics.BinaryIoU(name="iou"),
            metrics.R2Score(name="r2"),
            metrics.RootMeanSquaredError(name="rmse"),
            metrics.MeanMetricWrapper(lambda y, p: keras.ops.abs(y - p), name="own"),
        ]
        return {"optimizer": optimizers.SGD(0.5), "loss": "binary_crossentropy", "metrics": kinds}

    model = lambda: keras.Sequential([keras.Input((4,)), layers.Dense(1, "sigmoid")])  # noqa: E731
    check(Case(model, compiled, y=(Y[:, :1] > 0).astype("float32")))


# ---- masks ---------------------------------------------------------------------------------------


def test_masked_steps_of_a_sequence_count_neither_in_losses_nor_in_metrics():
    y = np.random.default_rng(1).normal(size=(DIVIDES, 6, 1)).astype("float32")
    model = on_tokens(lambda: layers.Dense(1))
    check(Case(model, sgd(metrics=["mae"], weighted_metrics=["mse"]), x=TOKENS, y=y, is_masked=True))


def test_masks_reach_metrics_in_training_too():
    y = np.random.default_rng(1).normal(size=(DIVIDES, 6, 1)).astype("float32")
    model = px.keras.replicate(on_tokens(lambda: layers.Dense(1))(), px.Mirrored(jax.devices()[:3]))
    model.compile(optimizers.SGD(0.0), "mse", metrics=["mae"])
    trained = model.fit(TOKENS, y, batch_size=20, verbose=0).history
    evaluated = model.evaluate(TOKENS, y, verbose=0, return_dict=True)
    np.testing.assert_allclose(trained["mae"], [evaluated["mae"]], rtol=1e-6)


def test_masked_and_weighted_steps():
    weights = np.random.default_rng(4).uniform(size=(DIVIDES, 6)).astype("float32")
    y = np.random.default_rng(1).normal(size=(DIVIDES, 6, 1)).astype("float32")
    model = on_tokens(lambda: layers.Dense(1))
    check(Case(model, sgd(weighted_metrics=["mae"]), x=TOKENS, y=y, weights=weights, is_masked=True))


def test_masks_that_end_in_a_recurrent_layer():
    steps = np.random.default_rng(2).normal(size=(DIVIDES, 5, 2)).astype("float32")
    steps[::3, 2:] = 0
    model = lambda: keras.Sequential(  # noqa: E731
        [keras.Input((5, 2)), layers.Masking(), layers.SimpleRNN(3), layers.Dense(2)]
    )
    check(Case(model, sgd(metrics=["mae"]), x=steps))


# ---- losses of layers ----------------------------------------------------------------------------


def test_penalties_of_weights_count_once():
    model = dense(kernel_regularizer=keras.regularizers.L1L2(0.01, 0.1), bias_regularizer="l2")
    check(Case(model, sgd()))


def test_penalties_of_activations_are_over_all_rows():
    check(Case(dense(activity_regularizer=keras.regularizers.L2(0.001)), sgd()))


class MeanOfOutputs(layers.Layer):
    """Adds the mean over the rows to the losses."""

    def call(self, x: Any) -> Any:
        self.add_loss(0.1 * keras.ops.mean(keras.ops.square(x)))
        return x


def test_losses_added_by_layers_count_once():
    model = lambda: keras.Sequential([keras.Input((4,)), layers.Dense(2), MeanOfOutputs()])  # noqa: E731
    check(Case(model, sgd()))


# ---- low-rank updates ----------------------------------------------------------------------------


def with_low_rank_updates() -> Any:
    model = keras.Sequential(
        [keras.Input((6,), dtype="int32"), layers.Embedding(5, 3), layers.Flatten(), layers.Dense(2)]
    )
    model.layers[0].enable_lora(1)
    model.layers[2].enable_lora(2)
    return model


def test_layers_with_low_rank_updates():
    compiled = lambda: {"optimizer": optimizers.Adam(0.05), "loss": "mse"}  # noqa: E731
    check(Case(with_low_rank_updates, compiled, x=TOKENS))


def test_low_rank_updates_of_a_model_that_was_trained_before():
    def trained(replicas: int | None) -> Any:
        keras.utils.set_random_seed(3)
        model = dense()()
        view = model if replicas is None else px.keras.replicate(model, px.Mirrored(jax.devices()[:replicas]))
        view.compile(optimizers.SGD(0.05), "mse")
        view.fit(X, Y, batch_size=BATCH, shuffle=False, verbose=0)
        frozen = np.asarray(model.layers[0]._kernel.value)
        model.layers[0].enable_lora(1)
        view.compile(optimizers.SGD(0.05), "mse")
        view.fit(X, Y, batch_size=BATCH, shuffle=False, verbose=0)
        np.testing.assert_array_equal(model.layers[0]._kernel.value, frozen)
        return model.get_weights()

    expected = trained(None)
    for n in REPLICAS:
        for want, have in zip(expected, trained(n), strict=True):
            np.testing.assert_allclose(have, want, **TOLERANCE)


# ---- several outputs -----------------------------------------------------------------------------


def two_outputs() -> Any:
    inputs = keras.Input((4,))
    hidden = layers.Dense(3, "tanh")(inputs)
    return keras.Model(
        inputs, {"a": layers.Dense(2, name="a")(hidden), "b": layers.Dense(3, "softmax", name="b")(hidden)}
    )


def two_outputs_in_a_list() -> Any:
    model = two_outputs()
    return keras.Model(model.inputs, [model.output["a"], model.output["b"]])


def test_losses_and_metrics_by_name_of_the_output():
    def compiled() -> dict[str, Any]:
        return {
            "optimizer": optimizers.Adam(0.02),
            "loss": {"a": "mse", "b": "sparse_categorical_crossentropy"},
            "loss_weights": {"a": 0.3, "b": 2.0},
            "metrics": {"a": ["mae"], "b": ["accuracy"]},
            "weighted_metrics": {"b": ["accuracy"]},
        }

    y = {"a": Y, "b": CLASSES}
    check(Case(two_outputs, compiled, y=y, weights={"a": WEIGHTS, "b": WEIGHTS[::-1].copy()}))


def test_losses_and_metrics_by_position_of_the_output():
    def compiled() -> dict[str, Any]:
        return {
            "optimizer": optimizers.Adam(0.02),
            "loss": ["mse", "sparse_categorical_crossentropy"],
            "loss_weights": [0.3, 2.0],
            "metrics": [["mae"], ["accuracy"]],
        }

    check(Case(two_outputs_in_a_list, compiled, y=[Y, CLASSES]))


# ---- optimizers ----------------------------------------------------------------------------------

OPTIMIZERS = {
    "momentum, clipped by norm": lambda: optimizers.SGD(0.05, momentum=0.9, nesterov=True, clipnorm=0.1),
    "adam, clipped by the norm of all": lambda: optimizers.Adam(0.02, global_clipnorm=0.1),
    "adam that accumulates": lambda: optimizers.Adam(0.02, gradient_accumulation_steps=2),
    "adam clipped, averaged over time": lambda: optimizers.Adam(
        0.02, clipvalue=0.05, use_ema=True, ema_momentum=0.8, ema_overwrite_frequency=2
    ),
    "adamw, averaged over time": lambda: optimizers.AdamW(0.02, weight_decay=0.1, use_ema=True, ema_momentum=0.7),
    "momentum with a schedule, accumulating, clipped": lambda: optimizers.SGD(
        optimizers.schedules.ExponentialDecay(0.1, 2, 0.5), momentum=0.5, gradient_accumulation_steps=3, clipnorm=0.3
    ),
    "loss scale": lambda: optimizers.LossScaleOptimizer(
        optimizers.Adam(0.02), initial_scale=8.0, dynamic_growth_steps=2
    ),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_optimizers(name):
    check(Case(dense(), lambda: {"optimizer": OPTIMIZERS[name](), "loss": "mse"}, weights=WEIGHTS))


def test_loss_scales_fall_where_one_row_overflows():
    def compiled() -> dict[str, Any]:
        return {"optimizer": optimizers.LossScaleOptimizer(optimizers.SGD(0.05, momentum=0.9)), "loss": "mae"}

    x = X.copy()
    x[30] = 1e38
    check(Case(dense(), compiled, x=x, rows=DIVIDES))
