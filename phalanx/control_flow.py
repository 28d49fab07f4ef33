"""`cond`, `while_loop` and `scan`: as in `jax.lax`, with variables read and written in the bodies.

A body is traced as a program of its own, which shows what it reads and writes. What it writes becomes
part of the loop's carry, so that a loop of many steps is one operation on the device.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from phalanx import _jax, state
from phalanx._eager_programs import as_function
from phalanx._signature import is_input
from phalanx._traced import Traced, trace
from phalanx.errors import AggregationRequiredError, ArgumentError, ArgumentTypeError, StrategyError
from phalanx.variables import Component, Variable


def cond(pred: Any, true_fun: Callable[..., Any], false_fun: Callable[..., Any], *operands: Any) -> Any:
    """``true_fun(*operands)`` if `pred` else ``false_fun(*operands)``; variables may be read and written.

    Args:
        pred: boolean scalar. In a replica with branches that assign or reduce it must be the same on all.
        true_fun: the branch for True.
        false_fun: the branch for False; its result has the same structure, shapes and dtypes.
        operands: arrays or pytrees, passed on.

    Raises:
        ArgumentError: when the branches' results differ in structure, shape or dtype.
        StrategyError: when replicas would have to wait for replicas that take the other branch.
        AggregationRequiredError: when a mirrored variable is assigned on a condition that differs.

    Example:
        >>> v = px.Variable(0.0)
        >>> @px.function
        ... def step(i):
        ...     px.cond(i % 2 == 0, lambda: v.assign_add(1.0), lambda: v.assign_sub(10.0))
        >>> step(0), step(1), float(v)
        (None, None, -9.0)

    As ``jax.lax.cond`` otherwise.
    """
    _check_functions("cond", true_fun, false_fun)
    pred = _array(pred, "cond: pred")
    if pred.shape != ():
        raise ArgumentError(f"cond: pred must be a scalar, got shape {pred.shape}. Reduce it with .any() or .all().")
    if not _jax.is_tracer(pred):
        return (true_fun if bool(pred) else false_fun)(*operands)
    return _trace_branches(pred != 0, true_fun, false_fun, operands)


def while_loop(cond_fun: Callable[[Any], Any], body_fun: Callable[[Any], Any], init_val: Any) -> Any:
    """Repeat ``val = body_fun(val)`` while ``cond_fun(val)``; variables may be read and written in the body.

    There is no reverse mode through it (the number of steps is unknown): use `scan` under a tape, or
    `ForwardAccumulator`.

    Args:
        cond_fun: from the value to a boolean scalar; it may read variables.
        body_fun: from the value to the next one, of the same structure, shapes and dtypes.
        init_val: array or pytree.

    Raises:
        ArgumentError: when the body changes the structure, a shape or a dtype.
        StrategyError: when replicas would have to wait for replicas that have left the loop.

    Example:
        >>> v = px.Variable(1.0)
        >>> def body(i):
        ...     v.assign(v * 2)
        ...     return i + 1
        >>> int(px.while_loop(lambda i: i < 3, body, 0)), float(v)
        (3, 8.0)

    As ``jax.lax.while_loop`` otherwise.
    """
    _check_functions("while_loop", cond_fun, body_fun)
    if _runs_now():
        return as_function("while_loop", _trace_while, cond_fun, body_fun, parameters=["init_val"])(init_val)
    return _trace_while(cond_fun, body_fun, init_val)


def scan(
    f: Callable[[Any, Any], tuple[Any, Any]],
    init: Any,
    xs: Any = None,
    length: int | None = None,
    reverse: bool = False,
    unroll: int | bool = 1,
) -> tuple[Any, Any]:
    """Loop ``carry, y = f(carry, x)`` over the rows of `xs`; variables may be read and written in `f`.

    Args:
        f: from (carry, x) to (carry, y); the carry keeps its structure, shapes and dtypes.
        init: the first carry.
        xs: array or pytree of arrays with the same first dimension, or None.
        length: number of steps, needed when `xs` is None.
        reverse: go from the last row to the first.
        unroll: steps per round of the compiled loop.

    Returns:
        The last carry, and the stacked ys.

    Raises:
        ArgumentError: for rows that do not match, or a carry that changes.

    Example:
        >>> total = px.Variable(0.0)
        >>> def step(carry, x):
        ...     total.assign_add(x)
        ...     return carry + 1, total.value
        >>> carry, ys = px.scan(step, 0, jnp.arange(3.0))
        >>> int(carry), ys.tolist(), float(total)
        (3, [0.0, 1.0, 3.0], 3.0)

    As ``jax.lax.scan`` otherwise.
    """
    _check_functions("scan", f)
    steps = _length(xs, length)
    options = (steps, bool(reverse), unroll)
    if _runs_now():
        loop = as_function("scan", _trace_scan, f, parameters=["init", "xs"], options=options)
        return loop(init, xs)  # type: ignore[no-any-return]
    return _trace_scan(f, init, xs, options=options)


# ---- bodies as programs --------------------------------------------------------------------------


class _Body:
    """A loop body or branch, traced: its program, what it captures, and what it writes."""

    def __init__(self, fn: Callable[..., Any], types: Sequence[Any], rebuild: Callable[[list[Any]], Any]) -> None:
        parent = state.top()

        def make_frame(tracing: _jax.Tracing) -> state.TraceFrame:
            return state.TraceFrame(parent, tracing)

        name = getattr(fn, "__name__", type(fn).__name__)
        self.traced: Traced = trace(fn, lambda values: (tuple(rebuild(values)), {}), types, name, make_frame)
        if self.traced.initial:
            born = self.traced.initial[0]
            raise ArgumentError(
                f"{name}: {born.label} is created at {born._created_at} in a loop or branch from a traced value. Create"
                " it before."
            )
        parent.base.note_use(self.traced.strategy)

    @property
    def written(self) -> list[Variable]:
        return self.traced.written

    def run(self, args: Sequence[Any], values: dict[Variable, Any], seen: dict[state.Capture, Any]) -> tuple[list[Any], dict[Variable, Any]]:
        """Results and new variable values, given those of the variables that the construct carries."""

        def load(capture: state.Capture) -> Any:
            variable, lifted = capture
            if variable not in values:
                return seen[capture]
            return _jax.lift(values[variable]) if lifted else values[variable]

        outs = self.traced.program(self.traced.inputs(args, load))
        n = self.traced.n_results
        return outs[:n], {**values, **dict(zip(self.written, outs[n:]))}

    def out_types(self) -> list[Any]:
        return self.traced.program.out_avals[: self.traced.n_results]

    def rebuild(self, results: list[Any]) -> Any:
        return self.traced._rebuild(results)


def _carried(*bodies: _Body) -> dict[Variable, Any]:
    """Present values of the variables that any of the bodies writes."""
    place = state.top().base
    written = dict.fromkeys(v for body in bodies for v in body.written)
    return {v: place.load(v) for v in written}


def _seen(carried: dict[Variable, Any], *bodies: _Body) -> dict[state.Capture, Any]:
    """Values of the variables that the bodies only read; tapes around the construct are told."""
    captures = dict.fromkeys(c for body in bodies for c in body.traced.captures if c[0] not in carried)
    return {capture: state.load_for_call(capture) for capture in captures}


def _store(before: dict[Variable, Any], after: dict[Variable, Any]) -> None:
    place = state.top().base
    for variable, value in after.items():
        if not variable.per_replica and _jax.in_replica_trace() and _jax.varies(value) and not _jax.varies(before[variable]):
            raise AggregationRequiredError(
                f"{variable.label} is mirrored and is assigned at {_jax.user_line()} on a condition that may differ between"
                " the replicas, so its components would differ. Make the condition the same on all of them (all_reduce"
                " it), or use synchronization='on_read'."
            )
        place.store(variable, value)


# ---- cond ----------------------------------------------------------------------------------------


def _trace_branches(pred: Any, true_fun: Callable[..., Any], false_fun: Callable[..., Any], operands: Any) -> Any:
    inputs, types, rebuild = _flatten(operands)
    bodies = [_Body(fun, types, rebuild) for fun in (true_fun, false_fun)]
    _check_same_results(bodies[0], bodies[1])
    differs = _jax.in_replica_trace() and _jax.varies(pred)
    if differs:
        _refuse_collectives("cond", "take the other branch", *bodies)
    carried = _carried(*bodies)
    seen = _seen(carried, *bodies)
    out_types = [[*body.out_types(), *_written_types(body, carried)] for body in bodies]
    lifted = [differs or any(map(_jax.aval_varies, pair)) for pair in zip(*out_types)]

    def branch(body: _Body) -> Callable[[list[Any]], list[Any]]:
        def run(args: list[Any]) -> list[Any]:
            results, values = body.run(args, carried, seen)
            outs = [*results, *values.values()]
            outs = [jnp.asarray(o, t.dtype) for o, t in zip(outs, out_types[0])]
            return [_jax.lift(o) if lift else o for o, lift in zip(outs, lifted)]

        return run

    outs = jax.lax.cond(pred, branch(bodies[0]), branch(bodies[1]), inputs)
    n = bodies[0].traced.n_results
    _store(carried, dict(zip(carried, outs[n:])))
    return bodies[0].rebuild(list(outs[:n]))


def _written_types(body: _Body, carried: dict[Variable, Any]) -> list[Any]:
    new = dict(zip(body.written, body.traced.program.out_avals[body.traced.n_results :]))
    return [new.get(v, jax.typeof(value)) for v, value in carried.items()]


def _check_same_results(true: _Body, false: _Body) -> None:
    markers = [list(range(len(b.out_types()))) for b in (true, false)]
    structures = [jax.tree.structure(b.rebuild(m)) for b, m in zip((true, false), markers)]
    if structures[0] != structures[1]:
        raise ArgumentError(
            f"cond: the branches must return the same structure, got {structures[0]} from true_fun and"
            f" {structures[1]} from false_fun."
        )
    for i, (a, b) in enumerate(zip(true.out_types(), false.out_types())):
        weak = a.weak_type or b.weak_type
        if a.shape != b.shape or (a.dtype != b.dtype and not weak):
            raise ArgumentError(
                f"cond: result {i} is {a.str_short()} in true_fun and {b.str_short()} in false_fun; the branches must"
                " return the same shapes and dtypes."
            )


# ---- while_loop ----------------------------------------------------------------------------------


def _trace_while(cond_fun: Callable[[Any], Any], body_fun: Callable[[Any], Any], init_val: Any) -> Any:
    inputs, types, rebuild = _flatten(init_val)

    def as_args(values: list[Any]) -> Any:
        return (rebuild(values),)

    inputs, body = _settle("while_loop", inputs, lambda types: _Body(body_fun, types, as_args), lambda b: b.out_types())
    _check_carry("while_loop", body.rebuild(body.out_types()), rebuild(list(map(jax.typeof, inputs))))
    test = _Body(cond_fun, list(map(jax.typeof, inputs)), as_args)
    if test.written:
        raise ArgumentError(f"while_loop: cond_fun assigns {test.written[0].label}; assign in body_fun.")
    carried = _carried(body)
    seen = _seen(carried, body, test)
    (answer,) = test.out_types() or (None,)
    if answer is None or answer.shape != ():
        raise ArgumentError(f"while_loop: cond_fun must return a boolean scalar, got {answer and answer.str_short()}.")
    if _jax.in_replica_trace() and _jax.aval_varies(answer):
        _refuse_collectives("while_loop", "have left the loop", body, test)
        _refuse_writes(body)
        if not all(map(_jax.varies, inputs)):
            # Replicas leave the loop after different numbers of steps, so all that it carries differs.
            return _trace_while(cond_fun, body_fun, rebuild([_jax.lift(x) for x in inputs]))

    def keep_going(loop: Any) -> Any:
        return test.run(loop[0], dict(zip(carried, loop[1])), seen)[0][0] != 0

    def step(loop: Any) -> Any:
        results, values = body.run(loop[0], dict(zip(carried, loop[1])), seen)
        return [_like(r, i) for r, i in zip(results, inputs)], list(values.values())

    results, values = jax.lax.while_loop(keep_going, step, (inputs, list(carried.values())))
    _store(carried, dict(zip(carried, values)))
    return body.rebuild(results)


# ---- scan ----------------------------------------------------------------------------------------


def _trace_scan(f: Callable[..., Any], init: Any, xs: Any, *, options: tuple[int, bool, Any]) -> Any:
    length, reverse, unroll = options
    inputs, _, rebuild_carry = _flatten(init)
    rows, row_types, rebuild_row = _flatten(xs)
    row_types = [_row_type(r, t) for r, t in zip(rows, row_types)]
    n_carry = len(inputs)

    def as_args(values: list[Any]) -> Any:
        return rebuild_carry(values[:n_carry]), rebuild_row(values[n_carry:])

    def carry_types(body: _Body) -> list[Any]:
        return body.out_types()[:n_carry]

    inputs, body = _settle("scan", inputs, lambda types: _Body(f, [*types, *row_types], as_args), carry_types)
    result = body.rebuild(body.out_types())
    if not isinstance(result, tuple) or len(result) != 2:
        raise ArgumentError(f"scan: f must return a pair (carry, y), got {jax.tree.structure(result)}.")
    _check_carry("scan", result[0], rebuild_carry(list(map(jax.typeof, inputs))))
    carried = _carried(body)
    seen = _seen(carried, body)

    def step(loop: Any, x: list[Any]) -> Any:
        results, values = body.run([*loop[0], *x], dict(zip(carried, loop[1])), seen)
        return ([_like(r, i) for r, i in zip(results, inputs)], list(values.values())), results[n_carry:]

    loop = (inputs, list(carried.values()))
    (results, values), ys = jax.lax.scan(step, loop, rows, length=length, reverse=reverse, unroll=unroll)
    _store(carried, dict(zip(carried, values)))
    return body.rebuild([*results, *ys])


def _row_type(rows: Any, aval: Any) -> Any:
    if _jax.in_replica_trace():
        return _jax.local_aval(aval.shape[1:], aval.dtype, varying=_jax.aval_varies(aval))
    return jax.make_jaxpr(lambda r: r[0])(jax.ShapeDtypeStruct((1, *aval.shape[1:]), aval.dtype)).out_avals[0]


def _length(xs: Any, length: int | None) -> int:
    lengths = {leaf.shape[0] if getattr(leaf, "ndim", 0) else None for leaf in map(_plain, jax.tree.leaves(xs))}
    if None in lengths or len(lengths) > 1:
        raise ArgumentError(f"scan: the arrays of xs need the same first dimension, got {sorted(map(str, lengths))}.")
    if not lengths and not isinstance(length, int):
        raise ArgumentError("scan: give xs, or the number of steps as length (a Python int).")
    steps = lengths.pop() if lengths else length
    if length is not None and steps != length:
        raise ArgumentError(f"scan: length is {length}, but xs has {steps} rows.")
    assert isinstance(steps, int)
    return steps


# ---- shared --------------------------------------------------------------------------------------


def _settle(
    name: str, inputs: list[Any], make: Callable[[list[Any]], _Body], carry_types: Callable[[_Body], list[Any]]
) -> tuple[list[Any], _Body]:
    """The carry's inputs in the types that the body gives back, and the body traced for them.

    A second trace is needed where the body makes a value differ between replicas, or a Python number's
    type definite, that was not so at the start.
    """
    for _ in range(len(inputs) + 1):
        body = make([jax.typeof(x) for x in inputs])
        new = carry_types(body)
        settled = [_settled(x, t) for x, t in zip(inputs, new)]
        if all(a is b for a, b in zip(settled, inputs)):
            break
        inputs = settled
    return inputs, body


def _settled(value: Any, new: Any) -> Any:
    old = jax.typeof(value)
    if old.weak_type and old.shape == new.shape and (not new.weak_type or new.dtype != old.dtype):
        value = jax.lax.convert_element_type(value, new.dtype)
    if _jax.aval_varies(new) and not _jax.varies(value):
        value = _jax.lift(value)
    return value


def _like(value: Any, example: Any) -> Any:
    if value.dtype != example.dtype or jax.typeof(value).weak_type != jax.typeof(example).weak_type:
        value = jax.lax.convert_element_type(value, example.dtype)
    return _jax.lift(value) if _jax.varies(example) else value


def _check_carry(name: str, found: Any, expected: Any) -> None:
    structures = jax.tree.structure(found), jax.tree.structure(expected)
    if structures[0] != structures[1]:
        raise ArgumentError(f"{name}: the carry must keep its structure, {structures[1]}; the body returned {structures[0]}.")
    for i, (new, old) in enumerate(zip(jax.tree.leaves(found), jax.tree.leaves(expected))):
        if new.shape != old.shape or (new.dtype != old.dtype and not new.weak_type):
            raise ArgumentError(
                f"{name}: leaf {i} of the carry is {old.str_short()} and became {new.str_short()} in the body; a carry keeps"
                " its shapes and dtypes."
            )


def _refuse_collectives(name: str, others: str, *bodies: _Body) -> None:
    if any(_jax.has_collective(body.traced.program.jaxpr) for body in bodies):
        raise StrategyError(
            f"{name} at {_jax.user_line()}: the condition may differ between the replicas, and the body reduces over them"
            f" (an all_reduce, or an update with an aggregation): those that {others} would be waited for for ever. Make"
            " the condition the same on all replicas, or reduce outside."
        )


def _refuse_writes(body: _Body) -> None:
    for variable in body.written:
        if not variable.per_replica:
            raise AggregationRequiredError(
                f"while_loop at {_jax.user_line()}: {variable.label} is mirrored and assigned in a loop whose number of"
                " steps may differ between the replicas. Make the condition the same on all of them."
            )


def _flatten(tree: Any) -> tuple[list[Any], list[Any], Callable[[list[Any]], Any]]:
    """Arrays of a pytree, their types, and how to build the tree around other arrays."""
    leaves, structure = jax.tree.flatten(tree)
    leaves = [_plain(leaf) for leaf in leaves]
    dynamic = [is_input(leaf) or isinstance(leaf, bool) for leaf in leaves]
    arrays = [jnp.asarray(leaf) for leaf, d in zip(leaves, dynamic) if d]

    def rebuild(values: list[Any]) -> Any:
        rest = iter(values)
        return jax.tree.unflatten(structure, [next(rest) if d else leaf for d, leaf in zip(dynamic, leaves)])

    return arrays, [jax.typeof(a) for a in arrays], rebuild


def _plain(leaf: Any) -> Any:
    return leaf.value if isinstance(leaf, (Variable, Component)) else leaf


def _array(value: Any, label: str) -> Any:
    value = _plain(value)
    try:
        return value if isinstance(value, jax.Array) else jnp.asarray(value)
    except (TypeError, ValueError) as error:
        raise ArgumentTypeError(f"{label} must be an array or a number, got {type(value).__name__}.") from error


def _check_functions(name: str, *functions: Any) -> None:
    for fn in functions:
        if not callable(fn):
            raise ArgumentTypeError(f"{name} takes functions, got {type(fn).__name__} {fn!r:.60}.")


def _runs_now() -> bool:
    return state.top().is_eager and not any(_jax.is_staging(t) for t in _jax.trace_chain())
