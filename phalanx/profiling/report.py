"""What a profile says, in words, as a table, as JSON and as a page."""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path

from phalanx.profiling.page import page

LABELS = {
    "compute": "devices compute",
    "collectives": "replicas meet (all-reduce and the like)",
    "input": "waiting for data",
    "host": "Python and dispatch",
    "compilation": "tracing and compiling again",
}


_CLOSE = 0.1
"""Shares that differ by less than this may change places from run to run."""


@dataclass(frozen=True)
class Span:
    """Something that took some time."""

    lane: str
    kind: str
    start: float
    seconds: float
    name: str = ""


@dataclass(frozen=True)
class Profile:
    """Where the time of a training step goes; made by `px.profile`."""

    steps: int
    """How many were measured."""
    seconds_per_step: float
    """As in training, where nobody waits for a step's results."""
    first_step_seconds: float
    """The step before all others; when nothing was compiled before, most of it is tracing and compiling."""
    shares: dict[str, float]
    """What part of a step goes to ``"compute"``, ``"collectives"``, ``"input"``, ``"host"`` and ``"compilation"``; the
    sum is one."""
    recompiled_steps: int
    """Steps after the first in which something was traced or compiled again."""
    name: str
    """Of the step."""
    is_traced: bool
    """Whether the step is a `px.function`."""
    last_retrace: str | None
    """Why it was traced the last time: which argument changed, from what to what. None for a single trace."""
    reads_numbers: bool
    """Whether the step returns numbers of Python or NumPy, for which it waits itself."""
    timeline: list[Span]
    """A few steps, by lanes: the host and the devices; seconds from their start."""

    @property
    def bound_by(self) -> str:
        """The largest of the shares."""
        return max(self.shares, key=self.shares.__getitem__)

    @property
    def verdict(self) -> str:
        """What the time goes to, and the one change that would help most; what comes close to it is named too."""
        first, second = sorted(self.shares, key=self.shares.__getitem__, reverse=True)[:2]
        text = self._verdict(first)
        if self.shares[first] - self.shares[second] < _CLOSE:
            text += (
                f" It is close: {LABELS[second]} takes {self.shares[second]:.0%}, and another run may put it first"
                " (more steps tell them apart)."
            )
        return text

    def _verdict(self, cause: str) -> str:
        share = f"{self.shares[cause]:.0%}"
        return {
            "input": f"Input-bound: {share} of each step waits for data. Raise prefetch, or speed up the source.",
            "compilation": f"Bound by compiling: {share} of the time goes to it, in {self.recompiled_steps} of {self.steps}"
            f" steps after the first. Give batches one shape and dtype, and numbers that change as arrays{self._retraces()}",
            "collectives": f"Bound by communication: the replicas meet in {share} of each step. Give each replica more rows"
            " between two updates: a larger batch, or gradients accumulated over several.",
            "compute": f"Bound by computing: the devices compute in {share} of each step, as they should. What is left is"
            " less work: smaller numbers (bfloat16), a smaller model, more devices.",
            "host": self._host_bound(share),
        }[cause]

    def _retraces(self) -> str:
        if self.last_retrace is None:
            return "; explain_retraces() of a px.function says which argument changed."
        return f". Last time: {self.last_retrace.rstrip('.')}. {self.name}.explain_retraces() has all."

    def _host_bound(self, share: str) -> str:
        what = f"Bound by the host: in {share} of each step the devices wait for Python. "
        if self.reads_numbers:
            return what + (
                "The step reads numbers (as float(loss) does), so Python and the devices take turns: return the arrays,"
                " and read one now and then."
            )
        if not self.is_traced:
            return what + "Make the step a px.function, which runs as one program."
        return what + "Do several steps in one call (px.scan over stacked batches), or less Python around the call."

    def __str__(self) -> str:
        rows = [
            f"  {LABELS[name]:40} {share:6.1%} {share * self.seconds_per_step * 1e3:10.3f} ms"
            for name, share in sorted(self.shares.items(), key=lambda item: -item[1])
        ]
        head = (
            f"{self.seconds_per_step * 1e3:.3f} ms per step over {self.steps} steps; the first took"
            f" {self.first_step_seconds:.2f} s."
        )
        return "\n".join([head, *rows, self.verdict])

    def to_json(self) -> str:
        """Everything, the timeline included."""
        return json.dumps({**asdict(self), "bound_by": self.bound_by, "verdict": self.verdict}, indent=1)

    def save_html(self, path: str | os.PathLike[str]) -> None:
        """Write a page with the shares and the timeline, which needs no other file.

        Args:
            path: where.
        """
        shares = [(LABELS[name], name, share) for name, share in self.shares.items()]
        spans = [(s.lane, s.kind, s.start, s.seconds, s.name) for s in self.timeline]
        head, *_ = str(self).split("\n")
        Path(path).write_text(page(head, self.verdict, shares, spans), encoding="utf-8")
