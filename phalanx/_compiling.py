"""Compiling a program before its first step: it works, or nothing has happened yet."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from phalanx.errors import CompilationError

logger = logging.getLogger("phalanx")


def compile_first(name: str, jitted: Any, inputs: Sequence[Any], arguments: Sequence[Any]) -> None:
    """Compile for these inputs, among them some arguments; the call that follows finds the program ready.

    Raises:
        CompilationError: with the compiler's message.
    """
    logger.info("%s: compiling", name)
    start = time.perf_counter()
    try:
        jitted.lower(*inputs).compile()
    except (jax.errors.JaxRuntimeError, NotImplementedError) as error:
        raise failed(name, str(error)) from error
    shapes = ", ".join(str(jnp.shape(x)) for x in arguments) or "none"
    logger.info("%s: compiled in %.2f s; arguments of shape %s", name, time.perf_counter() - start, shapes)


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
