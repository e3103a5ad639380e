"""What is added to an exception that leaves the `track` block: what was missed on this rank, and why."""

from __future__ import annotations

from collections.abc import Iterator

from ddpcov.report import Finding, Report, some

__all__ = ["note"]

_MAX_LINES = 8
_MAX_NAMES = 6
_WRAPPER = ("DDC301", "DDC305", "DDC306", "DDC308")
"""What makes DDP raise although nothing is missed."""


def note(report: Report, rank: int, out: str | None) -> str | None:
    """The note for an exception on `rank`, of which `report` tells; nothing where nothing is found that concerns it."""
    missed = [f for f in report.findings if f.code < "DDC300" and f.code != "DDC109"]
    lines = [*_lines(report, missed), *_lines(report, [f for f in report.findings if f.code in _WRAPPER])]
    if not lines:
        return None
    num_missed = len({name for f in missed for name in f.parameters})
    head = f"ddpcov: on rank {rank}"
    if num_missed:
        head += f", {num_missed} of {report.totals.trainable} trainable parameters missed a gradient"
    if len(lines) > _MAX_LINES:
        lines[_MAX_LINES:] = [f"and {len(lines) - _MAX_LINES} more findings"]
    text = "\n".join([f"{head}:", *(f"  {line}" for line in lines)])
    return f"{text}\n`python -m ddpcov report {out}` shows the rest." if out else text


def _lines(report: Report, findings: list[Finding]) -> Iterator[str]:
    """A line for each finding; what another has told of its parameters is not told again."""
    order = {p.name: i for i, p in enumerate(report.parameters)}
    told: set[str] = set()
    for f in sorted(findings, key=lambda f: f.code):
        names = sorted((n for n in f.parameters if n not in told), key=lambda n: order.get(n, -1))
        if names or not f.parameters:
            told.update(names)
            where = f" ({f.where.file}:{f.where.line} in {f.where.function})" if f.where else ""
            yield f"{some(names, _MAX_NAMES)}{': ' if names else ''}{f.code} {f.message}{where}"
