"""`progress`: a loop with a progress bar that does not hold the devices up."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterable, Iterator
from typing import Any, Generic, TypeVar

import jax

from phalanx.errors import ArgumentTypeError

T = TypeVar("T")

_LINE_SECONDS = 5.0
"""Seconds between two lines where the output is no terminal."""


class Progress(Generic[T]):
    """Made by `px.progress`."""

    def __init__(self, iterable: Iterable[T], description: str) -> None:
        if not hasattr(iterable, "__iter__"):
            raise ArgumentTypeError(f"progress takes an iterable, got {type(iterable).__name__}.")
        self._iterable = iterable
        self._description = description
        self._shown: dict[str, str] = {}
        self._pending: list[dict[str, Any]] = []

    def update(self, **metrics: Any) -> None:
        """Show these numbers next to the bar as soon as the devices have them; the loop does not wait."""
        self._pending.append(metrics)

    def __len__(self) -> int:
        return len(self._iterable)  # type: ignore[arg-type]

    def __iter__(self) -> Iterator[T]:
        if jax.process_index() != 0:
            yield from self._iterable
        elif sys.stdout.isatty():
            yield from self._with_bar()
        else:
            yield from self._with_lines()

    def _total(self) -> int | None:
        try:
            return len(self)
        except TypeError:
            return None

    def _with_bar(self) -> Iterator[T]:
        try:
            from rich import progress as bars
        except ImportError:  # rich is an extra; lines do without it
            yield from self._with_lines()
            return
        columns = (
            bars.TextColumn("{task.description}"),
            bars.BarColumn(),
            bars.MofNCompleteColumn(),
            bars.TextColumn("{task.fields[speed]}"),
            bars.TimeRemainingColumn(),
            bars.TextColumn("{task.fields[metrics]}"),
        )
        start = time.perf_counter()
        with bars.Progress(*columns) as bar:
            task = bar.add_task(self._description, total=self._total(), speed="", metrics="")
            for done, item in enumerate(self._iterable, 1):
                yield item
                speed = f"{done / (time.perf_counter() - start):.1f} steps/s"
                bar.update(task, advance=1, speed=speed, metrics=self._metrics(wait=False))
            bar.update(task, metrics=self._metrics(wait=True))

    def _with_lines(self) -> Iterator[T]:
        start = last = time.perf_counter()
        total = self._total()
        done = 0
        for item in self._iterable:
            yield item
            done += 1
            now = time.perf_counter()
            if now - last >= _LINE_SECONDS:
                last = now
                self._line(done, total, now - start, wait=False)
        self._line(done, total, time.perf_counter() - start, wait=True)

    def _line(self, done: int, total: int | None, seconds: float, wait: bool) -> None:
        of = "" if total is None else f"/{total}"
        speed = done / seconds if seconds else 0.0
        left = "" if total is None or not speed or done == total else f", {(total - done) / speed:.0f} s left"
        print(f"{self._description}: {done}{of}, {speed:.1f} steps/s{left} {self._metrics(wait)}".rstrip(), flush=True)

    def _metrics(self, wait: bool) -> str:
        """The newest numbers that are there already (or, at the end, the last ones)."""
        ready = next((i for i in reversed(range(len(self._pending))) if wait or _is_ready(self._pending[i])), None)
        if ready is not None:
            self._shown.update({name: _text(value) for name, value in self._pending[ready].items()})
            del self._pending[: ready + 1]
        return " ".join(f"{name} {value}" for name, value in self._shown.items())


def _is_ready(metrics: dict[str, Any]) -> bool:
    return all(value.is_ready() for value in metrics.values() if isinstance(value, jax.Array))


def _text(value: Any) -> str:
    try:
        return f"{float(value):.4g}"
    except (TypeError, ValueError):
        return str(value)


def progress(iterable: Iterable[T], description: str = "") -> Progress[T]:
    """Wrap a loop with a progress bar: steps, steps per second, time left, the last metrics.

    The numbers given to ``.update(...)`` are shown once the devices have computed them; the loop never
    waits for them. Only process 0 prints. Where the output is no terminal there is a line every 5 s.

    Args:
        iterable: what to loop over, for example a distributed dataset.
        description: shown in front.

    Raises:
        ArgumentTypeError: for something that cannot be iterated.

    Example:
        >>> bar = px.progress([1, 2, 3], "count")
        >>> for i in bar:
        ...     bar.update(value=i)  # doctest: +ELLIPSIS
        count: 3/3, ... steps/s value 3
    """
    return Progress(iterable, description)
