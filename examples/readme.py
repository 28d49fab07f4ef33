import jax
import jax.numpy as jnp
import numpy as np
import optax

import phalanx as px

GLOBAL_BATCH = 64

rng = np.random.default_rng(0)
x = rng.normal(size=(1024, 20)).astype(np.float32)
y = (x @ rng.normal(size=(20, 10))).argmax(axis=1).astype(np.int32)

strategy = px.Mirrored()  # one replica on each device
with strategy.scope():
    w = px.Variable(lambda: 0.1 * jax.random.normal(jax.random.key(0), (20, 10)), name="w")
    b = px.Variable(jnp.zeros(10), name="b")
    optimizer = px.Optimizer(optax.adam(1e-2))


@px.function
def train_step(batch):
    def replica_step(x, y):
        with px.GradientTape() as tape:
            loss = optax.softmax_cross_entropy_with_integer_labels(x @ w + b, y).sum() / GLOBAL_BATCH
        grads = tape.gradient(loss, [w, b])
        optimizer.apply_gradients(zip(grads, [w, b]))  # adds the gradients of all replicas up
        return loss

    return strategy.reduce("sum", strategy.run(replica_step, batch))


batches = strategy.distribute_dataset((x, y), batch_size=GLOBAL_BATCH)
for epoch in range(5):
    for batch in batches:
        loss = train_step(batch)
    print(f"epoch {epoch + 1}: loss {loss:.4f}")
print(f"replicas: {strategy.num_replicas}, traces: {train_step.trace_count}")
