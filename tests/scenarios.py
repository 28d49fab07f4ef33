"""For programs that are one of two processes, with a replica each: ``PROGRAM PROCESS PORT ...`` prints what its scenarios gave.

`cluster.two_processes` starts them.
"""

from __future__ import annotations

import json
import logging
import os
import sys
import time
import traceback

import jax

ME, PORT = int(sys.argv[1]), sys.argv[2]
_SCENARIOS = {}


def scenario(fn):
    """What it gives for a strategy of both processes is printed, under its name."""
    _SCENARIOS[fn.__name__] = fn
    return fn


def outcome(fn, *args, **kwargs):
    """What ``fn`` gives, or the error that it ends in, and whether that took long."""
    start = time.monotonic()
    try:
        result = fn(*args, **kwargs)
    except Exception as error:
        result = f"{type(error).__name__}: {error}"
    return {"result": result, "quick": time.monotonic() - start < 20}


def _run():
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(f"127.0.0.1:{PORT}", 2, ME, initialization_timeout=30)
    import phalanx as px

    strategy = px.Mirrored()
    results = {name: fn(strategy) for name, fn in _SCENARIOS.items()}
    sys.__stdout__.write(json.dumps(results) + "\n")
    sys.__stdout__.flush()
    jax.distributed.shutdown()


def main():
    """Run them all, in their order."""
    logging.getLogger("jax").setLevel(logging.ERROR)
    logging.getLogger("phalanx").setLevel(logging.CRITICAL)
    try:
        _run()
    except BaseException:
        traceback.print_exc()
    else:
        os._exit(0)
    os._exit(1)  # JAX's own way out would wait for the other process
