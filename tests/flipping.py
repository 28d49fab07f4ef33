"""Breaks components of mirrored variables, as faulty devices would."""

from __future__ import annotations

import jax
import numpy as np


def flip(variable, replica, index=(), bit=0):
    """Flip one bit of one component: a global array made of arrays of single devices is not checked by anybody."""
    parts = []
    for i, device in enumerate(variable.strategy.devices):
        part = np.array(variable.strategy.component(variable._stored, i, False))
        if i == replica:
            if part.dtype == np.bool_:
                part[index] = not part[index]
            else:
                raw = part.reshape(-1).view(np.uint8)
                position = int(np.ravel_multi_index(index, part.shape)) if index else 0
                raw[position * part.dtype.itemsize + bit // 8] ^= 1 << bit % 8
        parts.append(jax.device_put(part, device))
    sharding = variable.strategy.sharding(per_replica=False)
    variable._replace(jax.make_array_from_single_device_arrays(variable.shape, sharding, parts))
