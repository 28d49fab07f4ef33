"""What JAX says of its compilations, and its profiler's traces."""

from __future__ import annotations

import re
import tempfile
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
from jax._src import xla_bridge

from phalanx.errors import StrategyError

_STAGES = ("/jax/core/compile/",)  # tracing, lowering, compiling: each event says how long it took, at its end
_COLLECTIVE = re.compile(
    r"all.(reduce|gather|to.all)|reduce.scatter|collective|p(sum|mean|max|min|permute)", re.IGNORECASE
)

_CONTAINER = re.compile(r"while|conditional|call|end: ")
"""What runs other operations, which have events of their own."""


class _Listening(threading.local):
    spans: list[tuple[float, float]] | None = None


_listening = _Listening()
_is_registered = False


def _note(event: str, seconds: float, **_: Any) -> None:
    if _listening.spans is not None and event.startswith(_STAGES):
        now = time.perf_counter()
        _listening.spans.append((now - seconds, now))


@contextmanager
def compilations() -> Iterator[list[tuple[float, float]]]:
    """When, in the block, this thread traced or compiled something: pairs of `time.perf_counter`."""
    global _is_registered
    if not _is_registered:
        jax.monitoring.register_event_duration_secs_listener(_note)
        _is_registered = True
    before, _listening.spans = _listening.spans, []
    try:
        yield _listening.spans
    finally:
        _listening.spans = before


def wait_for_all() -> bool:
    """Until every array that somebody holds is computed; False when all were already."""
    arrays = [x for backend in xla_bridge.backends().values() for x in backend.live_arrays()]
    pending = [x for x in arrays if not x.is_deleted() and not x.is_ready()]
    jax.block_until_ready(pending)
    return bool(pending)


@dataclass(frozen=True)
class DeviceOperation:
    """One operation that a device ran."""

    name: str
    device: str
    start: float
    """In seconds, of the profiler's clock."""
    seconds: float

    @property
    def is_collective(self) -> bool:
        """Whether replicas meet in it."""
        return _COLLECTIVE.search(self.name) is not None


def device_operations(run: Callable[[], Any]) -> list[DeviceOperation]:
    """What the devices did while `run` was called, by JAX's profiler.

    Raises:
        StrategyError: when the profiler is in use.
    """
    options = jax.profiler.ProfileOptions()
    options.python_tracer_level = 0
    with tempfile.TemporaryDirectory(prefix="phalanx-profile-") as folder:
        try:
            jax.profiler.start_trace(folder, profiler_options=options)
        except RuntimeError as error:
            raise StrategyError(
                "profile: JAX's profiler is in use, by another profile, in a thread or around this one, or by"
                f" jax.profiler. It serves one at a time: end the other first. JAX says: {error}"
            ) from error
        try:
            run()
        finally:
            jax.profiler.stop_trace()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # Python has one for jaxlib's types, and as an error it aborts the process
            return _read(Path(folder))


def _read(folder: Path) -> list[DeviceOperation]:
    data = [jax.profiler.ProfileData.from_file(str(path)) for path in folder.rglob("*.xplane.pb")]
    return [operation for profiled in data for plane in profiled.planes for operation in _operations(plane)]


def _operations(plane: Any) -> Iterator[DeviceOperation]:
    for line in plane.lines:
        for event in line.events:
            facts = dict(event.stats)
            if "hlo_op" in facts and not _CONTAINER.match(event.name):
                # On a CPU the devices share a plane, and their operations say whose they are.
                device = plane.name if plane.name.startswith("/device:") else f"cpu {facts.get('device_ordinal', 0)}"
                yield DeviceOperation(event.name, device, event.start_ns / 1e9, event.duration_ns / 1e9)
