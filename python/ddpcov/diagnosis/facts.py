"""What the rules know of a run: the analysis of a capture, with names and ranks filled in."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from ddpcov import _core
from ddpcov.report import Launch, ParameterCoverage, Range, Wrapper

__all__ = ["UNFINISHED", "Facts", "Lane", "Profile", "collect", "count", "union"]

UNFINISHED = "Expected to have finished reduction"
"""What DDP says where something that it waits for did not come."""


def union(ranges: Iterable[list[Range]]) -> list[Range]:
    """All members of any of the ranges."""
    return _core.union(list(ranges))


def count(ranges: Iterable[Range]) -> int:
    """Number of members."""
    return sum(last - first + 1 for first, last in ranges)


@dataclass(frozen=True)
class Lane:
    """Ranks whose histories are equal; see `LaneSummary` in the core for the numbers."""

    ranks: tuple[int, ...]
    end: str
    facts: dict[str, Any]
    """The last that was noted of each topic."""
    noted: dict[str, list[dict[str, Any]]]
    """All that was noted of each topic, in order."""
    num_steps: int
    num_passes: int
    finished: list[Range]
    interrupted: list[Range]
    idle: list[Range]
    num_vain_sets: int
    num_unreached_sets: int
    num_orphans: int
    has_wrapper: bool
    broken_off: tuple[list[int], list[int], bool] | None
    stall: list[str]
    """Of a pass that is open: what its ranks lack, and what others did in it."""

    def outputs(self) -> Iterator[tuple[int, dict[str, Any]]]:
        """The outputs of its forwards that need a gradient, as they were noted, each with its step."""
        for note in self.noted.get("outputs", ()):
            for output in note.get("outputs") or ():
                if isinstance(output, dict) and output.get("needs_grad"):
                    yield int(note.get("step", 0)), output

    def evidence(self) -> Iterator[tuple[int, dict[str, Any]]]:
        """What traced passes showed of the parameters that they left without a gradient, each with its step."""
        written: list[dict[str, Any]] = []
        for note in self.noted.get("evidence", ()):
            if isinstance(note.get("groups"), list):
                written.append(note)
            again = note.get("again", len(written) - 1)
            if isinstance(again, int) and 0 <= again < len(written):
                yield int(note.get("step", 0)), written[again]

    def raised(self, text: str) -> dict[str, Any] | None:
        """What is known of an exception that says this: the one that ended it, or one that the script caught."""
        return next((e for e in self.noted.get("exception", ()) if text in str(e.get("message", ""))), None)

    @property
    def has_several_wrappers(self) -> bool:
        """Whether several DDPs were at work. One that a pass does not touch at all stays prepared, and loses nothing."""
        return "wrappers" in self.facts

    @property
    def is_broken_off(self) -> bool:
        """Whether it ended inside a backward pass: killed there, or by the exception that was raised there."""
        exception = self.facts.get("exception")
        return self.broken_off is not None and (exception is None or self.end == "killed" or bool(exception.get("in_pass")))


@dataclass(frozen=True)
class Profile:
    """Parameters that are alike in everything that was recorded."""

    parameters: tuple[ParameterCoverage, ...]
    steps: dict[int, dict[str, list[Range]]]
    """Lane → kind (see `Kind` in the core) → steps."""

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the parameters."""
        return tuple(p.name for p in self.parameters)

    def of_kind(self, kind: str) -> dict[int, list[Range]]:
        """Lane → steps in which it was so; lanes where it never was are absent."""
        return {lane: kinds[kind] for lane, kinds in self.steps.items() if kind in kinds}


@dataclass(frozen=True)
class Divergence:
    """Ranks that were about to do something else than others, when the guard stopped them."""

    step: int
    ranks: tuple[int, ...]
    names: tuple[str, ...]
    """What they would not have reached, and others would."""
    is_idle: bool
    """They would have reached nothing at all."""


@dataclass(frozen=True)
class Facts:
    """A run, as the rules see it."""

    members: tuple[int, ...]
    lanes: list[Lane]
    profiles: list[Profile]
    parameters: list[ParameterCoverage]
    wrapper: Wrapper
    torch: str
    optimizer_given: bool
    same_parameters: bool
    num_vain_sets: int
    conflicts: list[tuple[int, list[tuple[int, list[int], str]]]]
    launch: Launch | None = None
    attempt: int | None = None
    """Number of the attempt, where the job is restarted when it fails."""

    @property
    def num_steps(self) -> int:
        """Steps of the rank that came furthest."""
        return max((lane.num_steps for lane in self.lanes), default=0)

    @property
    def ranks(self) -> tuple[int, ...]:
        """Ranks whose data is here."""
        return tuple(sorted(r for lane in self.lanes for r in lane.ranks))

    @property
    def missing_ranks(self) -> tuple[int, ...]:
        """Ranks that took part and whose data is not here."""
        return tuple(sorted(set(self.members) - set(self.ranks)))

    @property
    def is_strict(self) -> bool:
        """Whether DDP stops, or hangs, when a parameter that it waits for gets no gradient."""
        return self.wrapper.kind == "ddp" and not (self.wrapper.find_unused_parameters or self.wrapper.static_graph)

    def is_fatal(self, profile: Profile) -> bool:
        """Whether what these parameters lacked stops DDP, or hangs it."""
        vain = self.awaited_in_vain(profile)
        return bool(vain) and (self.is_strict or any(self.lanes[lane].raised(UNFINISHED) for lane in vain))

    def divergences(self) -> Iterator[Divergence]:
        """What the guard kept from happening. All ranks noted the same."""
        noted: dict[str, Any] = next((lane.facts["divergence"] for lane in self.lanes if "divergence" in lane.facts), {})
        for group in noted.get("groups") or ():
            try:
                ranks, names = tuple(map(int, group["ranks"])), tuple(map(str, group["names"]))
                if names:
                    yield Divergence(int(noted["step"]), ranks, names, bool(group["is_idle"]))
            except (LookupError, TypeError, ValueError):
                continue

    def awaited_in_vain(self, profile: Profile) -> dict[int, list[Range]]:
        """Lane → steps in which DDP waited for them, and no gradient came. Of several DDPs, where one of them said so."""
        at = profile.of_kind("awaited_in_vain")
        return {i: s for i, s in at.items() if not self.lanes[i].has_several_wrappers or self.lanes[i].raised(UNFINISHED)}

    def said_ready_twice(self) -> Iterator[tuple[Lane, dict[str, Any]]]:
        """Lanes that DDP itself ended because a parameter was ready twice, and what is known of the exception."""
        return ((lane, said) for lane in self.lanes if (said := lane.raised("ready only once")))


def collect(capture: _core.Capture, *, with_notes: bool = True) -> Facts:
    """The facts of a capture, with what was noted beside the coverage or without."""
    analysis = capture.analyse()
    lanes = [_lane(lane if with_notes else {**lane, "facts": []}) for lane in analysis.lanes]
    run: dict[str, Any] = next((lane.facts["run"] for lane in lanes if "run" in lane.facts), {})
    num_steps = max((lane.num_steps for lane in lanes), default=0)
    defined = analysis.parameters  # made anew at each call
    parameters: list[Any] = [None] * len(defined)
    profiles = []
    for raw in analysis.profiles:
        covered = _coverage(raw, lanes, num_steps)
        members = []
        for param_id in raw["parameters"]:
            name, aliases, shape, dtype, itemsize, module_class = defined[param_id]
            parameter = ParameterCoverage(
                name=name,
                aliases=tuple(aliases),
                shape=tuple(shape),
                numel=math.prod(shape),
                itemsize=itemsize,
                dtype=dtype,
                module=name.rpartition(".")[0],
                module_class=module_class,
                **covered,
            )
            parameters[param_id] = parameter
            members.append(parameter)
        profiles.append(Profile(tuple(members), raw["lanes"]))
    return Facts(
        members=tuple(_expand(capture.ranks)),
        lanes=lanes,
        profiles=profiles,
        parameters=parameters,
        wrapper=_wrapper(run.get("wrapper")),
        torch=str(run.get("torch", "unknown")),
        optimizer_given=capture.optimizer_given,
        same_parameters=bool(run.get("same_parameters", True)),
        num_vain_sets=analysis.num_vain_sets,
        conflicts=analysis.conflicts,
        launch=_launch(run.get("launch")),
        attempt=run["attempt"] if isinstance(run.get("attempt"), int) else None,
    )


def _expand(ranges: Iterable[Range]) -> list[int]:
    return [i for first, last in ranges for i in range(first, last + 1)]


def _lane(raw: dict[str, Any]) -> Lane:
    noted: dict[str, list[dict[str, Any]]] = {}
    for topic, body in raw.pop("facts"):
        value = json.loads(body)
        if isinstance(value, dict):
            noted.setdefault(topic, []).append(value)
    facts = {topic: values[-1] for topic, values in noted.items()}
    end = raw["end"] or "killed"
    return Lane(**{**raw, "ranks": tuple(_expand(raw["ranks"])), "end": end, "facts": facts, "noted": noted})


def _wrapper(raw: Any) -> Wrapper:
    raw = raw if isinstance(raw, dict) else {}
    flags = {k: bool(raw.get(k)) for k in ("find_unused_parameters", "static_graph")}
    return Wrapper(str(raw.get("kind", "none")), **flags)


def _launch(raw: Any) -> Launch | None:
    if not isinstance(raw, dict):
        return None
    order = raw.get("order")
    return Launch(
        id=str(raw.get("id", "")),
        model=str(raw.get("model", "")),
        order=order if isinstance(order, int) else None,
        corrections=tuple(map(str, raw.get("corrections") or ())),
        freeze=tuple(map(str, raw.get("freeze") or ())),
    )


def _coverage(raw: dict[str, Any], lanes: list[Lane], num_steps: int) -> dict[str, Any]:
    """The fields of `ParameterCoverage` that are the same for all of a profile, and shared by them."""
    missed: dict[int, tuple[Range, ...]] = {}
    hits: dict[int, int] = {}
    trainable = False
    for index, kinds in raw["lanes"].items():
        trainable |= "trainable" in kinds
        for rank in lanes[index].ranks:
            hits[rank] = count(kinds.get("covered", ()))
            if "missed" in kinds:
                missed[rank] = tuple(kinds["missed"])
    if num_steps == 0:
        trainable = raw["trainable"]
    if not trainable:
        coverage = "frozen"
    elif not any(hits.values()):
        coverage = "never"
    else:
        coverage = "some" if missed else "always"
    return {
        "trainable": trainable,
        "coverage": coverage,
        "missed": dict(sorted(missed.items())),
        "hits": dict(sorted(hits.items())),
    }
