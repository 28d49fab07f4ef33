"""Trouble that people really had with distributed training, each as a test of its whole kind."""

from __future__ import annotations

import copy
import gc
from contextlib import nullcontext

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import phalanx as px
from phalanx.errors import AggregationRequiredError, ArgumentError, StrategyError

OPTIMIZERS = {
    "sgd": lambda: optax.sgd(0.1),
    "momentum": lambda: optax.sgd(0.1, momentum=0.9),
    "adam": lambda: optax.adam(0.01),
    "adamw": lambda: optax.adamw(0.01, weight_decay=0.1),
}


def replica_id():
    return px.get_replica_context().replica_id


class Regression:
    """A linear model that is trained on rows given to `step`."""

    def __init__(self, strategy: px.Strategy, tx: optax.GradientTransformation, width: int) -> None:
        self.strategy = strategy
        with strategy.scope():
            self.w = px.Variable(np.linspace(-1.0, 1.0, width).astype(np.float32), name="w")
            self.b = px.Variable(0.5, name="b")
        self.optimizer = px.Optimizer(tx)

    @px.function
    def step(self, x, y, rows):
        def replica_step(x, y):
            with px.GradientTape() as tape:
                loss = ((x @ self.w + self.b - y) ** 2).sum() / rows
            variables = [self.w, self.b]
            self.optimizer.apply_gradients(zip(tape.gradient(loss, variables), variables))
            return px.get_replica_context().all_reduce("sum", loss)

        return self.strategy.run(replica_step, args=(x, y))

    def train(self, x: np.ndarray, y: np.ndarray, steps: int) -> list[np.ndarray]:
        """Train; the loss, the weights and the slots."""
        parts = [self.strategy.split_rows(a) for a in (x, y)]
        for _ in range(steps):
            loss = self.step(*parts, float(len(x)))
        return [np.asarray(v) for v in (loss, self.w, self.b, *self.optimizer.variables)]


# ---- gradients were not summed over replicas -----------------------------------------------------


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_replicas_train_as_one_device_does(name):
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(16, 5)).astype(np.float32), rng.normal(size=16).astype(np.float32)
    strategies = [px.OneDevice(), px.Mirrored(jax.devices()[:2]), px.Mirrored()]
    for steps in (1, 20):
        alone, *others = [Regression(s, OPTIMIZERS[name](), 5).train(x, y, steps) for s in strategies]
        for other in others:
            for a, b in zip(alone, other):
                np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_missing_sum_would_show_at_once(name):
    # Row i has the i-th unit vector for its features, and replica i has row i alone: its gradient is along e_i.
    n = len(jax.devices())
    x, y = np.eye(n, dtype=np.float32), np.arange(n, dtype=np.float32)
    alone, everywhere = [Regression(s, OPTIMIZERS[name](), n).train(x, y, 3) for s in (px.OneDevice(), px.Mirrored())]
    for a, b in zip(alone, everywhere):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)
    moved = everywhere[1] - np.linspace(-1.0, 1.0, n)
    assert np.all(moved[1:] != 0.0), "every replica's gradient reached the weights"


# ---- a model or optimizer made before the strategy -----------------------------------------------


@pytest.mark.parametrize("traced", [False, True], ids=["eager", "traced"])
@pytest.mark.parametrize("outside", ["model", "optimizer", "metric", "all", "trained_before"])
def test_what_was_made_outside_the_scope_is_adopted(strategy, outside, traced):
    def here(part):
        return nullcontext() if outside == part else strategy.scope()

    if outside in ("all", "trained_before"):
        w, seen, optimizer = px.Variable([1.0, 2.0]), px.Variable(0, aggregation="sum"), px.Optimizer(optax.adam(0.1))
    else:
        with here("model"):
            w = px.Variable([1.0, 2.0])
        with here("metric"):
            seen = px.Variable(0, aggregation="sum")
        optimizer = px.Optimizer(optax.adam(0.1))
        with here("optimizer"):
            optimizer.build([w])

    def replica_step(x):
        with px.GradientTape() as tape:
            loss = (x @ w).sum() / 8
        optimizer.apply_gradients([(tape.gradient(loss, w), w)])
        seen.assign_add(x.shape[0])

    steps = 2
    if outside == "trained_before":
        replica_step(jnp.ones((8, 2)))
        steps = 1

    def step(x):
        strategy.run(replica_step, args=(x,))

    step = px.function(step) if traced else step
    for _ in range(steps):
        step(strategy.split_rows(np.ones((8, 2), np.float32)))
    np.testing.assert_allclose(w.numpy(), [0.8, 1.8], atol=1e-5)
    assert (int(seen), int(optimizer.state[0].count)) == (16, 2)
    for v in (w, seen, *optimizer.variables):
        assert v.strategy is strategy
        assert [next(iter(c.value.devices())) for c in v.components] == list(strategy.devices)


def test_a_model_of_one_strategy_is_refused_by_name_under_another():
    first, second = px.Mirrored(jax.devices()[:2]), px.Mirrored(jax.devices()[2:4])
    model = Regression(first, optax.adam(0.1), 2)
    x, y = np.ones((4, 2), np.float32), np.ones(4, np.float32)
    model.train(x, y, 1)
    before = [np.asarray(v) for v in (model.w, *model.optimizer.variables)]
    model.strategy = second
    with pytest.raises(
        StrategyError, match=r"Variable 'w' belongs to Mirrored\(cpu:0-1\) and is read under Mirrored\(cpu:2-3\)"
    ):
        model.train(x, y, 1)
    model.strategy = first
    for a, v in zip(before, (model.w, *model.optimizer.variables)):
        np.testing.assert_array_equal(a, v.numpy())
    with second.scope():
        moved = copy.deepcopy((model.w, model.b, model.optimizer))
    assert all(v.strategy is second for v in (*moved[:2], *moved[2].variables)), (
        "a copy made in its scope is the way over"
    )
    model.w, model.b, model.optimizer = moved
    model.strategy = second
    model.train(x, y, 1)


# ---- assigning in a replica ----------------------------------------------------------------------


def test_the_three_ways_of_assigning_in_a_replica(strategy):
    n = strategy.num_replicas
    with strategy.scope():
        v = px.Variable(0.0, name="v", aggregation="sum")
        w = px.Variable(0.0, name="w", synchronization="on_read", aggregation="mean")
        u = px.Variable(0.0, name="u")
    strategy.run(lambda: v.assign_add(1.0))
    strategy.run(lambda: w.assign_add(1.0 * replica_id()))
    assert float(v) == n
    assert [float(c) for c in w.components] == list(range(n)), "each replica keeps its own"
    assert float(w) == np.mean(range(n)), "a read gives the declared reduction"
    with pytest.raises(AggregationRequiredError) as caught:
        strategy.run(lambda: u.assign_add(1.0 * replica_id()))
    message = str(caught.value)
    assert "Variable 'u'" in message
    for cure in ('aggregation="sum"', 'px.get_replica_context().all_reduce("sum", value)', 'synchronization="on_read"'):
        assert cure in message, "the three choices, with code"
    assert [float(c) for c in u.components] == [0.0] * n
    strategy.run(lambda: u.assign_add(px.get_replica_context().all_reduce("sum", 1.0 * replica_id())))
    assert [float(c) for c in u.components] == [float(sum(range(n)))] * n


@pytest.mark.parametrize("kind", ["own", "sum"])
def test_gradients_accumulated_by_hand_are_those_of_the_large_batch(strategy, kind):
    options = {
        "own": {"synchronization": "on_read", "aggregation": "sum"},
        "sum": {"aggregation": "sum", "trainable": False},
    }[kind]
    with strategy.scope():
        w = px.Variable(np.ones(3, np.float32))
        acc = px.Variable(np.zeros(3, np.float32), **options)
    optimizer = px.Optimizer(optax.adam(0.1))
    rows = np.random.default_rng(0).normal(size=(16, 3)).astype(np.float32)

    @px.function
    def micro_step(x):
        def fn(x):
            with px.GradientTape() as tape:
                loss = ((x @ w) ** 2).sum() / 16
            acc.assign_add(tape.gradient(loss, w))

        strategy.run(fn, args=(x,))

    @px.function
    def apply():
        def fn():
            optimizer.apply_gradients([(acc.value, w)], reduce="sum" if kind == "own" else None)
            acc.assign(jnp.zeros(3))

        strategy.run(fn)

    for _ in range(2):
        for start in (0, 8):
            micro_step(strategy.split_rows(rows[start : start + 8]))
        apply()
    one = px.Variable(np.ones(3, np.float32))
    reference = px.Optimizer(optax.adam(0.1))
    for _ in range(2):
        with px.GradientTape() as tape:
            loss = ((rows @ one) ** 2).sum() / 16
        reference.apply_gradients([(tape.gradient(loss, one), one)])
    np.testing.assert_allclose(w.numpy(), one.numpy(), rtol=1e-5)
    assert not acc.numpy().any()


# ---- a strategy on some of the devices -----------------------------------------------------------


class OnlyOn:
    """Checks that arrays which are made from now on lie on the given devices alone."""

    def __init__(self, devices) -> None:
        self.devices = set(devices)
        gc.collect()
        self.before = jax.live_arrays()  # kept, so that no new array gets an old one's id
        self.known = {id(a) for a in self.before}

    def check(self) -> None:
        new = [a for a in jax.live_arrays() if id(a) not in self.known]
        strays = [f"{a.aval.str_short()} on {a.devices()}" for a in new if not a.devices() <= self.devices]
        assert not strays
        assert new, "there is something to check"


@pytest.mark.parametrize(
    "make", [lambda d: px.Mirrored(d[2:4]), lambda d: px.OneDevice(d[3])], ids=["mirrored", "one_device"]
)
def test_nothing_is_put_on_devices_that_the_strategy_does_not_use(make):
    strategy = make(jax.devices())
    only = OnlyOn(strategy.devices)
    model = Regression(strategy, optax.chain(optax.clip_by_global_norm(1.0), optax.adam(0.1)), 3)
    only.check()
    with strategy.scope():
        made = [
            px.Variable([1.0, 2.0]), px.Variable(lambda: jnp.ones(3)), px.Variable(0, synchronization="on_read", aggregation="sum"),
            px.Variable(lambda: jax.random.key(0), trainable=False), px.Variable(1.0, dtype="bfloat16"),
        ]  # fmt: skip
    only.check()
    kept = [model.train(np.ones((4, 3), np.float32), np.ones(4, np.float32), 2)]
    only.check()
    for shuffle in (False, True):
        dataset = strategy.distribute_dataset((np.ones((10, 3), np.float32), np.ones(10, np.float32)), batch_size=4, remainder="pad", mask=True, shuffle=shuffle, seed=0 if shuffle else None)  # fmt: skip
        for x, y, weight in dataset:
            kept.append((x, y, weight, model.step(x, y, 4.0)))
            only.check()
    kept.append(strategy.distribute_values_from_function(lambda c: np.float32(c.replica_id)))
    kept.append(strategy.run(lambda x: (x * 2.0, replica_id()), args=(x,)))
    kept.append(strategy.gather(kept[-1][0], 0))
    kept.append(strategy.reduce("mean", kept[-2][0]))
    kept.append((made[2].value, made[0].value, [c.value for c in made[0].components]))
    only.check()
    made[0].assign([3.0, 4.0])
    made[0].assign_add(np.ones(2))
    made[1].at[0].set(5.0)
    made[2].assign(8)
    strategy.update(made[0], lambda v, x: v.assign_add(x), args=(made[0].value,))
    model.optimizer.apply_gradients([(np.ones(3, np.float32), model.w), (np.float32(1.0), model.b)])
    only.check()
    with strategy.scope():
        kept.append(copy.deepcopy((made, model.optimizer)))
        kept.append(px.function(lambda x: (made[0] * x, made[0].assign_add([1.0, 1.0]).value))(2.0))
        with px.GradientTape() as tape:
            loss = (made[0] * 2.0).sum()
        kept.append((tape.gradient(loss, made[0]), repr(made)))
    only.check()
    assert px.self_check(lambda batch: model.step(batch[0], batch[1], 4.0), strategy.distribute_dataset((np.ones((12, 3), np.float32), np.ones(12, np.float32)), batch_size=4)) == "equal"  # fmt: skip
    only.check()


# ---- gradients that are None ---------------------------------------------------------------------


def test_unused_variables_have_no_gradient_and_zeros_on_request(strategy):
    with strategy.scope():
        used, unused = px.Variable([1.0, 2.0]), px.Variable(jnp.ones((2, 1)), dtype="bfloat16")

    def gradients(unconnected):
        with px.GradientTape() as tape:
            loss = (used * used).sum()
        return tape.gradient(loss, [used, unused], unconnected_gradients=unconnected)

    for run in (lambda f: f(), lambda f: px.function(f)(), lambda f: jax.tree.map(lambda g: g.values[0] if isinstance(g, px.PerReplica) else g, strategy.run(f), is_leaf=lambda x: isinstance(x, px.PerReplica))):  # fmt: skip
        gradient, nothing = run(lambda: gradients("none"))
        assert (gradient.tolist(), nothing) == ([2.0, 4.0], None)
        gradient, zeros = run(lambda: gradients("zero"))
        assert (zeros.shape, zeros.dtype, bool(zeros.any())) == ((2, 1), jnp.bfloat16, False)


def test_the_rest_is_applied_and_the_missing_ones_are_named_once(strategy):
    with strategy.scope():
        used, unused = px.Variable([1.0, 2.0], name="used"), px.Variable(5.0, name="unused")
    optimizer = px.Optimizer(optax.adam(0.5))

    def fn():
        with px.GradientTape() as tape:
            loss = (used * used).sum() / px.get_replica_context().num_replicas
        variables = [used, unused]
        optimizer.apply_gradients(zip(tape.gradient(loss, variables), variables))

    with pytest.warns(UserWarning, match="the loss does not depend on Variable 'unused'") as caught:
        for _ in range(3):
            strategy.run(fn)
        px.function(lambda: strategy.run(fn))()
    assert len(caught) == 1
    assert float(unused) == 5.0
    assert used.numpy().tolist() != [1.0, 2.0]


def test_no_gradient_at_all_names_likely_causes(strategy):
    with strategy.scope():
        w = px.Variable([1.0, 2.0], name="w")
    optimizer = px.Optimizer(optax.sgd(1.0))

    def outside_the_tape():
        loss = (w * w).sum()
        with px.GradientTape() as tape:
            loss = loss * 1.0
        return tape.gradient(loss, w)

    def stopped():
        with px.GradientTape() as tape:
            loss = jax.lax.stop_gradient(w.value).sum()
        return tape.gradient(loss, w)

    def cast():
        with px.GradientTape() as tape:
            loss = (w.value > 0).astype(jnp.int32).sum()
        return tape.gradient(loss, w)

    for wrong in (outside_the_tape, stopped, cast):
        for run in (lambda f: f(), strategy.run):
            with pytest.raises(
                ArgumentError, match=r"no gradient at all, for Variable 'w'\. Was the loss computed inside the tape"
            ):
                run(lambda: optimizer.apply_gradients([(wrong(), w)]))
    assert w.numpy().tolist() == [1.0, 2.0]


def test_a_gradient_that_depends_on_the_data_of_a_replica_is_zero_elsewhere(strategy):
    with strategy.scope():
        w = px.Variable(1.0)
    optimizer = px.Optimizer(optax.sgd(1.0))
    rows = strategy.split_rows(np.arange(1, strategy.num_replicas + 1, dtype=np.float32))

    @px.function
    def step(x):
        def fn(x):
            with px.GradientTape() as tape:
                loss = px.cond(x[0] > 1.5, lambda: w.value * x[0], lambda: 0.0 * x[0])
            optimizer.apply_gradients([(tape.gradient(loss, w, unconnected_gradients="zero"), w)])

        strategy.run(fn, args=(x,))

    step(rows)
    expected = 1.0 - sum(range(2, strategy.num_replicas + 1))
    assert [float(c) for c in w.components] == [expected] * strategy.num_replicas
