"""Training that goes on where it stopped, and validation with averaged weights."""

from __future__ import annotations

import itertools

import jax
import numpy as np
import pytest

import phalanx as px
import phalanx.keras
from phalanx.errors import ArgumentError
from phalanx.keras.steps import Fitting

import keras  # isort: skip

pytestmark = pytest.mark.slow

rng = np.random.default_rng(0)
X = rng.normal(size=(22, 4)).astype(np.float32)
Y = X.sum(1, keepdims=True)


def replicated(optimizer=None, n=2):
    keras.utils.set_random_seed(1)
    model = keras.Sequential([keras.layers.Dense(8, "relu"), keras.layers.Dropout(0.1), keras.layers.Dense(1)])
    view = px.keras.replicate(model, px.Mirrored(jax.devices()[:n]))
    view.compile(optimizer or keras.optimizers.Adam(0.01), "mse")
    return view


def fit(view, **options):
    return view.fit(X, Y, batch_size=8, shuffle=False, verbose=0, **options)


class Fails(keras.callbacks.Callback):
    """Breaks off in one epoch."""

    def __init__(self, epoch):
        super().__init__()
        self.epoch = epoch

    def on_epoch_begin(self, epoch, logs=None):
        if epoch == self.epoch:
            raise RuntimeError("power failure")


def test_a_run_goes_on_after_the_last_whole_epoch_and_ends_as_if_it_had_never_stopped(tmp_path):
    uninterrupted = replicated()
    whole = fit(uninterrupted, epochs=5).history["loss"]
    with pytest.raises(RuntimeError, match="power failure"):
        fit(replicated(), epochs=5, resume=tmp_path, callbacks=[Fails(3)])
    resumed = replicated()  # not built yet
    history = fit(resumed, epochs=5, resume=tmp_path)
    assert history.epoch == [3, 4]
    assert history.history["loss"] == whole[3:]
    for a, b in zip(resumed.get_weights(), uninterrupted.get_weights()):
        np.testing.assert_array_equal(a, b)
    finished = replicated()
    assert fit(finished, epochs=5, resume=tmp_path).epoch == []
    for a, b in zip(finished.get_weights(), uninterrupted.get_weights()):
        np.testing.assert_array_equal(a, b)


class Counts(keras.callbacks.Callback):
    def __init__(self):
        super().__init__()
        self.epochs = 0

    def on_epoch_end(self, epoch, logs=None):
        self.epochs += 1

    def state_dict(self):
        return {"epochs": self.epochs}

    def load_state_dict(self, state):
        self.epochs = state["epochs"]


def test_what_callbacks_have_counted_goes_on(tmp_path):
    def watches():
        # Nothing is an improvement after the first epoch, so that everybody runs out of patience.
        plateaus = [keras.callbacks.ReduceLROnPlateau("loss", patience=n, min_delta=1e9, cooldown=1) for n in (2, 3)]
        return [keras.callbacks.EarlyStopping("loss", patience=4, min_delta=1e9), *plateaus, Counts()]

    def counted(callbacks):
        stopping, first, second, counts = callbacks
        plateaus = [(c.wait, c.cooldown_counter, c.best) for c in (first, second)]
        return stopping.wait, stopping.stopped_epoch, stopping.best, stopping.best_epoch, plateaus, counts.epochs

    uninterrupted, expected = replicated(), watches()
    whole = fit(uninterrupted, epochs=9, callbacks=expected)
    assert whole.epoch == [0, 1, 2, 3, 4], "it ended early"
    with pytest.raises(RuntimeError, match="power failure"):
        fit(replicated(), epochs=9, resume=tmp_path, callbacks=[*watches(), Fails(3)])
    resumed, callbacks = replicated(), watches()
    assert fit(resumed, epochs=9, resume=tmp_path, callbacks=callbacks).epoch == [3, 4]
    assert counted(callbacks) == counted(expected)
    for a, b in zip(resumed.get_weights(), uninterrupted.get_weights()):
        np.testing.assert_array_equal(a, b)


def test_another_run_may_have_other_callbacks_and_is_told_what_is_not_kept(tmp_path, caplog):
    def stopping(**options):
        return keras.callbacks.EarlyStopping("loss", patience=9, min_delta=1e9, **options)

    fit(replicated(), epochs=2, resume=tmp_path, callbacks=[Counts(), stopping()])
    for epochs, callbacks, is_warned in (
        (3, [stopping(restore_best_weights=True)], True),
        (4, [], False),
        (5, [stopping()], False),
    ):
        caplog.clear()
        with caplog.at_level("WARNING", logger="phalanx"):
            assert fit(replicated(), epochs=epochs, resume=tmp_path, callbacks=callbacks).epoch == [epochs - 1]
        assert ("the best weights so far, of epoch 1, were not kept" in caplog.text) == is_warned


class FailsAtBatch(keras.callbacks.Callback):
    """Breaks off before one batch of the second epoch; notes the batches that it was told of."""

    def __init__(self, batch=None):
        super().__init__()
        self.batch = batch
        self.seen = []

    def on_epoch_begin(self, epoch, logs=None):
        self.epoch = epoch

    def on_train_batch_begin(self, batch, logs=None):
        if (self.epoch, batch) == (1, self.batch):
            raise RuntimeError("power failure")
        self.seen.append((self.epoch, batch))


@pytest.mark.parametrize("data", ["arrays", "generator", "distributed", "endless"])
def test_the_order_of_rows_goes_on_as_if_training_had_never_stopped(tmp_path, data):
    def source(view):
        if data == "arrays":
            return {"x": X, "y": Y, "batch_size": 4, "shuffle": True}
        if data == "generator":
            return {"x": Draws()}
        rows = view.strategy.distribute_dataset((X[:16], Y[:16]), 4, shuffle=True, seed=3)
        if data == "endless":

            def endless(epoch):
                return (row for _ in itertools.count() for row in zip(X, Y))

            rows = view.strategy.distribute_dataset(endless, 4)
        return {"x": rows} if data == "distributed" else {"x": rows, "steps_per_epoch": 3}

    class Draws(keras.utils.PyDataset):
        def __len__(self):
            return 4

        def __getitem__(self, i):
            rows = np.random.permutation(len(X))[:8]
            return X[rows], Y[rows]

    def run(**options):
        view = replicated()
        history = view.fit(**source(view), epochs=3, verbose=0, **options)
        return view.get_weights(), history.history.get("loss", [])

    whole = FailsAtBatch()
    weights, losses = run(callbacks=[whole])
    with pytest.raises(RuntimeError, match="power failure"):
        run(resume=tmp_path / "epochs", callbacks=[Fails(2)])
    np.random.seed(99)
    resumed, rest = run(resume=tmp_path / "epochs")
    assert rest == losses[2:]
    for a, b in zip(resumed, weights):
        np.testing.assert_array_equal(a, b)
    # In the middle of the second epoch.
    with pytest.raises(RuntimeError, match="power failure"):
        run(resume=px.CheckpointManager(tmp_path / "steps", every=1), callbacks=[FailsAtBatch(1)])
    np.random.seed(99)
    seen = FailsAtBatch()
    resumed, rest = run(resume=px.CheckpointManager(tmp_path / "steps", every=1), callbacks=[seen])
    assert rest == losses[1:]
    assert seen.seen == [at for at in whole.seen if at >= (1, 1)]
    for a, b in zip(resumed, weights):
        np.testing.assert_array_equal(a, b)
    assert run(resume=tmp_path / "steps")[1] == [], "finished"


def test_a_model_whose_own_step_makes_its_variables_is_resumed(tmp_path):
    class Late(px.keras.Model):
        def __init__(self):
            super().__init__()
            self.dense = None

        def train_step(self, data):
            x, y = data
            if self.dense is None:
                self.dense = keras.layers.Dense(1)
            with px.GradientTape() as tape:
                loss = ((self.dense(x) - y) ** 2).mean()
            grads = tape.gradient(loss, self.dense.trainable_variables)
            self.optimizer.apply(grads, self.dense.trainable_variables)
            return {"loss": loss}

    def run(**options):
        keras.utils.set_random_seed(1)
        with px.Mirrored(jax.devices()[:2]).scope():
            model = Late()
        model.compile(keras.optimizers.Adam(0.1))
        history = model.fit(X, Y, batch_size=8, shuffle=False, epochs=4, verbose=0, **options)
        return history.history["loss"]

    losses = run()
    with pytest.raises(RuntimeError, match="power failure"):
        run(resume=tmp_path, callbacks=[Fails(2)])
    assert run(resume=tmp_path) == losses[2:]


def test_validation_sees_averaged_weights_and_training_the_others():
    view = replicated(keras.optimizers.SGD(0.1, use_ema=True, ema_momentum=0.5))
    during = []

    class Evaluates(keras.callbacks.Callback):
        def on_epoch_end(self, epoch, logs=None):
            during.append(view.evaluate(X, Y, batch_size=8, verbose=0))

    plain = fit(view, epochs=2, callbacks=[Evaluates()], validation_data=(X, Y)).history
    assert plain["val_loss"] == pytest.approx(during)
    view = replicated(keras.optimizers.SGD(0.1, use_ema=True, ema_momentum=0.5))
    averaged = fit(view, epochs=2, validation_data=(X, Y), validate_with="ema").history
    assert averaged["loss"] == plain["loss"]
    # At the end of fit Keras itself puts the averages into the weights.
    assert averaged["val_loss"][-1] == pytest.approx(view.evaluate(X, Y, batch_size=8, verbose=0))
    assert averaged["val_loss"][0] != pytest.approx(plain["val_loss"][0], rel=1e-3)


def test_an_error_in_validation_leaves_the_weights_of_training():
    view = replicated(keras.optimizers.SGD(0.1, use_ema=True))
    fit(view, epochs=1)
    steps = view._steps
    steps.fitting = Fitting(averages=phalanx.keras._keras.averages(view.optimizer))
    view.set_weights([2 * w for w in view.get_weights()])
    before = view.get_weights()
    with pytest.raises(RuntimeError, match="power failure"), steps.averaged_weights():
        assert any((a != b).any() for a, b in zip(view.get_weights(), before))
        raise RuntimeError("power failure")
    for a, b in zip(view.get_weights(), before):
        np.testing.assert_array_equal(a, b)


def test_averages_that_are_not_kept_are_asked_for():
    with pytest.raises(ArgumentError, match="use_ema=True"):
        fit(replicated(), epochs=1, validation_data=(X, Y), validate_with="ema")
    with pytest.raises(ArgumentError, match="validate_with must be one of 'weights', 'ema'"):
        fit(replicated(), epochs=1, validate_with="best")


def test_an_epoch_that_was_begun_goes_on_with_as_many_batches_in_a_run(tmp_path):
    def run(steps, **options):
        view = replicated()
        view.compile("sgd", "mse", steps_per_execution=steps)
        view.fit(X[:16], Y[:16], batch_size=4, epochs=3, verbose=0, **options)

    with pytest.raises(RuntimeError, match="power failure"):
        run(1, resume=px.CheckpointManager(tmp_path, every=1), callbacks=[FailsAtBatch(2)])
    with pytest.raises(ArgumentError, match="begun with 1 batches in each run, and there are 2 now"):
        run(2, resume=tmp_path)


def test_a_finite_dataset_in_epochs_of_another_length_cannot_be_resumed(tmp_path):
    view = replicated()
    dataset = view.strategy.distribute_dataset((X[:16], Y[:16]), 4)
    with pytest.raises(ArgumentError, match="may end anywhere in a pass of 4 batches"):
        view.fit(dataset, steps_per_epoch=2, epochs=2, verbose=0, resume=tmp_path)


# ---- averages ------------------------------------------------------------------------------------


class Averaging(keras.optimizers.SGD):
    """Keeps averages, and what the weights were when `fit` ended, which Keras then replaces by these."""

    def __init__(self):
        super().__init__(0.1, momentum=0.5, use_ema=True, ema_momentum=0.5)
        self.at_end = []

    def finalize_variable_values(self, var_list):
        self.at_end = arrays(var_list)
        super().finalize_variable_values(var_list)


def arrays(variables):
    return [np.array(v.value) for v in variables]


def same(a, b):
    return [x.tobytes() for x in a] == [x.tobytes() for x in b]


class Looks(keras.callbacks.Callback):
    """Keeps the weights and their averages at the start of each epoch."""

    def __init__(self):
        super().__init__()
        self.seen = {}

    def on_epoch_begin(self, epoch, logs=None):
        optimizer = self.model.optimizer
        pairs = phalanx.keras._keras.averages(optimizer)() if optimizer.built else ()
        weights, averages = zip(*pairs) if optimizer.built else ((), ())
        self.seen[epoch] = arrays(weights), arrays(averages)


@pytest.mark.parametrize("n", [1, 4])
def test_averages_are_kept_beside_the_weights_and_go_on_as_if_training_had_never_stopped(tmp_path, n):
    uninterrupted, stopped, resumed = (replicated(Averaging(), n) for _ in range(3))
    whole, before, after = Looks(), Looks(), Looks()
    options = {"epochs": 4, "validation_data": (X, Y), "validate_with": "ema"}
    expected = fit(uninterrupted, callbacks=[whole], **options).history
    with pytest.raises(RuntimeError, match="power failure"):
        fit(stopped, resume=tmp_path, callbacks=[before, Fails(2)], **options)
    found = fit(resumed, resume=tmp_path, callbacks=[after], **options).history
    assert list(after.seen) == [2, 3]
    weights, averages = after.seen[2]
    assert not same(weights, averages)
    assert same(weights, before.seen[2][0]) and same(averages, before.seen[2][1])
    assert found == {name: values[2:] for name, values in expected.items()}
    assert same(resumed.optimizer.at_end, uninterrupted.optimizer.at_end)
    for model in (resumed, uninterrupted):  # at the end of fit Keras puts the averages into the weights
        weights, averages = zip(*phalanx.keras._keras.averages(model.optimizer)())
        assert same(arrays(weights), arrays(averages)) and not same(arrays(weights), model.optimizer.at_end)
    assert same(arrays(resumed.optimizer.variables), arrays(uninterrupted.optimizer.variables))


class BreaksInValidation(keras.callbacks.Callback):
    """Keeps the weights of the last training step and those that validation sees, and fails there."""

    def on_train_batch_end(self, batch, logs=None):
        self.trained = arrays(self.model.trainable_variables)

    def on_test_batch_end(self, batch, logs=None):
        self.validated = arrays(self.model.trainable_variables)
        if batch == 1:
            raise RuntimeError("power failure")


class BreaksWhenTraced(keras.metrics.MeanSquaredError):
    """Cannot be computed in validation."""

    def update_state(self, *args, **kwargs):
        if self.validating:
            raise RuntimeError("power failure")
        return super().update_state(*args, **kwargs)

    validating = False


@pytest.mark.parametrize("what", ["callback", "metric"])
@pytest.mark.parametrize("n", [1, 4])
def test_an_error_in_the_validation_of_fit_leaves_the_weights_of_training(n, what):
    view, metric, breaks = replicated(Averaging(), n), BreaksWhenTraced(), BreaksInValidation()
    if what == "metric":
        view.compile(Averaging(), "mse", metrics=[metric])
    begin = keras.callbacks.LambdaCallback(on_test_begin=lambda logs: setattr(metric, "validating", True))
    with pytest.raises(RuntimeError, match="power failure"):
        fit(view, epochs=2, validation_data=(X, Y), validate_with="ema", callbacks=[breaks, begin])
    # Keras puts the averages into the weights when fit ends, also by an error: what they are before that counts.
    assert same(view.optimizer.at_end, breaks.trained)
    averages = [average for _, average in phalanx.keras._keras.averages(view.optimizer)()]
    assert not same(arrays(averages), breaks.trained)
    if what == "callback":
        assert same(breaks.validated, arrays(averages))
    metric.validating = False
    assert len(fit(view, epochs=1, validation_data=(X, Y), validate_with="ema").history["val_loss"]) == 1
