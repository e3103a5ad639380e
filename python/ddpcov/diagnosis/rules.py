"""From facts to findings: pure functions, one for each code, made when a report is read.

A step that broke off proves what was covered in it and nothing about what was missed: the gradient might still have come.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from ddpcov import _core
from ddpcov.diagnosis.codes import SLUGS
from ddpcov.diagnosis.facts import Facts, Profile, count, union
from ddpcov.report import Finding, Range, as_ranges, some

__all__ = ["find"]

Found = Iterator[Finding]


def find(facts: Facts) -> list[Finding]:
    """All findings, the gravest first."""
    grave = ["error", "warning", "info"]
    found = [finding for rule in _RULES for finding in rule(facts)]
    return sorted(_joined(found), key=lambda f: (grave.index(f.severity), f.code, f.parameters))


def _joined(found: list[Finding]) -> list[Finding]:
    """Findings that say the same of different parameters, as one."""
    same: dict[tuple[object, ...], list[Finding]] = {}
    for f in found:
        same.setdefault((f.code, f.severity, f.ranks, f.steps, f.message, f.evidence, f.fix), []).append(f)
    out = []
    for group in same.values():
        f = group[0]
        names = tuple(sorted(n for one in group for n in one.parameters))
        out.append(Finding(f.code, f.slug, f.severity, names, f.ranks, f.steps, f.message, f.evidence, f.where, f.fix))
    return out


def _finding(
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
    fix: str = "",
) -> Finding:
    """A finding about `names`; `at` gives lanes and steps, and `ranks` and `steps` where there is no such table."""
    if at is not None:
        ranks = tuple(sorted(r for lane in at for r in facts.lanes[lane].ranks))
        steps = union(at.values())
    return Finding(code, SLUGS[code], severity, names, ranks, tuple(steps or ()), message, evidence, None, fix)


def _missed_for_good(facts: Facts, profile: Profile) -> dict[int, list[Range]]:
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


def missed(facts: Facts) -> Found:
    """DDC100: missed, and why is not established."""
    for profile in facts.profiles:
        at = _missed_for_good(facts, profile)
        if not at:
            continue
        is_never = not profile.of_kind("covered")
        is_fatal = facts.is_fatal(profile)
        if is_never:
            severity = "error" if is_fatal else "warning"
            message = "No gradient arrived in any step; cause not established."
        else:
            severity = "error" if is_fatal else "info"
            differs = "" if len({tuple(steps) for steps in at.values()}) == 1 else ", other steps on each rank"
            message = f"No gradient arrived in some steps{differs}; cause not established."
        yield _finding(facts, "DDC100", severity, message, names=profile.names, at=at)


def some_steps_or_ranks(facts: Facts) -> Found:
    """DDC201 and DDC202: missed in some steps on all ranks alike, or covered on some ranks in the same step."""
    for profile in facts.profiles:
        at, covered = _missed_for_good(facts, profile), profile.of_kind("covered")
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
            yield _finding(facts, "DDC202", "error" if is_fatal else "info", message, names=profile.names, at=split)
        else:
            alike = "" if len(profile.steps) == 1 and len(facts.ranks) == 1 else ", the same on all ranks"
            message = f"Missed in some steps{alike}."
            yield _finding(facts, "DDC201", "error" if is_fatal else "info", message, names=profile.names, at=at)


def some_passes(facts: Facts) -> Found:
    """DDC203: missed in a pass, covered in its step."""
    for profile in facts.profiles:
        at = profile.of_kind("missed_in_pass")
        if at:
            is_fatal = facts.is_fatal(profile)
            message = "Missed in at least one backward pass of a step, and covered in another of the same step."
            yield _finding(facts, "DDC203", "error" if is_fatal else "info", message, names=profile.names, at=at)


def frozen_after_wrap(facts: Facts) -> Found:
    """DDC301: DDP waits for it, but it was frozen later."""
    message = "Frozen after the model was wrapped: DDP was built to wait for a gradient that can no longer come."
    fix = "Freeze before wrapping: call requires_grad_(False) first, then DistributedDataParallel(model)."
    for profile in facts.profiles:
        at = profile.of_kind("frozen_awaited")
        if at:
            severity = "error" if facts.is_strict else "warning"
            yield _finding(facts, "DDC301", severity, message, names=profile.names, at=at, fix=fix)


def unknown_to_wrapper(facts: Facts) -> Found:
    """DDC302 and DDC303: trainable, and DDP does not know it."""
    again = "Wrap the model again after the change: DDP registers only what requires a gradient when it is built."
    says = {
        "thawed": ("DDC302", "Frozen when the model was wrapped and trainable now: DDP does not average its gradient."),
        "replaced": ("DDC303", "Added or replaced after the model was wrapped: DDP does not average its gradient."),
    }
    for profile in facts.profiles:
        for kind, (code, message) in says.items():
            at = profile.of_kind(kind)
            if at:
                yield _finding(facts, code, "error", message, names=profile.names, at=at, fix=again)


def reached_twice(facts: Facts) -> Found:
    """DDC306: its accumulator ran twice in a pass that DDP averages, or DDP itself said so."""
    if facts.wrapper.kind != "ddp":
        return
    for profile in facts.profiles:
        at = profile.of_kind("again")
        if at and not facts.wrapper.static_graph:  # which permits it
            message = "Accumulated more than once in a backward pass: DDP takes the first time for the last."
            yield _finding(facts, "DDC306", "error", message, names=profile.names, at=at)
    for lane, exception in facts.said_ready_twice():
        named = exception.get("named")
        if isinstance(named, dict):
            last = [(lane.num_steps - 1, lane.num_steps - 1)] if lane.num_steps else []
            message = "DDP counts it ready twice in one backward pass."
            evidence = (f"DDP raised: {lane.end.removeprefix('exception: ')}",)
            names = tuple(sorted(map(str, named.values())))
            yield _finding(facts, "DDC306", "error", message, names=names, ranks=lane.ranks, steps=last, evidence=evidence)


def needless_flag(facts: Facts) -> Found:
    """DDC307: the flag is on, and every pass on every rank had all that DDP waits for."""
    lanes = facts.lanes
    is_needless = (
        facts.wrapper.kind == "ddp"
        and facts.wrapper.find_unused_parameters
        and not facts.missing_ranks
        and facts.num_vain_sets == 1  # one set: the empty one, by the next line
        and not any(p.of_kind("awaited_in_vain") or p.of_kind("again") for p in facts.profiles)
        and not any(lane.num_orphans or lane.broken_off for lane in lanes)
        and not any(facts.said_ready_twice())
    )
    finished = min((count(lane.finished) for lane in lanes), default=0)
    if is_needless and finished >= 2:  # one step is no habit
        message = (
            f"find_unused_parameters=True was not needed: in {finished} steps on {_ranks(len(facts.ranks))} every parameter"
            " that DDP waits for got its gradient in every pass, and each pass paid for a search of the graph."
        )
        fix = "Drop find_unused_parameters=True."
        yield _finding(facts, "DDC307", "warning", message, ranks=facts.ranks, steps=[(0, facts.num_steps - 1)], fix=fix)


def not_in_optimizer(facts: Facts) -> Found:
    """DDC401: gets gradients, and none of the optimizers that the user named holds it."""
    if not facts.optimizer_given:
        return
    for profile in facts.profiles:
        at = profile.of_kind("unheld")
        if at:
            message = "Gets gradients, and none of the optimizers given to track() holds it: it is never updated."
            fix = "Add it to the optimizer's parameters (add_param_group), or freeze it."
            yield _finding(facts, "DDC401", "error", message, names=profile.names, at=at, fix=fix)


def incomplete(facts: Facts) -> Found:
    """DDC501 and DDC502: a rank that ended inside a pass, a rank without a shard."""
    for lane in facts.lanes:
        if lane.is_broken_off and lane.broken_off is not None:
            covered, lacking = lane.broken_off
            step = lane.num_steps - 1
            how = "stopped (killed or hung)" if lane.end == "killed" else "raised"
            message = (
                f"Rank {_join(lane.ranks)} {how} inside a backward pass of step {step}: {len(covered)} of"
                f" {len(covered) + len(lacking)} trainable parameters had their gradient by then."
            )
            names = tuple(sorted(facts.parameters[i].name for i in lacking))
            evidence = (f"lacking by then: {some(names, 5)}",) if names else ("all gradients had arrived",)
            yield _finding(
                facts, "DDC501", "error", message, names=names, ranks=lane.ranks, steps=[(step, step)], evidence=evidence
            )
    if facts.missing_ranks:
        message = f"No data of rank {_join(facts.missing_ranks)}: its shard is missing or could not be read."
        yield _finding(facts, "DDC502", "error", message, ranks=facts.missing_ranks)


def parameters_differ(facts: Facts) -> Found:
    """DDC503: ranks do not track the same parameters."""
    if not facts.same_parameters:
        return
    for profile in facts.profiles:
        if len(profile.steps) < len(facts.lanes):
            ranks = tuple(sorted(r for lane in profile.steps for r in facts.lanes[lane].ranks))
            message = f"Tracked on rank {_join(ranks)} only, of {_ranks(len(facts.ranks))}."
            yield _finding(facts, "DDC503", "error", message, names=profile.names, ranks=ranks)
    for param_id, definitions in facts.conflicts:
        ranks = tuple(sorted(r for lane, _, _ in definitions for r in facts.lanes[lane].ranks))
        says = (f"{dtype}{tuple(shape)} on rank {_join(facts.lanes[lane].ranks)}" for lane, shape, dtype in definitions)
        message = "Of different shape or type on different ranks."
        names = (facts.parameters[param_id].name,)
        yield _finding(facts, "DDC503", "error", message, names=names, ranks=ranks, evidence=tuple(says))


def nothing_recorded(facts: Facts) -> Found:
    """DDC504: no backward pass and no optimizer step on any rank."""
    if facts.num_steps == 0:
        message = "No backward pass and no optimizer step was recorded: nothing can be said about any parameter."
        fix = "Put the training steps inside the `with ddpcov.track(model)` block."
        yield _finding(facts, "DDC504", "warning", message, ranks=facts.ranks, fix=fix)


def _ranks(number: int) -> str:
    return f"{number} rank{'s' if number != 1 else ''}"


def _join(ranks: tuple[int, ...]) -> str:
    return ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in as_ranges(ranks))


_RULES: tuple[Callable[[Facts], Found], ...] = (
    missed,
    some_steps_or_ranks,
    some_passes,
    frozen_after_wrap,
    unknown_to_wrapper,
    reached_twice,
    needless_flag,
    not_in_optimizer,
    incomplete,
    parameters_differ,
    nothing_recorded,
)
