"""Findings 301 to 310: the data-parallel wrapper."""

from __future__ import annotations

from typing import Any

from ddpcov import _core
from ddpcov.diagnosis.facts import UNFINISHED, Facts, Lane, count, union
from ddpcov.diagnosis.rules.finding import Found, across_ranks, count_ranks, make
from ddpcov.report import Range


def frozen_after_wrap(facts: Facts) -> Found:
    """DDC301: DDP waits for it, but it was frozen later."""
    message = "Frozen after the model was wrapped: DDP was built to wait for a gradient that can no longer come."
    fix = "Freeze before wrapping: call requires_grad_(False) first, then DistributedDataParallel(model)."
    for profile in facts.profiles:
        at = profile.of_kind("frozen_awaited")
        for index, lane in enumerate(facts.lanes):
            if lane.has_several_wrappers and index in at:  # frozen while another of them is trained
                at[index] = _core.difference(at[index], profile.steps[index].get("covered", []))
        at = {lane: steps for lane, steps in at.items() if steps}
        if at:
            severity = "error" if facts.is_strict else "warning"
            yield make(facts, "DDC301", severity, message, names=profile.names, at=at, fix=fix)


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
                yield make(facts, code, "error", message, names=profile.names, at=at, fix=again)


def bypassed(facts: Facts) -> Found:
    """DDC304: covered in a pass that no forward of the wrapper prepared, and not averaged later in the step."""
    message = (
        "Its gradient came in a backward pass that no forward of the wrapper had prepared, so DDP did not average it: each rank"
        " trains a model of its own, without an error."
    )
    fix = "Call the wrapper, ddp(x), not ddp.module(x); and go back once for each forward: (loss_a + loss_b).backward()."
    for profile in facts.profiles:
        at = profile.of_kind("bypassed")
        if at:
            yield make(facts, "DDC304", "error", message, names=profile.names, at=at, fix=fix)


@across_ranks
def opaque_output(facts: Facts) -> Found:
    """DDC305: an output of the forward that takes part and that DDP's search for unused parameters does not find.

    What is reached through it alone is marked unused and then comes all the same, which DDP does not survive. If it did
    survive, other outputs lead to the same parameters.
    """
    wrapper = facts.wrapper
    if wrapper.kind != "ddp" or not wrapper.find_unused_parameters or wrapper.static_graph:
        return
    fix = "Return tensors in a tuple, list, dict or dataclass."
    twice = [lane for lane, _ in facts.said_ready_twice()]
    for lane in facts.lanes:
        hidden: dict[str, set[int]] = {}
        for step, output in lane.outputs():
            if output.get("found") is False and output.get("got") is not False:
                hidden.setdefault(str(output.get("path", "")), set()).add(step)
        is_grave = any(lane is one for one in twice) or lane.is_broken_off
        for path, steps in hidden.items():
            message = f"Output {path or 'of the forward'} is inside an object that DDP does not search: " + (
                "it takes the parameters behind it for unused, and then their gradients come."
                if is_grave
                else "it would take parameters that are reached through it alone for unused."
            )
            severity = "error" if is_grave else "warning"
            ranges = union([[(step, step) for step in sorted(steps)]])
            yield make(facts, "DDC305", severity, message, ranks=lane.ranks, steps=ranges, fix=fix)


def reached_twice(facts: Facts) -> Found:
    """DDC306: its accumulator ran twice in a pass that DDP averages, or DDP itself said so."""
    if facts.wrapper.kind != "ddp":
        return
    for profile in facts.profiles:
        at = profile.of_kind("again")
        if at and not facts.wrapper.static_graph:  # which permits it
            message = "Accumulated more than once in a backward pass: DDP takes the first time for the last."
            yield make(facts, "DDC306", "error", message, names=profile.names, at=at)
    for lane, exception in facts.said_ready_twice():
        named = exception.get("named")
        if isinstance(named, dict):
            last = [(lane.num_steps - 1, lane.num_steps - 1)] if lane.num_steps else []
            message = "DDP counts it ready twice in one backward pass."
            evidence = (f"DDP raised: {_first_line(exception)}",)
            names = tuple(sorted(map(str, named.values())))
            yield make(facts, "DDC306", "error", message, names=names, ranks=lane.ranks, steps=last, evidence=evidence)


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
            f"find_unused_parameters=True was not needed: in {finished} steps on {count_ranks(len(facts.ranks))} every"
            " parameter that DDP waits for got its gradient in every pass, and each pass paid for a search of the graph."
        )
        fix = "Drop find_unused_parameters=True."
        yield make(facts, "DDC307", "warning", message, ranks=facts.ranks, steps=[(0, facts.num_steps - 1)], fix=fix)


@across_ranks
def graph_changed(facts: Facts) -> Found:
    """DDC308: with `static_graph`, the set of parameters that are reached changed, or an output takes no part."""
    if facts.wrapper.kind != "ddp" or not facts.wrapper.static_graph:
        return
    fix = (
        "Wrap without static_graph=True; with find_unused_parameters=True if the set varies by design. If an output is not"
        " used, stop returning it, or use it in the loss."
    )
    for index, lane in enumerate(facts.lanes):
        said = _said(lane, "training graph has changed")
        for profile in facts.profiles:
            of_lane = profile.steps.get(index, {})
            absent = of_lane.get("unreached", [])
            reached = union([of_lane.get("covered", []), of_lane.get("undefined", [])])
            if absent and reached and (lane.num_unreached_sets > 1 or said):
                changed = absent if absent[0][0] > reached[0][0] else reached
                message = (
                    "Reached in some averaged passes and not in others, and static_graph=True promises that they are all alike:"
                    " from the change on DDP leaves gradients local or stops."
                )
                yield make(facts, "DDC308", "error", message, names=profile.names, at={index: changed}, evidence=said, fix=fix)
        unused: dict[str, list[Range]] = {}
        for step, output in lane.outputs():
            if output.get("got") is False:
                unused.setdefault(str(output.get("path", "")), []).append((step, step))
        # The first pass goes through a node for all outputs, and through it to parameters that no later one reaches.
        names = tuple(sorted(n for p in facts.profiles if "undefined" in p.steps.get(index, {}) for n in p.names))
        for path, steps in unused.items() if names else ():
            message = (
                f"No gradient arrived at output {path or 'of the forward'}. With static_graph=True the first pass reaches all"
                " the same what is behind it, later passes do not, and DDP waits for it: the second step stays local, and the"
                " third forward stops."
            )
            at = {index: union([steps])}
            yield make(facts, "DDC308", "error", message, names=names, at=at, evidence=said, fix=fix)


@across_ranks
def unsynchronised(facts: Facts) -> Found:
    """DDC310: a pass ended, and what DDP waits for in it was not reached, so that nothing of it was averaged."""
    if facts.wrapper.kind != "ddp" or facts.wrapper.static_graph:  # of which DDC308 tells
        return
    message = (
        "DDP waits for it, and the backward pass ended without it: the reduction was left unfinished, and the gradients of the"
        " whole model in that step are local to the rank."
    )
    fix = "Mend what the finding on why it was missed says; DDP then has all that it waits for."
    for index, lane in enumerate(facts.lanes):
        said = _said(lane, UNFINISHED)
        last = [(lane.num_steps - 1, lane.num_steps - 1)] if lane.num_steps else []
        if facts.wrapper.find_unused_parameters:  # and the search did not find it unused
            named = (lane.raised(UNFINISHED) or {}).get("named")
            if isinstance(named, dict) and named:
                names = tuple(sorted(map(str, named.values())))
                yield make(facts, "DDC310", "error", message, names=names, at={index: last}, evidence=said, fix=fix)
            continue
        for profile in facts.profiles:
            steps = profile.steps.get(index, {}).get("unreached", [])
            if not steps or (lane.has_several_wrappers and not said):
                continue
            is_silent = lane.end == "clean" and bool(_core.intersection(steps, last))
            evidence = said or (("no error follows the last step: DDP notices at the next forward only",) if is_silent else ())
            yield make(facts, "DDC310", "error", message, names=profile.names, at={index: steps}, evidence=evidence, fix=fix)
        if lane.num_orphans and said and not any("unreached" in p.steps.get(index, {}) for p in facts.profiles):
            gone = (
                f"DDP waits for {lane.num_orphans} tensor{'s' if lane.num_orphans > 1 else ''} no longer in the model: the"
                " reduction was left unfinished, and the gradients of the whole model in that step are local to the rank."
            )
            fix_gone = "Wrap the model again after parameters are replaced."
            yield make(facts, "DDC310", "error", gone, ranks=lane.ranks, steps=last, evidence=said, fix=fix_gone)


def _said(lane: Lane, text: str) -> tuple[str, ...]:
    """What DDP raised on the lane's ranks, if it contains the text."""
    exception = lane.raised(text)
    return () if exception is None else (f"DDP raised: {_first_line(exception).partition('. ')[0]}.",)


def _first_line(exception: dict[str, Any]) -> str:
    line = str(exception.get("message", "")).strip().partition("\n")[0][:300]
    return f"{exception.get('type')}: {line}"
