"""The command ``phalanx``: one module for each subcommand.

Such a module has `HELP` (one line), `add_arguments` (given an `argparse` parser) and `run` (given the parsed
arguments; returns the exit code).
"""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Sequence

from phalanx.errors import PhalanxError

COMMANDS = ("launch", "run")
"""Modules of this package."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit code."""
    parser = argparse.ArgumentParser(prog="phalanx", description="Run training scripts on many devices.")
    subcommands = parser.add_subparsers(dest="command", required=True, metavar="command")
    modules = {name: importlib.import_module(f"phalanx.cli.{name}") for name in COMMANDS}
    for name, module in modules.items():
        module.add_arguments(subcommands.add_parser(name, help=module.HELP, description=module.__doc__))
    args = parser.parse_args(argv)
    try:
        return int(modules[args.command].run(args))
    except PhalanxError as error:
        print(f"phalanx {args.command}: {error}", file=sys.stderr)
        return 2
