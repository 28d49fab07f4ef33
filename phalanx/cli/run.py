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
    parser.add_argument("script", help="a Python file, or -m and the name of a module")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help="arguments of the script")


def python_command(script: str, arguments: list[str]) -> list[str]:
    """The command line that runs the script with this Python; no shell ever sees it.

    Raises:
        ArgumentError: when there is no such file.
    """
    if script == "-m":
        if not arguments:
            raise ArgumentError("-m needs the name of a module.")
    elif not os.path.isfile(script):
        raise ArgumentError(f"there is no file {script!r}.")
    return [sys.executable, script, *arguments]


def run(args: argparse.Namespace) -> int:
    """Become the script."""
    if args.devices < 1:
        return usage_error(f"--devices must be at least 1, got {args.devices}.")
    try:
        command = python_command(args.script, args.arguments)
    except ArgumentError as error:
        return usage_error(error)
    environment = {**os.environ, "JAX_NUM_CPU_DEVICES": str(args.devices), "JAX_PLATFORMS": "cpu"}
    sys.stdout.flush()
    return os.execve(command[0], command, environment)
