"""Group "training": clipping, penalties, uneven batches, accumulation, contexts, batch normalisation."""

from __future__ import annotations

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import phalanx as px
from goldens.kit import GOLDENS, attempt, check, components, differs, each, per_replica, replay
from goldens.loop import WEIGHTS, array, make_variable, network, replica_number, row_losses, train, train_with, values

# ---- clipping, penalties, uneven batches ---------------------------------------------------------


@replay("train_clip_after_all_reduce")
def test_clipping_the_reduced_gradient_by_hand(golden, strategy):
    limit, lr = golden.inputs["clip_norm"], golden.inputs["lr"]
    norms, count = make_variable(strategy, np.zeros(10)), make_variable(strategy, 0.0)

    def apply(gradients, weights):
        context = px.get_replica_context()
        gradients = context.all_reduce("sum", gradients)
        norm = optax.global_norm(gradients)
        clipped = [g * limit / jnp.maximum(norm, limit) for g in gradients]
        here = jax.nn.one_hot(count.astype(jnp.int32), 10)

        def merge(strategy, clipped, norm):
            for v, g in zip(weights, clipped):
                strategy.update(v, lambda v, g: v.assign_sub(lr * g), args=(g,))
            strategy.update(norms, lambda v, x: v.assign_add(here * x), args=(norm,))
            strategy.update(count, lambda v: v.assign_add(1.0))

        context.merge_call(merge, args=(clipped, norm))

    return {**train(golden, strategy, apply), "norms": norms.value}


def _check_clipping(golden, strategy, transformation):
    """However many replicas there are, the result is that of one."""
    out = train_with(golden, strategy, optax.chain(transformation, optax.sgd(golden.inputs["lr"])))
    GOLDENS[golden.name, 1].check(out)


@differs("train_optimizer_global_clipnorm", "clipping acts on the reduced gradient")
def test_clipping_by_the_global_norm(golden, strategy):
    _check_clipping(golden, strategy, optax.clip_by_global_norm(golden.inputs["global_clipnorm"]))


@differs("train_optimizer_clipnorm", "clipping acts on the reduced gradient")
def test_clipping_each_gradient_by_its_norm(golden, strategy):
    limit = golden.inputs["clipnorm"]
    by_norm = optax.stateless_with_tree_map(lambda g, _: g * limit / jnp.maximum(jnp.linalg.norm(g.ravel()), limit))
    _check_clipping(golden, strategy, by_norm)


@differs("train_optimizer_clipvalue", "clipping acts on the reduced gradient")
def test_clipping_each_entry(golden, strategy):
    _check_clipping(golden, strategy, optax.clip(golden.inputs["clipvalue"]))


@replay("train_l2_scaled")
def test_penalty_divided_by_the_replicas_counts_once(golden, strategy):
    def penalty(weights):
        W1, _, W2, _ = weights
        squares = ((W1 * W1).sum() + (W2 * W2).sum()) / 2.0
        return golden.inputs["l2"] * squares / px.get_replica_context().num_replicas

    return train_with(golden, strategy, optax.sgd(golden.inputs["lr"]), penalty=penalty)


@replay("train_uneven_batches")
def test_every_row_of_uneven_batches_counts_once(golden, strategy):
    return train_with(golden, strategy, optax.sgd(0.1))


# ---- accumulation, averages ----------------------------------------------------------------------


@replay("train_gradient_accumulation_on_read")
def test_gradient_accumulation_by_hand(golden, strategy):
    weights, lr = network(golden, strategy), golden.inputs["lr"]
    sums = [
        make_variable(strategy, np.zeros(v.shape), synchronization="on_read", aggregation="sum", name=f"sum_{v.name}")
        for v in weights
    ]
    rows = array(golden.inputs["x"]), array(golden.inputs["y"])
    data = strategy.distribute_dataset(rows, golden.inputs["global_micro_batch"])

    def micro_step(x, y):
        with px.GradientTape() as tape:
            loss = row_losses(weights, x, y).sum() / 8.0
        for total, g in zip(sums, tape.gradient(loss, weights)):
            total.assign_add(g)
        return loss

    def update():
        context = px.get_replica_context()
        gradients = context.all_reduce("sum", [total.read_value() for total in sums])

        def merge(strategy, gradients):
            for v, g in zip(weights, gradients):
                strategy.update(v, lambda v, g: v.assign_sub(lr * g), args=(g,))

        context.merge_call(merge, args=(gradients,))
        for total in sums:
            total.assign(jnp.zeros(total.shape))

    accumulate = px.function(lambda element: strategy.reduce("sum", strategy.run(micro_step, args=element)))
    apply = px.function(lambda: strategy.run(update))
    losses = []
    for i, element in enumerate(itertools.islice(itertools.cycle(data), 8)):
        losses.append(accumulate(element))
        if i == 0:
            after_1 = values(sums)
        if i % 2:
            apply()
    return {
        "losses": losses,
        "accumulators_after_1": after_1,
        "final_weights": values(weights),
        "accumulators_at_the_end": [total.value for total in sums],
    }


@differs("train_keras_gradient_accumulation", "accumulation in the optimizer works in traced steps")
def test_gradient_accumulation_in_the_optimizer(golden, strategy):
    for traced in (True, False):
        optimizer = px.Optimizer(optax.MultiSteps(optax.sgd(golden.inputs["lr"]), every_k_schedule=2))

        def apply(gradients, weights):
            optimizer.apply_gradients(zip(gradients, weights))

        out = train(golden, strategy, apply, traced=traced)
        golden.check({**out, "iterations": optimizer.state.gradient_step.value}, "b_eager")


@replay("train_keras_ema")
def test_moving_averages_of_the_weights(golden, strategy):
    momentum = golden.inputs["ema_momentum"]
    averages = [make_variable(strategy, golden.inputs[name], trainable=False) for name in WEIGHTS]
    optimizer = px.Optimizer(optax.chain(optax.sgd(golden.inputs["lr"]), optax.scale_by_schedule(lambda count: 1.0)))

    def apply(gradients, weights):
        optimizer.apply_gradients(zip(gradients, weights))
        first = optimizer.state[-1].count == 1
        for average, v in zip(averages, weights):
            average.assign(jnp.where(first, v.value, momentum * average + (1.0 - momentum) * v))

    out = train(golden, strategy, apply)
    return {"result": {**out, "iterations": optimizer.state[-1].count.value, "averages": values(averages)}}


# ---- where and when an optimizer is used ---------------------------------------------------------


@differs("train_optimizer_not_built", "an optimizer may make its state in the first traced step")
def test_optimizer_makes_its_state_when_it_is_first_used(golden, strategy):
    expected = golden.expect["c_built_then_traced"]
    for traced, build in ((False, False), (True, False), (True, True)):
        w = make_variable(strategy, golden.inputs["w"])
        optimizer = px.Optimizer(optax.sgd(golden.inputs["lr"], momentum=golden.inputs["momentum"]))
        if build:
            optimizer.build([w])

        def replica():
            optimizer.apply_gradients([((replica_number() + 1.0) / strategy.num_replicas, w)])

        def step():
            strategy.run(replica)

        step = px.function(step) if traced else step
        step()
        step()
        check(components(w), expected)


@differs("train_optimizer_contexts", "an optimizer works in cross-replica context")
def test_optimizer_in_every_context(golden, strategy):
    def outcome(use):
        w = make_variable(strategy, golden.inputs["w"])
        optimizer = px.Optimizer(optax.sgd(golden.inputs["lr"]))
        use(optimizer, w)
        return components(w)

    def cross(gradient):
        def use(optimizer, w):
            with strategy.scope():
                optimizer.apply_gradients([(gradient, w)])

        return use

    n = strategy.num_replicas
    check(outcome(cross(jnp.float32(2.0))), [0.8] * n)
    parts = per_replica(strategy, [r + 1.0 for r in range(n)])
    golden.check(outcome(cross(parts)), "c_made_outside")
    in_replicas = outcome(
        lambda optimizer, w: strategy.run(lambda: optimizer.apply_gradients([(replica_number() + 1.0, w)]))
    )
    golden.check(in_replicas, "c_made_outside")
    outside = outcome(lambda optimizer, w: optimizer.apply_gradients([(jnp.float32(2.0), w)]))
    golden.check(outside, "d_used_outside")


@replay("train_none_gradients")
def test_missing_gradients_leave_variables_alone(golden, strategy):
    a, b, c = (make_variable(strategy, value, name=name) for name, value in (("a", 1.0), ("b", 2.0), ("c", 3.0)))
    optimizer = px.Optimizer(optax.sgd(0.1))
    n = strategy.num_replicas

    def applied(*pairs):
        strategy.run(lambda: optimizer.apply_gradients([(g and g(), v) for g, v in pairs]))
        return "ok"

    with pytest.warns(UserWarning, match="does not depend on Variable 'a'"):
        one = applied((None, a), (lambda: (replica_number() + 1.0) / n, b))
    return {
        "one_none": one,
        "after": {"a": components(a), "b": components(b)},
        "both_none": attempt(applied, (None, a), (None, b)),
        "unknown_variable": attempt(applied, (replica_number, c)),
    }


@replay("train_constraint_applied_by_optimizer")
def test_optimizer_applies_the_constraint(golden, strategy):
    w = make_variable(strategy, golden.inputs["w"], constraint=lambda x: jnp.maximum(x, 0.0))
    optimizer = px.Optimizer(optax.sgd(golden.inputs["lr"]))

    def replica():
        optimizer.apply_gradients([(jnp.ones(3) * (replica_number() + 1.0) / strategy.num_replicas, w)])

    log = []
    for _ in range(3):
        strategy.run(replica)
        log.append(components(w))
    return {"components_after_step": log}


@differs("train_embedding_sparse_gradients", "gradients are dense, and repeated rows are squared together")
def test_embedding(golden, strategy):
    o, n = golden.inputs, strategy.num_replicas
    batches = [(np.array(ids, np.int32), np.array(y, np.float32)) for ids, y in zip(o["ids"], o["y"])]
    transformations = {
        "a_sgd": optax.sgd(0.5),
        "b_momentum": optax.sgd(0.1, momentum=0.9),
        "c_adam": optax.adam(0.1, eps=1e-7),
        "d_adagrad": optax.adagrad(0.5, eps=1e-7),
    }
    models = {name: [make_variable(strategy, o[key]) for key in "Ew"] for name in transformations}
    optimizers = {name: px.Optimizer(transformation) for name, transformation in transformations.items()}

    def loss_of(weights, ids, y):
        E, w = weights
        return (((E[ids] @ w)[:, 0] - y) ** 2).sum() / 8.0

    def replica(ids, y):
        losses = {}
        for name, weights in models.items():
            with px.GradientTape() as tape:
                losses[name] = loss_of(weights, ids, y)
            optimizers[name].apply_gradients(zip(tape.gradient(losses[name], weights), weights))
        return losses

    @px.function
    def step(ids, y):
        return strategy.reduce("sum", strategy.run(replica, args=(ids, y)))

    @jax.jit
    def on_one_device(weights, states, ids, y):
        losses = {}
        for name, transformation in transformations.items():
            losses[name], gradients = jax.value_and_grad(loss_of)(weights[name], ids, y)
            changes, states[name] = transformation.update(gradients, states[name], weights[name])
            weights[name] = optax.apply_updates(weights[name], changes)
        return losses, weights, states

    weights = {name: [array(o[key]) for key in "Ew"] for name in transformations}
    states = {name: transformation.init(weights[name]) for name, transformation in transformations.items()}
    for i in range(6):
        losses = step(*(per_replica(strategy, rows.reshape(n, -1), rows.dtype) for rows in batches[i % 2]))
        expected, weights, states = on_one_device(weights, states, *batches[i % 2])
        for name in transformations:
            check(losses[name], float(expected[name]), golden.tolerance)
        for name in ("a_sgd", "b_momentum"):
            golden.check(losses[name], name, "losses", i)
    for name in ("a_sgd", "b_momentum"):
        for key, variable in zip("Ew", models[name]):
            golden.check(variable, name, key)


@differs("train_loss_helpers", "a division by the rows of the global batch needs no helper")
def test_average_of_row_losses(golden, strategy):
    def fn(losses):
        n = px.get_replica_context().num_replicas
        weights = jnp.array([1.0, 0.0, 2.0])
        penalty = jnp.stack([4.0, 2.0 * (replica_number() + 1.0)])
        return {
            "default": losses.sum() / (losses.size * n),
            "global_16": losses.sum() / 16.0,
            "weighted": (losses * weights).sum() / (losses.size * n),
            "regularization": penalty.sum() / n,
        }

    out = strategy.run(fn, args=(per_replica(strategy, golden.inputs["losses"]),))
    for name, value in out.items():
        golden.check(each(strategy, value), name)
    with strategy.scope():
        golden.check(jnp.array([1.0, 2.0, 3.0]).sum() / 6.0, "cross_average")


# ---- batch normalisation -------------------------------------------------------------------------


class _BatchNorm:
    """Batch normalisation over axis 0 with moving statistics, written by hand."""

    def __init__(self, strategy, moments, **moving):
        self.gamma, self.beta = make_variable(strategy, np.ones(4)), make_variable(strategy, np.zeros(4))
        self.mean = make_variable(strategy, np.zeros(4), trainable=False, aggregation="mean", **moving)
        self.variance = make_variable(strategy, np.ones(4), trainable=False, aggregation="mean", **moving)
        self._moments = moments

    def __call__(self, h, training):
        if training:
            mean, variance = self._moments(h)
            self.mean.assign(self.mean * 0.9 + mean * 0.1)
            self.variance.assign(self.variance * 0.9 + variance * 0.1)
        else:
            mean, variance = self.mean.value, self.variance.value
        return (h - mean) * self.gamma * jax.lax.rsqrt(variance + 0.001) + self.beta


def _own_moments(h):
    return h.mean(0), h.var(0)


def _shared_moments(h):
    mean, squares = px.get_replica_context().all_reduce("mean", [h.mean(0), (h * h).mean(0)])
    return mean, squares - mean**2


def _train_normalised(golden, strategy, norm):
    o = golden.inputs
    W, b, V = (make_variable(strategy, o[name]) for name in ("W", "b", "V"))
    weights = [W, b, V, norm.gamma, norm.beta]
    optimizer = px.Optimizer(optax.sgd(o["lr"]))
    data = strategy.distribute_dataset((array(o["x"]), array(o["y"])), o["global_batch"])

    def replica(x, y):
        with px.GradientTape() as tape:
            h = jnp.tanh(norm(x @ W + b, True))
            loss = ((h @ V - y) ** 2).sum() / o["global_batch"]
        optimizer.apply_gradients(zip(tape.gradient(loss, weights), weights))
        return loss

    step = px.function(lambda element: strategy.reduce("sum", strategy.run(replica, args=element)))
    losses = [step(element) for element in itertools.islice(itertools.cycle(data), o["steps"])]
    predicted = strategy.run(lambda x: jnp.tanh(norm(x @ W + b, False)) @ V, args=(array(o["x"][:3]),))
    moving = {"moving_mean": norm.mean, "moving_variance": norm.variance}
    return {
        "losses": losses,
        **dict(zip(("W", "b", "V", "gamma", "beta"), weights)),
        **{name: {"cross_read": v.value, "components": components(v)} for name, v in moving.items()},
        "inference_on_first_3_rows": each(strategy, predicted),
    }


@replay("train_batch_norm_manual_on_read")
def test_batch_norm_with_statistics_of_each_replica(golden, strategy):
    return _train_normalised(golden, strategy, _BatchNorm(strategy, _own_moments, synchronization="on_read"))


@replay("train_batch_norm_manual_on_write")
def test_batch_norm_with_averaged_statistics(golden, strategy):
    return _train_normalised(golden, strategy, _BatchNorm(strategy, _own_moments, synchronization="on_write"))


@replay("train_batch_norm_manual_synchronized")
def test_batch_norm_over_the_rows_of_all_replicas(golden, strategy):
    return _train_normalised(golden, strategy, _BatchNorm(strategy, _shared_moments))
