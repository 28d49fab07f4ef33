"""`NonFiniteGuard` and `finite_or_raise`: NaN and infinity are found, named, and kept out of the variables.

A program on the devices cannot raise. The guard decides there whether a step counts, from the reduced gradients, which
are the same on all replicas; each replica notes in a variable of its own what it saw. The host looks at these few
numbers now and then, without waiting for a step.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Iterable
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from phalanx import _jax, state
from phalanx._checks import as_array, check_choice, check_int, counterparts, take_apart
from phalanx._launch import in_order
from phalanx.checkpoint.objects import Parts, register
from phalanx.distribute.collectives import all_reduce, check_op
from phalanx.distribute.values import is_per_replica
from phalanx.errors import ArgumentError, ArgumentTypeError, NonFiniteError, StrategyError, TracingError
from phalanx.optim import Optimizer, Reduction, checked_pairs, pairs_of
from phalanx.variables import Component, Variable

logger = logging.getLogger("phalanx")

Policy = Literal["raise", "skip", "rescale"]

_LARGEST_SCALE = 2.0**24
"""The inverse of more is nothing in float16, and neither were the gradients that are divided by it."""

_OWN, _SUM, _LOSS = 1, 2, 4
"""Where something was not finite: on a replica, or only in the sum over the replicas; and whether the loss was not."""


class NonFiniteGuard:
    """An optimizer whose steps with NaN or infinite losses or gradients do not count, on any replica.

    Use it in place of the optimizer, or with Keras's `fit` as a callback: ``px.NonFiniteGuard(model.optimizer)``. Such a
    step changes neither the variables nor the optimizer's state.

    Args:
        optimizer: a `px.Optimizer`, or an optimizer of Keras's.
        policy: ``"raise"``: no later step counts either, and `after_step` raises: the variables are as they were before
            the first such step. ``"skip"``: training goes on, and a warning is logged. ``"rescale"``: for float16: as
            ``"skip"``, and the loss scale (see `scale_loss`) is halved; after `growth_steps` steps that count it is
            doubled. Not finite at a scale of 1 is an error.
        every: after how many steps the host looks.
        initial_scale: of the loss, with ``"rescale"``.
        growth_steps: see ``"rescale"``.

    Raises:
        ArgumentTypeError: for something that is no optimizer.
        ArgumentError: for an unknown policy, or numbers that are not positive.

    Example:
        >>> w = px.Variable([1.0, 2.0], name="w")
        >>> guard = px.NonFiniteGuard(px.Optimizer(optax.sgd(0.1)), every=1)
        >>> def step(x):
        ...     with px.GradientTape() as tape:
        ...         loss = (w * x).sum()
        ...     guard.apply_gradients([(tape.gradient(loss, w), w)], loss=loss)
        >>> step(jnp.array([1.0, jnp.nan]))
        >>> w.numpy().tolist()
        [1.0, 2.0]
        >>> guard.check()
        Traceback (most recent call last):
        phalanx.errors.NonFiniteError: At step 1 the loss and the gradient of Variable 'w' are not finite on replica 0...
    """

    def __init__(
        self,
        optimizer: Any,
        policy: Policy = "raise",
        *,
        every: int = 10,
        initial_scale: float = 2.0**15,
        growth_steps: int = 2000,
    ) -> None:
        if not (hasattr(optimizer, "apply_gradients") and hasattr(optimizer, "build")):
            raise ArgumentTypeError(
                f"NonFiniteGuard takes a px.Optimizer or an optimizer of Keras's, got {type(optimizer).__name__}."
            )
        check_choice(policy, "NonFiniteGuard: policy", ("raise", "skip", "rescale"))
        for name, value in (("every", every), ("growth_steps", growth_steps)):
            check_int(value, f"NonFiniteGuard: {name}")
        is_number = isinstance(initial_scale, (int, float)) and not isinstance(initial_scale, bool)
        if not is_number or not 1 <= initial_scale <= _LARGEST_SCALE:
            raise ArgumentError(
                f"NonFiniteGuard: initial_scale must be a number from 1 to 2**24, got {initial_scale!r:.60}."
            )
        self.optimizer = optimizer
        self.policy = policy
        self._every = every
        self._growth_steps = growth_steps
        self._names: list[str] = []
        """The variables that the numbers stand for, from 1 on, which replicas note."""
        self._is_scaled = False
        self._host_steps = self._reported = 0
        self._pending: tuple[Any, ...] | None = None
        rescales = policy == "rescale"
        self._counts = Variable(np.zeros(3, np.int32), trainable=False, name="guard/counts")
        """Steps, steps that did not count, and steps that counted since the scale changed."""
        self._seen = Variable(np.zeros(3, np.int32), trainable=False, name="guard/seen", synchronization="on_read")
        """Each replica's: the last step that did not count (with ``"raise"`` the first), what was not finite, and where."""
        self._scale = Variable(float(initial_scale) if rescales else 1.0, trainable=False, name="guard/scale")

    @property
    def variables(self) -> tuple[Variable, ...]:
        """The guard's own: counts, what each replica saw, and the loss scale."""
        return self._counts, self._seen, self._scale

    @property
    def skipped(self) -> int:
        """Steps that did not count."""
        return int(self._counts.value[1])

    @property
    def scale(self) -> float:
        """The loss scale."""
        return float(self._scale.value)

    def build(self, variables: Iterable[Any]) -> None:
        """Make the optimizer's state for these variables, before the first step: for a checkpoint that is restored."""
        self.optimizer.build(list(variables))

    # ---- in the step ----

    def scale_loss(self, loss: Any) -> Any:
        """The loss times the scale, in the tape; `apply_gradients` divides the gradients by it.

        Example:
            >>> w = px.Variable(1.0)
            >>> guard = px.NonFiniteGuard(px.Optimizer(optax.sgd(1.0)), "rescale", initial_scale=8)
            >>> with px.GradientTape() as tape:
            ...     scaled = guard.scale_loss(w * 2.0)
            >>> guard.apply_gradients([(tape.gradient(scaled, w), w)])
            >>> float(scaled), float(w)
            (16.0, -1.0)
        """
        self._is_scaled = True
        loss = jnp.asarray(loss)
        return loss * state.top().base.load(self._adopted(self._scale)).astype(loss.dtype)

    def apply_gradients(
        self, grads_and_vars: Iterable[tuple[Any, Any]], reduce: Reduction = "sum", *, loss: Any = None
    ) -> None:
        """As `px.Optimizer.apply_gradients`, if the loss and all gradients are finite on all replicas.

        Args:
            grads_and_vars: pairs of gradient and variable.
            reduce: how the replicas' gradients merge; None when they are reduced already.
            loss: checked too, if given.

        Raises:
            ArgumentError: with ``"rescale"``, when the loss was not scaled.
        """
        self._applied(grads_and_vars, reduce, loss)

    def _applied(self, grads_and_vars: Any, reduce: Reduction, loss: Any) -> jax.Array:
        """As `apply_gradients`; whether the step counts, on all replicas."""
        if self.policy == "rescale" and not self._is_scaled:
            raise ArgumentError(
                "NonFiniteGuard(policy='rescale').apply_gradients divides the gradients by the loss scale, and no loss was"
                " scaled. In the tape write `scaled = guard.scale_loss(loss)`, and take tape.gradient(scaled, variables)."
            )
        self._is_scaled = False
        given = pairs_of(grads_and_vars)
        # Keras's optimizers want Keras's variables.
        pairs = [(g, v) for (g, _), (_, v) in zip(checked_pairs(given), given)]
        present = [(g, v) for g, v in pairs if g is not None]
        if not present:
            self.optimizer.apply_gradients(pairs)  # which says what is wrong
            return jnp.bool_(True)
        own = [0.0 if loss is None else loss, *(g for g, _ in present)]
        own = [value if is_per_replica(value) else as_array(value, "apply_gradients") for value in own]
        merged = _merged(own, reduce)
        own = [total if is_per_replica(value) else value for value, total in zip(own, merged)]
        finite, seen = self._look(own, merged, [0, *(self._number(v) for _, v in present)])
        inverse = 1.0 / state.top().base.load(self._adopted(self._scale))
        reduced = iter(merged[1:])
        ready = [(None if g is None else _times(next(reduced), inverse), v) for g, v in pairs]
        counts = state.top().base.load(self._adopted(self._counts))
        if self.policy == "raise":
            finite = finite & (counts[1] == 0)
        self._step(finite, ready)
        self._note(finite, counts, seen)
        return finite

    def _number(self, variable: Any) -> int:
        (variable,) = counterparts([variable])
        if variable.label not in self._names:
            self._names.append(variable.label)
        return self._names.index(variable.label) + 1

    def _look(self, own: list[Any], merged: list[Any], numbers: list[int]) -> tuple[Any, Any]:
        """Whether everything is finite on all replicas, and what this replica would note: a number and flags."""
        in_own, in_sum = (jnp.stack([~jnp.isfinite(x).all() for x in values]) for values in (own, merged))
        here = in_own.any()
        bad = jnp.where(here, in_own, in_sum)
        # The loss comes first, with the number 0: it is what is noted where no gradient is bad.
        first = jnp.where(bad[1:].any(), jnp.array(numbers[1:], jnp.int32)[jnp.argmax(bad[1:])], 0)
        return ~in_sum.any(), jnp.stack([first, jnp.where(here, _OWN, _SUM) + jnp.where(bad[0], _LOSS, 0)])

    def _step(self, finite: Any, ready: list[tuple[Any, Any]]) -> None:
        """One step of the optimizer, which changes nothing where it is not to count."""
        ours = isinstance(self.optimizer, Optimizer)
        variables = [v for _, v in ready]
        if not (self.optimizer.state is not None if ours else self.optimizer.built):
            self.optimizer.build(variables)
        kept = counterparts([*variables, *self.optimizer.variables])
        before = {self._adopted(v): state.borrow(v) for v in kept}
        self.optimizer.apply_gradients(ready, **({"reduce": None} if ours else {}))
        place = state.top().base
        place.store_all({v: jnp.where(finite, place.load(v), old) for v, old in before.items()})

    def _note(self, finite: Any, counts: Any, seen: Any) -> None:
        place = state.top().base
        step = counts[0] + 1
        good = jnp.where(finite, counts[2] + 1, 0)
        if self.policy == "rescale":
            scale = place.load(self._scale)
            grows = good >= self._growth_steps
            grown = jnp.where(grows, jnp.minimum(scale * 2, _LARGEST_SCALE), scale)
            place.store(self._scale, jnp.where(finite, grown, jnp.maximum(scale / 2, 1.0)))
            good = jnp.where(grows, 0, good)
        place.store(self._counts, jnp.stack([step, counts[1] + ~finite, good]))
        known = place.load(self._adopted(self._seen))  # this replica's, or outside of replicas everyone's
        is_news = ~finite & ((counts[1] == 0) if self.policy == "raise" else True)
        place.store(self._seen, jnp.where(is_news, jnp.concatenate([step[None], seen]), known))

    def _adopted(self, variable: Variable) -> Variable:
        strategy = state.context().strategy
        if strategy is not None and _jax.in_replica_trace():
            strategy.adopt(variable)
        return variable

    # ---- on the host ----

    def after_step(self) -> None:
        """Call after each step; it looks at what was noted `every` steps ago, if that has arrived, and waits for nothing.

        Raises:
            NonFiniteError: see `check`.
            StrategyError: in a traced function or a replica.
        """
        _refuse_traces()
        self._host_steps += 1
        if self._pending is not None and all(x.is_ready() for x in self._pending):
            pending, self._pending = self._pending, None
            self._judge(*pending)
        if self._host_steps % self._every == 0 and self._pending is None:
            self._pending = tuple(map(state.borrow, self.variables))

    def check(self) -> None:
        """Look now, waiting for the last step.

        Raises:
            NonFiniteError: with the policy ``"raise"`` when a step was not finite, with ``"rescale"`` when one was not at
                a scale of 1: naming it, what was not finite, and on which replica.
            StrategyError: in a traced function or a replica.
        """
        _refuse_traces()
        self._pending = None
        self._judge(*map(state.borrow, self.variables))

    def _judge(self, counts: Any, seen: Any, scale: Any) -> None:
        skipped = int(_here(counts)[1])
        if skipped <= self._reported:
            return
        what = self._say(seen)
        if self.policy == "raise":
            raise NonFiniteError(
                f"{what}. The variables are as they were before that step. Look at its batch and the learning rate; with"
                " policy='skip' such steps are left out. guard.reset() lets training go on."
            )
        if self.policy == "rescale" and float(_here(scale)) <= 1.0:
            raise NonFiniteError(f"{what}, at a loss scale of 1 too: it does not come from the scale.")
        logger.warning("%d step(s) did not count: %s", skipped - self._reported, what)
        self._reported = skipped

    def _say(self, stored: Any) -> str:
        noted = [(*map(int, part), replica) for replica, part in _local_parts(self._seen, stored)]
        noted = sorted((step, replica, what, flags) for step, what, flags, replica in noted if step)
        if not noted:
            return "Before the checkpoint that was restored a step was not finite"
        step, replica, what, flags = next((note for note in noted if note[-1] & _OWN), noted[0])
        things = ["the loss"] if flags & _LOSS else []
        things += [f"the gradient of {self._names[what - 1]}"] if what else []
        subject = " and ".join(things)
        is_are = "are" if len(things) > 1 else "is"
        if flags & _OWN:
            return f"At step {step} {subject} {is_are} not finite on replica {replica}"
        if any(d.process_index != jax.process_index() for d in getattr(self._seen.strategy, "devices", ())):
            return f"At step {step} {subject} {is_are} not finite on a replica of another process, or only in the sum"
        return f"At step {step} {subject} {is_are} finite on each replica, but not in the sum over them"

    def reset(self) -> None:
        """Forget what was seen: with the policy ``"raise"`` steps count again.

        Raises:
            StrategyError: in a traced function or a replica.
        """
        _refuse_traces()
        self._pending = None
        with state.lifted_out():
            self._seen.assign(np.zeros(3, np.int32))
            self._counts.assign(self._counts.value.at[1].set(0))
        self._reported = 0

    def __repr__(self) -> str:
        return f"NonFiniteGuard({self.optimizer!r}, policy={self.policy!r})"


def _parts_of(guard: NonFiniteGuard, path: str) -> Parts:
    return [("optimizer", guard.optimizer), ("counts", guard._counts), ("scale", guard._scale)]


register(NonFiniteGuard, _parts_of)


def _refuse_traces() -> None:
    if state.in_step():
        raise StrategyError("A NonFiniteGuard is asked outside of traced functions and replicas: after the step.")


def _times(value: Any, factor: Any) -> Any:
    return value * factor.astype(value.dtype)


def _merged(values: list[Any], reduce: Reduction) -> list[Any]:
    """Each value over all replicas, small ones in one collective."""
    if reduce is not None:
        reduce = check_op(reduce, "apply_gradients(reduce=...)")
    if not state.context().in_replica:
        return [v.strategy.reduce(reduce, v) if is_per_replica(v) else jnp.asarray(v) for v in values]
    merged = [as_array(v, "apply_gradients") for v in values]
    # Without a reduction the loss is merged to be looked at; gradients that differ are refused by the optimizer.
    differing = [i for i, v in enumerate(merged) if reduce is not None or (i == 0 and _jax.varies(v))]
    strategy = state.context().strategy
    sums = all_reduce(reduce or "sum", [merged[i] for i in differing], strategy.num_replicas, strategy.platform)
    for i, total in zip(differing, sums):
        merged[i] = total
    return merged


def _here(array: Any) -> np.ndarray[Any, Any]:
    return np.asarray(array.addressable_shards[0].data)


def _local_parts(variable: Variable, stored: Any) -> list[tuple[int, np.ndarray[Any, Any]]]:
    """This process's replicas, each with its part."""
    devices = getattr(variable.strategy, "devices", (None,))
    return [
        (devices.index(shard.device) if len(devices) > 1 else 0, np.asarray(shard.data)[0])
        for shard in stored.addressable_shards
    ]


# ---- values outside of steps ---------------------------------------------------------------------


def finite_or_raise(values: Any, name: str = "value") -> Any:
    """The values as they are, if none of them is NaN or infinite; which are looked at on the devices.

    It waits for the values. In a step, and for gradients, use `NonFiniteGuard`.

    Args:
        values: array, variable, `PerReplica`, or a pytree of them.
        name: how the error calls them.

    Raises:
        NonFiniteError: naming the first that is not finite, and for a `PerReplica` the replica.
        TracingError: in a traced function, where nothing can be raised.

    Example:
        >>> float(px.finite_or_raise(jnp.float32(2.0), "loss"))
        2.0
        >>> px.finite_or_raise({"a": jnp.ones(2), "b": jnp.array([0.0, jnp.inf])}, "metrics")
        Traceback (most recent call last):
        phalanx.errors.NonFiniteError: metrics['b'] is not finite...
    """
    paths = jax.tree_util.tree_flatten_with_path(values, is_leaf=_is_value)[0]
    leaves = take_apart(values, "finite_or_raise", _is_value)[0]
    found = []
    for (path, _), leaf in zip(paths, leaves):
        label = name + jax.tree_util.keystr(path)
        parted = is_per_replica(leaf)
        array = leaf.stacked if parted else leaf.value if isinstance(leaf, (Variable, Component)) else leaf
        if _jax.is_tracer(array):
            raise TracingError(
                f"finite_or_raise: {label} is being traced, and a program on the devices cannot raise. Call it on the"
                " results of the step, or use px.NonFiniteGuard for gradients."
            )
        if isinstance(array, (float, complex)) or jnp.issubdtype(getattr(array, "dtype", np.bool_), jnp.inexact):
            found.append((label, parted, array, _are_bad(array, leaf.strategy if parted else None)))
    for label, parted, array, flags in found:
        bad = np.asarray(flags)
        if bad.any():
            where = f" on replica {int(np.argmax(bad))}" if parted else ""
            raise NonFiniteError(f"{label} is not finite{where}: {' '.join(str(np.asarray(array)).split())[:100]}")
    return values


def _are_bad(array: Any, strategy: Any) -> Any:
    """Whether something in it is not finite; for each replica, of a strategy's."""
    if not isinstance(array, jax.Array):
        return not np.isfinite(array).all()  # on the host: devices have no float64
    in_turn = strategy is not None and strategy.in_order
    return in_order(in_turn, lambda: [_bad(array, strategy is not None)])[0]


def _is_value(value: Any) -> bool:
    return is_per_replica(value) or isinstance(value, (Variable, Component))


@functools.partial(jax.jit, static_argnums=1)
def _bad(array: Any, parted: bool) -> Any:
    flags = ~jnp.isfinite(array)
    return flags.reshape(flags.shape[0], -1).any(1) if parted else flags.any()
