"""``phalanx info``: what there is on this machine, and what is missing."""

from __future__ import annotations

import argparse
import importlib.metadata
import platform

HELP = "show the devices, the versions and what is missing"

_PACKAGES = {
    "jax": "",
    "jaxlib": "",
    "optax": "",
    "orbax-checkpoint": "pip install 'phalanx[checkpoint]'  for checkpoints",
    "keras": "pip install 'phalanx[keras]'  for Keras models",
    "libtpu": "pip install 'phalanx[preflight]'  to compile for TPUs that are not here",
    "rich": "pip install 'phalanx[preflight]'  for tables in reports",
}
"""What is looked for, and how it is had."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """None."""


def run(options: argparse.Namespace) -> int:
    """Print it."""
    import jax

    import phalanx
    from phalanx.preflight.targets import chip_of

    devices = jax.devices()
    print(f"phalanx {phalanx.__version__} on Python {platform.python_version()}, {platform.platform()}")
    print(f"platform         {devices[0].platform} ({devices[0].device_kind})")
    print(f"processes        {jax.process_count()}")
    print(f"devices          {len(devices)}, {len(jax.local_devices())} of them in this process")
    stats = devices[0].memory_stats() or {}
    limit = stats.get("bytes_limit")
    print(f"memory           {'not known' if limit is None else f'{limit / 2**30:.1f} GiB for a device'}")
    coords = [d.coords for d in devices if hasattr(d, "coords")]
    if coords:
        shape = "x".join(str(max(c[i] for c in coords) + 1) for i in range(len(coords[0])))
        chip = chip_of(devices[0])
        print(f"topology         {chip.name if chip else devices[0].device_kind}:{shape}")
    else:
        print("topology         none")
    missing = []
    for package, remedy in _PACKAGES.items():
        version = _version(package)
        print(f"{package:<16} {version or 'not installed'}")
        if version is None:
            missing.append(remedy)
    if missing:
        print("missing:")
        for remedy in dict.fromkeys(missing):
            print(f"  {remedy}")
    return 0


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None
