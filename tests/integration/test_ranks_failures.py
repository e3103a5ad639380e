"""Ranks that fail, die, hang, or come late: nobody waits longer than the bound, and the shards tell what happened."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

import ddpcov
from ddpcov import gears
from ddpcov import ranks as ddpcov_ranks
from multirank import Rank, count_collectives
from multirank import run_ranks as run_ranks_for
from reference import Net, sgd

X = torch.ones(2, 3)
BOUND = 3.0
SLACK = 2.0

run_ranks = partial(run_ranks_for, timeout=timedelta(minutes=30))  # the default of gloo: no bound may come from there


class Block:
    """A tracked model that trains step by step, with the bound shortened; notes how leaving the block went."""

    fails = False

    def __init__(self, model: nn.Module, **options: Any) -> None:
        ddpcov_ranks.EXIT_TIMEOUT = timedelta(seconds=BOUND)
        self.model, self.optimizer = model, sgd(model)
        self.cov = ddpcov.track(model, out="run.bin", **options)
        self.collectives: list[str] = []
        self.notes: list[str] = []
        self.error = ""
        self.waited = 0.0

    def __enter__(self) -> Block:
        self.cov.__enter__()
        return self

    def __exit__(self, kind: Any, error: BaseException | None, tb: Any) -> bool:
        self.collectives = count_collectives()
        begin = time.monotonic()
        self.cov.__exit__(kind, error, tb)
        self.waited = time.monotonic() - begin
        if error is not None:
            self.error, self.notes = str(error), getattr(error, "__notes__", [])
        return True  # handled: the rank ends with code 0 and tells its story

    def train(self, *names: str) -> None:
        self.model(X, *names).sum().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def story(self) -> dict[str, Any]:
        """What the test may ask for."""
        return {"waited": self.waited, "collectives": self.collectives, "notes": self.notes, "error": self.error}


def report(folder: Path) -> dict[str, Any]:
    """The report as the command line gives it."""
    command = [sys.executable, "-m", "ddpcov", "report", "run.bin", "--format", "json"]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    return dict(json.loads(done.stdout))


def findings(told: dict[str, Any], code: str) -> list[dict[str, Any]]:
    return [f for f in told["findings"] if f["code"] == code]


def missed(told: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {p["name"]: p["missed"] for p in told["parameters"] if p["missed"]}


def check_bounded(ranks: list[Rank]) -> None:
    """Every rank that told its story left in time, and without a collective."""
    for story in (rank.result for rank in ranks if rank.code == 0):
        assert story["waited"] < BOUND + SLACK
        assert story["collectives"] == []


# An exception in the block.


def one_raises(rank: int) -> dict[str, Any]:
    with Block(DDP(Net("a", "b"), find_unused_parameters=True)) as block:
        block.train("a")
        if rank == 1:
            raise ValueError("on this rank alone\nand more of it")
    return block.story()


def test_one_rank_raises_and_the_other_leaves(tmp_path: Path) -> None:
    ranks = run_ranks(one_raises, folder=tmp_path)
    check_bounded(ranks)
    told = report(tmp_path)
    assert told["run"]["end"] == {"0": "clean", "1": "exception: ValueError: on this rank alone"}
    assert missed(told) == {"b.weight": {"0": [[0, 0]], "1": [[0, 0]]}}
    assert not findings(told, "DDC501")  # between passes
    assert not findings(told, "DDC502")
    (said,) = ranks[0].said
    assert "python -m ddpcov report run.bin" in said
    assert ranks[1].said == []
    (note,) = ranks[1].result["notes"]
    assert "on rank 1, 1 of 2" in note
    assert "b.weight" in note
    assert ranks[0].result["notes"] == []


def raises_in_backward(rank: int) -> dict[str, Any]:
    net = Net("first", "last")
    with Block(DDP(net, find_unused_parameters=True)) as block:
        block.train()
        if rank == 1:
            net.first.weight.register_hook(lambda gradient: 1 / 0)
        block.train()
    dist.destroy_process_group()  # so that the peer's transfer fails at once
    return block.story()


def test_exception_inside_backward(tmp_path: Path) -> None:
    ranks = run_ranks(raises_in_backward, folder=tmp_path)
    check_bounded(ranks)
    told = report(tmp_path)
    assert told["run"]["end"]["1"] == "exception: ZeroDivisionError: division by zero"
    assert told["run"]["end"]["0"].startswith("exception: RuntimeError: ")
    broken = {tuple(f["ranks"]): f for f in findings(told, "DDC501")}
    assert set(broken) == {(0,), (1,)}
    assert broken[1,]["parameters"] == ["first.weight"]
    assert broken[1,]["steps"] == [[1, 1]]
    assert broken[0,]["parameters"] == []  # all of its gradients had arrived; the transfer failed


class UnusedHead(Net):
    """The defect that everybody has had."""

    def __init__(self) -> None:
        super().__init__("body")
        self.head = nn.Linear(3, 9)

    def forward(self, x: torch.Tensor, *names: str) -> torch.Tensor:
        return super().forward(x, "body")


def unused_head(rank: int) -> dict[str, Any]:
    with Block(DDP(UnusedHead())) as block:
        for _ in range(3):
            block.train()
    return block.story()


def test_the_classic_crash_names_the_head(tmp_path: Path) -> None:
    ranks = run_ranks(unused_head, folder=tmp_path)
    check_bounded(ranks)
    told = report(tmp_path)
    assert all("Expected to have finished reduction" in rank.result["error"] for rank in ranks)
    assert all("head.weight, head.bias" in rank.result["notes"][0] for rank in ranks)
    assert missed(told) == {name: {"0": [[0, 0]], "1": [[0, 0]]} for name in ("head.weight", "head.bias")}
    assert told["run"]["steps"] == 1
    assert told["advice"]["find_unused_parameters"] == "off"
    assert told["advice"]["cost"] == {"bytes_reduced_for_nothing": 4 * (3 * 9 + 9)}
    assert [f["parameters"] for f in findings(told, "DDC101")] == [["head.bias", "head.weight"]]


# Ranks that are killed.


def killed_in_backward(rank: int, victim: int) -> dict[str, Any]:
    net = Net("first", "last")
    with Block(DDP(net)) as block:
        block.train()
        if rank == victim:
            # Real gradients first: of the last layer, and then the end.
            net.first.weight.register_hook(lambda gradient: os.kill(os.getpid(), signal.SIGKILL))
        block.train()
    return block.story()


@pytest.mark.parametrize("victim", [1, 0], ids=["any", "the one with the store"])
def test_killed_in_the_middle_of_backward(tmp_path: Path, victim: int) -> None:
    ranks = run_ranks(killed_in_backward, args=[victim], folder=tmp_path)
    other = 1 - victim
    assert ranks[victim].code == -signal.SIGKILL
    check_bounded(ranks)
    assert ranks[other].said == []
    told = report(tmp_path)
    assert told["run"]["end"][str(victim)] == "killed"
    assert told["run"]["end"][str(other)].startswith("exception: RuntimeError: ")
    (of_victim,) = (f for f in findings(told, "DDC501") if f["ranks"] == [victim])
    is_seen = gears.SETTLE > 0  # in a look nobody knows how far it came
    assert (of_victim["parameters"], of_victim["steps"]) == (["first.weight"] if is_seen else [], [[1, 1]])
    assert ("1 of 2" if is_seen else "how far it came is not known") in of_victim["message"]
    assert not findings(told, "DDC502")


def killed_at_the_end(rank: int) -> dict[str, Any]:
    with Block(DDP(Net("a"))) as block:
        block.train()
        dist.barrier()
        if rank == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(0.3)
    return block.story()


def test_the_store_is_gone_at_a_clean_exit(tmp_path: Path) -> None:
    ranks = run_ranks(killed_at_the_end, folder=tmp_path)
    check_bounded(ranks)
    assert len(ranks[1].said) == 1
    told = report(tmp_path)
    assert told["run"]["end"] == {"0": "killed", "1": "clean"}
    assert not findings(told, "DDC501")  # it died between passes


def freezes(rank: int) -> dict[str, Any]:
    """The process that hosts the store stops: it answers nothing, and its connections stay."""
    pids: list[Any] = [None, None]
    dist.all_gather_object(pids, os.getpid())
    with Block(Net("a")) as block:
        block.train()
        if rank == 0:
            time.sleep(60)
        os.kill(pids[0], signal.SIGSTOP)
        if block.fails:
            raise ValueError("for instance, a transfer timed out")
    os.kill(pids[0], signal.SIGKILL)
    return block.story()


def freezes_and_fails(rank: int) -> dict[str, Any]:
    Block.fails = True
    return freezes(rank)


@pytest.mark.parametrize("function", [freezes, freezes_and_fails])
def test_the_store_freezes(tmp_path: Path, function: Any) -> None:
    ranks = run_ranks(function, folder=tmp_path)
    check_bounded(ranks)
    assert ranks[0].code == -signal.SIGKILL
    assert ranks[1].code == 0
    told = report(tmp_path)
    end = "clean" if function is freezes else "exception: ValueError: for instance, a transfer timed out"
    assert told["run"]["end"] == {"0": "killed", "1": end}


def hang(rank: int) -> None:
    with Block(DDP(Net("a", "b"), find_unused_parameters=True)) as block:
        block.train("a")
        for _ in range(3):
            if rank == 1:  # say, no object in the picture: the loss is a fresh constant
                torch.zeros((), requires_grad=True).backward()
                block.optimizer.step()
            else:
                block.train("b")
        time.sleep(60)


def test_hang(tmp_path: Path) -> None:
    ranks = run_ranks(hang, folder=tmp_path, time_limit=4)
    assert [rank.code for rank in ranks] == [None, None]
    told = report(tmp_path)
    assert told["run"]["end"] == {"0": "killed", "1": "killed"}
    assert missed(told) == {
        "a.weight": {"0": [[1, 1]], "1": [[1, 3]]},
        "b.weight": {"0": [[0, 0]], "1": [[0, 3]]},
    }
    (broken,) = findings(told, "DDC501")
    assert broken["ranks"] == [0]
    assert told["advice"]["find_unused_parameters"] == "cannot-help"


# Ranks that come late, early or never. Without DDP, which would have its own say.


def comes_and_goes(rank: int, how: str) -> dict[str, Any]:
    block = Block(Net("a", "b"))
    if rank == 1 and how == "never":
        time.sleep(BOUND + 1)  # keeps its connections
        return block.story()
    with block:
        block.train("a")
        if rank == 1 and how == "late":
            time.sleep(BOUND / 2)
        if rank == 1 and how == "too late":
            time.sleep(BOUND + 1)
    return block.story()


def test_too_late(tmp_path: Path) -> None:
    first, second = run_ranks(comes_and_goes, args=["too late"], folder=tmp_path)
    check_bounded([first, second])
    assert first.result["waited"] > BOUND - 0.5  # it left early, and waited for the other
    assert second.result["waited"] < 0.5  # which need not wait for it any more
    assert [len(rank.said) for rank in (first, second)] == [1, 1]
    assert not (tmp_path / "run.bin").exists()
    told = report(tmp_path)
    assert told["run"]["end"] == {"0": "clean", "1": "clean"}
    assert missed(told) == {"b.weight": {"0": [[0, 0]], "1": [[0, 0]]}}
    assert not findings(told, "DDC502")


def test_late(tmp_path: Path) -> None:
    first, second = run_ranks(comes_and_goes, args=["late"], folder=tmp_path)
    assert BOUND / 2 - 0.5 < first.result["waited"] < BOUND
    assert first.said == second.said == []
    assert [file.name for file in tmp_path.iterdir()] == ["run.bin"]


def test_never(tmp_path: Path) -> None:
    first, second = run_ranks(comes_and_goes, args=["never"], folder=tmp_path)
    check_bounded([first, second])
    told = report(tmp_path)
    assert (told["run"]["world_size"], told["run"]["ranks"], told["run"]["end"]) == (2, [0], {"0": "clean"})
    assert [f["ranks"] for f in findings(told, "DDC502")] == [[1]]


def destroys_the_group(rank: int) -> dict[str, Any]:
    with Block(DDP(Net("a", "b"), find_unused_parameters=True)) as block:
        block.train("a")
        dist.destroy_process_group()
    return block.story()


def test_the_process_group_is_destroyed_inside_the_block(tmp_path: Path) -> None:
    ranks = run_ranks(destroys_the_group, folder=tmp_path)
    assert all(rank.result["waited"] < BOUND + SLACK for rank in ranks)
    told = report(tmp_path)  # merged, or of the shards: that depends on the backend
    assert told["run"]["end"] == {"0": "clean", "1": "clean"}
    assert missed(told) == {"b.weight": {"0": [[0, 0]], "1": [[0, 0]]}}


# Ranks of a sub-group; the third rank of the job has no part in it.


def in_a_sub_group(rank: int, how: str) -> dict[str, Any] | None:
    group = dist.new_group([0, 2])
    if rank == 1:
        return None
    if rank == 2 and how == "never":
        time.sleep(BOUND + 1)
        return None
    model = Net("a", "b")
    with Block(
        model if how == "never" else DDP(model, process_group=group, find_unused_parameters=True), process_group=group
    ) as block:
        block.train("a")
        if rank == 2:
            match how:
                case "raises":
                    raise ValueError("on this rank alone")
                case "killed":
                    os.kill(os.getpid(), signal.SIGKILL)
                case "too late":
                    time.sleep(BOUND + 1)
    return block.story()


@pytest.mark.parametrize(
    ("how", "end"),
    [
        ("raises", "exception: ValueError: on this rank alone"),
        ("killed", "killed"),
        ("too late", "clean"),
        ("never", None),
    ],
)
def test_a_sub_group(tmp_path: Path, how: str, end: str | None) -> None:
    ranks = run_ranks(in_a_sub_group, 3, args=[how], folder=tmp_path)
    assert [rank.code for rank in ranks] == [0, 0, -signal.SIGKILL if how == "killed" else 0]
    check_bounded([rank for rank in ranks if rank.code == 0 and rank.result is not None])
    told = report(tmp_path)
    assert told["run"]["end"] == {"0": "clean", **({"2": end} if end else {})}
    assert missed(told) == {"b.weight": {rank: [[0, 0]] for rank in told["run"]["end"]}}
    assert [f["ranks"] for f in findings(told, "DDC502")] == ([[2]] if end is None else [])
