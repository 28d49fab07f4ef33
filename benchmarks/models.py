"""Models as plain functions of a list of parameters, arrays or variables: both sides run this same code."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

Arrays = list[np.ndarray[Any, Any]]

HEADS, SEQUENCE, VOCABULARY = 4, 32, 64


def mlp_parameters(sizes: Sequence[int]) -> Arrays:
    """A weight and a bias for each layer."""
    rng = np.random.default_rng(0)
    arrays: Arrays = []
    for fan_in, fan_out in itertools.pairwise(sizes):
        q = np.linalg.qr(rng.normal(size=(max(fan_in, fan_out),) * 2))[0][:fan_in, :fan_out]
        arrays += [(q * 2**0.5).astype(np.float32), np.zeros(fan_out, np.float32)]
    return arrays


def mlp(parameters: Sequence[Any], x: Any) -> Any:
    """Dense layers with ReLU between them."""
    layers = list(zip(parameters[::2], parameters[1::2]))
    for w, b in layers[:-1]:
        x = jax.nn.relu(x @ w + b)
    w, b = layers[-1]
    return x @ w + b


def regression_batch(rows: int, features: int) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """Inputs and targets."""
    rng = np.random.default_rng(1)
    return rng.normal(size=(rows, features)).astype(np.float32), rng.normal(size=(rows, features)).astype(np.float32)


def squared_error(parameters: Sequence[Any], x: Any, y: Any) -> Any:
    """Sum over the rows of the mean squared error of the MLP."""
    return ((mlp(parameters, x) - y) ** 2).mean(-1).sum()


_PER_BLOCK = 8


def transformer_parameters(layers: int, width: int) -> Arrays:
    """Embedding, positions, and for each block: two norms, attention in and out, two dense layers."""
    rng = np.random.default_rng(0)

    def normal(*shape: int) -> np.ndarray[Any, Any]:
        return np.asarray(rng.normal(size=shape) * shape[0] ** -0.5, np.float32)

    arrays = [normal(VOCABULARY, width), normal(SEQUENCE, width)]
    for _ in range(layers):
        ones, zeros = np.ones(width, np.float32), np.zeros(4 * width, np.float32)
        arrays += [ones, normal(width, 3 * width), normal(width, width), ones.copy()]
        arrays += [normal(width, 4 * width), zeros, normal(4 * width, width), np.zeros(width, np.float32)]
    return arrays


def transformer_loss(parameters: Sequence[Any], tokens: Any) -> Any:
    """Next-token cross entropy of a decoder with tied embeddings."""
    embedding, positions, *rest = parameters
    x = jnp.take(embedding, tokens, axis=0) + positions
    for start in range(0, len(rest), _PER_BLOCK):
        x = _block(x, *rest[start : start + _PER_BLOCK])
    logits = jax.nn.log_softmax(x @ jnp.transpose(embedding))
    return -jnp.take_along_axis(logits[:, :-1], tokens[:, 1:, None], -1).mean()


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
