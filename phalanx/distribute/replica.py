"""Replica context: what one replica sees, and the ways in which replicas meet."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from phalanx import _jax, state
from phalanx._checks import as_array, check_axis, check_call, check_function, take_apart
from phalanx.distribute.collectives import all_reduce, broadcast, check_op
from phalanx.distribute.values import PerReplica, is_per_replica
from phalanx.errors import AggregationRequiredError, ArgumentError, ArgumentTypeError, StrategyError
from phalanx.variables import Variable


class ReplicaContext:
    """What `px.get_replica_context` gives inside `strategy.run`.

    Outside every scope there is one too, of a default strategy with a single replica.

    Example:
        >>> def fn():
        ...     context = px.get_replica_context()
        ...     return context.all_reduce("sum", 1.0 + context.replica_id)
        >>> float(px.Mirrored(jax.devices()[:1]).run(fn))
        1.0
    """

    def __init__(self, strategy: Any) -> None:
        self.strategy = strategy

    @property
    def num_replicas(self) -> int:
        """How many replicas run the program."""
        return int(self.strategy.num_replicas)

    @property
    def replica_id(self) -> jax.Array:
        """This replica's number, from 0: an int32 scalar that differs between replicas."""
        if not _jax.in_replica_trace():
            return jnp.int32(0)
        return jax.lax.axis_index(_jax.REPLICA_AXIS)

    def all_reduce(self, op: str, value: Any) -> Any:
        """Sum or mean over the replicas; every replica gets the result.

        Args:
            op: ``"sum"`` or ``"mean"`` (of integers: a float).
            value: array or pytree of arrays. Small arrays travel together.

        Example:
            >>> def fn(x):
            ...     return px.get_replica_context().all_reduce("sum", x)
            >>> float(px.OneDevice().run(fn, args=(3.0,)))
            3.0
        """
        op = check_op(op, "all_reduce")
        leaves, structure = self._leaves(value, "all_reduce")
        return jax.tree.unflatten(structure, all_reduce(op, leaves, self.num_replicas, self.strategy.platform))

    def all_gather(self, value: Any, axis: int = 0) -> Any:
        """The parts of all replicas side by side along `axis`; every replica gets the result.

        Args:
            value: array or pytree of arrays, of the same shape on every replica.
            axis: an axis of each array.

        Raises:
            ArgumentError: for scalars, which have no axis.
        """
        leaves, structure = self._leaves(value, "all_gather")
        for leaf in leaves:
            check_axis(leaf.ndim, axis, "all_gather")
        if not _jax.in_replica_trace():
            return value
        gathered = [_jax.all_gather(leaf, axis % leaf.ndim, stacked=False) for leaf in leaves]
        return jax.tree.unflatten(structure, gathered)

    def broadcast(self, value: Any, replica_id: int = 0) -> Any:
        """One replica's value on all of them.

        Args:
            value: array or pytree of arrays.
            replica_id: whose value it is, a Python int.

        Raises:
            ArgumentError: when there is no such replica.
        """
        if isinstance(replica_id, bool) or not isinstance(replica_id, int) or not 0 <= replica_id < self.num_replicas:
            raise ArgumentError(f"broadcast: replica_id must be 0 .. {self.num_replicas - 1}, got {replica_id!r}.")
        leaves, structure = self._leaves(value, "broadcast")
        if not _jax.in_replica_trace():
            return value
        return jax.tree.unflatten(structure, [broadcast(leaf, replica_id) for leaf in leaves])

    def merge_call(self, fn: Callable[..., Any], args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None) -> Any:
        """Step out of the replicas: call ``fn(strategy, *args)`` once, in cross-replica context.

        Values that may differ between replicas arrive as `PerReplica`; a `PerReplica` that `fn` returns
        gives each replica its own part.

        Raises:
            ArgumentTypeError: when `fn` is no function.
            StrategyError: when called inside the merge function itself.
        """
        check_function(fn, "merge_call")
        if state.context().in_cross_replica:
            raise StrategyError("merge_call must be called in a replica; here all replicas are already one program.")
        leaves, structure = take_apart(check_call(args, kwargs, "merge_call(fn"), "merge_call")
        args, kwargs = jax.tree.unflatten(structure, map(self._to_merge, leaves))
        rules = MergeRules(self.strategy) if _jax.in_replica_trace() else state.CrossReplica(self.strategy)
        with state.pushed(state.ContextFrame(state.top(), rules)):
            result = fn(self.strategy, *args, **kwargs)
        return jax.tree.map(lambda x: x.here[0] if is_per_replica(x) else x, result, is_leaf=is_per_replica)

    def _to_merge(self, value: Any) -> Any:
        if isinstance(value, jax.Array) and _jax.varies(value):
            return PerReplica(value[None], self.strategy)
        return value

    def _leaves(self, value: Any, caller: str) -> tuple[list[Any], Any]:
        context = state.context()
        if context.in_cross_replica:
            raise StrategyError(
                f"{caller} must be called in a replica, inside the function given to strategy.run. In cross-replica"
                " context use strategy.reduce or strategy.gather."
            )
        leaves, structure = take_apart(value, caller, is_per_replica)
        return [as_array(leaf, caller) for leaf in leaves], structure


# ---- rules for variables -------------------------------------------------------------------------

_TAPE_HINT = "\n  - what a tape watches counts as different: compute from trainable variables outside its `with` block"


class ReplicaRules(state.Context):
    """In a replica: mirrored variables read as equal values, updates merge by their aggregation."""

    in_replica = True

    def __init__(self, strategy: Any) -> None:
        self.strategy = strategy
        self.replica_context = ReplicaContext(strategy)

    @property
    def key(self) -> Hashable:
        return ("replica", self.strategy.key)

    def read(self, variable: Variable, frame: state.Frame) -> jax.Array:
        state.refuse_foreign(variable, self.strategy, "read")
        self.strategy.adopt(variable)
        stored = frame.load_for_read(variable)
        return stored[0] if variable.per_replica else stored

    def assign(self, variable: Variable, value: Any, op: state.Op, frame: state.Frame) -> None:
        state.refuse_foreign(variable, self.strategy, "assigned")
        self.strategy.adopt(variable)
        if is_per_replica(value):
            raise ArgumentTypeError(
                f"{variable.label}: a PerReplica was assigned in a replica, at {_jax.user_line()}. Pass it to"
                " strategy.run as an argument; each replica then gets its own part."
            )
        old = frame.load(variable) if op != "assign" else None
        if variable.per_replica:
            mine = state.apply_op(op, None if old is None else old[0], value)
            frame.store(variable, _jax.lift(jnp.asarray(mine))[None])
        else:
            frame.store(variable, state.apply_op(op, old, self._merged(variable, value)))

    def initial(self, variable: Variable, value: Any) -> Any:
        if not _jax.is_tracer(value):
            return state.CrossReplica(self.strategy).initial(variable, value)
        # All replicas start from the first one's value (peer: var_created_in_replica_context).
        value = broadcast(value, 0)
        return _jax.lift(value)[None] if variable.per_replica else value

    def _merged(self, variable: Variable, value: Any) -> Any:
        """The one value that all replicas assign."""
        if variable.aggregation == "sum":
            return all_reduce("sum", [value], self.strategy.num_replicas, "")[0].astype(variable.dtype)
        if not _jax.varies(value):
            return value
        if variable.aggregation == "mean":
            return all_reduce("mean", [value], self.strategy.num_replicas, "")[0]
        if variable.aggregation == "only_first_replica":
            return broadcast(value, 0)
        raise AggregationRequiredError(
            f"{variable.label} is mirrored, and the value assigned at {_jax.user_line()} may differ between the"
            f" {self.strategy.num_replicas} replicas. Say what is meant:\n"
            '  - merge the values: px.Variable(..., aggregation="sum"), "mean" or "only_first_replica"\n'
            '  - reduce the value first: px.get_replica_context().all_reduce("sum", value)\n'
            '  - let each replica keep its own: px.Variable(..., synchronization="on_read")'
            f"{_TAPE_HINT if any(state.tapes_of(state.top())) else ''}"
        )


class MergeRules(state.CrossReplica):
    """Inside merge_call: cross-replica rules, on values that are still those of one replica each."""

    in_cross_replica = True
    in_merge = True

    @property
    def key(self) -> Hashable:
        return ("merge", self.strategy.key)

    def merge(self, variable: Variable, stored: Any) -> jax.Array:
        n = self.strategy.num_replicas
        if variable.aggregation in ("sum", "mean"):
            return all_reduce(variable.aggregation, [stored[0]], n, "")[0].astype(variable.dtype)  # type: ignore[no-any-return]
        self.require_merge(variable)
        return broadcast(stored[0], 0)  # type: ignore[no-any-return]

    def spread(self, variable: Variable, value: Any) -> jax.Array:
        parts = super().spread(variable, value)
        return jax.lax.dynamic_index_in_dim(parts, jax.lax.axis_index(_jax.REPLICA_AXIS))

    def assign(self, variable: Variable, value: Any, op: state.Op, frame: state.Frame) -> None:
        if not is_per_replica(value) and _jax.varies(value):
            raise state.diverging(variable, "a value that may differ between replicas was assigned")
        super().assign(variable, value, op, frame)
