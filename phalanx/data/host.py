"""Host arrays, whatever library they are of: recognised, taken out of pytrees, compared.

Libraries are recognised by the modules of their types, and never imported for it.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, NoReturn

import jax
import jax.numpy as jnp
import numpy as np

from phalanx._checks import ARRAY_LIBRARIES, is_numeric, packages
from phalanx.distribute.values import PerReplica, is_per_replica
from phalanx.errors import ArgumentError, ArgumentTypeError
from phalanx.variables import Variable

Array = np.ndarray[Any, Any]

_FEW = 8
"""Paths that a message lists."""


# ---- one array -----------------------------------------------------------------------------------


def is_array(value: Any) -> bool:
    """Whether rows of `value` can be read by index."""
    if isinstance(value, (np.ndarray, jax.Array, Variable, PerReplica)):
        return True
    return hasattr(value, "shape") and not ARRAY_LIBRARIES.isdisjoint(packages(value))


def as_rows(array: Any, what: str) -> Any:
    """`array` as something that gives NumPy rows when it is indexed; what lies in a file stays there."""
    return array if "h5py" in packages(array) else host_array(array, what)


def host_array(value: Any, what: str) -> Array:
    """`value` as a NumPy array of numbers, without copying it where that can be."""
    if is_per_replica(value):
        raise ArgumentTypeError(
            f"distribute_dataset: {what} is a PerReplica, which lies on the replicas already. Give it to strategy.run as"
            " it is."
        )
    if isinstance(value, jax.Array) and jnp.issubdtype(value.dtype, jax.dtypes.prng_key):
        raise ArgumentTypeError(f"distribute_dataset: {what} holds random keys. Feed jax.random.key_data(keys).")
    if np.ma.is_masked(value):
        raise ArgumentTypeError(
            f"distribute_dataset: {what} has masked entries, which no device array can have. Fill them with"
            " .filled(value), and feed the mask beside them."
        )
    found = packages(value)
    if "pandas" in found and hasattr(value, "columns"):
        for name, dtype in value.dtypes.items():
            check_numeric(dtype, f"column {name!r} of {what}")
    try:
        array = _of_tensor(value) if "torch" in found else np.asarray(value)
    except Exception as error:
        if "inhomogeneous" in str(error):
            raise _ragged(what) from error
        raise ArgumentTypeError(
            f"distribute_dataset: {what} is no array, or none that NumPy can take: {type(value).__name__} ({error})"
        ) from error
    if array.dtype == object and _holds_rows(array):
        raise _ragged(what)
    check_numeric(array.dtype, what)
    return array


def _of_tensor(tensor: Any) -> Array:
    tensor = tensor.detach().cpu().resolve_conj().resolve_neg()
    name = str(tensor.dtype).removeprefix("torch.")
    if name == "bfloat16" or name.startswith("float8"):  # which NumPy knows through JAX only
        torch = sys.modules["torch"]
        words = {1: torch.uint8, 2: torch.int16}[tensor.element_size()]
        return np.asarray(tensor.view(words)).view(jnp.dtype(name))
    return np.asarray(tensor)


def _holds_rows(array: Array) -> bool:
    """Whether an array of objects is one of rows that do not fit together (TensorFlow's are one object)."""
    first = next(iter(array.flat), None)
    return isinstance(first, (list, tuple, np.ndarray)) or hasattr(first, "row_splits")


def _ragged(what: str) -> ArgumentTypeError:
    return ArgumentTypeError(
        f"distribute_dataset: {what} is ragged: its rows differ in length. Pad them to one length on the host, and feed"
        " the lengths too."
    )


def check_numeric(dtype: Any, what: str) -> None:
    """Raise for what no device can hold: strings, objects, NumPy's long doubles."""
    if dtype in (np.longdouble, np.clongdouble):
        raise ArgumentTypeError(
            f"distribute_dataset: {what} has dtype {dtype}, which JAX does not know. Use .astype(np.float64)."
        )
    if not is_numeric(dtype):
        raise ArgumentTypeError(
            f"distribute_dataset: {what} is not numeric (dtype {dtype}). Turn it into numbers on the host, with a map"
            " before distribute_dataset; or feed the number of the row instead and look the value up with it."
        )


def check_fits(array: Array, what: str) -> None:
    """Raise for integers that do not fit the dtype that they get on the devices, where 64 bits are off."""
    found, given = array.dtype, jax.dtypes.canonicalize_dtype(array.dtype)
    if found == given or found.kind not in "iu" or not array.size:
        return
    least, most = jnp.iinfo(given).min, jnp.iinfo(given).max
    outside = next((int(value) for value in (array.max(), array.min()) if not least <= value <= most), None)
    if outside is not None:
        raise ArgumentError(
            f"distribute_dataset: {what} holds {outside}, which does not fit {given}: {found} becomes {given} on the"
            " devices unless jax.config.update('jax_enable_x64', True) is set. Set it, or feed smaller numbers."
        )


# ---- pytrees of arrays ---------------------------------------------------------------------------


def flatten(tree: Any, name: str = "") -> tuple[list[str], list[Any], Any]:
    """Paths of the leaves as messages call them, the leaves, and the structure."""
    try:
        found, structure = jax.tree_util.tree_flatten_with_path(
            tree, is_leaf=lambda x: isinstance(x, Iterator) or is_per_replica(x)
        )
    except (TypeError, ValueError) as error:
        raise ArgumentTypeError(
            f"distribute_dataset: JAX cannot take the {name or 'element'} apart: {error}"
        ) from error
    paths = [name + jax.tree_util.keystr(path) or "the array" for path, _ in found]
    return paths, [leaf for _, leaf in found], structure


@dataclass
class Arrays:
    """A pytree of host arrays, taken apart."""

    paths: list[str]
    leaves: list[Array]
    structure: Any

    @classmethod
    def of(cls, tree: Any, what: str) -> Arrays:
        """The arrays of `tree`; errors call it `what`."""
        paths, leaves, structure = flatten(tree)
        if not paths:
            raise ArgumentError(f"distribute_dataset: {what} holds no arrays: {tree!r:.60}.")
        arrays = [host_array(leaf, f"{path} of {what}") for path, leaf in zip(paths, leaves)]
        return cls(paths, arrays, structure)

    def map(self, of_leaf: Callable[[Array], Array]) -> Arrays:
        """Each array replaced by ``of_leaf(array)``."""
        return Arrays(self.paths, [of_leaf(leaf) for leaf in self.leaves], self.structure)

    def copied(self) -> Arrays:
        """The same values in memory of their own."""
        return self.map(np.copy)

    def tree(self) -> Any:
        """Put together again."""
        return jax.tree.unflatten(self.structure, self.leaves)


def check_same_rows(arrays: Arrays, what: str) -> None:
    """Raise when arrays differ in the length of axis 0."""
    if len({leaf.shape[0] for leaf in arrays.leaves}) > 1:
        sizes = ", ".join(f"{path}: {leaf.shape[0]}" for path, leaf in zip(arrays.paths, arrays.leaves))
        raise ArgumentError(f"distribute_dataset: the arrays of {what} differ in their number of rows ({sizes}).")


class Layout:
    """Structure, shapes and dtypes of the first of many pytrees, which the others must have too."""

    def __init__(self, skip_axes: int, of_what: str) -> None:
        self._skip = skip_axes
        """Leading axes that may differ."""
        self._of_what = of_what
        self._structure: Any = None
        self.types: dict[str, tuple[tuple[int, ...], np.dtype[Any]]] = {}
        """Shape and dtype by path, in order."""

    def check(self, arrays: Arrays, what: str) -> None:
        """Raise when `arrays` differ from the first that were checked."""
        found = {path: (leaf.shape[self._skip :], leaf.dtype) for path, leaf in zip(arrays.paths, arrays.leaves)}
        if self._structure is None:
            self._structure, self.types = arrays.structure, found
        if found.keys() != self.types.keys():
            self._refuse(what, sorted(found.keys() ^ self.types.keys())[0], _few(self.types), _few(found))
        for path, type_ in found.items():
            if type_ != self.types[path]:
                self._refuse(what, path, _shown(self.types[path]), _shown(type_))
        if arrays.structure != self._structure:
            self._refuse(what, "the structure", self._structure, arrays.structure)

    def _refuse(self, what: str, path: str, expected: Any, found: Any) -> NoReturn:
        raise ArgumentError(
            f"distribute_dataset: {what} differs from the first in {path}: expected {expected}, found {found}"
            f" ({self._of_what})."
        )


def _few(paths: Iterable[str]) -> str:
    """Paths, of very many the first ones."""
    paths = list(paths)
    return f"{paths[:_FEW]} and so on ({len(paths)} arrays)" if len(paths) > _FEW else str(paths)


def _shown(type_: tuple[tuple[int, ...], np.dtype[Any]]) -> str:
    return f"{type_[1]}{list(type_[0])}"
