"""Workers as Ray actors:  python examples/clusters/ray_actors.py 2

Ray starts the processes and places them; JAX connects them. Needs: pip install ray
"""

import socket
import sys

import ray


@ray.remote(max_restarts=0)
class Worker:
    """One process of the cluster; for GPUs: ``Worker.options(num_gpus=1)``."""

    def address(self) -> str:
        """Where this process can be met, if it is process 0."""
        with socket.socket() as probe:
            probe.bind(("", 0))
            return f"{ray.util.get_node_ip_address()}:{probe.getsockname()[1]}"

    def train(self, number: int, count: int, address: str) -> list[float]:
        """Connect, and train on the devices of all."""
        import phalanx as px

        px.connect(px.cluster.Explicit(count, number, address), timeout=60)

        import jax.numpy as jnp
        import numpy as np
        import optax

        strategy = px.Mirrored()
        with strategy.scope():
            w = px.Variable(jnp.zeros(3))
            optimizer = px.Optimizer(optax.sgd(0.1))

        @px.function
        def step(batch):
            def replica(x):
                with px.GradientTape() as tape:
                    loss = ((x @ w - 1.0) ** 2).mean() / strategy.num_replicas
                optimizer.apply_gradients([(tape.gradient(loss, w), w)])
                return loss

            return strategy.reduce("sum", strategy.run(replica, (batch,)))

        rows = np.random.default_rng(0).normal(size=(64, 3)).astype(np.float32)
        return [float(step(batch)) for batch in strategy.distribute_dataset(rows, 16)]


def main(count: int) -> None:
    ray.init(include_dashboard=False, log_to_driver=True)
    workers = [Worker.remote() for _ in range(count)]
    address = ray.get(workers[0].address.remote())
    losses = ray.get([worker.train.remote(i, count, address) for i, worker in enumerate(workers)])
    assert all(theirs == losses[0] for theirs in losses), losses
    print(f"{count} workers, losses", *(f"{loss:.4f}" for loss in losses[0]))


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 2)
