"""What callbacks have counted, kept with the rest of `fit`'s state."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterator
from typing import Any

import keras

logger = logging.getLogger("phalanx")

_COUNTS = {
    keras.callbacks.EarlyStopping: ("wait", "stopped_epoch", "best", "best_epoch"),
    keras.callbacks.ReduceLROnPlateau: ("wait", "cooldown_counter", "best"),
    keras.callbacks.ModelCheckpoint: ("best",),
}


class Patience:
    """The numbers of Keras's callbacks, and the states of those that have ``state_dict`` and ``load_state_dict``.

    They are told apart by their classes, and several of one class by their order; another run may have others.
    """

    def __init__(self, callbacks: list[Any]) -> None:
        self._callbacks = callbacks

    def _named(self) -> Iterator[tuple[str, Any]]:
        seen: Counter[str] = Counter()
        for callback in self._callbacks:
            name = type(callback).__name__
            yield f"{name}:{seen[name]}", callback
            seen[name] += 1

    def state_dict(self) -> dict[str, Any]:
        states = {}
        for name, callback in self._named():
            if hasattr(callback, "state_dict") and hasattr(callback, "load_state_dict"):
                states[name] = callback.state_dict()
            elif counts := _counts_of(callback):
                states[name] = {count: getattr(callback, count) for count in counts}
        return states

    def load_state_dict(self, states: dict[str, Any]) -> None:
        for name, callback in self._named():
            if name not in states:
                continue
            if hasattr(callback, "load_state_dict"):
                callback.load_state_dict(states[name])
                continue
            vars(callback).update({count: states[name][count] for count in _counts_of(callback)})
            if getattr(callback, "restore_best_weights", False) and callback.wait:
                logger.warning(
                    "EarlyStopping: the best weights so far, of epoch %s, were not kept; unless a later epoch is better, fit"
                    " ends with its last ones. ModelCheckpoint(save_best_only=True) keeps them in a file.",
                    callback.best_epoch + 1,
                )


def _counts_of(callback: Any) -> tuple[str, ...]:
    counts = next((counts for cls, counts in _COUNTS.items() if isinstance(callback, cls)), ())
    return tuple(count for count in counts if hasattr(callback, count))
