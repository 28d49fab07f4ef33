"""What `fit` and its like are given, as batches on the host: one pass after another."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from phalanx._checks import packages
from phalanx.data import libraries
from phalanx.data.host import flatten, host_array
from phalanx.errors import ArgumentError, ArgumentTypeError
from phalanx.keras import _keras


def adapter_of(x: Any, y: Any = None, sample_weight: Any = None, **options: Any) -> Any:
    """Keras's adapter for arrays and for datasets that it knows, or one for iterators and other iterables.

    Args:
        x: what `fit` takes, but no function.
        y: targets, beside arrays.
        sample_weight: weights of rows, beside arrays.
        options: `batch_size`, `steps_per_epoch` and `shuffle`, for arrays and Keras's own datasets.

    Raises:
        ArgumentError: when there are no batches, or `y` or `sample_weight` stand beside what holds them.
        ArgumentTypeError: for anything else.
    """
    is_iterator = isinstance(x, Iterator)
    if not is_iterator and _keras.knows_data(x, y, sample_weight):
        for name, arrays in {"x": x, "y": y, "sample_weight": sample_weight}.items():
            _check_numbers(arrays, name)
        return _keras.data_adapters.get_data_adapter(x=x, y=y, sample_weight=sample_weight, **options)
    check_alone(x, y=y, sample_weight=sample_weight)
    if is_iterator:
        return Once(x)
    if libraries.kind(x) == "datasets":
        raise ArgumentTypeError(
            "A dataset of Hugging Face gives dicts, which do not say what is x and what is y. Give a function of batches:"
            " fit(lambda: ((b['x'], b['y']) for b in dataset.with_format('numpy').iter(batch_size=32)))."
        )
    if isinstance(x, (str, list, tuple, dict)) or not hasattr(x, "__iter__"):
        raise ArgumentTypeError(
            "Keras models take arrays (make lists arrays with np.asarray), datasets of Keras, PyTorch, grain and tf.data,"
            " distributed datasets, generators and other iterables of batches, and functions that return any of these;"
            f" got {type(x).__name__} {x!r:.60}."
        )
    return Passes(lambda: iter(x), iter(x))


def _check_numbers(arrays: Any, name: str) -> None:
    """Text, among others, is refused by the name of its column."""
    paths, leaves, _ = flatten(arrays, name)
    for path, leaf in zip(paths, leaves):
        if isinstance(leaf, np.ndarray) or "pandas" in packages(leaf):
            host_array(leaf, path)


def is_source_function(x: Any) -> bool:
    """Whether `x` is to be called for the data."""
    return callable(x) and (isinstance(x, type) or not (hasattr(x, "__iter__") or hasattr(x, "__getitem__")))


def check_alone(x: Any, **given: Any) -> None:
    """Raise where targets or weights are given beside data that holds them."""
    for name, value in given.items():
        if value is not None:
            raise ArgumentError(
                f"{name} was given beside a {type(x).__name__}, whose elements hold it: (x, y) or (x, y, sample_weight)."
            )


class Once(_keras.GeneratorDataAdapter):  # type: ignore[misc]
    """An iterator's batches. Keras would begin again with the few that it looked at; here the end is the end."""

    def __init__(self, batches: Iterator[Any]) -> None:
        super().__init__(batches)
        self._has_ended = False

    def get_numpy_iterator(self) -> Iterator[Any]:
        """One pass, of which there is no second after the end."""
        if self._has_ended:
            raise ArgumentError(
                "The iterator has ended, and it gives its batches once. Give the function that makes it, which is called for"
                " each epoch: fit(batches, ...) in place of fit(batches(), ...)."
            )
        yield from super().get_numpy_iterator()
        self._has_ended = True


class Passes(_keras.DataAdapter):  # type: ignore[misc]
    """What a function gives, called for each pass.

    Args:
        make: the function.
        made: what it gave the first time.
        options: as for `adapter_of`.
    """

    num_batches = batch_size = has_partial_batch = partial_batch_size = None

    def __init__(self, make: Callable[[], Any], made: Any, **options: Any) -> None:
        self._make = make
        self._options = options
        self._unused: Any = self._adapter(made)
        """Of which nobody has had more than the first batch, for its shapes."""

    def _adapter(self, made: Any) -> Any:
        if isinstance(made, list):  # of batches
            return Once(iter(made))
        return adapter_of(*made, **self._options) if isinstance(made, tuple) else adapter_of(made, **self._options)

    def get_numpy_iterator(self) -> Iterator[Any]:
        """One pass."""
        adapter = self._unused or self._adapter(self._make())
        adapter.on_epoch_begin()
        try:
            batches = iter(adapter.get_numpy_iterator())
            for batch in batches:
                self._unused = adapter
                yield batch
                break
            self._unused = None
            yield from batches
        finally:
            adapter.on_epoch_end()  # lets workers go
