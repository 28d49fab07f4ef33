"""All-reduce of many arrays, with small ones travelling together.

One collective per tensor is slow for many small tensors. Copying a few into one flat buffer is slow too,
because XLA's CPU compiler fuses a concatenation of up to eight pieces into a loop over its elements (15 ns
each); more pieces it copies. Measured on two CPU cores with jax 0.10.2, in ms per step (one psum each / all
in one flat psum / as here), the fastest tenth of the steps on a busy machine:

                                            2 replicas          8 replicas
    200 arrays of up to 4 KiB (100 layers)  7.6 / 3.2 / 3.1     39 / 9.9 / 9.8
    59 arrays of up to 144 KiB (conv net)   1.7 / 0.8 / 0.8     15 / 5.0 / 4.8
    6 arrays of up to 256 KiB (3 layers)    3.5 / 5.2 / 3.4     6.2 / 19 / 5.6

Limits of 8 KiB, 32 KiB and 128 KiB on what shares a bucket were up to 1.8 times slower on the conv net and
no faster elsewhere; 1 MiB made no difference. Buckets of 512 KiB were 1.2 times slower than those of 4 MiB
with eight replicas. On GPU and TPU XLA combines collectives itself.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp

from phalanx import _jax
from phalanx._checks import as_array
from phalanx._conversion import is_key
from phalanx.errors import ArgumentError, ArgumentTypeError

ReduceOp = Literal["sum", "mean"]

SMALL_BYTES = {"cpu": 256 * 1024}
"""Arrays up to this size share a bucket, by platform (others: never)."""

BUCKET_BYTES = 4 * 1024 * 1024
"""Size at which a bucket is closed."""

_COPIED = 9
"""From this many pieces on XLA's CPU compiler copies a concatenation; of fewer it computes each element anew."""

_TINY_BYTES = 8 * 1024
"""Arrays up to this size share a bucket of fewer pieces too."""


def check_op(op: Any, caller: str) -> ReduceOp:
    """'sum' or 'mean' in any case of letters."""
    if isinstance(op, str) and op.lower() in ("sum", "mean"):
        return op.lower()  # type: ignore[return-value]
    raise ArgumentError(f"{caller}: op must be 'sum' or 'mean', got {op!r:.60}.")


def all_reduce(
    op: ReduceOp, values: Sequence[Any], num_replicas: int, platform: str, names: Sequence[str] = ()
) -> list[Any]:
    """Reduce each array over the replicas; the results are the same on all of them.

    The compiled program says of each collective what it is for, where `names` do.

    Outside a replica there is nobody to reduce with, and only the dtypes follow: bools are counted, the mean of
    integers is a float.
    """
    arrays = [countable(as_array(v, "all_reduce"), "all_reduce") for v in values]
    if not _jax.in_replica_trace():
        sums = arrays
    elif num_replicas == 1:
        sums = [_jax.sum_of_one(_jax.lift(a)) for a in arrays]
    else:
        sums = _sums(arrays, SMALL_BYTES.get(platform, 0), names)
    return sums if op == "sum" else [_mean(total, num_replicas) for total in sums]


def _sums(arrays: list[Any], small: int, names: Sequence[str]) -> list[Any]:
    out = list(arrays)
    for bucket in _buckets(arrays, small):
        if len(bucket) == 1:
            out[bucket[0]] = _named_psum(arrays[bucket[0]], bucket, names)
            continue
        flat = _named_psum(jnp.concatenate([_jax.lift(arrays[i]).ravel() for i in bucket]), bucket, names)
        start = 0
        for i in bucket:
            stop = start + arrays[i].size
            out[i] = flat[start:stop].reshape(arrays[i].shape)
            start = stop
    return out


def _mean(total: Any, n: int) -> Any:
    exact = n == 1 and jnp.issubdtype(total.dtype, jnp.inexact)
    return total if exact else total / n


def broadcast(value: Any, replica: int) -> Any:
    """One replica's value on all of them."""
    array = as_array(value, "broadcast")
    if not _jax.varies(array):
        return array
    if is_key(array):
        return jax.random.wrap_key_data(broadcast(jax.random.key_data(array), replica), impl=jax.random.key_impl(array))
    mine = jax.lax.axis_index(_jax.REPLICA_AXIS) == replica
    bits = countable(array, "broadcast")
    return _psum(jnp.where(mine, bits, jnp.zeros_like(bits))).astype(array.dtype)


def _buckets(arrays: Sequence[Any], small: int) -> list[list[int]]:
    """Which arrays travel together, by index."""
    buckets: list[list[int]] = []
    for bucket in _filled(arrays, range(len(arrays)), small):
        buckets += [bucket] if len(bucket) >= _COPIED else _filled(arrays, bucket, min(small, _TINY_BYTES))
    return buckets


def _filled(arrays: Sequence[Any], indices: Iterable[int], small: int) -> list[list[int]]:
    buckets: list[list[int]] = []
    open_buckets: dict[Any, tuple[list[int], int]] = {}
    for i in indices:
        array = arrays[i]
        nbytes = array.size * array.dtype.itemsize
        if nbytes > small or array.size == 0:
            buckets.append([i])
            continue
        bucket, filled = open_buckets.get(array.dtype, ([], 0))
        if not bucket:
            buckets.append(bucket)
        bucket.append(i)
        filled += nbytes
        open_buckets[array.dtype] = (bucket, filled) if filled < BUCKET_BYTES else ([], 0)
    return buckets


def _named_psum(array: Any, bucket: Sequence[int], names: Sequence[str]) -> Any:
    if not names:
        return _psum(array)
    others = f" and {len(bucket) - 1} more" if len(bucket) > 1 else ""
    with jax.named_scope(f"gradient of {names[bucket[0]]}{others}"):
        return _psum(array)


def _psum(array: Any) -> Any:
    return jax.lax.psum(_jax.lift(array), _jax.REPLICA_AXIS)


def countable(array: Any, caller: str) -> Any:
    """`array` in a dtype that can be added up: bools are counted."""
    if is_key(array):
        raise ArgumentTypeError(
            f"{caller} cannot add random keys; take one replica's key by broadcast, or gather them all."
        )
    return array.astype(jnp.int32) if array.dtype == jnp.bool_ else array
