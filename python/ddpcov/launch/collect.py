"""From the shards of a launch to its report. Needs no torch."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from pathlib import Path

from ddpcov import Error
from ddpcov.launch.supervisor import Outcome
from ddpcov.reading import gather, read
from ddpcov.report import Range, Report

__all__ = ["collect", "never_covered"]

_PATIENCE_SECONDS = 5.0
"""How long ranks below another supervisor are waited for."""


def collect(outcome: Outcome, first: Path) -> Report:
    """The report on all parts of a launch. Where every rank came to its end, their shards become one capture."""
    for path, part in outcome.parts.items():
        deadline = time.monotonic() + (_PATIENCE_SECONDS if len(part.ranks) < len(part.members) else 0)
        while not _merge(path) and time.monotonic() < deadline:
            time.sleep(0.1)
    return read(first)


def _merge(path: Path) -> bool:
    """Whether every rank came to its end, so that the shards could be replaced by the capture."""
    try:
        capture, _ = gather(path)
    except (Error, OSError):
        return False
    lanes = capture.analyse().lanes
    ranks = set(_members(r for lane in lanes if lane["end"] for r in lane["ranks"]))
    if ranks != set(_members(capture.ranks)):
        return False
    beside = path.with_name(path.name + ".new")
    beside.write_bytes(capture.encode())
    beside.replace(path)
    for rank in ranks:
        path.with_name(f"{path.name}.rank{rank}").unlink(missing_ok=True)
    return True


def _members(ranges: Iterable[Range]) -> Iterator[int]:
    return (i for first, last in ranges for i in range(first, last + 1))


def never_covered(reports: Iterable[Report]) -> dict[str, list[str]]:
    """Number of the DDP in its process, as text → names of its parameters that never got a gradient, though others did."""
    return {
        str(report.run.launch.order): names
        for report in reports
        if report.totals.covered
        and report.run.launch is not None
        and report.run.launch.order is not None
        and (names := [p.name for p in report.parameters if p.coverage == "never"] + list(report.run.launch.freeze))
    }
