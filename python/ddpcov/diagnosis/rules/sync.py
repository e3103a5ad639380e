"""Finding 309: gradients compared across ranks."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from typing import Any

from ddpcov.diagnosis.facts import Facts
from ddpcov.diagnosis.rules.finding import Found, count_ranks, list_ranks, make
from ddpcov.diagnosis.rules.wrapper import bypassed, unknown_to_wrapper, unsynchronised

_MAX_GROUPS = 4


def gradients_differ(facts: Facts) -> Found:
    """DDC309: defined on all ranks, and not equal when the optimizer was about to step."""
    known: dict[str, dict[str, Any]] = {}
    for lane in facts.lanes:
        for name, difference in (lane.facts.get("sync", {}).get("differ") or {}).items():
            known.setdefault(name, difference)
    if not known:
        return
    explained: defaultdict[str, set[str]] = defaultdict(set)
    for finding in (*unknown_to_wrapper(facts), *bypassed(facts)):
        for name in finding.parameters:
            explained[name].add(finding.code)
    local = [steps for finding in unsynchronised(facts) for steps in finding.steps]
    alike: defaultdict[tuple[int, str, tuple[int, ...], tuple[str, ...]], list[str]] = defaultdict(list)
    for name, difference in known.items():
        step, groups = int(difference["first"]), [tuple(map(int, group)) for group in difference["groups"]]
        by = explained.get(name, set()) | ({"DDC310"} if any(a <= step <= b for a, b in local) else set())
        ranks = tuple(sorted(rank for group in groups for rank in group))
        alike[step, _in_words(groups), ranks, tuple(sorted(by))].append(name)
    for (step, who, ranks, others), names in alike.items():
        codes = " and ".join(others)
        yield make(
            facts,
            "DDC309",
            "error",
            f"Its gradients were not equal on all ranks when the optimizer was about to step: {who}. From step {step} on the"
            " ranks train models that differ.",
            names=tuple(sorted(names)),
            ranks=ranks,
            steps=[(step, step)],
            evidence=(f"{codes} explains it",) if codes else (_causes(facts),),
            fix=f"Mend {codes} first."
            if codes
            else "Average by hand what no wrapper averages, and treat gradients alike on all ranks after that: clip by a norm"
            " taken after averaging.",
        )


def remarks(facts: Facts) -> Iterator[str]:
    """What is to be said of the checks themselves, for the notes of the run; ranks that heard the same say it once."""
    notes = [lane.facts["sync"] for lane in facts.lanes if "sync" in lane.facts]
    for reason in dict.fromkeys(str(note["off"]) for note in notes if note.get("off")):
        yield f"sync_check: gradients were compared {max(int(note.get('checks', 0)) for note in notes)} times, then {reason}"
    for cut in {int(note["cut"]) for note in notes if note.get("cut")}:
        yield f"sync_check: {cut} more parameters differed; their names were not kept"


def _in_words(groups: list[tuple[int, ...]]) -> str:
    if len(groups) > _MAX_GROUPS:
        return f"{len(groups)} different ones on {count_ranks(sum(map(len, groups)))}"
    return ", another ".join([f"one on rank {list_ranks(groups[0])}", *(f"on rank {list_ranks(g)}" for g in groups[1:])])


def _causes(facts: Facts) -> str:
    if facts.wrapper.kind == "none":
        return "no wrapper averages gradients here: they were averaged by hand on some ranks only, or changed after that"
    return (
        "the wrapper knows it, so it is likely that something changed gradients rank by rank after the backward pass: clipping"
        " by a local norm, scaling, noise, or a second backward pass"
    )
