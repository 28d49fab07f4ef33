"""Handwritten digits: a training step written for one device, run on eight.

    python examples/digits.py                # all accelerators; a CPU plays 8 devices
    python examples/digits.py --replicas 2
    python examples/digits.py --quick        # a few epochs, for a first look

A small convolutional network learns scikit-learn's 1,797 images of 8 x 8 pixels. Then the script checks
what it claims: the accuracy on images it has not seen, that the replicas are still equal to the last
bit, and that one replica alone computes the same losses as all of them together.

Needs: pip install '.[examples]' from a checkout (`make demo` does it).
"""

from __future__ import annotations

import argparse
import sys
from itertools import chain, islice
from pathlib import Path

import jax
import jax.numpy as jnp
import matplotlib
import numpy as np
import optax
from rich.console import Console
from rich.table import Table
from sklearn.datasets import load_digits

import phalanx as px

BATCH = 100  # rows over all replicas; 1,437 images make 14 batches and a last one of 37 rows
Rows = tuple[np.ndarray, np.ndarray]

console = Console()


def load() -> tuple[Rows, Rows]:
    """Images and labels in a fixed random order: 1,437 to learn from and 360 held out."""
    digits = load_digits()
    images = (digits.images[..., None] / 16).astype(np.float32)
    labels = digits.target.astype(np.int32)
    order = np.random.default_rng(0).permutation(len(labels))
    held_out, learned = order[:360], order[360:]
    return (images[learned], labels[learned]), (images[held_out], labels[held_out])


# ---- the model: plain JAX, with variables --------------------------------------------------------


class Layer:
    """A kernel and a bias."""

    def __init__(self, name: str, key: jax.Array, *shape: int) -> None:
        scale = (2 / np.prod(shape[:-1])) ** 0.5
        self.kernel = px.Variable(scale * jax.random.normal(key, shape), name=f"{name}/kernel")
        self.bias = px.Variable(jnp.zeros(shape[-1]), name=f"{name}/bias")


class Network:
    """Two convolutions and two dense layers. Nothing in it knows of replicas."""

    def __init__(self) -> None:
        keys = jax.random.split(jax.random.key(0), 4)
        self.conv1 = Layer("conv1", keys[0], 3, 3, 1, 16)
        self.conv2 = Layer("conv2", keys[1], 3, 3, 16, 32)
        self.dense1 = Layer("dense1", keys[2], 4 * 4 * 32, 64)
        self.dense2 = Layer("dense2", keys[3], 64, 10)
        layers = (self.conv1, self.conv2, self.dense1, self.dense2)
        self.variables = [v for layer in layers for v in (layer.kernel, layer.bias)]

    def __call__(self, images: jax.Array) -> jax.Array:
        x = jax.nn.relu(convolve(images, self.conv1, stride=1))
        x = jax.nn.relu(convolve(x, self.conv2, stride=2))
        x = x.reshape(len(x), -1)
        x = jax.nn.relu(x @ self.dense1.kernel + self.dense1.bias)
        return x @ self.dense2.kernel + self.dense2.bias


def convolve(x: jax.Array, layer: Layer, stride: int) -> jax.Array:
    layout = ("NHWC", "HWIO", "NHWC")
    y = jax.lax.conv_general_dilated(x, layer.kernel, (stride, stride), "SAME", dimension_numbers=layout)
    return y + layer.bias


# ---- the training step: written for one device ---------------------------------------------------


class Trainer:
    """The network, its optimizer, and what to do with a batch of rows."""

    def __init__(self, strategy: px.Strategy) -> None:
        self.strategy = strategy
        with strategy.scope():
            self.network = Network()
            learning_rate = optax.exponential_decay(3e-3, transition_steps=100, decay_rate=0.5)
            self.optimizer = px.Optimizer(optax.adam(learning_rate))

    def update(self, images, labels, mask):
        """One replica's part of a training step; its part of the mean loss of the batch."""
        # The last batch is filled up with rows that have mask 0: they count nowhere.
        rows = px.get_replica_context().all_reduce("sum", mask.sum())
        with px.GradientTape() as tape:
            losses = optax.softmax_cross_entropy_with_integer_labels(self.network(images), labels)
            loss = (losses * mask).sum() / rows
        grads = tape.gradient(loss, self.network.variables)
        self.optimizer.apply_gradients(zip(grads, self.network.variables))
        return loss

    def correct(self, images, labels, mask):
        """How many of one replica's images are recognized."""
        return ((self.network(images).argmax(axis=1) == labels) * mask).sum()

    @px.function
    def train_step(self, batch):
        return self.strategy.reduce("sum", self.strategy.run(self.update, batch))

    @px.function
    def count_correct(self, batch):
        return self.strategy.reduce("sum", self.strategy.run(self.correct, batch))

    def batches(self, rows: Rows, **options):
        return self.strategy.distribute_dataset(rows, BATCH, remainder="pad", mask=True, **options)

    def shuffled(self, rows: Rows):
        """Batches for training; each time round in another order, the same on any number of replicas."""
        return self.batches(rows, shuffle=True, seed=1)

    def accuracy(self, rows: Rows) -> float:
        """The share of images that are recognized."""
        return float(sum(map(self.count_correct, self.batches(rows)))) / len(rows[0])


def preflight_train_step(global_batch: int = BATCH):
    """For `phalanx preflight examples/digits.py:train_step --topology v5e:2x4 --global-batch 1024`."""
    images = jax.ShapeDtypeStruct((global_batch, 8, 8, 1), np.float32)
    labels = jax.ShapeDtypeStruct((global_batch,), np.int32)
    mask = jax.ShapeDtypeStruct((global_batch,), np.float32)
    return Trainer(px.Mirrored()).train_step, (images, labels, mask)


def train(trainer: Trainer, learned: Rows, held_out: Rows, epochs: int) -> tuple[list[float], list[float]]:
    """The loss of each step, and the held-out accuracy after each epoch."""
    losses: list[jax.Array] = []
    accuracies: list[float] = []
    batches = trainer.shuffled(learned)
    for epoch in range(1, epochs + 1):
        progress = px.progress(batches, f"epoch {epoch:2}")
        for batch in progress:
            losses.append(trainer.train_step(batch))
            progress.update(loss=losses[-1])
        accuracies.append(trainer.accuracy(held_out))
        console.print(f"          held-out accuracy {accuracies[-1]:.1%}")
    return [float(loss) for loss in losses], accuracies


# ---- what is claimed, checked --------------------------------------------------------------------


def components_are_identical(variable: px.Variable) -> bool:
    """Whether all replicas hold the same bits."""
    first, *others = (np.asarray(component).tobytes() for component in variable.components)
    return all(other == first for other in others)


def largest_relative_difference(a: list[float], b: list[float]) -> float:
    return max(abs(x - y) / abs(y) for x, y in zip(a, b, strict=True))


def check(claim: str, holds: bool) -> bool:
    console.print(f"check: {claim}: {'passed' if holds else 'FAILED'}", soft_wrap=True)
    return holds


# ---- what is shown -------------------------------------------------------------------------------


def plot(losses: list[float], accuracies: list[float], path: Path) -> None:
    """Loss of each step and accuracy after each epoch, as a PNG."""
    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, (left, right) = plt.subplots(1, 2, figsize=(9, 3.2), layout="constrained")
    left.semilogy(range(1, len(losses) + 1), losses, linewidth=0.8)
    left.set(xlabel="step", ylabel="training loss", title="Loss")
    right.plot(range(1, len(accuracies) + 1), accuracies, marker=".")
    right.set(xlabel="epoch", ylabel="share recognized", title="Held-out accuracy")
    right.xaxis.get_major_locator().set_params(integer=True)
    for axes in (left, right):
        axes.grid(alpha=0.3)
        axes.spines[["top", "right"]].set_visible(False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)


def summary(trainer: Trainer, steps: int, loss: float, accuracy: float) -> Table:
    table = Table(title="Handwritten digits", show_header=False)
    table.add_row("replicas", f"{trainer.strategy.num_replicas} on {trainer.strategy.platform}")
    table.add_row("parameters", f"{sum(v.size for v in trainer.network.variables):,}")
    table.add_row("steps", f"{steps:,}")
    table.add_row("traces of the training step", str(trainer.train_step.trace_count))
    table.add_row("loss in the last epoch", f"{loss:.4f}")
    table.add_row("held-out accuracy", f"{accuracy:.1%}")
    return table


# ---- the whole of it -----------------------------------------------------------------------------


def positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, got {text}")
    return number


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Train a small network on handwritten digits, on several replicas.")
    parser.add_argument("--epochs", type=positive, help="how often every image is seen (default: 20)")
    parser.add_argument("--replicas", type=positive, help="how many devices to use (default: all; 8 on a CPU)")
    parser.add_argument("--quick", action="store_true", help="4 epochs, and content with 90 %% accuracy")
    parser.add_argument("--plot", type=Path, default=Path("out/digits.png"), help="where the curves go (%(default)s)")
    options = parser.parse_args()
    options.epochs = options.epochs or (4 if options.quick else 20)
    options.wanted = 0.90 if options.quick else 0.97
    return options


def main() -> int:
    options = parse_arguments()
    px.cpu_devices(options.replicas or 8)  # before anything uses JAX; changes nothing for accelerators
    devices = jax.devices()[: options.replicas]
    if len(devices) < (options.replicas or 1):
        sys.exit(f"There are {len(devices)} devices, not {options.replicas}: {devices}")
    strategy = px.Mirrored(devices)
    console.print(strategy.describe())

    learned, held_out = load()
    trainer = Trainer(strategy)
    losses, accuracies = train(trainer, learned, held_out, options.epochs)
    last_epoch = losses[-(len(losses) // options.epochs) :]
    console.print(summary(trainer, len(losses), float(np.mean(last_epoch)), accuracies[-1]))
    plot(losses, accuracies, options.plot)
    console.print(f"curves: {options.plot}", soft_wrap=True)

    n, accuracy = strategy.num_replicas, accuracies[-1]
    alone = Trainer(px.Mirrored(strategy.devices[:1]))
    batches = alone.shuffled(learned)
    first = [float(alone.train_step(batch)) for batch in islice(chain(batches, batches), min(20, len(losses)))]
    difference = largest_relative_difference(first, losses[: len(first)])
    checks = [
        check(f"held-out accuracy is {accuracy:.1%}, wanted {options.wanted:.0%}", accuracy >= options.wanted),
        check(
            f"the components of all {len(strategy.variables)} variables are bit-identical on {n} replicas",
            all(map(components_are_identical, strategy.variables)),
        ),
        check(
            f"the first {len(first)} losses on 1 and on {n} replicas differ by {difference:.1e} at most (relative)",
            difference < 1e-4,
        ),
    ]
    return 0 if all(checks) else 1


if __name__ == "__main__":
    sys.exit(main())
