"""What tapes and accumulators have in common: a place among JAX's traces and on the stack of frames."""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Hashable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from phalanx import _jax, state


class OpenTape(ABC):
    """A place on the frame stack and among JAX's traces; may be left in any order."""

    active = False
    recording = True

    def open(self) -> None:
        """Record the operations of this thread from now on."""
        self.active = self.recording = True
        self._thread = threading.get_ident()
        _drop_closed()
        self._trace = _jax.observe_operations(self)
        self._frame = state.TapeFrame(state.top(), self)
        state.set_top(self._frame)

    def close(self) -> None:
        """Stop recording. A tape that others were opened on top of stays, silent, until they close."""
        if not self.active:
            return
        self.active = False
        # The trace and the frame may outlive the tape; without these references it is freed at once.
        self._trace.observer = None
        self._frame.tape = _SILENT
        del self._trace, self._frame
        if threading.get_ident() == self._thread:  # a generator may be closed by another thread than it ran in
            _drop_closed()

    @contextmanager
    def silenced(self) -> Iterator[None]:
        """Operations in the block go to what lies below the tape."""
        if not self.active:
            yield
            return
        with _jax.using_trace(self._trace.parent_trace):
            yield

    # Called by the trace and the frame.

    @abstractmethod
    def wants(self, args: Sequence[Any]) -> bool:
        """Whether an operation on these values is to be recorded."""

    @abstractmethod
    def observe(self, operation: _jax.Operation, args: list[Any]) -> list[Any]:
        """Run the operation and record it."""

    def lifts(self, variable: Any) -> bool:
        """Whether `on_read` gives a value typed as varying in a replica."""
        return False

    @property
    def key(self) -> Hashable:
        """Equal for tapes that lift the same variables."""
        return None

    @abstractmethod
    def on_read(self, variable: Any, value: Any) -> Any:
        """A variable was read as `value`; the value to go on with."""


class _Silent:
    """Stands in for a closed tape in frames that outlive it."""

    key = None

    def lifts(self, variable: Any) -> bool:
        return False

    def on_read(self, variable: Any, value: Any) -> Any:
        return value


_SILENT = _Silent()


def _drop_closed() -> None:
    _jax.close_traces()
    frame: Any = state.top()
    while isinstance(frame, state.TapeFrame) and frame.tape is _SILENT:
        frame = frame.parent
    state.set_top(frame)
