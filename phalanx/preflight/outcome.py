"""What goes to the process that compiles, and what comes back."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from phalanx import _jax


@dataclass(frozen=True)
class Request:
    """A program, and for what to compile it."""

    lowered: _jax.Lowered
    slice_name: str = ""
    """A TPU slice; else devices of the process that compiles."""
    options: dict[str, Any] = field(default_factory=dict)
    devices: tuple[Any, ...] = ()
    """Which of them, when it is this process."""
    quick: bool = False
    """With little optimization."""


@dataclass(frozen=True)
class Outcome:
    """How compiling went."""

    seconds: float
    message: str = ""
    """What the compiler said when it failed; empty when it did not."""
    memory: dict[str, int] = field(default_factory=dict)
    """Bytes on one device: argument, output, alias, temp, generated_code."""
    cost: dict[str, float] = field(default_factory=dict)
    hlo: str = ""
    """The optimized program of one device."""

    @property
    def compiles(self) -> bool:
        """Whether there is a program."""
        return not self.message

    @property
    def out_of_memory(self) -> bool:
        """Whether it failed for want of memory on the device."""
        return "RESOURCE_EXHAUSTED" in self.message
