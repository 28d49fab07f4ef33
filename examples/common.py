"""What several examples share: their options, scikit-learn's digits, and pictures made of letters."""

from __future__ import annotations

import argparse
import sys
from typing import TYPE_CHECKING

import jax
import numpy as np
from sklearn.datasets import load_digits

import phalanx as px

if TYPE_CHECKING:
    import keras

Rows = tuple[np.ndarray, np.ndarray]


def start(description: str) -> tuple[px.Strategy, bool]:
    """The strategy to train on, and whether a few steps are enough: as the command line says."""
    parser = argparse.ArgumentParser(description=description.splitlines()[0])
    parser.add_argument("--replicas", type=int, default=2, help="devices; a CPU plays as many (default: %(default)s)")
    parser.add_argument("--quick", action="store_true", help="a few steps, for a first look")
    options = parser.parse_args()
    px.cpu_devices(options.replicas)  # before anything uses JAX; changes nothing for accelerators
    devices = jax.devices()[: options.replicas]
    if len(devices) < options.replicas:
        sys.exit(f"There are {len(devices)} devices, not {options.replicas}: {devices}")
    return px.Mirrored(devices), options.quick


def digits() -> tuple[Rows, Rows]:
    """Images of 8 x 8 x 1 pixels in 0..1 and labels, in a fixed random order: 1,437 to learn from, 360 held out."""
    data = load_digits()
    images = (data.images[..., None] / 16).astype("float32")
    order = np.random.default_rng(0).permutation(len(images))
    held_out, learned = order[:360], order[360:]
    return (images[learned], data.target[learned]), (images[held_out], data.target[held_out])


def report(text: str) -> keras.callbacks.Callback:
    """Print a line after each epoch, with the numbers of its logs."""
    import keras

    return keras.callbacks.LambdaCallback(
        on_epoch_end=lambda epoch, logs: print(f"epoch {epoch + 1}: {text.format(**logs)}")
    )


def show(images: np.ndarray) -> None:
    """Print images in a row."""
    shades = np.array(list(" .:-=+*#%@"))
    letters = shades[np.clip(np.asarray(images)[..., 0] * 10, 0, 9).astype(int)].repeat(2, axis=-1)
    for line in letters.transpose(1, 0, 2):
        print("  ".join("".join(row) for row in line).rstrip())
