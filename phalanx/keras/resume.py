"""Keeps the state of `fit`, and goes on from where it was kept: between two epochs, or in the middle of one.

Keras's loop counts the batches of an epoch from 0. In an epoch that is resumed the feed draws those that were trained
on already, so that random orders and augmentations come out the same, and gives an empty run for each; `Callbacks` keeps
these from the other callbacks.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from typing import Any, NoReturn

import keras

from phalanx import state
from phalanx._checks import counterparts
from phalanx.checkpoint.checkpoint import Checkpoint
from phalanx.checkpoint.manager import CheckpointManager
from phalanx.checkpoint.randomness import GlobalRandom
from phalanx.cluster.exits import EXIT_PREEMPTED
from phalanx.cluster.preemption import preemption
from phalanx.errors import ArgumentError, ArgumentTypeError
from phalanx.keras.patience import Patience

logger = logging.getLogger("phalanx")


class Resume(keras.callbacks.Callback):  # type: ignore[misc]
    """The model with its optimizer and seeds, metrics, callbacks' counts, the data's position, and the host's random state.

    Args:
        where: a folder, where each epoch is kept; or a manager, which also says after how many runs to save in an epoch.
        build: makes the variables of a model that has none yet.
        feed: the data; has ``skip``, ``batches_per_run`` and ``position(in_pass)``.
        callbacks: the others, which Keras tells of everything before this one.
    """

    def __init__(
        self,
        where: str | os.PathLike[str] | CheckpointManager,
        build: Callable[[], None],
        feed: Any,
        callbacks: list[Any],
    ) -> None:
        super().__init__()
        if not isinstance(where, (str, os.PathLike, CheckpointManager)):
            raise ArgumentTypeError(
                f"fit: resume must be the path of a folder or a px.CheckpointManager, got {where!r:.60}."
            )
        feed.position.check_resumable()
        self._manager = where if isinstance(where, CheckpointManager) else CheckpointManager(where, keep=1)
        self._saves_in_epochs = self._manager.every is not None
        self._build = build
        self._feed = feed
        self._patience = Patience(callbacks)
        self._random = _RandomOfEpoch()
        self._runs = 0
        """Of this epoch, those that were skipped included."""
        self._metrics: dict[Any, Any] = {}
        """Their values in the epoch that is resumed."""
        self._trained: dict[Any, Any] = {}
        """Their values before a validation."""

    # ---- what Keras's loop calls ----

    def on_train_begin(self, logs: Any = None) -> None:
        self._build()
        metrics = [v for metric in self.model.metrics for v in metric.variables]
        self._kept = Checkpoint(
            model=self.model,
            metrics=metrics,
            data=self._feed.position,
            random=self._random,
            callbacks=self._patience,
            epoch=0,
            runs_in_epoch=0,
            runs=0,
            batches_per_run=self._feed.batches_per_run,
        )
        self._manager.claim()
        self._manager.restore_latest(self._kept)
        if self._kept.runs_in_epoch and self._kept.batches_per_run != self._feed.batches_per_run:
            raise ArgumentError(
                f"fit(resume=...): the epoch was begun with {self._kept.batches_per_run} batches in each run, and there are"
                f" {self._feed.batches_per_run} now. Keep steps_per_execution and accumulate_steps until it has ended."
            )
        self._kept.batches_per_run = self._feed.batches_per_run
        self._feed.skip = self._kept.runs_in_epoch
        self._metrics = {v: state.borrow(v) for v in counterparts(metrics)} if self._feed.skip else {}
        self.model._initial_epoch = self._kept.epoch

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        for variable, value in self._metrics.items():  # Keras has just reset them
            variable._replace(value)
        if self._metrics:
            self._random.go_back()
        self._metrics = {}
        self._runs = 0
        self._random.begin_epoch(again=self.is_behind)
        self._feed.position.in_pass = True

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self._kept.epoch, self._kept.runs_in_epoch = epoch + 1, 0
        self._random.end_epoch()
        self._feed.position.in_pass = False
        self._manager.save(self._kept, step=self._kept.runs, force=True)

    def on_test_begin(self, logs: Any = None) -> None:
        # Validation is about to use the metrics for itself.
        self._trained = {v: state.borrow(v) for v in counterparts(self._kept.metrics)}

    def on_test_end(self, logs: Any = None) -> None:
        self._trained = {}

    def on_train_end(self, logs: Any = None) -> None:
        self._manager.wait()

    # ---- what `Callbacks` calls ----

    @property
    def is_behind(self) -> bool:
        """Whether the next run was done before the program stopped."""
        return self._runs < int(self._kept.runs_in_epoch)

    def before_run(self) -> None:
        """Save, if it is time to: the state after the last run, of an epoch that goes on."""
        if self._saves_in_epochs and self._runs:
            self._manager.save(self._kept, step=self._kept.runs)

    def after_run(self) -> None:
        """A run is done, or was skipped."""
        self._runs += 1
        if self._runs > self._kept.runs_in_epoch:
            self._kept.runs_in_epoch = self._runs
            self._kept.runs += 1

    def leave_if_asked(self) -> None:
        """After each run, also of a validation: all processes stop at the same one, when SIGTERM has come to any."""
        if preemption.reached():
            self.leave()

    def leave(self) -> NoReturn:
        """Save, and end the program so that a scheduler starts it again."""
        for variable, value in self._trained.items():
            variable._replace(value)
        self.save_now()
        logger.info("asked to stop: step %s is saved in %s", self._kept.runs, self._manager.directory)
        raise SystemExit(EXIT_PREEMPTED)

    def save_now(self) -> None:
        """Save after this run, and wait until that is complete: the program is about to end."""
        self._manager.save(self._kept, step=self._kept.runs, force=True)
        self._manager.wait()

    def close(self) -> None:
        """However training ended, what was saved is complete and the next fit starts where it is told to."""
        self._manager.settle()
        self.model._initial_epoch = 0
        self._feed.skip = 0


class _RandomOfEpoch(GlobalRandom):
    """In an epoch: the state at its start, from which its batches are drawn again."""

    def __init__(self) -> None:
        self._start: dict[str, Any] | None = None

    def begin_epoch(self, again: bool) -> None:
        """`again`: it is resumed, and its start was restored."""
        if not again:
            self._start = super().state_dict()

    def go_back(self) -> None:
        """To the start of the epoch."""
        if self._start is not None:
            super().load_state_dict(self._start)

    def end_epoch(self) -> None:
        """The next one starts from the state that there is now."""
        self._start = None

    def state_dict(self) -> dict[str, Any]:
        return super().state_dict() if self._start is None else self._start

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        self._start = state
