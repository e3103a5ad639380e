"""What a step costs under `ddpcov run`, against the same step inside `track`.

    pytest benches/bench_launch.py

A round starts the same training three times, in random order: plain, tracked by its own `with` block, and under `ddpcov run`.
A ratio is that of the median steps of two of them in the same round, after the trace came off; shown are the median over all
rounds and a 95 % bootstrap interval. The bound counts as broken when the whole interval lies beyond it.
"""

from __future__ import annotations

import random
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

BOUND = 1.02  # × a step inside `track`
NUM_ROUNDS = 5

SCRIPT = """
import contextlib, statistics, sys, time
import torch, torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

torch.set_num_threads(1)
torch.manual_seed(0)
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
model = DistributedDataParallel(nn.Sequential(*(nn.Linear(8, 8) for _ in range(300))))
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
batch = torch.randn(4, 8)
block = contextlib.nullcontext()
if sys.argv[1] == "track":
    import ddpcov
    block = ddpcov.track(model, out="run.bin")
times = []
with block:
    for _ in range(150):
        begun = time.perf_counter()
        model(batch).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        times.append(time.perf_counter() - begun)
print(statistics.median(times[30:]))
"""
COMMANDS = {
    "plain": ["script.py", "plain"],
    "track": ["script.py", "track"],
    "run": ["-m", "ddpcov", "run", "script.py", "plain"],
}


@pytest.mark.timeout(900)
def test_a_step_under_run_costs_what_it_costs_inside_track(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    rounds = [_round(tmp_path) for _ in range(NUM_ROUNDS)]
    print()
    low = 0.0
    for one, other in ("track", "plain"), ("run", "plain"), ("run", "track"):
        median, low, high = _interval([r[one] / r[other] for r in rounds])
        print(f"{one}/{other}: {median:.3f} [{low:.3f}, {high:.3f}]")
    assert low <= BOUND


def _round(folder: Path) -> dict[str, float]:
    return {kind: _step_time(folder, COMMANDS[kind]) for kind in random.sample(list(COMMANDS), len(COMMANDS))}


def _step_time(folder: Path, command: list[str]) -> float:
    done = subprocess.run([sys.executable, *command], cwd=folder, capture_output=True, text=True, check=True, timeout=120)
    return float(done.stdout)


def _interval(ratios: list[float]) -> tuple[float, float, float]:
    drawn = np.random.default_rng(0).choice(ratios, (2000, len(ratios)))
    low, high = np.percentile(np.median(drawn, axis=1), [2.5, 97.5])
    return float(np.median(ratios)), float(low), float(high)
