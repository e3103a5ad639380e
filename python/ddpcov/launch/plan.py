"""What the supervisor tells the processes below it, and where they tell it what they found. Needs no torch."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from ddpcov import attempts

__all__ = ["FLAGS", "VARIABLE", "Part", "Plan", "Registry"]

FLAGS: dict[str, dict[str, bool]] = {
    "find-unused": {"find_unused_parameters": True},
    "static-graph": {"static_graph": True},
    "no-flags": {"find_unused_parameters": False, "static_graph": False},
}
"""Correction → the arguments that it gives to DDP."""

VARIABLE = "DDPCOV_PLAN"
"""The environment variable that carries the plan."""


@dataclass(frozen=True)
class Plan:
    """One launch of a script."""

    out: str
    """Absolute path of the capture; that of the n-th model is `run.n.bin`."""
    folder: str
    """Private to this launch, and gone after it."""
    launch: str
    """Tells the captures of this launch from those of others."""
    stop_after: int | None = None
    """End each process after so many steps of its models."""
    corrections: tuple[str, ...] = ()
    """Names of built-in corrections, and absolute paths of files."""
    freeze: dict[str, list[str]] = field(default_factory=dict)
    """Number of the DDP in its process, as text → names of the parameters that the correction `freeze` freezes."""
    follow: bool = False
    """Write down losses, weights and step times, for comparison with another launch."""
    options: dict[str, Any] = field(default_factory=dict)
    """Keyword arguments for `track`."""
    copy: int = 0
    """Number of this launch among those that a launcher made of one script; their unconnected processes need other names."""

    def to_environment(self) -> str:
        """The plan as text."""
        return json.dumps(asdict(self))

    @staticmethod
    def from_environment(environment: Mapping[str, str]) -> Plan | None:
        """The plan that this process was started with, if it was."""
        text = environment.get(VARIABLE)
        if not text:
            return None
        raw = json.loads(text)
        return Plan(**{**raw, "corrections": tuple(raw["corrections"])})

    def file_of(self, number: int, part: Part) -> Path:
        """The capture of the part with this number, counted from 1."""
        out = Path(self.out)
        copy = f".copy{self.copy}" if self.copy and len(part.members) == 1 else ""
        return out.with_name(f"{out.stem}{copy}{f'.{number}' if number > 1 else ''}{out.suffix}")


@dataclass
class Part:
    """One tracked model: what the supervisor must know of it."""

    nonce: int
    members: list[int]
    ranks: list[int]
    """Those of them that run below this supervisor."""
    is_wrapped: bool
    has_trained: bool = False
    attempt: int = 0
    """Of the job, if it is restarted when it fails."""


class Registry:
    """The parts of a launch, by number, in a file that the processes of the launch share."""

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._file = Path(plan.folder, "parts.json")

    def parts(self) -> dict[int, Part]:
        """Number → part."""
        with self._locked() as parts:
            return dict(parts)

    def claim(self, nonce: int, members: list[int], rank: int, *, is_wrapped: bool) -> Path:
        """The capture of the part with this nonce, which all its ranks share; a new part takes the lowest free number."""
        attempt = attempts.number() or 0
        with self._locked() as parts:
            for old in [n for n, part in parts.items() if part.attempt < attempt]:
                del parts[old]  # its files are set aside when the next ones of that name are made
            number = next((n for n, part in parts.items() if part.nonce == nonce), None)
            if number is None:
                number = next(n for n in range(1, len(parts) + 2) if n not in parts)
                parts[number] = Part(nonce, members, [], is_wrapped, attempt=attempt)
            parts[number].ranks = sorted({*parts[number].ranks, rank})
            return self._plan.file_of(number, parts[number])

    def mark_trained(self, nonce: int) -> None:
        """A backward pass of this part was seen."""
        with self._locked() as parts:
            for part in parts.values():
                part.has_trained |= part.nonce == nonce

    def release(self, nonce: int, rank: int) -> None:
        """The rank does not track it after all."""
        with self._locked() as parts:
            for number, part in list(parts.items()):
                if part.nonce == nonce:
                    part.ranks = [r for r in part.ranks if r != rank]
                    if not part.ranks:
                        del parts[number]

    @contextlib.contextmanager
    def _locked(self) -> Iterator[dict[int, Part]]:
        with os.fdopen(os.open(self._file, os.O_RDWR | os.O_CREAT, 0o600), "r+") as file:
            fcntl.flock(file, fcntl.LOCK_EX)  # released with the file, also by a process that is killed
            text = file.read()
            parts = {int(n): Part(**raw) for n, raw in json.loads(text).items()} if text else {}
            yield parts
            written = json.dumps({n: asdict(part) for n, part in sorted(parts.items())})
            if written != text:
                file.seek(0)
                file.write(written)
                file.truncate()
