"""`OneDevice`, `Mirrored` and `TPU`: on which devices the program runs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax

from phalanx.distribute.strategy import Strategy
from phalanx.errors import ArgumentError, ArgumentTypeError, DeviceError


def _resolve(device: Any) -> Any:
    if isinstance(device, jax.Device):
        return device
    if isinstance(device, str):
        platform, _, index = device.strip("/").lower().replace("device:", "").partition(":")
        try:
            if int(index or 0) < 0:
                raise IndexError(index)
            return jax.devices(platform)[int(index or 0)]
        except (RuntimeError, ValueError, IndexError) as error:
            known = ", ".join(f"{d.platform}:{d.id}" for d in jax.devices())
            raise DeviceError(f"There is no device {device!r}. JAX sees: {known}.") from error
    raise ArgumentTypeError(f"A device is a jax.Device or a name like 'cpu:0' or 'gpu:1', got {device!r:.80}.")


class OneDevice(Strategy):
    """Everything on one device; the same programs as for many.

    Args:
        device: a ``jax.Device`` or a name like ``"gpu:0"``. Default: JAX's first device.

    Raises:
        DeviceError: when there is no such device.

    Example:
        >>> px.OneDevice().num_replicas
        1
    """

    def __init__(self, device: Any = None) -> None:
        super().__init__([jax.local_devices()[0] if device is None else _resolve(device)])


class Mirrored(Strategy):
    """One replica on each device, with every mirrored variable held by all of them.

    Args:
        devices: ``jax.Device`` objects or names like ``"gpu:1"``. Default: all devices of all processes.

    Raises:
        DeviceError: when a device does not exist.
        ArgumentError: for an empty list, a device given twice, or different platforms.

    Example:
        >>> strategy = px.Mirrored()
        >>> strategy.num_replicas == len(jax.devices())
        True
    """

    def __init__(self, devices: Sequence[Any] | None = None) -> None:
        if isinstance(devices, (str, jax.Device)) or (devices is not None and not isinstance(devices, Sequence)):
            raise ArgumentTypeError(f"Mirrored: devices must be a list of devices, got {devices!r:.80}.")
        resolved = jax.devices() if devices is None else [_resolve(d) for d in devices]
        if not resolved:
            raise ArgumentError("Mirrored: devices is empty. Leave it out to use all devices.")
        if len(set(resolved)) < len(resolved):
            raise ArgumentError(
                f"Mirrored: a device was given twice: {list(devices or ())}. Each replica needs its own."
            )
        if len({d.platform for d in resolved}) > 1:
            raise ArgumentError(f"Mirrored: all devices must be of one platform, got {resolved}.")
        super().__init__(resolved)


class TPU(Mirrored):
    """`Mirrored` on the cores of a TPU slice.

    Args:
        resolver: a cluster resolver; it is asked for nothing yet, since JAX finds a TPU slice by itself.
        single_core: use the first core of each chip only.

    Raises:
        DeviceError: when JAX sees no TPU.

    Example:
        >>> strategy = px.TPU() if jax.default_backend() == "tpu" else px.Mirrored()
        >>> strategy.num_replicas == len(jax.devices())
        True
    """

    def __init__(self, resolver: Any = None, single_core: bool = False) -> None:
        try:
            devices = jax.devices("tpu")
        except RuntimeError as error:
            raise DeviceError(
                "px.TPU found no TPU. Use px.Mirrored() for whatever devices there are. JAX says:"
                f" {str(error).partition(chr(10))[0]}"
            ) from error
        if single_core:
            devices = [d for d in devices if getattr(d, "core_on_chip", 0) == 0]
        super().__init__(devices)
