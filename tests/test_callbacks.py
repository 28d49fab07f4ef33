"""Python functions that a running program calls: what they may do with variables, and what their errors leave."""

from __future__ import annotations

import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import phalanx as px

PLACES = {"plain": lambda: None, "two replicas": lambda: px.Mirrored(jax.devices()[:2])}


@pytest.fixture(params=PLACES.values(), ids=PLACES)
def place(request):
    """Runs an update as a step: in the calling thread without replicas, in threads of JAX with them."""
    strategy = request.param()

    def step_of(update):
        return px.function(update if strategy is None else lambda: strategy.run(update))

    return step_of


@pytest.fixture(autouse=True)
def no_errors_left():
    """What JAX remembers of errors in callbacks until the next one on the same device."""
    yield
    for device in jax.devices()[:2]:
        jax.jit(lambda x: jax.debug.callback(lambda x: None, x))(jax.device_put(1.0, device))
    jax.effects_barrier()


def call(f, x):
    """Call `f` with the value of `x` from within the program, and use what it returns."""
    return jax.pure_callback(lambda x: np.asarray(f(x), np.float32), jax.ShapeDtypeStruct((), jnp.float32), x)


def variable(value):
    return px.Variable(value, aggregation="only_first_replica")


def test_a_callback_reads_variables_as_they_were_before_the_step(place):
    v, w, seen = variable(1.0), variable(5.0), []

    def look(x):
        seen.append((float(v.value), float(w)))
        return x

    def update():
        v.assign(2 * call(look, v.value))

    step = place(update)
    for _ in range(3):
        step()
    assert sorted(set(seen)) == [(1.0, 5.0), (2.0, 5.0), (4.0, 5.0)]
    assert float(v) == 8.0


def test_a_callback_that_assigns_or_calls_a_traced_function_is_refused(place):
    v, w = variable(1.0), variable(5.0)
    double = px.function(lambda: w.assign(2 * w.value).value)
    for forbidden in (lambda: w.assign(2.0).value, double):

        def update(forbidden=forbidden):
            v.assign_add(call(lambda x: forbidden(), v.value))

        with pytest.raises(Exception, match=r"StrategyError: A Python function that a running program calls"):
            place(update)()
        assert (float(v), float(w)) == (1.0, 5.0)
    assert float(double()) == 10.0


def test_another_thread_waits_for_a_step_that_calls_back_and_both_updates_count():
    v, running, go_on = variable(1.0), threading.Event(), threading.Event()

    def block(x):
        running.set()
        assert go_on.wait(30)
        return x

    step = px.function(lambda: v.assign_add(call(block, v.value)))
    first = threading.Thread(target=step)
    first.start()
    assert running.wait(30)
    second = threading.Thread(target=v.assign_add, args=(10.0,))
    second.start()
    assert float(v) == 1.0
    go_on.set()
    first.join()
    second.join()
    assert float(v) == 12.0


def fail(x):
    raise ValueError("too large")


FAILING = {
    "pure_callback": lambda x: call(fail, x),
    "io_callback": lambda x: jax.experimental.io_callback(fail, None, x) or x,
    "debug.callback": lambda x: jax.debug.callback(fail, x) or x,
    "debug.print": lambda x: jax.debug.print("{x:too large}", x=x) or x,
    "in a loop": lambda x: jax.lax.fori_loop(0, 2, lambda i, x: jax.debug.callback(fail, x) or x, x),
}


@pytest.mark.parametrize("failing", FAILING.values(), ids=FAILING)
def test_an_error_in_a_callback_leaves_the_variables_as_they_were(place, failing):
    v, w = variable(1.0), variable(2.0)

    def grow():
        v.assign_add(1.0)
        w.assign_add(1.0)

    def update():
        grow()
        w.assign(failing(v.value))

    step = place(grow)
    step()  # from here on the variables own their buffers
    with pytest.raises(Exception, match="too large"):
        place(update)()
    assert (float(v), float(w)) == (2.0, 3.0)
    step()
    assert (float(v), float(w)) == (3.0, 4.0)
