"""Group "training": custom loops with optimizers, schedules, clipping, accumulation and batch normalisation.

Keras optimizers are replayed by optax transformations that compute the same, through `px.Optimizer`.
"""

from __future__ import annotations

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import phalanx as px
from goldens.kit import GOLDENS, attempt, check, components, differs, each, per_replica, replay

WEIGHTS = ("W1", "b1", "W2", "b2")


def _array(values):
    return jnp.asarray(values, jnp.float32)


def _variable(strategy, value, **options):
    with strategy.scope():
        return px.Variable(_array(value), **options)


def _replica():
    """This replica's number, as a float."""
    return px.get_replica_context().replica_id.astype(jnp.float32)


def _options(golden):
    """The arguments of the Keras optimizer."""
    return {name: value for name, value in golden.inputs["optimizer"].items() if name != "class"}


# ---- the loop ------------------------------------------------------------------------------------


def _output(weights, x):
    W1, b1, W2, b2 = weights
    return jnp.tanh(x @ W1 + b1) @ W2 + b2


def _row_losses(weights, x, y):
    return ((_output(weights, x) - y) ** 2).mean(1)


def _values(weights):
    return {name: v.value for name, v in zip(WEIGHTS, weights)}


def _network(golden, strategy):
    return [_variable(strategy, golden.inputs[name], name=name) for name in WEIGHTS]


def _train(golden, strategy, apply, penalty=lambda weights: 0.0, traced=True):
    """The loop that most scenarios share; `apply(gradients, weights)` is called in each replica."""
    weights, batch = _network(golden, strategy), golden.inputs["global_batch"]
    data = strategy.distribute_dataset((_array(golden.inputs["x"]), _array(golden.inputs["y"])), batch)

    def replica(x, y):
        with px.GradientTape() as tape:
            loss = _row_losses(weights, x, y).sum() / batch + penalty(weights)
        apply(tape.gradient(loss, weights), weights)
        return loss

    def step(element):
        return strategy.reduce("sum", strategy.run(replica, args=element))

    step = px.function(step) if traced else step
    losses, first = [], None
    for element in itertools.islice(itertools.cycle(data), golden.inputs["steps"]):
        losses.append(step(element))
        first = first or _values(weights)
    equal = all(np.array_equal(part, v.value) for v in weights for part in components(v))
    return {
        "losses": losses,
        "weights_after_step_1": first,
        "final_weights": _values(weights),
        "components_equal": equal,
    }


def _train_with(golden, strategy, transformation, **options):
    """The loop with an optax transformation; also says how many steps its state has counted."""
    counter = optax.scale_by_schedule(lambda count: 1.0)
    optimizer = px.Optimizer(optax.chain(transformation, counter))

    def apply(gradients, weights):
        optimizer.apply_gradients(zip(gradients, weights))

    out = _train(golden, strategy, apply, **options)
    return {**out, "iterations": optimizer.state[-1].count.value}


def _by_hand(rule, *slots):
    """An optax transformation from a rule for one array, with slots that start with these values.

    ``rule(step, gradient, weight, *slots)`` gives the weight's change and the new slots; step counts from 1.
    """

    def init(params):
        return jnp.float32(0.0), [[jnp.full_like(w, value) for value in slots] for w in params]

    def update(gradients, state, params):
        step = state[0] + 1.0
        results = [rule(step, g, w, *own) for g, w, own in zip(gradients, params, state[1])]
        return [change for change, *_ in results], (step, [own for _, *own in results])

    return optax.GradientTransformation(init, update)


# ---- optimizers ----------------------------------------------------------------------------------


@replay("train_optimizer_sgd")
def test_sgd(golden, strategy):
    return _train_with(golden, strategy, optax.sgd(**_options(golden)))


@replay("train_optimizer_sgd_momentum")
def test_sgd_with_momentum(golden, strategy):
    return _train_with(golden, strategy, optax.sgd(**_options(golden)))


@replay("train_optimizer_sgd_nesterov")
def test_sgd_with_nesterov_momentum(golden, strategy):
    return _train_with(golden, strategy, optax.sgd(**_options(golden)))


@replay("train_optimizer_sgd_weight_decay")
def test_weight_decay_is_decoupled_and_scaled_by_the_learning_rate(golden, strategy):
    o = _options(golden)
    decayed = optax.chain(optax.add_decayed_weights(o["weight_decay"]), optax.sgd(o["learning_rate"]))
    return _train_with(golden, strategy, decayed)


def _adam_options(golden):
    """Keras adds epsilon before the correction of the second moment; within the scenario's tolerance it is the same."""
    o = _options(golden)
    return {"learning_rate": o["learning_rate"], "b1": o["beta_1"], "b2": o["beta_2"], "eps": o["epsilon"]}


@replay("train_optimizer_adam")
def test_adam(golden, strategy):
    return _train_with(golden, strategy, optax.adam(**_adam_options(golden)))


@replay("train_optimizer_adamw")
def test_adamw(golden, strategy):
    decay = _options(golden)["weight_decay"]
    return _train_with(golden, strategy, optax.adamw(**_adam_options(golden), weight_decay=decay))


@replay("train_optimizer_adam_amsgrad")
def test_amsgrad(golden, strategy):
    """optax.amsgrad takes the maximum of corrected second moments, Keras that of uncorrected ones: by hand."""
    o = _options(golden)
    lr, b1, b2 = o["learning_rate"], o["beta_1"], o["beta_2"]

    def rule(step, g, w, m, v, largest):
        m, v = b1 * m + (1 - b1) * g, b2 * v + (1 - b2) * g**2
        largest = jnp.maximum(largest, v)
        rate = lr * jnp.sqrt(1 - b2**step) / (1 - b1**step)
        return -rate * m / (jnp.sqrt(largest) + o["epsilon"]), m, v, largest

    return _train_with(golden, strategy, _by_hand(rule, 0.0, 0.0, 0.0))


@replay("train_optimizer_rmsprop")
def test_rmsprop(golden, strategy):
    o = _options(golden)
    return _train_with(golden, strategy, optax.rmsprop(o["learning_rate"], decay=o["rho"], eps=o["epsilon"]))


@replay("train_optimizer_rmsprop_centered_momentum")
def test_centered_rmsprop_with_momentum(golden, strategy):
    o = _options(golden)
    rmsprop = optax.rmsprop(
        o["learning_rate"], decay=o["rho"], eps=o["epsilon"], centered=True, momentum=o["momentum"]
    )
    return _train_with(golden, strategy, rmsprop)


@replay("train_optimizer_adagrad")
def test_adagrad(golden, strategy):
    o = _options(golden)
    adagrad = optax.adagrad(o["learning_rate"], o["initial_accumulator_value"], o["epsilon"])
    return _train_with(golden, strategy, adagrad)


@replay("train_optimizer_adadelta")
def test_adadelta(golden, strategy):
    o = _options(golden)
    return _train_with(golden, strategy, optax.adadelta(o["learning_rate"], rho=o["rho"], eps=o["epsilon"]))


@replay("train_optimizer_adamax")
def test_adamax(golden, strategy):
    return _train_with(golden, strategy, optax.adamax(**_adam_options(golden)))


@replay("train_optimizer_nadam")
def test_nadam(golden, strategy):
    """Keras lets the momentum grow with the steps, optax.nadam does not: by hand."""
    o = _options(golden)
    lr, b1, b2 = o["learning_rate"], o["beta_1"], o["beta_2"]

    def momentum(step):
        return b1 * (1 - 0.5 * 0.96**step)

    def rule(step, g, w, m, v, product):
        now, following = momentum(step), momentum(step + 1)
        product = product * now
        m, v = b1 * m + (1 - b1) * g, b2 * v + (1 - b2) * g**2
        corrected = following * m / (1 - product * following) + (1 - now) * g / (1 - product)
        return -lr * corrected / (jnp.sqrt(v / (1 - b2**step)) + o["epsilon"]), m, v, product

    return _train_with(golden, strategy, _by_hand(rule, 0.0, 0.0, 1.0))


@replay("train_optimizer_lion")
def test_lion(golden, strategy):
    o = _options(golden)
    return _train_with(golden, strategy, optax.lion(o["learning_rate"], o["beta_1"], o["beta_2"], weight_decay=0.0))


@replay("train_optimizer_ftrl")
def test_ftrl(golden, strategy):
    """optax has no FTRL: by hand."""
    o = _options(golden)
    lr, l1, l2 = o["learning_rate"], o["l1_regularization_strength"], o["l2_regularization_strength"]
    assert o["learning_rate_power"] == -0.5

    def rule(step, g, w, accumulated, linear):
        total = accumulated + g**2
        linear = linear + g - (jnp.sqrt(total) - jnp.sqrt(accumulated)) / lr * w
        new = (jnp.clip(linear, -l1, l1) - linear) / (jnp.sqrt(total) / lr + 2 * l2)
        return new - w, total, linear

    return _train_with(golden, strategy, _by_hand(rule, o["initial_accumulator_value"], 0.0))


# ---- learning rates ------------------------------------------------------------------------------


@replay("train_schedule_exponential")
def test_training_with_an_exponential_schedule(golden, strategy):
    o = golden.inputs
    schedule = optax.exponential_decay(o["initial"], o["decay_steps"], o["decay_rate"])
    out = _train_with(golden, strategy, optax.sgd(schedule))
    return {**out, "rates": [schedule(i) for i in range(10)], "rate_now": schedule(out["iterations"])}


@replay("train_schedules_alone")
def test_schedules_give_the_rate_of_each_step(golden, strategy):
    schedules = {
        "exponential_staircase": optax.exponential_decay(0.2, 4, 0.5, staircase=True),
        # Keras keeps a value up to and including its boundary.
        "piecewise": optax.piecewise_constant_schedule(0.3, {4: 2 / 3, 7: 1 / 2}),
        "polynomial": optax.polynomial_schedule(0.5, 0.1, power=2, transition_steps=8),
        "cosine": optax.cosine_decay_schedule(0.4, 10, alpha=0.1),
        "cosine_warmup": optax.warmup_cosine_decay_schedule(0.0, 0.4, warmup_steps=4, decay_steps=12),
        "inverse_time": lambda step: 0.3 / (1 + 0.5 * step / 2),
    }
    moved = {name: _variable(strategy, 0.0) for name in schedules}
    optimizers = {name: px.Optimizer(optax.sgd(schedule)) for name, schedule in schedules.items()}

    def replica():
        for name, optimizer in optimizers.items():
            moved[name].assign(0.0)
            optimizer.apply_gradients([(-(_replica() + 1.0), moved[name])], reduce="mean")
        return {name: v.value for name, v in moved.items()}

    step = px.function(lambda: strategy.run(replica))
    mean = (strategy.num_replicas + 1) / 2
    steps = [step() for _ in range(13)]
    return {name: [np.asarray(rates[name]) / mean for rates in steps] for name in schedules}


@replay("train_learning_rate_by_hand")
def test_learning_rate_is_a_variable_of_the_optimizer(golden, strategy):
    w = _variable(strategy, golden.inputs["w"])
    optimizer = px.Optimizer(optax.inject_hyperparams(optax.sgd)(learning_rate=0.1))
    with strategy.scope():
        optimizer.build([w])
    rate = optimizer.state.hyperparams["learning_rate"]

    def replica():
        optimizer.apply_gradients([((_replica() + 1.0) / strategy.num_replicas, w)])

    log = []
    for i in range(6):
        rate.assign({2: 0.5, 4: 0.0}.get(i, rate.value))
        strategy.run(replica)
        log.append({"w": w.value, "rate": rate.value})
    return {"steps": log, "components": components(w)}


# ---- clipping, penalties, uneven batches ---------------------------------------------------------


@replay("train_clip_after_all_reduce")
def test_clipping_the_reduced_gradient_by_hand(golden, strategy):
    limit, lr = golden.inputs["clip_norm"], golden.inputs["lr"]
    norms, count = _variable(strategy, np.zeros(10)), _variable(strategy, 0.0)

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

    return {**_train(golden, strategy, apply), "norms": norms.value}


def _check_clipping(golden, strategy, transformation):
    """However many replicas there are, the result is that of one."""
    out = _train_with(golden, strategy, optax.chain(transformation, optax.sgd(golden.inputs["lr"])))
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

    return _train_with(golden, strategy, optax.sgd(golden.inputs["lr"]), penalty=penalty)


@replay("train_uneven_batches")
def test_every_row_of_uneven_batches_counts_once(golden, strategy):
    weights, batch = _network(golden, strategy), golden.inputs["global_batch"]
    rows = _array(golden.inputs["x"]), _array(golden.inputs["y"])
    data = strategy.distribute_dataset(rows, batch, remainder="pad", mask=True)
    optimizer = px.Optimizer(optax.chain(optax.sgd(0.1), optax.scale_by_schedule(lambda count: 1.0)))

    def replica(element, weight):
        with px.GradientTape() as tape:
            loss = (_row_losses(weights, *element) * weight).sum() / batch
        optimizer.apply_gradients(zip(tape.gradient(loss, weights), weights))
        return loss

    step = px.function(lambda element: strategy.reduce("sum", strategy.run(replica, args=element)))
    losses, first = [], None
    for element in itertools.islice(itertools.cycle(data), golden.inputs["steps"]):
        losses.append(step((element[:2], element[2])))
        first = first or _values(weights)
    return {
        "losses": losses,
        "weights_after_step_1": first,
        "final_weights": _values(weights),
        "components_equal": all(np.array_equal(part, v.value) for v in weights for part in components(v)),
        "iterations": optimizer.state[-1].count.value,
    }


# ---- accumulation, averages ----------------------------------------------------------------------


@replay("train_gradient_accumulation_on_read")
def test_gradient_accumulation_by_hand(golden, strategy):
    weights, lr = _network(golden, strategy), golden.inputs["lr"]
    sums = [
        _variable(strategy, np.zeros(v.shape), synchronization="on_read", aggregation="sum", name=f"sum_{v.name}")
        for v in weights
    ]
    rows = _array(golden.inputs["x"]), _array(golden.inputs["y"])
    data = strategy.distribute_dataset(rows, golden.inputs["global_micro_batch"])

    def micro_step(x, y):
        with px.GradientTape() as tape:
            loss = _row_losses(weights, x, y).sum() / 8.0
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
            after_1 = _values(sums)
        if i % 2:
            apply()
    return {
        "losses": losses,
        "accumulators_after_1": after_1,
        "final_weights": _values(weights),
        "accumulators_at_the_end": [total.value for total in sums],
    }


@differs("train_keras_gradient_accumulation", "accumulation in the optimizer works in traced steps")
def test_gradient_accumulation_in_the_optimizer(golden, strategy):
    for traced in (True, False):
        optimizer = px.Optimizer(optax.MultiSteps(optax.sgd(golden.inputs["lr"]), every_k_schedule=2))

        def apply(gradients, weights):
            optimizer.apply_gradients(zip(gradients, weights))

        out = _train(golden, strategy, apply, traced=traced)
        golden.check({**out, "iterations": optimizer.state.gradient_step.value}, "b_eager")


@replay("train_keras_ema")
def test_moving_averages_of_the_weights(golden, strategy):
    momentum = golden.inputs["ema_momentum"]
    averages = [_variable(strategy, golden.inputs[name], trainable=False) for name in WEIGHTS]
    optimizer = px.Optimizer(optax.chain(optax.sgd(golden.inputs["lr"]), optax.scale_by_schedule(lambda count: 1.0)))

    def apply(gradients, weights):
        optimizer.apply_gradients(zip(gradients, weights))
        first = optimizer.state[-1].count == 1
        for average, v in zip(averages, weights):
            average.assign(jnp.where(first, v.value, momentum * average + (1.0 - momentum) * v))

    out = _train(golden, strategy, apply)
    return {"result": {**out, "iterations": optimizer.state[-1].count.value, "averages": _values(averages)}}


# ---- where and when an optimizer is used ---------------------------------------------------------


@differs("train_optimizer_not_built", "an optimizer may make its state in the first traced step")
def test_optimizer_makes_its_state_when_it_is_first_used(golden, strategy):
    expected = golden.expect["c_built_then_traced"]
    for traced, build in ((False, False), (True, False), (True, True)):
        w = _variable(strategy, golden.inputs["w"])
        optimizer = px.Optimizer(optax.sgd(golden.inputs["lr"], momentum=golden.inputs["momentum"]))
        if build:
            optimizer.build([w])

        def replica():
            optimizer.apply_gradients([((_replica() + 1.0) / strategy.num_replicas, w)])

        def step():
            strategy.run(replica)

        step = px.function(step) if traced else step
        step()
        step()
        check(components(w), expected)


@differs("train_optimizer_contexts", "an optimizer works in cross-replica context")
def test_optimizer_in_every_context(golden, strategy):
    def outcome(use):
        w = _variable(strategy, golden.inputs["w"])
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
    in_replicas = outcome(lambda optimizer, w: strategy.run(lambda: optimizer.apply_gradients([(_replica() + 1.0, w)])))
    golden.check(in_replicas, "c_made_outside")
    outside = outcome(lambda optimizer, w: optimizer.apply_gradients([(jnp.float32(2.0), w)]))
    golden.check(outside, "d_used_outside")


@replay("train_none_gradients")
def test_missing_gradients_leave_variables_alone(golden, strategy):
    a, b, c = (_variable(strategy, value, name=name) for name, value in (("a", 1.0), ("b", 2.0), ("c", 3.0)))
    optimizer = px.Optimizer(optax.sgd(0.1))
    n = strategy.num_replicas

    def applied(*pairs):
        strategy.run(lambda: optimizer.apply_gradients([(g and g(), v) for g, v in pairs]))
        return "ok"

    with pytest.warns(UserWarning, match="does not depend on Variable 'a'"):
        one = applied((None, a), (lambda: (_replica() + 1.0) / n, b))
    return {
        "one_none": one,
        "after": {"a": components(a), "b": components(b)},
        "both_none": attempt(applied, (None, a), (None, b)),
        "unknown_variable": attempt(applied, (_replica, c)),
    }


@replay("train_constraint_applied_by_optimizer")
def test_optimizer_applies_the_constraint(golden, strategy):
    w = _variable(strategy, golden.inputs["w"], constraint=lambda x: jnp.maximum(x, 0.0))
    optimizer = px.Optimizer(optax.sgd(golden.inputs["lr"]))

    def replica():
        optimizer.apply_gradients([(jnp.ones(3) * (_replica() + 1.0) / strategy.num_replicas, w)])

    log = []
    for _ in range(3):
        strategy.run(replica)
        log.append(components(w))
    return {"components_after_step": log}


@differs("train_embedding_sparse_gradients", "gradients are dense, and repeated rows are squared together")
def test_embedding(golden, strategy):
    o, n = golden.inputs, strategy.num_replicas
    batches = [(np.array(ids, np.int32), _array(y)) for ids, y in zip(o["ids"], o["y"])]

    def loss_of(weights, ids, y):
        E, w = weights
        return (((E[ids] @ w)[:, 0] - y) ** 2).sum() / 8.0

    def on_replicas(transformation):
        weights = [_variable(strategy, o["E"]), _variable(strategy, o["w"])]
        optimizer = px.Optimizer(transformation)

        def replica(ids, y):
            with px.GradientTape() as tape:
                loss = loss_of(weights, ids, y)
            optimizer.apply_gradients(zip(tape.gradient(loss, weights), weights))
            return loss

        step = px.function(lambda ids, y: strategy.reduce("sum", strategy.run(replica, args=(ids, y))))
        parts = [[per_replica(strategy, x.reshape(n, -1), x.dtype) for x in map(np.asarray, b)] for b in batches]
        return [step(*parts[i % 2]) for i in range(6)], *weights

    def on_one_device(transformation):
        @jax.jit
        def step(weights, state, ids, y):
            loss, gradients = jax.value_and_grad(loss_of)(weights, ids, y)
            changes, state = transformation.update(gradients, state, weights)
            return loss, optax.apply_updates(weights, changes), state

        weights = [_array(o["E"]), _array(o["w"])]
        state, losses = transformation.init(weights), []
        for i in range(6):
            loss, weights, state = step(weights, state, *batches[i % 2])
            losses.append(loss)
        return losses, *weights

    for name, transformation in (("a_sgd", optax.sgd(0.5)), ("b_momentum", optax.sgd(0.1, momentum=0.9))):
        for key, value in zip(("losses", "E", "w"), on_replicas(transformation)):
            golden.check(value, name, key)
    for transformation in (optax.adam(0.1, eps=1e-7), optax.adagrad(0.5, eps=1e-7)):
        for actual, expected in zip(on_replicas(transformation), on_one_device(transformation)):
            check(np.asarray(actual), np.asarray(expected).tolist(), golden.tolerance)


@differs("train_loss_helpers", "a division by the rows of the global batch needs no helper")
def test_average_of_row_losses(golden, strategy):
    def fn(losses):
        n = px.get_replica_context().num_replicas
        weights = jnp.array([1.0, 0.0, 2.0])
        penalty = jnp.stack([4.0, 2.0 * (_replica() + 1.0)])
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
        self.gamma, self.beta = _variable(strategy, np.ones(4)), _variable(strategy, np.zeros(4))
        self.mean = _variable(strategy, np.zeros(4), trainable=False, aggregation="mean", **moving)
        self.variance = _variable(strategy, np.ones(4), trainable=False, aggregation="mean", **moving)
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
    W, b, V = (_variable(strategy, o[name]) for name in ("W", "b", "V"))
    weights = [W, b, V, norm.gamma, norm.beta]
    optimizer = px.Optimizer(optax.sgd(o["lr"]))
    data = strategy.distribute_dataset((_array(o["x"]), _array(o["y"])), o["global_batch"])

    def replica(x, y):
        with px.GradientTape() as tape:
            h = jnp.tanh(norm(x @ W + b, True))
            loss = ((h @ V - y) ** 2).sum() / o["global_batch"]
        optimizer.apply_gradients(zip(tape.gradient(loss, weights), weights))
        return loss

    step = px.function(lambda element: strategy.reduce("sum", strategy.run(replica, args=element)))
    losses = [step(element) for element in itertools.islice(itertools.cycle(data), o["steps"])]
    predicted = strategy.run(lambda x: jnp.tanh(norm(x @ W + b, False)) @ V, args=(_array(o["x"][:3]),))
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
