"""Group "training", optimizers and learning rates.

Keras optimizers are replayed by optax transformations that compute the same, through `px.Optimizer`.
"""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import optax

import phalanx as px
from goldens.kit import components, replay
from goldens.loop import make_variable, replica_number, train_with


def _options(golden):
    """The arguments of the Keras optimizer."""
    return {name: value for name, value in golden.inputs["optimizer"].items() if name != "class"}


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
    return train_with(golden, strategy, optax.sgd(**_options(golden)))


@replay("train_optimizer_sgd_momentum")
def test_sgd_with_momentum(golden, strategy):
    return train_with(golden, strategy, optax.sgd(**_options(golden)))


@replay("train_optimizer_sgd_nesterov")
def test_sgd_with_nesterov_momentum(golden, strategy):
    return train_with(golden, strategy, optax.sgd(**_options(golden)))


@replay("train_optimizer_sgd_weight_decay")
def test_weight_decay_is_decoupled_and_scaled_by_the_learning_rate(golden, strategy):
    o = _options(golden)
    decayed = optax.chain(optax.add_decayed_weights(o["weight_decay"]), optax.sgd(o["learning_rate"]))
    return train_with(golden, strategy, decayed)


def _adam_options(golden):
    """Keras adds epsilon before the correction of the second moment; within the scenario's tolerance it is the same."""
    o = _options(golden)
    return {"learning_rate": o["learning_rate"], "b1": o["beta_1"], "b2": o["beta_2"], "eps": o["epsilon"]}


@replay("train_optimizer_adam")
def test_adam(golden, strategy):
    return train_with(golden, strategy, optax.adam(**_adam_options(golden)))


@replay("train_optimizer_adamw")
def test_adamw(golden, strategy):
    decay = _options(golden)["weight_decay"]
    return train_with(golden, strategy, optax.adamw(**_adam_options(golden), weight_decay=decay))


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

    return train_with(golden, strategy, _by_hand(rule, 0.0, 0.0, 0.0))


@replay("train_optimizer_rmsprop")
def test_rmsprop(golden, strategy):
    o = _options(golden)
    return train_with(golden, strategy, optax.rmsprop(o["learning_rate"], decay=o["rho"], eps=o["epsilon"]))


@replay("train_optimizer_rmsprop_centered_momentum")
def test_centered_rmsprop_with_momentum(golden, strategy):
    o = _options(golden)
    rmsprop = optax.rmsprop(o["learning_rate"], decay=o["rho"], eps=o["epsilon"], centered=True, momentum=o["momentum"])
    return train_with(golden, strategy, rmsprop)


@replay("train_optimizer_adagrad")
def test_adagrad(golden, strategy):
    o = _options(golden)
    adagrad = optax.adagrad(o["learning_rate"], o["initial_accumulator_value"], o["epsilon"])
    return train_with(golden, strategy, adagrad)


@replay("train_optimizer_adadelta")
def test_adadelta(golden, strategy):
    o = _options(golden)
    return train_with(golden, strategy, optax.adadelta(o["learning_rate"], rho=o["rho"], eps=o["epsilon"]))


@replay("train_optimizer_adamax")
def test_adamax(golden, strategy):
    return train_with(golden, strategy, optax.adamax(**_adam_options(golden)))


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

    return train_with(golden, strategy, _by_hand(rule, 0.0, 0.0, 1.0))


@replay("train_optimizer_lion")
def test_lion(golden, strategy):
    o = _options(golden)
    return train_with(golden, strategy, optax.lion(o["learning_rate"], o["beta_1"], o["beta_2"], weight_decay=0.0))


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

    return train_with(golden, strategy, _by_hand(rule, o["initial_accumulator_value"], 0.0))


# ---- learning rates ------------------------------------------------------------------------------


@replay("train_schedule_exponential")
def test_training_with_an_exponential_schedule(golden, strategy):
    o = golden.inputs
    schedule = optax.exponential_decay(o["initial"], o["decay_steps"], o["decay_rate"])
    out = train_with(golden, strategy, optax.sgd(schedule))
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
    moved = {name: make_variable(strategy, 0.0) for name in schedules}
    optimizers = {name: px.Optimizer(optax.sgd(schedule)) for name, schedule in schedules.items()}

    def replica():
        for name, optimizer in optimizers.items():
            moved[name].assign(0.0)
            optimizer.apply_gradients([(-(replica_number() + 1.0), moved[name])], reduce="mean")
        return {name: v.value for name, v in moved.items()}

    step = px.function(lambda: strategy.run(replica))
    mean = (strategy.num_replicas + 1) / 2
    steps = [step() for _ in range(13)]
    return {name: [np.asarray(rates[name]) / mean for rates in steps] for name in schedules}


@replay("train_learning_rate_by_hand")
def test_learning_rate_is_a_variable_of_the_optimizer(golden, strategy):
    w = make_variable(strategy, golden.inputs["w"])
    optimizer = px.Optimizer(optax.inject_hyperparams(optax.sgd)(learning_rate=0.1))
    with strategy.scope():
        optimizer.build([w])
    rate = optimizer.state.hyperparams["learning_rate"]

    def replica():
        optimizer.apply_gradients([((replica_number() + 1.0) / strategy.num_replicas, w)])

    log = []
    for i in range(6):
        rate.assign({2: 0.5, 4: 0.0}.get(i, rate.value))
        strategy.run(replica)
        log.append({"w": w.value, "rate": rate.value})
    return {"steps": log, "components": components(w)}
