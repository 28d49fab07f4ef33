"""Programs made of functions that are handed over in eager code, remembered by their code.

`strategy.run`, `scan` and `while_loop` compile what they are given also outside traced functions. The
usual habit of defining the inner function in the loop must not compile it again in every round.
"""

from __future__ import annotations

import collections
import functools
import inspect
import threading
from collections.abc import Callable, Hashable, Sequence
from typing import Any

from phalanx._signature import Given
from phalanx.function import Function

_KEPT = 64


class EagerPrograms:
    """The most recently used traced functions, by key."""

    def __init__(self) -> None:
        self._functions: collections.OrderedDict[Hashable, Function[..., Any]] = collections.OrderedDict()
        self._lock = threading.Lock()

    def get(self, key: Hashable, make: Callable[[], Function[..., Any]]) -> Function[..., Any]:
        """The function kept under `key`, made when there is none."""
        with self._lock:
            if key not in self._functions:
                self._functions[key] = make()
            self._functions.move_to_end(key)
            while len(self._functions) > _KEPT:
                self._functions.popitem(last=False)
            return self._functions[key]


_everywhere = EagerPrograms()


def as_function(
    name: str,
    construct: Callable[..., Any],
    *functions: Callable[..., Any],
    parameters: Sequence[str],
    options: Hashable = None,
    keep: EagerPrograms = _everywhere,
) -> Callable[..., Any]:
    """A traced function of the remaining arguments of ``construct(*functions, *arguments, options=options)``.

    `parameters` are their names, for messages. What is kept does not keep the functions alive, nor what they
    close over.
    """
    given = Given(functions)

    def make() -> Function[..., Any]:
        def program(given: Given, *arguments: Any) -> Any:
            chosen = {} if options is None else {"options": options}
            return construct(*given.functions, *arguments, **chosen)

        program.__name__ = program.__qualname__ = name
        kind = inspect.Parameter.POSITIONAL_ONLY
        names = [inspect.Parameter(p, kind) for p in ("function", *parameters)]
        program.__signature__ = inspect.Signature(names)  # type: ignore[attr-defined]
        return Function(program, donate=True, static_argnames=(), input_signature=None, reduce_retracing=False)

    return functools.partial(keep.get((name, options, given.key), make), given)
