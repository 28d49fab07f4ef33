"""Several processes that feed one strategy agree: on what the dataset is, and on each batch.

All replicas run each step together, so a process that has one batch more than the others would wait for
them for ever. Before each batch the processes tell each other how many rows they have.
"""

from __future__ import annotations

import contextlib
import itertools
import json
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax

from phalanx._plain import decode, encode
from phalanx.cluster.agreement import Roundtable
from phalanx.data.elements import Batcher, Rows
from phalanx.data.host import Arrays
from phalanx.errors import ArgumentError, ArgumentTypeError, StrategyError, UnevenBatchError

Feed = Iterator[tuple[Any, Any]]

_TIMEOUT_SECONDS = 300.0
"""How long a process waits for another one's batch."""

_datasets = itertools.count()
"""Every process makes its datasets in the same order, which is how they find each other's."""


class Turn(NamedTuple):
    """This process's element, and what all have."""

    number: int
    items: list[Rows]
    after: Any
    counts: list[int]
    """Rows of each process's element."""
    each: int
    """Rows that one replica has at most, of all processes."""


class Group:
    """The processes that own the replicas of a strategy, feeding one dataset together."""

    def __init__(self, devices: Any) -> None:
        owners = [device.process_index for device in devices]
        self.processes = sorted(set(owners))
        self.replicas = [owners.count(process) for process in self.processes]
        """Of each process."""
        self._name = f"phalanx/dataset/{next(_datasets)}" if self.several else ""
        self._passes = itertools.count()

    @property
    def several(self) -> bool:
        """Whether there is anything to agree on."""
        return len(self.processes) > 1

    @property
    def leads(self) -> bool:
        """Whether this process decides what is to be decided."""
        return self.processes[0] == jax.process_index()

    def agree(self, common: dict[str, Any], own: Any) -> tuple[dict[str, Any], list[Any]]:
        """What must be equal on all processes (where it is None, the first one's counts), and what each has of its own.

        Raises:
            StrategyError: naming what differs.
        """
        if not self.several:
            return common, [own]
        said = [json.loads(word) for word in self._tell(self._table("made"), json.dumps([common, own]))]
        settled = {key: said[0][0][key] if value is None else value for key, value in common.items()}
        for key, value in settled.items():
            everyones = [theirs[key] for theirs, _ in said]
            if any(theirs not in (None, value) for theirs in everyones):
                raise StrategyError(
                    f"distribute_dataset: the processes differ in {key}: {everyones}. All must make the same datasets,"
                    " in the same order."
                )
        return settled, [own for _, own in said]

    def begin(self) -> Roundtable:
        """Where a pass is talked about; every process begins its passes in the same order."""
        return self._table(f"pass/{next(self._passes)}")

    def in_step(
        self,
        table: Roundtable,
        elements: Feed,
        batcher: Batcher,
        start: int,
        stopped: Callable[[], bool],
        *,
        same_source: bool,
    ) -> Feed:
        """Batches of this process's elements, as many as every other process gets.

        Where each has a source of its own, one that has run out feeds padding until all have
        (``remainder="pad"``); with ``"drop"`` all stop together; else it is an error on all of them.
        """
        last_word = "left its loop"
        try:
            heard = self._heard(table, elements, batcher, start, stopped)
            yield from (_same if same_source else self._own)(heard, batcher)
            last_word = ""
        except InterruptedError:
            return
        except Exception as error:
            last_word = f"failed with {type(error).__name__}: {error}"
            raise
        finally:
            if last_word:
                with contextlib.suppress(Exception):  # the others may be gone
                    table.leave(json.dumps({"gone": last_word}))

    def _heard(
        self, table: Roundtable, elements: Feed, batcher: Batcher, start: int, stopped: Callable[[], bool]
    ) -> Iterator[Turn]:
        """Each element until no process has any, with what the others have."""
        taken = batcher.take(elements, start)
        padding: Any = None
        for number in itertools.count(start // batcher.items):
            own, after = next(taken, ([], None))
            word = {"rows": sum(item.count for item in own), "each": batcher.each(own) if own else 0}
            if padding is None:
                word |= _introduction(own, batcher)
            said = self._hear(table, word, number, stopped)
            if padding is None:
                padding = _settle(said)
            counts = [theirs["rows"] for theirs in said]
            if not any(counts):
                return
            if padding is None and not all(counts):  # which all processes see alike: none is left in a step
                kind = next(theirs["kind"] for theirs in said if theirs["rows"])
                raise StrategyError(
                    f"distribute_dataset: a process has no rows from the start (the processes have {counts}), and those of"
                    f" the others are in {kind}, of which only dicts, lists and tuples can be told to it. Use these, or"
                    " give every process a row."
                )
            own = own or [Rows(Arrays.of(padding, "padding"), 0)]
            yield Turn(number, own, after, counts, max(theirs["each"] for theirs in said))

    def _own(self, turns: Iterator[Turn], batcher: Batcher) -> Feed:
        for turn in turns:
            full = batcher.full(turn.each)
            short = any(count < full * n for count, n in zip(turn.counts, self.replicas))
            if short and batcher.drops:
                batcher.dropped(sum(turn.counts), turn.number)
                return
            if short and not batcher.pads:
                raise UnevenBatchError(
                    f"distribute_dataset: in element {turn.number} the processes have {turn.counts} rows for"
                    f" {self.replicas} replicas. Each replica needs the same number, in every element: choose"
                    " remainder='pad' (with mask=True for exact means) or remainder='drop'."
                )
            yield batcher.filled(turn.items, full), turn.after

    def _hear(
        self, table: Roundtable, word: dict[str, Any], number: int, stopped: Callable[[], bool]
    ) -> list[dict[str, Any]]:
        said = [json.loads(theirs) for theirs in self._tell(table, json.dumps(word), stopped)]
        for process, theirs in zip(self.processes, said):
            if "gone" in theirs:
                raise StrategyError(f"distribute_dataset: process {process} {theirs['gone']} (at element {number}).")
        return said

    def _table(self, name: str) -> Roundtable:
        return Roundtable(f"{self._name}/{name}", self.processes, _TIMEOUT_SECONDS)

    def _tell(self, table: Roundtable, word: str, stopped: Callable[[], bool] = lambda: False) -> list[str]:
        try:
            return table.tell(word, stopped)
        except TimeoutError as error:
            raise StrategyError(
                f"distribute_dataset: {error}. Every process must make its datasets, and iterate them, equally often"
                " and in the same order; a process may have failed: look at its log."
            ) from error


def _same(turns: Iterator[Turn], batcher: Batcher) -> Feed:
    for turn in turns:
        if len(set(turn.counts)) > 1:
            raise StrategyError(
                f"distribute_dataset: in element {turn.number} the processes have {turn.counts} rows. With"
                " auto_shard='data' all must have the same source; with auto_shard='off' each has its own part."
            )
        yield batcher.batch(turn.items, turn.number), turn.after


def _introduction(items: list[Rows], batcher: Batcher) -> dict[str, Any]:
    """What a process says of its first element: of what kind its rows are, and one of them.

    Not as a pickle, which could hold code: so instances of classes, such as named tuples, cannot be told.
    """
    if not items:
        return {}
    kind = repr(batcher.layout.types)
    try:
        return {"kind": kind, "row": encode(items[0].none().arrays.tree(), "row")}
    except ArgumentTypeError:
        return {"kind": kind, "row": None}


def _settle(said: list[dict[str, Any]]) -> Any:
    """A row to fill up with, for a process that has none; all have rows of the same kind."""
    rows = {theirs["kind"]: theirs["row"] for theirs in said if theirs["rows"]}
    if len(rows) > 1:
        raise ArgumentError(f"distribute_dataset: the processes have different kinds of rows: {', or '.join(rows)}.")
    return next((decode(row) for row in rows.values()), None)
