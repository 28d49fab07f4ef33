"""Parameters of other libraries' models, held in variables."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from phalanx._checks import check_flag
from phalanx.variables import Variable


def variables_like(tree: Any, *, trainable: bool | None = None) -> Any:
    """The pytree with a `Variable` in place of each array, named by its path; other leaves stay as they are.

    ``jax.tree.map(jnp.asarray, variables)`` gives the present values in the same structure, to call the
    library's functions with; ``jax.tree.leaves(variables)`` are the sources of gradients.

    Args:
        tree: parameters, as Equinox's ``eqx.partition`` and Flax's ``nnx.split`` give them, for example.
        trainable: whether tapes watch the variables on their own. Default: those that have a gradient.

    Example:
        >>> variables = px.variables_like({"w": jnp.ones(2), "steps": jnp.array(0)})
        >>> variables["w"].name, variables["w"].trainable, variables["steps"].trainable
        ("['w']", True, False)
    """
    if trainable is not None:
        check_flag(trainable, "variables_like: trainable")

    def variable(path: Any, leaf: Any) -> Any:
        if not isinstance(leaf, (jax.Array, np.ndarray)):
            return leaf
        watched = bool(jnp.issubdtype(leaf.dtype, jnp.inexact)) if trainable is None else trainable
        return Variable(leaf, name=jax.tree_util.keystr(path), trainable=watched)

    return jax.tree_util.tree_map_with_path(variable, tree)
