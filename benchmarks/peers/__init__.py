"""Contenders that need another environment than Phalanx's: each in a process of its own, fed with requests.

A peer is found in ``.bench/NAME``, where ``make bench`` puts it, or in the environment of Phalanx.
"""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

_ROOT = Path(__file__).parents[2]


def found(names: dict[str, str], workload: str, setting: dict[str, Any], quick: bool) -> Iterator[Peer]:
    """Those of the peers (what the table calls them, and their modules) that are installed and do the work.

    A quick run has no time for them.
    """
    for name, module in names.items():
        if not quick and is_installed(name, module):
            peer = Peer(name, module, workload, setting)
            if peer.takes_part:
                yield peer
            else:
                peer.end()


def is_installed(name: str, module: str) -> bool:
    """Whether a peer can start; says so when it cannot."""
    if _python(module) is None:
        print(f"{name} is not installed: left out (see `make bench`)", file=sys.stderr)
    return _python(module) is not None


def _python(module: str) -> str | None:
    own = _ROOT / ".bench" / module / "bin" / "python"
    if own.exists():
        return str(own)
    return sys.executable if importlib.util.find_spec(module) else None


class Peer:
    """A contender that another process is asked for; the process ends with this one, whose pipe it reads."""

    def __init__(self, name: str, module: str, workload: str, setting: dict[str, Any]) -> None:
        self.name = name
        self._process = subprocess.Popen(
            [str(_python(module)), "-m", f"benchmarks.peers.{module}_peer", workload, json.dumps(setting)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=_ROOT,
        )
        self.takes_part: bool = self._answer()

    def numbers(self) -> Any:
        """Asked for there."""
        return self._ask({"numbers": True})

    def round(self, steps: int) -> float:
        """Measured there."""
        return float(self._ask({"steps": steps}))

    def end(self) -> None:
        """End the process."""
        self._process.communicate()

    def _ask(self, request: dict[str, Any]) -> Any:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        return self._answer()

    def _answer(self) -> Any:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise SystemExit(f"benchmarks: {self.name} ended with code {self._process.wait()}.")
        return json.loads(line)
