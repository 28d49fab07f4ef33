"""`connect`: finds the cluster, meets the other processes and connects JAX's; `describe`: what is connected."""

from __future__ import annotations

import atexit
import logging
import os
import sys
import time
from dataclasses import dataclass
from types import TracebackType
from typing import Any, NoReturn

import jax

from phalanx import _jax
from phalanx._checks import check_seconds
from phalanx.cluster.exits import EXIT_PREEMPTED
from phalanx.cluster.lifeline import Lifeline, end_process
from phalanx.cluster.preemption import preemption
from phalanx.cluster.randomness import settle_seed
from phalanx.cluster.resolvers import Resolver, find
from phalanx.cluster.roll import Roll, call_the_roll, introduce
from phalanx.cluster.spec import ClusterSpec
from phalanx.errors import ArgumentError, ArgumentTypeError, ClusterError

logger = logging.getLogger("phalanx")

_SHUTDOWN_SECONDS = 60.0
_TELL_SECONDS = 10.0
_MARGIN_SECONDS = 30.0
"""JAX's own heartbeats end the process without naming anybody: they come after ours."""


@dataclass
class _Connection:
    spec: ClusterSpec
    lifeline: Lifeline | None = None


_connection: _Connection | None = None


def lifeline() -> Lifeline | None:
    """The connection to the other processes, if there are any."""
    return None if _connection is None else _connection.lifeline


def connect(
    resolver: Resolver | None = None,
    timeout: float = 300.0,
    *,
    heartbeat: float = 60.0,
    bind: str | None = None,
    seed: int | None = None,
) -> ClusterSpec:
    """Make this process one of a cluster; call it first, before anything asks for devices.

    Without a cluster in sight it does nothing, so that the script runs by itself too. Afterwards JAX sees the
    devices of all processes, and `Mirrored` uses them all. A process that fails, is killed or is stopped is
    named by all others, which then end with `px.cluster.EXIT_LOST`.

    Args:
        resolver: where to look: `px.cluster.TFConfig`, `Slurm`, `OpenMPI`, `Kubernetes`, `CloudTPU`, `Torchrun`, or
            `Explicit`. Default: the one whose variables are set.
        timeout: seconds within which all processes must have come.
        heartbeat: seconds of silence after which a process counts as lost.
        bind: the address on which process 0 listens. Default: the coordinator's own, so only loopback for
            processes of one machine.
        seed: of Python's and NumPy's global random numbers, from which Keras draws too. Default: with several
            processes process 0 draws one, unless all of them have been seeded alike; it is logged once.

    Returns:
        What was found.

    Raises:
        ClusterError: when settings are missing, broken or contradictory, when a process does not come (it is
            named), or when JAX has opened its devices already.
        ArgumentError: for a `timeout` or `heartbeat` that is no positive number, or a `seed` that NumPy does not take.
        ArgumentTypeError: for something that is no resolver.

    Example:
        >>> print(px.connect())
        cluster from nothing: 1 process
    """
    global _connection
    for name, seconds in (("timeout", timeout), ("heartbeat", heartbeat)):
        check_seconds(seconds, f"px.connect: {name}")
    if seed is not None and (isinstance(seed, bool) or not isinstance(seed, int) or not 0 <= seed < 2**32):
        raise ArgumentError(f"px.connect: seed must be an int from 0 to 2**32 - 1, got {seed!r:.60}.")
    is_resolver = callable(getattr(resolver, "resolve", None)) and not isinstance(resolver, type)
    if resolver is not None and not is_resolver:
        raise ArgumentTypeError(f"px.connect takes a resolver, like px.cluster.TFConfig(), got {resolver!r:.60}.")
    if bind is not None and not isinstance(bind, str):
        raise ArgumentTypeError(f"px.connect: bind must be an address, got {bind!r:.60}.")
    spec = _spec(resolver)
    if _connection is not None and _connection.lifeline is not None:
        if spec == _connection.spec:
            return spec
        raise ClusterError(f"px.connect: connected already, with another {_connection.spec}.")
    if spec.several:
        if _jax.connected():
            raise ClusterError("px.connect: jax.distributed.initialize has been called already; call one of them only.")
        if _jax.backend_started():
            raise ClusterError(
                "px.connect came too late: JAX has opened this process's devices. Call it first, before anything that"
                " makes an array or asks for devices."
            )
        logger.info("%s", spec)
        _connection = _Connection(spec, _join(spec, timeout, heartbeat, bind))
    else:
        logger.info("%s", spec)
        _connection = _Connection(spec)
    settle_seed(seed)
    return spec


def _spec(resolver: Resolver | None) -> ClusterSpec:
    if resolver is None:
        return find(os.environ) or ClusterSpec(source="nothing", num_processes=1, process_id=0)
    spec = resolver.resolve(os.environ)
    source = getattr(resolver, "source", type(resolver).__name__)
    if spec is None:
        raise ClusterError(f"px.connect: {source} was asked for, and its variables are not set.")
    if not isinstance(spec, ClusterSpec):
        raise ArgumentTypeError(
            f"px.connect: {source} gave a {type(spec).__name__}; resolve must give a px.cluster.ClusterSpec or None."
        )
    return spec


def _join(spec: ClusterSpec, timeout: float, heartbeat: float, bind: str | None) -> Lifeline:
    from phalanx import __version__

    begin = time.monotonic()
    roll = call_the_roll(spec, introduce(spec, f"phalanx {__version__}, jax {jax.__version__}"), timeout, bind)
    line = Lifeline(roll, spec.process_id, heartbeat)
    line.start()
    host = bind or spec.host
    if spec.is_loopback:
        _jax.stay_on_loopback()
    left = max(10.0, timeout - (time.monotonic() - begin))
    _jax.connect(
        spec.coordinator,
        spec.num_processes,
        spec.process_id,
        bind=f"[{host}]:{spec.port}" if ":" in host else f"{host}:{spec.port}",
        devices=spec.local_device_ids,
        timeout=left,
        heartbeat=heartbeat + _MARGIN_SECONDS,
        shutdown=_SHUTDOWN_SECONDS,
    )
    preemption.connect(line)
    _Leaving(line).install()
    _log_roll(roll)
    return line


def _log_roll(roll: Roll) -> None:
    hosts: dict[str, int] = {}
    for member in roll.members:
        hosts[member.host] = hosts.get(member.host, 0) + 1
    logger.info("all are there: %s", ", ".join(f"{n} on {host}" for host, n in hosts.items()))


class _Leaving:
    """How this process ends: all others have finished too, or hear why it has not."""

    def __init__(self, line: Lifeline) -> None:
        self._line = line
        self._code = 0
        """That the process failed with."""
        self._hook = sys.excepthook
        self._exit = sys.exit

    def install(self) -> None:
        sys.excepthook = self._on_error
        sys.exit = self._on_sys_exit  # no hook is called for SystemExit, and its code is gone at the end
        atexit.register(self._on_exit)  # after JAX's own, so it runs before

    def _on_error(self, kind: type[BaseException], error: BaseException, where: TracebackType | None) -> None:
        self._hook(kind, error, where)
        if _jax.is_collective_failure(error):
            self._line.wait_for_blame()
        self._code = 1
        self._line.fail(f"failed with {kind.__name__}: {str(error).partition(chr(10))[0][:500]}")

    def _on_sys_exit(self, status: Any = None, /) -> NoReturn:
        # Whether it ends the process is known at the end only. All processes are preempted together.
        code = status if isinstance(status, int) else status is not None
        self._code = 0 if code == EXIT_PREEMPTED else int(code)
        self._exit(status)

    def _on_exit(self) -> None:
        if self._code:
            self._line.fail(f"ended by sys.exit with code {self._code}")  # if it has not said yet why
            # JAX's own way out waits for the others, and aborts when they have gone.
            logging.shutdown()
            end_process(self._code & 0xFF, "")
        self._line.finish(_TELL_SECONDS)


@dataclass(frozen=True)
class Cluster:
    """What `describe` tells.

    Attributes:
        source: where the settings were found.
        num_processes: how many processes there are.
        process_id: which one this is.
        coordinator: "host:port" of process 0; empty for one process.
        hosts: of each process.
        devices: of each process: names such as "cpu:0", with coordinates on TPUs.
        local_devices: those of this process.
    """

    source: str
    num_processes: int
    process_id: int
    coordinator: str
    hosts: tuple[str, ...]
    devices: tuple[tuple[str, ...], ...]
    local_devices: tuple[str, ...]

    def __str__(self) -> str:
        total = sum(map(len, self.devices))
        lines = [f"{self.num_processes} process{'es' * (self.num_processes > 1)}, {total} devices, from {self.source}"]
        for i, (host, devices) in enumerate(zip(self.hosts, self.devices)):
            mine = "  <- this process" if i == self.process_id else ""
            lines.append(f"  process {i} on {host}: {', '.join(devices)}{mine}")
        return "\n".join(lines)


def describe() -> Cluster:
    """The processes of the cluster, their hosts and devices.

    Example:
        >>> px.cluster.describe().num_processes
        1
    """
    import socket

    spec = _connection.spec if _connection else ClusterSpec(source="nothing", num_processes=1, process_id=0)
    members = _connection.lifeline.members if _connection and _connection.lifeline else ()
    count = jax.process_count()
    devices: list[list[str]] = [[] for _ in range(count)]
    for device in jax.devices():
        devices[device.process_index].append(_name(device))
    hosts = tuple(member.host for member in members) or (socket.gethostname(),) * count
    return Cluster(
        source=spec.source,
        num_processes=count,
        process_id=jax.process_index(),
        coordinator=spec.coordinator,
        hosts=hosts,
        devices=tuple(map(tuple, devices)),
        local_devices=tuple(devices[jax.process_index()]),
    )


def _name(device: Any) -> str:
    coordinates = getattr(device, "coords", None)
    name = f"{device.platform}:{device.id}"
    return f"{name} at {','.join(map(str, coordinates))}" if coordinates is not None else name
