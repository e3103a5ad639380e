"""What the rules share: how a finding is made, and how ranks and steps are put in words."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

from ddpcov import _core
from ddpcov.diagnosis.codes import SLUGS
from ddpcov.diagnosis.facts import Facts, Profile, count, union
from ddpcov.report import Finding, Place, Range, as_ranges, some

__all__ = ["Found", "across_ranks", "as_place", "count_ranks", "list_ranks", "list_steps", "make", "missed_for_good"]

Found = Iterator[Finding]


def make(
    facts: Facts,
    code: str,
    severity: str,
    message: str,
    *,
    names: tuple[str, ...] = (),
    at: dict[int, list[Range]] | None = None,
    ranks: tuple[int, ...] = (),
    steps: list[Range] | None = None,
    evidence: tuple[str, ...] = (),
    where: Place | None = None,
    fix: str = "",
) -> Finding:
    """A finding about `names`; `at` gives lanes and steps, and `ranks` and `steps` where there is no such table."""
    if at is not None:
        ranks = tuple(sorted(r for lane in at for r in facts.lanes[lane].ranks))
        steps = union(at.values())
    return Finding(code, SLUGS[code], severity, names, ranks, tuple(steps or ()), message, evidence, where, fix)


def across_ranks(rule: Callable[[Facts], Found]) -> Callable[[Facts], Found]:
    """Joins what a rule finds on one lane and the next, where it is the same but for ranks and steps."""

    @functools.wraps(rule)
    def joined(facts: Facts) -> Found:
        same: dict[tuple[object, ...], list[Finding]] = {}
        for f in rule(facts):
            same.setdefault((f.code, f.severity, f.parameters, f.message, f.evidence, f.where, f.fix), []).append(f)
        for group in same.values():
            ranks = tuple(sorted({rank for f in group for rank in f.ranks}))
            yield replace(group[0], ranks=ranks, steps=tuple(union([list(f.steps) for f in group])))

    return joined


def missed_for_good(facts: Facts, profile: Profile) -> dict[int, list[Range]]:
    """Lane → steps in which the parameters were provably missed.

    Also in a step that was interrupted between two passes, if they were covered nowhere in the whole run: that a run with
    DDP stops in its first step is the usual case, and what its passes lack is plain.
    """
    at = profile.of_kind("missed_for_good")
    if at or profile.of_kind("covered"):
        return at
    missed = profile.of_kind("missed")
    interrupted = {lane: _core.intersection(steps, facts.lanes[lane].interrupted) for lane, steps in missed.items()}
    return {lane: steps for lane, steps in interrupted.items() if steps}


def as_place(raw: Any) -> Place | None:
    """A place, as it was noted; nothing where what was noted is none."""
    try:
        return Place(str(raw["file"]), int(raw["line"]), str(raw["function"]))
    except (KeyError, TypeError, ValueError):
        return None


def list_steps(steps: list[Range]) -> str:
    """Numbers of steps, in words."""
    shown = [str(a) if a == b else f"{a}-{b}" for a, b in steps]
    return f"step{'s' if count(steps) != 1 else ''} {some(shown, 5)}"


def count_ranks(number: int) -> str:
    """How many ranks, in words."""
    return f"{number} rank{'s' if number != 1 else ''}"


def list_ranks(ranks: tuple[int, ...]) -> str:
    """Numbers of ranks, in words."""
    return ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in as_ranges(ranks))
