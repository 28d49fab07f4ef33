"""Phalanx and JAX written by hand in fresh processes, where that matters: the first step, and memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import optax

import phalanx as px
from benchmarks.by_hand import REDUCTIONS, jit_step, shard_map_step
from benchmarks.peers.serving import serve
from benchmarks.problems import training_problems
from benchmarks.step import phalanx_step

Made = tuple[Callable[[], Any], Callable[[], Any]]

_ADAM = optax.adam(1e-3)


def first_step(way: str, problem: str, replicas: int, quick: bool) -> Made:
    """A training step that was never run."""
    step = _step(way, problem, replicas, quick)
    return step, lambda: [float(step()) for _ in range(4)]


def memory(way: str, problem: str, replicas: int, quick: bool) -> Made:
    """A training step, and the most bytes that its process held on devices after any step."""
    step = _step(way, problem, replicas, quick)

    def most_bytes() -> int:
        most = 0
        for _ in range(3 if quick else 1000):
            step()
            most = max(most, _bytes_on_devices())
        return most

    return step, most_bytes


def _step(way: str, problem: str, replicas: int, quick: bool) -> Callable[[], Any]:
    px.cpu_devices(replicas)
    what = training_problems(quick)[problem]
    if way == "Phalanx":
        return phalanx_step(replicas, what, _ADAM)
    return jit_step(what, _ADAM) if replicas == 1 else shard_map_step(replicas, what, _ADAM, REDUCTIONS[way])


def _bytes_on_devices() -> int:
    shards = [shard.data for array in jax.live_arrays() for shard in array.addressable_shards]
    return sum({shard.unsafe_buffer_pointer(): shard.nbytes for shard in shards}.values())


if __name__ == "__main__":
    serve({"first_step": first_step, "memory": memory})
