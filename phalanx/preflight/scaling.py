"""The same work for each replica on more and more chips."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from phalanx.preflight import estimate
from phalanx.preflight.targets import Target, find

if TYPE_CHECKING:
    from phalanx.preflight.report import Report


def curve(report: Report, again: Callable[..., Report], largest: int, compiled_to: int) -> list[estimate.Size]:
    """One point for each power of two; none without a chip that is known, a program, or replicas on all devices."""
    chip, step_time, here = report.target.chip, report.step_time, report.target
    rows = report._program.rows_per_device
    if chip is None or step_time is None or rows is None or report.num_devices != here.num_devices:
        return []
    found: list[tuple[Target, estimate.StepTime, bool]] = []
    last = report
    for chips in estimate.sizes_of(chip, largest):
        target = here if chips == here.num_chips and here.num_slices == 1 else here.with_chips(chips)
        if target is not None and chips <= compiled_to:
            of_this = report if target is here else again(target, rows * target.num_devices)
            if of_this.step_time is not None:
                last = of_this
                found.append((target, of_this.step_time, True))
            continue
        target = target or _several(here, chips)
        if target is None or last.step_time is None:
            continue
        communication = estimate.scaled_communication(last.collectives, last.target, target)
        found.append((target, estimate.StepTime(last.step_time.compute, last.step_time.memory, communication), False))
    if not found:
        return []
    first = found[0][1].seconds_without_overlap
    return [
        estimate.Size(t.num_chips, t.label, time, compiled, first / time.seconds_without_overlap)
        for t, time, compiled in found
    ]


def _several(target: Target, chips: int) -> Target | None:
    """Several of the largest slices of this kind."""
    assert target.chip is not None
    whole = find(f"{target.chip.name}:{target.chip.shapes[-1]}")
    n, rest = divmod(chips, whole.num_chips)
    return None if rest or n < 2 else find(whole.name, n)
