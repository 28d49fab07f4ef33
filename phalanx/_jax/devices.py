"""Meshes and shardings: which device holds what."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

REPLICA_AXIS = "replica"
"""Name of the one mesh axis that Phalanx uses."""


@dataclass(frozen=True)
class SliceDevice:
    """A device of a slice that is not here: a place in a mesh, on which nothing can be put."""

    id: int
    platform: str
    device_kind: str
    slice_name: str
    process_index: int = -1
    """No process's, so that nobody takes it for its own."""


def replica_mesh(devices: Sequence[Any]) -> Any:
    """A one-axis mesh over the devices, in their order."""
    if isinstance(devices[0], SliceDevice):
        return AbstractMesh((len(devices),), (REPLICA_AXIS,), axis_types=(AxisType.Auto,))
    return Mesh(np.array(devices), (REPLICA_AXIS,), axis_types=(AxisType.Auto,))


@functools.cache  # a sharding works out once what follows from it
def replicated(mesh: Any) -> NamedSharding:
    """Every device holds the whole array."""
    return NamedSharding(mesh, PartitionSpec())


@functools.cache
def split(mesh: Any) -> NamedSharding:
    """Axis 0 is split over the replicas."""
    return NamedSharding(mesh, PartitionSpec(REPLICA_AXIS))


def span(devices: Sequence[Any]) -> str:
    """Short names of devices: 'cpu:0-3', 'gpu:1', 'cpu:2,0'."""
    ids = [d.id for d in devices]
    in_a_row = ids == list(range(ids[0], ids[0] + len(ids))) and len(ids) > 1
    return f"{devices[0].platform}:" + (f"{ids[0]}-{ids[-1]}" if in_a_row else ",".join(map(str, ids)))


def would_hang(devices: Sequence[Any]) -> bool:
    """Whether collectives over these devices wait for each other for ever: a fault of jax 0.10 on CPUs."""
    processes = [d.process_index for d in devices]
    return devices[0].platform == "cpu" and 1 < len(set(processes)) < len(processes) and jax.__version_info__ < (0, 11)


def backend_started() -> bool:
    """True once JAX has opened its devices; settings about them come too late then."""
    from jax._src import xla_bridge

    return bool(xla_bridge.backends_are_initialized())
