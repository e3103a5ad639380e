"""`track(sync_check=N)`: gradients that are not equal on all ranks when an optimizer is about to step."""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as DDP

import ddpcov
from ddpcov import ranks as ddpcov_ranks
from ddpcov.gradsync import GradSync, fingerprints
from multirank import Rank, count_collectives, run_ranks


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(3, 3), nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.b(torch.tanh(self.a(x))).square().mean()


def no_change(model: nn.Module, step: int) -> None:
    pass


def train(
    model: nn.Module,
    num_steps: int = 3,
    *,
    every: int = 1,
    before_step: Callable[[nn.Module, int], None] = no_change,
    optimizers: list[torch.optim.Optimizer] | None = None,
    **options: Any,
) -> None:
    torch.manual_seed(dist.get_rank())
    optimizers = optimizers or [torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)]
    with ddpcov.track(model, out="run.bin", sync_check=every, **options):
        for step in range(num_steps):
            model(torch.randn(4, 3)).backward()
            before_step(model, step)
            for optimizer in optimizers:
                optimizer.step()
            for optimizer in optimizers:
                optimizer.zero_grad()


def run(function: Callable[..., Any], folder: Path, world_size: int = 2, *args: Any) -> ddpcov.Report:
    """Runs it on ranks that have nothing to complain of."""
    for rank in run_ranks(function, world_size, args, folder=folder):
        assert rank.code == 0 and not rank.said, rank.stderr
    return ddpcov.read(folder / "run.bin")


def differing(report: ddpcov.Report) -> list[ddpcov.Finding]:
    return [f for f in report.findings if f.code == "DDC309"]


# Equal.


def averaged(rank: int) -> None:
    called = count_collectives()
    train(DDP(Net()))
    assert called.count("all_reduce") == 1 and "all_gather" not in called  # that of the clean exit


def test_averaged(tmp_path: Path) -> None:
    report = run(averaged, tmp_path)
    assert not report.findings and not report.run.notes


def by_hand(rank: int) -> None:
    def average(model: nn.Module, step: int) -> None:
        for p in model.parameters():
            dist.all_reduce(p.grad)

    torch.manual_seed(0)
    train(Net(), before_step=average)


def test_averaged_by_hand(tmp_path: Path) -> None:
    assert not run(by_hand, tmp_path).findings


def ignored(rank: int) -> None:
    net = Net()
    DDP._set_params_and_buffers_to_ignore_for_model(net, ["b.weight"])
    train(DDP(net))


def test_ignored_by_the_wrapper(tmp_path: Path) -> None:
    assert not differing(run(ignored, tmp_path))


def missing_on_one(rank: int) -> None:
    def drop(model: nn.Module, step: int) -> None:
        if rank:
            model.module.a.weight.grad = None

    train(DDP(Net()), before_step=drop)


def test_defined_on_some_ranks_only(tmp_path: Path) -> None:
    assert not differing(run(missing_on_one, tmp_path))


def sharded_optimizer(rank: int) -> None:
    """An optimizer inside another one, which holds other parameters on each rank."""
    from torch.distributed.optim import ZeroRedundancyOptimizer

    model = DDP(Net())
    train(model, optimizers=[ZeroRedundancyOptimizer(model.parameters(), torch.optim.SGD, lr=0.1)])


def test_optimizer_that_shards_its_state(tmp_path: Path) -> None:
    report = run(sharded_optimizer, tmp_path)
    assert not differing(report) and not report.run.notes


def alone(rank: int) -> None:
    train(Net())


def test_alone(tmp_path: Path) -> None:
    assert not run(alone, tmp_path, 1).findings


# Not equal.


def thawed(rank: int) -> None:
    net = Net()
    net.a.requires_grad_(False)
    model = DDP(net)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)

    def thaw(model: nn.Module, step: int) -> None:
        if step == 0:
            net.a.requires_grad_(True)

    train(model, before_step=thaw, optimizers=[optimizer])


def test_thawed_after_wrap(tmp_path: Path) -> None:
    report = run(thawed, tmp_path)
    assert {f.code for f in report.findings} == {"DDC302", "DDC309"}
    (finding,) = differing(report)
    assert finding.parameters == ("a.bias", "a.weight")
    assert finding.ranks == (0, 1) and finding.steps == ((1, 1),) and finding.severity == "error"
    assert finding.evidence == ("DDC302 explains it",)


def clipped(rank: int) -> None:
    def clip(model: Any, step: int) -> None:
        if step >= 1:
            nn.utils.clip_grad_norm_(model.module.a.parameters(), 1e-3 * (1 + rank))

    train(DDP(Net()), 4, before_step=clip)


def test_clipped_by_rank(tmp_path: Path) -> None:
    report = run(clipped, tmp_path)
    (finding,) = report.findings
    assert finding.code == "DDC309" and finding.parameters == ("a.bias", "a.weight")
    assert finding.steps == ((1, 1),)
    assert "one on rank 0, another on rank 1" in finding.message
    assert "clipping" in finding.evidence[0]


def one_of_three(rank: int) -> None:
    def change(model: Any, step: int) -> None:
        if rank == 1 and step == 2:
            model.module.b.bias.grad[2] += 1e-6
        if step == 3:
            model.module.a.bias.grad += rank

    train(DDP(Net()), 4, before_step=change)


def test_one_of_three(tmp_path: Path) -> None:
    findings = differing(run(one_of_three, tmp_path, 3))
    assert [(f.parameters, f.steps) for f in findings] == [(("a.bias",), ((3, 3),)), (("b.bias",), ((2, 2),))]
    assert "one on rank 0, another on rank 1, another on rank 2" in findings[0].message
    assert "one on rank 0, 2, another on rank 1." in findings[1].message


def unknown_to_anyone(rank: int) -> None:
    torch.manual_seed(0)
    train(Net())


def test_no_wrapper(tmp_path: Path) -> None:
    (finding,) = differing(run(unknown_to_anyone, tmp_path))
    assert len(finding.parameters) == 4 and "no wrapper" in finding.evidence[0]


def dead(rank: int) -> None:
    class Dead(Net):
        def __init__(self) -> None:
            super().__init__()
            self.dead = nn.Linear(3, 3)

    train(DDP(Dead()), 1)


def test_unsynchronised_pass_explains_it(tmp_path: Path) -> None:
    (finding,) = differing(run(dead, tmp_path))
    assert len(finding.parameters) == 4 and finding.evidence == ("DDC310 explains it",)


def several_optimizers(rank: int) -> None:
    def change(model: Any, step: int) -> None:
        model.module.b.bias.grad += rank

    model = DDP(Net())
    train(
        model, before_step=change, optimizers=[torch.optim.SGD(part.parameters(), lr=0.1) for part in model.module.children()]
    )


def test_several_optimizers(tmp_path: Path) -> None:
    (finding,) = differing(run(several_optimizers, tmp_path))
    assert finding.parameters == ("b.bias",) and finding.steps == ((0, 0),)


def skipped_by_a_scaler(rank: int) -> None:
    """One rank's local gradient overflows, so that its scaler alone skips the step."""
    net = Net()
    net.a.requires_grad_(False)
    model = DDP(net)
    net.a.requires_grad_(True)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
    with ddpcov.track(model, out="run.bin", sync_check=1):
        for step in range(3):
            scaler.scale(model(torch.randn(4, 3))).backward()
            if rank == 1 and step == 1:
                net.a.bias.grad.fill_(float("inf"))  # type: ignore[union-attr]
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()


def test_step_skipped_on_one_rank(tmp_path: Path) -> None:
    start = time.monotonic()
    report = run(skipped_by_a_scaler, tmp_path)
    assert time.monotonic() - start < 20
    assert "a.bias" in {n for f in differing(report) for n in f.parameters}


def counted_checks(rank: int) -> int:
    calls = []
    original = GradSync._check

    def counting(self: GradSync, optimizer: torch.optim.Optimizer, step: int) -> None:
        calls.append(step)
        original(self, optimizer, step)

    GradSync._check = counting  # type: ignore[method-assign]
    train(DDP(Net()), 7, every=3)
    assert calls == [0, 3, 6]
    return len(calls)


def test_cadence(tmp_path: Path) -> None:
    assert not run(counted_checks, tmp_path).findings


# Ranks that do not come.


def more_steps(rank: int, how: str) -> float:
    """Rank 0 takes a step more than rank 1, which leaves, or goes on without steps."""
    ddpcov_ranks.ROUND_TIMEOUT = timedelta(seconds=4 if how == "stays" else 25)
    torch.manual_seed(0)
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    start = time.monotonic()
    with ddpcov.track(model, out="run.bin", sync_check=1):
        for _ in range(4 if rank == 0 else 2):
            model(torch.ones(4, 3)).backward()
            optimizer.step()
            optimizer.zero_grad()
        if how == "stays":
            dist.barrier()
    return time.monotonic() - start


@pytest.mark.parametrize("how", ["leaves", "stays"])
def test_a_rank_with_fewer_steps(tmp_path: Path, how: str) -> None:
    ranks = run_ranks(more_steps, args=[how], folder=tmp_path)
    assert all(rank.result < 15 for rank in ranks)  # where one leaves, the other is told
    said = [line for rank in ranks for line in rank.said]
    assert len(said) == 1 and "gradients are no longer compared" in said[0]
    report = ddpcov.read(tmp_path / "run.bin")
    assert report.run.steps == 4 and not differing(report)
    assert any("compared 2 times" in note for note in report.run.notes)


def other_parameters(rank: int) -> None:
    model = nn.ModuleDict({f"only{rank}": Net()})
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with ddpcov.track(model, out="run.bin", sync_check=1, same_parameters=False):
        for _ in range(3):
            model[f"only{rank}"](torch.ones(4, 3)).backward()
            optimizer.step()


def test_ranks_with_other_parameters(tmp_path: Path) -> None:
    ranks = run_ranks(other_parameters, folder=tmp_path)
    assert [rank.code for rank in ranks] == [0, 0]
    (said,) = [line for rank in ranks for line in rank.said]
    assert "hold different parameters" in said


def fails(rank: int) -> float:
    start = time.monotonic()
    try:
        train(DDP(Net()), before_step=lambda model, step: 1 // (step * rank - 1) and None)  # on rank 1 in step 1
    except ZeroDivisionError:
        return -1.0
    except RuntimeError:
        pass
    return time.monotonic() - start


def test_a_rank_that_fails(tmp_path: Path) -> None:
    first, second = run_ranks(fails, folder=tmp_path)
    assert second.result == -1.0
    assert isinstance(first, Rank) and first.result < 10


def breaks_down(rank: int) -> None:
    if rank == 1:
        GradSync._held_by = lambda self, optimizer: [] * (1 // 0)  # type: ignore[method-assign]
    train(DDP(Net()))


def test_breakdown_leaves_coverage(tmp_path: Path) -> None:
    ranks = run_ranks(breaks_down, folder=tmp_path)
    assert [rank.code for rank in ranks] == [0, 0], ranks
    assert sum(len(rank.said) for rank in ranks) == 1
    assert ddpcov.read(tmp_path / "run.bin").totals.covered == 4


# Fingerprints.


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.complex64])
def test_fingerprints(dtype: torch.dtype) -> None:
    tensor = torch.randn(7, 50, dtype=dtype)
    (own,) = fingerprints([tensor])
    assert fingerprints([tensor.clone(), None, tensor.t().contiguous().t()]) == [own, None, own]
    swapped, changed = tensor.clone(), tensor.clone()
    swapped[0, 0], swapped[0, 1] = tensor[0, 1], tensor[0, 0]
    changed[6, 49] *= 1.01
    assert own not in fingerprints([swapped, changed, -tensor, tensor.flip(0), tensor[:6]])


def test_fingerprints_do_not_depend_on_neighbours(monkeypatch: pytest.MonkeyPatch) -> None:
    tensors = [torch.randn(size) for size in (5, 0, 300, 1, 64, 1000)]
    monkeypatch.setattr("ddpcov.gradsync._CPU_CHUNK", 256)
    assert fingerprints(tensors) == [own for t in tensors for own in fingerprints([t])]


def test_fingerprints_of_zeros_and_sparse() -> None:
    assert fingerprints([torch.zeros(3), torch.tensor([0.0, -0.0, 0.0])]) == [0, 0]
    indices = torch.tensor([[0, 2, 2]])
    sparse = torch.sparse_coo_tensor(indices, torch.randn(3, 2), (4, 2), check_invariants=True)
    own, coalesced, other = fingerprints([sparse, sparse.coalesce(), 2 * sparse])
    assert own == coalesced != other
