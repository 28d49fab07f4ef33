"""One seed for the global random numbers of all processes, so that they make the same initial values."""

from __future__ import annotations

import hashlib
import logging
import random
import secrets

import jax
import numpy as np

from phalanx import _jax
from phalanx.cluster.agreement import agree

logger = logging.getLogger("phalanx")


def settle_seed(seed: int | None) -> None:
    """Seed Python's and NumPy's global generators: with `seed`, or where processes differ, with process 0's choice."""
    if seed is None:
        if not _several():
            return
        said = agree({"state": _state(), "seed": secrets.randbelow(2**32)}, what="px.connect")
        if len({theirs["state"] for theirs in said}) == 1:
            return  # the program has seeded them itself
        seed = int(said[0]["seed"])
        if jax.process_index() == 0:
            logger.info(
                "seed %s for Python's and NumPy's random numbers; px.connect(seed=%s) repeats the run", seed, seed
            )
    random.seed(seed)
    np.random.seed(seed)


def _several() -> bool:
    return _jax.connected() and jax.process_count() > 1


def _state() -> str:
    states = repr((random.getstate(), np.random.get_state(legacy=True)[1].tolist()))  # type: ignore[index]
    return hashlib.sha256(states.encode()).hexdigest()
