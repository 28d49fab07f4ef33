"""The other side: what a peer's process does. Nothing of Phalanx's environment is imported here."""

from __future__ import annotations

import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any


def serve(workloads: dict[str, Callable[..., tuple[Callable[[], Any], Callable[[], Any]] | None]]) -> None:
    """Answer requests: ``workloads`` maps names to what makes a step and the numbers, or gives None for 'not this one'."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print is no answer

    def answer(value: Any) -> None:
        print(json.dumps(value), file=answers, flush=True)

    name, setting = sys.argv[1:3]
    made = workloads[name](**json.loads(setting)) if name in workloads else None
    answer(made is not None)
    if made is None:
        return
    step, numbers = made
    for line in sys.stdin:
        request = json.loads(line)
        answer(round_of(step, request["steps"]) if "steps" in request else numbers())


def round_of(step: Callable[[], Any], steps: int) -> float:
    """The median of the seconds of some steps."""
    times = []
    for _ in range(steps):
        start = time.perf_counter()
        step()
        times.append(time.perf_counter() - start)
    return statistics.median(times)
