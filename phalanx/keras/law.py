"""How the losses, gradients and metrics of replicas go together where the code runs now."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from typing import Any

from phalanx import _jax, state
from phalanx.distribute.collectives import ReduceOp


@dataclass(frozen=True)
class Law:
    """The default is TensorFlow's, for a user's own ``strategy.run``."""

    op: ReduceOp = "sum"
    rows_are_the_same: bool = False
    """All replicas have the same rows, so that what each computes of them is complete, and counts once."""
    synchronize_batch_norm: bool = False
    """Batch normalisation takes the moments of all replicas' rows."""
    accumulate: Callable[[Any, list[Any], Any], list[Any] | None] | None = None
    """Given an optimizer, gradients and variables: what to apply, or None for nothing yet."""
    guard: Callable[[Any, list[Any], Any], None] | None = None
    """Given an optimizer, gradients and variables: applies those that are finite."""
    metrics_are_read_merged: bool = False
    """Reading a variable that adds up gives the sum over all replicas, in a replica too."""
    parts_are_read_here: bool = False
    """Reading a per-replica variable gives a part of this process's, without the others."""


class _Here(threading.local):
    law = Law()


_here = _Here()


def law() -> Law:
    """The law that holds here."""
    return _here.law


@contextmanager
def following(law: Law) -> Iterator[None]:
    """The law holds in the block."""
    before, _here.law = _here.law, law
    try:
        yield
    finally:
        _here.law = before


def metrics_read_merged() -> AbstractContextManager[None]:
    """In the block metrics are those of all replicas."""
    return following(replace(_here.law, metrics_are_read_merged=True))


def parts_read_here() -> AbstractContextManager[None]:
    """In the block one process reads by itself."""
    return following(replace(_here.law, parts_are_read_here=True))


def replicas_with_rows_of_their_own() -> int:
    """How many replicas' rows make up a mean over all rows: one where each replica has all of them."""
    if not _jax.in_replica_trace() or _here.law.rows_are_the_same:
        return 1
    return int(state.context().strategy.num_replicas)
