"""Group "function": traces, captures, variables and state in traced functions."""

from __future__ import annotations

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import io_callback

import phalanx as px
from goldens.kit import attempt, check, components, differs, each, replay, runners
from phalanx.errors import AggregationRequiredError, ArgumentTypeError, StrategyError, TracingError


def _variable(strategy, value, **options):
    with strategy.scope():
        return px.Variable(value, **options)


def _replica():
    """This replica's number, as a float."""
    return px.get_replica_context().replica_id.astype(jnp.float32)


def _trace_counts(f, calls):
    """How often `f` has been traced after each call."""
    counts = []
    for args in calls:
        f(*args)
        counts.append(f.trace_count)
    return counts


# ---- what makes a new trace ----------------------------------------------------------------------


@replay("fn_trace_count_shapes_and_dtypes", x64=True)
def test_one_trace_for_each_shape_and_dtype(golden, strategy):
    f = px.function(lambda x: x * 2)
    calls = [(jnp.ones(call["shape"], call["dtype"]),) for call in golden.inputs["calls"]]
    return {"traces_after_call": _trace_counts(f, calls)}


@differs("fn_trace_count_reduce_retracing", "programs have fixed shapes")
def test_reduce_retracing_cannot_relax_shapes(golden, strategy):
    f = px.function(lambda x: x * 2, reduce_retracing=True)
    shapes = golden.inputs["shapes"]
    counts = _trace_counts(f, [(jnp.ones(shape),) for shape in shapes])
    assert counts == [len({tuple(s) for s in shapes[: i + 1]}) for i in range(len(shapes))]
    numbers = px.function(lambda x: x * 2, reduce_retracing=True)
    assert _trace_counts(numbers, [(1.0,), (jnp.float32(2.0),), (np.float32(3.0),)]) == [1, 1, 1]


@differs("fn_trace_count_python_values", "Python numbers are traced, and 1, 1.0 and True are different")
def test_python_numbers_are_traced_and_keep_their_type(golden, strategy):
    f = px.function(lambda x: x + 1 if not isinstance(x, (str, bool, type(None))) else x)
    makers = {"tensor": jnp.int32, "numpy": np.int32}
    counts, values = [], []
    for kind, value in golden.inputs["calls"]:
        y = f(makers[kind](value) if kind in makers else value)
        values.append([y, y.dtype.name] if isinstance(y, jax.Array) else y)
        counts.append(f.trace_count)
    numbers, others = [1, 1, 1, 2, 2, 3, 3], [4, 4, 4, 5, 6, 6, 7, 7]  # ints share a trace, floats do
    assert counts == numbers + others
    expected = list(golden.expect["values"])
    expected[3:6] = [[2.0, "float32"], [2.0, "float32"], True]
    expected[10:13] = ["a", "b", "a"]
    check(values, expected)


@differs("fn_trace_count_structures", "a scale that changes is no new trace")
def test_traces_for_structured_arguments(golden, strategy):
    f = px.function(lambda x, scale=1.0: sum(jnp.sum(leaf) for leaf in jax.tree.leaves(x)) * scale)
    one = jnp.ones(2)
    calls = [
        (([one, one],), {}),
        (([one, one],), {}),
        (((one, one),), {}),
        (({"a": one, "b": one},), {}),
        (({"b": one, "a": one},), {}),
        (([one, one, one],), {}),
        (([np.ones(2, np.float32), one],), {}),
        (([one, one], 1.0), {}),
        (([one, one],), {"scale": 1.0}),
        (([one, one],), {"scale": 2.0}),
        (([one, one],), {"scale": jnp.float32(2.0)}),
        (([one, one],), {"scale": jnp.float32(3.0)}),
    ]
    counts, values = [], []
    for args, kwargs in calls:
        values.append(f(*args, **kwargs))
        counts.append(f.trace_count)
    golden.check(values, "values")
    theirs = golden.expect["traces_after_call"]
    assert counts == theirs[:9] + [4, 5, 5]


@differs("fn_input_signature", "each size that is left open is a trace of its own")
def test_calls_are_converted_to_the_signature_or_refused(golden, strategy):
    any_rows = jax.ShapeDtypeStruct(jax.export.symbolic_shape("rows, 3"), jnp.float32)
    f = px.function(jnp.sum, input_signature=[any_rows])
    fitting = {
        "2x3": jnp.ones((2, 3)),
        "5x3": jnp.ones((5, 3)),
        "0x3": jnp.ones((0, 3)),
        "python_list": [[1.0, 2.0, 3.0]],
        "numpy_float64": np.ones((1, 3)),
    }
    golden.check({name: f(x) for name, x in fitting.items()}, "values")
    wrong = {
        "2x4": (jnp.ones((2, 4)),),
        "vector3": (jnp.ones(3),),
        "int32_2x3": (jnp.ones((2, 3), jnp.int32),),
        "two_arguments": (jnp.ones((2, 3)), jnp.ones((2, 3))),
    }
    golden.check({name: attempt(f, *args) for name, args in wrong.items()}, "errors")
    assert f.trace_count == len({(2, 3), (5, 3), (0, 3), (1, 3)})


@replay("fn_python_flag")
def test_flags_are_static(golden, strategy):
    traces = []

    @px.function
    def f(x, training):
        traces.append(1)
        if isinstance(training, bool):
            return x * 2.0 if training else x / 2.0
        return px.cond(training, lambda: x * 2.0, lambda: x / 2.0)

    x, log = jnp.float32(golden.inputs["x"]), []
    calls = [((x, True), {}), ((x, False), {}), ((x, True), {}), ((x,), {"training": True})]
    calls += [((x, jnp.array(flag)), {}) for flag in (True, False)]
    for args, kwargs in calls:
        log.append({"value": f(*args, **kwargs), "traces": len(traces)})
    return {"after_call": log}


@replay("fn_method_per_object")
def test_method_is_traced_for_each_object(golden, strategy):
    traces = []

    class Scale:
        def __init__(self, k):
            self.k = _variable(strategy, k)

        @px.function
        def times(self, x):
            traces.append(1)
            return self.k * x

    first, second, log = Scale(2.0), Scale(5.0), []
    for scale, size in ((first, 2), (first, 2), (second, 2), (second, 2), (first, 3)):
        log.append({"value": scale.times(jnp.ones(size)), "traces": len(traces)})
    return {"after_call": log}


@differs("fn_variable_as_argument", "a variable given as an argument is the one that is read")
def test_each_variable_given_as_an_argument_is_read(golden, strategy):
    right = [20.0, 50.0, [10.0, 20.0]]

    def log(make):
        f = px.function(lambda v, x: v * x)
        variables = [make(golden.inputs[name]) for name in ("v1", "v2", "v3")]
        return [{"value": f(v, jnp.float32(10.0)), "traces": f.trace_count} for v in variables]

    for make in (lambda value: _variable(strategy, value), px.Variable):
        out = log(make)
        check([entry["value"] for entry in out], right)
        assert [entry["traces"] for entry in out] == [1, 2, 3]


@differs("fn_trace_per_context", "one trace for all replicas")
def test_each_kind_of_context_has_its_trace(golden, strategy):
    f = px.function(lambda x: x + float(px.get_strategy().num_replicas))
    log = []

    def call():
        log.append({"value": f(jnp.float32(1.0)), "traces": f.trace_count})

    call()
    call()
    with strategy.scope():
        call()
        call()
    call()
    result = strategy.run(lambda: f(jnp.float32(1.0)))
    log.append({"value": each(strategy, result), "traces": f.trace_count})
    expected = golden.expect["after_call"]
    check(log, [*expected[:5], {**expected[5], "traces": 3}])


@differs("fn_called_in_replica_context", "one trace for all replicas")
def test_function_called_in_replicas_is_traced_once_per_shape(golden, strategy):
    w = _variable(strategy, golden.inputs["w"])
    g = px.function(lambda x: x * w)

    def fn():
        a = g(jnp.ones(2) * (_replica() + 1.0))
        a = g(a)
        return a, g(jnp.ones(3))

    a, b = strategy.run(fn)
    assert g.trace_count == 2
    strategy.run(fn)
    assert g.trace_count == 2
    golden.check(each(strategy, a), "a")
    golden.check(each(strategy, b), "b")


@differs("fn_that_calls_run", "one trace for all replicas")
def test_function_around_run_traces_the_replica_once(golden, strategy):
    w = _variable(strategy, golden.inputs["w"])
    outer, inner = [], []

    def fn(x):
        inner.append(1)
        return x * w

    @px.function
    def f(x):
        outer.append(1)
        return strategy.reduce("sum", strategy.run(fn, args=(x,)))

    for i, shape in enumerate(golden.inputs["shapes"]):
        golden.check(f(jnp.ones(shape)), "after_call", i, "value")
        golden.check(len(outer), "after_call", i, "outer_python_calls")
        assert len(inner) == len(outer)


@differs("fn_traces_over_uneven_dataset", "batches are padded to one shape, or each shape is traced once")
def test_traces_over_a_dataset_with_a_short_last_batch(golden, strategy):
    rows = np.arange(golden.inputs["rows"], dtype=np.float32)
    inner = []

    def count(x, weight):
        inner.append(1)
        return weight.sum()

    @px.function
    def step(element):
        return strategy.reduce("sum", strategy.run(count, args=element))

    dataset = strategy.distribute_dataset(rows, golden.inputs["global_batch"], remainder="pad", mask=True)
    for _ in range(2):
        batches = [float(step(element)) for element in dataset]
        check(batches, [float(entry["rows"]) for entry in golden.expect["a_plain"][:3]])
    assert step.trace_count == 1
    assert len(inner) == 1


# ---- variables -----------------------------------------------------------------------------------


@replay("fn_variable_created_on_first_call")
def test_variable_may_be_created_on_the_first_call(golden, strategy):
    kept = []

    @px.function
    def f(x):
        if not kept:
            kept.append(px.Variable([1.0, 2.0]))
        kept[0].assign_add([1.0, 1.0])
        return kept[0] * x

    with strategy.scope():
        returned = [f(jnp.float32(golden.inputs["x"])) for _ in range(3)]
    return {"returned": returned, "components": components(kept[0]), "traces": f.trace_count}


@replay("fn_variable_created_every_call")
def test_variable_created_on_every_call_is_refused(golden, strategy):
    f = px.function(lambda x: px.Variable(1.0) * x)
    with strategy.scope():
        return attempt(f, jnp.float32(golden.inputs["x"]))


@differs("fn_variable_created_on_later_trace", "a later trace may create its own variables once")
def test_later_trace_may_create_variables(golden, strategy):
    kept = {}

    @px.function
    def g(x):
        n = x.shape[0]
        if n not in kept:
            kept[n] = px.Variable(float(n))
        return jnp.sum(x) * kept[n]

    with strategy.scope():
        for _ in range(2):
            check(g(jnp.ones(2)), golden.inputs["value_of_first_call"])
            check(g(jnp.ones(3)), 9.0)
    assert sorted(kept) == [2, 3]


@replay("fn_state_update_order")
def test_updates_happen_in_program_order(golden, strategy):
    a, b = _variable(strategy, golden.inputs["a"]), _variable(strategy, golden.inputs["b"])

    @px.function
    def f():
        r1 = a.read_value()
        a.assign(a + b)
        r2 = a.read_value()
        b.assign_sub(a)
        r3 = b.read_value()
        a.assign(a * 2.0)
        b.assign_add(a)
        return [r1, r2, r3, a.read_value(), b.read_value()]

    with strategy.scope():
        returned = [f() for _ in range(2)]
    return {"returned": returned, "a": components(a), "b": components(b)}


@replay("fn_state_update_order_in_run")
def test_updates_in_replicas_happen_in_program_order(golden, strategy):
    v = _variable(strategy, golden.inputs["v"], aggregation="sum")
    o = _variable(strategy, golden.inputs["o"], synchronization="on_read", aggregation="sum")

    def fn():
        r1 = v.read_value()
        v.assign_add(_replica() + 1.0)
        r2 = v.read_value()
        o.assign_add(v.read_value())
        v.assign(o.read_value())
        return [r1, r2, o.read_value(), v.read_value()]

    f = px.function(lambda: strategy.run(fn))
    returned = [[each(strategy, part) for part in f()] for _ in range(2)]
    return {
        "returned_by_name_then_replica": returned,
        "v": components(v),
        "o": components(o),
        "o_read": o.read_value(),
    }


@replay("fn_several_runs_in_one_function")
def test_several_runs_in_one_function(golden, strategy):
    v = _variable(strategy, 0.0, aggregation="mean")
    calls = []

    def fn(step):
        calls.append(1)
        v.assign_add((_replica() + 1.0) * step)
        return v.read_value()

    @px.function
    def f():
        for step in (1.0, 2.0, 3.0):
            out = strategy.run(fn, args=(jnp.float32(step),))
        return out

    returned = [each(strategy, f()) for _ in range(2)]
    # Traced once for all replicas: 3 Python calls, where TensorFlow makes 3 for each replica.
    assert len(calls) == 3
    return {
        "returned": returned,
        "components": components(v),
        "replica_python_calls": len(calls) * strategy.num_replicas,
    }


@replay("fn_on_read_cross_replica_inside_function")
def test_accumulator_read_between_runs_of_one_function(golden, strategy):
    o = _variable(strategy, golden.inputs["o"], synchronization="on_read", aggregation="sum")

    @px.function
    def f():
        strategy.run(lambda: o.assign_add(_replica() + 1.0))
        first = o.read_value()
        strategy.run(lambda: o.assign_add(10.0 * (_replica() + 1.0)))
        second = o.read_value()
        o.assign(0.0)
        return [first, second, o.read_value()]

    with strategy.scope():
        return {"first_call": f(), "second_call": f(), "components": components(o)}


@differs("fn_aggregation_inside_traced_code", "aggregating updates work in nested functions and branches")
def test_aggregating_updates_in_nested_traced_code(golden, strategy):
    eagerly, in_function = runners(strategy)

    def outcome(program, aggregation="sum"):
        v = _variable(strategy, golden.inputs["v"], aggregation=aggregation)

        def add():
            v.assign_add(_replica() + 1.0)

        program(add)
        return components(v)

    programs = {
        "a": lambda add: eagerly(px.function(add)),
        "b": lambda add: eagerly(lambda: px.function(add)()),
        "c": lambda add: in_function(lambda: px.function(add)()),
        "d": lambda add: in_function(lambda n: px.cond(n >= 0, add, add), (jnp.int32(0),)),
    }
    for program in programs.values():
        golden.check(outcome(program), "a_run_of_traced_function", "components")
    with pytest.raises(AggregationRequiredError):
        outcome(programs["b"], aggregation="none")

    def on_its_own_condition(add):
        in_function(lambda: px.cond(px.get_replica_context().replica_id >= 0, add, add))

    with pytest.raises(StrategyError, match="may differ between the replicas"):
        outcome(on_its_own_condition)


# ---- nesting, gradients --------------------------------------------------------------------------


@replay("fn_nested")
def test_nested_functions(golden, strategy):
    v = _variable(strategy, golden.inputs["v"])
    inner = px.function(lambda x: x * v + 1.0)
    outer = px.function(lambda x: jnp.sum(inner(inner(x))) + jnp.sum(inner(x[:2])))
    with strategy.scope():
        values = [outer(jnp.ones(4)), outer(jnp.ones(4))]
        v.assign(5.0)
        values.append(outer(jnp.ones(4)))
    return {"values": values, "traces_inner": inner.trace_count, "traces_outer": outer.trace_count}


@replay("fn_gradient_through")
def test_gradient_through_a_function(golden, strategy):
    w, b = _variable(strategy, golden.inputs["w"], name="w"), _variable(strategy, golden.inputs["b"], name="b")
    names = []
    f = px.function(lambda x: (w * x + b) ** 2)

    @px.function
    def with_tape(x):
        with px.GradientTape() as tape:
            tape.watch(x)
            y = (w * x + b) ** 2
        return tape.gradient(y, [w, b, x])

    def fn():
        x = _replica() + 1.0
        with px.GradientTape() as tape:
            tape.watch(x)
            y = f(x)
        outer = tape.gradient(y, [w, b, x])
        names.append(sorted(f"{v.name}:0" for v in tape.watched_variables()))
        inner = with_tape(x)
        keys = ("y", "dw", "db", "dx", "inner_dw", "inner_db", "inner_dx")
        return dict(zip(keys, (y, *outer, *inner)))

    out = {name: each(strategy, value) for name, value in strategy.run(fn).items()}
    return {**out, "outer_tape_watched": names[0]}


@replay("fn_second_derivative")
def test_second_derivative_through_a_function(golden, strategy):
    def derivatives(v):
        f = px.function(lambda: v**4.0)
        with px.GradientTape() as second:
            with px.GradientTape() as first:
                y = f()
            d1 = first.gradient(y, v)
        return {"first": d1, "second": second.gradient(d1, v)}

    w, p = _variable(strategy, golden.inputs["w"]), px.Variable(golden.inputs["p"])
    return {"mirrored": derivatives(w), "plain": derivatives(p)}


# ---- Python around it ----------------------------------------------------------------------------


@replay("fn_python_side_effects")
def test_python_runs_when_traced_only(golden, strategy):
    seen = {"n": 0}
    log = []

    @px.function
    def f(x):
        log.append("traced")
        seen["n"] += 1
        return x + float(seen["n"])

    returned = [f(jnp.float32(1.0)), f(jnp.float32(1.0))]
    seen["n"] = 100
    returned += [f(jnp.float32(1.0)), f(jnp.float32(1.0)), f(jnp.array([1.0, 2.0]))]
    return {"returned": returned, "list_length": len(log), "n": seen["n"]}


@replay("fn_captures")
def test_assignments_to_captured_variables_are_seen(golden, strategy):
    v = _variable(strategy, 1.0)
    box = {"c": jnp.float32(10.0), "k": 1000.0}
    items = [jnp.float32(100.0)]
    f = px.function(lambda: v + box["c"] + items[0] + box["k"])
    with strategy.scope():
        first = f()
        v.assign(2.0)
        box["c"], box["k"], items[0] = jnp.float32(20.0), 2000.0, jnp.float32(200.0)
        return {"first": first, "second": f()}


@differs("fn_return_kinds", "strings come back as they are")
def test_what_a_function_can_return(golden, strategy):
    v = _variable(strategy, 7.0)

    def kind(x):
        if x is None:
            return {"kind": "None"}
        if isinstance(x, jax.Array):
            return {"kind": "tensor", "value": x}
        if isinstance(x, (list, tuple)):
            return {"kind": type(x).__name__, "items": [kind(item) for item in x]}
        return {"kind": f"python {type(x).__name__}", "value": x}

    programs = {
        "none": lambda: None,
        "python_number": lambda: 3,
        "variable": lambda: v,
        "numpy": lambda: np.ones(2, np.float32),
        "tuple_with_none": lambda: (jnp.float32(1.0), None),
    }
    with strategy.scope():
        for name, program in programs.items():
            golden.check(kind(px.function(program)()), name)
        got = px.function(lambda: {"a": [jnp.float32(1.0), (jnp.int32(2),)]})()
        golden.check({name: kind(value) for name, value in got.items()}, "dict")
        assert px.function(lambda: "text")() == golden.expect["python_string"]["value"]


@differs("fn_control_flow", "control flow is written with px.cond, px.while_loop and px.scan")
def test_control_flow_that_updates_a_variable(golden, strategy):
    v = _variable(strategy, 0.0)

    @px.function
    def f(n, limit):
        def step(i):
            px.cond(i % 2 == 0, lambda: v.assign_add(i.astype(jnp.float32)), lambda: v.assign_sub(1.0))
            return i + 1

        def halve(_):
            v.assign(v / 2.0)

        px.while_loop(lambda i: i < n, step, jnp.int32(0))
        px.while_loop(lambda _: v > limit, halve, None)
        return v.read_value()

    with strategy.scope():
        values = [f(jnp.int32(n), jnp.float32(limit)) for n, limit in golden.inputs["calls"]]
    golden.check({"values": values, "components": components(v), "traces": f.trace_count})


@differs("fn_python_if_without_conversion", "Python's `if` is never converted")
def test_python_if_on_a_traced_value_is_refused(golden, strategy):
    def body(x):
        if x > 0.0:
            return x * 2.0
        return x * 3.0

    error = attempt(px.function(body), jnp.float32(1.0))
    golden.check(error, "not_converted")
    assert isinstance(error, TracingError)
    assert "px.cond" in str(error)
    converted = px.function(lambda x: px.cond(x > 0.0, lambda: x * 2.0, lambda: x * 3.0))
    golden.check([converted(jnp.float32(x)) for x in golden.inputs["x"]], "converted")


@replay("fn_leaked_tensor")
def test_value_kept_from_the_body_cannot_be_used(golden, strategy):
    kept = []

    @px.function
    def f(x):
        kept.append(x * 2.0)
        return x

    f(jnp.float32(golden.inputs["x"]))
    return attempt(lambda: 1.0 + kept[0])


@differs("fn_concrete_function", "another shape is refused")
def test_concrete_function_takes_what_it_was_traced_for(golden, strategy):
    v = _variable(strategy, golden.inputs["v"])
    f = px.function(lambda x: v * x)
    with strategy.scope():
        concrete = f.get_concrete_function(jax.ShapeDtypeStruct((2,), jnp.float32))
        golden.check(concrete(jnp.array([1.0, 2.0])), "first")
        v.assign(4.0)
        golden.check(concrete(jnp.array([1.0, 2.0])), "after_assign")
        for wrong in (jnp.ones(3), jnp.array([1, 2])):
            assert isinstance(attempt(concrete, wrong), ArgumentTypeError)
        golden.check(f.trace_count, "traces")


@differs("fn_exceptions_and_state", "nothing is half-applied")
def test_state_after_an_exception(golden, strategy):
    v = _variable(strategy, golden.inputs["v"])

    @px.function
    def bad():
        v.assign_add(1.0)
        raise KeyError("from the body")

    with strategy.scope():
        golden.check(attempt(bad), "python_exception")
        golden.check(v.read_value(), "v_after_python_exception")

    def positive(x):
        if x <= 0.0:
            raise ValueError("x must be positive")
        return x

    w = px.Variable(golden.inputs["v"])

    @px.function
    def checked(x):
        w.assign_add(10.0)
        return io_callback(positive, jax.ShapeDtypeStruct((), jnp.float32), x)

    with pytest.raises(jax.errors.JaxRuntimeError, match="x must be positive"):
        checked(jnp.float32(-1.0))
    check(w.read_value(), golden.inputs["v"])
    golden.check(checked(jnp.float32(1.0)), "good_call")
    check(w.read_value(), 11.0)
