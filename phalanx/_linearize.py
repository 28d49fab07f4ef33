"""One operation with its derivative: what a tape does at each step.

`linearize` runs an operation forward and keeps JAX's pullback of it; `push_forward` carries tangents
along. Where the parameters hash, both are traced once per (operation, shapes) and used again: compiled in
eager code, in a program as equations of it, because XLA puts the operations of calls in a worse order.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any, NoReturn

import jax
import jax.numpy as jnp

from phalanx import _jax
from phalanx.errors import TapeError

Mask = tuple[bool, ...]
"""Which arguments of an operation are watched."""


Pull = Callable[[list[Any]], list[Any]]
"""From one cotangent for each connected output to one for each watched input; None stands for a zero in both."""


def linearize(operation: _jax.Operation, args: list[Any], mask: Mask) -> tuple[list[Any], list[int], Pull]:
    """Run the operation on `args`, for derivatives with respect to those that `mask` marks.

    Returns:
        The outputs, the positions of those that gradients can come from, and the way back.
    """
    key = operation.key()
    try:
        with _rules():
            if key is None:
                outs, pull = _vjp(operation, args, mask)
                return outs, pull.connected, functools.partial(_pulled, pull)
            outs, residuals = _forwards.get(key, mask)(*args)
            return outs, residuals.connected, functools.partial(_pulled, *residuals.pull(args, outs))
    except TapeError:
        raise
    except Exception as error:  # there is no derivative: that matters only if a gradient comes this way
        reason = str(error)
    outs = operation(*args)
    return outs, _inexact_positions(outs), functools.partial(_refuse, reason)


def pull_again(operation: _jax.Operation, args: list[Any], mask: Mask, cotangents: list[Any]) -> list[Any]:
    """Cotangents of the watched inputs, as a computation on `args` that can itself be recorded."""
    key = operation.key()
    return _pulled(_pull_from(operation, mask) if key is None else _backwards.get(key, mask), args, cotangents)


def push_forward(
    operation: _jax.Operation, args: list[Any], mask: Mask, tangents: list[Any]
) -> tuple[list[Any], list[Any]]:
    """Outputs of the operation, and for each the tangent, or None where it does not depend on watched inputs."""
    key = operation.key()
    with _rules():
        push = _push(operation, mask) if key is None else _pushes.get(key, mask)
        return push(args, tangents)  # type: ignore[no-any-return]


_JAX_RULES = nullcontext()


def _rules() -> AbstractContextManager[None]:
    return _jax.local_gradients() if _jax.in_replica_trace() else _JAX_RULES


def _pulled(pull: Callable[..., Any], *inputs: Any) -> list[Any]:
    try:
        with _rules():
            return list(pull(*inputs))
    except NotImplementedError as error:
        raise _no_reverse_mode(str(error)) from error
    except ValueError as error:
        if "everse-mode" not in str(error):
            raise
        raise _no_reverse_mode(str(error)) from error


def _refuse(reason: str, cotangents: list[Any]) -> NoReturn:
    raise _no_reverse_mode(reason)


def _vjp(operation: _jax.Operation, args: Sequence[Any], mask: Mask) -> tuple[list[Any], _Pull]:
    watched = _watched(args, mask)
    _, pullback, outs = jax.vjp(_of_watched(operation, args, mask), *watched, has_aux=True)
    inexact, zero = _inexact_positions(outs), _jax.zero_outputs(pullback)
    if len(outs) > 1 and any(zero) and operation.key() is not None:
        # An output that is computed from nothing watched is a constant, one whose derivative is zero is not.
        reached = _jax.reaches(operation, args, mask)
        connected = [i for i, z in zip(inexact, zero) if reached[i] or not z]
    else:
        connected = inexact
    places = [connected.index(i) if i in connected else None for i in inexact]
    types = [jax.typeof(x) for x in watched], [jax.typeof(outs[i]) for i in inexact]
    return outs, _Pull(pullback, *types, zero, places, connected)


def _pull_from(operation: _jax.Operation, mask: Mask) -> Callable[[list[Any], list[Any]], Any]:
    return lambda args, cotangents: _vjp(operation, args, mask)[1](cotangents)


def _push(operation: _jax.Operation, mask: Mask) -> Callable[[list[Any], list[Any]], Any]:
    def push(args: list[Any], tangents: list[Any]) -> tuple[list[Any], list[Any]]:
        run, primals = _of_watched(operation, args, mask), _watched(args, mask)
        tangents = [_jax.typed_as(jax.typeof(x), t) for x, t in zip(primals, tangents)]
        _, derivatives, outs = jax.jvp(run, primals, tangents, has_aux=True)
        found = dict(zip(_inexact_positions(outs), derivatives))
        return outs, [found.get(i) for i in range(len(outs))]

    return push


def _push_precisely(operation: _jax.Operation, mask: Mask) -> Callable[[list[Any], list[Any]], Any]:
    """`_push` that gives no tangents to outputs which are computed from nothing watched."""

    def push(args: list[Any], tangents: list[Any]) -> tuple[list[Any], list[Any]]:
        outs, derivatives = _push(operation, mask)(args, tangents)
        depend: list[int] = []

        def learn(args: list[Any]) -> tuple[()]:
            depend.extend(_vjp(operation, args, mask)[1].connected)
            return ()

        jax.eval_shape(learn, args)
        return outs, [d if i in depend else None for i, d in enumerate(derivatives)]

    return push


def _of_watched(operation: _jax.Operation, args: Sequence[Any], mask: Mask) -> Any:
    def run(*watched: Any) -> tuple[list[Any], list[Any]]:
        rest = iter(watched)
        outs = operation(*[next(rest) if m else x for m, x in zip(mask, args)])
        return [outs[i] for i in _inexact_positions(outs)], outs

    return run


@dataclass(frozen=True)
class _Pull:
    """JAX's pullback, for cotangents of the connected outputs, some of them None."""

    pullback: Any
    in_types: list[Any]
    out_types: list[Any]
    zero: list[bool]
    """Which differentiable outputs have no derivative but zero."""
    places: list[int | None]
    """Where the cotangent of each differentiable output stands among those of the connected ones."""
    connected: list[int]

    def __call__(self, cotangents: list[Any]) -> list[Any]:
        found = [None if place is None else cotangents[place] for place in self.places]
        full = [_zeros(t) if ct is None else ct for ct, t in zip(found, self.out_types)]
        # What JAX knows to be zero must stay known to be: it may lead to operations without a derivative.
        reached = _jax.pulled_to(self.pullback, [ct is not None for ct, zero in zip(found, self.zero) if not zero])
        if not any(reached):
            return [None] * len(reached)
        pulled = zip(self.pullback(full), self.in_types, reached)
        return [_checked(t, ct) if r else None for ct, t, r in pulled]


# ---- traced once ---------------------------------------------------------------------------------


class _Recipe:
    """How to pull cotangents back, given the residuals of one forward step."""

    def __init__(self, pull: _Pull, structure: Any, places: list[tuple[str, int]]) -> None:
        bare = replace(pull, pullback=None)

        def run(residuals: list[Any], cotangents: list[Any]) -> Any:
            return replace(bare, pullback=jax.tree.unflatten(structure, residuals))(cotangents)

        self.connected = pull.connected
        self._run = jax.jit(run, inline=True)
        self._places = places

    def pull(self, new: list[Any], args: Sequence[Any], outs: list[Any]) -> tuple[Callable[..., Any], list[Any]]:
        found = {"argument": args, "output": outs, "new": new}
        return self._run, [found[kind][i] for kind, i in self._places]


@jax.tree_util.register_pytree_node_class
class _Residuals:
    """What a forward step keeps for the way back.

    Residuals that are arguments or outputs of the step are not among the results of its program, which
    would copy them.
    """

    def __init__(self, new: list[Any], recipe: _Recipe) -> None:
        self._new = new
        self._recipe = recipe

    @classmethod
    def of(cls, pull: _Pull, args: Sequence[Any], outs: list[Any]) -> _Residuals:
        """Called while the forward step is traced: values are told apart by identity."""
        places = {id(x): ("output", i) for i, x in enumerate(outs)}
        places |= {id(x): ("argument", i) for i, x in enumerate(args)}
        new: list[Any] = []
        leaves, structure = jax.tree.flatten(pull.pullback)
        for leaf in leaves:
            if id(leaf) not in places:
                places[id(leaf)] = ("new", len(new))
                new.append(leaf)
        return cls(new, _Recipe(pull, structure, [places[id(leaf)] for leaf in leaves]))

    def pull(self, args: Sequence[Any], outs: list[Any]) -> tuple[Callable[..., Any], list[Any]]:
        """The way back from this step: a function, and what it takes before the cotangents."""
        return self._recipe.pull(self._new, args, outs)

    @property
    def connected(self) -> list[int]:
        """Positions of the outputs that gradients can come from."""
        return self._recipe.connected

    def tree_flatten(self) -> tuple[list[Any], _Recipe]:
        """For JAX."""
        return self._new, self._recipe

    @classmethod
    def tree_unflatten(cls, recipe: _Recipe, new: Any) -> _Residuals:
        """For JAX."""
        return cls(new, recipe)


def _forward(operation: _jax.Operation, mask: Mask) -> Callable[..., Any]:
    def forward(*args: Any) -> tuple[list[Any], _Residuals]:
        outs, pull = _vjp(operation, args, mask)
        return outs, _Residuals.of(pull, args, outs)

    return forward


def _compiled(make: Callable[[_jax.Operation, Mask], Callable[..., Any]]) -> _jax.OperationCache:
    def compiled(key: Any, mask: Mask) -> Any:
        # The operation is put together when it is traced: kept, it would keep its jaxpr alive.
        return jax.jit(lambda *inputs: make(_jax.Operation.of(key), mask)(*inputs), inline=True)

    return _jax.OperationCache(compiled)


_forwards, _backwards, _pushes = _compiled(_forward), _compiled(_pull_from), _compiled(_push_precisely)


def _watched(args: Sequence[Any], mask: Mask) -> list[Any]:
    return [x for x, watched in zip(args, mask) if watched]


def _inexact_positions(values: list[Any]) -> list[int]:
    return [i for i, value in enumerate(values) if jnp.issubdtype(value.dtype, jnp.inexact)]


def _zeros(aval: Any) -> Any:
    return _jax.typed_as(aval, jnp.zeros(aval.shape, aval.dtype))


def _checked(aval: Any, cotangent: Any) -> Any:
    if cotangent.shape != aval.shape:
        raise TapeError(
            f"A derivative rule (jax.custom_vjp) gave a cotangent of shape {cotangent.shape} for an argument of shape"
            f" {aval.shape}."
        )
    return _jax.typed_as(aval, cotangent)


def _no_reverse_mode(reason: str) -> TapeError:
    return TapeError(
        "The target depends on an operation that cannot be differentiated backwards. JAX says:"
        f" {reason.partition(chr(10))[0][:300]} For loops use px.scan (jax.lax.scan, or fori_loop with fixed bounds)"
        " instead of a while loop, or px.ForwardAccumulator, which differentiates forwards; for anything else"
        " jax.custom_vjp."
    )
