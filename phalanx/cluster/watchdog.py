"""`Watchdog`: a step that takes too long ends the program, with the stacks of every thread of every process."""

from __future__ import annotations

import faulthandler
import os
import sys
import threading
import time
import traceback
from collections.abc import Iterable, Iterator
from types import TracebackType
from typing import Any, TypeVar

from phalanx._checks import check_seconds
from phalanx.cluster.connection import lifeline
from phalanx.cluster.exits import EXIT_STUCK
from phalanx.cluster.lifeline import Lifeline, end_process

T = TypeVar("T")

_GATHER_SECONDS = 1.0
"""How long the report waits for what the others say."""

_LONGEST_SECONDS = 1e9
"""What the clocks of C can count."""


class Watchdog:
    """Ends the program, with `EXIT_STUCK`, when a step takes longer than `step_timeout` seconds.

    Before that every process prints the stacks of all its threads, and in which step it is: the one that is
    behind is the one to look at. The first step, which compiles, may take ten times as long.

    Args:
        step_timeout: seconds. Generous: several times the longest step, checkpoints included.

    Raises:
        ArgumentError: unless `step_timeout` is a positive number.

    Example:
        >>> with px.cluster.Watchdog(step_timeout=300) as watchdog:
        ...     for batch in watchdog.over([1, 2, 3]):
        ...         pass
        >>> watchdog.steps
        3
    """

    _FIRST = 10

    def __init__(self, step_timeout: float) -> None:
        check_seconds(step_timeout, "Watchdog: step_timeout")
        self._limit = float(step_timeout)
        self.steps = 0
        """Finished ones."""
        self._began = 0.0
        self._ended = threading.Event()
        self._reports: dict[int, int] = {}

    def __enter__(self) -> Watchdog:
        self._ended.clear()
        self._began = time.monotonic()
        self._thread = threading.Thread(target=self._watch, name="phalanx-watchdog", daemon=True)
        self._thread.start()
        line = lifeline()
        if line is not None:
            line.handlers |= {"stuck": self._on_stuck, "step": self._on_step}
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        self._ended.set()
        self._thread.join()

    def step(self) -> None:
        """A step is finished."""
        self.steps += 1
        self._began = time.monotonic()

    def over(self, items: Iterable[T]) -> Iterator[T]:
        """The items; what is done with each is a step."""
        for item in items:
            yield item
            self.step()

    # ---- the thread ----

    def _allowed(self) -> float:
        return self._limit * (self._FIRST if self.steps == 0 else 1)

    def _watch(self) -> None:
        tick = min(self._limit / 4, 1.0)
        try:
            while not self._ended.wait(tick):
                # If some C code keeps Python from running at all, this thread cannot report; a thread in C then does.
                faulthandler.dump_traceback_later(min(2 * self._allowed() + 60, _LONGEST_SECONDS), exit=True)
                if time.monotonic() - self._began > self._allowed():
                    self._report()
        finally:
            faulthandler.cancel_dump_traceback_later()

    def _report(self) -> None:
        line, seen = lifeline(), stacks()
        if line is not None:
            line.tell("stuck", step=self.steps)
            time.sleep(_gathering(line))  # and end then, whatever happens: the others do
        self._end(seen)

    def _end(self, seen: str) -> None:
        line = lifeline()
        me = 0 if line is None else line.me
        took = f"process {me} is in step {self.steps} since {time.monotonic() - self._began:.1f} s"
        behind = ""
        reports = {**self._reports, me: self.steps}
        if line is not None and len(reports) > 1:
            last = min(reports.values())
            names = ", ".join(str(line.members[i]) for i, step in sorted(reports.items()) if step == last)
            if last < max(reports.values()):
                behind = f" Behind the others, in step {last}: {names}."
        end_process(
            EXIT_STUCK,
            f"{seen}\nphalanx: {took}, and step_timeout is {self._limit:g} s.{behind} It exits with code"
            f" {EXIT_STUCK}; the stacks of its threads are above.",
        )

    # ---- what others say, in the thread of the lifeline ----

    def _on_stuck(self, by: int, message: dict[str, Any]) -> None:
        self._reports[by] = int(message["step"])
        line = lifeline()
        if line is None:
            return
        line.excuse_the_gone()
        if by == line.me:
            return
        line.tell("step", step=self.steps)
        end = threading.Timer(_gathering(line), self._end, [stacks()])
        end.daemon = True
        end.start()

    def _on_step(self, by: int, message: dict[str, Any]) -> None:
        self._reports[by] = int(message["step"])


def _gathering(line: Lifeline) -> float:
    """Process 0 ends last: JAX aborts, without a word, those that lose its coordinator."""
    return _GATHER_SECONDS * (1.5 if line.me == 0 else 1)


def stacks() -> str:
    """The stack of every thread of this process, that of the caller last."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    frames = sorted(sys._current_frames().items(), key=lambda item: item[0] == threading.get_ident())
    parts = [f"phalanx: the threads of pid {os.getpid()}:"]
    for ident, frame in frames:
        parts.append(f"--- thread {names.get(ident, ident)}\n{''.join(traceback.format_stack(frame)).rstrip()}")
    return "\n".join(parts)
