"""Strategies: run, reduce, gather, local_results, update, contexts, adoption, and what they refuse."""

from __future__ import annotations

import logging

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import phalanx as px
from phalanx.distribute import in_effect
from phalanx.errors import (
    ArgumentError,
    ArgumentTypeError,
    DeviceError,
    ReplicaDivergenceError,
    StrategyError,
    TracingError,
)


@pytest.fixture
def two():
    return px.Mirrored(jax.devices()[:2])


@pytest.fixture(params=["eager_run", "in_function"])
def call(request):
    return (lambda fn: fn()) if request.param == "eager_run" else (lambda fn: px.function(fn)())


def replica_id():
    return px.get_replica_context().replica_id


def ids(strategy):
    return strategy.distribute_values_from_function(lambda context: np.float32(context.replica_id))


# ---- run -----------------------------------------------------------------------------------------


def test_each_replica_gets_its_own_part_of_per_replica_arguments(strategy, call):
    parts = ids(strategy)

    def fn(x, *, tree, factor):
        return x + tree["a"] * factor

    out = call(lambda: strategy.run(fn, args=(parts,), kwargs={"tree": {"a": parts}, "factor": 10.0}))
    assert [float(x) for x in out.values] == [11.0 * i for i in range(strategy.num_replicas)]


def test_results_are_plain_where_they_are_the_same_and_per_replica_where_they_may_differ(strategy, call):
    def fn(x):
        context = px.get_replica_context()
        return {
            "own": context.replica_id,
            "reduced": context.all_reduce("sum", x),
            "number": 3,
            "text": "abc",
            "none": None,
            "flag": True,
            "constant": jnp.arange(2.0),
            "nested": (x, [1.5]),
        }

    out = call(lambda: strategy.run(fn, args=(ids(strategy),)))
    n = strategy.num_replicas
    assert {k: type(v).__name__ for k, v in out.items() if k in ("own", "reduced", "number", "constant")} == {
        "own": "PerReplica", "reduced": "ArrayImpl", "number": "ArrayImpl", "constant": "ArrayImpl",
    }  # fmt: skip
    assert (out["text"], out["none"], out["flag"], float(out["nested"][1][0])) == ("abc", None, True, 1.5)
    assert [int(i) for i in out["own"].values] == list(range(n))
    assert float(out["reduced"]) == sum(range(n))
    assert [x.devices() for x in out["own"].values] == [{d} for d in strategy.devices]


def test_the_function_is_traced_once_whatever_the_number_of_replicas(strategy):
    bodies = []

    @px.function
    def step(x):
        return strategy.run(lambda x: bodies.append(1) or x + replica_id(), args=(x,))

    for _ in range(3):
        step(1.0)
    assert (len(bodies), step.trace_count) == (1, 1)


def test_an_eager_run_of_a_function_defined_in_the_loop_compiles_once(strategy):
    with strategy.scope():
        v = px.Variable(0.0, aggregation="sum")
    scale, bodies = 2.0, []

    for _ in range(4):

        def step(x, k=1.0):
            bodies.append(1)
            v.assign_add(x * scale * k)
            return v.value

        strategy.run(step, args=(1.0,))
    assert len(bodies) == 1
    assert float(v) == 4 * scale * strategy.num_replicas


def test_an_eager_run_is_compiled_anew_for_what_changes_the_program(two):
    bodies = []

    def make(scale, default):
        def step(x, k=default):
            bodies.append(1)
            return x * scale * k

        return step

    for scale, default, x in [
        (1.0, 1.0, 1.0),
        (2.0, 1.0, 1.0),
        (2.0, 3.0, 1.0),
        (2.0, 3.0, jnp.ones(2)),
        (1.0, 1.0, 1.0),
    ]:
        assert np.all(np.asarray(two.run(make(scale, default), args=(x,))) == scale * default)
    assert len(bodies) == 4


def test_a_list_in_a_cell_is_seen_as_it_is_when_the_program_was_traced_but_another_list_is_another_program(two):
    def make(values):
        return lambda: values[0] + 0.0 * replica_id()

    first = [1.0]
    assert float(two.run(make(first)).values[0]) == 1.0
    assert float(two.run(make([2.0])).values[0]) == 2.0


def test_several_runs_in_one_function_are_one_program(strategy):
    with strategy.scope():
        v = px.Variable(1.0, aggregation="mean")

    @px.function
    def step(x):
        strategy.run(lambda x: v.assign_add(x), args=(x,))
        first = v.value
        strategy.run(lambda: v.assign(v.value * 2.0 + replica_id()))
        return first, v.value

    first, second = step(ids(strategy))
    mean = np.mean(range(strategy.num_replicas))
    assert (float(first), float(second)) == (1.0 + mean, 2.0 * (1.0 + mean) + mean)


def test_arguments_that_are_no_arrays_reach_the_function_as_they_are(two):
    marker = object()
    seen = []
    two.run(lambda *xs: seen.extend(xs), args=("text", None, True, marker, px.Variable))
    assert seen == ["text", None, True, marker, px.Variable]


def test_a_variable_can_be_an_argument(strategy, call):
    with strategy.scope():
        v = px.Variable(2.0, aggregation="sum")

    def fn(variable, x):
        assert isinstance(variable, px.Variable)
        variable.assign_add(x)

    call(lambda: strategy.run(fn, args=(v, 1.0)))
    assert float(v) == 2.0 + strategy.num_replicas


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda s: s.run(3), "strategy.run takes a function, got int 3"),
        (lambda s: s.run(lambda x: x, args=3.0), r"args must be a tuple, got float; write args=\(x,\)"),
        (lambda s: s.run(lambda x: x, args=jnp.ones(2)), "args must be a tuple"),
        (lambda s: s.run(lambda x: x, args="ab"), "args must be a tuple, got str"),
        (lambda s: s.run(lambda x: x, kwargs=[1]), "kwargs must be a dict, got list"),
        (lambda s: s.run(lambda x: x, kwargs={1: 2}), r"keys of kwargs must be names of parameters, got \[1\]"),
        (lambda s: s.run(lambda x: x), r"the function is <lambda>\(x\).*missing a required argument: 'x'"),
        (lambda s: s.run(lambda x: x, args=(1, 2)), "too many positional arguments"),
        (lambda s: s.run(lambda x: x, args=(1,), kwargs={"y": 2}), "unexpected keyword argument 'y'"),
        (lambda s: s.run(lambda x: x, args=(np.array(["a"]),)), r"argument 'args'\[0\] is not numeric"),
        (lambda s: s.run(lambda x: x, args=({"a": np.array([None])},)), r"argument 'args'\[0\]\['a'\] is not numeric"),
    ],
)
def test_a_wrong_call_is_explained(two, call, words):
    with pytest.raises(ArgumentTypeError, match=words):
        call(two)


# ---- reduce, gather, local_results ---------------------------------------------------------------


def test_reduce_merges_the_parts(strategy, call):
    n = strategy.num_replicas
    rows = strategy.distribute_values_from_function(lambda c: np.arange(3, dtype=np.float32) + 10 * c.replica_id)
    stacked = np.stack([np.arange(3) + 10 * i for i in range(n)]).astype(np.float32)
    cases = [(op, axis) for op in ("sum", "mean") for axis in (None, 0, -1)]
    for (op, axis), value in zip(cases, call(lambda: [strategy.reduce(op, rows, axis) for op, axis in cases])):
        expected = getattr(stacked, op)(0 if axis is None else (0, 1))
        np.testing.assert_allclose(value, expected, rtol=1e-6, err_msg=f"{op} {axis}")


def test_what_is_not_per_replica_counts_once_for_each_replica(strategy):
    n = strategy.num_replicas
    with strategy.scope():
        v = px.Variable(2.0)
        own = px.Variable(3.0, synchronization="on_read")
    assert float(strategy.reduce("sum", v)) == 2.0 * n
    assert float(strategy.reduce("mean", v)) == 2.0
    assert float(strategy.reduce("sum", 0)) == 0.0
    assert float(strategy.reduce("sum", own)) == 3.0 * n
    assert strategy.reduce("sum", np.ones(2, np.float32)).tolist() == [n, n]


def test_reduce_keeps_sums_of_integers_whole_and_makes_their_mean_a_float(strategy):
    n = strategy.num_replicas
    whole = strategy.distribute_values_from_function(lambda c: np.int32(c.replica_id))
    flags = strategy.distribute_values_from_function(lambda c: np.bool_(True))
    assert (strategy.reduce("sum", whole).dtype, int(strategy.reduce("sum", whole))) == (jnp.int32, sum(range(n)))
    assert float(strategy.reduce("mean", whole)) == np.mean(range(n))
    assert int(strategy.reduce("sum", flags)) == n, "bools are counted"


def test_reduce_and_gather_go_through_pytrees(strategy):
    parts = strategy.distribute_values_from_function(
        lambda c: {"a": np.ones(2, np.float32), "b": np.zeros((1, 2), np.float32)}
    )
    n = strategy.num_replicas
    assert jax.tree.map(np.shape, strategy.reduce("sum", parts)) == {"a": (2,), "b": (1, 2)}
    assert jax.tree.map(np.shape, strategy.gather(parts, axis=0)) == {"a": (2 * n,), "b": (n, 2)}


def test_gather_puts_the_parts_side_by_side(strategy, call):
    n = strategy.num_replicas
    parts = strategy.distribute_values_from_function(lambda c: np.array([[c.replica_id, 10 + c.replica_id]], np.int32))
    rows, columns, last = call(lambda: tuple(strategy.gather(parts, axis) for axis in (0, 1, -1)))
    assert rows.tolist() == [[i, 10 + i] for i in range(n)]
    assert columns.tolist() == last.tolist() == [[x for i in range(n) for x in (i, 10 + i)]]
    assert strategy.gather(jnp.ones(3), 0).shape == (3,), "what is not per replica is there already"


def test_local_results_are_in_replica_order(strategy):
    n = strategy.num_replicas
    parts = ids(strategy)
    with strategy.scope():
        v = px.Variable(2.0)
    assert [float(x) for x in strategy.local_results(parts)] == list(range(n))
    assert [float(x) for x in strategy.local_results(v)] == [2.0] * n
    assert strategy.local_results(3.0) == (3.0,)
    assert strategy.local_results("text") == ("text",)
    trees = strategy.local_results({"a": parts, "b": 1})
    assert [(float(t["a"]), t["b"]) for t in trees] == [(i, 1) for i in range(n)]


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda s, p: s.reduce("max", p), "op must be 'sum' or 'mean', got 'max'"),
        (lambda s, p: s.reduce(None, p), "op must be 'sum' or 'mean', got None"),
        (lambda s, p: s.reduce("sum", p, axis=1), "there is no axis 1 in a value with 1 axes"),
        (lambda s, p: s.reduce("sum", p, axis="rows"), "axis must be a Python int, got 'rows'"),
        (lambda s, p: s.reduce("sum", p, axis=True), "axis must be a Python int, got True"),
        (lambda s, p: s.reduce("sum", "text"), "reduce takes arrays and numbers, got str 'text'"),
        (lambda s, p: s.gather(p, 5), "there is no axis 5"),
        (lambda s, p: s.gather(s.run(lambda: replica_id())), r"scalars have none\. Use value\[None\]"),
        (lambda s, p: s.gather(p, 0.0), "axis must be a Python int"),
    ],
)
def test_wrong_reductions_are_explained(two, call, words):
    parts = two.distribute_values_from_function(lambda c: np.ones(2, np.float32))
    with pytest.raises((ArgumentError, ArgumentTypeError), match=words):
        call(two, parts)


# ---- variables -----------------------------------------------------------------------------------


def test_the_container_owns_the_components(strategy):
    with strategy.scope():
        v = px.Variable(1.0)
    assert all(strategy.container_of(c) is v for c in v.components)
    assert strategy.container_of(v) is v
    with pytest.raises(ArgumentTypeError, match="container_of takes a component of a variable, got float"):
        strategy.container_of(1.0)


def test_update_changes_all_components_at_once(strategy, call):
    with strategy.scope():
        v = px.Variable(1.0, name="v")

    def update():
        return strategy.update(
            v, lambda variable, x, scale: variable.assign_add(x * scale).value, args=(2.0,), kwargs={"scale": 3.0}
        )

    assert float(call(update)) == 7.0
    assert [float(c) for c in v.components] == [7.0] * strategy.num_replicas


def test_update_refuses_what_would_make_components_differ(strategy):
    with strategy.scope():
        v = px.Variable(1.0, name="v")
    with pytest.raises(ReplicaDivergenceError, match="'v' is mirrored.*update was given an argument that differs"):
        strategy.update(v, lambda variable, x: variable.assign(x), args=(ids(strategy),))

    def fn():
        px.get_strategy().update(v, lambda variable, x: variable.assign(x), args=(1.0 * replica_id(),))

    with pytest.raises(ReplicaDivergenceError, match="'v' is mirrored"):
        strategy.run(fn)
    with pytest.raises(ArgumentTypeError, match="update takes a variable, got float"):
        strategy.update(1.0, lambda v: None)
    with pytest.raises(ArgumentTypeError, match="update takes a function, got int"):
        strategy.update(v, 3)
    assert float(v) == 1.0


def test_update_in_a_merge_function_applies_reduced_values(strategy):
    with strategy.scope():
        v = px.Variable(1.0)

    def merge(s, x):
        s.update(v, lambda variable, total: variable.assign_add(total), args=(s.reduce("sum", x),))

    strategy.run(lambda: px.get_replica_context().merge_call(merge, args=(1.0 * replica_id(),)))
    assert float(v) == 1.0 + sum(range(strategy.num_replicas))


# ---- values made for each replica ----------------------------------------------------------------


def test_values_are_made_for_each_replica_on_its_device(strategy):
    contexts = []
    parts = strategy.distribute_values_from_function(
        lambda context: contexts.append(context) or {"x": np.full(2, context.replica_id, np.float32)}
    )
    n = strategy.num_replicas
    assert [(c.replica_id, c.num_replicas) for c in contexts] == [(i, n) for i in range(n)]
    assert [x.tolist() for x in parts["x"].values] == [[i, i] for i in range(n)]
    assert [x.devices() for x in parts["x"].values] == [{d} for d in strategy.devices]


def test_values_of_different_kinds_are_refused(two):
    for make, words in [
        (lambda c: np.ones(c.replica_id + 1), "need the same shape and dtype"),
        (lambda c: np.ones(2, [np.float32, np.int32][c.replica_id]), "need the same shape and dtype"),
        (lambda c: {"a": 1.0} if c.replica_id else [1.0], "replica 1 gave"),
        (lambda c: "text", "takes arrays and numbers, got str 'text'"),
    ]:
        with pytest.raises((ArgumentError, ArgumentTypeError), match=words):
            two.distribute_values_from_function(make)
    with pytest.raises(ArgumentTypeError, match="takes a function"):
        two.distribute_values_from_function(3)


def test_values_can_be_made_in_a_traced_function(strategy):
    @px.function
    def step(x):
        parts = strategy.distribute_values_from_function(lambda c: x * c.replica_id)
        return strategy.run(lambda p: p + 1.0, args=(parts,))

    assert [float(x) for x in step(2.0).values] == [2.0 * i + 1.0 for i in range(strategy.num_replicas)]


def test_a_per_replica_value_shows_its_parts(two):
    parts = ids(two)
    assert repr(parts) == "PerReplica(x2, shape=(), dtype=float32, values=[0. 1.])"
    assert (len(parts), parts.shape, parts.dtype, [float(x) for x in parts]) == (2, (), jnp.float32, [0.0, 1.0])
    seen = []
    px.function(lambda p: seen.append(repr(p)))(parts)
    assert seen == ["PerReplica(x2, shape=(), dtype=float32)"]


def test_a_per_replica_value_is_no_array(two):
    parts = ids(two)
    for use in (
        lambda: parts + 1, lambda: 1 + parts, lambda: jnp.sum(parts), lambda: np.asarray(parts), lambda: float(parts),
        lambda: bool(parts), lambda: parts[0], lambda: parts < 1, lambda: -parts, lambda: jnp.asarray(parts),
        lambda: two.run(lambda: parts * 2.0), lambda: two.run(lambda: jnp.exp(parts)),
    ):  # fmt: skip
        with pytest.raises(ArgumentTypeError, match=r"holds one value per replica.*strategy\.reduce.*strategy\.gather"):
            use()
    with pytest.raises(StrategyError, match="Pass it to strategy.run as an argument"):
        two.run(lambda: parts.values[0] + 1.0)


# ---- contexts ------------------------------------------------------------------------------------


def test_contexts_say_where_we_are(strategy):
    def place():
        context = px.get_replica_context()
        return (context and (context.strategy, context.num_replicas), px.get_strategy(), px.in_cross_replica_context())

    seen = {}
    seen["outside"] = place()
    with strategy.scope():
        seen["scope"] = place()

    def fn():
        seen["replica"] = place()
        px.get_replica_context().merge_call(lambda s: seen.update(merge=place()))
        seen["replica again"] = place()

    strategy.run(fn)
    seen["after"] = place()
    px.function(lambda: seen.update(function=place()))()
    n, default = strategy.num_replicas, px.get_strategy()
    inside = ((strategy, n), strategy, False)
    assert seen["replica"] == seen["replica again"] == inside
    assert seen["scope"] == seen["merge"] == (None, strategy, True)
    assert seen["outside"] == seen["after"] == seen["function"] == ((default, 1), default, False)
    assert default is not strategy
    assert default.num_replicas == 1


def test_the_default_context_works_as_one_replica():
    context = px.get_replica_context()
    assert (int(context.replica_id), context.num_replicas) == (0, 1)
    assert float(context.all_reduce("sum", 3.0)) == 3.0
    assert context.all_gather(jnp.ones(2), 0).shape == (2,)
    assert float(context.broadcast(2.0)) == 2.0
    assert context.merge_call(lambda s, x: (s is px.get_strategy(), x), args=(1.0,)) == (True, 1.0)
    v = px.Variable(1.0, aggregation="sum")
    v.assign_add(1.0)
    assert float(v) == 2.0


def test_replicas_meet_by_reducing_gathering_and_broadcasting(strategy, call):
    n = strategy.num_replicas

    def fn():
        context = px.get_replica_context()
        mine = context.replica_id * jnp.ones((1, 2), jnp.float32)
        return {
            "sum": context.all_reduce("sum", {"a": mine, "b": 1.0}),
            "mean": context.all_reduce("MEAN", mine),
            "rows": context.all_gather(mine),
            "columns": context.all_gather(mine, axis=-1),
            "first": context.broadcast(mine + 5.0),
            "last": context.broadcast(context.replica_id == n - 1, n - 1),
        }

    out = call(lambda: strategy.run(fn))
    total = float(sum(range(n)))
    assert all(isinstance(x, jax.Array) for x in jax.tree.leaves(out)), "what all replicas got is one value"
    assert out["sum"]["a"].tolist() == [[total, total]]
    assert float(out["sum"]["b"]) == n, "a sum over replicas is a sum"
    assert out["mean"].tolist() == [[total / n] * 2]
    assert out["rows"].tolist() == [[i, i] for i in range(n)]
    assert out["columns"].tolist() == [[x for i in range(n) for x in (i, i)]]
    assert out["first"].tolist() == [[5.0, 5.0]]
    assert bool(out["last"]) is True


def test_random_keys_are_broadcast_and_gathered(two):
    def fn():
        context = px.get_replica_context()
        own = jax.random.fold_in(jax.random.key(0), context.replica_id)
        return context.broadcast(own, 1), context.all_gather(own[None])

    first, all_keys = two.run(fn)
    keys = [jax.random.fold_in(jax.random.key(0), i) for i in range(2)]
    assert jax.random.key_data(first).tolist() == jax.random.key_data(keys[1]).tolist()
    assert jax.random.key_data(all_keys).tolist() == [jax.random.key_data(k).tolist() for k in keys]


def test_a_merge_function_is_called_once_with_per_replica_values(strategy, call):
    seen = []

    def merge(s, own, shared, *, word):
        seen.append(
            (type(own).__name__, type(shared).__name__, word, len(own), [x.shape for x in s.local_results(own)])
        )
        doubled = s.reduce("sum", own)
        assert [x.shape for x in own.values] == [()] * s.num_replicas
        return own, doubled, shared

    def fn():
        own, total, shared = px.get_replica_context().merge_call(
            merge, args=(1.0 * replica_id(), 4.0), kwargs={"word": "w"}
        )
        return own + 1.0, total, shared

    own, total, shared = call(lambda: strategy.run(fn))
    n = strategy.num_replicas
    assert seen == [("PerReplica", "float", "w", n, [()] * n)]
    assert [float(x) for x in own.values] == [i + 1.0 for i in range(n)]
    assert (float(total), float(shared)) == (sum(range(n)), 4.0)


@pytest.mark.parametrize(
    ("use", "words"),
    [
        (lambda s: s.run(lambda: 1), r"strategy\.run was called in a replica"),
        (lambda s: s.reduce("sum", 1.0), r"px\.get_replica_context\(\)\.all_reduce"),
        (lambda s: s.gather(jnp.ones(1), 0), r"px\.get_replica_context\(\)\.all_gather"),
        (lambda s: s.scope().__enter__(), "cannot be entered in a replica"),
        (lambda s: px.get_replica_context().merge_call(lambda s: s.run(lambda: 1)), "part of a run already"),
        (lambda s: px.get_replica_context().merge_call(lambda s: px.self_check(lambda x: x, [])), "."),
    ],
)
def test_what_belongs_outside_is_refused_in_a_replica(two, use, words):
    with pytest.raises((StrategyError, ArgumentError), match=words):
        two.run(lambda: use(two))


@pytest.mark.parametrize(
    "use",
    [
        lambda context: context.all_reduce("sum", 1.0),
        lambda context: context.all_gather(jnp.ones(1)),
        lambda context: context.broadcast(1.0),
        lambda context: context.merge_call(lambda s: None),
    ],
)
def test_what_belongs_in_a_replica_is_refused_outside(two, use):
    kept = []
    two.run(lambda: kept.append(px.get_replica_context()))
    with two.scope(), pytest.raises(StrategyError, match="must be called in a replica"):
        use(kept[0])
    with pytest.raises(StrategyError, match="must be called in a replica"):
        two.run(lambda: px.get_replica_context().merge_call(lambda s: use(kept[0])))


@pytest.mark.parametrize(
    ("use", "words"),
    [
        (lambda c: c.all_reduce("max", 1.0), "op must be 'sum' or 'mean', got 'max'"),
        (lambda c: c.all_reduce("sum", "text"), "all_reduce takes arrays and numbers, got str 'text'"),
        (lambda c: c.all_reduce("sum", {"a": object()}), "all_reduce takes arrays and numbers, got object"),
        (lambda c: c.all_gather(1.0), "scalars have none"),
        (lambda c: c.all_gather(jnp.ones(2), 1), "there is no axis 1"),
        (lambda c: c.broadcast(1.0, 2), r"replica_id must be 0 \.\. 1, got 2"),
        (lambda c: c.broadcast(1.0, c.replica_id), r"replica_id must be 0 \.\. 1"),
        (lambda c: c.broadcast(1.0, True), r"replica_id must be 0 \.\. 1, got True"),
        (lambda c: c.merge_call(3), "merge_call takes a function, got int"),
        (lambda c: c.all_reduce("sum", jax.random.key(0)), "all_reduce cannot add random keys"),
        (lambda c: c.merge_call(lambda s: s.reduce("sum", jax.random.key(0))), "reduce cannot add random keys"),
    ],
)
def test_wrong_calls_in_a_replica_are_explained(two, use, words):
    with pytest.raises((ArgumentError, ArgumentTypeError), match=words):
        two.run(lambda: use(px.get_replica_context()))


# ---- scopes and other strategies -----------------------------------------------------------------


def test_scopes_of_two_strategies_do_not_mix(two):
    other = px.Mirrored(jax.devices()[2:4])
    with two.scope():
        with two.scope():
            assert px.get_strategy() is two, "its own scope again is fine"
        for use in (
            lambda: other.scope().__enter__(), lambda: other.run(lambda: 1), lambda: other.reduce("sum", 1.0),
            lambda: other.gather(jnp.ones(1), 0),
        ):  # fmt: skip
            with pytest.raises(StrategyError, match=r"Mirrored\(cpu:2-3\).*inside the scope of Mirrored\(cpu:0-1\)"):
                use()
        assert px.get_strategy() is two
    with pytest.raises(StrategyError, match=r"strategy\.run was called in a replica"):
        two.run(lambda: other.run(lambda: 1))


def test_a_scope_that_is_left_by_an_exception_is_left(two):
    with pytest.raises(KeyError), two.scope():
        raise KeyError
    assert not px.in_cross_replica_context()
    with pytest.raises(KeyError):
        two.run(lambda: {}["x"])
    assert px.get_replica_context().num_replicas == 1


def test_per_replica_values_of_another_strategy_are_refused_by_name(two):
    other = px.Mirrored(jax.devices()[2:4])
    parts = ids(other)
    for use in (
        lambda: two.run(lambda x: x, args=(parts,)), lambda: two.reduce("sum", parts), lambda: two.gather(parts, 0),
        lambda: two.run(lambda x: x, args=({"a": [parts]},)), lambda: two.local_results(parts),
    ):  # fmt: skip
        with pytest.raises(
            StrategyError, match=r"a PerReplica of Mirrored\(cpu:2-3\) was given to Mirrored\(cpu:0-1\)"
        ):
            use()


def test_arrays_bound_to_devices_of_others_are_refused_by_name(two):
    away = jax.device_put(jnp.ones(3), jax.devices()[5])
    with two.scope():
        v = px.Variable(jnp.zeros(3))
    uses = {
        "argument 0": lambda: two.run(lambda x: x + 1.0, args=(away,)),
        "closes over": lambda: two.run(lambda: away + 1.0),
        "assigned": lambda: two.run(lambda: v.assign(away)),
    }
    for use in uses.values():
        with pytest.raises(
            DeviceError, match=r"on cpu:5: .*\(float32\[3\]\).*The replicas of Mirrored\(cpu:0-1\) run on cpu:0-1"
        ):
            use()
    assert v.numpy().tolist() == [0.0] * 3
    assert v.assign(away).numpy().tolist() == [1.0] * 3, "an assignment outside replicas moves the value"
    assert two.run(lambda x: x + 1.0, args=(np.asarray(away),)).tolist() == [2.0] * 3


# ---- adoption ------------------------------------------------------------------------------------


def test_a_variable_made_outside_the_scope_is_adopted_when_a_replica_uses_it(strategy, call):
    read, written, unused = px.Variable(2.0), px.Variable(1.0, aggregation="sum"), px.Variable(0.0)

    def fn():
        written.assign_add(read.value)

    call(lambda: strategy.run(fn))
    assert [v.strategy for v in (read, written, unused)] == [strategy, strategy, None]
    assert [float(c) for c in written.components] == [1.0 + 2.0 * strategy.num_replicas] * strategy.num_replicas
    assert {d for d in read.value.devices()} == set(strategy.devices)


def test_a_per_replica_variable_made_outside_keeps_its_value(strategy):
    own = px.Variable(5.0, synchronization="on_read", aggregation="sum")
    strategy.run(lambda: own.assign_add(1.0 * replica_id()))
    n = strategy.num_replicas
    assert [float(c) for c in own.components] == [5.0 / n + i for i in range(n)]


def test_a_model_and_an_optimizer_made_outside_are_adopted_in_a_traced_step(strategy):
    w = px.Variable([1.0, 2.0], name="w")
    optimizer = px.Optimizer(optax.adam(0.1))
    optimizer.build([w])
    seen = px.Variable(0, aggregation="sum", trainable=False)
    rows = strategy.distribute_values_from_function(lambda c: np.ones((2, 2), np.float32))

    @px.function
    def step(x):
        def fn(x):
            with px.GradientTape() as tape:
                loss = (x @ w).mean() / strategy.num_replicas
            optimizer.apply_gradients([(tape.gradient(loss, w), w)])
            seen.assign_add(x.shape[0])

        strategy.run(fn, args=(x,))

    step(rows)
    step(rows)
    assert int(seen) == 4 * strategy.num_replicas
    assert all(v.strategy is strategy for v in (w, seen, *optimizer.variables))
    assert all(set(v.value.devices()) == set(strategy.devices) for v in (w, *optimizer.variables))
    np.testing.assert_allclose(w.numpy(), [0.8, 1.8], atol=1e-5)


def test_what_was_adopted_belongs_there(two):
    v = px.Variable(1.0, name="v")
    two.run(lambda: v.value)
    other = px.Mirrored(jax.devices()[2:4])
    with pytest.raises(
        StrategyError, match=r"Variable 'v' belongs to Mirrored\(cpu:0-1\) and is read under Mirrored\(cpu:2-3\)"
    ):
        other.run(lambda: v.value)
    with other.scope(), pytest.raises(StrategyError, match="'v' belongs to"):
        v.assign(2.0)


def test_a_failed_step_adopts_variables_without_changing_them(two):
    v = px.Variable(1.0, aggregation="sum")

    def fn():
        v.assign_add(1.0)
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        two.run(fn)
    assert float(v) == 1.0
    two.run(lambda: v.assign_add(1.0))
    assert float(v) == 3.0


def test_a_traced_function_reads_on_after_its_variable_is_adopted(two):
    v = px.Variable(1.0, aggregation="sum")
    double = px.function(lambda: v.value * 2.0)
    assert float(double()) == 2.0
    two.run(lambda: v.assign_add(1.0))
    assert float(double()) == 6.0


# ---- devices -------------------------------------------------------------------------------------


def test_devices_can_be_chosen_by_object_and_by_name():
    assert px.Mirrored().num_replicas == len(jax.devices())
    assert px.Mirrored(["cpu:2", "CPU:1", "/device:CPU:0"]).devices == tuple(jax.devices()[i] for i in (2, 1, 0))
    assert px.OneDevice("cpu:3").devices == (jax.devices()[3],)
    assert px.OneDevice().devices == (jax.devices()[0],)
    assert repr(px.Mirrored(jax.devices()[1:4])) == "Mirrored(cpu:1-3)"
    assert repr(px.Mirrored(["cpu:2", "cpu:0"])) == "Mirrored(cpu:2,0)"
    assert repr(px.OneDevice("cpu:3")) == "OneDevice(cpu:3)"


@pytest.mark.parametrize(
    ("make", "error", "words"),
    [
        (lambda: px.Mirrored([]), ArgumentError, "devices is empty"),
        (lambda: px.Mirrored(["cpu:0", "cpu:0"]), ArgumentError, "given twice"),
        (lambda: px.Mirrored("cpu:0"), ArgumentTypeError, "devices must be a list of devices, got 'cpu:0'"),
        (lambda: px.Mirrored(2), ArgumentTypeError, "devices must be a list of devices, got 2"),
        (lambda: px.Mirrored([0, 1]), ArgumentTypeError, "a name like 'cpu:0' or 'gpu:1', got 0"),
        (lambda: px.Mirrored(["cpu:99"]), DeviceError, "There is no device 'cpu:99'. JAX sees: cpu:0"),
        (lambda: px.Mirrored(["cpu:-1"]), DeviceError, "There is no device 'cpu:-1'"),
        (lambda: px.Mirrored(["cpu:x"]), DeviceError, "There is no device 'cpu:x'"),
        (lambda: px.OneDevice("tpu:0"), DeviceError, "There is no device 'tpu:0'"),
        (lambda: px.OneDevice(["cpu:0"]), ArgumentTypeError, "A device is a jax.Device or a name"),
        (lambda: px.TPU(), DeviceError, r"px\.TPU found no TPU\. Use px\.Mirrored\(\)"),
    ],
)
def test_wrong_devices_are_explained(make, error, words):
    with pytest.raises(error, match=words):
        make()


def test_a_strategy_says_at_its_start_where_it_runs(caplog):
    in_effect._default_strategy.cache_clear()
    with caplog.at_level(logging.INFO, logger="phalanx"):
        assert repr(px.get_strategy()) == "the default strategy (cpu:0)", "of which nobody asked to hear"
        px.Mirrored(jax.devices()[:4])
        px.OneDevice("cpu:2")
    assert [r.message for r in caplog.records] == [
        "Mirrored: 4 replicas on cpu:0-3, 1 process",
        "OneDevice: 1 replica on cpu:2, 1 process",
    ]


# ---- exceptions ----------------------------------------------------------------------------------


def test_exceptions_of_the_function_arrive_as_they_are(strategy, call):
    class Mine(Exception):
        pass

    def fn():
        raise Mine("as it is")

    with pytest.raises(Mine, match="^as it is"):
        call(lambda: strategy.run(fn))


def test_a_python_value_of_a_traced_one_is_refused_with_the_line(two):
    for use in (
        bool,
        float,
        int,
        np.asarray,
        lambda x: [1, 2][x],
        lambda x: list(range(x)),
        lambda x: jnp.ones(3)[jnp.arange(3) < x],
    ):
        with pytest.raises(TracingError, match=rf"{__file__}:\d+ a Python value was asked for"):
            two.run(lambda: use(replica_id()))


def test_what_a_replica_function_may_not_return(two):
    def generator():
        yield replica_id()

    async def coroutine():
        return replica_id()

    for fn, words in [
        (generator, "generator returns a generator: its body has not run"),
        (coroutine, "coroutine returns a coroutine: its body has not run"),
        (lambda: {1: replica_id(), "a": 2}, "JAX cannot take .* apart.*Dict keys must sort"),
    ]:
        with pytest.raises(ArgumentTypeError, match=words):
            two.run(fn)
