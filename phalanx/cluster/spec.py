"""`ClusterSpec`: what a process has to know of its cluster, wherever that was found."""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass

from phalanx.errors import ClusterError

_PORTS = range(1, 65536)


@dataclass(frozen=True, kw_only=True)
class ClusterSpec:
    """Which process this is, of how many, and where they meet.

    Attributes:
        source: where the settings were found: "TF_CONFIG", "SLURM", ...
        num_processes: how many there are.
        process_id: which one this is, from 0.
        coordinator: "host:port" of process 0; empty for one process.
        coordinator_from: what that was read from, for messages.
        local_device_ids: which of the devices that the process sees are its own; None for all.

    Example:
        >>> print(px.cluster.ClusterSpec(source="by hand", num_processes=2, process_id=1, coordinator="host:12"))
        cluster by hand: 2 processes, I am 1, coordinator host:12
    """

    source: str
    num_processes: int
    process_id: int
    coordinator: str = ""
    coordinator_from: str = ""
    local_device_ids: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        if self.num_processes < 1:
            raise ClusterError(
                f"{self.source}: the number of processes is {self.num_processes}; it must be at least 1."
            )
        if not 0 <= self.process_id < self.num_processes:
            raise ClusterError(
                f"{self.source}: this process's number is {self.process_id}, of {self.num_processes} processes: it must be"
                f" from 0 to {self.num_processes - 1}."
            )
        if self.num_processes > 1:
            _ = self.host, self.port

    @property
    def several(self) -> bool:
        """Whether there is anything to connect."""
        return self.num_processes > 1

    @property
    def host(self) -> str:
        """The coordinator's host, without the brackets of an IPv6 address."""
        host = self.coordinator.rpartition(":")[0].strip("[]")
        try:
            host.encode("idna")  # as the look-up does
        except UnicodeError:
            host = ""
        if not host:
            raise ClusterError(f"{self._where}: {self.coordinator!r:.200} is no address; it must be host:port.")
        return host

    @property
    def port(self) -> int:
        """The coordinator's port."""
        text = self.coordinator.rpartition(":")[2]
        if not text.isdecimal() or int(text) not in _PORTS:
            raise ClusterError(f"{self._where}: {self.coordinator!r} has no port; it must be host:port, 1 to 65535.")
        return int(text)

    @property
    def is_loopback(self) -> bool:
        """Whether all processes are on this machine, and nobody else can reach them."""
        try:
            return ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return self.host == "localhost"

    @property
    def _where(self) -> str:
        return self.coordinator_from or f"{self.source}: the coordinator"

    def __str__(self) -> str:
        origin = self.source if self.source == "by hand" else f"from {self.source}"
        if not self.several:
            return f"cluster {origin}: 1 process"
        return (
            f"cluster {origin}: {self.num_processes} processes, I am {self.process_id}, coordinator {self.coordinator}"
        )
