"""What a training step tells other chips: all-reduces of gradients in a program for a TPU slice that is not here."""

from __future__ import annotations

import functools
import importlib.util
import math
import os
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import optax

import phalanx as px
from benchmarks import by_hand
from benchmarks.harness import Case, Contender
from benchmarks.problems import training_problems
from benchmarks.step import phalanx_program
from phalanx.preflight.report import Report

REPLICAS = (1,)
UNIT = "MB"

_ADAM = optax.adam(1e-3)
_CHIPS, _TOPOLOGY = 16, "v5e:4x4"


def cases(replicas: int, quick: bool) -> Iterator[Case]:
    if importlib.util.find_spec("libtpu") is None:
        print("the compiler for TPUs is not installed: left out (pip install 'phalanx[preflight]')", file=sys.stderr)
        return
    problem = next(p for p in training_problems(quick).values() if p.kind == "convnet")
    step = functools.cache(lambda: _compiled(*phalanx_program(1, problem, _ADAM)))
    each = functools.cache(lambda: _compiled(*by_hand.shard_map_program(_CHIPS, problem, _ADAM, by_hand.each)))
    name = f"{problem.name.partition(',')[0]} on {_TOPOLOGY}"

    def compared(figure: Callable[[Report], float]) -> list[Contender]:
        return [Figure("Phalanx", lambda: figure(step())), Figure("one psum each", lambda: figure(each()))]

    yield Case(f"{name}, all-reduces", lambda: compared(_count), unit="")
    yield Case(f"{name}, what they sum", lambda: compared(_bytes))
    if not quick:
        yield Case(f"ResNet-50 on {_TOPOLOGY}, gradients summed", _of_resnet)


def _compiled(step: Any, arguments: Any) -> Report:
    return px.preflight(step, *arguments, topology=_TOPOLOGY, effort="quick")


def _count(report: Report) -> float:
    return len({c.operation for c in report.collectives})


def _bytes(report: Report) -> float:
    return sum(c.bytes for c in report.collectives)


def _of_resnet() -> list[Contender]:
    os.environ["KERAS_BACKEND"] = "jax"  # before Keras is imported
    import keras

    with px.abstract():
        model = px.keras.replicate(keras.applications.ResNet50(weights=None), px.Mirrored())
        model.compile(keras.optimizers.SGD(0.1, momentum=0.9), keras.losses.SparseCategoricalCrossentropy())
    report = model.preflight(topology=_TOPOLOGY, batch_size=64 * _CHIPS, effort="quick")
    gradients = sum(c.bytes for c in report.collectives if c.source.startswith("gradient"))
    size = sum(math.prod(v.shape) * 4 for v in model.trainable_variables)
    return [Figure("Phalanx", lambda: gradients), Figure("its trainable parameters", lambda: size)]


@dataclass(frozen=True)
class Figure:
    """A contender whose figure is no time; it is the same in every round."""

    name: str
    value: Callable[[], float]

    def numbers(self) -> None:
        """Those of the training step have a case of their own."""

    def round(self, steps: int) -> float:
        """The figure."""
        return self.value()

    def end(self) -> None:
        """Nothing to do."""
