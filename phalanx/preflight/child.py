"""What runs in the process in which a program is compiled.

A compiler that hangs or crashes takes this process down and no other.
"""

from __future__ import annotations

import pickle
import time
from pathlib import Path
from typing import Any

from phalanx import _jax
from phalanx.preflight.outcome import Outcome, Request


def main(request: str, answer: str) -> None:
    """Compile what the first file holds, and write to the second how it went."""
    asked: Request = pickle.loads(Path(request).read_bytes())
    Path(answer).write_bytes(pickle.dumps(compiled(asked)))


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
