"""Objects that are built again with the same structure: traced again, compiled once."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import phalanx as px


class Model:
    def __init__(self, strategy: px.Strategy, width: int = 3) -> None:
        self.strategy = strategy
        with strategy.scope():
            self.w = px.Variable(jnp.ones(width), name="w")
            self.optimizer = px.Optimizer(optax.adam(0.1))

    def update(self, x):
        with px.GradientTape() as tape:
            loss = ((self.w * x) ** 2).sum()
        self.optimizer.apply_gradients([(tape.gradient(loss, self.w), self.w)])
        return loss

    @px.function
    def step(self, x):
        return self.strategy.reduce("sum", self.strategy.run(self.update, args=(x,)))


@px.function
def step_of(model, x):
    return model.strategy.reduce("sum", model.strategy.run(model.update, args=(x,)))


@pytest.fixture
def compiled() -> Iterator[Callable[[], int]]:
    """How often XLA has compiled since the last call."""
    listening, count = True, 0

    def listen(event: str, seconds: float, **_: object) -> None:
        nonlocal count
        count += listening and event == "/jax/core/compile/backend_compile_duration"

    def since_last_call() -> int:
        nonlocal count
        before, count = count, 0
        return before

    jax.monitoring.register_event_duration_secs_listener(listen)
    yield since_last_call
    listening = False


STEPS = {"method": lambda model, x: model.step(x), "argument": step_of}


@pytest.mark.parametrize("step", STEPS.values(), ids=STEPS)
def test_a_model_that_is_built_again_is_not_compiled_again(step, compiled):
    strategy, x = px.Mirrored(jax.devices()[:2]), jnp.arange(5.0)
    losses = []
    for epoch in range(4):
        model = Model(strategy, width=5)
        model.optimizer.build([model.w])
        compiled()
        losses.append([float(step(model, x)), float(step(model, x))])
        assert (compiled() > 0) == (epoch == 0)
    assert losses == [losses[0]] * 4


def test_a_model_of_another_structure_is_compiled_and_the_old_ones_go(compiled):
    strategy = px.Mirrored(jax.devices()[:2])
    model = Model(strategy)
    gone = weakref.ref(model)
    model.step(jnp.ones(3))
    model = Model(strategy, width=4)
    compiled()
    assert float(model.step(jnp.ones(4))) == 8.0
    assert compiled() > 0
    gc.collect()
    assert gone() is None


class Scaled:
    """Calls Python functions of its own."""

    def __init__(self, factor):
        self.factor = factor
        self.seen = []
        self.total = px.Variable(0.0)

    @px.function
    def step(self, x):
        self.total.assign_add(jax.pure_callback(lambda x: self.factor * x, x, x))
        jax.debug.callback(lambda total: self.seen.append(float(total)), self.total.value)
        return self.total.value


def test_each_object_gets_its_own_python_functions_called():
    models = [Scaled(np.float32(factor)) for factor in (2, 3, 5)]
    x = jnp.float32(1.0)
    assert [[float(model.step(x)) for _ in range(2)] for model in models] == [[2.0, 4.0], [3.0, 6.0], [5.0, 10.0]]
    assert [model.seen for model in models] == [[2.0, 4.0], [3.0, 6.0], [5.0, 10.0]]
