"""`fit` of a replicated Keras model next to Keras alone, or its own DataParallel, and to TensorFlow.

A figure is the time of a whole epoch; the case says of how many steps.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import jax
import numpy as np

import phalanx as px
import phalanx.keras  # before Keras, so that it runs on JAX
from benchmarks import peers
from benchmarks.harness import Candidate, Case, Contender
from benchmarks.problems import mlp_parameters

import keras  # isort: skip

REPLICAS = (1, 2, 8)
UNIT = "ms"


def cases(replicas: int, quick: bool) -> Iterator[Case]:
    steps = 2 if quick else 50
    for layers, width, batch in ((3, 256, 256), (100, 32, 64)):
        name = f"{layers} layers of {width}, batch {batch}, {steps} steps"
        yield Case(name, functools.partial(_contenders, replicas, layers, width, batch, steps))


def _contenders(replicas: int, layers: int, width: int, batch: int, steps: int) -> list[Contender]:
    rng = np.random.default_rng(0)
    x = rng.normal(size=(steps * batch, width)).astype(np.float32)
    y = rng.normal(size=(steps * batch, 1)).astype(np.float32)

    def model() -> Any:
        hidden = [keras.layers.Dense(width, "relu") for _ in range(layers)]
        made = keras.Sequential([keras.layers.Input((width,)), *hidden, keras.layers.Dense(1)])
        made.set_weights(mlp_parameters([width] * (layers + 1) + [1]))  # libraries draw different numbers
        return made

    def fit(
        make: Callable[[], Any], around: Callable[[], AbstractContextManager[Any]] = nullcontext
    ) -> Callable[[], Any]:
        with around():
            model = make()
            model.compile(keras.optimizers.Adam(1e-3), "mse")

        def epoch() -> Any:
            with around():
                return model.fit(x, y, batch_size=batch, verbose=0, shuffle=False).history["loss"]

        return epoch

    devices = jax.devices()[:replicas]
    epochs = {"Phalanx": fit(lambda: px.keras.replicate(model(), px.Mirrored(devices)))}
    if replicas == 1:
        epochs["Keras"] = fit(model)
    elif replicas > 2 and devices[0].platform == "cpu":
        # It does not wait between steps, whose collectives then block each other until jaxlib aborts the process.
        print("Keras, DataParallel: left out on this many CPU devices, where it hangs", file=sys.stderr)
    else:
        names = [f"cpu:{d.id}" if d.platform == "cpu" else f"{d.platform}:{d.id}" for d in devices]
        epochs["Keras, DataParallel"] = fit(model, keras.distribution.DataParallel(devices=names).scope)
    setting = {"replicas": replicas, "layers": layers, "width": width, "batch": batch, "steps": steps}
    there = peers.found({"Keras on TensorFlow, MirroredStrategy": "tensorflow"}, "keras_fit", setting, quick=steps < 50)
    return [*(Candidate(name, epoch, epoch) for name, epoch in epochs.items()), *there]
