"""TensorFlow: a custom loop on `MirroredStrategy`, the eager tape, Keras's `fit`."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Any

os.environ |= {"TF_CPP_MIN_LOG_LEVEL": "3", "KERAS_BACKEND": "tensorflow", "CUDA_VISIBLE_DEVICES": ""}

import numpy as np
import tensorflow as tf

from benchmarks.peers.serving import serve
from benchmarks.problems import HEADS, mlp_parameters, regression_batch, training_problems

Made = tuple[Callable[[], Any], Callable[[], Any]]


def strategy_on(replicas: int) -> Any:
    """On virtual devices, which must be asked for before TensorFlow starts."""
    (cpu,) = tf.config.list_physical_devices("CPU")
    tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * replicas)
    return tf.distribute.MirroredStrategy([f"CPU:{i}" for i in range(replicas)])


# ---- models ----------------------------------------------------------------------------------------


def mlp_loss(parameters: Sequence[Any], x: Any, y: Any) -> Any:
    """As in `benchmarks.models`."""
    *layers, (w, b) = zip(parameters[::2], parameters[1::2])
    for weight, bias in layers:
        x = tf.nn.relu(x @ weight + bias)
    return tf.reduce_sum(tf.reduce_mean((x @ w + b - y) ** 2, -1))


def convnet_loss(parameters: Sequence[Any], x: Any, labels: Any) -> Any:
    """As in `benchmarks.models`."""
    k1, b1, k2, b2, w1, c1, w2, c2 = parameters
    for kernel, bias in ((k1, b1), (k2, b2)):
        x = tf.nn.relu(tf.nn.conv2d(x, kernel, 1, "SAME") + bias)
    x = tf.reshape(tf.nn.max_pool2d(x, 2, 2, "VALID"), (-1, w1.shape[0]))
    logits = tf.nn.relu(x @ w1 + c1) @ w2 + c2
    return tf.reduce_sum(tf.nn.sparse_softmax_cross_entropy_with_logits(labels, logits))


def transformer_loss(parameters: Sequence[Any], tokens: Any) -> Any:
    """As in `benchmarks.models`."""
    embedding, positions, *rest = parameters
    x = tf.gather(embedding, tokens) + positions
    for start in range(0, len(rest), 8):
        x = _block(x, *rest[start : start + 8])
    logits = tf.einsum("blw,vw->blv", x, embedding)[:, :-1]
    losses = tf.nn.sparse_softmax_cross_entropy_with_logits(tokens[:, 1:], logits)
    return tf.reduce_sum(tf.reduce_mean(losses, -1))


def _block(x: Any, norm1: Any, qkv: Any, out: Any, norm2: Any, up: Any, up_bias: Any, down: Any, down_bias: Any) -> Any:
    length, width = x.shape[1:]
    heads = tf.reshape(_normalise(x, norm1) @ qkv, (-1, length, HEADS, 3 * width // HEADS))
    q, k, v = tf.split(heads, 3, axis=-1)
    scores = tf.einsum("bqhd,bkhd->bhqk", q, k) * (width // HEADS) ** -0.5
    weights = tf.nn.softmax(tf.where(np.tril(np.ones((length, length), bool)), scores, -1e9))
    x = x + tf.reshape(tf.einsum("bhqk,bkhd->bqhd", weights, v), (-1, length, width)) @ out
    return x + tf.nn.gelu(_normalise(x, norm2) @ up + up_bias, approximate=True) @ down + down_bias


def _normalise(x: Any, scale: Any) -> Any:
    return x * tf.math.rsqrt(tf.reduce_mean(x * x, -1, keepdims=True) + 1e-6) * scale


LOSSES = {"mlp": mlp_loss, "convnet": convnet_loss, "transformer": transformer_loss}


# ---- workloads -------------------------------------------------------------------------------------


def step(problem: str, optimizer: str, replicas: int, quick: bool) -> Made:
    """The custom loop of TensorFlow's tutorial."""
    what = training_problems(quick)[problem]
    loss_fn, rows = LOSSES[what.kind], what.rows
    strategy = strategy_on(replicas)
    with strategy.scope():
        variables = [tf.Variable(p) for p in what.parameters]
        kinds = {
            "SGD": lambda: tf.keras.optimizers.SGD(1e-3),
            "Adam": lambda: tf.keras.optimizers.Adam(1e-3, epsilon=1e-8),
        }
        updates = kinds[optimizer]()
        updates.build(variables)
    dataset = (
        tf.data.Dataset.from_tensors(tuple(map(tf.constant, what.batch))).unbatch().batch(rows, drop_remainder=True)
    )
    batch = next(iter(strategy.experimental_distribute_dataset(dataset)))

    def replica_step(*batch: Any) -> Any:
        with tf.GradientTape() as tape:
            loss = loss_fn(variables, *batch) / rows
        updates.apply_gradients(zip(tape.gradient(loss, variables), variables))
        return loss

    @tf.function
    def train_step(*batch: Any) -> Any:
        return strategy.reduce("SUM", strategy.run(replica_step, args=batch), axis=None)

    def run() -> float:
        return float(train_step(*batch))

    return run, lambda: [run() for _ in range(4)]


def eager(sizes: list[int], rows: int) -> Made:
    """The tape outside of `tf.function`."""
    variables = [tf.Variable(p) for p in mlp_parameters(sizes)]
    x, y = map(tf.constant, regression_batch(rows, sizes[0]))

    def run() -> Any:
        with tf.GradientTape() as tape:
            loss = mlp_loss(variables, x, y)
        return loss, [g.numpy() for g in tape.gradient(loss, variables)]

    def numbers() -> list[float]:
        loss, grads = run()
        return [float(loss), *(float(np.abs(g).sum()) for g in grads)]

    return run, numbers


def keras_fit(replicas: int, layers: int, width: int, batch: int, steps: int) -> Made:
    """An epoch of `fit` on `MirroredStrategy`."""
    keras = tf.keras
    strategy = strategy_on(replicas)
    rng = np.random.default_rng(0)
    x = rng.normal(size=(steps * batch, width)).astype(np.float32)
    y = rng.normal(size=(steps * batch, 1)).astype(np.float32)
    with strategy.scope():
        hidden = [keras.layers.Dense(width, "relu") for _ in range(layers)]
        model = keras.Sequential([keras.layers.Input((width,)), *hidden, keras.layers.Dense(1)])
        model.set_weights(mlp_parameters([width] * (layers + 1) + [1]))
        model.compile(keras.optimizers.Adam(1e-3), "mse")

    def epoch() -> Any:
        return model.fit(x, y, batch_size=batch, verbose=0, shuffle=False).history["loss"]

    return epoch, epoch


if __name__ == "__main__":
    serve({"step": step, "eager": eager, "keras_fit": keras_fit})
