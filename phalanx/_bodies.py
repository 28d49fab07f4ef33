"""Loop bodies and branches as programs of their own: what they read and write, and the types that they carry."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from phalanx import _jax, state
from phalanx._checks import as_array, take_apart
from phalanx._conversion import is_key, weak_type_of
from phalanx._signature import is_input
from phalanx._traced import Traced, trace
from phalanx.errors import AggregationRequiredError, ArgumentError, ArgumentTypeError, StrategyError
from phalanx.variables import Component, Variable


class Body:
    """A loop body or branch, traced: its program, what it captures, and what it writes."""

    def __init__(
        self, construct: str, fn: Callable[..., Any], types: Sequence[Any], rebuild: Callable[[list[Any]], Any]
    ) -> None:
        parent = state.top()
        name = getattr(fn, "__name__", type(fn).__name__)

        @functools.wraps(fn, updated=())
        def of_arrays(*args: Any) -> Any:
            return _as_arrays(fn(*args), f"{construct}: {name}")

        def make_frame(tracing: _jax.Tracing) -> state.TraceFrame:
            return state.TraceFrame(parent, tracing)

        self.traced: Traced = trace(of_arrays, lambda values: (tuple(rebuild(values)), {}), types, name, make_frame)
        if self.traced.initial:
            born = self.traced.initial[0]
            raise ArgumentError(
                f"{name}: {born.label} is created at {born._created_at} in a loop or branch from a traced value. Create"
                " it before."
            )
        parent.base.note_use(self.traced.strategy)

    @property
    def written(self) -> list[Variable]:
        """The variables that it assigns."""
        return self.traced.written

    def run(self, args: Sequence[Any], values: Values, seen: Seen) -> tuple[list[Any], Values]:
        """Results and new variable values, given those of the variables that the construct carries."""

        def load(capture: state.Capture) -> Any:
            variable, lifted = capture
            if variable not in values:
                return seen[capture]
            value = _jax.lift(values[variable]) if lifted else values[variable]
            # Also where an earlier step has assigned the variable, a reader's gradient is that of the variable.
            return value if seen[capture] is None else _jax.read_again(value, seen[capture])

        outs = self.traced.program(self.traced.inputs(args, load))
        n = self.traced.n_results
        return outs[:n], {**values, **dict(zip(self.written, outs[n:]))}

    def out_types(self) -> list[Any]:
        """Types of its results."""
        return self.traced.program.out_avals[: self.traced.n_results]

    def rebuild(self, results: list[Any]) -> Any:
        """What the function returned, with other values in place of its arrays."""
        return self.traced._rebuild(results)


Values = dict[Variable, Any]
Seen = dict[state.Capture, Any]
"""For each variable that bodies read: its value before, as tapes around the construct see it."""


def _as_arrays(result: Any, label: str) -> Any:
    """A body's result with arrays for its numbers, bools and variables; nothing else can come out of a program."""

    def leaf(path: Any, value: Any) -> Any:
        value = plain(value)
        if not (is_input(value) or isinstance(value, bool)):
            place = jax.tree_util.keystr(path)
            raise ArgumentTypeError(
                f"{label} must return arrays and numbers, or pytrees of them; got {type(value).__name__}"
                f" {value!r:.60}{f' at [...]{place}' if place else ''}."
            )
        return as_array(value, label)

    take_apart(result, f"{label}: its result")
    return jax.tree_util.tree_map_with_path(leaf, result)


def carried_by(*bodies: Body) -> Values:
    """Present values of the variables that any of the bodies writes."""
    place = state.top().base
    written = dict.fromkeys(v for body in bodies for v in body.written)
    return {v: place.load(v) for v in written}


def seen_by(carried: Values, *bodies: Body) -> Seen:
    """Present values of the variables that the bodies read; tapes around the construct are told."""
    captures = dict.fromkeys(c for body in bodies for c in body.traced.captures)
    differentiable = {c for c in captures if jnp.issubdtype(c[0].dtype, jnp.inexact)}
    return {c: state.load_for_call(c) if c in differentiable or c[0] not in carried else None for c in captures}


def store(before: Values, after: Values, *bodies: Body) -> None:
    """Assign what the construct gave for the variables that the bodies write."""
    for variable, value in after.items():
        if variable.per_replica or not _jax.in_replica_trace():
            continue
        if _jax.varies(value) and not _jax.varies(before[variable]):
            line = next(b.traced.written_at[variable] for b in bodies if variable in b.traced.written_at)
            raise AggregationRequiredError(
                f"{variable.label} is mirrored and is assigned at {line} on a condition that may differ between the"
                " replicas, so its components would differ. Make the condition the same on all of them (all_reduce"
                " it), or use synchronization='on_read'."
            )
    state.top().base.store_all(after)


def refuse_collectives(construct: str, others: str, *bodies: Body) -> None:
    """Raise when replicas would wait for those that `others`."""
    if any(_jax.has_collective(body.traced.program.jaxpr) for body in bodies):
        raise StrategyError(
            f"{construct} at {_jax.user_line()}: the condition may differ between the replicas, and the body reduces"
            f" over them (an all_reduce, or an update with an aggregation): those that {others} would be waited for for"
            " ever. Make the condition the same on all replicas, or reduce outside."
        )


def refuse_writes(body: Body) -> None:
    """Raise when the body of a loop whose steps differ between replicas assigns what they share."""
    for variable in body.written:
        if not variable.per_replica:
            raise AggregationRequiredError(
                f"while_loop: {variable.label} is mirrored and assigned at {body.traced.written_at[variable]} in a loop"
                " whose number of steps may differ between the replicas. Make the condition the same on all of them."
            )


# ---- types of what is carried --------------------------------------------------------------------


def settle(
    name: str,
    inputs: list[Any],
    rebuild: Callable[[list[Any]], Any],
    make: Callable[[list[Any]], Body],
    carry: Callable[[Body], Any],
) -> tuple[list[Any], Body]:
    """The carry's inputs in the types that the body gives back, and the body traced for them.

    A second trace is needed where the body makes a value differ between replicas, or a Python number's
    type definite, that was not so at the start.
    """
    while True:
        types = list(map(jax.typeof, inputs))
        body = make(types)
        found = carry(body)
        structures = jax.tree.structure(found), jax.tree.structure(rebuild(types))
        if structures[0] != structures[1]:
            raise ArgumentError(
                f"{name}: the carry must keep its structure, {shown(structures[1])}; the body returned"
                f" {shown(structures[0])}."
            )
        settled = [_settled(name, i, x, t) for i, (x, t) in enumerate(zip(inputs, jax.tree.leaves(found)))]
        if all(a is b for a, b in zip(settled, inputs)):
            return inputs, body
        inputs = settled


def _settled(name: str, index: int, value: Any, new: Any) -> Any:
    """One input of the carry, in a type that also holds what the body makes of it."""
    old = jax.typeof(value)
    dtype = joined(old, new)
    if new.shape != old.shape or not (new.dtype == old.dtype or (old.weak_type and dtype) or dtype == old.dtype):
        raise ArgumentError(
            f"{name}: leaf {index} of the carry is {old.str_short()} and became {new.str_short()} in the body; a carry"
            " keeps its shapes and dtypes."
        )
    if dtype is not None and (dtype != old.dtype or old.weak_type):
        value = converted(value, dtype)
    if _jax.aval_varies(new) and not _jax.varies(value):
        value = _jax.lift(value)
    return value


def joined(a: Any, b: Any) -> Any:
    """The dtype in which two values of different types meet; None when they agree, or when they cannot meet.

    Python numbers (weak types) take the other's dtype where that is of their kind.
    """
    if a.dtype == b.dtype:
        return a.dtype if a.weak_type != b.weak_type else None
    if not (a.weak_type or b.weak_type) or is_key(a) or is_key(b):
        return None
    dtype = jnp.result_type(*(weak_type_of(t.dtype) if t.weak_type else t.dtype for t in (a, b)))
    fits = all(t.weak_type or t.dtype == dtype for t in (a, b))
    return dtype if fits else None


def converted(value: Any, dtype: Any) -> Any:
    """`value` in the dtype that `joined` gave."""
    return value if dtype is None else jax.lax.convert_element_type(value, dtype)


def like(values: list[Any], examples: list[Any]) -> list[Any]:
    """A body's carry in the types that it started with."""
    alike = []
    for value, example in zip(values, examples):
        if jax.typeof(value).weak_type != jax.typeof(example).weak_type or value.dtype != example.dtype:
            value = jax.lax.convert_element_type(value, example.dtype)
        alike.append(_jax.lift(value) if _jax.varies(example) else value)
    return alike


def shown(structure: Any) -> str:
    """A pytree's structure for messages."""
    return str(structure).removeprefix("PyTreeDef(").removesuffix(")")


# ---- pytrees -------------------------------------------------------------------------------------


def flatten(tree: Any) -> tuple[list[Any], list[Any], Callable[[list[Any]], Any]]:
    """Arrays of a pytree, their types, and how to build the tree around other arrays."""
    leaves, structure = take_apart(tree, "an argument of a loop or branch")
    leaves = [plain(leaf) for leaf in leaves]
    dynamic = [is_input(leaf) or isinstance(leaf, bool) for leaf in leaves]
    arrays = [as_array(leaf, "a loop or branch") for leaf, d in zip(leaves, dynamic) if d]

    def rebuild(values: list[Any]) -> Any:
        rest = iter(values)
        return jax.tree.unflatten(structure, [next(rest) if d else leaf for d, leaf in zip(dynamic, leaves)])

    return arrays, [jax.typeof(a) for a in arrays], rebuild


def plain(leaf: Any) -> Any:
    """The leaf itself, or a variable's value."""
    return leaf.value if isinstance(leaf, (Variable, Component)) else leaf
