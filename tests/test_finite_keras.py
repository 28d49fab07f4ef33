"""A guard around an optimizer of Keras's, in a loop of one's own."""

from __future__ import annotations

import jax
import numpy as np
import pytest

import phalanx as px
import phalanx.keras
from phalanx.errors import ArgumentError, NonFiniteError

import keras  # isort: skip

pytestmark = pytest.mark.slow


def make(policy):
    keras.utils.set_random_seed(0)
    strategy = px.Mirrored(jax.devices()[:2])
    with strategy.scope():
        model = keras.Sequential([keras.layers.Dense(3, "relu"), keras.layers.Dense(1)])
        model.build((None, 2))
        guard = px.NonFiniteGuard(keras.optimizers.Adam(0.1), policy)

    @px.function
    def step(x):
        def replica(x):
            with px.GradientTape() as tape:
                loss = (model(x, training=True) ** 2).mean()
            variables = model.trainable_variables
            guard.apply_gradients(zip(tape.gradient(loss, variables), variables), loss=loss, reduce="mean")

        strategy.run(replica, args=(x,))

    def values():
        return [np.asarray(v).tobytes() for v in [*model.variables, *guard.optimizer.variables]]

    def run(bad=False):
        rows = np.ones((4, 2), np.float32)
        rows[3, 1] = np.inf if bad else 1
        step(strategy.split_rows(rows))

    return run, values, guard


def test_a_step_that_is_not_finite_changes_neither_weights_nor_the_optimizers_state():
    run, values, guard = make("skip")
    other, expected, _ = make("skip")
    for bad in (False, True, False):
        run(bad)
        if not bad:
            other()
    assert values() == expected()
    assert guard.skipped == 1


def test_the_weight_is_named_by_its_path():
    run, values, guard = make("raise")
    before = values()
    run(bad=True)
    assert values()[:4] == before[:4]
    with pytest.raises(
        NonFiniteError,
        match=r"At step 1 .*'sequential.*dense.*kernel' (is|are) not finite on replica 1",
    ):
        guard.check()


# ---- in fit --------------------------------------------------------------------------------------

rng = np.random.default_rng(0)
X = rng.normal(size=(32, 4)).astype(np.float32)
Y = X.sum(1, keepdims=True)
BAD = slice(8, 16)
"""The rows of the second of four batches."""


def compiled(n=2, optimizer=None, **options):
    keras.utils.set_random_seed(1)
    layers = [keras.layers.Dense(8, "relu"), keras.layers.BatchNormalization(), keras.layers.Dense(1)]
    model = px.keras.replicate(keras.Sequential(layers), px.Mirrored(jax.devices()[:n]))
    model.compile(optimizer or keras.optimizers.Adam(0.01), "mse", metrics=["mae"], **options)
    return model


def fit(model, x, y, **options):
    return model.fit(x, y, batch_size=8, shuffle=False, verbose=0, epochs=2, **options).history


def bad_rows(value):
    x = X.copy()
    x[13, 2] = value
    return x


@pytest.mark.parametrize(
    ("n", "options"), [(1, {}), (2, {}), (2, {"steps_per_execution": 2}), (2, {"run_eagerly": True})]
)
def test_a_batch_that_is_skipped_has_never_been(n, options):
    model, reference = compiled(n, **options), compiled(n, **options)
    guard, other = (px.NonFiniteGuard(m.optimizer, "skip", every=1) for m in (model, reference))
    history = fit(model, bad_rows(np.nan), Y, callbacks=[guard])
    expected = fit(reference, np.delete(X, BAD, 0), np.delete(Y, BAD, 0), callbacks=[other])
    assert guard.skipped == 2
    assert history == expected
    for a, b in zip(
        [*model.variables, *model.optimizer.variables], [*reference.variables, *reference.optimizer.variables]
    ):
        np.testing.assert_array_equal(a.numpy(), b.numpy(), err_msg=a.path)
    again = fit(model, X, Y, callbacks=[guard])
    assert np.isfinite(again["loss"]).all() and (guard.skipped, other.skipped) == (2, 0)


def test_the_guard_ends_fit_with_the_name_of_what_was_not_finite():
    model = compiled()
    guard = px.NonFiniteGuard(model.optimizer, every=1)
    with pytest.raises(NonFiniteError, match=r"At step 2 the gradient of Variable '.*' is not finite on replica 1"):
        fit(model, bad_rows(np.inf), Y, callbacks=[guard])
    assert all(np.isfinite(weights).all() for weights in model.get_weights())
    fit(model, bad_rows(np.inf), Y)
    assert not all(np.isfinite(weights).all() for weights in model.get_weights()), "without it nothing is kept out"


def test_accumulated_gradients_are_looked_at_together():
    model = compiled()
    guard = px.NonFiniteGuard(model.optimizer, "skip")
    fit(model, bad_rows(np.nan), Y, callbacks=[guard], accumulate_steps=2)
    assert guard.skipped == 2
    assert int(model.optimizer.iterations.numpy()) == 2
    assert all(np.isfinite(weights).all() for weights in model.get_weights())


def test_a_guard_that_would_do_nothing_or_harm_is_refused():
    scaled = keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.1))
    for model, guard, message in [
        (
            compiled(),
            lambda model: px.NonFiniteGuard(keras.optimizers.Adam()),
            "is of another optimizer than the model's",
        ),
        (
            compiled(),
            lambda model: px.NonFiniteGuard(model.optimizer, "rescale"),
            "does not go together with a scaled loss",
        ),
        (
            compiled(optimizer=scaled),
            lambda model: px.NonFiniteGuard(scaled, "skip"),
            "LossScaleOptimizer, which does that",
        ),
    ]:
        with pytest.raises(ArgumentError, match=message):
            fit(model, X, Y, callbacks=[guard(model)])
