"""A step is compiled for devices that are not here, and nothing happens to it."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import threading
import time

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from slices import needs_libtpu

import phalanx as px
from phalanx.preflight import compiler, html, targets

ROWS, WIDE, OUT = 1024, 256, 512
SHAPES = (jax.ShapeDtypeStruct((ROWS, WIDE), jnp.float32), jax.ShapeDtypeStruct((ROWS, OUT), jnp.float32))


class Model:
    """One layer, Adam, and a count of rows that each replica keeps."""

    def __init__(self, strategy):
        self.strategy = strategy
        with strategy.scope():
            self.w = px.Variable(jnp.zeros((WIDE, OUT)), name="layer/w")
            self.b = px.Variable(jnp.zeros(OUT), name="layer/b")
            self.seen = px.Variable(0.0, synchronization="on_read", aggregation="sum", name="seen")
            self.optimizer = px.Optimizer(optax.adam(1e-3))

    def replica(self, x, y):
        with px.GradientTape() as tape:
            loss = jnp.mean((jnp.tanh(x @ self.w + self.b) - y) ** 2)
        variables = [self.w, self.b]
        self.optimizer.apply_gradients(zip(tape.gradient(loss, variables), variables), reduce="mean")
        self.seen.assign_add(len(x))
        return loss

    @px.function
    def step(self, x, y):
        return self.strategy.reduce("mean", self.strategy.run(self.replica, (x, y)))

    def eager_step(self, x, y):
        return self.strategy.reduce("mean", self.strategy.run(self.replica, (x, y)))


@pytest.fixture(scope="module")
def model():
    return Model(px.Mirrored())


@pytest.fixture(scope="module")
def report(model):
    return px.preflight(model.step, *SHAPES, topology="v5e:4x4")


def nbytes(*shapes):
    return 4 * sum(int(np.prod(s)) for s in shapes)


@needs_libtpu
def test_memory_is_counted_by_kind(report):
    b = report.bytes
    assert b.params == nbytes((WIDE, OUT), (OUT,), ())
    assert b.slots == 2 * nbytes((WIDE, OUT), (OUT,)) + 4
    assert b.inputs == nbytes((ROWS // 16, WIDE), (ROWS // 16, OUT))
    assert b.total == b.params + b.slots + b.inputs + b.constants + b.padding + b.outputs + b.temp + b.code
    assert b.aliased >= b.params + b.slots
    assert report.fits and report.compiles and report.verdict == "fits"
    assert b.total < b.available < 16 * 2**30
    assert report.compile_seconds > 0


@needs_libtpu
def test_collectives_say_whose_gradient_they_sum(report):
    reduced = {c.source: c.bytes for c in report.collectives if c.source.startswith("gradient")}
    assert reduced == {"gradient of layer/w": nbytes((WIDE, OUT)), "gradient of layer/b": nbytes((OUT,))}
    (loss,) = (c for c in report.collectives if not c.source.startswith("gradient"))
    assert "test_preflight.py:" in loss.source and loss.bytes == 4
    assert {(c.kind, c.dtype, c.group_size, c.network, c.count) for c in report.collectives} == {
        ("all-reduce", "f32", 16, "ICI", 1)
    }


@needs_libtpu
def test_arithmetic_is_that_of_the_whole_batch(report):
    expected = 2 * 2 * ROWS * WIDE * OUT  # forward, and the gradient of the weights
    assert report.matmul_flops == expected
    assert report.flops == pytest.approx(expected, rel=0.1)
    assert report.step_time_estimate == report.step_time.seconds > 0


@needs_libtpu
def test_the_step_and_its_variables_are_as_they_were(model, report):
    assert model.step.trace_count == 0
    assert not model.w.numpy().any() and float(model.seen) == 0.0
    assert model.w.value.sharding.device_set == set(model.strategy.devices)
    batch = next(iter(model.strategy.distribute_dataset((np.ones((16, WIDE)), np.ones((16, OUT))), 16)))
    assert float(model.step(*batch)) == pytest.approx(1.0) and float(model.seen) == 16.0


@needs_libtpu
def test_the_views_hold_the_same_figures(report, tmp_path):
    text = str(report)
    assert "It fits" in text and "gradient of layer/w" in text and "optimizer state" in text
    found = json.loads(report.to_json())
    assert found["fits"] is True and found["bytes"]["params"] == report.bytes.params
    assert {c["source"] for c in found["collectives"]} == {c.source for c in report.collectives}
    report.save_html(tmp_path / "report.html")
    page = (tmp_path / "report.html").read_text()
    assert "<svg" in page and "gradient of layer/w" in page and "viewport" in page
    assert not any(f"{a}{b}" in page for a in ("src=", "href=", "url(", "@import") for b in ("", '"'))
    assert "http" not in page.replace("http://www.w3.org", "")


@needs_libtpu
def test_without_rich_the_text_is_plain(report, monkeypatch):
    import sys

    monkeypatch.setitem(sys.modules, "rich.console", None)
    assert "gradient of layer/w" in str(report) and "It fits" in str(report)


@needs_libtpu
def test_every_way_of_writing_a_step_gives_the_same_program(model, report):
    eager = px.preflight(model.eager_step, *SHAPES, topology="v5e:4x4")
    element = next(iter(model.strategy.distribute_dataset(tuple(np.ones(s.shape, s.dtype) for s in SHAPES), ROWS)))
    fed = px.preflight(model.step, *element, topology="v5e:4x4")
    known = px.preflight(model.step, topology="v5e:4x4", global_batch=ROWS)  # has been called by now
    for other in (eager, fed, known):
        assert other.bytes.inputs == report.bytes.inputs and other.flops == report.flops
        assert other.global_batch == ROWS


def test_a_step_that_takes_its_arguments_whole_gets_them_whole(model):
    def predict(x):
        return jnp.tanh(x @ model.w)

    report = px.preflight(predict, SHAPES[0], topology="cpu:4", global_batch=64)
    assert report.bytes.inputs == nbytes((64, WIDE)) and report.num_devices == 4

    def wrong(x):
        return x @ model.b

    with pytest.raises(TypeError, match="contracting dimensions"):
        px.preflight(wrong, SHAPES[0], topology="cpu:4")


@needs_libtpu
def test_what_is_exchanged_in_loops_is_counted_as_often_as_these_run():
    strategy = px.Mirrored()
    w = px.Variable(jnp.ones((64, 64)))

    def reduced(x):
        return px.get_replica_context().all_reduce("mean", jnp.tanh(x @ w))

    def nested(x):
        def some(x, _):
            return px.scan(lambda x, _: (reduced(x), None), x, None, length=3)[0], None

        return px.scan(some, x, None, length=4)[0]

    def counted(x):
        return px.while_loop(lambda s: s[0] < 20, lambda s: (s[0] + 3, reduced(s[1])), (2, x))[1]

    for loop, topology, times in ((nested, "v5e:2x2", 12), (nested, "cpu:4", 12), (counted, "v5e:2x2", 6)):
        step = lambda x, f=loop: strategy.reduce("mean", strategy.run(lambda x: f(x).sum(), (x,)))  # noqa: E731
        report = px.preflight(step, jax.ShapeDtypeStruct((32, 64), jnp.float32), topology=topology)
        assert {c.count for c in report.collectives if c.bytes == nbytes((8, 64))} == {times}, (loop, topology)


@needs_libtpu
def test_several_slices_reduce_over_the_data_center_network_too(model):
    report = px.preflight(model.step, *SHAPES, topology="v5e:2x2", num_slices=2)
    assert report.num_devices == 8 and report.fits
    assert {c.network for c in report.collectives} == {"ICI", "DCN"}
    assert {c.group_size for c in report.collectives if c.network == "DCN"} == {2}


@needs_libtpu
@pytest.mark.slow
@pytest.mark.parametrize(
    "name", ["v2:2x2", "v3:2x2", "v4:2x2x1", "v5e:1x1", "v5p:2x2x1", "v6e:2x4", "tpu7x:2x2x1", "v5e:16x16"]
)
def test_every_generation_compiles(model, name):
    report = px.preflight(model.step, *SHAPES, topology=name)
    assert report.fits, report.compiler_message
    if report.num_devices > 1:
        assert sum(c.bytes for c in report.collectives if c.source == "gradient of layer/w") == nbytes((WIDE, OUT))


def test_a_cpu_plays_any_number_of_devices(model):
    report = px.preflight(model.step, *SHAPES, topology="cpu:2", global_batch=64)
    assert report.fits and report.bytes.available is None and report.step_time is None
    assert report.bytes.inputs == nbytes((32, WIDE), (32, OUT))
    assert {c.group_size for c in report.collectives} == {2}
    assert report.largest_batch_that_fits is None and report.scaling == []  # nothing to compile for


def test_other_threads_see_the_strategy_as_it_is(model):
    strategy, seen = model.strategy, []

    def step(x):
        other = threading.Thread(target=lambda: seen.append((strategy.num_replicas, strategy.mesh.size)))
        other.start()
        other.join()
        return strategy.reduce("sum", strategy.run(lambda x: x.sum(), (x,)))

    report = px.preflight(step, jax.ShapeDtypeStruct((8, 2), jnp.float32), topology="cpu:2")
    assert report.num_devices == 2 and set(seen) == {(8, 8)}


def test_inside_of_abstract_it_is_refused(model):
    with pytest.raises(px.errors.StrategyError, match=r"called in px\.abstract\(\)\. Call it outside"), px.abstract():
        px.preflight(model.step, *SHAPES, topology="cpu:2")


def test_replicas_may_need_nothing_from_outside():
    strategy = px.Mirrored()

    def draw(scale=1.0):
        return strategy.run(lambda: jax.random.normal(jax.random.key(0), (3,)))

    report = px.preflight(draw, topology="cpu:2")
    assert report.fits and report.num_devices == 2, report.compiler_message


def test_narrow_numbers_share_a_byte_and_keys_have_the_size_of_theirs():
    step = px.function(lambda *args: [jax.random.bits(x) if x.ndim == 0 else x for x in args])
    for given, size in [
        (jax.ShapeDtypeStruct((8, 5), jnp.int4), 20),
        (jax.ShapeDtypeStruct((8, 5), jnp.uint4), 20),
        (jax.ShapeDtypeStruct((8, 5), jnp.float8_e4m3fn), 40),
        (jax.ShapeDtypeStruct((8, 5), jnp.bool_), 40),
        (jax.random.key(0, impl="threefry2x32"), 8),
        (jax.random.key(0, impl="rbg"), 16),
    ]:
        b = px.preflight(step, given, topology="cpu:1").bytes
        assert b.inputs == size, given
        assert b.total == b.inputs + b.padding + b.outputs + b.temp + b.code


def test_variables_may_have_any_name():
    strategy = px.Mirrored()
    for name in ("größe/✓", 'a "quoted" one', "back\\slash", "</title><script>alert(1)</script>"):
        w = px.Variable(jnp.ones(3), name=name)

        def replica(x, w=w):
            with px.GradientTape() as tape:
                loss = (x * w).sum()
            px.Optimizer(optax.sgd(0.1)).apply_gradients([(tape.gradient(loss, w), w)])

        report = px.preflight(lambda x, f=replica: strategy.run(f, (x,)), np.ones((8, 3), "float32"), topology="cpu:2")
        assert [c.source for c in report.collectives] == [f"gradient of {name}"]
        assert f"gradient of {name}" in str(report) or len(name) > 20
        assert "<script" not in html.page(report)


def test_without_a_topology_the_strategys_own_devices_are_meant(model):
    assert px.preflight(model.step, *SHAPES).topology == "cpu:8"


@needs_libtpu
def test_a_batch_that_does_not_divide_is_refused(model):
    for rows, nearest in [(1000, "The nearest that do: 992 and 1008."), (3, "The nearest that do: 16.")]:
        text = f"{rows} rows does not divide by the 16 replicas of v5e:4x4. {nearest}"
        with pytest.raises(px.errors.UnevenBatchError, match=re.escape(text)):
            px.preflight(model.step, *SHAPES, topology="v5e:4x4", global_batch=rows)


def test_arguments_are_asked_for_where_none_are_known():
    @px.function
    def step(x):
        return x

    with pytest.raises(px.errors.ArgumentError, match="step needs example arguments"):
        px.preflight(step, topology="cpu:1")
    signed = px.function(lambda x: x + 1, input_signature=[jax.ShapeDtypeStruct((3,), jnp.float32)])
    assert px.preflight(signed, topology="cpu:1").bytes.inputs == 12


def test_mistakes_in_the_call_are_explained(model):
    for wrong, text in [
        ({"timeout": 0}, "timeout"),
        ({"effort": "low"}, "effort"),
        ({"global_batch": 0}, "global_batch"),
        ({"topology": "v5e"}, "not known"),
    ]:
        with pytest.raises(px.errors.ArgumentError, match=text):
            px.preflight(model.step, *SHAPES, **{"topology": "cpu:1", **wrong})
    with pytest.raises(px.errors.ArgumentTypeError, match="takes a function"):
        px.preflight(3, topology="cpu:1")
    with pytest.raises(px.errors.ArgumentTypeError, match="strategy"):
        px.preflight(model.step, strategy="all")


def test_plain_jitted_functions_keep_their_shardings():
    from jax.sharding import AbstractMesh, NamedSharding
    from jax.sharding import PartitionSpec as P

    mesh = AbstractMesh((2, 2), ("data", "model"))
    w = jax.ShapeDtypeStruct((64, 128), jnp.float32, sharding=NamedSharding(mesh, P(None, "model")))
    x = jax.ShapeDtypeStruct((32, 64), jnp.float32, sharding=NamedSharding(mesh, P("data")))
    report = px.preflight(jax.jit(lambda w, x: (x @ w).sum()), w, x, topology="cpu:4")
    assert report.bytes.inputs == nbytes((64, 64), (16, 64)) and report.num_devices == 4
    with pytest.raises(px.errors.ArgumentError, match="has 8 devices"):
        px.preflight(jax.jit(lambda w, x: x @ w), w, x, topology="cpu:8")


def test_the_batch_of_a_plain_jitted_function_is_in_its_last_argument():
    w, x = jax.ShapeDtypeStruct((64, 128), jnp.float32), jax.ShapeDtypeStruct((32, 64), jnp.float32)
    report = px.preflight(jax.jit(lambda w, x: (x @ w).sum()), w, x, topology="cpu:1", global_batch=16)
    assert report.global_batch == 16 and report.bytes.inputs == nbytes((64, 128), (16, 64))


def test_a_jitted_function_for_more_devices_than_there_are_is_refused():
    devices = jax.sharding.NamedSharding(jax.make_mesh((8,), ("d",)), jax.sharding.PartitionSpec("d"))
    fixed = jax.jit(lambda x: x * 2, in_shardings=devices)
    assert px.preflight(fixed, jax.ShapeDtypeStruct((8,), jnp.float32), topology="cpu:8").num_devices == 8
    with pytest.raises(px.errors.ArgumentError, match="written for 8 devices, and cpu:4 has 4"):
        px.preflight(fixed, jax.ShapeDtypeStruct((8,), jnp.float32), topology="cpu:4")


def test_without_libtpu_the_error_says_what_to_install(model, monkeypatch):
    monkeypatch.setattr(compiler._jax, "has_libtpu", lambda: False)
    with pytest.raises(px.errors.CompilationError, match=r"pip install 'phalanx\[preflight\]'"):
        px.preflight(model.step, *SHAPES, topology="v5e:4x4")


def test_a_hang_of_the_compiler_is_cut_short(model):
    start = time.monotonic()
    report = px.preflight(model.step, *SHAPES, topology="cpu:1", timeout=0.05)
    assert not report.compiles and report.verdict == "fails" and "did not finish within 0.05 s" in report.message
    assert time.monotonic() - start < 60


def test_a_compiler_that_is_killed_is_reported(model, monkeypatch):
    monkeypatch.setattr(compiler, "_PROGRAM", "import os; os.kill(os.getpid(), 9)")
    report = px.preflight(model.step, *SHAPES, topology="cpu:1")
    assert "crashed (SIGKILL). This machine may have too little memory for it. It printed nothing." in report.message
    assert json.loads(report.to_json())["verdict"] == "fails" and report.compile_seconds > 0
    assert report.scaling == [] and report.largest_batch_that_fits is None


def test_the_compiler_ends_with_the_process_that_asked(tmp_path):
    folder = tmp_path / "asked"
    folder.mkdir()
    os.mkfifo(folder / "request")  # nothing comes, so that it would wait for ever
    names = [str(folder / name) for name in ("request", "answer")]
    environment = compiler._environment(targets.find("cpu:1"), str(folder))
    child = subprocess.Popen([sys.executable, "-c", compiler._PROGRAM, *names], stdin=subprocess.PIPE, env=environment)
    child.stdin.close()  # as when its other end dies
    assert child.wait(60) == 1 and not folder.exists()


def test_a_crash_of_the_compiler_takes_nobody_along(model, monkeypatch):
    monkeypatch.setenv("XLA_FLAGS", "--no_such_flag_exists=1")
    environment = compiler._environment
    monkeypatch.setattr(compiler, "_environment", lambda *a: environment(*a) | {"XLA_FLAGS": "--no_such_flag_exists=1"})
    report = px.preflight(model.step, *SHAPES, topology="cpu:1")
    assert report.verdict == "fails" and "crashed" in report.compiler_message
    assert "no_such_flag_exists" in report.compiler_message


def test_what_the_compiler_refuses_is_reported_in_its_words():
    def step(x):
        return jax.ffi.ffi_call("no_such_target", jax.ShapeDtypeStruct(x.shape, x.dtype))(x)

    report = px.preflight(px.function(step), jax.ShapeDtypeStruct((3,), jnp.float32), topology="cpu:1")
    assert not report.fits and report.verdict == "fails"
    assert "no_such_target" in report.message and "no_such_target" in report.compiler_message


# ---- too large -----------------------------------------------------------------------------------


@px.function
def widen(x):
    """Gives 64 KiB for each row."""
    return px.get_strategy().run(lambda x: x @ jnp.ones((128, 2**14)), (x,))


@pytest.fixture(scope="module")
def too_large():
    strategy = px.Mirrored()
    rows = jax.ShapeDtypeStruct((2**21, 128), jnp.float32)
    with strategy.scope():
        return px.preflight(widen, rows, topology="v5e:2x2", strategy=strategy, effort="quick")


@needs_libtpu
@pytest.mark.slow
def test_too_large_a_batch_does_not_fit_and_the_largest_that_does_is_found(too_large):
    assert not too_large.fits and too_large.verdict == "does not fit"
    assert "does not fit" in str(too_large) and "largest_batch_that_fits" not in vars(too_large)  # printing is quick
    assert "RESOURCE_EXHAUSTED" in too_large.compiler_message
    batch = too_large.largest_batch_that_fits
    assert batch % 4 == 0 and 4 <= batch < too_large.global_batch
    assert too_large._again(too_large.target, batch).fits
    assert not too_large._again(too_large.target, (batch // 4 * 65 // 64 + 1) * 4).fits
    assert f"batch {batch} fits" in too_large.message and "of 15.75 GiB" in too_large.message
    assert too_large.bytes.total > too_large.bytes.available


# ---- scaling -------------------------------------------------------------------------------------


@needs_libtpu
def test_scaling_starts_on_one_slice_and_needs_replicas_on_all_devices(model):
    step = px.function(lambda x: jnp.tanh(x).sum())
    alone = px.preflight(step, SHAPES[0], topology="v5e:2x4", effort="quick")
    assert alone.num_devices == 1 and alone.scaling == []
    two = px.preflight(model.step, *SHAPES, topology="2*v5e:2x2", effort="quick")
    curve = two.scaling_to(1024, compiled_to=1)
    assert [s.topology for s in curve[:2]] == ["v5e:2x4", "v5e:4x4"]
    assert all(s.efficiency <= 1 for s in curve)
    for wrong in ({"largest": 0}, {"largest": "all"}, {"compiled_to": 2.5}):
        with pytest.raises(px.errors.ArgumentError, match=f"{next(iter(wrong))} must be a positive int"):
            two.scaling_to(**wrong)


@needs_libtpu
@pytest.mark.slow
def test_scaling_is_compiled_as_far_as_asked_and_computed_from_there(report, tmp_path):
    curve = report.scaling_to(4096, compiled_to=32)
    assert [s.chips for s in curve] == [8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096]
    assert [s.compiled for s in curve] == [True] * 3 + [False] * 7
    assert curve[0].efficiency == 1.0 and all(0 < s.efficiency <= 1.5 for s in curve)
    assert curve[6].topology == "2 x v5e:16x16" and curve[6].efficiency < curve[5].efficiency
    report.__dict__["scaling"] = curve
    report.save_html(tmp_path / "report.html")
    assert "scaling efficiency" in (tmp_path / "report.html").read_text() and "computed" in str(report)
