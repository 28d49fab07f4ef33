"""An Equinox module on replicas: px.variables_like holds its parameters, the step is the same as ever.

    python examples/equinox_mlp.py                 # two replicas
    python examples/equinox_mlp.py --replicas 8    # the same numbers

Needs: pip install '.[examples]' equinox from a checkout.
"""

import equinox as eqx
import jax
import jax.numpy as jnp
import optax
from common import digits, start

import phalanx as px

BATCH = 96  # over all replicas

strategy, quick = start(__doc__)
learned, (images, labels) = digits()
batches = strategy.distribute_dataset(learned, BATCH, remainder="drop", shuffle=True, seed=1)

mlp = eqx.nn.MLP(64, 10, width_size=128, depth=2, key=jax.random.key(0))
params, static = eqx.partition(mlp, eqx.is_inexact_array)
with strategy.scope():
    variables = px.variables_like(params)
    optimizer = px.Optimizer(optax.adam(3e-3))
weights = jax.tree.leaves(variables)


def scores_of(images: jax.Array) -> jax.Array:
    """By the parameters as they are here and now."""
    network = eqx.combine(jax.tree.map(jnp.asarray, variables), static)
    return jax.vmap(network)(images.reshape(len(images), -1))


@px.function
def train_step(batch):
    def replica_step(images, labels):
        with px.GradientTape() as tape:
            loss = optax.softmax_cross_entropy_with_integer_labels(scores_of(images), labels).sum() / BATCH
        optimizer.apply_gradients(zip(tape.gradient(loss, weights), weights))  # adds the gradients of all replicas up
        return loss

    return strategy.reduce("sum", strategy.run(replica_step, batch))


for epoch in range(3 if quick else 15):
    losses = [train_step(batch) for batch in batches]
    print(f"epoch {epoch + 1}: loss {sum(losses) / len(losses):.4f}")

accuracy = (scores_of(images).argmax(axis=1) == labels).mean()
print(f"held-out accuracy: {accuracy:.1%}")
