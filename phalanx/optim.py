"""`Optimizer`: any optax transformation on variables, with gradients all-reduced in replicas."""

from __future__ import annotations

import warnings
from collections.abc import Iterable
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any, Literal

import jax
import jax.numpy as jnp

from phalanx import _jax, state
from phalanx._checks import counterparts
from phalanx._conversion import check_kind, to_array
from phalanx._tensorflow import OPTIMIZER, no_such
from phalanx.abstract import abstract
from phalanx.distribute.collectives import all_reduce, check_op
from phalanx.distribute.in_effect import get_strategy
from phalanx.distribute.values import is_per_replica
from phalanx.errors import AggregationRequiredError, ArgumentError, ArgumentTypeError, AssignmentError
from phalanx.function import function
from phalanx.variables import Variable

if TYPE_CHECKING:
    import optax  # where it is needed: it takes half as long to import as Phalanx, and Keras has optimizers of its own

Reduction = Literal["sum", "mean"] | None


class Optimizer:
    """Updates variables by an optax transformation, whose state lives in variables too.

    Args:
        tx: any ``optax.GradientTransformation``. A learning rate that you change is a variable that a schedule
            reads, ``optax.adam(lambda count: rate.value)``; ``optax.adam(rate)`` would use its value of now for ever.

    Raises:
        ArgumentTypeError: for something that is not an optax transformation.

    Example:
        >>> w = px.Variable([1.0, 2.0])
        >>> optimizer = px.Optimizer(optax.sgd(0.1))
        >>> with px.GradientTape() as tape:
        ...     loss = (w * w).sum()
        >>> optimizer.apply_gradients([(tape.gradient(loss, w), w)])
        >>> w.numpy()
        array([0.8, 1.6], dtype=float32)
    """

    # Slots, so that `optimizer.learning_rate = x` is an error and not a setting that nothing reads.
    __slots__ = ("__weakref__", "_owners", "_state", "_structure", "_tx", "_update_now", "_updated", "_warned")

    def __init__(self, tx: optax.GradientTransformation) -> None:
        if not (hasattr(tx, "init") and hasattr(tx, "update")):
            raise ArgumentTypeError(
                f"Optimizer takes an optax transformation such as optax.adam(1e-3), got {type(tx).__name__} {tx!r:.60}."
            )
        self._tx = tx
        self._updated: tuple[Variable, ...] = ()
        self._state: list[Variable] = []
        self._owners: list[int | None] = []
        """Which variable each part of the state belongs to; None for what all share, such as a step counter."""
        self._structure: Any = None
        self._warned: set[Any] = set()
        self._update_now = function(self._update)

    @property
    def variables(self) -> tuple[Variable, ...]:
        """The variables that hold the optimizer's state (empty before `build`)."""
        return tuple(self._state)

    @property
    def state(self) -> Any:
        """optax's state with variables as its leaves, or None before `build`."""
        return None if self._structure is None else jax.tree.unflatten(self._structure, self._state)

    # ---- building ----

    def build(self, variables: Iterable[Variable]) -> None:
        """Make the state for these variables; `apply_gradients` does it at its first call.

        It happens outside every trace, so the first call may be inside a traced function or a replica.

        Args:
            variables: all the variables that the optimizer will ever update.

        Raises:
            ArgumentTypeError: for something that is not a variable.
            ArgumentError: when the optimizer was built for others, a variable is given twice, is per replica,
                or has a dtype without gradients.

        Example:
            >>> optimizer = px.Optimizer(optax.adam(1e-3))
            >>> optimizer.build([px.Variable([1.0, 2.0])])
            >>> [v.name for v in optimizer.variables]
            ['optimizer[0].count', 'optimizer[0].mu[0]', 'optimizer[0].nu[0]']
        """
        variables = _checked_variables(variables, "build")
        if self._updated and set(variables) != set(self._updated):
            raise ArgumentError(
                "Optimizer: it was built for other variables. Use one optimizer for each set of variables."
            )
        if self._updated or not variables:
            return
        if any(v._stored is None for v in variables):  # born in the trace that is running
            self._keep(self._tx.init([state.top().base.load(v) for v in variables]), variables)
        else:
            with state.lifted_out(), nullcontext() if all(v.has_storage for v in variables) else abstract():
                self._keep(self._tx.init(list(map(state.borrow, variables))), variables)

    def _keep(self, initial: Any, variables: tuple[Variable, ...]) -> None:
        paths, self._structure = jax.tree_util.tree_flatten_with_path(initial)
        self._owners = _owners(self._tx, initial, len(variables))
        strategy = next((v.strategy for v in variables if v.strategy is not None), None)
        self._state = [
            Variable(leaf, trainable=False, name=f"optimizer{jax.tree_util.keystr(path)}") for path, leaf in paths
        ]
        for slot in self._state:
            slot.is_slot = True
            if strategy is not None:
                strategy.adopt(slot)
        self._updated = variables

    # ---- updating ----

    def apply_gradients(self, grads_and_vars: Iterable[tuple[Any, Variable]], reduce: Reduction = "sum") -> None:
        """Update each variable by its gradient.

        Args:
            grads_and_vars: pairs; a gradient has its variable's shape, or is None (that variable and its
                part of the state stay as they are, and it is named once in a warning).
            reduce: in a replica, how the replicas' gradients merge before the step: ``"sum"`` (for losses
                divided by the global batch), ``"mean"``, or None when they are reduced already. Small
                gradients travel together.

        Raises:
            ArgumentError: when there is no gradient at all, a shape is wrong, or a variable is unknown or
                given twice.
            ArgumentTypeError: for something that is not pairs of gradient and variable.
            AggregationRequiredError: with ``reduce=None`` and a gradient that may differ between replicas.

        Example:
            >>> w, b = px.Variable([1.0, 2.0]), px.Variable(0.0)
            >>> optimizer = px.Optimizer(optax.sgd(1.0))
            >>> optimizer.apply_gradients(zip([jnp.ones(2), 3.0], [w, b]))
            >>> w.numpy().tolist(), float(b)
            ([0.0, 1.0], -3.0)
        """
        if reduce is not None:
            reduce = check_op(reduce, "apply_gradients(reduce=...)")
        pairs = checked_pairs(grads_and_vars)
        if not self._updated:
            self.build(v for _, v in pairs)
        known = set(self._updated)
        new = [v.label for _, v in pairs if v not in known]
        if new:
            raise ArgumentError(
                f"Optimizer: {', '.join(new)} was not among the variables that it was built for. Call"
                " optimizer.build(all_variables) first, or use one optimizer for each set of variables."
            )
        present = [(v, g) for g, v in pairs if g is not None]
        self._warn_of_missing([v for g, v in pairs if g is None], bool(present))
        reduced = dict(zip([v for v, _ in present], self._reduce(present, reduce)))
        grads = [reduced.get(v) for v in self._updated]
        if not state.top().is_eager:
            self._update(grads)
            return
        for v in reduced:
            state.refuse_transformations(v, None)
        with state.lifted_out():  # a step of the optimizer is nothing that a tape records
            self._update_now(grads)

    def _warn_of_missing(self, missing: list[Variable], some_left: bool) -> None:
        if missing and not some_left:
            raise ArgumentError(
                "apply_gradients: no gradient at all, for "
                + ", ".join(v.label for v in missing)
                + ". Was the loss computed"
                " inside the tape, from these variables, without stop_gradient or a cast to integers?"
            )
        new = [v for v in missing if v not in self._warned]
        if new:
            self._warned.update(new)
            names = ", ".join(v.label for v in new)
            warnings.warn(f"apply_gradients: the loss does not depend on {names}; left as it is", stacklevel=3)

    def _reduce(self, pairs: list[tuple[Variable, Any]], reduce: Reduction) -> list[Any]:
        differing = next((v for v, g in pairs if is_per_replica(g) or _jax.varies(g)), None)
        if differing is not None and reduce is None:
            raise AggregationRequiredError(
                f"apply_gradients(reduce=None): the gradient of {differing.label} may differ between the replicas, at"
                f" {_jax.user_line()}. Leave reduce at 'sum', or all_reduce the gradients first."
            )
        if state.context().in_replica and reduce is not None:
            strategy = get_strategy()
            self._warn_of_equal(pairs, reduce, strategy.num_replicas)
            grads = [jnp.asarray(g, v.dtype) for v, g in pairs]
            return all_reduce(reduce, grads, strategy.num_replicas, strategy.platform, [v.name for v, _ in pairs])
        merged = [g.strategy.reduce(reduce, g) if is_per_replica(g) else g for _, g in pairs]
        for (v, _), g in zip(pairs, merged):
            if _jax.varies(g):
                raise state.diverging(v, "apply_gradients was given a gradient that may differ between the replicas")
        return [jnp.asarray(g, v.dtype) for (v, _), g in zip(pairs, merged)]

    def _warn_of_equal(self, pairs: list[tuple[Variable, Any]], reduce: Reduction, n: int) -> None:
        equal = [v for v, g in pairs if not _jax.varies(g)]
        if reduce == "sum" and n > 1 and equal and "equal" not in self._warned:
            self._warned.add("equal")
            warnings.warn(
                f"apply_gradients: the gradient of {equal[0].label} is the same on all replicas and is summed to {n} times"
                " its value; pass reduce=None when gradients are reduced already",
                stacklevel=4,
            )

    def _update(self, grads: list[Any]) -> None:
        """One step; None stands for variables that have no gradient."""
        import optax

        place, strategy = state.top().base, state.context().strategy
        for v in (*self._updated, *self._state):
            state.refuse_foreign(v, strategy, "updated")
            if strategy is not None and state.context().in_replica:
                strategy.adopt(v)
        params = [place.load(v) for v in self._updated]
        slots = [place.load(v) for v in self._state]
        full = [jnp.zeros(v.shape, v.dtype) if g is None else g for v, g in zip(self._updated, grads)]
        updates, new_state = self._tx.update(full, jax.tree.unflatten(self._structure, slots), params)
        new_params = optax.apply_updates(params, updates)
        new_values: dict[Variable, Any] = {}
        for v, g, value in zip(self._updated, grads, new_params):
            if g is not None:
                new_values[v] = _constrained(v, value)
        for v, owner, value in zip(self._state, self._owners, jax.tree.leaves(new_state)):
            if owner is None or grads[owner] is not None:
                new_values[v] = jnp.asarray(value, v.dtype)
        for v, value in new_values.items():
            place.store(v, value)

    def __getattr__(self, name: str) -> Any:
        raise no_such("'Optimizer'", name, OPTIMIZER)

    def __setattr__(self, name: str, value: Any) -> None:
        if name in OPTIMIZER:
            raise no_such("'Optimizer'", name, OPTIMIZER)
        object.__setattr__(self, name, value)

    def __repr__(self) -> str:
        built = f"{len(self._updated)} variables" if self._updated else "not built"
        return f"Optimizer({built})"

    def __getstate__(self) -> dict[str, Any]:
        return {k: getattr(self, k) for k in self.__slots__ if k not in ("__weakref__", "_update_now")}

    def __setstate__(self, kept: dict[str, Any]) -> None:
        for k, v in kept.items():
            setattr(self, k, v)
        self._update_now = function(self._update)


def _checked_variables(variables: Any, caller: str) -> tuple[Variable, ...]:
    try:
        variables = tuple(counterparts(list(variables)))
    except TypeError:
        raise ArgumentTypeError(f"{caller} takes a list of px.Variables, got {type(variables).__name__}.") from None
    for v in variables:
        if not isinstance(v, Variable):
            raise ArgumentTypeError(f"{caller} takes px.Variables, got {type(v).__name__} {v!r:.60}.")
        if v.per_replica:
            raise ArgumentError(
                f"{caller}: {v.label} has one component per replica; it cannot be updated by one optimizer step."
            )
        if not jnp.issubdtype(v.dtype, jnp.inexact):
            raise ArgumentError(f"{caller}: {v.label} has dtype {v.dtype}, which has no gradient. Leave it out.")
    if len(set(variables)) < len(variables):
        twice = next(v for i, v in enumerate(variables) if v in set(variables[:i]))
        raise ArgumentError(f"{caller}: {twice.label} was given twice; add up its gradients first.")
    return variables


def pairs_of(grads_and_vars: Any) -> list[tuple[Any, Any]]:
    """What should be pairs, as a list.

    Raises:
        ArgumentError: for none.
        ArgumentTypeError: for something else.
    """
    try:
        pairs = [(g, v) for g, v in grads_and_vars]
    except (TypeError, ValueError) as error:
        raise ArgumentTypeError(
            f"apply_gradients takes pairs, zip(gradients, variables), got {type(grads_and_vars).__name__}."
        ) from error
    if not pairs:
        raise ArgumentError("apply_gradients: there are no pairs. Was the zip used up already?")
    return pairs


def checked_pairs(grads_and_vars: Any) -> list[tuple[Any, Variable]]:
    """Gradients as arrays, and variables, that go together.

    Raises:
        ArgumentError: for none, for wrong shapes, and for variables that an optimizer cannot update.
        ArgumentTypeError: for something else.
    """
    pairs = pairs_of(grads_and_vars)
    variables = _checked_variables([v for _, v in pairs], "apply_gradients")
    return [(None if g is None else _checked_gradient(g, v), v) for (g, _), v in zip(pairs, variables)]


def _checked_gradient(gradient: Any, variable: Variable) -> Any:
    if not is_per_replica(gradient):
        gradient = to_array(variable.label, "the gradient", gradient)
    elif state.context().in_replica:
        raise ArgumentTypeError(
            f"apply_gradients: the gradient of {variable.label} is a PerReplica, in a replica. Pass it to strategy.run as"
            " an argument; each replica then gets its own part."
        )
    if tuple(gradient.shape) != variable.shape:
        raise ArgumentError(
            f"apply_gradients: the gradient of {variable.label} has shape {tuple(gradient.shape)}, the variable"
            f" {variable.shape}."
        )
    check_kind(f"apply_gradients: {variable.label}", gradient.dtype, variable.dtype)
    return gradient


def _constrained(variable: Variable, value: Any) -> Any:
    if variable.constraint is None:
        return value
    kept = to_array(variable.label, "the result of its constraint", variable.constraint(value))
    if tuple(kept.shape) != variable.shape:
        raise AssignmentError(
            f"{variable.label} has shape {variable.shape}, and its constraint gave shape {tuple(kept.shape)}."
        )
    return jnp.asarray(kept, variable.dtype)


def _owners(tx: Any, initial: Any, n: int) -> list[int | None]:
    """For each leaf of the state: the position of the variable that it belongs to."""
    import optax

    try:
        marked = optax.tree.map_params(tx, lambda _, i: i, initial, list(range(n)), transform_non_params=lambda _: -1)
    except Exception:  # some transformations cannot be asked: then all of their state is shared
        return [None] * len(jax.tree.leaves(initial))
    return [None if owner < 0 else owner for owner in jax.tree.leaves(marked)]
