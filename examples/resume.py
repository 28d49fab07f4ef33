"""A training run that is killed, started again, and ends with the same bits as one that was not.

    python examples/resume.py

It trains a small network on handwritten digits three times, each in a process of its own: undisturbed; killed (SIGKILL) in
the middle of an epoch; and started again after that. Each step is guarded against NaN, and the replicas are audited.

Needs: pip install '.[examples,checkpoint]' from a checkout.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import signal
import subprocess
import sys
import tempfile

import jax
import jax.numpy as jnp
import numpy as np
import optax
from sklearn.datasets import load_digits

import phalanx as px

EPOCHS, BATCH, KILLED_AT = 3, 100, 23


class Trainer:
    """A network of two layers with dropout, its optimizer, and a step for the rows of one replica."""

    def __init__(self, strategy: px.Strategy) -> None:
        self.strategy = strategy
        with strategy.scope():
            keys = jax.random.split(jax.random.key(0), 2)
            self.w1 = px.Variable(0.2 * jax.random.normal(keys[0], (64, 32)), name="w1")
            self.w2 = px.Variable(0.2 * jax.random.normal(keys[1], (32, 10)), name="w2")
            self.key = px.Variable(jax.random.key(1), trainable=False, name="key")
            optimizer = px.Optimizer(optax.adam(optax.exponential_decay(1e-2, 20, 0.9)))
            optimizer.build([self.w1, self.w2])
            self.guard = px.NonFiniteGuard(optimizer)
        self.checkpoint = px.Checkpoint(w1=self.w1, w2=self.w2, key=self.key, optimizer=self.guard)

    def update(self, images, labels, key):
        """One replica's part of a step."""
        key = jax.random.fold_in(key, px.get_replica_context().replica_id)
        with px.GradientTape() as tape:
            hidden = jax.nn.relu(images @ self.w1)
            hidden = hidden * jax.random.bernoulli(key, 0.8, hidden.shape) / 0.8
            loss = optax.softmax_cross_entropy_with_integer_labels(hidden @ self.w2, labels).mean()
        variables = [self.w1, self.w2]
        self.guard.apply_gradients(zip(tape.gradient(loss, variables), variables), "mean", loss=loss)
        return loss

    @px.function
    def step(self, batch):
        after, key = jax.random.split(self.key.value)
        self.key.assign(after)
        return self.strategy.reduce("mean", self.strategy.run(self.update, (*batch, key)))


def train(directory: str, replicas: int, killed: bool) -> None:
    px.cpu_devices(replicas)  # before anything uses JAX; changes nothing for accelerators
    trainer = Trainer(px.Mirrored(jax.devices()[:replicas]))
    digits = load_digits()
    rows = (digits.data[:1700] / 16).astype(np.float32), digits.target[:1700].astype(np.int32)
    batches = trainer.strategy.distribute_dataset(rows, BATCH, shuffle=True, seed=1)
    auditor = px.Auditor(trainer.strategy, every=10)
    loss, first = jnp.nan, None
    for step in px.resumable(directory, batches, trainer.checkpoint, epochs=EPOCHS, every=5):
        first = step.number if first is None else first
        loss = trainer.step(step.batch)
        trainer.guard.after_step()
        auditor.after_step()
        if killed and step.number == KILLED_AT:
            os.kill(os.getpid(), signal.SIGKILL)
    auditor.finish()
    trainer.guard.check()
    bits = b"".join(np.asarray(v).tobytes() for v in (trainer.w1, trainer.w2))
    print(f"from step {first}: loss {float(loss):.4f}, weights {hashlib.sha256(bits).hexdigest()[:16]}")


def main() -> int:
    parser = argparse.ArgumentParser(description="Kill a training run, start it again, and compare.")
    parser.add_argument("--replicas", type=int, default=4, help="how many devices to use (default: %(default)s)")
    parser.add_argument("--train", metavar="DIRECTORY", help=argparse.SUPPRESS)
    parser.add_argument("--killed", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.train:
        train(options.train, options.replicas, options.killed)
        return 0

    def run(directory: str, *arguments: str) -> str:
        command = [sys.executable, __file__, "--replicas", str(options.replicas), "--train", directory, *arguments]
        finished = subprocess.run(command, stdout=subprocess.PIPE, text=True)
        return finished.stdout.strip() if finished.returncode == 0 else f"ended by signal {-finished.returncode}"

    with tempfile.TemporaryDirectory() as undisturbed, tempfile.TemporaryDirectory() as disturbed:
        whole = run(undisturbed)
        print(f"undisturbed    {whole}")
        print(f"killed         {run(disturbed, '--killed')}")
        resumed = run(disturbed)
        print(f"started again  {resumed}")
    same = whole.split("loss")[-1] == resumed.split("loss")[-1]
    print(f"check: the same weights to the last bit: {'passed' if same else 'FAILED'}")
    return 0 if same else 1


if __name__ == "__main__":
    sys.exit(main())
