"""Keeps the state of a training run after each epoch, with Orbax, and goes on from the last one."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import keras
import numpy as np

from phalanx.errors import ArgumentTypeError


class Resume(keras.callbacks.Callback):  # type: ignore[misc]
    """Weights, seeds and optimizer of the model, as they were after its last whole epoch."""

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        super().__init__()
        if not isinstance(folder, (str, os.PathLike)):
            raise ArgumentTypeError(f"fit: resume must be the path of a folder, got {folder!r:.60}.")
        try:
            import orbax.checkpoint as ocp
        except ImportError as error:
            raise ImportError("fit(resume=...) keeps its state with Orbax: pip install orbax-checkpoint.") from error
        self._items = ocp.args
        options = ocp.CheckpointManagerOptions(max_to_keep=1, create=True)
        self._manager = ocp.CheckpointManager(Path(folder).absolute(), options=options)

    def _variables(self) -> list[Any]:
        return [*self.model.variables, *self.model.optimizer.variables]

    def on_train_begin(self, logs: Any = None) -> None:
        epoch = self._manager.latest_step()
        if epoch is None:
            return
        here = {"values": [np.asarray(v) for v in self._variables()]}
        found = self._manager.restore(epoch, args=self._items.Composite(state=self._items.StandardRestore(here)))
        for variable, value in zip(self._variables(), found["state"]["values"]):
            variable.assign(value)
        self.model._initial_epoch = epoch + 1

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        values = {"values": [np.array(v) for v in self._variables()]}
        self._manager.save(epoch, args=self._items.Composite(state=self._items.StandardSave(values)))
        self._manager.wait_until_finished()  # whatever happens next, this epoch is kept

    def on_train_end(self, logs: Any = None) -> None:
        self._manager.close()
        self.model._initial_epoch = 0
