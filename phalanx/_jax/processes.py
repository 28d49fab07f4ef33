"""JAX's processes: connecting them, and its coordination service where they leave notes for each other."""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import functools
import os
import signal

import jax
from jax._src import distributed as _distributed


def connected() -> bool:
    """Whether this process is one of several that JAX has connected, or has tried to."""
    return _distributed.global_state.client is not None


def connect(
    coordinator: str,
    processes: int,
    process: int,
    *,
    bind: str,
    devices: tuple[int, ...] | None,
    timeout: float,
    heartbeat: float,
    shutdown: float,
) -> None:
    """Connect this process; all are known to be there."""
    if jax.config.jax_cpu_collectives_implementation is None:
        jax.config.update("jax_cpu_collectives_implementation", "gloo")
    # It would take SIGTERM for itself, so that a program that does not ask for it could not be ended.
    jax.config.update("jax_enable_preemption_service", False)
    _postpone_abort()
    jax.distributed.initialize(
        coordinator,
        processes,
        process,
        local_device_ids=devices,
        cluster_detection_method="deactivate",
        initialization_timeout=max(1, int(timeout)),
        heartbeat_timeout_seconds=max(2, int(heartbeat)),
        shutdown_timeout_seconds=max(1, int(shutdown)),
        coordinator_bind_address=bind,
    )


def stay_on_loopback() -> None:
    """Let the collectives of CPU devices listen on the loopback interface, whatever the host's name resolves to."""
    from jax._src import xla_bridge

    library = xla_bridge._jax
    library.make_gloo_tcp_collectives = functools.partial(library.make_gloo_tcp_collectives, hostname="127.0.0.1")


def _postpone_abort() -> None:
    """Let a thread that aborts the process wait for 6 seconds first.

    When process 0 is gone, JAX's client aborts the process from a thread of its own, before anybody could say
    why. ``sleep(SIGABRT)`` in place of the signal's default gives Python the time; nothing else is changed,
    since ``abort`` goes on when the handler returns.
    """
    if os.name != "posix":
        return
    dumps = faulthandler.is_enabled()
    if dumps:
        faulthandler.disable()
    library = ctypes.CDLL(None)
    library.signal.restype = ctypes.c_void_p
    library.signal.argtypes = [ctypes.c_int, ctypes.c_void_p]
    library.signal(signal.SIGABRT, ctypes.cast(library.sleep, ctypes.c_void_p))
    if dumps:
        faulthandler.enable()


def is_collective_failure(error: BaseException) -> bool:
    """Whether this error, or what it was raised from, may come from another process that is gone."""
    words = ("Gloo", "gloo", "NCCL", "UNAVAILABLE", "DEADLINE_EXCEEDED", "coordination", "INTERNAL")
    if isinstance(error, (jax.errors.JaxRuntimeError, ValueError)) and any(word in str(error) for word in words):
        return True
    if isinstance(error, ConnectionError):  # of `read_note`
        return True
    return error.__cause__ is not None and is_collective_failure(error.__cause__)


def write_note(key: str, value: str) -> None:
    """Leave a note for the other processes."""
    _distributed.global_state.client.key_value_set(key, value)


def read_note(key: str, wait_ms: int) -> str | None:
    """A note, or None if there is none within so many milliseconds.

    Raises:
        ConnectionError: when the service cannot be reached.
    """
    try:
        return str(_distributed.global_state.client.blocking_key_value_get(key, wait_ms))
    except jax.errors.JaxRuntimeError as error:
        if "DEADLINE_EXCEEDED" in str(error):
            return None
        raise ConnectionError(str(error)) from error


def delete_note(key: str) -> None:
    """Delete a note and all below it."""
    with contextlib.suppress(jax.errors.JaxRuntimeError):
        _distributed.global_state.client.key_value_delete(key)
