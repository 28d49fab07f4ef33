"""How long a step would take, from what it does and what the chips can do.

A model with no measured constants: every rate is the published peak (see `chips`), so that times are lower
bounds and their ratios are what to look at.

- compute: FLOPs of a device, by its peak in bfloat16 (float32 products run at that rate unless asked otherwise)
- memory: bytes that XLA's optimized program moves, by the bandwidth of HBM
- communication: a ring in each direction of the torus that has more than one chip, on both links where the axis
  closes to a ring (16 chips in v5e and v6e, multiples of 4 in v4, v5p and tpu7x) and on one where it does not. An
  all-reduce of B bytes among n devices moves 2 B (n - 1) / n through each; all-gather and reduce-scatter half of it.
  Each hop takes a microsecond. Between slices, the same over the data-center network.
- step: the largest of the three, when everything overlaps; or compute or memory plus communication, when nothing does
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from phalanx.preflight.chips import Chip
from phalanx.preflight.hlo import Collective
from phalanx.preflight.targets import Target

HOP_SECONDS = 1e-6
SLICE_HOP_SECONDS = 50e-6


@dataclass(frozen=True)
class StepTime:
    """Seconds of one step."""

    compute: float
    memory: float
    communication: float

    @property
    def seconds(self) -> float:
        """When everything overlaps."""
        return max(self.compute, self.memory, self.communication)

    @property
    def seconds_without_overlap(self) -> float:
        """When communication waits for the rest."""
        return max(self.compute, self.memory) + self.communication

    @property
    def bound(self) -> str:
        """What takes longest."""
        parts = {"compute": self.compute, "memory": self.memory, "communication": self.communication}
        return max(parts, key=lambda name: parts[name])


@dataclass(frozen=True)
class Size:
    """One point of a scaling curve: as many rows for each replica, on more chips."""

    chips: int
    topology: str
    step_time: StepTime
    compiled: bool
    """Whether the step was compiled for this size; else it is computed from the largest that was."""
    efficiency: float
    """Rows per second and chip, of those on the smallest size."""


def step_time(flops: float, bytes_moved: float, collectives: Sequence[Collective], target: Target) -> StepTime | None:
    """For one device's program; None where the chip is not known."""
    chip = target.chip
    if chip is None:
        return None
    return StepTime(
        compute=flops / (chip.flops["bfloat16"] / chip.devices),
        memory=bytes_moved / (chip.hbm_bandwidth / chip.devices),
        communication=scaled_communication(collectives, target, target),
    )


def scaled_communication(collectives: Sequence[Collective], measured: Target, target: Target) -> float:
    """Of the same collectives, on more chips."""
    seconds, seen = 0.0, set[str]()
    for c in collectives:
        whole = c.network == "ICI" and c.group_size == measured.num_devices // measured.num_slices
        size = target.num_devices // target.num_slices if whole else c.group_size
        if c.network == "DCN":
            size = target.num_slices
        steps = [(c.kind, float(c.bytes), size, c.network)]
        if whole and measured.num_slices == 1 and target.num_slices > 1:  # what is left to sum, between the slices
            share = c.bytes / size if c.kind == "all-reduce" else c.bytes
            steps.append((c.kind, share, target.num_slices, "DCN"))
        for kind, amount, n, network in steps:
            seconds += _transfer(kind, amount, n, network, target) * c.count
            if not c.operation or c.operation not in seen:  # what travels together waits once
                seconds += _latency(n, network, target) * c.count
        seen.add(c.operation)
    return seconds


def _latency(n: int, network: str, target: Target) -> float:
    if n < 2:
        return 0.0
    return (n - 1) * SLICE_HOP_SECONDS if network == "DCN" else sum(target.shape) * HOP_SECONDS


def _transfer(kind: str, amount: float, n: int, network: str, target: Target) -> float:
    chip = target.chip
    if chip is None or n < 2:
        return 0.0
    rate = chip.dcn_bandwidth if network == "DCN" else ici_rate(chip, target.shape, n)
    share = (n - 1) / n
    passes = {"all-reduce": 2 * share, "all-gather": share, "reduce-scatter": share, "all-to-all": share / 2}
    return passes.get(kind, 1.0) * amount / (rate / chip.devices)


def ici_rate(chip: Chip, shape: Sequence[int], n: int) -> float:
    """Bytes per second through a chip, over the links that a collective of all chips uses; at least one."""
    links = 0
    for size in shape:
        if size > 1:
            closes = size % 4 == 0 if len(shape) == 3 else size >= 16
            links += 2 if closes else 1
    return max(1, links) * chip.ici_link_bandwidth


def sizes_of(chip: Chip, largest: int = 4096) -> list[int]:
    """Numbers of chips to look at: powers of two from 8 on."""
    return [2**k for k in range(3, int(math.log2(largest)) + 1)]
