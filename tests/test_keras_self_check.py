"""``model.self_check``: does a replicated model train on all replicas as on one?"""

from __future__ import annotations

import jax
import numpy as np
import pytest

import phalanx as px
import phalanx.keras

import keras  # isort: skip

pytestmark = pytest.mark.slow

rng = np.random.default_rng(0)
X = rng.normal(size=(22, 3)).astype(np.float32)  # with batches of 8, the last has 6 rows
Y = X.sum(1, keepdims=True)
WEIGHTS = rng.uniform(0, 2, 22).astype(np.float32)


def plain(*inside, loss="mse"):
    keras.utils.set_random_seed(1)
    model = keras.Sequential([keras.layers.Dense(4, "tanh"), *inside, keras.layers.Dense(1)])
    model.compile(keras.optimizers.Adam(0.05), loss, metrics=["mae"], weighted_metrics=["mse"])
    return model


def on(n, model):
    return px.keras.replicate(model, px.Mirrored(jax.devices()[:n]))


def values(model):
    return [np.array(v.value) for v in (*model.variables, *model.metrics_variables, *model.optimizer.variables)]


@pytest.mark.parametrize("weights", [None, WEIGHTS], ids=["", "weighted"])
@pytest.mark.parametrize("n", [1, 4])
def test_what_trains_alike_is_equal(n, weights):
    """Also rows that do not divide, and penalties of weights."""
    penalised = keras.layers.Dense(4, kernel_regularizer="l2")
    assert on(n, plain(penalised)).self_check(X, Y, weights, batch_size=8) == "equal"


@pytest.mark.parametrize("n", [1, 4])
def test_everything_is_as_it_was(n):
    view = on(n, plain(keras.layers.BatchNormalization()))
    view.fit(X, Y, batch_size=8, verbose=0)
    before = values(view)
    assert int(view.optimizer.iterations) == 3 and any(v.any() for v in before)
    view.self_check(X, Y, WEIGHTS, batch_size=8)
    after = values(view)
    assert [v.tobytes() for v in after] == [v.tobytes() for v in before]


def test_a_model_that_was_not_built_trains_as_if_it_had_not_been_checked():
    losses = []
    for checks in (False, True):
        view = on(4, plain(keras.layers.Dropout(0.5, seed=3)))
        if checks:
            view.self_check(X, Y, batch_size=8)
        losses.append(view.fit(X, Y, batch_size=8, shuffle=False, epochs=2, verbose=0).history["loss"])
    assert losses[0] == losses[1]


def squares(y, p):
    return keras.ops.sum(keras.ops.square(y - p))


def mean_of_squares(y, p):
    return squares(y, p) / keras.ops.shape(p)[0]


def test_a_loss_that_is_a_sum_is_found_and_named():
    found = on(4, plain(loss=squares)).self_check(X, Y, batch_size=8)
    assert found.startswith("result['loss'] of step 0 differs: largest difference ")
    assert found.endswith(" between one replica and 4.")
    assert on(4, plain(loss=mean_of_squares)).self_check(X, Y, batch_size=8) == "equal"
    assert on(1, plain(loss=squares)).self_check(X, Y, batch_size=8) == "equal"


class Adds(keras.layers.Layer):
    """A sum over rows, or their mean."""

    def __init__(self, reduce):
        super().__init__()
        self.reduce = reduce

    def call(self, x):
        self.add_loss(self.reduce(keras.ops.sum(x**2, -1)))
        return x


@pytest.mark.parametrize(("reduce", "is_equal"), [(keras.ops.sum, False), (keras.ops.mean, True)])
def test_a_sum_that_a_layer_adds_is_found(reduce, is_equal):
    found = on(4, plain(Adds(reduce))).self_check(X, Y, batch_size=8)
    assert found == "equal" if is_equal else "result['loss'] of step 0 differs" in found
