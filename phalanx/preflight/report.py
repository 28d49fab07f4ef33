"""`Report`: what would happen on the devices, as an object, a text, JSON and a page."""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from phalanx._checks import check_int
from phalanx.preflight import estimate, hlo, operations
from phalanx.preflight.checks import Evidence, Warning, all_warnings, human, layer_of
from phalanx.preflight.compiler import Settings
from phalanx.preflight.hlo import Collective
from phalanx.preflight.outcome import Outcome
from phalanx.preflight.program import Program
from phalanx.preflight.targets import Target

_GIB = 2**30


@dataclass(frozen=True)
class Bytes:
    """Memory of one device during a step, by kind. What a kind needs is counted without padding to tiles."""

    params: int
    """Variables of the model and others that are no optimizer's."""
    slots: int
    """The optimizer's state."""
    inputs: int
    """Arguments of the step: this device's part of the batch."""
    constants: int
    """Arrays that the function closes over."""
    padding: int
    """What the layout of all these in tiles adds."""
    outputs: int
    """Results that need memory of their own."""
    temp: int
    """Activations and other intermediate values at the fullest moment."""
    code: int
    """The program itself."""
    aliased: int
    """Results that take the place of inputs, and need no memory."""
    total: int
    """What is needed; when it does not fit, as the compiler says."""
    available: int | None
    """What a program can use."""


@dataclass(frozen=True)
class Buffer:
    """One of the largest tensors, on one device."""

    bytes: int
    what: str
    line: str


class Report:
    """What `px.preflight` found; print it, or look at its fields.

    Example:
        >>> step = px.function(lambda x: (x @ x.T).sum())
        >>> report = px.preflight(step, jax.ShapeDtypeStruct((64, 32), "float32"), topology="cpu:1")
        >>> report.fits, report.bytes.inputs, report.collectives
        (True, 8192, [])
    """

    def __init__(
        self, program: Program, target: Target, outcome: Outcome, again: Callable[..., Report], settings: Settings
    ) -> None:
        self._program = program
        self._outcome = outcome
        self._again = again
        self.effort = settings.effort
        """How much the compiler optimized."""
        self.target = target
        self.name = program.name
        """The step's."""
        self.topology = target.label
        self.num_devices = program.num_devices
        """That the step runs on."""
        self.global_batch = program.global_batch
        """Rows of all devices, in a step."""

    # Read when they are asked for: most trials of a search for a batch are asked for their memory alone.

    @functools.cached_property
    def _module(self) -> hlo.Module | None:
        return hlo.Module(self._outcome.hlo) if self._outcome.compiles else None

    @functools.cached_property
    def _operations(self) -> operations.Operations:
        return operations.of(self._program.jaxpr, self._program.num_devices)

    # ---- the verdict ----

    @property
    def compiles(self) -> bool:
        """Whether the compiler made a program of it."""
        return self._outcome.compiles

    @property
    def fits(self) -> bool:
        """Whether it compiles, and its memory suffices."""
        b = self.bytes
        return self.compiles and (b.available is None or b.total <= b.available)

    @property
    def verdict(self) -> str:
        """'fits', 'does not fit' or 'fails'."""
        return "fits" if self.fits else "does not fit" if self.compiles or self._outcome.out_of_memory else "fails"

    @property
    def message(self) -> str:
        """One sentence for a person: the verdict and its likely cause, and `largest_batch_that_fits` once it is known."""
        b = self.bytes
        if self.fits:
            of = "" if b.available is None else f" of {human(b.available)} a device has"
            return f"It fits: {human(b.total)}{of}."
        if self.verdict == "fails":
            return f"It does not compile for {self.topology}: {self._outcome.message.partition(chr(10))[0]}"
        parts = {"variables": b.params, "optimizer state": b.slots, "inputs": b.inputs, "intermediate values": b.temp}
        worst = max(parts, key=lambda k: parts[k])
        need = f"needs at least {b.total / _GIB:.2f} of {(b.available or 0) / _GIB:.2f} GiB"
        cause = f" {human(parts[worst])} are {worst}; the largest: {self.largest_buffers[0].what}."
        return f"It does not fit: {need}{self._which_fits}.{cause if self.largest_buffers else ''}"

    @property
    def _which_fits(self) -> str:
        if "largest_batch_that_fits" not in self.__dict__:  # looking for it compiles the step several times
            return ""
        batch = self.largest_batch_that_fits
        if batch is None:
            return "; it has no batch to make smaller"
        return f"; batch {batch} fits" if batch else "; not even one row for each replica fits"

    @property
    def compiler_message(self) -> str:
        """All that the compiler said, when it failed."""
        return self._outcome.message

    @property
    def compile_seconds(self) -> float:
        """How long the compiler took."""
        return self._outcome.seconds

    # ---- memory ----

    @functools.cached_property
    def bytes(self) -> Bytes:
        """Memory of one device, by kind."""
        kinds = dict.fromkeys(("params", "slots", "inputs", "constants"), 0)
        for entry in self._program.entries:
            kinds[entry.kind] += entry.bytes
        memory = self._outcome.memory
        aliased, available = memory.get("alias", 0), self.target.usable_bytes
        held = memory.get("argument", sum(kinds.values()))
        outputs = max(0, memory.get("output", 0) - aliased)
        temp, code = memory.get("temp", 0), memory.get("generated_code", 0)
        total = held + outputs + temp + code
        if not self.compiles:
            total = max(total, _needed(self._outcome.message) or 0)
            temp = max(0, total - held)
        return Bytes(
            **kinds,
            padding=max(0, held - sum(kinds.values())),
            outputs=outputs,
            temp=temp,
            code=code,
            aliased=aliased,
            total=total,
            available=available,
        )

    @functools.cached_property
    def largest_buffers(self) -> list[Buffer]:
        """The largest variables, inputs and intermediate values of one device."""
        held = [Buffer(e.bytes, f"{e.name} {e.dtype}{list(e.shape)}", e.created_at) for e in self._program.entries]
        made: dict[tuple[str, str], Buffer] = {}
        for v in self._operations.values:
            layer = layer_of(v.scope)
            what = f"{v.description}{f' in {layer}' if layer else ''}"
            made.setdefault((what, v.line), Buffer(v.bytes, what, v.line))
        return sorted([*held, *made.values()], key=lambda b: -b.bytes)[:10]

    @functools.cached_property
    def largest_batch_that_fits(self) -> int | None:
        """About the largest global batch that fits, found by compiling for several.

        It fits, and one that is larger by a 64th (where there are few rows: by one for each replica) does not. 0 when
        not even one row for each replica fits. The search ends at 1,048,576 rows for each. None without a batch, and
        where it is not known how much memory there is (on CPUs).
        """
        from phalanx.preflight.batches import largest

        n, rows = self.num_devices, self._program.rows_per_device
        if rows is None or self.bytes.available is None or self.verdict == "fails":
            return None

        def needed(r: int) -> tuple[bool, int]:
            report = self if r * n == self.global_batch else self._again(self.target, r * n)
            return report.fits, report.bytes.total

        return n * largest(needed, rows, self.bytes.available)

    # ---- work ----

    @functools.cached_property
    def flops_per_device(self) -> float:
        """Floating-point operations of one device in a step.

        XLA's count for the optimized program. XLA counts the body of a loop once; where the step's matrix
        products alone, loops counted in full, come to more, it is their number.
        """
        return max(self._outcome.cost.get("flops", 0.0), self._operations.flops)

    @property
    def flops(self) -> float:
        """Floating-point operations of all devices in a step."""
        return self.flops_per_device * self.num_devices

    @property
    def matmul_flops(self) -> float:
        """Of matrix products and convolutions alone, of all devices, read from the step before it is optimized."""
        return self._operations.flops * self.num_devices

    @property
    def bytes_accessed(self) -> float:
        """What one device's program reads and writes in a step, as XLA counts, which takes the body of a loop once."""
        return self._outcome.cost.get("bytes accessed", 0.0)

    @functools.cached_property
    def collectives(self) -> list[Collective]:
        """Every exchange between the devices, the largest first."""
        if self._module is None:
            return []
        target = self.target
        return self._module.collectives(self.num_devices, target.num_slices, target.platform)

    @functools.cached_property
    def warnings(self) -> list[Warning]:
        """What is suspicious, each with the user's line and a remedy."""
        return all_warnings(Evidence(self._program, self._operations, self._module, self.collectives, self.target))

    # ---- time ----

    @functools.cached_property
    def step_time(self) -> estimate.StepTime | None:
        """Estimated from published peak rates: a lower bound. None where the chip is not known, or nothing compiled."""
        if not self.compiles:
            return None
        return estimate.step_time(self.flops_per_device, self.bytes_accessed, self.collectives, self.target)

    @property
    def step_time_estimate(self) -> float | None:
        """Seconds of `step_time`, everything overlapping."""
        return None if self.step_time is None else self.step_time.seconds

    @functools.cached_property
    def scaling(self) -> list[estimate.Size]:
        """The same rows for each replica on 8, 16, ... 4096 chips: compiled up to 256, and computed from there.

        Empty where the chip is not known, and for a step that does not run on all devices.
        """
        return self.scaling_to()

    def scaling_to(self, largest: int = 4096, compiled_to: int = 256) -> list[estimate.Size]:
        """As `scaling`, for other limits; each size up to `compiled_to` that is offered is compiled."""
        from phalanx.preflight.scaling import curve

        check_int(largest, "scaling_to: largest")
        check_int(compiled_to, "scaling_to: compiled_to")
        return curve(self, self._again, largest, compiled_to)

    # ---- views ----

    def to_dict(self) -> dict[str, Any]:
        """Everything that is known by now, as plain values."""
        step_time = self.step_time
        known = self.__dict__
        return {
            "step": self.name,
            "topology": self.topology,
            "devices": self.num_devices,
            "chips": self.target.num_chips,
            "global_batch": self.global_batch,
            "verdict": self.verdict,
            "fits": self.fits,
            "message": self.message if self.fits or "message" in known else None,
            "compiler_message": self.compiler_message or None,
            "effort": self.effort,
            "compile_seconds": round(self.compile_seconds, 3),
            "bytes": asdict(self.bytes),
            "largest_buffers": [asdict(b) for b in self.largest_buffers],
            "flops": self.flops,
            "matmul_flops": self.matmul_flops,
            "bytes_accessed": self.bytes_accessed,
            "collectives": [asdict(c) for c in self.collectives],
            "warnings": [asdict(w) for w in self.warnings],
            "step_time_estimate": self.step_time_estimate,
            "step_time": None if step_time is None else {**asdict(step_time), "bound": step_time.bound},
            "largest_batch_that_fits": known.get("largest_batch_that_fits"),
            "scaling": [asdict(s) for s in known.get("scaling", ())],
        }

    def to_json(self) -> str:
        """`to_dict` as JSON."""
        return json.dumps(self.to_dict(), indent=2)

    def save_html(self, path: str | Path) -> None:
        """Write one page that needs nothing else: memory, collectives, roofline, and scaling if it was looked at."""
        from phalanx.preflight.html import page

        Path(path).write_text(page(self), encoding="utf-8")

    def __str__(self) -> str:
        from phalanx.preflight.text import as_text

        return as_text(self)

    def __rich__(self) -> Any:
        from phalanx.preflight.text import as_rich

        return as_rich(self)

    def __repr__(self) -> str:
        return f"<Report of {self.name} on {self.topology}: {self.verdict}, {human(self.bytes.total)} per device>"


_UNITS = {"": 1, "B": 1, "K": 2**10, "M": 2**20, "G": _GIB, "T": 2**40}


def _needed(message: str) -> int | None:
    """The memory that the compiler says would be needed."""
    found = re.search(r"Used ([\d.]+)([KMGT]?) of|\(([\d.]+)([KMGT]?)\) exceeds available", message)
    if not found:
        return None
    number, unit = (found[1], found[2]) if found[1] else (found[3], found[4])
    return int(float(number) * _UNITS[unit])
