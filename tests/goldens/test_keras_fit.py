"""Group "keras_fit": compile, fit, evaluate and predict of Keras models on a strategy.

The recorded results of one replica are the law wherever TensorFlow's depend on how a batch was cut: N replicas
compute what one device computes.
"""

from __future__ import annotations

import itertools

import numpy as np
import pytest

import phalanx as px
import phalanx.keras  # before Keras: it chooses the backend
from goldens.kit import GOLDENS, check, differs, replay
from goldens.loop import WEIGHTS, array

import keras  # isort: skip

pytestmark = pytest.mark.slow


def one_replica(golden):
    """What one device computes."""
    return GOLDENS[golden.name, 1]


def network(golden, strategy, *, outputs="linear", make=keras.Sequential, **layer_options):
    """Two dense layers with the scenario's weights, on the strategy."""
    layers = [
        keras.Input((3,)),
        keras.layers.Dense(4, activation="tanh", **layer_options),
        keras.layers.Dense(len(golden.inputs["b2"]), activation=outputs, **layer_options),
    ]
    return start(golden, px.keras.replicate(make(layers), strategy))


def start(golden, model):
    model.set_weights([array(golden.inputs[name]) for name in WEIGHTS])
    return model


def regression(golden, strategy, *, layer_options=None, **settings):
    model = network(golden, strategy, **(layer_options or {}))
    optimizer = keras.optimizers.SGD(golden.inputs.get("lr", 0.1))
    model.compile(**{"optimizer": optimizer, "loss": "mse", "metrics": ["mae"], "jit_compile": False, **settings})
    return model


def classifier(golden, strategy):
    model = network(golden, strategy, outputs="softmax")
    optimizer = keras.optimizers.SGD(golden.inputs["lr"])
    model.compile(optimizer, "sparse_categorical_crossentropy", metrics=["accuracy"], jit_compile=False)
    return model


_MADE = {}


def usual(make, golden, strategy):
    """A model that several scenarios share, from its start; its steps are compiled once for each number of replicas."""
    key = make, strategy.num_replicas
    model = _MADE[key] = _MADE.get(key) or make(golden, strategy)
    model.optimizer.learning_rate = golden.inputs.get("lr", 0.1)
    model.reset_metrics()
    return start(golden, model)


def rows(golden, key="x"):
    values = np.array(golden.inputs[key])
    return values.astype(np.int32 if values.dtype.kind == "i" else np.float32)


def fit(golden, model, *data, **options):
    o = golden.inputs
    data = data or (rows(golden), rows(golden, "y"))
    given = {"batch_size": o.get("batch"), "epochs": o.get("epochs", 1), "shuffle": False, "verbose": 0, **options}
    return model.fit(*data, **given)


def trained(model, history):
    floats = {name: [float(value) for value in values] for name, values in history.history.items()}
    return {"history": floats, "final_weights": dict(zip(WEIGHTS, model.get_weights()))}


def trained_and_used(golden, model, *, weights=None, **options):
    x, y, batch = rows(golden), rows(golden, "y"), golden.inputs["batch"]
    out = trained(model, fit(golden, model, sample_weight=weights, **options))
    scores = model.evaluate(x, y, batch_size=batch, sample_weight=weights, verbose=0, return_dict=True)
    return {**out, "evaluate": scores, "predict": model.predict(x, batch_size=batch, verbose=0)}


# ---- batches that divide, and others -------------------------------------------------------------


@replay("fit_even")
def test_fit_evaluate_and_predict(golden, strategy):
    return trained_and_used(golden, usual(regression, golden, strategy))


@differs("fit_uneven", "every row of a short batch counts once")
def test_short_last_batch(golden, strategy):
    one_replica(golden).check(trained_and_used(golden, usual(regression, golden, strategy)))


@differs("fit_uneven_3_rows", "every row of a batch that does not divide counts once")
def test_last_batch_that_does_not_divide(golden, strategy):
    one_replica(golden).check(trained_and_used(golden, usual(regression, golden, strategy)))


@differs("fit_uneven_adam", "every row of a short batch counts once")
def test_short_last_batch_with_adam(golden, strategy):
    optimizer = keras.optimizers.Adam(golden.inputs["lr"], epsilon=1e-7)
    one_replica(golden).check(trained_and_used(golden, regression(golden, strategy, optimizer=optimizer)))


@differs("fit_first_batch_not_divisible", "batches of any size train")
def test_first_batch_that_does_not_divide(golden, strategy):
    model = usual(regression, golden, strategy)
    one_replica(golden).check(trained(model, fit(golden, model)))


@differs("fit_evaluate_predict_only", "batches of any size are evaluated")
def test_evaluate_and_predict_without_training(golden, strategy):
    x, y = rows(golden), rows(golden, "y")
    model = usual(regression, golden, strategy)
    for batch in (4, 2, 3, 10):
        scores = model.evaluate(x, y, batch_size=batch, verbose=0, return_dict=True)
        outputs = model.predict(x, batch_size=batch, verbose=0)
        one_replica(golden).check({"evaluate": scores, "predict": outputs}, f"batch_{batch}")


@differs("fit_on_batch", "a batch is cut over the replicas, and each row comes back once")
def test_single_batches(golden, strategy):
    model = usual(regression, golden, strategy)
    x, y = rows(golden), rows(golden, "y")

    def floats(logs):
        return {name: float(value) for name, value in logs.items()}

    one_replica(golden).check(
        {
            "train_1": floats(model.train_on_batch(x[:4], y[:4], return_dict=True)),
            "train_2": floats(model.train_on_batch(x[:4], y[:4], return_dict=True)),
            "test": floats(model.test_on_batch(x[4:8], y[4:8], return_dict=True)),
            "predict": model.predict_on_batch(x[8:]),
            "final_weights": dict(zip(WEIGHTS, model.get_weights())),
        }
    )


# ---- weights of rows and classes -----------------------------------------------------------------


@differs("fit_sample_weight", "every row of a short batch counts by its weight")
def test_sample_weights(golden, strategy):
    model = regression(golden, strategy, weighted_metrics=["mae"])
    one_replica(golden).check(trained_and_used(golden, model, weights=rows(golden, "sample_weight")))


@differs("fit_classifier", "every row of a short batch counts once")
def test_classifier(golden, strategy):
    one_replica(golden).check(trained_and_used(golden, usual(classifier, golden, strategy)))


def class_weight(golden):
    return {int(label): weight for label, weight in golden.inputs["class_weight"].items()}


@replay("fit_class_weight")
def test_class_weights(golden, strategy):
    return trained_and_used(golden, usual(classifier, golden, strategy), class_weight=class_weight(golden))


@differs("fit_class_weight_uneven", "every row of a short batch counts by the weight of its class")
def test_class_weights_and_a_short_batch(golden, strategy):
    out = trained_and_used(golden, usual(classifier, golden, strategy), class_weight=class_weight(golden))
    one_replica(golden).check(out)


# ---- around the loop -----------------------------------------------------------------------------


@replay("fit_validation")
def test_validation(golden, strategy):
    model = usual(regression, golden, strategy)
    validation = rows(golden, "x_val"), rows(golden, "y_val")
    return trained(model, fit(golden, model, validation_data=validation, validation_batch_size=4))


@replay("fit_dataset_steps")
def test_epochs_of_a_given_number_of_steps(golden, strategy):
    model = usual(regression, golden, strategy)
    x, y = (np.split(rows(golden, key), 3) for key in "xy")
    batches = (batch for batch in itertools.cycle(zip(x, y)))
    steps = golden.inputs["steps_per_epoch"]
    return trained(model, fit(golden, model, batches, batch_size=None, steps_per_epoch=steps))


class _Events(keras.callbacks.Callback):
    def __init__(self):
        super().__init__()
        self.seen = []

    def _note(self, event, number, logs):
        self.seen.append([event, number, {name: float(value) for name, value in (logs or {}).items()}])

    def on_train_begin(self, logs=None):
        self._note("train_begin", None, logs)

    def on_train_end(self, logs=None):
        self._note("train_end", None, logs)

    def on_epoch_begin(self, epoch, logs=None):
        self._note("epoch_begin", epoch, logs)

    def on_epoch_end(self, epoch, logs=None):
        self._note("epoch_end", epoch, logs)

    def on_train_batch_end(self, batch, logs=None):
        self._note("batch_end", batch, logs)


@differs("fit_callback_logs", "logs are over the rows of all replicas, at the end of a batch too")
def test_what_callbacks_see(golden, strategy):
    model, events = usual(regression, golden, strategy), _Events()
    fit(golden, model, callbacks=[events])
    one_replica(golden).check({"events": events.seen})


@replay("fit_schedule_and_early_stopping")
def test_callbacks_that_act_on_the_model(golden, strategy):
    model = usual(regression, golden, strategy)
    callbacks = [
        keras.callbacks.LearningRateScheduler(lambda epoch: 0.2 / (epoch + 1)),
        keras.callbacks.EarlyStopping("loss", min_delta=1.0, patience=1),
    ]
    history = fit(golden, model, callbacks=callbacks)
    return {**trained(model, history), "epochs_run": len(history.epoch)}


@differs("fit_options", "several steps per execution work with every number of replicas")
def test_options_that_do_not_change_numbers(golden, strategy):
    options = {
        "a_run_eagerly": {"run_eagerly": True},
        "b_steps_per_execution": {"steps_per_execution": 2},
        "c_default_jit": {"jit_compile": "auto"},
    }
    for name, option in options.items():
        model = regression(golden, strategy, **option)
        one_replica(golden).check(trained(model, fit(golden, model)), name)


@differs("fit_scope_mixups", "a model may be made and fitted inside and outside the scope")
def test_models_made_and_fitted_inside_and_outside_the_scope(golden, strategy):
    def make(strategy=None):
        model = network(golden, strategy)
        model.compile(keras.optimizers.SGD(0.1), "mse", jit_compile=False)
        return model

    def loss(model):
        return fit(golden, model, batch_size=4).history

    with strategy.scope():
        made_inside = make()
    losses = [loss(made_inside)]
    made_outside = make(strategy)
    with strategy.scope():
        losses += [loss(made_outside), loss(make())]
    for found in losses:
        golden.check(found, "made_inside_fitted_inside")


# ---- models with more in them --------------------------------------------------------------------


@replay("fit_l2_regularizer")
def test_penalties_of_layers_count_once(golden, strategy):
    penalty = keras.regularizers.L2(golden.inputs["l2"])
    return trained_and_used(golden, regression(golden, strategy, layer_options={"kernel_regularizer": penalty}))


@differs("fit_batch_norm", "moving statistics are the mean over the replicas")
def test_batch_norm(golden, strategy):
    o, expected = golden.inputs, golden.expect
    first, last, norm = keras.layers.Dense(4), keras.layers.Dense(1), keras.layers.BatchNormalization(momentum=0.9)
    layers = [keras.Input((3,)), first, norm, keras.layers.Activation("tanh"), last]
    model = px.keras.replicate(keras.Sequential(layers), strategy)
    first.set_weights([array(o["W1"]), array(o["b1"])])
    last.set_weights([array(o["W2"]), array(o["b2"])])
    model.compile(keras.optimizers.SGD(o["lr"]), "mse", jit_compile=False)
    history = fit(golden, model)
    found = {"W1": first.kernel, "b1": first.bias, "W2": last.kernel, "b2": last.bias}
    found |= {"gamma": norm.gamma, "beta": norm.beta}
    golden.check(history.history, "history")
    for name, variable in found.items():
        golden.check(variable.numpy(), name)
    means, variances = (np.mean(expected[f"moving_{name}"]["components"], 0) for name in ("mean", "variance"))
    check(norm.moving_mean.numpy(), means.tolist())
    check(norm.moving_variance.numpy(), variances.tolist())

    x, y = rows(golden), rows(golden, "y")
    normed = (x @ np.array(expected["W1"]) + expected["b1"] - means) / np.sqrt(variances + 0.001)
    outputs = np.tanh(normed * expected["gamma"] + expected["beta"]) @ np.array(expected["W2"]) + expected["b2"]
    check(model.predict(x, batch_size=4, verbose=0), outputs.tolist())
    check(model.evaluate(x, y, batch_size=4, verbose=0), float(((outputs - y) ** 2).mean()))


@differs("fit_custom_train_step", "replicas' gradients are averaged: a loss is the mean over the rows of a step")
def test_custom_train_step(golden, strategy):
    class Model(keras.Sequential):
        def train_step(self, data):
            x, y = data
            with px.GradientTape() as tape:
                errors = ((self(x, training=True) - y) ** 2).mean(1)
                loss = errors.mean()
            gradients = tape.gradient(loss, self.trainable_variables)
            self.optimizer.apply_gradients(zip(gradients, self.trainable_variables))
            self.errors.update_state(errors)
            return {"err": self.errors.result()}

        @property
        def metrics(self):
            return [self.errors]

    model = network(golden, strategy, make=Model)
    model.errors = keras.metrics.Mean(name="err")
    model.compile(keras.optimizers.SGD(golden.inputs["lr"]), jit_compile=False)
    out = trained(model, fit(golden, model))

    # The same network, rows and batches as in a scenario in which Keras computes the mean.
    same = GOLDENS["fit_uneven", 1]
    assert all(same.inputs[name] == value for name, value in golden.inputs.items())
    same.check(out["history"]["err"], "history", "loss")
    same.check(out["final_weights"], "final_weights")
