"""A variational autoencoder: a model with a training step of its own, as in TensorFlow 2.

    python examples/vae.py
    python examples/vae.py --replicas 8

Each replica draws noise of its own, so the losses differ a little with the number of replicas.
Needs: pip install '.[examples,keras]' from a checkout.
"""

import os

os.environ["KERAS_BACKEND"] = "jax"  # before Keras is imported

import keras
import numpy as np
from common import digits, report, show, start
from keras import layers, ops

import phalanx as px

LATENT = 4


class VAE(px.keras.Model):
    """An encoder to a normal distribution for each image, and a decoder of what is drawn from it."""

    def __init__(self):
        super().__init__()
        self.encoder = keras.Sequential([layers.Flatten(), layers.Dense(128, "relu"), layers.Dense(2 * LATENT)])
        self.decoder = keras.Sequential([layers.Dense(128, "relu"), layers.Dense(64), layers.Reshape((8, 8, 1))])
        self.seed = keras.random.SeedGenerator(1)
        self.loss_tracker = keras.metrics.Mean(name="loss")
        self.reconstruction_tracker = keras.metrics.Mean(name="reconstruction")
        self.kl_tracker = keras.metrics.Mean(name="kl")

    def call(self, images):
        mean, _ = ops.split(self.encoder(images), 2, axis=-1)
        return ops.sigmoid(self.decoder(mean))

    def losses_of(self, images):
        """For each image: how badly it is restored, and how far its distribution is from the normal one."""
        mean, log_variance = ops.split(self.encoder(images), 2, axis=-1)
        noise = keras.random.normal(ops.shape(mean), seed=self.seed)
        restored = self.decoder(mean + ops.exp(log_variance / 2) * noise)
        errors = ops.binary_crossentropy(images, restored, from_logits=True)
        kl = (ops.exp(log_variance) + mean**2 - 1 - log_variance) / 2
        return ops.sum(errors, axis=(1, 2, 3)), ops.sum(kl, axis=1)

    def track(self, reconstruction, kl):
        self.loss_tracker.update_state(reconstruction + kl)
        self.reconstruction_tracker.update_state(reconstruction)
        self.kl_tracker.update_state(kl)
        return {metric.name: metric.result() for metric in self.metrics}

    def train_step(self, images):
        with px.GradientTape() as tape:
            reconstruction, kl = self.losses_of(images)
            loss = ops.mean(reconstruction + kl)  # over this replica's rows
        grads = tape.gradient(loss, self.trainable_variables)
        self.optimizer.apply_gradients(zip(grads, self.trainable_variables))  # the mean over all replicas
        return self.track(reconstruction, kl)

    def test_step(self, images):
        return self.track(*self.losses_of(images))


strategy, quick = start(__doc__)
keras.utils.set_random_seed(1)
(images, _), (held_out, labels) = digits()
with strategy.scope():
    model = VAE()
model.compile(optimizer=keras.optimizers.Adam(2e-3))

model.fit(
    images,
    epochs=3 if quick else 40,
    batch_size=64,
    callbacks=[report("loss {loss:.2f} = reconstruction {reconstruction:.2f} + kl {kl:.2f}")],
    verbose=0,
)
result = model.evaluate(held_out, verbose=0, return_dict=True)

print("held-out digits, the same through four numbers each, and new ones:")
shown = held_out[[np.argmax(labels == digit) for digit in range(6)]]
show(shown)
show(model.predict(shown, verbose=0))
noise = np.random.default_rng(1).normal(size=(6, LATENT)).astype("float32")
show(ops.sigmoid(model.decoder(noise)))
print(f"held-out loss: {result['loss']:.2f}")
