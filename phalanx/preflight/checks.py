"""What is suspicious in a compiled step, each with the user's line and a remedy in one line."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from phalanx.preflight import hlo
from phalanx.preflight.operations import Operations
from phalanx.preflight.program import Program
from phalanx.preflight.targets import Target

_LARGE_SHARE = 1 / 64
"""Of a device's memory, from which a tensor is large."""
_LARGE_BYTES = 64 * 2**20
"""The same where the memory is not known."""
_TILE = (8, 128)
_WASTE = 0.25
_MATTERS = 0.02
"""Share of the step's arithmetic from which a matrix product is worth a warning."""
_SMALL = 1024
"""Bytes under which a buffer is nothing to speak of."""


@dataclass(frozen=True)
class Warning:
    """One finding."""

    kind: str
    """replicated, all-gather, float64, float32-matmul, callback, donation, dynamic-shape or padding."""
    message: str
    line: str
    """The user's, 'file.py:12', where it is known."""
    remedy: str

    def __str__(self) -> str:
        at = f" at {shown(self.line)}" if self.line else ""
        return f"{self.kind}: {self.message}{at}. {self.remedy}"


@dataclass(frozen=True)
class Evidence:
    """All that is known of a step."""

    program: Program
    operations: Operations
    module: hlo.Module | None
    collectives: list[hlo.Collective]
    target: Target


def all_warnings(evidence: Evidence) -> list[Warning]:
    """Every finding, in the order of the kinds."""
    return [warning for check in _CHECKS for warning in check(evidence)]


def _replicated(e: Evidence) -> Iterator[Warning]:
    if e.program.num_devices < 2:
        return
    limit = e.target.usable_bytes
    large = _LARGE_BYTES if limit is None else limit * _LARGE_SHARE
    found = sorted((x for x in e.program.entries if x.replicated and x.bytes >= large), key=lambda x: -x.bytes)
    if not found:
        return
    total = sum(x.bytes for x in found)
    names = ", ".join(f"{x.name} ({human(x.bytes)})" for x in found[:3]) + (", ..." if len(found) > 3 else "")
    slots = sum(x.bytes for x in found if x.kind == "slots")
    remedy = (
        "Keep the optimizer's moments in bfloat16 (optax.adam(..., mu_dtype='bfloat16')), or use one without."
        if slots > total / 2
        else "Store it in bfloat16, or split it over the devices in a jitted step with a NamedSharding."
    )
    yield Warning(
        "replicated",
        f"{human(total)} in {len(found)} large tensors are held whole by each of {e.program.num_devices} devices: {names}",
        found[0].created_at,
        remedy,
    )


def _gathered(e: Evidence) -> Iterator[Warning]:
    parts = {x.whole_shape: x for x in e.program.entries if not x.replicated and x.kind != "constants"}
    for c in e.collectives:
        if c.kind != "all-gather":
            continue
        for shape in c.shapes:
            entry = parts.get(shape)
            if entry is not None and math.prod(shape) > _SMALL:
                yield Warning(
                    "all-gather",
                    f"all of {entry.name}, {c.dtype}{list(shape)}, is gathered on every device in each step",
                    c.source,
                    "Split the computation like the array, or keep the array whole if it fits.",
                )


def _float64(e: Evidence) -> Iterator[Warning]:
    for dtype, line in e.operations.wide[:3]:
        yield Warning(
            "float64",
            f"{dtype} is computed with, which TPUs emulate slowly",
            line,
            "Unset jax_enable_x64, or convert with .astype('float32').",
        )


def _float32_matmuls(e: Evidence) -> Iterator[Warning]:
    total = e.operations.flops
    narrow = sum(m.flops for m in e.operations.matmuls if m.dtype in ("bfloat16", "float16"))
    if not total or narrow < total / 2:
        return
    by_line: dict[tuple[str, str], float] = {}
    for m in e.operations.matmuls:
        if m.dtype == "float32":
            by_line[m.line, m.scope] = by_line.get((m.line, m.scope), 0.0) + m.flops
    for (line, scope), flops in sorted(by_line.items(), key=lambda item: -item[1])[:3]:
        if flops > total * _MATTERS:
            yield Warning(
                "float32-matmul",
                f"a matrix product is in float32, {flops / total:.0%} of the arithmetic of a bfloat16 step{_in(scope)}",
                line,
                "Convert its operands with .astype('bfloat16'); preferred_element_type keeps a float32 result.",
            )


def _callbacks(e: Evidence) -> Iterator[Warning]:
    for name, line in e.operations.callbacks:
        yield Warning(
            "callback",
            f"{name} calls Python on the host in each step, which the devices wait for",
            line,
            "Return the value and use it after the step, or do it every so many steps.",
        )


def _donations(e: Evidence) -> Iterator[Warning]:
    if e.module is None:
        return
    reused = e.module.reused_inputs
    lost = [x for i, x in enumerate(e.program.entries) if x.donated and i not in reused and x.bytes > _SMALL]
    if lost:
        names = ", ".join(x.name for x in lost[:3]) + (", ..." if len(lost) > 3 else "")
        yield Warning(
            "donation",
            f"{human(sum(x.bytes for x in lost))} of buffers that were given away could not be reused: {names}",
            lost[0].created_at,
            "Return a value of the same shape, dtype and sharding, or do not donate it.",
        )


def _dynamic(e: Evidence) -> Iterator[Warning]:
    if e.module is not None and e.module.has_dynamic_shapes:
        yield Warning(
            "dynamic-shape",
            "a size is known at run time only, so that buffers have the largest and loops their worst length",
            "",
            "Pad to a fixed size, and mask.",
        )
    for label in e.program.symbolic:
        yield Warning(
            "dynamic-shape",
            f"{label} has a size that input_signature leaves open: each size that is met is compiled for itself",
            "",
            "Pad batches to one size (remainder='pad'), or fix the size.",
        )


def _padding(e: Evidence) -> Iterator[Warning]:
    if e.target.platform != "tpu":
        return
    total = e.operations.flops
    worst: dict[tuple[str, str, tuple[int, int, int]], tuple[float, float]] = {}
    for m in e.operations.matmuls:
        if m.sizes is None or not total:
            continue
        padded = math.prod(-(-d // t) * t for d, t in zip(m.sizes, (_TILE[0], _TILE[1], _TILE[1])))
        waste = 1 - math.prod(m.sizes) / max(1, padded)
        key = (m.line, m.scope, m.sizes)
        worst[key] = (worst.get(key, (0.0, 0.0))[0] + m.flops, waste)
    by_line: dict[str, str] = {}
    for (line, scope, sizes), (flops, waste) in sorted(worst.items(), key=lambda item: -item[1][0] * item[1][1]):
        if waste > _WASTE and flops > total * _MATTERS and line not in by_line and len(by_line) < 5:
            by_line[line] = line
            rows, inner, columns = sizes
            yield Warning(
                "padding",
                f"a matrix product of {rows}x{inner} and {inner}x{columns} is padded to tiles of 8x128, and"
                f" {waste:.0%} of its arithmetic is for nothing{_in(scope)}",
                line,
                "Use sizes that are multiples of 128 (rows: of 8).",
            )


_CHECKS: tuple[Callable[[Evidence], Iterator[Warning]], ...] = (
    _replicated,
    _gathered,
    _float64,
    _float32_matmuls,
    _callbacks,
    _donations,
    _dynamic,
    _padding,
)


def _in(scope: str) -> str:
    layer = layer_of(scope)
    return f", in {layer}" if layer else ""


def layer_of(scope: str) -> str:
    """The named scope that an operation is in, without JAX's own."""
    parts = [p for p in scope.split("/") if p and "(" not in p and ")" not in p and not p.startswith("gradient of")]
    return "/".join(parts)


def shown(line: str) -> str:
    """A line for reading: relative to where we are, where it is below."""
    return line.removeprefix(os.getcwd() + os.sep)


def human(amount: float) -> str:
    """Bytes as people read them."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(amount) < 1024 or unit == "GiB":
            return (
                f"{amount:.0f} {unit}"
                if unit == "B"
                else f"{amount:.3g} {unit}"
                if amount < 999.5
                else f"{amount:.0f} {unit}"
            )
        amount /= 1024
    return f"{amount:.1f} GiB"
