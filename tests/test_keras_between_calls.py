"""What changes between two calls of `fit`, `evaluate` or `predict` holds in the next: structure, optimizer, errors."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import phalanx as px
import phalanx.keras
from phalanx.errors import AggregationRequiredError, ArgumentError, ArgumentTypeError, StrategyError

import keras  # isort: skip
from keras import layers, optimizers  # isort: skip

pytestmark = pytest.mark.slow

FOUR = px.Mirrored(jax.devices()[:4])
rng = np.random.default_rng(0)
X = rng.normal(size=(24, 6)).astype(np.float32)
Y = rng.normal(size=(24, 1)).astype(np.float32)
IN_ORDER = {"batch_size": 8, "shuffle": False, "verbose": 0}


def model(cls=keras.Sequential, optimizer=None, loss="mse", **options):
    keras.utils.set_random_seed(0)
    made = cls([keras.Input((6,)), layers.Dense(5, "tanh"), layers.Dense(1)])
    made.compile(optimizer or optimizers.SGD(0.1), loss, **options)
    return made


def pair(**options):
    """A plain model, and one on four replicas."""
    return model(**options), px.keras.replicate(model(**options), FOUR)


# ---- structure -----------------------------------------------------------------------------------


def replace_the_last_layer(m):
    m.pop()
    m.add(layers.Dense(1, kernel_initializer="ones"))


def quantize(m, mode="int8"):
    for layer in m.layers:
        layer.quantize(mode)


def add_lora(m):
    keras.utils.set_random_seed(1)
    m.layers[0].enable_lora(2)
    m.layers[0].lora_kernel_b.assign(jnp.ones_like(m.layers[0].lora_kernel_b.value))


@pytest.mark.parametrize("change", [replace_the_last_layer, quantize, add_lora])
def test_predictions_are_those_of_the_model_as_it_is(change):
    predictions = []
    for m in pair():
        before = m.predict(X, verbose=0)
        change(m)
        predictions.append(m.predict(X, verbose=0))
        assert np.abs(predictions[-1] - before).max() > 1e-4
    np.testing.assert_allclose(predictions[1], predictions[0], rtol=1e-4, atol=1e-5)


def another_optimizer(m):
    m.optimizer = optimizers.SGD(0.0)


def a_schedule(m):
    m.optimizer.learning_rate = optimizers.schedules.ExponentialDecay(0.05, 1, 0.5)


@pytest.mark.parametrize("change", [another_optimizer, a_schedule])
def test_training_goes_on_with_the_optimizer_as_it_is(change):
    weights = []
    for m in pair():
        m.fit(X, Y, **IN_ORDER)
        change(m)
        m.fit(X, Y, **IN_ORDER)
        weights.append(m.get_weights())
    for have, want in zip(weights[1], weights[0]):
        np.testing.assert_allclose(have, want, rtol=1e-5, atol=1e-6)


def test_an_optimizer_that_does_not_know_the_weights_is_refused_as_in_keras():
    plain, view = pair()
    for m in (plain, view):
        m.fit(X, Y, **IN_ORDER)
        add_lora(m)
        before = m.get_weights()
        with pytest.raises(ValueError):
            m.fit(X, Y, **IN_ORDER)
    for have, want in zip(view.get_weights(), before):  # those of plain Keras are lost
        np.testing.assert_array_equal(have, want)
    view.compile(optimizers.SGD(0.1), "mse")
    view.fit(X, Y, **IN_ORDER)


def test_a_weight_that_is_frozen_by_itself_stays_as_it_is():
    _, view = pair()
    view.fit(X, Y, **IN_ORDER)
    view.layers[0].kernel.trainable = False
    kernel, bias = view.layers[0].get_weights()
    view.fit(X, Y, **IN_ORDER)
    np.testing.assert_array_equal(view.layers[0].get_weights()[0], kernel)
    assert (view.layers[0].get_weights()[1] != bias).all()


class Lazy(px.keras.Model):
    """Makes its layers' variables in the first step."""

    traces = 0

    def __init__(self):
        super().__init__()
        self.layer = layers.Dense(1)

    def call(self, x):
        return self.layer(x)

    def train_step(self, data):
        type(self).traces += 1
        x, y = data
        with px.GradientTape() as tape:
            loss = ((self(x) - y) ** 2).mean()
        weights = self.trainable_variables
        self.optimizer.apply_gradients(zip(tape.gradient(loss, weights), weights))
        return {"loss": loss}


def test_what_the_first_step_builds_is_no_change():
    with FOUR.scope():
        m = Lazy()
    m.compile("adam")
    for _ in range(3):
        m.fit(X, Y, batch_size=12, verbose=0)
    traces = Lazy.traces
    m.fit(X, Y, batch_size=12, verbose=0)
    assert traces == Lazy.traces <= 2  # the first creates variables, the second uses them


# ---- errors --------------------------------------------------------------------------------------


def test_an_update_that_was_not_finished_leaves_nothing_to_the_next_fit():
    weights = []
    for fails in (False, True):
        _, view = pair()
        if fails:
            batches = iter([(X[:8], 100 * Y[:8]), (X[:8, :5], Y[:8])])
            with pytest.raises(ValueError, match="incompatible with the layer"):
                view.fit(batches, accumulate_steps=2, steps_per_epoch=1, verbose=0)
        view.fit(X, Y, accumulate_steps=2, **IN_ORDER)
        weights.append(view.get_weights())
    for have, want in zip(*weights):
        np.testing.assert_allclose(have, want, rtol=1e-6)


def test_a_loss_that_is_no_single_number_is_refused():
    _, view = pair(loss=keras.losses.MeanSquaredError(reduction=None))
    before = view.get_weights()
    with pytest.raises(ArgumentError, match="loss has shape .2,., and only one number can be minimised"):
        view.fit(X, Y, **IN_ORDER)
    for have, want in zip(view.get_weights(), before):
        np.testing.assert_array_equal(have, want)


@pytest.mark.parametrize("method", ["fit", "evaluate", "predict", "train_on_batch"])
def test_a_model_is_refused_on_a_second_strategy_and_stays_usable_on_the_first(method):
    plain, first = model(), None
    first = px.keras.replicate(plain, FOUR)
    first.fit(X, Y, **IN_ORDER)
    second = px.keras.replicate(plain, px.Mirrored(jax.devices()[:2]))
    second.compile("sgd", "mse")
    arguments = (X,) if method == "predict" else (X, Y)
    with pytest.raises(StrategyError, match=r"has trained on another Mirrored\(cpu:0-3\).*replicate the model on it"):
        getattr(second, method)(*arguments)
    first.fit(X, Y, **IN_ORDER)
    assert first.predict(X, verbose=0).shape == (24, 1)


def test_layers_in_float8_are_refused_on_several_replicas():
    _, view = pair()
    quantize(view, "float8")
    view.compile(optimizers.SGD(0.1), "mse")
    with pytest.raises(StrategyError, match="float8 cannot train on several replicas"):
        view.fit(X, Y, **IN_ORDER)


def test_a_metric_of_the_scope_that_is_updated_outside_is_told_which_side_it_is_on_and_where():
    with FOUR.scope():
        metric = keras.metrics.Mean()
    with pytest.raises(
        AggregationRequiredError, match=r"metric .*outside the strategy's scope.*At .*test_keras_between"
    ):
        metric.update_state(1.0)


# ---- what users define ---------------------------------------------------------------------------


class Own(keras.Sequential):
    """Overrides Keras's methods, as KerasHub's tasks do."""

    def fit(self, *args, **kwargs):
        self.fits = getattr(self, "fits", 0) + 1
        return super().fit(*args, **kwargs)

    def evaluate(self, x, y=None, tag=None, **kwargs):
        return {"tag": tag, "loss": super().evaluate(x, y, **kwargs)}

    def predict(self, x, **kwargs):
        return super().predict(2 * x, **kwargs)

    def train_step(self, *args, **kwargs):
        return super().train_step(*args, **kwargs)


def test_methods_that_a_class_overrides_are_called_as_in_keras():
    results = []
    for m in pair(cls=Own):
        losses = m.fit(X, Y, epochs=2, **IN_ORDER).history["loss"]
        told = m.evaluate(X, Y, tag="mine", verbose=0)
        assert m.fits == 1 and told["tag"] == "mine"
        results.append([*losses, told["loss"], *m.predict(X, verbose=0).ravel()])
    np.testing.assert_allclose(results[1], results[0], rtol=1e-5, atol=1e-6)


def test_a_step_written_for_jax_is_refused():
    class ForJax(keras.Sequential):
        def train_step(self, state, data):
            return super().train_step(state, data)

    with pytest.raises(ArgumentTypeError, match="ForJax.train_step is written for JAX"):
        px.keras.replicate(model(cls=ForJax), FOUR)


def test_a_fit_in_a_callback_leaves_the_outer_one_as_it_was():
    class FitsNothing(keras.callbacks.Callback):
        def on_epoch_begin(self, epoch, logs=None):
            self.model.fit(X, Y, epochs=0, verbose=0)

    histories = []
    for callback in ([], [FitsNothing()]):
        _, view = pair(optimizer=optimizers.SGD(0.1, use_ema=True, ema_momentum=0.5))
        options = {"validation_data": (X, Y), "validate_with": "ema", "epochs": 2, **IN_ORDER}
        histories.append(view.fit(X, Y, callbacks=callback, **options).history["val_loss"])
    assert histories[0] == histories[1]
