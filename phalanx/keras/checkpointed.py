"""What of Keras's objects is kept in a checkpoint, under names that another run of the program has too.

Keras numbers what was not given a name as it comes: the second model of a program has a ``dense_7`` where the
first had a ``dense_3``. Here such layers are numbered within their model.
"""

from __future__ import annotations

import re
from collections import Counter
from typing import Any

from phalanx.checkpoint.objects import Parts, not_built, register
from phalanx.keras._keras import automatic_name, keras
from phalanx.optim import Optimizer

_SEEDS = re.compile(r"^(seed_generator)_\d+$")


def _of_model(model: Any, path: str) -> Parts:
    if not is_built(model):
        raise not_built(path, "Call the model on a batch, or model.build(input_shape),")
    optimizer = getattr(model, "optimizer", None)
    if optimizer is not None and not optimizer.built:
        optimizer.build(model.trainable_variables)
    own = {"optimizer": optimizer, **vars(model)}
    optimizers = [
        (name, own[name]) for name in sorted(own) if isinstance(own[name], (keras.optimizers.Optimizer, Optimizer))
    ]
    return [*_by_name(_names(model), model.variables), *optimizers]


def is_built(model: Any) -> bool:
    """Whether the variables of a model are there; one with steps of its own may use its layers without being called."""
    inner = list(model._flatten_layers(include_self=False))
    return bool(model.built or (inner and all(layer.built for layer in inner)))


def _of_layer(layer: Any, path: str) -> Parts:
    if not layer.built:
        raise not_built(path, "Call the layer on a batch, or layer.build(input_shape),")
    return _by_name(_names(layer), layer.variables)


def _of_optimizer(optimizer: Any, path: str) -> Parts:
    if not optimizer.built:
        raise not_built(path, "Call optimizer.build(model.trainable_variables)")
    return [(str(i), variable) for i, variable in enumerate(optimizer.variables)]


def _names(layer: Any) -> dict[str, str]:
    """What each layer that Keras named is called here."""
    counts: Counter[str] = Counter()
    names: dict[str, str] = {}
    for inner in layer._flatten_layers():
        kind = automatic_name(type(inner).__name__)
        if re.fullmatch(rf"{re.escape(kind)}(_\d+)?", inner.name):
            names[inner.name] = kind if not counts[kind] else f"{kind}_{counts[kind]}"
            counts[kind] += 1
    return names


def _by_name(names: dict[str, str], variables: list[Any]) -> list[tuple[str, Any]]:
    """Variables under their paths; several with the same one are counted."""
    counts: Counter[str] = Counter()
    found = []
    for variable in variables:
        path = "/".join(names.get(part, _SEEDS.sub(r"\1", part)) for part in variable.path.split("/"))
        counts[path] += 1
        found.append((path if counts[path] == 1 else f"{path}:{counts[path]}", variable))
    return found


def install() -> None:
    """Let checkpoints take Keras's objects; the first class that fits counts."""
    register(keras.Model, _of_model)
    register(keras.Layer, _of_layer)
    register(keras.optimizers.Optimizer, _of_optimizer)
    register(keras.random.SeedGenerator, lambda seeds, path: [("state", seeds.state)])
    register(keras.metrics.Metric, lambda metric, path: [(str(i), v) for i, v in enumerate(metric.variables)])
