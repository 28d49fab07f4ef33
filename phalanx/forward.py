"""`ForwardAccumulator`: forward-mode differentiation (Jacobian-vector products) of code as it runs."""

from __future__ import annotations

from types import TracebackType
from typing import Any

import jax
import jax.numpy as jnp

from phalanx import _jax
from phalanx.errors import ArgumentError, ArgumentTypeError, TapeError
from phalanx.tape import OpenTape
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
        leaves, structure = jax.tree.flatten(primals, is_leaf=_is_variable)
        try:
            directions = structure.flatten_up_to(tangents)
        except (ValueError, TypeError) as error:
            raise ArgumentError(f"ForwardAccumulator: tangents must have the structure of primals, {structure}.") from error
        self._tangents: dict[int, Any] = {}
        self._values: dict[int, Any] = {}
        self._variables: dict[Variable, Any] = {}
        for primal, tangent in zip(leaves, directions):
            if not isinstance(primal, (jax.Array, Variable)):
                raise ArgumentTypeError(f"ForwardAccumulator: primals are variables or jax arrays, got {type(primal).__name__}.")
            if not jnp.issubdtype(primal.dtype, jnp.inexact):
                raise ArgumentError(f"ForwardAccumulator: a primal of dtype {primal.dtype} has no derivative.")
            tangent = jnp.asarray(tangent, primal.dtype)
            if tangent.shape != tuple(primal.shape):
                raise ArgumentError(f"ForwardAccumulator: a primal has shape {primal.shape}, its tangent {tangent.shape}.")
            if isinstance(primal, Variable):
                self._variables[primal] = tangent
            else:
                self._track(primal, tangent)

    def _track(self, value: Any, tangent: Any) -> None:
        self._values[id(value)] = value
        self._tangents[id(value)] = tangent

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
        """
        if unconnected_gradients not in ("none", "zero"):
            raise ArgumentError(f"unconnected_gradients must be 'none' or 'zero', got {unconnected_gradients!r}.")

        def leaf(value: Any) -> Any:
            if isinstance(value, Variable):
                return self._variables.get(value)
            tangent = self._tangents.get(id(value))
            return jnp.zeros_like(value) if tangent is None and unconnected_gradients == "zero" else tangent

        return jax.tree.map(leaf, target, is_leaf=_is_variable)

    def wants(self, args: list[Any]) -> bool:
        return self.active and any(id(x) in self._tangents for x in args)

    def observe(self, operation: _jax.Operation, args: list[Any]) -> list[Any]:
        mask = [id(x) in self._tangents for x in args]
        primals = [x for x, m in zip(args, mask) if m]
        tangents = [_matching(self._tangents[id(x)], x) for x in primals]

        def run(*watched: Any) -> tuple[list[Any], list[Any]]:
            rest = iter(watched)
            outs = operation(*[next(rest) if m else x for m, x in zip(mask, args)])
            return [o for o in outs if jnp.issubdtype(o.dtype, jnp.inexact)], outs

        _, derivatives, outs = jax.jvp(run, primals, tangents, has_aux=True)
        outs = list(outs)
        rest = iter(derivatives)
        for i, out in enumerate(outs):
            if jnp.issubdtype(out.dtype, jnp.inexact):
                if any(out is x for x in args) or id(out) in self._values:
                    outs[i] = out = _jax.alias(out)
                self._track(out, next(rest))
        return outs

    def on_read(self, variable: Any, value: Any) -> Any:
        if self.active and variable in self._variables and id(value) not in self._values:
            self._track(value, self._variables[variable])
        return value


def _matching(tangent: Any, primal: Any) -> Any:
    """The tangent in the primal's type: JAX wants both to vary, or neither."""
    return _jax.lift(tangent) if _jax.varies(primal) else tangent


def _is_variable(value: Any) -> bool:
    return isinstance(value, (Variable, Component))
