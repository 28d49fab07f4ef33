"""Group "variables": creation, reads, assignment in both contexts, per-replica variables, dtypes, shapes."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import phalanx as px
from goldens.kit import attempt, check, components, differs, each, per_replica, replay, runners
from phalanx.errors import AggregationRequiredError, ReplicaDivergenceError

AGGREGATIONS = ("NONE", "SUM", "MEAN", "ONLY_FIRST_REPLICA")
UPDATES = ("assign", "assign_add", "assign_sub")


def _variable(strategy, value, aggregation="none", **options) -> px.Variable:
    with strategy.scope():
        return px.Variable(value, aggregation=aggregation.lower(), **options)


def _on_read(strategy, value, aggregation) -> px.Variable:
    return _variable(strategy, value, aggregation, synchronization="on_read")


def _replica_id() -> jax.Array:
    return px.get_replica_context().replica_id


def _r() -> jax.Array:
    """The replica's number as a float."""
    return _replica_id().astype(jnp.float32)


def _state(v: px.Variable) -> dict:
    return {"value": v.value, "components": components(v)}


def _settings(v: px.Variable) -> dict:
    return {
        "trainable": v.trainable,
        "synchronization": "ON_READ" if v.per_replica else "ON_WRITE",
        "aggregation": v.aggregation.upper(),
    }


def _described(v: px.Variable) -> dict:
    return {**_state(v), **_settings(v), "dtype": v.dtype, "shape": list(v.shape)}


# ---- creation ------------------------------------------------------------------------------------


@replay("var_create_from_values")
def test_variable_created_from_python_values(golden, strategy):
    return {name: _described(_variable(strategy, value, name=name)) for name, value in golden.inputs.items()}


@replay("var_create_callable_initializer")
def test_callable_initial_value_is_called_once_for_all_replicas(golden, strategy):
    calls = []

    def initial():
        calls.append(1)
        return [golden.inputs["base"] + len(calls)] * 2

    v = _variable(strategy, initial)
    return {"calls": len(calls), **_described(v)}


@differs("var_create_dtypes", "64-bit values need JAX's 64-bit mode")
def test_dtype_follows_the_initial_value_and_64_bits_need_the_64_bit_mode(golden, strategy):
    def created(case, value, dtype=None):
        def one():
            v = _variable(strategy, value, dtype=dtype)
            return {"dtype": v.dtype, "value": v.value}

        golden.check(attempt(one), case)

    created("python_int", 3)
    created("python_float", 2.5)
    created("python_bool", True)
    created("numpy_float32", np.array([1.0, 2.0], np.float32))
    created("numpy_uint8", np.array([1, 2], np.uint8))
    created("int_as_float32", 3, "float32")
    created("float_as_float16", 0.1, "float16")
    created("float_as_int32", 2.5, "int32")
    assert _variable(strategy, np.array([1.0, 2.0])).dtype == np.float32
    assert _variable(strategy, np.array([1, 2])).dtype == np.int32
    with jax.enable_x64(True):
        created("numpy_float64", np.array([1.0, 2.0]))
        created("numpy_int64", np.array([1, 2]))
        created("float_as_float64", 2.5, "float64")


@differs("var_names", "names are kept as they are given")
def test_names_are_kept_as_they_are_given(golden, strategy):
    unnamed, first, second = (_variable(strategy, 1.0, name=name) for name in (None, "w", "w"))
    assert (unnamed.name, first.name, second.name) == ("Variable", "w", "w")
    assert [c.container for c in second.components] == [second] * strategy.num_replicas
    assert [c.replica_id for c in second.components] == list(range(strategy.num_replicas))


@differs("var_creation_arguments", "aggregations are given by name")
def test_creation_arguments(golden, strategy):
    def created(case, value, aggregation="none", **options):
        golden.check(attempt(lambda: _settings(_variable(strategy, value, aggregation, **options))), case)

    created("a_trainable_false", 1.0, trainable=False)
    created("b_on_write", 1.0, synchronization="on_write")
    created("c_on_read", 1.0, synchronization="on_read")
    created("d_on_read_trainable_true", 1.0, synchronization="on_read", trainable=True)
    created("e_sync_none", 1.0, synchronization="none")
    created("f_mean_int32", 1, "mean")
    created("g_sum_int32", 1, "sum")
    created("h_mean_bool", True, "mean")
    assert _variable(strategy, 1.0, "mean").aggregation == "mean"


@differs("var_created_outside_scope", "updates that differ between replicas need an aggregation")
def test_variable_made_outside_the_scope_is_adopted_and_kept_equal(golden, strategy):
    summed, plain = px.Variable(1.0, aggregation="sum"), px.Variable(1.0)

    def fn():
        return summed.assign_add(_r() + 1.0).value

    total = 1.0 + sum(range(1, strategy.num_replicas + 1))
    check(each(strategy, strategy.run(fn)), [total] * strategy.num_replicas)
    assert summed.strategy is strategy and components(summed) == [total] * strategy.num_replicas
    with pytest.raises(AggregationRequiredError):
        strategy.run(lambda: plain.assign_add(_r() + 1.0))
    assert components(plain) == [1.0] * plain.num_components


@differs("var_created_in_replica_context", "the replica function runs once, not once per replica")
def test_variable_created_in_a_replica_starts_from_the_first_replicas_value(golden, strategy):
    kept = []

    def fn():
        if not kept:
            kept.append(px.Variable(_r() + 1.0, aggregation="mean"))
        return kept[0].value

    golden.check(each(strategy, strategy.run(fn)), "read_in_replica")
    assert len(kept) == 1
    golden.check(components(kept[0]), "components")
    strategy.run(lambda: kept[0].assign_add(_r()))
    golden.check(components(kept[0]), "after_assign_add")


@differs("var_module_collects", "variables are collected from any pytree")
def test_variables_are_collected_from_any_pytree(golden, strategy):
    with strategy.scope():
        module = {
            "w": px.Variable(jnp.zeros((2, 2)), name="w"),
            "b": px.Variable(jnp.zeros(2), name="b"),
            "counter": px.Variable(0, name="counter", trainable=False),
            "sub": {"g": px.Variable(1.0, name="g")},
        }
    found = jax.tree.leaves(module)
    assert {v.name + ":0" for v in found} == set(golden.expect["variables"])
    assert {v.name + ":0" for v in found if v.trainable} == set(golden.expect["trainable_variables"])
    assert any(v is module["w"] for v in found)


# ---- reading -------------------------------------------------------------------------------------


@replay("var_read_contexts")
def test_reads_in_both_contexts(golden, strategy):
    v = _variable(strategy, golden.inputs["initial"])

    def fn():
        return {"read_value": v.read_value(), "value": v.value, "plus_r": v + _r(), "twice": 2.0 * v}

    out = {"cross": {"read_value": v.read_value(), "value": v.value, "numpy": v.numpy(), "plus_zero": v + 0.0}}
    for mode, run in zip(("replica_eager", "replica_in_function"), runners(strategy)):
        out[mode] = {name: each(strategy, x) for name, x in run(fn).items()}
    return out


@differs("var_local_results_of_kinds", "a tuple of plain values is one value")
def test_local_results_of_every_kind(golden, strategy):
    o = _on_read(strategy, 2.0, "sum")
    strategy.run(lambda: o.assign_add(_r()))
    parts = per_replica(strategy, [[r, r + 0.5] for r in range(strategy.num_replicas)])
    for kind, value in (
        ("mirrored_variable", _variable(strategy, 1.0)),
        ("on_read_variable", o),
        ("per_replica_value", parts),
        ("tensor", jnp.array([1.0, 2.0])),
        ("python_number", 3),
    ):
        results = strategy.local_results(value)
        golden.check({"parts": len(results), "values": results}, kind)
    assert strategy.local_results((1, 2)) == ((1, 2),)


@differs("var_indexing", "a variable has the length of its array")
def test_indexing_in_both_contexts(golden, strategy):
    v = _variable(strategy, golden.inputs["initial"])

    def parts():
        return {
            "row0": v[0],
            "rows_from_1_col_2": v[1:, 2],
            "last_column": v[..., -1],
            "every_second_column": v[:, ::2],
            "row_by_tensor": v[jnp.array(2)],
        }

    cross = {**parts(), "newaxis_shape": v[None].shape, "loop_over_rows": list(v)}
    for name, value in cross.items():
        golden.check(value, "cross", name)
    assert len(v) == 3
    in_replica = strategy.run(lambda: {**parts(), "row_r": v[_replica_id() % 3]})
    golden.check({name: each(strategy, x) for name, x in in_replica.items()}, "replica")


@differs("var_arithmetic", "a scalar variable converts to a Python number")
def test_arithmetic_with_variables(golden, strategy):
    a, b, m, s = (_variable(strategy, golden.inputs[name]) for name in "abms")
    ones = [1.0, 1.0, 1.0]
    increased = a
    increased += 1.0
    results = {
        "add": a + b,
        "rsub": 2.0 - a,
        "mul": a * b,
        "div": a / b,
        "floordiv": a // b,
        "mod": a % b,
        "pow": a**2.0,
        "neg": -a,
        "abs": abs(a),
        "matmul": m @ jnp.reshape(a, (3, 1)),
        "greater": a > b,
        "less_equal": a <= b,
        "equal_self": a == a,
        "equal_other": a == b,
        "numpy_sum": np.asarray(a).sum(),
        "tensor_plus_variable": jnp.array(ones) + a,
        "numpy_plus_variable": np.array(ones, np.float32) + a,
        "in_place_add": {"result": increased, "variable_unchanged": a.value},
    }
    for name, result in results.items():
        golden.check(result, name)
    assert float(s) == 2.5


@differs("var_identity", "a variable is hashed by identity")
def test_identity_and_equality(golden, strategy):
    v, w = _variable(strategy, 1.0), _variable(strategy, 1.0)
    assert {v: 1}[v] == 1 and w not in {v: 1}
    golden.check(v == w, "scalar_equal_other_same_value")
    golden.check(w in [v], "in_list")


# ---- assignment in cross-replica context ---------------------------------------------------------


@replay("var_assign_cross_replica")
def test_assignment_in_cross_replica_context(golden, strategy):
    v = _variable(strategy, golden.inputs["initial"])
    steps = []
    for op, value in golden.inputs["steps"]:
        returned = getattr(v, op)(jnp.array(value))
        steps.append({"op": op, "returned": returned.value, **_state(v)})
    return {"after_step": steps}


@differs("var_assign_chained", "assign returns the variable everywhere")
def test_assign_returns_the_variable_so_that_updates_chain_everywhere(golden, strategy):
    def chain(v):
        return v.assign(2.0).assign_add(3.0)

    outside, inside, plain = _variable(strategy, 1.0), _variable(strategy, 1.0), px.Variable(1.0)
    mean, none = _variable(strategy, 1.0, "mean"), _variable(strategy, 1.0)
    assert chain(outside) is outside and chain(plain) is plain
    with strategy.scope():
        chain(inside)
    strategy.run(lambda: chain(none).value)
    strategy.run(lambda: chain(mean).value)
    for v in (outside, inside, plain, mean, none):
        assert components(v) == [5.0] * v.num_components


@replay("var_assign_wrong_shape")
def test_assignment_does_not_broadcast(golden, strategy):
    def one(op, value):
        return getattr(_variable(strategy, np.zeros((2, 3), np.float32)), op)(value).value

    return {
        "assign_3x2": attempt(one, "assign", jnp.ones((3, 2))),
        "assign_6": attempt(one, "assign", jnp.ones(6)),
        "assign_1x3": attempt(one, "assign", jnp.ones((1, 3))),
        "assign_scalar": attempt(one, "assign", 1.0),
        "assign_nested_list": attempt(one, "assign", [[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]]),
        "assign_add_scalar": attempt(one, "assign_add", 1.0),
        "assign_add_vector3": attempt(one, "assign_add", jnp.ones(3)),
    }


@replay("var_assign_wrong_dtype", x64=True)
def test_assignment_converts_numbers_but_no_arrays_of_another_dtype(golden, strategy):
    def one(dtype, value):
        return _variable(strategy, 1 if dtype != "bool" else False, dtype=dtype).assign(value).value

    return {
        "float32_from_python_int": attempt(one, "float32", 3),
        "float32_from_numpy_float64": attempt(one, "float32", np.float64(0.1)),
        "float32_from_int32_tensor": attempt(one, "float32", jnp.array(3, "int32")),
        "float32_from_float64_tensor": attempt(one, "float32", jnp.array(3.0, "float64")),
        "float32_from_bool": attempt(one, "float32", True),
        "int32_from_python_float": attempt(one, "int32", 2.7),
        "int32_from_whole_python_float": attempt(one, "int32", 2.0),
        "int32_from_float32_tensor": attempt(one, "int32", jnp.array(2.0, "float32")),
        "int32_from_numpy_int64": attempt(one, "int32", np.int64(5)),
        "bool_from_int": attempt(one, "bool", 1),
    }


@replay("var_bool_int_cross_replica")
def test_bool_and_integer_variables_in_cross_replica_context(golden, strategy):
    flag, count = _variable(strategy, False), _variable(strategy, 3)
    flag.assign(True)
    count.assign_add(2)
    return {
        "flag": flag.value,
        "if_flag": "taken" if flag else "not taken",
        "count": count.value,
        "times_2": count * 2,
        "floordiv_2": count // 2,
        "mod_2": count % 2,
        "greater_4": count > 4,
        "flag_assign_add": attempt(flag.assign_add, True),
    }


@replay("var_constraint_is_kept")
def test_constraint_is_kept_for_the_optimizer_and_not_applied(golden, strategy):
    def clip(x):
        return jnp.clip(x, 0.0, 1.0)

    v = _variable(strategy, golden.inputs["initial"], constraint=clip)
    v.assign(golden.inputs["assign"])
    return {"is_same_function": v.constraint is clip, "value": v.value, "constrained": v.constraint(v.value)}


@replay("var_scatter_cross_replica")
def test_indexed_updates(golden, strategy):
    methods = {"add": "add", "sub": "subtract", "update": "set", "max": "max", "min": "min"}
    out = {}
    for name, expected in golden.expect.items():
        v = _variable(strategy, golden.inputs["initial"])
        update = v.at[jnp.array(expected["indices"])]
        getattr(update, methods[name.removeprefix("scatter_")])(jnp.array(expected["values"]))
        out[name] = {**expected, "components": components(v)}
    return out


@replay("var_checkpoint_roundtrip")
def test_values_that_were_read_restore_the_variables(golden, strategy):
    saved = {
        "m": _variable(strategy, golden.inputs["m"]),
        "s": _on_read(strategy, 0.0, "sum"),
        "a": _on_read(strategy, 0.0, "mean"),
    }
    strategy.run(lambda: [saved[name].assign(_r() + 1.0).value for name in "sa"])
    values = {name: v.numpy() for name, v in saved.items()}
    for v in saved.values():
        v.assign(np.full(v.shape, 100.0))
    for name, v in saved.items():
        v.assign(values[name])
    return {name: {"components": components(v), "cross_read": v.value} for name, v in saved.items()}


# ---- assignment in a replica ---------------------------------------------------------------------


def _distinct(golden):
    return jnp.stack([_r() + 1.0, 2.0 * (_r() + 1.0)])


def _identical(golden):
    return jnp.array(golden.inputs["value"])


def _replay_updates(aggregation, value):
    """Every update of a fresh variable in a replica, eagerly and in a traced function."""

    def program(golden, strategy):
        for run in runners(strategy):
            for op in UPDATES:
                v = _variable(strategy, golden.inputs["initial"], aggregation)
                returned = run(lambda: getattr(v, op)(value(golden)).value)
                golden.check({"returned_in_replica": each(strategy, returned), **_state(v)}, op)

    program.__name__ = f"test_update_in_a_replica_{aggregation}{value.__name__}"
    return program


test_sum_distinct = replay("var_assign_replica_sum_distinct")(_replay_updates("sum", _distinct))
test_sum_identical = replay("var_assign_replica_sum_identical_tensors")(_replay_updates("sum", _identical))
test_mean_distinct = replay("var_assign_replica_mean_distinct")(_replay_updates("mean", _distinct))
test_mean_identical = replay("var_assign_replica_mean_identical_tensors")(_replay_updates("mean", _identical))
test_first_distinct = replay("var_assign_replica_only_first_replica_distinct")(
    _replay_updates("only_first_replica", _distinct)
)
test_first_identical = replay("var_assign_replica_only_first_replica_identical_tensors")(
    _replay_updates("only_first_replica", _identical)
)
test_none_identical = replay("var_assign_replica_none_identical_tensors")(_replay_updates("none", _identical))


@differs("var_assign_replica_none_distinct", "components that would drift apart are an error")
def test_differing_values_without_an_aggregation_are_refused(golden, strategy):
    for run in runners(strategy):
        for op in UPDATES:
            v = _variable(strategy, golden.inputs["initial"], name="total")
            with pytest.raises(AggregationRequiredError, match=r"(?s)'total' .*aggregation=\"sum\".*on_read"):
                run(lambda: getattr(v, op)(_distinct(golden)))
            check(components(v), [golden.inputs["initial"]] * strategy.num_replicas)


@differs("var_assign_replica_shared_python_value", "a sum over the replicas of an equal value is N times the value")
def test_number_shared_by_all_replicas_is_summed_like_equal_arrays(golden, strategy):
    n, value = strategy.num_replicas, golden.inputs["value"]
    for aggregation in AGGREGATIONS:
        for op in UPDATES:
            v = _variable(strategy, golden.inputs["initial"], aggregation)
            strategy.run(lambda: getattr(v, op)(value))
            if aggregation == "SUM":
                expected = {"assign": n * value, "assign_add": 10.0 + n * value, "assign_sub": 10.0 - n * value}[op]
                check(_state(v), {"value": expected, "components": [expected] * n})
            else:
                golden.check(_state(v), aggregation, op)


@differs("var_assign_replica_shared_tensor_and_zero", "shared arrays are summed and 0 is a number like others")
def test_shared_array_is_summed_and_zero_is_a_number_like_others(golden, strategy):
    n, shared = strategy.num_replicas, jnp.array(golden.inputs["shared"])
    for aggregation in AGGREGATIONS:
        for value, expected in ((shared, 10.0 + 3.0 * (n if aggregation == "SUM" else 1)), (0.0, 10.0)):
            v = _variable(strategy, golden.inputs["initial"], aggregation)
            strategy.run(lambda: v.assign_add(value))
            check(_state(v), {"value": expected, "components": [expected] * n})


@replay("var_replica_sees_aggregated_update")
def test_replica_sees_its_aggregated_update(golden, strategy):
    v = _variable(strategy, golden.inputs["initial"], "sum")

    def fn():
        first = v.assign_add(_r() + 1.0).value
        return first, v.assign_add(10.0 * (_r() + 1.0)).value

    for run in runners(strategy):
        v.assign(golden.inputs["initial"])
        first, second = run(fn)
        golden.check({"read_1": each(strategy, first), "read_2": each(strategy, second), "value": v.value})


@replay("var_assign_from_variable")
def test_variable_assigned_from_a_variable(golden, strategy):
    a, b = _variable(strategy, golden.inputs["a"], "mean"), _variable(strategy, golden.inputs["b"])
    a.assign(b)
    first = {"a": components(a), "b": components(b)}
    strategy.run(lambda: a.assign_add(b * (_r() + 1.0)))
    return {"after_cross_assign": first, "after_replica_assign_add": {"a": components(a), "b": components(b)}}


@differs("var_assign_cross_per_replica_value", "a mirrored variable takes no per-replica value, a per-replica one does")
def test_per_replica_value_is_refused_by_a_mirrored_variable_and_taken_by_a_per_replica_one(golden, strategy):
    parts = per_replica(strategy, golden.inputs["per_replica"])
    mirrored, own = _variable(strategy, 0.0, name="total"), _on_read(strategy, 0.0, "mean")
    with pytest.raises(ReplicaDivergenceError, match=r"'total' is mirrored.*strategy.reduce"):
        mirrored.assign(parts)
    assert components(mirrored) == [0.0] * strategy.num_replicas
    own.assign(parts)
    check(_state(own), {"value": np.mean(golden.inputs["per_replica"]), "components": golden.inputs["per_replica"]})


@differs("var_int_and_bool_in_replica", "components that would drift apart are an error")
def test_integer_and_bool_variables_in_a_replica(golden, strategy):
    def updated(value, dtype, aggregation, op, update):
        v = _variable(strategy, value, aggregation, dtype=dtype)
        strategy.run(lambda: getattr(v, op)(update()))
        return {"dtype": v.dtype, "components": components(v)}

    summed = updated(10, "int32", "sum", "assign_add", lambda: _replica_id() + 1)
    golden.check(summed, "int32_sum_assign_add")
    flag = updated(False, "bool", "only_first_replica", "assign", lambda: _replica_id() == 0)
    golden.check(flag, "bool_first_assign")
    with jax.enable_x64(True):
        first = updated(10, "int64", "only_first_replica", "assign", lambda: _replica_id().astype("int64") + 5)
        golden.check(first, "int64_first_assign")
    with pytest.raises(AggregationRequiredError):
        updated(False, "bool", "none", "assign", lambda: _replica_id() == 0)
    with pytest.raises(AggregationRequiredError):
        updated(10, "int32", "none", "assign_sub", _replica_id)


@replay("var_assign_wrong_shape_in_replica")
def test_wrong_shape_in_a_replica_leaves_the_variable_alone(golden, strategy):
    out = {}
    for case, op, value in (("assign_vector3", "assign", [1.0, 2.0, 3.0]), ("assign_add_scalar", "assign_add", 1.0)):
        v = _variable(strategy, golden.inputs["initial"], "mean")
        error = attempt(lambda: strategy.run(lambda: getattr(v, op)(jnp.array(value))))
        out[case] = {"result": error, "components_after": components(v)}
    return out


# ---- per-replica variables -----------------------------------------------------------------------


def _on_read_steps(golden, strategy, aggregation, cross_read):
    """Updates of a per-replica variable in two runs; `cross_read` checks the three ways of reading it merged."""
    v = _on_read(strategy, golden.inputs["initial"], aggregation)

    def first():
        return v.assign_add(jnp.stack([_r() + 1.0, 10.0 * (_r() + 1.0)])).value

    def second():
        v.assign(v * (_r() + 2.0))
        return v.assign_sub(jnp.ones(2)) + 0.0

    golden.check(components(v), "initial_components")
    cross_read(lambda: v.value, "initial_cross_read")
    for step, fn in (("assign_add", first), ("assign_and_assign_sub", second)):
        golden.check(each(strategy, strategy.run(fn)), step, "read_in_replica")
        golden.check(components(v), step, "components")
        cross_read(lambda: v.value, step, "cross_read_value")
        cross_read(lambda: v + 0.0, step, "cross_implicit")
        cross_read(v.numpy, step, "cross_numpy")


def _replay_on_read(aggregation):
    def program(golden, strategy):
        _on_read_steps(golden, strategy, aggregation, lambda read, *path: golden.check(read(), *path))

    program.__name__ = f"test_per_replica_variable_merged_by_{aggregation}"
    return program


test_on_read_sum = replay("var_on_read_sum_replica_updates")(_replay_on_read("sum"))
test_on_read_mean = replay("var_on_read_mean_replica_updates")(_replay_on_read("mean"))
test_on_read_first = replay("var_on_read_only_first_replica_replica_updates")(_replay_on_read("only_first_replica"))


@differs("var_on_read_none_replica_updates", "one component needs no aggregation to be read")
def test_per_replica_variable_without_aggregation_has_no_merged_value(golden, strategy):
    def cross_read(read, *path):
        if strategy.num_replicas > 1:
            golden.check(attempt(read), *path)
        else:
            read()

    _on_read_steps(golden, strategy, "none", cross_read)


@differs("var_on_read_cross_assign", "an assignment that was carried out does not raise")
def test_per_replica_variable_assigned_in_cross_replica_context(golden, strategy):
    n, inputs = strategy.num_replicas, golden.inputs
    for aggregation in AGGREGATIONS:
        for op, updated in (("assign", 6.0), ("assign_add", 8.0), ("assign_sub", 5.0)):
            v = _on_read(strategy, inputs["initial"], aggregation)
            v.assign(inputs["assign"])
            result = attempt(getattr(v, op), inputs[op])
            failed = isinstance(result, AggregationRequiredError)
            expected = golden.expect[aggregation][op]
            if aggregation == "NONE":
                # Only what needs the merged value of several components is refused.
                assert failed == (op != "assign" and n > 1)
                check(components(v), [6.0 if failed else updated] * n)
            else:
                assert failed == ("error" in expected)
                check(v.value, expected["cross_read"])
                check(components(v), expected["components_now"])


@differs("var_on_read_int_sum_cross_assign", "a count reads back as it was assigned")
def test_integer_sum_is_split_without_losing_the_rest(golden, strategy):
    v = _on_read(strategy, golden.inputs["initial"], "sum")
    v.assign(golden.inputs["assign"])
    part, rest = divmod(golden.inputs["assign"], strategy.num_replicas)
    check(components(v), [part + rest] + [part] * (strategy.num_replicas - 1))
    check(v.value, golden.inputs["assign"])


@replay("var_used_outside_scope")
def test_variables_of_a_scope_are_used_after_it(golden, strategy):
    v, o = _variable(strategy, 1.0, "sum"), _on_read(strategy, 0.0, "sum")
    out = {"has_strategy_outside": px.get_strategy() is strategy}
    out["cross_assign_add"] = v.assign_add(2.0).value
    out["components_1"] = components(v)

    def fn():
        o.assign_add(_r() + 1.0)
        return v.assign_add(_r() + 1.0).value

    out["read_in_replica"] = each(strategy, strategy.run(fn))
    out.update(v=v.value, o=o.value, o_plus_zero=o + 0.0, o_components=components(o))
    o.assign(8.0)
    return {**out, "o_assign_outside_scope": components(o)}
