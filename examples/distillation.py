"""Distillation: a small student learns from what a large teacher thinks of images without labels.

    python examples/distillation.py
    python examples/distillation.py --replicas 8    # the same numbers

Needs: pip install '.[examples,keras]' from a checkout.
"""

import os

os.environ["KERAS_BACKEND"] = "jax"  # before Keras is imported

import keras
from common import digits, report, start
from keras import layers, ops

import phalanx as px

LABELLED = 60  # images whose labels the student sees
TEMPERATURE = 3.0

strategy, quick = start(__doc__)
epochs = 6 if quick else 30
keras.utils.set_random_seed(1)
(images, labels), held_out = digits()


class Distiller(px.keras.Model):
    """Trains a student to say what a teacher says, as softly as the temperature makes it."""

    def __init__(self, teacher, student):
        super().__init__()
        self.teacher = teacher  # only asked: the student alone gets gradients
        self.student = student
        self.distance = keras.metrics.Mean(name="distance")

    def call(self, images):
        return self.student(images)

    def train_step(self, images):
        said = ops.softmax(self.teacher(images, training=False) / TEMPERATURE)
        with px.GradientTape() as tape:
            answered = ops.softmax(self.student(images, training=True) / TEMPERATURE)
            distances = keras.losses.kl_divergence(said, answered)
            loss = ops.mean(distances) * TEMPERATURE**2  # over this replica's rows
        grads = tape.gradient(loss, self.student.trainable_variables)
        self.optimizer.apply_gradients(zip(grads, self.student.trainable_variables))
        self.distance.update_state(distances)
        return {"distance": self.distance.result()}


def small():
    return keras.Sequential([keras.Input((8, 8, 1)), layers.Flatten(), layers.Dense(16, "relu"), layers.Dense(10)])


def compiled(model):
    """With settings that all models share."""
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.Adam(3e-3), loss, metrics=["accuracy"])
    return model


with strategy.scope():
    teacher = compiled(
        px.keras.replicate(
            keras.Sequential(
                [
                    keras.Input((8, 8, 1)),
                    layers.Conv2D(32, 3, padding="same", activation="relu"),
                    layers.MaxPooling2D(),
                    layers.Conv2D(64, 3, padding="same", activation="relu"),
                    layers.Flatten(),
                    layers.Dense(10),
                ]
            )
        )
    )
    alone = compiled(px.keras.replicate(small()))
    distiller = compiled(Distiller(teacher, small()))

print("teacher")
teacher.fit(images, labels, batch_size=64, epochs=epochs // 2, callbacks=[report("loss {loss:.4f}")], verbose=0)
alone.fit(images[:LABELLED], labels[:LABELLED], batch_size=30, epochs=10 * epochs, verbose=0)
print("student")
distiller.fit(images, batch_size=32, epochs=epochs, callbacks=[report("distance {distance:.4f}")], verbose=0)

for who, model in (
    ("teacher", teacher),
    (f"student with {LABELLED} labels", alone),
    ("student of the teacher", distiller),
):
    accuracy = model.evaluate(*held_out, verbose=0, return_dict=True)["accuracy"]
    print(f"held-out accuracy of the {who}: {accuracy:.1%}")
