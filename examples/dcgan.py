"""A DCGAN draws digits: two models, two optimizers, one step, as in TensorFlow 2.

    python examples/dcgan.py
    python examples/dcgan.py --replicas 8

Each replica draws noise of its own, so the pictures differ with the number of replicas.
Needs: pip install '.[examples,keras]' from a checkout.
"""

import os

os.environ["KERAS_BACKEND"] = "jax"  # before Keras is imported

import keras
import numpy as np
from common import digits, show, start
from keras import layers
from sklearn.linear_model import LogisticRegression

import phalanx as px

BATCH = 128  # over all replicas
NOISE = 32

strategy, quick = start(__doc__)
keras.utils.set_random_seed(1)
(images, labels), _ = digits()
images = images * 2 - 1  # as the generator's tanh
batches = strategy.distribute_dataset(images, BATCH, remainder="drop", shuffle=True, seed=1)

with strategy.scope():
    generator = keras.Sequential(
        [
            keras.Input((NOISE,)),
            layers.Dense(2 * 2 * 64, use_bias=False),
            layers.BatchNormalization(),
            layers.LeakyReLU(),
            layers.Reshape((2, 2, 64)),
            layers.Conv2DTranspose(32, 3, strides=2, padding="same", use_bias=False),
            layers.BatchNormalization(),
            layers.LeakyReLU(),
            layers.Conv2DTranspose(1, 3, strides=2, padding="same", activation="tanh"),
        ]
    )
    discriminator = keras.Sequential(
        [
            keras.Input((8, 8, 1)),
            layers.Conv2D(32, 3, strides=2, padding="same"),
            layers.LeakyReLU(),
            layers.Conv2D(64, 3, strides=2, padding="same"),
            layers.LeakyReLU(),
            layers.Flatten(),
            layers.Dense(1),
        ]
    )
    generator_optimizer = keras.optimizers.Adam(1e-3, beta_1=0.5)
    discriminator_optimizer = keras.optimizers.Adam(1e-3, beta_1=0.5)
    cross_entropy = keras.losses.BinaryCrossentropy(from_logits=True)
    seed = keras.random.SeedGenerator(1)


@px.function
def train_step(batch):
    def replica_step(images):
        noise = keras.random.normal((len(images), NOISE), seed=seed)
        with px.GradientTape() as g_tape, px.GradientTape() as d_tape:
            drawn = generator(noise, training=True)
            real = discriminator(images, training=True)
            fake = discriminator(drawn, training=True)
            g_loss = cross_entropy(keras.ops.ones_like(fake), fake)
            d_loss = cross_entropy(keras.ops.ones_like(real), real) + cross_entropy(keras.ops.zeros_like(fake), fake)
        g_grads = g_tape.gradient(g_loss, generator.trainable_variables)
        d_grads = d_tape.gradient(d_loss, discriminator.trainable_variables)
        generator_optimizer.apply_gradients(zip(g_grads, generator.trainable_variables))
        discriminator_optimizer.apply_gradients(zip(d_grads, discriminator.trainable_variables))
        return g_loss, d_loss  # this replica's shares

    return strategy.reduce("sum", strategy.run(replica_step, (batch,)))


judge = LogisticRegression(max_iter=1000).fit(images.reshape(len(images), -1), labels)


def score(drawn: np.ndarray) -> float:
    """The inception score, by a judge that knows digits: from 1 to 10, for pictures that are clear and of all kinds."""
    p = judge.predict_proba(drawn.reshape(len(drawn), -1)) + 1e-9
    return float(np.exp((p * np.log(p / p.mean(axis=0))).sum(axis=1).mean()))


fixed_noise = np.random.default_rng(1).normal(size=(256, NOISE)).astype("float32")
for epoch in range(10 if quick else 60):
    losses = np.mean([train_step(batch) for batch in batches], axis=0)
    if epoch % 10 == 9:
        drawn = generator.predict(fixed_noise, verbose=0)
        g_loss, d_loss = losses
        print(f"epoch {epoch + 1}: generator {g_loss:.3f}, discriminator {d_loss:.3f}, score {score(drawn):.2f}")

show((drawn[:6] + 1) / 2)
print(f"score: {score(drawn):.2f} (the real digits: {score(images):.2f})")
