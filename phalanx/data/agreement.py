"""Several processes with sources of their own, in step: all see the same number of batches.

Before each batch the processes tell each other how many rows they have. It goes over JAX's coordination
service, from the feeding threads, and so never stands between the collectives of two steps.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

from phalanx import _jax
from phalanx.data.elements import Batcher
from phalanx.errors import ArgumentError, StrategyError, UnevenBatchError

_TIMEOUT_SECONDS = 300.0

_passes = itertools.count()


def in_step(elements: Iterator[Any], batcher: Batcher, start: int) -> Iterator[tuple[Any, dict[str, Any]]]:
    """Batches of this process's elements, as many as every other process has.

    A process that has run out feeds padding until all have (``remainder="pad"``); with ``"drop"`` all stop
    together; else it is an error on all of them.
    """
    this_pass = next(_passes)
    size = 0
    for number in itertools.count(start):
        element, after = next(elements, (None, None))
        rows = 0 if element is None else batcher.rows_of(element, number)
        everyone = _tell(f"phalanx/rows/{this_pass}/{number}", rows)
        size = size or max(everyone)
        if not any(everyone):
            return
        if batcher.drops and min(everyone) < size:
            return
        if not batcher.pads and len(set(everyone)) > 1:
            raise UnevenBatchError(
                f"distribute_dataset: in element {number} the processes have {everyone} rows. All must have the same number,"
                " in every element: choose remainder='pad' (with mask=True for exact means) or remainder='drop'."
            )
        if element is None and number == start:
            raise ArgumentError(f"distribute_dataset: the source of this process is empty; the others have {everyone} rows.")
        batch = batcher.padding() if element is None else batcher(element, number)
        yield batch, {"element": number + 1, "source": after}


def _tell(key: str, rows: int) -> list[int]:
    try:
        return [int(said) for said in _jax.exchange(key, str(rows), _TIMEOUT_SECONDS)]
    except TimeoutError as error:
        raise StrategyError(
            f"distribute_dataset: {error}. Every process must iterate its datasets the same number of times and in the same"
            " order; a process may have failed: look at its log."
        ) from error
