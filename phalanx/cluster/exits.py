"""Exit codes: what a scheduler, or `phalanx launch`, can tell from how a process ended."""

from __future__ import annotations

EXIT_PREEMPTED = 75
"""Asked to stop, state saved: start it again and it goes on (``EX_TEMPFAIL``, "try again")."""

EXIT_LOST = 76
"""Another process failed or is gone, so that this one could not go on. Start all again."""

EXIT_STUCK = 77
"""A step took longer than its time limit; the stacks of all threads were printed."""
