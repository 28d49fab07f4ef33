"""Notes about arrays, which are told apart by identity.

Arrays have no hash, and equal ones are not the same for a tape.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any, Generic, TypeVar

T = TypeVar("T")


class Identities(Generic[T]):
    """A note for each of some arrays, for as long as somebody else keeps the array."""

    def __init__(self) -> None:
        self._entries: dict[int, _Entry] = {}
        owner = weakref.ref(self)

        def forget(entry: _Entry) -> None:
            identities = owner()
            if identities is not None:
                del identities._entries[entry.key]

        self._forget = forget

    def note(self, array: Any, note: T) -> None:
        """Write down something about the array, in place of what stood there."""
        self._entries[id(array)] = _Entry(array, self._forget, note)

    def __contains__(self, array: Any) -> bool:
        return id(array) in self._entries

    def __len__(self) -> int:
        return len(self._entries)

    def any_of(self, arrays: Iterable[Any]) -> bool:
        """Whether there is a note about one of them."""
        entries = self._entries
        return any(id(array) in entries for array in arrays)

    def get(self, array: Any) -> T | None:
        """The note about the array, if there is one."""
        entry = self._entries.get(id(array))
        return None if entry is None else entry.note


class _Entry(weakref.ref):  # type: ignore[type-arg]
    __slots__ = ("key", "note")

    key: int
    note: Any

    def __new__(cls, array: Any, forget: Any, note: Any) -> _Entry:
        entry: _Entry = super().__new__(cls, array, forget)
        entry.key = id(array)
        entry.note = note
        return entry

    def __init__(self, array: Any, forget: Any, note: Any) -> None:
        super().__init__(array, forget)  # type: ignore[call-arg]
