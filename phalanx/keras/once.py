"""What several processes do together and only one may do: writing files, and printing."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import keras

from phalanx import state
from phalanx.cluster.agreement import agree
from phalanx.distribute.strategy import Strategy
from phalanx.keras.law import parts_read_here

logger = logging.getLogger("phalanx")

_WRITERS = (keras.callbacks.CSVLogger, keras.callbacks.TensorBoard, keras.callbacks.ProgbarLogger)


def writer_of(strategy: Strategy) -> int | None:
    """The process that writes for all of a strategy's; None where there is only one."""
    processes = {device.process_index for device in strategy.devices}
    return min(processes) if len(processes) > 1 else None


def write_once(strategy: Strategy, write: Callable[..., Any], path: Any, *args: Any, **options: Any) -> Any:
    """``write(path, ...)`` on one process, which needs no other for it; a file is complete or not there."""
    writer = writer_of(strategy)
    if writer is None:
        return write(path, *args, **options)
    if writer != jax.process_index():
        logger.info("%s: written by process %s", path, writer)
        return None
    # Keras makes objects with variables on its way, which are no business of the strategy's.
    with state.pushed(state.EagerFrame()), parts_read_here():
        if not isinstance(path, (str, os.PathLike)):
            return write(path, *args, **options)
        target = Path(path)
        temporary = target.with_name(f".{os.getpid()}.{target.name}")
        result = write(temporary, *args, **options)
    os.replace(temporary, target)
    return result


class StopTogether(keras.callbacks.Callback):  # type: ignore[misc]
    """When a callback of one process ends the training, all end it, after the same epoch."""

    def __init__(self) -> None:
        super().__init__()
        self._wanted = False

    def on_train_begin(self, logs: Any = None) -> None:
        self._wanted = False

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        if self.model.stop_training:  # the others go on, and their steps need this process
            self._wanted, self.model.stop_training = True, False

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        wanted = self._wanted or bool(self.model.stop_training)
        self.model.stop_training = any(agree(wanted, what="fit: whether to stop"))


def for_this_process(strategy: Strategy, given: list[Any]) -> list[Any]:
    """The callbacks that act here: those that only write or print are left to one process."""
    writer = writer_of(strategy)
    if writer is None:
        return given
    kept = given if writer == jax.process_index() else [c for c in given if not isinstance(c, _WRITERS)]
    return [*kept, StopTogether()]
