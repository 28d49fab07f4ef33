"""A bounded background pipeline: work on later items goes on while the step runs.

One thread produces ahead. It holds no reference to the iterator that consumes, so that dropping the
iterator, leaving its loop or ending the program stops the thread.

What bounds it is not the queue alone: an item counts until its arrays have died, in the consumer's hands
too. So the devices never hold more than the items ahead and the one in use, unless the consumer keeps
them.
"""

from __future__ import annotations

import atexit
import contextlib
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from queue import Empty, SimpleQueue
from typing import Any, Generic, Literal, TypeAlias, TypeVar

import jax

from phalanx.errors import StrategyError

S = TypeVar("S")
T = TypeVar("T")
Outcome: TypeAlias = Literal["item", "end", "error"]

_POLL_SECONDS = 0.1
"""How often a waiting consumer looks up, so that Ctrl-C is answered at once (on Windows too)."""

_LEAVE_SECONDS = 0.5
"""How long the next loop (which may read the same source), or the end of the program, waits for a source that is busy when its loop is left."""


class _Channel(Generic[T]):
    """What the two threads share: items from one to the other, and how many there may be.

    There is no lock in it that Ctrl-C, or the death of an array in the middle of anything, could find held:
    both queues are C code that may be entered again, and everything else is written by one thread.
    """

    def __init__(self, ahead: int) -> None:
        self._ahead = ahead
        self._items: SimpleQueue[tuple[Outcome, Any]] = SimpleQueue()
        self._news: SimpleQueue[Any] = SimpleQueue()
        """Something changed that the producer may be waiting for."""
        self._living: list[list[weakref.ref[Any]]] = []
        """The arrays of each item, of which some are alive."""
        self._made = 0
        self._taken = 0
        self._asked = 0
        """The item that the consumer waits for; it is made even if the consumer has kept all others."""
        self.stopped = False
        self.thread: threading.Thread

    # ---- the producing thread ----

    def wait_for_room(self) -> bool:
        """Wait until the next item may be made; False when none will be needed."""
        while not self.stopped:
            self._living = [arrays for arrays in self._living if any(array() is not None for array in arrays)]
            fits = self._made - self._taken < self._ahead and len(self._living) <= self._ahead
            if fits or self._asked > self._made:
                return True
            self._news.get()
        return False

    def put(self, item: T, arrays: list[Any]) -> None:
        """Hand over an item, whose `arrays` take room until they die."""
        self._living.append([weakref.ref(array, self._news.put) for array in arrays])
        self._made += 1
        self._items.put(("item", item))

    def finish(self, error: BaseException | None = None) -> None:
        """No item will follow; the consumer raises the error, if there is one."""
        self._items.put(("end", None) if error is None else ("error", error))
        if self.stopped:
            self._drop_items()

    # ---- the consumer ----

    def take(self) -> list[T]:
        """The next item, in a list from which it can be taken without leaving a reference; or an empty list."""
        self._asked = self._taken + 1
        self._news.put(None)
        while True:
            try:
                outcome, value = self._items.get(timeout=_POLL_SECONDS)
                break
            except Empty:
                if not self.thread.is_alive() and self._items.empty():
                    raise StrategyError(
                        "The thread that feeds this iterator is gone: the process was forked after the iterator was"
                        " opened. Call iter(dataset) in the process that uses it."
                    ) from None
        if outcome == "error":
            try:
                raise value
            finally:
                del value
        self._taken += 1
        self._news.put(None)
        return [value] if outcome == "item" else []

    def stop(self) -> None:
        """Let go of everything; the thread ends as soon as its source lets it, and nobody waits for that.

        Iterators are closed while objects die, where Ctrl-C would be lost.
        """
        if self.stopped:
            return  # also when the interpreter takes modules apart
        self.stopped = True
        self._news.put(None)
        self._drop_items()

    def _drop_items(self) -> None:
        with contextlib.suppress(Empty):
            while True:
                self._items.get_nowait()


_open: weakref.WeakSet[_Channel[Any]] = weakref.WeakSet()
"""Those whose thread or iterator lives."""


def _wait_for_stopped() -> None:
    """Give the threads that were stopped a moment to end, one for all of them."""
    end = time.monotonic() + _LEAVE_SECONDS
    for channel in list(_open):
        if channel.stopped and channel.thread.is_alive() and channel.thread is not threading.current_thread():
            channel.thread.join(max(0.0, end - time.monotonic()))


@atexit.register  # after JAX's own, so it runs before: no thread may use a JAX that is shut down
def _stop_all() -> None:
    for channel in list(_open):
        channel.stop()
    _wait_for_stopped()


def ahead(
    make: Callable[[Callable[[], bool]], Iterator[S]], send: Callable[[S], tuple[T, list[Any]]], prefetch: int
) -> Iterator[T]:
    """Iterate ``make(stopped)``, each item sent to the devices, in a background thread at most `prefetch` items ahead.

    With 0 there is no thread. An exception comes out where its item would have, with the source's own
    traceback.

    Args:
        make: called in the thread; ``stopped()`` tells a source that waits whether anybody still waits for it.
        send: given an item, returns the one to hand out and its arrays.
        prefetch: how many items to be ahead.
    """
    if prefetch == 0:
        _wait_for_stopped()
        for item in make(lambda: False):
            yield send(item)[0]
        return
    channel: _Channel[T] = _Channel(prefetch)
    arguments = make, send, channel, bool(jax.config.jax_enable_x64)
    channel.thread = threading.Thread(target=_produce, args=arguments, name="phalanx-feed", daemon=True)
    _open.add(channel)
    try:
        channel.thread.start()
        while box := channel.take():
            yield box.pop()
    finally:
        channel.stop()


def _produce(
    make: Callable[[Callable[[], bool]], Iterator[S]],
    send: Callable[[S], tuple[T, list[Any]]],
    channel: _Channel[T],
    x64: bool,
) -> None:
    _wait_for_stopped()
    with jax.enable_x64(x64):  # as in the thread that iterates
        _produce_into(channel, make, send)


def _produce_into(
    channel: _Channel[T], make: Callable[[Callable[[], bool]], Iterator[S]], send: Callable[[S], tuple[T, list[Any]]]
) -> None:
    try:
        items = make(lambda: channel.stopped)
        while channel.wait_for_room():
            try:
                item = next(items)
            except StopIteration:
                break
            channel.put(*send(item))
            del item
        close = getattr(items, "close", None)
        if close is not None:
            close()
    except BaseException as error:
        channel.finish(error)
    else:
        channel.finish()
