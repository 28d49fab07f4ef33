"""The roll call: before JAX connects, process 0 hears from every other process.

JAX's own coordination service ends the process when somebody does not come in time. So the processes meet
first, at the same address, where it can be said who is missing, who is there twice and who has other
settings. The connections stay open afterwards, see `phalanx.cluster.lifeline`.
"""

from __future__ import annotations

import errno
import os
import select
import socket
import time
from dataclasses import asdict, dataclass
from typing import Any

from phalanx.cluster.spec import ClusterSpec
from phalanx.cluster.wire import Wire
from phalanx.errors import ClusterError

_RETRY_SECONDS = 0.1
_VERDICT_SECONDS = 5.0
"""How much longer than process 0 the others wait, to hear from it who did not come."""


@dataclass(frozen=True)
class Member:
    """One process of the cluster, as it introduced itself."""

    process_id: int
    num_processes: int
    host: str
    pid: int
    versions: str
    """Of Phalanx and JAX."""

    def __str__(self) -> str:
        return f"process {self.process_id} (host {self.host}, pid {self.pid})"


@dataclass(frozen=True)
class Roll:
    """Who is there, and the wires to them: on process 0 to all others, on the others to process 0."""

    members: tuple[Member, ...]
    wires: dict[int, Wire]


def introduce(spec: ClusterSpec, versions: str) -> Member:
    """This process."""
    return Member(spec.process_id, spec.num_processes, socket.gethostname(), os.getpid(), versions)


def call_the_roll(spec: ClusterSpec, me: Member, timeout: float, bind: str | None) -> Roll:
    """Wait until all processes are there.

    Raises:
        ClusterError: naming who is not, after `timeout` seconds; or who does not fit, at once.
    """
    end = time.monotonic() + timeout
    if spec.process_id == 0:
        with _listen(spec, bind) as door:
            host = _Host(me, timeout, door)
            try:
                return host.wait(end)
            except BaseException:
                host.close()
                raise
    return _attend(spec, me, timeout, end)


# ---- process 0 -----------------------------------------------------------------------------------


def _listen(spec: ClusterSpec, bind: str | None) -> socket.socket:
    host = bind or spec.host
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, spec.port, type=socket.SOCK_STREAM)[0]
    except OSError as error:
        raise ClusterError(
            f"{_coordinator(spec)}: its host cannot be resolved on process 0 itself ({error}). Correct the name, or pass"
            " px.connect(bind=address) with the address that process 0 is to listen on."
        ) from error
    door = socket.socket(family, kind, protocol)
    try:
        door.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        door.bind(address)
        door.listen(128)
    except OSError as error:
        door.close()
        if error.errno == errno.EADDRINUSE:
            raise ClusterError(
                f"{_coordinator(spec)}: port {spec.port} is taken on this host: by another program, or by another process"
                " that says it is process 0. Choose another port, or give each process its own number."
            ) from error
        raise ClusterError(
            f"{_coordinator(spec)} is no address of this host, {socket.gethostname()} ({error}). Either this process is"
            " not process 0, or pass px.connect(bind=address) with the address that it is to listen on."
        ) from error
    return door


class _Host:
    def __init__(self, me: Member, timeout: float, door: socket.socket) -> None:
        self._me = me
        self._timeout = timeout
        self._door = door
        door.setblocking(False)
        self._strangers: list[Wire] = []
        self._there: dict[int, tuple[Member, Wire]] = {}

    def wait(self, end: float) -> Roll:
        others = range(1, self._me.num_processes)
        while len(self._there) < len(others):
            left = end - time.monotonic()
            if left <= 0:
                self._refuse(_missing([i for i in others if i not in self._there], self._me, self._timeout))
            wires: list[Any] = [*self._strangers, *(wire for _, wire in self._there.values())]
            ready, _, _ = select.select([self._door, *wires], [], [], min(left, 1.0))
            if self._door in ready:
                self._strangers.append(Wire(self._door.accept()[0]))
            for stranger in [wire for wire in self._strangers if wire in ready]:
                self._hear(stranger)
            for i, (_, wire) in list(self._there.items()):
                if wire in ready and (wire.receive() or wire.closed):
                    del self._there[i]  # it died; whoever restarts it may do so in time
                    wire.close()
        for wire in self._strangers:
            wire.close()
        members = (self._me, *(self._there[i][0] for i in others))
        for i in others:
            self._there[i][1].send(members=[asdict(member) for member in members])
        return Roll(members, {i: self._there[i][1] for i in others})

    def _hear(self, wire: Wire) -> None:
        for message in wire.receive():
            member = _member(message.get("hello"))
            if member is None:
                break
            known = self._there.get(member.process_id)
            if known or member.process_id == 0:
                self._refuse(
                    f"two processes say that they are process {member.process_id}: {known[0] if known else self._me} and"
                    f" {member}. Give each its own number"
                )
            if member.num_processes != self._me.num_processes:
                self._refuse(
                    f"{member} was told of {member.num_processes} processes, and {self._me} of {self._me.num_processes}"
                )
            if member.versions != self._me.versions:
                self._refuse(
                    f"{member} has {member.versions}, and {self._me} has {self._me.versions}. Install the same everywhere"
                )
            self._strangers.remove(wire)
            self._there[member.process_id] = member, wire
            return
        else:
            if not wire.closed:
                return
        self._strangers.remove(wire)
        wire.close()

    def _refuse(self, why: str) -> None:
        for wire in (*self._strangers, *(wire for _, wire in self._there.values())):
            wire.send(refused=why)
        raise ClusterError(f"px.connect: {why}.")

    def close(self) -> None:
        """Let go of all connections."""
        for wire in (*self._strangers, *(wire for _, wire in self._there.values())):
            wire.close()


def _missing(missing: list[int], me: Member, timeout: float) -> str:
    names = ", ".join(map(str, missing[:20])) + (", ..." if len(missing) > 20 else "")
    return (
        f"process{'es' * (len(missing) > 1)} {names} of {me.num_processes} did not come within {timeout:.0f} s. Look at"
        " their logs; they must be started with the same settings and reach process 0"
    )


def _member(given: Any) -> Member | None:
    try:
        member = Member(**given)
    except TypeError:
        return None
    numbers = (member.process_id, member.num_processes, member.pid)
    texts = (member.host, member.versions)
    fits = all(type(n) is int and n >= 0 for n in numbers) and all(type(t) is str and t.isprintable() for t in texts)
    return member if fits and member.process_id < member.num_processes else None


# ---- the others ----------------------------------------------------------------------------------


def _attend(spec: ClusterSpec, me: Member, timeout: float, end: float) -> Roll:
    problem = "nobody answered"
    while (left := end - time.monotonic()) > 0:
        try:
            wire = Wire(socket.create_connection((spec.host, spec.port), timeout=min(left, 5.0)))
        except OSError as error:  # it may not have started yet, and its name may not be known yet
            problem = str(error)
            time.sleep(min(left, _RETRY_SECONDS))
            continue
        roll = None
        try:
            wire.send(hello=asdict(me))
            roll = _verdict(spec, wire, end + _VERDICT_SECONDS)
        finally:
            if roll is None:
                wire.close()
        if roll is not None:
            return roll
        problem = "process 0 closed the connection, or something else is listening there"
        time.sleep(min(max(0.0, left), _RETRY_SECONDS))
    raise ClusterError(
        f"px.connect: {_coordinator(spec)}: process {me.process_id} could not reach process 0 there within {timeout:.0f} s"
        f" ({problem}). Process 0 did not come, or the address is wrong."
    )


def _verdict(spec: ClusterSpec, wire: Wire, end: float) -> Roll | None:
    while (left := end - time.monotonic()) > 0 and not wire.closed:
        if not select.select([wire], [], [], min(left, 1.0))[0]:
            continue
        for message in wire.receive():
            if isinstance(why := message.get("refused"), str):
                raise ClusterError(f"px.connect: {why}.")
            members = [member for given in message.get("members", ()) if (member := _member(given))]
            if len(members) == spec.num_processes:
                return Roll(tuple(members), {0: wire})
            wire.closed = True
    return None


def _coordinator(spec: ClusterSpec) -> str:
    return f"{spec.coordinator_from or spec.source}={spec.coordinator}"
