"""`ForwardAccumulator`: forward-mode differentiation (Jacobian-vector products) of code as it runs."""

from __future__ import annotations

from collections.abc import Sequence
from types import TracebackType
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from phalanx import _jax
from phalanx._checks import take_apart
from phalanx._conversion import check_kind, to_array
from phalanx._identities import Identities
from phalanx._linearize import push_forward
from phalanx._open_tape import OpenTape
from phalanx.errors import ArgumentError, ArgumentTypeError, TapeError
from phalanx.tape import check_unconnected
from phalanx.variables import Component, Variable


class ForwardAccumulator(OpenTape):
    """Carries tangents along with the values that are computed in the block.

    One pass gives the derivative of everything along one direction, also through while loops.

    Args:
        primals: variables or arrays (or pytrees) to differentiate with respect to.
        tangents: the direction, in the structure and shapes of `primals`.

    Raises:
        ArgumentError: when tangents do not match primals.

    Example:
        >>> x = px.Variable([1.0, 2.0])
        >>> with px.ForwardAccumulator(x, jnp.array([1.0, 0.0])) as accumulator:
        ...     y = (x * x).sum()
        >>> float(accumulator.jvp(y))
        2.0

    Semantics follow ``tf.autodiff.ForwardAccumulator``.
    """

    def __init__(self, primals: Any, tangents: Any) -> None:
        leaves, structure = take_apart(primals, "ForwardAccumulator: primals", _is_variable)
        if not leaves:
            raise ArgumentError("ForwardAccumulator: primals is empty; give the arrays to differentiate by.")
        try:
            directions = structure.flatten_up_to(tangents)
        except (ValueError, TypeError) as error:
            raise ArgumentError(
                f"ForwardAccumulator: tangents must have the structure of primals, {structure}."
            ) from error
        self._tangents: Identities[Any] = Identities()
        self._arrays: list[jax.Array] = []
        self._variables: dict[Variable, Any] = {}
        self._reads: dict[Variable, tuple[Any, Any]] = {}
        """The last value that each variable was read as, and what the reader got."""
        for primal, direction in zip(leaves, directions):
            tangent = _tangent(primal, direction)
            if isinstance(primal, Variable):
                self._variables[primal] = tangent
            else:
                self._arrays.append(primal)
                self._tangents.note(primal, tangent)

    def __enter__(self) -> ForwardAccumulator:
        if self.active:
            raise TapeError("This accumulator is already recording.")
        self.open()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        self.close()

    def jvp(self, target: Any, unconnected_gradients: str = "none") -> Any:
        """The derivative of `target` along the tangents, in its structure.

        Args:
            target: array or pytree of arrays computed in the block.
            unconnected_gradients: ``"none"`` (None) or ``"zero"`` for what does not depend on the primals.

        Raises:
            ArgumentError: for another `unconnected_gradients`.
        """
        check_unconnected(unconnected_gradients)

        leaves, structure = take_apart(target, "jvp: target", _is_variable)
        return jax.tree.unflatten(structure, [self._derivative(value, unconnected_gradients) for value in leaves])

    def _derivative(self, value: Any, unconnected_gradients: str) -> Any:
        if not isinstance(value, (jax.Array, Variable)):
            raise ArgumentTypeError(
                f"jvp: target must be an array computed in the block, got {type(value).__name__} {value!r:.60}."
            )
        tangent = self._variables.get(value) if isinstance(value, Variable) else self._tangents.get(value)
        if tangent is None:
            return jnp.zeros(value.shape, value.dtype) if unconnected_gradients == "zero" else None
        if isinstance(tangent, _Refused):
            raise tangent.error()
        # Typed as the same on all replicas or not, a derivative is the replica's own.
        return _jax.local_lift(tangent) if _jax.in_replica_trace() else tangent

    def wants(self, args: Sequence[Any]) -> bool:
        return self.active and self._tangents.any_of(args)

    def observe(self, operation: _jax.Operation, args: list[Any]) -> list[Any]:
        tangents = [self._tangents.get(x) for x in args]
        outs, derivatives = _push(operation, args, tangents)
        outs = list(outs)
        for i, derivative in enumerate(derivatives):
            if derivative is not None:
                if outs[i] in self._tangents or any(outs[i] is x for x in args):
                    outs[i] = _jax.alias(outs[i])
                self._tangents.note(outs[i], derivative)
        return outs

    def on_read(self, variable: Any, value: Any) -> Any:
        if not (self.active and variable in self._variables):
            return value
        last, fresh = self._reads.get(variable, (None, None))
        if last is not value:
            with self.silenced():
                fresh = _jax.alias(value)  # the array may have another owner, with another direction
            self._reads[variable] = (value, fresh)
            self._tangents.note(fresh, self._variables[variable])
        return fresh


class _Refused(NamedTuple):
    """Stands for the tangent of what JAX cannot differentiate forwards; an error only if it is asked for."""

    reason: str

    def error(self) -> TapeError:
        return TapeError(
            "The target depends on an operation that cannot be differentiated forwards. JAX says:"
            f" {self.reason.partition(chr(10))[0][:300]} Use px.GradientTape, which differentiates backwards."
        )


def _push(operation: _jax.Operation, args: list[Any], tangents: list[Any]) -> tuple[list[Any], list[Any]]:
    mask = tuple(t is not None for t in tangents)
    given = [t for t in tangents if t is not None]
    refused = next((t for t in given if isinstance(t, _Refused)), None)
    if refused is None:
        try:
            return push_forward(operation, args, mask, given)
        except TapeError:
            raise
        except Exception as error:
            refused = _Refused(str(error))
    outs = operation(*args)
    return outs, [refused if jnp.issubdtype(out.dtype, jnp.inexact) else None for out in outs]


def _tangent(primal: Any, direction: Any) -> Any:
    if not isinstance(primal, (jax.Array, Variable)):
        raise ArgumentTypeError(
            f"ForwardAccumulator: primals must be variables or jax arrays, got {type(primal).__name__} {primal!r:.60}."
        )
    if not jnp.issubdtype(primal.dtype, jnp.inexact):
        raise ArgumentError(f"ForwardAccumulator: primals of dtype {primal.dtype} have no derivative.")
    tangent = to_array("ForwardAccumulator", "tangents", direction)
    if tangent.shape != tuple(primal.shape):
        raise ArgumentError(
            f"ForwardAccumulator: primals and tangents must have the same shapes, got {tuple(primal.shape)} and"
            f" {tangent.shape}."
        )
    check_kind("ForwardAccumulator: the primal", tangent.dtype, primal.dtype)
    return jnp.asarray(tangent, primal.dtype)


def _is_variable(value: Any) -> bool:
    return isinstance(value, (Variable, Component))
