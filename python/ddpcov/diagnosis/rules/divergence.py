"""Findings of the guard: what it kept the ranks from doing, as the findings that would have come of it."""

from __future__ import annotations

from ddpcov.diagnosis.facts import Facts
from ddpcov.diagnosis.rules.finding import Found, list_ranks, make
from ddpcov.diagnosis.rules.missed import causes_of

__all__ = ["prevented"]


def prevented(facts: Facts) -> Found:
    """DDC202 and DDC107, with the cause, for a pass that the guard stopped before its first gradient."""
    for group in facts.divergences():
        steps = [(group.step, group.step)]
        if group.is_idle:
            message = (
                "A backward pass was about to reach no parameter of the model at all: its loss does not depend on it. The guard"
                " stopped it on all ranks; those whose loss does depend on it would have waited for good."
            )
            fix = (
                "Let the loss depend on the model on every rank; where there is nothing to learn from, with weight zero:"
                " loss = output.sum() * 0.0."
            )
            yield make(facts, "DDC107", "error", message, names=group.names, ranks=group.ranks, steps=steps, fix=fix)
            continue
        message = (
            f"About to be missed on rank {list_ranks(group.ranks)} and not on others in the same step. The guard stopped the"
            " pass on all ranks; those that reach them would have waited for good."
        )
        yield make(facts, "DDC202", "error", message, names=group.names, ranks=group.ranks, steps=steps)
        yield from causes_of(facts, group.names, group.ranks, group.step)
