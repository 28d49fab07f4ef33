"""The lifeline: a thread that knows, within a moment, when another process of the cluster is gone.

A collective with a process that is dead waits for ever, or ends the program in JAX's C++ code with a message
that names nobody. Every process keeps a connection to process 0, which the operating system closes when
either end dies, and says now and then that it is alive. Who learns that another process has failed, is gone
or is silent says so and ends, with `EXIT_LOST`: without that process no step can be finished.
"""

from __future__ import annotations

import contextlib
import os
import select
import socket
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

from phalanx.cluster.exits import EXIT_LOST
from phalanx.cluster.roll import Member, Roll

_TICK_SECONDS = 0.2
_WRITING_SECONDS = 3.0
_LATE_SECONDS = 5.0
"""After such a pause of this thread nobody is blamed for silence: it was this process that did not listen."""

Handler = Callable[[int, dict[str, Any]], None]


def end_process(code: int, text: str) -> None:
    """End, whatever the other threads wait for; what a thread of its own writes to a file is finished if it can be."""
    until = time.monotonic() + _WRITING_SECONDS
    for thread in threading.enumerate():
        if not thread.daemon and thread not in (threading.main_thread(), threading.current_thread()):
            thread.join(max(0.0, until - time.monotonic()))
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):  # a closed pipe
            stream.flush()
    if text:
        os.write(2, f"{text}\n".encode())
    os._exit(code)


class Lifeline:
    """The connections of this process to the others, and what is known of them.

    Args:
        roll: who is there.
        me: this process's number.
        heartbeat: seconds of silence after which a process counts as lost.
    """

    def __init__(self, roll: Roll, me: int, heartbeat: float) -> None:
        self.members: tuple[Member, ...] = roll.members
        self.me = me
        self._wires = roll.wires
        self._heartbeat = heartbeat
        self._heard = dict.fromkeys(roll.wires, time.monotonic())
        self._finished: set[int] = set()
        self._all_finished = threading.Event()
        self._failed = False
        """Whether this process has failed itself; it then listens to nobody."""
        self._excuses_the_gone = False
        self._lock = threading.Lock()
        self._bell = socket.socketpair()
        self.handlers: dict[str, Handler] = {
            "failed": self._on_failed,
            "finished": self._on_finished,
            "all_finished": lambda by, message: self._all_finished.set(),
        }
        """Of messages by their kind; called in this thread."""
        self.ticks: list[Callable[[], None]] = []
        """Called in this thread several times a second."""
        self._thread = threading.Thread(target=self._watch, name="phalanx-lifeline", daemon=True)

    def start(self) -> None:
        """Begin to listen."""
        os.register_at_fork(after_in_child=self._let_go)
        self._thread.start()

    def _let_go(self) -> None:
        """A forked child would keep the connections of its parent open after that has died."""
        self._failed = True
        for wire in self._wires.values():
            wire.close()

    def ring(self) -> None:
        """Let the thread look at once; for signal handlers too."""
        with contextlib.suppress(OSError):
            self._bell[1].send(b"!", socket.MSG_DONTWAIT)

    # ---- saying ----

    def tell(self, kind: str, **content: Any) -> None:
        """Tell all other processes; this one's own handler is called too."""
        message = {"kind": kind, "by": self.me, **content}
        self._send(message)
        self._handle(message)

    def tell_first(self, kind: str, **content: Any) -> None:
        """Tell process 0 alone."""
        message = {"kind": kind, "by": self.me, "to": 0, **content}
        if self.me == 0:
            self._handle(message)
        else:
            self._send(message)

    def _send(self, message: dict[str, Any], but: int | None = None) -> None:
        with self._lock:
            for i, wire in self._wires.items():
                if i != but:
                    wire.send(**message)

    # ---- leaving ----

    def fail(self, text: str) -> None:
        """This process ends because of an error of its own; the others need not wait for it."""
        if not self._failed:
            self._failed = True
            self._send({"kind": "failed", "by": self.me, "process": self.me, "text": text})

    def excuse_the_gone(self) -> None:
        """All are about to end, for a reason that is known: who is gone first is none. One that is silent may be the cause."""
        self._excuses_the_gone = True

    def finish(self, told: float) -> None:
        """Wait until all processes have finished; `told` seconds later say who is waited for."""
        if self._failed:
            return
        self.tell("finished")
        # One says it for all. It need not be process 0: that one may wait in a collective for those that have left.
        if not self._all_finished.wait(told) and self.me == min(self._finished):
            late = [str(m) for m in self.members if m.process_id not in self._finished]
            sys.stderr.write(
                f"phalanx: process {self.me} has finished and waits for {', '.join(late)}. If that is in a step on the devices"
                " of all processes, it waits for ever: all must make equally many steps. px.cluster.Watchdog ends such a"
                " program, with the line that it waits in.\n"
            )
            sys.stderr.flush()
        self._all_finished.wait()

    def wait_for_blame(self) -> None:
        """Wait as long as it may take to learn that another process is gone; this process then ends in here."""
        if not self._all_finished.is_set():
            self._thread.join(_TICK_SECONDS * 10)

    # ---- the thread ----

    def _watch(self) -> None:
        last = pinged = time.monotonic()
        while not self._failed and not self._all_finished.is_set():
            open_wires = [wire for wire in self._wires.values() if not wire.closed]
            ears: list[Any] = [self._bell[0], *open_wires]
            ready, _, _ = select.select(ears, [], [], _TICK_SECONDS)
            if self._bell[0] in ready:
                self._bell[0].recv(64)
            now = time.monotonic()
            if now - last > max(_LATE_SECONDS, self._heartbeat / 2):
                self._heard = dict.fromkeys(self._wires, now)
            last = now
            if now - pinged > self._heartbeat / 4:
                self._send({"kind": "alive", "by": self.me})
                pinged = now
            for i, wire in self._wires.items():
                if wire in ready:
                    self._heard[i] = now
                    for message in wire.receive():
                        self._relay(i, message)
                if not self._all_finished.is_set():
                    self._check(i, now)
            for tick in self.ticks:
                tick()

    def _relay(self, sender: int, message: dict[str, Any]) -> None:
        if self.me == 0 and message.get("kind") != "alive" and message.get("to") != 0:
            self._send(message, but=sender)
        self._handle(message)

    def _handle(self, message: dict[str, Any]) -> None:
        handler = self.handlers.get(str(message.get("kind")))
        if handler is not None:
            handler(int(message.get("by", -1)), message)

    def _check(self, i: int, now: float) -> None:
        if self._wires[i].closed:
            if not self._excuses_the_gone:
                self._blame(i, "is gone: its connection closed without a word, as when it is killed")
        elif now - self._heard[i] > self._heartbeat:
            silence = f"has not been heard of for {now - self._heard[i]:.0f} s"
            self._blame(i, f"{silence}: it is stopped, or its machine or the network is down")

    def _blame(self, i: int, text: str) -> None:
        self._send({"kind": "failed", "by": self.me, "process": i, "text": text}, but=i)
        self._on_failed(self.me, {"process": i, "text": text})

    def _on_failed(self, by: int, message: dict[str, Any]) -> None:
        if self._failed or self._all_finished.is_set():
            return
        i = int(message["process"])
        who = self.members[i] if i != self.me else "this process"
        end_process(
            EXIT_LOST,
            f"phalanx: {who} {message['text']}. Process {self.me} of {len(self.members)} cannot go on without it and"
            f" exits with code {EXIT_LOST}.",
        )

    def _on_finished(self, by: int, message: dict[str, Any]) -> None:
        self._finished.add(by)
        if self.me == 0 and len(self._finished) == len(self.members):
            self._send({"kind": "all_finished", "by": 0})
            self._all_finished.set()
