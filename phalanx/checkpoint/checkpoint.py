"""`Checkpoint`: the objects whose state is kept together."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any, NamedTuple

import numpy as np

from phalanx import state
from phalanx._interrupts import HeldBack
from phalanx.checkpoint.leaves import Changes, Kept, start_copying
from phalanx.checkpoint.objects import Contents, Parts, register
from phalanx.errors import CheckpointError, StrategyError


class Checkpoint:
    """Objects whose state is saved and restored together, each under a name of your choice.

    Variables, optimizers, Keras models (with their optimizer), datasets, generators of random numbers, and what
    else has ``state_dict()`` and ``load_state_dict()``; arrays, numbers and strings; objects with a list
    ``variables``; and dicts, lists and other pytrees of these. Restoring changes the objects themselves; numbers,
    strings and arrays, which cannot be changed, are attributes: read and set them as ``checkpoint.name``.

    Args:
        objects: by name.

    Example:
        >>> w = px.Variable([1.0, 2.0], name="w")
        >>> checkpoint = px.Checkpoint(weights=w, epoch=0)
        >>> checkpoint.epoch += 1
        >>> checkpoint
        Checkpoint(weights, epoch)
    """

    _objects: dict[str, Any]

    def __init__(self, **objects: Any) -> None:
        object.__setattr__(self, "_objects", objects)

    def __getattr__(self, name: str) -> Any:
        objects = self.__dict__.get("_objects", {})
        if name not in objects:
            raise AttributeError(f"the checkpoint has nothing called {name!r}; it has {', '.join(objects)}")
        return objects[name]

    def __setattr__(self, name: str, value: Any) -> None:
        if name not in self._objects:
            raise AttributeError(
                f"the checkpoint has nothing called {name!r}; it has {', '.join(self._objects)}. Give it to px.Checkpoint."
            )
        self._objects[name] = value

    def __repr__(self) -> str:
        return f"Checkpoint({', '.join(self._objects)})"


def _parts_of(checkpoint: Checkpoint, path: str) -> Parts:
    return checkpoint._objects.items()


def _replace(checkpoint: Checkpoint, name: str, value: Any) -> None:
    checkpoint._objects[name] = value


register(Checkpoint, _parts_of, _replace)


class Snapshot(NamedTuple):
    """The state of a checkpoint's objects at one moment."""

    entries: dict[str, dict[str, Any]]
    arrays: dict[str, np.ndarray[Any, Any]]


def contents_of(checkpoint: Checkpoint) -> Contents:
    """What there is to keep.

    Raises:
        ArgumentError: when an object has no variables yet.
        ArgumentTypeError: for an object that cannot be kept.
    """
    contents = Contents()
    for name, value in checkpoint._objects.items():
        contents.add(name, value, functools.partial(_replace, checkpoint, name))
    return contents


@contextmanager
def in_eager_code(doing: str) -> Iterator[None]:
    """The block reads and writes variables, outside of every trace.

    Raises:
        StrategyError: in a traced function or a replica.
    """
    if state.in_step():
        raise StrategyError(f"A checkpoint cannot be {doing} in a traced function or a replica. Do it after the step.")
    with state.lifted_out():
        yield


def take(contents: Contents) -> Snapshot:
    """Copy the state of all objects to the host."""
    leaves = list(contents.leaves.values())
    start_copying(leaves)
    entries: dict[str, dict[str, Any]] = {}
    arrays: dict[str, np.ndarray[Any, Any]] = {}
    for leaf in leaves:
        entry, array = leaf.save()
        entries[leaf.path] = {"kind": leaf.kind, **entry}
        if array is not None:
            arrays[leaf.path] = array
    return Snapshot(entries, arrays)


class Restoring:
    """A restore in two steps: everything is made ready, and only then anything is changed for good."""

    def __init__(self, contents: Contents, saved: Snapshot, process: int, processes: int) -> None:
        self._contents = contents
        self._changes = Changes()
        self._before: list[tuple[Any, Any]] = []
        here, there = contents.leaves, saved.entries
        self.missing = [path for path in here if path not in there]
        """What is here and not in the checkpoint."""
        self.extra = [path for path in there if path not in here]
        """What is in the checkpoint and not here."""
        for path, leaf in here.items():
            if path in there:
                kind = there[path]["kind"]
                if kind != leaf.kind and not {kind, leaf.kind} <= {"value", "array"}:
                    raise leaf.misfit(f"a {kind}", f"a {leaf.kind}")
                leaf.prepare(Kept(there[path], saved.arrays.get(path), process, processes), self._changes)

    def begin(self) -> None:
        """Load the states of objects, which may refuse them; then nothing has changed.

        Raises:
            CheckpointError: naming the object that refused.
        """
        for leaf, new in self._changes.states:
            before = leaf.get()
            try:
                self._before.append((leaf, before))
                leaf.load(new)
            except Exception as error:
                self.undo()
                raise CheckpointError(f"{leaf.path!r} cannot take its state from the checkpoint: {error}") from error
            except BaseException:
                self.undo()
                raise

    def undo(self) -> None:
        """Take back what `begin` did."""
        while self._before:
            leaf, before = self._before.pop()
            with suppress(Exception):  # the one that refused a state may refuse its own too
                leaf.load(before)

    def finish(self) -> None:
        """Change everything else, which cannot fail; interrupts wait for the end."""
        with HeldBack():
            with state.turn(), state.lock:
                state.top().base.store_all(self._changes.variables)
            for put, value in self._changes.values:
                put(value)
            self._contents.rebuild()


def describe(missing: list[str], extra: list[str]) -> str:
    """The list of what does not match."""
    lines = [f"  - {path}: here, not in the checkpoint" for path in missing]
    lines += [f"  - {path}: in the checkpoint, not here" for path in extra]
    return "\n".join(lines)
