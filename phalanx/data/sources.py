"""Sources: where elements come from, whatever library holds them.

A source gives host elements (pytrees of arrays with the same number of rows), from any position on.
Libraries are recognised by the module of the object's type and never imported for it.
"""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from typing import Any

import jax
import numpy as np

from phalanx.errors import ArgumentError, ArgumentTypeError

Element = Any
Positioned = tuple[Element, Any]
"""An element, and the source's own state after it (None where counting elements is enough)."""


class Source(ABC):
    """Elements in order, one pass after another."""

    reiterable = True
    length: int | None = None
    """Elements in one pass, where it is known."""

    @abstractmethod
    def elements(self, epoch: int, start: int, state: Any) -> Iterator[Positioned]:
        """The elements of a pass from the `start`-th on; `state` is the source's own, if it has one."""


class RowSource(Source):
    """Rows that can be read by index: arrays, memory maps, HDF5, Hugging Face datasets."""

    def __init__(self, leaves: list[Any], structure: Any, batch_size: int, seed: int | None) -> None:
        rows = {int(leaf.shape[0]) for leaf in leaves}
        if len(rows) != 1:
            raise ArgumentError(f"distribute_dataset: the arrays must have the same number of rows, got {sorted(rows)}.")
        (self.rows,) = rows
        self._leaves = leaves
        self._structure = structure
        self._batch_size = batch_size
        self.seed = seed
        self.length = -(-self.rows // batch_size)

    def elements(self, epoch: int, start: int, state: Any) -> Iterator[Positioned]:
        order = None if self.seed is None else np.random.default_rng([self.seed, epoch]).permutation(self.rows)
        for first in range(start * self._batch_size, self.rows, self._batch_size):
            last = min(first + self._batch_size, self.rows)
            index: Any = slice(first, last) if order is None else order[first:last]
            yield jax.tree.unflatten(self._structure, [_take(leaf, index) for leaf in self._leaves]), None


def _take(rows: Any, index: Any) -> np.ndarray[Any, Any]:
    if isinstance(index, slice):
        return np.asarray(rows[index])
    # Files are read in their own order (HDF5 allows no other), then put into the drawn one.
    ascending = np.sort(index)
    return np.asarray(rows[ascending])[np.searchsorted(ascending, index)]


class IterableSource(Source):
    """Anything that can be iterated; each item is an element."""

    def __init__(self, make: Callable[[], Iterable[Any]], length: int | None, reiterable: bool) -> None:
        self._make = make
        self.length = length
        self.reiterable = reiterable

    def elements(self, epoch: int, start: int, state: Any) -> Iterator[Positioned]:
        for item in islice(iter(self._make()), start, None):
            yield item, None


class IndexedBatchSource(Source):
    """keras.utils.PyDataset: batches by index, told when a pass ends."""

    def __init__(self, dataset: Any) -> None:
        self._dataset = dataset
        self.length = int(dataset.num_batches) if dataset.num_batches is not None else None

    def elements(self, epoch: int, start: int, state: Any) -> Iterator[Positioned]:
        self._dataset.on_epoch_begin()
        index = start
        while self.length is None or index < self.length:
            yield self._dataset[index], None
            index += 1
        self._dataset.on_epoch_end()


class CheckpointedSource(Source):
    """grain: its iterators tell and take their own state."""

    def __init__(self, dataset: Any, length: int | None) -> None:
        self._dataset = dataset
        self.length = length

    def elements(self, epoch: int, start: int, state: Any) -> Iterator[Positioned]:
        iterator = iter(self._dataset)
        if state is not None:
            iterator.set_state(state)
        else:
            for _ in islice(iterator, start):
                pass
        for item in iterator:
            yield item, copy.deepcopy(iterator.get_state())


class StackedSource(Source):
    """Rows one by one, stacked into batches."""

    def __init__(self, rows: Source, batch_size: int) -> None:
        self._rows = rows
        self._batch_size = batch_size
        self.reiterable = rows.reiterable
        self.length = None if rows.length is None else -(-rows.length // batch_size)

    def elements(self, epoch: int, start: int, state: Any) -> Iterator[Positioned]:
        rows = self._rows.elements(epoch, 0 if state is not None else start * self._batch_size, state)
        while batch := list(islice(rows, self._batch_size)):
            yield _stack([row for row, _ in batch]), batch[-1][1]


class GroupedSource(Source):
    """Batches of single replicas, side by side: one step takes one for each replica of this process."""

    def __init__(self, batches: Source, group: int) -> None:
        self._batches = batches
        self._group = group
        self.reiterable = batches.reiterable
        self.length = None if batches.length is None else -(-batches.length // group)

    def elements(self, epoch: int, start: int, state: Any) -> Iterator[Positioned]:
        batches = self._batches.elements(epoch, 0 if state is not None else start * self._group, state)
        while group := list(islice(batches, self._group)):
            yield _joined([batch for batch, _ in group]), group[-1][1]


def _joined(batches: list[Any]) -> Any:
    try:
        return jax.tree.map(lambda *leaves: np.concatenate([np.asarray(leaf) for leaf in leaves]), *batches)
    except ValueError as error:
        reason = str(error).partition("\n")[0]
        raise ArgumentError(
            f"distribute_datasets_from_function: the replicas' batches do not fit together: {reason}"
        ) from error


def _stack(rows: list[Any]) -> Any:
    try:
        return jax.tree.map(lambda *leaves: np.stack([np.asarray(leaf) for leaf in leaves]), *rows)
    except ValueError as error:
        reason = str(error).partition("\n")[0]
        raise ArgumentError(f"distribute_dataset: the rows of a batch do not fit together: {reason}") from error


# ---- recognising what was given ------------------------------------------------------------------


def as_source(given: Any, batch_size: int | None, seed: int | None) -> Source:
    """The source behind whatever the user gave.

    `seed` is None without shuffling, which needs rows that can be read by index.
    """
    rows = _rows_by_index(given)
    if rows is not None:
        if batch_size is None:
            raise ArgumentError("distribute_dataset: arrays need batch_size, the number of rows per batch over all replicas.")
        leaves, structure = rows
        return RowSource(leaves, structure, batch_size, seed)
    if seed is not None:
        raise ArgumentError(
            "distribute_dataset: shuffle=True needs rows that can be read by index (arrays, HDF5, Hugging Face datasets)."
            " Shuffle in the source instead: a DataLoader, grain and tf.data can."
        )
    source = _library_source(given) or _iterable_source(given)
    return source if batch_size is None else StackedSource(source, batch_size)


def _rows_by_index(given: Any) -> tuple[list[Any], Any] | None:
    if _library(given) == "datasets" and hasattr(given, "with_format") and hasattr(given, "num_rows"):
        columns = {name: _Column(given, name) for name in given.column_names}
        return jax.tree.flatten(columns)
    leaves, structure = jax.tree.flatten(given)
    if not leaves or not all(_is_rows(leaf) for leaf in leaves):
        return None
    for leaf in leaves:
        if len(leaf.shape) == 0:
            raise ArgumentError("distribute_dataset: a 0-d array has no rows.")
        if leaf.dtype.kind not in "biufcV":
            raise ArgumentTypeError(
                f"distribute_dataset: arrays must be numeric, got dtype {leaf.dtype}. Look up strings and objects on the"
                " host first."
            )
    return [np.asarray(leaf) if isinstance(leaf, jax.Array) else leaf for leaf in leaves], structure


def _is_rows(leaf: Any) -> bool:
    return isinstance(leaf, (np.ndarray, jax.Array)) or _library(leaf) == "h5py"


class _Column:
    """One column of a Hugging Face dataset, read by rows."""

    def __init__(self, dataset: Any, name: str) -> None:
        self._rows = dataset.with_format("numpy")
        self._name = name
        example = np.asarray(self._rows[:1][name])
        if example.dtype.kind not in "biufc":
            raise ArgumentTypeError(
                f"distribute_dataset: column {name!r} is not numeric (dtype {example.dtype}). Look it up on the host before:"
                " dataset.map(...), or drop it with remove_columns."
            )
        self.shape = (dataset.num_rows, *example.shape[1:])
        self.dtype = example.dtype

    def __getitem__(self, index: Any) -> np.ndarray[Any, Any]:
        return np.asarray(self._rows[index][self._name])


def _library(value: Any) -> str:
    return type(value).__module__.partition(".")[0]


def _library_source(given: Any) -> Source | None:
    library = _library(given)
    names = {base.__module__.partition(".")[0]: base for base in type(given).__mro__[:-1]}
    if library == "grain" or "grain" in names:
        return CheckpointedSource(given, _length(given))
    if library == "tensorflow" and hasattr(given, "as_numpy_iterator"):
        count = int(given.cardinality())
        return IterableSource(given.as_numpy_iterator, count if count >= 0 else None, True)
    if ("keras" in names) and hasattr(given, "num_batches"):
        return IndexedBatchSource(given)
    if "torch" in names:
        return IterableSource(lambda: map(_from_torch, given), _length(given), True)
    return None


def _from_torch(item: Any) -> Any:
    return jax.tree.map(lambda leaf: leaf.detach().cpu().numpy() if hasattr(leaf, "detach") else leaf, item)


def _iterable_source(given: Any) -> Source:
    if callable(given) and not hasattr(given, "__iter__"):
        return IterableSource(given, None, True)
    if isinstance(given, (str, bytes, dict)) or not hasattr(given, "__iter__"):
        raise ArgumentTypeError(
            "distribute_dataset takes arrays, pytrees of arrays, an iterable, a function that returns one, or a dataset of"
            f" PyTorch, grain, tf.data, Hugging Face or Keras; got {type(given).__name__} {given!r:.60}."
        )
    one_shot = iter(given) is given
    return IterableSource(lambda: given, None if one_shot else _length(given), not one_shot)


def _length(given: Any) -> int | None:
    try:
        return len(given)
    except (TypeError, NotImplementedError):
        return None
