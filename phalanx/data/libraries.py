"""The datasets of other libraries: PyTorch, TensorFlow, Hugging Face, grain and Keras.

They are recognised by the modules of their types; none is imported for it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from typing import Any, Literal

from phalanx._checks import packages
from phalanx.data.host import host_array
from phalanx.errors import ArgumentTypeError

Kind = Literal["datasets", "grain", "keras", "tensorflow", "torch"]

_ENDLESS = 2**40
"""Lengths from here on are a library's way to say that a dataset repeats for ever."""


def table(value: Any) -> tuple[int, Callable[[Any], Any]] | None:
    """Number of rows of a `datasets.Dataset`, and how to read some of them; None for anything else."""
    if "datasets" in packages(value) and isinstance(value, dict):
        raise ArgumentTypeError(
            f"distribute_dataset: {type(value).__name__} is a dict of datasets. Choose a split:"
            f" {', or '.join(f'dataset[{name!r}]' for name in value)}."
        )
    if "datasets" not in packages(value) or not hasattr(value, "num_rows"):
        return None
    transformed = value.format["type"] == "custom"  # by a function of the user's, which says what the rows are
    rows = value if transformed else value.with_format("numpy")

    def read(index: Any) -> dict[str, Any]:
        return {name: host_array(column, f"column {name!r}") for name, column in rows[index].items()}

    if value.num_rows:
        read(slice(0, 1))
    return int(value.num_rows), read


def kind(value: Any) -> Kind | None:
    """The library that `value` is a dataset of."""
    bases = packages(value)
    if "datasets" in bases and hasattr(value, "with_format"):
        return "datasets"
    if "grain" in bases and hasattr(value, "__iter__"):
        return "grain"
    if "keras" in bases and hasattr(value, "num_batches"):
        return "keras"
    if "tensorflow" in bases and hasattr(value, "as_numpy_iterator"):
        return "tensorflow"
    if "torch" in bases and (hasattr(value, "__iter__") or hasattr(value, "__getitem__")):
        return "torch"
    return None


_KEEPS_ROWS = re.compile(r"_?(Parallel)?(Cache|Filter|Map|Options|Prefetch|Repeat|Shuffle|Skip|Slice|Take)")
"""Steps of tf.data and grain that give batches where they get batches, by the names of their types."""


def gives_batches(value: Any) -> bool:
    """Whether the items of `value` are batches and no rows, where its library tells."""
    library = kind(value)
    if library == "keras":
        return True
    if library == "torch":
        return getattr(value, "batch_sampler", None) is not None
    if library not in ("grain", "tensorflow"):
        return False
    steps = [*getattr(value, "_operations", ())][-1:] or [value]  # those of a grain loader
    while len(steps) == 1:
        name = type(steps[0]).__name__
        if re.search("Batch|Rebatch", name):
            return True
        if not _KEEPS_ROWS.match(name):
            return False
        steps = _inputs(steps[0])
    return False


def _inputs(step: Any) -> list[Any]:
    """What a step of tf.data or grain reads from."""
    return list(step._inputs() if hasattr(step, "_inputs") else getattr(step, "parents", ()))


def batches(library: Kind, dataset: Any) -> tuple[Callable[[], Iterable[Any]], int | None]:
    """How to iterate a dataset once, and how many items it has."""
    if library == "tensorflow":
        count = int(dataset.cardinality())
        return dataset.as_numpy_iterator, count if count >= 0 else None
    if library == "datasets":  # a stream; its transforms, if any, say what the rows are
        # A stream keeps the place of all its iterators in itself: each pass gets one of its own, with all the shards.
        return lambda: iter(dataset.shard(num_shards=1, index=0).with_format("numpy")), None
    return lambda: iter(dataset), length_of(dataset)


def length_of(value: Any) -> int | None:
    """``len(value)``, or None where it has none or never ends."""
    try:
        length = len(value)
    except Exception:  # whatever a class of the user's does where it cannot tell
        return None
    return length if length < _ENDLESS else None
