"""Starts workers on this machine, as one cluster over the loopback interface.

All run the same script, which calls `px.connect()`. When one fails, all are ended, and the traceback of
the first one that failed is printed last. Nothing it starts outlives it.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import time
from types import FrameType

from phalanx.cli import usage_error
from phalanx.cli.run import add_script, python_command
from phalanx.cli.workers import Shepherd, Worker, Workers, free_port
from phalanx.cluster.exits import EXIT_LOST, EXIT_PREEMPTED
from phalanx.errors import ArgumentError

HELP = "start a script as several processes on this machine"

_TERM_SECONDS = 3.0
"""Between SIGTERM and SIGKILL, for the workers that are left when one has failed."""
_OTHERS_SECONDS = 1.0
"""How long others may take to end by themselves, so that the first cause is known."""
_LONGEST_PAUSE = 30.0
_RAN_WELL_SECONDS = 600.0
"""After so long a run a failure is no longer one of a row, as Kubernetes has it for containers that crash."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of the subcommand."""
    parser.add_argument("-n", "--processes", type=int, required=True, metavar="N", help="how many workers")
    parser.add_argument("--devices-per-process", type=int, metavar="N", help="virtual CPU devices of each worker")
    parser.add_argument("--max-restarts", type=int, default=0, metavar="N",
                        help="start all again after a failure, at most so often (0)")  # fmt: skip
    parser.add_argument("--pause", type=float, default=0.5, metavar="SECONDS",
                        help="before a restart; twice as long before the next, up to 30, and as at first after a run of"
                             " 10 minutes (0.5)")  # fmt: skip
    parser.add_argument("--port", type=int, default=0, help="where process 0 listens, on loopback (a free one)")
    add_script(parser)


def run(args: argparse.Namespace) -> int:
    """Launch; the exit code is that of the first worker that failed."""
    for name, value, least in (
        ("-n", args.processes, 1),
        ("--max-restarts", args.max_restarts, 0),
        ("--devices-per-process", 1 if args.devices_per_process is None else args.devices_per_process, 1),
    ):
        if value < least:
            return usage_error(f"{name} must be at least {least}, got {value}.")
    if not 0 <= args.port <= 65535:
        return usage_error(f"--port must be from 1 to 65535, or 0 for a free one, got {args.port}.")
    if not args.pause >= 0:
        return usage_error(f"--pause must be a number of seconds from 0 on, got {args.pause}.")
    try:
        command = python_command(args)
    except ArgumentError as error:
        return usage_error(error)
    return Launcher(args, command).run()


def _may_be_a_consequence(worker: Worker) -> int:
    """How likely a worker failed because another had: of those that end in one moment the order says nothing."""
    if worker.code == EXIT_LOST:  # it says so itself
        return 2
    return 0 if worker.code == 128 + signal.SIGKILL else 1  # nobody kills a worker because another has failed


class Launcher:
    """Starts the workers, again after failures if it may."""

    def __init__(self, args: argparse.Namespace, command: list[str]) -> None:
        self._args = args
        self._command = command
        self._colour = sys.stdout.isatty() and "NO_COLOR" not in os.environ
        self._workers: Workers | None = None
        self._asked: int | None = None
        """The signal with which this launcher was asked to end."""
        self._asked_times = 0

    def run(self) -> int:
        """Until the workers have finished, or failed too often."""
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, self._forward)
        shepherd = Shepherd()
        pause = self._args.pause
        try:
            for attempt in range(self._args.max_restarts + 1):
                begun = time.monotonic()
                code = self._attempt(attempt, shepherd)
                if code == 0 or self._asked is not None or attempt == self._args.max_restarts:
                    break
                if time.monotonic() - begun > _RAN_WELL_SECONDS:
                    pause = self._args.pause
                pause = min(pause, _LONGEST_PAUSE)
                self._say(f"starting all again in {pause:g} s ({attempt + 1} of {self._args.max_restarts} restarts)")
                self._sleep(pause)
                pause *= 2
        finally:
            if self._workers is not None:
                self._workers.send(signal.SIGKILL)
            shepherd.close()
        return code

    def _forward(self, number: int, frame: FrameType | None) -> None:
        self._asked, self._asked_times = number, self._asked_times + 1
        if self._workers is not None:
            self._workers.send(number if self._asked_times == 1 else signal.SIGKILL)

    def _say(self, text: str) -> None:
        sys.stdout.flush()
        print(f"phalanx launch: {text}", file=sys.stderr, flush=True)

    def _sleep(self, seconds: float) -> None:
        end = time.monotonic() + seconds
        while self._asked is None and (left := end - time.monotonic()) > 0:
            time.sleep(min(left, 0.1))

    def _environment(self, number: int, port: int, attempt: int) -> dict[str, str]:
        own = {
            "PHALANX_COORDINATOR": f"127.0.0.1:{port}",
            "PHALANX_LAUNCHER": str(os.getpid()),
            "PHALANX_NUM_PROCESSES": str(self._args.processes),
            "PHALANX_PROCESS_ID": str(number),
            "PHALANX_RESTARTS": str(attempt),
            "PYTHONUNBUFFERED": "1",
        }
        if self._args.devices_per_process is not None:
            own["JAX_NUM_CPU_DEVICES"] = str(self._args.devices_per_process)
        return {**os.environ, **own}

    def _attempt(self, attempt: int, shepherd: Shepherd) -> int:
        if self._asked is not None:
            return 128 + self._asked
        port = self._args.port or free_port()
        self._workers = workers = Workers(shepherd)
        for number in range(self._args.processes):
            workers.start(number, self._command, self._environment(number, port, attempt), self._colour)
        if self._asked is not None:  # while they were started
            workers.send(self._asked)
        while workers.running:
            workers.wait(1.0)
            if workers.failed:
                self._end(workers)
        workers.close()
        self._workers = None
        return self._outcome(workers)

    def _end(self, workers: Workers) -> None:
        """One has failed: give the others a moment to say so themselves, then end them."""
        for seconds, then in ((_OTHERS_SECONDS, signal.SIGTERM), (_TERM_SECONDS, signal.SIGKILL), (5.0, None)):
            end = time.monotonic() + seconds
            while workers.running and time.monotonic() < end:
                workers.wait(end - time.monotonic())
            if then is not None:
                workers.send(then)

    def _outcome(self, workers: Workers) -> int:
        if workers.failed and self._asked is None:
            first = min(workers.failed, key=_may_be_a_consequence)
            for line in first.traceback():
                print(f"[{first.number}] {line}", file=sys.stderr)
            self._say(f"worker {first.number} of {len(workers.all)} {first.ending}, the first to fail; see above")
            return first.code or 1
        if any(worker.code == EXIT_PREEMPTED for worker in workers.all):
            self._say("the workers have saved and stopped, as they were asked")
            return EXIT_PREEMPTED
        return 0 if self._asked is None else 128 + self._asked
