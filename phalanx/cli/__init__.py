"""The command `phalanx`: one module for each of its subcommands, listed here."""

from __future__ import annotations

import argparse
import importlib
import os
import signal
import sys
from collections.abc import Sequence

from phalanx import __version__

COMMANDS = ("info", "launch", "preflight", "profile", "run")
"""Modules of this package, each with ``HELP``, ``add_arguments(parser)`` and ``run(options) -> exit code``."""

USAGE_ERROR = 2


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a subcommand; the exit code is its own, 2 where it was called in a wrong way."""
    parser = argparse.ArgumentParser(prog="phalanx", description="Training steps written for one device, on many.")
    parser.add_argument("--version", action="version", version=f"phalanx {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name in COMMANDS:
        module = importlib.import_module(f"phalanx.cli.{name}")
        subparser = commands.add_parser(name, help=module.HELP, description=module.HELP)
        module.add_arguments(subparser)
        subparser.set_defaults(run=module.run)
    if sys.stdout is None:  # closed, as in `>&-`
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115
    options = parser.parse_args(arguments)
    try:
        code = int(options.run(options))
        sys.stdout.flush()
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    except BrokenPipeError:  # who reads our output has read enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 128 + signal.SIGPIPE
    return code


def usage_error(message: object) -> int:
    """Say what is wrong with the call; returns the exit code for it."""
    print(f"phalanx: {message}", file=sys.stderr)
    return USAGE_ERROR
