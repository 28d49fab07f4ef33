"""Group "tape": gradients, watching, higher order, control flow, assignment under a tape."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import phalanx as px
from goldens.kit import attempt, check, components, differs, each, per_replica, replay, runners
from phalanx.errors import AggregationRequiredError, ArgumentTypeError, TapeError


def _variable(strategy, value, **options):
    with strategy.scope():
        return px.Variable(value, **options)


def _matrix(values):
    return jnp.asarray(values, jnp.float32)


def _replica():
    """This replica's number, as a float."""
    return px.get_replica_context().replica_id.astype(jnp.float32)


def _in_replicas(strategy, fn, *args):
    """What each replica gets under each name, eagerly and in a traced function alike."""
    eager, traced = ({k: each(strategy, v) for k, v in run(fn, args).items()} for run in runners(strategy))
    for name, values in eager.items():
        np.testing.assert_allclose(np.asarray(values), np.asarray(traced[name]), 1e-6, 1e-7)
    return eager


def _watched(tape):
    """Names as TensorFlow writes them."""
    return [f"{v.name}:0" for v in tape.watched_variables()]


# ---- what is watched -----------------------------------------------------------------------------


@differs("tape_watched_variables_cross_replica", "the container is watched, not a component")
def test_tape_lists_the_container_in_cross_replica_context(golden, strategy):
    w, _, n = (_variable(strategy, golden.inputs[k], name=k, trainable=k != "n") for k in ("w", "u", "n"))

    def watched():
        with px.GradientTape() as tape:
            w * n
        golden.check(_watched(tape), "inside_scope", "names")
        return tape.watched_variables()

    with strategy.scope():
        assert watched() == (w,)
    assert watched() == (w,)


@replay("tape_watched_variables_replica")
def test_tape_lists_the_container_in_a_replica(golden, strategy):
    w, n = _variable(strategy, golden.inputs["w"], name="w"), _variable(strategy, 4.0, name="n", trainable=False)
    seen = []

    def fn():
        with px.GradientTape() as tape:
            w * n + w
        kinds = ["container" if v is w else "other" for v in tape.watched_variables()]
        seen.append({"names": _watched(tape), "kind": kinds})

    for run in runners(strategy):
        run(fn)
    eager, traced = seen
    return {"eager": [eager] * strategy.num_replicas, "in_function": [traced] * strategy.num_replicas}


@replay("tape_watch_tensor")
def test_arrays_are_watched_from_the_call_of_watch_on(golden, strategy):
    missing = []

    def fn():
        x, u = _replica() + 2.0, jnp.float32(golden.inputs["u"])
        with px.GradientTape() as tape:
            y = x * x
        missing.append(tape.gradient(y, x) is None)
        with px.GradientTape() as tape:
            tape.watch(x)
            y = x * x
        watched = tape.gradient(y, x)
        with px.GradientTape() as tape:
            y = x * x
            tape.watch(x)
        missing.append(tape.gradient(y, x) is None)
        with px.GradientTape() as tape:
            tape.watch([x, u])
            y = x * u
        dx, du = tape.gradient(y, [x, u])
        return {"watched": watched, "list_dx": dx, "list_du": du}

    return {**_in_replicas(strategy, fn), "unwatched_and_late_watch_give_none": all(missing)}


@replay("tape_watch_accessed_false")
def test_only_what_is_asked_for_is_watched(golden, strategy):
    a, b = (_variable(strategy, golden.inputs[k], name=k) for k in "ab")
    seen = []

    def fn():
        with px.GradientTape(watch_accessed_variables=False) as tape:
            tape.watch(b)
            y = a * b * (_replica() + 1.0)
        da, db = tape.gradient(y, [a, b])
        seen.append({"da_is_none": da is None, "watched_names": _watched(tape)})
        return {"db": db}

    return {**_in_replicas(strategy, fn), **seen[0]}


@replay("tape_stop_recording")
def test_what_is_computed_while_recording_is_stopped_is_constant(golden, strategy):
    w = _variable(strategy, golden.inputs["w"])
    missing = []

    def fn():
        with px.GradientTape(persistent=True) as tape:
            y = w * w
            with tape.stop_recording():
                z = w * w * w
            total = y + z * 1.0
        missing.append(tape.gradient(z, w) is None)
        return {"target": total, "dtarget_dw": tape.gradient(total, w)}

    return {**_in_replicas(strategy, fn), "gradient_of_z_is_none": all(missing)}


@replay("tape_reset")
def test_reset_forgets_what_was_recorded(golden, strategy):
    w, u = (_variable(strategy, golden.inputs[k], name=k) for k in "wu")
    seen = []

    def fn():
        with px.GradientTape() as tape:
            y = w * w
            tape.reset()
            z = u * u
            total = y + z
        dw, du = tape.gradient(total, [w, u])
        seen.append({"dw_is_none": dw is None, "watched_names": _watched(tape)})
        return {"du": du}

    return {**_in_replicas(strategy, fn), **seen[0]}


@replay("tape_nontrainable_not_watched")
def test_variables_that_are_not_trainable_must_be_watched_by_hand(golden, strategy):
    n = _variable(strategy, golden.inputs["n"], name="n", trainable=False)
    o = _variable(strategy, golden.inputs["o"], name="o", synchronization="on_read", aggregation="sum")
    w = _variable(strategy, golden.inputs["w"], name="w")
    seen = []

    def fn():
        with px.GradientTape() as tape:
            y = n * o * w * (_replica() + 1.0)
        grads = tape.gradient(y, [n, o, w])
        seen.append({"is_none_for_n_o_w": [g is None for g in grads], "watched_names": _watched(tape)})
        with px.GradientTape() as tape:
            tape.watch([n, o])
            y = n * o * w * (_replica() + 1.0)
        dn, do, dw = tape.gradient(y, [n, o, w])
        return {"dw": grads[2], "watched_dn": dn, "watched_do": do, "watched_dw": dw}

    return {**_in_replicas(strategy, fn), **seen[0]}


# ---- whose gradients -----------------------------------------------------------------------------


@replay("tape_gradient_is_local")
def test_a_replica_gets_the_gradient_of_its_own_loss(golden, strategy):
    w, b = _variable(strategy, golden.inputs["w"]), _variable(strategy, golden.inputs["b"])

    def fn(x):
        with px.GradientTape() as tape:
            loss = ((w * x).sum() + b) ** 2
        dw, db = tape.gradient(loss, [w, b])
        return {"loss": loss, "dw": dw, "db": db}

    return _in_replicas(strategy, fn, per_replica(strategy, golden.inputs["x"]))


@differs("tape_gradient_cross_replica", "a mirrored variable is a source in every context")
def test_gradients_in_cross_replica_context(golden, strategy):
    w = _variable(strategy, golden.inputs["w"])

    def gradient(sources):
        with px.GradientTape() as tape:
            loss = (w * w * w).sum()
        return tape.gradient(loss, sources)

    right = golden.expect["b_outside_scope"]
    check(gradient(w), right)
    with strategy.scope():
        check(gradient(w), right)
        check(px.function(lambda: gradient(w))(), right)
        golden.check(gradient(list(w.components)), "c_components")


@differs("tape_around_run", "the tape sees into strategy.run")
def test_tape_around_run_differentiates_through_the_replicas(golden, strategy):
    w = _variable(strategy, golden.inputs["w"])
    xs = per_replica(strategy, golden.inputs["x"])

    def gradient(sources):
        with strategy.scope(), px.GradientTape() as tape:
            total = strategy.reduce("sum", strategy.run(lambda x: w * x, args=(xs,)))
        return total, tape.gradient(total, sources)

    total, dw = gradient(w)
    x = golden.inputs["x"]
    check([total, dw], [golden.inputs["w"] * sum(x), sum(x)])
    _, parts = gradient(list(w.components))
    check(parts, [sum(x)] + [None] * (strategy.num_replicas - 1))


@replay("tape_through_all_reduce")
def test_gradient_of_an_all_reduce_is_an_all_reduce(golden, strategy):
    w = _variable(strategy, golden.inputs["w"])

    def fn():
        x = _replica() + 1.0
        out = {}
        for op in ("SUM", "MEAN"):
            with px.GradientTape() as tape:
                s = px.get_replica_context().all_reduce(op, w * x)
                y = s * (_replica() + 1.0)
            out |= {f"{op}_s": s, f"{op}_y": y, f"{op}_dy_dw": tape.gradient(y, w)}
        return out

    return _in_replicas(strategy, fn)


@replay("tape_through_all_gather")
def test_gradient_of_an_all_gather(golden, strategy):
    w = _variable(strategy, golden.inputs["w"])
    n = strategy.num_replicas

    def fn():
        C = jnp.arange(2.0 * n).reshape(n, 2) * (_replica() + 1.0)
        with px.GradientTape() as tape:
            h = (w * (_replica() + 1.0))[None]
            g = px.get_replica_context().all_gather(h, axis=0)
            y = (g * C).sum()
        return {"g": g, "y": y, "dy_dw": tape.gradient(y, w)}

    return _in_replicas(strategy, fn)


# ---- what a tape can be asked for ----------------------------------------------------------------


@replay("tape_persistent_and_second_use")
def test_second_gradient_needs_a_persistent_tape(golden, strategy):
    w = _variable(strategy, golden.inputs["w"])
    second = []

    def recorded(**options):
        with px.GradientTape(**options) as tape:
            y = w**3
            z = y * (_replica() + 1.0)
        return tape, y, z

    def fn():
        tape, y, z = recorded(persistent=True)
        out = {
            "dz_dw": tape.gradient(z, w),
            "dy_dw": tape.gradient(y, w),
            "dz_dy": tape.gradient(z, y),
            "dz_dw_again": tape.gradient(z, w),
        }
        tape, y, z = recorded()
        out["dz_dw_nonpersistent"] = tape.gradient(z, w)
        second.append(attempt(tape.gradient, y, w))
        return out

    out = _in_replicas(strategy, fn)
    same = len({str(error) for error in second}) == 1
    return {**out, "second_use": second[0], "second_use_same_everywhere": same}


@replay("tape_nested_third_derivative")
def test_nested_tapes_give_higher_derivatives(golden, strategy):
    w = _variable(strategy, golden.inputs["w"])

    def fn():
        x = _replica() + 1.0
        with px.GradientTape() as third:
            with px.GradientTape() as second:
                with px.GradientTape() as first:
                    y = x * w**4.0
                d1 = first.gradient(y, w)
            d2 = second.gradient(d1, w)
        return {"d1": d1, "d2": d2, "d3": third.gradient(d2, w)}

    return _in_replicas(strategy, fn)


@replay("tape_hessian_vector_product")
def test_hessian_vector_product_and_gradient_penalty(golden, strategy):
    w, v = _variable(strategy, golden.inputs["w"]), _matrix(golden.inputs["v"])

    def fn(x):
        with px.GradientTape(persistent=True) as outer:
            with px.GradientTape() as inner:
                f = (jnp.tanh(w * x) ** 2).sum()
            g = inner.gradient(f, w)
            gv = (g * v).sum()
            penalised = f + 0.1 * (g**2).sum()
        return {"f": f, "g": g, "hvp": outer.gradient(gv, w), "penalty_gradient": outer.gradient(penalised, w)}

    return _in_replicas(strategy, fn, per_replica(strategy, golden.inputs["x"]))


@replay("tape_unconnected_gradients")
def test_unconnected_sources_give_none_or_zeros(golden, strategy):
    w, u = _variable(strategy, golden.inputs["w"]), _variable(strategy, golden.inputs["u"])
    x = _matrix(golden.inputs["x"])
    missing = []

    def fn():
        with px.GradientTape(persistent=True) as tape:
            y = jnp.sum(w) * (_replica() + 1.0)
        nones = tape.gradient(y, [w, u, x])
        missing.append([g is None for g in nones])
        zeros = tape.gradient(y, [w, u, x], unconnected_gradients="zero")
        return {"w_none_mode": nones[0], "w_zero": zeros[0], "u_zero": zeros[1], "x_zero": zeros[2]}

    return {**_in_replicas(strategy, fn), "none_mode_is_none": missing[0]}


@replay("tape_output_gradients")
def test_output_gradients_weigh_the_targets(golden, strategy):
    w = _variable(strategy, golden.inputs["w"])
    wrong = []

    def fn():
        with px.GradientTape(persistent=True) as tape:
            y, s = w * w, jnp.sum(w)
        wrong.append(attempt(tape.gradient, y, w, jnp.array([1.0, 2.0])))
        weights = jnp.array([1.0, 10.0, 100.0]) * (_replica() + 1.0)
        return {
            "single": tape.gradient(y, w, output_gradients=weights),
            "list": tape.gradient([y, s], w, output_gradients=[jnp.array([1.0, 0.0, -1.0]), 2.0]),
        }

    return {**_in_replicas(strategy, fn), "wrong_shape": wrong[0]}


@replay("tape_intermediate")
def test_gradients_with_respect_to_intermediate_results(golden, strategy):
    w = _variable(strategy, golden.inputs["w"])

    def fn():
        with px.GradientTape(persistent=True) as tape:
            h = w * w
            k = h * (_replica() + 1.0)
            y = k**2
        sources = {"dk": k, "dh": h, "dw": w, "dy": y}
        return {name: tape.gradient(y, source) for name, source in sources.items()}

    return _in_replicas(strategy, fn)


@replay("tape_structures")
def test_targets_and_sources_are_pytrees(golden, strategy):
    a, b = _variable(strategy, golden.inputs["a"]), _variable(strategy, golden.inputs["b"])

    def fn():
        with px.GradientTape(persistent=True) as tape:
            targets = [a * jnp.sum(b), b * 1.0, a * 1.0]
            named = {"p": a * a, "q": jnp.sum(b * b)}
        grads = tape.gradient(targets, {"a": a, "nested": [b, (a,)]})
        da, db = tape.gradient(named, [a, b])
        nested, (inner,) = grads["nested"]
        return {"a": grads["a"], "nested_0": nested, "nested_1_0": inner, "dict_target_da": da, "dict_target_db": db}

    return _in_replicas(strategy, fn)


@replay("tape_jacobian")
def test_jacobian_of_vectors_matrices_and_scalars(golden, strategy):
    w, u = _variable(strategy, golden.inputs["w"]), _variable(strategy, [1.0])
    missing = []

    def fn(A):
        with px.GradientTape(persistent=True) as tape:
            y = A @ w**2
            outer = y[:, None] * y[None, :]
            s = y.sum()
        missing.append(tape.jacobian(y, u) is None)
        targets = {"jacobian": y, "jacobian_of_matrix": outer, "jacobian_of_scalar": s}
        return {name: tape.jacobian(target, w) for name, target in targets.items()}

    out = _in_replicas(strategy, fn, per_replica(strategy, golden.inputs["A"]))
    return {**out, "unconnected_is_none": all(missing)}


@replay("tape_batch_jacobian")
def test_batch_jacobian_is_one_jacobian_per_row(golden, strategy):
    W = _variable(strategy, _matrix(golden.inputs["W"]))
    wrong = []

    def fn(x):
        other = jnp.ones((3, 3))
        with px.GradientTape(persistent=True) as tape:
            tape.watch([x, other])
            y = jnp.sin(x @ W) + other.sum()
        wrong.append(attempt(tape.batch_jacobian, y, other))
        return {"batch_jacobian": tape.batch_jacobian(y, x)}

    out = _in_replicas(strategy, fn, per_replica(strategy, golden.inputs["X"]))
    return {**out, "first_dimensions_differ": wrong[0]}


@replay("tape_edge_uses")
def test_edge_uses(golden, strategy):
    w = _variable(strategy, golden.inputs["w"])
    seen = {}

    def fn():
        with px.GradientTape() as tape:
            y = w * w
            g = tape.gradient(y, w)
            z = g * w
        seen["second"] = attempt(tape.gradient, z, w)
        numbers = np.array([1.0, 2.0], np.float32)
        with px.GradientTape(persistent=True) as tape:
            y = w * numbers
        seen["b_python_number"] = attempt(tape.gradient, 3.0, w)
        seen["c_numpy_source"] = attempt(tape.gradient, y, numbers)
        seen["d_no_sources"] = tape.gradient(y, [])
        with px.GradientTape() as tape:
            tape.watch(w)
        return g, tape.gradient(w, w)

    g, itself = (each(strategy, value)[0] for value in strategy.run(fn))
    assert isinstance(seen["b_python_number"], ArgumentTypeError)
    assert isinstance(seen["c_numpy_source"], ArgumentTypeError)
    return {"a_inside_block": {"g": g, "second": seen.pop("second")}, "e_target_is_variable": itself, **seen}


# ---- loops, branches, kinks ----------------------------------------------------------------------


@differs("tape_loops", "while loops have no reverse mode; forward mode and scan have")
def test_gradients_through_loops(golden, strategy):
    w = _variable(strategy, golden.inputs["w"])
    most = max(golden.inputs["iterations"])
    refused = []

    def fn():
        n = px.get_replica_context().replica_id + 2

        def while_loop():
            return px.while_loop(lambda loop: loop[0] < n, lambda loop: (loop[0] + 1, loop[1] * w + 1.0), (0, 1.0))[1]

        def step(h, i):
            return jnp.where(i < n, h * w + 1.0, h), None

        with px.GradientTape(persistent=True) as tape:
            h = jnp.float32(1.0)
            for i in range(most):
                h, _ = step(h, i)
            g = while_loop()
            s, _ = px.scan(step, jnp.float32(1.0), jnp.arange(most))
        refused.append(attempt(tape.gradient, g, w))
        with px.ForwardAccumulator(w, jnp.float32(1.0)) as forward:
            f = while_loop()
        return {
            "python_loop": h,
            "python_loop_dw": tape.gradient(h, w),
            "while_op": g,
            "while_op_dw": forward.jvp(f),
            "scan": s,
            "scan_dw": tape.gradient(s, w),
        }

    out = _in_replicas(strategy, fn)
    check([out.pop("scan"), out.pop("scan_dw")], [golden.expect["while_op"], golden.expect["while_op_dw"]])
    golden.check(out)
    for error in refused:
        assert isinstance(error, TapeError)
        assert "px.scan" in str(error) and "px.ForwardAccumulator" in str(error)


@replay("tape_cond_and_where")
def test_gradients_through_branches(golden, strategy):
    w = _variable(strategy, golden.inputs["w"])

    def fn():
        x = _matrix(golden.inputs["x_base"]) * (_replica() + 1.0)
        even = px.get_replica_context().replica_id % 2 == 0
        with px.GradientTape(persistent=True) as tape:
            tape.watch(x)
            y = px.cond(even, lambda: w * w, lambda: -2.0 * w)
            z = jnp.where(x > 0.0, x * x, -x)
        return {"cond": y, "cond_dw": tape.gradient(y, w), "where": z, "where_dx": tape.gradient(z, x)}

    return _in_replicas(strategy, fn)


@replay("tape_stop_gradient_and_custom_gradient")
def test_stop_gradient_and_custom_gradients(golden, strategy):
    w = _variable(strategy, golden.inputs["w"])

    @jax.custom_vjp
    def f(x, factor):
        return x * x

    f.defvjp(lambda x, factor: (x * x, factor), lambda factor, upstream: (upstream * factor, jnp.zeros_like(factor)))

    def fn():
        with px.GradientTape(persistent=True) as tape:
            y1 = jax.lax.stop_gradient(w * w) * w
            y2 = f(w * 2.0, 100.0 * (_replica() + 1.0))
        return {"y1": y1, "dy1": tape.gradient(y1, w), "y2": y2, "dy2": tape.gradient(y2, w)}

    return _in_replicas(strategy, fn)


@differs("tape_ties_and_kinks", "ties and kinks follow jax")
def test_ties_are_shared_and_kinks_follow_jax(golden, strategy):
    programs = {
        "maximum": (jnp.maximum, [1.0, 2.0, 3.0], [2.0, 2.0, 2.0]),
        "minimum": (jnp.minimum, [1.0, 2.0, 3.0], [2.0, 2.0, 2.0]),
        "reduce_max": (jnp.max, [1.0, 3.0, 3.0]),
        "relu": (jax.nn.relu, [-1.0, 0.0, 1.0]),
        "relu6": (jax.nn.relu6, [-1.0, 0.0, 3.0, 6.0, 7.0]),
        "abs": (jnp.abs, [-1.0, 0.0, 1.0]),
        "clip_1_3": (lambda x: jnp.clip(x, 1.0, 3.0), [0.0, 1.0, 2.0, 3.0, 4.0]),
        "sum_of_squares": (lambda x: (x * x).sum(), [0.0, 0.0]),
        "floor": (jnp.floor, [0.5, 1.0]),
        "sign": (jnp.sign, [-1.0, 0.0, 1.0]),
        "round": (jnp.round, [0.5, 1.2]),
    }

    def fn():
        out = {}
        for name, (f, *xs) in programs.items():
            xs = [jnp.array(x) for x in xs]
            with px.GradientTape() as tape:
                tape.watch(xs)
                y = f(*xs)
            out[name] = {"value": y, "gradients": tape.gradient(y, xs)}
        return out

    parts = strategy.run(fn)
    for replica in range(strategy.num_replicas):
        out = jax.tree.map(lambda x: each(strategy, x)[replica], parts, is_leaf=lambda x: isinstance(x, px.PerReplica))
        for name, (f, *xs) in programs.items():
            golden.check(out[name]["value"], name, "value")
            theirs = jax.vjp(f, *map(jnp.array, xs))[1](jnp.ones(jnp.shape(out[name]["value"])))
            check(out[name]["gradients"], jax.tree.map(lambda g: np.asarray(g).tolist(), list(theirs)))
        for name in ("reduce_max", "relu", "relu6", "sum_of_squares", "sign"):
            golden.check(out[name]["gradients"], name, "gradients")
        # Where the peer gives the whole gradient to the first argument, or none.
        check(out["maximum"]["gradients"], [[0.0, 0.5, 1.0], [1.0, 0.5, 0.0]])
        check(out["minimum"]["gradients"], [[1.0, 0.5, 0.0], [0.0, 0.5, 1.0]])
        check(out["floor"]["gradients"], [[0.0, 0.0]])
        check(out["round"]["gradients"], [[0.0, 0.0]])


# ---- assignments under a tape --------------------------------------------------------------------


@replay("tape_read_assign_read")
def test_both_reads_around_an_assignment_count(golden, strategy):
    w = _variable(strategy, golden.inputs["w"], aggregation="mean")

    def fn():
        with px.GradientTape() as tape:
            p = w * 3.0
            w.assign(golden.inputs["c"] + _replica())
            q = w * w
            y = p * q
        return {"p": p, "q": q, "y": y, "dy_dw": tape.gradient(y, w)}

    for run in runners(strategy):
        w.assign(golden.inputs["w"])
        out = {name: each(strategy, value) for name, value in run(fn).items()}
        golden.check({**out, "w_after": components(w)})


@differs("tape_assign_variable_to_variable", "what a tape watches counts as different on each replica")
def test_assigning_one_variable_to_another(golden, strategy):
    def program(a, b):
        def fn():
            with px.GradientTape() as tape:
                a.assign(b * 2.0)
                y = a * a * (_replica() + 1.0)
            da, db = tape.gradient(y, [a, b])
            assert db is None
            return {"y": y, "da": da}

        return fn

    a, b = _variable(strategy, golden.inputs["a"], name="a"), _variable(strategy, golden.inputs["b"])
    with pytest.raises(AggregationRequiredError, match=r"'a'.*\n(.*\n)*.*outside its `with` block"):
        strategy.run(program(a, b))
    check(components(a), [golden.inputs["a"]] * strategy.num_replicas)

    merged = _variable(strategy, golden.inputs["a"], aggregation="mean")
    out = _in_replicas(strategy, program(merged, b))
    golden.check({**out, "db_is_none": True, "a_after": components(merged)})


@differs("tape_assign_returned_value", "an assignment returns the variable, and what is read from it is watched")
def test_what_an_assignment_returns_is_a_read(golden, strategy):
    w = _variable(strategy, golden.inputs["w"], aggregation="sum")
    missing = []

    def fn():
        x = _replica() + 1.0
        with px.GradientTape() as tape:
            tape.watch(x)
            u = w.assign_add(x)
            y = u * u
        dw, dx = tape.gradient(y, [w, x])
        missing.append(dx is None)
        return {"y": y, "dw": dw}

    for run in runners(strategy):
        w.assign(golden.inputs["w"])
        out = {name: each(strategy, value) for name, value in run(fn).items()}
        golden.check(out["y"], "SUM", "y")
        total = golden.inputs["w"] + sum(golden.inputs["x"])
        check(out["dw"], [2.0 * total] * strategy.num_replicas)
    assert all(missing)

    drifting = _variable(strategy, golden.inputs["w"])
    with pytest.raises(AggregationRequiredError):
        strategy.run(lambda: drifting.assign_add(_replica() + 1.0).value)
    check(drifting, golden.inputs["w"])


# ---- kinds of values -----------------------------------------------------------------------------


@replay("tape_integer_target_and_source")
def test_integers_have_no_gradient(golden, strategy):
    w, k = _variable(strategy, golden.inputs["w"]), _variable(strategy, golden.inputs["k"])

    def fn():
        c = jnp.int32(3)
        with px.GradientTape(persistent=True) as tape:
            with pytest.warns(UserWarning, match="int32 has no gradient"):
                tape.watch(c)
            a = (w * 2.0).astype(jnp.int32)
            b = k.astype(jnp.float32) * w
            d = c * c
        return {
            "a_int_target": tape.gradient(a, w),
            "b_int_source": tape.gradient(b, k),
            "b_float_source": tape.gradient(b, w),
            "c_int_tensor": tape.gradient(d, c),
        }

    for run in runners(strategy):
        for replica in range(strategy.num_replicas):
            golden.check({name: g if g is None else each(strategy, g)[replica] for name, g in run(fn).items()})


@differs("tape_gather_rows", "gradients are dense arrays")
def test_gradient_of_looked_up_rows_adds_up(golden, strategy):
    table = _variable(strategy, _matrix(golden.inputs["table"]))

    def fn(rows):
        with px.GradientTape() as tape:
            loss = (table[rows] ** 2).sum() * (_replica() + 1.0)
        return {"loss": loss, "gradient": tape.gradient(loss, table)}

    out = _in_replicas(strategy, fn, per_replica(strategy, golden.inputs["rows"], np.int32))
    for name, values in out.items():
        golden.check(values, name)
    assert all(isinstance(g, jax.Array) for g in out["gradient"])


@replay("tape_small_network")
def test_gradients_of_a_small_network(golden, strategy):
    names = ("W1", "b1", "W2", "b2")
    W1, b1, W2, b2 = weights = [_variable(strategy, _matrix(golden.inputs[name])) for name in names]

    def fn(X, labels):
        with px.GradientTape() as tape:
            logits = jnp.tanh(X @ W1 + b1) @ W2 + b2
            loss = optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()
        return {"loss": loss, **{f"d{name}": g for name, g in zip(names, tape.gradient(loss, weights))}}

    X, labels = golden.inputs["X"], golden.inputs["labels"]
    return _in_replicas(strategy, fn, per_replica(strategy, X), per_replica(strategy, labels, np.int32))
