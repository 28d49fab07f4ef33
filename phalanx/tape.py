"""`GradientTape`: reverse-mode differentiation of code that runs as it is written.

Values are plain ``jax.Array``s. Entering a tape makes a trace of our own JAX's current one: each
operation comes by, is run on the trace below, and is recorded under the identity of its inputs and
outputs when it is reached from something watched. `gradient` walks the records backwards.
"""

from __future__ import annotations

import functools
import itertools
import warnings
from collections.abc import Hashable, Iterator, Sequence
from contextlib import contextmanager
from types import TracebackType
from typing import Any, Literal, NamedTuple, get_args

import jax
import jax.numpy as jnp

from phalanx import _jax, state
from phalanx._checks import as_array, check_choice, check_flag, take_apart
from phalanx._identities import Identities
from phalanx._linearize import Pull, linearize, pull_again
from phalanx._open_tape import OpenTape
from phalanx.errors import ArgumentError, ArgumentTypeError, TapeError
from phalanx.variables import Component, Variable

Unconnected = Literal["none", "zero"]


class GradientTape(OpenTape):
    """Records operations so that gradients of their results can be asked for.

    Trainable variables are watched when they are read; other arrays by `watch`. Works in eager code,
    in `px.function`, in replicas (gradients are local to the replica), inside and around JAX's own
    transformations, and nested for higher derivatives.

    Args:
        persistent: allow several calls of `gradient`; records are kept until the tape goes.
        watch_accessed_variables: watch trainable variables when they are read.

    Raises:
        ArgumentTypeError: for options that are not True or False.

    Example:
        >>> w = px.Variable(3.0)
        >>> with px.GradientTape() as tape:
        ...     loss = w * w
        >>> float(tape.gradient(loss, w))
        6.0

    Semantics follow ``tf.GradientTape`` (TensorFlow 2.21); see docs/differences.md.
    """

    def __init__(self, persistent: bool = False, watch_accessed_variables: bool = True) -> None:
        super().__init__()
        for value, label in ((persistent, "persistent"), (watch_accessed_variables, "watch_accessed_variables")):
            check_flag(value, f"GradientTape: {label}")
        self._persistent = persistent
        self._watch_variables = watch_accessed_variables
        self._used = False
        self._clear()

    def _clear(self) -> None:
        self._records: list[_Record] = []
        self._known: Identities[int] = Identities()
        """A number for each value that gradients can flow through."""
        self._variables: dict[Variable, list[Any]] = {}
        """Each watched variable with its reads: (stored value, what the reader got)."""

    def __enter__(self) -> GradientTape:
        if self.active:
            raise TapeError("This tape is already recording; use one `with` block at a time.")
        if self._used and not self._persistent:
            raise TapeError("This tape has given its gradient. Make a new one, or use persistent=True.")
        if not self._used:
            self._clear()
        self.open()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        self.close()

    # ---- what is watched ----

    def watch(self, value: Any) -> None:
        """Watch an array, a variable, or a pytree of them (integers have no gradient and are passed over).

        Raises:
            TapeError: when the tape is not recording.
            ArgumentTypeError: for something that is not an array.
        """
        if not self.active:
            raise TapeError("watch was called on a tape that is not recording; call it inside the `with` block.")
        for leaf in take_apart(value, "watch", _is_source)[0]:
            if isinstance(leaf, Variable):
                self._variables.setdefault(leaf, [])
                state.renew_bodies()
            elif isinstance(leaf, jax.Array):
                if _differentiable(leaf):
                    self._number(leaf)
                else:
                    warnings.warn(f"watch: a value of dtype {leaf.dtype} has no gradient", stacklevel=2)
            else:
                raise ArgumentTypeError(
                    f"watch takes jax arrays and variables, got {type(leaf).__name__}. Convert it with jnp.asarray"
                    " and use that array in the computation."
                )

    def watched_variables(self) -> tuple[Variable, ...]:
        """The variables that were read or watched, in that order."""
        return tuple(self._variables)

    @contextmanager
    def stop_recording(self) -> Iterator[None]:
        """Operations in the block are not recorded.

        Raises:
            TapeError: when the tape is not recording.

        Example:
            >>> w = px.Variable(3.0)
            >>> with px.GradientTape() as tape:
            ...     y = w * w
            ...     with tape.stop_recording():
            ...         z = w * y
            >>> float(tape.gradient(y, w))
            6.0
        """
        if not self.active:
            raise TapeError("stop_recording was called on a tape that is not recording.")
        before, self.recording = self.recording, False
        state.renew_bodies()
        try:
            yield
        finally:
            self.recording = before
            state.renew_bodies()

    def reset(self) -> None:
        """Forget everything recorded and watched so far."""
        self._clear()
        self._used = False

    # ---- recording ----

    def wants(self, args: Sequence[Any]) -> bool:
        return self.active and self.recording and self._known.any_of(args)

    def observe(self, operation: _jax.Operation, args: list[Any]) -> list[Any]:
        sources = [self._known.get(x) for x in args]
        mask = tuple(number is not None for number in sources)
        outs, connected, pull = linearize(operation, args, mask)
        outs, numbers = list(outs), []
        for position in connected:
            out = outs[position]
            if out in self._known or any(out is x for x in args):
                outs[position] = out = _jax.alias(out)
            numbers.append(self._number(out))
        if numbers:
            again = functools.partial(pull_again, operation, args, mask) if self._persistent else None
            self._records.append(_Record([n for n in sources if n is not None], numbers, pull, again))
        return outs

    def _number(self, value: Any) -> int:
        number = self._known.get(value)
        if number is None:
            number = next(_numbers)
            self._known.note(value, number)
        return number

    def lifts(self, variable: Any) -> bool:
        if not (self.active and self.recording):
            return False
        return variable in self._variables or (self._watch_variables and variable.trainable)

    @property
    def key(self) -> Hashable:
        by_hand = frozenset(id(v) for v in self._variables if not (self._watch_variables and v.trainable))
        return (self._watch_variables, by_hand) if self.active and self.recording else None

    def on_read(self, variable: Any, value: Any) -> Any:
        return self._watched(variable, value) if self.lifts(variable) else value

    def _watched(self, variable: Any, value: Any) -> Any:
        """The read `value` as what gradients end at."""
        if not _differentiable(value):
            self._variables.setdefault(variable, [])
            return value
        seen = self._variables.setdefault(variable, [])
        if seen and seen[-1][0] is value:
            return seen[-1][1]
        with self.silenced():
            if _jax.in_replica_trace() and not _jax.varies(value):
                # Typed as varying, or JAX would give the gradient summed over the replicas.
                fresh = _jax.lift(value)
            else:
                # The array may have a history or another owner: the variable is where its gradient ends.
                fresh = _jax.alias(value)
        seen.append((value, fresh))
        self._number(fresh)
        return fresh

    # ---- gradients ----

    def gradient(
        self,
        target: Any,
        sources: Any,
        output_gradients: Any = None,
        unconnected_gradients: Unconnected = "none",
    ) -> Any:
        """The gradient of `target` with respect to `sources`.

        Args:
            target: array or pytree of arrays; what is not a scalar counts as its sum.
            sources: variable, array or pytree of them.
            output_gradients: a factor for each target, of its shape (default: ones).
            unconnected_gradients: what to give for a source that the target does not depend on: ``"none"``
                (None) or ``"zero"``.

        Returns:
            The gradients in the structure of `sources`. In a replica they are the gradients of this
            replica's own target: all-reduce them, or let `px.Optimizer` do it.

        Raises:
            TapeError: on a second call, unless the tape is persistent; where JAX has no reverse mode.
            ArgumentError: when an output gradient has the wrong shape.

        Example:
            >>> w, b = px.Variable([1.0, 2.0]), px.Variable(0.0)
            >>> with px.GradientTape() as tape:
            ...     y = (w * w).sum()
            >>> tape.gradient(y, {"w": w, "b": b})
            {'b': None, 'w': Array([2., 4.], dtype=float32)}
        """
        check_unconnected(unconnected_gradients)
        targets = self._targets(target)
        seeds = _seeds(targets, target, output_gradients)
        leaves, structure = _sources(sources)
        with self._differentiating():
            grads = self._backward(targets, seeds, leaves)
            grads = [_finish(g, s, unconnected_gradients) for g, s in zip(grads, leaves)]
        return jax.tree.unflatten(structure, grads)

    def jacobian(self, target: jax.Array, sources: Any, unconnected_gradients: Unconnected = "none") -> Any:
        """All first derivatives: for each source an array of shape ``target.shape + source.shape``.

        Args:
            target: array.
            sources: as in `gradient`.
            unconnected_gradients: as in `gradient`.

        Raises:
            TapeError: as in `gradient`.

        Example:
            >>> x = px.Variable([1.0, 2.0])
            >>> with px.GradientTape() as tape:
            ...     y = x * x
            >>> tape.jacobian(y, x)
            Array([[2., 0.],
                   [0., 4.]], dtype=float32)
        """
        check_unconnected(unconnected_gradients)
        (array,) = self._single(target, "jacobian")
        leaves, structure = _sources(sources)
        with self._differentiating():
            basis = _unit_vectors(array.size, array).reshape(array.size, *array.shape)
            rows = self._batched_backward(array, basis, leaves)
            full = [None if r is None else r.reshape(*array.shape, *_shape(s)) for r, s in zip(rows, leaves)]
            grads = [_finish(g, s, unconnected_gradients, array.shape) for g, s in zip(full, leaves)]
        return jax.tree.unflatten(structure, grads)

    def batch_jacobian(
        self, target: jax.Array, source: jax.Array, unconnected_gradients: Unconnected = "none"
    ) -> jax.Array | None:
        """Per-example derivatives, for row-wise computations: shape ``(batch, *target_row, *source_row)``.

        Args:
            target: array of shape ``(batch, ...)`` whose row i depends on row i of `source` alone.
            source: array of shape ``(batch, ...)``.
            unconnected_gradients: as in `gradient`.

        Raises:
            ArgumentError: when the first dimensions differ.
            TapeError: as in `gradient`.
        """
        check_unconnected(unconnected_gradients)
        (array,) = self._single(target, "batch_jacobian")
        leaves, _ = _sources(source)
        if len(leaves) != 1:
            raise ArgumentError(f"batch_jacobian takes one source, got a structure of {len(leaves)}.")
        shape = _shape(leaves[0])
        if not shape or not array.ndim or array.shape[0] != shape[0]:
            raise ArgumentError(
                "batch_jacobian: target and source need the same first dimension, got shapes"
                f" {array.shape} and {shape}."
            )
        with self._differentiating():
            row = array.size // array.shape[0] if array.shape[0] else 1
            basis = _unit_vectors(row, array).reshape(row, 1, *array.shape[1:])
            basis = jnp.broadcast_to(basis, (row, *array.shape))
            (rows,) = self._batched_backward(array, basis, leaves)
            if rows is not None:
                rows = jnp.moveaxis(rows, 0, 1).reshape(shape[0], *array.shape[1:], *shape[1:])
            full = (shape[0], *array.shape[1:], *shape[1:])
            return rows if rows is not None or unconnected_gradients == "none" else jnp.zeros(full, array.dtype)

    def _targets(self, target: Any) -> list[Any]:
        leaves, _ = take_apart(target, "target", _is_source)
        if not leaves:
            raise ArgumentTypeError(f"target holds no array to differentiate, got {target!r:.60}.")
        return [self._target(leaf) for leaf in leaves]

    def _target(self, leaf: Any) -> Any:
        _check_leaf("target", leaf, "an array that the tape recorded")
        if isinstance(leaf, jax.Array):
            return leaf
        # A watched variable is its own target also when it is read now, after the tape was closed.
        variable = leaf.container if isinstance(leaf, Component) else leaf
        return self._watched(variable, variable.value) if variable in self._variables else variable.value

    def _single(self, target: Any, caller: str) -> list[Any]:
        targets = self._targets(target)
        if len(targets) != 1:
            raise ArgumentError(f"{caller} takes one target array, got a structure of {len(targets)}.")
        return targets

    @contextmanager
    def _differentiating(self) -> Iterator[None]:
        if self._used and not self._persistent:
            raise TapeError(
                "This tape has given its gradient and let go of its records. Use GradientTape(persistent=True) to ask"
                " several times."
            )
        self._used = True
        if not self._persistent:
            self.close()
        try:
            yield
        finally:
            if not self._persistent:
                self._records, self._known = [], Identities()
                self._variables = {variable: [] for variable in self._variables}

    def _batched_backward(self, target: Any, basis: Any, sources: list[Any]) -> list[Any]:
        def rows(seed: Any) -> list[Any]:
            return self._backward([target], [seed], sources)

        if not _differentiable(target):
            return [None] * len(sources)
        return list(jax.vmap(rows)(basis))

    def _backward(self, targets: list[Any], seeds: list[Any], sources: list[Any]) -> list[Any]:
        numbers = [self._numbers_of(source) for source in sources]
        wanted = {number for group in numbers for number in group}
        cotangents: dict[int, Any] = {}
        for target, seed in zip(targets, seeds):
            number = self._known.get(target)
            if number is not None and seed is not None:
                _accumulate(cotangents, number, _jax.typed_as(jax.typeof(target), seed))
        for record in reversed(self._records):
            if not any(number in cotangents for number in record.outs):
                continue
            cts = [cotangents.get(n) if n in wanted else cotangents.pop(n, None) for n in record.outs]
            known_zero = all(ct is None for ct in cts)
            pull = record.again if record.again and self.active and self.recording else record.pull
            for number, ct in zip(record.sources, [None] * len(record.sources) if known_zero else pull(cts)):
                _accumulate(cotangents, number, ct)
        return [self._total(source, cotangents, group) for source, group in zip(sources, numbers)]

    def _total(self, source: Any, cotangents: dict[int, Any], numbers: list[int]) -> Any:
        found = [cotangents[n] for n in numbers if n in cotangents]
        if not found:
            return None
        total = functools.reduce(_add, found)
        if total is None:
            total = jnp.zeros(_shape(source), source.dtype)
        # Typed as the same on all replicas or not, a gradient is the replica's own.
        return _jax.local_lift(total) if _jax.in_replica_trace() else total

    def _numbers_of(self, source: Any) -> list[int]:
        """The values whose cotangents add up to the gradient with respect to `source`."""
        if isinstance(source, Component):
            return self._numbers_of(source.container) if source.replica_id == 0 else []
        values = [fresh for _, fresh in self._variables.get(source, [])] if isinstance(source, Variable) else [source]
        return [number for value in values if (number := self._known.get(value)) is not None]


_numbers = itertools.count()


class _Record(NamedTuple):
    """One operation: how cotangents of its outputs become cotangents of its watched inputs."""

    sources: list[int]
    outs: list[int]
    pull: Pull
    again: Pull | None
    """The same as a computation that can itself be recorded (for persistent tapes)."""


def _accumulate(cotangents: dict[int, Any], number: int, ct: Any) -> None:
    """Add to a value's cotangent; None is a zero, which is still something: the value is connected to the target."""
    cotangents[number] = _add(cotangents.get(number), ct)


def _add(a: Any, b: Any) -> Any:
    return b if a is None else a if b is None else jax.lax.add(a, b)


def _differentiable(value: Any) -> bool:
    return jnp.issubdtype(value.dtype, jnp.inexact)


def _is_source(value: Any) -> bool:
    return isinstance(value, (Variable, Component))


def _check_leaf(argument: str, leaf: Any, wanted: str) -> None:
    if _jax.is_leaked(leaf):
        raise TapeError(
            f"{argument} holds a value of a traced function or a replica that is over. Ask for the gradient where the"
            " value is computed, and return it."
        )
    if not (isinstance(leaf, jax.Array) or _is_source(leaf)):
        raise ArgumentTypeError(
            f"{argument} must be {wanted}, or a pytree of them, got {type(leaf).__name__} {leaf!r:.60}. Arrays of NumPy"
            " and numbers take part as jnp.asarray(value): watch that, and compute with it."
        )


def _sources(sources: Any) -> tuple[list[Any], Any]:
    if sources is None:
        raise ArgumentTypeError("sources must be variables or arrays, got None.")
    leaves, structure = take_apart(sources, "sources", _is_source)
    for leaf in leaves:
        _check_leaf("sources", leaf, "a variable or a jax array that was watched")
    return leaves, structure


def _seeds(targets: list[Any], target: Any, output_gradients: Any) -> list[Any]:
    if output_gradients is None:
        return [jnp.ones(t.shape, t.dtype) if _differentiable(t) else None for t in targets]
    structure = jax.tree.structure(target, is_leaf=_is_source)
    try:
        given = structure.flatten_up_to(output_gradients)
    except (ValueError, TypeError) as error:
        raise ArgumentError(f"output_gradients must have the structure of the target, {structure}.") from error
    return [_seed(t, g) if _differentiable(t) else None for t, g in zip(targets, given)]


def _seed(target: Any, given: Any) -> Any:
    if given is None:
        return jnp.ones(target.shape, target.dtype)
    seed = as_array(given, "output_gradients")
    if seed.shape != target.shape:
        raise ArgumentError(f"output_gradients has shape {seed.shape} for a target of shape {target.shape}.")
    if jnp.iscomplexobj(seed) and not jnp.iscomplexobj(target):
        raise ArgumentError(f"output_gradients has dtype {seed.dtype} for a target of dtype {target.dtype}.")
    return seed.astype(target.dtype)


def _unit_vectors(n: int, target: Any) -> Any:
    return jnp.eye(n, dtype=target.dtype if _differentiable(target) else None)


def _shape(source: Any) -> tuple[int, ...]:
    return tuple(source.shape)


def check_unconnected(option: Any) -> None:
    """Raise unless it is one of the two ways to answer for what has no gradient."""
    check_choice(option, "unconnected_gradients", get_args(Unconnected))


def _finish(grad: Any, source: Any, unconnected: Unconnected, prefix: Sequence[int] = ()) -> Any:
    if grad is None:
        return jnp.zeros((*prefix, *_shape(source)), source.dtype) if unconnected == "zero" else None
    return grad
