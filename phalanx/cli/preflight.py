"""``phalanx preflight``: compile a step from a file for devices that are not here."""

from __future__ import annotations

import argparse
import os
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

from phalanx.cli import usage_error
from phalanx.cli.steps import NoSuchStepError, check_outputs, made_by, names_in, part_of, split_name, users_code

if TYPE_CHECKING:
    from phalanx.preflight.report import Report
    from phalanx.preflight.targets import Target

HELP = "compile a training step for a TPU slice that is not here; exit code 0: it fits, 1: it does not, 2: usage"

_NOTE = """\
STEP is FILE:NAME. NAME is a px.function, a function that calls strategy.run, a jitted function, or a replicated and
compiled Keras model, found in the file after it was run (not as a script: what stands under `if __name__ ==
"__main__"` does not run). It may be a method, NAME.METHOD.

Its example arguments are one --arg for each, or those with which the file has called it. Where one is a tuple or a
dict, write a function preflight_NAME in the file: it is called with the global batch (or nothing), and returns the
step and its example arguments, (step, *arguments).

Examples:
  phalanx preflight train.py:step --topology v5e:4x4 --global-batch 1024 --html report.html
  phalanx preflight train.py:step --arg float32[1024,28,28,1] --arg int32[1024] --topology v5e:2x4
  phalanx preflight train.py:step --arg float32[1024,784] --compare v5e:2x4,v6e:2x4,v5p:2x2x1
  phalanx preflight --topology list
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Those of this subcommand."""
    parser.epilog = _NOTE
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("step", nargs="?", metavar="STEP", help="FILE:NAME of the step")
    parser.add_argument("--topology", metavar="NAME", help="a slice such as v5e:4x4; 'list' shows all that are known")
    parser.add_argument("--compare", metavar="NAME,NAME", help="several slices in one table")
    parser.add_argument("--num-slices", type=int, default=1, metavar="N", help="so many slices together")
    parser.add_argument("--global-batch", type=int, metavar="ROWS", help="rows of all replicas in a batch")
    parser.add_argument(
        "--arg", action="append", default=[], metavar="TYPE", help="an example argument, float32[1024,28,28,1]"
    )
    parser.add_argument("--largest-batch", action="store_true", help="look for the largest batch that fits")
    parser.add_argument("--scaling", action="store_true", help="look at 8, 16, ... 4096 chips")
    parser.add_argument("--html", metavar="FILE", help="write the report as a page")
    parser.add_argument("--json", metavar="FILE", help="write the report as JSON; '-' for the terminal")
    parser.add_argument("--timeout", type=float, default=900.0, metavar="SECONDS", help="for the compiler (900)")
    parser.add_argument("--quick", action="store_true", help="compile with little optimization")


def run(options: argparse.Namespace) -> int:
    """Compile and print."""
    from phalanx.errors import PhalanxError

    if options.topology == "list":
        print_known()
        return 0
    if not options.step:
        return usage_error("preflight needs a step, FILE:NAME; or --topology list.")
    if bool(options.topology) == bool(options.compare):
        return usage_error("preflight needs either --topology or --compare.")
    if options.compare and (options.html or options.json or options.largest_batch or options.scaling):
        return usage_error("--html, --json, --largest-batch and --scaling are for one slice: --topology.")
    # Nothing runs on accelerators here, and opening one would keep it from those who train.
    if not re.match(r"gpu|cuda|rocm", options.topology or options.compare):
        os.environ.setdefault("JAX_PLATFORMS", "cpu")
    try:
        check_outputs(options)
        arguments = list(map(_argument, options.arg))
        path, name = split_name(options.step)
        step, args = found_step(path, name, options.global_batch)
        names = options.compare.split(",") if options.compare else [options.topology]
        found = [_target(topology, options.num_slices) for topology in names]
        with users_code(path, f"while {name!r} was traced"):
            reports = [_report(step, [*args, *arguments], target, options) for target in found]
        if options.compare:
            print_comparison(reports)
        else:
            _print_one(reports[0], options)
    except (PhalanxError, NoSuchStepError) as error:
        return usage_error(error)
    return 0 if all(r.fits for r in reports) else 1


# ---- finding the step ----------------------------------------------------------------------------


def found_step(path: str, name: str, global_batch: int | None) -> tuple[Any, list[Any]]:
    """The step that FILE:NAME names, and example arguments if it comes with some."""
    names = names_in(path, name, run_name="__preflight__")
    made = made_by(names, f"preflight_{name}", path, () if global_batch is None else (global_batch,))
    step, *args = (part_of(names, name, path),) if made is None else made
    return step, args


def _argument(text: str) -> Any:
    import jax
    import jax.numpy as jnp

    match = re.fullmatch(r"\s*([a-z]+[0-9a-z_]*)\[((?:\s*\d+\s*,)*\s*\d*\s*)\]\s*", text)
    if match is None:
        raise NoSuchStepError(f"--arg {text!r} is not a dtype with a shape, such as float32[1024,28,28,1].")
    try:
        dtype = jnp.dtype(match[1])
    except TypeError:
        raise NoSuchStepError(f"--arg {text!r}: {match[1]!r} is not a dtype.") from None
    return jax.ShapeDtypeStruct(tuple(int(d) for d in match[2].split(",") if d.strip()), dtype)


def _target(name: str, num_slices: int) -> Target:
    from phalanx.preflight import targets

    return targets.find(name, num_slices)


def _report(step: Any, args: list[Any], target: Target, options: argparse.Namespace) -> Report:
    import phalanx as px

    settings: dict[str, Any] = {
        "topology": target.name,
        "num_slices": target.num_slices,
        "timeout": options.timeout,
        "effort": "quick" if options.quick else "full",
    }
    if hasattr(step, "preflight"):
        return step.preflight(*args, batch_size=options.global_batch, **settings)  # type: ignore[no-any-return]
    return px.preflight(step, *args, global_batch=options.global_batch, **settings)


# ---- printing ------------------------------------------------------------------------------------


def _print_one(report: Report, options: argparse.Namespace) -> None:
    if options.largest_batch:
        _ = report.largest_batch_that_fits
    if options.scaling:
        _ = report.scaling
    if options.json == "-":
        print(report.to_json())
    else:
        print(report)
        if options.largest_batch:
            print(f"\nlargest global batch that fits: {_largest_batch(report)}")
        if options.json:
            Path(options.json).write_text(report.to_json())
    if options.html:
        report.save_html(options.html)


def _largest_batch(report: Report) -> str:
    from phalanx.preflight.batches import LIMIT

    batch = report.largest_batch_that_fits
    if batch is None:
        return "not known"
    return f"{batch}, and more: the search ended there" if batch == LIMIT * report.num_devices else str(batch)


def print_known() -> None:
    """All slices that are known."""
    from phalanx.preflight import targets

    rows: list[tuple[str, ...]] = [("topology", "chips", "devices", "HBM of a chip", "of all", "hosts")]
    rows += [
        (
            t.name,
            str(t.num_chips),
            str(t.num_devices),
            f"{t.chip.hbm_bytes / 2**30:.0f} GiB",
            f"{t.chip.hbm_bytes * t.num_chips / 2**30:,.0f} GiB",
            str(t.num_hosts),
        )
        for t in targets.known()
        if t.chip is not None
    ]
    _print_table(rows)
    print("\nSeveral slices: '2*v5e:4x4' or --num-slices 2. Devices that are present: 'cpu:8', 'gpu:1'.")


def print_comparison(reports: list[Report]) -> None:
    """One line for each."""
    from phalanx.preflight.checks import human
    from phalanx.preflight.text import seconds

    rows: list[tuple[str, ...]] = [
        (
            "topology",
            "devices",
            "verdict",
            "memory of a device",
            "available",
            "step at least",
            "bound by",
            "compiled in",
        )
    ]
    for r in reports:
        time = r.step_time
        rows.append(
            (
                r.topology,
                str(r.num_devices),
                r.verdict,
                human(r.bytes.total),
                "-" if r.bytes.available is None else human(r.bytes.available),
                "-" if time is None else seconds(time.seconds),
                "-" if time is None else time.bound,
                f"{r.compile_seconds:.1f} s",
            )
        )
    _print_table(rows)
    for r in reports:
        if r.verdict == "fails":
            print(f"\n{r.message}")


def _print_table(rows: list[tuple[str, ...]]) -> None:
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    for row in rows:
        print("  ".join(cell.ljust(width) for cell, width in zip(row, widths)).rstrip())
