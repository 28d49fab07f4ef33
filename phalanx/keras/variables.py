"""Keras's variables as citizens: a `phalanx` variable stands for each that takes part in a step.

A Keras variable keeps its array to itself until it is first used in a tape, a traced function or a
replica, or made in a strategy's scope. From then on a variable of ours holds the value, and Keras's
reads and writes, wherever they come from, go to it.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from phalanx import _jax, state
from phalanx._checks import register_variables
from phalanx._conversion import is_per_replica
from phalanx.distribute.collectives import all_reduce
from phalanx.errors import AssignmentError, StrategyError
from phalanx.keras import _keras
from phalanx.keras.law import law
from phalanx.variables import Aggregation, Synchronization, Variable

_COUNTERPART = "_phalanx_variable"
_GOLDEN = np.uint32(0x9E3779B9)
"""How far apart the replicas' seeds are: an odd number, so that no two of 2**32 are the same."""


class KerasVariable(Variable):
    """Stands for a Keras variable; follows its `trainable`."""

    def __init__(self, keras_variable: Any, value: Any) -> None:
        self._keras_variable = keras_variable
        self.assignments = 0
        """How often code assigned it; for a traced function, when it was traced."""
        aggregation, synchronization = _rules(keras_variable)
        super().__init__(
            value,
            trainable=keras_variable.trainable,
            name=keras_variable.path,
            aggregation=aggregation,
            synchronization=synchronization,
        )

    @property
    def trainable(self) -> bool:  # type: ignore[override]
        """Whether tapes watch it on their own: as the Keras variable says now."""
        return bool(self._keras_variable.trainable)

    @trainable.setter
    def trainable(self, value: bool) -> None:
        pass

    @property
    def is_slot(self) -> bool:  # type: ignore[override]
        """Whether one of Keras's optimizers made it."""
        return not self.trainable and _keras.is_of_an_optimizer(self._keras_variable)


class Seed(KerasVariable):
    """The state of a seed generator: each replica draws numbers of its own, the first one those of a single device."""

    def _repeated(self, value: Any, n: int) -> Any:
        apart = (
            jnp.zeros((n, 2), value.dtype).at[:, 0].set((jnp.arange(n, dtype=jnp.uint32) * _GOLDEN).astype(value.dtype))
        )
        return value[None] + apart


class RowState(KerasVariable):
    """The state of a stateful recurrent layer: each replica has that of its own rows of the batch."""

    @property
    def shape(self) -> tuple[int, ...]:  # type: ignore[override]
        """Shape of a replica's part."""
        return self._whole if self._stored is None else tuple(self._stored.shape[1:])

    @shape.setter
    def shape(self, whole: tuple[int, ...]) -> None:
        self._whole = whole

    def _repeated(self, value: Any, n: int) -> Any:
        rows = value.shape[0]
        if rows % n:
            raise StrategyError(
                f"{self.label} is the state of a stateful layer for {rows} rows, which {n} replicas cannot share. Choose a"
                " batch size that divides."
            )
        return value.reshape(n, rows // n, *value.shape[1:])

    def _merged(self, stored: Any) -> Any:
        return stored.reshape(-1, *stored.shape[2:])

    def _fit(self, value: Any, arithmetic: str | None = None) -> Any:
        return value  # a replica's part, or the whole


def _is_seed(variable: Any) -> bool:
    return variable.name == "seed_generator_state" and variable.shape == (2,) and not variable.trainable


def _is_row_state(variable: Any) -> bool:
    return variable.name == "rnn_state" and not variable.trainable


def _rules(variable: Any) -> tuple[Aggregation, Synchronization]:
    """How the replicas' values merge, and when."""
    if _is_seed(variable):
        return "only_first_replica", "on_read"
    if _is_row_state(variable):
        return "only_first_replica", "on_read"
    if variable.synchronization == "on_read":  # metrics
        return variable.aggregation, "on_read"
    if variable.aggregation == "none" and not variable.trainable and _is_float(variable):
        # Statistics of a replica's own rows, as batch normalisation keeps them: the mean is that of all rows.
        return "mean", "auto"
    return variable.aggregation, "auto"


def _is_float(variable: Any) -> bool:
    return bool(jnp.issubdtype(_keras.stored_dtype(variable), jnp.floating))


def counterpart(variable: Any) -> KerasVariable:
    """The variable that stands for a Keras variable; made when there is none yet."""
    known = variable.__dict__.get(_COUNTERPART)
    if known is None:
        with state.lifted_out():
            value = _keras.stored(variable)
            known = _stand_in(variable, _keras.initialise(variable) if value is None else value)
    return known


def strategy_of(variable: Any) -> Any:
    """The strategy that a Keras variable belongs to, if it does."""
    known = variable.__dict__.get(_COUNTERPART)
    return None if known is None else known.strategy


def assignments(variable: Any) -> int:
    """How often code has assigned a Keras variable that takes part."""
    known = variable.__dict__.get(_COUNTERPART)
    return 0 if known is None else known.assignments


def _stand_in(variable: Any, value: Any) -> KerasVariable:
    cls = Seed if _is_seed(variable) else RowState if _is_row_state(variable) else KerasVariable
    known = variable.__dict__[_COUNTERPART] = cls(variable, value)
    _keras.empty(variable)
    return known


# ---- Keras's side --------------------------------------------------------------------------------


def _read(original: property) -> property:
    def value(variable: Any) -> Any:
        scope = _keras.get_stateless_scope()
        if scope is not None:
            given = scope.get_current_value(variable)
            if given is not None:
                return _keras.autocast(variable, given)
        if _COUNTERPART not in variable.__dict__ and (state.is_plain() or _is_placeholder(variable, scope)):
            return original.fget(variable)  # type: ignore[misc]
        # In a scope of Keras's, a function is traced for its shapes alone, or as the body of a loop.
        read = state.read if scope is None else state.read_out_of_traces
        ours = counterpart(variable)
        if law().parts_are_read_here and ours.per_replica:
            return _part_here(ours)
        value = read(ours)
        if law().metrics_are_read_merged and _adds_up(ours) and ours.per_replica and _jax.in_replica_trace():
            strategy = state.context().strategy
            value = all_reduce("sum", [value], strategy.num_replicas, strategy.platform)[0].astype(value.dtype)
        return _keras.autocast(variable, value)

    return property(value, doc=original.__doc__)


def _part_here(ours: KerasVariable) -> Any:
    """The first replica's part, which one process writes to a file without the others."""
    if isinstance(ours, RowState):
        raise StrategyError(
            f"{ours.label} is the state of a stateful layer, whose rows lie on several processes. Reset it before saving:"
            " layer.reset_states()."
        )
    return ours.strategy.component(state.borrow(ours), 0, True)


def _is_placeholder(variable: Any, scope: Any) -> bool:
    return scope is not None and _keras.stored(variable) is None


def _assign(original: Any) -> Any:
    def assign(variable: Any, value: Any) -> Any:
        if _goes_to_keras(variable):
            return original(variable, value)
        ours = counterpart(variable)
        ours.assignments += 1
        value = _fitting(variable, value)
        ours.assign(_once(ours, value, ours.value if ours.per_replica else 0) if _counts_once(ours) else value)
        return value

    return assign


def _assign_by(operation: str) -> Any:
    def make(original: Any) -> Any:
        def assign_by(variable: Any, value: Any) -> Any:
            if _goes_to_keras(variable):
                return original(variable, value)
            ours = counterpart(variable)
            ours.assignments += 1
            value = jnp.broadcast_to(_keras.converted(variable, value), variable.shape)
            getattr(ours, operation)(_once(ours, value, 0) if _counts_once(ours) else value)
            return variable.value

        return assign_by

    return make


def _adds_up(ours: Variable) -> bool:
    return ours.aggregation == "sum"


def _counts_once(ours: Variable) -> bool:
    """Whether all replicas add the same to a sum, which is to grow by it once."""
    return _adds_up(ours) and law().rows_are_the_same and _jax.in_replica_trace()


def _once(ours: Variable, value: Any, other: Any) -> Any:
    """The value in the first replica."""
    first = jax.lax.axis_index(_jax.REPLICA_AXIS) == 0
    return jnp.where(first, value, jnp.asarray(other, ours.dtype))


def _goes_to_keras(variable: Any) -> bool:
    """Whether a write is Keras's business: in its own scopes, and for variables that never left it."""
    if _keras.get_stateless_scope() is not None:
        return True
    return _COUNTERPART not in variable.__dict__ and state.is_plain()


def _show(original: Any) -> Any:
    def show(variable: Any) -> str:
        known = variable.__dict__.get(_COUNTERPART)
        return str(original(variable)) if known is None else repr(known)

    return show


def _fitting(variable: Any, value: Any) -> Any:
    if is_per_replica(value):
        return value
    array = _keras.converted(variable, value)
    if tuple(array.shape) != tuple(variable.shape) and not _is_row_state(variable):
        raise AssignmentError(
            f"Variable {variable.path!r} has shape {tuple(variable.shape)}, got a value of shape {tuple(array.shape)} at"
            f" {_jax.user_line()}."
        )
    return array


def _create(original: Any) -> Any:
    def create(variable: Any, initializer: Any, *args: Any, **kwargs: Any) -> None:
        if state.is_plain() or _keras.get_stateless_scope() is not None:
            original(variable, initializer, *args, **kwargs)
            return
        traced = initializer if _jax.is_tracer(initializer) else None
        with state.lifted_out():
            start = jnp.zeros(traced.shape, traced.dtype) if traced is not None else initializer
            original(variable, start, *args, **kwargs)
        _stand_in(variable, _keras.stored(variable) if traced is None else _keras.converted(variable, traced))

    return create


def _initialise_late(original: Any) -> Any:
    def deferred_initialize(variable: Any) -> None:
        if _goes_to_keras(variable):
            original(variable)
        else:
            counterpart(variable)  # its initial value belongs to no function that is being traced

    return deferred_initialize


def install() -> None:
    """Let Keras's variables find their counterparts."""
    cls = _keras.Variable
    _keras.replace(cls, "__init__", _create)
    _keras.replace(cls, "_deferred_initialize", _initialise_late)
    _keras.replace(cls, "value", _read)
    _keras.replace(cls, "__repr__", _show)
    _keras.replace(cls, "assign", _assign)
    _keras.replace(cls, "assign_add", _assign_by("assign_add"))
    _keras.replace(cls, "assign_sub", _assign_by("assign_sub"))
    register_variables(cls, counterpart)
    _jax.register_array_like(cls, lambda variable: variable.value)
