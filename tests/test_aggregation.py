"""How updates of variables merge: every row of the tables of frames and of aggregations, for 1, 2 and 4 replicas."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import phalanx as px
from phalanx.errors import AggregationRequiredError, AssignmentError, ReplicaDivergenceError, StrategyError

START = 1.0
OPS = {"assign": lambda old, x: x, "assign_add": lambda old, x: old + x, "assign_sub": lambda old, x: old - x}
MERGES = {"sum": sum, "mean": np.mean, "only_first_replica": lambda parts: parts[0]}


@pytest.fixture(params=["eager_run", "in_function"])
def call(request):
    """Ways of calling something that contains strategy.run."""
    return (lambda fn: fn()) if request.param == "eager_run" else (lambda fn: px.function(fn)())


def components(variable: px.Variable) -> list[float]:
    return [float(c) for c in variable.components]


def replica_id():
    return px.get_replica_context().replica_id


def mirrored(strategy, aggregation, dtype="float32", **options):
    with strategy.scope():
        return px.Variable(int(START), name="v", dtype=dtype, aggregation=aggregation, **options)


def per_replica(strategy, aggregation, value=START, dtype="float32"):
    with strategy.scope():
        return px.Variable(value, name="v", dtype=dtype, synchronization="on_read", aggregation=aggregation)


# ---- mirrored variables, assigned in a replica ---------------------------------------------------


def test_values_that_vary_are_merged_by_the_aggregation(strategy, call):
    table = {(op, aggregation): mirrored(strategy, aggregation) for op in OPS for aggregation in MERGES}

    def fn():
        for (op, _), v in table.items():
            getattr(v, op)(3.0 + 2.0 * replica_id())

    call(lambda: strategy.run(fn))
    parts = [3.0 + 2.0 * i for i in range(strategy.num_replicas)]
    for (op, aggregation), v in table.items():
        assert components(v) == [OPS[op](START, MERGES[aggregation](parts))] * strategy.num_replicas, (op, aggregation)


def test_values_that_vary_need_an_aggregation(strategy, call):
    v = mirrored(strategy, "none")
    for op in OPS:
        with pytest.raises(AggregationRequiredError, match="'v' is mirrored"):
            call(lambda: strategy.run(lambda: getattr(v, op)(1.0 * replica_id())))
    assert components(v) == [START] * strategy.num_replicas


def test_values_that_are_equal_are_assigned_but_a_sum_counts_each_replica(strategy, call):
    n = strategy.num_replicas
    kinds = {"number": 5.0, "numpy": np.float32(5.0), "array": jnp.float32(5.0), "read": None}
    cases = [(op, aggregation, kind) for op in OPS for aggregation in ("none", *MERGES) for kind in kinds]
    table = {case: mirrored(strategy, case[1]) for case in cases}

    def fn():
        for (op, _, kind), v in table.items():
            getattr(v, op)(v.value + 4.0 if kind == "read" else kinds[kind])

    call(lambda: strategy.run(fn))
    for (op, aggregation, kind), v in table.items():
        total = 5.0 * (n if aggregation == "sum" else 1)
        assert components(v) == [OPS[op](START, total)] * n, (op, aggregation, kind)


def test_zero_is_a_number_like_others_under_sum_and_mean(strategy, call):
    for aggregation in ("sum", "mean"):
        v = mirrored(strategy, aggregation)
        call(lambda: strategy.run(lambda: v.assign(0)))
        assert components(v) == [0.0] * strategy.num_replicas


def test_integers_are_summed_and_broadcast(strategy, call):
    total, first = mirrored(strategy, "sum", "int32"), mirrored(strategy, "only_first_replica", "int32")

    def fn():
        total.assign(replica_id() + 7)
        first.assign(replica_id() + 7)

    call(lambda: strategy.run(fn))
    assert components(total) == [sum(range(7, 7 + strategy.num_replicas))] * strategy.num_replicas
    assert components(first) == [7] * strategy.num_replicas
    assert total.dtype == first.dtype == jnp.int32


def test_a_bool_is_taken_from_the_first_replica(strategy, call):
    with strategy.scope():
        flag = px.Variable(False, aggregation="only_first_replica")
    call(lambda: strategy.run(lambda: flag.assign(replica_id() == 0)))
    assert [bool(c.value) for c in flag.components] == [True] * strategy.num_replicas


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "complex64"])
def test_merged_values_keep_the_dtype(strategy, dtype):
    for aggregation in ("sum", "mean", "only_first_replica"):
        v = mirrored(strategy, aggregation, dtype)
        strategy.run(lambda: v.assign_add(jnp.ones((), dtype) * replica_id().astype(dtype)))
        assert v.dtype == v.value.dtype == jnp.dtype(dtype)


def test_the_new_value_is_seen_by_later_lines_of_the_replica(strategy, call):
    v = mirrored(strategy, "sum")

    def fn():
        before = v.value
        v.assign_add(1.0)
        between = v.value
        v.assign(between * 2.0 + replica_id())
        return before, between, v.value

    n = strategy.num_replicas
    before, between, after = call(lambda: strategy.run(fn))
    expected = sum((START + n) * 2.0 + i for i in range(n))
    assert (float(before), float(between), float(after)) == (START, START + n, expected)
    assert components(v) == [expected] * n


def test_merged_updates_reach_nested_functions_and_branches(strategy, call):
    v, w = mirrored(strategy, "sum"), mirrored(strategy, "mean")

    @px.function
    def inner(x):
        v.assign_add(x)
        px.cond(v.value > -1.0, lambda: w.assign_add(x).value, lambda: w.value)

    call(lambda: strategy.run(lambda: inner(1.0 * replica_id())))
    ids = range(strategy.num_replicas)
    assert components(v) == [START + sum(ids)] * strategy.num_replicas
    assert components(w) == [START + float(np.mean(ids))] * strategy.num_replicas


# ---- per-replica variables -----------------------------------------------------------------------


def test_a_replica_updates_its_own_component(strategy, call):
    table = {(op, a): per_replica(strategy, a) for op in OPS for a in ("none", *MERGES)}

    def fn():
        return [getattr(v, op)(10.0 * replica_id()).value for (op, _), v in table.items()]

    for ((op, aggregation), v), seen in zip(table.items(), call(lambda: strategy.run(fn))):
        expected = [OPS[op](START, 10.0 * i) for i in range(strategy.num_replicas)]
        assert components(v) == [float(x) for x in seen.values] == expected, (op, aggregation)


def test_outside_a_replica_the_components_are_merged(strategy, call):
    table = {aggregation: per_replica(strategy, aggregation) for aggregation in MERGES}
    parts = [3.0 + 2.0 * i for i in range(strategy.num_replicas)]
    strategy.run(lambda: [v.assign(3.0 + 2.0 * replica_id()) for v in table.values()])
    expected = {aggregation: merge(parts) for aggregation, merge in MERGES.items()}
    assert call(lambda: {a: v.value for a, v in table.items()}) == expected
    with strategy.scope():
        assert call(lambda: {a: v.value for a, v in table.items()}) == expected


def test_components_without_an_aggregation_have_no_single_value(strategy, call):
    v = per_replica(strategy, "none")
    if strategy.num_replicas == 1:
        assert float(call(lambda: v.value)) == START
        return
    with pytest.raises(
        AggregationRequiredError, match=f"'v' has {strategy.num_replicas} components and no aggregation"
    ):
        call(lambda: v.value)
    assert components(v) == [START] * strategy.num_replicas


def test_every_component_starts_with_the_initial_value(strategy):
    for aggregation in ("none", "sum", "mean", "only_first_replica"):
        assert components(per_replica(strategy, aggregation, 3.0)) == [3.0] * strategy.num_replicas


def test_a_total_assigned_outside_is_shared_out(strategy, call):
    v = per_replica(strategy, "sum")
    call(lambda: v.assign(6.0))
    assert components(v) == [6.0 / strategy.num_replicas] * strategy.num_replicas
    assert float(v) == 6.0


def test_a_value_assigned_outside_goes_to_all_components(strategy, call):
    table = [per_replica(strategy, aggregation) for aggregation in ("none", "mean", "only_first_replica")]

    def assign():
        for v in table:
            v.assign(6.0)

    call(assign)
    assert [components(v) for v in table] == [[6.0] * strategy.num_replicas] * 3


def test_adding_to_a_sum_outside_a_replica_is_ambiguous(strategy, call):
    v = per_replica(strategy, "sum")
    for update in (v.assign_add, v.assign_sub):
        with pytest.raises(AggregationRequiredError, match=r"v\.assign\(v\.value \+ x\)|assign\(v\.value"):
            call(lambda: update(1.0))
    assert components(v) == [START] * strategy.num_replicas


def test_adding_to_a_mean_outside_a_replica_adds_to_the_merged_value(strategy, call):
    for aggregation in ("mean", "only_first_replica"):
        v = per_replica(strategy, aggregation)
        strategy.run(lambda: v.assign(1.0 * replica_id()))
        before = float(v)
        call(lambda: v.assign_add(2.0))
        assert components(v) == [before + 2.0] * strategy.num_replicas


# ---- mirrored variables, outside replicas and in merge functions ---------------------------------


def test_outside_a_replica_all_components_are_assigned_at_once(strategy, call):
    table = {(op, aggregation): mirrored(strategy, aggregation) for op in OPS for aggregation in ("none", *MERGES)}

    def twice():
        for (op, _), v in table.items():
            getattr(getattr(v, op)(2.0), op)(3.0)

    with strategy.scope():
        call(twice)
    call(twice)
    for (op, aggregation), v in table.items():
        expected = START
        for x in (2.0, 3.0, 2.0, 3.0):
            expected = OPS[op](expected, x)
        assert components(v) == [expected] * strategy.num_replicas, (op, aggregation)


def test_a_merge_function_reads_and_writes_as_outside(strategy, call):
    w = mirrored(strategy, "none")
    sums, means = per_replica(strategy, "sum"), per_replica(strategy, "mean")

    def merge(s, x):
        assert s is strategy
        assert px.in_cross_replica_context()
        assert px.get_replica_context() is None
        w.assign_add(s.reduce("sum", x))
        sums.assign(sums.value + 1.0)
        means.assign_add(10.0)
        return sums.value, means.value

    def fn():
        x = 1.0 * replica_id()
        sums.assign(x)
        means.assign(x)
        return px.get_replica_context().merge_call(merge, args=(x,))

    n = strategy.num_replicas
    total, mean = call(lambda: strategy.run(fn))
    ids = list(range(n))
    assert components(w) == [START + sum(ids)] * n
    assert components(sums) == [(sum(ids) + 1.0) / n] * n
    assert components(means) == [np.mean(ids) + 10.0] * n
    assert (float(total), float(mean)) == (sum(ids) + 1.0, np.mean(ids) + 10.0)


def test_a_merge_function_may_not_make_components_differ(strategy, call):
    v = mirrored(strategy, "sum")

    def fn():
        px.get_replica_context().merge_call(lambda s, x: v.assign(x), args=(1.0 * replica_id(),))

    with pytest.raises(ReplicaDivergenceError, match="'v' is mirrored: all replicas must hold the same value"):
        call(lambda: strategy.run(fn))
    assert components(v) == [START] * strategy.num_replicas


def test_parts_assigned_outside_fit_per_replica_variables_only(strategy, call):
    parts = strategy.distribute_values_from_function(lambda c: np.float32(c.replica_id))
    own, shared = per_replica(strategy, "none"), mirrored(strategy, "mean")
    call(lambda: own.assign_add(parts) is own)
    assert components(own) == [START + i for i in range(strategy.num_replicas)]
    with pytest.raises(ReplicaDivergenceError, match="strategy.reduce"):
        call(lambda: shared.assign(parts))
    wrong = strategy.distribute_values_from_function(lambda c: np.ones(2, np.float32))
    with pytest.raises(AssignmentError, match=r"shape \(\)"):
        call(lambda: own.assign(wrong))
    assert components(shared) == [START] * strategy.num_replicas


# ---- the frames ----------------------------------------------------------------------------------


def test_what_a_read_gives_in_each_frame(strategy):
    w, own = mirrored(strategy, "none"), per_replica(strategy, "mean")
    strategy.run(lambda: own.assign(1.0 * replica_id()))
    mean = float(np.mean(range(strategy.num_replicas)))
    values = {
        "eager": (w.value, own.value),
        "function": px.function(lambda: (w.value, own.value))(),
        "merge": strategy.run(lambda: px.get_replica_context().merge_call(lambda s: (w.value, own.value))),
    }
    for shared, merged in values.values():
        assert isinstance(shared, jax.Array)
        assert (float(shared), float(merged)) == (START, mean)
    shared, parts = strategy.run(lambda: (w.value, own.value))
    assert isinstance(shared, jax.Array), "a mirrored variable is the same on every replica"
    assert isinstance(parts, px.PerReplica), "a per-replica variable is not"
    assert [float(x) for x in parts.values] == list(range(strategy.num_replicas))


def test_a_function_captures_variables_instead_of_their_values(strategy):
    w, own = mirrored(strategy, "none"), per_replica(strategy, "sum")
    read = px.function(lambda: (w.value, own.value))
    first = read()
    w.assign(5.0)
    own.assign(8.0)
    second = read()
    assert [float(x) for x in first] == [START, START * strategy.num_replicas]
    assert [float(x) for x in second] == [5.0, 8.0]
    assert read.trace_count == 1


def test_a_replica_sees_its_component_only(strategy, call):
    v = mirrored(strategy, "none")
    with pytest.raises(StrategyError, match=r"in a replica read `v\.value`"):
        call(lambda: strategy.run(lambda: v.components))


def test_a_step_that_fails_leaves_every_component_as_it_was(strategy, call):
    v, own = mirrored(strategy, "sum"), per_replica(strategy, "none")

    def fn():
        v.assign_add(1.0)
        own.assign(1.0 * replica_id())
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        call(lambda: strategy.run(fn))
    assert components(v) == components(own) == [START] * strategy.num_replicas
