"""From files to a `Report`. Needs no torch."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path

from ddpcov import _core, attempts
from ddpcov.diagnosis.advice import advise
from ddpcov.diagnosis.facts import Facts, collect
from ddpcov.diagnosis.rules import find, sync, values
from ddpcov.report import Report, Run, Totals

__all__ = ["Progress", "build", "gather", "read"]

Progress = Callable[[Sequence[Path]], Iterable[Path]]


def read(path: str | os.PathLike[str], *, progress: Progress = iter) -> Report:
    """The report of a run.

    Args:
        path: the capture, one of its shards, or the name that the capture would have: if the run did not reach a clean end,
            its shards beside it are merged in memory. If `ddpcov run` recorded it, other models of the script are read as well.
        progress: called with the shards to read; gives them back one by one.

    Raises:
        ddpcov.CaptureError: the file is none of ours, damaged, or of another format version.
        OSError: it is not there, or cannot be read.
    """
    path = Path(path)
    report = build(*gather(path, progress=progress))
    report = replace(report, run=replace(report.run, notes=(*report.run.notes, *_earlier_attempts(path, report.run.attempt))))
    launch = report.run.launch
    if launch is None:
        return report
    others, notes = [], []
    for beside in _numbered(path):
        try:
            other = build(*gather(beside, progress=progress))
            if other.run.launch is not None and other.run.launch.id == launch.id:
                others.append(other)
        except (_core.Error, OSError) as error:
            notes.append(_with_path(beside, error))
    return replace(report, others=tuple(others), run=replace(report.run, notes=(*report.run.notes, *notes)))


def gather(path: Path, *, progress: Progress = iter) -> tuple[_core.Capture, list[str]]:
    """The capture at `path`, merged from shards if need be, and remarks on files that were left out. See `read`."""
    if path.is_dir():
        raise _core.CaptureError(f"{path}: a folder, expected a capture; give the file that out= named")
    runs, notes = _runs_at(path)
    if not runs:
        if notes:
            raise _core.CaptureError(notes[0])
        raise FileNotFoundError(
            f"{path}: no such capture, and no shards ({path.name}.rank0, …) beside it; check the path given to out="
        )
    _, newest = max(runs.items())
    for (_, nonce), files in runs.items():
        if files is not newest:
            notes.append(f"{len(files)} file(s) of an earlier run ({nonce:016x}) beside it are not part of this report")
    captures = [file for kind, file in newest if kind == "capture"]
    if captures:
        return _named(captures[0], lambda: _core.Capture.read(captures[0])), notes
    merger = _core.Merger()
    num_read = 0
    for shard in progress([file for _, file in newest]):
        try:
            merger.add_shard(shard)
            num_read += 1
        except (_core.Error, OSError) as error:
            notes.append(_with_path(shard, error))
    if not num_read:
        raise _core.CaptureError(notes[-1])
    return merger.finish(), notes


def build(capture: _core.Capture, notes: Sequence[str] = ()) -> Report:
    """The report of a capture."""
    try:
        return _report(collect(capture), notes)
    except (LookupError, TypeError, ValueError, AttributeError, ArithmeticError, RecursionError) as error:
        # Notes are free text; in a file from elsewhere they may be anything. The coverage does not depend on them.
        why = f"{type(error).__name__}: {error}"[:200]
        dropped = f"what was noted beside the coverage is dropped, causes with it, as this ddpcov cannot read it ({why})"
        return _report(collect(capture, with_notes=False), [*notes, dropped])


def _report(facts: Facts, notes: Sequence[str]) -> Report:
    run = Run(
        world_size=len(facts.members),
        ranks=facts.ranks,
        steps=facts.num_steps,
        backward_passes=max((lane.num_passes for lane in facts.lanes), default=0),
        torch=facts.torch,
        wrapper=facts.wrapper,
        end={rank: lane.end for lane in facts.lanes for rank in lane.ranks},
        launch=facts.launch,
        attempt=facts.attempt,
        notes=(*notes, *_corrected(facts), *_degraded(facts), *values.remarks(facts), *sync.remarks(facts)),
    )
    return Report(run, _totals(facts), tuple(facts.parameters), tuple(find(facts)), advise(facts))


def _earlier_attempts(path: Path, attempt: int | None) -> list[str]:
    """Attempts of the same job that were set aside when the next one began."""
    earlier = [(number, name) for number, name in attempts.kept(path) if number < attempt] if attempt else []
    return [f"attempt {number} of this job is kept: `python -m ddpcov report {name}`" for number, name in earlier]


def _corrected(facts: Facts) -> list[str]:
    if facts.launch is None or not facts.launch.corrections:
        return []
    return [f"recorded with corrections applied from outside: {', '.join(facts.launch.corrections)}"]


def _degraded(facts: Facts) -> list[str]:
    return [
        f"rank {rank} could not write its shard ({lane.facts['degraded'].get('reason')}) and recorded in memory"
        for lane in facts.lanes
        if "degraded" in lane.facts
        for rank in lane.ranks
    ]


def _totals(facts: Facts) -> Totals:
    trainable = [p for p in facts.parameters if p.trainable]
    missed = [p for p in trainable if p.missed]
    return Totals(
        parameters=len(facts.parameters),
        trainable=len(trainable),
        covered=len(trainable) - len(missed),
        missed=len(missed),
        never=sum(p.coverage == "never" for p in missed),
        elements=sum(p.numel for p in facts.parameters),
        elements_missed=sum(p.numel for p in missed),
        bytes_missed=sum(p.num_bytes for p in missed),
    )


def _numbered(path: Path) -> list[Path]:
    """The names that further models of one launch have, beside `path`: `run.2.bin`, …; those of which there are files."""
    is_other = re.compile(re.escape(path.stem) + r"\.(\d+)" + re.escape(path.suffix) + r"(\.rank\d+)?").fullmatch
    numbers = {int(match[1]) for file in path.parent.iterdir() if (match := is_other(file.name))}
    return [path.with_name(f"{path.stem}.{n}{path.suffix}") for n in sorted(numbers)]


Files = list[tuple[str, Path]]


def _runs_at(path: Path) -> tuple[dict[tuple[int, int], Files], list[str]]:
    """Start and nonce of each run → its files, of those that belong to this name; and remarks on files that are unreadable."""
    is_shard = re.compile(re.escape(path.name) + r"\.rank(\d+)").fullmatch
    beside = path.parent.iterdir() if path.parent.is_dir() else ()
    shards = [(int(match[1]), file) for file in beside if (match := is_shard(file.name))]
    candidates = [path] if path.exists() else []
    candidates += [file for _, file in sorted(shards)]
    runs: dict[tuple[int, int], Files] = {}
    notes = []
    for file in candidates:
        try:
            kind, nonce, started = _core.peek(file)
            runs.setdefault((started, nonce), []).append((kind, file))
        except (_core.CaptureError, OSError) as error:
            notes.append(_with_path(file, error))
            if file == path:
                raise _core.CaptureError(notes[-1]) from None
    return runs, notes


def _with_path(path: Path, error: Exception) -> str:
    return f"{path}: {error.strerror if isinstance(error, OSError) and error.strerror else error}"


def _named(path: Path, action: Callable[[], _core.Capture]) -> _core.Capture:
    try:
        return action()
    except _core.CaptureError as error:
        raise _core.CaptureError(f"{path}: {error}") from None
