"""Running steps, and taking note of when what happened."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import jax
import numpy as np

from phalanx import _jax


@dataclass(frozen=True)
class Step:
    """One step's moments, in seconds of one clock."""

    asked: float
    """A batch was asked for."""
    got: float
    returned: float
    """The call came back; what it computes need not be there yet."""
    done: float | None = None
    """All that it computes was there; None where nobody waited for it."""

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
    reads_numbers: bool = False
    """Whether the steps return numbers of the host."""
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
    made, out = Run(), None
    with _jax.compilations() as compilations:
        made.started = time.perf_counter()
        for _ in range(count):
            asked = time.perf_counter()
            batch = next(batches)
            got = time.perf_counter()
            out = step(batch)
            returned = time.perf_counter()
            if wait:
                jax.block_until_ready(out)
            done = time.perf_counter()
            # The variables that it updates count as what it returns does. Looking for them takes time of its own,
            # which is not the step's where nothing was left to wait for.
            if wait and _jax.wait_for_all():
                done = time.perf_counter()
            made.steps.append(Step(asked, got, returned, done if wait else None))
        _jax.wait_for_all()
        made.ended = time.perf_counter()
    made.compilations = _merged(compilations)
    made.reads_numbers = _has_numbers(out)
    return made


def _has_numbers(out: Any) -> bool:
    """Whether a result holds numbers of Python or NumPy, which the step can only have when the devices are done."""
    return any(isinstance(x, (float, np.ndarray, np.generic)) for x in jax.tree.leaves(out))


def _merged(spans: list[tuple[float, float]]) -> list[tuple[float, float]]:
    """Without those that lie in others."""
    merged: list[tuple[float, float]] = []
    for start, end in sorted(spans):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(end, merged[-1][1]))
        else:
            merged.append((start, end))
    return merged
