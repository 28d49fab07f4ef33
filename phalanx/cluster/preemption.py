"""Preemption: a scheduler's SIGTERM becomes a stop after the same step on all processes.

The signal's handler only makes a note. Loops ask after each step, which costs nothing; when one process has
been told to stop, all agree on the step by counting how often each of them has asked: the next time that none
of them has come to yet.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import islice
from types import FrameType
from typing import Any, TypeVar

from phalanx.cluster.lifeline import Lifeline

T = TypeVar("T")


class Preempted(BaseException):
    """This process was asked to stop while it waited for data. It never leaves the loop that waits."""


class Preemption:
    """Whether, and after which step, this process is to stop."""

    def __init__(self) -> None:
        self._noticed = False
        self._told = False
        self._asked = 0
        self._stop_at: int | None = None
        self._frozen = False
        """Whether processes are agreeing, so that none may ask again before they have."""
        self._changed = threading.Condition()
        self._counts: dict[int, int] = {}
        self._lifeline: Lifeline | None = None
        self._before: Any = None
        self._waits = False

    def listen(self) -> None:
        """Take SIGTERM for a request to stop. The second one ends the process as it always did.

        Only the main thread can; elsewhere nothing is changed.
        """
        if self._before is None and threading.current_thread() is threading.main_thread():
            self._before = signal.signal(signal.SIGTERM, self._note) or signal.SIG_DFL

    def _note(self, number: int, frame: FrameType | None) -> None:
        self._noticed = True
        signal.signal(number, self._before if self._before is not None else signal.SIG_DFL)
        if self._lifeline is not None:
            self._lifeline.ring()
        elif self._waits:
            raise Preempted

    @contextmanager
    def listening(self) -> Iterator[None]:
        """`listen` for the length of the block; a signal that came too late for it then does what it always did."""
        mine = self._before is None
        self.listen()
        try:
            yield
        except BaseException:
            self._listen_no_more(mine)
            raise
        self._listen_no_more(mine)
        if mine and self._noticed:
            self._noticed = False
            signal.raise_signal(signal.SIGTERM)

    def _listen_no_more(self, mine: bool) -> None:
        if mine and self._before is not None and threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, self._before)
            self._before = None

    def next_of(self, items: Iterator[T]) -> list[T]:
        """The next item, alone in a list, or an empty one; a request to stop ends the wait for it.

        Raises:
            Preempted: then no item was taken.
        """
        if self._noticed and self._lifeline is None:
            raise Preempted
        self._waits = True
        try:
            return list(islice(items, 1))
        finally:
            self._waits = False

    def reached(self) -> bool:
        """Whether to stop here; all processes must ask equally often, after the same steps."""
        if self._lifeline is None:
            return self._noticed
        with self._changed:
            while self._frozen and self._stop_at is None:
                self._changed.wait(0.1)  # so that signals are handled
            self._asked += 1
            return self._stop_at is not None and self._asked >= self._stop_at

    # ---- several processes ----

    def connect(self, lifeline: Lifeline) -> None:
        """Agree with the others from now on."""
        self._lifeline = lifeline
        lifeline.handlers |= {
            "preempted": self._on_preempted,
            "freeze": self._on_freeze,
            "asked": self._on_asked,
            "stop_at": self._on_stop_at,
        }
        lifeline.ticks.append(self._tick)

    @property
    def _line(self) -> Lifeline:
        assert self._lifeline is not None
        return self._lifeline

    def _tick(self) -> None:
        if self._noticed and not self._told:
            self._told = True
            self._line.tell_first("preempted")

    def _on_preempted(self, by: int, message: dict[str, Any]) -> None:
        if not self._frozen:
            self._line.tell("freeze")

    def _on_freeze(self, by: int, message: dict[str, Any]) -> None:
        with self._changed:
            self._frozen = True
            asked = self._asked
        self._line.tell_first("asked", times=asked)

    def _on_asked(self, by: int, message: dict[str, Any]) -> None:
        self._counts[by] = int(message["times"])
        if len(self._counts) == len(self._line.members):
            self._line.tell("stop_at", times=max(self._counts.values()) + 1)

    def _on_stop_at(self, by: int, message: dict[str, Any]) -> None:
        with self._changed:
            self._stop_at = int(message["times"])
            self._changed.notify_all()


preemption = Preemption()


def listen() -> None:
    """Take SIGTERM for a request to stop, from now on; `stop_requested` does so by itself.

    Call it first, so that a signal that comes while the model is built and compiled is not lost. Only the main
    thread can; a second SIGTERM ends the process.

    Example:
        >>> px.cluster.listen()
    """
    preemption.listen()


def stop_requested() -> bool:
    """Whether to save and stop now, because SIGTERM has asked for it; on all processes after the same step.

    Ask once after each step: all processes must ask equally often. Then save, and leave with
    ``sys.exit(px.cluster.EXIT_PREEMPTED)``, which tells a scheduler to start the program again.

    Example:
        >>> px.cluster.stop_requested()
        False
    """
    preemption.listen()
    return preemption.reached()
