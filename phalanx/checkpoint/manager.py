"""`CheckpointManager`: the last few checkpoints of a run in a directory."""

from __future__ import annotations

import hashlib
import logging
import os
import threading
import time
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import Any

from phalanx._checks import check_flag, check_int, check_seconds
from phalanx._interrupts import HeldBack
from phalanx.checkpoint import files
from phalanx.checkpoint.checkpoint import Checkpoint, Restoring, Snapshot, contents_of, describe, in_eager_code, take
from phalanx.checkpoint.claim import Claim
from phalanx.checkpoint.together import Processes
from phalanx.errors import ArgumentError, ArgumentTypeError, CheckpointError
from phalanx.function import is_strict

logger = logging.getLogger("phalanx")


class CheckpointManager:
    """Saves checkpoints to a directory while training goes on, and restores the last one.

    A checkpoint is complete or not there at all, whenever the program or the machine stops. It is copied to the
    host when `save` is called and written in the background; what goes wrong there is raised by the next call. It
    can be restored on another number of replicas and processes. With several processes all call the same methods
    in the same order, the first one writes, and `directory` is one that all can reach.

    Args:
        directory: where; made when it is not there.
        keep: how many checkpoints stay; the oldest is removed when a new one is complete. None: all.
        every: `save` does nothing at steps that this number does not divide. None: it saves at each call.
        timeout: seconds in which all processes must have come to a save or restore.

    Raises:
        ArgumentTypeError: for a `directory` that is no path.
        ArgumentError: when `keep` or `every` is no positive int, `timeout` no positive number, or `directory` a file.
        ImportError: when Orbax is not installed.

    Example:
        >>> import tempfile
        >>> w = px.Variable(1.0)
        >>> manager = px.CheckpointManager(tempfile.mkdtemp(), keep=2)
        >>> for step in (1, 2, 3):
        ...     _ = w.assign_add(1.0)
        ...     _ = manager.save(px.Checkpoint(w=w), step=step)
        >>> manager.wait()
        >>> manager.steps
        [2, 3]
        >>> _ = w.assign(0.0)
        >>> manager.restore_latest(px.Checkpoint(w=w)), float(w)
        (3, 4.0)
    """

    def __init__(
        self,
        directory: str | os.PathLike[str],
        keep: int | None = 3,
        every: int | None = None,
        *,
        timeout: float = 300.0,
    ) -> None:
        if not isinstance(directory, (str, os.PathLike)):
            raise ArgumentTypeError(f"CheckpointManager: directory must be a path, got {directory!r:.60}.")
        for name, value in (("keep", keep), ("every", every)):
            check_int(value, f"CheckpointManager: {name}", optional=True)
        check_seconds(timeout, "CheckpointManager: timeout")
        files.load_orbax()
        self._directory = Path(directory).absolute()
        if self._directory.exists() and not self._directory.is_dir():
            raise ArgumentError(f"CheckpointManager: {self._directory} is a file; checkpoints need a directory.")
        self._keep = keep
        self._every = every
        self._processes = Processes(timeout)
        self._writing = Writing()
        self._claim = Claim(self._directory)
        self._is_claimed = False
        self._turn = threading.RLock()
        """Threads save and restore one after the other."""
        self._last: int | None = None
        """The step that was saved or restored last."""
        self._is_clean = False
        """Whether what earlier runs left incomplete has been removed."""

    # ---- what there is ----

    @property
    def directory(self) -> Path:
        """Where the checkpoints are."""
        return self._directory

    @property
    def every(self) -> int | None:
        """After how many steps `save` saves, or None: at each call."""
        return self._every

    @property
    def steps(self) -> list[int]:
        """The steps of all complete checkpoints, the oldest first."""
        try:
            names = [path.name for path in self._directory.iterdir() if path.is_dir()]
        except (FileNotFoundError, NotADirectoryError):
            return []
        return sorted(int(name) for name in names if name.isdecimal() and name == str(int(name)))

    @property
    def latest_step(self) -> int | None:
        """The step of the newest complete checkpoint, or None."""
        return max(self.steps, default=None)

    # ---- saving ----

    def save(self, checkpoint: Checkpoint, *, step: int, force: bool = False) -> bool:
        """Copy the state of the objects to the host, and write it in the background.

        It waits for the step that is running, and for the checkpoint before this one if that is still being written.

        Args:
            checkpoint: the objects.
            step: the number of finished steps, which names the checkpoint. Larger than those that are there.
            force: save although `every` does not divide the step.

        Returns:
            Whether there was something to do: not where `every` does not divide, or this very step was saved or
            restored last.

        Raises:
            ArgumentError: for a step that is no int from 0 on, or not larger than those in the directory; and when
                an object has no variables yet.
            ArgumentTypeError: for something that is no `Checkpoint`, or an object that it cannot keep.
            CheckpointError: when this or the last checkpoint could not be written, or another program that still
                runs writes to the directory (it is named). Training goes on where it was, and the older checkpoints
                are whole.
            StrategyError: in a traced function or a replica, or when another process does not come to save.
        """
        check_checkpoint(checkpoint, "save")
        check_int(step, "save: step", 0)
        check_flag(force, "save: force")
        if self._every is not None and step % self._every and not force:
            return False
        with self._turn, in_eager_code("saved"):
            contents = contents_of(checkpoint)
            self._finish(f"save(step={step})", contents.leaves)
            if step == self._last:
                return False
            self.claim()
            self._check_new(step)
            start = time.perf_counter()
            snapshot = self._with_all_states(take(contents), step)
            logger.debug("checkpoint of step %s copied in %.3f s", step, time.perf_counter() - start)
            with HeldBack():  # that this step is saved, and that a thread writes it, is known together
                self._last = step
                if self._processes.leads:
                    self._writing.start(lambda: self._write(step, snapshot))
                else:
                    logger.info("checkpoint of step %s: written by process 0", step)
        return True

    def claim(self) -> None:
        """Keep other programs from writing to the directory, from now on until this one ends or calls `settle`.

        The first `save` does so by itself.

        Raises:
            CheckpointError: naming the program that writes there.
        """
        if self._is_claimed:
            return
        other = self._processes.tell("claim", self._claim.take() if self._processes.leads else None)[0]
        if other is not None:
            raise CheckpointError(
                f"Another program writes checkpoints to {self._directory}: {other}. Two would remove each other's. Give this"
                " run a directory of its own, or end the other one first."
            )
        self._is_claimed = True

    def _check_new(self, step: int) -> None:
        latest = self._processes.tell("save", self.latest_step)[0]
        if latest is not None and step <= latest:
            raise ArgumentError(
                f"save: step {step} is not after step {latest}, which is in {self._directory} already. Continue that run"
                " with restore_latest, or use another directory; to go on from an older checkpoint, remove the newer ones."
            )

    def _with_all_states(self, snapshot: Snapshot, step: int) -> Snapshot:
        """The snapshot with the states of all processes, where they differ."""
        own = {path: entry["states"][0] for path, entry in snapshot.entries.items() if entry["kind"] == "state"}
        everyones = self._processes.tell(f"states of step {step}", own)
        for path in own:
            states = [theirs[path] for theirs in everyones]
            same = all(theirs == states[0] for theirs in states)
            snapshot.entries[path]["states"] = states[:1] if same else states
        return snapshot

    def _write(self, step: int, snapshot: Snapshot) -> None:
        """In the background."""
        start = time.perf_counter()
        try:
            self._directory.mkdir(parents=True, exist_ok=True)
            if not self._is_clean:
                files.remove_incomplete(self._directory)
                self._is_clean = True
            specs = {name: [str(array.dtype), list(array.shape)] for name, array in snapshot.arrays.items()}
            contents = {
                "phalanx": metadata.version("phalanx"),
                "step": step,
                "entries": snapshot.entries,
                "arrays": specs,
            }
            files.write(self._directory / str(step), contents, snapshot.arrays)
            for old in [] if self._keep is None else self.steps[: -self._keep]:
                files.remove(self._directory / str(old))
        except Exception as error:
            logger.error("checkpoint of step %s could not be written to %s: %s", step, self._directory, error)
            raise
        size = sum(array.nbytes for array in snapshot.arrays.values()) / 2**20
        logger.info("checkpoint of step %s: %.1f MiB in %.2f s", step, size, time.perf_counter() - start)

    def wait(self) -> None:
        """Wait until the last checkpoint is complete.

        Raises:
            CheckpointError: when it could not be written.
            StrategyError: when another process does not come to wait.
        """
        with self._turn:
            self._finish("wait()", ())

    def settle(self) -> None:
        """Wait until this process has written what it had to write, whatever the others do; for the way out after an error.

        Other programs may then write to the directory. What went wrong is raised by the next call of another method.
        """
        self._writing.join()
        self._claim.let_go()
        self._is_claimed = False

    def _finish(self, doing: str, leaves: Any) -> None:
        """All processes are here and do the same with the same objects, and the last checkpoint is complete."""
        failure = self._writing.failure() if self._processes.leads else None
        names = hashlib.sha256("\n".join(leaves).encode()).hexdigest()
        said = self._processes.tell(doing, [failure, names])
        failure = said[0][0]
        if failure is not None:
            self._last = None
            raise CheckpointError(
                f"The last checkpoint could not be written to {self._directory}: {failure}. The variables are as they were;"
                f" the newest complete checkpoint is of step {self.latest_step}."
            )
        if any(theirs[1] != names for theirs in said):
            raise ArgumentError(
                f"{doing}: the processes gave checkpoints of different objects. All must give the same."
            )

    # ---- restoring ----

    def restore_latest(self, checkpoint: Checkpoint, *, partial: bool = False) -> int | None:
        """Give the objects the state of the newest complete checkpoint.

        Call it at the start of every run: the first time it does nothing.

        Args:
            checkpoint: objects of the same structure as those that were saved, built.
            partial: leave what the checkpoint does not have as it is. What does not match is logged; under
                `px.strict` entries that nothing here takes are an error.

        Returns:
            The step, or None when there is no checkpoint.

        Raises:
            CheckpointError: when a file is missing, cut off or altered, or what was saved does not fit. Then
                nothing has changed.
            ArgumentError: when an object has no variables yet.
            StrategyError: in a traced function or a replica, or when another process does not come to restore.
        """
        check_checkpoint(checkpoint, "restore_latest")
        check_flag(partial, "restore_latest: partial")
        with self._turn, in_eager_code("restored"):
            contents = contents_of(checkpoint)  # also when nothing is there: what is not built shows in the first run
            self._finish("restore_latest()", contents.leaves)
            step = self._processes.tell("latest", self.latest_step)[0]
            if step is not None:
                self._restore(contents, step, partial)
        return step  # type: ignore[no-any-return]

    def restore(self, checkpoint: Checkpoint, step: int, *, partial: bool = False) -> None:
        """As `restore_latest`, from the checkpoint of another step.

        Args:
            checkpoint: see `restore_latest`.
            step: one of `steps`.
            partial: see `restore_latest`.

        Raises:
            ArgumentError: when there is none of that step.
            CheckpointError: see `restore_latest`.
            StrategyError: see `restore_latest`.
        """
        check_checkpoint(checkpoint, "restore")
        check_int(step, "restore: step", 0)
        check_flag(partial, "restore: partial")
        with self._turn, in_eager_code("restored"):
            contents = contents_of(checkpoint)
            self._finish(f"restore(step={step})", contents.leaves)
            steps = self._processes.tell("steps", self.steps)[0]
            if step not in steps:
                raise ArgumentError(
                    f"restore: there is no checkpoint of step {step} in {self._directory}, only {steps}."
                )
            self._restore(contents, step, partial)

    def _restore(self, contents: Any, step: int, partial: bool) -> None:
        """All processes restore, or none."""
        folder = self._directory / str(step)
        restoring: Restoring | None = None
        failure: Exception | None = None
        try:
            saved, arrays = files.read(folder)
            restoring = Restoring(
                contents, Snapshot(saved["entries"], arrays), self._processes.index, self._processes.count
            )
            _check_match(restoring, folder, partial)
            restoring.begin()
        except Exception as error:
            failure = error
        try:
            said = self._processes.tell(f"restored step {step}", None if failure is None else str(failure))
        except BaseException:
            if restoring is not None:
                restoring.undo()
            raise
        if failure is None and any(said):
            assert restoring is not None
            restoring.undo()
            process, reason = next((i, text) for i, text in enumerate(said) if text)
            raise CheckpointError(f"Process {process} could not restore step {step}: {reason}")
        if failure is not None:
            raise failure
        assert restoring is not None
        restoring.finish()
        self._last = step
        logger.info("restored the checkpoint of step %s from %s", step, self._directory)

    def __repr__(self) -> str:
        return f"CheckpointManager({str(self._directory)!r}, steps={self.steps})"


class Writing:
    """A thread that writes one checkpoint; the program does not end before it has."""

    def __init__(self) -> None:
        # Not the thread's own `join`, which after an interrupt may take it for ended.
        self._ended: threading.Event | None = None
        self._error: Exception | None = None

    def start(self, write: Callable[[], None]) -> None:
        """Begin; the one before has finished."""

        ended = threading.Event()

        def run() -> None:
            try:
                write()
            except Exception as error:
                self._error = error
            finally:
                ended.set()

        threading.Thread(target=run, name="phalanx-checkpoint").start()
        self._ended = ended

    def join(self) -> None:
        """Wait for the end."""
        if self._ended is not None:
            self._ended.wait()
            self._ended = None

    def failure(self) -> str | None:
        """Wait for the end, and say what went wrong, once."""
        self.join()
        error, self._error = self._error, None
        return None if error is None else f"{type(error).__name__}: {error}"


def _check_match(restoring: Restoring, folder: Path, partial: bool) -> None:
    missing, extra = restoring.missing, restoring.extra
    if (missing and not partial) or (extra and is_strict()):
        raise CheckpointError(
            f"Checkpoint {folder} does not match the objects that are to be restored:\n{describe(missing, extra)}\n"
            "Nothing was restored. Give the objects that were saved, or use partial=True."
        )
    if missing or extra:
        logger.warning("checkpoint %s was restored in part:\n%s", folder, describe(missing, extra))


def check_checkpoint(checkpoint: Any, caller: str) -> None:
    """Raise unless it is one."""
    if not isinstance(checkpoint, Checkpoint):
        raise ArgumentTypeError(
            f"{caller} takes a px.Checkpoint(name=object, ...), got {type(checkpoint).__name__} {checkpoint!r:.60}."
        )
