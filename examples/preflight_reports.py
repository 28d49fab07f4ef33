"""Three training steps, compiled for TPU slices that are not here: the reports of docs/howto/preflight.md.

    python examples/preflight_reports.py                 # all of them, into out/preflight
    python examples/preflight_reports.py digits          # one

Each report is written as a page, as JSON and as text. Nothing runs: the models are abstract, and only the compiler for
TPUs is needed. Needs: pip install '.[examples,keras,preflight]' from a checkout.
"""

from __future__ import annotations

import os

os.environ["KERAS_BACKEND"] = "jax"  # before Keras is imported
os.environ.setdefault("JAX_PLATFORMS", "cpu")

import argparse
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import keras
import optax

import phalanx as px

sys.path.insert(0, str(Path(__file__).parent))

# ---- the digits ----------------------------------------------------------------------------------


def digits(topology: str = "v5e:2x4", rows: int = 1024):
    """The convolutional network of digits.py."""
    from digits import preflight_train_step

    with px.abstract():
        step, *arguments = preflight_train_step(rows)
    return px.preflight(step, *arguments, topology=topology, effort="quick")


# ---- ResNet-50 -----------------------------------------------------------------------------------


def resnet(topology: str = "v5e:4x4", rows: int = 1024):
    """Keras's ResNet-50 on images of 224 x 224, with momentum."""
    with px.abstract():
        model = px.keras.replicate(keras.applications.ResNet50(weights=None), px.Mirrored())
        model.compile(keras.optimizers.SGD(0.1, momentum=0.9), keras.losses.SparseCategoricalCrossentropy())
    return model.preflight(topology=topology, batch_size=rows, effort="quick")


# ---- a transformer of the size of GPT-2 small ----------------------------------------------------

WIDTH, HEADS, BLOCKS, WORDS, CONTEXT = 768, 12, 12, 50257, 1024
SHAPES = {
    "qkv": (WIDTH, 3 * WIDTH),
    "project": (WIDTH, WIDTH),
    "up": (WIDTH, 4 * WIDTH),
    "down": (4 * WIDTH, WIDTH),
    "norm1": (WIDTH,),
    "norm2": (WIDTH,),
}


class Transformer:
    """Decoder blocks in plain JAX, with variables; computes in `dtype`, and stores float32."""

    def __init__(self, context: int = CONTEXT, dtype: str = "float32", remat: bool = False) -> None:
        self.dtype, self.context = dtype, context
        self.block = jax.checkpoint(self.plain_block) if remat else self.plain_block
        self.words = px.Variable(jnp.zeros((WORDS, WIDTH)), name="words")
        self.places = px.Variable(jnp.zeros((context, WIDTH)), name="places")
        self.norm = px.Variable(jnp.ones(WIDTH), name="norm")
        self.blocks = [
            {name: px.Variable(jnp.zeros(shape), name=f"block{i}/{name}") for name, shape in SHAPES.items()}
            for i in range(BLOCKS)
        ]
        self.variables = [self.words, self.places, self.norm, *(v for block in self.blocks for v in block.values())]

    def plain_block(self, x, w):
        heads = (*x.shape[:2], HEADS, WIDTH // HEADS)
        q, k, v = (part.reshape(heads) for part in jnp.split(normalized(x, w["norm1"]) @ w["qkv"], 3, axis=-1))
        x = x + jax.nn.dot_product_attention(q, k, v, is_causal=True).reshape(x.shape) @ w["project"]
        return x + jax.nn.gelu(normalized(x, w["norm2"]) @ w["up"]) @ w["down"]

    def loss(self, tokens):
        x = (self.words.value[tokens[:, :-1]] + self.places.value).astype(self.dtype)
        for block in self.blocks:
            x = self.block(x, {name: v.value.astype(self.dtype) for name, v in block.items()})
        x = normalized(x, self.norm.value.astype(self.dtype))
        scores = x @ self.words.value.astype(self.dtype).T
        return optax.softmax_cross_entropy_with_integer_labels(scores.astype("float32"), tokens[:, 1:]).mean()


def normalized(x, scale):
    x32 = x.astype("float32")
    return ((x32 * jax.lax.rsqrt((x32 * x32).mean(-1, keepdims=True) + 1e-6)).astype(x.dtype)) * scale


def transformer_step(rows: int, **settings):
    """The step, and its example argument."""
    strategy = px.Mirrored()
    with px.abstract(), strategy.scope():
        model = Transformer(**settings)
        optimizer = px.Optimizer(optax.adam(3e-4))
        optimizer.build(model.variables)

    def update(tokens):
        with px.GradientTape() as tape:
            loss = model.loss(tokens)
        optimizer.apply_gradients(zip(tape.gradient(loss, model.variables), model.variables), reduce="mean")
        return loss

    @px.function
    def train_step(tokens):
        return strategy.reduce("mean", strategy.run(update, (tokens,)))

    return train_step, jax.ShapeDtypeStruct((rows, model.context + 1), jnp.int32)


def transformer(topology: str = "v5e:2x4", rows: int = 128, **settings):
    """Adam in float32: 16 rows of 1,024 words for each chip."""
    return px.preflight(*transformer_step(rows, **settings), topology=topology, effort="quick")


# ---- all of them ---------------------------------------------------------------------------------

REPORTS = {
    "digits": digits,
    "resnet50-v5e": resnet,
    "resnet50-v6e": lambda: resnet("v6e:4x4"),
    "transformer-float32": transformer,
    "transformer-bfloat16": lambda: transformer(dtype="bfloat16"),
    "transformer-bfloat16-remat": lambda: transformer(dtype="bfloat16", remat=True),
}


def main() -> int:
    parser = argparse.ArgumentParser(description="Compile three training steps for TPU slices that are not here.")
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"which of {', '.join(REPORTS)} (default: all)")
    parser.add_argument("--out", type=Path, default=Path("out/preflight"), help="where they go (default: %(default)s)")
    options = parser.parse_args()
    unknown = set(options.names) - set(REPORTS)
    if unknown:
        parser.error(f"there is no report {', '.join(sorted(unknown))}")
    options.out.mkdir(parents=True, exist_ok=True)
    for name in options.names or REPORTS:
        report = REPORTS[name]()
        if not report.fits:
            _ = report.largest_batch_that_fits  # which the text then names
        text = str(report)
        print(f"== {name}\n{text}\n", flush=True)
        report.save_html(options.out / f"{name}.html")
        (options.out / f"{name}.json").write_text(report.to_json())
        (options.out / f"{name}.txt").write_text(text + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
