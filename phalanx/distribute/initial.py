"""Initial values are equal on all processes: where they are not, those of the first process are taken.

A mirrored variable that several processes make, each from its own random numbers, would hold other values on
each without a word from JAX.
"""

from __future__ import annotations

import hashlib
import json
import logging
from typing import TYPE_CHECKING, Any

import jax
import numpy as np

from phalanx import _jax
from phalanx._conversion import is_key
from phalanx.cluster.agreement import Roundtable
from phalanx.distribute.reductions import compute
from phalanx.errors import StrategyError
from phalanx.variables import Variable

if TYPE_CHECKING:
    from phalanx.distribute.strategy import Strategy

logger = logging.getLogger("phalanx")

_TIMEOUT_SECONDS = 300.0


class InitialValues:
    """What the processes of a strategy say of each variable that they make; they make the same ones, in one order."""

    def __init__(self, strategy: Strategy, number: int) -> None:
        self._strategy = strategy
        processes = sorted({device.process_index for device in strategy.devices})
        self._first = processes[0]
        self._table = Roundtable(f"phalanx/variables/{number}", processes, _TIMEOUT_SECONDS)
        self._differed = False

    def settle(self, variable: Variable) -> Any | None:
        """The first process's value of a variable where the processes differ, else None.

        Raises:
            StrategyError: when the processes make different variables, or one makes none.
        """
        value = variable._stored.addressable_shards[0].data
        host = np.asarray(jax.random.key_data(value) if is_key(variable.dtype) else value)
        kind = [variable.name, str(variable.dtype), list(variable.shape)]
        digest = hashlib.sha256(host.tobytes()).hexdigest()
        try:
            said = [json.loads(word) for word in self._table.tell(json.dumps([kind, digest]))]
        except TimeoutError as error:
            raise StrategyError(
                f"{variable.label}: {error}. Every process must make the variables of {self._strategy!r}, in the same order."
            ) from error
        if any(theirs[0] != kind for theirs in said):
            made = ", ".join(f"{name!r} {dtype}{shape}" for (name, dtype, shape), _ in said)
            raise StrategyError(f"The processes make different variables of {self._strategy!r}: {made}.")
        if len({theirs[1] for theirs in said}) == 1:
            return None
        if not self._differed:
            self._differed = True
            logger.info(
                "initial values differ between the processes, %s is the first: those of process %s are taken. A seed,"
                " px.connect(seed=...), makes them equal",
                variable.label,
                self._first,
            )
        return self._from_first(host, variable)

    def _from_first(self, host: np.ndarray[Any, Any], variable: Variable) -> Any:
        strategy, mine = self._strategy, np.frombuffer(host.tobytes(), np.uint8)
        speaker = next(i for i, device in enumerate(strategy.devices) if device.process_index == self._first)

        def row(index: Any) -> np.ndarray[Any, Any]:
            return mine[None] if (index[0].start or 0) == speaker else np.zeros((1, mine.size), np.uint8)

        shape = (strategy.num_replicas, mine.size)
        stacked = jax.make_array_from_callback(shape, _jax.split(strategy.mesh), row)
        heard = np.asarray(compute(strategy, _sum_of_bytes, stacked).addressable_shards[0].data)
        value = np.frombuffer(heard.tobytes(), host.dtype).reshape(host.shape)
        if is_key(variable.dtype):
            return jax.random.wrap_key_data(value, impl=jax.random.key_impl(variable._stored))
        return value


def _sum_of_bytes(stacked: Any) -> Any:
    return stacked.sum(0, dtype=np.uint8)  # all rows but one are zero
