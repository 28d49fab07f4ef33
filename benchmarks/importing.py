"""Starting Python and importing Phalanx, against importing what it stands on."""

from __future__ import annotations

import functools
import os
import subprocess
import sys
from collections.abc import Iterator

from benchmarks.harness import Candidate, Case

REPLICAS = (1,)
UNIT = "s"


def cases(replicas: int, quick: bool) -> Iterator[Case]:
    yield Case("python -c 'import ...'", _candidates)


def _candidates() -> list[Candidate]:
    imports = {"Phalanx": "phalanx", "jax": "jax", "jax and optax": "jax, optax"}
    return [Candidate(name, functools.partial(_import, modules)) for name, modules in imports.items()]


def _import(modules: str) -> None:
    # With compiled modules, as an installed package has them, whatever this process was told.
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONDONTWRITEBYTECODE"}
    subprocess.run([sys.executable, "-c", f"import {modules}"], check=True, env=environment)
