"""`DistributedDataset`: a source whose elements arrive on the replicas."""

from __future__ import annotations

import logging
import secrets
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Literal, get_args

import jax
import numpy as np

from phalanx import _jax
from phalanx.data.elements import Batcher, Remainder, check_remainder, uneven
from phalanx.data.pipeline import ahead
from phalanx.data.agreement import in_step
from phalanx.data.sources import GroupedSource, RowSource, Source, as_source
from phalanx.errors import ArgumentError, ArgumentTypeError, UnevenBatchError

if TYPE_CHECKING:
    from phalanx.distribute.strategy import Strategy

logger = logging.getLogger("phalanx")

AutoShard = Literal["data", "off"]


class DistributedDataset:
    """Made by `strategy.distribute_dataset`: iterate it, again and again where the source allows it.

    Elements have the structure of the source's, with `PerReplica` in place of arrays.
    """

    def __init__(
        self,
        strategy: Strategy,
        source: Any,
        *,
        batch_size: int | None,
        remainder: Remainder,
        mask: bool,
        prefetch: int,
        shuffle: bool,
        seed: int | None,
        auto_shard: AutoShard,
        per_replica: bool = False,
    ) -> None:
        check_remainder(remainder)
        if auto_shard not in get_args(AutoShard):
            raise ArgumentError(f"distribute_dataset: auto_shard must be 'data' or 'off', got {auto_shard!r}.")
        _check_size("batch_size", batch_size, 1, optional=True)
        _check_size("prefetch", prefetch, 0)
        _check_size("seed", seed, 0, optional=True)
        self._strategy = strategy
        self._remainder: Remainder = remainder
        self._mask = mask
        self._prefetch = int(prefetch)
        self._batch_size = batch_size
        self._local = auto_shard == "off"
        """Whether this process's source has the rows of its own replicas only."""
        self._seed = (_draw_seed() if seed is None else int(seed)) if shuffle else None
        rows = None if batch_size is None else int(batch_size) // (jax.process_count() if self._local else 1)
        self._source: Source = as_source(source, rows, self._seed)
        if per_replica:
            self._source = GroupedSource(self._source, len(strategy.local_devices))
        self._rows = rows
        self._epoch = 0
        self._resume: dict[str, Any] | None = None
        self._position: dict[str, Any] = {"epoch": 0, "element": 0, "source": None}
        self._started = False
        self._check_rows()
        self._announce()

    def _check_rows(self) -> None:
        """What is known to fail is said before the first step."""
        if not isinstance(self._source, RowSource):
            return
        if self._source.rows == 0:
            raise ArgumentError("distribute_dataset: the source is empty (0 rows).")
        n, size, rows = self._strategy.num_replicas, int(self._batch_size or 1), self._source.rows
        if self._remainder == "pad":
            return
        whole, rest = divmod(rows, size)
        if whole and size % n:
            raise uneven(size, size, n, f"a batch of {rows} rows in batches of {size}")
        if rest and self._remainder != "drop" and (rest % n or self._remainder == "error"):
            raise uneven(rest, size, n, f"the last batch of {rows} rows in batches of {size}")

    def _announce(self) -> None:
        size = self._batch_size
        per_replica = "" if size is None else f", batches of {size} ({-(-size // self._strategy.num_replicas)} per replica)"
        seed = "" if self._seed is None else f", shuffled with seed {self._seed}"
        logger.info("dataset on %r%s%s", self._strategy, per_replica, seed)

    def __len__(self) -> int:
        """Batches in one pass.

        Raises:
            TypeError: when the source does not tell.
        """
        if self._source.length is None:
            raise TypeError("the source of this dataset does not tell its length")
        if isinstance(self._source, RowSource) and self._remainder == "drop":
            return self._source.rows // int(self._batch_size or 1)
        return self._source.length

    @property
    def element_spec(self) -> Any:
        """Structure of an element, with a ``jax.ShapeDtypeStruct`` of each replica's part.

        Known without reading for arrays; else the first element of a source that can be iterated again
        is read.
        """
        if not self._source.reiterable:
            raise ArgumentError("element_spec: this source can be read only once; look at an element instead.")
        first = next(self._batches(self._epoch, 0, None), None)
        if first is None:
            raise ArgumentError("element_spec: the source is empty.")
        n = len(self._strategy.local_devices) if self._local else self._strategy.num_replicas
        dtype = jax.dtypes.canonicalize_dtype
        return jax.tree.map(
            lambda a: jax.ShapeDtypeStruct((a.shape[0] // n, *a.shape[1:]), dtype(a.dtype)), first[0]
        )

    def __iter__(self) -> Iterator[Any]:
        start = self._resume or {"epoch": self._epoch, "element": 0, "source": None}
        self._resume = None
        if self._started and not self._source.reiterable:
            raise ArgumentError(
                "This dataset was made from an iterator that can be read only once, and it has been read. Give"
                " distribute_dataset a function that returns a new iterator (callable) to go over the data several times."
            )
        self._started = True
        self._epoch = start["epoch"] + 1
        return self._iterate(start)

    def _iterate(self, start: dict[str, Any]) -> Iterator[Any]:
        epoch = start["epoch"]

        def on_devices() -> Iterator[Any]:
            for element, position in self._batches(epoch, start["element"], start["source"]):
                yield jax.tree.map(self._to_devices, element), position

        count = 0
        for element, position in ahead(on_devices, self._prefetch):
            self._position = {"epoch": epoch, **position}
            count += 1
            yield element
        self._position = {"epoch": epoch + 1, "element": 0, "source": None}
        if not count and not start["element"]:
            raise ArgumentError("distribute_dataset: the source is empty (it gave no element).")

    def _batches(self, epoch: int, start: int, state: Any) -> Iterator[tuple[Any, dict[str, Any]]]:
        """Host batches, each with the position after it."""
        n = len(self._strategy.local_devices) if self._local else self._strategy.num_replicas
        batcher = Batcher(n, self._remainder, self._mask, self._rows)
        if self._local and jax.process_count() > 1:
            yield from in_step(self._source.elements(epoch, start, state), batcher, start)
            return
        for number, (element, after) in enumerate(self._source.elements(epoch, start, state), start):
            batch = batcher(element, number)
            if batch is not None:
                yield batch, {"element": number + 1, "source": after}

    def _to_devices(self, rows: np.ndarray[Any, Any]) -> Any:
        try:
            return self._strategy.split_rows(rows, local=self._local)
        except (RuntimeError, MemoryError) as error:
            if "RESOURCE_EXHAUSTED" not in str(error) and not isinstance(error, MemoryError):
                raise
            raise ArgumentError(
                f"distribute_dataset: an array of shape {rows.shape} and dtype {rows.dtype} ({rows.nbytes / 2**20:.0f} MiB,"
                f" {rows.nbytes / 2**20 / self._strategy.num_replicas:.0f} MiB per replica) does not fit on the devices. Use a"
                " smaller batch_size, or a smaller prefetch."
            ) from error

    # ---- resuming ----

    def state_dict(self) -> dict[str, Any]:
        """The position after the last element that was handed out, to be kept with a checkpoint.

        Example:
            >>> dataset = px.OneDevice().distribute_dataset(jnp.arange(6.0), batch_size=2)
            >>> iterator = iter(dataset)
            >>> _ = next(iterator)
            >>> state = dataset.state_dict()
            >>> dataset.load_state_dict(state)
            >>> next(iter(dataset)).values[0].tolist()
            [2.0, 3.0]
        """
        return {**self._position, "seed": self._seed}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Let the next iteration start where `state` was taken.

        Raises:
            ArgumentError: for a state of another kind of dataset.
        """
        if not isinstance(state, dict) or set(state) != {"epoch", "element", "source", "seed"}:
            raise ArgumentError(f"load_state_dict takes what state_dict gave, got {state!r:.80}.")
        if (state["seed"] is None) != (self._seed is None):
            raise ArgumentError("load_state_dict: the state is of a dataset with another setting of shuffle.")
        if self._seed is not None:
            self._seed = state["seed"]
            if isinstance(self._source, RowSource):
                self._source.seed = state["seed"]
        self._resume = {k: state[k] for k in ("epoch", "element", "source")}
        self._position = dict(self._resume)
        self._started = False

    def __repr__(self) -> str:
        length = "" if self._source.length is None else f", {len(self)} batches"
        return f"<dataset on {self._strategy!r}{length}>"


class InputContext:
    """What the function given to `distribute_datasets_from_function` is told."""

    def __init__(self, num_input_pipelines: int, input_pipeline_id: int, num_replicas: int) -> None:
        self.num_input_pipelines = num_input_pipelines
        """How many processes feed."""
        self.input_pipeline_id = input_pipeline_id
        """Which of them this is."""
        self.num_replicas = num_replicas
        """Replicas over all processes."""

    def per_replica_batch_size(self, global_batch_size: int) -> int:
        """Rows for each replica.

        Raises:
            UnevenBatchError: when the global batch does not divide by the replicas.
        """
        if global_batch_size % self.num_replicas:
            raise UnevenBatchError(
                f"A global batch of {global_batch_size} rows does not divide by {self.num_replicas} replicas."
            )
        return global_batch_size // self.num_replicas


def _draw_seed() -> int:
    """A seed that all processes agree on."""
    return int(_jax.from_first_process("phalanx/seed", str(secrets.randbits(32))))


def _check_size(name: str, value: Any, least: int, optional: bool = False) -> None:
    if optional and value is None:
        return
    if isinstance(value, bool) or not isinstance(value, (int, np.integer)):
        raise ArgumentTypeError(f"distribute_dataset: {name} must be an int, got {value!r}.")
    if value < least:
        raise ArgumentError(f"distribute_dataset: {name} must be at least {least}, got {value!r}.")
