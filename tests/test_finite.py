"""NaN and infinity: found inside the step, named, and kept out of the variables on all replicas together."""

from __future__ import annotations

import logging

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import phalanx as px
from phalanx.errors import (
    AggregationRequiredError,
    ArgumentError,
    ArgumentTypeError,
    NonFiniteError,
    StrategyError,
    TracingError,
)

N = 4


class Loop:
    """Two variables, of which each replica's gradient is the mean of its rows."""

    def __init__(self, n=N, optimizer=None, traced=True, **options):
        self.strategy = px.Mirrored(jax.devices()[:n])
        with self.strategy.scope():
            self.w = px.Variable(jnp.ones(2), name="w")
            self.b = px.Variable(0.0, name="b")
            self.guard = px.NonFiniteGuard(optimizer or px.Optimizer(optax.adam(0.1)), **options)
        self.step = px.function(self._step) if traced else self._step

    def _step(self, x):
        def replica(x):
            with px.GradientTape() as tape:
                loss = (self.w * x[:, :2]).sum() + self.b * x[:, 2].sum() + x[:, 3].sum()
                scaled = self.guard.scale_loss(loss) if self.guard.policy == "rescale" else loss
            grads = tape.gradient(scaled, [self.w, self.b])
            self.guard.apply_gradients(zip(grads, [self.w, self.b]), loss=loss)

        self.strategy.run(replica, args=(x,))

    def __call__(self, row=None, column=None, value=np.nan):
        """A step on ones, one of which is something else."""
        rows = np.ones((N, 4), np.float32)
        if row is not None:
            rows[row, column] = value
        self.step(self.strategy.split_rows(rows))

    def values(self):
        slots = self.guard.optimizer.variables
        return [np.asarray(v).tobytes() for v in [self.w, self.b, *slots]]


NAMED = {
    0: "the loss and the gradient of Variable 'w' are",
    2: "the loss and the gradient of Variable 'b' are",
    3: "the loss is",
}


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("column", NAMED)
def test_the_first_is_named_with_its_replica_and_step_and_nothing_has_changed(column, value):
    loop = Loop()
    loop()
    loop()
    before = loop.values()
    loop(row=2, column=column, value=value)
    assert loop.values() == before
    loop()
    loop(row=0, column=2)
    assert loop.values() == before, "no later step counts"
    with pytest.raises(
        NonFiniteError, match=rf"At step 3 {NAMED[column]} not finite on replica 2\. .*before that step"
    ):
        loop.guard.check()
    loop.guard.reset()
    loop.guard.check()
    loop()
    assert loop.values() != before


def test_without_the_loss_the_first_variable_is_named():
    w, b, c = (px.Variable(jnp.ones(2), name=name) for name in "wbc")
    guard = px.NonFiniteGuard(px.Optimizer(optax.sgd(0.1)))
    guard.apply_gradients([(jnp.ones(2), w), (jnp.array([1.0, jnp.inf]), b), (jnp.full(2, jnp.nan), c)])
    with pytest.raises(NonFiniteError, match="At step 1 the gradient of Variable 'b' is not finite on replica 0"):
        guard.check()


@pytest.mark.parametrize("traced", [True, False])
@pytest.mark.parametrize("n", [1, 2, 4])
def test_a_step_that_is_skipped_has_never_been(n, traced, caplog):
    guarded, reference = Loop(n, traced=traced, policy="skip"), Loop(n, traced=traced, policy="skip")
    for step in range(6):
        bad = step in (1, 4)
        guarded(row=3 if bad else None, column=2)
        if not bad:
            reference()
    assert guarded.values() == reference.values()
    assert px.audit(guarded.strategy).equal
    with caplog.at_level(logging.WARNING, logger="phalanx"):
        guarded.guard.check()
    replica = 3 * n // 4
    assert (
        f"2 step(s) did not count: At step 5 the loss and the gradient of Variable 'b' are not finite on replica {replica}"
        in caplog.text
    )
    assert guarded.guard.skipped == 2
    if traced:
        assert guarded.step.trace_count == 1


def test_the_host_looks_without_waiting_and_raises_soon():
    loop = Loop(every=2)
    raised = None
    for step in range(1, 20):
        loop(row=1 if step == 5 else None, column=2)
        jax.block_until_ready(loop.guard._counts._stored)  # a device that is fast
        try:
            loop.guard.after_step()
        except NonFiniteError as error:
            raised = step, str(error)
            break
    assert raised is not None
    assert raised[0] == 7
    assert "At step 5 the loss and the gradient of Variable 'b' are not finite on replica 1" in raised[1]


def test_a_sum_that_overflows_is_told_apart_from_what_a_replica_computed():
    strategy = px.Mirrored(jax.devices()[:2])
    with strategy.scope():
        w = px.Variable(jnp.ones(2), name="w")
        guard = px.NonFiniteGuard(px.Optimizer(optax.sgd(1.0)))
    strategy.run(lambda: guard.apply_gradients([(jnp.full(2, 3e38), w)], reduce="sum"))
    assert w.numpy().tolist() == [1, 1]
    with pytest.raises(NonFiniteError, match="gradient of Variable 'w' is finite on each replica, but not in the sum"):
        guard.check()


def test_the_replicas_gradients_may_be_applied_outside_of_them():
    strategy = px.Mirrored(jax.devices()[:2])
    with strategy.scope():
        w = px.Variable(jnp.ones(2), name="w")
        guard = px.NonFiniteGuard(px.Optimizer(optax.sgd(1.0)), "skip")
    for rows in ([[1.0, 1.0], [1.0, np.inf]], [[1.0, 1.0], [1.0, 2.0]]):
        guard.apply_gradients([(strategy.split_rows(np.array(rows, np.float32).reshape(4)), w)])
    assert w.numpy().tolist() == [-1, -2]
    assert guard.skipped == 1


def test_gradients_that_are_reduced_already_are_taken_as_they_are():
    strategy = px.Mirrored(jax.devices()[:2])
    with strategy.scope():
        w = px.Variable(jnp.ones(2), name="w")
        guard = px.NonFiniteGuard(px.Optimizer(optax.sgd(1.0)))

    def replica():
        total = px.get_replica_context().all_reduce("sum", jnp.ones(2))
        guard.apply_gradients([(total, w)], reduce=None)

    strategy.run(replica)
    guard.check()
    assert w.numpy().tolist() == [-1, -1]


def test_gradients_that_differ_are_refused_unless_they_are_to_be_reduced():
    strategy = px.Mirrored(jax.devices()[:2])
    with strategy.scope():
        w = px.Variable(1.0, name="w")
        guard = px.NonFiniteGuard(px.Optimizer(optax.sgd(1.0)))

    def replica():
        guard.apply_gradients([(px.get_replica_context().replica_id + 1.0, w)], reduce=None)

    with pytest.raises(AggregationRequiredError, match="the gradient of Variable 'w' may differ between the replicas"):
        strategy.run(replica)
    assert float(w) == 1.0


def test_the_loss_scale_falls_where_gradients_overflow_and_grows_again():
    strategy = px.Mirrored(jax.devices()[:2])
    with strategy.scope():
        w = px.Variable(1.0, name="w")
        guard = px.NonFiniteGuard(px.Optimizer(optax.sgd(1.0)), "rescale", initial_scale=2.0**14, growth_steps=3)

    @px.function
    def step(x):
        def replica(x):
            with px.GradientTape() as tape:
                loss = (w.value.astype(jnp.float16) * x.astype(jnp.float16)).sum()
                scaled = guard.scale_loss(loss)
            guard.apply_gradients([(tape.gradient(scaled, w), w)])

        strategy.run(replica, args=(x,))

    x = strategy.split_rows(np.full((2, 1), 8.0, np.float32))
    scales, values = [], []
    for _ in range(8):
        step(x)
        scales.append(guard.scale)
        values.append(float(w))
    # A gradient of 8 times a scale of 2**14 or 2**13 is more than float16 has.
    assert scales == [2.0**13, 2.0**12, 2.0**12, 2.0**12, 2.0**13, 2.0**12, 2.0**12, 2.0**12]
    assert values == [1, 1, -15, -31, -47, -47, -63, -79]
    assert guard.skipped == 3
    guard.check()
    assert step.trace_count == 1


def test_what_is_not_finite_at_a_scale_of_one_is_an_error():
    loop = Loop(policy="rescale", initial_scale=2.0)
    loop(row=1, column=0)
    loop(row=1, column=0)
    assert (loop.guard.scale, loop.w.numpy().tolist()) == (1.0, [1, 1])
    with pytest.raises(NonFiniteError, match="at a loss scale of 1 too: it does not come from the scale"):
        loop.guard.check()


def test_a_loss_that_was_not_scaled_is_refused():
    w = px.Variable(1.0)
    guard = px.NonFiniteGuard(px.Optimizer(optax.sgd(1.0)), "rescale")
    with pytest.raises(
        ArgumentError, match=r"no loss was scaled\. In the tape write `scaled = guard.scale_loss\(loss\)`"
    ):
        guard.apply_gradients([(1.0, w)])
    assert float(w) == 1.0


def test_missing_gradients_pass_through_as_without_the_guard():
    a, b = px.Variable(1.0, name="a"), px.Variable(1.0, name="b")
    guard = px.NonFiniteGuard(px.Optimizer(optax.sgd(1.0)))
    with pytest.warns(UserWarning, match="does not depend on Variable 'b'"):
        guard.apply_gradients([(1.0, a), (None, b)])
    assert (float(a), float(b)) == (0.0, 1.0)
    with pytest.raises(ArgumentError, match="no gradient at all"):
        guard.apply_gradients([(None, a), (None, b)])


def test_a_guard_is_kept_in_checkpoints_with_its_optimizer_and_scale(tmp_path, caplog):
    def make():
        w = px.Variable(1.0, name="w")
        guard = px.NonFiniteGuard(px.Optimizer(optax.adam(0.1)), "rescale", initial_scale=64)
        guard.build([w])
        return w, guard

    w, guard = make()
    scaled = guard.scale_loss(jnp.float32(jnp.nan))
    guard.apply_gradients([(scaled, w)])
    manager = px.CheckpointManager(tmp_path)
    manager.save(px.Checkpoint(w=w, guard=guard), step=1)
    v, other = make()
    manager.restore_latest(px.Checkpoint(w=v, guard=other))
    assert (other.scale, other.skipped) == (32.0, 1)
    with caplog.at_level(logging.WARNING, logger="phalanx"):
        other.check()
    assert "1 step(s) did not count: Before the checkpoint that was restored a step was not finite" in caplog.text


def test_after_a_restore_it_is_the_step_that_came_then_that_is_named(tmp_path):
    loop, manager = Loop(), px.CheckpointManager(tmp_path)
    loop()
    kept = px.Checkpoint(w=loop.w, b=loop.b, guard=loop.guard)
    manager.save(kept, step=1)
    loop(row=0, column=0)
    manager.restore_latest(kept)
    loop()
    loop(row=3, column=2)
    with pytest.raises(NonFiniteError, match="At step 3 .* of Variable 'b' are not finite on replica 3"):
        loop.guard.check()


@pytest.mark.parametrize("policy", ["skip", "rescale"])
def test_steps_in_a_row_that_do_not_count_are_each_reported(policy, caplog):
    loop = Loop(1, policy=policy, every=1)
    with caplog.at_level(logging.WARNING, logger="phalanx"):
        for replica in range(4):
            loop(row=replica, column=2 * (replica % 2))
            jax.block_until_ready(loop.guard._counts._stored)  # a device that is fast
            loop.guard.after_step()
        loop.guard.check()
    steps = [record.getMessage().partition(" the loss")[0] for record in caplog.records]
    assert steps == [f"1 step(s) did not count: At step {i}" for i in (1, 2, 3, 4)]


def test_the_host_looks_outside_of_traces_alone():
    guard = px.NonFiniteGuard(px.Optimizer(optax.sgd(0.1)), every=1)
    for look in (guard.after_step, guard.check, guard.reset):
        with pytest.raises(StrategyError, match="outside of traced functions and replicas: after the step"):
            px.function(look)()
        with pytest.raises(StrategyError, match="outside of traced functions and replicas: after the step"):
            px.Mirrored(jax.devices()[:2]).run(look)


@pytest.mark.parametrize(
    ("pairs", "options", "kind", "message"),
    [
        (lambda w: 3, {}, ArgumentTypeError, "takes pairs, zip"),
        (lambda w: [(jnp.ones(2),)], {}, ArgumentTypeError, "takes pairs, zip"),
        (lambda w: [("x", w)], {}, ArgumentTypeError, "the gradient"),
        (lambda w: [(jnp.ones(2), jnp.ones(2))], {}, ArgumentTypeError, "takes px.Variables, got ArrayImpl"),
        (lambda w: [(jnp.ones(3), w)], {}, ArgumentError, r"has shape \(3,\), the variable \(2,\)"),
        (lambda w: [(jnp.ones(2), w)], {"loss": {"a": 1}}, ArgumentTypeError, "takes arrays and numbers, got dict"),
        (lambda w: [(jnp.ones(2), w)], {"loss": "big"}, ArgumentTypeError, "takes arrays and numbers, got str"),
    ],
)
def test_what_is_no_gradient_is_refused_as_without_the_guard(pairs, options, kind, message):
    w = px.Variable(jnp.ones(2), name="w")
    guard = px.NonFiniteGuard(px.Optimizer(optax.sgd(0.1)))
    with pytest.raises(kind, match=message):
        guard.apply_gradients(pairs(w), **options)
    assert w.numpy().tolist() == [1, 1]


@pytest.mark.parametrize(
    ("make", "kind", "message"),
    [
        (lambda o: px.NonFiniteGuard(3), ArgumentTypeError, "takes a px.Optimizer or an optimizer of Keras's, got int"),
        (lambda o: px.NonFiniteGuard(o, "warn"), ArgumentError, "policy must be one of 'raise', 'skip', 'rescale'"),
        (lambda o: px.NonFiniteGuard(o, every=0), ArgumentError, "every must be a positive int, got 0"),
        (lambda o: px.NonFiniteGuard(o, growth_steps=1.5), ArgumentError, "growth_steps must be a positive int"),
        (
            lambda o: px.NonFiniteGuard(o, initial_scale=0.5),
            ArgumentError,
            "must be a number from 1 to 2[*][*]24, got 0.5",
        ),
        (lambda o: px.NonFiniteGuard(o, initial_scale=2.0**40), ArgumentError, "must be a number from 1 to 2[*][*]24"),
    ],
)
def test_bad_arguments_are_refused(make, kind, message):
    with pytest.raises(kind, match=message):
        make(px.Optimizer(optax.sgd(0.1)))


# ---- values outside of steps ---------------------------------------------------------------------


def test_finite_values_are_given_back_as_they_are():
    v = px.Variable([1.0, 2.0])
    for values in (1.5, 3, jnp.ones(2), v, {"a": (np.ones(2), "text", None, True)}, jnp.ones(2, jnp.bfloat16)):
        assert px.finite_or_raise(values) is values


def test_values_of_the_host_are_looked_at_as_they_are():
    for big in (1e300, np.array([1e300]), np.float64(-1e300), {"a": [np.longdouble(1e300)]}):
        assert px.finite_or_raise(big) is big
    for bad in (np.longdouble("nan"), np.array([1e300, np.inf]), complex(0, np.inf)):
        with pytest.raises(NonFiniteError, match="value is not finite"):
            px.finite_or_raise(bad)


def test_the_first_value_that_is_not_finite_is_named():
    strategy = px.Mirrored(jax.devices()[:4])
    parts = strategy.run(lambda: jnp.where(px.get_replica_context().replica_id == 2, jnp.nan, 1.0))
    for values, message in [
        (jnp.array([1.0, jnp.inf]), "loss is not finite"),
        (float("nan"), "loss is not finite"),
        ({"a": jnp.ones(2), "b": [1.0, np.float32("nan")]}, r"loss\['b'\]\[1\] is not finite"),
        (px.Variable(jnp.nan), "loss is not finite"),
        ({"part": parts}, r"loss\['part'\] is not finite on replica 2"),
    ]:
        with pytest.raises(NonFiniteError, match=message):
            px.finite_or_raise(values, "loss")
    with pytest.raises(TracingError, match=r"loss is being traced, .*use px\.NonFiniteGuard"):
        px.function(lambda x: px.finite_or_raise(x, "loss"))(1.0)
