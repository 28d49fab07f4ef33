"""Steps reuse the buffers of the variables that they replace, and of nothing that anybody else holds."""

from __future__ import annotations

import contextlib
import copy
import pickle
import threading

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import phalanx as px
from phalanx import state

STEPS = 10
START = np.arange(4.0, dtype=np.float32)
ONES = np.ones(4, np.float32)


class Place:
    """Where steps run: in a plain traced function, or in the replicas of a strategy."""

    def __init__(self, n):
        self.strategy = px.Mirrored(jax.devices()[:n]) if n else None

    def scope(self):
        return self.strategy.scope() if self.strategy else contextlib.nullcontext()

    def variable(self, value, **options):
        with self.scope():
            return px.Variable(value, **options)

    def step(self, fn, **options):
        strategy = self.strategy
        if strategy is None:
            return px.function(fn, **options)
        return px.function(lambda *args: strategy.run(fn, args=args), **options)


@pytest.fixture(params=[0, 1, 4], ids=["no strategy", "1 replica", "4 replicas"])
def place(request):
    return Place(request.param)


def adding_one(*variables):
    def update():
        for v in variables:
            v.assign_add(ONES)

    return update


def pointers(array):
    return {shard.data.unsafe_buffer_pointer() for shard in array.addressable_shards}


def share_a_buffer(*arrays):
    return len(set().union(*map(pointers, arrays))) < sum(len(pointers(a)) for a in arrays)


# ---- buffers are reused --------------------------------------------------------------------------


def test_a_step_reuses_the_buffers_of_what_it_replaces(place):
    v = place.variable(START)
    step = place.step(adding_one(v))
    step()
    before, where = v._stored, pointers(v._stored)
    step()
    assert before.is_deleted()
    assert pointers(v._stored) == where


def test_memory_does_not_grow_with_the_steps(place):
    variables = [place.variable(START) for _ in range(3)]
    step = place.step(adding_one(*variables))
    step()
    before = len(jax.live_arrays())
    for _ in range(5):
        step()
    assert len(jax.live_arrays()) == before


def test_nothing_is_reused_where_that_is_switched_off(place):
    v = place.variable(START)
    step = place.step(adding_one(v), donate=False)
    step()
    before = v._stored
    step()
    assert before.tolist() == (START + 1).tolist()


def test_programs_that_call_python_reuse_nothing_since_python_may_raise(place):
    v = place.variable(START)

    def check(x):
        if x.max() > 6:
            raise ValueError("too large")
        return x

    def update():
        checked = jax.pure_callback(check, v.value, v.value)
        v.assign_add(ONES)
        return checked

    step = place.step(update)
    for _ in range(4):
        step()
    for _ in range(2):
        with pytest.raises(Exception, match="too large"):
            step()
        assert v.numpy().tolist() == (START + 4).tolist()


# ---- what somebody holds stays as it is ----------------------------------------------------------


def zeros():
    return px.Variable(np.zeros(4, np.float32))


def assigned_in_a_function(v):
    other = zeros()
    px.function(lambda: other.assign(v))()
    return other


def assigned_twice(v):
    value = v.value
    return [zeros().assign(value), zeros().assign(value)]


def read_in_a_tape(v):
    with px.GradientTape() as tape:
        y = v * v
    return tape.gradient(y, v) / 2


SNAPSHOTS = {
    "value": lambda v: v.value,
    "read_value": lambda v: v.read_value(),
    "numpy": lambda v: v.numpy(),
    "np.asarray": np.asarray,
    "jnp.asarray": jnp.asarray,
    "component": lambda v: v.components[-1].value,
    "component as numpy": lambda v: np.asarray(v.components[0]),
    "local_results": lambda v: px.get_strategy().local_results(v)[-1],
    "deepcopy": copy.deepcopy,
    "pickle": lambda v: pickle.loads(pickle.dumps(v)),
    "rows": lambda v: list(v),
    "slice": lambda v: v[:],
    "reshape": lambda v: v.reshape(4),
    "tree": lambda v: jax.tree.map(lambda leaf: leaf.value, [v])[0],
    "result of a function": lambda v: px.function(lambda: v.value)(),
    "variable as a result": lambda v: px.function(lambda: [v])()[0],
    "another variable": lambda v: px.Variable(v),
    "another variable made from the value": lambda v: px.Variable(v.value),
    "assigned to another variable": lambda v: zeros().assign(v),
    "assigned to two variables": lambda v: assigned_twice(v)[1],
    "assigned in a function": assigned_in_a_function,
    "read in a tape": read_in_a_tape,
    "passed through jax.jit": lambda v: jax.jit(lambda x: x)(v.value),
}


@pytest.mark.parametrize("name", SNAPSHOTS)
def test_a_snapshot_keeps_its_value_while_steps_go_on(place, name):
    v = place.variable(START)
    step = place.step(adding_one(v))
    snapshots = []
    for i in range(STEPS):
        if i in (0, 3):
            with place.scope():
                snapshots.append(SNAPSHOTS[name](v))
        step()
    assert v.numpy().tolist() == (START + STEPS).tolist()
    for snapshot, age in zip(snapshots, (0, 3)):
        assert np.asarray(snapshot).tolist() == (START + age).tolist()


def test_what_a_variable_was_made_of_or_assigned_from_stays_the_users(place):
    arrays = [jnp.asarray(START) for _ in range(3)] + [START.copy()]
    made = [place.variable(a) for a in arrays]
    assigned = [place.variable(np.zeros(4, np.float32)).assign(a) for a in arrays]
    step = place.step(adding_one(*made, *assigned))
    for _ in range(STEPS):
        step()
    assert [v.numpy().tolist() for v in (*made, *assigned)] == [(START + STEPS).tolist()] * 8
    assert [np.asarray(a).tolist() for a in arrays] == [START.tolist()] * 4


def test_an_array_of_a_variable_that_a_strategy_adopts_stays_the_users():
    array = jnp.asarray(START)
    v = px.Variable(array)
    before = v.value
    place = Place(4)
    step = place.step(adding_one(v))
    for _ in range(STEPS):
        step()
    assert v.strategy is place.strategy and v.numpy().tolist() == (START + STEPS).tolist()
    assert array.tolist() == before.tolist() == START.tolist()


def test_arguments_and_constants_that_a_step_assigns_stay_the_users(place):
    v, w = place.variable(np.zeros(4, np.float32)), place.variable(np.zeros(4, np.float32))
    constant = jnp.asarray(START)
    take = place.step(lambda x: (v.assign(x), w.assign(constant)))
    step = place.step(adding_one(v, w))
    for _ in range(3):
        argument = jnp.asarray(START)
        for _ in range(2):
            take(argument)
            step()
            step()
        assert argument.tolist() == constant.tolist() == START.tolist()
        assert v.numpy().tolist() == w.numpy().tolist() == (START + 2).tolist()


def test_parts_for_each_replica_stay_the_users():
    strategy = px.Mirrored(jax.devices()[:4])
    with strategy.scope():
        own = px.Variable(0.0, synchronization="on_read", aggregation="sum")
    parts = strategy.distribute_values_from_function(lambda context: jnp.float32(context.replica_id))

    def replica(part):
        own.assign(part)
        own.assign_add(1.0)
        return own.value

    step = px.function(lambda p: strategy.run(replica, args=(p,)))
    own.assign(4.0)
    before = own.components
    results = [step(parts) for _ in range(STEPS)]
    for result in results:
        assert [float(x) for x in result.values] == [1.0, 2.0, 3.0, 4.0]
    assert [float(x) for x in parts.values] == [0.0, 1.0, 2.0, 3.0]
    assert [float(c) for c in before] == [1.0, 2.0, 3.0, 4.0]
    assert float(own) == 10.0


# ---- one buffer, two owners ----------------------------------------------------------------------


def test_variables_that_start_from_one_buffer(place):
    """Tied weights, an average started from the weights, one array for two variables."""
    shared = jnp.asarray(START)
    w, twin = place.variable(shared), place.variable(shared)
    tied = [w, w]
    ema = place.variable(w.value)
    other = place.variable(w)
    held = w.value

    def update():
        for v in tied:
            v.assign_add(ONES)
        twin.assign_sub(ONES)
        ema.assign(0.5 * ema + 0.5 * w)
        other.assign(other * 2)

    step = place.step(update)
    expected = START.copy()
    for i in range(STEPS):
        step()
        expected = 0.5 * expected + 0.5 * (START + 2 * (i + 1))
    assert w.numpy().tolist() == (START + 2 * STEPS).tolist()
    assert twin.numpy().tolist() == (START - STEPS).tolist()
    assert other.numpy().tolist() == (START * 2**STEPS).tolist()
    np.testing.assert_allclose(ema, expected, rtol=1e-6)
    assert held.tolist() == shared.tolist() == START.tolist()


def test_variables_and_results_of_one_value_get_buffers_of_their_own(place):
    v, w, u = (place.variable(np.zeros(4, np.float32)) for _ in range(3))

    def update(x):
        y = x * 2
        v.assign(y)
        w.assign(y)
        u.assign(v)
        return y, v, w.value

    both = place.step(update)
    one = place.step(adding_one(v))
    results = []
    for _ in range(3):
        results += both(jnp.asarray(START))
        assert not share_a_buffer(v._stored, w._stored, u._stored, *results)
        one()
    assert v.numpy().tolist() == (START * 2 + 1).tolist()
    assert w.numpy().tolist() == u.numpy().tolist() == (START * 2).tolist()
    assert [r.tolist() for r in results] == [(START * 2).tolist()] * 9


def test_variables_that_change_places(place):
    v, w = place.variable(START), place.variable(-START)

    def swap():
        first, second = v.value, w.value
        v.assign(second)
        w.assign(first)

    step = place.step(swap)
    for i in range(STEPS):
        step()
        sign = 1 if i % 2 else -1
        assert v.numpy().tolist() == (sign * START).tolist()
        assert w.numpy().tolist() == (-sign * START).tolist()


def test_a_variable_assigned_its_own_value(place):
    v = place.variable(START)
    step = place.step(lambda: (v.assign(v), v.value)[1])
    results = [step() for _ in range(3)]
    assert [r.tolist() for r in (*results, v.value)] == [START.tolist()] * 4
    assert not share_a_buffer(*results, v._stored)


def test_one_variable_read_by_one_step_and_replaced_by_another(place):
    v, w = place.variable(START), place.variable(np.zeros(4, np.float32))
    copy_over = place.step(lambda: w.assign(v))
    step = place.step(adding_one(v))
    for i in range(STEPS):
        copy_over()
        step()
        assert w.numpy().tolist() == (START + i).tolist()


def test_an_optimizer_with_an_average_of_the_weights(place):
    w = place.variable(START)
    ema = place.variable(w.value, trainable=False)
    optimizer = px.Optimizer(optax.adam(0.1))
    held = []

    def update():
        with px.GradientTape() as tape:
            loss = (w * w).sum()
        optimizer.apply_gradients([(tape.gradient(loss, w), w)], reduce="mean")
        ema.assign(0.9 * ema + 0.1 * w)
        return loss

    step = place.step(update)
    for _ in range(STEPS):
        held.append(([w.value, ema.value, *(v.value for v in optimizer.variables)], w.numpy().tolist()))
        step()
    for arrays, weights in held:
        assert arrays[0].tolist() == weights
        assert all(np.isfinite(a).all() for a in arrays)


@pytest.mark.parametrize("setting", ["jax_debug_nans", "jax_debug_infs"])
def test_a_result_that_jax_checks_and_refuses_leaves_the_variables_as_they_were(place, setting):
    v = place.variable(START)
    divide = place.step(lambda: v.assign_add(v.value * 0 / (v.value - v.value[0]) + jnp.log(v.value - v.value)))
    step = place.step(lambda: v.assign_add(ONES))
    step()
    jax.config.update(setting, True)
    try:
        with pytest.raises(FloatingPointError, match="invalid value"):
            divide()
        assert v.numpy().tolist() == (START + 1).tolist()
        step()
    finally:
        jax.config.update(setting, False)
    step()
    assert v.numpy().tolist() == (START + 3).tolist()


# ---- while another thread steps ------------------------------------------------------------------


def lent_to(use, v):
    """Whether `use` got hold of the array in `v` between two steps of another thread, and was let keep it."""
    step = px.function(lambda: v.assign_add(ONES))
    step()
    step()  # from here on the variable owns its buffer, and steps take it
    real, stepped = state.EagerFrame.load, []

    def load_then_step(frame, variable):
        stored = real(frame, variable)
        if not stepped:
            stepped.append(threading.Thread(target=step))
            stepped[0].start()
            stepped[0].join(0.05)  # it must wait, so this is the whole of it
            stepped.append(not stored.is_deleted())
        return stored

    state.EagerFrame.load = load_then_step
    try:
        use()
    finally:
        state.EagerFrame.load = real
        stepped[0].join()
    return stepped[1]


@pytest.mark.parametrize("n", [0, 2])
def test_whoever_looks_at_a_variable_gets_an_array_that_another_threads_step_cannot_delete(n):
    strategy = px.Mirrored(jax.devices()[:2]) if n else None
    per_replica = {"synchronization": "on_read", "aggregation": "mean"}
    with strategy.scope() if strategy else contextlib.nullcontext():
        v = px.Variable(START)
        parts = px.Variable(START, **per_replica)
    found = []
    for variable in (v, parts):
        for use in (
            lambda: variable.numpy(),
            lambda: found.append(variable.components[0].value),
            lambda: found.append(repr(variable)),
            lambda: pickle.dumps(variable),
            lambda: copy.deepcopy(variable),
        ):
            assert lent_to(use, variable)
    assert "not readable" not in str(found)
    if strategy:
        assert lent_to(lambda: found.append(strategy.reduce("mean", parts)), parts)
    else:
        assert lent_to(lambda: px.Mirrored(jax.devices()[:2]).adopt(v), v)
        assert lent_to(lambda: px.Optimizer(optax.adam(0.1)).build([v]), v)


def test_each_new_value_takes_the_place_of_its_own_old_one_whatever_the_order(place):
    """Values in each other's places would first have to be copied."""
    a, b, c, unread = (place.variable(np.full(4, i, np.float32), name=f"v{i}") for i in range(4))

    def update():
        total = a + b + c
        unread.assign(ONES)
        for v in (c, a, b):
            v.assign(v + total)
        return total

    step = place.step(update)
    step()
    step()
    before = [pointers(v._stored) for v in (a, b, c)]
    step()
    assert [pointers(v._stored) for v in (a, b, c)] == before
