"""Group "strategy": run, reduce, gather, merge steps, contexts and the errors of using them in the wrong place."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import phalanx as px
from goldens.kit import attempt, check, components, differs, each, per_replica, replay, runners
from phalanx.errors import ArgumentError, ArgumentTypeError, ReplicaDivergenceError, StrategyError, TracingError


def _variable(strategy, value, **options) -> px.Variable:
    with strategy.scope():
        return px.Variable(value, **options)


def _context() -> px.ReplicaContext:
    return px.get_replica_context()


def _replica_id() -> jax.Array:
    return _context().replica_id


def _r() -> jax.Array:
    """The replica's number as a float."""
    return _replica_id().astype(jnp.float32)


# ---- contexts ------------------------------------------------------------------------------------


@replay("strategy_contexts")
def test_every_place_knows_its_strategy_and_context(golden, strategy):
    def where():
        context = px.get_replica_context()
        out = {
            "has_strategy": px.get_strategy() is strategy,
            "in_cross_replica_context": px.in_cross_replica_context(),
            "has_replica_context": context is not None,
            "num_replicas_in_sync": px.get_strategy().num_replicas,
            "is_this_strategy": px.get_strategy() is strategy,
        }
        if context is not None:
            out["replica_id"] = context.replica_id
            out["context_num_replicas"] = context.num_replicas
        return out

    seen = []

    def fn():
        seen.append(where())
        return seen[0].pop("replica_id")

    out = {"outside": where()}
    with strategy.scope():
        out["scope"] = where()
    ids = strategy.run(fn)
    assert len(seen) == 1
    out["replica"] = [{**seen[0], "replica_id": i} for i in each(strategy, ids)]
    return {**out, "outside_after": where()}


@replay("strategy_wrong_context")
def test_calls_in_the_wrong_context_are_refused(golden, strategy):
    v = _variable(strategy, 1.0)

    def call(fn):
        return attempt(lambda: (fn(), "ok")[1])

    def merge_call_in_merge_call():
        context = _context()
        context.merge_call(lambda _: context.merge_call(lambda _: None))

    def enter_scope():
        with strategy.scope():
            pass

    def scope_in_scope():
        with strategy.scope(), strategy.scope():
            pass

    def run(fn):
        return call(lambda: strategy.run(fn))

    return {
        "a_update_in_replica": run(lambda: strategy.update(v, lambda x: x.assign(2.0).value)),
        "b_reduce_in_replica": run(lambda: strategy.reduce("sum", jnp.array(1.0))),
        "c_gather_in_replica": run(lambda: strategy.gather(jnp.array([1.0]), axis=0)),
        "d_run_in_run": run(lambda: strategy.run(lambda: jnp.array(1.0))),
        "e_merge_call_in_merge_call": run(merge_call_in_merge_call),
        "f_scope_in_replica": run(enter_scope),
        "g_scope_in_scope": call(scope_in_scope),
    }


@replay("strategy_run_inside_run")
def test_run_inside_run_is_refused(golden, strategy):
    return attempt(strategy.run, lambda: strategy.run(lambda: jnp.array(1.0)))


@replay("strategy_mixed_scopes")
def test_scopes_of_two_strategies_do_not_nest(golden, strategy):
    def nested():
        with strategy.scope(), px.Mirrored(strategy.devices).scope():
            pass

    return attempt(nested)


@differs("strategy_two_strategies", "a replica reads the variables of its own strategy only")
def test_two_strategies_do_not_mix(golden, strategy):
    other = px.Mirrored(strategy.devices)
    v = _variable(strategy, 1.0, aggregation="sum", name="theirs")
    o = _variable(strategy, 1.0, aggregation="sum", synchronization="on_read")

    def both_scopes():
        with strategy.scope(), other.scope():
            pass

    def run_in_scope():
        with strategy.scope():
            other.run(lambda: jnp.array(1.0))

    def in_other(fn):
        with other.scope():
            return fn()

    golden.check(attempt(both_scopes), "a_scope_in_scope")
    golden.check(attempt(run_in_scope), "b_run_in_scope")
    golden.check(attempt(in_other, lambda: v.assign(5.0)), "c_assign")
    golden.check(attempt(in_other, lambda: v + 0.0), "d_read")
    with pytest.raises(StrategyError, match="'theirs' belongs to"):
        other.run(lambda: v + 0.0)
    golden.check(attempt(other.run, lambda: v.assign_add(jnp.array(1.0))), "f_assign_in_replica")
    golden.check(attempt(in_other, lambda: o.value), "g_read_on_read")
    golden.check(components(v), "v_components")


@replay("strategy_default")
def test_default_strategy_has_one_replica(golden, strategy):
    default = px.get_strategy()
    x = default.run(lambda v: v + _r(), args=(3.0,))
    rows = jnp.array([1.0, 2.0, 3.0])
    return {
        "num_replicas": default.num_replicas,
        "run": default.local_results(x)[0],
        "reduce_sum": default.reduce("sum", x),
        "reduce_mean": default.reduce("mean", x),
        "reduce_axis_0_sum": default.reduce("sum", rows, axis=0),
        "reduce_axis_0_mean": default.reduce("mean", rows, axis=0),
        "merge_call": _context().merge_call(lambda s, v: v * 2.0, args=(jnp.array(4.0),)),
        "all_reduce": _context().all_reduce("sum", jnp.array(5.0)),
        "local_results": default.local_results(jnp.array(1.0)),
    }


# ---- run: arguments and results ------------------------------------------------------------------


@differs("strategy_distribute_values_from_function", "all replicas run one program, so their values have one shape")
def test_distributed_values_have_one_shape(golden, strategy):
    def double(fn):
        return each(strategy, strategy.run(lambda x: x * 2, (strategy.distribute_values_from_function(fn),)))

    golden.check(double(lambda c: jnp.array([c.replica_id, c.num_replicas])), "tensor")
    golden.check(double(lambda c: c.replica_id + 1), "python_int")
    golden.check(double(lambda c: np.arange(2, dtype=np.float32) + c.replica_id), "numpy")

    def uneven(c):
        return jnp.ones((c.replica_id + 1, 2))

    if strategy.num_replicas == 1:
        golden.check(double(uneven), "uneven_rows")
    else:
        with pytest.raises(ArgumentError, match=r"same shape.*\(1, 2\).*\(2, 2\).*Pad them"):
            strategy.distribute_values_from_function(uneven)


@replay("strategy_run_arguments")
def test_per_replica_arguments_are_taken_apart_inside_structures(golden, strategy):
    p, t = per_replica(strategy, golden.inputs["p"]), jnp.array(100.0)

    def fn(a, b, c, k=None, flag=False):
        return a + b + c[0] + c[1] + k + (0.5 if flag else 0.0)

    args, kwargs = (p, 10.0, [p, t]), {"k": p, "flag": True}
    golden.check(strategy.run(fn, args, kwargs))
    return px.function(lambda: strategy.run(fn, args, kwargs))()


@replay("strategy_run_returns")
def test_results_are_per_replica_where_they_may_differ(golden, strategy):
    def fn():
        r = _replica_id()
        return {"t": r + 1, "pair": (r * 10, "text"), "none": None, "int": 7, "id": r}

    out = strategy.run(fn)
    assert out["none"] is None and out["pair"][1] == "text"
    parts = {"t": out["t"], "pair_0": out["pair"][0], "pair_1": out["pair"][1]}
    parts.update({name: out[name] for name in ("none", "int", "id")})
    return {name: strategy.local_results(value) for name, value in parts.items()}


@differs("strategy_per_replica_in_cross_context", "a per-replica value is no array on one replica either")
def test_per_replica_value_is_no_array_whatever_the_number_of_replicas(golden, strategy):
    y = strategy.run(lambda x: x * 1.0, (per_replica(strategy, np.arange(strategy.num_replicas) + 1.0),))
    for use in (lambda: y + 1.0, lambda: float(y), lambda: jnp.asarray(y), lambda: np.asarray(y), lambda: y[0]):
        with pytest.raises(ArgumentTypeError, match=r"one value per replica.*strategy\.reduce"):
            use()


# ---- reduce --------------------------------------------------------------------------------------


@differs("strategy_reduce_axis_none", "the dtype of a mean does not depend on the number of replicas")
def test_reduce_over_the_replicas(golden, strategy):
    values = {"scalar": per_replica(strategy, golden.inputs["scalar"])}
    values["matrix"] = per_replica(strategy, golden.inputs["matrix"])
    values["dict"] = {"s": values["scalar"], "m": values["matrix"]}
    for op in ("SUM", "MEAN"):
        for name, value in values.items():
            golden.check(strategy.reduce(op, value, axis=None), op, name)
    golden.check(strategy.reduce("sum", values["scalar"]), "sum_lower_case")
    golden.check(attempt(strategy.reduce, "MAX", values["scalar"]), "unknown_op")
    integers = per_replica(strategy, golden.inputs["scalar"], np.int32)
    total, mean = strategy.reduce("sum", integers), strategy.reduce("mean", integers)
    golden.check({"value": total, "dtype": total.dtype}, "SUM", "int32")
    check({"value": mean, "dtype": mean.dtype}, {"value": np.mean(golden.inputs["scalar"]), "dtype": "float32"})


@differs("strategy_reduce_axis_0", "parts have one shape, and the dtype of a mean does not depend on N")
def test_reduce_over_rows_and_replicas(golden, strategy):
    a, d = per_replica(strategy, golden.inputs["a"]), per_replica(strategy, golden.inputs["d"], np.int32)
    for op in ("SUM", "MEAN"):
        golden.check(strategy.reduce(op, a, axis=0), op, "a")
        golden.check(strategy.reduce(op, a, axis=1), op, "e_axis_1")
    total, mean = strategy.reduce("sum", d, axis=0), strategy.reduce("mean", d, axis=0)
    golden.check(total, "SUM", "d")
    golden.check(total.dtype, "SUM", "d_dtype")
    check({"d": mean, "dtype": mean.dtype}, {"d": np.mean(golden.inputs["d"]), "dtype": "float32"})
    scalars = per_replica(strategy, [1.0] * strategy.num_replicas)
    golden.check(attempt(strategy.reduce, "sum", scalars, 0), "f_scalars")
    for name in ("b", "c"):
        if strategy.num_replicas == 1:
            golden.check(strategy.reduce("mean", per_replica(strategy, golden.inputs[name]), axis=0), "MEAN", name)
        else:
            with pytest.raises(ArgumentError, match="same shape"):
                strategy.distribute_values_from_function(lambda c: jnp.array(golden.inputs[name][c.replica_id]))


@differs("strategy_reduce_not_distributed", "what all replicas hold counts N times in a sum")
def test_reduce_of_what_every_replica_holds(golden, strategy):
    n, m = strategy.num_replicas, _variable(strategy, 3.0)
    o = _variable(strategy, 0.0, aggregation="sum", synchronization="on_read")
    strategy.run(lambda: o.assign(_r() + 1.0))
    for op in ("SUM", "MEAN"):
        golden.check(strategy.reduce(op, o), op, "on_read_variable")
        golden.check(strategy.reduce(op, jnp.array([1.0, 2.0]), axis=0), op, "tensor_axis_0")
        for value in (3.0, jnp.array(3.0), m):
            check(strategy.reduce(op, value), 3.0 * n if op == "SUM" else 3.0)
    check(strategy.reduce("sum", 0), 0)
    check(strategy.reduce("mean", 0), 0.0)


# ---- gather --------------------------------------------------------------------------------------


@differs("strategy_gather", "parts have one shape, and structures are gathered leaf by leaf")
def test_gather(golden, strategy):
    a = per_replica(strategy, golden.inputs["even"])
    golden.check(strategy.gather(a, axis=0), "even_axis_0")
    golden.check(strategy.gather(a, axis=1), "even_axis_1")
    golden.check(strategy.gather(jnp.array([1.0, 2.0]), axis=0), "plain_tensor")
    both = strategy.gather({"a": a, "b": (a,)}, axis=0)
    golden.check(both["a"], "even_axis_0")
    golden.check(both["b"][0], "even_axis_0")
    if strategy.num_replicas > 1:
        with pytest.raises(ArgumentError, match="same shape"):
            strategy.distribute_values_from_function(lambda c: jnp.array(golden.inputs["uneven"][c.replica_id]))


@replay("strategy_gather_uneven_other_axis")
def test_gather_needs_equal_other_axes(golden, strategy):
    def gather():
        parts = golden.inputs["uneven"]
        value = strategy.distribute_values_from_function(lambda c: np.asarray(parts[c.replica_id], np.float32))
        return strategy.gather(value, axis=1)

    return attempt(gather)


@differs("strategy_gather_scalars", "scalars are refused on one replica too")
def test_scalars_cannot_be_gathered_whatever_the_number_of_replicas(golden, strategy):
    with pytest.raises(ArgumentError, match=r"no axis 0 .*scalars have none"):
        strategy.gather(per_replica(strategy, golden.inputs["scalars"]), axis=0)


@differs("strategy_all_gather", "parts have one shape")
def test_all_gather(golden, strategy):
    a = per_replica(strategy, golden.inputs["even"])
    for axis in (0, 1):
        gathered = strategy.run(lambda x: _context().all_gather(x, axis=axis), (a,))
        golden.check(each(strategy, gathered), f"even_axis_{axis}")
    nested = strategy.run(lambda x: _context().all_gather({"x": x, "y": [2.0 * x]}), (a,))
    golden.check(each(strategy, nested["x"]), "nested", "x")
    check(nested["y"][0], (2.0 * nested["x"]).tolist())
    if strategy.num_replicas > 1:
        with pytest.raises(ArgumentError, match="same shape"):
            strategy.distribute_values_from_function(lambda c: jnp.array(golden.inputs["uneven"][c.replica_id]))


@differs("strategy_all_gather_scalars", "scalars are refused on one replica too")
def test_scalars_cannot_be_all_gathered_whatever_the_number_of_replicas(golden, strategy):
    with pytest.raises(ArgumentError, match=r"no axis 0 .*scalars have none"):
        strategy.run(lambda: _context().all_gather(_r() + 1.0, axis=0))


# ---- merge steps and update ----------------------------------------------------------------------


@replay("strategy_merge_call")
def test_merge_call_runs_once_and_sees_all_replicas(golden, strategy):
    calls = []

    def total(merging, x, five):
        calls.append({"cross": px.in_cross_replica_context(), "same_strategy": merging is strategy})
        calls[-1]["five"] = merging.local_results(five)
        return merging.reduce("sum", x) + five, merging.local_results(x)

    def own(merging, x):
        parts = merging.local_results(x)
        return merging.distribute_values_from_function(lambda c: parts[c.replica_id] * 2.0)

    def fn():
        x = _r() + 1.0
        return _context().merge_call(total, args=(x, 5.0)), _context().merge_call(own, args=(x,))

    (sums, parts), doubled = strategy.run(fn)
    return {
        "calls": len(calls),
        "seen": {**calls[0], "x": parts},
        "total": each(strategy, sums),
        "own": each(strategy, doubled),
    }


@replay("strategy_merge_call_update")
def test_update_in_a_merge_step(golden, strategy):
    for run in runners(strategy):
        v = _variable(strategy, golden.inputs["v"])

        def merge(merging, g):
            mean = merging.reduce("mean", g)
            merging.update(v, lambda var, gr: var.assign_sub(golden.inputs["lr"] * gr), args=(mean,))

        def fn():
            _context().merge_call(merge, args=(jnp.stack([_r() + 1.0, 2.0]),))
            return v.value

        golden.check({"read_in_replica": each(strategy, run(fn)), "components": components(v)})


@differs("strategy_extended_update", "update works on all components at once and keeps them equal")
def test_update_works_on_all_components_at_once(golden, strategy):
    n, v, w = strategy.num_replicas, _variable(strategy, 1.0, name="v"), _variable(strategy, 10.0)
    calls = []

    def add(var, x):
        calls.append(1)
        return var.assign_add(x) * 100.0

    with strategy.scope():
        strategy.update(v, add, args=(2.0,))
        golden.check(components(v), "a_number")
        with pytest.raises(ReplicaDivergenceError, match=r"'v' is mirrored"):
            strategy.update(v, add, args=(per_replica(strategy, np.arange(n) + 1.0),))
        golden.check(components(v), "a_number")
        strategy.update(v, add, args=(w,))
        check(components(v), [13.0] * n)
        check(strategy.update(v, add, args=(0.5,)), 1350.0)
    check(components(v), [13.5] * n)
    assert len(calls) == 3


@differs("strategy_extended_update_in_replica", "components that would drift apart are an error")
def test_update_in_a_replica_refuses_an_argument_that_was_not_reduced(golden, strategy):
    n, v = strategy.num_replicas, _variable(strategy, golden.inputs["v"], name="v")

    def add(value):
        strategy.run(lambda: strategy.update(v, lambda var, x: var.assign_add(x).value, args=(value(),)))

    with pytest.raises(ReplicaDivergenceError, match=r"'v' is mirrored.*Reduce it first"):
        add(lambda: 10.0 * (_r() + 1.0))
    check(components(v), [1.0] * n)
    add(lambda: 0.5)
    check(components(v), [1.5] * n)
    add(lambda: _context().all_reduce("sum", _r() + 1.0))
    check(components(v), [1.5 + n * (n + 1) / 2] * n)


@replay("strategy_extended_helpers")
def test_reduced_values_and_containers(golden, strategy):
    v, plain = _variable(strategy, 0.0), px.Variable(0.0)
    p = per_replica(strategy, np.arange(strategy.num_replicas) + 1.0)
    q = per_replica(strategy, [[r, 2.0 * r] for r in range(strategy.num_replicas)])
    with strategy.scope():
        return {
            "reduce_to_sum": each(strategy, strategy.reduce("sum", p)),
            "reduce_to_mean": each(strategy, strategy.reduce("mean", p)),
            "batch_reduce_to": [each(strategy, x) for x in strategy.reduce("sum", [p, q])],
            "broadcast_to": strategy.local_results(v.assign(7.0)),
            "created_in_scope": v.strategy is strategy,
            "plain_created_in_scope": plain.strategy is strategy,
            "container_of_component_is_v": strategy.container_of(v.components[-1]) is v,
        }


@replay("strategy_manual_step")
def test_training_step_from_parts(golden, strategy):
    n, w = strategy.num_replicas, _variable(strategy, golden.inputs["w"])
    x, y = (per_replica(strategy, golden.inputs[name]) for name in "xy")

    def replica_step(x, y):
        with px.GradientTape() as tape:
            loss = ((w * jnp.stack([x, 1.0])).sum() - y) ** 2 / n
        gradient = _context().all_reduce("sum", tape.gradient(loss, w))

        def merge(merging, g):
            merging.update(w, lambda var, d: var.assign_sub(golden.inputs["lr"] * d), args=(g,))

        _context().merge_call(merge, args=(gradient,))
        return loss

    @px.function
    def step():
        return strategy.reduce("sum", strategy.run(replica_step, args=(x, y)))

    steps = [{"loss": step(), "w": w.value} for _ in golden.expect["steps"]]
    assert step.trace_count == 1
    return {"steps": steps, "components": components(w)}


# ---- all_reduce ----------------------------------------------------------------------------------


@differs("strategy_all_reduce_nested", "numbers are reduced like arrays, and the dtype of a mean does not depend on N")
def test_all_reduce_of_structures_numbers_and_integers(golden, strategy):
    n, x = strategy.num_replicas, per_replica(strategy, golden.inputs["x"])

    def fn(x):
        out = {}
        for op in ("SUM", "MEAN"):
            y = _context().all_reduce(op, {"a": _r() + 1.0, "b": [x * 1.0, (3.0 * _r(),)]})
            out.update({f"{op}_a": y["a"], f"{op}_b0": y["b"][0], f"{op}_b1": y["b"][1][0]})
        out["enum_sum"] = _context().all_reduce("sum", _r())
        out["int_sum"] = _context().all_reduce("sum", _replica_id() + 1)
        return out

    for run in runners(strategy):
        for name, value in run(fn, (x,)).items():
            golden.check(each(strategy, value), name)

    def numbers():
        return {op: _context().all_reduce(op, (_replica_id() + 1, 2.0)) for op in ("sum", "mean")}

    expected = {"sum": [n * (n + 1) // 2, 2.0 * n], "mean": [(n + 1) / 2, 2.0]}
    check(strategy.run(numbers), expected)
    check(_context().all_reduce("mean", (1, 2.0)), [1.0, 2.0])


@differs("strategy_all_reduce_of_argument", "works in a traced function with one replica too")
def test_all_reduce_of_an_argument(golden, strategy):
    p = per_replica(strategy, golden.inputs["x"])
    for run in runners(strategy):
        golden.check(each(strategy, run(lambda x: _context().all_reduce("sum", x), (p,))), "eager")


@replay("strategy_all_reduce_sequence")
def test_several_all_reduces_in_one_replica_function(golden, strategy):
    def fn():
        s1 = _context().all_reduce("sum", _r() + 1.0)
        m = _context().all_reduce("mean", s1 * _r())
        x = _r()
        for _ in range(3):
            x = _context().all_reduce("sum", x) / strategy.num_replicas + _r()
        return {"s1": s1, "m": m, "x": x}

    for run in runners(strategy):
        golden.check({name: each(strategy, value) for name, value in run(fn).items()})


@replay("strategy_all_reduce_sparse")
def test_all_reduce_of_the_gradient_of_looked_up_rows(golden, strategy):
    table = _variable(strategy, np.zeros((4, 2), np.float32))

    def fn():
        with px.GradientTape() as tape:
            loss = table[jnp.stack([_replica_id() % 4, 1])].sum() * (_r() + 1.0)
        return _context().all_reduce("sum", tape.gradient(loss, table))

    return {"dense": each(strategy, strategy.run(fn))}


# ---- replicas that disagree ----------------------------------------------------------------------


@differs("strategy_exception_in_one_replica", "nothing of a step that raised is kept")
def test_exception_leaves_the_variables_as_they_were(golden, strategy):
    v = _variable(strategy, golden.inputs["v"], aggregation="sum")

    def fn():
        v.assign_add(_r() + 1.0)
        raise ValueError("boom")

    golden.check(attempt(strategy.run, fn))
    check(components(v), [0.0] * strategy.num_replicas)
    check(each(strategy, strategy.run(lambda: v.value)), [0.0] * strategy.num_replicas)


@differs("strategy_unequal_collectives", "a branch that depends on the replica is an error before it runs")
def test_collective_in_a_branch_of_some_replicas_is_refused(golden, strategy):
    def python_branch():
        if _replica_id() == 0:
            return _context().all_reduce("sum", jnp.array(1.0))
        return jnp.array(0.0)

    def traced_branch():
        return px.cond(_replica_id() == 0, lambda: _context().all_reduce("sum", jnp.array(1.0)), lambda: jnp.array(0.0))

    with pytest.raises(TracingError, match=r"px\.cond"):
        strategy.run(python_branch)
    with pytest.raises(StrategyError, match="waited for for ever"):
        strategy.run(traced_branch)
