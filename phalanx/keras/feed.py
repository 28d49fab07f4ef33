"""Keras's data adapters, their batches sent to the replicas."""

from __future__ import annotations

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

    def check_resumable(self) -> None:
        length = length_of(self._dataset)
        if not self._whole_passes and length is not None:
            raise ArgumentError(
                f"fit(resume=...): with steps_per_epoch an epoch may end anywhere in a pass of {length} batches, and Keras does"
                " not go on there. Leave steps_per_epoch out, or use a dataset that does not end."
            )

    def state_dict(self) -> dict[str, Any]:
        at_end = self._whole_passes and not self.in_pass
        return self._dataset.state_after_pass() if at_end else self._dataset.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._dataset.load_state_dict(state)


class Feed(_keras.DataAdapter):  # type: ignore[misc]
    """What an adapter of Keras's gives, as batches on the replicas.

    Rows that do not divide are computed by every replica and counted once. Where a batch may be cut
    (`divisible`: predictions, but no losses, whose mean is over the batch), only the few rows left over are.
    """

    def __init__(self, adapter: Any, strategy: Strategy, divisible: bool, steps: int, accumulate: int = 1) -> None:
        self._adapter = adapter
        self._strategy = strategy
        self._divisible = divisible
        self._steps = steps
        """Batches for one run, where their shapes allow it."""
        self._accumulate = accumulate
        """Batches for one update of the weights."""
        self.skip = 0
        """Runs of the next pass that were done before the program stopped."""
        self.position = Position()

    def first(self) -> Any:
        """A batch on the host, for its shapes."""
        return next(iter(self._adapter.get_numpy_iterator()), None)

    def get_jax_iterator(self) -> Iterator[Parts]:
        """The batches of one pass, for Keras's loops: what each run of the replicas takes."""

        def batches(stopped: Callable[[], bool]) -> Iterator[list[Any]]:
            counted = self._adapter.num_batches is not None
            several = alike(iter(self._adapter.get_numpy_iterator()), self._strategy, counted, stopped)
            runs = iter(lambda: list(islice(several, self.batches_per_run)), [])
            skipped, self.skip = self.skip, 0
            yield from ([] for _ in islice(runs, skipped))  # drawn, as they were then, and not used
            yield from runs

        def send(several: list[Any]) -> tuple[Parts, list[Any]]:
            if not several:
                return (), []
            separate = self._divisible or len(several) == 1 or self._accumulate > 1
            together = None if separate else _stacked(several, self._strategy)
            parts = together or sum((distribute(b, self._strategy, self._divisible) for b in several), ())
            if self._accumulate > 1:
                parts = tuple(self._accumulated(part, i, len(parts)) for i, part in enumerate(parts))
            return parts, jax.tree.leaves(parts)

        return ahead(batches, send, _AHEAD.get(self._strategy.platform, 2))

    get_numpy_iterator = get_jax_iterator

    def _accumulated(self, part: Batch, i: int, of: int) -> Batch:
        is_last = (i + 1) % self._accumulate == 0 or i + 1 == of
        return replace(part, accumulate="apply" if is_last else "add")

    @property
    def batches_per_run(self) -> int:
        """Of the adapter."""
        return self._steps * self._accumulate

    def on_epoch_begin(self) -> None:
        """Keras's loops say so."""
        self._adapter.on_epoch_begin()

    def on_epoch_end(self) -> None:
        """Keras's loops say so."""
        self._adapter.on_epoch_end()

    @property
    def num_batches(self) -> int | None:
        """In one pass, if known."""
        count = self._adapter.num_batches
        return None if count is None else -(-count // self._accumulate)

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


class DatasetFeed(_keras.DataAdapter):  # type: ignore[misc]
    """A distributed dataset of ours, whose elements are on the replicas already."""

    batch_size = has_partial_batch = partial_batch_size = None
    batches_per_run = 1

    def __init__(
        self,
        dataset: DistributedDataset,
        strategy: Strategy,
        class_weight: dict[int, float] | None,
        steps_per_epoch: int | None = None,
    ) -> None:
        if dataset.strategy is not strategy:
            raise StrategyError(
                f"The dataset was distributed by {dataset.strategy!r}, and the model is on {strategy!r}."
            )
        if dataset.pads:
            raise ArgumentError(
                "The dataset fills short batches up (remainder='pad'), and Keras's losses and metrics would count these"
                " rows. Give the source itself to the model, which counts every row once; or choose remainder='drop'."
            )
        if class_weight is not None and not _are_class_weights(class_weight):
            raise ArgumentError(f"class_weight must be a dict from class numbers to weights, got {class_weight!r:.80}.")
        self._dataset = dataset
        self._strategy = strategy
        self._class_weight = class_weight
        self.skip = 0
        """Elements of the next pass that were used before the program stopped; the dataset stands behind them."""
        self.position = DatasetPosition(dataset, whole_passes=steps_per_epoch in (None, self.num_batches))

    def first(self) -> Any:
        """An element, for its shapes."""
        return next(iter(self._dataset._peek(1)), None)

    def get_jax_iterator(self) -> Iterator[Parts]:
        """The elements of one pass, which begins with the first: Keras makes iterators that it does not use."""
        skipped, self.skip = self.skip, 0
        yield from [()] * skipped
        for element in self._dataset:
            yield (Batch(self._weighted(element)),)

    get_numpy_iterator = get_jax_iterator

    def _weighted(self, element: Any) -> Any:
        if self._class_weight is None:
            return element
        x, y, weights = _keras.unpack(element)
        if weights is not None:
            raise ArgumentError("fit: class_weight and weights of rows in the dataset cannot be given together.")
        table = np.ones(max(self._class_weight) + 1, np.float32)
        table[list(self._class_weight)] = list(self._class_weight.values())
        return x, y, self._strategy.run(_weights_of_rows, args=(y, table))

    @property
    def num_batches(self) -> int | None:
        """In one pass, if known."""
        return length_of(self._dataset)


def _are_class_weights(given: Any) -> bool:
    return isinstance(given, dict) and bool(given) and all(isinstance(c, (int, np.integer)) and c >= 0 for c in given)


def _weights_of_rows(y: Any, table: Any) -> Any:
    classes = y if y.ndim == 1 else y[:, 0] if y.shape[-1] == 1 else jnp.argmax(y, -1)
    classes = jnp.round(classes).astype(jnp.int32)
    return jnp.where(classes < len(table), table[jnp.minimum(classes, len(table) - 1)], 1.0)


def distribute(batch: Any, strategy: Strategy, divisible: bool) -> Parts:
    """A host batch on the replicas: in one part, or two where it may be cut."""
    arrays = Arrays.of(batch, "the batch")
    rows = min((leaf.shape[0] for leaf in arrays.leaves if leaf.ndim), default=0)
    n = strategy.num_replicas
    whole = rows - rows % n
    if whole == rows:
        return (_split(arrays, strategy, slice(None)),)
    if not divisible or whole == 0:
        return (_repeated(arrays, strategy, slice(None)),)
    return _split(arrays, strategy, slice(whole)), _repeated(arrays, strategy, slice(whole, None))


def _stacked(batches: list[Any], strategy: Strategy) -> Parts | None:
    """Batches of one shape, which divide, for one run; None for others."""
    several = [Arrays.of(batch, "the batch") for batch in batches]
    shapes = [(arrays.structure, [leaf.shape for leaf in arrays.leaves]) for arrays in several]
    n, leaves = strategy.num_replicas, several[0].leaves
    if any(shape != shapes[0] for shape in shapes) or any(not leaf.ndim or leaf.shape[0] % n for leaf in leaves):
        return None

    def send(*rows: Any) -> Any:
        # Each replica's rows of all steps side by side.
        parts = np.stack([r.reshape(n, len(r) // n, *r.shape[1:]) for r in rows], axis=1)
        return strategy.split_rows(parts.reshape(n * len(rows), *parts.shape[2:]))

    sent = [send(*column) for column in zip(*(arrays.leaves for arrays in several))]
    return (Batch(jax.tree.unflatten(several[0].structure, sent), steps=len(several)),)


def _split(arrays: Arrays, strategy: Strategy, rows: slice) -> Batch:
    def send(leaf: Any) -> Any:
        return strategy.split_rows(leaf[rows]) if leaf.ndim else strategy.place(leaf, per_replica=False)

    return Batch(arrays.map(send).tree())


def _repeated(arrays: Arrays, strategy: Strategy, rows: slice) -> Batch:
    def send(leaf: Any) -> Any:
        return strategy.place(leaf[rows] if leaf.ndim else leaf, per_replica=False)

    return Batch(arrays.map(send).tree(), is_split=False)
