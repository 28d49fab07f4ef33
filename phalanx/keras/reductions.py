"""Where replicas meet in Keras's code: gradients in optimizers, rows in losses, branches in control flow.

In a replica an average is over the rows of all replicas, so a loss object gives this replica's share of it,
and the shares add up: optimizers sum what differs (as in TensorFlow). In the steps of a replicated model the
law is the mean instead, so that a loss written as a mean over a replica's rows is right as it stands.
"""

from __future__ import annotations

import functools
import inspect
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from phalanx import _jax, control_flow, state
from phalanx.distribute.collectives import ReduceOp, all_reduce
from phalanx.distribute.values import is_per_replica
from phalanx.errors import ArgumentError, StrategyError
from phalanx.keras import _keras
from phalanx.keras._keras import keras
from phalanx.keras.law import law, replicas_with_rows_of_their_own


def _reduce(op: ReduceOp, values: list[Any], names: Sequence[str] = ()) -> list[Any]:
    strategy = state.context().strategy
    return all_reduce(op, values, strategy.num_replicas, strategy.platform, names)


# ---- optimizers ----------------------------------------------------------------------------------


def _apply(original: Callable[..., Any]) -> Callable[..., Any]:
    def apply(optimizer: Any, grads: Sequence[Any], trainable_variables: Any = None) -> Any:
        grads = list(grads)
        _check_scaled(optimizer)
        accumulate = law().accumulate
        if accumulate is not None and any(map(_differs, grads)):
            total = accumulate(optimizer, grads, trainable_variables)
            if total is None:
                return None
            grads = total
        known = getattr(optimizer, "_trainable_variables", ()) if trainable_variables is None else trainable_variables
        _check_scales(grads, known)
        guard = law().guard
        if guard is not None and grads:
            return guard(optimizer, grads, known)
        return original(optimizer, _reduced(grads, [v.path for v in known]), trainable_variables)

    return apply


_scaled: weakref.WeakSet[Any] = weakref.WeakSet()
"""Optimizers that were given a loss to scale."""


def _scale_loss(original: Callable[..., Any]) -> Callable[..., Any]:
    def scale_loss(optimizer: Any, loss: Any) -> Any:
        _scaled.add(optimizer)
        return original(optimizer, loss)

    return scale_loss


def _check_scaled(optimizer: Any) -> None:
    scales = isinstance(optimizer, keras.optimizers.LossScaleOptimizer) or optimizer.loss_scale_factor is not None
    if scales and optimizer not in _scaled and _keras.get_stateless_scope() is None:
        raise ArgumentError(
            f"{type(optimizer).__name__}.apply divides the gradients by the loss scale, and no loss was scaled: the"
            " updates would be far too small. In the tape write `scaled = optimizer.scale_loss(loss)`, and take"
            " `tape.gradient(scaled, variables)`."
        )


def _check_scales(grads: list[Any], variables: Any) -> None:
    """Float8 layers hand the scales of their numbers on as "gradients", each replica those of its own rows."""
    scales = [v for g, v in zip(grads, variables) if getattr(v, "overwrite_with_gradient", False) and _differs(g)]
    if scales and state.context().strategy.num_replicas > 1:
        raise StrategyError(
            f"Layers quantized to float8 cannot train on several replicas: {scales[0].path} would be the scale of one"
            " replica's rows. Train on one device, or in mixed_bfloat16."
        )


def _differs(gradient: Any) -> bool:
    """Whether it may differ between the replicas; else it has been reduced already."""
    return gradient is not None and _jax.varies(gradient)


def _reduced(grads: list[Any], names: Sequence[str]) -> list[Any]:
    """The gradients over all replicas; what is the same on all of them has been reduced already."""
    if not _jax.in_replica_trace():
        return [g.strategy.reduce(law().op, g) if is_per_replica(g) else g for g in grads]
    differing = [i for i, g in enumerate(grads) if _differs(g)]
    named = [names[i] for i in differing] if len(names) == len(grads) else ()
    for i, total in zip(differing, _reduce(law().op, [grads[i] for i in differing], named)):
        grads[i] = total
    return grads


# ---- losses --------------------------------------------------------------------------------------


def _reduce_losses(original: Callable[..., Any]) -> Callable[..., Any]:
    def reduce_weighted_values(
        values: Any,
        sample_weight: Any = None,
        mask: Any = None,
        reduction: Any = "sum_over_batch_size",
        dtype: Any = None,
    ) -> Any:
        n = replicas_with_rows_of_their_own()
        if n == 1 or reduction in (None, "none"):
            return original(values, sample_weight, mask, reduction, dtype)
        weighted = original(values, sample_weight, mask, "none", dtype)
        share = jnp.sum(weighted)
        if reduction != "sum" or weighted.ndim == 0:  # one number for all rows, which Keras never sums
            share = _divided(share, _count_of_all(weighted, sample_weight, mask, reduction))
        return share * n if law().op == "mean" else share

    return reduce_weighted_values


def _count_of_all(weighted: Any, weights: Any, mask: Any, reduction: Any) -> Any:
    """What Keras divides the sum of the weighted losses by, over all replicas."""
    if reduction == "mean_with_sample_weight" and not (weights is None and mask is None):
        count = jnp.sum(_keras.loss.apply_mask(weights, mask, weighted.dtype, reduction), dtype=weighted.dtype)
    elif mask is not None:
        mask = jnp.asarray(mask, weighted.dtype)
        count = jnp.sum(mask) * (weighted.size / mask.size)
    else:
        return weighted.size * state.context().strategy.num_replicas
    return _reduce("sum", [jax.lax.stop_gradient(count)])[0]


def _divided(share: Any, count: Any) -> Any:
    return jnp.where(count != 0, share / jnp.where(count != 0, count, 1), 0)


# ---- metrics -------------------------------------------------------------------------------------


def _update_mean(original: Callable[..., Any]) -> Callable[..., Any]:
    def update_state(metric: Any, values: Any, sample_weight: Any = None) -> Any:
        if law().op == "mean" and sample_weight is None and jnp.ndim(values) == 0:
            sample_weight = 1 / replicas_with_rows_of_their_own()  # one number for a batch, of which each has a part
        return original(metric, values, sample_weight)

    return update_state


# ---- batch normalisation -------------------------------------------------------------------------


def _made(original: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(original)
    def make(self: Any, *args: Any, synchronized: bool = False, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        self.synchronized = synchronized  # on JAX Keras refuses it

    make.__signature__ = inspect.signature(original)  # type: ignore[attr-defined]  # Keras looks at it
    return make


def _moments(original: Callable[..., Any]) -> Callable[..., Any]:
    def moments(layer: Any, inputs: Any, mask: Any) -> Any:
        if not (layer.synchronized or law().synchronize_batch_norm):
            return original(layer, inputs, mask)
        axes = tuple(i for i in range(inputs.ndim) if i != layer.axis % inputs.ndim)
        weights = jnp.ones_like(inputs) if mask is None else jnp.broadcast_to(mask[..., None], inputs.shape)
        alone = replicas_with_rows_of_their_own() == 1

        def total(values: Any) -> Any:
            own = values.sum(axes, keepdims=True)
            return own if alone else _reduce("sum", [own])[0]

        weights = weights.astype(inputs.dtype)
        count = jnp.maximum(total(weights), 1)
        mean = total(inputs * weights) / count
        variance = total(jnp.square(inputs - mean) * weights) / count
        return mean.squeeze(axes), variance.squeeze(axes)

    return moments


# ---- recurrent layers ----------------------------------------------------------------------------


def _call_rnn(original: Callable[..., Any]) -> Callable[..., Any]:
    def call(layer: Any, sequences: Any, *args: Any, **kwargs: Any) -> Any:
        rows, n = getattr(layer, "_expected_batch_size", None), replicas_with_rows_of_their_own()
        if rows is None or n == 1:
            return original(layer, sequences, *args, **kwargs)
        layer.__dict__["_expected_batch_size"] = rows // n  # of which the state has been split likewise
        try:
            return original(layer, sequences, *args, **kwargs)
        finally:
            layer.__dict__["_expected_batch_size"] = rows

    return call


# ---- control flow --------------------------------------------------------------------------------


def _cond(original: Callable[..., Any]) -> Callable[..., Any]:
    def cond(pred: Any, true_fn: Callable[[], Any], false_fn: Callable[[], Any]) -> Any:
        here = original if _keras.get_stateless_scope() is not None else control_flow.cond
        return here(pred, true_fn, false_fn)

    return cond


def _scan(original: Callable[..., Any]) -> Callable[..., Any]:
    def scan(f: Any, init: Any, xs: Any = None, length: Any = None, reverse: bool = False, unroll: Any = 1) -> Any:
        here = original if _keras.get_stateless_scope() is not None else control_flow.scan
        return here(f, init, xs, length=length, reverse=reverse, unroll=unroll)

    return scan


def _while_loop(original: Callable[..., Any]) -> Callable[..., Any]:
    def while_loop(cond: Any, body: Any, loop_vars: Any, maximum_iterations: Any = None) -> Any:
        if _keras.get_stateless_scope() is not None:
            return original(cond, body, loop_vars, maximum_iterations)
        several = isinstance(loop_vars, (tuple, list))
        start = tuple(loop_vars) if several else (loop_vars,)

        def goes_on(carry: Any) -> Any:
            i, values = carry
            more = cond(*values)
            return more if maximum_iterations is None else jnp.logical_and(more, i < maximum_iterations)

        def step(carry: Any) -> Any:
            i, values = carry
            new = body(*values)
            return i + 1, tuple(new) if isinstance(new, (tuple, list)) else (new,)

        _, values = control_flow.while_loop(goes_on, step, (jnp.int32(0), start))
        return values if several else values[0]

    return while_loop


def install() -> None:
    """Let Keras's optimizers, losses and control flow meet the other replicas."""
    for cls in (keras.optimizers.Optimizer, keras.optimizers.LossScaleOptimizer):
        _keras.replace(cls, "apply", _apply)
        _keras.replace(cls, "scale_loss", _scale_loss)
    _keras.replace(keras.metrics.Mean, "update_state", _update_mean)
    _keras.replace(keras.layers.BatchNormalization, "__init__", _made)
    _keras.replace(keras.layers.BatchNormalization, "_moments", _moments)
    _keras.replace(keras.layers.RNN, "call", _call_rnn)
    _keras.replace(_keras.loss, "reduce_weighted_values", _reduce_losses)
    for name, make in (("cond", _cond), ("scan", _scan), ("while_loop", _while_loop)):
        _keras.replace(_keras.core, name, make)
