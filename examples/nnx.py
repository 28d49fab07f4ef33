"""A Flax NNX module on replicas: px.variables_like holds its parameters, the step is the same as ever.

    python examples/nnx.py                 # two replicas
    python examples/nnx.py --replicas 8    # the same numbers

Needs: pip install '.[examples]' flax from a checkout.
"""

import jax
import jax.numpy as jnp
import optax
from common import digits, start
from flax import nnx

import phalanx as px

BATCH = 96  # over all replicas


class Network(nnx.Module):
    """Two convolutions and two dense layers. Nothing in it knows of replicas."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.conv1 = nnx.Conv(1, 16, (3, 3), rngs=rngs)
        self.conv2 = nnx.Conv(16, 32, (3, 3), strides=2, rngs=rngs)
        self.dense1 = nnx.Linear(4 * 4 * 32, 64, rngs=rngs)
        self.dense2 = nnx.Linear(64, 10, rngs=rngs)

    def __call__(self, images: jax.Array) -> jax.Array:
        x = nnx.relu(self.conv1(images))
        x = nnx.relu(self.conv2(x))
        x = x.reshape(len(x), -1)
        return self.dense2(nnx.relu(self.dense1(x)))


strategy, quick = start(__doc__)
learned, (images, labels) = digits()
batches = strategy.distribute_dataset(learned, BATCH, remainder="drop", shuffle=True, seed=1)

graph, params = nnx.split(Network(nnx.Rngs(0)))
with strategy.scope():
    variables = px.variables_like(params)
    optimizer = px.Optimizer(optax.adam(3e-3))
weights = jax.tree.leaves(variables)


def network() -> Network:
    """The module with the parameters as they are here and now."""
    return nnx.merge(graph, jax.tree.map(jnp.asarray, variables))


@px.function
def train_step(batch):
    def replica_step(images, labels):
        with px.GradientTape() as tape:
            scores = network()(images)
            loss = optax.softmax_cross_entropy_with_integer_labels(scores, labels).sum() / BATCH
        optimizer.apply_gradients(zip(tape.gradient(loss, weights), weights))  # adds the gradients of all replicas up
        return loss

    return strategy.reduce("sum", strategy.run(replica_step, batch))


for epoch in range(3 if quick else 15):
    losses = [train_step(batch) for batch in batches]
    print(f"epoch {epoch + 1}: loss {sum(losses) / len(losses):.4f}")

accuracy = (network()(images).argmax(axis=1) == labels).mean()
print(f"held-out accuracy: {accuracy:.1%}")
