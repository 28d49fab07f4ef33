"""A program is compiled before its first step: it works, or nothing has happened."""

from __future__ import annotations

import logging
import pickle

import jax
import jax.numpy as jnp
import pytest

import phalanx as px


def impossible(x):
    """Something that no compiler knows."""
    return jax.ffi.ffi_call("no_such_target", jax.ShapeDtypeStruct(x.shape, x.dtype))(x)


def test_what_does_not_compile_leaves_variables_as_they_were():
    w = px.Variable([1.0, 2.0])

    @px.function
    def step():
        w.assign_add(jnp.ones(2))
        return impossible(w.value)

    for _ in range(2):
        with pytest.raises(px.errors.CompilationError, match="step does not compile, and has not run") as error:
            step()
        assert "no_such_target" in error.value.compiler_message
        assert w.numpy().tolist() == [1.0, 2.0]


def test_a_strategys_run_is_compiled_first_too():
    strategy = px.Mirrored()
    with strategy.scope():
        w = px.Variable(jnp.ones(3))

    def replica():
        w.assign(impossible(w.value))

    with pytest.raises(px.errors.CompilationError, match="replica does not compile"):
        strategy.run(replica)
    assert w.numpy().tolist() == [1.0, 1.0, 1.0]


def test_the_log_says_what_is_compiled_and_how_long_it_took(caplog):
    @px.function
    def doubled(x):
        return 2 * x

    with caplog.at_level(logging.INFO, "phalanx"):
        doubled(jnp.ones(3)), doubled(jnp.ones(3))
    said = [r.getMessage() for r in caplog.records if r.getMessage().startswith("doubled")]
    assert said[0] == "doubled: compiling" and said[1].startswith("doubled: compiled in ") and len(said) == 2


def test_it_is_compiled_once():
    durations = []

    def listen(event, seconds, **_):
        if event.endswith("backend_compile_duration"):
            durations.append(seconds)

    w, x = px.Variable(jnp.ones(3)), jnp.ones(3)

    def made(factor):
        @px.function
        def step(x):
            w.assign_add(factor * x)
            return w.value.sum()

        return step

    made(1.0)(x)  # what else there is to compile, such as the copy of a value that was handed out
    step = made(2.0)
    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        step(x), step(x)
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)
    assert len(durations) == 1


def test_want_of_memory_is_named_with_what_helps():
    from phalanx._compiling import failed

    error = failed("step", "RESOURCE_EXHAUSTED: Out of memory\nmore")
    assert "smaller batches" in str(error) and error.compiler_message.endswith("more")
    again = pickle.loads(pickle.dumps(error))
    assert str(again) == str(error) and again.compiler_message == error.compiler_message
