"""Arrays as the bits that they are made of, on the devices: what differs in one bit differs."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

_GOLDEN = np.uint32(0x9E3779B9)
_SEEDS = (np.uint32(0x85EBCA6B), np.uint32(0xC2B2AE35))


def to_bits(array: Any) -> Any:
    """The bits of each element as uint32, several of them along a last axis where it has more than 32."""
    if jnp.issubdtype(array.dtype, jax.dtypes.prng_key):
        array = jax.random.key_data(array)
    if jnp.issubdtype(array.dtype, jnp.complexfloating):
        array = jnp.stack([array.real, array.imag], -1)
    if array.dtype == np.bool_ or jnp.iinfo(jnp.int8).bits > _width(array.dtype):
        return array.astype(jnp.int8).astype(jnp.uint32)
    width = _width(array.dtype)
    return jax.lax.bitcast_convert_type(array, {8: jnp.uint8, 16: jnp.uint16}.get(width, jnp.uint32)).astype(jnp.uint32)


def from_bits(bits: Any, like: Any) -> Any:
    """The array of the dtype of `like` that has these bits."""
    if jnp.issubdtype(like.dtype, jax.dtypes.prng_key):
        data = from_bits(bits, jax.eval_shape(jax.random.key_data, like))
        return jax.random.wrap_key_data(data, impl=jax.random.key_impl(like))
    if jnp.issubdtype(like.dtype, jnp.complexfloating):
        parts = from_bits(bits, jax.ShapeDtypeStruct((), jnp.finfo(like.dtype).dtype))
        return jax.lax.complex(parts[..., 0], parts[..., 1])
    if like.dtype == np.bool_ or jnp.iinfo(jnp.int8).bits > _width(like.dtype):
        return bits.astype(jnp.int8).astype(like.dtype)
    narrow = bits.astype({8: jnp.uint8, 16: jnp.uint16}.get(_width(like.dtype), jnp.uint32))
    return jax.lax.bitcast_convert_type(narrow, like.dtype)


def _width(dtype: Any) -> int:
    if dtype == np.bool_:
        return 1
    return int((jnp.finfo if jnp.issubdtype(dtype, jnp.floating) else jnp.iinfo)(dtype).bits)


def fingerprint(array: Any) -> Any:
    """Two uint32 that differ for arrays with one different element, and for others but once in 2**64.

    Each element is mixed with its position, which maps different elements to different numbers, and the sum taken.
    """
    bits = to_bits(array).ravel()
    position = jax.lax.iota(jnp.uint32, bits.size) * _GOLDEN
    return jnp.stack([_mixed(bits ^ (position + seed)).sum(dtype=jnp.uint32) for seed in _SEEDS])


def _mixed(x: Any) -> Any:
    """A permutation of the 32-bit numbers (murmur3's last step)."""
    x = (x ^ (x >> 16)) * np.uint32(0x85EBCA6B)
    x = (x ^ (x >> 13)) * np.uint32(0xC2B2AE35)
    return x ^ (x >> 16)
