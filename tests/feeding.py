"""What the tests of feeding share: looking at elements, and sources that tell what happens to them."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np

import phalanx as px

WAIT = 20.0
"""Seconds after which a test that waits for another thread gives up."""


def replicas(n: int) -> px.Mirrored:
    return px.Mirrored(jax.devices()[:n])


def whole(element: Any) -> Any:
    """The element with the rows of all replicas in order, as NumPy arrays."""

    def joined(part: px.PerReplica) -> np.ndarray:
        return np.concatenate([np.asarray(value) for value in part.values])

    return jax.tree.map(joined, element, is_leaf=lambda x: isinstance(x, px.PerReplica))


def rows_of(dataset: Any) -> list[list[float]]:
    """The rows of each element of a dataset of single arrays."""
    return [whole(element).tolist() for element in dataset]


def parts_of(dataset: Any) -> list[list[list[float]]]:
    """The rows of each element, replica by replica."""
    return [[np.asarray(part).tolist() for part in element.values] for element in dataset]


def aligned(*shape: int) -> np.ndarray:
    """Zeros in memory that a CPU device could use as it is."""
    memory = np.zeros(4 * int(np.prod(shape)) + 64, np.uint8)
    start = -memory.ctypes.data % 64
    return memory[start : memory.size - 64 + start].view(np.float32).reshape(shape)


def numbers(count: int, rows: int = 4) -> Callable[[], Iterator[np.ndarray]]:
    """A function that gives `count` batches, the i-th full of i."""
    return lambda: (np.full(rows, i, np.float32) for i in range(count))


def feeding_threads() -> list[threading.Thread]:
    """Threads that feed and do not end by themselves."""
    threads = [thread for thread in threading.enumerate() if thread.name == "phalanx-feed"]
    for thread in threads:
        thread.join(WAIT)  # on a busy machine one that ends may still be about to
    return [thread for thread in threads if thread.is_alive()]
