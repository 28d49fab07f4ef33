"""Ctrl-C and the like wait while the variables' old values are gone and the new ones have not arrived.

Python runs signal handlers between any two bytecodes of its main thread, and they may raise. A step that JAX
has compiled before is a single call for Python; one that it compiles now, or that calls back to the host,
passes through JAX's own Python code after the old values were given away.
"""

from __future__ import annotations

import signal
import threading
from types import FrameType, TracebackType
from typing import Any

_SIGNALS = [getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGALRM") if hasattr(signal, name)]


class HeldBack:
    """Context manager: Python's signal handlers run after the block instead of in it.

    Does nothing in other threads than the main one, where no handler runs.
    """

    __slots__ = ("_arrived", "_handlers")

    def __enter__(self) -> None:
        self._arrived: list[tuple[int, FrameType | None]] = []
        self._handlers: dict[int, Any] = {}
        if threading.get_ident() != threading.main_thread().ident:
            return
        try:
            for number in _SIGNALS:
                handler = signal.getsignal(number)
                if callable(handler):
                    self._handlers[number] = handler
                    signal.signal(number, self._note)
        except BaseException:
            self._restore()
            raise

    def _note(self, number: int, frame: FrameType | None) -> None:
        self._arrived.append((number, frame))

    def _restore(self) -> None:
        try:
            self._set_back()
        except BaseException:  # from the handler of a signal that has just arrived
            self._set_back()
            raise

    def _set_back(self) -> None:
        for number, handler in self._handlers.items():
            signal.signal(number, handler)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        self._restore()
        for number, frame in self._arrived:
            self._handlers[number](number, frame)
