"""What a program can be compiled for: a TPU slice by its name, or devices that are present."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax

from phalanx import _jax
from phalanx._checks import check_int
from phalanx.errors import ArgumentError, ArgumentTypeError, DeviceError
from phalanx.preflight.chips import CHIPS, Chip

_SMALL_HOST = 4
"""Chips of a host in slices of several hosts."""
_MOST_DEVICES = 2**17
"""Of all slices together; sixteen times those of the largest slice that is offered."""
_MOST_CPU_DEVICES = 2**11
"""JAX takes those above for another process's."""


@dataclass(frozen=True)
class Target:
    """Devices to compile for."""

    name: str
    platform: str
    num_devices: int
    chip: Chip | None = None
    shape: tuple[int, ...] = ()
    num_slices: int = 1
    present: tuple[Any, ...] = ()
    """The devices, where they are here."""

    @property
    def label(self) -> str:
        """With the number of slices, where there are several."""
        return self.name if self.num_slices == 1 else f"{self.num_slices} x {self.name}"

    @property
    def num_chips(self) -> int:
        """Of all slices."""
        return math.prod(self.shape) * self.num_slices if self.chip else self.num_devices

    @property
    def chips_per_host(self) -> int:
        """In this slice."""
        assert self.chip is not None
        of_slice = math.prod(self.shape)
        if of_slice <= self.chip.chips_per_host:
            return of_slice
        return _SMALL_HOST

    @property
    def num_hosts(self) -> int:
        """Machines that the slices have."""
        return max(1, self.num_chips // self.chips_per_host) if self.chip else 1

    @property
    def usable_bytes(self) -> int | None:
        """Memory of one device for programs, if known."""
        if self.chip is not None:
            return self.chip.usable_bytes
        stats = self.present[0].memory_stats() if self.platform == "gpu" and self.present else None
        return None if not stats else stats.get("bytes_limit")

    @property
    def devices(self) -> Sequence[Any]:
        """For a mesh."""
        if self.present:
            return self.present
        kind = self.chip.name if self.chip else self.platform
        return [_jax.SliceDevice(i, self.platform, kind, self.label) for i in range(self.num_devices)]

    @property
    def compiler_options(self) -> dict[str, Any]:
        """For libtpu."""
        assert self.chip is not None
        options: dict[str, Any] = dict(self.chip.options)
        if math.prod(self.shape) <= self.chip.chips_per_host:
            options["chips_per_host_bounds"] = (*self.shape, 1)[:3]
        if self.num_slices > 1:
            options["num_slices"] = self.num_slices
        return options

    @property
    def accelerator_type(self) -> str:
        """As Cloud TPU calls it, for libtpu's settings."""
        assert self.chip is not None
        counts_cores = self.chip.name in ("v2", "v3", "v4", "v5p")
        n = math.prod(self.shape) * (2 if counts_cores else 1)
        return f"{'v5litepod' if self.chip.name == 'v5e' else self.chip.name}-{n}"

    def with_chips(self, chips: int) -> Target | None:
        """The offered slice of the same kind with so many chips, if there is one."""
        if self.chip is None:
            return None
        shape = next((s for s in self.chip.shapes if math.prod(_sizes(s)) == chips), None)
        return None if shape is None else find(f"{self.chip.name}:{shape}")


def known() -> list[Target]:
    """Every slice that is offered, smallest first in each generation."""
    return [find(f"{chip.name}:{shape}") for chip in CHIPS.values() for shape in chip.shapes]


def find(name: str, num_slices: int = 1) -> Target:
    """The target of this name.

    Raises:
        ArgumentError: for an unknown name; it lists those that are known.
        DeviceError: for devices that are not here.
    """
    if not isinstance(name, str):
        raise ArgumentTypeError(f"topology must be a name such as 'v5e:4x4', got {name!r:.60}.")
    check_int(num_slices, "num_slices")
    plain = name.strip().lower()
    several = re.fullmatch(r"(\d+)\s*[x*]\s*([a-z].*)|(.+?)\s*\*\s*(\d+)", plain)
    if several:
        count, slice_ = (several[1], several[2]) if several[1] else (several[4], several[3])
        return find(slice_, int(count) * num_slices)
    here = re.fullmatch(r"(cpu|gpu|cuda|rocm)(?::(\d+))?", plain)
    if here:
        if num_slices > 1:
            raise ArgumentError(
                f"num_slices={num_slices} is for slices of TPUs, and {name!r} is none. Say how many devices there are in all:"
                f" '{here[1]}:{int(here[2] or 1) * num_slices}'."
            )
        return _possible(_present(here[1], None if here[2] is None else int(here[2])))
    generation, shape = _taken_apart(plain)
    chip = CHIPS.get(generation)
    if chip is None or shape not in chip.shapes:
        raise _unknown(name, chip)
    sizes = _sizes(shape)
    return _possible(
        Target(
            name=f"{chip.name}:{shape}",
            platform="tpu",
            num_devices=math.prod(sizes) * chip.devices * num_slices,
            chip=chip,
            shape=sizes,
            num_slices=num_slices,
        )
    )


def _possible(target: Target) -> Target:
    """The target, if it is not beyond all reason."""
    most = _MOST_CPU_DEVICES if target.platform == "cpu" else _MOST_DEVICES
    if target.num_devices > most:
        raise ArgumentError(
            f"topology {target.label!r} has {target.num_devices:,} devices; programs are compiled for {most:,} at most."
        )
    return target


def of_devices(devices: Sequence[Any]) -> Target:
    """The devices of a strategy, which are present."""
    first = devices[0]
    if isinstance(first, _jax.SliceDevice):
        raise ArgumentError("The strategy is on devices that are not here already.")
    chip = chip_of(first)
    return Target(
        name=f"{first.platform}:{len(devices)}",
        platform=first.platform,
        num_devices=len(devices),
        chip=chip,
        shape=(len(devices) // chip.devices,) if chip else (),
        present=tuple(devices),
    )


_KINDS = {
    "TPU v2": "v2",
    "TPU v3": "v3",
    "TPU v4": "v4",
    "TPU v5 lite": "v5e",
    "TPU v5e": "v5e",
    "TPU v5": "v5p",
    "TPU v5p": "v5p",
    "TPU v6 lite": "v6e",
    "TPU v6e": "v6e",
    "TPU7x": "tpu7x",
}


def chip_of(device: Any) -> Chip | None:
    """The chip that a device is of, if it is known."""
    return CHIPS.get(_KINDS.get(device.device_kind, ""))


def _present(platform: str, n: int | None) -> Target:
    if n == 0:
        raise ArgumentError(f"topology '{platform}:0' has no devices. Give it some: '{platform}:1'.")
    if platform == "cpu":  # any number of them can be played
        n = n or len(jax.devices("cpu"))
        return Target(name=f"cpu:{n}", platform="cpu", num_devices=n)
    try:
        devices = jax.devices(platform)
    except RuntimeError:
        devices = []
    if len(devices) < (n or 1):
        raise DeviceError(
            f"topology '{platform}:{n or 1}': JAX sees {len(devices)} such devices here. Programs for GPUs are compiled where"
            " these are; TPU slices such as 'v5e:4x4' need not be here."
        )
    return of_devices(devices[:n])


def _taken_apart(name: str) -> tuple[str, str]:
    """Generation and shape; 'v5litepod-16', as Cloud TPU writes, is v5e:4x4."""
    generation, _, shape = name.partition(":")
    if shape:
        return {"v5litepod": "v5e", "v7x": "tpu7x", "v5lite": "v5e"}.get(generation, generation), shape
    match = re.fullmatch(r"(v2|v3|v4|v5p|v5e|v5litepod|v6e|tpu7x)-(\d+)", name)
    if match is None:
        return generation, shape
    generation = "v5e" if match[1] == "v5litepod" else match[1]
    chips = int(match[2]) // (2 if generation in ("v2", "v3", "v4", "v5p", "tpu7x") else 1)
    return generation, next((s for s in CHIPS[generation].shapes if math.prod(_sizes(s)) == chips), "")


def _sizes(shape: str) -> tuple[int, ...]:
    return tuple(map(int, shape.split("x")))


def _unknown(name: str, chip: Chip | None) -> ArgumentError:
    chips = [chip] if chip else list(CHIPS.values())
    known = "; ".join(" ".join(f"{c.name}:{s}" for s in c.shapes) for c in chips)
    return ArgumentError(
        f"topology {name!r} is not known. Known are: {known}; several slices as '2*v5e:4x4'; and devices that are present,"
        " as 'cpu:8' or 'gpu:1'."
    )
