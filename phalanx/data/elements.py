"""Elements on their way to the replicas: checked, filled up to whole batches, weighted row by row."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Any, Literal

import jax
import numpy as np

from phalanx.data.host import Array, Arrays, Layout, check_fits, check_same_rows
from phalanx.errors import ArgumentError, UnevenBatchError
from phalanx.function import is_strict

logger = logging.getLogger("phalanx")

Remainder = Literal["auto", "pad", "drop", "error"]


@dataclass
class Rows:
    """An item of the source whose arrays have the same number of rows."""

    arrays: Arrays
    count: int
    """Of rows that are no padding."""

    def none(self) -> Rows:
        """No rows of this kind."""
        return Rows(self.arrays.map(lambda leaf: leaf[-1:]), 0)


class Batcher:
    """Turns the items of one pass into batches with an equal number of rows for each replica.

    A batch is one item, split over the replicas, or as many items as there are replicas, one for each.
    `size` is the number of rows of a full item, where it is known beforehand; else it is that of the
    largest so far.
    """

    def __init__(self, num_replicas: int, items: int, remainder: Remainder, mask: bool, size: int | None) -> None:
        self.items = items
        """In a batch."""
        self._split = num_replicas // items
        """The replicas that an item is for."""
        self._remainder = remainder
        self._mask = mask
        self.size = size or 0
        self.layout = Layout(1, "shapes and dtypes of rows")

    def take(self, elements: Iterator[tuple[Any, Any]], first: int) -> Iterator[tuple[list[Rows], Any]]:
        """The items of each batch, checked, with the source's state after them; `first` is the number of the first."""
        numbered = enumerate(elements, first)
        while True:
            items: list[Rows] = []
            after: Any = None
            for number, (item, state) in islice(numbered, self.items):
                after = state
                items.append(self._rows(item, f"{'element' if self.items == 1 else 'batch'} {number}"))
            if not items:
                return
            yield items, after

    def _rows(self, item: Any, what: str) -> Rows:
        arrays = Arrays.of(item, what)
        for path, leaf in zip(arrays.paths, arrays.leaves):
            if leaf.ndim == 0:
                raise ArgumentError(
                    f"distribute_dataset: {path} of {what} is a single number and has no rows to split. Give"
                    " batch_size to stack such elements into batches, or make arrays whose first axis is the batch."
                )
            check_fits(leaf, f"{path} of {what}")
        check_same_rows(arrays, what)
        self.layout.check(arrays, what)
        if self.items > 1:
            arrays = arrays.copied()  # the source may use its memory for the next one
        count = arrays.leaves[0].shape[0]
        if count == 0:
            raise ArgumentError(f"distribute_dataset: {what} has no rows.")
        return Rows(arrays, count)

    @property
    def pads(self) -> bool:
        """Whether short batches are filled up."""
        return self._remainder == "pad"

    @property
    def drops(self) -> bool:
        """Whether short batches are left out."""
        return self._remainder == "drop"

    def each(self, items: list[Rows]) -> int:
        """The rows that one replica has at most."""
        return max(-(-item.count // self._split) for item in items)

    def full(self, each: int) -> int:
        """The rows for a replica in a full batch, when a batch comes in which one has `each`."""
        self.size = max(self.size, each * self._split)
        return self.size // self._split

    def batches(self, elements: Iterator[tuple[Any, Any]], first: int) -> Iterator[tuple[Any | None, Any]]:
        """The batches for items, each with the source's state after it."""
        for number, (items, after) in enumerate(self.take(elements, first), first // self.items):
            yield self.batch(items, number), after

    def batch(self, items: list[Rows], number: int) -> Any | None:
        """The batch, or None when its rows are dropped."""
        counts = [item.count for item in items] + [0] * (self.items - len(items))
        self.size = max(self.size, *counts)
        if self.pads:
            # Up to the full batch, so that a short one is not traced anew.
            return self.filled(items, -(-self.size // self._split))
        if self.drops and min(counts) < self.size:
            self.dropped(sum(counts), number)
            return None
        count = counts[0]
        if len(set(counts)) > 1:
            raise UnevenBatchError(
                f"distribute_dataset: the batches of the replicas in element {number} have {counts} rows. Each replica"
                " needs the same number: choose remainder='pad' (with mask=True for exact means) or remainder='drop'."
            )
        if count % self._split or (count < self.size and self._remainder == "error"):
            raise uneven(f"element {number} has", count, self.size, self._split)
        return self.filled(items, count // self._split)

    def filled(self, items: list[Rows], each: int) -> Any:
        """The batch with `each` rows for a replica, and with the weights if they are wanted.

        Items are filled up with their last row, and those that are missing with that of the last item. A real
        row is as harmless as the others; a row of zeros may be NaN to a model, and NaN times 0 is NaN.
        """
        items = [*items, *[items[-1].none()] * (self.items - len(items))]
        rows = each * self._split
        columns = zip(*[[_filled(leaf, rows) for leaf in item.arrays.leaves] for item in items])
        leaves = [column[0] if len(column) == 1 else np.concatenate(column) for column in columns]
        element = jax.tree.unflatten(items[0].arrays.structure, leaves)
        if not self._mask:
            return element
        return with_mask(element, np.concatenate([np.arange(rows) < item.count for item in items]).astype(np.float32))

    def dropped(self, count: int, number: int) -> None:
        """Say that rows are left out."""
        if is_strict():
            raise dropped(f"{count} rows (element {number}, {self.size * self.items} expected)")
        logger.info("dataset: element %d has %d rows of %d and is dropped", number, count, self.size * self.items)


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
