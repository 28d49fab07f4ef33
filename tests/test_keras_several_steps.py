"""``compile(steps_per_execution=k)``: k steps are one loop on the device, and one call of it."""

from __future__ import annotations

import jax
import numpy as np
import pytest

import phalanx as px
import phalanx.keras
from phalanx._launch import Launch

import keras  # isort: skip

rng = np.random.default_rng(0)
X = rng.normal(size=(24, 3)).astype(np.float32)  # six batches of four rows
Y = X.sum(1, keepdims=True)


def model(n, steps):
    keras.utils.set_random_seed(1)
    strategy = px.Mirrored(jax.devices()[:n])
    view = px.keras.replicate(keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)]), strategy)
    view.compile(keras.optimizers.SGD(0.1), "mse", steps_per_execution=steps)
    return view


def data(view, kind):
    if kind == "arrays":
        return (X, Y), {"batch_size": 4, "shuffle": False}
    return (view.strategy.distribute_dataset((X, Y), batch_size=4),), {}


@pytest.fixture
def launched(monkeypatch):
    """The names of the compiled programs that are called."""
    names, call = [], Launch.__call__

    def spy(launch, args):
        names.append(launch._traced.program.name)
        return call(launch, args)

    monkeypatch.setattr(Launch, "__call__", spy)
    return names


@pytest.mark.parametrize("kind", ["arrays", "distributed dataset"])
@pytest.mark.parametrize("n", [1, 4])
def test_a_run_is_one_call_of_one_program(n, kind, launched):
    losses = []
    for steps, calls in ((1, 6), (3, 2), (6, 1)):
        view = model(n, steps)
        given, options = data(view, kind)
        launched.clear()
        losses.append(view.fit(*given, **options, verbose=0).history["loss"][0])
        assert launched.count("train_step") == calls
        assert int(view.optimizer.iterations) == 6
        assert view._steps.training(view).trace_count == 1
    np.testing.assert_allclose(losses, losses[0], rtol=1e-6)


@pytest.mark.parametrize("kind", ["arrays", "distributed dataset"])
@pytest.mark.parametrize("n", [1, 4])
def test_the_program_is_a_loop(n, kind):
    loops = []
    for steps in (1, 3):
        view = model(n, steps)
        given, options = data(view, kind)
        view.fit(*given, **options, verbose=0)
        x, y = given if kind == "arrays" else (*given, None)
        feed = view._feed(x, y, None, 4, None)
        (batch,) = next(feed.get_jax_iterator())
        with view.strategy.scope():
            text = view._steps.training(view).lower(batch).as_text()
        loops.append(text.count("stablehlo.while"))
    assert loops == [0, 1]
