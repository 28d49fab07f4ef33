"""The random numbers that Python and NumPy draw where no generator is named."""

from __future__ import annotations

import random
from typing import Any

import numpy as np


class GlobalRandom:
    """Kept in a checkpoint, so that shuffling and augmentation go on as if the run had never stopped."""

    def state_dict(self) -> dict[str, Any]:
        """Both states, as plain values."""
        return {"python": random.getstate(), "numpy": np.random.get_state(legacy=False)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from states that were taken before."""
        random.setstate(state["python"])
        np.random.set_state(state["numpy"])
