"""Batches of arrays, an equal number of rows for each replica."""

from __future__ import annotations

import logging
import secrets
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Literal, get_args

import jax
import numpy as np

from phalanx._checks import check_flag, is_numeric
from phalanx.errors import ArgumentError, ArgumentTypeError, UnevenBatchError
from phalanx.function import is_strict

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
        for value, label in ((mask, "mask"), (shuffle, "shuffle")):
            check_flag(value, f"distribute_dataset: {label}")
        if seed is not None and (isinstance(seed, bool) or not isinstance(seed, (int, np.integer)) or seed < 0):
            raise ArgumentError(f"distribute_dataset: seed must be an int from 0 on, or None, got {seed!r}.")
        self._leaves, self._structure, self._rows = _host_arrays(source)
        self._batch_size = int(batch_size)
        self._remainder = remainder
        self._mask = mask
        self._shuffle = shuffle
        self._seed = secrets.randbits(32) if shuffle and seed is None else seed
        self._epoch = 0
        self._check_even()
        logger.info(
            "dataset: %d rows, batches of %d (%d per replica)%s",
            self._rows,
            batch_size,
            -(-batch_size // strategy.num_replicas),
            f", shuffled with seed {self._seed}" if shuffle else "",
        )

    def _check_even(self) -> None:
        n, size, rest = self._strategy.num_replicas, self._batch_size, self._rows % self._batch_size
        if self._remainder == "pad":
            return
        if self._remainder == "drop" and rest and is_strict():
            raise UnevenBatchError(
                f"distribute_dataset: remainder='drop' leaves out {rest} of {self._rows} rows, and px.strict is on. Use"
                " remainder='pad' (with mask=True for exact means), or a batch_size that divides the rows."
            )
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
            # By numbers, which copies: on a CPU a slice would share the memory of the source, which may change.
            stop = min(start + self._batch_size, self._rows)
            yield self._element(np.arange(start, stop) if order is None else order[start:stop], stop - start)

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


def _host_arrays(source: Any) -> tuple[list[np.ndarray[Any, Any]], Any, int]:
    """The arrays of a source, how they are put together, and how many rows they have."""
    try:
        named, structure = jax.tree_util.tree_flatten_with_path(source)
    except (TypeError, ValueError) as error:
        raise ArgumentTypeError(f"distribute_dataset: JAX cannot take the source apart: {error}") from error
    if not named:
        raise ArgumentError(f"distribute_dataset: there is no array in the source {source!r:.60}.")
    arrays = {f"source{jax.tree_util.keystr(path)}": leaf for path, leaf in named}
    leaves = {name: _host_array(leaf, name) for name, leaf in arrays.items()}
    rows = {name: leaf.shape[0] for name, leaf in leaves.items()}
    if len(set(rows.values())) > 1:
        found = ", ".join(f"{name} {n}" for name, n in rows.items())
        raise ArgumentError(f"distribute_dataset: the arrays must have the same number of rows, got {found}.")
    (n,) = set(rows.values())
    if n == 0:
        raise ArgumentError("distribute_dataset: the source is empty (0 rows).")
    return list(leaves.values()), structure, n


def _host_array(leaf: Any, name: str) -> np.ndarray[Any, Any]:
    if isinstance(leaf, (bool, int, float, complex, str, bytes, np.generic)) or not hasattr(leaf, "shape"):
        raise ArgumentTypeError(
            f"distribute_dataset takes arrays or pytrees of arrays, and {name} is a {type(leaf).__name__}, {leaf!r:.60}."
            " Make lists arrays with np.asarray."
        )
    try:
        array = np.asarray(leaf)
    except TypeError as error:
        raise ArgumentTypeError(f"distribute_dataset: {name} cannot be had as a NumPy array: {error}") from error
    if not is_numeric(array.dtype):
        raise ArgumentTypeError(
            f"distribute_dataset: {name} has dtype {array.dtype}; arrays must be numeric. Look up strings and objects on the"
            " host first."
        )
    if array.ndim == 0:
        raise ArgumentError(f"distribute_dataset: {name} is 0-d and has no rows.")
    return array
