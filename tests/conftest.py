"""Every test sees eight virtual CPU devices; they are asked for before JAX starts."""

from __future__ import annotations

import os
import signal
import sys

import jax
import pytest

import phalanx as px

os.environ.setdefault("JAX_PLATFORMS", "cpu")
px.cpu_devices(8)

# A shell starts a command with `&` with SIGINT ignored, and children inherit that: Ctrl-C is tested all the same.
signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup() -> None:
    """Keras starts weights from seeds that it draws: the same ones in each run, fixtures included."""
    if keras := sys.modules.get("keras"):
        keras.utils.set_random_seed(0)


@pytest.fixture(params=[1, 2, 4], ids=lambda n: f"replicas{n}")
def strategy(request: pytest.FixtureRequest) -> px.Mirrored:
    """A strategy with 1, 2 and 4 replicas."""
    return px.Mirrored(jax.devices()[: request.param])


@pytest.fixture(autouse=True)
def _no_trace_left_behind():
    """Each test starts and ends in eager code: no tape, scope or setting may leak."""
    yield
    from phalanx import _jax, state

    leaked = not _jax.is_eager() or type(state.top()) is not state.EagerFrame
    if leaked:
        _jax.set_trace(_jax.traces._core.eval_trace)
        state._stack.top = state.EagerFrame()
    px.strict(False)
    px.run_functions_eagerly(False)
    assert not leaked, "a trace or frame was left active"
