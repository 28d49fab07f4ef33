"""Variables without storage."""

from __future__ import annotations

import copy

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import phalanx as px

WIDE = 1_000_000


def test_variables_of_any_size_take_no_memory():
    with px.abstract():
        w = px.Variable(jnp.zeros((WIDE, WIDE)), name="w")
        drawn = px.Variable(jax.random.normal(jax.random.key(0), (WIDE, 2)) * 0.1)
        called = px.Variable(lambda: jnp.ones((3, 4), jnp.bfloat16))
        given = px.Variable(np.ones(3))
    assert [v.shape for v in (w, drawn, called, given)] == [(WIDE, WIDE), (WIDE, 2), (3, 4), (3,)]
    assert called.dtype == jnp.bfloat16 and not any(v.has_storage for v in (w, drawn, called, given))
    assert "<no storage>" in repr(w)


def test_nothing_can_be_read_run_or_copied():
    with px.abstract():
        w = px.Variable(1.0, name="w")

    @px.function
    def double(x):
        return 2 * w * x

    for use in (lambda: w.value, lambda: w + 1, lambda: float(w), lambda: double(1.0), lambda: copy.deepcopy(w)):
        with pytest.raises(px.errors.VariableCreationError, match=r"'w' was created at .* in px\.abstract"):
            use()


def test_inside_values_are_types_and_variables_can_be_computed_with():
    with px.abstract():
        w = px.Variable(jnp.ones((2, 3)))
        both = px.Variable(w.value @ jnp.ones((3, 5)))
        w.assign(w * 2)
        w.assign_add(jnp.ones((2, 3)))
    assert both.shape == (2, 5)


def test_a_value_that_is_needed_is_an_error_and_nothing_is_left_behind():
    with pytest.raises(px.errors.TracingError, match=r"px\.abstract"), px.abstract():
        float(jnp.ones(()) + 1)
    assert px.Variable(1.0).has_storage


def test_a_variable_with_a_value_is_not_assigned_inside():
    w = px.Variable(1.0, name="w")
    with pytest.raises(px.errors.VariableWriteError, match="'w' has a value"), px.abstract():
        w.assign(2.0)
    assert float(w) == 1.0


def test_strategies_and_optimizers_take_part():
    strategy = px.Mirrored()
    with px.abstract(), strategy.scope():
        w = px.Variable(jnp.zeros((WIDE, 2)))
        mine = px.Variable(0.0, synchronization="on_read", aggregation="sum")
        optimizer = px.Optimizer(optax.adam(1e-3))
        optimizer.build([w])
    assert w.strategy is strategy and mine.num_components == strategy.num_replicas
    assert not any(v.has_storage for v in optimizer.variables)
    outside = px.Optimizer(optax.sgd(0.1, momentum=0.9))
    outside.build([w])
    assert not any(v.has_storage for v in outside.variables)


def test_a_variable_made_outside_the_scope_is_adopted():
    with px.abstract():
        w = px.Variable(jnp.zeros(3))
        mine = px.Variable(0.0, synchronization="on_read", aggregation="sum")
    strategy = px.Mirrored()
    report = px.preflight(lambda: strategy.run(lambda: mine.assign_add(w.value.sum())), topology="cpu:2")
    assert report.fits and w.strategy is strategy and mine.strategy is strategy
    assert report.bytes.params == 12 + 4


def test_what_a_step_creates_from_them_is_abstract_too():
    with px.abstract():
        w = px.Variable(jnp.zeros((WIDE, WIDE)), name="w")
    made = []

    @px.function
    def step():
        if not made:
            made.append(px.Variable(w.value * 2))
        made[0].assign_add(w.value)

    report = px.preflight(step, topology="cpu:1")
    assert not made[0].has_storage and made[0].shape == (WIDE, WIDE)
    assert report.bytes.params == 2 * 4 * WIDE * WIDE
