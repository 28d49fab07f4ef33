"""What the recipes of this folder start: a run that goes on where it was broken off, on any number of processes.

    python examples/clusters/train.py run/                          # by itself
    phalanx launch -n 2 --max-restarts 3 examples/clusters/train.py run/
    srun python examples/clusters/train.py /shared/run/             # see train.slurm

The directory must be one that all processes reach.
"""

import logging
import sys

import phalanx as px

logging.basicConfig(format="%(message)s")
logging.getLogger("phalanx").setLevel(logging.INFO)


def main(directory: str) -> None:
    px.connect()  # first: it finds the cluster, and does nothing where there is none

    import jax.numpy as jnp
    import numpy as np
    import optax

    strategy = px.Mirrored()
    rng = np.random.default_rng(0)
    x = rng.normal(size=(400, 3)).astype(np.float32)
    y = x @ np.float32([1.0, -2.0, 0.5])
    with strategy.scope():
        w = px.Variable(jnp.zeros(3), name="w")
        optimizer = px.Optimizer(optax.adam(0.05))
        optimizer.build([w])

    def replica(x, y, mask):
        rows = px.get_replica_context().all_reduce("sum", mask.sum())
        with px.GradientTape() as tape:
            loss = ((x @ w - y) ** 2 * mask).sum() / rows
        optimizer.apply_gradients([(tape.gradient(loss, w), w)])
        return loss

    @px.function
    def train(batch):
        return strategy.reduce("sum", strategy.run(replica, batch))

    data = strategy.distribute_dataset((x, y), 64, remainder="pad", mask=True, shuffle=True, seed=1)
    checkpoint = px.Checkpoint(w=w, optimizer=optimizer)
    with px.cluster.Watchdog(step_timeout=300) as watchdog:
        for step in watchdog.over(px.resumable(directory, data, checkpoint, epochs=20, every=10)):
            loss = train(step.batch)
            if step.number % 20 == 0 and px.cluster.describe().process_id == 0:
                print(f"step {step.number}: loss {float(loss):.4f}", flush=True)
    if px.cluster.describe().process_id == 0:
        print("w =", " ".join(f"{value:.2f}" for value in w.numpy()), flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
