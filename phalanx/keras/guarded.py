"""A `NonFiniteGuard` in the steps of `fit`: one that is not finite leaves nothing behind, metrics and averages included."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax.numpy as jnp

from phalanx import state
from phalanx._checks import counterparts
from phalanx.errors import ArgumentError
from phalanx.finite import NonFiniteGuard
from phalanx.keras._keras import keras
from phalanx.keras.law import following, law
from phalanx.variables import Variable


def check(guard: NonFiniteGuard, model: Any) -> None:
    """Refuse what would do nothing, or harm.

    Raises:
        ArgumentError: for a guard of another optimizer, and where the loss is scaled.
    """
    optimizer = model.optimizer
    if guard.policy == "rescale" or isinstance(optimizer, keras.optimizers.LossScaleOptimizer):
        raise ArgumentError(
            "fit: a NonFiniteGuard does not go together with a scaled loss: keras.optimizers.LossScaleOptimizer, which does"
            " that in fit, leaves out steps that are not finite by itself. Use that alone, or policy='raise' or 'skip'"
            " without it."
        )
    if guard.optimizer is not optimizer:
        raise ArgumentError(
            "fit: the NonFiniteGuard among the callbacks is of another optimizer than the model's. Give it the one that"
            " was compiled: px.NonFiniteGuard(model.optimizer)."
        )


def guarded(guard: NonFiniteGuard, model: Any, step: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """A training step of one replica that has never been where its gradients are not finite."""

    def guarded_step(data: Any) -> Any:
        counted: list[Any] = []

        def apply(optimizer: Any, grads: list[Any], variables: Any) -> None:
            with following(replace(law(), guard=None, accumulate=None)):
                if optimizer is guard.optimizer:
                    counted.append(guard._applied(zip(grads, variables), law().op, None))
                else:
                    optimizer.apply(grads, variables)

        place, others = state.top().base, _others(model)
        before = [place.load(v) for v in others]
        with following(replace(law(), guard=apply)):
            results = step(data)
        for finite in counted:
            place.store_all({v: jnp.where(finite, place.load(v), old) for v, old in zip(others, before)})
        return results

    return guarded_step


def _others(model: Any) -> list[Variable]:
    """What a step changes besides the weights: moving averages, seeds, and metrics."""
    metrics = [v for metric in model.metrics for v in metric.variables]
    return list(dict.fromkeys(counterparts([*model.non_trainable_variables, *metrics])))
