"""Keeps the state of `fit` after each epoch, and goes on from the last one."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import keras

from phalanx.checkpoint.checkpoint import Checkpoint
from phalanx.checkpoint.manager import CheckpointManager
from phalanx.checkpoint.randomness import GlobalRandom
from phalanx.errors import ArgumentTypeError


class Resume(keras.callbacks.Callback):  # type: ignore[misc]
    """The model with its optimizer and seeds, the data's position, and the random state of the host.

    Args:
        folder: where.
        build: makes the variables of a model that has none yet.
        data: has ``state_dict()`` and ``load_state_dict()``, or None.
    """

    def __init__(self, folder: str | os.PathLike[str], build: Callable[[], None], data: Any) -> None:
        super().__init__()
        if not isinstance(folder, (str, os.PathLike)):
            raise ArgumentTypeError(f"fit: resume must be the path of a folder, got {folder!r:.60}.")
        self._manager = CheckpointManager(folder, keep=1)
        self._build = build
        self._data = {} if data is None else {"data": data}

    def on_train_begin(self, logs: Any = None) -> None:
        self._build()
        self._kept = Checkpoint(model=self.model, epochs=0, random=GlobalRandom(), **self._data)
        self._manager.restore_latest(self._kept)
        self.model._initial_epoch = self._kept.epochs

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self._kept.epochs = epoch + 1
        self._manager.save(self._kept, step=epoch + 1)

    def on_train_end(self, logs: Any = None) -> None:
        self._manager.wait()

    def close(self) -> None:
        """However training ended, the last epoch is kept and the next fit starts where it is told to."""
        self._manager.settle()
        self.model._initial_epoch = 0
