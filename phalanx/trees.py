"""Parameters of other libraries' models, held in variables."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from phalanx._checks import check_flag
from phalanx.variables import Aggregation, Synchronization, Variable, can_merge


def variables_like(
    tree: Any,
    *,
    trainable: bool | None = None,
    synchronization: Synchronization = "auto",
    aggregation: Aggregation = "none",
) -> Any:
    """The pytree with a `Variable` in place of each array, named by its path; other leaves stay as they are.

    ``jax.tree.map(jnp.asarray, variables)`` gives the present values in the same structure, to call the
    library's functions with; ``jax.tree.leaves(variables)`` are the sources of gradients.

    Args:
        tree: parameters, as Equinox's ``eqx.partition`` and Flax's ``nnx.split`` give them, for example.
        trainable: whether tapes watch the variables on their own. Default: those that have a gradient, and none
            with ``"on_read"``.
        synchronization: of each variable, as in `Variable`.
        aggregation: of each variable, as in `Variable`. Those that it cannot merge (integers and random keys have
            no mean, keys no sum) take the first replica's value.

    Raises:
        ArgumentError: for an unknown option.

    Example:
        >>> variables = px.variables_like({"w": jnp.ones(2), "steps": jnp.array(0)})
        >>> variables["w"].name, variables["w"].trainable, variables["steps"].trainable
        ("['w']", True, False)
        >>> statistics = px.variables_like({"mean": jnp.zeros(2), "steps": jnp.array(0)}, aggregation="mean")
        >>> statistics["mean"].aggregation, statistics["steps"].aggregation
        ('mean', 'only_first_replica')
    """
    if trainable is not None:
        check_flag(trainable, "variables_like: trainable")

    def variable(path: Any, leaf: Any) -> Any:
        if not isinstance(leaf, (jax.Array, np.ndarray)):
            return leaf
        watched = synchronization != "on_read" and bool(jnp.issubdtype(leaf.dtype, jnp.inexact))
        return Variable(
            leaf,
            name=jax.tree_util.keystr(path),
            trainable=watched if trainable is None else trainable,
            synchronization=synchronization,
            aggregation=aggregation if can_merge(aggregation, leaf.dtype) else "only_first_replica",
        )

    return jax.tree_util.tree_map_with_path(variable, tree)
