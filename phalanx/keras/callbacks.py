"""Keras's callbacks, called where they listen: numbers that nobody looks at stay on the devices."""

from __future__ import annotations

import time
from typing import Any

import keras

from phalanx.audit import Auditor
from phalanx.keras import _keras
from phalanx.keras.resume import Resume

_BAR_SECONDS = 0.05
"""How often Keras's progress bar draws itself."""


class Callbacks(keras.callbacks.CallbackList):  # type: ignore[misc]
    """The list that Keras's loops call after each batch, for which Keras fetches all metrics."""

    def __init__(self, callbacks: Any, **options: Any) -> None:
        given = [Audits(c) if isinstance(c, Auditor) else c for c in _keras.callbacks(callbacks)]
        super().__init__(given, **options)
        self._audits = [callback for callback in given if isinstance(callback, Audits)]
        self._resume = next((callback for callback in given if isinstance(callback, Resume)), None)
        self._drawn = 0.0

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
        for callback in self._audits:
            callback.auditor.after_step()
        if self._is_heard("on_train_batch_end"):
            super().on_train_batch_end(batch, logs)
        if self._resume is not None:
            self._resume.leave_if_asked()

    def on_test_batch_end(self, batch: int, logs: Any = None) -> None:
        if self._is_heard("on_test_batch_end"):
            super().on_test_batch_end(batch, logs)
        if self._resume is not None:
            self._resume.leave_if_asked()

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


class Audits(keras.callbacks.Callback):  # type: ignore[misc]
    """An auditor among the callbacks of `fit`; it listens to no numbers, so that none are fetched for it."""

    def __init__(self, auditor: Auditor) -> None:
        super().__init__()
        self.auditor = auditor

    def on_train_begin(self, logs: Any = None) -> None:
        if self.auditor.target is None:
            self.auditor.target = self.model

    def on_train_end(self, logs: Any = None) -> None:
        self.auditor.finish()


def _listens(callback: Any, event: str) -> bool:
    # The hooks of `LambdaCallback`, among others, are attributes of the object.
    return any(
        getattr(getattr(callback, name), "__func__", None) is not getattr(keras.callbacks.Callback, name)
        for name in (event, "on_batch_end")
    )
