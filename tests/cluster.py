"""Real processes for tests: `phalanx launch` with a script, and what came of it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import textwrap
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from phalanx.cli.workers import free_port
from phalanx.cluster.exits import EXIT_PREEMPTED

TESTS = Path(__file__).parent


@dataclass
class Outcome:
    code: int
    out: str
    err: str
    seconds: float

    def told(self) -> dict[int, list[Any]]:
        """The JSON that each worker printed, line by line."""
        said: dict[int, list[Any]] = {}
        for line in self.out.splitlines():
            number, _, text = line.removeprefix("[").partition("] ")
            if text.startswith("{"):
                said.setdefault(int(number), []).append(json.loads(text))
        return said


def environment(**more: str) -> dict[str, str]:
    """Of a new process: this Python's packages, CPU devices, few threads, nothing of a cluster around."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("PHALANX_", "SLURM_", "OMPI_", "TF_CONFIG"))}
    kept.pop("XLA_FLAGS", None)
    return {
        **kept,
        "PYTHONPATH": os.pathsep.join([str(Path(__file__).parents[1]), *filter(None, sys.path)]),
        "JAX_PLATFORMS": "cpu",
        "JAX_NUM_CPU_DEVICES": "1",
        "KERAS_BACKEND": "jax",
        "OMP_NUM_THREADS": "1",
        "TF_CPP_MIN_LOG_LEVEL": "1",
        **more,
    }


def start(*command: str, **more: str) -> subprocess.Popen[str]:
    """``python -m phalanx`` with this command line."""
    return subprocess.Popen(
        [sys.executable, "-m", "phalanx", *command],
        env=environment(**more),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def end(process: subprocess.Popen[str], timeout: float = 120.0) -> Outcome:
    """Wait for it; a process that hangs is killed, and the test fails."""
    begin = time.monotonic()
    try:
        out, err = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        process.send_signal(signal.SIGTERM)
        time.sleep(1.0)
        process.kill()
        out, err = process.communicate()
        raise AssertionError(f"did not end within {timeout} s\n{out[-5000:]}\n{err[-5000:]}") from None
    return Outcome(process.returncode, out, err, time.monotonic() - begin)


def launch(
    n: int, script: Path, *args: str, options: tuple[str, ...] = (), timeout: float = 120.0, **more: str
) -> Outcome:
    """``phalanx launch`` to its end."""
    return end(start("launch", "-n", str(n), *options, str(script), *args, **more), timeout)


def pair(*command: str | Path) -> list[subprocess.Popen[str]]:
    """A Python program as two processes, which are told their number and a free port, and then the rest of the command."""
    program, *arguments = map(str, command)
    port = str(free_port())
    return [
        subprocess.Popen(
            [sys.executable, program, str(number), port, *arguments],
            env=environment(),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for number in range(2)
    ]


def two_processes(*command: str | Path, timeout: float = 90.0) -> list[dict[str, Any]]:
    """What each of the two processes of a program with `scenarios` has printed."""
    processes = pair(*command)
    try:
        outputs = [process.communicate(timeout=timeout) for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.wait()
    for process, (_, errors) in zip(processes, outputs):
        assert process.returncode == 0, errors[-5000:]
    return [json.loads(printed.splitlines()[-1]) for printed, _ in outputs]


def stop_when_told(command: list[str]) -> None:
    """Start a program, send it SIGTERM when it prints ``now``; it ends soon, having saved its state."""
    process = subprocess.Popen(command, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None
    for line in process.stdout:
        if line == "now\n":
            break
    process.send_signal(signal.SIGTERM)
    begin = time.monotonic()
    _, errors = process.communicate(timeout=60)
    assert process.returncode == EXIT_PREEMPTED, errors[-3000:]
    assert time.monotonic() - begin < 10


def write(path: Path, source: str) -> Path:
    """A script."""
    path.write_text(textwrap.dedent(source))
    return path


def wait_for(happened: Any, seconds: float = 60.0) -> Any:
    """Until ``happened()`` gives something."""
    end_at = time.monotonic() + seconds
    while time.monotonic() < end_at:
        if found := happened():
            return found
        time.sleep(0.05)
    raise AssertionError("it did not happen in time")


def alive(pid: int) -> bool:
    """Whether there is such a process, and it is no zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False
