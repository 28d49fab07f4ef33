"""What a tape keeps alive: what its pullbacks need, and nothing else."""

from __future__ import annotations

import gc
import weakref

import jax.numpy as jnp

import phalanx as px


def test_results_that_no_derivative_needs_are_let_go_while_the_tape_records():
    w = px.Variable(jnp.ones(3))
    with px.GradientTape() as tape:
        shifted = w + 1.0
        doubled = shifted * 2.0
        loss = doubled.sum()
        refs = [weakref.ref(x) for x in (shifted, doubled)]
        del shifted, doubled
        gc.collect()
        assert [ref() for ref in refs] == [None, None]
    assert tape.gradient(loss, w).tolist() == [2.0, 2.0, 2.0]


def test_results_that_derivatives_need_are_kept_until_the_gradient():
    w = px.Variable(jnp.ones(3))
    with px.GradientTape() as tape:
        y = w + 1.0
        loss = (y * y).sum()
        ref = weakref.ref(y)
        del y
        assert ref() is not None
    assert tape.gradient(loss, w).tolist() == [4.0, 4.0, 4.0]
    gc.collect()
    assert ref() is None
