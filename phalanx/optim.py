"""`Optimizer`: any optax transformation on variables, with gradients all-reduced in replicas."""

from __future__ import annotations

import warnings
from collections.abc import Iterable
from typing import Any, Literal

import jax
import jax.numpy as jnp
import optax

from phalanx import _jax, state
from phalanx.distribute.collectives import all_reduce, check_op
from phalanx.distribute.strategy import get_strategy
from phalanx.distribute.values import PerReplica
from phalanx.errors import AggregationRequiredError, ArgumentError, ArgumentTypeError, StrategyError
from phalanx.variables import Variable

Reduction = Literal["sum", "mean"] | None


class Optimizer:
    """Updates variables by an optax transformation, whose state lives in variables too.

    Args:
        tx: any ``optax.GradientTransformation``.

    Example:
        >>> w = px.Variable([1.0, 2.0])
        >>> optimizer = px.Optimizer(optax.sgd(0.1))
        >>> with px.GradientTape() as tape:
        ...     loss = (w * w).sum()
        >>> optimizer.apply_gradients([(tape.gradient(loss, w), w)])
        >>> w.numpy()
        array([0.8, 1.6], dtype=float32)
    """

    def __init__(self, tx: optax.GradientTransformation) -> None:
        if not (hasattr(tx, "init") and hasattr(tx, "update")):
            raise ArgumentTypeError(
                f"Optimizer takes an optax transformation such as optax.adam(1e-3), got {type(tx).__name__} {tx!r:.60}."
            )
        self._tx = tx
        self._updated: tuple[Variable, ...] = ()
        self._state: list[Variable] = []
        self._structure: Any = None
        self._warned: set[Any] = set()
        self._step = jax.jit(self._transform)

    @property
    def variables(self) -> tuple[Variable, ...]:
        """The variables that hold the optimizer's state (empty before `build`)."""
        return tuple(self._state)

    @property
    def state(self) -> Any:
        """optax's state with variables as its leaves, or None before `build`."""
        return None if self._structure is None else jax.tree.unflatten(self._structure, self._state)

    def build(self, variables: Iterable[Variable]) -> None:
        """Make the state for these variables; `apply_gradients` does it at its first call.

        It happens outside every trace, so the first call may be inside a traced function or a replica.

        Raises:
            ArgumentTypeError: for something that is not a variable.
            ArgumentError: when the optimizer was built for others, or a variable is given twice.
        """
        variables = tuple(variables)
        for v in variables:
            if not isinstance(v, Variable):
                raise ArgumentTypeError(f"Optimizer takes px.Variables, got {type(v).__name__}.")
        if len(set(variables)) < len(variables):
            raise ArgumentError("Optimizer: a variable was given twice; add up its gradients first.")
        if self._updated and variables != self._updated:
            raise ArgumentError("Optimizer: it was built for other variables. Use one optimizer for each set of variables.")
        if self._updated or not variables:
            return
        for v in variables:
            if v.per_replica:
                raise ArgumentError(
                    f"Optimizer: {v.label} has one component per replica; it cannot be updated by one optimizer step."
                )
        born_here = any(v._stored is None for v in variables)
        if born_here:
            initial = self._tx.init([state.top().base.load(v) for v in variables])
            self._keep(initial, variables)
        else:
            with state.lifted_out():
                initial = self._tx.init([v._stored for v in variables])
                self._keep(initial, variables)

    def _keep(self, initial: Any, variables: tuple[Variable, ...]) -> None:
        paths, self._structure = jax.tree_util.tree_flatten_with_path(initial)
        owner = next((v.strategy for v in variables if v.strategy is not None), None)
        self._state = [
            Variable(leaf, trainable=False, name=f"optimizer{jax.tree_util.keystr(path)}") for path, leaf in paths
        ]
        if owner is not None:
            for slot in self._state:
                owner.adopt(slot)
        self._updated = variables

    def apply_gradients(self, grads_and_vars: Iterable[tuple[Any, Variable]], reduce: Reduction = "sum") -> None:
        """Update each variable by its gradient.

        Args:
            grads_and_vars: pairs; a gradient has its variable's shape, or is None (that variable is left as
                it is, and named once in a warning).
            reduce: in a replica, how the replicas' gradients merge before the step: ``"sum"`` (for losses
                divided by the global batch), ``"mean"``, or None when they are reduced already. Small
                gradients travel together.

        Raises:
            ArgumentError: when there is no gradient at all, a shape is wrong, or a variable is unknown.
            AggregationRequiredError: with ``reduce=None`` and a gradient that may differ between replicas.
        """
        pairs = self._check_pairs(grads_and_vars)
        if reduce is not None:
            reduce = check_op(reduce, "apply_gradients(reduce=...)")
        variables = tuple(v for _, v in pairs)
        known = set(self._updated)
        if not self._updated:
            self.build(variables)
        elif not set(variables) <= known:
            new = [v.label for v in variables if v not in known]
            raise ArgumentError(
                f"Optimizer: {', '.join(new)} was not among the variables that it was built for. Call"
                " optimizer.build(all_variables) first, or use one optimizer for each set of variables."
            )
        grads = {v: g for g, v in pairs if g is not None}
        self._warn_of_missing([v for g, v in pairs if g is None], bool(grads))
        reduced = dict(zip(grads, self._reduce(list(grads.items()), reduce)))
        self._update(reduced)

    def _check_pairs(self, grads_and_vars: Any) -> list[tuple[Any, Variable]]:
        try:
            pairs = [(g, v) for g, v in grads_and_vars]
        except (TypeError, ValueError) as error:
            raise ArgumentTypeError("apply_gradients takes pairs: zip(gradients, variables).") from error
        if not pairs:
            raise ArgumentError("apply_gradients: there are no pairs. Was the zip used up already?")
        checked: list[tuple[Any, Variable]] = []
        for g, v in pairs:
            if not isinstance(v, Variable):
                raise ArgumentTypeError(f"apply_gradients takes pairs (gradient, px.Variable), got {type(v).__name__}.")
            if g is not None:
                g = g.value if isinstance(g, Variable) else g
                shape = tuple(g.shape) if hasattr(g, "shape") else jnp.shape(g)
                if shape != v.shape:
                    raise ArgumentError(f"apply_gradients: the gradient of {v.label} has shape {shape}, the variable {v.shape}.")
            checked.append((g, v))
        return checked

    def _warn_of_missing(self, missing: list[Variable], some_left: bool) -> None:
        if missing and not some_left:
            raise ArgumentError(
                "apply_gradients: no gradient at all, for " + ", ".join(v.label for v in missing) + ". Was the loss computed"
                " inside the tape, from these variables, without stop_gradient or a cast to integers?"
            )
        new = [v for v in missing if v not in self._warned]
        if new:
            self._warned.update(new)
            names = ", ".join(v.label for v in new)
            warnings.warn(f"apply_gradients: the loss does not depend on {names}; left as it is", stacklevel=3)

    def _reduce(self, pairs: list[tuple[Variable, Any]], reduce: Reduction) -> list[Any]:
        context = state.context()
        strategy = get_strategy()
        if not context.in_replica:
            if any(isinstance(g, PerReplica) for _, g in pairs):
                return [strategy.reduce(reduce or "sum", g) for _, g in pairs]
            return [jnp.asarray(g, v.dtype) for v, g in pairs]
        if reduce is None:
            for v, g in pairs:
                if _jax.varies(g):
                    raise AggregationRequiredError(
                        f"apply_gradients(reduce=None): the gradient of {v.label} may differ between the replicas, at"
                        f" {_jax.user_line()}. Leave reduce at 'sum', or all_reduce the gradients first."
                    )
            return [jnp.asarray(g, v.dtype) for v, g in pairs]
        self._warn_of_equal(pairs, reduce, strategy.num_replicas)
        return all_reduce(reduce, [jnp.asarray(g, v.dtype) for v, g in pairs], strategy.num_replicas, strategy.platform)

    def _warn_of_equal(self, pairs: list[tuple[Variable, Any]], reduce: Reduction, n: int) -> None:
        equal = [v for v, g in pairs if not _jax.varies(jnp.asarray(g))]
        if reduce == "sum" and n > 1 and equal and "equal" not in self._warned:
            self._warned.add("equal")
            warnings.warn(
                f"apply_gradients: the gradient of {equal[0].label} is the same on all replicas and is summed to {n} times"
                " its value; pass reduce=None when gradients are reduced already",
                stacklevel=4,
            )

    def _update(self, grads: dict[Variable, Any]) -> None:
        place = state.top().base
        strategy = state.context().strategy
        for v in (*self._updated, *self._state):
            state.refuse_foreign(v, strategy, "updated")
            if strategy is not None and state.context().in_replica:
                strategy.adopt(v)
        params = [place.load(v) for v in self._updated]
        slots = [place.load(v) for v in self._state]
        full = [grads.get(v) if v in grads else jnp.zeros(v.shape, v.dtype) for v in self._updated]
        new_params, new_slots = self._step(full, slots, params)
        for v, value in zip(self._updated, new_params):
            if v in grads:
                place.store(v, value if v.constraint is None else v.constraint(value))
        for v, value in zip(self._state, new_slots):
            place.store(v, value)

    def _transform(self, grads: list[Any], slots: list[Any], params: list[Any]) -> tuple[list[Any], list[Any]]:
        updates, new = self._tx.update(grads, jax.tree.unflatten(self._structure, slots), params)
        new_params = optax.apply_updates(params, updates)
        slots = [jnp.asarray(s, v.dtype) for s, v in zip(jax.tree.leaves(new), self._state)]
        return list(new_params), slots  # type: ignore[arg-type]

    def __repr__(self) -> str:
        built = f"{len(self._updated)} variables" if self._updated else "not built"
        return f"Optimizer({built})"
