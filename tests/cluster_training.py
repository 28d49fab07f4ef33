"""A training run of every kind, on the replicas of all processes: ``cluster_training.py ROWS`` prints its numbers."""

# ruff: noqa: E402 - the cluster is connected before anything that might open devices is imported

from __future__ import annotations

import json
import logging
import sys
import tempfile

import phalanx as px

logging.basicConfig(level=logging.INFO, format="%(message)s")
logging.getLogger("jax").setLevel(logging.ERROR)
spec = px.connect(timeout=60)

import jax
import jax.numpy as jnp
import keras
import numpy as np
import optax
from sklearn.datasets import load_digits

STRATEGY = px.Mirrored()
ME = spec.process_id
BATCH = 24

digits = load_digits()
IMAGES = (digits.images[:106] / 16).astype(np.float32)  # four batches and a last one of 10 rows
LABELS = digits.target[:106].astype(np.int32)


def small(model_dropout=0.0):
    return keras.Sequential([
        keras.Input((8, 8, 1)),
        keras.layers.Flatten(),
        keras.layers.Dense(8, use_bias=False),  # a bias would have no gradient but noise
        keras.layers.BatchNormalization(),
        keras.layers.Dropout(model_dropout),
        keras.layers.Dense(10),
    ])  # fmt: skip


def plain_loop(source, **options):
    """Plain JAX and optax; the loss of each batch, as a mean over its rows, and the last weights."""
    with STRATEGY.scope():
        w = px.Variable(0.01 * jax.random.normal(jax.random.key(1), (64, 10)), name="w")
        optimizer = px.Optimizer(optax.adam(1e-2))

    @px.function
    def step(batch):
        def replica(x, y, mask):
            rows = px.get_replica_context().all_reduce("sum", mask.sum())
            with px.GradientTape() as tape:
                losses = optax.softmax_cross_entropy_with_integer_labels(x.reshape(len(x), -1) @ w, y)
                loss = (losses * mask).sum() / rows
            optimizer.apply_gradients([(tape.gradient(loss, w), w)])
            return loss

        return STRATEGY.reduce("sum", STRATEGY.run(replica, batch))

    losses = []
    for _ in range(2):
        dataset = STRATEGY.distribute_dataset(source, BATCH, remainder="pad", mask=True, **options)
        for batch in px.progress(dataset, "plain"):
            losses.append(step(batch))
    return {"losses": [float(loss) for loss in losses], "weights": float(jnp.abs(w.value).sum())}


def uneven_parts():
    """Every process has rows of its own, of other number than the others'; all are seen once.

    Which rows share a batch depends on the number of processes, so what is compared is a sum over all rows.
    """
    count = px.cluster.describe().num_processes
    rows = np.arange(1.0, 107.0, dtype=np.float32)
    own = rows[0:11] if count > 1 and ME == 0 else rows[11 + ME - 1 :: count - 1] if count > 1 else rows
    with STRATEGY.scope():
        total = px.Variable(0.0, synchronization="on_read", aggregation="sum")

    def replica(x, mask):
        total.assign_add((x * x * mask).sum())

    dataset = STRATEGY.distribute_dataset(own, BATCH, remainder="pad", mask=True, auto_shard="off")
    for batch in dataset:
        STRATEGY.run(replica, batch)
    return float(total)


def keras_loop():
    keras.utils.set_random_seed(2)
    with STRATEGY.scope():
        model = small()
        optimizer = keras.optimizers.SGD(0.1, momentum=0.9)
    loss_of = keras.losses.SparseCategoricalCrossentropy(from_logits=True)

    @px.function
    def step(batch):
        def replica(x, y):
            with px.GradientTape() as tape:
                loss = loss_of(y, model(x[..., None], training=False))
            grads = tape.gradient(loss, model.trainable_variables)
            optimizer.apply_gradients(zip(grads, model.trainable_variables))
            return loss

        return STRATEGY.reduce("sum", STRATEGY.run(replica, batch))

    dataset = STRATEGY.distribute_dataset((IMAGES, LABELS), BATCH, remainder="drop", shuffle=True, seed=4)
    return [float(step(batch)) for _ in range(2) for batch in dataset]


def keras_fit():
    keras.utils.set_random_seed(3)
    said = []
    model = px.keras.replicate(small(), STRATEGY, synchronize_batch_norm=True)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(optimizer=keras.optimizers.SGD(0.05, momentum=0.9), loss=loss, metrics=["accuracy"])
    # One path for all: process 0's.
    folder = px.cluster.agree(tempfile.mkdtemp())[0]
    history = model.fit(
        IMAGES[..., None],
        LABELS,
        batch_size=BATCH,
        epochs=2,
        validation_split=0.1,
        shuffle=True,
        verbose=2,
        callbacks=[
            keras.callbacks.ModelCheckpoint(f"{folder}/model.keras"),
            keras.callbacks.CSVLogger(f"{folder}/log.csv"),
            keras.callbacks.LambdaCallback(on_epoch_end=lambda epoch, logs: said.append(logs["loss"])),
        ],
    ).history
    predictions = model.predict(IMAGES[:50, :, :, None], batch_size=BATCH, verbose=0)
    evaluated = model.evaluate(IMAGES[..., None], LABELS, batch_size=BATCH, verbose=0)
    px.cluster.agree("all have saved")
    loaded = keras.saving.load_model(f"{folder}/model.keras")
    return {
        "history": history,
        "heard": said,
        "rows": len(predictions),
        "predictions": float(np.abs(predictions).sum()),
        "order": predictions[:, 0].tolist(),
        "evaluated": evaluated,
        "loaded": float(sum(np.abs(w).sum() for w in loaded.get_weights())),
        "weights": float(sum(np.abs(np.asarray(w)).sum() for w in model.get_weights())),
        "lines of the log": len(open(f"{folder}/log.csv").readlines()),
    }


def stop_on_one_process():
    """A callback of the last process alone ends the training, for all."""
    keras.utils.set_random_seed(5)
    model = px.keras.replicate(small(), STRATEGY)
    model.compile(optimizer="sgd", loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True))

    def stop(batch, logs):
        if spec.num_processes - 1 == ME and batch == 1:
            model.stop_training = True

    watcher = keras.callbacks.LambdaCallback(on_train_batch_end=stop)
    history = model.fit(IMAGES[..., None], LABELS, batch_size=BATCH, epochs=5, verbose=0, callbacks=[watcher])
    return len(history.history["loss"])


def initial_values():
    """Random numbers that nobody has seeded, and such that differ by design."""
    with STRATEGY.scope():
        drawn = px.Variable(np.random.normal(size=(3, 3)).astype(np.float32), name="drawn")
        own = px.Variable(jnp.full(2, 1.0 + ME), name="own")
        whole = px.Variable(np.array([ME, 7], np.int32), name="whole")
    return [drawn.numpy().tolist(), own.numpy().tolist(), whole.numpy().tolist()]


result = {
    "initial": initial_values(),
    "same source": plain_loop((IMAGES, LABELS), shuffle=True, seed=1),
    "uneven": uneven_parts(),
    "keras loop": keras_loop(),
    "keras fit": keras_fit(),
    "stopped": stop_on_one_process(),
}
print(json.dumps(result))
sys.stdout.flush()
