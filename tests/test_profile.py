"""`px.profile` finds what slows a step down: each test plants one cause, many times larger than all else."""

from __future__ import annotations

import dataclasses
import json
import re
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import phalanx as px
from phalanx.errors import ArgumentError, ArgumentTypeError, StrategyError

SMALL = [jnp.ones((4, 4))]


@px.function
def small_step(x):
    return (x @ x).sum()


def slow_source():
    for batch in SMALL * 8:
        time.sleep(0.03)
        yield batch


class Slow:
    def __iter__(self):
        return slow_source()


def test_a_slow_source():
    found = px.profile(small_step, Slow(), steps=6)
    assert found.bound_by == "input"
    assert found.verdict.startswith("Input-bound: ") and "Raise prefetch" in found.verdict


@pytest.mark.filterwarnings("ignore:step has been traced for 10 kinds")
def test_batches_of_many_shapes():
    @px.function
    def step(x):
        return jnp.tanh(x @ x.T).sum()

    batches = [jnp.ones((n, 4)) for n in range(1, 40)]
    found = px.profile(step, batches, steps=6)
    assert found.bound_by == "compilation"
    assert found.recompiled_steps == 6
    assert "in 6 of 6 steps" in found.verdict
    changed = r"Last time: argument 'x': float32\[\d+,4\] -> float32\[\d+,4\]. step.explain_retraces\(\) has all"
    assert re.search(changed, found.verdict)


def test_python_around_the_call():
    def step(x):
        time.sleep(0.03)
        return small_step(x)

    found = px.profile(step, SMALL, steps=6)
    assert found.bound_by == "host"
    assert "Make the step a px.function" in found.verdict


def test_a_step_that_returns_nothing_is_waited_for_by_the_variables_it_updates():
    w = px.Variable(jnp.ones((256, 256)) / 256)

    @px.function
    def step(x):
        w.assign(jax.lax.fori_loop(0, 300, lambda i, x: jnp.sin(x @ x), x))

    found = px.profile(step, [jnp.ones((256, 256)) / 256], steps=3)
    assert found.bound_by == "compute"


def test_a_step_that_reads_its_loss_is_told_so_where_python_takes_the_time():
    def step(x):
        time.sleep(0.03)
        return {"loss": float(small_step(x))}

    found = px.profile(step, SMALL, steps=3)
    assert found.bound_by == "host"
    assert "The step reads numbers (as float(loss) does)" in found.verdict


def test_a_step_that_reads_its_loss_waits_for_the_devices_which_compute():
    @px.function
    def computed(x):
        return jax.lax.fori_loop(0, 300, lambda i, x: jnp.sin(x @ x), x).sum()

    found = px.profile(lambda x: float(computed(x)), [jnp.ones((256, 256)) / 256], steps=3)
    assert found.bound_by == "compute" and found.reads_numbers


def test_two_causes_that_are_close_are_both_named():
    found = px.profile(small_step, SMALL, steps=1)
    shares = {"host": 0.45, "input": 0.36, "compute": 0.19, "collectives": 0.0, "compilation": 0.0}
    close = dataclasses.replace(found, shares=shares)
    assert close.verdict.startswith("Bound by the host") and "waiting for data takes 36%" in close.verdict
    clear = dataclasses.replace(found, shares={**shares, "input": 0.34})
    assert "waiting for data" not in clear.verdict


def test_a_call_that_does_little():
    weights = [px.Variable(1.0) for _ in range(300)]

    @px.function
    def step(x):
        for w in weights:
            w.assign_add(x[0, 0])
        return x[0, 0]

    found = px.profile(step, SMALL, steps=6)
    assert found._host_bound("90%").endswith("or less Python around the call.")


def test_devices_that_compute():
    @px.function
    def step(x):
        return jax.lax.fori_loop(0, 300, lambda i, x: jnp.sin(x @ x), x).sum()

    found = px.profile(step, [jnp.ones((256, 256)) / 256], steps=3)
    assert found.bound_by == "compute"
    assert found.recompiled_steps == 0


def test_replicas_that_meet_all_the_time():
    strategy = px.Mirrored(jax.devices()[:4])

    @px.function
    def step(x):
        def on_replica(x):
            context = px.get_replica_context()

            def meet(x, _):
                return context.all_reduce("mean", x), ()

            return jax.lax.scan(meet, context.all_reduce("sum", x), length=300)[0].sum()

        return strategy.reduce("mean", strategy.run(on_replica, (x,)))

    found = px.profile(step, strategy.distribute_dataset(np.ones((8, 4), np.float32), batch_size=4), steps=4)
    assert found.bound_by == "collectives"


def test_methods_are_traced_functions_too():
    class Trainer:
        @px.function
        def step(self, x):
            return x.sum()

    assert px.profile(Trainer().step, SMALL, steps=1).is_traced
    assert not px.profile(lambda x: small_step(x), SMALL, steps=1).is_traced


def test_shares_are_of_one_whole_and_the_timeline_shows_host_and_devices():
    found = px.profile(small_step, SMALL, steps=3)
    assert sum(found.shares.values()) == pytest.approx(1)
    assert min(found.shares.values()) >= 0
    lanes = {span.lane for span in found.timeline}
    assert "host" in lanes and len(lanes) > 1
    assert all(span.seconds >= 0 for span in found.timeline)


def test_a_profile_is_shown_as_a_table_as_json_and_as_a_page(tmp_path):
    found = px.profile(small_step, SMALL, steps=3)
    assert found.verdict in str(found) and "ms per step over 3 steps" in str(found)
    data = json.loads(found.to_json())
    assert data["bound_by"] == found.bound_by and set(data["shares"]) == set(found.shares)
    found.save_html(tmp_path / "profile.html")
    page = (tmp_path / "profile.html").read_text()
    assert page.startswith("<!doctype html>") and found.verdict in page.replace("&#x27;", "'")
    assert "http" not in page and "<script" not in page


def test_the_steps_are_real_ones():
    count = px.Variable(0)

    @px.function
    def step(x):
        count.assign_add(1)
        return x

    px.profile(step, SMALL, steps=2)
    assert int(count.value) == 1 + 2 + 2 + 2


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: px.profile(3, SMALL), ArgumentTypeError, "step must be a function, got int"),
        (lambda: px.profile(small_step, 3), ArgumentTypeError, "batches must be iterable, got int"),
        (lambda: px.profile(small_step, []), ArgumentError, "batches is empty"),
        (lambda: px.profile(small_step, iter(SMALL)), ArgumentError, "give what makes it"),
        (lambda: px.profile(small_step, SMALL, steps=0), ArgumentError, "steps must be a positive int, got 0"),
        (
            lambda: px.profile(lambda x: [small_step(x), px.profile(small_step, SMALL, steps=1)], SMALL, steps=1),
            StrategyError,
            "profiler is in use",
        ),
        (lambda: px.function(lambda: px.profile(small_step, SMALL))(), StrategyError, "outside traced functions"),
    ],
)
def test_wrong_calls(call, error, message):
    with pytest.raises(error, match=message):
        call()


def test_after_a_failure_the_next_profile_works():
    count = []

    def step(x):
        count.append(0)
        if len(count) == 1 + 2 + 2 + 1:  # under JAX's profiler
            raise KeyError("of mine")
        return small_step(x)

    with pytest.raises(KeyError, match="of mine"):
        px.profile(step, SMALL, steps=2)
    assert px.profile(small_step, SMALL, steps=2).steps == 2
