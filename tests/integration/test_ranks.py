"""Several ranks that all leave cleanly: what each of them, and the merged capture, says."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.checkpoint import checkpoint

import ddpcov
from ddpcov import _core
from multirank import Rank, count_collectives, run_ranks
from reference import Both, Missed, Net, assert_agree, layer, sgd

X = torch.ones(2, 3)


class Told(NamedTuple):
    """What one rank knows of a block that it left."""

    own: ddpcov.Report  # inside the block
    after: ddpcov.Report
    missed: Missed  # by the reference


def record(rank: int, model: nn.Module, train: Callable[[Both], None], **options: Any) -> Told:
    options = {"out": "run.bin", **options}
    with Both(model, **options) as run:
        train(run)
        own = run.cov.report()
        begin = time.monotonic()
    assert time.monotonic() - begin < 10, "ranks that all leave cleanly need not wait"
    assert_agree(own, run.ref, rank)
    return Told(own, run.cov.report(), run.ref.missed())


def each_step(
    model: nn.Module, optimizer: Any, names: Callable[[int], list[str]], num_steps: int = 4
) -> Callable[[Both], None]:
    """Trains the layers that `names` gives for the step."""

    def train(run: Both) -> None:
        for step in range(num_steps):
            run.train(optimizer, model(X, *names(step)).sum())

    return train


def missed(report: ddpcov.Report, rank: int) -> Missed:
    return {p.name: list(p.missed[rank]) for p in report.parameters if rank in p.missed}


def codes(report: ddpcov.Report) -> set[str]:
    return {f.code for f in report.findings}


def check(ranks: list[Rank], folder: Path, out: str = "run.bin", members: tuple[int, ...] = ()) -> ddpcov.Report:
    """What holds after every clean run: a capture and no shards, exact for every rank; its report, for more to hold."""
    told = dict(enumerate(rank.result for rank in ranks))
    told = {rank: told[rank] for rank in members or told}
    assert [ranks[rank].said for rank in told] == [[]] * len(told)
    assert list(folder.glob(f"{out}.*")) == []
    report = ddpcov.read(folder / out)
    assert report.run.ranks == tuple(told)
    assert set(report.run.end.values()) == {"clean"}
    assert {rank: missed(report, rank) for rank in told} == {rank: t.missed for rank, t in told.items()}
    first, *others = told
    assert told[first].after == report
    for rank, t in told.items():
        assert t.own.run.ranks == (rank,)
    for rank in others:
        assert told[rank].after.run.ranks == (rank,)
        assert missed(told[rank].after, rank) == told[rank].missed
    return report


def num_lanes(capture: Path) -> int:
    return len(_core.Capture.read(capture).analyse().lanes)


# Ranks alike, and ranks that differ.


def alike(rank: int) -> tuple[Told, list[str]]:
    collectives = count_collectives()
    model = DDP(Net("a", "b"))
    return record(rank, model, each_step(model, sgd(model), lambda step: ["a", "b"])), collectives


def test_equal_ranks_share_one_lane_and_gather_nothing(tmp_path: Path) -> None:
    ranks = run_ranks(alike, 3, folder=tmp_path)
    assert [rank.result[1] for rank in ranks] == [["all_reduce"]] * 3
    report = ddpcov.read(tmp_path / "run.bin")
    assert report.verdict == "clean"
    assert report.run.ranks == (0, 1, 2)
    assert [p.hits for p in report.parameters] == [{0: 4, 1: 4, 2: 4}] * 2
    assert num_lanes(tmp_path / "run.bin") == 1
    assert sorted(file.name for file in tmp_path.iterdir()) == ["run.bin"]


def differing(rank: int) -> Told:
    model = DDP(Net("a", "b", "c"), find_unused_parameters=True)
    return record(rank, model, each_step(model, sgd(model), lambda step: ["a", "b" if step % 4 == rank else "c"]))


def test_ranks_that_branch_are_told_apart(tmp_path: Path) -> None:
    report = check(run_ranks(differing, 4, folder=tmp_path), tmp_path)
    assert missed(report, 1) == {"b.weight": [(0, 0), (2, 3)], "c.weight": [(1, 1)]}
    (finding,) = (f for f in report.findings if f.code == "DDC202")
    assert (finding.parameters, finding.ranks, finding.steps) == (("b.weight", "c.weight"), (0, 1, 2, 3), ((0, 3),))
    assert report.advice.find_unused_parameters == "on"
    assert num_lanes(tmp_path / "run.bin") == 4


def one_differs(rank: int) -> Told:
    model = DDP(Net("a", "b"), find_unused_parameters=True)
    return record(rank, model, each_step(model, sgd(model), lambda step: ["a"] if rank == 2 else ["a", "b"]))


def test_equal_ranks_share_a_lane_beside_another(tmp_path: Path) -> None:
    report = check(run_ranks(one_differs, 3, folder=tmp_path), tmp_path)
    assert [f.ranks for f in report.findings if f.code == "DDC202"] == [(2,)]
    assert num_lanes(tmp_path / "run.bin") == 2


# Groups of ranks.


def in_groups(rank: int, is_given: bool) -> Told:
    groups = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    group, out = groups[rank % 2], f"run{rank % 2}.bin"
    model = DDP(Net("a", "b"), process_group=group, find_unused_parameters=True)
    train = each_step(model, sgd(model), lambda step: ["a"] if rank >= 2 and step > 1 else ["a", "b"])
    told = record(rank, model, train, out=out, process_group=group if is_given else None)
    dist.barrier()  # the store of both groups goes with rank 0
    return told


@pytest.mark.parametrize("is_given", [True, False], ids=["process_group", "of the wrapper"])
def test_sub_groups_are_runs_of_their_own(tmp_path: Path, is_given: bool) -> None:
    ranks = run_ranks(in_groups, 4, [is_given], folder=tmp_path)
    for members in (0, 2), (1, 3):
        report = check(ranks, tmp_path, f"run{members[0]}.bin", members)
        assert report.run.world_size == 2
        assert missed(report, members[1]) == {"b.weight": [(2, 3)]}


# Ranks that track different parameters.


def of_different_names(rank: int, same_parameters: bool) -> Told:
    model = Net("a", f"stage{rank}")
    train = each_step(model, sgd(model), lambda step: ["a"] if step == rank else [])
    return record(rank, model, train, same_parameters=same_parameters)


def test_different_names_are_found(tmp_path: Path) -> None:
    report = check(run_ranks(of_different_names, 2, [True], folder=tmp_path), tmp_path)
    found = {f.parameters: f.ranks for f in report.findings if f.code == "DDC503"}
    assert found == {("stage0.weight",): (0,), ("stage1.weight",): (1,)}
    assert {p.name: dict(p.hits) for p in report.parameters} == {
        "a.weight": {0: 4, 1: 4},
        "stage0.weight": {0: 3},
        "stage1.weight": {1: 3},
    }


def test_different_names_may_be_meant(tmp_path: Path) -> None:
    report = check(run_ranks(of_different_names, 2, [False], folder=tmp_path), tmp_path)
    assert "DDC503" not in codes(report)


def of_different_shapes(rank: int) -> Told:
    model = Net("a", "b")
    model.b = nn.Linear(3, 3 + rank, bias=False)
    return record(rank, model, each_step(model, sgd(model), lambda step: []))


def test_different_shapes_are_found(tmp_path: Path) -> None:
    report = check(run_ranks(of_different_shapes, 2, folder=tmp_path), tmp_path)
    (finding,) = report.findings
    assert (finding.code, finding.parameters, finding.ranks) == ("DDC503", ("b.weight",), (0, 1))
    assert finding.evidence == ("float32(3, 3) on rank 0", "float32(4, 3) on rank 1")


# Blocks.


def without_file(rank: int) -> Told:
    model = DDP(Net("a", "b"), find_unused_parameters=True)
    return record(rank, model, each_step(model, sgd(model), lambda step: ["a"] if rank else []), out=None)


def test_without_a_file_ranks_are_merged_in_memory(tmp_path: Path) -> None:
    first, second = (rank.result for rank in run_ranks(without_file, folder=tmp_path))
    assert list(tmp_path.iterdir()) == []
    assert first.after.run.ranks == (0, 1)
    assert missed(first.after, 1) == second.missed == {"b.weight": [(0, 3)]}
    assert second.after.run.ranks == (1,)


def two_blocks(rank: int) -> Told:
    model = DDP(Net("a", "b"), find_unused_parameters=True)
    optimizer = sgd(model)
    record(rank, model, each_step(model, optimizer, lambda step: ["a"]))
    dist.barrier()
    assert ddpcov.read("run.bin").totals.missed == 1
    dist.barrier()
    return record(rank, model, each_step(model, optimizer, lambda step: [] if step else ["b"], num_steps=3))


def test_one_block_after_the_other_to_the_same_file(tmp_path: Path) -> None:
    report = check(run_ranks(two_blocks, folder=tmp_path), tmp_path)
    assert report.run.steps == 3
    assert missed(report, 1) == {"a.weight": [(0, 0)]}


class Gan(NamedTuple):
    """Two wrapped models, trained in turns, each tracked into a file of its own."""

    generator: Told
    critic: Told


def gan(rank: int) -> Gan:
    generator, critic = (
        DDP(Net("g", "unused"), find_unused_parameters=True),
        DDP(Net("c", "d"), find_unused_parameters=True),
    )
    of_generator, of_critic = sgd(generator), sgd(critic)
    with Both(generator, out="g.bin") as g, Both(critic, out="c.bin") as c:
        for step in range(4):
            # The critic's loss stops at the generator: no pass of the generator. On one rank it skips a layer in one step.
            c.backward(critic(generator(X, "g").detach(), *(["c"] if rank and step == 2 else [])).sum())
            of_critic.step()
            of_critic.zero_grad()
            c.end_step()
            # The generator's loss goes through the critic, whose parameters get gradients, too.
            with c.ref.backward_pass():
                g.backward(critic(generator(X, "g")).sum())
            of_generator.step()
            of_generator.zero_grad()
            g.end_step()
        own = g.cov.report(), c.cov.report()
    assert_agree(own[0], g.ref, rank)
    assert_agree(own[1], c.ref, rank)
    return Gan(*(Told(o, b.cov.report(), b.ref.missed()) for o, b in zip(own, (g, c), strict=True)))


def test_two_models_at_once(tmp_path: Path) -> None:
    ranks = run_ranks(gan, folder=tmp_path)
    results = [rank.result for rank in ranks]
    of_generator, of_critic = ddpcov.read(tmp_path / "g.bin"), ddpcov.read(tmp_path / "c.bin")
    assert {rank: missed(of_generator, rank) for rank in (0, 1)} == {
        0: {"unused.weight": [(0, 3)]},
        1: {"unused.weight": [(0, 3)]},
    }
    assert (of_generator.run.steps, of_generator.run.backward_passes) == (4, 4)
    # Its last pass came after its last step, and is a step.
    assert (of_critic.run.steps, of_critic.run.backward_passes) == (5, 8)
    assert {rank: missed(of_critic, rank) for rank in (0, 1)} == {rank: r.critic.missed for rank, r in enumerate(results)}


# What DDP can be told.


def accumulating(rank: int, flag: bool) -> Told:
    model = DDP(Net("a", "b"), find_unused_parameters=flag)
    optimizer = sgd(model)

    def train(run: Both) -> None:
        for step in range(3):
            for micro in range(3):
                with model.no_sync() if micro < 2 else nullcontext():
                    names = ["a"] if flag and step == 1 else ["b"] if micro == 0 else []
                    run.backward(model(X, *names).sum())
            optimizer.step()
            optimizer.zero_grad()
            run.end_step()

    return record(rank, model, train)


@pytest.mark.parametrize("flag", [True, False], ids=["flag", "no flag"])
def test_accumulation_without_synchronisation(tmp_path: Path, flag: bool) -> None:
    report = check(run_ranks(accumulating, args=[flag], folder=tmp_path), tmp_path)
    assert (report.run.steps, report.run.backward_passes) == (3, 9)
    assert missed(report, 0) == ({"b.weight": [(1, 1)]} if flag else {})
    assert ("a.weight",) in [f.parameters for f in report.findings if f.code == "DDC203"]
    assert report.advice.find_unused_parameters == ("on" if flag else "off")


class Embedding(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(5, 3, sparse=True)
        self.spare = layer()

    def forward(self, x: torch.Tensor, *names: str) -> torch.Tensor:
        return self.table(torch.tensor([0, 2])) + (self.spare(x) if names else x)


class Reentrant(Net):
    def forward(self, x: torch.Tensor, *names: str) -> torch.Tensor:
        out = checkpoint(super().forward, x.clone().requires_grad_(), *names, use_reentrant=True)
        assert isinstance(out, torch.Tensor)
        return out


def compiled(module: nn.Module) -> nn.Module:
    return torch.compile(module, backend="aot_eager")  # type: ignore[return-value]


SITUATIONS: dict[str, tuple[Callable[[], nn.Module], list[list[str]], Missed]] = {
    "static_graph": (lambda: DDP(Net("a", "b"), static_graph=True), [["a"]] * 4, {"b.weight": [(0, 3)]}),
    "gradient_as_bucket_view": (
        lambda: DDP(Net("a", "b"), gradient_as_bucket_view=True, find_unused_parameters=True),
        [["a"], ["b"], ["a", "b"]],
        {"a.weight": [(1, 1)], "b.weight": [(0, 0)]},
    ),
    "sparse": (
        lambda: DDP(Embedding(), find_unused_parameters=True),
        [[], ["spare"], []],
        {"spare.weight": [(0, 0), (2, 2)]},
    ),
    "reentrant": (lambda: DDP(Reentrant("a", "b")), [[]] * 3, {}),
    "compiled inside": (
        lambda: DDP(compiled(Net("a", "b")), find_unused_parameters=True),
        [["a"], ["a", "b"]],
        {"b.weight": [(0, 0)]},
    ),
    "compiled outside": (
        lambda: compiled(DDP(Net("a", "b"), find_unused_parameters=True)),
        [["a"], ["a", "b"]],
        {"b.weight": [(0, 0)]},
    ),
}


def in_situation(rank: int, name: str) -> Told:
    make, steps, _ = SITUATIONS[name]
    model = make()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return record(rank, model, each_step(model, optimizer, lambda step: steps[step], len(steps)))


@pytest.mark.parametrize("name", SITUATIONS)
def test_situations_of_ddp(tmp_path: Path, name: str) -> None:
    _, steps, expected = SITUATIONS[name]
    report = check(run_ranks(in_situation, args=[name], folder=tmp_path), tmp_path)
    assert report.run.steps == len(steps)
    assert report.run.wrapper.kind == "ddp"
    assert report.run.wrapper.static_graph == (name == "static_graph")
    assert {rank: missed(report, rank) for rank in (0, 1)} == {0: expected, 1: expected}
