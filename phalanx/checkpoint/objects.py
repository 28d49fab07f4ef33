"""Finds what is to be kept in the objects that a checkpoint is given."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any

import jax
import numpy as np

from phalanx._checks import counterparts
from phalanx._conversion import is_per_replica
from phalanx._plain import is_plain
from phalanx.checkpoint.leaves import Array, Held, Leaf, Put, State, Value, generator
from phalanx.errors import ArgumentError, ArgumentTypeError
from phalanx.optim import Optimizer
from phalanx.variables import Component, Variable

Parts = Iterable[tuple[str, Any]]
"""What an object consists of, each with a name that is the same in another run of the program."""

_Replace = Callable[[Any, str, Any], None]
_parts: dict[type, tuple[Callable[[Any, str], Parts], _Replace | None]] = {}


def register(cls: type, parts: Callable[[Any, str], Parts], replace: _Replace | None = None) -> None:
    """Keep objects of a class as their parts.

    `parts` is given the object and how messages call it. ``replace(object, name, value)`` puts another value in the place of a
    part that cannot be changed itself, if the object has such.
    """
    _parts[cls] = parts, replace


def not_built(path: str, cure: str) -> ArgumentError:
    """The error for an object that has no variables yet, so that nothing could be restored into it."""
    return ArgumentError(
        f"Checkpoint: {path!r} has no variables yet. {cure} before the checkpoint is saved or restored."
    )


def _of_optimizer(optimizer: Optimizer, path: str) -> Parts:
    if optimizer.state is None:
        raise not_built(path, "Call optimizer.build(variables) with all the variables that it updates,")
    return [(v.name.removeprefix("optimizer").lstrip("."), v) for v in optimizer.variables]


register(Optimizer, _of_optimizer)


class Contents:
    """The leaves of a checkpoint's objects, each once, by their paths."""

    def __init__(self) -> None:
        self.leaves: dict[str, Leaf] = {}
        self._seen: set[int] = set()
        self._rebuild: list[Callable[[], None]] = []

    def add(self, path: str, value: Any, put: Put) -> None:
        """Take in an object; `put` replaces it, if it is of a kind that cannot be changed."""
        (value,) = counterparts([value])
        parts = next((find for cls, find in _parts.items() if isinstance(value, cls)), None)
        state = generator(value)
        if isinstance(value, Variable):
            if id(value) not in self._seen:
                self._seen.add(id(value))
                self._leaf(Held(path, value))
        elif isinstance(value, Component) or is_per_replica(value):
            raise ArgumentTypeError(
                f"Checkpoint: {path!r} is a {type(value).__name__}, a value of some replicas. Keep the px.Variable, or make"
                " one with synchronization='on_read' for it."
            )
        elif parts is not None:
            self._parts_of(path, value, *parts)
        elif state is not None:
            self._leaf(State(path, *state))
        elif hasattr(value, "state_dict") and hasattr(value, "load_state_dict"):
            self._leaf(State(path, value.state_dict, value.load_state_dict))
        elif isinstance(value, (np.ndarray, jax.Array)):
            self._leaf(Array(path, value, put))
        elif is_plain(value):
            self._leaf(Value(path, value, _in_place(value, put)))
        else:
            self._container(path, value, put)

    def rebuild(self) -> None:
        """After values were put: make containers that cannot be changed anew, with what is in them now."""
        for again in reversed(self._rebuild):
            again()

    def _leaf(self, leaf: Leaf) -> None:
        if leaf.path in self.leaves:
            raise ArgumentError(f"Checkpoint: there are two things that would be called {leaf.path!r}. Rename one.")
        self.leaves[leaf.path] = leaf

    def _parts_of(self, path: str, value: Any, parts: Callable[[Any, str], Parts], replace: _Replace | None) -> None:
        for name, part in parts(value, path):
            self.add(f"{path}/{name}", part, functools.partial(replace or _never, value, name))

    def _container(self, path: str, value: Any, put: Put) -> None:
        if isinstance(value, (dict, list)) and type(value) in (dict, list):
            for key, item in value.items() if isinstance(value, dict) else enumerate(value):
                self.add(f"{path}/{key}", item, _setter(value, key))
            return
        paths, structure = jax.tree_util.tree_flatten_with_path(value, is_leaf=lambda x: x is not value)
        if structure != jax.tree.structure(0):  # a kind of container that JAX knows
            items = [item for _, item in paths]
            before = len(self.leaves)
            for i, (key, item) in enumerate(paths):
                self.add(f"{path}/{jax.tree_util.keystr(key, simple=True)}", item, _setter(items, i))
            if any(isinstance(leaf, Value) for leaf in list(self.leaves.values())[before:]):
                self._rebuild.append(lambda: put(jax.tree.unflatten(structure, items)))
        elif isinstance(getattr(value, "variables", None), (list, tuple, dict)):
            self.add(path, _named(value.variables), put)
        else:
            raise ArgumentTypeError(
                f"Checkpoint: {path!r} is a {type(value).__name__}, which it does not know how to keep. It takes variables,"
                " optimizers, Keras models, datasets and whatever else has state_dict() and load_state_dict(), generators of"
                " random numbers, arrays, numbers, strings, objects with a list `variables`, and dicts, lists and other"
                " pytrees of these."
            )


def _never(value: Any, name: str, new: Any) -> None:
    raise AssertionError(f"{type(value).__name__} has a part {name!r} that is no variable")


def _setter(container: Any, key: Any) -> Put:
    def put(value: Any) -> None:
        container[key] = value

    return put


def _in_place(value: Any, put: Put) -> Put:
    """Lists and dicts of plain values stay the same objects, which others may hold."""

    def replace(new: Any) -> None:
        if isinstance(value, list) and isinstance(new, list):
            value[:] = new
        elif isinstance(value, dict) and isinstance(new, dict):
            value.clear()
            value.update(new)
        else:
            put(new)

    return replace


def _named(variables: Any) -> Any:
    """An object's variables by their names, where these tell them apart, else by their positions."""
    if isinstance(variables, dict):
        return variables
    found = counterparts(list(variables))
    names = [getattr(v, "name", None) for v in found]
    return dict(zip(names, found)) if None not in names and len(set(names)) == len(names) else found
