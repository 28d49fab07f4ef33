"""What processes tell each other without their devices."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence

import jax
from jax._src import distributed as _distributed

_POLL_MS = 200


class Roundtable:
    """Where processes tell each other something, round by round, over JAX's coordination service.

    It does not go through the devices, so that it never stands between the collectives of two steps. The
    first process collects what the others say and tells them all of it.
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
        _distributed.global_state.client.key_value_delete(f"{self._name}/{number - 1}")  # all have read that by now
        return said

    def leave(self, value: str) -> None:
        """Say a last word, which the others hear in the round that they are in."""
        first = self._processes[0]
        self._say(json.dumps([value] * len(self._processes)) if jax.process_index() == first else value)

    def _say(self, value: str) -> None:
        me, client = jax.process_index(), _distributed.global_state.client
        client.key_value_set(f"{self._name}/{self._round}/{'all' if me == self._processes[0] else me}", value)
        self._round += 1

    def _hear(self, number: int, key: str, process: int, stopped: Callable[[], bool]) -> str:
        client = _distributed.global_state.client
        end = time.monotonic() + self._timeout
        while time.monotonic() < end:
            if stopped():
                raise InterruptedError
            try:
                return str(client.blocking_key_value_get(f"{self._name}/{number}/{key}", _POLL_MS))
            except jax.errors.JaxRuntimeError as error:
                if "DEADLINE_EXCEEDED" not in str(error):
                    raise TimeoutError(f"process {process} cannot be reached any more: {error}") from error
        raise TimeoutError(f"process {process} did not come within {self._timeout:.0f} s")
