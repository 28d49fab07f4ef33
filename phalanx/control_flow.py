"""`cond`, `while_loop` and `scan`: as in `jax.lax`, with variables read and written in the bodies.

A body is traced as a program of its own, which shows what it reads and writes. What it writes becomes
part of the loop's carry, so that a loop of many steps is one operation on the device.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from phalanx import _jax, state
from phalanx._bodies import (
    Body,
    carried_by,
    converted,
    flatten,
    joined,
    like,
    plain,
    refuse_collectives,
    refuse_writes,
    seen_by,
    settle,
    shown,
    store,
)
from phalanx._checks import as_array, check_flag, take_apart
from phalanx._conversion import is_key
from phalanx._eager_programs import as_function
from phalanx._signature import is_input
from phalanx.errors import ArgumentError, ArgumentTypeError
from phalanx.variables import Variable


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
    for role, fn in (("true_fun", true_fun), ("false_fun", false_fun)):
        _check_function("cond", role, fn, len(operands))
    pred = _as_condition(pred)
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
    for role, fn in (("cond_fun", cond_fun), ("body_fun", body_fun)):
        _check_function("while_loop", role, fn, 1)
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
    _check_function("scan", "f", f, 2)
    steps = _check_steps(xs, length, unroll)
    check_flag(reverse, "scan: reverse")
    options = (steps, reverse, unroll)
    if _runs_now():
        loop = as_function("scan", _trace_scan, f, parameters=["init", "xs"], options=options)
        return loop(init, xs)  # type: ignore[no-any-return]
    return _trace_scan(f, init, xs, options=options)


# ---- cond ----------------------------------------------------------------------------------------


def _trace_branches(pred: Any, true_fun: Callable[..., Any], false_fun: Callable[..., Any], operands: Any) -> Any:
    inputs, types, rebuild = flatten(operands)
    bodies = [Body("cond", fun, types, rebuild) for fun in (true_fun, false_fun)]
    _check_same_results(bodies[0], bodies[1])
    differs = _jax.in_replica_trace() and _jax.varies(pred)
    if differs:
        refuse_collectives("cond", "take the other branch", *bodies)
    carried = carried_by(*bodies)
    seen = seen_by(carried, *bodies)
    out_types = [[*body.out_types(), *_written_types(body, carried)] for body in bodies]
    dtypes = [joined(*pair) for pair in zip(*out_types)]
    lifted = [differs or any(map(_jax.aval_varies, pair)) for pair in zip(*out_types)]

    def branch(body: Body) -> Callable[[list[Any]], list[Any]]:
        def run(args: list[Any]) -> list[Any]:
            results, values = body.run(args, carried, seen)
            outs = [converted(o, dtype) for o, dtype in zip([*results, *values.values()], dtypes)]
            return [_jax.lift(o) if lift else o for o, lift in zip(outs, lifted)]

        return run

    outs = jax.lax.cond(pred, branch(bodies[0]), branch(bodies[1]), inputs)
    n = bodies[0].traced.n_results
    store(carried, dict(zip(carried, outs[n:])), *bodies)
    return bodies[0].rebuild(list(outs[:n]))


def _written_types(body: Body, carried: dict[Variable, Any]) -> list[Any]:
    new = dict(zip(body.written, body.traced.program.out_avals[body.traced.n_results :]))
    return [new.get(v, jax.typeof(value)) for v, value in carried.items()]


def _check_same_results(true: Body, false: Body) -> None:
    structures = [jax.tree.structure(b.rebuild(b.out_types())) for b in (true, false)]
    if structures[0] != structures[1]:
        raise ArgumentError(
            f"cond: the branches must return the same structure, got {shown(structures[0])} from true_fun and"
            f" {shown(structures[1])} from false_fun (assign, assign_add and assign_sub return the variable)."
        )
    for i, (a, b) in enumerate(zip(true.out_types(), false.out_types())):
        if a.shape != b.shape or (a.dtype != b.dtype and joined(a, b) is None):
            raise ArgumentError(
                f"cond: result {i} is {a.str_short()} in true_fun and {b.str_short()} in false_fun; the branches must"
                " return the same shapes and dtypes."
            )


# ---- while_loop ----------------------------------------------------------------------------------


def _trace_while(cond_fun: Callable[[Any], Any], body_fun: Callable[[Any], Any], init_val: Any) -> Any:
    inputs, _, rebuild = flatten(init_val)

    def as_args(values: list[Any]) -> Any:
        return (rebuild(values),)

    def make(types: list[Any]) -> Body:
        return Body("while_loop", body_fun, types, as_args)

    inputs, body = settle("while_loop", inputs, rebuild, make, lambda b: b.rebuild(b.out_types()))
    test = Body("while_loop", cond_fun, list(map(jax.typeof, inputs)), as_args)
    if test.written:
        raise ArgumentError(f"while_loop: cond_fun assigns {test.written[0].label}; assign in body_fun.")
    carried = carried_by(body)
    seen = seen_by(carried, body, test)
    answer = test.rebuild(test.out_types())
    if getattr(answer, "shape", None) != () or is_key(answer):
        found = answer.str_short() if hasattr(answer, "str_short") else shown(jax.tree.structure(answer))
        raise ArgumentError(f"while_loop: cond_fun must return a boolean scalar, got {found}.")
    if _jax.in_replica_trace() and _jax.aval_varies(answer):
        refuse_collectives("while_loop", "have left the loop", body, test)
        refuse_writes(body)
        if not all(map(_jax.varies, inputs)):
            # Replicas leave the loop after different numbers of steps, so all that it carries differs.
            return _trace_while(cond_fun, body_fun, rebuild([_jax.lift(x) for x in inputs]))

    def keep_going(loop: Any) -> Any:
        return test.run(loop[0], dict(zip(carried, loop[1])), seen)[0][0] != 0

    def step(loop: Any) -> Any:
        results, values = body.run(loop[0], dict(zip(carried, loop[1])), seen)
        return like(results, inputs), list(values.values())

    results, values = jax.lax.while_loop(keep_going, step, (inputs, list(carried.values())))
    store(carried, dict(zip(carried, values)), body)
    return body.rebuild(results)


# ---- scan ----------------------------------------------------------------------------------------


def _trace_scan(f: Callable[..., Any], init: Any, xs: Any, *, options: tuple[int, bool, Any]) -> Any:
    length, reverse, unroll = options
    inputs, _, rebuild_carry = flatten(init)
    rows, row_types, rebuild_row = flatten(xs)
    row_types = list(map(_row_type, row_types))
    n_carry = len(inputs)

    def as_args(values: list[Any]) -> Any:
        return rebuild_carry(values[:n_carry]), rebuild_row(values[n_carry:])

    def make(types: list[Any]) -> Body:
        return Body("scan", f, [*types, *row_types], as_args)

    inputs, body = settle("scan", inputs, rebuild_carry, make, _carry_of_scan)
    carried = carried_by(body)
    seen = seen_by(carried, body)

    def step(loop: Any, x: list[Any]) -> Any:
        results, values = body.run([*loop[0], *x], dict(zip(carried, loop[1])), seen)
        return (like(results[:n_carry], inputs), list(values.values())), results[n_carry:]

    loop = (inputs, list(carried.values()))
    (results, values), ys = jax.lax.scan(step, loop, rows, length=length, reverse=reverse, unroll=unroll)
    store(carried, dict(zip(carried, values)), body)
    return body.rebuild([*results, *ys])


def _carry_of_scan(body: Body) -> Any:
    result = body.rebuild(body.out_types())
    if not isinstance(result, tuple) or len(result) != 2:
        raise ArgumentError(f"scan: f must return a pair (carry, y), got {shown(jax.tree.structure(result))}.")
    return result[0]


def _row_type(aval: Any) -> Any:
    if _jax.in_replica_trace():
        return _jax.local_aval(aval.shape[1:], aval.dtype, varying=_jax.aval_varies(aval))
    return _row_of(aval.shape[1:], aval.dtype)


@functools.lru_cache(maxsize=1024)
def _row_of(shape: tuple[int, ...], dtype: Any) -> Any:
    return jax.make_jaxpr(lambda r: r[0])(jax.ShapeDtypeStruct((1, *shape), dtype)).out_avals[0]


def _check_steps(xs: Any, length: Any, unroll: Any) -> int:
    """The number of steps, or an error about it."""
    leaves, _ = take_apart(xs, "scan: xs")
    shapes = [jnp.shape(plain(leaf)) if is_input(plain(leaf)) else None for leaf in leaves]
    if not all(shapes):
        raise ArgumentError(
            "scan: xs must be arrays, or pytrees of arrays, whose rows are the steps; got a number, a list or another"
            f" object without rows: {xs!r:.80}. For a list use jnp.asarray or jnp.stack."
        )
    lengths = {shape[0] for shape in shapes if shape}
    if len(lengths) > 1:
        raise ArgumentError(f"scan: the arrays of xs need the same first dimension, got {sorted(lengths)}.")
    if length is None and not lengths:
        raise ArgumentError("scan: give xs, or the number of steps as length.")
    steps = lengths.pop() if lengths else length
    if length is not None and not _is_count(length):
        raise ArgumentError(f"scan: length must be a number of steps, a Python int of at least 0, got {length!r:.80}.")
    if length is not None and steps != length:
        raise ArgumentError(f"scan: length is {length}, but xs has {steps} rows.")
    if not isinstance(unroll, (bool, int)) or unroll < 0:
        raise ArgumentError(f"scan: unroll must be True, False or a number of steps, got {unroll!r:.80}.")
    return int(steps)


# ---- arguments -----------------------------------------------------------------------------------


def _is_count(value: Any) -> bool:
    return isinstance(value, (int, np.integer)) and not isinstance(value, bool) and bool(0 <= value < 2**31)


def _as_condition(value: Any) -> Any:
    value = plain(value)
    array = as_array(value, "cond: pred") if is_input(value) or isinstance(value, bool) else None
    if array is None or is_key(array):
        raise ArgumentTypeError(f"cond: pred must be True, False or a boolean scalar, got {type(value).__name__}.")
    if array.shape != ():
        raise ArgumentError(f"cond: pred must be a scalar, got shape {array.shape}. Reduce it with .any() or .all().")
    return array


def _check_function(construct: str, role: str, fn: Any, n_args: int) -> None:
    if not callable(fn):
        raise ArgumentTypeError(f"{construct}: {role} must be a function, got {type(fn).__name__} {fn!r:.60}.")
    try:
        signature = inspect.signature(fn)
    except (TypeError, ValueError):  # builtins, some of which have none
        return
    try:
        signature.bind(*[None] * n_args)
    except TypeError as error:
        name = getattr(fn, "__name__", type(fn).__name__)
        raise ArgumentTypeError(
            f"{construct}: {role} is called with {n_args} arguments, but it is {name}{signature}: {error}."
        ) from None


def _runs_now() -> bool:
    return state.top().is_eager and not any(_jax.is_staging(t) for t in _jax.trace_chain())
