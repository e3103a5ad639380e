"""What something costs, as a ratio of steps with it and without, taken in one process.

Machines are shared, and their speed drifts: times of different minutes cannot be compared. So kinds of training take turns, in
a new random order each round, and only steps of one round are set against one another. The bootstrap interval of the median
is that of B. Efron, "Bootstrap Methods: Another Look at the Jackknife" (1979).
"""

from __future__ import annotations

import gc
import random
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass

import numpy as np

__all__ = ["Kind", "Ratio", "Round", "of_rounds", "take_turns"]

_NUM_DRAWN = 4000

Kind = Callable[[], AbstractContextManager[Callable[[], None]]]
"""Opens a way of training, which is over when it is left; inside, each call is a step."""
Round = dict[str, float]
"""Kind → the median of its steps, in seconds."""


@dataclass(frozen=True)
class Ratio:
    """The median of paired ratios, and the ends of its 95 % bootstrap interval."""

    median: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.median:.3f} [{self.low:.3f}, {self.high:.3f}]"


def of_rounds(rounds: Iterable[Round], kind: str, to: str) -> Ratio:
    """How long a step of one kind takes in steps of another."""
    ratios = np.array([one[kind] / one[to] for one in rounds])
    drawn = np.random.default_rng(0).choice(ratios, (_NUM_DRAWN, len(ratios)))
    low, high = np.percentile(np.median(drawn, axis=1), (2.5, 97.5))
    return Ratio(float(np.median(ratios)), float(low), float(high))


def take_turns(
    kinds: Mapping[str, Kind],
    *,
    num_warm: int,
    num_timed: int,
    order: random.Random,
    wait: Callable[[], None] = lambda: None,
) -> Round:
    """One round: each kind once, in random order. `wait` ends the work that a step left running on its device.

    Ranks that train together give the same `order`.
    """
    medians = {}
    was_enabled = gc.isenabled()
    for kind in order.sample(sorted(kinds), len(kinds)):
        with kinds[kind]() as step:
            gc.collect()
            gc.disable()  # a collection in the middle of a step would count as the step's
            try:
                for _ in range(num_warm):
                    step()
                wait()
                medians[kind] = float(np.median([_seconds(step, wait) for _ in range(num_timed)]))
            finally:
                if was_enabled:
                    gc.enable()
    return medians


def _seconds(step: Callable[[], None], wait: Callable[[], None]) -> float:
    begun = time.perf_counter()
    step()
    wait()
    return time.perf_counter() - begun
