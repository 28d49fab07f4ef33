"""Compiling a program before its first step: it works, or nothing has happened yet."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from phalanx.errors import CompilationError

logger = logging.getLogger("phalanx")

_SHOWN = 8
"""Shapes that are named."""


def compile_first(name: str, jitted: Any, inputs: Sequence[Any], args: Sequence[Any]) -> None:
    """Compile for these inputs, of which `args` are the call's own; the call that follows finds the program ready.

    Raises:
        CompilationError: with the compiler's message.
    """
    logger.info("%s: compiling", name)
    start = time.perf_counter()
    try:
        jitted.lower(*inputs).compile()
    except (jax.errors.JaxRuntimeError, NotImplementedError) as error:
        raise failed(name, str(error)) from error
    shapes = ", ".join(str(np.shape(x)) for x in args[:_SHOWN]) + (", ..." if len(args) > _SHOWN else "")
    of = f" for arrays of shape {shapes}" if args else ""
    logger.info("%s compiled in %.1f s%s", name, time.perf_counter() - start, of)


def failed(name: str, message: str) -> CompilationError:
    """The error for a program that the compiler refuses."""
    short = message.partition("\n")[0]
    hint = ""
    if "RESOURCE_EXHAUSTED" in message or "out of memory" in message.lower():
        hint = (
            " It needs more memory than a device has: use smaller batches, a narrower dtype, or more replicas; px.preflight"
            " says what takes the memory and which batch fits."
        )
    return CompilationError(
        f"{name} does not compile, and has not run: all variables are as they were. The compiler says: {short}{hint}",
        message,
    )
