"""Batches of arrays, an equal number of rows for each replica."""

from __future__ import annotations

import logging
import secrets
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Literal, get_args

import jax
import numpy as np

from phalanx.errors import ArgumentError, ArgumentTypeError, UnevenBatchError

if TYPE_CHECKING:
    from phalanx.distribute.strategy import Strategy

logger = logging.getLogger("phalanx")

Remainder = Literal["auto", "pad", "drop", "error"]


class ArrayDataset:
    """Made by `strategy.distribute_dataset`."""

    def __init__(
        self,
        strategy: Strategy,
        source: Any,
        batch_size: int,
        remainder: Remainder,
        mask: bool,
        shuffle: bool,
        seed: int | None,
    ) -> None:
        self._strategy = strategy
        if isinstance(batch_size, bool) or not isinstance(batch_size, (int, np.integer)) or batch_size < 1:
            raise ArgumentError(f"distribute_dataset: batch_size must be a positive int, got {batch_size!r}.")
        if remainder not in get_args(Remainder):
            known = ", ".join(map(repr, get_args(Remainder)))
            raise ArgumentError(f"distribute_dataset: remainder must be one of {known}, got {remainder!r}.")
        leaves, self._structure = jax.tree.flatten(source)
        self._leaves = [_host_array(leaf) for leaf in leaves]
        rows = {leaf.shape[0] for leaf in self._leaves}
        if len(rows) != 1:
            raise ArgumentError(f"distribute_dataset: the arrays must have the same number of rows, got {sorted(rows)}.")
        (self._rows,) = rows
        if self._rows == 0:
            raise ArgumentError("distribute_dataset: the source is empty (0 rows).")
        self._batch_size = int(batch_size)
        self._remainder = remainder
        self._mask = mask
        self._shuffle = shuffle
        self._seed = secrets.randbits(32) if shuffle and seed is None else seed
        self._epoch = 0
        self._check_even()
        logger.info(
            "dataset: %d rows, batches of %d (%d per replica)%s",
            self._rows, batch_size, -(-batch_size // strategy.num_replicas),
            f", shuffled with seed {self._seed}" if shuffle else "",
        )

    def _check_even(self) -> None:
        n, size, rest = self._strategy.num_replicas, self._batch_size, self._rows % self._batch_size
        if self._remainder == "pad":
            return
        for rows in ([size] if self._rows >= size else []) + ([rest] if rest and self._remainder != "drop" else []):
            if rows % n or (self._remainder == "error" and rows == rest):
                raise UnevenBatchError(
                    f"distribute_dataset: {self._rows} rows in batches of {size} on {n} replicas give a batch of {rows} rows,"
                    f" which {'does not divide by ' + str(n) if rows % n else 'is smaller than the others'}. Choose"
                    " remainder='pad' (with mask=True for exact means), remainder='drop', or another batch_size."
                )

    def __len__(self) -> int:
        whole, rest = divmod(self._rows, self._batch_size)
        return whole + bool(rest and self._remainder != "drop")

    def __iter__(self) -> Iterator[Any]:
        order = None
        if self._shuffle:
            order = np.random.default_rng([self._seed or 0, self._epoch]).permutation(self._rows)
            self._epoch += 1
        for start in range(0, len(self) * self._batch_size, self._batch_size):
            index = slice(start, start + self._batch_size) if order is None else order[start : start + self._batch_size]
            yield self._element(index, min(self._batch_size, self._rows - start))

    def _element(self, index: Any, rows: int) -> Any:
        n = self._strategy.num_replicas
        # Padded to the full batch, so that the last one is not traced anew.
        padded = -(-self._batch_size // n) * n if self._remainder == "pad" else rows
        batch = jax.tree.unflatten(
            self._structure, [self._strategy.split_rows(_pad(leaf[index], padded)) for leaf in self._leaves]
        )
        if not self._mask:
            return batch
        weights = self._strategy.split_rows((np.arange(padded) < rows).astype(np.float32))
        return (*batch, weights) if isinstance(batch, tuple) else (batch, weights)

    def __repr__(self) -> str:
        return f"<dataset of {self._rows} rows, {len(self)} batches of {self._batch_size} on {self._strategy!r}>"


def _pad(rows: np.ndarray[Any, Any], size: int) -> np.ndarray[Any, Any]:
    missing = size - rows.shape[0]
    return np.concatenate([rows, np.zeros((missing, *rows.shape[1:]), rows.dtype)]) if missing else rows


def _host_array(leaf: Any) -> np.ndarray[Any, Any]:
    if isinstance(leaf, (bool, int, float, complex, str, bytes)) or not hasattr(leaf, "shape"):
        raise ArgumentTypeError(f"distribute_dataset takes arrays or pytrees of arrays, got {type(leaf).__name__} {leaf!r:.60}.")
    array = np.asarray(leaf)
    if array.dtype.kind not in "biufcV":
        raise ArgumentTypeError(
            f"distribute_dataset: arrays must be numeric, got dtype {array.dtype}. Look up strings and objects on the host first."
        )
    if array.ndim == 0:
        raise ArgumentError("distribute_dataset: a 0-d array has no rows.")
    return array
