"""Keras's fit, evaluate and predict on all replicas: one line is added to a script for one device.

    python examples/keras_fit.py                 # two replicas
    python examples/keras_fit.py --replicas 8    # the same numbers

Needs: pip install '.[examples,keras]' from a checkout.
"""

import os

os.environ["KERAS_BACKEND"] = "jax"  # before Keras is imported

import keras
from common import digits, report, start

import phalanx as px

strategy, quick = start(__doc__)
keras.utils.set_random_seed(1)
(images, labels), (held_out_images, held_out_labels) = digits()

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
model = px.keras.replicate(model, strategy)  # the line that is added
model.compile(
    optimizer=keras.optimizers.Adam(3e-3),
    loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
    metrics=["accuracy"],
)
model.fit(
    images,
    labels,
    batch_size=100,  # over all replicas; the last batch has 94 rows, and each of them counts once
    epochs=3 if quick else 20,
    validation_split=0.1,
    callbacks=[
        keras.callbacks.ReduceLROnPlateau("val_loss", factor=0.5, patience=2, verbose=0),
        keras.callbacks.EarlyStopping("val_loss", patience=5, restore_best_weights=True),
        report("loss {loss:.4f}, validation loss {val_loss:.4f}"),
    ],
    verbose=0,
)

_, accuracy = model.evaluate(held_out_images, held_out_labels, verbose=0)
recognized = model.predict(held_out_images, verbose=0).argmax(axis=1)
print("the first held-out digits:", *held_out_labels[:12])
print("             predicted as:", *recognized[:12])
print(f"held-out accuracy: {accuracy:.1%}")
