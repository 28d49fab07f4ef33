"""Runs a script on virtual CPU devices of this machine, in one process."""

from __future__ import annotations

import argparse
import os
import sys

from phalanx.cli import usage_error
from phalanx.errors import ArgumentError

HELP = "run a script on virtual CPU devices"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of the subcommand."""
    parser.add_argument("--devices", type=int, default=8, metavar="N", help="how many devices the CPU looks like (8)")
    add_script(parser)


def add_script(parser: argparse.ArgumentParser) -> None:
    """The script and its arguments, which come last."""
    parser.add_argument(
        "-m", dest="is_module", action="store_true", help="SCRIPT is the name of a module, as for Python"
    )
    parser.add_argument("script", help="a Python file")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help="arguments of the script")


def python_command(args: argparse.Namespace) -> list[str]:
    """The command line that runs the script with this Python; no shell ever sees it.

    Raises:
        ArgumentError: when there is no such file.
    """
    if args.is_module:
        return [sys.executable, "-m", args.script, *args.arguments]
    if not os.path.isfile(args.script):
        raise ArgumentError(f"there is no file {args.script!r}.")
    return [sys.executable, args.script, *args.arguments]


def run(args: argparse.Namespace) -> int:
    """Become the script."""
    if args.devices < 1:
        return usage_error(f"--devices must be at least 1, got {args.devices}.")
    try:
        command = python_command(args)
    except ArgumentError as error:
        return usage_error(error)
    environment = {**os.environ, "JAX_NUM_CPU_DEVICES": str(args.devices), "JAX_PLATFORMS": "cpu"}
    sys.stdout.flush()
    return os.execve(command[0], command, environment)
