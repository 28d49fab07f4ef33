"""A bounded background pipeline: work on later elements goes on while the step runs.

One thread produces ahead. It holds no reference to the iterator that consumes, so that dropping the
iterator, leaving its loop or ending the program stops the thread.
"""

from __future__ import annotations

import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any, Generic, TypeVar

T = TypeVar("T")

_POLL_SECONDS = 0.1
"""How often a waiting consumer looks up, so that Ctrl-C is answered at once."""

_JOIN_SECONDS = 5.0
"""How long leaving the loop waits for the source to finish what it is doing."""


class _Channel(Generic[T]):
    """What the two threads share."""

    def __init__(self, ahead: int) -> None:
        self.ready = threading.Condition()
        self.items: deque[T] = deque()
        self.ahead = ahead
        self.made = 0
        """Items made or being made and not yet taken."""
        self.done = False
        self.stopped = False
        self.error: BaseException | None = None

    def stop(self) -> None:
        with self.ready:
            self.stopped = True
            self.items.clear()
            self.ready.notify_all()


def ahead(make: Callable[[], Iterator[T]], prefetch: int) -> Iterator[T]:
    """Iterate ``make()`` in a background thread, at most `prefetch` items ahead.

    With 0 there is no thread. An exception in the source comes out where its item would have, with the
    source's own traceback.
    """
    if prefetch == 0:
        yield from make()
        return
    channel: _Channel[T] = _Channel(prefetch)
    thread = threading.Thread(target=_produce, args=(make, channel), name="phalanx-feed", daemon=True)
    thread.start()
    # The interpreter must not end while the thread is inside JAX.
    at_exit = weakref.finalize(thread, _end, channel, thread)
    try:
        while True:
            item, more = _take(channel)
            if not more:
                return
            yield item  # type: ignore[misc]
            del item
    finally:
        _end(channel, thread)
        at_exit.detach()


def _take(channel: _Channel[T]) -> tuple[T | None, bool]:
    with channel.ready:
        while not channel.items:
            if channel.error is not None:
                error, channel.error = channel.error, None
                channel.done = True
                raise error
            if channel.done:
                return None, False
            channel.ready.wait(_POLL_SECONDS)
        item = channel.items.popleft()
        channel.made -= 1
        channel.ready.notify_all()
        return item, True


def _produce(make: Callable[[], Iterator[T]], channel: _Channel[T]) -> None:
    try:
        items = make()
        while True:
            with channel.ready:
                while channel.made >= channel.ahead and not channel.stopped:
                    channel.ready.wait()
                if channel.stopped:
                    break
                channel.made += 1
            try:
                item = next(items)
            except StopIteration:
                break
            with channel.ready:
                if not channel.stopped:
                    channel.items.append(item)
                channel.ready.notify_all()
            del item
        close = getattr(items, "close", None)
        if close is not None:
            close()
    except BaseException as error:
        channel.error = error
    finally:
        with channel.ready:
            channel.done = True
            channel.ready.notify_all()


def _end(channel: _Channel[Any], thread: threading.Thread) -> None:
    channel.stop()
    if thread is not threading.current_thread():
        thread.join(_JOIN_SECONDS)
