"""Ends the workers when the launcher is gone, however it died; started by the launcher as a process of its own.

Reads lines from the launcher: ``+123`` (watch this process group), ``-123`` (it is gone). At the end of the
file the launcher has died, and what is left is killed, children of the workers too. Uses nothing but the
standard library.
"""

import contextlib
import os
import signal
import sys


def main() -> None:
    """Watch until the launcher closes the pipe or dies."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    groups: set[int] = set()
    for line in sys.stdin:
        group = int(line[1:])
        if line[0] == "+":
            groups.add(group)
        else:
            groups.discard(group)
    for group in groups:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(group, signal.SIGKILL)


if __name__ == "__main__":
    main()
