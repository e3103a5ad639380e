"""Attempts of one job: what torchrun restarts begins anew, with the same command and the same files. Needs no torch.

The files of an attempt are set aside when the next one begins: `run.bin.rank3` of attempt 0 becomes `run.bin.attempt0.rank3`,
which is read as any other run.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
from collections.abc import Iterator
from pathlib import Path

from ddpcov import _core

__all__ = ["begin", "kept", "number"]


def number() -> int | None:
    """Of the attempt that this process is part of, from 0; None if nothing restarts it."""
    count = os.environ.get("TORCHELASTIC_RESTART_COUNT", "")
    return int(count) if count.isdecimal() else None


def begin(capture: Path, rank: int, members: list[int]) -> None:
    """Sets aside what this rank left at this name in an earlier attempt; on the first rank also the capture, and what ranks
    left that take part no more. Called before this rank makes its shard.

    Raises:
        OSError: a file cannot be moved.
    """
    current = number()
    if current is None:
        return
    is_shard = re.compile(re.escape(capture.name) + r"\.rank(\d+)").fullmatch
    is_kept = re.compile(re.escape(capture.name) + r"\.attempt\d+(\.rank\d+)?").fullmatch
    is_first = rank == members[0]
    for file in list(capture.parent.iterdir()):
        match = is_shard(file.name)
        is_ours = (int(match[1]) == rank or (is_first and int(match[1]) not in members)) if match else False
        if is_ours or (is_first and file == capture):
            of = _attempt_of(file)
            if of is not None and of < current:
                file.replace(capture.with_name(f"{capture.name}.attempt{of}{file.name.removeprefix(capture.name)}"))
        elif is_first and current == 0 and is_kept(file.name):
            file.unlink()  # of an earlier job, which this one replaces as any run replaces the one before


def kept(capture: Path) -> Iterator[tuple[int, Path]]:
    """Number, and name of the capture, of the attempts that were set aside."""
    is_kept = re.compile(re.escape(capture.name) + r"\.attempt(\d+)(\.rank\d+)?").fullmatch
    numbers = {int(match[1]) for file in capture.parent.iterdir() if (match := is_kept(file.name))}
    return ((n, capture.with_name(f"{capture.name}.attempt{n}")) for n in sorted(numbers))


def _attempt_of(file: Path) -> int | None:
    """The attempt that a shard or capture says it is of."""
    with contextlib.suppress(_core.Error, OSError, ValueError):
        for lane in _read(file).analyse().lanes:
            for topic, body in lane["facts"]:
                if topic == "run" and isinstance(fact := json.loads(body), dict) and isinstance(fact.get("attempt"), int):
                    return int(fact["attempt"])
    return None


def _read(file: Path) -> _core.Capture:
    kind, _, _ = _core.peek(file)
    if kind == "capture":
        return _core.Capture.read(file)
    merger = _core.Merger()
    merger.add_shard(file)
    return merger.finish()
