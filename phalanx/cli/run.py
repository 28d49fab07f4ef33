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
    # An option of its own: argparse takes no word that begins with a dash for a script.
    parser.add_argument("-m", dest="module", nargs=argparse.REMAINDER, help="a module and its arguments, not a script")
    parser.add_argument("script", nargs="?", help="a Python file")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help="arguments of the script")


def python_command(options: argparse.Namespace) -> list[str]:
    """The command line that runs the script or module with this Python; no shell ever sees it.

    Raises:
        ArgumentError: when there is no such file.
    """
    if options.module is not None:
        if not options.module:
            raise ArgumentError("-m needs the name of a module.")
        return [sys.executable, "-m", *options.module]
    if options.script is None:
        raise ArgumentError("there is nothing to run: give a Python file, or -m and a module.")
    if not os.path.isfile(options.script):
        raise ArgumentError(f"there is no file {options.script!r}.")
    return [sys.executable, options.script, *options.arguments]


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
