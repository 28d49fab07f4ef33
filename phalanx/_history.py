"""What the traces of a function were made for, so that the next one can be explained."""

from __future__ import annotations

import collections
import itertools
from collections.abc import Hashable
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


class History:
    """The kinds of calls that a function was traced for, the latest of them."""

    def __init__(self, signature: Signature) -> None:
        self._signature = signature
        self._entries: collections.deque[tuple[Call, Context]] = collections.deque(maxlen=_REMEMBERED)
        self.count = 0
        """How many there were, those for objects that are gone included."""

    def add(self, call: Call) -> None:
        """A trace was made here for calls like this one."""
        self._entries.append((call.without_values(), context_keys()))
        self.count += 1

    def difference(self, call: Call) -> str:
        """Why this call, made here, needs another trace than those before."""
        return self._difference(call, context_keys(), len(self._entries))

    def last_difference(self) -> str:
        """Why the last trace was made."""
        return self._difference(*self._entries[-1], len(self._entries) - 1)

    def lines(self) -> list[str]:
        """Why each trace was made, as far as they are remembered."""
        first = self.count - len(self._entries) + 1
        entries = enumerate(self._entries)
        return [f"trace {first + i}: {self._difference(call, context, i)}" for i, (call, context) in entries if i]

    def _difference(self, call: Call, context: Context, n_earlier: int) -> str:
        earlier = reversed(list(itertools.islice(self._entries, n_earlier)))
        fewest: list[str] = min((self._changes(*old, call, context) for old in earlier), key=len)
        return "; ".join(fewest) or "an object that is gone, or variables were created"

    def _changes(self, old: Call, old_context: Any, new: Call, new_context: Any) -> list[str]:
        changes = self._signature.changes(old, new)
        if old_context[0] != new_context[0]:
            changes.append(f"context: {describe(old_context[0])} -> {describe(new_context[0])}")
        elif old_context != new_context:
            tapes = old_context[1] != new_context[1]
            changes.append("tapes around the call" if tapes else "JAX settings (x64, precision ...)")
        return changes
