"""An auditor among the callbacks of `fit`."""

from __future__ import annotations

import jax
import numpy as np
import pytest
from flipping import flip

import phalanx as px
import phalanx.keras
from phalanx.errors import ReplicaDivergenceError
from phalanx.keras.variables import counterpart

import keras  # isort: skip

pytestmark = pytest.mark.slow

X = np.random.default_rng(0).normal(size=(32, 4)).astype(np.float32)
Y = X.sum(1, keepdims=True)


class Flips(keras.callbacks.Callback):
    def on_epoch_begin(self, epoch, logs=None):
        if epoch == 1:
            flip(counterpart(self.model.layers[0].kernel), replica=1, index=(2, 1), bit=22)


def fit(auditor):
    keras.utils.set_random_seed(0)
    view = px.keras.replicate(
        keras.Sequential([keras.layers.Dense(3), keras.layers.Dense(1)]), px.Mirrored(jax.devices()[:2])
    )
    view.compile("adam", "mse")
    view.fit(X, Y, batch_size=8, epochs=3, verbose=0, callbacks=[Flips(), auditor])
    return view


def test_fit_audits_the_model_with_its_optimizer():
    auditor = px.Auditor(every=2)
    with pytest.raises(
        ReplicaDivergenceError, match=r"differ after step 6:\n.*dense(_\d+)?/kernel': replica 1 .*\[2, 1\]"
    ):
        fit(auditor)
    assert auditor.audits == 3
    auditor = px.Auditor(every=2, on_divergence="repair")
    view = fit(auditor)
    assert px.audit(view).equal
    assert px.audit(view).variables >= 4 + 9
    assert auditor.audits == 6
