"""Models as plain functions of a list of parameters, arrays or variables: Phalanx and JAX run this same code."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from benchmarks.problems import HEADS

_PER_BLOCK = 8


def mlp_loss(parameters: Sequence[Any], x: Any, y: Any) -> Any:
    """Sum over the rows of the mean squared error of dense layers with ReLU between them."""
    *layers, (w, b) = zip(parameters[::2], parameters[1::2])
    for weight, bias in layers:
        x = jax.nn.relu(x @ weight + bias)
    return ((x @ w + b - y) ** 2).mean(-1).sum()


def convnet_loss(parameters: Sequence[Any], x: Any, labels: Any) -> Any:
    """Sum over the rows of the cross entropy."""
    k1, b1, k2, b2, w1, c1, w2, c2 = parameters
    for kernel, bias in ((k1, b1), (k2, b2)):
        x = jax.lax.conv_general_dilated(
            x, jnp.asarray(kernel), (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
        )
        x = jax.nn.relu(x + bias)
    x = x.reshape(x.shape[0], 4, 2, 4, 2, -1).max((2, 4)).reshape(x.shape[0], -1)
    logits = jax.nn.log_softmax(jax.nn.relu(x @ w1 + c1) @ w2 + c2)
    return -jnp.take_along_axis(logits, labels[:, None], -1).sum()


def transformer_loss(parameters: Sequence[Any], tokens: Any) -> Any:
    """Sum over the rows of the mean next-token cross entropy of a decoder with tied embeddings."""
    embedding, positions, *rest = parameters
    x = jnp.take(embedding, tokens, axis=0) + positions
    for start in range(0, len(rest), _PER_BLOCK):
        x = _block(x, *rest[start : start + _PER_BLOCK])
    logits = jax.nn.log_softmax(x @ jnp.transpose(embedding))
    return -jnp.take_along_axis(logits[:, :-1], tokens[:, 1:, None], -1).mean((1, 2)).sum()


def _block(x: Any, norm1: Any, qkv: Any, out: Any, norm2: Any, up: Any, up_bias: Any, down: Any, down_bias: Any) -> Any:
    batch, length, width = x.shape
    q, k, v = jnp.split((_normalise(x, norm1) @ qkv).reshape(batch, length, HEADS, -1), 3, axis=-1)
    scores = jnp.einsum("bqhd,bkhd->bhqk", q, k) * q.shape[-1] ** -0.5
    causal = jnp.tril(jnp.ones((length, length), bool))
    weights = jax.nn.softmax(jnp.where(causal, scores, -1e9))
    x = x + jnp.einsum("bhqk,bkhd->bqhd", weights, v).reshape(batch, length, width) @ out
    hidden = jax.nn.gelu(_normalise(x, norm2) @ up + up_bias)
    return x + hidden @ down + down_bias


def _normalise(x: Any, scale: Any) -> Any:
    return x * jax.lax.rsqrt((x * x).mean(-1, keepdims=True) + 1e-6) * scale


LOSSES = {"mlp": mlp_loss, "convnet": convnet_loss, "transformer": transformer_loss}
"""By the kind of problem."""
