"""`guard=True`: what would hang, or train wrongly, raises on every rank before the first gradient; nothing else does."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.join import Join
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.checkpoint import checkpoint

import ddpcov
from multirank import Rank, run_ranks
from reference import Net, sgd

X = torch.ones(2, 3)
PATIENCE = 3.0
NAMES = ("a", "b")


def guarded(train: Callable[[int, nn.Module, Callable[[], None]], None], model: nn.Module, rank: int, **options: Any) -> Any:
    """Trains, and tells what came out of it: seconds, and a divergence, if there was one."""
    optimizer = sgd(model)

    def step() -> None:
        optimizer.step()
        optimizer.zero_grad()

    begun = time.monotonic()
    options = {"guard": True, "stall_after": PATIENCE, **options}
    try:
        with ddpcov.track(model, out="run.bin", **options):
            train(rank, model, step)
    except ddpcov.RankDivergence as error:
        return {
            "seconds": time.monotonic() - begun,
            "message": str(error),
            "lacking": error.lacking,
            "absent": error.absent,
            "notes": getattr(error, "__notes__", []),
        }
    except Exception as error:
        return {"other": f"{type(error).__name__}: {error}", "seconds": time.monotonic() - begun}
    return None


def divergences(ranks: list[Rank]) -> list[dict[str, Any]]:
    told = [rank.result for rank in ranks]
    assert all(one and "message" in one for one in told), told
    return told


# What would hang.


def one_skips(rank: int, model: nn.Module, step: Callable[[], None]) -> None:
    for i in range(4):
        model(X, *(NAMES if (rank, i) != (1, 2) else NAMES[:1])).sum().backward()
        step()


def flag_off(rank: int) -> Any:
    return guarded(one_skips, DDP(Net(*NAMES)), rank)


def test_a_branch_on_one_rank(tmp_path: Path) -> None:
    for told in divergences(run_ranks(flag_off, folder=tmp_path)):
        assert told["lacking"] == {1: ("b.weight",)}
        assert told["absent"] == ()
        assert told["seconds"] < PATIENCE
        who, cause, fix = told["message"].splitlines()
        assert who == "in the backward pass of step 2, rank 1 would not reach b.weight, and others would"
        assert "b.weight: DDC101 b (Linear) never ran" in cause
        assert "find_unused_parameters=True" in fix
    report = ddpcov.read(tmp_path / "run.bin")
    (found,) = (f for f in report.findings if f.code == "DDC202")
    assert (found.parameters, found.ranks, found.steps) == (("b.weight",), (1,), ((2, 2),))
    assert {f.code: f.ranks for f in report.findings}["DDC101"] == (1,)


def many(rank: int) -> Any:
    def train(rank: int, model: nn.Module, step: Callable[[], None]) -> None:
        model(X, *(NAMES if rank in (0, 3) else NAMES[:1])).sum().backward()

    return guarded(train, DDP(Net(*NAMES)), rank)


def test_ranks_in_ranges(tmp_path: Path) -> None:
    for told in divergences(run_ranks(many, 4, folder=tmp_path)):
        assert told["lacking"] == {1: ("b.weight",), 2: ("b.weight",)}
        assert "ranks 1-2 would not reach b.weight" in told["message"]


def in_a_sub_group(rank: int) -> Any:
    group = dist.new_group([0, 2])
    if rank == 1:
        return None  # of another group, and not asked

    def train(rank: int, model: nn.Module, step: Callable[[], None]) -> None:
        model(X, *(NAMES if rank == 0 else NAMES[:1])).sum().backward()

    return guarded(train, DDP(Net(*NAMES), process_group=group), rank)


def test_a_sub_group(tmp_path: Path) -> None:
    first, other, last = run_ranks(in_a_sub_group, 3, folder=tmp_path)
    assert other.result is None
    for told in divergences([first, last]):
        assert told["lacking"] == {2: ("b.weight",)}
        assert told["seconds"] < PATIENCE


def constant(rank: int, flag: bool) -> Any:
    def train(rank: int, model: nn.Module, step: Callable[[], None]) -> None:
        for i in range(3):
            loss = model(X, *NAMES).sum()
            (loss if (rank, i) != (1, 1) else torch.zeros((), requires_grad=True)).backward()
            step()

    return guarded(train, DDP(Net(*NAMES), find_unused_parameters=flag), rank)


@pytest.mark.parametrize("flag", [False, True])
def test_a_constant_loss(tmp_path: Path, flag: bool) -> None:
    for told in divergences(run_ranks(constant, args=[flag], folder=tmp_path)):
        assert told["lacking"] == {1: ("a.weight", "b.weight")}
        assert "rank 1 would reach no parameter at all" in told["message"]
        assert "find_unused_parameters as without" in told["message"]
    report = ddpcov.read(tmp_path / "run.bin")
    (found,) = (f for f in report.findings if f.code == "DDC107")
    assert (found.ranks, found.steps) == ((1,), ((1, 1),))
    assert report.advice.find_unused_parameters == "cannot-help"


def changed_graph(rank: int) -> Any:
    return guarded(one_skips, DDP(Net(*NAMES), static_graph=True), rank)


def test_a_static_graph_that_changes_on_one_rank(tmp_path: Path) -> None:
    for told in divergences(run_ranks(changed_graph, folder=tmp_path)):
        assert told["lacking"] == {1: ("b.weight",)}
        assert "static_graph=True expects" in told["message"]


def sharded(rank: int, is_even: bool) -> Any:
    from torch.distributed.fsdp import fully_shard

    model = Net(*NAMES)
    fully_shard(model)
    return guarded(one_skips if not is_even else lambda _, m, s: one_skips(0, m, s), model, rank)


@pytest.mark.skipif(torch.__version__ < (2, 6), reason="fully_shard needs a GPU there")
@pytest.mark.parametrize("is_even", [False, True])
def test_fsdp2(tmp_path: Path, is_even: bool) -> None:
    ranks = run_ranks(sharded, args=[is_even], folder=tmp_path)
    if is_even:
        assert [rank.result for rank in ranks] == [None, None]
        return
    for told in divergences(ranks):
        assert told["lacking"] == {1: ("b.weight",)}
        assert "FSDP2" in told["message"]


# Ranks that do not come.


def away(rank: int, how: str) -> Any:
    def train(rank: int, model: nn.Module, step: Callable[[], None]) -> None:
        for i in range(3):
            if (rank, i) == (1, 2):
                if how == "leaves":
                    return
                if how == "raises":
                    raise ValueError("of its own")
                if how == "killed":
                    os.kill(os.getpid(), signal.SIGKILL)
                time.sleep(3 * PATIENCE)
            model(X, *NAMES).sum().backward()
            step()

    return guarded(train, DDP(Net(*NAMES)), rank)


@pytest.mark.parametrize(
    ("how", "says"),
    [
        ("leaves", "it left the block"),
        ("raises", "it left the block with an exception"),
        ("killed", "its connection is lost"),
        ("sleeps", "not within 3 s"),
    ],
)
def test_a_rank_that_does_not_come(tmp_path: Path, how: str, says: str) -> None:
    ranks = run_ranks(away, args=[how], folder=tmp_path)
    told = ranks[0].result
    assert told["absent"] == (1,), told
    assert says in told["message"]
    assert told["seconds"] < PATIENCE + 5
    if how == "sleeps":
        assert ranks[1].result["absent"] == (0,)
    else:
        assert told["seconds"] < PATIENCE + 3


# What the wrapper survives.


def free(rank: int, model: nn.Module, step: Callable[[], None]) -> None:
    for i in range(6):
        model(X, NAMES[(rank + i) % 2]).sum().backward()
        step()


def accumulates(rank: int, model: Any, step: Callable[[], None]) -> None:
    for _ in range(3):
        with model.no_sync():
            for _ in range(2 + rank):  # as many as each likes
                model(X, *NAMES[:1]).sum().backward()
        model(X, *NAMES).sum().backward()
        step()


def evaluates(rank: int, model: Any, step: Callable[[], None]) -> None:
    for _ in range(3):
        model(X, *NAMES).sum().backward()
        step()
        if rank == 0:
            model.eval()
            with torch.no_grad():
                model.module(X, *NAMES)
            model.module(X, *NAMES).sum().backward()  # a look at gradients, of its own
            step()
            model.train()


def static(rank: int, model: nn.Module, step: Callable[[], None]) -> None:
    for _ in range(4):
        model(X, NAMES[rank]).sum().backward()
        step()


def piecemeal(rank: int, model: nn.Module, step: Callable[[], None]) -> None:
    for _ in range(3):
        output = model(X, *NAMES)
        parts = list(model.module.children())
        for part in (parts[:1], parts[1:]):  # DDP goes on from pass to pass until it has all
            output.sum().backward(inputs=[p for layer in part for p in layer.parameters()], retain_graph=True)
        step()


def equally_lacking(rank: int, model: nn.Module, step: Callable[[], None]) -> None:
    model(X, NAMES[0]).sum().backward()


def ends_early_with_join(rank: int, model: Any, step: Callable[[], None]) -> None:
    with Join([model]):
        for _ in range(2 + rank):
            model(X, *NAMES).sum().backward()
            step()


SURVIVED: dict[str, tuple[Callable[..., None], dict[str, bool]]] = {
    "ranks that take different branches, with the flag": (free, {"find_unused_parameters": True}),
    "no_sync": (accumulates, {}),
    "evaluation": (evaluates, {}),
    "static sets that differ": (static, {"static_graph": True}),
    "nothing missing": (lambda r, m, s: one_skips(0, m, s), {}),
    "the same lacking on all ranks": (equally_lacking, {}),
    "a pass for each half of the model": (piecemeal, {}),
    "join": (ends_early_with_join, {}),
}


def survives(rank: int, name: str) -> Any:
    train, flags = SURVIVED[name]
    return guarded(train, DDP(Net(*NAMES), **flags), rank)


@pytest.mark.parametrize("name", SURVIVED)
def test_no_false_alarm(tmp_path: Path, name: str) -> None:
    ranks = run_ranks(partial(survives, name=name), folder=tmp_path)
    assert [rank.result for rank in ranks] == [None, None]


class Checkpointed(Net):
    def forward(self, x: torch.Tensor, *names: str) -> torch.Tensor:
        return checkpoint(super().forward, x, *names, use_reentrant=True)


def reentrant(rank: int) -> Any:
    x = torch.ones(2, 3, requires_grad=True)

    def train(rank: int, model: nn.Module, step: Callable[[], None]) -> None:
        for _ in range(3):
            model(x, *NAMES).sum().backward()
            step()

    return guarded(train, DDP(Checkpointed(*NAMES)), rank)


def test_reentrant_checkpointing_is_said_to_be_unguarded(tmp_path: Path) -> None:
    ranks = run_ranks(reentrant, folder=tmp_path)
    assert [rank.result for rank in ranks] == [None, None]
    (said,) = (line for rank in ranks for line in rank.said if "guard" in line)
    assert "reentrant checkpointing" in said


def gan(rank: int) -> Any:
    generator, critic = DDP(Net("g")), DDP(Net("c"))
    both = [sgd(generator), sgd(critic)]
    begun = time.monotonic()
    options: dict[str, Any] = {"guard": True, "stall_after": PATIENCE}
    with ddpcov.track(generator, out="g.bin", **options), ddpcov.track(critic, out="c.bin", **options):
        for _ in range(3):
            critic(generator(X, "g").detach(), "c").sum().backward()
            both[1].step()
            critic(generator(X, "g"), "c").sum().backward()
            both[0].step()
    assert time.monotonic() - begun < PATIENCE
    return None


def test_two_models_that_are_trained_in_turn(tmp_path: Path) -> None:
    assert [rank.result for rank in run_ranks(gan, folder=tmp_path)] == [None, None]


def unwrapped(rank: int) -> Any:
    return guarded(lambda r, m, s: one_skips(r, m, s), Net(*NAMES), rank)


def test_what_cannot_be_guarded_is_said(tmp_path: Path) -> None:
    ranks = run_ranks(unwrapped, folder=tmp_path)
    assert [rank.result for rank in ranks] == [None, None]
    assert [line for line in ranks[0].said if "guard" in line] == ["ddpcov: guard: not made: only DDP and FSDP2 can be guarded"]
