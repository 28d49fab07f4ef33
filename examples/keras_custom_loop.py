"""A training loop written by hand, with Keras's model, optimizer and metrics, as in TensorFlow 2.

    python examples/keras_custom_loop.py                 # two replicas
    python examples/keras_custom_loop.py --replicas 8    # the same numbers

Needs: pip install '.[examples,keras]' from a checkout.
"""

import os

os.environ["KERAS_BACKEND"] = "jax"  # before Keras is imported

import keras
from common import digits, start

import phalanx as px

BATCH = 96  # over all replicas

strategy, quick = start(__doc__)
keras.utils.set_random_seed(1)
learned, held_out = digits()
batches = strategy.distribute_dataset(learned, BATCH, remainder="drop", shuffle=True, seed=1)
validation_batches = strategy.distribute_dataset(held_out, 120)

with strategy.scope():
    model = keras.Sequential(
        [
            keras.Input((8, 8, 1)),
            keras.layers.Conv2D(16, 3, padding="same", activation="relu"),
            keras.layers.Conv2D(32, 3, strides=2, padding="same", activation="relu"),
            keras.layers.Flatten(),
            keras.layers.Dense(64, activation="relu"),
            keras.layers.Dense(10),
        ]
    )
    optimizer = keras.optimizers.Adam(keras.optimizers.schedules.ExponentialDecay(3e-3, 100, 0.5))
    loss_of = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    loss_seen = keras.metrics.SparseCategoricalCrossentropy(from_logits=True)
    accuracy = keras.metrics.SparseCategoricalAccuracy()
    validation_accuracy = keras.metrics.SparseCategoricalAccuracy()


@px.function
def train_step(batch):
    def replica_step(images, labels):
        with px.GradientTape() as tape:
            scores = model(images, training=True)
            loss = loss_of(labels, scores)  # this replica's share of the mean over all rows
        grads = tape.gradient(loss, model.trainable_variables)
        optimizer.apply_gradients(zip(grads, model.trainable_variables))  # adds the gradients of all replicas up
        loss_seen.update_state(labels, scores)
        accuracy.update_state(labels, scores)

    strategy.run(replica_step, batch)


@px.function
def validation_step(batch):
    strategy.run(lambda images, labels: validation_accuracy.update_state(labels, model(images)), batch)


for epoch in range(3 if quick else 15):
    for metric in (loss_seen, accuracy, validation_accuracy):
        metric.reset_state()
    for batch in batches:
        train_step(batch)
    for batch in validation_batches:
        validation_step(batch)
    print(f"epoch {epoch + 1}: loss {loss_seen.result():.4f}, accuracy {accuracy.result():.1%}")

print(f"held-out accuracy: {validation_accuracy.result():.1%}")
