"""Findings 100 to 203: why a parameter was missed, and when and where.

A step that broke off proves what was covered in it and nothing about what was missed: the gradient might still have come.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import dataclass, field, replace

from ddpcov import _core
from ddpcov.diagnosis import preconditions
from ddpcov.diagnosis.facts import Facts, Lane, count, union
from ddpcov.diagnosis.rules import fixes
from ddpcov.diagnosis.rules.causes import MODULE, ORDER, TWIN, Cause, cause_of
from ddpcov.diagnosis.rules.finding import Found, across_ranks, as_place, list_steps, make, missed_for_good
from ddpcov.report import Range, some


def missed(facts: Facts) -> Found:
    """DDC100 to DDC111: missed, and why; one cause for a parameter on each rank."""
    causes = [_Causes(lane) for lane in facts.lanes]
    alike: dict[tuple[object, ...], _Alike] = {}
    is_static = any(p.option == "static_graph" and p.met for p in preconditions.examine(facts))
    for profile in facts.profiles:
        for lane, steps in missed_for_good(facts, profile).items():
            pattern = fixes.pattern_of(facts, profile, is_static=is_static)
            for name in profile.names:
                cause, explained = causes[lane].of(name, steps)
                if explained:
                    alike.setdefault((cause, pattern), _Alike(cause, pattern)).members.append((cause, name, lane, explained))
    for known in alike.values():
        yield from known.findings(facts)


def causes_of(facts: Facts, names: tuple[str, ...], ranks: tuple[int, ...], step: int) -> Found:
    """Why ranks were about to miss parameters in a step, as far as it is established."""
    alike: dict[Cause, _Alike] = {}
    for index, lane in enumerate(facts.lanes):
        if not set(ranks).isdisjoint(lane.ranks):
            known = _Causes(lane)
            for name in names:
                cause, explained = known.of(name, [(step, step)])
                if explained and cause.code != "DDC100":
                    pattern = fixes.Pattern(varies=True, is_static=False, is_awaited=facts.wrapper.kind == "ddp", is_fatal=True)
                    alike.setdefault(cause, _Alike(cause, pattern)).members.append((cause, name, index, explained))
    for group in alike.values():
        yield from group.findings(facts)


@across_ranks
def loss_detached(facts: Facts) -> Found:
    """DDC107: a backward pass, or a whole step, reached nothing."""
    fix = (
        "Let the loss depend on the model in every pass and on every rank; where there is nothing to learn from, with weight"
        " zero: loss = output.sum() * 0.0. Call backward() on the loss itself, not on a tensor made anew from its value."
    )
    message = "A backward pass reached no parameter of the model at all: its loss does not depend on it."
    if facts.wrapper.kind == "ddp" and len(facts.members) > 1:
        message += " Ranks whose loss does depend on it wait for this one, with find_unused_parameters as without."
    for index, lane in enumerate(facts.lanes):
        if lane.idle:
            trained = ((p, p.steps.get(index, {}).get("trainable", [])) for p in facts.profiles)
            names = tuple(sorted(n for p, steps in trained if _core.intersection(steps, lane.idle) for n in p.names))
            where = as_place(lane.facts.get("idle", {}).get("where"))
            at = {index: lane.idle}
            yield make(facts, "DDC107", "error", message, names=names, at=at, where=where, fix=fix)


def some_steps_or_ranks(facts: Facts) -> Found:
    """DDC201 and DDC202: missed in some steps on all ranks alike, or covered on some ranks in the same step."""
    for profile in facts.profiles:
        at, covered = missed_for_good(facts, profile), profile.of_kind("covered")
        if not at or not covered:
            continue
        is_fatal = facts.is_fatal(profile)
        elsewhere = union(covered.values())
        split = {lane: _core.intersection(steps, elsewhere) for lane, steps in at.items()}
        split = {lane: steps for lane, steps in split.items() if steps}
        if split:
            message = "Covered on some ranks and missed on others in the same step."
            if is_fatal:
                message += " With find_unused_parameters off the ranks that have the gradient wait for those that do not."
            yield make(facts, "DDC202", "error" if is_fatal else "info", message, names=profile.names, at=split)
        else:
            alike = "" if len(profile.steps) == 1 and len(facts.ranks) == 1 else ", the same on all ranks"
            message = f"Missed in some steps{alike}."
            yield make(facts, "DDC201", "error" if is_fatal else "info", message, names=profile.names, at=at)


def some_passes(facts: Facts) -> Found:
    """DDC203: missed in a pass, covered in its step."""
    for profile in facts.profiles:
        at = profile.of_kind("missed_in_pass")
        if at:
            is_fatal = facts.is_fatal(profile)
            message = "Missed in at least one backward pass of a step, and covered in another of the same step."
            yield make(facts, "DDC203", "error" if is_fatal else "info", message, names=profile.names, at=at)


@dataclass
class _Alike:
    """Parameters that are missed for the same reason."""

    cause: Cause
    pattern: fixes.Pattern
    members: list[tuple[Cause, str, int, list[Range]]] = field(default_factory=list)
    """Cause, name, lane and steps."""

    def findings(self, facts: Facts) -> Found:
        lanes: defaultdict[str, dict[int, list[Range]]] = defaultdict(dict)
        causes: defaultdict[str, list[Cause]] = defaultdict(list)
        for cause, name, lane, steps in self.members:
            lanes[name][lane] = steps
            causes[name].append(cause)
        groups: defaultdict[tuple[object, ...], list[str]] = defaultdict(list)
        for name, at in lanes.items():
            ranks = tuple(sorted(rank for lane in at for rank in facts.lanes[lane].ranks))
            groups[ranks, tuple(union(at.values()))].append(name)
        for group in groups.values():
            names = tuple(sorted(group))
            cause = _filled(self.cause, [cause for name in names for cause in causes[name]])
            yield make(
                facts,
                cause.code,
                "error" if self.pattern.is_fatal else "info" if self.pattern.varies else "warning",
                cause.message,
                names=names,
                at=lanes[names[0]],
                evidence=cause.evidence,
                where=cause.where,
                fix=fixes.fix(cause, self.pattern, facts, names),
            )


def _filled(cause: Cause, alike: list[Cause]) -> Cause:
    """The cause in the words that hold for all of its parameters."""
    modules = some(list(dict.fromkeys(one.module for one in alike)), 4)
    twins = some(list(dict.fromkeys(one.twin for one in alike)), 4)

    def fill(text: str) -> str:
        return text.replace(MODULE, modules).replace(TWIN, twins)

    reads = list(dict.fromkeys(text for one in alike for text in one.reads))
    return replace(
        cause,
        message=fill(cause.message),
        evidence=(*map(fill, cause.evidence), *([some(reads, 3)] if reads else ())),
        mend=fill(cause.mend),
        suspicion=fill(cause.suspicion),
    )


class _Causes:
    """What the traced passes of a lane prove."""

    def __init__(self, lane: Lane) -> None:
        self._lane = lane
        self._by_name: defaultdict[str, dict[int, list[Cause]]] = defaultdict(dict)
        self._traced: set[int] = set()
        for step, record in lane.evidence():
            self._traced.add(step)
            for group in record["groups"]:
                try:
                    cause = cause_of(group, record.get("blind"))
                    for name in group["names"]:
                        self._by_name[name].setdefault(step, []).append(cause)
                except (AttributeError, LookupError, TypeError, ValueError):
                    continue  # evidence that this version does not write proves nothing to it

    def of(self, name: str, steps: list[Range]) -> tuple[Cause, list[Range]]:
        """The cause, and those of the steps that it explains: where the loss reached nothing, that is the reason."""
        at = self._by_name[name]
        told = {step: max(at[step], key=_progress) for step in sorted(at) if any(a <= step <= b for a, b in steps)}
        idle = _core.difference(self._lane.idle, [(step, step) for step in told])
        explained = _core.difference(steps, idle)
        if not told:
            return self._unknown(), explained
        established = {step: cause for step, cause in told.items() if cause.code != "DDC100"}
        codes = Counter(cause.code for cause in (established or told).values())
        commonest = codes.most_common(1)[0][0]  # of equals, the first
        cause = next(cause for cause in told.values() if cause.code == commonest)
        others: dict[str, int] = {}
        for step, other in established.items():
            if other.code != cause.code:
                others.setdefault(other.code, step)
        alike = [step for step, other in told.items() if other.code == cause.code]
        evidence = [*cause.evidence]
        if len(told) < count(explained):
            evidence.append(f"seen in {list_steps([(s, s) for s in alike])}; other steps were not traced")
        evidence += (f"in step {step} the cause was another: {code}" for code, step in others.items())
        return replace(cause, evidence=tuple(evidence)), explained

    def _unknown(self) -> Cause:
        why = self._lane.facts.get("diagnosis", {}).get("off")
        if why:
            reason = f"the diagnosis was {why}" if why == "off" else f"the diagnosis broke off: {why}"
        elif self._traced:
            reason = "no pass of these steps was traced"
        else:
            reason = "no pass was traced"
        return Cause("DDC100", "No gradient arrived; cause not established.", (reason,))


def _progress(cause: Cause) -> int:
    return ORDER.index(cause.code)
