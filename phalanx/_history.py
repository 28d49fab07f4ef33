"""What the traces of a function were made for, so that the next one can be explained."""

from __future__ import annotations

import collections
import itertools
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any

from phalanx import _jax, state
from phalanx._signature import Call, Signature, describe

_REMEMBERED = 20
"""Latest traces whose arguments a function remembers, to explain the next."""

Context = tuple[Hashable, ...]


def context_keys() -> Context:
    """What besides the arguments makes calls need traces of their own: strategy and replica, tapes, JAX's settings."""
    frame = state.top()
    return (frame.context.key, state.tape_key(frame), _jax.trace_context())


@dataclass(frozen=True)
class Entry:
    """A trace that was made and kept."""

    call: Call
    context: Context
    number: int
    """Which of the function's traces it is."""
    created: tuple[str, ...]
    """The variables that the trace before it created, which this one uses."""


class History:
    """The kinds of calls that a function was traced for, the latest of them."""

    def __init__(self, signature: Signature) -> None:
        self._signature = signature
        self._entries: collections.deque[Entry] = collections.deque(maxlen=_REMEMBERED)
        self.count = 0
        """How many there were, those for objects that are gone included."""

    def add(self, call: Call, number: int, created: Sequence[Any]) -> None:
        """The trace of this number was made here for calls like this one; the one before it created variables."""
        labels = tuple(v.label for v in created)
        self._entries.append(Entry(call.without_values(), context_keys(), number, labels))
        self.count += 1

    def difference(self, call: Call) -> str:
        """Why this call, made here, needs another trace than those before."""
        return self._difference(call, context_keys(), len(self._entries))

    def last_difference(self) -> str:
        """Why the last trace was made."""
        last = self._entries[-1]
        return self._difference(last.call, last.context, len(self._entries) - 1)

    def lines(self) -> list[str]:
        """Why each trace was made, as far as they are remembered."""
        lines = []
        for i, entry in enumerate(self._entries):
            number = entry.number - bool(entry.created)
            if i:
                lines.append(f"trace {number}: {self._difference(entry.call, entry.context, i)}")
            if entry.created:
                lines.append(f"trace {entry.number}: {_created(number, entry.created)}")
        return lines

    def _difference(self, call: Call, context: Context, n_earlier: int) -> str:
        earlier = reversed(list(itertools.islice(self._entries, n_earlier)))
        fewest: list[str] = min((self._changes(old.call, old.context, call, context) for old in earlier), key=len)
        return "; ".join(fewest) or "an object that is gone"

    def _changes(self, old: Call, old_context: Any, new: Call, new_context: Any) -> list[str]:
        changes = self._signature.changes(old, new)
        if old_context[0] != new_context[0]:
            changes.append(f"context: {describe(old_context[0])} -> {describe(new_context[0])}")
        elif old_context != new_context:
            tapes = old_context[1] != new_context[1]
            changes.append("tapes around the call" if tapes else "JAX settings (x64, precision ...)")
        return changes


def _created(number: int, variables: Sequence[str]) -> str:
    others = f" and {len(variables) - 1} more" if len(variables) > 1 else ""
    return (
        f"trace {number} created {variables[0]}{others}, and the body was traced again to use what there is now. Create"
        " variables before the first call (optimizer.build(variables), model.build(shape)) to have one trace."
    )
