"""Each fault that is planted in a step is found, with its line and a remedy."""

from __future__ import annotations

import inspect

import jax
import jax.numpy as jnp
import optax
import pytest
from slices import needs_libtpu

import phalanx as px


def f32(*shape):
    return jax.ShapeDtypeStruct(shape, jnp.float32)


def warnings_of(fn, *args, topology="cpu:1", **options):
    return px.preflight(fn, *args, topology=topology, **options).warnings


def line_with(function, text):
    """'file.py:12' of the line in the function's source that has the text."""
    lines, start = inspect.getsourcelines(function)
    return f"{__file__}:{start + next(i for i, line in enumerate(lines) if text in line)}"


def only(warnings, kind):
    (found,) = [w for w in warnings if w.kind == kind]
    assert found.remedy.endswith(".") and found.remedy in str(found)
    return found


def clean(x, w):
    return jnp.tanh(x @ w).sum()


def test_a_clean_step_has_no_warnings():
    assert warnings_of(px.function(clean), f32(64, 128), f32(128, 256)) == []


def test_large_tensors_that_every_device_holds_whole():
    strategy = px.Mirrored()
    with px.abstract(), strategy.scope():
        table = px.Variable(jnp.zeros((2**15, 1024)), name="table")
        optimizer = px.Optimizer(optax.adam(1e-3))
        optimizer.build([table])

    def replica():
        optimizer.apply_gradients([(table.value, table)], reduce="mean")

    found = only(warnings_of(lambda: strategy.run(replica), topology="cpu:2"), "replicated")
    assert "table (128 MiB)" in found.message and "384 MiB in 3 large tensors" in found.message
    assert "mu_dtype" in found.remedy and __file__ in found.line
    assert not any(w.kind == "replicated" for w in warnings_of(lambda: strategy.run(replica), topology="cpu:1"))


def test_all_gathers_of_whole_parameters():
    from jax.sharding import AbstractMesh, NamedSharding
    from jax.sharding import PartitionSpec as P

    mesh = AbstractMesh((4,), ("d",))
    w = jax.ShapeDtypeStruct((256, 512), jnp.float32, sharding=NamedSharding(mesh, P("d")))
    x = jax.ShapeDtypeStruct((64, 256), jnp.float32, sharding=NamedSharding(mesh, P("d")))

    def step(w, x):
        whole = jax.lax.with_sharding_constraint(w, NamedSharding(mesh, P()))
        return x @ whole

    found = only(warnings_of(jax.jit(step), w, x, topology="cpu:4"), "all-gather")
    assert "[256, 512], is gathered on every device" in found.message and "argument" in found.message
    assert "test_preflight_warnings.py:" in found.line


def test_float64():
    def step(x):
        return x.astype(jnp.float64) * 2

    with jax.enable_x64(True):
        found = only(warnings_of(px.function(step), f32(8)), "float64")
    assert found.line == line_with(step, "float64")


def test_float32_products_in_a_bfloat16_step():
    def step(x, w, v):
        h = (x.astype(jnp.bfloat16) @ w.astype(jnp.bfloat16)).astype(jnp.float32)
        return h @ v

    found = only(warnings_of(px.function(step), f32(64, 256), f32(256, 256), f32(256, 128)), "float32-matmul")
    assert found.line == line_with(step, "h @ v") and "33%" in found.message
    all_in_float32 = warnings_of(px.function(clean), f32(64, 128), f32(128, 256))
    assert all_in_float32 == []


@pytest.mark.parametrize("topology", ["cpu:1", pytest.param("v5e:1x1", marks=needs_libtpu)])
def test_calls_of_python_in_the_step(topology):
    def step(x):
        jax.debug.print("{}", x.sum())
        return x * 2

    found = only(warnings_of(px.function(step), f32(8, 128), topology=topology), "callback")
    assert found.line == line_with(step, "debug.print")


def test_buffers_that_could_not_be_reused():
    given_away = jax.jit(lambda state, x: state[:2] + x, donate_argnums=0)
    found = only(warnings_of(given_away, f32(1024, 8), f32(2, 8)), "donation")
    assert "32 KiB" in found.message
    reused = jax.jit(lambda state, x: state + x[0], donate_argnums=0)
    assert warnings_of(reused, f32(1024, 8), f32(2, 8)) == []


def test_sizes_that_are_left_open():
    (rows,) = jax.export.symbolic_shape("rows")

    @px.function(input_signature=[jax.ShapeDtypeStruct((rows, 3), jnp.float32)])
    def step(x):
        return x * 2

    found = only(warnings_of(step, f32(5, 3)), "dynamic-shape")
    assert "argument 'x'" in found.message


def test_sizes_that_are_known_at_run_time_only():
    from phalanx.preflight.hlo import Module

    text = "HloModule m\n\nENTRY %main (p: f32[<=8]) -> f32[<=8] {\n  ROOT %p = f32[<=8]{0} parameter(0)\n}\n"
    assert Module(text).has_dynamic_shapes
    assert not Module(text.replace("<=", "")).has_dynamic_shapes


@needs_libtpu
def test_products_that_are_mostly_padding():
    def step(x, w):
        return (x @ w).sum()

    found = only(warnings_of(px.function(step), f32(64, 130), f32(130, 10), topology="v5e:1x1"), "padding")
    assert "64x130 and 130x10" in found.message and found.line == line_with(step, "x @ w")
    assert warnings_of(px.function(step), f32(64, 128), f32(128, 256), topology="v5e:1x1") == []


def test_pythons_own_frames_are_no_line_of_the_users():
    from phalanx.preflight.hlo import Instruction, Module

    # Where a step is started by the command line, the outermost frames are of runpy.
    text = """HloModule step

FileNames
1 "<frozen runpy>"
2 "/lib/site-packages/keras/core.py"

FileLocations
1 {file_name_id=1 function_name_id=1 line=88}
2 {file_name_id=2 function_name_id=1 line=387}

StackFrames
1 {file_location_id=1}
2 {file_location_id=2 parent_frame_id=2}

"""
    called = Instruction("all-reduce", "f32[]", "all-reduce", (), "stack_frame_id=2")
    assert Module(text).line_of(called) == "keras/core.py:387"
