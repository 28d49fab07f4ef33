"""One operation with its derivative: what a tape does at each step.

`linearize` runs an operation forward and keeps JAX's pullback of it. Where the parameters hash, the
forward step and the pullback are compiled once per (operation, shapes) and reused, in eager code as
well as while tracing, where they cost one equation each.

In a replica every watched input is typed as varying before it is linearized. Otherwise JAX would
give the gradient summed over the replicas for inputs that are the same on all of them, and a later
all-reduce would count it N times. Variables are lifted when they are read; what is lifted here are
arrays that the user watched.
"""

from __future__ import annotations

import functools
from collections.abc import Hashable
from typing import Any

import jax
import jax.numpy as jnp

from phalanx import _jax
from phalanx.errors import TapeError


class Linearized:
    """Outputs of an operation and the way back.

    `differentiable` are the positions of the outputs that cotangents can come from; `pull` takes one
    cotangent (or None) for each of them and gives one for each watched input.
    """

    __slots__ = ("_expects", "_pullback", "differentiable", "outs")

    def __init__(self, outs: list[Any], differentiable: list[int], expects: list[Any], pullback: Any) -> None:
        self.outs = outs
        self.differentiable = differentiable
        self._expects = expects
        self._pullback = pullback

    def pull(self, cotangents: list[Any]) -> list[Any]:
        """Cotangents of the watched inputs."""
        if isinstance(self._pullback, Exception):
            raise _no_reverse_mode(self._pullback) from self._pullback
        cts = [_as_expected(ct, expected) for ct, expected in zip(cotangents, self._expects)]
        try:
            return list(_pull(self._pullback, cts))
        except (ValueError, NotImplementedError, TypeError) as error:
            raise _no_reverse_mode(error) from error


def linearize(operation: _jax.Operation, args: list[Any], mask: tuple[bool, ...]) -> Linearized:
    """Run the operation on `args`, keeping the derivative with respect to those that `mask` marks."""
    replicated = _jax.in_replica_trace()
    key = operation.key()
    if operation.is_lift:
        forward = functools.partial(_forward_lift, operation)
    elif key is None:
        forward = functools.partial(_forward, operation, mask, replicated)
    else:
        forward = _cached_forward(key, mask, replicated)
    try:
        outs, pullback, expects = forward(*args)
    except Exception as error:  # no reverse mode here: that matters only if a gradient comes this way
        outs, pullback, expects = operation(*args), error, None
    differentiable = [i for i, out in enumerate(outs) if jnp.issubdtype(out.dtype, jnp.inexact)]
    if expects is None:
        expects = [outs[i] for i in differentiable]
    types = [jax.typeof(e) for e in expects]
    return Linearized(list(outs), differentiable, types, pullback)


@functools.lru_cache(maxsize=8192)
def _cached_forward(key: Hashable, mask: tuple[bool, ...], replicated: bool) -> Any:
    primitive, items = key  # type: ignore[misc]
    return jax.jit(functools.partial(_forward, _jax.Operation(primitive, dict(items)), mask, replicated))


def _forward(
    operation: _jax.Operation, mask: tuple[bool, ...], replicated: bool, *args: Any
) -> tuple[list[Any], Any, Any]:
    def linearized(run: Any, watched: list[Any]) -> tuple[Any, Any, Any]:
        def differentiated(*watched: Any) -> tuple[list[Any], list[Any]]:
            rest = iter(watched)
            outs = run(*[next(rest) if m else x for m, x in zip(mask, args)])
            return [o for o in outs if jnp.issubdtype(o.dtype, jnp.inexact)], outs

        return jax.vjp(differentiated, *watched, has_aux=True)

    watched = [x for m, x in zip(mask, args) if m]
    if not replicated:
        _, pullback, outs = linearized(operation, watched)
        return outs, pullback, None
    linear, pullback, outs = linearized(operation.lifted, [_jax.lift(x) for x in watched])
    if any(_jax.varies(x) for x in args):
        return outs, pullback, None
    # All inputs are provably equal, so the outputs are too: lifting must not lose that. XLA merges the two
    # computations. Both are derived: JAX lets a custom_jvp or custom_vjp take one way only, by its rule or without.
    _, _, outs = linearized(operation, watched)
    return outs, pullback, linear


def _forward_lift(operation: _jax.Operation, x: Any) -> tuple[list[Any], Any, Any]:
    return operation(x), None, None


@jax.jit
def _pull_compiled(pullback: Any, cotangents: list[Any]) -> Any:
    return pullback(cotangents)


def _pull(pullback: Any, cotangents: list[Any]) -> Any:
    return cotangents if pullback is None else _pull_compiled(pullback, cotangents)


def _as_expected(ct: Any, expected: Any) -> Any:
    """A cotangent of the type that JAX's pullback asks for."""
    varying = _jax.aval_varies(expected)
    if ct is None:
        ct = jnp.zeros(expected.shape, expected.dtype)
    if varying and not _jax.varies(ct):
        return _jax.lift(ct)
    if not varying and _jax.varies(ct):
        # An all-reduced value: what every replica's target says about it counts (peer: tape_through_all_reduce).
        return jax.lax.psum(ct, _jax.REPLICA_AXIS)
    return ct


def _no_reverse_mode(error: Exception) -> TapeError:
    reason = str(error).partition("\n")[0][:300]
    return TapeError(
        f"The target depends on an operation that cannot be differentiated backwards. JAX says:"
        f" {reason} For loops use px.scan (jax.lax.scan, or fori_loop with fixed bounds) instead of a while loop, or"
        " px.ForwardAccumulator, which differentiates forwards; for anything else jax.custom_vjp."
    )
