"""`cond`, `while_loop` and `scan`: as in JAX, and as the same code in Python, with variables in the bodies."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import phalanx as px
from phalanx.errors import (
    AggregationRequiredError,
    ArgumentError,
    ArgumentTypeError,
    StrategyError,
    TapeError,
    TracingError,
    VariableWriteError,
)

XS = jnp.asarray([1.0, 2.0, 3.0])
TRUE, FALSE = jnp.asarray(True), jnp.asarray(False)


def in_function(fn, *args):
    return px.function(fn)(*args)


def eagerly(fn, *args):
    return fn(*args)


class Replicas:
    """Runs a function in the replicas of a strategy; results are those of all replicas, which must agree."""

    def __init__(self, n, traced):
        self.strategy = px.Mirrored(jax.devices()[:n])
        self.traced = traced

    def __call__(self, fn, *args):
        def run(*args):
            return self.strategy.run(fn, args=args)

        result = px.function(run)(*args) if self.traced else run(*args)

        def same(x):
            if not isinstance(x, px.PerReplica):
                return x
            for part in x.values[1:]:
                np.testing.assert_array_equal(part, x.values[0])
            return x.values[0]

        return jax.tree.map(same, result, is_leaf=lambda x: isinstance(x, px.PerReplica))


PLACES = {"eager": eagerly, "function": in_function, "3 replicas": Replicas(3, traced=True)}


@pytest.fixture(params=PLACES.values(), ids=PLACES)
def place(request):
    return request.param


traced_places = pytest.mark.parametrize("place", [in_function, PLACES["3 replicas"]], ids=["function", "3 replicas"])


def close(found, expected):
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6), found, expected)
    assert jax.tree.structure(found) == jax.tree.structure(expected)


# ---- as in JAX -----------------------------------------------------------------------------------


class State(NamedTuple):
    n: Any
    total: Any


CASES = {
    "cond": lambda lax: lambda x: lax.cond(x[0] > 0, jnp.sin, jnp.cos, x),
    "cond, other branch": lambda lax: lambda x: lax.cond(x[0] > 9, jnp.sin, jnp.cos, x),
    "cond with two operands": lambda lax: (
        lambda x: lax.cond(x[0] > 0, lambda a, b: {"s": a + b["k"]}, lambda a, b: {"s": a * 2}, x, {"k": x})
    ),
    "while_loop": lambda lax: lambda x: lax.while_loop(lambda c: c[0] < 5, lambda c: (c[0] + 1, c[1] * 2), (0, x)),
    "while_loop over a named tuple": lambda lax: (
        lambda x: lax.while_loop(lambda s: s.total.sum() < 50, lambda s: State(s.n + 1, s.total * 1.5), State(0, x))
    ),
    "while_loop without a step": lambda lax: lambda x: lax.while_loop(lambda c: c.sum() < 0, lambda c: c + 1, x),
    "bool carry": lambda lax: lambda x: lax.while_loop(lambda c: c[0], lambda c: (c[1] < 3, c[1] + 1), (True, 0)),
    "scan": lambda lax: lambda x: lax.scan(lambda c, r: (c + r, c * r), 0.0, x),
    "scan backwards": lambda lax: lambda x: lax.scan(lambda c, r: (c + r, c), 0.0, x, reverse=True),
    "scan, unrolled": lambda lax: lambda x: lax.scan(lambda c, r: (c + r, c), 0.0, x, unroll=2),
    "scan, all unrolled": lambda lax: lambda x: lax.scan(lambda c, r: (c + r, c), 0.0, x, unroll=True),
    "scan without xs": lambda lax: lambda x: lax.scan(lambda c, _: (c * 2, c.sum()), x, None, length=4),
    "scan without a carry": lambda lax: lambda x: lax.scan(lambda _, r: (None, r * 2), None, x),
    "scan over a pytree": lambda lax: (
        lambda x: lax.scan(lambda c, r: (c + r["a"], (r["b"], None)), 0.0, {"a": x, "b": (x > 1, x[:, None])})
    ),
    "scan of no rows": lambda lax: lambda x: lax.scan(lambda c, r: (c + r, c), 1.0, x[:0]),
    "scan of no steps": lambda lax: lambda x: lax.scan(lambda c, _: (c + 1, c), x, length=0),
    "bool results": lambda lax: lambda x: lax.scan(lambda c, r: (~c, r > 1), jnp.asarray(True), x),
    "nested": lambda lax: (
        lambda x: lax.scan(
            lambda c, r: (
                lax.while_loop(lambda k: k < 10, lambda k: k + r, c * 0) + c,
                lax.cond(r > 1.5, lambda: lax.scan(lambda a, b: (a + b, None), 0.0, x)[0], lambda: -r),
            ),
            0.0,
            x,
        )
    ),
}


PLACES_OF_CASES = {**PLACES, "1 replica": Replicas(1, traced=False)}


@pytest.mark.parametrize("place", PLACES_OF_CASES.values(), ids=PLACES_OF_CASES)
def test_they_compute_what_jax_computes(place):
    def all_cases(lax):
        return lambda x: {name: case(lax)(x) for name, case in CASES.items()}

    expected = in_function(all_cases(jax.lax), XS)
    found = place(all_cases(px), XS)
    for name in CASES:
        close(found[name], expected[name])
        dtypes = [[x.dtype for x in jax.tree.leaves(result[name])] for result in (found, expected)]
        assert dtypes[0] == dtypes[1], name


@traced_places
def test_random_keys_are_carried_and_scanned_over(place):
    def draw(key):
        _, ys = px.scan(lambda k, _: (jax.random.split(k)[0], jax.random.uniform(k)), key, length=3)
        _, zs = px.scan(lambda _, k: (None, jax.random.uniform(k)), None, jax.random.split(key, 2))
        return ys, zs

    ys, zs = place(draw, jax.random.key(0))
    assert len({*ys.tolist(), *zs.tolist()}) >= 4


NUMBERS = [
    (0, lambda c, x: c + 1, jnp.int32),
    (0, lambda c, x: c + x, jnp.float32),
    (0, lambda c, x: c + 0.5, jnp.float32),
    (0.0, lambda c, x: c + 1, jnp.float32),
    (0.0, lambda c, x: jnp.float16(1) + c, jnp.float16),
    (0, lambda c, x: jnp.int8(1) + c, jnp.int8),
    (jnp.float16(0), lambda c, x: 1, jnp.float16),
    (jnp.int32(0), lambda c, x: c + 1, jnp.int32),
    (False, lambda c, x: True, jnp.bool_),
    (1j, lambda c, x: c * x, jnp.complex64),
]


@traced_places
def test_numbers_in_the_carry_take_the_type_that_the_body_gives_them(place):
    def loops(xs):
        def both(init, body):
            scanned, _ = px.scan(lambda c, x: (body(c, x), None), init, xs)
            looped = px.while_loop(lambda c: c[0] < 3, lambda c: (c[0] + 1, body(c[1], xs[c[0]])), (0, init))
            return scanned, looped[1]

        return [both(init, body) for init, body, _ in NUMBERS]

    for (scanned, looped), (value, body, dtype) in zip(place(loops, XS), NUMBERS):
        for x in XS:
            value = body(value, x)
        assert scanned.dtype == looped.dtype == dtype
        assert scanned == looped == value


def test_numbers_in_branches_meet_in_one_type():
    pairs = [(1, 2, jnp.int32), (1, 2.5, jnp.float32), (1.5, jnp.float16(2), jnp.float16), (True, False, jnp.bool_)]

    @px.function
    def choose(pred):
        def both(one, two):
            return px.cond(pred, lambda: one, lambda: two), px.cond(~pred, lambda: two, lambda: one)

        return [both(one, two) for one, two, _ in pairs]

    for pred in (True, False):
        for found, (one, two, dtype) in zip(choose(jnp.asarray(pred)), pairs):
            assert all(x.dtype == dtype and x == (one if pred else two) for x in found)


def test_a_python_condition_runs_one_branch_only():
    ran = []
    for pred in (True, False, 1, np.bool_(False), TRUE, px.Variable(False)):
        px.cond(pred, lambda: ran.append("true"), lambda: ran.append("false"))
    assert ran == ["true", "false"] * 3


def test_bodies_run_once_for_each_trace():
    runs = []

    def body(c, x):
        runs.append("body")
        return c + x, c

    def test(c):
        runs.append("test")
        return c < 3.0

    @px.function
    def loops(xs):
        px.scan(body, jnp.float32(0), xs)
        px.while_loop(test, lambda c: body(c, 1.0)[0], jnp.float32(0))
        return px.cond(xs[0] > 0, lambda: body(1.0, 1.0)[0], lambda: 0.0)

    for _ in range(2):
        loops(XS)
    assert runs == ["body", "body", "test", "body"]
    runs.clear()
    for start in (0.0, 1.0):
        px.scan(body, jnp.float32(start), XS)
    assert runs == ["body"]


def test_printing_happens_once_for_each_step(capfd):
    def body(c, x):
        jax.debug.print("step {x}", x=x)
        return c, None

    for _ in range(2):
        px.scan(body, 0, XS)
    px.function(lambda p: px.cond(p, lambda: jax.debug.print("yes"), lambda: jax.debug.print("no")))(TRUE)
    jax.effects_barrier()
    assert capfd.readouterr().out.split() == ["step", "1.0", "step", "2.0", "step", "3.0"] * 2 + ["yes"]


# ---- variables -----------------------------------------------------------------------------------


def test_variables_are_read_and_written_step_by_step(place):
    v, n = px.Variable(1.0), px.Variable(0)

    def program(xs):
        def step(total, x):
            v.assign(v * x)
            n.assign_add(1)
            return total + v, v.value

        def body(i):
            v.assign_sub(0.5)
            return i + n

        looped = px.while_loop(lambda i: i + v < 100, body, 0)
        total, seen = px.scan(step, 0.0, xs)
        chosen = px.cond(v > 0, lambda: v.assign(-v).value, lambda: v.assign_add(n.astype(float)).value)
        return looped, total, seen, chosen, v.value

    def by_hand(xs):
        value, count, i, total, seen = 1.0, 0, 0, 0.0, []
        n.assign(40)
        count = 40
        while i + value < 100:
            value, i = value - 0.5, i + count
        for x in xs.tolist():
            value, count = value * x, count + 1
            total, seen = total + value, [*seen, value]
        value = -value if value > 0 else value + count
        return i, total, seen, value, count

    i, total, seen, value, count = by_hand(XS)
    looped, *found = place(program, XS)
    assert int(looped) == i
    close([np.asarray(x).tolist() for x in found], [total, seen, value, value])
    assert (float(v), int(n)) == (value, count)


def test_a_variable_written_by_one_branch_keeps_its_value_in_the_other(place):
    v, w = px.Variable(1.0), px.Variable(10.0)

    def program(pred):
        px.cond(pred, lambda: v.assign_add(1.0).value, lambda: w.assign_add(1.0).value)
        return v.value, w.value

    assert [float(x) for x in place(program, TRUE)] == [2.0, 10.0]
    assert [float(x) for x in place(program, FALSE)] == [2.0, 11.0]


def test_loops_of_loops_carry_variables(place):
    v = px.Variable(0.0)

    def inner(c, x):
        px.cond(x > 1.5, lambda: v.assign_add(x).shape, lambda: v.assign_sub(x).shape)
        return c, v.value

    def outer(c, x):
        _, ys = px.scan(inner, c, XS)
        px.while_loop(lambda i: i < 2, lambda i: i + (v.assign_add(0.5), 1)[1], 0)
        return c, ys.sum()

    _, sums = place(lambda xs: px.scan(outer, 0, xs), XS)
    value, expected = 0.0, []
    for _ in range(3):
        rows = []
        for x in (1.0, 2.0, 3.0):
            value += x if x > 1.5 else -x
            rows.append(value)
        value += 1.0
        expected.append(sum(rows))
    assert sums.tolist() == expected and float(v) == value


def test_indexed_updates_and_keys_in_variables(place):
    table = px.Variable(jnp.zeros(4))
    key = px.Variable(jax.random.key(0))

    def step(c, i):
        table.at[i].add(1.0)
        now, following = jax.random.split(key.value)
        key.assign(following)
        return c, jax.random.uniform(now)

    _, draws = place(lambda ids: px.scan(step, 0, ids), jnp.asarray([0, 2, 2]))
    assert table.numpy().tolist() == [1.0, 0.0, 2.0, 0.0]
    assert len(set(draws.tolist())) == 3


def test_an_exception_in_a_body_leaves_the_variables_as_they_were(place):
    v = px.Variable(1.0)

    def body(c, x):
        v.assign(x)
        raise KeyError("from the body")

    for loop in (
        lambda xs: (v.assign(7.0), px.scan(body, 0.0, xs))[1],
        lambda xs: px.while_loop(lambda c: c < 3, lambda c: body(c, 2.0), 0.0),
        lambda xs: px.cond(xs[0] > 0, lambda: body(0.0, 2.0), lambda: 1.0),
    ):
        before = float(v)
        with pytest.raises(KeyError, match="from the body"):
            place(loop, XS)
        if place is not eagerly:  # there the lines before a loop have run
            assert float(v) == before


def test_the_loop_in_the_function_sees_an_assignment_before_it_and_after_it():
    v = px.Variable(1.0)

    def body(c, x):
        return c + v * x, None

    @px.function
    def program(xs):
        first, _ = px.scan(body, 0.0, xs)
        v.assign(10.0)
        second, _ = px.scan(body, 0.0, xs)
        return first, second

    assert [float(x) for x in program(XS)] == [6.0, 60.0]
    assert [float(x) for x in program(XS)] == [60.0, 60.0]
    v.assign(2.0)
    assert float(px.scan(body, 0.0, XS)[0]) == 12.0


# ---- in replicas ---------------------------------------------------------------------------------


def replica_id():
    return px.get_replica_context().replica_id


@pytest.fixture
def three():
    return px.Mirrored(jax.devices()[:3])


@pytest.mark.parametrize(
    ("aggregation", "each"),
    [("sum", lambda x: 3 * x + 3), ("mean", lambda x: x + 1), ("only_first_replica", lambda x: x)],
)
def test_updates_in_bodies_merge_by_the_aggregation(three, aggregation, each):
    v = px.Variable(0.0, aggregation=aggregation)

    def replica(xs):
        def step(c, x):
            v.assign_add(x + replica_id())
            return c, v.value

        _, ys = px.scan(step, 0, xs)
        px.cond(xs[0] > 0, lambda: step(0, xs[0]), lambda: (0, v.value))
        px.while_loop(lambda i: i < 1, lambda i: step(i, xs[0])[0] + 1, 0)
        return ys

    steps = [each(x) for x in (1.0, 2.0, 3.0, 1.0, 1.0)]
    for run in (three.run, px.function(three.run)):
        v.assign(0.0)
        assert run(replica, args=(XS,)).tolist() == list(np.cumsum(steps[:3]))
        assert [float(c) for c in v.components] == [sum(steps)] * 3


def test_each_replica_updates_its_own_component(three):
    v = px.Variable(0.0, synchronization="on_read", aggregation="sum")

    def replica(xs):
        px.scan(lambda c, x: (c, v.assign_add(x * replica_id()).value), 0, xs)
        px.cond(replica_id() == 1, lambda: v.assign_add(100.0).shape, lambda: v.assign_sub(1.0).shape)
        px.while_loop(lambda i: i < replica_id(), lambda i: i + (v.assign_add(0.5), 1)[1], 0)

    for _ in range(2):
        three.run(replica, args=(XS,))
    assert [float(c) for c in v.components] == [-2.0, 213.0, 24.0]
    assert float(v) == 235.0


def test_branches_that_only_compute_may_be_chosen_by_each_replica(three):
    w = px.Variable(2.0)

    def replica():
        i = replica_id()
        chosen = px.cond(i == 1, lambda: w * 10, lambda: w.value)
        counted = px.while_loop(lambda c: c < 5 * i, lambda c: c + 2, 0)
        scanned, _ = px.scan(lambda c, x: (px.cond(x > i, lambda: c + x * w, lambda: c), None), 0.0, XS)
        return chosen, counted, scanned

    chosen, counted, scanned = three.run(replica)
    assert [float(x) for x in chosen.values] == [2.0, 20.0, 2.0]
    assert [int(x) for x in counted.values] == [0, 6, 10]
    assert [float(x) for x in scanned.values] == [12.0, 10.0, 6.0]


def differing(construct, update):
    if construct == "cond":
        return lambda: px.cond(replica_id() == 0, lambda: (update(), 1)[1], lambda: 1)
    return lambda: px.while_loop(lambda i: i < replica_id(), lambda i: (update(), i + 1)[1], 0)


@pytest.mark.parametrize("construct", ["cond", "while_loop"])
def test_a_condition_that_differs_must_not_make_replicas_wait_or_drift(three, construct):
    plain, summed = px.Variable(1.0, name="plain"), px.Variable(1.0, aggregation="sum")
    context = px.get_replica_context
    for update, error, words in (
        (lambda: summed.assign_add(1.0), StrategyError, "the body reduces over them"),
        (lambda: context().all_reduce("sum", 1.0), StrategyError, "would be waited for for ever"),
        (lambda: plain.assign(5.0), AggregationRequiredError, r"'plain' is mirrored .* assigned at .*_flow.py:\d+"),
        (lambda: plain.assign(replica_id() * 1.0), AggregationRequiredError, "'plain' is mirrored"),
    ):
        for run in (three.run, px.function(three.run)):
            with pytest.raises(error, match=words):
                run(differing(construct, update))
    assert (float(plain), float(summed)) == (1.0, 1.0)


def test_a_condition_that_is_reduced_first_lets_branches_reduce(three):
    v = px.Variable(0.0, aggregation="mean")

    def replica(x):
        context = px.get_replica_context()
        any_large = context.all_reduce("sum", (x + replica_id() > 2).astype(int)) > 0
        px.cond(any_large, lambda: v.assign_add(context.all_reduce("sum", x * replica_id())).shape, lambda: v.shape)
        return px.while_loop(lambda c: context.all_reduce("sum", c * 1.0) < 20, lambda c: c + 1 + replica_id() * 0, 0)

    counts = three.run(replica, args=(1.0,))
    assert float(v) == 3.0
    assert {int(c) for c in three.local_results(counts)} == {7}


@pytest.mark.parametrize("nested", [False, True], ids=["direct", "nested function"])
def test_gradient_accumulation_with_an_update_every_k_steps(nested):
    """Gradients are applied inside a condition that all replicas share."""
    x = np.linspace(-1, 1, 24, dtype=np.float32).reshape(6, 4)

    def train(n):
        strategy = px.Mirrored(jax.devices()[:n])
        with strategy.scope():
            w = px.Variable([0.5], name="w")
            accumulated = px.Variable(np.zeros(1, np.float32), trainable=False, aggregation="sum")
            count = px.Variable(0)
        optimizer = px.Optimizer(optax.adam(0.1))

        def apply():
            optimizer.apply_gradients([(accumulated.value, w)], reduce=None)
            accumulated.assign(np.zeros(1, np.float32) / strategy.num_replicas)

        def update(rows):
            with px.GradientTape() as tape:
                loss = ((w * rows - 1) ** 2).sum() / 4
            accumulated.assign_add(tape.gradient(loss, w))
            count.assign_add(1)
            px.cond(count % 3 == 0, lambda: (apply(), 0)[1], lambda: 0)

        inner = px.function(update) if nested else update
        step = px.function(lambda rows: strategy.run(inner, args=(rows,)))
        for batch in x:
            step(strategy.distribute_values_from_function(lambda c: batch.reshape(n, -1)[c.replica_id]))
        return [np.asarray(v) for v in (w, accumulated, count, *optimizer.variables)]

    for a, b in zip(train(4), train(1)):
        np.testing.assert_allclose(a, b, rtol=1e-5)


@traced_places
def test_a_training_loop_on_the_device(place):
    """An optimizer step in a scan, against the same steps in Python."""
    xs = jnp.asarray(np.linspace(-1, 1, 8, dtype=np.float32).reshape(4, 2))

    def train(run_loop):
        w = px.Variable([1.0, -1.0])
        optimizer = px.Optimizer(optax.adam(0.1))
        optimizer.build([w])

        def step(c, x):
            with px.GradientTape() as tape:
                loss = ((w * x - 1) ** 2).sum()
            optimizer.apply_gradients([(tape.gradient(loss, w), w)], reduce="mean")
            return c + 1, loss

        losses = run_loop(step)
        return [np.asarray(losses), w.numpy(), *map(np.asarray, optimizer.variables)]

    def on_device(step):
        return place(lambda xs: px.scan(step, 0, xs)[1], xs)

    def in_python(step):
        return jnp.stack([step(0, x)[1] for x in xs])

    for a, b in zip(train(on_device), train(in_python)):
        np.testing.assert_allclose(a, b, rtol=2e-5)


# ---- under a tape --------------------------------------------------------------------------------


def loss_by_scan(lax, read, x):
    def step(c, row):
        w, b = read()
        c = jnp.tanh(c * w + row)
        return c, lax.cond(row > 1.5, lambda: c * b, lambda: c - w)

    c, ys = lax.scan(step, x[0], x)
    return (c + ys.sum()) ** 2


@pytest.mark.parametrize("inside", [True, False], ids=["tape inside", "tape outside"])
def test_gradients_of_what_bodies_read_are_jaxs(place, inside):
    w, b = px.Variable(0.7), px.Variable(-0.3)

    def gradients(x):
        with px.GradientTape() as tape:
            tape.watch(x)
            loss = (
                loss_by_scan(px, lambda: (w.value, b.value), x)
                if inside
                else px.function(functools.partial(loss_by_scan, px, lambda: (w.value, b.value)))(x)
            )
        return loss, tape.gradient(loss, [w, b, x])

    expected = jax.value_and_grad(lambda p: loss_by_scan(jax.lax, lambda: p[:2], p[2]))([w.value, b.value, XS])
    loss, grads = place(gradients, XS)
    close([loss, *grads], [expected[0], *expected[1]])


def test_second_derivatives_through_a_scan():
    w = px.Variable(0.7)

    def loss(read):
        return px.scan(lambda c, x: (jnp.sin(c * read() + x), None), 0.1, XS)[0]

    with px.GradientTape() as outer:
        with px.GradientTape() as tape:
            y = loss(lambda: w.value)
        first = tape.gradient(y, w)
    second = outer.gradient(first, w)

    def plain(p):
        return jax.lax.scan(lambda c, x: (jnp.sin(c * p + x), None), 0.1, XS)[0]

    close([first, second], [jax.grad(plain)(0.7), jax.grad(jax.grad(plain))(0.7)])


def test_the_gradient_of_a_variable_that_a_body_assigns_is_that_of_its_reads(place):
    """As in Python, where each read after an assignment starts anew; assignments carry no gradient."""

    def by_hand(v, xs):
        total = 0.0
        for x in xs:
            total = total + v * x
            v.assign(v * 2.0)
        return total * v

    def by_scan(v, xs):
        def step(c, x):
            c = c + v * x
            v.assign(v * 2.0)
            return c, None

        return px.scan(step, 0.0, xs)[0] * v

    def by_cond(v, xs):
        def branch():
            y = v * xs.sum()
            v.assign(v * 2.0)
            return y + v * 3.0

        return px.cond(xs[0] > 0, branch, lambda: 0.0)

    def branch_by_hand(v, xs):
        y = v * xs.sum()
        v.assign(v * 2.0)
        return y + v * 3.0

    for program, plain in ((by_scan, by_hand), (by_cond, branch_by_hand)):
        for inside in (True, False):

            def gradient(xs, v, program):
                with px.GradientTape() as tape:
                    y = program(v, xs) if inside else px.function(functools.partial(program, v))(xs)
                return y, tape.gradient(y, v)

            v, w = px.Variable(1.0, aggregation="mean"), px.Variable(1.0)
            found = place(functools.partial(gradient, v=v, program=program), XS)
            expected = gradient(XS, v=w, program=plain)
            close(found, expected)
            assert float(v) == float(w)


def test_assigned_values_carry_no_gradient_to_what_they_came_from(place):
    v = px.Variable(1.0, aggregation="mean")

    def gradient(x):
        with px.GradientTape() as tape:
            tape.watch(x)

            def step(c, row):
                v.assign(row * 5.0)
                return c + row * v, None

            y, _ = px.scan(step, 0.0, x)
        return tape.gradient(y, x)

    assert place(gradient, XS).tolist() == [5.0, 10.0, 15.0]


def test_while_loops_have_forward_derivatives_and_say_that_they_have_no_others():
    w = px.Variable(2.0)

    def power(n):
        return px.while_loop(lambda c: c[0] < n, lambda c: (c[0] + 1, c[1] * w), (0, 1.0))[1]

    with px.ForwardAccumulator([w], [jnp.float32(1.0)]) as accumulator:
        y = power(3)
    assert (float(y), float(accumulator.jvp(y))) == (8.0, 12.0)
    with px.GradientTape() as tape:
        y = power(3)
    with pytest.raises(TapeError, match=r"cannot be differentiated backwards.* px\.scan"):
        tape.gradient(y, w)


def test_under_jax_transformations_bodies_read_variables_and_must_not_write_them():
    w = px.Variable(2.0)

    def reading(x):
        return px.scan(lambda c, row: (px.cond(row > 1, lambda: c + w * row, lambda: c - row), None), 0.0, x)[0]

    def writing(x):
        return px.scan(lambda c, row: (c + w.assign_add(row).value, None), 0.0, x)[0]

    def by_hand(x):
        return sum(jnp.where(row > 1, w * row, -row) for row in x)

    close(jax.grad(reading)(XS), jax.grad(by_hand)(XS))
    batch = jnp.stack([XS, -XS])
    close(jax.vmap(reading)(batch), jax.vmap(by_hand)(batch))
    for transform in (jax.grad, lambda f: lambda x: jax.vmap(f)(x[None])):
        with pytest.raises(VariableWriteError, match=r"px\.GradientTape"):
            transform(writing)(XS)
    assert float(w) == 2.0


# ---- mistakes ------------------------------------------------------------------------------------


def cond_of(*args, pred=TRUE):
    return lambda: in_function(lambda p: px.cond(p, *args), pred)


MISTAKES = {
    "pred is no scalar": (lambda: px.cond(XS > 0, lambda: 1, lambda: 2), ArgumentError, r"got shape \(3,\).*\.any\(\)"),
    "pred is text": (lambda: px.cond("a", lambda: 1, lambda: 2), ArgumentTypeError, "pred must be True, .* got str"),
    "no function": (cond_of(1, lambda: 2), ArgumentTypeError, "cond: true_fun must be a function, got int 1"),
    "arity of a branch": (cond_of(lambda x: x, lambda: 2), ArgumentTypeError, "true_fun is called with 0 arguments"),
    "structures of branches": (cond_of(lambda: (1, 2), lambda: [1, 2]), ArgumentError, r"got \(\*, \*\) .* \[\*, \*\]"),
    "nothing and something": (cond_of(lambda: None, lambda: 1), ArgumentError, r"got None from true_fun and \*"),
    "dtypes of branches": (cond_of(lambda: jnp.int32(1), lambda: jnp.float32(1)), ArgumentError, "result 0 is int32"),
    "a number of another kind": (cond_of(lambda: jnp.int32(1), lambda: 2.5), ArgumentError, "must return the same"),
    "shapes of branches": (cond_of(lambda: XS, lambda: XS[:2]), ArgumentError, r"float32\[3\] in true_fun and"),
    "text from a branch": (cond_of(lambda: "a", lambda: "b"), ArgumentTypeError, "must return arrays .* str 'a'"),
    "an object from a branch": (cond_of(lambda: {"k": object()}, lambda: 1), ArgumentTypeError, r"at \[...\]\['k'\]"),
    "carry of another dtype": (
        lambda: px.scan(lambda c, x: (c + x, c), jnp.int32(0), XS),
        ArgumentError,
        r"scan: leaf 0 of the carry is int32\[\] and became float32\[\]",
    ),
    "carry of another kind": (
        lambda: px.while_loop(lambda c: c < 5, lambda c: c + 0.5, jnp.int32(0)),
        ArgumentError,
        "while_loop: leaf 0 of the carry is int32",
    ),
    "carry of another shape": (
        lambda: px.scan(lambda c, x: (jnp.append(c, x), c), jnp.ones(1), XS),
        ArgumentError,
        r"is float32\[1\] and became float32\[2\]",
    ),
    "carry of another structure": (
        lambda: px.while_loop(lambda c: c[0] < 3, lambda c: [c[0] + 1], (0,)),
        ArgumentError,
        r"keep its structure, \(\*,\); the body returned \[\*\]",
    ),
    "no pair": (lambda: px.scan(lambda c, x: c, 1.0, XS), ArgumentError, r"must return a pair \(carry, y\), got \*"),
    "three results": (lambda: px.scan(lambda c, x: (c, c, c), 1.0, XS), ArgumentError, r"got \(\*, \*, \*\)"),
    "text as a row": (lambda: px.scan(lambda c, x: (c, "a"), 1.0, XS), ArgumentTypeError, "got str 'a'"),
    "text in the carry": (lambda: px.scan(lambda c, x: (c, x), "a", XS), ArgumentTypeError, "got str 'a'"),
    "arity of f": (lambda: px.scan(lambda c: c, 1.0, XS), ArgumentTypeError, "scan: f is called with 2 arguments"),
    "no rows": (lambda: px.scan(lambda c, x: (c, x), 1.0), ArgumentError, "give xs, or the number of steps as length"),
    "a number for xs": (lambda: px.scan(lambda c, x: (c, x), 1.0, 3.0), ArgumentError, "xs must be arrays"),
    "a list for xs": (lambda: px.scan(lambda c, x: (c, x), 1.0, [1, 2]), ArgumentError, "use jnp.asarray or jnp.stack"),
    "rows that differ": (lambda: px.scan(lambda c, x: (c, x), 1.0, (XS, XS[:2])), ArgumentError, r"got \[2, 3\]"),
    "another length": (lambda: px.scan(lambda c, x: (c, x), 1.0, XS, length=4), ArgumentError, "length is 4, but xs"),
    "a negative length": (lambda: px.scan(lambda c, x: (c, x), 1.0, length=-1), ArgumentError, "at least 0, got -1"),
    "a traced length": (
        lambda: in_function(lambda n: px.scan(lambda c, x: (c, x), 1.0, length=n), 3),
        ArgumentError,
        "a Python int",
    ),
    "unroll": (lambda: px.scan(lambda c, x: (c, x), 1.0, XS, unroll="a"), ArgumentError, "unroll must be .* got 'a'"),
    "a condition of many": (
        lambda: px.while_loop(lambda c: c < 3, lambda c: c + 1, jnp.zeros(2)),
        ArgumentError,
        r"must return a boolean scalar, got bool\[2\]",
    ),
    "no condition": (lambda: px.while_loop(lambda c: None, lambda c: c, 0), ArgumentError, "boolean scalar, got None"),
    "a condition that assigns": (
        lambda: px.while_loop(lambda c: px.Variable(0, name="n").assign(c) < 3, lambda c: c + 1, 0),
        ArgumentError,
        "cond_fun assigns Variable 'n'; assign in body_fun",
    ),
    "a value in a body": (
        lambda: px.scan(lambda c, x: (c if x > 0 else -c, x), 0.0, XS),
        TracingError,
        r"at .*test_control_flow.py:\d+ a Python value was asked for",
    ),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_mistakes_are_explained(name):
    call, error, words = MISTAKES[name]
    with pytest.raises(error, match=words):
        call()
