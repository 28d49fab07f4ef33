"""What can be read off finished programs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax._src import core as _core
from jax._src.interpreters import partial_eval as _pe
from jax.extend import core as _jex

COLLECTIVES = frozenset(
    "psum psum_invariant phalanx_sum_of_one pmax pmin ppermute pgather all_gather all_gather_invariant all_gather_reduced"
    " all_to_all reduce_scatter psum_scatter ragged_all_to_all".split()
)
"""Operations in which the replicas wait for each other."""


def has_collective(jaxpr: Any) -> bool:
    """True when the replicas wait for each other somewhere in the jaxpr."""
    return _has(jaxpr, COLLECTIVES)


def has_callback(jaxpr: Any) -> bool:
    """True when Python functions, which may raise, are called from the compiled program."""
    # All but this one are effects of the program.
    return bool(jaxpr.effects) or _has(jaxpr, frozenset(("pure_callback",)))


def _has(jaxpr: Any, names: frozenset[str]) -> bool:
    return any(
        equation.primitive.name in names or any(_has(inner, names) for inner in inner_jaxprs(equation))
        for equation in getattr(jaxpr, "jaxpr", jaxpr).eqns
    )


def inner_jaxprs(equation: Any) -> list[Any]:
    """The jaxprs among an operation's parameters: bodies, branches, called functions."""
    return list(_core.jaxprs_in_params(equation.params))


def split_scan(equation: Any, values: Sequence[Any]) -> tuple[list[Any], list[Any], list[Any]]:
    """One value per input of a `scan`, as those of its constants, its carry and its rows."""
    params = equation.params
    if "ft_in" in params:  # since jax 0.12
        consts, carry, rows = params["ft_in"].update(list(values)).unpack()
        return list(consts), list(carry), list(rows)
    start, stop = params["num_consts"], params["num_consts"] + params["num_carry"]
    return list(values[:start]), list(values[start:stop]), list(values[stop:])


def is_literal(atom: Any) -> bool:
    """True for a constant that stands in the jaxpr itself."""
    return isinstance(atom, _jex.Literal)


def zero_outputs(pullback: Any) -> list[bool]:
    """Which outputs of the function that `jax.vjp` differentiated have no derivative but zero."""
    return list(pullback.fun.args[1])


def pulled_to(pullback: Any, outputs: Sequence[bool]) -> list[bool]:
    """To which inputs cotangents of these outputs (without those of `zero_outputs`) come back."""
    linear = pullback.jaxpr
    _, used = _pe.dce_jaxpr(getattr(linear, "jaxpr", linear), list(outputs))
    return list(used[-pullback.in_tree.num_leaves :])


def reaches(operation: Callable[..., Any], args: Sequence[Any], mask: Sequence[bool]) -> list[bool]:
    """Which outputs of the operation are computed from arguments that `mask` marks."""
    closed = jax.make_jaxpr(operation)(*args)
    jaxpr = getattr(closed, "jaxpr", closed)
    found = []
    for out in jaxpr.outvars:
        _, used = _pe.dce_jaxpr(jaxpr, [other is out for other in jaxpr.outvars])
        found.append(any(u and m for u, m in zip(used[-len(args) :], mask)))
    return found
