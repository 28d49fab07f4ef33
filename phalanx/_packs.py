"""Small variables that one program updates, kept between its calls as parts of a few larger arrays.

A call costs some microseconds for each array that goes in or comes out, on each device: with hundreds of small
variables that is more than the step itself. The variables stay the truth: a pack knows what it left in each of
its members, and joins their values anew when it finds anything else there.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass
from math import prod
from operator import attrgetter, is_
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np

from phalanx import _jax
from phalanx._turns import lock, set_all

if TYPE_CHECKING:
    from phalanx.variables import Variable

_LARGEST = {"cpu": 1 << 14}
"""Bytes of a variable that shares an array with others, by platform (others: never).

Measured on two CPU cores with jax 0.10.2, 2 replicas, 100 layers with Adam, single variables and packs in turn: 3.9
and 2.3 ms a step for layers of 32, 7.5 and 4.2 ms for 64; 14 to 28 and 15 to 24 ms for 128, whose matrices are larger
than this. Elsewhere the host runs ahead of the devices, and nothing is measured.
"""

_FEWEST = 16
"""Variables of one kind that are worth it."""

_MOST = 8
"""Variables in one pack. Of more pieces XLA's CPU compiler copies a concatenation, where of fewer it computes each
element anew: 12 compiled 1.3 to 1.6 times slower than 8, and made no faster steps; 8 compile faster than single ones.
"""

_stored = attrgetter("_stored")


@dataclass(frozen=True)
class Layout:
    """How arrays of one dtype lie in one: each flattened but for the axis of components, if they have one."""

    shapes: tuple[tuple[int, ...], ...]
    axis: int
    """The axis along which they are joined: 1 behind an axis of components, else 0."""

    @property
    def size(self) -> int:
        """Elements of all."""
        return sum(map(prod, self.shapes))

    def join(self, arrays: Sequence[Any]) -> Any:
        """One array of all of them."""
        return jnp.concatenate([x.reshape(*x.shape[: self.axis], -1) for x in arrays], self.axis)

    def split(self, joined: Any) -> list[Any]:
        """The arrays."""
        parts = jax.lax.split(joined, [prod(shape[self.axis :]) for shape in self.shapes], self.axis)
        return [part.reshape(shape) for part, shape in zip(parts, self.shapes)]


@functools.lru_cache(maxsize=256)
def _joining(layout: Layout, sharding: Any) -> Callable[..., Any]:
    return jax.jit(layout.join, out_shardings=sharding)


@functools.lru_cache(maxsize=256)
def _splitting(layout: Layout, sharding: Any) -> Callable[..., Any]:
    return jax.jit(layout.split, out_shardings=sharding)


class Piece:
    """Stands in a variable for its value, which is part of a pack."""

    def __init__(self, pack: Pack, index: int, stored: Any) -> None:
        self.pack = pack
        self.index = index
        self.shape: tuple[int, ...] = stored.shape
        self.dtype = stored.dtype


class Pack:
    """Variables whose values lie in one array while the programs that share it run."""

    def __init__(self, members: Sequence[Variable]) -> None:
        self.members = tuple(members)
        self.layout = Layout(tuple(v._stored.shape for v in members), int(members[0].per_replica))
        self.sharding = sharding_of(members[0])
        self._pieces = [Piece(self, i, v._stored) for i, v in enumerate(members)]
        self._left: Sequence[Any] = [None] * len(members)
        """What it left in each member: all pieces, or the arrays that were asked for in the meantime."""
        self._array: Any = None
        set_all(members, "_piece", self._pieces)

    def take(self) -> Any:
        """The members' present values in one array, which nobody else holds."""
        if not all(map(is_, map(_stored, self.members), self._left)):
            found = stored_arrays(self.members)
            with _jax.outside_traces():
                self._array = _joining(self.layout, self.sharding)(found)
            self._left = found
        return self._array

    def give(self, array: Any) -> None:
        """Take the members' new values; to be called again if it is interrupted."""
        self._array = array
        if self._left is not self._pieces:
            set_all(self.members, "_stored", self._pieces)
            self._left = self._pieces

    def spread(self) -> None:
        """Give the members whose values are only here arrays of their own; the pack stays as it is."""
        with lock:
            with _jax.outside_traces(), _jax.compiling():
                parts = _splitting(self.layout, self.sharding)(self._array)
            waiting = [v._stored is piece for v, piece in zip(self.members, self._pieces)]
            set_all(_chosen(self.members, waiting), "_stored", _chosen(parts, waiting))
            self._left = parts


def _chosen(items: Iterable[Any], which: Iterable[bool]) -> list[Any]:
    return [x for x, chosen in zip(items, which) if chosen]


def stored_array(variable: Variable) -> Any:
    """What the variable holds: an array of its own, also where it was part of a pack."""
    if type(variable._stored) is Piece:
        variable._stored.pack.spread()
    return variable._stored


def stored_arrays(variables: Sequence[Variable]) -> list[Any]:
    """As `stored_array`, of several."""
    found = list(map(_stored, variables))
    return list(map(stored_array, variables)) if Piece in map(type, found) else found


# ---- in one program ------------------------------------------------------------------------------


class Packs:
    """The packs that a program takes instead of single variables: first those that it updates."""

    def __init__(self, read: Sequence[Variable] = (), written: Sequence[Variable] = ()) -> None:
        _form(written)
        pieces = {v: piece for v in (*written, *read) if (piece := _piece_of(v)) is not None}
        self.all = list(dict.fromkeys(piece.pack for piece in pieces.values()))
        self.n_updated = len({pieces[v].pack for v in written if v in pieces})
        number = {pack: n for n, pack in enumerate(self.all)}
        self.places = {v: (number[piece.pack], piece.index) for v, piece in pieces.items()}
        """Number of the pack that a variable is in, and index there."""

    @property
    def updated(self) -> list[Pack]:
        """Those that the program gives back."""
        return self.all[: self.n_updated]

    @property
    def read(self) -> list[Pack]:
        """Those that stay as they are."""
        return self.all[self.n_updated :]


def _form(variables: Sequence[Variable]) -> None:
    """Pack those that are in no pack and small, if there are enough of one kind."""
    kinds: dict[Hashable, list[Variable]] = {}
    for variable in variables:
        stored = variable._stored
        if _piece_of(variable) is None and isinstance(stored, jax.Array) and _is_small(variable, stored):
            kind = stored.dtype, stored.sharding, stored.committed, variable.strategy, variable.per_replica
            kinds.setdefault(kind, []).append(variable)
    for members in kinds.values():
        n = -(-len(members) // _MOST)
        if len(members) >= _FEWEST:
            for i in range(n):
                Pack(members[i * len(members) // n : (i + 1) * len(members) // n])


def _is_small(variable: Variable, stored: jax.Array) -> bool:
    # Scalars are what loops look at after each step, which would take the whole pack apart.
    if not isinstance(stored.dtype, np.dtype):  # random keys
        return False
    platform = next(iter(stored.sharding.device_set)).platform
    return 1 < prod(variable.shape) <= _LARGEST.get(platform, 0) // stored.dtype.itemsize


def _piece_of(variable: Variable) -> Piece | None:
    piece: Piece | None = variable._piece
    if piece is None or piece.pack.sharding != sharding_of(variable):  # it has moved since
        return None
    return piece


def sharding_of(variable: Variable) -> Any:
    """Where a strategy keeps a variable; None for one that is on whatever device it was made."""
    return None if variable.strategy is None else variable.strategy.sharding(per_replica=variable.per_replica)


NO_PACKS = Packs()
