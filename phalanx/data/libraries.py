"""The datasets of other libraries, recognised by the modules of their types: none is imported for it.

h5py, PyTorch, TensorFlow, Hugging Face datasets, grain and Keras.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from typing import Any, Literal

import jax
import numpy as np

from phalanx.data.elements import check_numeric, host_array

Kind = Literal["datasets", "grain", "keras", "tensorflow", "torch"]


def _packages(value: Any) -> set[str]:
    """The packages that the value's type and its base classes come from."""
    return {base.__module__.partition(".")[0] for base in type(value).__mro__}


# ---- arrays --------------------------------------------------------------------------------------


def is_array(value: Any) -> bool:
    """Whether rows of `value` can be read by index."""
    if isinstance(value, (np.ndarray, jax.Array)):
        return True
    libraries = {"h5py", "torch", "tensorflow"}
    return hasattr(value, "shape") and hasattr(value, "dtype") and not libraries.isdisjoint(_packages(value))


def as_rows(array: Any, what: str) -> Any:
    """`array` as something that gives NumPy rows when it is indexed; what lies in a file stays there."""
    if isinstance(array, np.ndarray) or "h5py" in _packages(array):
        return array
    return _numpy(array) if "torch" in _packages(array) else host_array(array, what)


def _numpy(tensor: Any) -> Any:
    """A PyTorch tensor as a NumPy array that shares its memory; anything else as it is."""
    if not hasattr(tensor, "detach"):
        return tensor
    tensor = tensor.detach().cpu()
    torch = sys.modules["torch"]
    if tensor.dtype == torch.bfloat16:  # which NumPy knows through JAX only
        return tensor.view(torch.int16).numpy().view(jax.numpy.bfloat16)
    return tensor.numpy()


def table(value: Any) -> tuple[int, Callable[[Any], Any]] | None:
    """Number of rows of a `datasets.Dataset`, and how to read some of them; None for anything else."""
    if "datasets" not in _packages(value) or not hasattr(value, "num_rows"):
        return None
    transformed = value.format["type"] == "custom"  # by a function of the user's, which says what the rows are
    rows = value if transformed else value.with_format("numpy")

    def read(index: Any) -> dict[str, Any]:
        return {name: np.asarray(column) for name, column in rows[index].items()}

    if value.num_rows:
        for name, column in read(slice(0, 1)).items():
            check_numeric(column.dtype, f"column {name!r}")
    return int(value.num_rows), read


# ---- datasets ------------------------------------------------------------------------------------


def kind(value: Any) -> Kind | None:
    """The library that `value` is a dataset of."""
    packages = _packages(value)
    if "datasets" in packages and hasattr(value, "with_format"):
        return "datasets"
    if "grain" in packages and hasattr(value, "__iter__"):
        return "grain"
    if "keras" in packages and hasattr(value, "num_batches"):
        return "keras"
    if "tensorflow" in packages and hasattr(value, "as_numpy_iterator"):
        return "tensorflow"
    if "torch" in packages and hasattr(value, "__getitem__" if not hasattr(value, "__iter__") else "__iter__"):
        return "torch"
    return None


def batches(library: Kind, dataset: Any) -> tuple[Callable[[], Iterable[Any]], int | None]:
    """How to iterate a dataset once, with NumPy arrays, and how many items it has."""
    if library == "tensorflow":
        count = int(dataset.cardinality())
        return dataset.as_numpy_iterator, count if count >= 0 else None
    if library == "datasets":  # a stream; its transforms, if any, say what the rows are
        return dataset.with_format("numpy").__iter__, None
    return lambda: (jax.tree.map(_numpy, item) for item in dataset), length_of(dataset)


def length_of(value: Any) -> int | None:
    """``len(value)``, or None where it has none or never ends."""
    try:
        length = len(value)
    except (TypeError, NotImplementedError):
        return None
    return length if length < sys.maxsize else None  # how grain says that a dataset repeats for ever
