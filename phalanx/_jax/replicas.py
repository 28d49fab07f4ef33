"""Types along the replica axis: what JAX can prove to be the same on all replicas."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax._src.lax.control_flow import loops as _loops
from jax.extend import core as _jex
from jax.interpreters import ad as _ad
from jax.interpreters import batching as _batching
from jax.interpreters import mlir as _mlir
from jax.sharding import Mesh

from phalanx._jax.devices import REPLICA_AXIS
from phalanx._jax.values import ConcreteArray


def in_replica_trace() -> bool:
    """True while a program for the replica axis is being traced."""
    return REPLICA_AXIS in getattr(jax.sharding.get_abstract_mesh(), "manual_axes", ())


def varies(value: Any) -> bool:
    """True when JAX cannot prove that `value` is the same on every replica."""
    return aval_varies(jax.typeof(value))


def aval_varies(aval: Any) -> bool:
    """`varies` of a type."""
    kind = getattr(aval, "manual_axis_type", None)
    return kind is not None and REPLICA_AXIS in kind.varying


def lift(value: Any) -> Any:
    """`value` typed as varying, so that gradients with respect to it stay local to the replica."""
    return value if varies(value) else jax.lax.pcast(value, REPLICA_AXIS, to="varying")


_settle_number_type = _loops._promote_weak_typed_input


def _settle_carry(value: Any, before: Any, after: Any) -> tuple[Any, bool]:
    """The start of a carry in the type that the body gives back.

    JAX's `scan` and `while_loop` do it for the types of Python numbers, and refuse a carry that starts with the
    same value on all replicas (zeros, most often) and becomes the replica's own. Here it starts as its own.
    """
    value, changed = _settle_number_type(value, before, after)
    if in_replica_trace() and aval_varies(after) and not varies(value):
        return lift(value), True
    return value, changed


_loops._promote_weak_typed_input = _settle_carry


def all_gather(value: Any, axis: int, *, stacked: bool) -> Any:
    """The parts of all replicas side by side, typed as the same on every replica."""
    return jax.lax.all_gather(lift(value), REPLICA_AXIS, axis=axis, tiled=not stacked, to="invarying")


@functools.lru_cache(maxsize=4096)
def _local_aval(shape: tuple[int, ...], dtype: Any, weak_type: bool, varying: bool, mesh: Any) -> Any:
    def example() -> Any:
        x = jax.lax.full(shape, 0, dtype) if not jnp.issubdtype(dtype, jax.dtypes.prng_key) else jnp.empty(shape, dtype)
        return jax.lax.pcast(x, REPLICA_AXIS, to="varying") if varying else x

    aval = jax.make_jaxpr(example)().out_avals[0]
    return aval.update(weak_type=weak_type)


def local_aval(shape: tuple[int, ...], dtype: Any, *, weak_type: bool = False, varying: bool) -> Any:
    """The type of a value on one replica; needs the replica axis in scope."""
    return _local_aval(tuple(shape), dtype, weak_type, varying, jax.sharding.get_abstract_mesh())


def type_of(value: Any) -> Any:
    """The type of `value` as an input of a program: the same on whatever devices it lies."""
    aval = value.aval if type(value) is ConcreteArray else jax.typeof(value)
    if in_replica_trace():
        return local_aval(aval.shape, aval.dtype, weak_type=aval.weak_type, varying=aval_varies(aval))
    return _without_mesh(aval)


@functools.lru_cache(maxsize=4096)
def _without_mesh(aval: Any) -> Any:
    mesh = aval.sharding.mesh
    return aval if mesh.empty or not mesh.are_all_axes_auto else aval.update(sharding=None)


def on_replicas(mesh: Mesh, body: Callable[..., Any], in_specs: Any, out_specs: Any) -> Callable[..., Any]:
    """`jax.shard_map` over the replica axis, with the checks that prove what is invariant."""
    return jax.shard_map(body, mesh=mesh, in_specs=in_specs, out_specs=out_specs, check_vma=True)


_sum_of_one_p = _jex.Primitive("phalanx_sum_of_one")
_sum_of_one_p.def_abstract_eval(
    lambda aval: local_aval(aval.shape, aval.dtype, weak_type=aval.weak_type, varying=False)
)
_ad.deflinear(_sum_of_one_p, lambda ct: [lift(ct)])
_batching.defvectorized(_sum_of_one_p)
_mlir.register_lowering(_sum_of_one_p, lambda ctx, x: [x])


def sum_of_one(value: Any) -> Any:
    """The sum over the replicas when there is one: its varying value, typed as the same on all.

    XLA's CPU compiler keeps a psum of one and copies the value.
    """
    return _sum_of_one_p.bind(value)
