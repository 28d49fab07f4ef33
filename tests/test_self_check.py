"""`px.self_check`: three steps on one replica and on all, compared."""

from __future__ import annotations

import itertools
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import phalanx as px
from phalanx.errors import ArgumentError, ArgumentTypeError, StrategyError


@pytest.fixture
def strategy():
    return px.Mirrored(jax.devices()[:4])


def replica_id():
    return px.get_replica_context().replica_id


def dataset(strategy, rows=24):
    x = np.random.default_rng(0).normal(size=(rows, 3)).astype(np.float32)
    return strategy.distribute_dataset((x, x.sum(1) + 1.0), batch_size=8)


class Training:
    """A step that is right, with parts that tests replace by wrong ones."""

    def __init__(self, strategy, loss=None, reduce="sum", update=None):
        self.strategy, self.loss, self.reduce, self.update = strategy, loss, reduce, update
        with strategy.scope():
            self.w = px.Variable(np.ones(3, np.float32), name="w")
            self.seen = px.Variable(0, name="seen", aggregation="sum")
            self.mean = px.Variable(0.0, name="mean", synchronization="on_read", aggregation="mean")
        self.optimizer = px.Optimizer(optax.sgd(0.1, momentum=0.9))

    def step(self, batch):
        def fn(x, y):
            with px.GradientTape() as tape:
                errors = (x @ self.w - y) ** 2
                loss = errors.sum() / 8 if self.loss is None else self.loss(errors)
            self.optimizer.apply_gradients([(tape.gradient(loss, self.w), self.w)], reduce=self.reduce)
            self.seen.assign_add(len(x))
            self.mean.assign(loss if self.loss else loss * px.get_replica_context().num_replicas)
            if self.update:
                self.update(self)
            return px.get_replica_context().all_reduce("sum", loss)

        return self.strategy.run(fn, args=batch)

    def values(self):
        return [v.numpy().tolist() for v in (self.w, self.seen, self.mean, *self.optimizer.variables)]


@pytest.mark.parametrize("traced", [False, True], ids=["eager", "traced"])
def test_a_right_step_is_equal_and_changes_nothing(strategy, traced):
    training = Training(strategy)
    step = px.function(training.step) if traced else training.step
    assert px.self_check(step, dataset(strategy)) == "equal"
    assert training.values() == [[1.0] * 3, 0, 0.0, [0.0] * 3], "a fresh optimizer is fresh again"
    for batch in dataset(strategy):
        step(batch)
    trained = training.values()
    assert px.self_check(step, dataset(strategy)) == "equal"
    assert training.values() == trained
    assert all(len(v.components) == 4 for v in (training.w, training.mean, *training.optimizer.variables))
    step(next(iter(dataset(strategy))))
    assert int(training.seen) == 32


@pytest.mark.parametrize("taken", [0, 1, 3])
def test_a_dataset_goes_on_where_it_would_have(strategy, taken):
    def make():
        x = np.arange(24, dtype=np.float32)
        return strategy.distribute_dataset(x, batch_size=8, shuffle=True, seed=0)

    def rows(batches):
        return [np.asarray(batch.stacked).tolist() for batch in batches]

    def step(batch):
        strategy.run(lambda x: total.assign_add(x.sum()), args=(batch,))

    with strategy.scope():
        total = px.Variable(0.0, aggregation="sum")
    checked, other = make(), make()
    for dataset in (checked, other):
        stopped = make()
        rows(stopped)
        rows(itertools.islice(stopped, taken))
        dataset.load_state_dict(stopped.state_dict())
    assert px.self_check(step, checked) == "equal"
    assert checked.state_dict() == other.state_dict()
    assert [rows(checked), rows(checked)] == [rows(other), rows(other)]
    inside = iter(checked)
    next(inside)
    assert px.self_check(step, checked) == "equal"
    assert checked.state_dict()["element"] == 1
    next(inside)
    assert checked.state_dict()["element"] == 2


def test_a_wrong_step_names_the_first_variable_that_differs(strategy):
    cases = {
        "a mean of means summed": (Training(strategy, loss=lambda e: e.mean()), r"result of step 0 differs"),
        "gradients averaged that were to be summed": (
            Training(strategy, reduce="mean"),
            r"Variable 'w' after step 0 differs",
        ),
        "a count that each replica adds to": (
            Training(strategy, update=lambda t: t.seen.assign_add(1)),
            r"Variable 'seen' after step 0 differs: largest difference 3 between one replica and 4\.",
        ),
    }
    for case, (training, words) in cases.items():
        sentence = px.self_check(px.function(training.step), dataset(strategy))
        assert re.match(words, sentence), (case, sentence)


def test_a_result_of_another_shape_is_named(strategy):
    def step(batch):
        return {"out": strategy.run(lambda x, y: px.get_replica_context().all_gather(x.sum()[None]), args=batch)}

    assert (
        px.self_check(step, dataset(strategy)) == "result['out'] of step 0 has shape (1,) on one replica and (4,) on 4."
    )


def test_tolerances_can_be_chosen(strategy):
    with strategy.scope():
        v = px.Variable(1.0, name="v")

    def step(batch):
        strategy.run(lambda: v.assign(1.0 + 1e-3 * px.get_replica_context().num_replicas))

    assert px.self_check(step, dataset(strategy)).startswith(
        "Variable 'v' after step 0 differs: largest difference 0.003"
    )
    assert px.self_check(step, dataset(strategy), rtol=0.1) == "equal"


def test_what_the_step_adopts_and_creates_is_as_it_was(strategy):
    outside, made = px.Variable([1.0, 2.0], aggregation="sum"), []

    @px.function
    def step(batch):
        def fn(x, y):
            if not made:
                made.append(px.Variable(jnp.zeros(2), aggregation="sum"))
            outside.assign_add(x[:, :2].sum(0))
            made[0].assign_add(x[:, :2].sum(0))

        strategy.run(fn, args=batch)

    assert px.self_check(step, dataset(strategy)) == "equal"
    assert outside.numpy().tolist() == [1.0, 2.0]
    assert made[0].numpy().tolist() == [0.0, 0.0]


def test_every_kind_of_variable_takes_part(strategy):
    with strategy.scope():
        key = px.Variable(jax.random.key(0), name="key", trainable=False)
        flag = px.Variable(False, aggregation="only_first_replica")
        half = px.Variable(jnp.ones(2), dtype="bfloat16", aggregation="mean")
        wave = px.Variable(1j, aggregation="mean")
        own = px.Variable(jax.random.key(1), synchronization="on_read", trainable=False)

    @px.function
    def step(batch):
        def fn():
            key.assign(jax.random.split(key.value)[0])
            own.assign(jax.random.fold_in(own.value, replica_id()))
            flag.assign(True)
            half.assign_add(jnp.ones(2, jnp.bfloat16))
            wave.assign(wave.value * 1j)

        strategy.run(fn)

    assert px.self_check(step, dataset(strategy)) == "equal"
    assert (bool(flag), half.numpy().tolist(), complex(wave)) == (False, [1.0, 1.0], 1j)


def test_an_error_in_the_step_leaves_everything_as_it_was(strategy):
    training = Training(strategy)
    calls = []

    def step(batch):
        training.step(batch)
        calls.append(strategy.num_replicas)
        if strategy.num_replicas == 1:
            raise KeyError("only on one")

    before = training.values()[:3]
    with pytest.raises(KeyError):
        px.self_check(step, dataset(strategy))
    assert calls == [4, 4, 4, 4, 1]
    assert strategy.num_replicas == 4
    assert training.values()[:3] == before
    training.step(next(iter(dataset(strategy))))


def test_it_may_trace_anew_also_when_that_is_an_error_elsewhere(strategy):
    training = Training(strategy)
    step = px.function(training.step)
    px.strict(True)
    for _ in range(2):
        for batch in dataset(strategy):
            step(batch)
    assert px.self_check(step, dataset(strategy)) == "equal"


@pytest.mark.parametrize(
    ("arguments", "error", "words"),
    [
        (lambda s: (3, dataset(s)), ArgumentTypeError, "step must be a function, got int 3"),
        (lambda s: (print, 3), ArgumentTypeError, "batches must be iterable, got int"),
        (lambda s: (print, []), ArgumentError, "got 0 elements with 0 such values"),
        (lambda s: (print, [np.ones(3)] * 3), ArgumentError, "got 3 elements with 0 such values"),
        (lambda s: (print, [s.run(replica_id)]), ArgumentError, "got 1 elements with 1 such values and scalars"),
    ],
)
def test_wrong_arguments_are_named(strategy, arguments, error, words):
    with pytest.raises(error, match=words):
        px.self_check(*arguments(strategy))


def test_it_belongs_outside(strategy):
    batches = dataset(strategy)

    def check():
        px.self_check(print, batches)

    with pytest.raises(StrategyError, match="outside traced functions, replicas and tapes"):
        px.function(check)()
    with pytest.raises(StrategyError, match="outside traced functions"):
        strategy.run(check)
    with px.GradientTape(), pytest.raises(StrategyError, match="and tapes"):
        check()
    training = Training(strategy)
    with strategy.scope():
        assert px.self_check(training.step, dataset(strategy)) == "equal"
