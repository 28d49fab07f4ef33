"""Sources: where elements come from.

A source gives host elements (pytrees of arrays with the same number of rows), from any position on. What
users give is turned into one by `as_source`; what the libraries' datasets need is in `libraries`.
"""

from __future__ import annotations

import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from itertools import count, islice
from typing import Any

import jax
import numpy as np

from phalanx.data import libraries
from phalanx.data.host import Arrays, Layout, as_rows, check_numeric, check_same_rows, flatten, is_array
from phalanx.errors import ArgumentError, ArgumentTypeError

Element = Any

_OF_ROWS = "shapes and dtypes of single rows; columns would be a tuple of arrays, (np.array(x), np.array(y))"
Positioned = tuple[Element, Any]
"""An element, and the source's own state after it (None where counting elements is enough)."""


class Source(ABC):
    """Elements in order, one pass after another."""

    kind: str
    """Sources of one kind take each other's positions."""
    reiterable = True
    length: int | None = None
    """Elements in one pass, where it is known."""
    rows: int | None = None
    """Rows in one pass, where it is known."""
    seed: int | None = None
    """Of the order of rows in each pass; None without shuffling."""

    @abstractmethod
    def elements(self, epoch: int, start: int, state: Any) -> Iterator[Positioned]:
        """The elements of a pass from the `start`-th on; `state` is the source's own, if it has one."""


class RowSource(Source):
    """Rows that can be read by index, some of them at a time."""

    kind = "rows"

    def __init__(self, count: int, read: Callable[[Any], Element], batch_size: int, seed: int | None) -> None:
        self._count = count
        self._read = read
        """Given a slice or an array of ascending indices."""
        self._size = batch_size
        self.seed = seed
        self.rows = count
        self.length = -(-count // batch_size)

    def elements(self, epoch: int, start: int, state: Any) -> Iterator[Positioned]:
        order = None if self.seed is None else np.random.default_rng([self.seed, epoch]).permutation(self._count)
        for first in range(start * self._size, self._count, self._size):
            last = min(first + self._size, self._count)
            yield self._read(slice(first, last)) if order is None else self._in_order(order[first:last]), None

    def _in_order(self, index: np.ndarray[Any, Any]) -> Element:
        # Files are read in their own order (HDF5 allows no other), then put into the drawn one.
        ascending = np.sort(index)
        place = np.searchsorted(ascending, index)
        return jax.tree.map(lambda rows: rows[place], self._read(ascending))


class IterableSource(Source):
    """Anything that can be iterated; each item is an element."""

    kind = "items"

    def __init__(self, make: Callable[[], Iterable[Element]], length: int | None, reiterable: bool) -> None:
        self._make = make
        self.length = length
        self.reiterable = reiterable

    def elements(self, epoch: int, start: int, state: Any) -> Iterator[Positioned]:
        for item in islice(iter(self._make()), start, None):
            yield item, None


class FunctionSource(Source):
    """A function that gives a new source for each pass, and may ask for its number."""

    kind = "function"

    def __init__(self, make: Callable[..., Any], batch_size: int | None, seed: int | None) -> None:
        self._make = make
        self._takes_epoch = _takes_epoch(make)
        self._batch_size = batch_size
        self.seed = seed

    def elements(self, epoch: int, start: int, state: Any) -> Iterator[Positioned]:
        made = as_source(self._make(epoch) if self._takes_epoch else self._make(), self._batch_size, self.seed)
        if isinstance(made, FunctionSource):
            raise ArgumentTypeError(
                f"distribute_dataset: the function {self._make!r:.60} gave a function, {made._make!r:.60}, and no data."
            )
        yield from made.elements(epoch, start, state)


class IndexedSource(Source):
    """Items by index (keras.utils.PyDataset, which is told when a pass begins and ends; a torch Dataset)."""

    kind = "items"

    def __init__(self, items: Any, length: int | None) -> None:
        self._items = items
        self.length = length

    def elements(self, epoch: int, start: int, state: Any) -> Iterator[Positioned]:
        self._tell("on_epoch_begin")
        try:
            for index in count(start) if self.length is None else range(start, self.length):
                yield self._items[index], None
        finally:
            self._tell("on_epoch_end")

    def _tell(self, method: str) -> None:
        getattr(self._items, method, lambda: None)()


class CheckpointedSource(Source):
    """What makes iterators that tell and take their own state (grain)."""

    kind = "grain"

    def __init__(self, dataset: Iterable[Element], length: int | None) -> None:
        self._dataset = dataset
        self.length = length

    def elements(self, epoch: int, start: int, state: Any) -> Iterator[Positioned]:
        iterator: Any = iter(self._dataset)
        if state is not None:
            iterator.set_state(state)
        else:
            next(islice(iterator, start, start), None)
        for item in iterator:
            yield item, iterator.get_state()


class StackedSource(Source):
    """Every so many items of another source, which are rows, as one element."""

    def __init__(self, items: Source, count: int) -> None:
        self._items = items
        self._count = count
        self.kind = items.kind
        self.reiterable = items.reiterable
        self.rows = items.length
        self.length = None if items.length is None else -(-items.length // count)

    def elements(self, epoch: int, start: int, state: Any) -> Iterator[Positioned]:
        first = start * self._count
        items = enumerate(self._items.elements(epoch, first if state is None else 0, state), first)
        layout = Layout(0, _OF_ROWS)
        while True:
            rows: list[Arrays] = []
            after: Any = None
            for number, (item, state_after) in islice(items, self._count):
                after = state_after
                arrays = Arrays.of(item, f"row {number}")
                layout.check(arrays, f"row {number}")
                rows.append(arrays.copied())  # the source may use its memory for the next one
            if not rows:
                return
            columns = zip(*[arrays.leaves for arrays in rows])
            yield jax.tree.unflatten(rows[0].structure, [np.stack(column) for column in columns]), after


# ---- what users give -----------------------------------------------------------------------------


def as_source(given: Any, batch_size: int | None, seed: int | None, per_replica: bool = False) -> Source:
    """The source behind whatever the user gave.

    `seed` is None without shuffling, which needs rows that can be read by index. With `per_replica` the source
    gives batches of one replica.
    """
    batches = isinstance(given, list) and batch_size is None
    table = None if batches else libraries.table(given) or _arrays(given)
    if table is not None:
        if per_replica:
            raise ArgumentError(
                "distribute_datasets_from_function: the function returned arrays. It returns an iterable of batches,"
                " each for one replica."
            )
        if batch_size is None:
            raise ArgumentError(
                "distribute_dataset: arrays need batch_size, the rows per batch over all replicas:"
                " strategy.distribute_dataset(arrays, batch_size=...)."
            )
        return RowSource(*table, batch_size, seed)
    if callable(given) and (isinstance(given, type) or not hasattr(given, "__iter__")):
        return FunctionSource(given, batch_size, seed)
    if seed is not None:
        raise ArgumentError(
            "distribute_dataset: shuffle=True needs rows that can be read by index (arrays, HDF5, Hugging Face"
            " datasets). Shuffle in the source instead: a DataLoader, grain and tf.data can."
        )
    source = _library_source(given) or _iterable_source(given)
    if batch_size is None:
        return source
    if libraries.gives_batches(given):
        raise ArgumentError(
            f"distribute_dataset: {type(given).__name__} gives batches, and batch_size={batch_size} would stack them as"
            " if they were rows. Leave batch_size out (each of its batches is then one for all replicas), or let it"
            " give single rows: DataLoader(..., batch_size=None), a dataset without .batch()."
        )
    return StackedSource(source, batch_size)


def _takes_epoch(make: Callable[..., Any]) -> bool:
    """Whether the function has a parameter that must be given: the number of the pass."""
    try:
        parameters = inspect.signature(make).parameters.values()
    except (TypeError, ValueError):  # some of C's have no signature
        return False
    by_place = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    needed = [p.name for p in parameters if p.kind in by_place and p.default is p.empty]
    if len(needed) > 1:
        raise ArgumentTypeError(
            f"distribute_dataset: the function {make!r:.60} needs {', '.join(needed)}. A source function is called with"
            " the number of the epoch, or with nothing."
        )
    return bool(needed)


def _arrays(given: Any) -> tuple[int, Callable[[Any], Any]] | None:
    """The number of rows of a pytree of arrays, and how to read some of them; None for anything else."""
    if isinstance(given, list):
        leaves = flatten(given[0], "source[0]")[1] if given else []
        if leaves and all(is_array(leaf) and len(leaf.shape) for leaf in leaves):
            raise ArgumentError(
                "distribute_dataset: a list of arrays with batch_size may be columns or rows. Columns are a tuple:"
                " tuple(x). Rows are one array, np.stack(x), or an iterable: lambda: iter(x)."
            )
        return None  # rows, perhaps very many of them
    paths, arrays, structure = flatten(given, "source")
    if not arrays:
        raise ArgumentError(f"distribute_dataset: there is no array in the source {given!r:.60}.")
    others = [(path, leaf) for path, leaf in zip(paths, arrays) if not is_array(leaf)]
    if others and (isinstance(given, (dict, tuple)) or len(others) < len(arrays)):
        path, leaf = others[0]
        raise ArgumentTypeError(
            f"distribute_dataset takes arrays or pytrees of arrays, and {path} is a {type(leaf).__name__},"
            f" {leaf!r:.60}. Make lists arrays with np.asarray."
        )
    if others:
        return None
    leaves = [as_rows(array, path) for path, array in zip(paths, arrays)]
    for path, leaf in zip(paths, leaves):
        check_numeric(leaf.dtype, path)
        if len(leaf.shape) == 0:
            raise ArgumentError(f"distribute_dataset: {path} is 0-d and has no rows.")
    check_same_rows(Arrays(paths, leaves, structure), "the source")

    def read(index: Any) -> Any:
        return jax.tree.unflatten(structure, [np.asarray(leaf[index]) for leaf in leaves])

    return int(leaves[0].shape[0]), read


def _library_source(given: Any) -> Source | None:
    """The source behind a library's dataset, or None for anything else."""
    kind = libraries.kind(given)
    if kind == "grain":
        return CheckpointedSource(given, libraries.length_of(given))
    if kind == "keras":
        return IndexedSource(given, None if given.num_batches is None else int(given.num_batches))
    if kind == "torch" and not hasattr(given, "__iter__") and hasattr(given, "__len__"):
        return IndexedSource(given, libraries.length_of(given))
    if kind is not None:
        iterate, length = libraries.batches(kind, given)
        return IterableSource(iterate, length, reiterable=True)
    return None


def _iterable_source(given: Any) -> Source:
    if isinstance(given, (str, bytes)) or not hasattr(given, "__iter__"):
        raise ArgumentTypeError(
            "distribute_dataset takes arrays, pytrees of arrays, an iterable, a function that returns one, or a dataset"
            f" of PyTorch, grain, tf.data, Hugging Face or Keras; got {type(given).__name__} {given!r:.60}."
        )
    once = iter(given) is given
    return IterableSource(lambda: given, None if once else libraries.length_of(given), not once)
