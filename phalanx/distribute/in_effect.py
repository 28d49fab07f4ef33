"""Which strategy and which replica are in effect where the program is now."""

from __future__ import annotations

import functools

from phalanx import _jax, state
from phalanx.distribute.mirrored import OneDevice
from phalanx.distribute.replica import ReplicaContext, ReplicaRules
from phalanx.distribute.strategy import Strategy
from phalanx.variables import Variable


class _Default(OneDevice):
    """In effect outside every scope: one device, nothing moved."""

    def _announce(self) -> None:
        pass

    def __repr__(self) -> str:
        return f"the default strategy ({_jax.span(self.devices)})"

    def adopt(self, variable: Variable) -> None:
        pass


@functools.cache
def _default_strategy() -> Strategy:
    return _Default()


def get_strategy() -> Strategy:
    """The strategy in effect: that of the scope or replica we are in, else a default with one device.

    Example:
        >>> strategy = px.Mirrored()
        >>> with strategy.scope():
        ...     px.get_strategy() is strategy
        True
    """
    return state.context().strategy or _default_strategy()  # type: ignore[no-any-return]


def get_replica_context() -> ReplicaContext | None:
    """The replica context, or None in cross-replica context (in a scope, outside `run`).

    Outside every scope it is that of a default strategy with one replica.

    Example:
        >>> px.get_replica_context().num_replicas
        1
    """
    context = state.context()
    if isinstance(context, ReplicaRules):
        return context.replica_context
    return None if context.in_cross_replica else ReplicaContext(_default_strategy())


def in_cross_replica_context() -> bool:
    """True in a scope and in merge functions: where all replicas are seen at once.

    Example:
        >>> px.in_cross_replica_context()
        False
    """
    return state.context().in_cross_replica
