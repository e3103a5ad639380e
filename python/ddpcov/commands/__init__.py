"""The command line: a class a command, and one `main` that turns errors into a line and an exit code."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from typing import Protocol

from ddpcov import Error, __version__
from ddpcov.commands.demo import Demo
from ddpcov.commands.explain import Explain
from ddpcov.commands.report import ReportCommand
from ddpcov.commands.run import Run
from ddpcov.commands.script import UsageError, split
from ddpcov.commands.verify import Verify

__all__ = ["main"]

EXIT_UNREADABLE = 3


class Command(Protocol):
    """What `main` asks of a command. Its docstring is its help."""

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        """Declares the arguments."""

    def run(self, args: argparse.Namespace) -> int:
        """Does the work and returns the exit code."""


COMMANDS: dict[str, Command] = {
    "report": ReportCommand(),
    "run": Run(),
    "verify": Verify(),
    "explain": Explain(),
    "demo": Demo(),
}
"""Command → what does it."""


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a command. Exit codes: 0 fine, 1 findings where the command gates, 2 usage, 3 unreadable capture."""
    parser = argparse.ArgumentParser(
        prog="ddpcov", description="Gradient coverage for PyTorch: which parameters received a gradient, where and when."
    )
    parser.add_argument("--version", action="version", version=f"ddpcov {__version__}")
    subparsers = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, command in COMMANDS.items():
        help_text = (command.__doc__ or "").strip()
        sub = subparsers.add_parser(name, help=help_text.split("\n")[0], description=help_text)
        command.add_arguments(sub)
    own, script = split(sys.argv[1:] if argv is None else argv)
    args = parser.parse_args(own)
    args.script = script
    try:
        return COMMANDS[args.command].run(args)
    except BrokenPipeError:  # the reader had enough (`| head`)
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except UsageError as error:
        print(f"ddpcov {args.command}: {error}", file=sys.stderr)
        return 2
    except (Error, OSError) as error:
        print(f"ddpcov {args.command}: {error}", file=sys.stderr)
        return EXIT_UNREADABLE
    except KeyboardInterrupt:
        return 130
