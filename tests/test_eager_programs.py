"""Programs of functions handed over in eager code: remembered by code and by what the code sees."""

from __future__ import annotations

import gc
import weakref
from collections import namedtuple

import jax.numpy as jnp

import phalanx as px

RATE = 1.0


def _scaled(x):
    return RATE * x


def _even(n):
    return RATE if n == 0 else _odd(n - 1)


def _odd(n):
    return _even(n - 1)


def test_function_defined_in_a_loop_is_compiled_once(strategy):
    calls = []

    def step_of(factor):
        def step(x):
            calls.append(1)
            return factor * x

        return step

    assert [float(strategy.run(step_of(2.0), args=(x,))) for x in (1.0, 2.0, 3.0)] == [2.0, 4.0, 6.0]
    assert len(calls) == 1
    assert float(strategy.run(step_of(5.0), args=(1.0,))) == 5.0


def test_global_bound_anew_is_seen(monkeypatch):
    strategy = px.OneDevice()
    assert float(strategy.run(lambda x: RATE * x, args=(2.0,))) == 2.0

    def fn(x):
        return _scaled(x)

    assert float(strategy.run(fn, args=(2.0,))) == 2.0
    monkeypatch.setitem(globals(), "RATE", 10.0)
    assert float(strategy.run(fn, args=(2.0,))) == 20.0
    _, ys = px.scan(lambda carry, x: (carry, _scaled(x)), 0, jnp.ones(2))
    assert ys.tolist() == [10.0, 10.0]
    monkeypatch.setitem(globals(), "RATE", 3.0)
    _, ys = px.scan(lambda carry, x: (carry, _scaled(x)), 0, jnp.ones(2))
    assert ys.tolist() == [3.0, 3.0]


def test_functions_that_call_each_other_are_told_apart_by_their_globals(monkeypatch):
    strategy = px.OneDevice()
    assert float(strategy.run(lambda: _even(4) + jnp.zeros(()))) == 1.0
    monkeypatch.setitem(globals(), "RATE", 7.0)
    assert float(strategy.run(lambda: _even(4) + jnp.zeros(()))) == 7.0


def test_what_the_functions_close_over_is_let_go(strategy):
    class Model:
        def __init__(self):
            with strategy.scope():
                self.w = px.Variable(1.0)

    def count(calls):
        model, v = Model(), px.Variable(1.0)

        def step(x):
            calls.append(1)
            model.w.assign_add(x)
            v.assign_add(x)

        for x in (1.0, 2.0):
            strategy.run(step, args=(x,))
        px.scan(lambda carry, x: (carry + model.w, v.assign_add(x).value), 0.0, jnp.ones(2))
        assert (float(model.w), float(v)) == (4.0, 6.0)
        return [weakref.ref(thing) for thing in (model, model.w, v)]

    for _ in range(2):
        calls = []
        refs = count(calls)
        gc.collect()
        assert [ref() for ref in refs] == [None] * 3
        assert len(calls) == 1


def test_values_that_are_equal_but_compute_differently_are_different_programs() -> None:
    ordered, reversed_ = namedtuple("ordered", "x y"), namedtuple("reversed_", "y x")
    strategy = px.OneDevice()

    def first(c):
        return float(strategy.run(lambda: jnp.float32(c.x) * 1))

    def inverse(z):
        return float(strategy.run(lambda: 1 / jnp.float32(z)))

    assert (first(ordered(1, 2)), first(reversed_(1, 2))) == (1.0, 2.0)
    assert (inverse(0.0), inverse(-0.0)) == (float("inf"), float("-inf"))


def test_static_arguments_of_other_types_are_different_programs() -> None:
    @px.function(static_argnames="k")
    def scale(x, k):
        return x * k[0]

    dtypes = [scale(jnp.int32(3), k).dtype.name for k in ((1,), (True,), (1.0,))]
    assert (dtypes, scale.trace_count) == (["int32", "int32", "float32"], 3)
    assert scale(jnp.int32(3), (float("nan"),)).dtype == scale(jnp.int32(3), (float("nan"),)).dtype
    assert scale.trace_count == 4


def test_programs_that_are_let_go_leave_no_watch_on_the_objects_they_used() -> None:
    w, strategy = px.Variable(1.0), px.OneDevice()
    before = len(weakref.getweakrefs(w))
    for k in range(80):
        strategy.run(lambda k=k: w * k)
    assert len(weakref.getweakrefs(w)) - before <= 2 * 64 + 8
