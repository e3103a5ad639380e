"""A pass that stays open is explained, on stderr and to whoever asks from another terminal."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

import ddpcov
from multirank import Rank, run_ranks
from reference import Net, sgd

X = torch.ones(2, 3)
PATIENCE = 1.0


def heard(rank: Rank) -> list[str]:
    """What the watchdog said, from its first line on."""
    lines = rank.stderr.splitlines()
    begun = [i for i, line in enumerate(lines) if line.startswith("ddpcov: backward pass")]
    return [line for i in begun for line in lines[i : i + 6] if line.startswith(("ddpcov: backward", "  rank", "`python"))]


def skips_and_stays(rank: int, world: int) -> None:
    model = DDP(Net("a", "b"))
    optimizer = sgd(model)
    with ddpcov.track(model, out="run.bin", stall_after=PATIENCE):
        for step in range(3):
            is_last = (rank, step) == (world - 1, 2)
            model(X, *(("a",) if is_last else ("a", "b"))).sum().backward()
            optimizer.step()
            if is_last:
                time.sleep(60)


@pytest.mark.parametrize("world", [2, 4])
def test_a_hang_is_explained_while_it_lasts(tmp_path: Path, world: int) -> None:
    ended: list[Rank] = []
    job = threading.Thread(
        target=lambda: ended.extend(run_ranks(skips_and_stays, world, args=[world], folder=tmp_path, time_limit=9))
    )
    job.start()
    why = f"rank {world - 1}: ended that pass without b.weight"
    told: dict[str, ddpcov.Finding] = {}
    while job.is_alive() and not {"DDC202", "DDC501"} <= told.keys():
        time.sleep(0.3)
        if len(list(tmp_path.glob("run.bin.rank*"))) == world:
            report = ddpcov.read(tmp_path / "run.bin")
            told = {f.code: f for f in report.findings if f.code != "DDC501" or any(why in line for line in f.evidence)}
    assert job.is_alive(), "it did not hang, or the report did not say why"
    assert told["DDC202"].ranks == (world - 1,)
    shown = subprocess.run(
        [sys.executable, "-m", "ddpcov", "report", "run.bin"], cwd=tmp_path, capture_output=True, text=True, check=True
    )
    assert why in shown.stdout
    job.join()
    ((head, own, *others),) = filter(None, map(heard, ended))  # one rank speaks
    assert head.startswith("ddpcov: backward pass 2 is open for 1 s")
    assert own.startswith("  rank 0: every gradient that is waited for has arrived here") or "not reached so far" in own
    assert others[0] == f"  {why}"
    assert len(others) == (2 if world == 2 else 3)  # once; ranks that do the same are in one line


def slow(rank: int, patience: float | None) -> None:
    net = Net("a", "b")
    optimizer = sgd(net)
    with ddpcov.track(net, out="run.bin", stall_after=patience):
        for step in range(3):
            handle = net.b.weight.register_hook(lambda gradient: time.sleep(0.6 if step == 1 else 0))  # noqa: B023
            net.loss().backward()
            optimizer.step()
            handle.remove()


@pytest.mark.parametrize(("patience", "num"), [(0.2, 1), (5.0, 0), (None, 0)])
def test_a_slow_pass_is_mentioned_once(tmp_path: Path, patience: float | None, num: int) -> None:
    (rank,) = run_ranks(slow, 1, args=[patience], folder=tmp_path)
    assert rank.result is None
    assert sum("is open for" in line for line in heard(rank)) == num
    if num:
        assert "backward pass 1 is open for 0 s" in rank.stderr
        assert "rank 0: not reached so far: a.weight, b.weight" in rank.stderr
    assert not [f for f in ddpcov.read(tmp_path / "run.bin").findings if f.code.startswith("DDC5")]


def holds_the_interpreter(rank: int) -> None:
    net = Net("a")

    def hook(gradient: Any) -> None:
        sum(range(300_000_000))  # one call into C: no other Python thread runs meanwhile
        os.write(2, b"\nthe interpreter is free\n")

    with ddpcov.track(net, stall_after=0.3):
        net.a.weight.register_hook(hook)
        net.loss().backward()


def test_the_watchdog_needs_no_interpreter(tmp_path: Path) -> None:
    (rank,) = run_ranks(holds_the_interpreter, 1, folder=tmp_path)
    assert rank.result is None
    before, _ = rank.stderr.split("the interpreter is free")
    assert "ddpcov: backward pass 0 is open for" in before
    assert "rank 0: not reached so far: a.weight" in before


def test_the_thread_ends_with_the_recording() -> None:
    def threads() -> list[str]:
        return [Path(task, "comm").read_text().strip() for task in Path("/proc/self/task").iterdir()]

    if not Path("/proc/self/task").exists():
        pytest.skip("needs /proc")
    with ddpcov.track(nn.Linear(1, 1), stall_after=0.04):
        time.sleep(0.1)
        assert "ddpcov-watchdog" in threads()
    time.sleep(0.2)
    assert "ddpcov-watchdog" not in threads()


@pytest.mark.parametrize("value", [0, -1.0, "60"])
def test_a_patience_that_is_none(value: Any) -> None:
    with pytest.raises(ValueError, match="stall_after="):
        ddpcov.track(nn.Linear(1, 1), stall_after=value)
