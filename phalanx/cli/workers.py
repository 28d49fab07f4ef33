"""Worker processes on this machine: started together, heard together, ended together."""

from __future__ import annotations

import contextlib
import ctypes
import os
import selectors
import signal
import socket
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import IO

from phalanx.cluster.exits import EXIT_PREEMPTED

_TAIL_LINES = 400
_LONGEST_LINE = 1 << 16
_COLOURS = (36, 33, 35, 32, 34, 31)
_DEATH_SIGNAL = 1
"""``PR_SET_PDEATHSIG`` of Linux's ``prctl``."""


def free_port() -> int:
    """A port that nobody listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _die_with_parent() -> Callable[[], None] | None:
    """What a new process does before it becomes the worker; Linux then ends it with the launcher."""
    if not sys.platform.startswith("linux"):
        return None
    library, launcher = ctypes.CDLL(None), os.getpid()

    def ask() -> None:
        library.prctl(_DEATH_SIGNAL, signal.SIGKILL)
        if os.getppid() != launcher:
            os._exit(1)

    return ask


class Shepherd:
    """The process that outlives the launcher for a moment, to end the workers."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-S", "-E", str(Path(__file__).with_name("shepherd.py"))],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            start_new_session=True,
            text=True,
        )

    def watch(self, group: int) -> None:
        """End this process group with the launcher."""
        self._say(f"+{group}\n")

    def forget(self, group: int) -> None:
        """It is gone."""
        self._say(f"-{group}\n")

    def _say(self, line: str) -> None:
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.write(line)
            self._process.stdin.flush()

    def close(self) -> None:
        """Nothing is left to watch."""
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()
        self._process.wait()


class _Stream:
    """One output of a worker, whose lines go to ours with a prefix."""

    def __init__(self, source: IO[bytes], target: IO[str], prefix: str, tail: deque[str]) -> None:
        self.source, self._target, self._prefix, self._tail = source, target, prefix, tail
        self._rest = b""
        os.set_blocking(source.fileno(), False)

    def read(self) -> bool:
        """Pass on what is there; False at the end."""
        try:
            data = os.read(self.source.fileno(), _LONGEST_LINE)
        except BlockingIOError:
            return True
        *lines, self._rest = (self._rest + data).replace(b"\r\n", b"\n").split(b"\n")
        if self._rest and (not data or len(self._rest) > _LONGEST_LINE):
            lines, self._rest = [*lines, self._rest], b""
        for line in lines:
            # Of what a progress bar has drawn over itself, only the last is worth a line.
            text = line.rstrip(b"\r").rpartition(b"\r")[2].decode(errors="replace")
            self._tail.append(text)
            self._target.write(f"{self._prefix}{text}\n")
        self._target.flush()
        return bool(data)


class Worker:
    """One worker process, with its outputs."""

    def __init__(self, number: int, command: list[str], environment: dict[str, str], colour: bool) -> None:
        self.number = number
        self.tail: deque[str] = deque(maxlen=_TAIL_LINES)
        """Its last lines, of both outputs."""
        self._process = subprocess.Popen(
            command,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            process_group=0,
            preexec_fn=_die_with_parent(),
        )
        assert self._process.stdout and self._process.stderr
        prefix = f"[{number}] "
        if colour:
            prefix = f"\x1b[{_COLOURS[number % len(_COLOURS)]}m{prefix}\x1b[0m"
        self.streams = [
            _Stream(self._process.stdout, sys.stdout, prefix, self.tail),
            _Stream(self._process.stderr, sys.stderr, prefix, self.tail),
        ]
        self.group = self._process.pid
        self.code: int | None = None
        """Its exit code once it has ended; 128 and more for a signal, as in a shell."""

    def poll(self) -> bool:
        """Whether it has just ended."""
        if self.code is not None or self._process.poll() is None:
            return False
        code = self._process.returncode
        self.code = code if code >= 0 else 128 - code
        self.send(signal.SIGKILL)  # what it has left behind
        return True

    def send(self, number: int) -> None:
        """Send a signal to the worker; SIGKILL to its children too."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            if number == signal.SIGKILL:
                os.killpg(self.group, number)
            else:
                self._process.send_signal(number)

    @property
    def ending(self) -> str:
        """How it ended, for people."""
        code = self.code or 0
        if code > 128:
            with contextlib.suppress(ValueError):
                return f"was ended by {signal.Signals(code - 128).name}"
        return f"ended with exit code {code}"

    def traceback(self) -> list[str]:
        """The last traceback among its last lines, or else the last few of them."""
        lines = list(self.tail)
        starts = [i for i, line in enumerate(lines) if line.startswith("Traceback (most recent call last)")]
        return lines[starts[-1] :] if starts else lines[-20:]


class Workers:
    """All workers of one attempt."""

    def __init__(self, shepherd: Shepherd) -> None:
        self.all: list[Worker] = []
        self.failed: list[Worker] = []
        """Those that did not end well, in their order, until a signal was sent to them."""
        self._ended_by_us = False
        self._shepherd = shepherd
        self._selector = selectors.DefaultSelector()

    def start(self, number: int, command: list[str], environment: dict[str, str], colour: bool) -> None:
        """Start one more."""
        worker = Worker(number, command, environment, colour)
        self._shepherd.watch(worker.group)
        self.all.append(worker)
        for stream in worker.streams:
            self._selector.register(stream.source, selectors.EVENT_READ, stream)

    @property
    def running(self) -> list[Worker]:
        """Those that have not ended."""
        return [worker for worker in self.all if worker.code is None]

    def wait(self, seconds: float) -> list[Worker]:
        """Pass on output for at most so long; the workers that ended meanwhile, at once."""
        end = time.monotonic() + seconds
        while True:
            for key, _ in self._selector.select(max(0.0, min(0.05, end - time.monotonic()))):
                if not key.data.read():
                    self._selector.unregister(key.fileobj)
            ended = [worker for worker in self.all if worker.poll()]
            for worker in ended:
                self._shepherd.forget(worker.group)
                if worker.code not in (0, EXIT_PREEMPTED) and not self._ended_by_us:
                    self.failed.append(worker)
            if ended or time.monotonic() >= end:
                return ended

    def send(self, number: int) -> None:
        """Send a signal to all that run."""
        self._ended_by_us = True
        for worker in self.running:
            worker.send(number)

    def close(self) -> None:
        """Pass on the last output."""
        for key in list(self._selector.get_map().values()):
            while key.data.read() and select_now(self._selector, key.fileobj):
                pass
            self._selector.unregister(key.fileobj)
        self._selector.close()


def select_now(selector: selectors.BaseSelector, fileobj: object) -> bool:
    """Whether there is something to read right now."""
    return any(key.fileobj is fileobj for key, _ in selector.select(0))
