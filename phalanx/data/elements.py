"""Elements on their way to the replicas: checked, cut to whole batches, weighted row by row."""

from __future__ import annotations

from typing import Any, Literal, get_args

import jax
import numpy as np

from phalanx.errors import ArgumentError, ArgumentTypeError, UnevenBatchError

Remainder = Literal["auto", "pad", "drop", "error"]


def check_remainder(remainder: Any) -> None:
    """Raise unless it is one of the known modes."""
    if remainder not in get_args(Remainder):
        known = ", ".join(map(repr, get_args(Remainder)))
        raise ArgumentError(f"distribute_dataset: remainder must be one of {known}, got {remainder!r}.")


class Batcher:
    """Turns the elements of one pass into batches with an equal number of rows for each replica.

    `size` is the number of rows of a full batch, where it is known beforehand; else that of the first
    element.
    """

    def __init__(self, num_replicas: int, remainder: Remainder, mask: bool, size: int | None) -> None:
        self._n = num_replicas
        self._remainder = remainder
        self._mask = mask
        self._size = size
        self._spec: tuple[Any, list[Any]] | None = None

    def __call__(self, element: Any, number: int) -> Any | None:
        """The batch for an element, or None when its rows are dropped."""
        leaves, structure = self._checked(element, number)
        rows = leaves[0].shape[0]
        size = self._size = self._size or rows
        target = self._target(rows, size, number)
        return None if target is None else self._filled(leaves, structure, rows, target)

    def rows_of(self, element: Any, number: int) -> int:
        """Rows of an element."""
        return int(self._checked(element, number)[0][0].shape[0])

    def padding(self) -> Any:
        """A batch of padding alone, for a process that has no rows left."""
        assert self._spec is not None and self._size is not None
        structure, spec = self._spec
        leaves = [np.zeros((0, *shape), dtype) for shape, dtype in spec]
        return self._filled(leaves, structure, 0, -(-self._size // self._n) * self._n)

    @property
    def pads(self) -> bool:
        """Whether short batches are filled up."""
        return self._remainder == "pad"

    @property
    def drops(self) -> bool:
        """Whether short batches are left out."""
        return self._remainder == "drop"

    def _filled(self, leaves: list[Any], structure: Any, rows: int, target: int) -> Any:
        if self._mask:
            weights = (np.arange(target) < rows).astype(np.float32)
            return with_mask(jax.tree.unflatten(structure, [pad(leaf, target) for leaf in leaves]), weights)
        return jax.tree.unflatten(structure, [pad(leaf, target) for leaf in leaves])

    def _target(self, rows: int, size: int, number: int) -> int | None:
        """Rows that the batch must have."""
        short = rows < size
        if self._remainder == "pad":
            # Padded to the full batch, so that a short one is not traced anew.
            return -(-max(rows, size) // self._n) * self._n
        if self._remainder == "drop" and short:
            return None
        if rows % self._n or (self._remainder == "error" and short):
            raise uneven(rows, size, self._n, f"element {number}")
        return rows

    def _checked(self, element: Any, number: int) -> tuple[list[Any], Any]:
        paths, structure = jax.tree_util.tree_flatten_with_path(element)
        if not paths:
            raise ArgumentError(f"distribute_dataset: element {number} holds no arrays: {element!r:.60}.")
        leaves = [_numeric(leaf, path, number) for path, leaf in paths]
        rows = {leaf.shape[0] for leaf in leaves}
        if len(rows) > 1:
            sizes = ", ".join(f"{label(path)}: {leaf.shape[0]}" for (path, _), leaf in zip(paths, leaves))
            raise ArgumentError(f"distribute_dataset: the arrays of element {number} differ in their number of rows ({sizes}).")
        spec = [(leaf.shape[1:], leaf.dtype) for leaf in leaves]
        if self._spec is None:
            self._spec = structure, spec
        elif structure != self._spec[0]:
            raise ArgumentError(
                f"distribute_dataset: element {number} has another structure than the first: expected {self._spec[0]}, found"
                f" {structure}."
            )
        for (path, _), expected, found in zip(paths, self._spec[1], spec):
            if expected != found:
                raise ArgumentError(
                    f"distribute_dataset: element {number} changes {label(path)}: expected rows of shape {expected[0]} and"
                    f" dtype {expected[1]}, found {found[0]} and {found[1]}."
                )
        return leaves, structure


def label(path: Any) -> str:
    """How messages call a leaf: "['x'][0]", or "the array" when there is just one."""
    return jax.tree_util.keystr(path) or "the array"


def _numeric(leaf: Any, path: Any, number: int) -> np.ndarray[Any, Any]:
    if isinstance(leaf, (bool, int, float, complex)):
        raise ArgumentTypeError(
            f"distribute_dataset: {label(path)} of element {number} is a single number and has no rows to split. Give"
            " batch_size to stack rows into batches, or arrays whose first axis is the batch."
        )
    try:
        array = np.asarray(leaf)
    except Exception as error:
        raise ArgumentTypeError(
            f"distribute_dataset: {label(path)} of element {number} is no array: {type(leaf).__name__}."
        ) from error
    if array.dtype.kind not in "biufcV":
        raise ArgumentTypeError(
            f"distribute_dataset: {label(path)} of element {number} is not numeric (dtype {array.dtype}). Look up strings and"
            " objects on the host, with a map before distribute_dataset, or take them out of the element."
        )
    if array.ndim == 0:
        raise ArgumentError(f"distribute_dataset: {label(path)} of element {number} is 0-d and has no rows. Give batch_size.")
    return array


def pad(rows: np.ndarray[Any, Any], size: int) -> np.ndarray[Any, Any]:
    """`rows` with zeros up to `size`."""
    missing = size - rows.shape[0]
    return np.concatenate([rows, np.zeros((missing, *rows.shape[1:]), rows.dtype)]) if missing else rows


def with_mask(element: Any, weights: Any) -> Any:
    """The element with the row weights at its end."""
    return (*element, weights) if isinstance(element, tuple) else (element, weights)


def uneven(rows: int, size: int, n: int, what: str) -> UnevenBatchError:
    """The error for a batch that cannot be split, with the ways out."""
    why = f"does not divide by {n} replicas" if rows % n else f"is smaller than the others ({size})"
    return UnevenBatchError(
        f"distribute_dataset: {what} has {rows} rows, which {why}. Choose remainder='pad' (with mask=True for exact means),"
        " remainder='drop', or another batch_size."
    )
