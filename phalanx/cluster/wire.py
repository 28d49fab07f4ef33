"""Short messages between two processes over TCP: one JSON object a line, never anything that could run code."""

from __future__ import annotations

import contextlib
import json
import select
import socket
import time
from typing import Any

_LONGEST = 1 << 16
"""Bytes of a message; whoever sends more is not one of ours."""

_SEND_SECONDS = 5.0


class Wire:
    """One end of a connection. Receiving never waits; sending waits a few seconds at most."""

    def __init__(self, connection: socket.socket) -> None:
        self.socket = connection
        connection.setblocking(False)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._received = b""
        self.closed = False
        """Whether the other end is gone, or talked nonsense."""

    def fileno(self) -> int:
        """For `select`."""
        return self.socket.fileno()

    def send(self, **message: Any) -> None:
        """Send a message, or find that the other end is gone."""
        rest = json.dumps(message).encode() + b"\n"
        end = time.monotonic() + _SEND_SECONDS
        while rest and not self.closed:
            try:
                rest = rest[self.socket.send(rest) :]
            except (BlockingIOError, InterruptedError):
                if time.monotonic() > end or not select.select([], [self.socket], [], _SEND_SECONDS)[1]:
                    self.closed = True
            except OSError:
                self.closed = True

    def receive(self) -> list[dict[str, Any]]:
        """The messages that have arrived."""
        try:
            while not self.closed:
                data = self.socket.recv(_LONGEST)
                self._received += data
                if not data or len(self._received) > 4 * _LONGEST:
                    self.closed = True
        except (BlockingIOError, InterruptedError):
            pass
        except OSError:
            self.closed = True
        *lines, self._received = self._received.split(b"\n")
        messages = []
        for line in lines:
            try:
                message = json.loads(line)
            except ValueError:
                message = None
            if not isinstance(message, dict):
                self.closed = True
                break
            messages.append(message)
        if len(self._received) > _LONGEST:
            self.closed = True
        return messages

    def close(self) -> None:
        """Let go of the connection."""
        self.closed = True
        with contextlib.suppress(OSError):
            self.socket.close()
