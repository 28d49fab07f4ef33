"""`fit`, `evaluate`, `predict` and their like on replicas do what they do in plain Keras on one device."""

from __future__ import annotations

import copy
import pickle
import re
from collections import namedtuple
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import phalanx as px
import phalanx.keras  # first, so that Keras runs on JAX

import keras  # isort: skip
from keras import callbacks, layers, losses, optimizers  # isort: skip

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore:.*has been traced for .* kinds of arguments"),  # one pair for all
]

FOUR = px.Mirrored(jax.devices()[:4])
ROWS, BATCH = 22, 8  # batches of 8, 8 and 6 rows; the last one does not divide by four
CLOSE = {"rtol": 2e-5, "atol": 1e-6}

rng = np.random.default_rng(0)
X = rng.normal(size=(ROWS, 3)).astype("float32")
Y = (X @ rng.normal(size=(3, 2)) + 0.5).astype("float32")
WEIGHTS = rng.uniform(0, 2, ROWS).astype("float32")
QUIET = {"verbose": 0, "batch_size": BATCH}
IN_ORDER = {**QUIET, "shuffle": False}

NO_ROWS: dict[str, Any] = {"verbose": 0, "shuffle": False}  # for data in batches already

Action = Callable[[Any], Any]


class Counted(layers.Dense):
    """Counts how often it is traced."""

    calls = 0

    def call(self, inputs: Any) -> Any:
        type(self).calls += 1
        return super().call(inputs)


def regression() -> Any:
    return keras.Sequential([keras.Input((3,)), layers.Dense(4, "tanh"), Counted(2)])


def compiled(make: Callable[[], Any], **options: Any) -> tuple[Any, Any]:
    """A plain model and one on four replicas, with the same weights."""
    pair = make(), px.keras.replicate(make(), FOUR)
    for model in pair:
        settings = {"optimizer": optimizers.SGD(0.1, momentum=0.5), "loss": "mse", "metrics": ["mae"], **options}
        keep_optimizer_apart = {k: v() if callable(v) and k == "optimizer" else v for k, v in settings.items()}
        model.compile(**keep_optimizer_apart)
    if pair[0].built:
        pair[1].set_weights(pair[0].get_weights())
    return pair


@pytest.fixture(scope="module")
def kept() -> tuple[Any, Any, list[Any]]:
    """One pair for most tests, so that its steps are compiled once; and how it starts."""
    pair = compiled(regression)
    for model in pair:
        model.optimizer.build(model.trainable_variables)
    return *pair, state(pair[0])


@pytest.fixture
def models(kept) -> tuple[Any, Any]:
    *pair, start = kept
    for model in pair:
        restart(model, start)
    return tuple(pair)


def restart(model: Any, start: list[Any]) -> None:
    for variable, value in zip((*model.variables, *model.optimizer.variables), start):
        variable.assign(value)


def state(model: Any) -> list[Any]:
    return [np.array(v.value) for v in (*model.variables, *model.optimizer.variables)]


def assert_same(have: Any, want: Any, **tolerance: float) -> None:
    assert jax.tree.structure(have) == jax.tree.structure(want)
    for h, w in zip(jax.tree.leaves(have), jax.tree.leaves(want)):
        if np.asarray(w).dtype.kind in "OU":
            assert h == w
        else:
            assert type(h) is type(w)
            np.testing.assert_allclose(h, w, **(CLOSE | tolerance))


def both(pair: tuple[Any, Any], action: Action) -> Any:
    """Do the same with both, from the same start; results and variables must agree. Returns the result."""
    plain, replicated = pair
    start = state(plain) if plain.built and plain.optimizer.built else None
    results = []
    for model in pair:
        if start is not None:
            restart(model, start)
        keras.utils.set_random_seed(1)
        results.append(action(model))
    assert_same(results[1], results[0])
    assert_same(state(replicated), state(plain))
    return results[0]


def fit(*args: Any, **kwargs: Any) -> Action:
    return lambda model: model.fit(*args, **(IN_ORDER | kwargs)).history


def batches(*arrays: Any, size: int = BATCH) -> list[tuple[Any, ...]]:
    return [tuple(a[i : i + size] for a in arrays) for i in range(0, len(arrays[0]), size)]


# ---- data ----------------------------------------------------------------------------------------


class Sequence(keras.utils.PyDataset):
    """Batches by number."""

    def __init__(self, *arrays: Any, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.batches = batches(*arrays)
        self.ends = 0

    def __len__(self) -> int:
        return len(self.batches)

    def __getitem__(self, index: int) -> Any:
        return self.batches[index]

    def on_epoch_end(self) -> None:
        self.ends += 1


KINDS: dict[str, Callable[[], tuple[Any, ...]]] = {
    "numpy": lambda: (X, Y),
    "jax arrays": lambda: (jnp.asarray(X), jnp.asarray(Y)),
    "float64": lambda: (X.astype("float64"), Y.astype("float64")),
    "integers": lambda: ((2 * X).astype("int64"), Y),
    "PyDataset": lambda: (Sequence(X, Y),),
    "PyDataset with weights": lambda: (Sequence(X, Y, WEIGHTS),),
    "PyDataset with workers": lambda: (Sequence(X, Y, workers=2),),
}


@pytest.mark.parametrize("kind", KINDS)
def test_data(models, kind):
    both(models, lambda model: fit(*KINDS[kind](), epochs=2)(model))


@pytest.mark.parametrize("arrays", [(X, Y), (X, Y, WEIGHTS)], ids=["pairs", "triples"])
def test_generators(models, arrays):
    def twice() -> Iterator[Any]:
        for _ in range(2):
            yield from batches(*arrays)

    both(models, lambda model: model.fit(twice(), steps_per_epoch=3, epochs=2, **NO_ROWS).history)


def test_datasets_hear_of_the_end_of_epochs(models):
    def action(model: Any) -> int:
        data = Sequence(X, Y)
        model.fit(data, epochs=3, shuffle=False, verbose=0)
        return data.ends

    assert both(models, action) > 0


def two_inputs() -> Any:
    a, b = keras.Input((3,), name="a"), keras.Input((2,), name="b")
    hidden = layers.Concatenate()([layers.Dense(2)(a), b])
    return keras.Model(
        {"a": a, "b": b}, {"p": layers.Dense(2, name="p")(hidden), "q": layers.Dense(1, name="q")(hidden)}
    )


@pytest.fixture(scope="module")
def named() -> tuple[Any, Any]:
    return compiled(two_inputs, metrics=None, loss={"p": "mse", "q": "mae"})


def test_inputs_and_outputs_by_name(named):
    x, y = {"a": X, "b": Y}, {"p": Y, "q": X[:, :1]}
    both(
        named, lambda model: (fit(x, y, epochs=2)(model), model.evaluate(x, y, verbose=0), model.predict(x, verbose=0))
    )


def test_generators_of_dicts(named):
    def rows() -> Iterator[Any]:
        for x, y in batches(X, Y):
            yield {"a": x, "b": y}, {"p": y, "q": x[:, :1]}

    both(named, lambda model: model.fit(rows(), steps_per_epoch=3, **NO_ROWS).history)


@pytest.mark.parametrize("kind", [list, tuple])
def test_inputs_and_outputs_by_position(kind):
    def make() -> Any:
        model = two_inputs()
        return keras.Model(list(model.inputs), list(model.outputs))

    pair = compiled(make, loss=["mse", "mae"], metrics=None)
    x, y = kind((X, Y)), kind((Y, X[:, :1]))
    both(pair, lambda model: (fit(x, y)(model), model.predict(x, verbose=0)))


# ---- how much of it ------------------------------------------------------------------------------


def test_steps_per_epoch_go_through_the_data_as_in_keras(models):
    both(models, fit(X, Y, batch_size=6, steps_per_epoch=2, epochs=2))


def test_initial_epoch(models):
    seen = both(models, lambda model: model.fit(X, Y, **IN_ORDER, initial_epoch=2, epochs=4).epoch)
    assert seen == [2, 3]


def test_shuffling_follows_the_seed(models):
    both(models, fit(X, Y, shuffle=True, epochs=3))


def test_batch_sizes_do_not_divide(models):
    both(models, fit(X, Y, batch_size=7))


def test_one_row(models):
    both(models, fit(X[:1], Y[:1]))


def test_the_default_batch_size(models):
    both(models, lambda model: model.fit(X, Y, verbose=0, shuffle=False).history)


# ---- validation ----------------------------------------------------------------------------------


def test_validation_split(models):
    assert "val_mae" in both(models, fit(X, Y, validation_split=0.3, epochs=2))


def test_validation_split_with_weights(models):
    both(models, fit(X, Y, sample_weight=WEIGHTS, validation_split=0.3))


def test_validation_data(models):
    both(models, fit(X, Y, validation_data=(X[:9], Y[:9]), epochs=2))


def test_validation_data_with_weights(models):
    both(models, fit(X, Y, validation_data=(X[:9], Y[:9], WEIGHTS[:9])))


def test_validation_data_of_a_generator(models):
    def endless() -> Iterator[Any]:
        while True:
            yield from batches(X, Y)

    both(models, lambda model: fit(X, Y, validation_data=endless(), validation_steps=2, epochs=2)(model))


def test_validation_data_of_a_dataset(models):
    both(models, lambda model: fit(X, Y, validation_data=Sequence(X, Y), epochs=2)(model))


@pytest.mark.parametrize("freq", [2, [1, 3]], ids=["every second", "first and third"])
def test_validation_freq(models, freq):
    history = both(models, fit(X, Y, validation_data=(X, Y), validation_freq=freq, epochs=4))
    assert len(history["val_loss"]) == 2


def test_validation_batch_size_and_steps(models):
    both(models, fit(X, Y, validation_data=(X, Y), validation_batch_size=4, validation_steps=2))


# ---- weights of rows -----------------------------------------------------------------------------


def test_sample_weights(models):
    both(models, fit(X, Y, sample_weight=WEIGHTS, epochs=2))


def test_class_weights(models):
    y = (Y[:, :1] > 0).astype("float32")
    both(models, fit(X, y, class_weight={0: 0.3, 1: 2.0}, epochs=2))


def test_class_weights_and_sample_weights_exclude_each_other(models):
    for model in models:
        with pytest.raises(ValueError, match="cannot be `?specified at the same time|at the same time"):
            model.fit(X, Y[:, :1], sample_weight=WEIGHTS, class_weight={0: 1.0}, **QUIET)


# ---- callbacks -----------------------------------------------------------------------------------


def test_early_stopping_restores_the_best_weights(models):
    def action(model: Any) -> Any:
        stop = callbacks.EarlyStopping("loss", patience=1, min_delta=0.15, restore_best_weights=True)
        return fit(X, Y, epochs=9, callbacks=[stop])(model), stop.stopped_epoch

    _, stopped = both(models, action)
    assert 0 < stopped < 8


def test_model_checkpoints(models, tmp_path):
    def action(model: Any) -> Any:
        folder = tmp_path / type(model).__module__
        path = str(folder / "{epoch}.weights.h5")
        keep = callbacks.ModelCheckpoint(path, "loss", save_weights_only=True, save_best_only=True)
        whole = callbacks.ModelCheckpoint(str(folder / "whole.keras"))
        fit(X, Y, epochs=2, callbacks=[keep, whole])(model)
        names = sorted(file.name for file in folder.iterdir())
        loaded = keras.models.load_model(folder / "whole.keras", custom_objects={"Counted": Counted})
        assert_same(loaded.get_weights(), model.get_weights())
        model.load_weights(folder / "1.weights.h5")
        return names

    assert both(models, action) == ["1.weights.h5", "2.weights.h5", "whole.keras"]


def test_reduce_lr_on_plateau(models):
    def action(model: Any) -> Any:
        plateau = callbacks.ReduceLROnPlateau("loss", factor=0.5, patience=1, min_delta=5.0)
        return fit(X, Y, epochs=6, callbacks=[plateau])(model)

    assert both(models, action)["learning_rate"][-1] < 0.1


def test_learning_rate_schedulers(models):
    rates = both(models, fit(X, Y, epochs=3, callbacks=[callbacks.LearningRateScheduler(lambda e, lr: lr / 2)]))
    np.testing.assert_allclose(rates["learning_rate"], [0.05, 0.025, 0.0125], rtol=1e-6)


def test_backup_and_restore_goes_on_where_it_was_interrupted(models, tmp_path):
    def action(model: Any) -> Any:
        def fail(epoch: int, logs: Any) -> None:
            if epoch == 2:
                raise KeyboardInterrupt

        backup = callbacks.BackupAndRestore(tmp_path / str(id(model)), delete_checkpoint=True)
        with pytest.raises(KeyboardInterrupt):
            fit(X, Y, epochs=4, callbacks=[backup, callbacks.LambdaCallback(on_epoch_begin=fail)])(model)
        for variable in model.trainable_variables:
            variable.assign(jnp.zeros(variable.shape))
        epochs = model.fit(X, Y, **IN_ORDER, epochs=4, callbacks=[backup]).epoch
        model._initial_epoch = None  # which Keras keeps for later fits
        return epochs

    assert both(models, action) == [2, 3]


def test_csv_logger(models, tmp_path):
    def action(model: Any) -> Any:
        path = tmp_path / f"{id(model)}.csv"
        fit(X, Y, epochs=2, validation_data=(X, Y), callbacks=[callbacks.CSVLogger(path)])(model)
        return [[float(x) if x[0].isdigit() else x for x in line.split(",")] for line in path.read_text().split()]

    assert both(models, action)[0] == ["epoch", "loss", "mae", "val_loss", "val_mae"]


class Log(callbacks.Callback):
    """Writes down everything that it is told."""

    def __init__(self) -> None:
        super().__init__()
        self.events: list[Any] = []

    def __getattribute__(self, name: str) -> Any:
        if not re.match(r"on_(train|test|predict|epoch)", name):
            return super().__getattribute__(name)

        def write(*args: Any, **kwargs: Any) -> None:
            logs = kwargs.get("logs") or (args[-1] if args and isinstance(args[-1], dict) else {})
            numbers = [float(v) if np.ndim(v) == 0 else np.asarray(v) for v in logs.values()]
            self.events.append((name, [a for a in args if isinstance(a, int)], list(logs), numbers))

        return write


def test_callbacks_hear_the_same_in_the_same_order(models):
    def action(model: Any) -> Any:
        log = Log()
        model.fit(X, Y, **IN_ORDER, validation_data=(X, Y), callbacks=[log])
        model.evaluate(X, Y, **QUIET, callbacks=[log])
        model.predict(X, **QUIET, callbacks=[log])
        return log.events

    events = both(models, action)
    assert {"on_train_batch_end", "on_test_batch_end", "on_predict_batch_end"} <= {e[0] for e in events}


def test_callbacks_see_the_replicated_model(models):
    log = Log()
    models[1].fit(X, Y, **QUIET, callbacks=[log])
    assert log.model is models[1]


def test_terminate_on_nan(models):
    y = Y.copy()
    y[9] = np.nan

    def action(model: Any) -> int:
        start = model.get_weights()
        log = Log()
        model.fit(X, y, **IN_ORDER, epochs=3, callbacks=[callbacks.TerminateOnNaN(), log])
        model.set_weights(start)
        for variable in model.optimizer.variables[2:]:
            variable.assign(jnp.zeros(variable.shape))
        return sum(event[0] == "on_train_batch_end" for event in log.events)

    assert both(models, action) == 2


def at_batch(number: int, do: Callable[[], None]) -> Any:
    return callbacks.LambdaCallback(on_train_batch_end=lambda batch, logs: do() if batch == number else None)


def assign_weights(model: Any) -> None:
    model.layers[0].kernel.assign(0.5 * jnp.ones((3, 4)))


def assign_rate(model: Any) -> None:
    model.optimizer.learning_rate = 0.01


@pytest.mark.parametrize("assign", [assign_weights, assign_rate])
def test_what_a_callback_assigns_takes_effect_at_the_next_step_without_a_new_trace(models, assign):
    def action(model: Any) -> Any:
        def change() -> None:
            if model is models[0]:
                model.jax_state_sync()  # which Keras needs on one device; replicated models are in step always
            assign(model)

        model.fit(X, Y, **IN_ORDER)
        before = Counted.calls
        history = fit(X, Y, epochs=2, callbacks=[at_batch(0, change)])(model)
        return history, Counted.calls - before

    history, traces = both(models, action)
    assert traces == 0
    assert history != both(models, lambda model: (fit(X, Y)(model), fit(X, Y, epochs=2)(model))[1])


def test_callbacks_may_sync_the_state_as_in_keras(models):
    def action(model: Any) -> Any:
        def change() -> None:
            model.jax_state_sync()
            assign_weights(model)

        return fit(X, Y, callbacks=[at_batch(0, change)])(model)

    both(models, action)


def test_loops_stop_when_a_callback_says_so(models):
    def action(model: Any) -> Any:
        log = Log()

        def stopping(name: str) -> Any:
            stop = lambda batch, logs: setattr(model, f"stop_{name}", True)  # noqa: E731
            kind = {"training": "train", "evaluating": "test", "predicting": "predict"}[name]
            return [callbacks.LambdaCallback(**{f"on_{kind}_batch_end": stop}), log]

        fit(X, Y, epochs=3, callbacks=stopping("training"))(model)
        model.evaluate(X, Y, **QUIET, callbacks=stopping("evaluating"))
        predicted = model.predict(X, **QUIET, callbacks=stopping("predicting"))
        return len(log.events), predicted

    assert len(both(models, action)[1]) == BATCH


def test_an_exception_in_a_callback_leaves_the_model_usable(models):
    def fail() -> None:
        raise RuntimeError("a callback failed")

    def action(model: Any) -> Any:
        with pytest.raises(RuntimeError, match="a callback failed"):
            fit(X, Y, callbacks=[at_batch(1, fail)])(model)
        return fit(X, Y)(model), model.evaluate(X, Y, verbose=0)

    both(models, action)


def test_what_is_printed(models, capsys):
    def action(model: Any) -> Any:
        model.fit(X, Y, batch_size=BATCH, shuffle=False, epochs=2, validation_data=(X, Y), verbose=2)
        words = re.findall(r"Epoch \d+/\d+|\d+/\d+|\w+: [\d.]+", capsys.readouterr().out)
        return [w if "/" in w else (w.split()[0], float(w.split()[1])) for w in words]

    printed = both(models, action)
    assert printed[:2] == ["Epoch 1/2", "3/3"] and printed[-1][0] == "val_mae:"


# ---- evaluate and predict ------------------------------------------------------------------------


def test_evaluate_gives_a_list_or_a_dict(models):
    as_list, as_dict = both(models, lambda m: (m.evaluate(X, Y, **QUIET), m.evaluate(X, Y, **QUIET, return_dict=True)))
    assert list(as_dict) == ["loss", "mae"] and as_list == list(as_dict.values())


def test_evaluate_with_weights_and_steps(models):
    both(models, lambda m: m.evaluate(X, Y, sample_weight=WEIGHTS, **QUIET))
    both(models, lambda m: m.evaluate(X, Y, steps=2, **QUIET))
    both(models, lambda m: m.evaluate(Sequence(X, Y), verbose=0))


@pytest.mark.parametrize("rows", range(1, 10))
def test_predictions_are_one_for_each_row_in_order(models, rows):
    predicted = both(models, lambda model: model.predict(X[:rows], batch_size=5, verbose=0))
    assert predicted.shape == (rows, 2)


def test_predict_takes_generators_datasets_and_steps(models):
    both(models, lambda m: m.predict(((x,) for x, _ in batches(X, Y)), steps=3, verbose=0))
    both(models, lambda m: m.predict(Sequence(X), verbose=0))
    both(models, lambda m: m.predict(X, steps=2, **QUIET))
    both(models, lambda m: m.predict(jnp.asarray(X), **QUIET))


def test_predictions_need_no_compilation_and_no_built_model():
    model = keras.Sequential([layers.Dense(2)])
    predicted = px.keras.replicate(model, FOUR).predict(X, **QUIET)
    assert_same(predicted, model.predict(X, **QUIET))


Pair = namedtuple("Pair", "first second")


class Structured(keras.Model):
    """Gives a structure with a hole."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.dense, self.kind = layers.Dense(2), kind

    def call(self, x: Any) -> Any:
        y = self.dense(x)
        return {"dict": {"a": y, "b": (y + 1, y[:, 0])}, "namedtuple": Pair(y, [x]), "hole": {"a": y, "b": None}}[
            self.kind
        ]


@pytest.mark.parametrize("kind", ["dict", "namedtuple"])
def test_outputs_of_any_structure(kind):
    model = Structured(kind)
    model(X)
    replicated = px.keras.replicate(model, FOUR)
    assert_same(replicated.predict(X, **QUIET), model.predict(X, **QUIET))
    assert_same(replicated.predict_on_batch(X[:6]), model.predict_on_batch(X[:6]))


def test_outputs_with_holes():
    model = Structured("hole")
    model(X)
    replicated = px.keras.replicate(model, FOUR)
    expected = {"a": np.asarray(model(X)["a"]), "b": None}  # for which Keras has no array to put batches together
    assert_same(replicated.predict(X, **QUIET), expected)
    assert_same(replicated.predict_on_batch(X), expected)


# ---- single batches ------------------------------------------------------------------------------


@pytest.mark.parametrize("rows", [8, 6])
def test_single_batches(models, rows):
    x, y = X[:rows], Y[:rows]

    def action(model: Any) -> Any:
        return (
            model.train_on_batch(x, y),
            model.train_on_batch(x, y, return_dict=True),
            model.test_on_batch(x, y),
            model.test_on_batch(x, y, return_dict=True),
            model.predict_on_batch(x),
        )

    both(models, action)


def test_single_batches_with_weights(models):
    x, y, labels = X[:8], Y[:8], (Y[:8, :1] > 0).astype("float32")
    both(models, lambda m: m.train_on_batch(x, y, sample_weight=WEIGHTS[:8]))
    both(models, lambda m: m.train_on_batch(x, labels, class_weight={0: 0.2, 1: 3.0}))
    both(models, lambda m: m.test_on_batch(x, y, sample_weight=WEIGHTS[:8]))


def test_single_batches_of_names(named):
    x, y = {"a": X[:8], "b": Y[:8]}, {"p": Y[:8], "q": X[:8, :1]}
    both(named, lambda m: (m.train_on_batch(x, y, return_dict=True), m.test_on_batch(x, y), m.predict_on_batch(x)))


def test_single_batches_can_be_profiled(models):
    _, model = models
    found = px.profile(lambda batch: model.train_on_batch(*batch), [(X[:8], Y[:8])], steps=2)
    assert found.reads_numbers  # which Keras gives in place of arrays


# ---- how it is compiled --------------------------------------------------------------------------


@pytest.mark.parametrize("options", [{"run_eagerly": True}, {"steps_per_execution": 2}, {"jit_compile": False}])
def test_ways_to_run_steps_give_the_same_numbers(options):
    pair = compiled(regression, **options)

    x, y = X[:14], Y[:14]

    def action(model: Any) -> Any:
        log = Log()
        return (
            fit(x, y, epochs=2, callbacks=[log])(model),
            [event[0] for event in log.events],
            model.evaluate(x, y, **QUIET),
            model.predict(x, **QUIET),
        )

    both(pair, action)


def test_a_model_may_be_compiled_before_it_is_replicated_and_again_through_either_view(models):
    model = regression()
    model.compile(optimizers.SGD(0.1, momentum=0.5), "mse", metrics=["mae"])
    replicated = px.keras.replicate(model, FOUR)
    both((models[0], replicated), fit(X, Y))
    for view in (model, replicated):
        plain = regression()
        plain.set_weights(model.get_weights())
        for each, one in ((plain, plain), (view, replicated)):
            each.compile(optimizers.Adam(0.1), losses.MeanAbsoluteError(), metrics=["mse"])
            one.optimizer.build(one.trainable_variables)
        both((plain, replicated), fit(X, Y))


def test_losses_may_be_given_as_functions_and_metrics_may_be_absent():
    pair = compiled(regression, loss=lambda y, p: keras.ops.mean(keras.ops.abs(y - p), axis=-1), metrics=None)
    assert list(both(pair, fit(X, Y))) == ["loss"]


def test_a_loss_of_layers_alone():
    def make() -> Any:
        return keras.Sequential(
            [keras.Input((3,)), layers.Dense(2, kernel_regularizer="l2", activity_regularizer="l2")]
        )

    pair = compiled(make, loss=None, metrics=None)
    both(pair, lambda m: (m.fit(X, **IN_ORDER).history, m.evaluate(X, **QUIET)))


def test_outputs_without_a_loss_need_no_targets():
    pair = compiled(two_inputs, loss={"p": "mse", "q": None}, metrics=None)
    both(pair, fit({"a": X, "b": Y}, {"p": Y}))


class OwnLoss(keras.Model):
    """Computes its loss itself, and counts in a metric of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.dense = layers.Dense(2)
        self.seen = keras.metrics.Sum(name="seen")

    def call(self, x: Any) -> Any:
        return self.dense(x)

    def compute_loss(self, x: Any, y: Any, y_pred: Any, sample_weight: Any = None, training: bool = True) -> Any:
        return keras.ops.mean(keras.ops.abs(y - y_pred)) * (2.0 if training else 1.0)

    def compute_metrics(self, x: Any, y: Any, y_pred: Any, sample_weight: Any = None) -> Any:
        self.seen.update_state(x)
        return super().compute_metrics(x, y, y_pred, sample_weight)


def test_models_that_compute_their_loss_and_metrics():
    pair = compiled(OwnLoss, loss=None)
    for model in pair:
        model(X)
    pair[1].set_weights(pair[0].get_weights())
    history = both(pair, lambda m: (fit(X, Y, epochs=2)(m), m.evaluate(X, Y, **QUIET, return_dict=True)))[0]
    np.testing.assert_allclose(history["seen"], [X.sum()] * 2, rtol=1e-4)


# ---- kinds of models -----------------------------------------------------------------------------


class Subclassed(keras.Model):
    """Has a model and a shared layer in it, and an argument `training`."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = keras.Sequential([layers.Dense(3, "tanh"), layers.Dense(3)])
        self.last = layers.Dense(2)

    def call(self, x: Any, training: bool = False) -> Any:
        y = self.inner(self.inner(x))
        return self.last(2 * y if training else y)


def shared() -> Any:
    inputs = keras.Input((3,))
    layer = layers.Dense(3, "tanh")
    return keras.Model(inputs, layers.Dense(2)(layer(layer(inputs))))


def nested() -> Any:
    inputs = keras.Input((3,))
    inner = keras.Model(inputs, layers.Dense(4, "tanh")(inputs))
    return keras.Sequential([keras.Input((3,)), inner, keras.Sequential([layers.Dense(2)])])


def constrained() -> Any:
    return keras.Sequential([keras.Input((3,)), layers.Dense(2, kernel_constraint="non_neg")])


LAZY = {"sequential, not built": lambda: keras.Sequential([layers.Dense(2)]), "subclassed, not built": Subclassed}


@pytest.mark.parametrize("make", [shared, nested, constrained])
def test_kinds_of_models(make):
    both(compiled(make), lambda m: (fit(X, Y, epochs=2)(m), m.evaluate(X, Y, **QUIET)))


@pytest.mark.parametrize(("kind", "replicated_first"), list(zip(LAZY, [True, False])))
def test_models_that_are_built_by_their_first_batch(kind, replicated_first):
    results = []
    for on_replicas in (False, True):
        keras.utils.set_random_seed(5)
        model = LAZY[kind]()
        view = px.keras.replicate(model, FOUR) if on_replicas else model
        (view if replicated_first else model).compile("adam", "mse", metrics=["mae"])
        results.append((fit(X, Y, epochs=2)(view), state(view), model.predict(X, **QUIET)))
    assert_same(results[1], results[0])


def test_layers_are_frozen_and_thawed_between_fits(models):
    def action(model: Any) -> Any:
        first = model.layers[0]
        results = [fit(X, Y)(model)]
        for trainable in (False, True):
            first.trainable = trainable
            before = np.array(first.kernel.value)
            model.compile(optimizers.SGD(0.1, momentum=0.5), "mse", metrics=["mae"])
            results.append(fit(X, Y)(model))
            assert np.array_equal(first.kernel.value, before) is (not trainable)
        return results

    pair = compiled(regression)
    for model in pair:
        model.optimizer.build(model.trainable_variables)
    both(pair, action)


def test_a_layer_that_is_frozen_without_compiling_again_stays_as_it_is():
    replicated = compiled(regression)[1]
    first = replicated.layers[0]
    for trainable in (True, False, True):
        first.trainable = trainable
        before = np.array(first.kernel.value)
        replicated.fit(X, Y, **IN_ORDER)
        assert np.array_equal(first.kernel.value, before) is (not trainable)


# ---- the two views -------------------------------------------------------------------------------


def test_fits_follow_each_other_and_may_change_places(models):
    plain, replicated = models
    model = regression()
    model.compile(optimizers.SGD(0.1, momentum=0.5), "mse", metrics=["mae"])
    view = px.keras.replicate(model, FOUR)
    both((plain, view), lambda m: [fit(X, Y)(m) for _ in range(2)])
    both((plain, model), fit(X, Y))
    both((plain, view), fit(X, Y))
    both((plain, model), lambda m: (m.evaluate(X, Y, **QUIET), m.predict(X, **QUIET)))


def test_models_are_saved_and_loaded_through_either_view(tmp_path):
    model = regression()
    view = px.keras.replicate(model, FOUR)
    view.compile(optimizers.SGD(0.1, momentum=0.5), "mse", metrics=["mae"])
    fit(X, Y)(view)
    want = state(model)
    for number, one in enumerate((view, model)):
        one.save(tmp_path / f"{number}.keras")
        one.save_weights(tmp_path / f"{number}.weights.h5")
        loaded = keras.models.load_model(tmp_path / f"{number}.keras", custom_objects={"Counted": Counted})
        assert type(loaded) is keras.Sequential
        assert_same(state(loaded), want)
        for other in (view, model):
            other.set_weights([np.zeros_like(w) for w in model.get_weights()])
            other.load_weights(tmp_path / f"{number}.weights.h5")
            assert_same(state(model), want)
            assert_same(state(view), want)
    both((loaded, px.keras.replicate(loaded, FOUR)), fit(X, Y))


def test_copies_of_a_view_are_models_as_they_were(tmp_path):
    model = keras.Sequential([keras.Input((3,)), layers.Dense(2)])
    view = px.keras.replicate(model, FOUR)
    keras.saving.save_model(view, tmp_path / "model.keras")
    copies = [
        keras.models.load_model(tmp_path / "model.keras"),
        copy.deepcopy(view),
        pickle.loads(pickle.dumps(view)),
    ]
    for each in copies:
        assert type(each) is keras.Sequential
        assert_same(each.get_weights(), model.get_weights())
    for each in (keras.models.model_from_json(view.to_json()), keras.models.clone_model(view)):
        assert type(each) is keras.Sequential and each.count_params() == model.count_params()


def test_views_are_parts_of_other_models():
    model = keras.Sequential([keras.Input((3,)), layers.Dense(4), layers.Dense(2)])
    view = px.keras.replicate(model, FOUR)
    inside = keras.Model(view.inputs, view.layers[0].output)
    around = keras.Sequential([view, layers.Dense(1)])
    assert_same(inside.predict(X, verbose=0), np.asarray(model.layers[0](X)))
    assert around.predict(X, verbose=0).shape == (ROWS, 1)


def test_callbacks_may_evaluate_and_predict_through_either_view(models):
    plain, replicated = models
    model = regression()
    model.compile(optimizers.SGD(0.1, momentum=0.5), "mse", metrics=["mae"])
    view = px.keras.replicate(model, FOUR)

    def action(one: Any) -> Any:
        seen: list[Any] = []

        def look(epoch: int, logs: Any) -> None:
            other = model if one is view else one
            seen.extend((one.predict(X, **QUIET), other.predict(X, **QUIET), other.evaluate(X, Y, **QUIET)))

        return fit(X, Y, epochs=2, callbacks=[callbacks.LambdaCallback(on_epoch_end=look)])(one), seen

    both((plain, view), action)


def test_both_views_have_the_same_parts():
    model = regression()
    view = px.keras.replicate(model, FOUR)
    view.compile("sgd", "mse")
    view.fit(X, Y, **QUIET)
    assert isinstance(view, keras.Sequential)
    assert view.name == model.name and view.layers == model.layers and view.optimizer is model.optimizer
    assert [v.path for v in view.weights] == [v.path for v in model.weights]
    assert view.count_params() == model.count_params() and view.get_config() == model.get_config()
    assert model.history is view.history and model.history.history["loss"]
    model.layers[0].name_of_mine = 1
    view.note = "shared"
    assert model.note == "shared"
    assert_same(view(X), model(X))


# ---- mistakes ------------------------------------------------------------------------------------


def test_models_that_are_not_compiled(models):
    for model in (regression(), px.keras.replicate(regression(), FOUR)):
        for method in ("fit", "evaluate", "train_on_batch", "test_on_batch"):
            with pytest.raises(ValueError, match="call `compile\\(\\)`"):
                getattr(model, method)(X, Y)


def test_empty_data(models):
    replicated = models[1]
    before = state(replicated)
    for method in (replicated.fit, replicated.evaluate):
        with pytest.raises(px.errors.ArgumentError, match="the data is empty"):
            method(X[:0], Y[:0], verbose=0)
    with pytest.raises(px.errors.ArgumentError, match="the data is empty"):
        replicated.predict(X[:0], verbose=0)
    assert_same(state(replicated), before)


def test_columns_of_strings(models):
    replicated = models[1]
    before = state(replicated)
    with pytest.raises(px.errors.ArgumentTypeError, match="x is not numeric"):
        replicated.fit(np.array([["a", "b", "c"]] * ROWS), Y, **QUIET)
    assert_same(state(replicated), before)
    replicated.fit(X, Y, **QUIET)


def test_inputs_and_targets_of_different_length(models):
    for model in models:
        with pytest.raises(ValueError, match=r"same (first dimension|number of samples)|cardinality"):
            model.fit(X, Y[:5], **QUIET)


def test_a_model_that_fails_in_a_step_leaves_everything_as_it_was(models):
    def action(model: Any) -> Any:
        with pytest.raises(Exception, match=r"(?i)shape|dimension|incompatible"):
            model.train_on_batch(X[:8], np.ones((8, 5), "float32"))
        return fit(X, Y)(model)

    both(models, action)


def test_only_models_are_replicated():
    with pytest.raises(px.errors.ArgumentTypeError, match="takes a keras.Model, got Dense"):
        px.keras.replicate(layers.Dense(2), FOUR)


def test_labels_of_64_bits_build_a_model_without_a_warning():
    model = px.keras.replicate(keras.Sequential([layers.Dense(3)]), FOUR)
    model.compile("sgd", losses.SparseCategoricalCrossentropy(from_logits=True))
    model.fit(X, np.zeros(ROWS, "int64"), **QUIET)
    assert model.built
