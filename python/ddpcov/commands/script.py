"""What `run` and `verify` share: command lines that end in somebody else's command line, and how they are started."""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from ddpcov.launch.plan import FLAGS

__all__ = ["USAGE", "UsageError", "add_arguments", "command_of", "corrections_of", "out_of", "positive", "split"]

USAGE = "%(prog)s [OPTIONS] SCRIPT ARGS…\n       %(prog)s [OPTIONS] -m MODULE ARGS…\n       %(prog)s [OPTIONS] -- COMMAND ARGS…"
_COMMANDS = ("run", "verify")
_SWITCHES = ("-h", "--help", "--guard")


class UsageError(Exception):
    """The command line asks for what cannot be."""


def split(argv: Sequence[str]) -> tuple[list[str], list[str]]:
    """Our own arguments, and the script's: from the script's name, `-m` or `--` on, after which nothing is ours.

    argparse cannot tell, as versions of it treat `--` differently. All options of these commands but `_SWITCHES` take a value.
    """
    if not argv or argv[0] not in _COMMANDS:
        return list(argv), []
    i = 1
    while i < len(argv) and argv[i].startswith("-") and argv[i] not in ("-m", "--", "-"):
        i += 1 if argv[i] in _SWITCHES or "=" in argv[i] else 2
    return list(argv[:i]), list(argv[i:])


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares what both commands take."""
    parser.usage = USAGE
    parser.add_argument("--out", default="run.bin", metavar="FILE", help="the capture (default: run.bin)")


def out_of(name: str) -> Path:
    """Where the capture is to be.

    Raises:
        UsageError: nothing can be written there, which would show only after the training.
    """
    out = Path(name)
    folder = out.absolute().parent
    if out.is_dir():
        raise UsageError(f"--out {name}: a folder; give the file")
    if not folder.is_dir():
        raise UsageError(f"--out {name}: {folder} is no folder; make it first")
    if not os.access(folder, os.W_OK):
        raise UsageError(f"--out {name}: no permission to write in {folder}; give another place")
    return out


def positive(text: str) -> int:
    """Of an option that wants a number from 1 on.

    Raises:
        argparse.ArgumentTypeError: it is none.
    """
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text} is no whole number from 1 on")
    return int(text)


def command_of(script: Sequence[str]) -> list[str]:
    """The command to start.

    Raises:
        UsageError: there is none, or no such script.
    """
    if not script or script[0] == "-" or (script[0] in ("-m", "--") and len(script) == 1):
        raise UsageError("nothing to run; give a script and its arguments, -m MODULE, or -- and a whole command line")
    if script[0] == "--":
        return list(script[1:])
    if script[0] != "-m" and not Path(script[0]).exists():
        raise UsageError(f"{script[0]}: no such script; for a whole command line, as of torchrun, put -- before it")
    return [sys.executable, *_interpreter_options(), *script]


def _interpreter_options() -> list[str]:
    """Those that this interpreter was started with; not the ones that would keep us out of the script."""
    options: list[str] = subprocess._args_from_interpreter_flags()  # type: ignore[attr-defined]
    return [option for option in options if option not in ("-I", "-E", "-S")]


def corrections_of(names: Sequence[str]) -> tuple[str, ...]:
    """Corrections as a plan has them.

    Raises:
        UsageError: a name is neither a built-in one nor that of a file.
    """
    for name in names:
        if name != "freeze" and name not in FLAGS and not os.path.isfile(name):
            raise UsageError(f"--apply {name}: expected freeze, {', '.join(FLAGS)}, or a Python file with correct(model)")
    return tuple(name if name == "freeze" or name in FLAGS else os.path.abspath(name) for name in names)
