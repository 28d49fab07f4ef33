"""Gradients local to a replica: what the transposes of casts and reductions become for a tape."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import jax
from jax._src import config as _config
from jax._src import core as _core
from jax._src.lax import parallel as _parallel
from jax.extend import core as _jex
from jax.interpreters import ad as _ad
from jax.interpreters import batching as _batching
from jax.interpreters import mlir as _mlir

from phalanx._jax.devices import REPLICA_AXIS
from phalanx._jax.replicas import aval_varies, lift, local_aval, varies
from phalanx.errors import TapeError

_local = jax.make_user_context(False)


@contextlib.contextmanager
def local_gradients() -> Iterator[None]:
    """What JAX transposes in the block are gradients of this replica's own target.

    JAX differentiates the sum over the replicas. To the gradient with respect to a value that is the same on all
    of them it adds up what each replica says, where the value is cast to varying; and what is said about an
    all-reduced value it takes for the same everywhere. A tape in a replica wants neither. The transposes of these
    casts and reductions are therefore replaced: after a cast the cotangent is typed as invariant, as JAX's rules
    want it, but stays the replica's own; before a reduction the cotangents of all replicas are added up, since a
    replica's value enters the targets of all of them. Rules of `jax.custom_vjp`, written for one device, may give a
    varying cotangent for an invariant argument, which JAX's checks would refuse.
    """
    with _local(True), _config.disable_bwd_checks(True):
        yield


def local_lift(value: Any) -> Any:
    """`lift` for a value that is the replica's own whatever its type says: a cotangent, a tangent."""
    return value if varies(value) else _local_lift_p.bind(value)


def _cast(name: str, varying: bool, transpose: Callable[[Any], Any]) -> Any:
    """A primitive that changes the type of a value and nothing else."""

    def of_cotangent(ct: Any) -> list[Any]:
        if not _local.value:
            raise TapeError(
                "The gradient that a tape in a replica took, with respect to an array that is the same on all replicas,"
                " is differentiated again by something outside that replica's tapes (jax.grad, or a tape around"
                " strategy.run). Use a px.Variable instead of the array, or a second px.GradientTape in the replica."
            )
        return [transpose(ct)]

    primitive = _jex.Primitive(name)
    primitive.def_abstract_eval(
        lambda aval: local_aval(aval.shape, aval.dtype, weak_type=aval.weak_type, varying=varying)
    )
    _ad.deflinear(primitive, of_cotangent)
    _batching.defvectorized(primitive)
    _mlir.register_lowering(primitive, lambda ctx, x: [x])
    return primitive


_typed_invariant_p = _cast("phalanx_typed_invariant", False, local_lift)
_local_lift_p = _cast("phalanx_local_lift", True, _typed_invariant_p.bind)


def typed_as(aval: Any, value: Any) -> Any:
    """`value` typed as varying or not, as `aval` is, whatever it is in truth: see `local_gradients`."""
    if aval_varies(aval):
        return lift(value)
    return _typed_invariant_p.bind(value) if varies(value) else value


def _replace_transpose(primitive: Any, local: Callable[..., Any]) -> None:
    original = _ad.primitive_transposes[primitive]

    def transpose(ct: Any, x: Any, **params: Any) -> Any:
        axes = params.get("axes", params.get("axis_name"))
        if not _local.value or type(ct) is _ad.Zero or REPLICA_AXIS not in (axes or ()):
            return original(ct, x, **params)
        return local(original, ct, x, **params)

    _ad.primitive_transposes[primitive] = transpose


def _transpose_lift(original: Any, ct: Any, x: Any, **params: Any) -> Any:
    return [_typed_invariant_p.bind(ct)]


def _transpose_reduction(original: Any, ct: Any, x: Any, **params: Any) -> Any:
    return original(jax.lax.psum(local_lift(ct), REPLICA_AXIS), x, **params)


_replace_transpose(_core.pvary_p, _transpose_lift)
_replace_transpose(_parallel.psum_invariant_p, _transpose_reduction)
_replace_transpose(_parallel.all_gather_invariant_p, _transpose_reduction)
