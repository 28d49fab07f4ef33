"""A small transformer learns to write, one character after another, in mixed precision.

    python examples/transformer.py
    python examples/transformer.py --replicas 8    # the same losses, as far as bfloat16 goes

It reads the licence of this project. Needs: pip install '.[examples,keras]' from a checkout.
"""

import os

os.environ["KERAS_BACKEND"] = "jax"  # before Keras is imported

from pathlib import Path

import jax
import keras
import numpy as np
from common import report, start
from keras import layers, ops

import phalanx as px

CONTEXT = 48  # characters that it sees
WIDTH = 64
HEADS = 4
BLOCKS = 2
BATCH = 32  # over all replicas

strategy, quick = start(__doc__)
keras.utils.set_random_seed(1)
keras.config.set_dtype_policy("mixed_bfloat16")  # computes in bfloat16; variables are float32

text = " ".join((Path(__file__).parents[1] / "LICENSE").read_text().split())
characters = sorted(set(text))
numbers = np.array([characters.index(c) for c in text], "int32")
windows = np.lib.stride_tricks.sliding_window_view(numbers, CONTEXT + 1)[:: 8 if quick else 4]
epochs = 1 if quick else 6


class Embedding(layers.Layer):
    """Of characters and of their places."""

    def __init__(self):
        super().__init__()
        self.of_characters = layers.Embedding(len(characters), WIDTH)
        self.of_places = layers.Embedding(CONTEXT, WIDTH)

    def call(self, x):
        return self.of_characters(x) + self.of_places(ops.arange(x.shape[1]))


def block(x):
    """Look back, then think."""
    y = layers.LayerNormalization()(x)
    x = x + layers.MultiHeadAttention(HEADS, WIDTH // HEADS)(y, y, use_causal_mask=True)
    y = layers.LayerNormalization()(x)
    return x + layers.Dense(WIDTH)(layers.Dense(4 * WIDTH, "gelu")(y))


inputs = keras.Input((CONTEXT,), dtype="int32")
x = Embedding()(inputs)
for _ in range(BLOCKS):
    x = block(x)
scores = layers.Dense(len(characters), dtype="float32")(layers.LayerNormalization()(x))
model = px.keras.replicate(keras.Model(inputs, scores), strategy)
model.compile(
    optimizer=keras.optimizers.AdamW(keras.optimizers.schedules.CosineDecay(3e-3, epochs * len(windows) // BATCH)),
    loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
)


@px.function
def next_character(written, temperature, key):
    """One more, given the last ones."""
    last = model(written[None])[0, -1]
    return jax.random.categorical(key, last / temperature)


def write(beginning: str, length: int) -> str:
    written = [characters.index(c) for c in beginning]
    for key in jax.random.split(jax.random.key(1), length):
        window = np.array(([characters.index(" ")] * CONTEXT + written)[-CONTEXT:])
        written.append(int(next_character(window, 0.5, key)))
    return "".join(characters[i] for i in written)


model.fit(
    windows[:, :-1], windows[:, 1:], batch_size=BATCH, epochs=epochs, callbacks=[report("loss {loss:.3f}")], verbose=0
)
print(write("You may ", 60 if quick else 300))
