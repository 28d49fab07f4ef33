"""Steps with collectives on virtual CPU devices are dispatched without waiting for them, and never block each other."""

from __future__ import annotations

import threading

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import phalanx as px

STEPS = 300
WIDTH = 256


class Model:
    """Two layers and what a training step writes: weights, slots, a per-replica counter."""

    def __init__(self, strategy: px.Strategy) -> None:
        self.strategy = strategy
        with strategy.scope():
            self.weights = [px.Variable(jnp.eye(WIDTH) / 2), px.Variable(jnp.eye(WIDTH) / 2)]
            self.seen = px.Variable(0, synchronization="on_read", aggregation="sum")
            self.running = px.Variable(0.0, aggregation="mean")
        self.optimizer = px.Optimizer(optax.sgd(1e-3))
        n = strategy.num_replicas
        self.batch = strategy.split_rows(np.ones((2 * n, WIDTH), np.float32))

    def replica_step(self, x: jax.Array) -> jax.Array:
        with px.GradientTape() as tape:
            y = jax.nn.relu(x @ self.weights[0]) @ self.weights[1]
            loss = (y * y).mean() / self.strategy.num_replicas
        self.optimizer.apply_gradients(zip(tape.gradient(loss, self.weights), self.weights))
        self.seen.assign_add(x.shape[0])
        self.running.assign(loss)
        return loss

    @px.function
    def step(self, x):
        return self.strategy.run(self.replica_step, args=(x,))

    def check(self, steps: int) -> None:
        assert int(self.seen) == steps * 2 * self.strategy.num_replicas
        first, *others = [np.asarray(c) for c in self.weights[0].components]
        assert np.isfinite(first).all()
        assert all(np.array_equal(first, other) for other in others)


@pytest.mark.parametrize("n", [2, 8])
def test_many_steps_in_flight(n):
    model = Model(px.Mirrored(jax.devices()[:n]))
    for _ in range(STEPS):
        model.step(model.batch)
    model.check(STEPS)


def test_steps_between_eager_runs_reductions_and_reads():
    model = Model(px.Mirrored(jax.devices()[:4]))
    strategy = model.strategy
    losses = []
    for i in range(60):
        loss = model.step(model.batch)
        match i % 6:
            case 0:
                losses.append(strategy.reduce("sum", loss))
            case 1:
                losses.append(strategy.gather(model.batch, axis=0).sum())
            case 2:
                strategy.run(lambda: model.running.assign(1.0 * px.get_replica_context().replica_id))
            case 3:
                losses.append(model.seen.value)
            case 4:
                model.running.assign(model.weights[0].sum() * 0.0)
            case 5:
                model.optimizer.apply_gradients(
                    [(jnp.zeros((WIDTH, WIDTH)), model.weights[0]), (jnp.zeros((WIDTH, WIDTH)), model.weights[1])]
                )
    model.check(60)
    assert all(np.isfinite(x) for x in losses)


def test_two_strategies_on_overlapping_devices():
    models = [
        Model(px.Mirrored(jax.devices()[:4])),
        Model(px.Mirrored(jax.devices()[2:6])),
        Model(px.OneDevice(jax.devices()[3])),
    ]
    for _ in range(50):
        for model in models:
            model.step(model.batch)
    for model in models:
        model.check(50)


def test_two_threads_train_models_of_their_own_and_one_that_they_share():
    strategies = [px.Mirrored(jax.devices()[:4]), px.Mirrored(jax.devices()[:4])]
    own = [Model(s) for s in strategies]
    shared = Model(px.Mirrored(jax.devices()[4:]))
    errors = []

    def train(model):
        try:
            for i in range(40):
                model.step(model.batch)
                shared.step(shared.batch)
                if i % 10 == 0:
                    model.strategy.reduce("mean", model.strategy.run(lambda: px.get_replica_context().replica_id))
                    float(shared.running)
        except BaseException as error:
            errors.append(error)
            raise

    threads = [threading.Thread(target=train, args=(model,)) for model in own]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []
    for model in own:
        model.check(40)
    shared.check(80)


def test_everything_in_which_replicas_meet_outside_of_them():
    strategy = px.Mirrored()
    with strategy.scope():
        own = px.Variable(jnp.ones((WIDTH, WIDTH)), synchronization="on_read", aggregation="sum")
        w = px.Variable(jnp.ones((WIDTH, WIDTH)))
    parts = strategy.split_rows(np.ones((8, WIDTH, WIDTH), np.float32))

    def tape_around_run():
        with px.GradientTape() as tape:
            total = strategy.reduce("sum", strategy.run(lambda p: p[0] @ w, args=(parts,)))
        return tape.gradient(total, w)

    traced_reduce = px.function(lambda p: strategy.reduce("sum", p))
    traced_read = px.function(lambda: own.value)
    uses = [
        (STEPS, lambda: own.value),
        (STEPS, lambda: strategy.reduce("mean", parts)),
        (STEPS, lambda: traced_reduce(parts)),
        (STEPS, traced_read),
        (100, lambda: strategy.gather(parts, 0)),
        (100, lambda: strategy.run(lambda p: px.get_replica_context().all_gather(p), args=(parts,))),
        (30, lambda: own.assign(own.value)),
        (10, tape_around_run),
    ]
    for times, use in uses:
        for _ in range(times):
            last = use()
    jax.block_until_ready(last)
    assert float(own.value[0, 0]) == 8.0
