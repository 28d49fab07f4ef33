"""`DistributedDataset`: a source whose elements arrive on the replicas."""

from __future__ import annotations

import logging
import secrets
from collections.abc import Callable, Iterator
from itertools import islice
from typing import TYPE_CHECKING, Any, Literal, get_args

import jax
import numpy as np

from phalanx import _jax, state
from phalanx._checks import check_choice, check_flag
from phalanx.data.agreement import Group
from phalanx.data.elements import Batcher, Remainder, dropped, uneven
from phalanx.data.pipeline import ahead
from phalanx.data.sources import RowSource, Source, as_source
from phalanx.errors import ArgumentError, ArgumentTypeError, StrategyError, UnevenBatchError
from phalanx.function import is_strict

if TYPE_CHECKING:
    from phalanx.distribute.strategy import Strategy

logger = logging.getLogger("phalanx")

AutoShard = Literal["data", "off"]
Positioned = tuple[Any, dict[str, Any]]
"""A batch, and the position after it."""


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
        check_choice(remainder, "distribute_dataset: remainder", get_args(Remainder))
        check_choice(auto_shard, "distribute_dataset: auto_shard", get_args(AutoShard))
        if batch_size is not None:
            _check_int("distribute_dataset: batch_size", batch_size, 1, "a positive int")
        _check_int("distribute_dataset: prefetch", prefetch, 0, "an int from 0 on")
        if seed is not None:
            _check_int("distribute_dataset: seed", seed, 0, "an int from 0 on, or None")
        for name, value in (("mask", mask), ("shuffle", shuffle)):
            check_flag(value, f"distribute_dataset: {name}")
        if seed is not None and not shuffle:
            raise ArgumentError(f"distribute_dataset: seed={seed} is for shuffle=True, and shuffle is False.")
        if isinstance(source, DistributedDataset):
            raise ArgumentTypeError(
                "distribute_dataset: the source is a distributed dataset already; its elements go to strategy.run as they"
                " are."
            )
        if not strategy.local_devices:
            raise StrategyError(f"distribute_dataset: no replica of {strategy!r} belongs to this process.")
        self.strategy = strategy
        self._remainder: Remainder = remainder
        self._mask = mask
        self._prefetch = int(prefetch)
        self._batch_size = None if batch_size is None else int(batch_size)
        self._group = Group(strategy.devices)
        self._own = auto_shard == "off" and self._group.several
        """Whether this process's source has the rows of its own replicas only."""
        self._replicas = len(strategy.local_devices) if self._own else strategy.num_replicas
        """That this process's source has rows for."""
        self._items = self._replicas if per_replica else 1
        """Of the source in a batch."""
        self._rows = self._rows_per_element()
        self._seed_given = None if seed is None else int(seed)
        seed = _seed(seed, self._group.leads) if shuffle else None
        self._source: Source = as_source(source, self._rows, (seed or 0) if shuffle else None, per_replica)
        self._source.seed, self._length = self._agree(shuffle, seed)
        self._epoch = 0
        self._resume: dict[str, Any] | None = None
        self._position = self._start_of(0)
        self._started = False
        self._spec: Any = None
        self._check_rows()
        self._announce()

    def _rows_per_element(self) -> int | None:
        size, n = self._batch_size, self.strategy.num_replicas
        if size is None or not self._own:
            return size
        if size % n:
            raise uneven("the batch of all processes has", size, size, n)
        return size // n * self._replicas

    def _agree(self, shuffle: bool, seed: int | None) -> tuple[int | None, int | None]:
        """The seed of all processes, and the number of batches that they all get (None if unknown)."""
        same_rows = self._source.rows if not self._own else None
        common: dict[str, Any] = {"batch_size": self._batch_size or 0, "remainder": self._remainder, "mask": self._mask}
        common |= {"shuffle": shuffle, "seed": seed, "auto_shard": "off" if self._own else "data", "rows": same_rows}
        settled, lengths = self._group.agree(common, self._known_length())
        if None in lengths:
            return settled["seed"], None
        return settled["seed"], min(lengths) if self._remainder == "drop" else max(lengths)

    def _known_length(self) -> int | None:
        source = self._source
        if self._remainder != "drop":
            return None if source.length is None else -(-source.length // self._items)
        return None if source.rows is None or self._rows is None else source.rows // self._rows

    def _check_rows(self) -> None:
        """What is known to fail is said before the first step."""
        if not isinstance(self._source, RowSource) or self._own:
            return
        n, size, rows = self._replicas, int(self._rows or 1), int(self._source.rows or 0)
        if rows == 0:
            raise ArgumentError("distribute_dataset: the source is empty (0 rows).")
        if self._remainder == "pad":
            return
        whole, rest = divmod(rows, size)
        what = f"{rows} rows in batches of {size} on {n} replicas give a batch of"
        if whole and size % n:
            raise uneven(what, size, size, n)
        if rest and self._remainder == "drop" and is_strict():
            raise dropped(f"{rest} of {rows} rows")
        if rest and self._remainder != "drop" and (rest % n or self._remainder == "error"):
            raise uneven(what, rest, size, n)

    def _announce(self) -> None:
        size, n = self._batch_size, self.strategy.num_replicas
        rows = "" if self._source.rows is None else f"{self._source.rows} rows, "
        batches = "elements of the source" if size is None else f"batches of {size} ({-(-size // n)} per replica)"
        seed = "" if self._source.seed is None else f", shuffled with seed {self._source.seed}"
        logger.info("dataset: %s%s%s", rows, batches, seed)

    @property
    def pads(self) -> bool:
        """Whether rows are repeated to fill a batch up."""
        return self._remainder == "pad"

    def __len__(self) -> int:
        """Batches in one pass.

        Raises:
            TypeError: when the source does not tell.
        """
        if self._length is None:
            raise TypeError("the source of this dataset does not tell how many batches it has")
        return self._length

    @property
    def element_spec(self) -> Any:
        """Structure of an element, with a ``jax.ShapeDtypeStruct`` of each replica's part.

        It is known from the first full element that was made. Before there is one, the source is asked for it,
        once: a pass begins and is left, which a source with state of its own (a generator of random numbers, a
        counter of epochs) notices. Ask after the first element then.

        Raises:
            ArgumentError: before the first element when the source can be read only once, or gives no batch.
        """
        if self._spec is None:
            if not self._source.reiterable:
                raise ArgumentError(
                    "element_spec: this source can be read only once. Ask after the first element was handed out."
                )
            batches = self._batcher(self._rows).batches(self._source.elements(self._epoch, 0, None), 0)
            first = next((batch for batch, _ in batches if batch is not None), None)
            if first is None:
                raise ArgumentError("element_spec: the source gives no batch.")
            self._spec = self._spec_of(first)
        return self._spec

    def _spec_of(self, batch: Any) -> Any:
        def of(rows: np.ndarray[Any, Any]) -> jax.ShapeDtypeStruct:
            shape = (rows.shape[0] // self._replicas, *rows.shape[1:])
            return jax.ShapeDtypeStruct(shape, jax.dtypes.canonicalize_dtype(rows.dtype))

        return jax.tree.map(of, batch)

    # ---- iterating ----

    def __iter__(self) -> Iterator[Any]:
        _refuse_traces()
        if self._started and not self._source.reiterable:
            raise ArgumentError(
                "This dataset was made from an iterator that can be read only once, and it has been read. To go over"
                " the data several times give distribute_dataset a function that returns a new iterator."
            )
        start = self._resume or self._start_of(self._epoch)
        self._resume = None
        self._started = True
        self._epoch = start["epoch"] + 1
        left = None if self._length is None else self._length - -(-start["element"] // self._items)
        return _Outside(self._iterate(start, self._group.begin()), left)

    def _peek(self, count: int) -> list[Any]:
        """The first elements of a pass; the next iteration starts where it would have."""
        kept = self._epoch, self._resume, self._position
        self._resume = None
        try:
            return list(islice(iter(self), count))
        finally:
            self._epoch, self._resume, self._position = kept

    def _iterate(self, start: dict[str, Any], table: Any) -> Iterator[Any]:
        def to_devices(host: Positioned) -> tuple[list[Any], list[Any]]:
            element = jax.tree.map(self._to_devices, host[0])
            return [element, host[1]], jax.tree.leaves(element)

        def batches(stopped: Callable[[], bool]) -> Iterator[Positioned]:
            return self._batches(start, table, stopped)

        for box in ahead(batches, to_devices, self._prefetch):
            self._position = box.pop()
            yield box.pop()  # so that nothing but the loop's variable holds the element
        self._position = self._start_of(start["epoch"] + 1)

    def _start_of(self, epoch: int) -> dict[str, Any]:
        """The position: pass, items of the source handed out, its own state, and rows of a full item."""
        return {"epoch": epoch, "element": 0, "source": None, "rows": self._rows}

    def _batches(self, start: dict[str, Any], table: Any, stopped: Callable[[], bool]) -> Iterator[Positioned]:
        """Host batches, each with the position after it."""
        first = start["element"]
        elements = self._source.elements(start["epoch"], first, start["source"])
        batcher = self._batcher(start["rows"])
        if self._group.several and (self._own or not isinstance(self._source, RowSource)):
            batches = self._group.in_step(table, elements, batcher, first, stopped, same_source=not self._own)
        else:
            batches = batcher.batches(elements, first)
        number = given = 0
        for number, (batch, after) in enumerate(batches, 1):
            if batch is not None:
                given += 1
                if self._spec is None and jax.tree.leaves(batch)[0].shape[0] >= batcher.size * self._items:
                    self._spec = self._spec_of(batch)
                element = first + number * self._items
                yield batch, {**start, "element": element, "source": after, "rows": batcher.size}
        if first == number == 0 and not batcher.layout.types:
            raise ArgumentError("distribute_dataset: the source is empty (it gave no element).")
        if first == given == 0:
            logger.warning(
                "dataset: remainder='drop' left no batch in this pass: the source has too few rows. Use a smaller"
                " batch_size, or remainder='pad' (with mask=True for exact means)."
            )

    def _batcher(self, rows: int | None) -> Batcher:
        return Batcher(self._replicas, self._items, self._remainder, self._mask, rows)

    def _to_devices(self, rows: np.ndarray[Any, Any]) -> Any:
        try:
            return self.strategy.split_rows(rows, local=self._own)
        except (RuntimeError, MemoryError) as error:
            if "RESOURCE_EXHAUSTED" not in str(error) and not isinstance(error, MemoryError):
                raise
            size = rows.nbytes / 2**20
            raise ArgumentError(
                f"distribute_dataset: an array of shape {rows.shape} and dtype {rows.dtype} ({size:,.0f} MiB,"
                f" {size / self._replicas:,.0f} MiB per replica) does not fit on the devices. Use a smaller batch_size,"
                " or a smaller prefetch."
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
        source = self._source
        size = source.length if source.rows is None else source.rows
        settings = {"kind": source.kind, "seed": source.seed, "batch_size": self._batch_size, "size": size}
        return {**self._position, **settings}

    def state_after_pass(self) -> dict[str, Any]:
        """As `state_dict`, at the start of the next pass if one has begun, whether or not it was read to its end."""
        begun = self._started and self._position["element"] > 0
        position = self._start_of(self._position["epoch"] + 1) if begun else self._position
        return {**self.state_dict(), **position}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Let the next iteration start where `state` was taken.

        After the last element of a pass that is its end: the next iteration gives nothing, and the one after
        it the next pass. The order of a state that was shuffled is that of its own seed.

        Raises:
            ArgumentError: for a state of another kind of source, or of other settings.
        """
        own = self.state_dict()
        if not isinstance(state, dict) or state.keys() != own.keys() or not _is_position(state):
            raise ArgumentError(f"load_state_dict takes what state_dict gave, got {state!r:.80}.")
        if state["kind"] != own["kind"]:
            raise ArgumentError(
                f"load_state_dict: the state is of another kind of source, {state['kind']!r}; this one is of"
                f" {own['kind']!r}."
            )
        if (state["seed"] is None) != (own["seed"] is None):
            raise ArgumentError("load_state_dict: the state is of a dataset with another setting of shuffle.")
        if self._seed_given not in (None, state["seed"]):
            raise ArgumentError(
                f"load_state_dict: the state is of a dataset with seed={state['seed']}; this one has"
                f" seed={self._seed_given}, and would go on in another order. Leave seed out: the state has it."
            )
        if state["batch_size"] != own["batch_size"]:
            raise ArgumentError(
                f"load_state_dict: the state is of a dataset with batch_size={state['batch_size']}; this one has"
                f" {own['batch_size']}, and would go on at another row."
            )
        if None not in (state["size"], own["size"]) and state["size"] != own["size"]:
            raise ArgumentError(
                f"load_state_dict: the state is of a dataset whose source has {state['size']} rows or batches; this one's"
                f" has {own['size']}."
            )
        self._source.seed = state["seed"]
        self._resume = {key: state[key] for key in self._position}
        self._position = dict(self._resume)

    def __repr__(self) -> str:
        rows = "" if self._source.rows is None else f"of {self._source.rows} rows, "
        length = "" if self._length is None else f"{self._length} batches "
        size = "" if self._batch_size is None else f"of {self._batch_size} " if length else ""
        return f"<dataset {rows}{length}{size}on {self.strategy!r}>"


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
            ArgumentError: when it is no positive int.
        """
        _check_int("per_replica_batch_size: global_batch_size", global_batch_size, 1, "a positive int")
        if global_batch_size % self.num_replicas:
            raise UnevenBatchError(
                f"A global batch of {global_batch_size} rows does not divide by {self.num_replicas} replicas."
            )
        return global_batch_size // self.num_replicas

    def __repr__(self) -> str:
        return (
            f"InputContext(num_input_pipelines={self.num_input_pipelines}, input_pipeline_id={self.input_pipeline_id},"
            f" num_replicas={self.num_replicas})"
        )


def _seed(given: int | None, leads: bool) -> int | None:
    """The seed that was given, or one that the first process draws for all."""
    if given is not None:
        return int(given)
    return secrets.randbits(32) if leads else None


def _check_int(name: str, value: Any, least: int, what: str) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, np.integer)) or value < least:
        raise ArgumentError(f"{name} must be {what}, got {value!r}.")


def _is_position(state: dict[str, Any]) -> bool:
    """Whether the values of a state are of the types that they were written with."""

    def counts(value: Any) -> bool:
        return type(value) is int and value >= 0

    unknown = ("rows", "seed", "batch_size", "size")
    return (
        isinstance(state["kind"], str)
        and counts(state["epoch"])
        and counts(state["element"])
        and all(state[key] is None or counts(state[key]) for key in unknown)
    )


class _Outside(Iterator[Any]):
    """An iterator that is not to be asked while a program is traced: its items would become constants of it."""

    def __init__(self, items: Iterator[Any], left: int | None) -> None:
        self._items = items
        self._left = left

    def __next__(self) -> Any:
        _refuse_traces()
        item = next(self._items)
        self._left = None if self._left is None else self._left - 1
        return item

    def __length_hint__(self) -> int:
        return NotImplemented if self._left is None else max(0, self._left)


def _refuse_traces() -> None:
    if not state.top().is_eager or any(map(_jax.is_staging, _jax.trace_chain())):
        raise StrategyError(
            "A distributed dataset is iterated inside a program that is being traced, where this trace's data would be"
            " baked in for all later calls. Iterate it outside, and pass each element to the function as an argument."
        )
