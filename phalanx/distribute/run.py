"""`strategy.run`: a function traced once as the program of every replica.

Two steps. First the function is traced in the context of one replica, which finds the variables that
it uses and which results may differ between replicas. Then the finished program, one equation by now,
is put under `jax.shard_map` with exactly those inputs and outputs.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import jax
import numpy as np
from jax.sharding import PartitionSpec

from phalanx import _jax, state
from phalanx._checks import refuse_foreign_array
from phalanx._signature import NUMBERS
from phalanx._traced import Traced, trace
from phalanx.distribute.divergence import hidden_variation
from phalanx.distribute.replica import ReplicaRules
from phalanx.distribute.values import PerReplica, is_per_replica
from phalanx.errors import ArgumentTypeError, ReplicaDivergenceError
from phalanx.variables import Variable

if TYPE_CHECKING:
    from phalanx.distribute.strategy import Strategy

_SPLIT, _WHOLE = PartitionSpec(_jax.REPLICA_AXIS), PartitionSpec()


class ReplicaFrame(state.TraceFrame):
    """The body of a replica: it sees its own part of per-replica variables."""

    inherits_tapes = False

    def type_outside(self, variable: Variable) -> Any:
        shape = (1, *variable.shape) if variable.per_replica else variable.shape
        return _jax.local_aval(shape, variable.dtype, varying=variable.per_replica)


class _Arguments:
    """Arguments of a run: which leaves are split over the replicas, which go to all, which are static."""

    def __init__(self, strategy: Strategy, args: tuple[Any, ...], kwargs: dict[str, Any], name: str) -> None:
        self.leaves, self.structure = jax.tree.flatten((args, kwargs), is_leaf=is_per_replica)
        self.arrays: list[Any] = []
        self.split: list[bool] = []
        self._is_array: list[bool] = []
        for leaf in self.leaves:
            array = isinstance(leaf, (jax.Array, np.ndarray, np.generic, PerReplica, *NUMBERS)) and not isinstance(
                leaf, bool
            )
            self._is_array.append(array)
            if not array:
                refuse_foreign_array(leaf, f"strategy.run({name}): an argument")
                continue
            parted = is_per_replica(leaf)
            if parted:
                strategy.check_owner(leaf, name)
            self.arrays.append(leaf.stacked if parted else leaf)
            self.split.append(parted)

    def local_types(self) -> list[Any]:
        """Types of the arrays on one replica; call in a replica's trace."""
        avals = [jax.typeof(x) for x in self.arrays]
        return [
            _jax.local_aval(a.shape[1:] if s else a.shape, a.dtype, weak_type=getattr(a, "weak_type", False), varying=s)
            for a, s in zip(avals, self.split)
        ]

    def rebuild(self, values: list[Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """args and kwargs with one replica's values."""
        rest = iter(values)
        leaves = [next(rest) if a else leaf for a, leaf in zip(self._is_array, self.leaves)]
        args, kwargs = jax.tree.unflatten(self.structure, leaves)
        return args, kwargs


def run_in_trace(
    strategy: Strategy, fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], *, options: str
) -> Any:
    """Run `fn` on all replicas as part of the program that is being traced."""
    name = options
    frame = state.top()
    frame.base.note_use(strategy)
    _check_call(fn, args, kwargs, name)
    arguments = _Arguments(strategy, args, kwargs, name)
    traced = _trace_replica(strategy, fn, arguments, name)
    program = traced.program
    inputs = traced.inputs(arguments.arrays, state.load_for_call)
    split = [*arguments.split, *(v.per_replica for v, _ in traced.captures)]
    n_args, n_constants = len(arguments.arrays), len(program.constants)
    causes = hidden_variation(program)
    varying = [_jax.aval_varies(a) or c is not None for a, c in zip(program.out_avals, causes)]
    n_results = len(varying) - len(traced.written) - len(traced.initial)
    _refuse_divergence(traced, varying[n_results:], causes[n_results:])

    def one_replica(*blocks: Any) -> list[Any]:
        local = [b[0] if i < n_args and split[i] else b for i, b in enumerate(blocks[: len(inputs)])]
        values = [local[i] for i in program.used]
        outs = program.bind(*values, *blocks[len(inputs) :])
        outs = [_jax.lift(o) if varies else o for o, varies in zip(outs, varying)]
        return [o[None] if varies and i < n_results else o for i, (o, varies) in enumerate(zip(outs, varying))]

    in_specs = tuple(_SPLIT if s else _WHOLE for s in split) + (_WHOLE,) * n_constants
    out_specs = [_SPLIT if v else _WHOLE for v in varying]
    everywhere = _jax.on_replicas(strategy.mesh, one_replica, in_specs, out_specs)
    outs = list(jax.jit(everywhere)(*inputs, *program.constants))
    for i in range(n_results):
        if varying[i]:
            outs[i] = PerReplica(outs[i], strategy)
    result, written, initial = traced.split(outs)
    for variable, value in zip(traced.written, written):
        frame.base.store(variable, value)
    for variable, value in zip(traced.initial, initial):
        frame.base.created(variable, value)
    return result


def _refuse_divergence(traced: Traced, varying: list[bool], causes: list[str | None]) -> None:
    """The last line of defence: raise when a mirrored variable would end with components that differ.

    Updates check the types of what they assign. What gets here was typed as equal where it is not.
    """
    for variable, differs, cause in zip([*traced.written, *traced.initial], varying, causes):
        if differs and not variable.per_replica:
            line = traced.written_at.get(variable, variable._created_at)
            raise ReplicaDivergenceError(
                f"{variable.label} is mirrored: all replicas must hold the same value, but what is assigned at {line}"
                f" comes from the {cause or 'replicas and may differ'} between them. Use px.cond, px.while_loop or"
                " jnp.where, whose results count as different, and all_reduce them or give the variable an aggregation."
            )


def _trace_replica(strategy: Strategy, fn: Callable[..., Any], arguments: _Arguments, name: str) -> Traced:
    parent = state.top()
    rules = ReplicaRules(strategy)
    found: list[Traced] = []

    def in_context() -> tuple[()]:
        types = arguments.local_types()
        found.append(trace(fn, arguments.rebuild, types, name, lambda tracing: ReplicaFrame(parent, tracing, rules)))
        return ()

    jax.eval_shape(_jax.on_replicas(strategy.mesh, in_context, (), ()))
    for variable in found[0].births:
        if variable not in set(found[0].initial):
            parent.base.created(variable, variable._stored)
    return found[0]


def _check_call(fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], name: str) -> None:
    """Raise when `fn` cannot be called in this way."""
    try:
        signature = inspect.signature(fn)
    except (TypeError, ValueError):  # builtins, some of which have none
        return
    try:
        signature.bind(*args, **kwargs)
    except TypeError as error:
        raise ArgumentTypeError(
            f"strategy.run({name}): the function is {name}{signature}, and args and kwargs do not fit: {error}."
        ) from None
