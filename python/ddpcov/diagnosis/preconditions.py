"""What options of DDP take for granted, held against what was recorded."""

from __future__ import annotations

from collections.abc import Iterator

from ddpcov.diagnosis.facts import Facts, Lane, count, union
from ddpcov.diagnosis.rules.finding import list_ranks
from ddpcov.report import Precondition, some

__all__ = ["examine"]

_MAX_REASONS = 8


def examine(facts: Facts) -> tuple[Precondition, ...]:
    """The preconditions of `static_graph`, and of `skip_all_reduce_unused_params`; none without DDP."""
    if facts.wrapper.kind != "ddp":
        return ()
    return _judged("static_graph", facts, _static_graph(facts)), _judged("skip_all_reduce_unused_params", facts, _skip(facts))


_Said = Iterator[tuple[bool, str]]
"""Reasons why not (true), and why it cannot be said (false)."""


def _judged(option: str, facts: Facts, said: _Said) -> Precondition:
    against: list[str] = []
    unknown: list[str] = []
    for is_against, reason in said:
        (against if is_against else unknown).append(reason)
    if min((count(lane.finished) for lane in facts.lanes), default=0) < 2:
        unknown.append("fewer than two steps were finished on some rank")
    if facts.missing_ranks:
        unknown.append(f"no data of rank {list_ranks(facts.missing_ranks)}")
    met = False if against else None if unknown else True
    return Precondition(option, met, tuple(dict.fromkeys(against or unknown))[:_MAX_REASONS])


def _static_graph(facts: Facts) -> _Said:
    """On each rank every averaged pass reaches the same parameters, and every output takes part. That a parameter is reached
    twice in a pass is permitted."""
    for index, lane in enumerate(facts.lanes):
        if lane.has_several_wrappers:
            yield False, "several modules are wrapped, each on its own"
        elif lane.num_vain_sets > 1 or lane.num_unreached_sets > 1:
            varying = _varying(facts, index)
            yield True, varying or f"the set without a gradient varies on rank {list_ranks(lane.ranks)}"
        needed = [output for _, output in lane.outputs()]
        for output in needed:
            path = output.get("path") or "of the forward"
            if output.get("got") is False:
                # Harmless where other outputs lead to all that is behind it; then nothing is awaited in vain.
                is_missed = any("awaited_in_vain" in p.steps.get(index, {}) for p in facts.profiles)
                yield is_missed, f"no gradient arrives at output {path}"
            elif output.get("got") is None:
                yield False, f"whether output {path} takes part in the loss was not seen"
        if not needed:
            yield False, f"the outputs of the forward were not observed on rank {list_ranks(lane.ranks)}"


def _varying(facts: Facts, index: int) -> str:
    lane = facts.lanes[index]
    for profile in facts.profiles:
        kinds = profile.steps.get(index, {})
        lacking, had = kinds.get("awaited_in_vain"), kinds.get("covered")
        if lacking and had:
            return (
                f"{some(profile.names, 2)}: no gradient in step {lacking[0][0]} on rank {_first(lane)}, one in step {had[0][0]}"
            )
    return ""


def _skip(facts: Facts) -> _Said:
    """DDP's search is on, and finds the same parameters unused in every pass on every rank."""
    if not facts.wrapper.find_unused_parameters or facts.wrapper.static_graph:
        yield True, "it has an effect with find_unused_parameters=True and without static_graph only"
    for profile in facts.profiles:
        absent = profile.of_kind("unreached")
        if not absent:
            continue
        reached = {
            lane: steps
            for lane, kinds in profile.steps.items()
            if (steps := union([kinds.get("covered", []), kinds.get("undefined", [])]))
        }
        if reached:
            where, steps = next(iter(absent.items()))
            there, others = next(iter(reached.items()))
            yield (
                True,
                f"{some(profile.names, 2)}: not reached in step {steps[0][0]} on rank {_first(facts.lanes[where])},"
                f" reached in step {others[0][0]} on rank {_first(facts.lanes[there])}",
            )


def _first(lane: Lane) -> int:
    return lane.ranks[0]
