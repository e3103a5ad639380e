"""`track(values=N)`: gradients that are exactly zero, and those that are not finite."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as DDP

import ddpcov
from ddpcov.values import Values
from multirank import run_ranks

X = torch.ones(2, 3)


class Net(nn.Module):
    """Two branches; the second counts by the factor it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(3, 3), nn.Linear(3, 3)

    def forward(self, x: Tensor, factor: float = 0.0) -> Tensor:
        return (self.a(x) + factor * self.b(x)).sum()


class LoRA(nn.Module):
    """A low-rank branch that begins at zero, named as PEFT names it."""

    def __init__(self) -> None:
        super().__init__()
        self.lora_A = nn.ModuleDict({"default": nn.Linear(3, 2, bias=False)})
        self.lora_B = nn.ModuleDict({"default": nn.Linear(2, 3, bias=False)})
        nn.init.zeros_(self.lora_B["default"].weight)  # type: ignore[arg-type]

    def forward(self, x: Tensor) -> Tensor:
        return self.lora_B["default"](self.lora_A["default"](x)).sum()


def train(
    model: nn.Module,
    losses: list[Callable[[nn.Module], Tensor]],
    *,
    every: int = 1,
    optimizer: torch.optim.Optimizer | None = None,
    **options: Any,
) -> ddpcov.Report:
    """A step for each loss; the report."""
    optimizer = optimizer or torch.optim.SGD(model.parameters(), lr=0.1)
    with ddpcov.track(model, values=every, **options) as cov:
        for loss in losses:
            loss(model).backward()
            optimizer.step()
            optimizer.zero_grad()
    return cov.report()


def zeros(report: ddpcov.Report) -> list[ddpcov.Finding]:
    return [f for f in report.findings if f.code == "DDC109"]


def usual(model: nn.Module) -> Tensor:
    return model(X)


def test_multiplied_by_zero() -> None:
    (finding,) = zeros(train(Net(), [usual] * 3))
    assert finding.parameters == ("b.bias", "b.weight")
    assert finding.severity == "warning" and finding.steps == ((0, 2),)
    assert "each of 3 sampled steps" in finding.message
    assert not finding.evidence


def test_zero_now_and_then_is_not_dead() -> None:
    assert not zeros(train(Net(), [usual, lambda m: m(X, 1.0), usual]))


def test_dead_relu() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.ReLU(), nn.Linear(3, 1))
    nn.init.constant_(model[0].bias, -100.0)  # type: ignore[arg-type]
    (finding,) = zeros(train(model, [lambda m: m(X).sum()] * 2))
    assert finding.parameters == ("0.bias", "0.weight", "2.weight")


def test_missed_is_not_zero() -> None:
    """What `zero_grad(set_to_none=False)` leaves is no gradient that arrived."""
    model = Net()
    for p in model.parameters():
        p.grad = torch.zeros_like(p)
    assert not zeros(train(model, [lambda m: m.a(X).sum()] * 2))


def test_cancelled_by_a_later_pass_is_not_zero() -> None:
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with ddpcov.track(model, optimizer=optimizer, values=1) as cov:
        model(X, 1.0).backward()
        (-model(X, 1.0)).backward()
        assert all(not p.grad.any() for p in model.parameters() if p.grad is not None)
        optimizer.step()
    assert not zeros(cov.report())


@pytest.mark.parametrize("num_steps", [1, 3])
def test_lora_is_not_dead(num_steps: int) -> None:
    report = train(LoRA(), [usual] * num_steps)
    assert not zeros(report)
    assert any("lora_A" in note for note in report.run.notes) == (num_steps == 1)


def test_lora_is_not_dead_in_the_passes_of_one_step() -> None:
    model = LoRA()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with ddpcov.track(model, values=1) as cov:
        for _ in range(3):
            usual(model).backward()
        optimizer.step()
    assert not zeros(cov.report())


def test_lora_is_dead_if_it_never_moves() -> None:
    model = LoRA()
    optimizer = torch.optim.SGD(model.lora_A.parameters(), lr=0.1)
    (finding,) = zeros(train(model, [usual] * 2, optimizer=optimizer))
    assert finding.parameters == ("lora_A.default.weight",)


class ZeroScale(nn.Module):
    """A residual branch that begins at zero, as normalisation layers with `zero_init_residual` make it."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(3, 3)
        self.scale = nn.Parameter(torch.zeros(3))

    def forward(self, x: Tensor) -> Tensor:
        return (x + self.scale * self.inner(x)).sum()


@pytest.mark.parametrize("num_steps", [1, 2])
def test_behind_a_scale_of_zero(num_steps: int) -> None:
    assert not zeros(train(ZeroScale(), [usual] * num_steps))


def test_zero_bias_explains_nothing() -> None:
    model = Net()
    nn.init.zeros_(model.a.bias)
    (finding,) = zeros(train(model, [usual]))
    assert finding.parameters == ("b.bias", "b.weight")
    assert "the one step that was sampled" in finding.message


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "decay": lambda p: torch.optim.SGD(p, lr=0.1, weight_decay=0.01),
    "adam": lambda p: torch.optim.Adam(p),
}


@pytest.mark.parametrize("kind", OPTIMIZERS)
@pytest.mark.parametrize("is_given", [True, False])
def test_optimizer_that_moves_it_all_the_same(kind: str, is_given: bool) -> None:
    model = Net()
    optimizer = OPTIMIZERS[kind](model.parameters())
    options = {"optimizer": optimizer}
    with ddpcov.track(model, values=1, **(options if is_given else {})) as cov:
        for _ in range(2):
            usual(model).backward()
            optimizer.step()
            optimizer.zero_grad()
    (finding,) = zeros(cov.report())
    assert "can move it all the same" in " ".join(finding.evidence)


def test_non_finite() -> None:
    report = train(Net(), [usual, lambda m: m(X, float("inf")), lambda m: m(X, float("nan"))])
    (note,) = report.run.notes
    assert note == "non-finite gradients in step 1 on rank 0: b.bias, b.weight"
    assert not zeros(report)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64, torch.complex64])
def test_types(dtype: torch.dtype) -> None:
    """Gradients too small for another type are not zero."""
    model = nn.Module()
    model.a, model.b = (nn.Parameter(torch.ones(3, dtype=dtype)) for _ in range(2))
    tiny = 1e-300 if dtype == torch.float64 else 6e-8
    report = train(model, [lambda m: (m.a * tiny + m.b * 0).abs().sum() if dtype.is_complex else (m.a * tiny + m.b * 0).sum()])
    assert [f.parameters for f in zeros(report)] == [("b",)]


def test_sparse_and_empty() -> None:
    model = nn.ModuleDict({"dead": nn.Embedding(4, 2, sparse=True), "live": nn.Embedding(4, 2, sparse=True)})
    model.register_parameter("empty", nn.Parameter(torch.empty(0, 2)))

    def loss(m: Any) -> Tensor:
        rows = torch.tensor([1, 1])
        return 0 * m["dead"](rows).sum() + m["live"](rows).sum() + m.empty.sum()

    assert [f.parameters for f in zeros(train(model, [loss] * 2))] == [("dead.weight",)]


@contextlib.contextmanager
def counted(name: str) -> Iterator[list[Any]]:
    """What a method of `Values` was called with."""
    calls: list[Any] = []
    original = getattr(Values, name)

    def counting(self: Values, *args: Any) -> Any:
        calls.append(args)
        return original(self, *args)

    setattr(Values, name, counting)
    try:
        yield calls
    finally:
        setattr(Values, name, original)


def test_cadence() -> None:
    with counted("_sample") as sampled, counted("_read") as read:
        (finding,) = zeros(train(Net(), [usual] * 7, every=3))
    assert sampled == [(0,), (3,), (6,)]
    assert len(read) == 3
    assert finding.steps == ((0, 0), (3, 3), (6, 6))
    assert "each of 3 sampled steps" in finding.message


def test_cadence_without_an_optimizer() -> None:
    """Each pass is a step; what was sampled is read when the next begins, and at the end."""
    model = Net()
    with counted("_sample") as sampled, counted("_read") as read, ddpcov.track(model, values=2) as cov:
        for number in range(5):
            usual(model).backward()
            assert len(read) == [0, 1, 1, 2, 2][number]
    assert sampled == [(0,), (2,), (4,)] and len(read) == 3
    assert len(zeros(cov.report())) == 1


def test_several_passes_of_a_step_are_read_once() -> None:
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with counted("_read") as read, ddpcov.track(model, optimizer=optimizer, values=1) as cov:
        for _ in range(2):
            for _ in range(3):
                usual(model).backward()
            assert len(read) < 3
            optimizer.step()
            optimizer.zero_grad()
    assert len(read) == 2
    assert "each of 2 sampled steps" in zeros(cov.report())[0].message


@pytest.mark.parametrize("where", ["before", "after"])
def test_crash_keeps_the_sample(tmp_path: Path, where: str) -> None:
    """Before the optimizer steps, or after that."""
    model, out = Net(), tmp_path / "run.bin"
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(ZeroDivisionError) as raised, ddpcov.track(model, out=out, values=1):
        usual(model).backward()
        if where == "after":
            optimizer.step()
        raise ZeroDivisionError
    (finding,) = zeros(ddpcov.read(out))
    assert finding.parameters == ("b.bias", "b.weight")
    assert not hasattr(raised.value, "__notes__")  # nothing was missed


def test_breakdown_leaves_coverage(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ddpcov.values._largest", lambda tensors: 1 / 0)
    report = train(Net(), [usual] * 3)
    assert capfd.readouterr().err.count("values: no longer observed") == 1
    assert report.totals.covered == 4 and not zeros(report)
    assert any("ZeroDivisionError" in note for note in report.run.notes)


def test_names_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ddpcov.values._MAX_NAMES", 1)
    report = train(Net(), [usual] * 2)
    assert [f.parameters for f in zeros(report)] == [("b.bias",)]
    assert any("only the first 1 names were kept" in note for note in report.run.notes)


@pytest.mark.parametrize("every", [0, -1, True, 1.5, "1"])
@pytest.mark.parametrize("option", ["values", "sync_check"])
def test_wrong_values(option: str, every: Any) -> None:
    with pytest.raises(ValueError, match=f"{option}=.*: expected a number of steps"):
        ddpcov.track(Net(), **{option: every})


# On two ranks.


def on_ranks(rank: int) -> None:
    torch.manual_seed(rank)
    model = DDP(Net())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with ddpcov.track(model, out="run.bin", values=1) as cov:
        for _ in range(3):
            model(torch.randn(2, 3)).backward()
            optimizer.step()
            optimizer.zero_grad()
    assert len(cov.report().run.ranks) == (2 if rank == 0 else 1)


def test_on_ranks(tmp_path: Path) -> None:
    for rank in run_ranks(on_ranks, folder=tmp_path):
        assert rank.code == 0 and not rank.said, rank.stderr
    report = ddpcov.read(tmp_path / "run.bin")
    (finding,) = zeros(report)
    assert finding.ranks == (0, 1) and finding.parameters == ("b.bias", "b.weight")
    json.dumps(report.to_dict())


class Sharded(nn.Module):
    """The gradient of `part` is zero in the rows that one rank holds, that of `dead` everywhere; `single` fits one rank."""

    def __init__(self) -> None:
        super().__init__()
        self.part, self.dead = nn.Linear(3, 4, bias=False), nn.Linear(3, 4, bias=False)
        self.single = nn.Parameter(torch.ones(1))

    def forward(self, x: Tensor) -> Tensor:
        mask = torch.tensor([1.0, 1.0, 0.0, 0.0])
        return (self.part(x) * mask).sum() + 0 * self.dead(x).sum() + self.single.sum()


def sharded(rank: int) -> None:
    from torch.distributed.fsdp import fully_shard

    model = Sharded()
    fully_shard(model)
    train(model, [usual] * 2, out="run.bin", sync_check=1)


@pytest.mark.skipif(torch.__version__ < (2, 6), reason="fully_shard needs a GPU there")
def test_sharded_gradients(tmp_path: Path) -> None:
    ranks = run_ranks(sharded, folder=tmp_path)
    assert [rank.code for rank in ranks] == [0, 0], ranks
    assert [len(rank.said) for rank in ranks] == [1, 0] and "sync_check: not made" in ranks[0].stderr
    (finding,) = zeros(ddpcov.read(tmp_path / "run.bin"))
    assert finding.parameters == ("dead.weight",) and finding.ranks == (0, 1)
