"""Elements on their way to the replicas: checked, filled up to whole batches, weighted row by row."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Literal, NoReturn, get_args

import jax
import jax.numpy as jnp
import numpy as np

from phalanx.errors import ArgumentError, ArgumentTypeError, UnevenBatchError
from phalanx.function import is_strict

logger = logging.getLogger("phalanx")

Remainder = Literal["auto", "pad", "drop", "error"]
Array = np.ndarray[Any, Any]


def check_remainder(remainder: Any) -> None:
    """Raise unless it is one of the known modes."""
    if remainder not in get_args(Remainder):
        known = ", ".join(map(repr, get_args(Remainder)))
        raise ArgumentError(f"distribute_dataset: remainder must be one of {known}, got {remainder!r}.")


# ---- what all elements have in common ------------------------------------------------------------


def flatten(tree: Any) -> tuple[list[str], list[Any], Any]:
    """Paths of the leaves as messages call them, the leaves, and the structure."""
    found, structure = jax.tree_util.tree_flatten_with_path(tree, is_leaf=lambda x: isinstance(x, Iterator))
    return [jax.tree_util.keystr(path) or "the array" for path, _ in found], [leaf for _, leaf in found], structure


@dataclass
class Arrays:
    """A pytree of host arrays, taken apart."""

    paths: list[str]
    leaves: list[Array]
    structure: Any

    @classmethod
    def of(cls, tree: Any, what: str) -> Arrays:
        """The arrays of `tree`; errors call it `what`."""
        paths, leaves, structure = flatten(tree)
        if not paths:
            raise ArgumentError(f"distribute_dataset: {what} holds no arrays: {tree!r:.60}.")
        arrays = [host_array(leaf, f"{path} of {what}") for path, leaf in zip(paths, leaves)]
        return cls(paths, arrays, structure)

    def tree(self, of_leaf: Callable[[Array], Any] = lambda leaf: leaf) -> Any:
        """Put together again, each array replaced by ``of_leaf(array)``."""
        return jax.tree.unflatten(self.structure, [of_leaf(leaf) for leaf in self.leaves])


def host_array(value: Any, what: str) -> Array:
    """`value` as a NumPy array of numbers."""
    if isinstance(value, jax.Array) and jnp.issubdtype(value.dtype, jax.dtypes.prng_key):
        raise ArgumentTypeError(f"distribute_dataset: {what} holds random keys. Feed jax.random.key_data(keys).")
    try:
        array = np.asarray(value)
    except Exception as error:
        raise ArgumentTypeError(f"distribute_dataset: {what} is no array: {type(value).__name__}.") from error
    check_numeric(array.dtype, what)
    return array


def check_numeric(dtype: Any, what: str) -> None:
    """Raise for strings and objects, which no device can hold."""
    if getattr(dtype, "kind", "O") not in "biufcV":
        raise ArgumentTypeError(
            f"distribute_dataset: {what} is not numeric (dtype {dtype}). Turn it into numbers on the host, with a map"
            " before distribute_dataset; or feed the number of the row instead and look the value up with it."
        )


class Layout:
    """Structure, shapes and dtypes of the first of many pytrees, which the others must have too."""

    def __init__(self, skip_axes: int, of_what: str) -> None:
        self._skip = skip_axes
        """Leading axes that may differ."""
        self._of_what = of_what
        self._structure: Any = None
        self.types: dict[str, tuple[tuple[int, ...], np.dtype[Any]]] = {}
        """Shape and dtype by path, in order."""

    def check(self, arrays: Arrays, what: str) -> None:
        """Raise when `arrays` differ from the first that were checked."""
        found = {path: (leaf.shape[self._skip :], leaf.dtype) for path, leaf in zip(arrays.paths, arrays.leaves)}
        if self._structure is None:
            self._structure, self.types = arrays.structure, found
        if found.keys() != self.types.keys():
            self._refuse(what, sorted(found.keys() ^ self.types.keys())[0], list(self.types), list(found))
        for path, type_ in found.items():
            if type_ != self.types[path]:
                self._refuse(what, path, _shown(self.types[path]), _shown(type_))
        if arrays.structure != self._structure:
            self._refuse(what, "the structure", self._structure, arrays.structure)

    def _refuse(self, what: str, path: str, expected: Any, found: Any) -> NoReturn:
        raise ArgumentError(
            f"distribute_dataset: {what} differs from the first in {path}: expected {expected}, found {found}"
            f" ({self._of_what})."
        )



def _shown(type_: tuple[tuple[int, ...], np.dtype[Any]]) -> str:
    return f"{type_[1]}{list(type_[0])}"


# ---- batches -------------------------------------------------------------------------------------


@dataclass
class Rows:
    """An element whose arrays have the same number of rows."""

    arrays: Arrays
    count: int
    """Of rows that are no padding."""


class Batcher:
    """Turns the elements of one pass into batches with an equal number of rows for each replica.

    `size` is the number of rows of a full batch, where it is known beforehand; else it is that of the
    largest element so far.
    """

    def __init__(self, num_replicas: int, remainder: Remainder, mask: bool, size: int | None) -> None:
        self.num_replicas = num_replicas
        self._remainder = remainder
        self._mask = mask
        self.size = size or 0
        self.layout = Layout(1, "shapes and dtypes of rows")

    def rows_of(self, element: Any, number: int) -> Rows:
        """The element, checked."""
        what = f"element {number}"
        arrays = Arrays.of(element, what)
        for path, leaf in zip(arrays.paths, arrays.leaves):
            if leaf.ndim == 0:
                raise ArgumentError(
                    f"distribute_dataset: {path} of {what} is a single number and has no rows to split. Give"
                    " batch_size to stack such elements into batches, or make arrays whose first axis is the batch."
                )
        check_same_rows(arrays, what)
        self.layout.check(arrays, what)
        rows = Rows(arrays, arrays.leaves[0].shape[0])
        if rows.count == 0:
            raise ArgumentError(f"distribute_dataset: {what} has no rows.")
        return rows

    @property
    def pads(self) -> bool:
        """Whether short batches are filled up."""
        return self._remainder == "pad"

    @property
    def drops(self) -> bool:
        """Whether short batches are left out."""
        return self._remainder == "drop"

    def __call__(self, element: Any, number: int) -> Any | None:
        """The batch for an element, or None when its rows are dropped."""
        rows = self.rows_of(element, number)
        self.size = max(self.size, rows.count)
        short = rows.count < self.size
        if self.pads:
            # Up to the full batch, so that a short one is not traced anew.
            return self.filled(rows, -(-self.size // self.num_replicas) * self.num_replicas)
        if self.drops and short:
            self.dropped(rows.count, number)
            return None
        if rows.count % self.num_replicas or (short and self._remainder == "error"):
            raise uneven(rows.count, self.size, self.num_replicas, f"element {number}")
        return self.filled(rows, rows.count)

    def filled(self, rows: Rows, target: int) -> Any:
        """The element with its last row repeated up to `target`, and with the weights if they are wanted.

        A real row is as harmless as the others; a row of zeros may be NaN to a model, and NaN times 0 is NaN.
        """
        element = rows.arrays.tree(lambda leaf: _filled(leaf, target))
        return with_mask(element, (np.arange(target) < rows.count).astype(np.float32)) if self._mask else element

    def dropped(self, count: int, number: int) -> None:
        """Say that rows are left out."""
        what = f"element {number} has {count} rows of {self.size}, and remainder='drop' leaves them out"
        if is_strict():
            raise UnevenBatchError(f"distribute_dataset: {what}, but px.strict is on.")
        logger.info("dataset: %s", what)


def check_same_rows(arrays: Arrays, what: str) -> None:
    """Raise when arrays differ in the length of axis 0."""
    if len({leaf.shape[0] for leaf in arrays.leaves}) > 1:
        sizes = ", ".join(f"{path}: {leaf.shape[0]}" for path, leaf in zip(arrays.paths, arrays.leaves))
        raise ArgumentError(f"distribute_dataset: the arrays of {what} differ in their number of rows ({sizes}).")


def _filled(rows: Array, size: int) -> Array:
    missing = size - rows.shape[0]
    return np.concatenate([rows, np.repeat(rows[-1:], missing, axis=0)]) if missing else rows


def with_mask(element: Any, weights: Any) -> Any:
    """The element with the row weights at its end."""
    if type(element) is list:
        return [*element, weights]
    return (*element, weights) if isinstance(element, tuple) else (element, weights)


def uneven(rows: int, size: int, n: int, what: str) -> UnevenBatchError:
    """The error for a batch that cannot be split, with the ways out."""
    why = f"does not divide by {n} replicas" if rows % n else f"is smaller than the others ({size})"
    drop = " remainder='drop'," if rows < size else ""
    return UnevenBatchError(
        f"distribute_dataset: {what} has {rows} rows, which {why}. Choose remainder='pad' (with mask=True for exact"
        f" means),{drop} or another batch_size."
    )
