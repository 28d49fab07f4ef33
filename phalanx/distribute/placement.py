"""Which devices the replicas run on, and how arrays lie on them."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import jax
import numpy as np

from phalanx import _jax
from phalanx._conversion import is_key
from phalanx.errors import DeviceError, StrategyError


class _Elsewhere(threading.local):
    """Where a thread sees placements on devices that are not theirs, while others train with them."""

    def __init__(self) -> None:
        self.places: dict[Placement, tuple[tuple[Any, ...], jax.sharding.Mesh]] = {}
        """Devices and mesh of each."""


_elsewhere = _Elsewhere()


class Placement:
    """One device for each replica."""

    def __init__(self, devices: Sequence[Any]) -> None:
        self._use_devices(devices)

    def _use_devices(self, devices: Sequence[Any]) -> None:
        if _jax.would_hang(devices):
            raise DeviceError(
                f"{type(self).__name__}: several CPU devices in each of several processes hang in JAX {jax.__version__}. Start"
                " one process for each device (phalanx launch --devices-per-process 1), or use JAX 0.11 or later."
            )
        self._place = (tuple(devices), _jax.replica_mesh(tuple(devices)))

    def __repr__(self) -> str:
        return f"{type(self).__name__}({_jax.span(self.devices)})"

    @property
    def devices(self) -> tuple[Any, ...]:
        """The replicas' devices, in replica order."""
        return _elsewhere.places.get(self, self._place)[0]

    @property
    def mesh(self) -> jax.sharding.Mesh:
        """JAX's mesh, with the one axis "replica"."""
        return _elsewhere.places.get(self, self._place)[1]

    @contextmanager
    def on_other_devices(self, devices: Sequence[Any]) -> Iterator[None]:
        """In the block this thread sees the replicas on these devices; the variables' arrays stay where they are."""
        before = _elsewhere.places
        _elsewhere.places = {**before, self: (tuple(devices), _jax.replica_mesh(tuple(devices)))}
        try:
            yield
        finally:
            _elsewhere.places = before

    @property
    def num_replicas(self) -> int:
        """How many replicas run the program."""
        return len(self.devices)

    @property
    def local_devices(self) -> list[Any]:
        """Those of the devices that belong to this process."""
        return [d for d in self.devices if d.process_index == jax.process_index()]

    @property
    def platform(self) -> str:
        """ "cpu", "gpu" or "tpu"."""
        return str(self.devices[0].platform)

    @property
    def in_order(self) -> bool:
        """Whether steps must not overlap (several replicas on a CPU)."""
        return self.platform == "cpu" and self.num_replicas > 1

    def sharding(self, *, per_replica: bool) -> jax.sharding.NamedSharding:
        """JAX's sharding of a stored variable."""
        return _jax.split(self.mesh) if per_replica else _jax.replicated(self.mesh)

    def place(self, stored: Any, *, per_replica: bool) -> Any:
        """`stored` on these devices."""
        sharding = self.sharding(per_replica=per_replica)
        if getattr(stored, "sharding", None) == sharding or type(stored) is jax.ShapeDtypeStruct:
            return stored
        if sharding.is_fully_addressable:
            return jax.device_put(stored, sharding)
        # Other processes hold part of it: each fills its own devices from its own copy of the value.
        if is_key(stored):  # which NumPy does not have
            data = self.place(jax.random.key_data(stored), per_replica=per_replica)
            return jax.random.wrap_key_data(data, impl=jax.random.key_impl(stored))
        host = np.asarray(stored)
        return jax.make_array_from_callback(host.shape, sharding, lambda index: host[index])

    def component(self, stored: jax.Array, replica_id: int, per_replica: bool) -> jax.Array:
        """One replica's part of a stored array, on its device.

        Raises:
            StrategyError: when the replica belongs to another process.
        """
        for shard in stored.addressable_shards:
            if shard.device == self.devices[replica_id]:
                return shard.data[0] if per_replica else shard.data
        raise StrategyError(
            f"Replica {replica_id} of {self!r} belongs to another process. strategy.gather and strategy.reduce bring the"
            " values of all replicas to every process; strategy.local_results gives those of this one."
        )

    def _local(self, of_replicas: Sequence[Any]) -> list[Any]:
        """Of one thing per replica, those of this process's replicas."""
        return [part for part, d in zip(of_replicas, self.devices) if d.process_index == jax.process_index()]
