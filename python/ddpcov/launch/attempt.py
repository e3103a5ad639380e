"""One try of a script with corrections applied, and how two tries compare. Needs no torch."""

from __future__ import annotations

import itertools
import json
import math
import re
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ddpcov.launch.collect import collect
from ddpcov.launch.plan import Part
from ddpcov.launch.supervisor import launch, planned
from ddpcov.report import Report

__all__ = ["Attempt", "Difference", "attempt", "compare"]

_ROUNDING = 1e-5
"""Relative difference of single-precision results that the order of a sum may make within a few steps."""


@dataclass
class Attempt:
    """A script that was run for a few steps."""

    corrections: tuple[str, ...]
    code: int
    was_stalled: bool
    num_seconds: float
    parts: dict[Path, Part]
    report: Report | None
    """None where nothing to track was seen."""
    unreached: list[str]
    log: str
    """Its output."""
    trajectories: dict[tuple[int, int], dict[str, Any]] = field(default_factory=dict)
    """Order of the DDP among those of its process, and rank → what the process wrote down."""

    @property
    def reports(self) -> list[Report]:
        """One for each model."""
        return [] if self.report is None else [self.report, *self.report.others]

    @property
    def num_steps(self) -> int:
        """Steps of the rank that came furthest."""
        return max((report.run.steps for report in self.reports), default=0)

    @property
    def step_seconds(self) -> float | None:
        """Median time of a step after the first, on the slowest rank."""
        times = [t["times"] for t in self.trajectories.values()]
        gaps = [[b - a for a, b in itertools.pairwise(t)] for t in times]
        return max((statistics.median(g) for g in gaps if g), default=None)

    @property
    def are_ranks_equal(self) -> bool | None:
        """Whether the weights of each DDP model are the same, bit for bit, on all its ranks; None if that was not seen."""
        found = None
        for order in {order for order, _ in self.trajectories}:
            weights = [_digests(t) for (o, _), t in self.trajectories.items() if o == order]
            if len(weights) > 1:
                found = found is not False and all(w == weights[0] for w in weights)
        return found

    @property
    def is_verified(self) -> bool:
        """Whether it ended well, with nothing wrong left that was seen, and all ranks in the same state."""
        is_sound = not any(f.severity == "error" for report in self.reports for f in report.findings)
        return self.code == 0 and not self.was_stalled and self.num_steps > 0 and is_sound and self.are_ranks_equal is not False


def attempt(
    command: Sequence[str],
    *,
    out: Path,
    num_steps: int,
    patience: float,
    corrections: tuple[str, ...] = (),
    freeze: dict[str, list[str]] | None = None,
    diagnose: str = "off",
) -> Attempt:
    """Runs the command for so many steps. It is killed if no step ends for `patience` seconds.

    Raises:
        OSError: it cannot be started.
    """
    fields = {"corrections": corrections, "freeze": freeze or {}, "options": {"diagnose": diagnose}}
    with planned(out, stop_after=num_steps, follow=True, **fields) as plan:
        folder = Path(plan.folder)
        progress, log = folder / "progress", folder / "log"
        progress.touch()
        begun = time.time()
        with log.open("wb") as output:
            outcome = launch(command, plan, output=output, is_stalled=lambda: time.time() - progress.stat().st_mtime > patience)
        first = min(outcome.parts, key=lambda path: path != plan.file_of(1, outcome.parts[path]), default=None)
        return Attempt(
            corrections,
            outcome.code,
            outcome.was_stalled,
            time.time() - begun,
            outcome.parts,
            None if first is None else collect(outcome, first),
            outcome.unreached,
            log.read_text(errors="replace"),
            {_order_and_rank(file): json.loads(file.read_text()) for file in sorted(folder.glob("trajectory.*.json"))},
        )


def _order_and_rank(file: Path) -> tuple[int, int]:
    order, rank = re.findall(r"\d+", file.name)
    return int(order), int(rank)


def _digests(trajectory: dict[str, Any]) -> dict[str, str]:
    return {name: digest for name, (digest, _) in trajectory["weights"].items()}


@dataclass(frozen=True)
class Difference:
    """Of two attempts: nothing was different bit for bit, or how much at most, relative, in losses and sampled weights."""

    is_exact: bool
    largest: float
    num_losses: int
    num_weights: int

    @property
    def is_equal(self) -> bool:
        """Whether it is no more than rounding."""
        return self.is_exact or self.largest <= _ROUNDING


def compare(one: Attempt, other: Attempt) -> Difference | None:
    """How far the losses of two attempts, and the weights that both train, lie apart; None if they have none in common."""
    is_exact, largest, num_losses, num_weights = True, 0.0, 0, 0
    never = {p.name for attempt in (one, other) for r in attempt.reports for p in r.parameters if p.coverage != "always"}
    for key in one.trajectories.keys() & other.trajectories.keys():
        a, b = one.trajectories[key], other.trajectories[key]
        for x, y in zip(a["losses"], b["losses"], strict=False):
            is_exact &= x == y
            largest = max(largest, _distance(x, y))
            num_losses += len(x)
        if len(a["times"]) != len(b["times"]):
            continue  # weights after another number of steps are others
        for name in a["weights"].keys() & b["weights"].keys() - never:
            (digest, samples), (digest_b, samples_b) = a["weights"][name], b["weights"][name]
            is_exact &= digest == digest_b
            largest = max(largest, _distance(samples, samples_b))
            num_weights += 1
    return Difference(is_exact, largest, num_losses, num_weights) if num_losses or num_weights else None


def _distance(one: Sequence[float], other: Sequence[float]) -> float:
    """The largest difference, relative to the largest of the values."""
    if len(one) != len(other):
        return math.inf
    scale = max((abs(x) for x in (*one, *other)), default=0.0)
    if not scale or list(one) == list(other):
        return 0.0
    apart = max(abs(x - y) for x, y in zip(one, other, strict=True)) / scale
    return math.inf if math.isnan(apart) else apart
