"""The first step, traced and compiled, in processes that did nothing before."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from benchmarks import peers
from benchmarks.harness import Case, Contender
from benchmarks.problems import training_problems

REPLICAS = (1, 2, 8)
UNIT = "s"


def cases(replicas: int, quick: bool) -> Iterator[Case]:
    problem = list(training_problems(quick))[1]  # many small layers
    yield Case(f"{problem}, Adam", functools.partial(_contenders, problem, replicas, quick))


def _contenders(problem: str, replicas: int, quick: bool) -> Iterator[Contender]:
    setting = {"problem": problem, "replicas": replicas, "quick": quick}
    flat = "one flat psum"
    for name, way in {"Phalanx": "Phalanx", "jax.jit" if replicas == 1 else f"shard_map, {flat}": flat}.items():
        yield Fresh(name, functools.partial(peers.Peer, name, "jax", "first_step", setting | {"way": way}))
    name = "TensorFlow, MirroredStrategy"
    if not quick and peers.is_installed(name, "tensorflow"):
        yield Fresh(name, functools.partial(peers.Peer, name, "tensorflow", "step", setting | {"optimizer": "Adam"}))


@dataclass(frozen=True)
class Fresh:
    """A contender whose every round is the first step of a process of its own."""

    name: str
    start: Callable[[], peers.Peer]
    _measured: list[float] = field(default_factory=list)

    def numbers(self) -> Any:
        """Losses; the first of them takes a round's time."""
        peer = self.start()
        self._measured.append(peer.round(1))
        losses = peer.numbers()
        peer.end()
        return losses

    def round(self, steps: int) -> float:
        """One first step: there is no second."""
        if not self._measured:
            self.numbers()
        return self._measured.pop()

    def end(self) -> None:
        """Each process has ended."""
