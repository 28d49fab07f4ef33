"""Steps that the command line names: FILE:NAME."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path
from typing import Any


class NoSuchStepError(Exception):
    """There is no such step."""


def split_name(where: str) -> tuple[str, str]:
    """The file and the name."""
    path, _, name = where.rpartition(":")
    if not path or not name:
        raise NoSuchStepError(f"{where!r} is not FILE:NAME.")
    return path, name


def names_in(path: str, name: str, run_name: str) -> dict[str, Any]:
    """What the file defines when it runs, and not as a script."""
    file = Path(path)
    if not file.is_file():
        raise NoSuchStepError(f"there is no file {path!r}.")
    sys.path.insert(0, str(file.resolve().parent))
    try:
        return runpy.run_path(str(file), run_name=run_name)
    except SystemExit as error:
        raise NoSuchStepError(
            f"{path} ended while it was run (exit code {error.code}), before it had {name!r}."
        ) from error


def part_of(names: dict[str, Any], name: str, path: str) -> Any:
    """NAME, or NAME.PART."""
    first, *rest = name.split(".")
    if first not in names:
        known = ", ".join(sorted(k for k, v in names.items() if callable(v) and not k.startswith("_")))
        raise NoSuchStepError(f"{path} has no {first!r}. It has: {known}.")
    found = names[first]
    for part in rest:
        if not hasattr(found, part):
            raise NoSuchStepError(f"{first} in {path} has no {part!r}.")
        found = getattr(found, part)
    return found
