"""Who may look at the arrays in variables, give them away and replace them, and when."""

from __future__ import annotations

import collections
import itertools
import threading
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING, Any

from phalanx import _jax
from phalanx.errors import StrategyError

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
