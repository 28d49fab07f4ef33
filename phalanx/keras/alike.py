"""With several processes Keras's loops feed the same batches on each: checked, as far as it costs nothing to speak of."""

from __future__ import annotations

import hashlib
import itertools
import json
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np

from phalanx.cluster.agreement import Roundtable
from phalanx.distribute.strategy import Strategy
from phalanx.errors import StrategyError

_TIMEOUT_SECONDS = 300.0

_passes = itertools.count()
"""Over data, which every process makes in the same order."""


def alike(batches: Iterator[Any], strategy: Strategy, counted: bool, stopped: Callable[[], bool]) -> Iterator[Any]:
    """The batches, whose first is the same on all processes; so is their number, where nobody knows it before (`counted`).

    Raises:
        StrategyError: when they differ.
    """
    processes = sorted({device.process_index for device in strategy.devices})
    if len(processes) == 1:
        yield from batches
        return
    table = Roundtable(f"phalanx/keras/{next(_passes)}", processes, _TIMEOUT_SECONDS)
    for number in itertools.count():
        batch = next(batches, None)
        if number == 0 or not counted:
            try:
                said = [json.loads(word) for word in table.tell(json.dumps(_word(batch, number)), stopped)]
            except InterruptedError:
                return
            except TimeoutError as error:
                raise StrategyError(f"{error}: all processes must run the same loops over their data.") from error
            _check(said, number)
        if batch is None:
            return
        yield batch


def _word(batch: Any, number: int) -> str | None:
    if batch is None or number:
        return None if batch is None else "more"
    digest = hashlib.sha256()
    for leaf in jax.tree.leaves(batch):
        digest.update(repr((np.shape(leaf), str(np.asarray(leaf).dtype))).encode())
        digest.update(np.ascontiguousarray(leaf).tobytes())
    return digest.hexdigest()


def _check(said: list[str | None], number: int) -> None:
    if len(set(said)) == 1:
        return
    if None in said:
        ended = ", ".join(str(i) for i, word in enumerate(said) if word is None)
        raise StrategyError(
            f"The data of process {ended} ended after {number} batches, and others have more. With Keras's loops every process"
            " is given the same data, of which each replica takes its rows; for data of its own use"
            " strategy.distribute_dataset(..., auto_shard='off')."
        )
    raise StrategyError(
        "The first batches of the processes differ. With Keras's loops every process is given the same data in the same"
        " order: shuffle with one seed on all (px.connect(seed=...)), or not at all."
    )
