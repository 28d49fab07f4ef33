"""Keras's data adapters, their batches sent to the replicas."""

from __future__ import annotations

import functools
import itertools
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from phalanx.data.dataset import DistributedDataset
from phalanx.data.host import Arrays
from phalanx.data.libraries import length_of
from phalanx.data.pipeline import ahead
from phalanx.distribute.strategy import Strategy
from phalanx.errors import ArgumentError, StrategyError
from phalanx.keras import _keras
from phalanx.keras._keras import keras
from phalanx.keras.accumulation import Accumulate
from phalanx.keras.alike import alike

_AHEAD = {"cpu": 0}
"""Batches on their way to the devices while a step runs, by platform; on a CPU the step needs the cores itself."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Batch:
    """Rows for one run of the replicas."""

    data: Any
    is_split: bool = field(default=True, metadata={"static": True})
    """Each replica has rows of its own; or, where rows do not divide, every replica has all of them."""
    steps: int | None = field(default=None, metadata={"static": True})
    """Steps in one run: a replica's arrays have one part for each along axis 0. None: one step, without that axis."""
    accumulate: Accumulate = field(default="no", metadata={"static": True})


Parts = tuple[Batch, ...]
"""Of one run; none where the run was done before the program stopped."""


class Position:
    """Where the data of `fit` is, as a checkpoint keeps it: for what Keras reads from its start in each epoch."""

    in_pass = False
    """Whether an epoch has begun and not ended."""

    def check_resumable(self) -> None:
        """Raise where training could not go on from a checkpoint."""

    def state_dict(self) -> dict[str, Any]:
        """Nothing: the batches that were used are counted."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """There is nothing."""


class DatasetPosition(Position):
    """That of a distributed dataset.

    Args:
        dataset: which.
        whole_passes: whether each epoch is one pass over it.
    """

    def __init__(self, dataset: DistributedDataset, whole_passes: bool) -> None:
        self._dataset = dataset
        self._whole_passes = whole_passes
        self._begun: dict[str, Any] | None = None
        """Where the run begins whose elements are being drawn."""

    def draw(self, elements: Iterator[Any], n: int, is_first: bool) -> list[Any]:
        """The elements of one run; if the wait for them is ended, none of them counts as used."""
        self._begun = self._dataset.state_after_pass() if is_first else self._dataset.state_dict()
        several = list(islice(elements, n))
        self._begun = None
        return several

    def check_resumable(self) -> None:
        length = length_of(self._dataset)
        if not self._whole_passes and length is not None:
            raise ArgumentError(
                f"fit(resume=...): with steps_per_epoch an epoch may end anywhere in a pass of {length} batches, and Keras does"
                " not go on there. Leave steps_per_epoch out, or use a dataset that does not end."
            )

    def state_dict(self) -> dict[str, Any]:
        if self._begun is not None:
            return self._begun
        at_end = self._whole_passes and not self.in_pass
        return self._dataset.state_after_pass() if at_end else self._dataset.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._dataset.load_state_dict(state)


class Runs(_keras.DataAdapter, ABC):  # type: ignore[misc]
    """Batches on the replicas, grouped as Keras's loops take them: those of one run at a time.

    Args:
        strategy: whose replicas.
        divisible: whether what comes out is of single rows (predictions), so that batches may be cut.
        steps: updates in one run.
        accumulate: batches for one update.
        class_weight: by the number of the class, weights of rows.
    """

    def __init__(
        self,
        strategy: Strategy,
        divisible: bool = False,
        steps: int = 1,
        accumulate: int = 1,
        class_weight: dict[int, float] | None = None,
    ) -> None:
        if class_weight is not None and not _are_class_weights(class_weight):
            raise ArgumentError(f"class_weight must be a dict from class numbers to weights, got {class_weight!r:.80}.")
        self._strategy = strategy
        self._divisible = divisible
        self._accumulate = accumulate
        self._class_weight = class_weight
        self._given = 0
        """Batches of the source in this pass."""
        self.batches_per_run = steps * accumulate
        """Of the source."""
        self.skip = 0
        """Runs of the next pass that were done before the program stopped."""
        self.position: Any = Position()

    @property
    @abstractmethod
    def source_batches(self) -> int | None:
        """Batches of the source in one pass, if known."""

    @abstractmethod
    def get_jax_iterator(self) -> Iterator[Parts]:
        """The batches of one pass, for Keras's loops: what each run of the replicas takes."""

    def get_numpy_iterator(self) -> Iterator[Parts]:
        """The same: Keras's loops ask for one or the other."""
        return self.get_jax_iterator()

    @property
    def num_batches(self) -> int | None:
        """Updates in one pass, if known."""
        return None if self.source_batches is None else -(-self.source_batches // self._accumulate)

    def ran_out(self, steps_per_epoch: int | None) -> None:
        """The data has ended where Keras's loops did not know that it would."""
        if steps_per_epoch:
            warnings.warn(
                f"The data ended after {self._given} batches, and steps_per_epoch={steps_per_epoch} asks for so many in each"
                " epoch: this one is cut short. Give more data, repeat it, or leave steps_per_epoch out.",
                stacklevel=2,
            )

    def _weighted(self, batch: Any) -> Any:
        """x, y and the weights of the classes in y."""
        if self._class_weight is None:
            return batch
        x, y, weights = _keras.unpack(batch)
        if weights is not None:
            raise ArgumentError("fit: class_weight and weights of rows cannot be given at the same time.")
        table = np.ones(max(self._class_weight) + 1, keras.config.floatx())
        table[list(self._class_weight)] = list(self._class_weight.values())
        return x, y, self._of_classes(y, table)

    @abstractmethod
    def _of_classes(self, y: Any, table: Any) -> Any:
        """The weights of the rows whose classes are in `y`."""

    def _skipped(self) -> int:
        skipped, self.skip = self.skip, 0
        return skipped

    def _parts(self, several: list[Any], together: Callable[[], Batch | None], apart: Callable[[Any], Parts]) -> Parts:
        """Of one run: one for all its batches where that can be, else of each its own."""
        self._given += len(several)
        separate = self._divisible or self._accumulate > 1 or len(several) < 2
        if not separate and (one := together()) is not None:
            return (one,)
        parts = sum(map(apart, several), ())
        if self._accumulate == 1:
            return parts
        lasts = [(i + 1) % self._accumulate == 0 or i + 1 == len(parts) for i in range(len(parts))]
        return tuple(replace(p, accumulate="apply" if is_last else "add") for p, is_last in zip(parts, lasts))


class Feed(Runs):
    """What an adapter of Keras's gives, as batches on the replicas.

    Rows that do not divide are computed by every replica and counted once. Where a batch may be cut
    (`divisible`: predictions, but no losses, whose mean is over the batch), only the few rows left over are.
    """

    def __init__(self, adapter: Any, strategy: Strategy, **runs: Any) -> None:
        super().__init__(strategy, **runs)
        self._adapter = adapter

    def first(self) -> Any:
        """A batch on the host, for its shapes."""
        for batch in map(self._weighted, self._adapter.get_numpy_iterator()):
            Arrays.of(batch, "the batch")  # they are numbers, or it says which are not
            return batch
        return None

    def get_jax_iterator(self) -> Iterator[Parts]:
        """The batches of one pass."""
        self._given = 0

        def batches(stopped: Callable[[], bool]) -> Iterator[list[Any]]:
            counted = self._adapter.num_batches is not None
            weighted = map(self._weighted, self._adapter.get_numpy_iterator())
            several = alike(weighted, self._strategy, counted, stopped)
            runs = iter(lambda: list(islice(several, self.batches_per_run)), [])
            yield from ([] for _ in islice(runs, self._skipped()))  # drawn, as they were then, and not used
            yield from runs

        def send(several: list[Any]) -> tuple[Parts, list[Any]]:
            parts = self._parts(
                several,
                lambda: _stacked(several, self._strategy),
                lambda batch: distribute(batch, self._strategy, self._divisible),
            )
            return parts, jax.tree.leaves(parts)

        return ahead(batches, send, _AHEAD.get(self._strategy.platform, 2))

    def _of_classes(self, y: Any, table: Any) -> Any:
        return _weights_of_rows(np, y, table)

    def on_epoch_begin(self) -> None:
        """Keras's loops say so."""
        self._adapter.on_epoch_begin()

    def on_epoch_end(self) -> None:
        """Keras's loops say so."""
        self._adapter.on_epoch_end()

    @property
    def source_batches(self) -> int | None:
        """Those of the adapter."""
        return self._adapter.num_batches  # type: ignore[no-any-return]

    @property
    def batch_size(self) -> int | None:
        """Rows of all replicas in a batch, if known."""
        return self._adapter.batch_size  # type: ignore[no-any-return]

    @property
    def has_partial_batch(self) -> bool | None:
        """Whether the last batch is smaller, if known."""
        return self._adapter.has_partial_batch  # type: ignore[no-any-return]

    @property
    def partial_batch_size(self) -> int | None:
        """Rows of the last batch, if known."""
        return self._adapter.partial_batch_size  # type: ignore[no-any-return]


class DatasetFeed(Runs):
    """A distributed dataset of ours, whose elements are on the replicas already."""

    batch_size = has_partial_batch = partial_batch_size = None

    def __init__(
        self,
        dataset: DistributedDataset,
        strategy: Strategy,
        steps_per_epoch: int | None = None,
        **runs: Any,
    ) -> None:
        super().__init__(strategy, **runs)
        if dataset.strategy is not strategy:
            raise StrategyError(
                f"The dataset was distributed by {dataset.strategy!r}, and the model is on another {strategy!r}. Make one"
                " strategy, and use it for both (model.strategy is that of a replicated model)."
            )
        if dataset.pads:
            raise ArgumentError(
                "The dataset fills short batches up (remainder='pad'), and Keras's losses and metrics would count these"
                " rows. Give the source itself to the model, which counts every row once; or choose remainder='drop'."
            )
        self._dataset = dataset
        self.position: DatasetPosition = DatasetPosition(
            dataset, whole_passes=steps_per_epoch in (None, self.num_batches)
        )

    def first(self) -> Any:
        """An element, for its shapes."""
        return next(iter(self._dataset._peek(1)), None)

    def get_jax_iterator(self) -> Iterator[Parts]:
        """The elements of one pass, which begins with the first: Keras makes iterators that it does not use."""
        yield from [()] * self._skipped()  # behind which the dataset stands
        self._given = 0
        elements, n = map(self._weighted, self._dataset), self.batches_per_run
        for number in itertools.count():
            several = self.position.draw(elements, n, is_first=number == 0)
            if not several:
                return
            yield self._parts(several, functools.partial(self._joined, several), lambda element: (Batch(element),))

    def _joined(self, elements: list[Any]) -> Batch | None:
        """Elements of one shape, for one run; None for others."""
        structures = {jax.tree.structure(element) for element in elements}
        shapes = {tuple(leaf.shape for leaf in jax.tree.leaves(element)) for element in elements}
        if len(structures) > 1 or len(shapes) > 1:
            return None
        return Batch(self._strategy.run(_stack, args=elements), steps=len(elements))

    def _of_classes(self, y: Any, table: Any) -> Any:
        return self._strategy.run(functools.partial(_weights_of_rows, jnp), args=(y, table))

    @property
    def source_batches(self) -> int | None:
        """Elements of the dataset."""
        return length_of(self._dataset)


def _stack(*elements: Any) -> Any:
    return jax.tree.map(lambda *leaves: jnp.stack(leaves), *elements)


def _are_class_weights(given: Any) -> bool:
    return isinstance(given, dict) and bool(given) and all(isinstance(c, (int, np.integer)) and c >= 0 for c in given)


def _weights_of_rows(xp: Any, y: Any, table: Any) -> Any:
    if not hasattr(y, "ndim"):
        raise ArgumentError(f"fit: class_weight is for one array of targets, got {type(y).__name__}.")
    classes = y if y.ndim == 1 else y[:, 0] if y.shape[-1] == 1 else xp.argmax(y, -1)
    classes = xp.round(classes).astype(np.int32)
    is_known = (classes >= 0) & (classes < len(table))
    return xp.where(is_known, table[xp.where(is_known, classes, 0)], xp.ones((), table.dtype))


def distribute(batch: Any, strategy: Strategy, divisible: bool) -> Parts:
    """A host batch on the replicas: in one part, or two where it may be cut.

    Arrays of different length have more in them than rows (nodes and edges of a graph): nothing of it is split.
    """
    arrays = Arrays.of(batch, "the batch")
    lengths = _lengths(arrays)
    rows, n = min(lengths, default=0), strategy.num_replicas
    whole = rows - rows % n
    if len(lengths) > 1:
        return (_repeated(arrays, strategy, slice(None)),)
    if whole == rows:
        return (_split(arrays, strategy, slice(None)),)
    if not divisible or whole == 0:
        return (_repeated(arrays, strategy, slice(None)),)
    return _split(arrays, strategy, slice(whole)), _repeated(arrays, strategy, slice(whole, None))


def _lengths(arrays: Arrays) -> set[int]:
    return {leaf.shape[0] for leaf in arrays.leaves if leaf.ndim}


def _stacked(batches: list[Any], strategy: Strategy) -> Batch | None:
    """Batches of one shape, which divide, for one run; None for others."""
    several = [Arrays.of(batch, "the batch") for batch in batches]
    shapes = [(arrays.structure, [leaf.shape for leaf in arrays.leaves]) for arrays in several]
    n, leaves = strategy.num_replicas, several[0].leaves
    if any(shape != shapes[0] for shape in shapes) or len(_lengths(several[0])) > 1:
        return None
    if any(not leaf.ndim or leaf.shape[0] % n for leaf in leaves):
        return None

    def send(*rows: Any) -> Any:
        # Each replica's rows of all steps side by side.
        parts = np.stack([r.reshape(n, len(r) // n, *r.shape[1:]) for r in rows], axis=1)
        return strategy.split_rows(parts.reshape(n * len(rows), *parts.shape[2:]))

    sent = [send(*column) for column in zip(*(arrays.leaves for arrays in several))]
    return Batch(jax.tree.unflatten(several[0].structure, sent), steps=len(several))


def _split(arrays: Arrays, strategy: Strategy, rows: slice) -> Batch:
    def send(leaf: Any) -> Any:
        return strategy.split_rows(leaf[rows]) if leaf.ndim else strategy.place(leaf, per_replica=False)

    return Batch(arrays.map(send).tree())


def _repeated(arrays: Arrays, strategy: Strategy, rows: slice) -> Batch:
    def send(leaf: Any) -> Any:
        return strategy.place(leaf[rows] if leaf.ndim else leaf, per_replica=False)

    return Batch(arrays.map(send).tree(), is_split=False)


def _interrupted_warning(original: Any) -> Any:
    """The feed says what it means that data ended where Keras's loops did not know that it would."""

    def interrupted(epochs: Any) -> None:
        if not isinstance(epochs.data_adapter, Runs):
            original(epochs)
            return
        epochs._num_batches = epochs.data_adapter.num_batches  # the next pass may have more
        epochs.data_adapter.ran_out(epochs.steps_per_epoch)

    return interrupted


def _get_iterator(original: Any) -> Any:
    """The feed is ahead of the steps itself; Keras would draw one more, and what is drawn counts as used."""

    def iterator(epochs: Any) -> Any:
        feed = epochs.data_adapter
        return feed.get_jax_iterator() if isinstance(feed, Runs) else original(epochs)

    return iterator


def install() -> None:
    """Put this into Keras's loops over batches."""
    _keras.replace(_keras.EpochIterator, "_interrupted_warning", _interrupted_warning)
    _keras.replace(_keras.JAXEpochIterator, "_get_iterator", _get_iterator)
