"""Group "variables": creation, reads, assignment in both contexts, per-replica variables, dtypes, shapes."""

from __future__ import annotations

import numpy as np
from goldens.kit import attempt, components, differs, each, per_replica, replay, runners

import phalanx as px


def _described(v: px.Variable) -> dict:
    return {
        "value": v.value,
        "dtype": v.dtype,
        "shape": list(v.shape),
        "trainable": v.trainable,
        "synchronization": "ON_READ" if v.per_replica else "ON_WRITE",
        "aggregation": v.aggregation.upper(),
        "components": components(v),
    }


@replay("var_create_from_values")
def test_variable_created_from_python_values(golden, strategy):
    with strategy.scope():
        return {name: _described(px.Variable(value, name=name)) for name, value in golden.inputs.items()}


@replay("var_create_callable_initializer")
def test_callable_initial_value_is_called_once_for_all_replicas(golden, strategy):
    calls = []

    def initial():
        calls.append(1)
        return [golden.inputs["base"] + len(calls)] * 2

    with strategy.scope():
        v = px.Variable(initial)
    return {"calls": len(calls), **_described(v)}
