"""What reading and writing a variable mean in one kind of place; `state` says which place that is."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Hashable
from typing import TYPE_CHECKING, Any, Literal

import jax
import jax.numpy as jnp

from phalanx import _jax
from phalanx.errors import AggregationRequiredError, AssignmentError, ReplicaDivergenceError, StrategyError

if TYPE_CHECKING:
    from phalanx.state import Frame
    from phalanx.variables import Variable

Op = Literal["assign", "add", "sub"]


def apply_op(op: Op, old: Any, value: Any) -> Any:
    """The new value of a variable that holds `old`."""
    return value if op == "assign" else old + value if op == "add" else old - value


class Context(ABC):
    """The rules of one kind of place for reading and writing variables."""

    strategy: Any = None
    """The strategy in effect, or None outside every scope."""

    in_replica = False
    in_cross_replica = False
    in_merge = False
    """In cross-replica context within the program of one replica."""

    @property
    @abstractmethod
    def key(self) -> Hashable:
        """Traces made under equal keys can be shared."""

    @abstractmethod
    def read(self, variable: Variable, frame: Frame) -> jax.Array:
        """What user code sees when it reads the variable."""

    @abstractmethod
    def assign(self, variable: Variable, value: Any, op: Op, frame: Frame) -> None:
        """Carry out an update whose value has the variable's shape and dtype."""

    @abstractmethod
    def initial(self, variable: Variable, value: Any) -> Any:
        """What is stored for a variable that starts with `value`."""


class CrossReplica(Context):
    """One program for all replicas: a mirrored variable is one value, a per-replica one is merged."""

    def __init__(self, strategy: Any = None) -> None:
        self.strategy = strategy
        self.in_cross_replica = strategy is not None

    @property
    def key(self) -> Hashable:
        return ("cross-replica", self.strategy and self.strategy.key)

    def read(self, variable: Variable, frame: Frame) -> jax.Array:
        if not variable.per_replica:
            return frame.load_for_read(variable)
        # Merging is the owner's business; one value for all can be read anywhere (peer: strategy_two_strategies).
        refuse_foreign(variable, self.strategy, "read")
        return self.merge(variable, frame.load_for_read(variable))

    def assign(self, variable: Variable, value: Any, op: Op, frame: Frame) -> None:
        refuse_foreign(variable, self.strategy, "assigned")
        if getattr(value, "is_per_replica", False):
            self._assign_parts(variable, value, op, frame)
            return
        if not variable.per_replica:
            frame.store(variable, apply_op(op, frame.load(variable) if op != "assign" else None, value))
            return
        if op != "assign":
            if variable.aggregation == "sum" and variable.strategy is not None:
                raise AggregationRequiredError(
                    f"{variable.label} has aggregation 'sum' and one component per replica: adding to it in"
                    " cross-replica context could mean once or once per replica. Update it in a replica (strategy.run); or make"
                    " it, or the metric that it belongs to, outside the strategy's scope; or assign the total with"
                    f" `assign(v.value + x)`. At {_jax.user_line()}."
                )
            value = apply_op(op, self.read(variable, frame), value)
        frame.store(variable, self.spread(variable, value))

    def _assign_parts(self, variable: Variable, value: Any, op: Op, frame: Frame) -> None:
        if not variable.per_replica:
            raise diverging(variable, "a PerReplica with a part for each replica was assigned")
        value.strategy.adopt(variable)
        variable.strategy.check_owner(value, f"{variable.label}, assigned at {_jax.user_line()}")
        if (value.shape, value.dtype) != (variable.shape, variable.dtype):
            raise AssignmentError(
                f"{variable.label} has components of shape {variable.shape} and dtype {variable.dtype}, got {value!r:.100}"
                f" at {_jax.user_line()}."
            )
        frame.store(variable, apply_op(op, frame.load(variable) if op != "assign" else None, value.here))

    def initial(self, variable: Variable, value: Any) -> Any:
        # Every component starts with the initial value, also under 'sum' (peer: var_on_read_sum_replica_updates).
        if not variable.per_replica:
            return value
        return variable._repeated(value, variable.num_components)

    def merge(self, variable: Variable, stored: Any) -> jax.Array:
        """The one value that stands for all components of a per-replica variable."""
        self.require_merge(variable)
        return variable._merged(stored)  # type: ignore[no-any-return]

    def spread(self, variable: Variable, value: Any) -> jax.Array:
        """The components after an assignment: they merge to `value` again."""
        n = variable.num_components
        value = jnp.asarray(value, variable.dtype)
        if variable.aggregation != "sum" or n == 1:
            return variable._repeated(value, n)
        if jnp.issubdtype(variable.dtype, jnp.inexact):
            return jnp.broadcast_to((value / n)[None], (n, *value.shape))
        # The first replica takes what does not divide: a count reads back as it was assigned.
        part = jax.lax.div(value, jnp.asarray(n, variable.dtype))
        parts = jnp.broadcast_to(part[None], (n, *value.shape))
        return parts.at[0].add(value - part * n)

    def require_merge(self, variable: Variable) -> None:
        """Raise unless the variable says how its components merge."""
        if variable.aggregation == "none" and variable.num_components > 1:
            raise AggregationRequiredError(
                f"{variable.label} has {variable.num_components} components and no aggregation: it has no single"
                " value outside a replica. Create it with aggregation='sum', 'mean' or 'only_first_replica', or"
                f" look at `v.components`. Read at {_jax.user_line()}."
            )


def merge_components(stored: Any, aggregation: str) -> jax.Array:
    """The one value, in their dtype, that stands for components side by side along axis 0."""
    if aggregation == "sum":
        return stored.sum(0, dtype=stored.dtype)
    return stored.mean(0, dtype=stored.dtype) if aggregation == "mean" else stored[0]


def refuse_foreign(variable: Variable, strategy: Any, action: str) -> None:
    """Raise when a variable of one strategy is used under another."""
    owner = variable.strategy
    if owner is not None and strategy is not None and owner is not strategy:
        other = (
            f"another {strategy!r}: make one strategy and use it throughout"
            if repr(owner) == repr(strategy)
            else f"{strategy!r}"
        )
        raise StrategyError(
            f"{variable.label} belongs to {owner!r} and is {action} under {other} at {_jax.user_line()}."
            " Create the variable in the scope of the strategy that uses it."
        )


def diverging(variable: Variable, what: str) -> ReplicaDivergenceError:
    """The error for an assignment that would leave a mirrored variable with unequal components."""
    return ReplicaDivergenceError(
        f"{variable.label} is mirrored: all replicas must hold the same value, but {what} at {_jax.user_line()}."
        " Reduce it first with strategy.reduce('sum' or 'mean', value), or create the variable with"
        " synchronization='on_read' to give each replica its own."
    )
