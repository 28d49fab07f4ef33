"""Running steps, and taking note of when what happened."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import jax

from phalanx import _jax
from phalanx.distribute.values import is_per_replica
from phalanx.errors import ArgumentError


@dataclass(frozen=True)
class Step:
    """One step's moments, in seconds of one clock."""

    asked: float
    """A batch was asked for."""
    got: float
    returned: float
    """The call came back; what it computes need not be there yet."""
    done: float | None = None
    """Its results were there; None where nobody waited for them."""

    @property
    def waiting(self) -> float:
        """Seconds that the loop waited for the batch."""
        return self.got - self.asked

    @property
    def calling(self) -> float:
        """Seconds that the call took."""
        return self.returned - self.got


@dataclass
class Run:
    """Some steps, one after the other."""

    steps: list[Step] = field(default_factory=list)
    compilations: list[tuple[float, float]] = field(default_factory=list)
    """When something was traced or compiled: from, to."""
    started: float = 0.0
    ended: float = 0.0

    @property
    def seconds(self) -> float:
        """Of all steps."""
        return self.ended - self.started

    def compiling(self, step: Step) -> float:
        """Seconds of the step's call in which something was traced or compiled."""
        return sum(max(0.0, min(b, step.returned) - max(a, step.got)) for a, b in self.compilations)


def run(step: Callable[[Any], Any], batches: Iterator[Any], count: int, *, wait: bool) -> Run:
    """Do so many steps, waiting for each or only for the last; `batches` never ends."""
    made = Run()
    out: Any = None
    with _jax.compilations() as compilations:
        made.started = time.perf_counter()
        for _ in range(count):
            asked = time.perf_counter()
            batch = next(batches)
            got = time.perf_counter()
            out = step(batch)
            returned = time.perf_counter()
            if wait:
                wait_for(out)
            made.steps.append(Step(asked, got, returned, time.perf_counter() if wait else None))
        wait_for(out)
        made.ended = time.perf_counter()
    made.compilations = _merged(compilations)
    return made


def wait_for(out: Any) -> None:
    """Until the step's results are there."""
    jax.block_until_ready(_arrays(out))


def require_results(out: Any) -> None:
    """Raise when there is nothing to wait for."""
    if not _arrays(out):
        raise ArgumentError(
            f"profile: the step returned {type(out).__name__}, and no array that could be waited for. Return the loss."
        )


def _arrays(out: Any) -> list[jax.Array]:
    leaves = jax.tree.leaves(out, is_leaf=is_per_replica)
    return [x for x in (x.stacked if is_per_replica(x) else x for x in leaves) if isinstance(x, jax.Array)]


def _merged(spans: list[tuple[float, float]]) -> list[tuple[float, float]]:
    """Without those that lie in others."""
    merged: list[tuple[float, float]] = []
    for start, end in sorted(spans):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(end, merged[-1][1]))
        else:
            merged.append((start, end))
    return merged
