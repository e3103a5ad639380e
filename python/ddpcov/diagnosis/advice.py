"""What the recorded steps say about DDP's flags, always with the scope in which it was seen."""

from __future__ import annotations

from ddpcov.diagnosis import preconditions
from ddpcov.diagnosis.facts import Facts, count
from ddpcov.report import Advice, some

__all__ = ["advise"]


def advise(facts: Facts) -> Advice:
    """The advice for the whole run."""
    flag, known = _flag(facts), preconditions.examine(facts)
    static = {True: "safe", False: "unsafe", None: "unknown"}[known[0].met if known else None]
    return Advice(
        find_unused_parameters=flag,
        static_graph=static,
        num_steps=max((count(lane.finished) for lane in facts.lanes), default=0),
        num_ranks=len(facts.ranks),
        bytes_reduced_for_nothing=_wasted_bytes(facts),
        actions=tuple(_actions(facts, flag, static)),
        preconditions=known,
    )


def _flag(facts: Facts) -> str:
    if facts.wrapper.kind != "ddp":
        return "not-applicable"
    is_twice = any(facts.said_ready_twice()) or (
        not facts.wrapper.static_graph and any(p.of_kind("again") for p in facts.profiles)
    )
    if is_twice or _is_idle(facts):
        return "cannot-help"
    # Lacking in one averaged pass and covered in another, or on another rank: neither freezing nor deleting is right.
    varies = any(facts.awaited_in_vain(p) and p.of_kind("covered") for p in facts.profiles) or any(facts.divergences())
    return "on" if varies else "off"


def _is_idle(facts: Facts) -> bool:
    """Whether a pass reached nothing at all on some rank, or was about to."""
    return any(lane.idle for lane in facts.lanes) or any(d.is_idle for d in facts.divergences())


def _wasted_bytes(facts: Facts) -> int:
    """Bytes of gradient that DDP reduces in each step for parameters that never got one on any rank."""
    useless = (p for p in facts.profiles if facts.awaited_in_vain(p) and not p.of_kind("covered"))
    return sum(parameter.num_bytes for profile in useless for parameter in profile.parameters)


def _actions(facts: Facts, flag: str, static_graph: str) -> list[str]:
    actions = []
    static = " or static_graph=True, as each rank's own set stays the same" if static_graph == "safe" else ""
    is_on = facts.wrapper.find_unused_parameters
    constant = sorted(name for p in facts.profiles if facts.awaited_in_vain(p) and not p.of_kind("covered") for name in p.names)
    if constant:
        actions.append(
            f"{some(constant, 4)} never got a gradient: mend that first, as the findings say. Use or rewire what is to be"
            " trained; delete the rest, or freeze it (requires_grad_(False)) before the model is wrapped."
        )
    if any(p.of_kind("thawed") or p.of_kind("replaced") for p in facts.profiles):
        actions.append("Wrap the model again after thawing or replacing parameters.")
    if flag == "on":
        actions.append(
            "Keep find_unused_parameters=True: the set of parameters without a gradient varies."
            if is_on
            else f"Set find_unused_parameters=True{static}, or give the absent branch a path of weight zero into the loss: the"
            " set of parameters without a gradient varies."
        )
    elif flag == "off" and is_on and any(count(lane.finished) >= 2 for lane in facts.lanes):
        actions.append("Then drop find_unused_parameters=True." if constant else "Drop find_unused_parameters=True.")
    elif flag == "cannot-help":
        actions.append(
            "find_unused_parameters cannot mend this: "
            + (
                "a backward pass reached no parameter at all on some rank, which the other ranks wait for; let every rank's"
                " loss depend on the model, with weight zero if need be."
                if _is_idle(facts)
                else "DDP counted a parameter ready twice."
            )
        )
    return actions
