"""How tapes open, close, fail and let go."""

from __future__ import annotations

import gc
import threading
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from modes import everywhere, results

import phalanx as px
from phalanx import _jax, _linearize, state
from phalanx.errors import ArgumentError, ArgumentTypeError, TapeError

X = jnp.array([0.5, -1.25, 2.0])


def slope(x):
    """The derivative of x^2, by a tape."""
    with px.GradientTape() as tape:
        tape.watch(x)
        y = x * x
    return tape.gradient(y, x)


def assert_nothing_is_open():
    assert _jax.current_trace() is _jax.traces._core.eval_trace
    assert state.top().is_eager and not list(state.tapes_of(state.top()))


# ---- opening and closing -------------------------------------------------------------------------


@everywhere
def test_an_exception_in_the_block_closes_the_tape(mode):
    def fn(x):
        tape = px.GradientTape()
        with pytest.raises(ZeroDivisionError), tape:
            tape.watch(x)
            y = x**3
            with px.GradientTape():
                raise ZeroDivisionError
        return tape.gradient(y, x), slope(x)

    for (x,), (cubed, squared) in results(mode, fn, X):
        np.testing.assert_allclose(cubed, 3 * x**2, 1e-6)
        np.testing.assert_allclose(squared, 2 * x)


def recording(x):
    """Yields in the middle of a tape's block: first a square, in the end the gradient of its cube."""
    with px.GradientTape() as tape:
        tape.watch(x)
        y = x * x
        yield y
        y = y * x
    yield tape.gradient(y, x)


def test_generators_leave_their_tapes_in_any_order():
    first, second = recording(X), recording(X + 1)
    next(first), next(second)
    np.testing.assert_allclose(next(first), 3 * X**2, 1e-6)
    np.testing.assert_allclose(slope(X), 2 * X)
    np.testing.assert_allclose(next(second), 3 * (X + 1) ** 2, 1e-6)
    assert_nothing_is_open()


def test_a_generator_that_is_dropped_closes_its_tape():
    generator = recording(X)
    next(generator)
    assert not _jax.is_eager()
    del generator
    assert_nothing_is_open()


def test_a_generator_that_is_closed_while_something_else_is_traced_leaves_nothing_behind():
    generator = recording(X)
    next(generator)

    @jax.jit
    def closing(x):
        generator.close()
        return slope(x)

    np.testing.assert_allclose(closing(X), 2 * X)
    assert _jax.is_eager()
    np.testing.assert_allclose(slope(X), 2 * X)
    assert_nothing_is_open()


def test_a_generator_that_another_thread_closes_is_silent_at_once():
    generator = recording(X)
    next(generator)
    thread = threading.Thread(target=generator.close)
    thread.start()
    thread.join()
    assert _jax.is_eager()
    np.testing.assert_allclose(slope(X), 2 * X)
    assert_nothing_is_open()


def test_each_thread_has_its_own_tapes():
    w = px.Variable(X)
    meet, found = threading.Barrier(2), {}

    def work(factor):
        with px.GradientTape() as tape:
            meet.wait(60)
            y = jnp.sum(w * w) * factor
            meet.wait(60)
            z = y * factor
            found[factor] = tape.gradient(z, w), tape.watched_variables()

    with px.GradientTape() as unused:
        threads = [threading.Thread(target=work, args=(factor,)) for factor in (2.0, 3.0)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert unused.watched_variables() == ()
    for factor, (gradient, watched) in found.items():
        np.testing.assert_allclose(gradient, 2 * factor**2 * X, 1e-6)
        assert watched == (w,)


def test_a_tape_records_one_block_at_a_time_and_a_persistent_one_several():
    tape = px.GradientTape()
    with tape:
        tape.watch(X)
        y = X * X
        with pytest.raises(TapeError, match="already recording"), tape:
            pass
    tape.gradient(y, X)
    with pytest.raises(TapeError, match=r"persistent=True"):
        tape.gradient(y, X)
    with pytest.raises(TapeError, match=r"persistent=True"), tape:
        pass
    persistent = px.GradientTape(persistent=True)
    with persistent:
        persistent.watch(X)
        y = X * X
    np.testing.assert_allclose(persistent.gradient(y, X), 2 * X)
    with persistent:
        z = y * X
    np.testing.assert_allclose(persistent.gradient(z, X), 3 * X**2, 1e-6)


def test_asking_wrongly_does_not_use_up_the_tape():
    with px.GradientTape() as tape:
        tape.watch(X)
        y = X * X
    with pytest.raises(ArgumentError):
        tape.gradient(y, X, output_gradients=jnp.ones(7))
    np.testing.assert_allclose(tape.gradient(y, X), 2 * X)


# ---- how much is kept, and for how long ----------------------------------------------------------


@pytest.fixture
def _no_garbage_collection():
    gc.collect()
    gc.disable()
    yield
    gc.enable()


@pytest.mark.usefixtures("_no_garbage_collection")
def test_values_that_only_a_tape_used_go_with_its_gradient():
    with px.GradientTape() as tape:
        tape.watch(X)
        hidden = jnp.exp(X)
        y = jnp.sum(jnp.sin(hidden))
    kept = weakref.ref(hidden)
    del hidden
    assert kept() is not None  # its own derivative
    tape.gradient(y, X)
    assert kept() is None


@pytest.mark.usefixtures("_no_garbage_collection")
@pytest.mark.parametrize("persistent", [False, True])
def test_values_go_with_the_tape_that_used_them(persistent):
    with px.GradientTape(persistent=persistent) as tape:
        tape.watch(X)
        with px.GradientTape(persistent=persistent) as inner:
            inner.watch(X)
            hidden = jnp.exp(X)
            y = jax.lax.while_loop(lambda v: v < 9.0, lambda v: 2 * v, jnp.sum(hidden))
        with pytest.raises(TapeError):
            inner.gradient(y, X)
    kept = weakref.ref(hidden)
    del hidden
    assert kept() is not None
    del tape, inner
    assert kept() is None


@pytest.mark.usefixtures("_no_garbage_collection")
def test_values_that_no_derivative_needs_go_at_once():
    with px.GradientTape() as tape:
        tape.watch(X)
        unwatched = jnp.exp(jnp.ones(3))
        shifted = X * 2.0 + unwatched
        y = jnp.sum(shifted)
        gone = [weakref.ref(unwatched), weakref.ref(shifted)]
        del unwatched, shifted
        assert [ref() for ref in gone] == [None, None]
    np.testing.assert_allclose(tape.gradient(y, X), [2.0] * 3)


def test_ten_thousand_operations_are_ten_thousand_records():
    def records(steps):
        with px.GradientTape() as tape:
            y = tape_input = jnp.float32(1.0)
            tape.watch(tape_input)
            for _ in range(steps):
                y = jax.lax.mul(y, jnp.float32(0.9999))
        count = len(tape._records)
        return count, tape.gradient(y, tape_input)

    assert records(100)[0] == 100
    count, gradient = records(10_000)
    assert count == 10_000
    np.testing.assert_allclose(gradient, 0.9999**10_000, 1e-2)


def test_the_same_step_again_adds_nothing_to_any_cache():
    w, b = px.Variable(jnp.ones((3, 3))), px.Variable(jnp.zeros(3))

    def step():
        with px.GradientTape() as outer:
            with px.GradientTape() as tape:
                y = jnp.sum(jax.nn.softmax(jnp.tanh(X @ w + b)) * X)
            slopes = tape.gradient(y, [w, b])
            z = jnp.sum(slopes[0] * slopes[0])
        return outer.gradient(z, w)

    def live_objects():
        gc.collect()
        return len(gc.get_objects())

    for _ in range(3):
        step()
    before = live_objects()
    for _ in range(20):
        step()
    assert live_objects() - before < 20


def test_programs_of_functions_that_are_gone_go_too():
    def step(factor):
        def body(carry, row):
            return carry * row * factor, row

        with px.GradientTape() as tape:
            tape.watch(X)
            y = jax.lax.scan(body, jnp.float32(1.0), X)[0]
        tape.gradient(y, X)

    def programs():
        gc.collect()
        return [len(cache._entries) for cache in (_linearize._forwards, _linearize._backwards)]

    step(1.0)
    before = programs()
    for factor in (2.0, 3.0):
        step(factor)
    assert programs() == before


def test_recording_again_finds_what_was_compiled(monkeypatch):
    with px.GradientTape() as tape:
        tape.watch(X)
        y = jnp.tanh(X)
    tape.gradient(y, X)
    traces = []
    monkeypatch.setattr(_linearize, "_vjp", lambda *args: traces.append(args))
    np.testing.assert_allclose(slope_of(jnp.tanh, X + 1), 1 - jnp.tanh(X + 1) ** 2, 1e-5)
    assert traces == []


def slope_of(f, x):
    with px.GradientTape() as tape:
        tape.watch(x)
        y = f(x)
    return tape.gradient(y, x)


# ---- what it does not take -----------------------------------------------------------------------

MISUSES = {
    "persistent": (lambda t: px.GradientTape("yes"), ArgumentTypeError, "persistent takes True or False, got 'yes'"),
    "watch_accessed_variables": (
        lambda t: px.GradientTape(watch_accessed_variables=None),
        ArgumentTypeError,
        "watch_accessed_variables takes True or False, got None",
    ),
    "watch a string": (lambda t: t.watch("x"), ArgumentTypeError, "watch .*str"),
    "watch numpy": (lambda t: t.watch([X, np.ones(2)]), ArgumentTypeError, r"watch .*ndarray.*jnp\.asarray"),
    "watch a number": (lambda t: t.watch({"x": 1.0}), ArgumentTypeError, "watch .*float"),
    "string target": (lambda t: t.gradient("y", X), ArgumentTypeError, "target.*str 'y'"),
    "numpy target": (lambda t: t.gradient(np.ones(3), X), ArgumentTypeError, "target.*ndarray"),
    "no target": (lambda t: t.gradient(None, X), ArgumentTypeError, "target.*None"),
    "empty target": (lambda t: t.gradient([], X), ArgumentTypeError, r"target.*\[\]"),
    "string source": (lambda t: t.gradient(t.y, [X, "w"]), ArgumentTypeError, "sources.*str 'w'"),
    "numpy source": (lambda t: t.gradient(t.y, np.ones(3)), ArgumentTypeError, r"sources.*ndarray.*jnp\.asarray"),
    "no sources": (lambda t: t.gradient(t.y, None), ArgumentTypeError, "sources.*None"),
    "shape of output_gradients": (
        lambda t: t.gradient(t.y, X, output_gradients=jnp.ones((3, 1))),
        ArgumentError,
        r"output_gradients.*\(3, 1\).*\(3,\)",
    ),
    "structure of output_gradients": (
        lambda t: t.gradient([t.y, t.y], X, output_gradients=[jnp.ones(3)]),
        ArgumentError,
        "output_gradients must have the structure of the target",
    ),
    "string output_gradients": (
        lambda t: t.gradient(t.y, X, output_gradients="ones"),
        ArgumentTypeError,
        "output_gradients.*'ones'",
    ),
    "complex output_gradients": (
        lambda t: t.gradient(t.y, X, output_gradients=1j * X),
        ArgumentError,
        "output_gradients.*complex64.*float32",
    ),
    "unconnected_gradients": (
        lambda t: t.gradient(t.y, X, unconnected_gradients="zeros"),
        ArgumentError,
        "unconnected_gradients must be one of 'none', 'zero', got 'zeros'",
    ),
    "jacobian of several": (lambda t: t.jacobian([t.y, t.y], X), ArgumentError, "jacobian.*one target.*2"),
    "jacobian of a string": (lambda t: t.jacobian("y", X), ArgumentTypeError, "target.*str"),
    "jacobian by a string": (lambda t: t.jacobian(t.y, "x"), ArgumentTypeError, "sources.*str"),
    "jacobian unconnected": (
        lambda t: t.jacobian(t.y, X, unconnected_gradients=0),
        ArgumentError,
        "unconnected_gradients.*0",
    ),
    "batch_jacobian of different batches": (
        lambda t: t.batch_jacobian(t.y, jnp.ones((2, 3))),
        ArgumentError,
        r"batch_jacobian.*\(3,\).*\(2, 3\)",
    ),
    "batch_jacobian of a scalar": (lambda t: t.batch_jacobian(jnp.sum(t.y), X), ArgumentError, r"batch_jacobian.*\(\)"),
    "batch_jacobian by several": (lambda t: t.batch_jacobian(t.y, [X, X]), ArgumentError, "batch_jacobian.*one .*2"),
    "batch_jacobian unconnected": (
        lambda t: t.batch_jacobian(t.y, X, unconnected_gradients="no"),
        ArgumentError,
        "unconnected_gradients.*'no'",
    ),
}


@pytest.mark.parametrize("name", MISUSES)
def test_misuse_is_an_error_that_names_the_argument(name):
    misuse, error, message = MISUSES[name]
    with px.GradientTape(persistent=True) as tape:
        tape.watch(X)
        tape.y = X * X
        with pytest.raises(error, match=message):
            misuse(tape)


def test_what_needs_an_open_tape_says_so():
    tape = px.GradientTape()
    with pytest.raises(TapeError, match="watch was called on a tape that is not recording"):
        tape.watch(X)
    not_open = pytest.raises(TapeError, match="stop_recording was called on a tape that is not recording")
    with not_open, tape.stop_recording():
        pass


def test_integers_are_not_watched_and_have_no_gradient():
    numbers = jnp.arange(3)
    with px.GradientTape() as tape:
        with pytest.warns(UserWarning, match="int32 has no gradient"):
            tape.watch([numbers, X])
        y = jnp.sum(numbers * X)
    assert tape.gradient(y, {"numbers": numbers, "x": X})["numbers"] is None


def test_values_of_a_function_that_is_over_have_no_gradient_any_more():
    tape, kept = px.GradientTape(persistent=True), []

    @px.function
    def fn(x):
        with tape:
            tape.watch(x)
            y = x * x
        kept[:] = x, y
        return y

    fn(X)
    with pytest.raises(TapeError, match=r"target.*is over"):
        tape.gradient(kept[1], kept[0])
    with pytest.raises(TapeError, match=r"sources.*is over"):
        tape.gradient(jnp.ones(3), kept[0])
