"""Virtual CPU devices: many replicas on a machine with one CPU."""

from __future__ import annotations

import jax

from phalanx import _jax
from phalanx.errors import ArgumentError, DeviceError


def cpu_devices(n: int) -> None:
    """Make the CPU look like `n` devices; call it before anything else uses JAX.

    Args:
        n: how many, at least 1.

    Raises:
        ArgumentError: for anything but a positive int.
        DeviceError: when JAX has started with another number of devices already.

    Example:
        >>> px.cpu_devices(len(jax.devices("cpu")))  # as many as there are: nothing to do
    """
    if isinstance(n, bool) or not isinstance(n, int) or n < 1:
        raise ArgumentError(f"cpu_devices takes a positive int, got {n!r}.")
    if _jax.backend_started():
        found = len(jax.devices("cpu"))
        if found != n:
            raise DeviceError(
                f"px.cpu_devices({n}) came too late: JAX has started with {found} CPU device{'s' * (found > 1)}. Call it"
                " before anything that makes an array or asks for devices."
            )
        return
    jax.config.update("jax_num_cpu_devices", n)
