"""The datasets of other libraries: PyTorch, TensorFlow, Hugging Face, grain and Keras.

They are recognised by the modules of their types; none is imported for it.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from typing import Any, Literal

import numpy as np

from phalanx.data.host import check_numeric, packages

Kind = Literal["datasets", "grain", "keras", "tensorflow", "torch"]


def table(value: Any) -> tuple[int, Callable[[Any], Any]] | None:
    """Number of rows of a `datasets.Dataset`, and how to read some of them; None for anything else."""
    if "datasets" not in packages(value) or not hasattr(value, "num_rows"):
        return None
    transformed = value.format["type"] == "custom"  # by a function of the user's, which says what the rows are
    rows = value if transformed else value.with_format("numpy")

    def read(index: Any) -> dict[str, Any]:
        return {name: np.asarray(column) for name, column in rows[index].items()}

    if value.num_rows:
        for name, column in read(slice(0, 1)).items():
            check_numeric(column.dtype, f"column {name!r}")
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


def batches(library: Kind, dataset: Any) -> tuple[Callable[[], Iterable[Any]], int | None]:
    """How to iterate a dataset once, and how many items it has."""
    if library == "tensorflow":
        count = int(dataset.cardinality())
        return dataset.as_numpy_iterator, count if count >= 0 else None
    if library == "datasets":  # a stream; its transforms, if any, say what the rows are
        return dataset.with_format("numpy").__iter__, None
    return lambda: iter(dataset), length_of(dataset)


def length_of(value: Any) -> int | None:
    """``len(value)``, or None where it has none or never ends."""
    try:
        length = len(value)
    except (TypeError, NotImplementedError):
        return None
    return length if length < sys.maxsize else None  # how grain says that a dataset repeats for ever
