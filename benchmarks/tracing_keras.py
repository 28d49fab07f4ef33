"""Time to trace a Keras ResNet-50 and its gradient: a tape in `px.function` against `jax.value_and_grad` of Keras's own
`stateless_call`."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import phalanx as px
import phalanx.keras  # before Keras, so that it runs on JAX
from benchmarks.harness import Candidate, Case

import keras  # isort: skip

REPLICAS = (1,)
UNIT = "ms"


def cases(replicas: int, quick: bool) -> Iterator[Case]:
    yield Case("Keras ResNet-50" if not quick else "Keras, two layers", functools.partial(_candidates, quick))


def _candidates(quick: bool) -> list[Candidate]:
    shape = (32, 32, 3)

    def model() -> Any:
        keras.utils.set_random_seed(0)
        if quick:
            layers = keras.layers
            return keras.Sequential(
                [keras.Input(shape), layers.Conv2D(4, 3), layers.BatchNormalization(), layers.Flatten()]
            )
        return keras.applications.ResNet50(weights=None, input_shape=shape, classes=10)

    x = jnp.asarray(np.random.default_rng(0).normal(size=(2, *shape)), jnp.float32)
    taped, plain = model(), model()
    trainable = [v.value for v in plain.trainable_variables]
    others = [v.value for v in plain.non_trainable_variables]

    def function() -> Any:
        @px.function
        def loss_and_gradient(x: Any) -> Any:
            with px.GradientTape() as tape:
                loss = jnp.mean(taped(x, training=True) ** 2)
            return loss, tape.gradient(loss, taped.trainable_variables)

        return loss_and_gradient

    def by_hand() -> Any:
        def loss_fn(trainable: Any, others: Any, x: Any) -> Any:
            outputs, others = plain.stateless_call(trainable, others, x, training=True)
            return jnp.mean(outputs**2), others

        return jax.jit(jax.value_and_grad(loss_fn, has_aux=True))

    return [
        Candidate(
            "Phalanx: tape in px.function",
            lambda: function().get_concrete_function(x),
            lambda: [float(function()(x)[0])],
        ),
        Candidate(
            "jax.jit(jax.value_and_grad)",
            lambda: by_hand().trace(trainable, others, x),
            lambda: [float(by_hand()(trainable, others, x)[0][0])],
        ),
    ]
