"""`PerReplica`: one value for each replica."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NoReturn

import jax
import numpy as np

from phalanx import _jax, state
from phalanx.errors import ArgumentTypeError, StrategyError


@jax.tree_util.register_pytree_node_class
class PerReplica:
    """Values of the same shape and dtype, one for each replica, each on its replica's device.

    Made by `strategy.run` for results that may differ between replicas, and by the elements of a
    distributed dataset. Passed to `strategy.run` each replica gets its own part. It is no array: reduce it
    (`strategy.reduce`), gather it (`strategy.gather`), or look at `values`.

    Example:
        >>> strategy = px.OneDevice()
        >>> p = strategy.distribute_values_from_function(lambda context: jnp.ones(2) * context.replica_id)
        >>> p
        PerReplica(x1, shape=(2,), dtype=float32, values=[[0. 0.]])
        >>> len(p), p.values[0].shape
        (1, (2,))
    """

    is_per_replica = True

    def __init__(self, stacked: Any, strategy: Any) -> None:
        self.stacked = stacked
        """All parts as one array, replica axis first, split over the devices."""
        self.strategy = strategy

    @property
    def values(self) -> tuple[jax.Array, ...]:
        """The parts in replica order.

        Raises:
            StrategyError: in a replica that was not given it as an argument.
        """
        self.strategy.check_owner(self, "values")
        stacked = self.stacked
        if _jax.in_replica_trace():
            if state.context().in_replica:
                raise StrategyError(
                    f"{self!r:.120}: its parts lie on different devices and cannot be used in a replica. Pass it to"
                    " strategy.run as an argument; each replica then gets its own part."
                )
            stacked = _jax.all_gather(self.here[0], 0, stacked=True)
        if _jax.is_tracer(stacked):
            return tuple(stacked[i] for i in range(len(self)))
        stacked = self.strategy.place(stacked, per_replica=True)
        return tuple(self.strategy.component(stacked, i, True) for i in range(len(self)))

    @property
    def here(self) -> Any:
        """The parts as variables are stored in this place: all of them, or in a merge function this replica's own."""
        stacked = self.stacked
        if not _jax.in_replica_trace():
            return stacked
        if stacked.shape[0] > 1:  # made outside
            stacked = jax.lax.dynamic_index_in_dim(stacked, jax.lax.axis_index(_jax.REPLICA_AXIS))
        return _jax.lift(stacked)

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of each part."""
        return tuple(self.stacked.shape[1:])

    @property
    def dtype(self) -> np.dtype[Any]:
        """Dtype of each part."""
        return self.stacked.dtype  # type: ignore[no-any-return]

    def __len__(self) -> int:
        return int(self.strategy.num_replicas)

    def __iter__(self) -> Iterator[jax.Array]:
        return iter(self.values)

    def __repr__(self) -> str:
        if not hasattr(self.stacked, "dtype"):  # stands for an array, where JAX maps trees and messages are written
            return f"PerReplica({self.stacked!r})"
        kind = f"PerReplica(x{len(self)}, shape={self.shape}, dtype={self.dtype}"
        if _jax.is_tracer(self.stacked) or not getattr(self.stacked, "is_fully_addressable", True):
            return f"{kind})"
        with np.printoptions(threshold=6, edgeitems=2, precision=4):
            return f"{kind}, values={' '.join(str(np.asarray(self.stacked)).split())})"

    def _refuse(self, *_: Any) -> NoReturn:
        raise ArgumentTypeError(
            f"{self!r:.120} holds one value per replica and is no array. Use strategy.reduce('sum' or 'mean', value),"
            " strategy.gather(value, axis), value.values, or work on it inside strategy.run."
        )

    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __truediv__ = __rtruediv__ = _refuse
    __matmul__ = __rmatmul__ = __pow__ = __neg__ = __float__ = __int__ = __bool__ = __array__ = __jax_array__ = _refuse
    __getitem__ = __lt__ = __le__ = __gt__ = __ge__ = _refuse

    def __format__(self, spec: str) -> str:
        return self._refuse() if spec else repr(self)

    def __getattr__(self, name: str) -> Any:
        if not name.startswith("_") and hasattr(jax.Array, name):
            self._refuse()
        raise AttributeError(f"'PerReplica' object has no attribute {name!r}")

    def tree_flatten(self) -> tuple[tuple[Any], Any]:
        """For JAX: one leaf, the stacked array."""
        return (self.stacked,), self.strategy

    @classmethod
    def tree_unflatten(cls, strategy: Any, children: tuple[Any]) -> PerReplica:
        """For JAX."""
        return cls(children[0], strategy)


def is_per_replica(value: Any) -> bool:
    """For `jax.tree` functions: stop at PerReplica values."""
    return isinstance(value, PerReplica)
