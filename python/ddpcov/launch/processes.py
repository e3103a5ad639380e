"""The processes below a launch, as the kernel shows them; where it does not (other systems than Linux), nothing is said."""

from __future__ import annotations

import contextlib
import os
import re
import shlex
from collections.abc import Iterator, Sequence
from pathlib import Path

from ddpcov.launch.plan import VARIABLE

__all__ = ["unreached"]

_PYTHON = re.compile(r"python[\d.]*t?").fullmatch
_WITH_VALUE = "WX"
_SWITCHES = {"I": "-I", "E": "-E", "S": "-S"}


def unreached(root: int, site: Path) -> list[str]:
    """The processes below `root` that have loaded torch and that never loaded our `sitecustomize`: command, and why."""
    out = []
    for pid in _descendants(root):
        with contextlib.suppress(OSError):
            why = _why_unreached(pid, str(site))
            if why and "libtorch" in Path(f"/proc/{pid}/maps").read_text(errors="replace"):
                out.append(f"{shlex.join(_strings(pid, 'cmdline'))[:160]}: {why}")
    return out


def _descendants(root: int) -> Iterator[int]:
    found = [root]
    while found:
        pid = found.pop()
        yield pid
        with contextlib.suppress(OSError):
            for children in Path(f"/proc/{pid}/task").glob("*/children"):
                found += map(int, children.read_text().split())


def _why_unreached(pid: int, site: str) -> str | None:
    command = _strings(pid, "cmdline")
    if not command or not _PYTHON(os.path.basename(os.readlink(f"/proc/{pid}/exe"))):
        return None
    environment = dict(pair.partition("=")[::2] for pair in _strings(pid, "environ"))
    if VARIABLE not in environment or site not in environment.get("PYTHONPATH", "").split(os.pathsep):
        return "it was started with an environment of its own"
    switches = sorted(set(_switches(command[1:])) & set(_SWITCHES))
    return f"Python was started with {_SWITCHES[switches[0]]}" if switches else None


def _switches(arguments: Sequence[str]) -> str:
    """The single-letter options of the interpreter itself."""
    letters = ""
    given = iter(arguments)
    for argument in given:
        if not argument.startswith("-") or argument in ("-", "--"):
            break
        for i, letter in enumerate(argument[1:], 1):
            if letter in "cm-":
                return letters
            if letter in _WITH_VALUE:
                if i == len(argument) - 1:
                    next(given, None)
                break
            letters += letter
    return letters


def _strings(pid: int, name: str) -> list[str]:
    return Path(f"/proc/{pid}/{name}").read_text(errors="replace").rstrip("\0").split("\0")
