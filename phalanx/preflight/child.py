"""What runs in the process in which a program is compiled.

A compiler that hangs or crashes takes this process down and no other; it goes down with the one that asked, too.
"""

from __future__ import annotations

import os
import pickle
import shutil
import sys
import threading
import time
from pathlib import Path
from typing import Any

from phalanx import _jax
from phalanx.preflight.outcome import Outcome, Request


def main(request: str, answer: str) -> None:
    """Compile what the first file holds, and write to the second how it went."""
    threading.Thread(target=_end_with_the_asker, args=(Path(request).parent,), daemon=True).start()
    asked: Request = pickle.loads(Path(request).read_bytes())
    Path(answer).write_bytes(pickle.dumps(compiled(asked)))


def _end_with_the_asker(folder: Path) -> None:
    """Our input is a pipe in which nothing is ever written: it ends with the process at its other end."""
    os.read(sys.stdin.fileno(), 1)
    shutil.rmtree(folder, ignore_errors=True)
    os._exit(1)


def compiled(asked: Request) -> Outcome:
    """Compile here and now."""
    import jax

    start = time.perf_counter()
    try:
        if asked.slice_name:
            executable = _jax.compile_for_slice(asked.lowered, asked.slice_name, asked.options, asked.quick)
        else:
            devices = asked.devices or jax.devices()
            executable = _jax.compile_here(asked.lowered, devices, asked.quick)
    except (RuntimeError, ValueError) as error:  # JAX's own errors among them
        return Outcome(seconds=time.perf_counter() - start, message=str(error) or type(error).__name__)
    seconds = time.perf_counter() - start
    return Outcome(
        seconds=seconds,
        memory=_memory(executable),
        cost={k: float(v) for k, v in _cost(executable).items() if k in ("flops", "bytes accessed", "transcendentals")},
        hlo=executable.hlo_modules()[0].to_string(),
    )


def _memory(executable: Any) -> dict[str, int]:
    stats = executable.get_compiled_memory_stats()
    names = ("generated_code", "argument", "output", "alias", "temp")
    return {name: int(getattr(stats, f"{name}_size_in_bytes")) for name in names}


def _cost(executable: Any) -> dict[str, float]:
    found = executable.cost_analysis() or {}
    return found[0] if isinstance(found, (list, tuple)) else found
