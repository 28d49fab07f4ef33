"""Steps that the command line names: FILE:NAME."""

from __future__ import annotations

import argparse
import inspect
import os
import runpy
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from phalanx.errors import PhalanxError


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
    given, sys.argv = sys.argv, [path]  # our arguments are none of the file's
    try:
        with users_code(path, f"before it had {name!r}"):
            return runpy.run_path(str(file), run_name=run_name)
    finally:
        sys.argv = given


@contextmanager
def users_code(path: str, when: str) -> Iterator[None]:
    """Errors of what is in the file are shown from there on; none of them is an exit code of ours.

    Raises:
        NoSuchStepError: with the traceback.
    """
    try:
        yield
    except (PhalanxError, NoSuchStepError):
        raise
    except SystemExit as error:
        raise NoSuchStepError(f"{path} ended by itself (exit code {error.code}), {when}.") from error
    except Exception as error:
        frames, file = error.__traceback__, str(Path(path))
        while frames is not None and frames.tb_frame.f_code.co_filename != file:
            frames = frames.tb_next
        shown = "".join(traceback.format_exception(type(error), error, frames, chain=False)).rstrip()
        raise NoSuchStepError(f"{path} failed, {when}:\n{shown}") from error


def check_outputs(options: argparse.Namespace) -> None:
    """Raise when --html or --json cannot be written, before there is something to lose."""
    for option in ("html", "json"):
        path = getattr(options, option)
        if path is None or (option == "json" and path == "-"):
            continue
        if Path(path).is_dir():
            raise NoSuchStepError(f"--{option} {path!r} is a folder. Give the name of a file in it.")
        folder = Path(path).parent
        if not folder.is_dir():
            raise NoSuchStepError(f"--{option} {path!r}: there is no folder {str(folder)!r}. Make it first.")
        if not os.access(Path(path) if Path(path).exists() else folder, os.W_OK):
            raise NoSuchStepError(f"--{option} {path!r} may not be written.")


def gives_batches(value: Any) -> bool:
    """Whether a loop over it could give batches."""
    return hasattr(value, "__iter__") and not isinstance(value, (str, type))


def part_of(names: dict[str, Any], name: str, path: str, fits: Callable[[Any], bool] = callable) -> Any:
    """NAME, or NAME.PART; without it the error lists those names whose values fit."""
    first, *rest = name.split(".")
    if first not in names:
        known = ", ".join(sorted(k for k, v in names.items() if fits(v) and not k.startswith("_")))
        raise NoSuchStepError(f"{path} has no {first!r}. It has: {known or 'nothing that would do'}.")
    found = names[first]
    for part in rest:
        if not hasattr(found, part):
            raise NoSuchStepError(f"{first} in {path} has no {part!r}.")
        found = getattr(found, part)
    return found


def made_by(names: dict[str, Any], maker: str, path: str, args: tuple[Any, ...] = ()) -> tuple[Any, ...] | None:
    """What the file's function of this name returns, called with the arguments if it takes some; None without one."""
    make = names.get(maker)
    if make is None:
        return None
    if not callable(make):
        raise NoSuchStepError(f"{maker} in {path} is {make!r:.60}, and no function that gives a step.")
    with users_code(path, f"in {maker}"):
        made = make(*args) if inspect.signature(make).parameters else make()
    made = made if isinstance(made, tuple) else (made,)
    if not made or not (callable(made[0]) or hasattr(made[0], "preflight")):
        raise NoSuchStepError(
            f"{maker} in {path} returned {made!r:.60}; a tuple that begins with the step is expected."
        )
    return made
