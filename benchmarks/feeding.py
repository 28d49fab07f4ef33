"""Feeding: a source of 5 ms per batch under a step of 5 ms, and what moving a batch costs when nothing else does.

With the work side by side a step should take what the slower of the two takes alone; one after the other
it takes both.
"""

from __future__ import annotations

import functools
import itertools
import time
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

import phalanx as px
from benchmarks.harness import Candidate, Case

REPLICAS = (1, 2, 8)
UNIT = "ms"

_MS = 5
_CHECKED_STEPS = 4


def cases(replicas: int, quick: bool) -> Iterator[Case]:
    yield Case(f"source {_MS} ms, step waits {_MS} ms", functools.partial(_overlap, replicas, _waiting))
    yield Case(f"source {_MS} ms, step computes {_MS} ms", functools.partial(_overlap, replicas, _computing))
    yield Case("batches of 256 x 64 from memory", functools.partial(_from_memory, replicas, 256, 64))


# ---- side by side --------------------------------------------------------------------------------


def _overlap(replicas: int, make_step: Callable[[px.Strategy], Callable[[Any], Any]]) -> list[Candidate]:
    strategy = px.Mirrored(jax.devices()[:replicas])
    step = make_step(strategy)
    (element,) = strategy.distribute_dataset(_batch(0), 64)
    step(element)

    def total(elements: Any) -> float:
        return sum(float(step(x)) for x in itertools.islice(elements, _CHECKED_STEPS))

    fed = {
        name: iter(strategy.distribute_dataset(_slow_source, prefetch=prefetch))
        for name, prefetch in (("Phalanx", 2), ("Phalanx, prefetch=1", 1), ("one after the other (prefetch=0)", 0))
    }
    candidates = [Candidate(name, lambda it=it: step(next(it)), lambda it=it: total(it)) for name, it in fed.items()]
    alone = _slow_source()
    expected = float(sum(_batch(i).sum() for i in range(_CHECKED_STEPS)))
    return [
        *candidates,
        Candidate("the step alone", lambda: step(element), lambda: expected),
        Candidate("the source alone", lambda: next(alone), lambda: expected),
    ]


def _batch(number: int) -> np.ndarray[Any, Any]:
    return np.full((64, 256), number % 4, np.float32)


def _slow_source() -> Iterator[np.ndarray[Any, Any]]:
    for number in itertools.count():
        time.sleep(_MS / 1000)
        yield _batch(number)


def _waiting(strategy: px.Strategy) -> Callable[[Any], Any]:
    """A step that leaves the processor alone, as one does whose work is on an accelerator."""
    total = px.function(lambda x: strategy.reduce("sum", strategy.run(jnp.sum, (x,))))

    def step(x: Any) -> Any:
        end = time.perf_counter() + _MS / 1000
        result = total(x).block_until_ready()
        time.sleep(max(0.0, end - time.perf_counter()))
        return result

    return step


def _computing(strategy: px.Strategy) -> Callable[[Any], Any]:
    """A step that keeps the processor busy."""

    def program(rounds: int) -> Callable[[Any], Any]:
        def work(x: Any) -> Any:
            a = jax.lax.fori_loop(0, rounds, lambda _, a: jnp.sin(a), x)
            return x.sum() + 0.0 * a.sum()

        total = px.function(lambda x: strategy.reduce("sum", strategy.run(work, (x,))))
        return lambda x: total(x).block_until_ready()

    (x,) = strategy.distribute_dataset(_batch(0), 64)
    rounds = 50
    for _ in range(3):  # until it takes about as long as it should
        step = program(rounds)
        step(x)
        rounds = max(1, round(rounds * _MS / 1000 / min(_seconds(step, x) for _ in range(20))))
    return program(rounds)


def _seconds(step: Callable[[Any], Any], x: Any) -> float:
    start = time.perf_counter()
    step(x)
    return time.perf_counter() - start


# ---- the cost of moving --------------------------------------------------------------------------


def _from_memory(replicas: int, rows: int, width: int) -> list[Candidate]:
    strategy = px.Mirrored(jax.devices()[:replicas])
    source = np.random.default_rng(0).normal(size=(64 * rows, width)).astype(np.float32)
    mesh = Mesh(np.array(jax.devices()[:replicas]), ("replica",), axis_types=(AxisType.Auto,))
    sharding = NamedSharding(mesh, PartitionSpec("replica"))

    def by_phalanx() -> Iterator[Any]:
        dataset = strategy.distribute_dataset(source, rows)
        while True:
            for x in dataset:
                yield x.stacked

    def by_hand() -> Iterator[Any]:
        while True:
            for first in range(0, len(source), rows):
                yield jax.device_put(source[first : first + rows], sharding)

    candidates = []
    for name, batches in (("Phalanx", by_phalanx()), ("jax.device_put", by_hand())):
        candidates.append(
            Candidate(
                name,
                lambda batches=batches: next(batches).block_until_ready(),
                lambda batches=batches: [float(next(batches).sum()) for _ in range(_CHECKED_STEPS)],
            )
        )
    return candidates
