"""Elements on their way to the replicas: checked, filled up to whole batches, weighted row by row."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from phalanx.data.host import Array, Arrays, Layout, check_same_rows
from phalanx.errors import ArgumentError, UnevenBatchError
from phalanx.function import is_strict

logger = logging.getLogger("phalanx")

Remainder = Literal["auto", "pad", "drop", "error"]


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

    def batches(self, elements: Iterator[tuple[Any, Any]], start: int) -> Iterator[tuple[Any | None, Any]]:
        """The batches for elements, each with the source's state after it."""
        for number, (element, after) in enumerate(elements, start):
            yield self.batch(self.rows_of(element, number), number), after

    def batch(self, rows: Rows, number: int) -> Any | None:
        """The batch for an element, or None when its rows are dropped."""
        self.size = max(self.size, rows.count)
        short = rows.count < self.size
        if self.pads:
            # Up to the full batch, so that a short one is not traced anew.
            return self.filled(rows, -(-self.size // self.num_replicas) * self.num_replicas)
        if self.drops and short:
            self.dropped(rows.count, number)
            return None
        if rows.count % self.num_replicas or (short and self._remainder == "error"):
            raise uneven(f"element {number} has", rows.count, self.size, self.num_replicas)
        return self.filled(rows, rows.count)

    def filled(self, rows: Rows, target: int) -> Any:
        """The element with its last row repeated up to `target`, and with the weights if they are wanted.

        A real row is as harmless as the others; a row of zeros may be NaN to a model, and NaN times 0 is NaN.
        """
        element = rows.arrays.tree(lambda leaf: _filled(leaf, target))
        return with_mask(element, (np.arange(target) < rows.count).astype(np.float32)) if self._mask else element

    def dropped(self, count: int, number: int) -> None:
        """Say that rows are left out."""
        if is_strict():
            raise dropped(f"{count} rows (element {number}, {self.size} expected)")
        logger.info("dataset: element %d has %d rows of %d and is dropped", number, count, self.size)


def _filled(rows: Array, size: int) -> Array:
    missing = size - rows.shape[0]
    return np.concatenate([rows, np.repeat(rows[-1:], missing, axis=0)]) if missing else rows


def with_mask(element: Any, weights: Any) -> Any:
    """The element with the row weights at its end."""
    if type(element) is list:
        return [*element, weights]
    return (*element, weights) if isinstance(element, tuple) else (element, weights)


def uneven(what: str, rows: int, size: int, n: int) -> UnevenBatchError:
    """The error for a batch that cannot be split, with the ways out."""
    why = f"does not divide by {n}" if rows % n else f"is smaller than the others ({size})"
    drop = " remainder='drop'," if rows < size else ""
    return UnevenBatchError(
        f"distribute_dataset: {what} {rows} rows, which {why}. Choose remainder='pad' (with mask=True for exact means),"
        f"{drop} or another batch_size."
    )


def dropped(what: str) -> UnevenBatchError:
    """The error for rows that would be left out although `px.strict` is on."""
    return UnevenBatchError(
        f"distribute_dataset: remainder='drop' leaves out {what}, and px.strict is on. Use remainder='pad' (with"
        " mask=True for exact means), or a batch_size that divides the rows."
    )
