"""What tests share that compile for TPU slices."""

from __future__ import annotations

import importlib.metadata
import re

import pytest


def _why_not() -> str:
    """Why programs for TPUs cannot be compiled here; empty where they can."""
    wanted = [r for r in importlib.metadata.requires("jax") or () if r.startswith("libtpu")]
    pinned = re.search(r"==([\d.]+)", wanted[0]) if wanted else None
    asked = (
        f"libtpu {pinned[1].rstrip('.')} fits jax {importlib.metadata.version('jax')}"
        if pinned
        else "no libtpu is known to fit"
    )
    try:
        found = importlib.metadata.version("libtpu")
    except importlib.metadata.PackageNotFoundError:
        return f"{asked}, and none is installed"
    return "" if pinned and found.startswith(pinned[1]) else f"{asked}, and {found} is installed"


needs_libtpu = pytest.mark.skipif(bool(_why_not()), reason=_why_not())
