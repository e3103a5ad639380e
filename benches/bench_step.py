"""What a step costs under ddpcov, under what a user could choose instead, and without any of it.

    pytest -s benches/bench_step.py

Two real ranks. A ratio is that of the median steps of two kinds in the same round; see `ddpcov.overhead`.
"""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from rivals import kinds_of, small_layers

from ddpcov.overhead import Round, of_rounds, take_turns
from multirank import run_ranks

NUM_ROUNDS = 15


def rounds_on(rank: int, num_rounds: int) -> list[Round]:
    order = random.Random(0)
    kinds = kinds_of(small_layers)
    return [take_turns(kinds, num_warm=40, num_timed=20, order=order) for _ in range(num_rounds)]


@pytest.mark.timeout(900)
def test_worst_case(tmp_path: Path) -> None:
    first, _ = run_ranks(rounds_on, args=[NUM_ROUNDS], folder=tmp_path, time_limit=900)
    rounds: list[Round] = first.result
    print(f"\n300 layers of 8×8, DDP, 2 ranks: {len(rounds)} rounds")
    for kind in rounds[0]:
        print(f"  {kind:24} {of_rounds(rounds, kind, 'bare')}")
