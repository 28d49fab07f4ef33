"""Mistakes in replicas: a Phalanx error that names the variable and the user's line, never JAX's words about replicas."""

from __future__ import annotations

import inspect
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import io_callback

import phalanx as px
from phalanx.errors import (
    AggregationRequiredError,
    ArgumentError,
    ArgumentTypeError,
    AssignmentError,
    FrozenVariableError,
    PhalanxError,
    ReplicaDivergenceError,
    StrategyError,
    TracingError,
    VariableCreationError,
    VariableWriteError,
)

JAX_WORDS = re.compile(
    r"out_specs|in_specs|manual ax|check_vma|pcast|pvary|shard_map inside|ShapedArray|replicat(ed|ion) (over|rule)"
)


@pytest.fixture
def two():
    return px.Mirrored(jax.devices()[:2])


@pytest.fixture
def v(two):
    with two.scope():
        return px.Variable(0.0, name="v")


@pytest.fixture
def total(two):
    with two.scope():
        return px.Variable(0.0, name="total", aggregation="sum")


def replica_id():
    return 1.0 * px.get_replica_context().replica_id


def marked_line(fn) -> str:
    """'file:12' of the line of `fn` that ends with '# here'."""
    lines, start = inspect.getsourcelines(fn)
    (offset,) = [i for i, line in enumerate(lines) if line.rstrip().endswith("# here")]
    return f"{__file__}:{start + offset}"


def refused(two, fn, error, *words) -> str:
    """Run `fn` eagerly and in a traced function; the message of the error, the same for both."""
    messages = []
    for run in (lambda: two.run(fn), px.function(lambda: two.run(fn))):
        with pytest.raises(PhalanxError) as caught:
            run()
        assert type(caught.value) is error, caught.value
        text = str(caught.value).partition("\n-----")[0]
        messages.append(re.sub(r"^<lambda>", fn.__name__, text))
    assert messages[0] == messages[1]
    for word in words:
        assert word in messages[0]
    assert not JAX_WORDS.search(messages[0]), messages[0]
    return messages[0]


# ---- the user's line -----------------------------------------------------------------------------


def test_a_value_that_varies_is_refused_at_the_line_that_assigns_it(two, v):
    def straight():
        v.assign(replica_id())  # here

    def with_increment():
        with px.GradientTape():
            v.assign_add(replica_id() * 2.0)  # here

    @px.function
    def nested(x):
        v.assign(x)  # here

    def in_a_nested_function():
        nested(replica_id())

    def in_a_branch():
        px.cond(
            jnp.bool_(True) & (jnp.ones(()) > 0),
            lambda: v.assign(replica_id()).value,  # here
            lambda: v.value + replica_id(),
        )

    def in_a_scan():
        def body(carry, x):
            v.assign_add(x * replica_id())  # here
            return carry, x

        px.scan(body, 0.0, jnp.ones(2))

    def from_a_helper():
        helper(v)

    def helper(variable):
        variable.at[()].add(replica_id())  # here

    places = {straight: straight, with_increment: with_increment, in_a_nested_function: nested._fn,
              in_a_branch: in_a_branch, in_a_scan: in_a_scan, from_a_helper: helper}  # fmt: skip
    for fn, place in places.items():
        message = refused(two, fn, AggregationRequiredError, "Variable 'v'", marked_line(place))
        assert 'aggregation="sum"' in message
        assert 'all_reduce("sum", value)' in message
        assert 'synchronization="on_read"' in message
    assert [float(c) for c in v.components] == [0.0, 0.0]


def test_mistakes_outside_replicas_are_refused_at_their_line_too(two, v):
    parts = two.distribute_values_from_function(lambda c: np.float32(c.replica_id))
    other = px.Mirrored(jax.devices()[2:4])
    with two.scope():
        sums = px.Variable(0.0, name="sums", synchronization="on_read", aggregation="sum")
        own = px.Variable(0.0, name="own", synchronization="on_read")

    def assigns_parts():
        v.assign(parts)  # here

    def updates():
        two.update(v, lambda variable, x: variable.assign(x), args=(parts,))  # here

    def merges():
        two.run(lambda: px.get_replica_context().merge_call(lambda s, x: v.assign(x), args=(replica_id(),)))  # here

    def adds():
        sums.assign_add(1.0)  # here

    def reads():
        return own + 1.0  # here

    def of_another():
        with other.scope():
            v.assign(1.0)  # here

    def in_another():
        other.run(lambda: v * 2.0)  # here

    for fn, error, name in [
        (assigns_parts, ReplicaDivergenceError, "'v'"),
        (updates, ReplicaDivergenceError, "'v'"),
        (merges, ReplicaDivergenceError, "'v'"),
        (adds, AggregationRequiredError, "'sums'"),
        (reads, AggregationRequiredError, "'own'"),
        (of_another, StrategyError, "'v'"),
        (in_another, StrategyError, "'v'"),
    ]:
        with pytest.raises(error, match=re.escape(marked_line(fn))) as caught:
            fn()
        assert f"Variable {name}" in str(caught.value)
    assert [float(c) for c in (*v.components, *sums.components)] == [0.0] * 4


def test_a_condition_that_varies_is_refused_at_the_line_of_the_branch(two, v, total):
    def assigns():
        px.cond(replica_id() > 0, lambda: v.assign(1.0).value, lambda: v.value)  # here

    def reduces():
        px.cond(replica_id() > 0, lambda: total.assign_add(1.0).value, lambda: total.value)  # here

    def loops():
        px.while_loop(lambda i: i < replica_id(), lambda i: total.assign_add(1.0) * 0.0 + i + 1.0, 0.0)  # here

    refused(two, assigns, AggregationRequiredError, "'v'", marked_line(assigns), "condition")
    refused(two, reduces, StrategyError, marked_line(reduces), "waited for for ever")
    refused(two, loops, StrategyError, marked_line(loops), "waited for for ever")
    assert [float(c) for c in (*v.components, *total.components)] == [0.0] * 4


def test_what_differs_behind_the_back_of_its_type_is_found(two, v):
    def branch():
        v.assign(jax.lax.cond(replica_id() > 0, lambda: 1.0, lambda: 2.0))  # here

    def switch():
        v.assign(jax.lax.switch(replica_id().astype(int), [lambda: 1.0, lambda: 2.0]))  # here

    def loop():
        v.assign(jax.lax.while_loop(lambda i: i < replica_id(), lambda i: i + 1.0, 0.0))  # here

    def fori():
        v.assign(jax.lax.fori_loop(0, replica_id().astype(int), lambda i, x: x + 1.0, 0.0))  # here

    def callback():
        v.assign(io_callback(lambda: np.float32(np.random.rand()), jax.ShapeDtypeStruct((), jnp.float32)))  # here

    def pure_callback():
        v.assign(jax.pure_callback(lambda x: x, jax.ShapeDtypeStruct((), jnp.float32), replica_id()))  # here

    def in_a_jitted_helper():
        helper = jax.jit(lambda x: jax.lax.cond(x > 0, lambda: 1.0, lambda: 2.0) * 3.0)
        v.assign(helper(replica_id()))  # here

    def carried_by_a_scan():
        def body(carry, _):
            return jax.lax.cond(replica_id() > 0, lambda: 1.0, lambda: 2.0) + carry, None

        v.assign(jax.lax.scan(body, 0.0, None, length=2)[0])  # here

    def carried_by_a_loop():
        def body(state):
            return state[0] + 1, jax.lax.cond(replica_id() > 0, lambda: 1.0, lambda: 2.0)

        v.assign(jax.lax.while_loop(lambda state: state[0] < 2, body, (0, 0.0))[1])  # here

    def in_a_checkpoint():
        v.assign(jax.checkpoint(lambda x: jax.lax.cond(x > 0, lambda: 1.0, lambda: 2.0))(replica_id()))  # here

    for fn in (branch, switch, loop, fori, callback, pure_callback, in_a_jitted_helper, carried_by_a_scan,
               carried_by_a_loop, in_a_checkpoint):  # fmt: skip
        refused(
            two, fn, ReplicaDivergenceError, "Variable 'v' is mirrored", f"assigned at {marked_line(fn)}", "may differ"
        )
    assert [float(c) for c in v.components] == [0.0, 0.0]


def test_results_that_differ_behind_the_back_of_their_type_come_back_per_replica(two):
    def fn():
        return (
            jax.lax.cond(replica_id() > 0, lambda: 1.0, lambda: 2.0),
            jax.lax.while_loop(lambda i: i < replica_id(), lambda i: i + 1.0, 0.0),
            jax.lax.cond(px.get_replica_context().num_replicas > 1, lambda: 5.0, lambda: 6.0),
        )

    branch, loop, same = two.run(fn)
    assert [float(x) for x in branch.values] == [2.0, 1.0]
    assert [float(x) for x in loop.values] == [0.0, 1.0]
    assert float(same) == 5.0, "a condition that is the same on all replicas is fine"


def test_branches_and_loops_of_px_say_that_their_results_differ(two, total):
    def fn():
        x = px.cond(replica_id() > 0, lambda: 1.0, lambda: 2.0)
        y = px.while_loop(lambda i: i < replica_id(), lambda i: i + 1.0, 0.0)
        total.assign_add(x)
        return x, y, px.get_replica_context().all_reduce("sum", x + y)

    x, y, reduced = two.run(fn)
    assert [float(a) for a in x.values] == [2.0, 1.0]
    assert [float(a) for a in y.values] == [0.0, 1.0]
    assert (float(reduced), float(total)) == (4.0, 3.0)


def test_replicas_that_would_wait_for_ever_are_found_before_they_run(two, total):
    def in_a_branch():
        jax.lax.cond(replica_id() > 0, lambda x: x + jax.lax.psum(x, "replica"), lambda x: x * 2.0, replica_id())

    def in_a_loop():
        def body(x):
            return x + jax.lax.psum(x, "replica")

        return jax.lax.while_loop(lambda x: x < 10.0, body, 1.0 + replica_id())

    def on_a_hidden_condition():
        chosen = jax.lax.cond(replica_id() > 0, lambda: 1.0, lambda: 2.0)
        px.cond(chosen > 1.5, lambda: total.assign_add(1.0).value, lambda: total.value)

    for fn in (in_a_branch, in_a_loop, on_a_hidden_condition):
        refused(two, fn, StrategyError, "waited for for ever", f"{__file__}:")


def test_library_loops_on_values_that_differ_are_fine(two):
    def fn():
        x = jnp.ones(2) * (1.0 + replica_id())
        solved = jax.scipy.sparse.linalg.cg(lambda y: 2.0 * y, x)[0]
        key = jax.random.fold_in(jax.random.key(0), px.get_replica_context().replica_id)
        drawn = jax.random.poisson(key, 2.0 + replica_id()), jax.random.gamma(key, 2.0)
        return solved, jnp.linalg.eigvalsh(jnp.eye(2) * x), jax.scipy.linalg.expm(jnp.eye(2) * x), drawn

    solved, eigen, exponential, drawn = two.run(fn)
    np.testing.assert_allclose([x for x in solved.values], [[0.5, 0.5], [1.0, 1.0]], rtol=1e-5)
    assert all(isinstance(x, px.PerReplica) for x in (eigen, exponential, *drawn))


# ---- JAX's loops and transformations -------------------------------------------------------------


def test_loops_of_jax_may_start_with_what_is_the_same_on_all_replicas(two):
    rows = np.arange(12, dtype=np.float32).reshape(4, 3) / 10

    def recurrent(x):
        return jax.lax.scan(lambda h, row: (jnp.tanh(h + row), h.sum()), jnp.zeros(3), x)

    def loops(x):
        counted = jax.lax.fori_loop(0, 3, lambda i, total: total + i * x.sum(), 0.0)
        doubled = jax.lax.while_loop(lambda state: state[0] < 3, lambda s: (s[0] + 1, s[1] * 2 + x[0, 0]), (0, 1.0))
        return recurrent(x), counted, doubled[1]

    expected = [loops(rows[:2]), loops(rows[2:])]
    found = two.run(loops, args=(two.split_rows(rows),))
    for i in range(2):
        mine = jax.tree.map(lambda p: p.values[i], found, is_leaf=lambda x: isinstance(x, px.PerReplica))
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6), mine, expected[i])


def test_gradients_go_through_loops_that_start_the_same(strategy):
    rows = np.arange(24, dtype=np.float32).reshape(8, 3) / 10
    with strategy.scope():
        w = px.Variable(np.eye(3, dtype=np.float32))

    def gradient(x):
        def fn(x):
            with px.GradientTape() as tape:
                last, _ = jax.lax.scan(lambda h, row: (jnp.tanh(h @ w.value + row), None), jnp.zeros(3), x)
                loss = (last * last).sum()
            return px.get_replica_context().all_reduce("sum", tape.gradient(loss, w))

        return strategy.run(fn, args=(x,))

    def loss(weights, x):
        last, _ = jax.lax.scan(lambda h, row: (jnp.tanh(h @ weights + row), None), jnp.zeros(3), x)
        return (last * last).sum()

    parts = np.split(rows, strategy.num_replicas)
    expected = sum(jax.grad(loss)(jnp.eye(3), part) for part in parts)
    np.testing.assert_allclose(gradient(strategy.split_rows(rows)), expected, rtol=1e-5)
    assert len(w.components) == strategy.num_replicas


def test_what_jax_does_not_put_together_is_explained(two):
    def cond():
        jax.lax.cond(jnp.ones(()) > 0, lambda: replica_id(), lambda: 2.0)  # here

    def handed_on():
        jax.lax.scan(lambda c, x: ((c[1], c[1] + replica_id()), x), (0.0, 0.0), jnp.arange(3.0))  # here

    def pullback():
        jax.vjp(lambda x: x * replica_id(), replica_id())[1](jnp.ones(()))  # here

    for fn in (cond, handed_on, pullback):
        refused(
            two, fn, TracingError, marked_line(fn), "may differ between the replicas", "px.scan, px.while_loop, px.cond"
        )
    mixed = two.run(lambda: px.scan(lambda c, x: ((c[1], c[1] + replica_id()), x), (0.0, 0.0), jnp.arange(3.0))[0])
    assert [float(x) for x in mixed[0].values] == [0.0, 2.0]


def test_mapping_again_over_devices_is_refused(two):
    def pmap():
        jax.pmap(lambda x: x)(jnp.ones(2))  # here

    def shard_map():
        mapped = jax.shard_map(lambda x: x, mesh=two.mesh, in_specs=jax.P(), out_specs=jax.P())
        mapped(jnp.ones(2))  # here

    for fn in (pmap, shard_map):
        message = refused(two, fn, StrategyError, marked_line(fn))
        assert "Compute on this replica's part" in message


def test_variables_in_raw_jax_transformations_are_refused_at_their_line(two, v):
    def reads():
        return jax.jit(lambda: v * 2.0)()  # here

    def writes():
        jax.vmap(lambda x: v.assign(x).value)(jnp.ones(3))  # here

    refused(two, reads, FrozenVariableError, "Variable 'v'", marked_line(reads))
    refused(two, writes, VariableWriteError, "Variable 'v'", marked_line(writes))


# ---- values that do not belong -------------------------------------------------------------------


def test_traced_values_that_were_kept_are_refused(two, v, total):
    kept = []
    two.run(lambda: kept.append(replica_id()))

    def computes():
        return kept[0] + 1.0

    def assigns():
        total.assign(kept[0])

    def returns():
        return kept[0]

    for fn in (computes, assigns, returns):
        refused(two, fn, TracingError)
    for use in (
        lambda: two.run(lambda x: x, args=(kept[0],)), lambda: px.function(lambda x: x)(kept[0]), lambda: v.assign(kept[0]),
        lambda: px.function(lambda: v.assign(kept[0]))(),
    ):  # fmt: skip
        with pytest.raises((TracingError, AggregationRequiredError)):
            use()
    assert [float(c) for c in (*v.components, *total.components)] == [0.0] * 4


def test_a_tape_of_another_trace_gives_no_gradient(two, v):
    kept = []

    def fn():
        with px.GradientTape(persistent=True) as tape:
            y = v * replica_id()
        kept.append((tape, y))

    two.run(fn)
    tape, y = kept[0]
    for use in (lambda: tape.gradient(y, v), lambda: two.run(lambda: tape.gradient(y, v))):
        with pytest.raises(PhalanxError) as caught:
            use()
        assert not JAX_WORDS.search(str(caught.value))


def test_values_that_do_not_fit_are_refused_at_their_line(two, v):
    with two.scope():
        w = px.Variable(jnp.zeros(3), name="w")

    def shape():
        w.assign(jnp.ones(2) * replica_id())  # here

    def kind():
        w.assign(jnp.ones(3, jnp.int32))  # here

    def index():
        w.at[0].set(jnp.ones(2))  # here

    for fn in (shape, kind, index):
        with pytest.raises(AssignmentError, match=re.escape(marked_line(fn))):
            two.run(fn)
    for value in ("abc", None, object(), [1.0, "a", 2.0], {"a": 1.0}):
        with pytest.raises((ArgumentError, ArgumentTypeError), match="Variable 'w': value"):
            two.run(lambda: w.assign(value))
    assert w.numpy().tolist() == [0.0] * 3


def test_lists_of_traced_values_can_be_assigned(two):
    with two.scope():
        w = px.Variable(jnp.zeros(3), name="w", aggregation="mean")
    two.run(lambda: w.assign([replica_id(), 2.0, 1.0 + replica_id()]))
    assert w.numpy().tolist() == [0.5, 2.0, 1.5]


def test_per_replica_values_that_were_not_passed_in_are_refused(two, v):
    parts = two.distribute_values_from_function(lambda c: np.float32(c.replica_id))
    foreign = px.Mirrored(jax.devices()[2:4]).distribute_values_from_function(lambda c: np.float32(c.replica_id))
    with two.scope():
        own = px.Variable(0.0, name="own", synchronization="on_read", aggregation="sum")
    refused(
        two,
        lambda: own.assign(parts),
        ArgumentTypeError,
        "'own': a PerReplica was assigned in a replica",
        f"{__file__}:",
    )
    refused(two, lambda: v.assign(parts), ArgumentTypeError, "'v': a PerReplica was assigned in a replica")
    refused(two, lambda: parts * 2.0, ArgumentTypeError, "holds one value per replica")
    refused(two, lambda: parts.values, StrategyError, "Pass it to strategy.run as an argument")
    with pytest.raises(
        StrategyError, match=r"Variable 'own', assigned at .*: a PerReplica of Mirrored\(cpu:2-3\) was given to"
    ):
        own.assign(foreign)
    assert [float(c) for c in own.components] == [0.0, 0.0]


def test_a_per_replica_value_that_was_taken_apart_is_refused(two):
    parts = two.distribute_values_from_function(lambda c: np.arange(3, dtype=np.float32))
    broken = jax.tree.map(lambda x: x.sum(), parts)
    with two.scope():
        own = px.Variable(0.0, synchronization="on_read")
    for use in (
        lambda: two.run(lambda x: x, args=(broken,)), lambda: two.reduce("sum", broken), lambda: two.gather(broken, 0),
        lambda: broken.values, lambda: two.local_results(broken), lambda: own.assign(broken),
        lambda: px.function(lambda x: two.run(lambda y: y, args=(x,)))(broken),
    ):  # fmt: skip
        with pytest.raises(ArgumentError, match=r"array of shape \(\) instead of one part for each of 2 replicas"):
            use()
    doubled = jax.tree.map(lambda x: np.asarray(x) * 2.0, parts)
    assert [x.tolist() for x in doubled.values] == [[0.0, 2.0, 4.0]] * 2
    assert two.run(lambda x: px.get_replica_context().all_reduce("sum", x), args=(doubled,)).tolist() == [0.0, 4.0, 8.0]


def test_per_replica_values_mean_the_replicas_own_part_in_merge_functions(two):
    parts = two.distribute_values_from_function(lambda c: np.float32(10 + c.replica_id))
    with two.scope():
        own = px.Variable(0.0, synchronization="on_read", aggregation="sum")
    seen = {}

    def merge(s):
        own.assign_add(parts)
        seen["components"] = [c.value for c in own.components]
        return s.reduce("sum", parts), s.local_results(parts), [c.value for c in own.components], parts

    total, local, components, again = two.run(lambda: px.get_replica_context().merge_call(merge))
    assert float(total) == 21.0
    assert (
        [float(x) for x in local] == [float(x) for x in components] == [float(x) for x in again.values] == [10.0, 11.0]
    )
    assert [float(c) for c in own.components] == [10.0, 11.0]


# ---- creating variables --------------------------------------------------------------------------


def test_a_variable_made_on_every_call_is_refused_with_its_line(two):
    def fn():
        return px.Variable(1.0, name="new")  # here

    refused(two, fn, VariableCreationError, "Variable 'new' at", marked_line(fn))


def test_a_variable_made_once_in_a_replica_starts_with_the_first_replicas_value(two):
    made = []

    def fn():
        if not made:
            made.append(px.Variable(5.0 + replica_id(), name="new", aggregation="sum"))
        made[0].assign_add(1.0)
        return made[0].value

    two.run(fn)
    assert [float(c) for c in made[0].components] == [7.0, 7.0]
    two.run(fn)
    assert float(made[0]) == 9.0


# ---- exceptions leave nothing behind -------------------------------------------------------------


def test_after_a_mistake_everything_works_on(two, v, total):
    mistakes = [
        lambda: v.assign(replica_id()), lambda: float(v), lambda: two.run(lambda: 1), lambda: jax.jit(lambda: v * 1.0)(),
        lambda: px.GradientTape().__enter__() and float(v), lambda: px.get_replica_context().merge_call(lambda s: v.assign(replica_id())),
    ]  # fmt: skip
    for mistake in mistakes:
        before = float(total)

        def fn():
            total.assign_add(1.0)
            mistake()

        with pytest.raises(Exception):  # noqa: B017
            two.run(fn)
        assert float(total) == before
        two.run(lambda: total.assign_add(1.0))
        assert [float(c) for c in total.components] == [before + 2.0] * 2
        assert not px.in_cross_replica_context()
        assert float(jnp.ones(()) + v) == 1.0
