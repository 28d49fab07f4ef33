"""Agreement: what processes tell each other, round by round, with a time limit that names who is missing.

It goes over JAX's coordination service and not through the devices, so that it never stands between the
collectives of two steps. The first process collects what the others say and tells them all of it.
"""

from __future__ import annotations

import itertools
import json
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax

from phalanx import _jax
from phalanx.errors import ArgumentTypeError, ClusterError

_POLL_MS = 200

_calls = itertools.count()
"""Of `agree`, which every process makes in the same order."""


class Roundtable:
    """Where processes meet again and again.

    Args:
        name: where they find each other; the same on all.
        processes: who takes part.
        timeout: how long, in seconds, one waits for the others.
    """

    def __init__(self, name: str, processes: Sequence[int], timeout: float) -> None:
        self._name = name
        self._processes = list(processes)
        self._timeout = timeout
        self._round = 0

    def tell(self, value: str, stopped: Callable[[], bool] = lambda: False) -> list[str]:
        """Say `value` and hear what each process says in this round, in the order of the processes.

        Raises:
            TimeoutError: naming the process that did not come.
            InterruptedError: when ``stopped()`` became true meanwhile.
        """
        number = self._round
        first, *others = self._processes
        if jax.process_index() != first:
            self._say(value)
            return list(json.loads(self._hear(number, "all", first, stopped)))
        said = [value, *(self._hear(number, str(process), process, stopped) for process in others)]
        self._say(json.dumps(said))
        _jax.delete_note(f"{self._name}/{number - 1}")  # all have read that by now
        return said

    def leave(self, value: str) -> None:
        """Say a last word, which the others hear in the round that they are in."""
        first = self._processes[0]
        self._say(json.dumps([value] * len(self._processes)) if jax.process_index() == first else value)

    def _say(self, value: str) -> None:
        me = jax.process_index()
        _jax.write_note(f"{self._name}/{self._round}/{'all' if me == self._processes[0] else me}", value)
        self._round += 1

    def _hear(self, number: int, key: str, process: int, stopped: Callable[[], bool]) -> str:
        end = time.monotonic() + self._timeout
        while time.monotonic() < end:
            if stopped():
                raise InterruptedError
            try:
                found = _jax.read_note(f"{self._name}/{number}/{key}", _POLL_MS)
            except ConnectionError as error:
                raise TimeoutError(f"process {process} cannot be reached any more: {error}") from error
            if found is not None:
                return found
        raise TimeoutError(f"process {process} did not come within {self._timeout:.0f} s")


def agree(value: Any, timeout: float = 300.0, what: str = "px.cluster.agree") -> list[Any]:
    """What each process says, in the order of the processes; all must call this equally often, in the same order.

    Use it before anything that all processes must do alike and that depends on data of one of them: it needs
    no device, so it may stand anywhere between two steps.

    Args:
        value: what this process says; anything that JSON holds.
        timeout: how long, in seconds, to wait for the others.
        what: what is agreed on, for messages.

    Raises:
        ClusterError: naming the process that did not come.
        ArgumentTypeError: for a value that JSON does not hold, such as an array.

    Example:
        >>> px.cluster.agree({"loss": 0.5})
        [{'loss': 0.5}]
    """
    try:
        word = json.dumps(value)
    except (TypeError, ValueError) as error:
        raise ArgumentTypeError(
            f"{what} takes numbers, strings, and lists and dicts of these, got {type(value).__name__} {value!r:.60} ({error})."
            " Of an array give float(array) or array.tolist()."
        ) from error
    processes = range(jax.process_count())
    if len(processes) == 1:
        return [json.loads(word)]
    table = Roundtable(f"phalanx/agree/{next(_calls)}", processes, timeout)
    try:
        return [json.loads(said) for said in table.tell(word)]
    except TimeoutError as error:
        raise ClusterError(
            f"{what}: {error}. All processes must come here equally often and in the same order; one may have failed,"
            " or taken another branch: look at its log."
        ) from error
