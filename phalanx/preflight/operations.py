"""What a step computes, read from its jaxpr: matrix arithmetic and large intermediate values, each with its line."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from phalanx import _jax
from phalanx._conversion import is_key

CALLBACKS = frozenset({"pure_callback", "io_callback", "debug_callback", "debug_print", "outside_call"})


@dataclass(frozen=True)
class Matmul:
    """One matrix product or convolution, on one device."""

    flops: float
    """In one step."""
    dtype: str
    sizes: tuple[int, int, int] | None
    """Rows, inner dimension and columns; None for convolutions."""
    line: str
    scope: str


@dataclass(frozen=True)
class Value:
    """An intermediate value, on one device."""

    bytes: int
    description: str
    line: str
    scope: str


@dataclass(frozen=True)
class Operations:
    """Of one device."""

    matmuls: list[Matmul]
    callbacks: list[tuple[str, str]]
    """Name of the operation, and line."""
    wide: list[tuple[str, str]]
    """Dtypes of 64-bit floats, and line."""
    values: list[Value]
    """The largest, first."""

    @property
    def flops(self) -> float:
        """Of matrix products and convolutions, in one step."""
        return sum(m.flops for m in self.matmuls)


_LARGEST = 50


def size_of(shape: Sequence[int], dtype: Any) -> int:
    """In bytes, without padding; as many numbers as fit share a byte."""
    if is_key(dtype):
        data = jax.eval_shape(jax.random.key_data, jax.ShapeDtypeStruct(tuple(shape), dtype))
        return math.prod(data.shape) * data.dtype.itemsize
    dtype = np.dtype(dtype)
    bits = 8 * dtype.itemsize
    if bits == 8 and dtype != np.bool_:
        bits = (jnp.iinfo if jnp.issubdtype(dtype, jnp.integer) else jnp.finfo)(dtype).bits
    return -(-math.prod(shape) * bits // 8)


def of(jaxpr: Any, num_devices: int) -> Operations:
    """Everything there is to say about a program's operations.

    What XLA is left to split over the devices is taken to be split evenly.
    """
    matmuls: list[Matmul] = []
    callbacks: dict[tuple[str, str], None] = {}
    wide: dict[tuple[str, str], None] = {}
    values: list[Value] = []
    for place in _walk(getattr(jaxpr, "jaxpr", jaxpr), _Place((), 1, num_devices)):
        equation = place.equation
        name = equation.primitive.name
        if name in ("dot_general", "conv_general_dilated"):
            matmuls.append(_matmul(place))
        if name in CALLBACKS:
            callbacks[name, place.line] = None
        for out in equation.outvars:
            dtype = getattr(out.aval, "dtype", None)
            if dtype is None or is_key(dtype):
                continue
            if dtype in (np.float64, np.complex128):
                wide[str(dtype), place.line] = None
            if not _jax.inner_jaxprs(equation):
                _keep_largest(values, out.aval, place)
    return Operations(matmuls, list(callbacks), list(wide), values)


@dataclass(frozen=True)
class _Place:
    """An operation, and the ones that it is part of, outermost first."""

    chain: tuple[Any, ...]
    times: int
    """How often it runs in one step."""
    share: int
    """Over how many devices it is split."""

    @property
    def equation(self) -> Any:
        return self.chain[-1]

    @property
    def line(self) -> str:
        """The user's, of the innermost that knows one: what is kept from trace to trace does not."""
        return next(filter(None, map(_jax.users_line_of, reversed(self.chain))), "")

    @property
    def scope(self) -> str:
        """All named scopes around it."""
        return "/".join(filter(None, map(_jax.scope_of, self.chain)))


def _keep_largest(values: list[Value], aval: Any, place: _Place) -> None:
    size = size_of([d for d in aval.shape if isinstance(d, int)], aval.dtype) // place.share
    if len(values) == _LARGEST and size <= values[-1].bytes:
        return
    shape = ",".join(map(str, aval.shape))
    values.append(Value(size, f"{place.equation.primitive.name} {aval.dtype}[{shape}]", place.line, place.scope))
    values.sort(key=lambda v: -v.bytes)
    del values[_LARGEST:]


def _walk(jaxpr: Any, around: _Place) -> Iterator[_Place]:
    for equation in jaxpr.eqns:
        name = equation.primitive.name
        place = _Place((*around.chain, equation), around.times, around.share)
        yield place
        times = around.times * (int(equation.params["length"]) if name == "scan" else 1)
        inside = _Place(place.chain, times, 1 if name == "shard_map" else around.share)
        for inner in _jax.inner_jaxprs(equation):
            yield from _walk(getattr(inner, "jaxpr", inner), inside)


def _matmul(place: _Place) -> Matmul:
    equation, times = place.equation, place.times / place.share
    left, right = (atom.aval for atom in equation.invars[:2])
    out = equation.outvars[0].aval
    dtype = str(np.promote_types(left.dtype, right.dtype) if left.dtype != right.dtype else left.dtype)
    if equation.primitive.name == "dot_general":
        (contract, _), (batch, _) = equation.params["dimension_numbers"]
        inner = math.prod(left.shape[i] for i in contract)
        batches = math.prod(left.shape[i] for i in batch)
        rows = math.prod(left.shape) // max(1, inner * batches)
        columns = math.prod(right.shape) // max(1, inner * batches)
        return Matmul(
            2.0 * batches * rows * inner * columns * times, dtype, (rows, inner, columns), place.line, place.scope
        )
    numbers = equation.params["dimension_numbers"]
    kernel = right.shape
    per_output = math.prod(kernel) // max(1, kernel[numbers.rhs_spec[0]])
    # Positions that fall between the rows of a dilated input multiply zeros, which no machine needs to do.
    dilation = math.prod(equation.params["lhs_dilation"])
    return Matmul(2.0 * math.prod(out.shape) * per_output / dilation * times, dtype, None, place.line, place.scope)
