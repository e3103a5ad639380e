"""Finding 109, and remarks on what the samples of gradients held."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from typing import Any

from ddpcov import _core
from ddpcov.diagnosis.facts import Facts
from ddpcov.diagnosis.rules.finding import Found, list_ranks, make
from ddpcov.report import Range, some

_MAX_LISTED = 1000
"""Sampled steps that are listed one by one; of more, the range."""


def zero_gradient(facts: Facts) -> Found:
    """DDC109: covered, and exactly zero in every sample.

    Not where a weight that is zero itself, and about to move, explains a single sample: LoRA begins like this.
    """
    notes = _notes(facts)
    zero = {index: set(note.get("zero") or ()) for index, note in notes.items()}
    if facts.wrapper.kind.startswith("fsdp"):  # each rank saw a shard
        everywhere = set.intersection(*zero.values()) if len(zero) == len(facts.lanes) and zero else set()
        zero = {index: names & everywhere for index, names in zero.items()}
    groups: defaultdict[tuple[tuple[int, ...], bool], tuple[list[str], dict[int, list[Range]]]]
    for profile in facts.profiles:
        covered = profile.of_kind("covered")
        groups = defaultdict(lambda: ([], {}))
        for name in profile.names:
            lanes = tuple(
                index
                for index in covered
                if name in zero.get(index, ()) and name not in (notes[index].get("zero_partner") or ())
            )
            if lanes:
                names, at = groups[lanes, any(name in (notes[i].get("decayed") or ()) for i in lanes)]
                names.append(name)
                at.update((i, _sampled(covered[i], int(notes[i].get("every", 1)))) for i in lanes)
        for (lanes, is_moved), (names, at) in groups.items():
            num_samples = max(int(notes[i].get("samples", 0)) for i in lanes)
            how_many = f"each of {num_samples} sampled steps" if num_samples > 1 else "the one step that was sampled"
            evidence = ("an optimizer with weight decay, momentum or running averages holds it, and can move it all the same",)
            yield make(
                facts,
                "DDC109",
                "warning",
                f"A gradient arrives, and it was exactly zero in {how_many}: the parameter does not learn from it.",
                names=tuple(names),
                at=at,
                evidence=evidence if is_moved else (),
                fix="Look for a factor of zero: a mask that hides everything, a ReLU that never fires, a loss weight of 0;"
                " under torch.compile, an output left out of the loss.",
            )


def remarks(facts: Facts) -> Iterator[str]:
    """What the samples hold that is no finding, for the notes of the run."""
    for index, note in _notes(facts).items():
        who = f"rank {list_ranks(facts.lanes[index].ranks)}"
        by_step: defaultdict[int, list[str]] = defaultdict(list)
        for name, step in (note.get("nonfinite") or {}).items():
            by_step[step].append(name)
        steps = sorted(by_step.items())
        for step, names in steps[:3]:
            yield f"non-finite gradients in step {step} on {who}: {some(names, 5)}"
        if len(steps) > 3:
            yield f"non-finite gradients of {sum(len(n) for _, n in steps[3:])} more parameters in later steps on {who}"
        if partnered := note.get("zero_partner"):
            yield (
                f"values: {some(partnered, 5)} had a gradient of exactly zero once on {who}, while a weight of zero was about"
                " to move; not judged before another sample"
            )
        if note.get("cut"):
            yield f"values: only the first {len(note.get('zero') or ())} names were kept on {who}"
        if note.get("off"):
            yield f"values: stopped on {who}: {note['off']}"


def _notes(facts: Facts) -> dict[int, dict[str, Any]]:
    return {index: lane.facts["values"] for index, lane in enumerate(facts.lanes) if "values" in lane.facts}


def _sampled(steps: list[Range], every: int) -> list[Range]:
    """Those of the steps that were sampled."""
    if every == 1 or (steps and (steps[-1][1] - steps[0][0]) // every > _MAX_LISTED):
        return steps
    last = max((last for _, last in steps), default=-1)
    return _core.intersection(steps, [(s, s) for s in range(0, last + 1, every)]) or steps
