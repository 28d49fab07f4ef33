"""The training loop that most scenarios of group "training" share.

The network y^ = tanh(x W1 + b1) W2 + b2 is trained on batches cut evenly over the replicas; each replica's
loss is the sum of its row losses, divided by the global batch. A short batch is padded with rows of weight 0.
"""

from __future__ import annotations

import itertools

import jax.numpy as jnp
import numpy as np
import optax

import phalanx as px

WEIGHTS = ("W1", "b1", "W2", "b2")


def array(values):
    return jnp.asarray(values, jnp.float32)


def make_variable(strategy, value, **options):
    with strategy.scope():
        return px.Variable(array(value), **options)


def replica_number():
    """This replica's number, as a float."""
    return px.get_replica_context().replica_id.astype(jnp.float32)


def row_losses(weights, x, y):
    W1, b1, W2, b2 = weights
    return ((jnp.tanh(x @ W1 + b1) @ W2 + b2 - y) ** 2).mean(1)


def values(weights):
    return {name: v.value for name, v in zip(WEIGHTS, weights)}


def network(golden, strategy):
    return [make_variable(strategy, golden.inputs[name], name=name) for name in WEIGHTS]


def train(golden, strategy, apply, penalty=lambda weights: 0.0, traced=True, weights=None):
    """The loop that most scenarios share; `apply(gradients, weights)` is called in each replica."""
    weights, batch = weights or network(golden, strategy), golden.inputs["global_batch"]
    rows = array(golden.inputs["x"]), array(golden.inputs["y"])
    data = strategy.distribute_dataset(rows, batch, remainder="pad", mask=True)

    def replica(x, y, valid):
        with px.GradientTape() as tape:
            loss = (row_losses(weights, x, y) * valid).sum() / batch + penalty(weights)
        apply(tape.gradient(loss, weights), weights)
        return loss

    def step(element):
        return strategy.reduce("sum", strategy.run(replica, args=element))

    step = px.function(step) if traced else step
    losses, first = [], None
    for element in itertools.islice(itertools.cycle(data), golden.inputs["steps"]):
        losses.append(step(element))
        first = first or values(weights)
    equal = all(np.array_equal(part, v.value) for v in weights for part in strategy.local_results(v))
    return {
        "losses": losses,
        "weights_after_step_1": first,
        "final_weights": values(weights),
        "components_equal": equal,
    }


def train_with(golden, strategy, transformation, **options):
    """The loop with an optax transformation; also says how many steps its state has counted."""
    counter = optax.scale_by_schedule(lambda count: 1.0)
    optimizer = px.Optimizer(optax.chain(transformation, counter))

    def apply(gradients, weights):
        optimizer.apply_gradients(zip(gradients, weights))

    out = train(golden, strategy, apply, **options)
    return {**out, "iterations": optimizer.state[-1].count.value}
