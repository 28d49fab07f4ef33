"""The compiled steps of a Keras model on a strategy."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from phalanx.control_flow import scan
from phalanx.distribute.strategy import Strategy
from phalanx.distribute.values import is_per_replica
from phalanx.errors import ArgumentError
from phalanx.finite import NonFiniteGuard
from phalanx.function import Function, function
from phalanx.keras import _keras
from phalanx.keras.accumulation import Accumulator
from phalanx.keras.feed import Batch, Parts
from phalanx.keras.guarded import guarded
from phalanx.keras.law import Law, following
from phalanx.keras.variables import assignments

logger = logging.getLogger("phalanx")

Logs = dict[str, Any]


@dataclass(frozen=True)
class Fitting:
    """What one call of `fit` asks of the steps that run in it."""

    guard: NonFiniteGuard | None = None
    """What keeps steps that are not finite out."""
    averages: Callable[[], Iterable[tuple[Any, Any]]] | None = None
    """Gives pairs of weights and their averages, when validation is to see these."""
    resuming: bool = False
    """Whether a request to stop ends the wait for a batch."""


class Steps:
    """One training, test and prediction step for each setting that is compiled into it."""

    def __init__(self, strategy: Strategy, synchronize_batch_norm: bool = False) -> None:
        self.strategy = strategy
        self.fitting = Fitting()
        self._synchronize_batch_norm = synchronize_batch_norm
        self._accumulator = Accumulator()
        self._functions: dict[Any, Function[..., Any]] = {}
        self._structures: dict[Any, Structure] = {}
        """What each function saw of the model when it was first traced."""
        self._settings: Any = None
        self._structure_of_outputs: Any = None

    @contextmanager
    def fit(self, fitting: Fitting) -> Iterator[None]:
        """The block is a `fit`, which may be in a callback of another."""
        self._accumulator.start_anew()
        before, self.fitting = self.fitting, fitting
        try:
            yield
        finally:
            self.fitting = before

    def _compiled(self, model: Any, kind: str, step: Callable[[Batch], Any]) -> Callable[[Batch], Any]:
        if model.run_eagerly:
            return step
        return self._function(model, kind, step)

    def _function(self, model: Any, kind: str, step: Callable[[Batch], Any]) -> Function[..., Any]:
        if _keras.settings(model) is not self._settings:  # through whichever view of the model it was compiled
            self._functions.clear()
            self._structures.clear()
            self._settings = _keras.settings(model)
        key = kind, self.fitting.guard
        if key in self._structures and self._structures[key] != Structure(model):
            del self._functions[key], self._structures[key]
        if key not in self._functions:

            def noting(batch: Batch) -> Any:
                result = step(batch)  # which may have built the model
                self._structures.setdefault(key, Structure(model))
                return result

            noting.__name__ = noting.__qualname__ = kind
            self._functions[key] = function(noting)
        return self._functions[key]

    @contextmanager
    def averaged_weights(self) -> Iterator[None]:
        """Weights hold their averages in the block, if that is asked for, and are as before after it."""
        averages = self.fitting.averages
        pairs = [] if averages is None else list(averages())
        weights = [(weight, weight.value) for weight, _ in pairs]
        try:
            for weight, average in pairs:
                weight.assign(average.value)
            yield
        finally:
            for weight, value in weights:
                weight.assign(value)

    # ---- with metrics ----

    def counting(self, model: Any, kind: str) -> Callable[[Parts], Logs]:
        """``model.train_step`` or ``model.test_step`` for a batch; its logs are over all rows since the last reset."""
        run = self._compiled(model, kind, self._counted(model, kind))
        return lambda parts: [run(part) for part in parts][-1]

    def trace(self, model: Any, kind: str, batch: Batch) -> None:
        """Trace a step without running it: the variables that it creates are there then."""
        if not model.run_eagerly:
            self._function(model, kind, self._counted(model, kind)).get_concrete_function(batch)

    def training(self, model: Any) -> Function[..., Any]:
        """The traced function of a batch that `fit` calls."""
        return self._function(model, "train_step", self._counted(model, "train_step"))

    def _counted(self, model: Any, kind: str) -> Callable[[Batch], Logs]:
        step = getattr(model, kind)
        if self.fitting.guard is not None and kind == "train_step":
            step = guarded(self.fitting.guard, model, step)

        def on_replicas(batch: Batch) -> Logs:
            loss_is_metric = False

            def replica_step(data: Any) -> Logs:
                nonlocal loss_is_metric
                with following(self._law(batch, data)):
                    before = _loss_updates(model)
                    logs = _repeated(step, data, batch.steps)
                    loss_is_metric = _loss_updates(model) > before
                    return logs

            logs = self.strategy.run(replica_step, args=(batch.data,))
            # Keras adds a metric "loss"; a step that does not use it may still have a loss of its own.
            results = _results([m for m in model.metrics if loss_is_metric or m is not model._loss_tracker])
            return {name: results[name] if name in results else self._merged(v) for name, v in logs.items()}

        return on_replicas

    def _law(self, batch: Batch, data: Any) -> Law:
        def accumulate(optimizer: Any, grads: list[Any], variables: Any) -> list[Any] | None:
            rows = jax.tree.leaves(data)[0].shape[0] * (self.strategy.num_replicas if batch.is_split else 1)
            known = optimizer._trainable_variables if variables is None else list(variables)
            return self._accumulator.gradients(optimizer, grads, known, rows, batch.accumulate == "apply")

        return Law(
            "mean",
            rows_are_the_same=not batch.is_split,
            synchronize_batch_norm=self._synchronize_batch_norm,
            accumulate=None if batch.accumulate == "no" else accumulate,
        )

    def _merged(self, value: Any) -> Any:
        return jax.tree.map(
            lambda v: self.strategy.reduce("mean", v) if is_per_replica(v) else v, value, is_leaf=is_per_replica
        )

    # ---- without ----

    def predicting(self, model: Any) -> Callable[[Parts], Any]:
        """``model.predict_step`` for a batch; its outputs are on the host, in the order of the rows.

        They come as a list, which Keras's loop puts together array by array; see `structured`.
        """

        def on_replicas(batch: Batch) -> Any:
            return self.strategy.run(model.predict_step, args=(batch.data,))

        run = self._compiled(model, "predict_step", on_replicas)

        def predicted(parts: Parts) -> list[Any]:
            outputs = concatenated([self._to_host(run(part), part) for part in parts])
            arrays, self._structure_of_outputs = jax.tree.flatten(outputs)
            return arrays

        return predicted

    def structured(self, arrays: list[Any]) -> Any:
        """Predictions as the model gives them: nothing stays nothing, and classes that JAX knows are as they were."""
        return jax.tree.unflatten(self._structure_of_outputs, arrays)

    def _to_host(self, outputs: Any, part: Batch) -> Any:
        leaf = jax.tree.leaves(part.data, is_leaf=is_per_replica)[0]  # of a replica's part, where it has one
        n, expected_rows = self.strategy.num_replicas, leaf.shape[0]

        def rows(path: Any, value: Any) -> Any:
            elsewhere = is_per_replica(value) and not value.stacked.is_fully_addressable
            if elsewhere and part.is_split and value.shape[:1] == (expected_rows,):
                return np.asarray(self.strategy.gather(value))
            shards = self.strategy.local_results(value) if is_per_replica(value) else (value,) * n
            arrays = [np.asarray(shard) for shard in (shards if part.is_split else shards[:1])]
            if arrays[0].ndim == 0 or (part.is_split and len(arrays[0]) != expected_rows):
                raise ArgumentError(
                    f"predict: output{jax.tree_util.keystr(path)} has shape {arrays[0].shape} for {expected_rows} rows: there"
                    " is one output for each row. Compute what concerns the whole batch afterwards, from the predictions."
                )
            return np.concatenate(arrays)

        return jax.tree_util.tree_map_with_path(rows, outputs, is_leaf=is_per_replica)


class Structure:
    """What Keras reads of a model while a step is traced, and lets users change between two calls.

    Layers may come and go, be frozen, quantized or given LoRA weights; the optimizer and its schedule may be replaced.
    """

    def __init__(self, model: Any) -> None:
        layers, variables = model._flatten_layers(), model.variables
        self._parts = [*layers, *variables, *_keras.parts_of_optimizer(model)]
        """Kept, so that no other object gets the identity of one of them."""
        self._seen = [*map(id, self._parts)], [part.trainable for part in (*layers, *variables)]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Structure) and self._seen == other._seen

    __hash__ = None  # type: ignore[assignment]


def _repeated(step: Callable[[Any], Logs | None], data: Any, steps: int | None) -> Logs:
    """The logs of the last of so many steps, in one loop on the device."""
    if steps is None:
        return step(data) or {}
    _, logs = scan(lambda carry, rows: (carry, step(rows) or {}), 0, data)
    return jax.tree.map(lambda values: values[-1], logs)


def concatenated(outputs: list[Any]) -> Any:
    """Several batches' outputs as one, by rows."""
    return outputs[0] if len(outputs) == 1 else jax.tree.map(lambda *leaves: np.concatenate(leaves), *outputs)


def _results(metrics: list[Any]) -> Logs:
    """The metrics' results, as the logs name them."""
    results: Logs = {}
    for metric in metrics:
        if not getattr(metric, "built", True):
            continue  # given to `compile`, and not used by a step of the user's
        value = metric.result()
        results |= value if isinstance(value, dict) else {metric.name: value}
    return results


def _loss_updates(model: Any) -> int:
    tracker = model._loss_tracker
    return 0 if tracker is None else sum(map(assignments, tracker.variables))
