"""A Wasserstein GAN with gradient penalty: the loss of the critic contains a gradient, and is differentiated.

    python examples/wgan_gp.py
    python examples/wgan_gp.py --replicas 8

Each replica draws noise of its own, so the pictures differ with the number of replicas.
Needs: pip install '.[examples,keras]' from a checkout.
"""

import os

os.environ["KERAS_BACKEND"] = "jax"  # before Keras is imported

import keras
import numpy as np
from common import digits, report, show, start
from keras import layers, ops

import phalanx as px

NOISE = 16
PENALTY = 10.0
CRITIC_STEPS = 3  # for one step of the generator


class WGAN(px.keras.Model):
    """A generator of images, and a critic whose scores have slope one between real images and drawn ones."""

    def __init__(self):
        super().__init__()
        self.generator = keras.Sequential(
            [
                layers.Dense(128, "relu"),
                layers.Dense(128, "relu"),
                layers.Dense(64, "sigmoid"),
                layers.Reshape((8, 8, 1)),
            ]
        )
        self.critic = keras.Sequential(
            [layers.Flatten(), layers.Dense(128, "silu"), layers.Dense(128, "silu"), layers.Dense(1)]
        )
        self.seed = keras.random.SeedGenerator(1)

    def compile(self, generator_optimizer, critic_optimizer):
        super().compile()
        self.generator_optimizer = generator_optimizer
        self.critic_optimizer = critic_optimizer

    def call(self, noise):
        return self.generator(noise)

    def draw(self, n):
        return self.generator(keras.random.normal((n, NOISE), seed=self.seed), training=True)

    def penalty(self, real, drawn):
        """How far the slope of the critic is from one, on lines from real images to drawn ones."""
        where = keras.random.uniform((len(real), 1, 1, 1), seed=self.seed)
        between = real + where * (drawn - real)
        with px.GradientTape() as tape:
            tape.watch(between)
            scores = self.critic(between)
        slopes = ops.sqrt(ops.sum(tape.gradient(scores, between) ** 2, axis=(1, 2, 3)) + 1e-12)
        return ops.mean((slopes - 1) ** 2)

    def train_step(self, real):
        for _ in range(CRITIC_STEPS):
            with px.GradientTape() as tape:
                drawn = self.draw(len(real))
                distance = ops.mean(self.critic(real)) - ops.mean(self.critic(drawn))
                penalty = self.penalty(real, drawn)
                loss = PENALTY * penalty - distance
            weights = self.critic.trainable_variables
            self.critic_optimizer.apply_gradients(zip(tape.gradient(loss, weights), weights))

        with px.GradientTape() as tape:
            loss = -ops.mean(self.critic(self.draw(len(real))))
        weights = self.generator.trainable_variables
        self.generator_optimizer.apply_gradients(zip(tape.gradient(loss, weights), weights))
        return {"distance": distance, "penalty": penalty}


strategy, quick = start(__doc__)
keras.utils.set_random_seed(1)
(images, _), _ = digits()
with strategy.scope():
    model = WGAN()
model.compile(keras.optimizers.Adam(1e-3, beta_1=0.5), keras.optimizers.Adam(1e-3, beta_1=0.5))

history = model.fit(
    images,
    epochs=3 if quick else 60,
    batch_size=128,
    callbacks=[report("distance {distance:.3f}, penalty {penalty:.4f}")],
    verbose=0,
).history

noise = np.random.default_rng(1).normal(size=(6, NOISE)).astype("float32")
show(model.predict(noise, verbose=0))
first, *_, last = history["distance"]
print(f"distance from the real digits: {first:.3f} at first, {last:.3f} now")
