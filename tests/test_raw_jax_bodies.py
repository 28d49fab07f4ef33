"""JAX's own loops, branches and checkpoints in a traced function: they see variables as they are at that point.

JAX keeps what it traced of a body by the body's identity; all bodies here are defined once, and used again after
the variable has changed.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest

import phalanx as px
from phalanx.errors import FrozenVariableError, VariableWriteError

v = px.Variable(1.0, name="v")


def times_v(x):
    return x * v


def scan_body(carry, x):
    return carry + times_v(x), None


def while_body(x):
    return x + v


def fori_body(i, x):
    return times_v(x)


checkpointed = jax.checkpoint(times_v)
custom_jvp = jax.custom_jvp(times_v)
custom_jvp.defjvp(lambda primals, tangents: (times_v(*primals), times_v(*tangents)))

CONSTRUCTS = {
    "scan": lambda x: jax.lax.scan(scan_body, 0.0, x[None])[0],
    "map": lambda x: jax.lax.map(times_v, x[None])[0],
    "fori_loop": lambda x: jax.lax.fori_loop(0, 1, fori_body, x),
    "while_loop": lambda x: jax.lax.while_loop(lambda y: y < 2.0, while_body, x) - x,
    "cond": lambda x: jax.lax.cond(x > 0, times_v, times_v, x),
    "switch": lambda x: jax.lax.switch(1, [jnp.sin, times_v], x),
    "checkpoint": lambda x: checkpointed(x),
    "custom_jvp": lambda x: custom_jvp(x),
    "vmap": lambda x: jax.vmap(times_v)(x[None])[0],
    "grad": lambda x: jax.grad(times_v)(x),
}


@pytest.fixture(autouse=True)
def _v_is_one():
    v.assign(1.0)


@pytest.mark.parametrize("construct", CONSTRUCTS.values(), ids=CONSTRUCTS)
def test_a_body_used_again_after_an_assignment_sees_the_new_value(construct):
    @px.function
    def before_and_after(x):
        before = construct(x)
        v.assign_add(1.0)
        return before, construct(x)

    for call in range(3):
        assert [float(y) for y in before_and_after(jnp.float32(1.0))] == [1.0 + call, 2.0 + call]
    assert before_and_after.trace_count == 1


def test_a_body_used_in_one_function_can_be_used_in_another():
    loops = [px.function(lambda xs: jax.lax.scan(scan_body, 0.0, xs)[0]) for _ in range(2)]
    for loop in loops:
        assert float(loop(jnp.ones(3))) == 3.0
    v.assign(2.0)
    for loop in loops:
        assert float(loop(jnp.ones(3))) == 6.0


@pytest.mark.parametrize("name", ["scan", "cond", "checkpoint"])
def test_each_tape_sees_what_a_body_reads(name):
    construct = CONSTRUCTS[name]

    @px.function
    def gradients(x):
        found = []
        construct(x)
        for _ in range(2):
            with px.GradientTape(persistent=True) as tape:
                y = construct(x)
                with tape.stop_recording():
                    construct(x)
                z = construct(x)
            found += [tape.gradient(y, v), tape.gradient(z, v)]
        return found

    assert [float(g) for g in gradients(jnp.float32(3.0))] == [3.0] * 4


def test_a_tape_differentiates_with_the_value_that_the_body_read():
    squared = jax.checkpoint(lambda x: (x * v) ** 2)

    @px.function
    def gradient_after_an_assignment(x):
        with px.GradientTape() as tape:
            y = squared(x)
        v.assign(10.0)
        return tape.gradient(y, v), squared(x)

    assert [float(r) for r in gradient_after_an_assignment(jnp.float32(3.0))] == [18.0, 900.0]


@pytest.mark.parametrize("n", [1, 3])
def test_bodies_in_a_replica_see_the_present_value(n):
    strategy = px.Mirrored(jax.devices()[:n])
    with strategy.scope():
        w = px.Variable(1.0)

    def body(carry, x):
        return carry + w * x, None

    def replica(xs):
        before = jax.lax.scan(body, 0.0, xs)[0]
        w.assign_add(1.0)
        return before, jax.lax.scan(body, 0.0, xs)[0]

    step = px.function(lambda xs: strategy.run(replica, args=(xs,)))
    for call in range(2):
        assert [float(y) for y in step(jnp.ones(2))] == [2.0 + 2 * call, 4.0 + 2 * call]


def test_functions_called_in_between_are_not_traced_again():
    inner = px.function(times_v)

    @px.function
    def outer(x):
        return inner(x), jax.lax.scan(scan_body, 0.0, x[None])[0], v.assign_add(1.0).value, inner(x)

    assert [float(y) for y in outer(jnp.float32(1.0))] == [1.0, 1.0, 2.0, 2.0]
    assert inner.trace_count == 1


def test_eager_programs_are_not_compiled_again_after_such_a_function():
    traces = []
    plain = jax.jit(lambda x: (traces.append(1), x)[1])
    plain(1.0)
    px.function(lambda xs: jax.lax.scan(scan_body, 0.0, xs)[0])(jnp.ones(2))
    plain(1.0)
    assert len(traces) == 1


@pytest.mark.parametrize("inside", [False, True], ids=["eager", "in a function"])
def test_reading_in_a_program_that_jax_keeps_is_refused(inside):
    transformations = {"jit": jax.jit(times_v), "make_jaxpr": jax.make_jaxpr(times_v)}
    if not inside:
        transformations |= {name: CONSTRUCTS[name] for name in ("scan", "cond", "checkpoint", "while_loop")}
    for transformed in transformations.values():
        call = px.function(transformed) if inside else transformed
        with pytest.raises(FrozenVariableError, match=r"'v' is read inside .* at .*test_raw_jax_bodies.py:\d+"):
            call(jnp.float32(1.0))


def test_writing_in_a_body_that_jax_traces_is_refused_with_the_way_out():
    def writing(carry, x):
        v.assign_add(x)
        return carry, None

    @px.function
    def step(xs):
        return jax.lax.scan(writing, 0.0, xs)[0]

    with pytest.raises(VariableWriteError, match=r"'v' is assigned inside a JAX transformation .*px\.scan"):
        step(jnp.ones(2))
    assert float(v) == 1.0
