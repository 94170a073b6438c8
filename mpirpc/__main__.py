"""``python -m mpirpc COMMAND``: choose a sub-command; what it does is in :mod:`mpirpc.cli`."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from typing import Protocol

from mpirpc.cli import bench, demo, doctor, run


class Command(Protocol):
    """What a module of ``mpirpc.cli`` offers."""

    HELP: str

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        """Declare the command's options."""

    def run(self, arguments: argparse.Namespace) -> int:
        """Do it on this rank; return the exit status."""


COMMANDS: dict[str, Command] = {"bench": bench, "demo": demo, "doctor": doctor, "run": run}
"""Every sub-command by name; a new one is a module in ``mpirpc.cli`` and an entry here."""


def make_parser() -> argparse.ArgumentParser:
    """Build the parser of the whole command line."""
    parser = argparse.ArgumentParser(prog="python -m mpirpc", description="PyTorch distributed RPC over MPI.")
    subparsers = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for name, command in COMMANDS.items():
        subparser = subparsers.add_parser(name, help=command.HELP, description=command.HELP)
        command.add_arguments(subparser)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit status."""
    arguments = make_parser().parse_args(argv)
    return COMMANDS[arguments.command].run(arguments)


if __name__ == "__main__":
    sys.exit(main())
