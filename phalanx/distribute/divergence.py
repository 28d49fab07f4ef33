"""What JAX's types miss about replicas.

In a replica JAX types each value as invariant (provably the same on all replicas) or as varying. Its
rules have gaps: what a `jax.lax.cond`, `switch` or `while_loop` gives on a condition that varies, and
what a callback gives for arguments that vary, is typed as invariant. Taken at their word, mirrored
variables would drift apart. Here a finished program is followed to find such values.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from phalanx import _jax
from phalanx.errors import StrategyError

Cause = str | None
"""Which operation made a value vary behind the back of its type, and where; None for what its type says."""

_OWN_ANSWER = frozenset({"io_callback", "rng_uniform"})
"""Operations that give each replica an answer of its own, whatever the arguments."""


def hidden_variation(program: _jax.Program) -> list[Cause]:
    """For each output of a replica's program: why it may differ between replicas although its type denies it.

    Raises:
        StrategyError: when replicas would wait for others that take another branch, or have left a loop.
    """
    jaxpr = program.jaxpr
    return _follow(jaxpr, [None] * len(_open(jaxpr).invars))


def _open(jaxpr: Any) -> Any:
    return getattr(jaxpr, "jaxpr", jaxpr)


def _follow(jaxpr: Any, inputs: Sequence[Cause]) -> list[Cause]:
    jaxpr = _open(jaxpr)
    causes = {var: cause for var, cause in zip(jaxpr.invars, inputs) if cause}

    def look_up(atom: Any) -> Cause:
        return None if _jax.is_literal(atom) else causes.get(atom)

    for equation in jaxpr.eqns:
        outs = _through(equation, [look_up(atom) for atom in equation.invars])
        causes.update({v: c for v, c in zip(equation.outvars, outs) if c and not _jax.aval_varies(v.aval)})
    return [look_up(atom) for atom in jaxpr.outvars]


def _through(equation: Any, inputs: list[Cause]) -> Sequence[Cause]:
    """Causes of an operation's outputs, given those of its inputs."""
    name = equation.primitive.name
    if name in _RULES:
        return _RULES[name](equation, inputs)
    inner = _jax.inner_jaxprs(equation)
    if not inner:
        return [_leaf(equation, inputs)] * len(equation.outvars)
    if len(inner) == 1 and len(_open(inner[0]).invars) == len(inputs):
        return _follow(inner[0], inputs)
    found = [*inputs, *(c for jaxpr in inner for c in _follow(jaxpr, [None] * len(_open(jaxpr).invars)))]
    return [_first(found)] * len(equation.outvars)


def _leaf(equation: Any, inputs: list[Cause]) -> Cause:
    name = equation.primitive.name
    if name in _jax.COLLECTIVES:
        return None
    if name in _OWN_ANSWER or any(_jax.aval_varies(atom.aval) for atom in equation.invars):
        return f"{name} at {_jax.line_of(equation)}, whose answers may differ"
    return _first(inputs)


def _cond(equation: Any, inputs: list[Cause]) -> list[Cause]:
    branches = equation.params["branches"]
    outs = [_first(causes) for causes in zip(*(_follow(branch, inputs[1:]) for branch in branches))]
    if not (inputs[0] or _jax.aval_varies(equation.invars[0].aval)):
        return outs
    _refuse_waiting(equation, "take the other branch", *branches)
    return [f"jax.lax.cond at {_jax.line_of(equation)}, whose condition may differ"] * len(equation.outvars)


def _while(equation: Any, inputs: list[Cause]) -> list[Cause]:
    n_test, n_body = equation.params["cond_nconsts"], equation.params["body_nconsts"]
    test, body = equation.params["cond_jaxpr"], equation.params["body_jaxpr"]
    carry = inputs[n_test + n_body :]
    while True:
        (answer,) = _follow(test, [*inputs[:n_test], *carry])
        after = _follow(body, [*inputs[n_test : n_test + n_body], *carry])
        new = [_first(pair) for pair in zip(carry, after)]
        if answer or _jax.aval_varies(_open(test).outvars[0].aval):
            _refuse_waiting(equation, "have left the loop", test, body)
            new = [f"jax.lax.while_loop at {_jax.line_of(equation)}, whose condition may differ"] * len(carry)
        if new == carry:
            return new
        carry = new


def _scan(equation: Any, inputs: list[Cause]) -> list[Cause]:
    consts, carry, rows = _jax.split_scan(equation, inputs)
    while True:
        outs = _follow(equation.params["jaxpr"], [*consts, *carry, *rows])
        new = [_first(pair) for pair in zip(carry, outs)]
        if new == carry:
            return [*new, *outs[len(carry) :]]
        carry = new


_RULES = {"cond": _cond, "while": _while, "scan": _scan}


def _refuse_waiting(equation: Any, others: str, *bodies: Any) -> None:
    if any(map(_jax.has_collective, bodies)):
        raise StrategyError(
            f"The condition of the {equation.primitive.name} at {_jax.line_of(equation)} may differ between the replicas,"
            " and its body reduces over them (an all_reduce, or an update with an aggregation): replicas that"
            f" {others} would be waited for for ever. Make the condition the same on all replicas, or reduce outside."
        )


def _first(causes: Sequence[Cause]) -> Cause:
    return next(filter(None, causes), None)
