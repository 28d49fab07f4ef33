"""Reading environment variables so that an error names the variable and its value."""

from __future__ import annotations

import re
from collections.abc import Mapping

from phalanx.errors import ClusterError

_LIMIT = 200


class Variables:
    """Environment variables of one scheduler.

    Args:
        environment: names and values, such as ``os.environ``.
        source: the scheduler, for messages.
    """

    def __init__(self, environment: Mapping[str, str], source: str) -> None:
        self._environment = environment
        self.source = source

    def __contains__(self, name: str) -> bool:
        return bool(self._environment.get(name, "").strip())

    def text(self, name: str, default: str | None = None, why: str = "") -> str:
        """The value.

        Raises:
            ClusterError: when it is missing or empty, and there is no default.
        """
        value = self._environment.get(name, "").strip()
        if value:
            return value
        if default is None:
            found = "empty" if name in self._environment else "not set"
            raise ClusterError(f"{self.source}: {name} is {found}. {why or 'It is set by the launcher.'}")
        return default

    def number(self, name: str, default: int | None = None, why: str = "") -> int:
        """The value as a number from 0.

        Raises:
            ClusterError: when it is missing, or no such number.
        """
        if default is not None and name not in self:
            return default
        value = self.text(name, why=why)
        if not re.fullmatch(r"[0-9]{1,9}", value):
            raise self.wrong(name, "it must be a number from 0")
        return int(value)

    def wrong(self, name: str, why: str) -> ClusterError:
        """The error for a value that cannot be."""
        value = self._environment.get(name, "")
        shown = value if len(value) <= _LIMIT else f"{value[:_LIMIT]}..."
        return ClusterError(f"{self.source}: {name}={shown}: {why}.")

    def index(self, name: str, count_name: str) -> tuple[int, int]:
        """A process's number and how many there are.

        Raises:
            ClusterError: when they do not fit.
        """
        number, count = self.number(name), self.number(count_name)
        if count < 1:
            raise self.wrong(count_name, "there must be at least one process")
        if number >= count:
            raise self.wrong(name, f"{count_name}={count}, so it must be from 0 to {count - 1}")
        return number, count


def visible_devices(environment: Mapping[str, str]) -> list[str] | None:
    """The GPUs that this process may see, or None where nothing says which."""
    for name in ("CUDA_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES"):
        if name in environment:
            return [part.strip() for part in environment[name].split(",") if part.strip()]
    return None


def share(visible: int, local_id: int, local_count: int) -> tuple[int, ...]:
    """A process's equal part of the devices that all processes of its machine see."""
    each = visible // local_count
    return tuple(range(local_id * each, (local_id + 1) * each))
