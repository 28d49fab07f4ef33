"""What a checkpoint is made of: each variable, array, state and plain value, and how it is kept and restored."""

from __future__ import annotations

import random
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from phalanx import state
from phalanx._checks import is_numeric
from phalanx._conversion import is_key
from phalanx._packs import stored_array
from phalanx._plain import decode, encode
from phalanx.distribute.reductions import compute
from phalanx.errors import AggregationRequiredError, ArgumentError, ArgumentTypeError, CheckpointError
from phalanx.variables import Variable

Entry = dict[str, Any]
Arrays = dict[str, Any]
Put = Callable[[Any], None]
"""Puts another value in the place of one that cannot be changed itself."""


class Kept(NamedTuple):
    """What was saved of one leaf."""

    entry: Entry
    array: np.ndarray[Any, Any] | None
    process: int
    """Which of the processes reads it now."""
    processes: int


class Changes:
    """What a restore is about to do; nothing is done before all of it is known to work."""

    def __init__(self) -> None:
        self.variables: dict[Variable, Any] = {}
        self.states: list[tuple[State, Any]] = []
        self.values: list[tuple[Put, Any]] = []


class Leaf(ABC):
    """One thing that is kept."""

    kind: str

    def __init__(self, path: str) -> None:
        self.path = path

    @abstractmethod
    def save(self) -> tuple[Entry, Any]:
        """What JSON holds of it, and its array; a copy, which later steps do not change."""

    @abstractmethod
    def prepare(self, kept: Kept, changes: Changes) -> None:
        """Note what restoring it will change.

        Raises:
            CheckpointError: when what was saved does not fit.
        """

    def misfit(self, found: str, wanted: str) -> CheckpointError:
        """The error for a saved thing that is not what is here."""
        return CheckpointError(f"{self.path!r} is {found} in the checkpoint and {wanted} here. Nothing was restored.")


class Value(Leaf):
    """A plain value, which is replaced in its place."""

    kind = "value"

    def __init__(self, path: str, value: Any, put: Put) -> None:
        super().__init__(path)
        self.value = value
        self._put = put

    def save(self) -> tuple[Entry, Any]:
        return {"value": encode(self.value, self.path)}, None

    def prepare(self, kept: Kept, changes: Changes) -> None:
        value = _array_of(kept, self.value) if kept.entry["kind"] == Array.kind else decode(kept.entry["value"])
        changes.values.append((self._put, value))


class Array(Value):
    """An array of JAX or NumPy, which is replaced in its place."""

    kind = "array"

    def __init__(self, path: str, value: Any, put: Put) -> None:
        super().__init__(path, value, put)
        if isinstance(value, np.ndarray) and not _can_be_kept(value):
            raise ArgumentTypeError(
                f"Checkpoint: {path!r} is a {type(value).__name__} of dtype {value.dtype}. Arrays of numbers and booleans can be"
                " kept; of others keep what they are made of, as lists or strings."
            )

    def save(self) -> tuple[Entry, Any]:
        impl = {"key": str(jax.random.key_impl(self.value))} if is_key(self.value) else {}
        return impl, _on_host(self.value, self.path)


class State(Leaf):
    """What an object says its state is, as plain values; each process has its own."""

    kind = "state"

    def __init__(self, path: str, get: Callable[[], Any], load: Callable[[Any], Any]) -> None:
        super().__init__(path)
        self.get = get
        self.load = load

    def save(self) -> tuple[Entry, Any]:
        return {"states": [encode(self.get(), self.path)]}, None

    def prepare(self, kept: Kept, changes: Changes) -> None:
        states = kept.entry["states"]
        if len(states) not in (1, kept.processes):
            raise CheckpointError(
                f"{self.path!r} was saved by {len(states)} processes, each with a state of its own, and cannot be restored by"
                f" {kept.processes}. Leave it out of the checkpoint, or use as many processes."
            )
        changes.states.append((self, decode(states[kept.process if len(states) > 1 else 0])))


class Held(Leaf):
    """A variable."""

    kind = "variable"

    def __init__(self, path: str, variable: Variable) -> None:
        super().__init__(path)
        self.variable = variable

    def save(self) -> tuple[Entry, Any]:
        stored = state.borrow(self.variable)
        entry: Entry = {"parts": self.variable.num_components if self.variable.per_replica else None}
        if is_key(stored):
            entry["key"] = str(jax.random.key_impl(stored))
        if self.variable.per_replica and not stored.is_fully_addressable:
            stored = compute(self.variable.strategy, _all_parts, stored)
        return entry, _on_host(stored, self.path)

    def prepare(self, kept: Kept, changes: Changes) -> None:
        entry, array, variable = kept.entry, kept.array, self.variable
        assert array is not None
        parts = entry["parts"]
        if (parts is not None) != variable.per_replica:
            kinds = "a per-replica variable", "a mirrored one"
            raise self.misfit(*(kinds if parts is not None else kinds[::-1]))
        value: Any = array if "key" not in entry else jax.random.wrap_key_data(jnp.asarray(array), impl=entry["key"])
        if value.dtype != variable.dtype:
            raise self.misfit(f"of dtype {value.dtype}", f"of dtype {variable.dtype}")
        shape = tuple(value.shape if parts is None else value.shape[1:])
        if parts in (None, variable.num_components) and shape != variable.shape:
            raise self.misfit(f"of shape {shape}", f"of shape {variable.shape}")
        if parts is not None and parts != variable.num_components:
            value = self._spread_anew(value, parts)
        changes.variables[variable] = variable._placed(jnp.asarray(value) if variable.strategy is None else value)

    def _spread_anew(self, parts: Any, count: int) -> Any:
        """Components of another number of replicas, merged and spread over those that there are now."""
        rules = state.CrossReplica()
        try:
            if self.variable.aggregation == "none":
                rules.require_merge(self.variable)
            merged = self.variable._merged(jnp.asarray(parts)) if count > 1 else jnp.asarray(parts)[0]
            return rules.spread(self.variable, merged)
        except AggregationRequiredError as error:
            raise CheckpointError(
                f"{self.path!r} was saved with one component for each of {count} replicas, and there are"
                f" {self.variable.num_components} now. It says not how components merge: give it an aggregation, or use as"
                " many replicas."
            ) from error


def _all_parts(stacked: Any) -> Any:
    return stacked


# ---- arrays on the host --------------------------------------------------------------------------


def _can_be_kept(array: np.ndarray[Any, Any]) -> bool:
    is_long = array.dtype.type in (np.longdouble, np.clongdouble)
    return is_numeric(array.dtype) and not is_long and not isinstance(array, np.ma.MaskedArray)


def _on_host(array: Any, path: str) -> np.ndarray[Any, Any]:
    """A copy in NumPy; of an array that is the same on all devices, this process's."""
    if not isinstance(array, jax.Array):
        return np.array(array)
    if is_key(array):
        array = jax.random.key_data(array)
    if array.sharding.is_fully_replicated:
        array = array.addressable_shards[0].data
    if not array.is_fully_addressable:
        raise ArgumentError(
            f"Checkpoint: the array {path!r} is spread over several processes, and none has all of it. Keep it in a"
            " px.Variable, or make it the same on all devices."
        )
    # A view of JAX's memory stays as it is, because JAX gives away no buffer that somebody looks at.
    return np.asarray(array)


def start_copying(leaves: list[Leaf]) -> None:
    """Let all arrays start on their way to the host, so that fetching one by one does not wait for each."""
    for leaf in leaves:
        array = (
            stored_array(leaf.variable) if isinstance(leaf, Held) else leaf.value if isinstance(leaf, Array) else None
        )
        if isinstance(array, jax.Array) and not is_key(array) and array.sharding.is_fully_replicated:
            array.addressable_shards[0].data.copy_to_host_async()


def _array_of(kept: Kept, here: Any) -> Any:
    """A saved array, of the library of the one that is here and where that one is."""
    array = kept.array
    assert array is not None
    if isinstance(here, np.ndarray):
        return np.array(array)
    impl = kept.entry.get("key")
    value = jnp.asarray(array) if impl is None else jax.random.wrap_key_data(jnp.asarray(array), impl=impl)
    if not isinstance(here, jax.Array) or here.shape != value.shape:
        return value
    if here.is_fully_addressable:
        return jax.device_put(value, here.sharding)
    return jax.make_array_from_callback(array.shape, here.sharding, lambda index: array[index])


# ---- random numbers of the host ------------------------------------------------------------------


def generator(value: Any) -> tuple[Callable[[], Any], Callable[[Any], Any]] | None:
    """How to read and set the state of a generator of random numbers; None for anything else."""
    if isinstance(value, random.Random):
        return value.getstate, value.setstate
    if isinstance(value, np.random.RandomState):
        return lambda: value.get_state(legacy=False), value.set_state
    bits = value.bit_generator if isinstance(value, np.random.Generator) else value
    if isinstance(bits, np.random.BitGenerator):
        return lambda: bits.state, lambda new: setattr(bits, "state", new)
    return None
