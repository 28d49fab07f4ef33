"""`Variable`: one value that programs read and update, on however many replicas."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, TypeAlias, cast, get_args

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike, DTypeLike

from phalanx import _jax, state
from phalanx._as_array import AsArray
from phalanx._checks import check_choice, is_numeric
from phalanx._conversion import (
    check_kind,
    check_range,
    definite,
    is_key,
    is_per_replica,
    is_strong,
    key_impl,
    reason_of,
    to_array,
    to_host,
    weak_type_of,
)
from phalanx._explain import leaked
from phalanx.errors import (
    AggregationRequiredError,
    ArgumentError,
    ArgumentTypeError,
    AssignmentError,
    StrategyError,
    VariableCreationError,
)

Aggregation = Literal["none", "sum", "mean", "only_first_replica"]
Synchronization = Literal["auto", "on_write", "on_read"]
InitialValue: TypeAlias = ArrayLike | Callable[[], ArrayLike]


def can_merge(aggregation: str, dtype: Any) -> bool:
    """Whether values of the dtype can be merged so: integers have no mean that is one, random keys no sum either."""
    return not (
        (aggregation == "mean" and not jnp.issubdtype(dtype, jnp.inexact)) or (aggregation == "sum" and is_key(dtype))
    )


class Variable(AsArray):
    """A value that programs read and update; under a strategy every replica holds it.

    A *mirrored* variable (the default) has one value, kept equal on all replicas. A *per-replica*
    variable (``synchronization="on_read"``) has one component per replica, which are merged by
    `aggregation` when the variable is read outside a replica. It can be used wherever JAX takes an array.

    Args:
        initial_value: array, number, nested list, or a function without arguments that returns one
            (called once, outside every trace). Any shape.
        trainable: whether tapes watch it on their own. Default: True, and False for ``"on_read"``.
        name: for messages and checkpoints. Default: ``"Variable"``.
        dtype: dtype of the value. Default: that of `initial_value` (Python floats: float32).
        synchronization: ``"on_write"`` (mirrored, the same as ``"auto"``) or ``"on_read"`` (per replica).
        aggregation: how different values from the replicas merge: ``"none"``, ``"sum"``, ``"mean"`` or
            ``"only_first_replica"``.
        constraint: a function from array to array for optimizers to apply after an update; `assign`
            does not apply it.

    Raises:
        ArgumentError: for an unknown option, or ``"mean"`` on a dtype that is not floating.
        ArgumentTypeError: when `initial_value` is not numeric.
        AssignmentTypeError: when `dtype` cannot hold it, as int32 cannot hold 2.5.
        VariableCreationError: when the initial value depends on a JAX transformation around the call.

    Example:
        >>> w = px.Variable([1.0, 2.0], name="w")
        >>> w.assign_add([1.0, 1.0])
        Variable(name='w', shape=(2,), dtype=float32, value=[2. 3.])
        >>> float((w * w).sum())
        13.0

    Semantics follow ``tf.Variable`` under ``tf.distribute`` (TensorFlow 2.21); see docs/differences.md.
    """

    _stored: Any
    _owned: bool
    _piece: Any = None

    is_slot = False
    """Whether it is part of an optimizer's state."""

    def __init__(
        self,
        initial_value: InitialValue,
        *,
        trainable: bool | None = None,
        name: str | None = None,
        dtype: DTypeLike | None = None,
        synchronization: Synchronization = "auto",
        aggregation: Aggregation = "none",
        constraint: Callable[[jax.Array], jax.Array] | None = None,
    ) -> None:
        self._check_options(trainable, name, synchronization, aggregation, constraint)
        self.name = name or "Variable"
        self.trainable = (synchronization != "on_read") if trainable is None else trainable
        self.synchronization: Synchronization = synchronization
        self.aggregation: Aggregation = aggregation
        self.constraint = constraint
        self.strategy: Any = state.context().strategy
        self._stored = None
        self._owned = False
        self._created_at = _jax.user_line()
        value = self._initial(initial_value, dtype)
        self.shape: tuple[int, ...] = tuple(value.shape)
        self.dtype: np.dtype[Any] = value.dtype
        if not can_merge(aggregation, self.dtype):
            raise ArgumentError(
                f"{self.label}: aggregation={aggregation!r} cannot merge values of dtype {self.dtype}. Use"
                " 'only_first_replica'" + ("." if is_key(value) else ", 'sum', or dtype='float32'.")
            )
        state.create(self, value)

    @staticmethod
    def _check_options(trainable: Any, name: Any, synchronization: Any, aggregation: Any, constraint: Any) -> None:
        for given, label, known in (
            (synchronization, "synchronization", get_args(Synchronization)),
            (aggregation, "aggregation", get_args(Aggregation)),
        ):
            check_choice(given, label, known)
        if trainable is not None and not isinstance(trainable, bool):
            raise ArgumentTypeError(f"trainable must be True, False or None, got {trainable!r:.60}.")
        if name is not None and not isinstance(name, str):
            raise ArgumentTypeError(f"name must be a string, got {name!r:.60}.")
        if constraint is not None and not callable(constraint):
            raise ArgumentTypeError(f"constraint must be a function from array to array, got {constraint!r:.60}.")

    def _initial(self, initial_value: Any, dtype: Any) -> jax.Array:
        if callable(initial_value) and not isinstance(initial_value, Variable):
            with state.lifted_out():
                return self._initial(initial_value(), dtype)
        if isinstance(initial_value, Variable):
            initial_value = initial_value.value
        if dtype is not None:
            dtype = self._as_dtype(dtype)
        if _jax.is_tracer(initial_value):
            if state.top().base.is_eager:
                raise VariableCreationError(
                    f"{self.label} is created at {self._created_at} from a value that belongs to a JAX"
                    " transformation. Create it outside, or give its initial value as a function without arguments."
                )
            return definite(initial_value, dtype or initial_value.dtype)
        array = to_array(self.label, "initial_value", initial_value)
        if dtype is not None and isinstance(initial_value, (bool, int, float, complex, list, tuple)):
            check_kind(self.label, array.dtype, dtype)
        with state.lifted_out():
            if isinstance(array, jax.Array):
                return definite(array, dtype or array.dtype)
            if dtype is None and not isinstance(initial_value, (np.ndarray, np.generic)):
                dtype = jnp.result_type(weak_type_of(array.dtype))
            # A copy: on a CPU JAX may share memory with NumPy, whose owner can write to it.
            return jnp.array(array, dtype)

    def _as_dtype(self, dtype: Any) -> np.dtype[Any]:
        if isinstance(dtype, type) and dtype in (bool, int, float, complex):
            return jnp.result_type(dtype)
        try:
            found = jnp.dtype(dtype)
        except Exception as error:  # NumPy raises whatever it stumbles over
            raise ArgumentTypeError(f"{self.label}: {dtype!r:.60} is not a dtype.") from error
        if not is_numeric(found):
            raise ArgumentTypeError(f"{self.label}: a variable cannot have dtype {found}, which is not numeric.")
        return found

    # ---- reading ----

    @property
    def value(self) -> jax.Array:
        """The value here and now, a plain ``jax.Array``; later updates never change it.

        Raises:
            FrozenVariableError: inside a raw ``jax.jit``.
            AggregationRequiredError: outside a replica, for components without an aggregation.
        """
        return state.read(self)

    def read_value(self) -> jax.Array:
        """The same as `value`, under TensorFlow's name."""
        return self.value

    def numpy(self) -> np.ndarray[Any, Any]:
        """The value as a NumPy array (eager code only)."""
        return np.asarray(self)

    @property
    def per_replica(self) -> bool:
        """Whether each replica has a value of its own."""
        return self.synchronization == "on_read"

    @property
    def num_components(self) -> int:
        """How many replicas hold the variable."""
        return 1 if self.strategy is None else cast(int, self.strategy.num_replicas)

    @property
    def components(self) -> tuple[Component, ...]:
        """Each replica's copy, in replica order.

        Raises:
            StrategyError: in a replica, which sees its own component only.
        """
        if state.context().in_replica:
            raise StrategyError(
                f"{self.label}: components can be looked at outside a replica only; in a replica read `v.value`."
            )
        return tuple(Component(self, i) for i in range(self.num_components))

    # ---- updates ----

    def assign(self, value: ArrayLike) -> Variable:
        """Set the value; in a replica, merged over the replicas by `aggregation`.

        Args:
            value: shape and dtype of the variable (Python numbers and NumPy arrays are converted when
                their kind allows it; there is no broadcasting).

        Returns:
            The variable itself.

        Raises:
            AssignmentError: for another shape or dtype.
            AggregationRequiredError: in a replica, when the value may differ between the replicas and
                the aggregation is ``"none"``.
            VariableWriteError: inside ``jax.grad``, ``jax.vmap`` and the like.

        Example:
            >>> v = px.Variable(0.0)
            >>> float(v.assign(2.0).value)
            2.0
        """
        state.assign(self, self._fit(value), "assign")
        return self

    def assign_add(self, value: ArrayLike) -> Variable:
        """Add `value`; otherwise as `assign` (in a replica the increments are merged)."""
        state.assign(self, self._fit(value, arithmetic="add to"), "add")
        return self

    def assign_sub(self, value: ArrayLike) -> Variable:
        """Subtract `value`; otherwise as `assign_add`."""
        state.assign(self, self._fit(value, arithmetic="subtract from"), "sub")
        return self

    @property
    def at(self) -> _Updates:
        """Indexed updates that change the variable: ``v.at[i].add(x)``, also set, multiply, divide, min, max.

        Example:
            >>> v = px.Variable([1.0, 2.0, 3.0])
            >>> v.at[1].add(10.0).numpy()
            array([ 1., 12.,  3.], dtype=float32)
        """
        return _Updates(self)

    def _fit(self, value: Any, arithmetic: str | None = None) -> Any:
        """`value` as an array of this variable's shape and dtype, or an AssignmentError."""
        if arithmetic and (self.dtype == np.bool_ or is_key(self.dtype)):
            raise AssignmentError(f"{self.label}: cannot {arithmetic} a variable of dtype {self.dtype}; use assign.")
        if is_per_replica(value):
            return value
        if isinstance(value, (Variable, Component)):
            value = value.value
        if _jax.is_leaked(value):
            raise leaked(f"{self.label}, assigned at {_jax.user_line()}")
        array = to_array(self.label, "value", value)
        if tuple(array.shape) != self.shape:
            raise AssignmentError(
                f"{self.label} has shape {self.shape}, got a value of shape {tuple(array.shape)} at"
                f" {_jax.user_line()}. There is no broadcasting in assignments: use jnp.broadcast_to."
            )
        check_kind(self.label, array.dtype, self.dtype, exact=is_strong(array))
        if isinstance(array, jax.Array):
            return definite(array, self.dtype)
        check_range(self.label, array, self.dtype)
        return jnp.array(array, self.dtype)

    def _placed(self, stored: Any) -> Any:
        """`stored` on the devices of the variable's strategy."""
        return stored if self.strategy is None else self.strategy.place(stored, per_replica=self.per_replica)

    def _repeated(self, value: Any, n: int) -> Any:
        """What each of `n` components holds when the variable is set to `value`."""
        return jnp.broadcast_to(value[None], (n, *value.shape))

    def _merged(self, stored: Any) -> Any:
        """The one value that stands for all components."""
        if self.strategy is None:
            return state.merge_components(stored, self.aggregation)
        return self.strategy.merge_components(stored, self.aggregation)

    @property
    def has_storage(self) -> bool:
        """Whether there is an array behind it, which `px.abstract` leaves out."""
        return type(self._stored) is not jax.ShapeDtypeStruct

    def _replace(self, stored: Any) -> None:
        """Take another array, which others may hold too."""
        is_first = self._stored is None
        with state.lock:
            state.Lending.lend((self,))
            self._stored = stored
        if is_first and self.strategy is not None:
            self.strategy.register(self)

    __hash__ = object.__hash__

    # ---- as a Python object ----

    @property
    def label(self) -> str:
        """How messages call this variable."""
        return f"Variable {self.name!r}"

    def __repr__(self) -> str:
        where = "" if self.strategy is None else f", {'per replica' if self.per_replica else 'mirrored'}"
        where += f" x{self.num_components}" if where else ""
        return f"Variable(name={self.name!r}, shape={self.shape}, dtype={self.dtype}{where}, value={self._short()})"

    def _short(self) -> str:
        if self._stored is None:
            return "<not initialised>"
        if not self.has_storage:
            return "<no storage>"
        try:
            with state.lifted_out(), np.printoptions(threshold=6, edgeitems=2, precision=4):
                stored = state.borrow(self)
                if self.per_replica and self.num_components == 1:
                    stored = stored[0]
                return " ".join(str(to_host(stored)).split())
        except Exception:  # a repr must not fail: buffers may be gone, or lie on another process
            return "<not readable here>"

    def __getstate__(self) -> dict[str, Any]:
        if self._stored is None:
            raise VariableCreationError(f"{self.label} has no value yet and cannot be copied or pickled.")
        kept = {k: v for k, v in self.__dict__.items() if k not in ("strategy", "_stored", "_owned", "_piece")}
        with state.lifted_out():
            stored = state.borrow(self)
            return {**kept, "value": to_host(stored), "key_impl": key_impl(stored)}

    def __setstate__(self, kept: dict[str, Any]) -> None:
        """The copy belongs to the strategy in whose scope it is made; components merge and spread anew."""
        stored, key_impl = jnp.array(kept.pop("value")), kept.pop("key_impl")
        if key_impl is not None:
            stored = jax.random.wrap_key_data(stored, impl=key_impl)
        self.__dict__.update(kept)
        self.strategy = state.context().strategy
        if self.per_replica and stored.shape[0] != self.num_components:
            rules = state.CrossReplica()
            stored = rules.spread(self, rules.merge(self, stored))
        self._stored = None
        self._replace(self._placed(stored))


class Component(AsArray):
    """One replica's copy of a variable, for looking at and as a source of gradients.

    `container` is the variable, `replica_id` the replica. It can be used wherever JAX takes an array.

    Example:
        >>> v = px.Variable(3.0)
        >>> [float(c) for c in v.components]
        [3.0]
    """

    def __init__(self, container: Variable, replica_id: int) -> None:
        self.container = container
        self.replica_id = replica_id

    @property
    def value(self) -> jax.Array:
        """The copy itself, an array on that replica's device."""
        stored = state.borrow(self.container)
        if _jax.is_tracer(stored) or self.container.strategy is None:
            if not self.container.per_replica:
                return cast(jax.Array, stored)
            if _jax.in_replica_trace():
                stored = _jax.all_gather(stored[0], 0, stacked=True)
            return cast(jax.Array, stored[self.replica_id])
        return cast(jax.Array, self.container.strategy.component(stored, self.replica_id, self.container.per_replica))

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the value."""
        return self.container.shape

    @property
    def dtype(self) -> np.dtype[Any]:
        """Dtype of the value."""
        return self.container.dtype

    def __eq__(self, other: object) -> bool:
        return (
            isinstance(other, Component) and other.container is self.container and other.replica_id == self.replica_id
        )

    def __ne__(self, other: object) -> bool:
        return not self == other

    def __hash__(self) -> int:
        return hash((id(self.container), self.replica_id))

    def __repr__(self) -> str:
        return f"Component({self.container.name!r}, replica {self.replica_id}, value={np.asarray(self.value)})"


class _Updates:
    """`v.at`: waits for the index."""

    def __init__(self, variable: Variable) -> None:
        self._variable = variable

    def __getitem__(self, index: Any) -> _IndexedUpdate:
        return _IndexedUpdate(self._variable, index)


class _IndexedUpdate:
    """`v.at[index]`: waits for the operation."""

    def __init__(self, variable: Variable, index: Any) -> None:
        self._variable = variable
        self._index = index

    def _updated(self, array: Any, method: str, values: ArrayLike) -> Any:
        """`array` after the update, or an error that names the variable."""
        label = self._variable.label
        values = to_array(label, "value", values)
        check_kind(label, values.dtype, self._variable.dtype, exact=is_strong(values))
        try:
            return getattr(array.at[self._index], method)(values)
        except (jax.errors.JAXTypeError, jax.errors.JAXIndexError):  # about tracing
            raise
        except (TypeError, ValueError, IndexError, OverflowError) as error:
            raise AssignmentError(
                f"{label} has shape {self._variable.shape}, and at[{self._index!r:.60}].{method} with a value of shape"
                f" {tuple(values.shape)} does not fit, at {_jax.user_line()}: {reason_of(error)}"
            ) from error

    def _assign(self, method: str, values: ArrayLike) -> Variable:
        variable = self._variable
        if state.context().in_replica and variable.aggregation == "sum" and not variable.per_replica:
            raise AggregationRequiredError(
                f"{variable.label} has aggregation 'sum': at[...].{method} in a replica, at {_jax.user_line()}, would sum"
                " the elements that it leaves alone over the replicas too. Use at[...].add, which sums the increments, or"
                " assign the whole value."
            )
        return self._variable.assign(self._updated(self._variable.value, method, values))

    def _increment(self, values: ArrayLike) -> Any:
        return self._updated(jnp.zeros(self._variable.shape, self._variable.dtype), "add", values)

    def add(self, values: ArrayLike) -> Variable:
        """Add at the index; repeated indices add up. In a replica the increments are merged."""
        return self._variable.assign_add(self._increment(values))

    def subtract(self, values: ArrayLike) -> Variable:
        """Subtract at the index; otherwise as `add`."""
        return self._variable.assign_sub(self._increment(values))

    def set(self, values: ArrayLike) -> Variable:
        """Replace at the index."""
        return self._assign("set", values)

    def multiply(self, values: ArrayLike) -> Variable:
        """Multiply at the index."""
        return self._assign("multiply", values)

    def divide(self, values: ArrayLike) -> Variable:
        """Divide at the index."""
        return self._assign("divide", values)

    def min(self, values: ArrayLike) -> Variable:
        """Take the smaller of both at the index."""
        return self._assign("min", values)

    def max(self, values: ArrayLike) -> Variable:
        """Take the larger of both at the index."""
        return self._assign("max", values)
