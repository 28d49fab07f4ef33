"""What is computed, in NumPy alone: the parameters and the batch of each model, for every library alike."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

Arrays = list[np.ndarray[Any, Any]]

HEADS, VOCABULARY = 4, 64


@dataclass(frozen=True)
class Problem:
    """A model with its start and one batch; the loss that belongs to its kind is the sum over the rows."""

    name: str
    kind: str
    """``"mlp"``, ``"convnet"`` or ``"transformer"``."""
    parameters: Arrays
    batch: tuple[np.ndarray[Any, Any], ...]

    @property
    def rows(self) -> int:
        """Rows of the batch."""
        return len(self.batch[0])


def training_problems(quick: bool) -> dict[str, Problem]:
    """Those of the training steps, by name."""
    width, depth, layers, scale = (32, 9, 1, 8) if quick else (256, 100, 4, 1)
    problems = (
        mlp(f"MLP 3 x {width}, batch 256", [width] * 4, 256),
        mlp(f"{depth} x Dense(32), batch 64", [32] * (depth + 1), 64),
        convnet("digits convnet, batch 256", 256 // scale),
        transformer(f"{layers}-layer transformer, batch 8", layers, width=128, length=64 // scale, rows=8),
    )
    return {problem.name: problem for problem in problems}


def mlp(name: str, sizes: Sequence[int], rows: int) -> Problem:
    """Regression with dense layers."""
    return Problem(name, "mlp", mlp_parameters(sizes), regression_batch(rows, sizes[0]))


def mlp_parameters(sizes: Sequence[int]) -> Arrays:
    """A weight and a bias for each layer."""
    rng = np.random.default_rng(0)
    arrays: Arrays = []
    for fan_in, fan_out in itertools.pairwise(sizes):
        q = np.linalg.qr(rng.normal(size=(max(fan_in, fan_out),) * 2))[0][:fan_in, :fan_out]
        arrays += [(q * 2**0.5).astype(np.float32), np.zeros(fan_out, np.float32)]
    return arrays


def regression_batch(rows: int, features: int) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """Inputs and targets."""
    rng = np.random.default_rng(1)
    return rng.normal(size=(rows, features)).astype(np.float32), rng.normal(size=(rows, features)).astype(np.float32)


def convnet(name: str, rows: int) -> Problem:
    """Ten classes of images of 8 x 8: two convolutions, pooling, two dense layers."""
    rng = np.random.default_rng(0)
    parameters: Arrays = []
    for shape in ((3, 3, 1, 32), (3, 3, 32, 64), (4 * 4 * 64, 128), (128, 10)):
        scale = (2 / np.prod(shape[:-1])) ** 0.5
        parameters += [(rng.normal(size=shape) * scale).astype(np.float32), np.zeros(shape[-1], np.float32)]
    images = rng.normal(size=(rows, 8, 8, 1)).astype(np.float32)
    return Problem(name, "convnet", parameters, (images, rng.integers(0, 10, rows, dtype=np.int32)))


def transformer(name: str, layers: int, width: int, length: int, rows: int) -> Problem:
    """A decoder's next-token prediction."""
    tokens = np.random.default_rng(1).integers(0, VOCABULARY, (rows, length), dtype=np.int32)
    return Problem(name, "transformer", transformer_parameters(layers, width, length), (tokens,))


def transformer_parameters(layers: int, width: int, length: int) -> Arrays:
    """Embedding, positions, and for each block: two norms, attention in and out, two dense layers."""
    rng = np.random.default_rng(0)

    def normal(*shape: int) -> np.ndarray[Any, Any]:
        return np.asarray(rng.normal(size=shape) * shape[0] ** -0.5, np.float32)

    arrays = [normal(VOCABULARY, width), normal(length, width)]
    for _ in range(layers):
        ones, zeros = np.ones(width, np.float32), np.zeros(4 * width, np.float32)
        arrays += [ones, normal(width, 3 * width), normal(width, width), ones.copy()]
        arrays += [normal(width, 4 * width), zeros, normal(4 * width, width), np.zeros(width, np.float32)]
    return arrays
