"""Findings 501 to 504: the capture itself."""

from __future__ import annotations

from ddpcov.diagnosis.facts import Facts
from ddpcov.diagnosis.rules.finding import Found, count_ranks, list_ranks, make
from ddpcov.report import some


def incomplete(facts: Facts) -> Found:
    """DDC501 and DDC502: a rank that ended inside a pass, a rank without a shard."""
    for lane in facts.lanes:
        if lane.is_broken_off and lane.broken_off is not None:
            covered, lacking, is_seen = lane.broken_off
            step = lane.num_steps - 1
            how = "stopped (killed or hung)" if lane.end == "killed" else "raised"
            message = (
                f"Rank {list_ranks(lane.ranks)} {how} inside a backward pass of step {step}: {len(covered)} of"
                f" {len(covered) + len(lacking)} trainable parameters had their gradient by then."
                if is_seen
                else f"Rank {list_ranks(lane.ranks)} {how} inside a backward pass of step {step}; how far it came is not known."
            )
            names = tuple(sorted(facts.parameters[i].name for i in lacking)) if is_seen else ()
            by_then = f"lacking by then: {some(names, 5)}" if names else "all gradients had arrived"
            if not is_seen:
                by_then = "in a long run of equal passes gradients are looked at where a pass ends, not one by one"
            yield make(
                facts,
                "DDC501",
                "error",
                message,
                names=names,
                ranks=lane.ranks,
                steps=[(step, step)],
                evidence=(by_then, *lane.stall[1:]),
            )
    if facts.missing_ranks:
        message = f"No data of rank {list_ranks(facts.missing_ranks)}: its shard is missing or could not be read."
        yield make(facts, "DDC502", "error", message, ranks=facts.missing_ranks)


def parameters_differ(facts: Facts) -> Found:
    """DDC503: ranks do not track the same parameters."""
    if not facts.same_parameters:
        return
    for profile in facts.profiles:
        if len(profile.steps) < len(facts.lanes):
            ranks = tuple(sorted(r for lane in profile.steps for r in facts.lanes[lane].ranks))
            message = f"Tracked on rank {list_ranks(ranks)} only, of {count_ranks(len(facts.ranks))}."
            yield make(facts, "DDC503", "error", message, names=profile.names, ranks=ranks)
    for param_id, definitions in facts.conflicts:
        ranks = tuple(sorted(r for lane, _, _ in definitions for r in facts.lanes[lane].ranks))
        says = (f"{dtype}{tuple(shape)} on rank {list_ranks(facts.lanes[lane].ranks)}" for lane, shape, dtype in definitions)
        message = "Of different shape or type on different ranks."
        names = (facts.parameters[param_id].name,)
        yield make(facts, "DDC503", "error", message, names=names, ranks=ranks, evidence=tuple(says))


def nothing_recorded(facts: Facts) -> Found:
    """DDC504: no backward pass and no optimizer step on any rank."""
    if facts.num_steps == 0:
        message = "No backward pass and no optimizer step was recorded: nothing can be said about any parameter."
        fix = (
            "The script built this model and never ran a backward pass through it; see whether it was to be trained."
            if facts.launch
            else "Put the training steps inside the `with ddpcov.track(model)` block."
        )
        yield make(facts, "DDC504", "warning", message, ranks=facts.ranks, fix=fix)
