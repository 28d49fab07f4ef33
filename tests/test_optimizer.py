"""`px.Optimizer`: optax on variables, in eager code, traced functions and replicas."""

from __future__ import annotations

import copy
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import phalanx as px
from phalanx.distribute import collectives
from phalanx.errors import (
    AggregationRequiredError,
    ArgumentError,
    ArgumentTypeError,
    AssignmentError,
    AssignmentTypeError,
    StrategyError,
    VariableWriteError,
)


@pytest.fixture
def two():
    return px.Mirrored(jax.devices()[:2])


def replica_id():
    return px.get_replica_context().replica_id


def values(variables):
    return [v.numpy().tolist() for v in variables]


# ---- in one place --------------------------------------------------------------------------------


@pytest.mark.parametrize("traced", [False, True], ids=["eager", "traced"])
@pytest.mark.parametrize(
    "tx",
    [optax.sgd(0.1), optax.sgd(0.1, momentum=0.9, nesterov=True), optax.adam(0.01), optax.chain(optax.clip_by_global_norm(0.5), optax.adamw(0.01))],
    ids=["sgd", "momentum", "adam", "clipped_adamw"],
)  # fmt: skip
def test_a_step_is_what_optax_does(tx, traced):
    params = [jnp.arange(3.0), jnp.float32(1.0)]
    variables = [px.Variable(p) for p in params]
    optimizer, opt_state = px.Optimizer(tx), tx.init(params)

    def step(grads):
        optimizer.apply_gradients(zip(grads, variables))

    step = px.function(step) if traced else step
    for i in range(3):
        grads = [jnp.ones(3) * (i + 1), jnp.float32(i)]
        step(grads)
        updates, opt_state = tx.update(grads, opt_state, params)
        params = optax.apply_updates(params, updates)
    np.testing.assert_allclose(variables[0].numpy(), params[0], rtol=1e-6)
    np.testing.assert_allclose(variables[1].numpy(), params[1], rtol=1e-6)
    for slot, expected in zip(optimizer.variables, jax.tree.leaves(opt_state)):
        np.testing.assert_allclose(slot.numpy(), expected, rtol=1e-6)


def test_the_state_is_made_of_variables():
    w = px.Variable(jnp.ones(2), name="w")
    optimizer = px.Optimizer(optax.adam(0.1))
    assert (optimizer.variables, optimizer.state, repr(optimizer)) == ((), None, "Optimizer(not built)")
    optimizer.build([w])
    assert [v.name for v in optimizer.variables] == ["optimizer[0].count", "optimizer[0].mu[0]", "optimizer[0].nu[0]"]
    assert not any(v.trainable for v in optimizer.variables)
    assert optimizer.state[0].mu[0] is optimizer.variables[1]
    assert repr(optimizer) == "Optimizer(1 variables)"


def test_variables_in_another_order_or_a_part_of_them_are_fine():
    a, b = px.Variable(0.0, name="a"), px.Variable(0.0, name="b")
    optimizer = px.Optimizer(optax.sgd(1.0, momentum=0.5))
    optimizer.build([a, b])
    optimizer.build([b, a])
    optimizer.apply_gradients([(1.0, b), (2.0, a)])
    optimizer.apply_gradients([(1.0, b)])
    assert values([a, b]) == [-2.0, -2.5]


def test_gradients_may_be_numbers_numpy_arrays_and_variables():
    w = px.Variable([1.0, 1.0])
    s = px.Variable(1.0)
    optimizer = px.Optimizer(optax.sgd(1.0))
    optimizer.apply_gradients([(np.ones(2), w), (1, s)])
    optimizer.apply_gradients([(px.Variable([1.0, 1.0]), w), (np.float32(1.0), s)])
    assert values([w, s]) == [[-1.0, -1.0], -1.0]


def test_gradients_of_another_precision_are_converted():
    w = px.Variable(jnp.ones(2), dtype="bfloat16")
    px.Optimizer(optax.sgd(0.5)).apply_gradients([(jnp.ones(2, jnp.float32), w)])
    assert (w.dtype, values([w])) == (jnp.bfloat16, [[0.5, 0.5]])


def test_a_learning_rate_is_assigned_by_hand_without_retracing():
    w = px.Variable(0.0)
    optimizer = px.Optimizer(optax.inject_hyperparams(optax.sgd)(learning_rate=1.0))
    optimizer.build([w])
    step = px.function(lambda: optimizer.apply_gradients([(1.0, w)]))
    step()
    optimizer.state.hyperparams["learning_rate"].assign(10.0)
    step()
    assert float(w) == -11.0
    assert step.trace_count == 1


def test_a_schedule_counts_steps_in_a_variable():
    w = px.Variable(0.0)
    optimizer = px.Optimizer(optax.sgd(lambda count: 1.0 + count))
    step = px.function(lambda: optimizer.apply_gradients([(1.0, w)]))
    for _ in range(3):
        step()
    assert (float(w), step.trace_count) == (-6.0, 1)


@pytest.mark.parametrize("traced", [False, True], ids=["eager", "traced"])
def test_a_schedule_may_read_a_variable(traced):
    w, rate = px.Variable(0.0), px.Variable(1.0, trainable=False)
    optimizer = px.Optimizer(optax.sgd(lambda count: rate.value))
    step = lambda: optimizer.apply_gradients([(1.0, w)])  # noqa: E731
    step = px.function(step) if traced else step
    step()
    rate.assign(5.0)
    step()
    assert float(w) == -6.0


def test_a_constraint_is_applied_after_the_update():
    w = px.Variable([0.5, 0.5], constraint=lambda x: jnp.clip(x, 0.0, 1.0))
    optimizer = px.Optimizer(optax.sgd(1.0))
    optimizer.apply_gradients([([1.0, -1.0], w)])
    assert values([w]) == [[0.0, 1.0]]
    px.function(lambda: optimizer.apply_gradients([([1.0, 0.25], w)]))()
    assert values([w]) == [[0.0, 0.75]]


def test_a_constraint_that_fails_leaves_everything_as_it_was():
    first = px.Variable(1.0, name="first")

    def fails(x):
        raise ZeroDivisionError

    for constraint, error in [
        (fails, ZeroDivisionError),
        (lambda x: x[None], AssignmentError),
        (lambda x: None, ArgumentTypeError),
    ]:
        second = px.Variable(1.0, name="second", constraint=constraint)
        optimizer = px.Optimizer(optax.adam(0.1))
        optimizer.build([first, second])
        before = values([first, second, *optimizer.variables])
        for step in (
            optimizer.apply_gradients,
            px.function(lambda pairs: optimizer.apply_gradients([(1.0, first), (1.0, second)])),
        ):
            with pytest.raises(error):
                step([(1.0, first), (1.0, second)])
        assert values([first, second, *optimizer.variables]) == before


def test_an_update_inside_the_tape_block_is_no_part_of_what_is_differentiated():
    w = px.Variable(3.0)
    optimizer = px.Optimizer(optax.sgd(1.0))
    with px.GradientTape(persistent=True) as tape:
        loss = w * w
        optimizer.apply_gradients([(tape.gradient(loss, w), w)])
        after = w * 1.0
    assert (float(w), float(after)) == (-3.0, -3.0)
    assert float(tape.gradient(loss, w)) == 6.0


def test_snapshots_survive_an_update():
    w = px.Variable([1.0, 2.0])
    optimizer = px.Optimizer(optax.sgd(1.0))
    before = w.value
    for _ in range(3):
        optimizer.apply_gradients([(jnp.ones(2), w)])
    assert before.tolist() == [1.0, 2.0]


def test_two_optimizers_keep_their_own_state():
    a, b = px.Variable(0.0), px.Variable(0.0)
    first, second = px.Optimizer(optax.adam(0.1)), px.Optimizer(optax.sgd(1.0, momentum=0.5))

    @px.function
    def step():
        first.apply_gradients([(1.0, a)])
        second.apply_gradients([(1.0, b)])

    step()
    step()
    assert int(first.state[0].count) == 2
    assert float(b) == -2.5
    assert not set(first.variables) & set(second.variables)


def test_an_optimizer_built_in_the_trace_is_built_once():
    w = px.Variable([1.0, 2.0])
    optimizer = px.Optimizer(optax.adam(0.5))
    step = px.function(lambda: optimizer.apply_gradients([(jnp.ones(2), w)]))
    step()
    step()
    built = optimizer.variables
    step()
    assert all(a is b for a, b in zip(optimizer.variables, built))
    assert int(optimizer.state[0].count) == 3
    np.testing.assert_allclose(w.numpy(), [-0.5, 0.5], atol=1e-4)


def test_a_model_made_in_the_trace_gets_its_optimizer_there():
    made = {}

    @px.function
    def step(x):
        if not made:
            made["w"] = px.Variable(x * 0.0)
            made["optimizer"] = px.Optimizer(optax.sgd(1.0, momentum=0.5))
        made["optimizer"].apply_gradients([(x, made["w"])])

    step(jnp.ones(2))
    step(jnp.ones(2))
    assert values([made["w"]]) == [[-2.5, -2.5]]


def test_copies_of_a_model_and_its_optimizer_train_on_their_own():
    w = px.Variable(0.0)
    optimizer = px.Optimizer(optax.sgd(1.0, momentum=0.5))
    optimizer.apply_gradients([(1.0, w)])
    twin, twin_optimizer = copy.deepcopy((w, optimizer))
    for _ in range(2):
        twin_optimizer.apply_gradients([(1.0, twin)])
    optimizer.apply_gradients([(1.0, w)])
    assert values([w, twin]) == [-2.5, -4.25]


# ---- gradients that are missing ------------------------------------------------------------------


@pytest.mark.parametrize("traced", [False, True], ids=["eager", "traced"])
def test_a_missing_gradient_leaves_the_variable_and_its_state_alone_and_is_named_once(traced):
    used, unused, other = (px.Variable(1.0, name=n) for n in ("used", "unused", "other"))
    optimizer = px.Optimizer(optax.adamw(0.1))
    optimizer.apply_gradients([(1.0, used), (1.0, unused), (1.0, other)])
    before = values([unused, optimizer.state[0].mu[1], optimizer.state[0].nu[1]])

    def step():
        optimizer.apply_gradients([(1.0, used), (None, unused), (None, other)])

    step = px.function(step) if traced else step
    with pytest.warns(
        UserWarning, match="does not depend on Variable 'unused', Variable 'other'; left as it is"
    ) as caught:
        step()
    assert [w.filename for w in caught] == [__file__]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        step()
        px.function(lambda x: step())(1)
    assert values([unused, optimizer.state[0].mu[1], optimizer.state[0].nu[1]]) == before
    assert int(optimizer.state[0].count) == 4
    assert float(used) < 0.7


def test_no_gradient_at_all_is_an_error():
    w, b = px.Variable(1.0, name="w"), px.Variable(1.0, name="b")
    optimizer = px.Optimizer(optax.sgd(0.1))
    with pytest.raises(ArgumentError, match="no gradient at all, for Variable 'w', Variable 'b'.*stop_gradient"):
        optimizer.apply_gradients([(None, w), (None, b)])
    assert values([w, b]) == [1.0, 1.0]


def test_a_gradient_that_is_there_on_one_replica_only_counts_as_zero_on_the_others(strategy):
    with strategy.scope():
        w = px.Variable(1.0)
    optimizer = px.Optimizer(optax.sgd(0.5))

    @px.function
    def step(x):
        def fn(x):
            with px.GradientTape() as tape:
                loss = px.cond(replica_id() == 0, lambda: w.value * x, lambda: x)
            optimizer.apply_gradients([(tape.gradient(loss, w), w)])

        strategy.run(fn, args=(x,))

    step(2.0)
    assert [float(c) for c in w.components] == [0.0] * strategy.num_replicas


# ---- in replicas ---------------------------------------------------------------------------------


@pytest.mark.parametrize(("reduce", "merge"), [("sum", sum), ("mean", np.mean), ("SUM", sum)])
def test_gradients_of_replicas_are_merged_before_the_step(strategy, reduce, merge):
    with strategy.scope():
        w = px.Variable([0.0, 0.0])
    optimizer = px.Optimizer(optax.sgd(1.0, momentum=0.5))

    def fn():
        optimizer.apply_gradients([(jnp.array([1.0, 2.0]) * (1.0 + replica_id()), w)], reduce=reduce)

    strategy.run(fn)
    strategy.run(fn)
    merged = float(merge([1.0 + i for i in range(strategy.num_replicas)]))
    expected = [[-2.5 * merged, -5.0 * merged]] * strategy.num_replicas
    assert [c.value.tolist() for c in w.components] == expected
    (momentum,) = optimizer.variables
    assert len(momentum.components) == strategy.num_replicas
    assert all(c.value.tolist() == [1.5 * merged, 3.0 * merged] for c in momentum.components)


def test_gradients_that_are_reduced_already_are_taken_as_they_are(strategy):
    with strategy.scope():
        w = px.Variable(0.0)
    optimizer = px.Optimizer(optax.sgd(1.0))

    def fn():
        grad = px.get_replica_context().all_reduce("sum", 1.0 + replica_id())
        optimizer.apply_gradients([(grad, w)], reduce=None)

    strategy.run(fn)
    assert float(w) == -sum(range(1, strategy.num_replicas + 1))


def test_gradients_that_are_not_reduced_are_refused_without_a_reduction(strategy):
    with strategy.scope():
        w = px.Variable(0.0, name="w")
    optimizer = px.Optimizer(optax.sgd(1.0))
    with pytest.raises(AggregationRequiredError, match=rf"gradient of Variable 'w' may differ.*{__file__}:\d+"):
        strategy.run(lambda: optimizer.apply_gradients([(1.0 * replica_id(), w)], reduce=None))
    parts = strategy.distribute_values_from_function(lambda c: np.float32(c.replica_id))
    with pytest.raises(AggregationRequiredError, match="gradient of Variable 'w' may differ"):
        optimizer.apply_gradients([(parts, w)], reduce=None)
    assert float(w) == 0.0


def test_summing_what_is_reduced_already_is_warned_of_once(two):
    with two.scope():
        w = px.Variable(0.0, name="w")
    optimizer = px.Optimizer(optax.sgd(1.0))
    with pytest.warns(
        UserWarning, match=r"gradient of Variable 'w' is the same on all replicas and is summed to 2 times"
    ) as caught:
        two.run(lambda: optimizer.apply_gradients([(jnp.float32(1.0), w)]))
    assert [c.filename for c in caught] == [__file__]
    two.run(lambda: optimizer.apply_gradients([(jnp.float32(1.0), w)]))
    assert float(w) == -4.0


def test_a_variable_with_an_aggregation_is_updated_once(strategy):
    with strategy.scope():
        variables = {a: px.Variable(0.0, aggregation=a) for a in ("none", "sum", "mean", "only_first_replica")}
    optimizer = px.Optimizer(optax.sgd(1.0))
    strategy.run(
        lambda: optimizer.apply_gradients([(1.0 + replica_id(), v) for v in variables.values()], reduce="mean")
    )
    mean = float(np.mean([1.0 + i for i in range(strategy.num_replicas)]))
    assert {a: float(v) for a, v in variables.items()} == dict.fromkeys(variables, -mean)


def test_bucketed_and_single_reductions_give_the_same(strategy, monkeypatch):
    shapes = [(), (3,), (2, 2), (0,), (40, 300), (5,)]
    dtypes = ["float32", "float32", "bfloat16", "float32", "float32", "bfloat16"]

    def train(small):
        monkeypatch.setitem(collectives.SMALL_BYTES, "cpu", small)
        with strategy.scope():
            variables = [px.Variable(jnp.ones(s), dtype=d) for s, d in zip(shapes, dtypes)]
        optimizer = px.Optimizer(optax.adam(0.1))

        def fn():
            grads = [
                jnp.arange(v.size, dtype=v.dtype).reshape(v.shape) * (1 + replica_id()).astype(v.dtype)
                for v in variables
            ]
            optimizer.apply_gradients(zip(grads, variables))

        strategy.run(fn)
        return [v.numpy().astype(np.float32) for v in variables]

    for bucketed, single in zip(train(32 * 1024), train(0)):
        np.testing.assert_array_equal(bucketed, single)


def test_many_small_gradients_take_few_collectives(two):
    with two.scope():
        variables = [px.Variable(jnp.ones(4)) for _ in range(20)]
    optimizer = px.Optimizer(optax.sgd(1.0))
    optimizer.build(variables)

    @px.function
    def step():
        two.run(lambda: optimizer.apply_gradients([(jnp.ones(4) * replica_id(), v) for v in variables]))

    assert step.lower().as_text().count("all_reduce") == 1


def test_per_replica_gradients_are_reduced_outside_replicas_too(strategy):
    with strategy.scope():
        w = px.Variable(0.0)
    optimizer = px.Optimizer(optax.sgd(1.0))
    grads = strategy.distribute_values_from_function(lambda c: np.float32(1 + c.replica_id))
    n = strategy.num_replicas
    total, mean = sum(range(1, n + 1)), np.mean(range(1, n + 1))
    optimizer.apply_gradients([(grads, w)])
    assert float(w) == -total
    with strategy.scope():
        optimizer.apply_gradients([(grads, w)], reduce="mean")
        px.function(lambda g: optimizer.apply_gradients([(g, w)]))(grads)
    assert float(w) == -2 * total - mean

    def merge(s, grad):
        optimizer.apply_gradients([(grad, w)])

    strategy.run(lambda: px.get_replica_context().merge_call(merge, args=(1.0 + replica_id(),)))
    assert float(w) == -3 * total - mean


def test_an_update_outside_replicas_counts_once(strategy):
    with strategy.scope():
        w = px.Variable(0.0)
        optimizer = px.Optimizer(optax.sgd(1.0, momentum=0.5))
        optimizer.apply_gradients([(1.0, w)])
    optimizer.apply_gradients([(1.0, w)])
    assert [float(c) for c in w.components] == [-2.5] * strategy.num_replicas


def test_updates_in_a_loop_on_the_device(two):
    with two.scope():
        w = px.Variable(0.0)
    optimizer = px.Optimizer(optax.sgd(1.0, momentum=0.5))

    @px.function
    def train(xs):
        def fn(xs):
            def body(carry, x):
                optimizer.apply_gradients([(x * (1.0 + replica_id()), w)])
                return carry, w.value

            return px.scan(body, 0, xs)[1]

        return two.run(fn, args=(xs,))

    assert train(jnp.ones(3)).tolist() == [-3.0, -7.5, -12.75]


def test_a_captured_per_replica_gradient_is_refused_in_a_replica(two):
    with two.scope():
        w = px.Variable(0.0, name="w")
    optimizer = px.Optimizer(optax.sgd(1.0))
    parts = two.distribute_values_from_function(lambda c: np.float32(1))
    with pytest.raises(ArgumentTypeError, match="the gradient of Variable 'w' is a PerReplica, in a replica"):
        two.run(lambda: optimizer.apply_gradients([(parts, w)]))
    assert float(w) == 0.0


# ---- what is refused -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("pairs", "error", "words"),
    [
        (lambda v: zip([], []), ArgumentError, "there are no pairs. Was the zip used up already"),
        (lambda v: None, ArgumentTypeError, r"takes pairs, zip\(gradients, variables\), got NoneType"),
        (lambda v: [1.0], ArgumentTypeError, "takes pairs"),
        (lambda v: [(1.0, v, 2)], ArgumentTypeError, "takes pairs"),
        (lambda v: [(v, jnp.ones(2))], ArgumentTypeError, "takes px.Variables, got ArrayImpl"),
        (lambda v: [(jnp.ones(2), v.components[0])], ArgumentTypeError, "takes px.Variables, got Component"),
        (lambda v: [(jnp.ones(3), v)], ArgumentError, r"gradient of Variable 'w' has shape \(3,\), the variable \(2,\)"),
        (lambda v: [(1.0, v)], ArgumentError, r"has shape \(\), the variable \(2,\)"),
        (lambda v: [(jnp.ones(2, complex), v)], AssignmentTypeError, "Variable 'w' has dtype float32, got a value of dtype complex64"),
        (lambda v: [("text", v)], ArgumentTypeError, "Variable 'w': the gradient must be numeric, got str 'text'"),
        (lambda v: [(jnp.ones(2), v), (jnp.ones(2), v)], ArgumentError, "'w' was given twice; add up its gradients"),
        (lambda v: [(jnp.ones(2), v), (1, px.Variable(1, name="steps"))], ArgumentError, "'steps' has dtype int32, which has no gradient"),
        (lambda v: [(1.0, px.Variable(1.0, name="own", synchronization="on_read"))], ArgumentError, "'own' has one component per replica"),
    ],
)  # fmt: skip
def test_wrong_pairs_are_named_and_change_nothing(pairs, error, words):
    v = px.Variable([1.0, 2.0], name="w")
    optimizer = px.Optimizer(optax.adam(0.1))
    with pytest.raises(error, match=words):
        optimizer.apply_gradients(pairs(v))
    optimizer.apply_gradients([(jnp.zeros(2), v)])
    before = values([v, *optimizer.variables])
    with pytest.raises(error, match=words):
        optimizer.apply_gradients(pairs(v))
    assert values([v, *optimizer.variables]) == before


def test_a_zip_that_was_used_up_is_an_error():
    v = px.Variable(1.0)
    optimizer = px.Optimizer(optax.sgd(1.0))
    pairs = zip([1.0], [v])
    optimizer.apply_gradients(pairs)
    with pytest.raises(ArgumentError, match="used up already"):
        optimizer.apply_gradients(pairs)
    optimizer.apply_gradients((g, w) for g, w in [(1.0, v)])
    assert float(v) == -1.0


def test_unknown_variables_are_refused_by_name():
    v, new = px.Variable(1.0, name="v"), px.Variable(1.0, name="new")
    optimizer = px.Optimizer(optax.sgd(1.0))
    optimizer.apply_gradients([(1.0, v)])
    with pytest.raises(
        ArgumentError, match=r"Variable 'new' was not among the variables.*optimizer\.build\(all_variables\)"
    ):
        optimizer.apply_gradients([(1.0, v), (1.0, new)])
    with pytest.raises(ArgumentError, match="it was built for other variables"):
        optimizer.build([v, new])
    assert values([v, new]) == [0.0, 1.0]


@pytest.mark.parametrize(
    ("variables", "error", "words"),
    [
        (3, ArgumentTypeError, "build takes a list of px.Variables, got int"),
        ([1.0], ArgumentTypeError, "build takes px.Variables, got float 1.0"),
        (px.Variable([1.0, 2.0]), ArgumentTypeError, "build takes px.Variables, got ArrayImpl"),
    ],
)
def test_what_an_optimizer_cannot_be_built_for(variables, error, words):
    with pytest.raises(error, match=words):
        px.Optimizer(optax.sgd(1.0)).build(variables)


@pytest.mark.parametrize("tx", [None, "adam", 0.1, optax.adam, object()])
def test_only_optax_transformations_are_taken(tx):
    with pytest.raises(
        ArgumentTypeError, match=r"Optimizer takes an optax transformation such as optax\.adam\(1e-3\), got"
    ):
        px.Optimizer(tx)


def test_an_unknown_reduction_is_refused():
    v = px.Variable(1.0)
    with pytest.raises(ArgumentError, match=r"apply_gradients\(reduce=\.\.\.\): op must be 'sum' or 'mean', got 'avg'"):
        px.Optimizer(optax.sgd(1.0)).apply_gradients([(1.0, v)], reduce="avg")


def test_an_optimizer_of_another_strategy_is_refused_by_name(two):
    with two.scope():
        w = px.Variable(0.0, name="w")
    optimizer = px.Optimizer(optax.adam(1.0))
    two.run(lambda: optimizer.apply_gradients([(1.0 * replica_id(), w)]))
    other = px.Mirrored(jax.devices()[2:4])
    with pytest.raises(
        StrategyError, match=r"Variable 'w' belongs to Mirrored\(cpu:0-1\) and is updated under Mirrored\(cpu:2-3\)"
    ):
        other.run(lambda: optimizer.apply_gradients([(1.0 * replica_id(), w)]))


def test_an_update_in_a_jax_transformation_is_refused():
    w = px.Variable(0.0, name="w")
    optimizer = px.Optimizer(optax.sgd(1.0))
    optimizer.build([w])

    def fn(x):
        optimizer.apply_gradients([(x, w)])
        return x

    for transformation in (lambda: jax.grad(fn)(1.0), lambda: jax.vmap(fn)(jnp.ones(2)), lambda: jax.jit(fn)(1.0)):
        with pytest.raises(VariableWriteError, match="'w' is assigned inside a JAX transformation"):
            transformation()
    assert float(w) == 0.0
