"""Compiling in a process of its own, for a limited time."""

from __future__ import annotations

import contextlib
import os
import pickle
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import phalanx
from phalanx import _jax
from phalanx.errors import CompilationError
from phalanx.preflight.child import compiled
from phalanx.preflight.outcome import Outcome, Request
from phalanx.preflight.targets import Target

Effort = Literal["full", "quick"]
"""How much the compiler optimizes: as in training, or little, which takes a twentieth of the time with convolutions."""

_PROGRAM = "import sys; from phalanx.preflight.child import main; main(*sys.argv[1:])"

_TAIL = 2000
"""Characters of what a process printed before it died."""


def check_available(target: Target) -> None:
    """Raise when there is no compiler for the target.

    Raises:
        CompilationError: it says what to install.
    """
    if target.platform == "tpu" and not target.present and not _jax.has_libtpu():
        raise CompilationError(
            f"Compiling for {target.label} needs libtpu, the compiler for TPUs, which works on any Linux machine and is not"
            " installed here: pip install 'phalanx[preflight]'."
        )


@dataclass(frozen=True)
class Settings:
    """How to compile."""

    timeout: float = 900.0
    """Seconds after which the compiler is stopped."""
    effort: Effort = "full"


def run(lowered: _jax.Lowered, target: Target, settings: Settings) -> Outcome:
    """Compile for the target.

    Raises:
        CompilationError: when there is no compiler for it.
    """
    check_available(target)
    quick = settings.effort == "quick"
    if target.present:  # they are this process's, and another could not open them
        return compiled(Request(lowered, devices=tuple(target.present), quick=quick))
    if target.platform == "tpu":
        request = Request(lowered, target.name, target.compiler_options, quick=quick)
    else:
        request = Request(lowered, quick=quick)
    return _in_child(request, target, settings.timeout)


def _in_child(request: Request, target: Target, timeout: float) -> Outcome:
    with tempfile.TemporaryDirectory(prefix="phalanx-preflight-") as folder:
        asked, answer, printed = (Path(folder, name) for name in ("request", "answer", "printed"))
        asked.write_bytes(pickle.dumps(request))
        start = time.perf_counter()
        with printed.open("wb") as output:
            child = subprocess.Popen(
                [sys.executable, "-P", "-c", _PROGRAM, str(asked), str(answer)],
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=_environment(target, folder),
                start_new_session=True,
            )
            try:
                code = child.wait(timeout)
            except subprocess.TimeoutExpired:
                return Outcome(
                    seconds=timeout,
                    message=f"The compiler did not finish within {timeout:g} s and was stopped. Give it more: timeout=...",
                )
            finally:
                _end(child)
        if code == 0 and answer.exists():
            outcome: Outcome = pickle.loads(answer.read_bytes())
            return outcome
        said = printed.read_text(errors="replace")[-_TAIL:].strip()
        return Outcome(seconds=time.perf_counter() - start, message=_crash(code, said))


def _end(child: subprocess.Popen[bytes]) -> None:
    if child.poll() is None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child.pid, signal.SIGKILL)
        child.wait()
    assert child.stdin is not None
    child.stdin.close()


def _crash(code: int, said: str) -> str:
    memory = " This machine may have too little memory for it." if code == -signal.SIGKILL else ""
    printed = f"It printed:\n{said}" if said else "It printed nothing."
    return f"The compiler crashed ({_cause(code)}).{memory} {printed}"


def _cause(code: int) -> str:
    if code < 0:
        with contextlib.suppress(ValueError):
            return signal.Signals(-code).name
    return f"exit code {code}"


def _environment(target: Target, folder: str) -> dict[str, str]:
    """The child finds this package, opens no accelerator, and libtpu asks nobody where it is."""
    here = str(Path(phalanx.__file__).parents[1])
    paths = [here, *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
    settings = {
        "PYTHONPATH": os.pathsep.join(paths),
        "JAX_PLATFORMS": "cpu",
        "TF_CPP_MIN_LOG_LEVEL": "3",
        "JAX_COMPILATION_CACHE_DIR": "",
    }
    if target.chip is not None:
        settings |= {
            "TPU_SKIP_MDS_QUERY": "1",
            "TPU_ACCELERATOR_TYPE": target.accelerator_type,
            "TPU_WORKER_HOSTNAMES": "localhost",
            "TPU_WORKER_ID": "0",
            "TPU_LOG_DIR": "disabled",
            "TPU_STDERR_LOG_LEVEL": "3",
            "TPU_MIN_LOG_LEVEL": "3",
            "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
        }
    else:
        settings["JAX_NUM_CPU_DEVICES"] = str(target.num_devices)
    inherited = {k: v for k, v in os.environ.items() if k != "XLA_FLAGS" or target.platform == "tpu"}
    return inherited | settings
