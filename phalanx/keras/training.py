"""Training steps in the style of TensorFlow 2, and Keras's own loops around them, on a strategy."""

from __future__ import annotations

import contextlib
import inspect
import os
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any, Literal

import jax
import jax.numpy as jnp

from phalanx._checks import check_choice, check_int
from phalanx.abstract import abstract
from phalanx.checkpoint.manager import CheckpointManager
from phalanx.cluster.preemption import Preempted, preemption
from phalanx.data.dataset import DistributedDataset
from phalanx.distribute.strategy import Strategy
from phalanx.errors import ArgumentError, StrategyError
from phalanx.keras import _keras
from phalanx.keras._keras import keras
from phalanx.keras.batches import Passes, adapter_of, check_alone, is_source_function
from phalanx.keras.callbacks import Callbacks
from phalanx.keras.checkpointed import is_built
from phalanx.keras.examples import example_batch
from phalanx.keras.feed import Batch, DatasetFeed, Feed, Parts, distribute
from phalanx.keras.law import metrics_read_merged
from phalanx.keras.once import for_this_process, write_once, writer_of
from phalanx.keras.resume import Resume
from phalanx.keras.steps import Fitting, Logs, Steps
from phalanx.keras.variables import counterpart, strategy_of
from phalanx.preflight.api import own_target, report_on, settings
from phalanx.preflight.compiler import Effort
from phalanx.preflight.program import VariableStep
from phalanx.preflight.report import Report
from phalanx.preflight.targets import find
from phalanx.self_check import self_check
from phalanx.tape import GradientTape


class StatefulSteps:
    """One step of one replica on its rows; models override them."""

    def train_step(self: Any, data: Any) -> Logs:
        """Compute the loss and its gradients, update weights and metrics; returns the metrics' results."""
        x, y, sample_weight = _keras.unpack(data)
        with GradientTape() as tape:
            y_pred = self(x, training=True) if self._call_has_training_arg else self(x)
            loss = self._compute_loss(x=x, y=y, y_pred=y_pred, sample_weight=sample_weight, training=True)
            if jnp.ndim(loss):
                raise ArgumentError(
                    f"Model {self.name!r}: its loss has shape {jnp.shape(loss)}, and only one number can be minimised. Give the"
                    " loss a reduction, such as 'sum_over_batch_size' (the default), in place of None."
                )
            self._loss_tracker.update_state(loss, sample_weight=_rows(x))
            scaled = self.optimizer.scale_loss(loss)
        weights = self.trainable_weights
        grads = tape.gradient(scaled, weights, unconnected_gradients="zero")  # as jax.grad, and so Keras, has it
        self.optimizer.apply(grads, weights)  # which may be none, where all layers are frozen
        return self.compute_metrics(x, y, y_pred, sample_weight=sample_weight)  # type: ignore[no-any-return]

    def test_step(self: Any, data: Any) -> Logs:
        """Compute the loss and update metrics; returns the metrics' results."""
        x, y, sample_weight = _keras.unpack(data)
        y_pred = self(x, training=False) if self._call_has_training_arg else self(x)
        loss = self._compute_loss(x=x, y=y, y_pred=y_pred, sample_weight=sample_weight, training=False)
        self._loss_tracker.update_state(loss, sample_weight=_rows(x))
        return self.compute_metrics(x, y, y_pred, sample_weight=sample_weight)  # type: ignore[no-any-return]

    def predict_step(self: Any, data: Any) -> Any:
        """The outputs for the rows."""
        x, _, _ = _keras.unpack(data)
        return self(x, training=False) if self._call_has_training_arg else self(x)


def _rows(x: Any) -> int:
    return int(jax.tree.leaves(x)[0].shape[0])


class Loops:
    """Keras's `fit`, `evaluate`, `predict` and their like, each step run on the replicas.

    Values live in the variables, so the state that Keras hands from step to step on JAX is empty here.
    """

    _steps: Steps

    @property
    def strategy(self) -> Strategy:
        """Where the steps run."""
        return self._steps.strategy

    # ---- Keras's entry points ----

    def fit(
        self: Any,
        *args: Any,
        accumulate_steps: int = 1,
        validate_with: Literal["weights", "ema"] = "weights",
        resume: str | os.PathLike[str] | CheckpointManager | None = None,
        **kwargs: Any,
    ) -> Any:
        """As in Keras, on all replicas; `batch_size` is that of all of them together.

        Args:
            args: as Keras's.
            accumulate_steps: batches whose gradients make one update of the weights, which is that of one batch
                so many times as large: the mean over all rows, then clipping, schedules and loss scaling (for
                losses that are means over rows). An epoch has as many steps as updates.
            validate_with: ``"ema"``: validation sees the moving averages of an optimizer with ``use_ema=True`` in
                place of the weights.
            resume: a folder where the state after each epoch is kept, or a `CheckpointManager`, whose `every` says after
                how many steps to save in an epoch too. fit goes on from the last state that it finds there as if it had
                never stopped, and returns at once when all epochs are done. SIGTERM ends it after the step (or where it waits
                for data): the state is saved, and the program exits with `px.cluster.EXIT_PREEMPTED`.
            kwargs: as Keras's.

        Raises:
            ArgumentError: for `accumulate_steps` that is no positive int, or averages that are not there.
        """
        check_int(accumulate_steps, "fit: accumulate_steps")
        check_choice(validate_with, "fit: validate_with", ("weights", "ema"))
        given = _arguments(super().fit, args, kwargs)  # type: ignore[misc]
        if given["validation_split"] and given["validation_data"] is None:
            _split_off_validation(given)
        if given["validation_data"] is not None:
            x, y, sample_weight = _keras.unpack(given["validation_data"])
            given["validation_data"] = self._feed(
                x, y, sample_weight, given["validation_batch_size"] or given["batch_size"], given["validation_steps"]
            )
        given["x"] = self._feed(
            given["x"],
            given.pop("y"),
            given.pop("sample_weight"),
            given.pop("batch_size"),
            given["steps_per_epoch"],
            shuffle=given.pop("shuffle"),
            class_weight=given.pop("class_weight"),
            accumulate=accumulate_steps,
        )
        callbacks = _keras.callbacks(given["callbacks"])
        resuming = None if resume is None else self._resume(resume, given["x"], callbacks)
        given["callbacks"] = [*callbacks, *filter(None, [resuming])]
        steps = given["steps_per_epoch"] or given["x"].num_batches
        given["callbacks"] = self._callbacks(given, steps, epochs=given["epochs"], add_history=True)
        fitting = Fitting(
            guard=given["callbacks"].guard,
            averages=_keras.averages(self.optimizer) if validate_with == "ema" else None,
            resuming=resuming is not None,
        )
        try:
            with (
                preemption.listening() if resuming else nullcontext(),
                self._steps.fit(fitting),
                self._on_the_strategy(),
            ):
                return super().fit(**given)  # type: ignore[misc]
        except Preempted:
            assert resuming is not None
            resuming.leave()
        finally:
            if resuming is not None:
                resuming.close()

    def _resume(self: Any, where: Any, feed: Any, callbacks: list[Any]) -> Resume:
        def build() -> None:
            own_step = type(self).train_step is not StatefulSteps.train_step
            if own_step and not (is_built(self) and self.optimizer.built):  # the step makes what it uses
                self._steps.trace(self, "train_step", self._on_replicas(feed.first())[0])

        return Resume(where, build, feed, callbacks)

    def evaluate(self: Any, *args: Any, **kwargs: Any) -> Any:
        """As in Keras, on all replicas."""
        given = _arguments(super().evaluate, args, kwargs)  # type: ignore[misc]
        feed = self._feed(
            given["x"], given.pop("y"), given.pop("sample_weight"), given.pop("batch_size"), given["steps"]
        )
        given["callbacks"] = self._callbacks(given, given["steps"] or feed.num_batches, epochs=1)
        with self._on_the_strategy(), self._steps.averaged_weights():
            return super().evaluate(**given | {"x": feed})  # type: ignore[misc]

    def predict(self: Any, *args: Any, **kwargs: Any) -> Any:
        """As in Keras, on all replicas: one output for each row, in the order of the rows."""
        given = _arguments(super().predict, args, kwargs)  # type: ignore[misc]
        feed = self._feed(given["x"], None, None, given.pop("batch_size"), given["steps"], divisible=True)
        if not all(layer.built for layer in self._flatten_layers()):
            _keras.build(self, _keras.unpack(feed.first())[0])
            feed.on_epoch_end()
        given["callbacks"] = self._callbacks(given, given["steps"] or feed.num_batches, epochs=1)
        with self._on_the_strategy():
            return self._steps.structured(super().predict(**given | {"x": feed}))  # type: ignore[misc]

    def train_on_batch(self: Any, *args: Any, **kwargs: Any) -> Any:
        """As in Keras, on all replicas."""
        with self._on_the_strategy():
            return super().train_on_batch(*args, **kwargs)  # type: ignore[misc]

    def test_on_batch(self: Any, *args: Any, **kwargs: Any) -> Any:
        """As in Keras, on all replicas."""
        with self._on_the_strategy():
            return super().test_on_batch(*args, **kwargs)  # type: ignore[misc]

    def predict_on_batch(self: Any, x: Any) -> Any:
        """As in Keras, on all replicas."""
        with self._on_the_strategy():
            return self._steps.structured(super().predict_on_batch(x))  # type: ignore[misc]

    def save(self: Any, filepath: Any, *args: Any, **kwargs: Any) -> Any:
        """As in Keras. With several processes one writes, by itself, and the file is complete or not there."""
        return write_once(self.strategy, super().save, filepath, *args, **kwargs)  # type: ignore[misc]

    def save_weights(self: Any, filepath: Any, *args: Any, **kwargs: Any) -> Any:
        """As `save`."""
        return write_once(self.strategy, super().save_weights, filepath, *args, **kwargs)  # type: ignore[misc]

    def sync_to_host(self: Any) -> None:
        """Wait for the last step; the original, which shares all values, is then as it left them."""
        jax.block_until_ready([v.value for v in (*self.variables, *self.optimizer.variables)])

    def self_check(self: Any, x: Any, y: Any = None, sample_weight: Any = None, batch_size: int | None = None) -> str:
        """Train three batches on one replica and on all of them, and compare; everything is then as it was.

        Args:
            x: inputs, as for `fit`.
            y: targets.
            sample_weight: weights of rows.
            batch_size: rows of all replicas in a batch.

        Returns:
            ``"equal"``, or which variable or metric differs first and by how much. Dropout draws other numbers on
            each replica, and batch normalisation that is not synchronized other moments: they differ by design.
        """
        feed = self._feed(x, y, sample_weight, batch_size, None)
        with self.strategy.scope():
            self._symbolic_build(data_batch=feed.first())
        train = self._steps.counting(self, "train_step")

        def step(batch: Batch) -> Logs:
            self.reset_metrics()
            logs = train((batch,))
            self.reset_metrics()  # how often they counted depends on the number of replicas
            return logs

        batches = [part for parts in feed.get_jax_iterator() for part in parts if part.is_split]
        return self_check(step, batches)

    def preflight(
        self: Any,
        x: Any = None,
        y: Any = None,
        sample_weight: Any = None,
        *,
        topology: str | None = None,
        batch_size: int | None = None,
        num_slices: int = 1,
        timeout: float = 900.0,
        effort: Effort = "full",
    ) -> Report:
        """Compile the training step of `fit` for devices that need not be here; see `phalanx.preflight`.

        The model is built, if it was not, and otherwise stays as it is. It must have been compiled (``compile``).

        Args:
            x: inputs for their shapes: arrays or ``jax.ShapeDtypeStruct``. Default: what the model says it takes.
            y: targets, likewise. Default: as the outputs are, or class numbers where the loss is sparse.
            sample_weight: weights of rows, likewise.
            topology: as in `phalanx.preflight`. Default: the strategy's own devices.
            batch_size: rows of all replicas in a batch. Default: those of `x`, or one for each device.
            num_slices: as in `phalanx.preflight`.
            timeout: as in `phalanx.preflight`.
            effort: as in `phalanx.preflight`.

        Raises:
            ArgumentError: when the model does not say what it takes or was not compiled, and for an unknown topology.
            UnevenBatchError: when the batch does not divide by the replicas.
            CompilationError: when the compiler is not installed.
        """
        if not self.compiled:
            raise ArgumentError(
                f"preflight: model {self.name!r} has no training step yet: call model.compile(optimizer, loss) before."
            )
        if batch_size is not None:
            check_int(batch_size, "preflight: batch_size")
        target = find(topology, num_slices) if topology is not None else own_target(self.strategy)
        data = _as_on_devices(example_batch(self, x, y, sample_weight, batch_size or target.num_devices))
        has_storage = all(counterpart(v).has_storage for v in self.variables)
        with nullcontext() if has_storage else abstract(), self.strategy.scope():
            self._symbolic_build(data_batch=data)
        step = VariableStep(self._steps.training(self), (Batch(data),), {}, self.strategy)
        return report_on(step, target, batch_size, settings(timeout, effort))

    def _callbacks(self, given: dict[str, Any], steps: int | None, **options: Any) -> Callbacks:
        verbose, callbacks = given["verbose"], given["callbacks"]
        if isinstance(callbacks, keras.callbacks.CallbackList):
            return callbacks
        if writer_of(self.strategy) not in (None, jax.process_index()):
            verbose = 0
        callbacks = for_this_process(self.strategy, _keras.callbacks(callbacks))
        return Callbacks(callbacks, add_progbar=verbose != 0, verbose=verbose, steps=steps, model=self, **options)

    def _feed(
        self: Any,
        x: Any,
        y: Any,
        sample_weight: Any,
        batch_size: Any,
        steps: Any,
        *,
        shuffle: bool = False,
        class_weight: Any = None,
        divisible: bool = False,
        accumulate: int = 1,
    ) -> Any:
        if isinstance(x, (Feed, DatasetFeed)):
            return x
        runs = {
            "divisible": divisible,
            "steps": self.steps_per_execution,
            "accumulate": accumulate,
            "class_weight": class_weight,
        }
        options = {"batch_size": batch_size, "steps_per_epoch": steps, "shuffle": shuffle}
        if is_source_function(x):
            check_alone(x, y=y, sample_weight=sample_weight)
            made = x()
            x = made if isinstance(made, DistributedDataset) else Passes(x, made, **options)
        if isinstance(x, DistributedDataset):
            check_alone(x, y=y, sample_weight=sample_weight)
            return DatasetFeed(x, self.strategy, steps, **runs)
        adapter = adapter_of(x, y, sample_weight, **options)
        if adapter.num_batches == 0:
            raise ArgumentError(f"Model {self.name!r}: the data is empty; at least one row is needed.")
        return Feed(adapter, self.strategy, **runs)

    @contextlib.contextmanager
    def _on_the_strategy(self: Any) -> Iterator[None]:
        _check_layers(self)
        _check_owner(self)
        # The model that this is a view of keeps its own functions, which work on other state.
        names = ("train_function", "test_function", "predict_function")
        before = {name: self.__dict__.get(name) for name in names}
        try:
            with self.strategy.scope():
                yield
        finally:
            self.__dict__.update(before)

    # ---- what Keras's loops call ----

    def make_train_function(self: Any, force: bool = False) -> None:
        """Keras's loops ask for it."""
        self.train_function = self._stepper(self._steps.counting(self, "train_step"))

    def make_test_function(self: Any, force: bool = False) -> None:
        """Keras's loops ask for it."""
        self.test_function = self._stepper(self._steps.counting(self, "test_step"))

    def make_predict_function(self: Any, force: bool = False) -> None:
        """Keras's loops ask for it."""
        self.predict_function = self._stepper(self._steps.predicting(self))

    def _next_of(self, iterator: Iterator[Any]) -> Any:
        if not self._steps.fitting.resuming:
            return next(iterator)
        for parts in preemption.next_of(iterator):
            return parts
        raise StopIteration

    def _stepper(self, step: Callable[[Parts], Any]) -> Callable[[Any, Iterator[Any]], tuple[Any, Any]]:
        def steps(state: Any, iterator: Iterator[Any]) -> tuple[Any, Any]:
            parts = self._next_of(iterator)
            if isinstance(parts, tuple) and not parts:  # done before the program stopped
                return {}, state
            return step(self._on_replicas(parts)), state

        return steps

    def _on_replicas(self, batch: Any) -> Parts:
        """What `Feed` has sent already; or a batch of Keras's ``..._on_batch``."""
        if isinstance(batch, tuple) and batch and isinstance(batch[0], Batch):
            return batch
        return distribute(batch, self.strategy, divisible=False)

    def get_metrics_result(self: Any) -> Logs:
        """The metrics over the rows of all replicas."""
        with metrics_read_merged():
            return super().get_metrics_result()  # type: ignore[misc]

    def _get_jax_state(self, **wanted: bool) -> tuple[None, ...]:
        return tuple(None for name, is_wanted in wanted.items() if is_wanted and name != "purge_model_variables")

    def _get_metrics_result_or_logs(self, logs: Logs) -> Logs:
        # They are the metrics' results already; Keras would put its own "loss" for that of a user's step.
        return logs or self.get_metrics_result()  # type: ignore[attr-defined,no-any-return]

    def _symbolic_build(self: Any, iterator: Any = None, data_batch: Any = None) -> None:
        if type(self).train_step is not StatefulSteps.train_step:
            return  # What `call` takes need not be the data: the layers are built by the step that uses them.
        # Nothing is taken from the data where nothing is left to build: it may be a draw of random numbers.
        feeds = () if iterator is None else (iterator.data_adapter,)
        batches = ((0, 0, iter([_as_on_devices(feed.first())])) for feed in feeds)
        super()._symbolic_build(iterator=batches, data_batch=_as_on_devices(data_batch))  # type: ignore[misc]


def _as_on_devices(batch: Any) -> Any:
    """The shapes and dtypes that JAX will give a host batch: its 64 bits are 32, unless it is told otherwise."""

    def spec(array: Any) -> jax.ShapeDtypeStruct:
        dtype = keras.backend.standardize_dtype(array.dtype)
        return jax.ShapeDtypeStruct(array.shape, jax.dtypes.canonicalize_dtype(dtype))

    return jax.tree.map(spec, batch, is_leaf=lambda leaf: hasattr(leaf, "dtype"))


def _check_layers(model: Any) -> None:
    if keras.distribution.distribution() is not None:
        raise StrategyError(
            "A keras.distribution is set, which splits the same arrays in its own way. Unset it for replicated models:"
            " keras.distribution.set_distribution(None)."
        )
    for layer in model._flatten_layers():
        if not layer.supports_jit:
            raise StrategyError(
                f"Layer {layer.name!r} ({type(layer).__name__}) cannot be compiled, so that it runs on no replica. Apply it"
                " to the data beforehand, on the host."
            )


def _check_owner(model: Any) -> None:
    optimizer = getattr(model, "optimizer", None)
    variables = (*model.variables, *model.metrics_variables, *(() if optimizer is None else optimizer.variables))
    owners = {owner for v in variables if (owner := strategy_of(v)) is not None}
    if owners - {model.strategy}:
        other = (owners - {model.strategy}).pop()
        raise StrategyError(
            f"Model {model.name!r} has trained on another {other!r}, where its variables are now, and not on this view's"
            f" {model.strategy!r}. Make one strategy, and replicate the model on it each time; to move to other devices make a"
            " new model (keras.models.clone_model) and set_weights."
        )


def _arguments(method: Callable[..., Any], args: Any, kwargs: Any) -> dict[str, Any]:
    bound = inspect.signature(method).bind(*args, **kwargs)
    bound.apply_defaults()
    given = dict(bound.arguments)
    return given | given.pop("kwargs", {})


def _split_off_validation(given: dict[str, Any]) -> None:
    names = ("x", "y", "sample_weight")
    rest, validation = _keras.train_validation_split(
        tuple(given[name] for name in names), validation_split=given.pop("validation_split")
    )
    given.update(zip(names, rest), validation_data=validation)
