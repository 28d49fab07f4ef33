"""Keras's callbacks, called where they listen: numbers that nobody looks at stay on the devices."""

from __future__ import annotations

import time
from typing import Any

import keras

from phalanx.audit import Auditor
from phalanx.finite import NonFiniteGuard
from phalanx.keras import _keras
from phalanx.keras.guarded import check
from phalanx.keras.resume import Resume

_BAR_SECONDS = 0.05
"""How often Keras's progress bar draws itself."""


class Callbacks(keras.callbacks.CallbackList):  # type: ignore[misc]
    """The list that Keras's loops call after each batch, for which Keras fetches all metrics."""

    def __init__(self, callbacks: Any, **options: Any) -> None:
        given = [Watches(c) if isinstance(c, (Auditor, NonFiniteGuard)) else c for c in _keras.callbacks(callbacks)]
        super().__init__(given, **options)
        self._watches = [callback for callback in given if isinstance(callback, Watches)]
        self._resume = next((callback for callback in given if isinstance(callback, Resume)), None)
        self._drawn = 0.0

    @property
    def guard(self) -> NonFiniteGuard | None:
        """The one that keeps steps that are not finite from counting."""
        return next((c.watched for c in self._watches if isinstance(c.watched, NonFiniteGuard)), None)

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        if self._resume is not None:
            if self._resume.is_behind:
                return
            self._resume.before_run()
        super().on_train_batch_begin(batch, logs)

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        if self._resume is not None:
            was_behind = self._resume.is_behind
            self._resume.after_run()
            if was_behind:
                return
        for callback in self._watches:
            callback.watched.after_step()
        if self._is_heard("on_train_batch_end"):
            super().on_train_batch_end(batch, logs)
        if self._resume is not None:
            self._resume.leave_if_asked()

    def on_test_batch_end(self, batch: int, logs: Any = None) -> None:
        if self._is_heard("on_test_batch_end"):
            super().on_test_batch_end(batch, logs)
        if self._resume is not None:
            self._resume.leave_if_asked()

    def on_predict_batch_end(self, batch: int, logs: Any = None) -> None:
        if logs and "outputs" in logs:
            logs = {**logs, "outputs": self._model._steps.structured(logs["outputs"])}
        super().on_predict_batch_end(batch, logs)

    def _is_heard(self, event: str) -> bool:
        listeners = [callback for callback in self.callbacks if _listens(callback, event)]
        if not listeners:
            return False
        now = time.perf_counter()
        if all(isinstance(callback, keras.callbacks.ProgbarLogger) and callback.target for callback in listeners):
            if now - self._drawn < _BAR_SECONDS:
                return False
            self._drawn = now
        return True


class Watches(keras.callbacks.Callback):  # type: ignore[misc]
    """An auditor or a guard among the callbacks of `fit`; it listens to no numbers, so that none are fetched for it."""

    def __init__(self, watched: Auditor | NonFiniteGuard) -> None:
        super().__init__()
        self.watched = watched

    def on_train_begin(self, logs: Any = None) -> None:
        if isinstance(self.watched, NonFiniteGuard):
            check(self.watched, self.model)
        elif self.watched.target is None:
            self.watched.target = self.model

    def on_train_end(self, logs: Any = None) -> None:
        if isinstance(self.watched, NonFiniteGuard):
            self.watched.check()
        else:
            self.watched.finish()


def _listens(callback: Any, event: str) -> bool:
    # The hooks of `LambdaCallback`, among others, are attributes of the object.
    return any(
        getattr(getattr(callback, name), "__func__", None) is not getattr(keras.callbacks.Callback, name)
        for name in (event, "on_batch_end")
    )
