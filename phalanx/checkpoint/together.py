"""The processes of a run agree on each save and restore: that all do it, which step, and how it ended."""

from __future__ import annotations

import itertools
import json
from typing import Any

import jax

from phalanx.cluster.agreement import Roundtable
from phalanx.errors import StrategyError

_managers = itertools.count()
"""Every process makes its managers in the same order, which is how they find each other's."""


class Processes:
    """All processes of the run."""

    def __init__(self, timeout: float) -> None:
        self.count = jax.process_count()
        self.index = jax.process_index()
        name = f"phalanx/checkpoint/{next(_managers)}" if self.count > 1 else ""
        self._table = Roundtable(name, range(self.count), timeout)

    @property
    def leads(self) -> bool:
        """Whether this process writes."""
        return self.index == 0

    def tell(self, doing: str, word: Any = None) -> list[Any]:
        """Say something that JSON knows, and hear what each process says where it does the same.

        Raises:
            StrategyError: when a process does not come in time, or comes for something else.
        """
        if self.count == 1:
            return [word]
        try:
            said = [json.loads(theirs) for theirs in self._table.tell(json.dumps([doing, word]))]
        except TimeoutError as error:
            raise StrategyError(
                f"Checkpoint: {error}, where this one came to {doing}. Every process must call save, restore_latest and"
                " wait, not one alone: the first one writes, and all know that it has. A process may have failed: look at"
                " its log."
            ) from error
        if any(theirs != doing for theirs, _ in said):
            others = ", ".join(f"process {i}: {theirs}" for i, (theirs, _) in enumerate(said))
            raise StrategyError(f"Checkpoint: the processes do different things: {others}. All must do the same.")
        return [theirs for _, theirs in said]
