"""Gradient accumulation: four small batches make one update, which is that of a batch four times as large.

    python examples/accumulation.py
    python examples/accumulation.py --replicas 8    # the same numbers

Needs: pip install '.[examples,keras]' from a checkout.
"""

import os

os.environ["KERAS_BACKEND"] = "jax"  # before Keras is imported

import keras
import numpy as np
from common import digits, start

import phalanx as px

BATCH = 96  # rows for one update, over all replicas

strategy, quick = start(__doc__)
(images, labels), held_out = digits()
learned = images[: 14 * BATCH], labels[: 14 * BATCH]


def train(parts: int) -> tuple[list[float], float]:
    """The loss of each update, from so many batches, and the accuracy in the end."""
    keras.utils.set_random_seed(1)
    with strategy.scope():
        model = keras.Sequential(
            [
                keras.Input((8, 8, 1)),
                keras.layers.Flatten(),
                keras.layers.Dense(128, activation="relu"),
                keras.layers.Dense(10),
            ]
        )
        optimizer = keras.optimizers.Adam(3e-3, global_clipnorm=1.0)
        loss_of = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        step = px.Variable(0, name="step")
        # One sum for each replica: nothing is sent until the update.
        sums = [
            px.Variable(np.zeros(w.shape, w.dtype), synchronization="on_read", aggregation="sum")
            for w in model.trainable_variables
        ]

    def update():
        optimizer.apply_gradients(zip([total.value for total in sums], model.trainable_variables))
        for total in sums:
            total.assign(keras.ops.zeros_like(total))

    @px.function
    def train_step(batch):
        def replica_step(images, labels):
            with px.GradientTape() as tape:
                loss = loss_of(labels, model(images, training=True)) / parts
            for total, grad in zip(sums, tape.gradient(loss, model.trainable_variables)):
                total.assign_add(grad)
            step.assign_add(1)
            px.cond(step % parts == 0, update, lambda: None)
            return loss

        return strategy.reduce("sum", strategy.run(replica_step, batch))

    batches = strategy.distribute_dataset(learned, BATCH // parts, shuffle=True, seed=1)
    losses = [train_step(batch) for _ in range(2 if quick else 20) for batch in batches]
    accuracy = keras.metrics.SparseCategoricalAccuracy()
    accuracy.update_state(held_out[1], model(held_out[0]))
    return np.reshape(losses, (-1, parts)).sum(axis=1), float(accuracy.result())


in_parts, accuracy_in_parts = train(4)
whole, accuracy_whole = train(1)
for update in (0, 9, len(whole) - 1):
    print(f"update {update + 1}: loss {in_parts[update]:.4f} from 4 batches of 24, {whole[update]:.4f} from one of 96")
print(f"largest difference of the losses: {np.abs(in_parts - whole).max():.5f}")
print(f"held-out accuracy: {accuracy_in_parts:.1%} and {accuracy_whole:.1%}")
