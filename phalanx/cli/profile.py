"""``phalanx profile``: where the time of a step from a file goes."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from phalanx.cli import usage_error
from phalanx.cli.steps import (
    NoSuchStepError,
    check_outputs,
    gives_batches,
    made_by,
    names_in,
    part_of,
    split_name,
    users_code,
)

HELP = "run a training step some times, and say where its time goes"

_NOTE = """\
STEP is FILE:NAME, a function of one batch; it is found in the file after it was run (not as a script: what stands under
`if __name__ == "__main__"` does not run). It may be a method, NAME.METHOD. Its batches are those of --batches, or of a
function profile_NAME in the file, which returns (step, batches). The steps are real ones: they train.

Examples:
  phalanx profile train.py:step --batches dataset
  phalanx profile train.py:trainer.step --batches batches --steps 50 --html profile.html
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Those of this subcommand."""
    parser.epilog = _NOTE
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("step", metavar="STEP", help="FILE:NAME of the step")
    parser.add_argument("--batches", metavar="NAME", help="what in the file gives the batches, time after time")
    parser.add_argument("--steps", type=int, default=20, metavar="N", help="how many to measure in each way (20)")
    parser.add_argument("--html", metavar="FILE", help="write the profile as a page")
    parser.add_argument("--json", metavar="FILE", help="write the profile as JSON; '-' for the terminal")


def run(options: argparse.Namespace) -> int:
    """Measure and print."""
    import phalanx as px

    try:
        check_outputs(options)
        path, name = split_name(options.step)
        step, batches = _found(path, name, options.batches)
        with users_code(path, f"while {name!r} was profiled"):
            found = px.profile(step, batches, steps=options.steps)
    except (px.errors.PhalanxError, NoSuchStepError) as error:
        return usage_error(error)
    if options.json == "-":
        print(found.to_json())
    else:
        print(found)
        if options.json:
            Path(options.json).write_text(found.to_json())
    if options.html:
        found.save_html(options.html)
    return 0


def _found(path: str, name: str, batches: str | None) -> tuple[Any, Any]:
    names = names_in(path, name, run_name="__profile__")
    made = made_by(names, f"profile_{name}", path)
    if made is not None:
        if len(made) != 2:
            raise NoSuchStepError(f"profile_{name} in {path} returned {len(made)} values; (step, batches) is expected.")
        return made[0], made[1] if batches is None else part_of(names, batches, path, gives_batches)
    if batches is None:
        raise NoSuchStepError(
            f"profile needs --batches, or a function profile_{name} in {path} that returns (step, batches)."
        )
    return part_of(names, name, path), part_of(names, batches, path, gives_batches)
