"""Gradients summed over several batches before the optimizer sees them, as if they were one."""

from __future__ import annotations

from typing import Any, Literal

import jax.numpy as jnp

from phalanx.keras.variables import counterpart
from phalanx.variables import Variable

Accumulate = Literal["no", "add", "apply"]
"""What becomes of a batch's gradients: applied at once; added to a sum; or added, and the sum applied."""


class Accumulator:
    """Each replica's sum of gradients times rows, for each optimizer and variable."""

    def __init__(self) -> None:
        self._sums: dict[tuple[int, Variable], Variable] = {}
        self._rows: dict[int, Variable] = {}

    def start_anew(self) -> None:
        """Forget the sums that an update left which was not finished."""
        if any(float(rows) for rows in self._rows.values()):
            for variable in (*self._sums.values(), *self._rows.values()):
                variable.assign(jnp.zeros(variable.shape, variable.dtype))

    def gradients(self, optimizer: Any, grads: list[Any], variables: Any, rows: int, is_last: bool) -> list[Any] | None:
        """The mean gradients over the rows of all batches; None while more batches follow."""
        total = self._rows_of(optimizer).value + rows
        weighted = [None if g is None else self._sum_of(optimizer, v, g) + g * rows for g, v in zip(grads, variables)]
        self._rows_of(optimizer).assign(0 * total if is_last else total)
        for value, v in zip(weighted, variables):
            if value is not None:
                self._sum_of(optimizer, v, value).assign(jnp.zeros_like(value) if is_last else value)
        return [None if value is None else value / total for value in weighted] if is_last else None

    def _rows_of(self, optimizer: Any) -> Variable:
        if id(optimizer) not in self._rows:
            self._rows[id(optimizer)] = Variable(lambda: 0.0, name="accumulated_rows", trainable=False)
        return self._rows[id(optimizer)]

    def _sum_of(self, optimizer: Any, variable: Any, like: Any) -> Variable:
        key = id(optimizer), counterpart(variable)
        if key not in self._sums:
            self._sums[key] = Variable(
                lambda: jnp.zeros(like.shape, like.dtype),
                name=f"{key[1].name}/accumulated_gradient",
                synchronization="on_read",
                aggregation="sum",
            )
        return self._sums[key]
