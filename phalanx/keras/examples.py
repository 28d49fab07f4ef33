"""A batch of the shapes that a model takes, without values."""

from __future__ import annotations

from typing import Any

import jax

from phalanx.errors import ArgumentError
from phalanx.keras._keras import keras


def example_batch(model: Any, x: Any, y: Any, sample_weight: Any, rows: int) -> Any:
    """x, y and weights as given, or as the model says that it takes them."""
    inputs_known = x is not None
    if x is None:
        x = _inputs(model, rows)
    if y is None and not inputs_known:
        y = _targets(model, rows)
    return keras.utils.pack_x_y_sample_weight(x, y, sample_weight)


def _inputs(model: Any, rows: int) -> Any:
    structure = _declared(model, "inputs")
    if structure is None:
        raise ArgumentError(
            f"preflight: model {model.name!r} does not say what it takes. Pass x and y, arrays or"
            " jax.ShapeDtypeStruct(shape, dtype), with the rows of all replicas."
        )
    made = jax.tree.map(lambda t: _like(model, t, rows), structure, is_leaf=_is_tensor)
    return made[0] if isinstance(made, (list, tuple)) and len(made) == 1 else made


def _targets(model: Any, rows: int) -> Any:
    outputs = _declared(model, "outputs")
    loss = getattr(model, "loss", None)
    if outputs is None or loss is None:
        return None
    sparse = "sparse" in (loss if isinstance(loss, str) else type(loss).__name__).lower()

    def target(output: Any) -> jax.ShapeDtypeStruct:
        like = _like(model, output, rows)
        return jax.ShapeDtypeStruct(like.shape[:-1], "int32") if sparse else jax.ShapeDtypeStruct(like.shape, "float32")

    made = jax.tree.map(target, outputs, is_leaf=_is_tensor)
    return made[0] if isinstance(made, (list, tuple)) and len(made) == 1 else made


def _declared(model: Any, which: str) -> Any:
    structure = getattr(model, f"_{which}_struct", None)
    return structure if structure is not None else getattr(model, which, None) or None


def _is_tensor(value: Any) -> bool:
    return isinstance(value, keras.KerasTensor)


def _like(model: Any, tensor: Any, rows: int) -> jax.ShapeDtypeStruct:
    if any(size is None for size in tensor.shape[1:]):
        raise ArgumentError(
            f"preflight: model {model.name!r} takes arrays of shape {tuple(tensor.shape)}, with open sizes. Pass x and y,"
            " arrays or jax.ShapeDtypeStruct(shape, dtype), with the rows of all replicas."
        )
    return jax.ShapeDtypeStruct((rows, *tensor.shape[1:]), str(tensor.dtype))
