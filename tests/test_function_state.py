"""Variables in traced functions: read, written, created, given as arguments, and let go."""

from __future__ import annotations

import gc
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import phalanx as px
from phalanx.errors import ArgumentError, TracingError, VariableCreationError, VariableWriteError


def freed(*refs):
    gc.collect()
    return [ref() is None for ref in refs] == [True] * len(refs)


@pytest.fixture
def compilations():
    """A list that gets an entry for each program that XLA compiles."""
    seen: list[str] = []

    def listen(event, duration, **_):
        if event == "/jax/core/compile/backend_compile_duration":
            seen.append(event)

    jax.monitoring.register_event_duration_secs_listener(listen)
    yield seen
    jax.monitoring.unregister_event_duration_listener(listen)


# ---- reading and writing -------------------------------------------------------------------------


def test_updates_happen_in_the_order_of_the_code():
    a, b = px.Variable(1.0), px.Variable(10.0)

    @px.function
    def step():
        seen = [a.value]
        a.assign(a + b)
        seen.append(a.value)
        b.assign_sub(a)
        seen.append(b.value)
        a.assign(a * 2)
        b.assign_add(a)
        return [*seen, a, b]

    assert [float(x) for x in step()] == [1.0, 11.0, -1.0, 22.0, 21.0]
    assert [float(x) for x in step()] == [22.0, 43.0, -22.0, 86.0, 64.0]
    assert (float(a), float(b)) == (86.0, 64.0)


def test_variables_are_read_anew_at_each_call_and_python_values_are_those_of_the_trace():
    v, scale, items = px.Variable(1.0), [10.0], [jnp.float32(100.0)]
    f = px.function(lambda: v + scale[0] + items[0])
    assert float(f()) == 111.0
    v.assign(2.0)
    scale[0], items[0] = 20.0, jnp.float32(200.0)
    assert float(f()) == 112.0


def test_a_variable_that_is_only_written_needs_no_reading():
    v = px.Variable(jnp.zeros(3))
    f = px.function(lambda x: v.assign(x))
    f(jnp.ones(3))
    assert v.numpy().tolist() == [1.0, 1.0, 1.0]


def test_indexed_updates_and_operators():
    v = px.Variable([1.0, 2.0, 3.0])

    @px.function
    def step(i):
        v.at[i].add(10.0)
        v.at[0].set(v[2] - 1)
        return v @ v, abs(-v), 2 / v

    dot, absolute, inverse = step(1)
    assert v.numpy().tolist() == [2.0, 12.0, 3.0] == absolute.tolist()
    assert float(dot) == 157.0 and inverse[0] == 1.0


def test_nested_functions_read_and_write_the_variables_of_the_outer_one():
    v = px.Variable(1.0)

    @px.function
    def double():
        v.assign(v * 2)
        return v.value

    @px.function
    def outer():
        v.assign_add(1.0)
        first = double()
        v.assign_add(1.0)
        return first, double()

    assert [float(x) for x in outer()] == [4.0, 10.0]
    assert [float(x) for x in outer()] == [22.0, 46.0]
    assert (float(v), double.trace_count) == (46.0, 1)


def test_a_tape_sees_a_call_as_one_operation(strategy):
    with strategy.scope():
        w = px.Variable(3.0)
        calls = px.Variable(0.0)

    @px.function
    def cube(x):
        calls.assign_add(1.0)
        return w**2 * x

    def gradients(x):
        with px.GradientTape() as tape:
            tape.watch(x)
            y = cube(x)
        return tape.gradient(y, [w, x])

    assert [float(g) for g in gradients(jnp.float32(2.0))] == [12.0, 9.0]
    assert [float(g) for g in px.function(gradients)(jnp.float32(2.0))] == [12.0, 9.0]
    in_replica = strategy.run(gradients, args=(jnp.float32(2.0),))
    assert [float(strategy.reduce("mean", g)) for g in in_replica] == [12.0, 9.0]
    assert float(calls) == 3.0


def test_jax_transformations_of_a_function_see_its_variables():
    w = px.Variable(3.0)
    f = px.function(lambda x: w * x**2)
    assert float(jax.grad(f)(2.0)) == 12.0
    assert jax.vmap(f)(jnp.arange(3.0)).tolist() == [0.0, 3.0, 12.0]
    writing = px.function(lambda x: w.assign_add(x).value)
    with pytest.raises(VariableWriteError):
        jax.grad(writing)(2.0)
    assert float(w) == 3.0


# ---- exceptions ----------------------------------------------------------------------------------


def test_an_exception_in_the_body_leaves_the_variables_as_they_were(strategy):
    with strategy.scope():
        v, w = px.Variable(1.0), px.Variable([1.0, 2.0], aggregation="sum")
    before = (v.value, w.value)

    def failing(where):
        v.assign(5.0)
        if where == "before":
            raise KeyError("from the body")
        w.assign_add([1.0, 1.0])
        if where == "shape":
            w.assign([1.0, 2.0, 3.0])
        raise KeyError("from the body")

    @px.function
    def outer(where):
        v.assign(7.0)
        px.function(failing)(where)

    ways = (
        px.function(failing),
        outer,
        lambda w: strategy.run(failing, args=(w,)),
        lambda w: px.function(lambda: (v.assign(6.0), strategy.run(failing, args=(w,))))(),
    )
    for call in ways:
        for where, error in (("before", KeyError), ("shape", ValueError), ("after", KeyError)):
            with pytest.raises(error):
                call(where)
            assert (float(v), w.numpy().tolist()) == (1.0, [1.0, 2.0])
            assert (v.value is before[0], w.value is before[1]) == (True, True)


def test_a_caught_exception_undoes_the_function_that_raised_and_nothing_else():
    v = px.Variable(1.0)

    @px.function
    def inner():
        v.assign_add(1.0)
        raise KeyError

    @px.function
    def outer():
        v.assign_add(10.0)
        with pytest.raises(KeyError):
            inner()
        return v.value

    assert float(outer()) == 11.0 == float(v)


def test_a_failed_trace_is_made_again():
    v, fail = px.Variable(1.0), [True]

    @px.function
    def f(x):
        v.assign_add(x)
        if fail[0]:
            raise KeyError
        return v.value

    with pytest.raises(KeyError):
        f(1.0)
    fail[0] = False
    assert float(f(1.0)) == 2.0


# ---- values that outlive their trace -------------------------------------------------------------


def test_traced_values_that_are_kept_and_used_later_are_an_error_that_names_the_function():
    kept = []
    v = px.Variable(0.0)

    @px.function
    def leaking(x):
        kept.append(x * 2)
        return x

    leaking(1.0)
    with pytest.raises(jax.errors.UnexpectedTracerError, match=r"leaked was leaking at .*test_function_state.py"):
        kept[0] + 1
    with pytest.raises(TracingError, match=r"<lambda>: a value of another trace was used: .* Return it, or"):
        px.function(lambda x: x + kept[0])(1.0)
    with pytest.raises(TracingError, match="leaking: a value of another trace"):
        leaking(kept[0])
    with pytest.raises(TracingError, match=r"'Variable', assigned at .*test_function_state.py:\d+: a value of another"):
        v.assign(kept[0])
    assert float(v) == 0.0


def test_a_nested_function_may_close_over_values_of_the_outer_one():
    class Layer:
        @px.function
        def __call__(self, x):
            return x * self.scale

    layer = Layer()

    @px.function
    def outer(x):
        total = 0.0
        for i in range(3):
            layer.scale = x + i
            total = total + layer(x)
        return total

    assert [float(outer(1.0)), float(outer(2.0)), float(px.function(outer)(3.0))] == [6.0, 18.0, 36.0]


# ---- variables as arguments ----------------------------------------------------------------------


def test_two_variables_are_two_arguments():
    a, b = px.Variable(2.0), px.Variable(5.0)

    @px.function
    def add(v, x):
        v.assign_add(x)
        return v * 10

    assert [float(add(v, 1.0)) for v in (a, b, a, b)] == [30.0, 60.0, 40.0, 70.0]
    assert (float(a), float(b), add.trace_count) == (4.0, 7.0, 2)
    assert "argument 'v': <Variable Variable> -> <Variable Variable>" in add.explain_retraces()


def test_lists_of_variables_are_arguments(strategy):
    with strategy.scope():
        a, b = px.Variable(1.0), px.Variable([2.0, 3.0])

    @px.function
    def scale(variables, x):
        def replica():
            for v in variables["all"]:
                v.assign(v * x)

        strategy.run(replica)

    for _ in range(2):
        scale({"all": [a, b]}, 2.0)
    assert (float(a), b.numpy().tolist(), scale.trace_count) == (4.0, [8.0, 12.0], 1)


def test_arguments_are_let_go():
    class Model:
        def __init__(self):
            self.w = px.Variable(jnp.ones(3))

    step = px.function(lambda model, x: model.w.assign_add(x).value)
    on_variables = px.function(lambda variables, x: [v.assign_add(x).value for v in variables])
    on_functions = px.function(lambda fn, x: fn(x))
    for _ in range(2):
        model = Model()
        step(model, jnp.ones(3))
        on_variables([model.w], jnp.ones(3))
        on_functions(lambda x, w=model.w: w + x, jnp.ones(3))
        refs = [weakref.ref(model), weakref.ref(model.w)]
        del model
        assert freed(*refs)
    for function in (step, on_variables, on_functions):
        assert (len(function._traces), len(function._shared)) == (0, 1)


def test_what_a_function_captures_lives_as_long_as_the_function():
    held = {"v": px.Variable(1.0)}

    @px.function
    def step():
        held["v"].assign_add(1.0)
        return held["v"].value

    step()
    ref = weakref.ref(held.pop("v"))
    assert not freed(ref)
    assert float(step()) == 3.0
    del step
    assert freed(ref)


# ---- rebuilt objects -----------------------------------------------------------------------------


class Net:
    def __init__(self, width):
        self.layers = [px.Variable(np.full((width, width), 0.1, np.float32)), px.Variable(np.zeros(width, np.float32))]

    def __call__(self, x):
        return jnp.tanh(x @ self.layers[0] + self.layers[1])


def train(net, optimizer, x):
    with px.GradientTape() as tape:
        loss = (net(x) ** 2).mean()
    optimizer.apply_gradients(zip(tape.gradient(loss, net.layers), net.layers))
    return loss


def test_a_rebuilt_model_of_the_same_structure_does_not_compile_again(compilations):
    step = px.function(train)
    x = np.ones((2, 4), np.float32)
    losses, counts, live, refs = [], [], [], []
    for _ in range(5):
        net, optimizer = Net(4), px.Optimizer(optax.adam(0.1))
        losses.append([float(step(net, optimizer, x)) for _ in range(3)])
        counts.append(len(compilations))
        refs += [weakref.ref(v) for v in (*net.layers, *optimizer.variables)]
        del net, optimizer
        gc.collect()
        live.append(len(jax.live_arrays()))
    assert losses == [losses[0]] * 5
    assert counts[1:] == [counts[1]] * 4
    assert live[2:] == [live[1]] * 3
    assert freed(*refs)
    assert len(step._shared) == 1
    net = Net(8)
    step(net, px.Optimizer(optax.adam(0.1)), np.ones((2, 8), np.float32))
    assert len(step._shared) == 2


def test_a_new_object_at_every_call_is_a_storm_of_traces_that_is_warned_of_once():
    step = px.function(train)
    with pytest.warns(UserWarning, match="train has been traced for 10 kinds of arguments") as caught:
        for i in range(25):
            step(Net(2), px.Optimizer(optax.sgd(0.1)), np.ones((1, 2), np.float32))
            assert len(caught) == (i >= 9)
    assert step.trace_count == 25
    lines = step.explain_retraces().splitlines()
    assert [line.partition(":")[0] for line in lines] == ["train", *(f"trace {n}" for n in range(7, 26))]


def test_programs_that_differ_only_in_a_constant_are_told_apart():
    add = px.function(lambda x, thing: x + thing.n)
    objects = [type("Thing", (), {"n": n})() for n in (1.0, 2.0, 1.0)]
    assert [float(add(1.0, thing)) for thing in objects] == [2.0, 3.0, 2.0]


def test_a_second_trace_for_variables_that_the_first_created_is_explained_with_the_others():
    kept = {}

    @px.function
    def scaled(x):
        if not kept:
            kept.update(a=px.Variable(2.0, name="a"), b=px.Variable(1.0, name="b"))
        return kept["a"] * x + kept["b"]

    assert float(scaled(3.0)) == 7.0
    scaled(jnp.ones(2))
    created, argument = scaled.explain_retraces().splitlines()[1:]
    assert created.startswith("trace 2: trace 1 created Variable 'a' and 1 more")
    assert "before the first call (optimizer.build(variables)" in created
    assert argument.startswith("trace 3: argument 'x'")


# ---- creating variables --------------------------------------------------------------------------


def test_two_optimizers_through_one_function():
    def run(make):
        w = px.Variable([1.0, 2.0])
        first, second = px.Optimizer(optax.adam(0.1)), px.Optimizer(optax.adam(0.5))
        step = make(lambda optimizer, x: train_on(w, optimizer, x))
        for optimizer in (first, second, first, second, first):
            step(optimizer, 1.0)
        return step, [w, *first.variables, *second.variables]

    def train_on(w, optimizer, x):
        with px.GradientTape() as tape:
            loss = ((w * x) ** 2).sum()
        optimizer.apply_gradients([(tape.gradient(loss, w), w)])

    step, traced = run(px.function)
    _, plain = run(lambda fn: fn)
    assert step.trace_count == 2
    for a, b in zip(traced, plain):
        np.testing.assert_allclose(a, b, rtol=1e-6)
    counts = [int(v) for v in traced if v.dtype == jnp.int32]
    assert counts == [3, 2]


class Lazy:
    def __init__(self):
        self.w = None

    def __call__(self, x):
        if self.w is None:
            self.w = px.Variable(jnp.full(x.shape[-1], 2.0), name="w")
            self.calls = px.Variable(lambda: jnp.zeros(()), name="calls")
        self.calls.assign_add(1.0)
        return x * self.w


def test_a_layer_built_at_the_first_step_inside_the_function(strategy):
    for in_run in (False, True):
        layer = Lazy()
        step = px.function(lambda x: strategy.run(layer, args=(x,)) if in_run else layer(x))
        for n in range(1, 4):
            assert np.asarray(step(jnp.ones(3))).tolist() == [2.0] * 3
            assert (layer.w.numpy().tolist(), float(layer.calls)) == ([2.0] * 3, float(n))
        assert step.trace_count == 2


def test_a_layer_built_in_a_nested_function():
    layer = Lazy()
    inner = px.function(layer)
    outer = px.function(lambda x: inner(x) + layer(x))
    for n in (2, 4):
        assert outer(jnp.ones(2)).tolist() == [4.0, 4.0]
        assert float(layer.calls) == n
    assert inner(jnp.ones(2)).tolist() == [2.0, 2.0]


def test_initial_values_may_depend_on_the_arguments_and_side_effects_happen_once(capfd):
    kept = {}

    @px.function
    def running_sum(x):
        jax.debug.print("called with {x}", x=x)
        if "total" not in kept:
            kept["total"] = px.Variable(x * 100)
        kept["total"].assign_add(x)
        return kept["total"].value

    assert [float(running_sum(x)) for x in (1.0, 2.0)] == [101.0, 103.0]
    jax.effects_barrier()
    assert capfd.readouterr().out.splitlines() == ["called with 1.0", "called with 2.0"]


def test_creating_on_every_call_is_an_error_that_names_the_line():
    @px.function
    def f(x):
        v = px.Variable(0.0, name="fresh")
        return v + x

    with pytest.raises(VariableCreationError, match=r"f creates variables each time .*'fresh' at .*_state.py:\d+"):
        f(1.0)


def test_a_variable_whose_creation_failed_says_so():
    layer, fail = Lazy(), [True]

    @px.function
    def step(x):
        layer(x)
        if fail[0]:
            raise KeyError
        return layer(x)

    with pytest.raises(KeyError):
        step(jnp.ones(2))
    for use in (lambda: step(jnp.ones(2)), lambda: layer.w.value, lambda: layer.w + 1):
        with pytest.raises(VariableCreationError, match=r"'w', created at .*_state.py:\d+, has no value: .* failed"):
            use()
    assert "not initialised" in repr(layer.w)
    layer.w, fail[0] = None, False
    assert step(jnp.ones(2)).tolist() == [2.0, 2.0]


def test_variables_cannot_be_created_from_traced_values_in_loops_and_branches():
    f = px.function(lambda x: px.cond(x > 0, lambda: px.Variable(x, name="born").value, lambda: x))
    with pytest.raises(ArgumentError, match=r"'born' is created at .*_state.py:\d+ in a loop or branch"):
        f(1.0)
