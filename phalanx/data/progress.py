"""`progress`: a loop with a progress bar that does not hold the devices up."""

from __future__ import annotations

import sys
import time
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, suppress
from datetime import timedelta
from operator import length_hint
from typing import Any, Generic, Protocol, TypeVar

import jax

from phalanx.data.libraries import length_of
from phalanx.errors import ArgumentTypeError
from phalanx.variables import Variable

T = TypeVar("T")

_UNSHOWN = 64
"""Metrics kept until a device has computed them; no device is further behind than that."""

_LONG_SECONDS = 100 * 24 * 3600.0
"""A time that long is not shown."""

_LONG_COUNT = 1e15
"""Whole numbers from here on are rounded like others."""


class _Display(Protocol):
    """Shows one status after the other."""

    seconds: float
    """Between two of them."""

    def show(self, done: int, total: int | None, speed: float, metrics: str) -> None:
        """Show where the loop is."""


class Progress(Generic[T]):
    """Made by `px.progress`."""

    def __init__(self, iterable: Iterable[T], description: str) -> None:
        if not hasattr(iterable, "__iter__"):
            raise ArgumentTypeError(f"progress takes an iterable, got {type(iterable).__name__}.")
        self._iterable = iterable
        self._description = description
        self._unshown: deque[dict[str, Any]] = deque(maxlen=_UNSHOWN)
        self._shown: dict[str, str] = {}

    def update(self, *unnamed: Any, **metrics: Any) -> None:
        """Show these numbers next to the bar as soon as the devices have them; the loop does not wait.

        Raises:
            ArgumentTypeError: for a number without a name.
        """
        if unnamed:
            raise ArgumentTypeError(
                f"progress.update takes numbers by name, update(loss=loss), or update(**metrics) for a dict; got"
                f" {unnamed[0]!r:.60}."
            )
        self._unshown.append({name: v.value if isinstance(v, Variable) else v for name, v in metrics.items()})

    def __len__(self) -> int:
        return len(self._iterable)  # type: ignore[arg-type]

    def __iter__(self) -> Iterator[T]:
        if jax.process_index() != 0:
            yield from self._iterable
            return
        with ExitStack() as stack:
            total = length_of(self._iterable)
            yield from self._shown_on(_display(self._description, total, stack), total)

    def _shown_on(self, display: _Display, total: int | None) -> Iterator[T]:
        items = iter(self._iterable)
        done = before = _already_done(items, total)
        finished = False
        start = last = time.perf_counter()
        try:
            for item in items:
                done += 1  # in a loop that is left here, too: the item was handed out
                yield item
                now = time.perf_counter()
                if done - before == 1:
                    start = now  # the first step compiles
                if now - last >= display.seconds:
                    last = now
                    display.show(done, total, _per_second(done - before, now - start), self._metrics(wait=False))
            finished = True
        finally:
            speed = _per_second(done - before, time.perf_counter() - start)
            display.show(done, total, speed, self._metrics(wait=finished))

    def _metrics(self, wait: bool) -> str:
        """The newest numbers that the devices have computed; the last ones if it may wait for them."""
        for i in reversed(range(len(self._unshown))):
            if wait or all(map(_is_ready, self._unshown[i].values())):
                texts = {name: _text(value) for name, value in self._unshown[i].items()}
                self._shown |= {name: text for name, text in texts.items() if text is not None}
                for _ in range(i + 1):
                    self._unshown.popleft()
                break
        return "  ".join(f"{name} {value}" for name, value in self._shown.items())


def _already_done(items: Iterator[Any], total: int | None) -> int:
    """Items of a pass that was resumed, before the first one that it gives now."""
    if total is None:
        return 0
    try:
        return max(0, total - length_hint(items, total))
    except (TypeError, ValueError):  # whatever a class of the user's does where it cannot tell
        return 0


def _per_second(done: int, seconds_since_first: float) -> float:
    return (done - 1) / seconds_since_first if done > 1 and seconds_since_first else 0.0


def _is_ready(value: Any) -> bool:
    arrays: list[Any] = [leaf for leaf in jax.tree.leaves(value) if isinstance(leaf, jax.Array)]
    return all(array.is_deleted() or array.is_ready() for array in arrays)


def _text(value: Any) -> str | None:
    """The value as it is shown; None for one that is gone (donated) or cannot be computed: no metric ends a run."""
    try:
        number = float(value)
        return f"{number:.0f}" if number.is_integer() and abs(number) < _LONG_COUNT else f"{number:.4g}"
    except (TypeError, ValueError, OverflowError):
        with suppress(Exception):
            return str(value)
    except Exception:
        pass
    return None


# ---- displays ------------------------------------------------------------------------------------


def _display(description: str, total: int | None, stack: ExitStack) -> _Display:
    if getattr(sys.stdout, "isatty", lambda: False)():
        try:
            return _Bar(description, total, stack)
        except ImportError:  # rich is an extra; lines do without it
            pass
    return _Lines(description)


class _Bar:
    """A bar of rich's."""

    seconds = 0.1

    def __init__(self, description: str, total: int | None, stack: ExitStack) -> None:
        from rich import progress as bars
        from rich.console import Console

        columns = (
            bars.TextColumn("{task.description}", markup=False),
            bars.BarColumn(),
            bars.MofNCompleteColumn(),
            bars.TextColumn("{task.fields[status]}", markup=False),
        )
        self._bar = stack.enter_context(bars.Progress(*columns, console=Console(), auto_refresh=False))
        self._task = self._bar.add_task(description, total=total, status="")

    def show(self, done: int, total: int | None, speed: float, metrics: str) -> None:
        status = _status(done, total, speed, metrics)
        self._bar.update(self._task, completed=done, total=total, status=status, refresh=True)


class _Lines:
    """A line now and then, for output that goes to a file."""

    seconds = 5.0

    def __init__(self, description: str) -> None:
        self._description = description

    def show(self, done: int, total: int | None, speed: float, metrics: str) -> None:
        of = "" if total is None else f"/{total}"
        print(f"{self._description}: {done}{of}  {_status(done, total, speed, metrics)}".rstrip(), flush=True)


def _status(done: int, total: int | None, speed: float, metrics: str) -> str:
    rate = f"{speed:.1f} steps/s" if speed else ""
    seconds = (total - done) / speed if speed and total else 0
    left = f"{timedelta(seconds=round(seconds))} left" if 0 < seconds < _LONG_SECONDS else ""
    return "  ".join(filter(None, (rate, left, metrics)))


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
        count: 3/3  ... steps/s  value 3
    """
    return Progress(iterable, description)
