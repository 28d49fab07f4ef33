"""Parameters of other libraries' models in variables."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import phalanx as px
from phalanx.errors import ArgumentError, ArgumentTypeError


def test_arrays_become_variables_named_by_their_path_and_the_rest_stays():
    tree = {"layers": [{"w": np.ones((2, 3), np.float32)}], "act": jnp.tanh, "step": jnp.array(3), "none": None}
    variables = px.variables_like(tree)
    assert jax.tree.structure(variables) == jax.tree.structure(tree)
    w = variables["layers"][0]["w"]
    assert (w.name, w.shape, w.trainable) == ("['layers'][0]['w']", (2, 3), True)
    assert not variables["step"].trainable and variables["act"] is jnp.tanh
    assert not px.variables_like(jnp.ones(2), trainable=False).trainable
    with pytest.raises(ArgumentTypeError, match="variables_like: trainable takes True or False"):
        px.variables_like(tree, trainable="yes")


def test_statistics_merge_by_an_aggregation_and_what_it_cannot_merge_takes_the_first_replicas_value():
    strategy = px.Mirrored(jax.devices()[:2])
    tree = {"mean": jnp.zeros(()), "count": jnp.array(0), "key": jax.random.key(0)}
    for synchronization in ("on_write", "on_read"):
        with strategy.scope():
            kept = px.variables_like(tree, trainable=False, synchronization=synchronization, aggregation="mean")

        def update():
            i = px.get_replica_context().replica_id
            kept["mean"].assign(jnp.float32(i))
            kept["count"].assign(jnp.int32(5 + i))
            kept["key"].assign(jax.random.fold_in(jax.random.key(1), i))

        strategy.run(update)
        assert (float(kept["mean"]), int(kept["count"])) == (0.5, 5)
        assert kept["key"].value == jax.random.fold_in(jax.random.key(1), 0)
        assert kept["mean"].synchronization == synchronization
    assert not px.variables_like(jnp.zeros(2), synchronization="on_read").trainable
    assert px.variables_like(tree, aggregation="sum")["key"].aggregation == "only_first_replica"
    with pytest.raises(ArgumentError, match="aggregation"):
        px.variables_like(tree, aggregation="median")


def equinox_model():
    import equinox as eqx

    params, static = eqx.partition(eqx.nn.MLP(3, 1, 8, 1, key=jax.random.key(0)), eqx.is_inexact_array)
    return params, lambda params, x: jax.vmap(eqx.combine(params, static))(x)


def nnx_model():
    from flax import nnx

    class Network(nnx.Module):
        def __init__(self, rngs):
            self.hidden = nnx.Linear(3, 8, rngs=rngs)
            self.out = nnx.Linear(8, 1, rngs=rngs)

        def __call__(self, x):
            return self.out(nnx.relu(self.hidden(x)))

    graph, params = nnx.split(Network(nnx.Rngs(0)))
    return params, lambda params, x: nnx.merge(graph, params)(x)


@pytest.mark.parametrize("model", [equinox_model, nnx_model])
def test_a_librarys_model_trains_as_it_does_by_itself_on_any_number_of_replicas(model):
    params, apply = model()
    x = np.random.default_rng(0).normal(size=(12, 3)).astype(np.float32)
    y = x.sum(1, keepdims=True)

    def loss_of(params):
        return ((apply(params, x) - y) ** 2).mean()

    transformation = optax.adam(1e-2)
    state, expected = transformation.init(params), params
    for _ in range(3):
        updates, state = transformation.update(jax.grad(loss_of)(expected), state, expected)
        expected = optax.apply_updates(expected, updates)

    for n in (1, 2, 3):
        strategy = px.Mirrored(jax.devices()[:n])
        with strategy.scope():
            variables = px.variables_like(params)
            optimizer = px.Optimizer(optax.adam(1e-2))
        weights = jax.tree.leaves(variables)

        def replica_step(x, y):
            with px.GradientTape() as tape:
                loss = ((apply(jax.tree.map(jnp.asarray, variables), x) - y) ** 2).sum() / 12
            optimizer.apply_gradients(zip(tape.gradient(loss, weights), weights))

        step = px.function(lambda batch: strategy.run(replica_step, batch))
        for batch in [*strategy.distribute_dataset((x, y), batch_size=12)] * 3:
            step(batch)
        found = jax.tree.map(jnp.asarray, variables)
        for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected)):
            np.testing.assert_allclose(a, b, atol=2e-6)
