"""Who may trace, look at the arrays in variables, give them away and replace them, and when."""

from __future__ import annotations

import collections
import itertools
import threading
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from typing import TYPE_CHECKING, Any

from phalanx import _jax
from phalanx.errors import StrategyError, TracingError

if TYPE_CHECKING:
    from phalanx.variables import Variable

lock = threading.RLock()
"""Held in eager code while the arrays in variables are handed out, given away or replaced."""

_turns = threading.RLock()
_calling_back: list[int] = []
"""The thread whose program, running now, calls Python functions."""


def turn() -> AbstractContextManager[Any]:
    """Held by who updates variables, from reading the old values to storing the new ones; before `lock`.

    Programs that call Python functions run in it without `lock`, so that these functions can read variables.

    Raises:
        StrategyError: in such a function, whose program waits for it.
    """
    if _calling_back:
        thread = threading.current_thread()
        # JAX calls back in the thread that runs the program, or in one that Python did not start.
        if thread.ident in _calling_back or isinstance(thread, threading._DummyThread):
            raise StrategyError(
                "A Python function that a running program calls (jax.pure_callback, io_callback, debug.callback) assigns"
                f" variables or calls a traced function, at {_jax.user_line()}. It may read variables only: the program"
                " has their new values. Return the value from the program and use it afterwards."
            )
    return _turns


@contextmanager
def calling_back() -> Iterator[None]:
    """In a `turn`: the block runs a program that calls Python functions, and waits for it."""
    _calling_back.append(threading.get_ident())
    try:
        yield
    finally:
        _calling_back.pop()


_tracing = threading.RLock()
_traced: list[tuple[str, str]] = []
"""The functions that are being traced, the outermost first, each with the thread that does it."""

_PATIENCE_SECONDS = 600.0
"""How long a thread waits for another one that traces; a body that takes longer is most likely stuck."""


@contextmanager
def tracing(name: str) -> Iterator[None]:
    """In the block no other thread traces functions: one turn for all, since functions call each other.

    Raises:
        TracingError: when another thread goes on tracing for ever; its body may be waiting for this thread.
    """
    taken: list[bool] = []
    try:
        # One call into C: an interrupt comes when the lock is held and noted, or neither.
        taken.extend(map(_tracing.acquire, [True], [_PATIENCE_SECONDS]))
        if not taken[0]:
            raise _stuck(name)
        depth = len(_traced)
        _traced.append((name, threading.current_thread().name))
        try:
            yield
        finally:
            del _traced[depth:]
            _stop_tracing(taken)
    finally:
        _stop_tracing(taken)  # again: an interrupt may have come before it there


def _stop_tracing(taken: list[bool]) -> None:
    if taken and taken[0]:
        with suppress(RuntimeError):  # it is not held any more
            _tracing.release()
    taken.clear()


def _stuck(name: str) -> TracingError:
    other, thread = _traced[-1]
    return TracingError(
        f"{name} cannot be traced: thread {thread!r} has been tracing {other} for {_PATIENCE_SECONDS:.0f} s, and only"
        f" one thread traces at a time. If the body of {other} waits for other threads: call {name} once before it, or"
        " start threads and wait for them outside of traced functions."
    )


def set_all(objects: Iterable[Any], name: str, values: Iterable[Any]) -> None:
    """Set an attribute of several objects in one call into C: an interrupt finds all of them set or none."""
    collections.deque(map(setattr, objects, itertools.repeat(name), values), maxlen=0)


class Lending:
    """Whether the array in a variable may be in other hands too, so that its buffer must not be reused."""

    times = 0
    """How often something was lent; while it stays the same, what was owned is owned."""

    @classmethod
    def lend(cls, variables: Iterable[Variable]) -> None:
        """From here on somebody may hold the arrays in these variables."""
        set_all(variables, "_owned", itertools.repeat(False))
        cls.times += 1
