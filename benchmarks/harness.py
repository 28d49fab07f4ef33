"""Timing candidates in turn, in child processes, and showing what came out.

A *case* is one piece of work, a *candidate* one way of doing it. Candidates of a case first show that
they compute the same numbers; then they are timed round by round (A B A B ...), so that whatever else
the machine does in the meantime hits all of them alike.
"""

from __future__ import annotations

import json
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from importlib import import_module, metadata
from pathlib import Path
from typing import Any, Protocol

import numpy as np

WORKLOADS = (
    "eager",
    "step",
    "first_step",
    "dispatch",
    "tracing",
    "tracing_keras",
    "loop",
    "memory",
    "collectives",
    "feeding",
    "keras_fit",
    "durability",
    "importing",
)
"""Modules of this package, each with REPLICAS, UNIT and cases(replicas, quick)."""

_UNITS = {"": 1.0, "s": 1.0, "ms": 1e3, "us": 1e6, "MB": 1e-6}
_ROOT = Path(__file__).parents[1]


class Contender(Protocol):
    """One way of doing a case's work. The first of a case is Phalanx, which the others are compared with."""

    @property
    def name(self) -> str:
        """What the table calls it."""

    def numbers(self) -> Any:
        """What all of a case must agree on, or None; asked for once, before any timing."""

    def round(self, steps: int) -> float:
        """Do the work so many times: the median of the seconds, in which an interrupted one does not count."""

    def end(self) -> None:
        """Nothing more will be asked."""


@dataclass(frozen=True)
class Candidate:
    """A contender in this process."""

    name: str
    step: Callable[[], Any]
    """Does the work once and waits until it is finished."""

    check: Callable[[], Any] | None = None
    """Gives the numbers."""

    prepare: Callable[[], Any] | None = None
    """Called before each step and not timed."""

    def numbers(self) -> Any:
        """Those of the check."""
        return None if self.check is None else self.check()

    def round(self, steps: int) -> float:
        """The median of some steps."""
        times = []
        for _ in range(steps):
            if self.prepare is not None:
                self.prepare()
            start = time.perf_counter()
            self.step()
            times.append(time.perf_counter() - start)
        return statistics.median(times)

    def end(self) -> None:
        """Nothing to do."""


@dataclass(frozen=True)
class Case:
    """One piece of work; its candidates are made when its turn comes."""

    name: str
    candidates: Callable[[], Iterable[Contender]]
    unit: str | None = None
    """Of its figures, where it is not that of the workload."""


@dataclass(frozen=True)
class Effort:
    """How long to measure."""

    rounds: int = 5
    seconds: float = 0.4
    """Aimed at for each candidate in each round."""

    steps: int = 3
    """At least this many in each round."""


# ---- timing --------------------------------------------------------------------------------------


def measure(candidates: Sequence[Contender], effort: Effort) -> list[dict[str, Any]]:
    """Check the candidates, time them in turn, and give one row of figures (in seconds) for each."""
    checks = [None if (numbers := c.numbers()) is None else np.asarray(numbers, np.float64) for c in candidates]
    require_equal([c.name for c in candidates], checks)
    steps = [_steps_for(candidate, effort) for candidate in candidates]
    rounds: list[list[float]] = [[] for _ in candidates]
    for _ in range(effort.rounds):
        for i, candidate in enumerate(candidates):
            rounds[i].append(candidate.round(steps[i]))
    return [
        {
            "name": candidate.name,
            **figures(times, rounds[0]),
            "steps_per_round": n,
            "check": None if check is None else check.ravel().tolist(),
        }
        for candidate, times, n, check in zip(candidates, rounds, steps, checks)
    ]


def figures(times: Sequence[float], first: Sequence[float]) -> dict[str, Any]:
    """What is told of a candidate's rounds, next to those of the first."""
    ratio = statistics.median(a / b for a, b in zip(first, times))
    return {
        "median": statistics.median(times),
        "min": min(times),
        "max": max(times),
        "ratio": ratio,
        "rounds": list(times),
    }


def require_equal(names: Sequence[str], checks: Sequence[Any]) -> None:
    """Raise unless the candidates computed the same: a baseline that does less is worth nothing."""
    for name, check in zip(names[1:], checks[1:]):
        if (check is None) != (checks[0] is None) or (check is not None and not _close(checks[0], check)):
            raise RuntimeError(f"{names[0]!r} and {name!r} do not compute the same: {checks[0]} and {check}.")


def _close(a: Any, b: Any) -> bool:
    return a.shape == b.shape and bool(np.all(np.isfinite(a))) and np.allclose(a, b, rtol=1e-3, atol=1e-6)


def _steps_for(candidate: Contender, effort: Effort) -> int:
    once = candidate.round(effort.steps)
    return max(effort.steps, min(10_000, int(effort.seconds / once)))


# ---- child processes -----------------------------------------------------------------------------


def groups(workloads: Sequence[str], replicas: Sequence[int] | None) -> Iterator[tuple[str, int]]:
    """What runs in a process of its own: the number of virtual devices is settled when JAX starts."""
    for name in workloads:
        for n in _module(name).REPLICAS:
            if not replicas or n in replicas:
                yield name, n


def run_group(workload: str, replicas: int, effort: Effort, quick: bool, processes: int = 1) -> list[dict[str, Any]]:
    """The results of one workload with one number of replicas: the rounds of so many processes, one after another.

    How fast a program runs differs from process to process, too.
    """
    command = [sys.executable, "-m", "benchmarks.harness", workload, str(replicas)]
    command += [json.dumps(asdict(effort)), json.dumps(quick)]
    runs = []
    for _ in range(processes):
        child = subprocess.run(command, stdout=subprocess.PIPE, text=True, cwd=_ROOT)
        if child.returncode:
            raise SystemExit(f"benchmarks: {workload} with {replicas} replicas ended with code {child.returncode}.")
        runs.append(json.loads(child.stdout))
    return [_pooled(same_case) for same_case in zip(*runs)]


def _pooled(results: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """One result of those of several processes."""
    rounds = [
        [time for row in rows for time in row["rounds"]] for rows in zip(*(result["candidates"] for result in results))
    ]
    rows = [row | figures(times, rounds[0]) for row, times in zip(results[0]["candidates"], rounds)]
    return results[0] | {"candidates": rows}


def _child(workload: str, replicas: int, effort: Effort, quick: bool) -> list[dict[str, Any]]:
    import jax

    import phalanx as px

    px.cpu_devices(replicas)
    if len(jax.devices()) < replicas:
        print(f"{workload} needs {replicas} devices, JAX sees {jax.devices()}: left out", file=sys.stderr)
        return []
    module = _module(workload)
    results = []
    for case in module.cases(replicas, quick):
        candidates = list(case.candidates())
        rows = measure(candidates, effort)
        for candidate in candidates:
            candidate.end()
        results.append(
            {
                "workload": workload,
                "case": case.name,
                "replicas": replicas,
                "unit": module.UNIT if case.unit is None else case.unit,
                "candidates": rows,
            }
        )
    return results


def _module(workload: str) -> Any:
    return import_module(f"benchmarks.{workload}")


# ---- showing -------------------------------------------------------------------------------------


def environment() -> dict[str, Any]:
    """Where and with what the figures were measured."""
    return {
        "date": time.strftime("%Y-%m-%d"),
        "machine": _processor(),
        "system": platform.platform(),
        "cores": os.cpu_count(),
        "load": os.getloadavg()[0],
        "python": platform.python_version(),
        **{name: metadata.version(name) for name in ("jax", "jaxlib", "optax", "phalanx")},
    }


def _processor() -> str:
    try:
        with open("/proc/cpuinfo") as lines:
            return next(line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()


def show(report: dict[str, Any]) -> None:
    """Print the report as a table (which is Markdown, too)."""
    from rich import box
    from rich.console import Console
    from rich.table import Table

    env = report["environment"]
    table = Table("workload", "case", "replicas", "candidate", box=box.MARKDOWN)
    for header in ("median", "min .. max", "Phalanx takes"):
        table.add_column(header, justify="right")
    for result in report["results"]:
        for i, row in enumerate(result["candidates"]):
            labels = (result["workload"], result["case"], str(result["replicas"])) if i == 0 else ("", "", "")
            table.add_row(*labels, *_figures(row, result["unit"], first=i == 0))
    console = Console(width=None if sys.stdout.isatty() else 1000)  # a file has room
    console.print(
        f"{env['date']}, {env['machine']}, {env['cores']} cores, load {env['load']:.1f}, Python {env['python']},"
        f" JAX {env['jax']}, Phalanx {env['phalanx']}",
        table,
        highlight=False,
        sep="\n",
    )


def _figures(row: dict[str, Any], unit: str, *, first: bool) -> tuple[str, str, str, str]:
    median, low, high = (f"{row[key] * _UNITS[unit]:.3g}" for key in ("median", "min", "max"))
    return row["name"], f"{median} {unit}", f"{low} .. {high}", "" if first else f"{row['ratio']:.2f} x"


if __name__ == "__main__":
    workload, n, effort, quick = sys.argv[1:]
    json.dump(_child(workload, int(n), Effort(**json.loads(effort)), json.loads(quick)), sys.stdout)
