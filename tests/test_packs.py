"""Small variables that a step updates travel together, and nobody can tell except by the clock."""

from __future__ import annotations

import contextlib
import gc
import pickle
import threading
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from cluster import launch, write

import phalanx as px

N = 20
"""Small variables of one kind: enough to travel together."""


@pytest.fixture(params=[0, 1, 4], ids=["no strategy", "1 replica", "4 replicas"])
def strategy(request):
    return px.Mirrored(jax.devices()[: request.param]) if request.param else None


def scope_of(strategy):
    return strategy.scope() if strategy else contextlib.nullcontext()


def variables_in(strategy, n=N, shape=(3,), **options):
    with scope_of(strategy):
        return [px.Variable(np.full(shape, float(i), np.float32), name=f"v{i}", **options) for i in range(n)]


def function_of(strategy, fn):
    if strategy is None:
        return px.function(fn)
    return px.function(lambda *args: strategy.run(fn, args))


def adding(strategy, variables, amount=1.0):
    def step():
        for v in variables:
            v.assign_add(jnp.full(v.shape, amount, v.dtype))

    return function_of(strategy, step)


def arrays_of(step):
    """How many arrays a call of the step takes and gives."""
    lowered = step.lower()
    return len(jax.tree.leaves(lowered.in_avals)), len(jax.tree.leaves(lowered.out_info))


def values_of(variables):
    return [np.array(v.value) for v in variables]


def test_a_step_takes_and_gives_a_few_arrays_for_many_small_variables(strategy):
    step = adding(strategy, variables_in(strategy))
    assert arrays_of(step) == (3, 3)


def test_large_variables_scalars_and_a_few_small_ones_stay_single():
    large, scalars, few = variables_in(None, shape=(100, 100)), variables_in(None, shape=()), variables_in(None, n=4)
    assert [arrays_of(adding(None, some))[0] for some in (large, scalars, few)] == [N, N, 4]


def test_variables_of_one_dtype_travel_together():
    floats = variables_in(None)
    halves = variables_in(None, dtype="bfloat16")
    integers = [px.Variable(np.zeros(2, np.int32)) for _ in range(N)]
    step = adding(None, [*floats, *halves, *integers])
    assert arrays_of(step) == (9, 9)
    step()
    assert {str(v.value.dtype) for v in halves} == {"bfloat16"}
    assert [float(v.value[0]) for v in halves] == [i + 1.0 for i in range(N)]
    assert all((np.array(v.value) == 1).all() for v in integers)


def test_variables_are_updated_as_single_ones_are(strategy):
    variables = variables_in(strategy)
    step = adding(strategy, variables)
    for _ in range(3):
        step()
    np.testing.assert_array_equal(values_of(variables), [np.full(3, i + 3.0) for i in range(N)])


def test_values_in_other_hands_never_change(strategy):
    variables = variables_in(strategy)
    step = adding(strategy, variables)
    held = []
    for i in range(4):
        step()
        held.append((variables[i].value, np.array(variables[i].value), variables[-1].value, i))
    for first, copy, last, i in held:
        np.testing.assert_array_equal(first, copy)
        np.testing.assert_array_equal(last, np.full(3, N - 1 + i + 1.0))


def test_what_happens_to_variables_between_steps_counts(strategy):
    """Steps on all and on some of them, eager reads and updates, and programs that only read, in any order."""
    rng = np.random.default_rng(7)
    variables = variables_in(strategy)
    expected = [np.full(3, float(i)) for i in range(N)]
    whole, part = adding(strategy, variables), adding(strategy, variables[3:12], 0.5)
    total = px.function(lambda: sum(v.value.sum() for v in variables))

    def act(kind, i):
        if kind == "whole":
            whole()
            for x in expected:
                x += 1.0
        elif kind == "part":
            part()
            for x in expected[3:12]:
                x += 0.5
        elif kind == "assign":
            variables[i].assign(np.full(3, float(i), np.float32))
            expected[i][:] = i
        elif kind == "read":
            np.testing.assert_array_equal(variables[i].value, expected[i])
        elif kind == "tape":
            with px.GradientTape() as tape:
                loss = (variables[i] * variables[i]).sum()
            np.testing.assert_array_equal(tape.gradient(loss, variables[i]), 2 * expected[i])
        else:
            np.testing.assert_allclose(total(), np.sum(expected), rtol=1e-6)

    kinds = ["whole", "part", "assign", "read", "tape", "total"]
    for kind, i in zip(rng.choice(kinds, 60), rng.integers(0, N, 60)):
        act(str(kind), int(i))
    np.testing.assert_array_equal(values_of(variables), expected)


def test_optimizers_and_their_slots_step_as_on_single_arrays(strategy):
    def losses(n):
        """Of the first variable in a model of n."""
        variables = variables_in(strategy, n)
        with scope_of(strategy):
            optimizer = px.Optimizer(optax.adam(0.1))

        def step():
            with px.GradientTape() as tape:
                loss = sum(((v - 1.0) ** 2).sum() for v in variables)
            optimizer.apply_gradients(zip(tape.gradient(loss, variables), variables))

        run = function_of(strategy, step)
        for _ in range(3):
            run()
        return [np.array(v.value) for v in variables[:2]]

    np.testing.assert_array_equal(losses(N), losses(2))


def test_components_of_replicas_travel_together():
    strategy = px.Mirrored(jax.devices()[:4])
    variables = variables_in(strategy, synchronization="on_read", aggregation="sum")

    def step():
        number = px.get_replica_context().replica_id
        for v in variables:
            v.assign_add(jnp.ones(3) * number)

    run = function_of(strategy, step)
    before = [[np.array(c.value) for c in v.components] for v in variables]
    run(), run()
    assert arrays_of(run)[1] == 3
    for v, old in zip(variables, before):
        for i, component in enumerate(v.components):
            np.testing.assert_array_equal(component.value, old[i] + 2 * i)


def test_another_program_reads_them_where_they_are():
    variables = variables_in(None)
    step = adding(None, variables)
    step()
    total = px.function(lambda: sum(v.value.sum() for v in variables))
    assert len(jax.tree.leaves(total.lower().in_avals)) == 3
    assert float(total()) == 3 * sum(i + 1 for i in range(N))


def test_a_program_made_before_they_travelled_goes_on():
    variables = variables_in(None)
    total = px.function(lambda: sum(v.value.sum() for v in variables))
    first = adding(None, variables[:4])
    start = float(total())
    first()
    step = adding(None, variables)
    step()
    first()
    assert float(total()) == start + 3 * (4 + N + 4)


def test_variables_that_a_strategy_takes_over_go_on(strategy):
    variables = variables_in(None)
    step = adding(None, variables)
    step()
    other = px.Mirrored(jax.devices()[:2])
    moved = px.function(lambda: other.run(lambda: [v.assign_add(jnp.ones(3)) for v in variables] and None))
    moved()
    assert variables[0].strategy is other
    np.testing.assert_array_equal(values_of(variables), [np.full(3, i + 2.0) for i in range(N)])
    step()
    np.testing.assert_array_equal(values_of(variables), [np.full(3, i + 3.0) for i in range(N)])


def test_objects_of_one_structure_share_the_program(caplog):
    class Model:
        def __init__(self):
            self.variables = variables_in(None)

        @px.function
        def step(self):
            for v in self.variables:
                v.assign_add(jnp.ones(3))

    models = [Model() for _ in range(3)]
    with caplog.at_level("INFO", "phalanx"):
        for model in models:
            model.step()
    assert sum("compiled in" in r.message for r in caplog.records) == 1
    for model in models:
        np.testing.assert_array_equal(values_of(model.variables), [np.full(3, i + 1.0) for i in range(N)])


def test_copies_and_pickles_are_variables_of_their_own(strategy):
    variables = variables_in(strategy)
    step = adding(strategy, variables)
    step()
    copies = pickle.loads(pickle.dumps(variables))
    step()
    np.testing.assert_array_equal(values_of(copies), [np.full(3, i + 1.0) for i in range(N)])
    np.testing.assert_array_equal(values_of(variables), [np.full(3, i + 2.0) for i in range(N)])


def test_the_buffers_are_reused():
    variables = variables_in(None)
    step = adding(None, variables)
    step()
    jax.block_until_ready(variables[0].value)
    gc.collect()

    def bytes_alive():
        return sum(x.nbytes for x in jax.live_arrays())

    before = bytes_alive()
    for _ in range(3):
        step()
    values_of(variables)
    step()
    assert bytes_alive() <= before


def test_variables_go_when_nobody_needs_them():
    variables = variables_in(None)
    step = adding(None, variables)
    step()
    gone = weakref.ref(variables[0])
    del variables, step
    gc.collect()
    assert gone() is None


def test_threads_that_step_and_read_see_whole_steps():
    variables = variables_in(None, n=N, shape=(2,))
    for v in variables:
        v.assign(np.zeros(2, np.float32))
    step = adding(None, variables)
    done = threading.Event()
    seen = []

    def read():
        while not done.is_set():
            seen.append([float(variables[i].value[0]) for i in (0, N - 1)])

    reader = threading.Thread(target=read)
    reader.start()
    for _ in range(50):
        step()
    done.set()
    reader.join(60)
    assert not reader.is_alive()
    assert all(first <= last for first, last in seen)
    np.testing.assert_array_equal(values_of(variables), np.full((N, 2), 50.0))


@pytest.mark.processes
def test_one_process_may_look_at_them_while_the_others_do_not(tmp_path):
    script = write(
        tmp_path / "looking.py",
        """
        import phalanx as px
        me = px.connect(timeout=60).process_id
        import jax.numpy as jnp, json, numpy as np
        strategy = px.Mirrored()
        with strategy.scope():
            variables = [px.Variable(np.full(3, float(i), np.float32)) for i in range(20)]

        def replica():
            two = px.get_replica_context().all_reduce("sum", 1.0)
            for v in variables:
                v.assign_add(jnp.full(3, two))

        step = px.function(lambda: strategy.run(replica))
        looked = []
        for number in range(4):
            step()
            if number % 2 == me:
                looked += [float(variables[i].numpy()[0]) for i in (0, 19)]
            if number == 2:
                variables[3].assign(np.zeros(3, np.float32))
        print(json.dumps({"looked": looked, "end": [float(v.numpy()[0]) for v in variables]}))
        """,
    )
    outcome = launch(2, script)
    assert outcome.code == 0, outcome.err
    end = [2.0 if i == 3 else i + 8.0 for i in range(N)]
    assert outcome.told() == {
        0: [{"looked": [2.0, 21.0, 6.0, 25.0], "end": end}],
        1: [{"looked": [4.0, 23.0, 8.0, 27.0], "end": end}],
    }
