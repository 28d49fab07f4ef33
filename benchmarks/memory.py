"""The most bytes that training steps hold on the devices after any of a thousand steps."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from benchmarks import peers
from benchmarks.harness import Case, Contender
from benchmarks.problems import training_problems

REPLICAS = (1, 2)
UNIT = "MB"


def cases(replicas: int, quick: bool) -> Iterator[Case]:
    problem = list(training_problems(quick))[-1]
    yield Case(f"{problem}, Adam", functools.partial(_contenders, problem, replicas, quick))


def _contenders(problem: str, replicas: int, quick: bool) -> Iterator[Contender]:
    setting = {"problem": problem, "replicas": replicas, "quick": quick}
    each = "one psum each"
    for name, way in {"Phalanx": "Phalanx", "jax.jit" if replicas == 1 else f"shard_map, {each}": each}.items():
        yield Held(name, setting | {"way": way})


@dataclass(frozen=True)
class Held:
    """A contender whose figure is a number of bytes, in a process of its own; it is the same in every round."""

    name: str
    setting: dict[str, Any]

    def numbers(self) -> None:
        """Those of the training step have a case of their own."""

    def round(self, steps: int) -> float:
        """How many bytes."""
        return float(_bytes(self.name, tuple(self.setting.items())))

    def end(self) -> None:
        """The process has ended."""


@functools.cache
def _bytes(name: str, setting: tuple[tuple[str, Any], ...]) -> int:
    peer = peers.Peer(name, "jax", "memory", dict(setting))
    try:
        return int(peer.numbers())
    finally:
        peer.end()
