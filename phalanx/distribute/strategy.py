"""`Strategy`: devices, the variables that live on them, and what a program does with all replicas."""

from __future__ import annotations

import functools
import itertools
import logging
import weakref
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import jax
import numpy as np

from phalanx import _jax, state
from phalanx._checks import check_call, check_function, counterparts, take_apart
from phalanx._eager_programs import EagerPrograms, as_function
from phalanx._tensorflow import STRATEGY, no_such
from phalanx.data.dataset import AutoShard, DistributedDataset, InputContext
from phalanx.data.elements import Remainder
from phalanx.distribute.collectives import check_op
from phalanx.distribute.feeding import ValueContext, values_from_function
from phalanx.distribute.initial import InitialValues
from phalanx.distribute.placement import Placement
from phalanx.distribute.reductions import compute, gather_leaf, is_distributed, reduce_leaf
from phalanx.distribute.run import run_in_trace
from phalanx.distribute.values import PerReplica, is_per_replica
from phalanx.errors import ArgumentError, ArgumentTypeError, StrategyError
from phalanx.variables import Component, Variable

logger = logging.getLogger("phalanx")

_of_several_processes = itertools.count()
"""Strategies, which every process makes in the same order."""


class Strategy(Placement):
    """Runs one program on several devices, with variables kept equal on all of them.

    Use `OneDevice`, `Mirrored` or `TPU`.

    Example:
        >>> isinstance(px.OneDevice(), px.Strategy)
        True
    """

    def __init__(self, devices: Sequence[Any]) -> None:
        super().__init__(devices)
        self._variables: dict[int, weakref.ref[Variable]] = {}
        self._eager_runs = EagerPrograms()
        several = len({device.process_index for device in devices}) > 1
        self._initial_values = InitialValues(self, next(_of_several_processes)) if several else None
        self.on_register: Callable[[Variable], None] | None = None
        """Called with each variable that joins the strategy."""
        self._announce()

    def _announce(self) -> None:
        leads = jax.process_index() == min(device.process_index for device in self.devices)
        logger.log(logging.INFO if leads else logging.DEBUG, "%s", self.describe())

    @property
    def key(self) -> Hashable:
        """Part of the key of every trace made under this strategy."""
        return (self, self.devices)

    def describe(self) -> str:
        """One line: replicas and their devices, processes."""
        return (
            f"{type(self).__name__}: {self.num_replicas} replica{'s' * (self.num_replicas > 1)} on {_jax.span(self.devices)},"
            f" {jax.process_count()} process{'es' * (jax.process_count() > 1)}"
        )

    def __getattr__(self, name: str) -> Any:
        raise no_such(repr(type(self).__name__), name, STRATEGY)

    # ---- variables ----

    def register(self, variable: Variable) -> None:
        """Remember a variable of this strategy (for as long as it lives)."""
        if self._initial_values is not None and not variable.per_replica:
            with state.lifted_out():
                value = self._initial_values.settle(variable)
                if value is not None:
                    variable._replace(self.place(value, per_replica=False))
        key = id(variable)
        self._variables[key] = weakref.ref(variable, lambda _: self._variables.pop(key, None))
        if self.on_register is not None:
            self.on_register(variable)

    @property
    def variables(self) -> list[Variable]:
        """The live variables of this strategy."""
        return [v for ref in list(self._variables.values()) if (v := ref()) is not None]

    def adopt(self, variable: Variable) -> None:
        """Move a variable that was made outside every scope to this strategy.

        Raises:
            StrategyError: for a per-replica variable that the same traced function has read already.
        """
        if variable.strategy is not None:
            return
        place = state.top().base
        if (
            variable.per_replica
            and self.num_replicas > 1
            and place.parent is not None
            and place.parent.base.holds(variable)
        ):
            raise StrategyError(
                f"{variable.label} was made outside the scope of {self!r} and read in a traced function before its first"
                " replica. Create it in the scope."
            )
        with state.lifted_out(), state.turn(), state.lock:
            if variable.strategy is not None:  # another thread was first
                return
            if not variable.has_storage:
                variable.strategy = self
                shape = (self.num_replicas, *variable.shape) if variable.per_replica else variable.shape
                variable._replace(jax.ShapeDtypeStruct(shape, variable.dtype))
                self.register(variable)
                return
            stored = None if variable._stored is None else state.borrow(variable)
            variable.strategy = self
            if stored is not None:
                if variable.per_replica:
                    stored = state.CrossReplica(self).spread(variable, stored[0])
                variable._replace(self.place(stored, per_replica=variable.per_replica))
        self.register(variable)

    def check_owner(self, value: PerReplica, caller: str) -> None:
        """Check that a per-replica value was made by this strategy and is whole.

        Raises:
            StrategyError: when it was made by another strategy.
            ArgumentError: when it does not hold one part for each replica.
        """
        if value.strategy is not self:
            raise StrategyError(f"{caller}: a PerReplica of {value.strategy!r} was given to {self!r}.")
        local = _jax.in_replica_trace() and np.shape(value.stacked)[:1] == (1,)
        if not local and np.shape(value.stacked)[:1] != (self.num_replicas,):
            raise ArgumentError(
                f"{caller}: a PerReplica holds an array of shape {np.shape(value.stacked)} instead of one part for each of"
                f" {self.num_replicas} replicas. jax.tree.map works on all parts at once, with the replica axis first."
            )

    # ---- contexts ----

    @contextmanager
    def scope(self) -> Iterator[Strategy]:
        """Variables made in the block belong to this strategy.

        Raises:
            StrategyError: inside a replica, or inside the scope of another strategy.

        Example:
            >>> strategy = px.OneDevice()
            >>> with strategy.scope():
            ...     w = px.Variable(1.0)
            >>> w
            Variable(name='Variable', shape=(), dtype=float32, mirrored x1, value=1.0)
        """
        context = state.context()
        if context.in_replica:
            raise StrategyError(
                "strategy.scope() cannot be entered in a replica: the strategy is in effect there already."
            )
        if context.strategy not in (None, self):
            raise StrategyError(
                f"The scope of {self!r} was entered inside the scope of {context.strategy!r}: strategies cannot be mixed."
            )
        with state.pushed(state.ContextFrame(state.top(), state.CrossReplica(self))):
            yield self

    def _require_cross_replica(self, method: str, instead: str) -> None:
        context = state.context()
        if context.in_replica:
            raise StrategyError(f"strategy.{method} was called in a replica. {instead}")
        if context.strategy not in (None, self):
            raise StrategyError(
                f"strategy.{method} of {self!r} was called inside the scope of {context.strategy!r}: strategies cannot be mixed."
            )

    # ---- running ----

    def run(self, fn: Callable[..., Any], args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None) -> Any:
        """Call ``fn(*args, **kwargs)`` on every replica, as one program.

        `fn` is traced once, whatever the number of replicas; called outside a traced function, `run`
        compiles and remembers it by its code and what it closes over.

        Args:
            fn: the replica function.
            args: `PerReplica` values reach each replica as its own part, also inside pytrees; everything
                else reaches all replicas as it is.
            kwargs: likewise.

        Returns:
            The results: as `PerReplica` where they may differ between replicas, else as plain arrays.

        Raises:
            StrategyError: in a replica, or inside the scope of another strategy.
            AggregationRequiredError: see `Variable.assign`.

        Example:
            >>> strategy = px.Mirrored()
            >>> total = strategy.run(lambda x: px.get_replica_context().all_reduce("mean", x), args=(2.0,))
            >>> float(total)
            2.0
        """
        check_function(fn, "strategy.run")
        self._require_cross_replica(
            "run", "It is running already: call the function, or use the replica context to reduce."
        )
        if state.context().in_merge:
            raise StrategyError("strategy.run was called in a merge function, which is part of a run already.")
        name = getattr(fn, "__name__", type(fn).__name__)
        checked = check_call(args, kwargs, f"strategy.run({name}")
        with state.pushed(state.ContextFrame(state.top(), state.CrossReplica(self))):
            if state.top().is_eager:
                construct = functools.partial(run_in_trace, self)
                program = as_function(
                    name, construct, fn, parameters=["args", "kwargs"], options=name, keep=self._eager_runs
                )
                return program(*checked)
            return run_in_trace(self, fn, *checked, options=name)

    # ---- reducing and looking ----

    def reduce(self, op: str, value: Any, axis: int | None = None) -> Any:
        """Merge the replicas' values into one.

        Args:
            op: ``"sum"`` or ``"mean"`` (of integers: a float).
            value: `PerReplica`, variable, array, number, or a pytree of them. What is not per replica
                counts as held by each of them: its sum is N times the value.
            axis: reduce along this axis of each part too; ``"mean"`` divides by all rows of all replicas.

        Raises:
            StrategyError: in a replica.
            ArgumentError: for an unknown op or axis.

        Example:
            >>> strategy = px.OneDevice()
            >>> losses = strategy.run(lambda: px.get_replica_context().replica_id + 1.0)
            >>> float(strategy.reduce("sum", losses))
            1.0
        """
        self._require_cross_replica("reduce", "Use px.get_replica_context().all_reduce(op, value).")
        op = check_op(op, "reduce")
        leaves, structure = take_apart(value, "reduce", is_distributed)
        return jax.tree.unflatten(structure, [reduce_leaf(self, op, leaf, axis) for leaf in leaves])

    def gather(self, value: Any, axis: int = 0) -> Any:
        """The parts of all replicas side by side along `axis`.

        Args:
            value: `PerReplica` or a pytree of them; other arrays are returned as they are.
            axis: an axis of each part.

        Raises:
            StrategyError: in a replica.
            ArgumentError: for scalars, or when there is no such axis.
        """
        self._require_cross_replica("gather", "Use px.get_replica_context().all_gather(value, axis).")

        leaves, structure = take_apart(value, "gather", is_distributed)
        return jax.tree.unflatten(structure, [gather_leaf(self, leaf, axis) for leaf in leaves])

    def merge_components(self, stacked: Any, aggregation: str) -> Any:
        """The one value that stands for all components of a per-replica variable, in their dtype."""
        return compute(self, state.merge_components, stacked, aggregation)

    def local_results(self, value: Any) -> tuple[Any, ...]:
        """The parts of a value that belong to this process's replicas, in replica order.

        Args:
            value: `PerReplica` or variable: one part per replica; anything else is its own only part.
        """
        (value,) = counterparts([value])
        if isinstance(value, Variable):
            return tuple(component.value for component in self._local(value.components))
        if is_per_replica(value):
            self.check_owner(value, "local_results")
            if _jax.is_tracer(value.stacked) or value.stacked.is_fully_addressable:
                return value.values
            return tuple(self.component(value.stacked, i, True) for i in self._local(range(self.num_replicas)))
        leaves, structure = take_apart(value, "local_results", is_per_replica)
        if any(map(is_per_replica, leaves)):
            n = len(self.local_devices)
            parts = [self.local_results(leaf) if is_per_replica(leaf) else (leaf,) * n for leaf in leaves]
            return tuple(jax.tree.unflatten(structure, part) for part in zip(*parts))
        return (value,)

    def container_of(self, component: Component | Variable) -> Variable:
        """The variable that a component belongs to.

        Raises:
            ArgumentTypeError: for anything but a component or a variable.
        """
        (component,) = counterparts([component])
        if isinstance(component, Variable):
            return component
        if isinstance(component, Component):
            return component.container
        raise ArgumentTypeError(f"container_of takes a component of a variable, got {type(component).__name__}.")

    def update(
        self, variable: Variable, fn: Callable[..., Any], args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Call ``fn(variable, *args, **kwargs)``, which assigns to the variable, on all components at once.

        Raises:
            ReplicaDivergenceError: when an argument differs between the replicas.
        """
        given = variable
        (variable,) = counterparts([given])
        if not isinstance(variable, Variable):
            raise ArgumentTypeError(f"update takes a variable, got {type(variable).__name__}.")
        check_function(fn, "update")
        state.refuse_foreign(variable, self, "updated")
        args, kwargs = check_call(args, kwargs, "update(variable, fn")
        for leaf in take_apart((args, kwargs), "update", is_per_replica)[0]:
            if not variable.per_replica and (
                is_per_replica(leaf) or (isinstance(leaf, jax.Array) and _jax.varies(leaf))
            ):
                raise state.diverging(variable, "update was given an argument that differs between replicas")
        return fn(given, *args, **kwargs)

    # ---- feeding ----

    def distribute_values_from_function(self, fn: Callable[[ValueContext], Any]) -> Any:
        """One value for each replica, made by ``fn(context)`` with its `replica_id` and `num_replicas`.

        Raises:
            ArgumentError: when the values differ in structure, shape or dtype.
        """
        check_function(fn, "distribute_values_from_function")
        self._require_cross_replica("distribute_values_from_function", "Pass the values to strategy.run as arguments.")
        return values_from_function(self, fn)

    def distribute_dataset(
        self,
        source: Any,
        batch_size: int | None = None,
        *,
        remainder: Remainder = "auto",
        mask: bool = False,
        prefetch: int = 2,
        shuffle: bool = False,
        seed: int | None = None,
        auto_shard: AutoShard = "data",
    ) -> DistributedDataset:
        """Elements of a source, their rows split over the replicas, moved to the devices ahead of time.

        Args:
            source: arrays, tensors, pandas frames, or tuples and dicts of them (memory maps and HDF5 datasets are
                read batch by batch), an iterable, a generator, or a dataset of PyTorch, grain, tf.data, Hugging
                Face or Keras; or a function that returns one for each epoch, given its number if it takes one
                argument. A source that shuffles itself must draw its order from that number to be resumed.
            batch_size: rows per batch, over all replicas. Needed for arrays. For iterables: stack this many
                items; without it each item is a batch, whose arrays are split along axis 0. Not for loaders
                that give batches.
            remainder: what to do with a batch that is smaller than the others: ``"auto"`` (keep it if it
                divides by the replicas, else an error), ``"pad"`` (by repeating its last row), ``"drop"`` or
                ``"error"``.
            mask: append a float32 0/1 weight for each row to the element (with ``"pad"``: 0 for padding).
            prefetch: elements made ahead in a background thread; 0 for none.
            shuffle: draw a new order in each pass, which depends on (seed, pass) alone. For rows that can be
                read by index.
            seed: for `shuffle`; drawn and logged when it is not given.
            auto_shard: with several processes: ``"data"`` (all have the same source; each sends its replicas
                their rows) or ``"off"`` (each has a source of its own, with the rows of its replicas).

        Returns:
            An iterable of elements with the structure of `source`'s whose arrays are `PerReplica`.

        Raises (also while iterating):
            UnevenBatchError: when a batch does not divide by the number of replicas.
            ArgumentError: when arrays differ in their number of rows or change their shape, there are none, or an
                integer does not fit its dtype on the devices; and for batches where rows are expected.
            ArgumentTypeError: for strings, objects, and rows of different length.
            StrategyError: when it is iterated in a traced function.

        Example:
            >>> strategy = px.OneDevice()
            >>> dataset = strategy.distribute_dataset((jnp.arange(6.0), jnp.ones((6, 2))), batch_size=3)
            >>> len(dataset), [x.shape for x in next(iter(dataset))]
            (2, [(3,), (3, 2)])
        """
        self._require_cross_replica(
            "distribute_dataset", "Make the dataset outside, and pass its elements to strategy.run."
        )
        return DistributedDataset(
            self,
            source,
            batch_size=batch_size,
            remainder=remainder,
            mask=mask,
            prefetch=prefetch,
            shuffle=shuffle,
            seed=seed,
            auto_shard=auto_shard,
        )

    def distribute_datasets_from_function(
        self,
        fn: Callable[[InputContext], Any],
        *,
        remainder: Remainder = "auto",
        mask: bool = False,
        prefetch: int = 2,
    ) -> DistributedDataset:
        """A dataset whose batches are made for one replica each, by this process's own ``fn(context)``.

        Args:
            fn: given an `InputContext`, returns a source as in `distribute_dataset`, whose items are batches
                of one replica (``context.per_replica_batch_size(global_batch_size)`` rows).
            remainder: as in `distribute_dataset`, for steps in which some replicas have no batch left.
            mask: as in `distribute_dataset`.
            prefetch: as in `distribute_dataset`.

        Example:
            >>> strategy = px.OneDevice()
            >>> def batches(context):
            ...     return [np.ones(context.per_replica_batch_size(4))] * 3
            >>> len(strategy.distribute_datasets_from_function(batches))
            3
        """
        check_function(fn, "distribute_datasets_from_function")
        self._require_cross_replica(
            "distribute_datasets_from_function", "Make the dataset outside, and pass its elements to strategy.run."
        )
        context = InputContext(jax.process_count(), jax.process_index(), self.num_replicas)
        return DistributedDataset(
            self,
            fn(context),
            batch_size=None,
            remainder=remainder,
            mask=mask,
            prefetch=prefetch,
            shuffle=False,
            seed=None,
            auto_shard="off",
            per_replica=True,
        )

    def split_rows(self, rows: np.ndarray[Any, Any], *, local: bool = False) -> PerReplica:
        """The rows of a host array, an equal number for each replica, each sent to its device only.

        `rows` are those of all replicas, or with `local` those of this process's replicas. The array may be
        changed as soon as this returns.
        """
        replicas = self._local(range(self.num_replicas)) if local else list(range(self.num_replicas))
        stacked = rows.reshape(len(replicas), rows.shape[0] // len(replicas), *rows.shape[1:])

        def part(index: Any) -> np.ndarray[Any, Any]:
            i = replicas.index(index[0].start or 0)
            mine = stacked[i : i + 1]
            return mine.copy() if self.platform == "cpu" else mine  # a CPU device would go on using this memory

        shape = (self.num_replicas, *stacked.shape[1:])
        with jax.transfer_guard_host_to_device("allow"):  # whoever feeds has asked for it
            split = jax.make_array_from_callback(shape, _jax.split(self.mesh), part)
        if self.platform != "cpu":
            split.block_until_ready()  # the copy reads the caller's memory
        return PerReplica(split, self)
