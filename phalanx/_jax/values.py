"""Values and what JAX does with them: tracers, aliases, objects in the place of arrays."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
from jax._src import array as _array
from jax._src import core as _core
from jax._src import dtypes as _dtypes
from jax._src.interpreters import pxla as _pxla
from jax.extend import core as _jex
from jax.interpreters import ad as _ad
from jax.interpreters import batching as _batching
from jax.interpreters import mlir as _mlir

from phalanx._jax.traces import is_eager

ConcreteArray: TypeAlias = _array.ArrayImpl
"""The type of arrays that have a value."""


def is_tracer(value: Any) -> bool:
    """True for a value of a program that is being traced."""
    return isinstance(value, _core.Tracer)


def _same_buffers(x: Any) -> Any:
    if isinstance(x, jax.Array) and jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
        return jax.random.wrap_key_data(_same_buffers(jax.random.key_data(x)), impl=jax.random.key_impl(x))
    if not isinstance(x, jax.Array):
        return jnp.asarray(x)
    buffers: Any = x
    return _array.ArrayImpl(x.aval, x.sharding, buffers._arrays, committed=buffers._committed, _skip_checks=True)


_alias_p = _jex.Primitive("phalanx_alias")
_alias_p.def_impl(_same_buffers)
_alias_p.def_abstract_eval(lambda aval: aval)
_ad.deflinear(_alias_p, lambda ct: [ct])
_batching.defvectorized(_alias_p)
_mlir.register_lowering(_alias_p, lambda ctx, x: [x])


def alias(x: Any) -> Any:
    """The same value and the same buffers as a new object (operations are told apart by identity)."""
    return _same_buffers(x) if is_eager() and not is_tracer(x) else _alias_p.bind(x)


_read_again_p = _jex.Primitive("phalanx_read_again")
_read_again_p.def_impl(lambda stored, entry: stored)
_read_again_p.def_abstract_eval(lambda stored, entry: stored)
_ad.defjvp(_read_again_p, None, lambda tangent, stored, entry: tangent)
_batching.defbroadcasting(_read_again_p)
_mlir.register_lowering(_read_again_p, lambda ctx, stored, entry: [stored])


def read_again(stored: Any, entry: Any) -> Any:
    """`stored`, a new value of a variable that a program was given as `entry`; its gradient is that of `entry`."""
    return _read_again_p.bind(stored, entry)


def register_array_like(cls: type, read: Callable[[Any], Any]) -> None:
    """Let JAX's functions take instances of `cls` wherever they take an array.

    `__jax_array__` alone is refused by everything jitted, and a pytree node would make `jax.tree.map`
    see the value where users want the object itself.
    """

    def shard(xs: Sequence[Any], *rest: Any) -> Any:
        return _pxla.shard_arg_handlers[type(read(xs[0]))]([read(x) for x in xs], *rest)

    _core.pytype_aval_mappings[cls] = lambda x: _core.typeof(read(x))
    _dtypes.canonicalize_value_handlers[cls] = read
    _pxla.shard_arg_handlers[cls] = shard
