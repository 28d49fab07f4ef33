"""Devices that are not here: meshes of them, programs lowered for them, and compiling for them."""

from __future__ import annotations

import contextlib
import contextvars
import glob
import importlib.util
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax._src import callback as _callback
from jax._src import compiler as _compiler
from jax._src import core as _core
from jax._src import xla_bridge as _xla_bridge
from jax._src.interpreters import mlir as _mlir
from jax._src.interpreters import partial_eval as _pe
from jax._src.lib import xla_client as _xla_client
from jax._src.lib.mlir import ir as _ir
from jax._src.sharding_impls import UnspecifiedValue
from jax.experimental import topologies

from phalanx._jax.programs import Tracing

_GOOGLE = "0x1ae0"
_LITTLE = 19
"""XLA's number for the level that it calls O1."""
_TUPLED_FROM = 2000
"""Arguments from which JAX hands them to a TPU as one tuple."""


@dataclass(frozen=True)
class Lowered:
    """A program for a number of devices, as bytes that another process can compile."""

    module: bytes
    num_devices: int
    tuple_arguments: bool
    free_outputs: tuple[bool, ...]
    """Which outputs XLA may split as it likes."""
    kept_inputs: tuple[int, ...]
    """Which inputs the program uses."""


def lower_traced(traced: Any, platform: str | None) -> Lowered:
    """Lower what ``jax.jit(...).trace`` gave, for a platform that need not be here; None for the one that is."""
    if platform is None:
        lowered = traced.lower()
    else:
        with _callbacks_left_out():
            lowered = traced.lower(lowering_platforms=(platform,))
    computation = lowered._lowering
    given = computation.compile_args
    module = lowered.compiler_ir("stablehlo")
    effects = len(given["ordered_effects"])
    outputs = [isinstance(s, UnspecifiedValue) for s in given["out_shardings"]]
    kept = tuple(sorted(given["kept_var_idx"]))
    return Lowered(
        module=_mlir.module_to_bytecode(module),
        num_devices=int(given["num_devices"]),
        tuple_arguments=platform == "tpu" and len(kept) > _TUPLED_FROM,
        free_outputs=(False,) * effects + tuple(outputs),
        kept_inputs=kept,
    )


_leaving_out = contextvars.ContextVar("leaving_out", default=False)
_emit_python_callback = _callback.emit_python_callback


def _emit(ctx: Any, callback: Any, token: Any, operands: Any, avals: Any, results: Any, **options: Any) -> Any:
    """Zeros in the place of what Python would give: its functions are of this process, and cannot be sent to another."""
    if not _leaving_out.get():
        return _emit_python_callback(ctx, callback, token, operands, avals, results, **options)
    return [_mlir.full_like_aval(ctx, 0, aval) for aval in results], token, None


_callback.emit_python_callback = _emit


@contextlib.contextmanager
def _callbacks_left_out() -> Iterator[None]:
    before = _leaving_out.set(True)
    try:
        yield
    finally:
        _leaving_out.reset(before)


def compile_for_slice(lowered: Lowered, name: str, options: dict[str, Any], quick: bool) -> Any:
    """XLA's executable for a TPU slice; loads libtpu. `quick`: with little optimization."""
    devices = topologies.get_topology_desc(platform="tpu", topology_name=name, **options).devices
    return _compile(lowered, devices, quick, load=False)


def compile_here(lowered: Lowered, devices: Sequence[Any], quick: bool) -> Any:
    """XLA's executable for devices of this process."""
    return _compile(lowered, devices, quick, load=True)


def _compile(lowered: Lowered, devices: Sequence[Any], quick: bool, load: bool) -> Any:
    devices = list(devices)[: lowered.num_devices]
    client = devices[0].client
    assignment = np.array([d.id for d in devices])[None]
    options = _compiler.get_compile_options(
        num_replicas=1, num_partitions=len(devices), device_assignment=assignment, backend=client
    )
    options.parameter_is_tupled_arguments = lowered.tuple_arguments
    build = options.executable_build_options
    if quick:
        build.optimization_level = _LITTLE
    build.allow_spmd_sharding_propagation_to_parameters = [False] * len(lowered.kept_inputs)
    build.allow_spmd_sharding_propagation_to_output = list(lowered.free_outputs)
    context = _mlir.make_ir_context()
    with context:
        module = _ir.Module.parse(lowered.module)
        compile_ = client.compile_and_load if load else client.compile
        return compile_(module, _xla_client.DeviceList(tuple(devices)), options)


# ---- libtpu where there is no TPU ----------------------------------------------------------------


def has_libtpu() -> bool:
    """Whether the compiler for TPUs is installed."""
    return importlib.util.find_spec("libtpu") is not None


def _has_tpu() -> bool:
    for path in glob.glob("/sys/bus/pci/devices/*/vendor"):
        with contextlib.suppress(OSError), open(path) as file:
            if file.read().strip() == _GOOGLE:
                return True
    return False


def hide_absent_tpu() -> None:
    """Let JAX not look for TPUs on a machine that has the compiler for them and none of them.

    It would take its time over it and print libtpu's errors, in every program.
    """
    wanted = os.environ.get("JAX_PLATFORMS", "") + os.environ.get("JAX_FORCE_TPU_INIT", "")
    if not wanted and has_libtpu() and not _has_tpu() and not _xla_bridge.backends_are_initialized():
        _xla_bridge._backend_factories.pop("tpu", None)


# ---- computing with types alone ------------------------------------------------------------------


@contextlib.contextmanager
def types_alone() -> Iterator[Tracing]:
    """In the block operations give values without content: they are written into a program that nobody runs."""
    debug = jax.make_jaxpr(lambda: ())().jaxpr.debug_info
    with _core.set_current_trace(_pe.DynamicJaxprTrace(debug)):
        yield Tracing()


def back_to(tracing: Tracing) -> contextlib.AbstractContextManager[None]:
    """The block computes as in `types_alone` again, whatever is being traced around it."""
    return _core.set_current_trace(tracing.trace)
