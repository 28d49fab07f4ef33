"""A bounded background pipeline: work on later items goes on while the step runs.

One thread produces ahead. It holds no reference to the iterator that consumes, so that dropping the
iterator, leaving its loop or ending the program stops the thread.

What bounds it is not the queue alone: an item counts until its arrays have died, in the consumer's hands
too. So the devices never hold more than the items ahead and the one in use, unless the consumer keeps
them.
"""

from __future__ import annotations

import atexit
import functools
import sys
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any, Generic, TypeVar

S = TypeVar("S")
T = TypeVar("T")

_POLL_SECONDS = 0.1
"""How often a waiting consumer looks up, so that Ctrl-C is answered at once (on Windows too)."""

_LEAVE_SECONDS = 0.5
"""How long leaving the loop waits for a source that is busy; after that its thread ends by itself, later."""


class _Channel(Generic[T]):
    """What the two threads share: items from one to the other, and how many there may be."""

    def __init__(self, ahead: int) -> None:
        self._changed = threading.Condition()  # its lock is reentrant: arrays can die while it is held
        self._ahead = ahead
        self._items: deque[T] = deque()
        self._living: dict[int, list[weakref.ref[Any]]] = {}
        """Items whose arrays have not all died yet."""
        self._made = 0
        self._wanted = False
        """Whether the consumer waits; it gets its item even if it has kept all others."""
        self._done = False
        self._error: BaseException | None = None
        self.stopped = False
        self.thread: threading.Thread | None = None

    # ---- the producing thread ----

    def wait_for_room(self) -> bool:
        """Wait until the next item may be made; False when none will be needed."""
        with self._changed:
            while not self.stopped and not self._wanted:
                if len(self._items) < self._ahead and len(self._living) <= self._ahead:
                    break
                self._changed.wait()
            return not self.stopped

    def put(self, item: T, arrays: list[Any]) -> None:
        """Hand over an item, whose `arrays` take room until they die."""
        with self._changed:
            self._wanted = False
            if not self.stopped:
                self._made += 1
                died = functools.partial(self._died, self._made)
                self._living[self._made] = [weakref.ref(array, died) for array in arrays]
                self._items.append(item)
                self._changed.notify_all()

    def _died(self, number: int, _: weakref.ref[Any]) -> None:
        with self._changed:
            if all(array() is None for array in self._living.get(number, ())):
                self._living.pop(number, None)
                self._changed.notify_all()

    def finish(self, error: BaseException | None = None) -> None:
        """No item will follow; the consumer raises the error, if there is one."""
        with self._changed:
            self._done, self._error = True, error
            self._changed.notify_all()

    # ---- the consumer ----

    def take(self) -> tuple[T | None, bool]:
        """The next item, or that there is none."""
        with self._changed:
            while not self._items:
                if self._error is not None:
                    try:
                        raise self._error
                    finally:
                        self._error = None
                if self._done:
                    return None, False
                self._wanted = True
                self._changed.notify_all()
                self._changed.wait(_POLL_SECONDS)
            self._wanted = False
            item = self._items.popleft()
            self._changed.notify_all()
            return item, True

    def stop(self) -> None:
        """Let go of everything; the thread ends as soon as its source lets it."""
        with self._changed:
            self.stopped = True
            self._items.clear()
            self._living.clear()
            self._error = None
            self._changed.notify_all()

    def leave(self) -> None:
        """`stop`, and give the thread a moment to end."""
        self.stop()
        _open.discard(self)
        thread = self.thread
        if thread is not None and thread is not threading.current_thread() and not sys.is_finalizing():
            thread.join(_LEAVE_SECONDS)


_open: weakref.WeakSet[_Channel[Any]] = weakref.WeakSet()


@atexit.register  # after JAX's own, so it runs before: no thread may use a JAX that is shut down
def _leave_all() -> None:
    channels = list(_open)
    for channel in channels:
        channel.stop()
    for channel in channels:
        channel.leave()


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
        for item in make(lambda: False):
            yield send(item)[0]
        return
    channel: _Channel[T] = _Channel(prefetch)
    channel.thread = threading.Thread(target=_produce, args=(make, send, channel), name="phalanx-feed", daemon=True)
    _open.add(channel)
    channel.thread.start()
    try:
        while True:
            taken, more = channel.take()
            if not more:
                return
            yield taken  # type: ignore[misc]
            del taken  # while the next one is waited for only the consumer may hold it
    finally:
        channel.leave()


def _produce(
    make: Callable[[Callable[[], bool]], Iterator[S]], send: Callable[[S], tuple[T, list[Any]]], channel: _Channel[T]
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
