"""Which run writes to a directory of checkpoints: one at a time.

The operating system keeps the lock, and lets go of it when the process ends, however it ends: a run that is dead
leaves none behind. POSIX's locks are those of a process, so that its managers share them and its forked children
have none; they hold on network file systems too. Where a file system has no locks, nothing is refused.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import socket
import sys
import threading
from collections import deque
from pathlib import Path

try:
    import fcntl
except ImportError:  # not on Windows
    fcntl = None  # type: ignore[assignment]

FILE_NAME = ".writer"


class _Locks:
    """The directories that this process has locked, each with the open file and how many claims there are to it.

    Nothing else opens these files: closing any of them would let go of the lock.
    """

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.held: dict[Path, tuple[int, int]] = {}
        self.dropped: deque[Path] = deque()
        """Claims that nobody has let go of; garbage is collected at any moment, also while the lock is held."""

    def add(self, directory: Path) -> None:
        """One more claim.

        Raises:
            BlockingIOError: when another process has locked it, saying which.
            OSError: when there are no locks, or no such directory.
        """
        with self.lock:
            self._remove_dropped()
            file, claims = self.held.get(directory) or (_locked(directory / FILE_NAME), 0)
            self.held[directory] = file, claims + 1

    def drop(self, directory: Path) -> None:
        """One less, now or soon; it waits for nothing."""
        self.dropped.append(directory)
        if self.lock.acquire(blocking=False):
            try:
                self._remove_dropped()
            finally:
                self.lock.release()

    def drop_all(self) -> None:
        """At the end of the program."""
        with self.lock:
            self.dropped.extend(directory for directory, (_, claims) in self.held.items() for _ in range(claims))
            self._remove_dropped()

    def _remove_dropped(self) -> None:
        while self.dropped:
            directory = self.dropped.popleft()
            file, claims = self.held.pop(directory, (-1, 0))
            if claims == 0:  # dropped before, with all
                continue
            if claims > 1:
                self.held[directory] = file, claims - 1
                continue
            with contextlib.suppress(OSError):
                if _is_at(file, directory / FILE_NAME):
                    os.unlink(directory / FILE_NAME)
            os.close(file)


_locks = _Locks()
atexit.register(_locks.drop_all)
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_locks.__init__)  # type: ignore[misc]  # its parent has them


class Claim:
    """This process's right to write to a directory, from when it is taken until nobody needs it any more."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._taken: Path | None = None
        self._process = os.getpid()

    def take(self) -> str | None:
        """Who else writes there, if somebody does."""
        if self._taken is None:
            try:
                self._directory.mkdir(parents=True, exist_ok=True)
                directory = self._directory.resolve()
                _locks.add(directory)
                self._taken = directory
            except BlockingIOError as error:
                return str(error)
            except OSError:  # read-only, say: writing will tell
                pass
        return None

    def let_go(self) -> None:
        """Others may write there."""
        directory, self._taken = self._taken, None
        if directory is not None and self._process == os.getpid():
            _locks.drop(directory)

    def __del__(self) -> None:
        if not sys.is_finalizing():  # then all are dropped already
            self.let_go()


def _locked(path: Path) -> int:
    while True:
        file = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
        try:
            if fcntl is not None:
                fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if _is_at(file, path):  # else the one that had it has just removed it
                with contextlib.suppress(OSError):  # a disk that is full; the lock holds without a name
                    os.ftruncate(file, 0)
                    os.write(file, f"pid {os.getpid()} on host {socket.gethostname()}\n".encode())
                return file
        except BlockingIOError:
            who = os.read(file, 300).decode(errors="replace").strip()
            os.close(file)
            raise BlockingIOError(who or "another process") from None
        except BaseException:
            os.close(file)
            raise
        os.close(file)


def _is_at(file: int, path: Path) -> bool:
    with contextlib.suppress(FileNotFoundError):
        return os.path.samestat(os.fstat(file), os.stat(path))
    return False
