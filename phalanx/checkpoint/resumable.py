"""`resumable`: a training loop that goes on where it stopped."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Any, NoReturn

from phalanx._checks import check_int
from phalanx.checkpoint.checkpoint import Checkpoint
from phalanx.checkpoint.manager import CheckpointManager, check_checkpoint
from phalanx.checkpoint.randomness import GlobalRandom
from phalanx.cluster.exits import EXIT_PREEMPTED
from phalanx.cluster.preemption import Preempted, preemption
from phalanx.errors import ArgumentError, ArgumentTypeError

logger = logging.getLogger("phalanx")


@dataclass(frozen=True)
class Step:
    """One step of a `resumable` loop."""

    number: int
    """Of finished steps before this one, in all runs."""
    epoch: int
    batch: Any
    """An element of the data."""


def resumable(
    directory: str | os.PathLike[str],
    data: Iterable[Any],
    checkpoint: Checkpoint,
    *,
    epochs: int = 1,
    every: int | None = None,
    keep: int | None = 3,
) -> Iterator[Step]:
    """The steps of a training run that are still to be done; started again, the loop goes on where it stopped.

    After each epoch, and every so many steps, it keeps the objects, the position in the data, the number of the step and
    the epoch, and the states of Python's and NumPy's global random numbers. A step counts when its body has been run to the
    end; after a break or an exception the loop goes on from the last checkpoint. When all epochs are done it gives nothing.

    SIGTERM, with which schedulers ask a program to stop, ends the loop after the step (the same on all processes), or where it
    waits for data (with one process): the state is saved, and the program exits with `px.cluster.EXIT_PREEMPTED`.

    Args:
        directory: of the checkpoints, see `CheckpointManager`.
        data: a distributed dataset, or anything else that can be iterated once for each epoch. What has no
            ``state_dict()`` is resumed by skipping the elements that were used.
        checkpoint: the objects that change: variables, optimizers (which hold the learning rate), models, seeds.
        epochs: passes over the data, in all runs together.
        every: save after so many steps. None: after each epoch only.
        keep: how many checkpoints stay.

    Returns:
        An iterator of `Step`, with ``number``, ``epoch`` and ``batch``.

    Raises:
        ArgumentTypeError: for `data` that cannot be iterated, or something that is no `Checkpoint`.
        ArgumentError: for numbers that are not positive; for data that gives nothing in an epoch, as a generator does
            in its second; and for what `CheckpointManager` refuses.
        CheckpointError: when another program that still runs writes to the directory; and for what
            `CheckpointManager.restore_latest` and `save` refuse.

    Example:
        >>> import tempfile
        >>> directory, total = tempfile.mkdtemp(), px.Variable(0.0)
        >>> for step in px.resumable(directory, [1.0, 2.0, 3.0], px.Checkpoint(total=total), epochs=2, every=1):
        ...     if step.number == 4:
        ...         break  # a power failure, say
        ...     _ = total.assign_add(step.batch)
        >>> for step in px.resumable(directory, [1.0, 2.0, 3.0], px.Checkpoint(total=total), epochs=2, every=1):
        ...     _ = total.assign_add(step.batch)
        ...     print(step)
        Step(number=4, epoch=1, batch=2.0)
        Step(number=5, epoch=1, batch=3.0)
        >>> float(total)
        12.0
    """
    if not hasattr(data, "__iter__") or isinstance(data, (str, bytes)):
        raise ArgumentTypeError(
            f"resumable: data must be something to iterate, got {type(data).__name__} {data!r:.60}."
        )
    check_checkpoint(checkpoint, "resumable")
    check_int(epochs, "resumable: epochs")
    check_int(every, "resumable: every", optional=True)
    if not hasattr(data, "state_dict"):
        data = _Counted(data)
    return _steps(CheckpointManager(directory, keep=keep), data, checkpoint, epochs, every)


def _steps(
    manager: CheckpointManager, data: Any, checkpoint: Checkpoint, epochs: int, every: int | None
) -> Iterator[Step]:
    kept = Checkpoint(objects=checkpoint, data=data, step=0, epoch=0, random=GlobalRandom())
    try:
        manager.claim()
        manager.restore_latest(kept)
        with preemption.listening():
            yield from _until_asked(manager, data, kept, epochs, every)
        manager.wait()
    except Preempted:
        manager.save(kept, step=kept.step)
        _leave(manager, kept)
    finally:
        manager.settle()


def _until_asked(manager: CheckpointManager, data: Any, kept: Any, epochs: int, every: int | None) -> Iterator[Step]:
    is_resumed = kept.step > 0
    while kept.epoch < epochs:
        items, before = iter(data), kept.step
        while item := preemption.next_of(items):
            yield Step(kept.step, kept.epoch, item.pop())
            kept.step += 1
            stop = preemption.reached()
            if stop or (every is not None and kept.step % every == 0):
                manager.save(kept, step=kept.step)
            if stop:
                _leave(manager, kept)
        if kept.step == before and not is_resumed:  # which may have been at the end of its epoch
            raise ArgumentError(
                f"resumable: the data gives nothing in epoch {kept.epoch}. It must be something that can be gone through once"
                " for each epoch: a list or a dataset, and no generator or iterator, which is then used up."
            )
        is_resumed = False
        kept.epoch += 1
        manager.save(kept, step=kept.step)


def _leave(manager: CheckpointManager, kept: Any) -> NoReturn:
    manager.wait()
    logger.info("asked to stop: step %s is saved in %s", kept.step, manager.directory)
    raise SystemExit(EXIT_PREEMPTED)


class _Counted:
    """Data without a state of its own: the elements of the pass that were used are skipped."""

    def __init__(self, data: Iterable[Any]) -> None:
        self._data = data
        self._used = self._skip = 0

    def __iter__(self) -> Iterator[Any]:
        self._used, self._skip = self._skip, 0
        for item in islice(self._data, self._used, None):
            self._used += 1
            yield item
        self._used = 0

    def state_dict(self) -> dict[str, Any]:
        return {"used": self._used}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._skip = self._used = state["used"]
