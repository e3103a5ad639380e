"""What goes wrong between a model and its DDP, made by real runs on two ranks whose data differ.

Each scenario says after every step whether the gradients are the same on both ranks, so that what ddpcov finds can be held
against what happened.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as DDP

import ddpcov
from multirank import run_ranks


class Net(nn.Module):
    """A trunk and branches, each an output."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk, self.a, self.b = nn.Linear(3, 3), nn.Linear(3, 2), nn.Linear(3, 2)

    def forward(self, x: Tensor, *names: str) -> Tensor:
        x = torch.tanh(self.trunk(x))
        return torch.stack([self.get_submodule(name)(x) for name in names or ("a", "b")]).square()


class Apart(Net):
    """Branches that share nothing."""

    def forward(self, x: Tensor, *names: str) -> tuple[Tensor, ...]:  # type: ignore[override]
        return tuple(self.get_submodule(name)(x).square() for name in ("trunk", "a", "b"))


class Run:
    """A model on one rank, what it is trained with, and whether the ranks agreed after each step."""

    def __init__(self, model: nn.Module, **options: Any) -> None:
        self.ddp: Any = DDP(model, **options)
        self.optimizer = torch.optim.SGD(self.ddp.parameters(), lr=0.01)
        self.agreed: list[bool] = []

    def end_step(self, *models: nn.Module) -> None:
        own = [p for m in models or (self.ddp,) for p in m.parameters()]
        grads = torch.cat([torch.zeros_like(p).flatten() if p.grad is None else p.grad.flatten() for p in own])
        other = grads.clone()
        dist.broadcast(other, 0)
        differs = torch.tensor(float(not torch.equal(grads, other)))
        dist.all_reduce(differs)
        self.agreed.append(not differs.item())
        self.optimizer.step()
        self.optimizer.zero_grad()


class Case(NamedTuple):
    run: Callable[[int, Path], list[bool]]
    codes: set[str]


CASES: dict[str, Case] = {}


def case(*codes: str) -> Callable[[Callable[[int, Path], list[bool]]], None]:
    def add(run: Callable[[int, Path], list[bool]]) -> None:
        CASES[run.__name__] = Case(run, set(codes))

    return add


def x() -> Tensor:
    return torch.randn(4, 3)


@contextlib.contextmanager
def tracking(run: Run, out: Path, model: Any = None) -> Iterator[None]:
    with contextlib.suppress(RuntimeError), ddpcov.track(run.ddp if model is None else model, out=out, optimizer=run.optimizer):
        yield


# Past the wrapper, or past what it prepared.


@case("DDC304")
def inner_module(rank: int, out: Path) -> list[bool]:
    run = Run(Net())
    with tracking(run, out):
        for _ in range(2):
            with torch.no_grad():
                run.ddp(x())
            run.ddp.module(x()).sum().backward()
            run.end_step()
    return run.agreed


@case("DDC304")
def inner_module_after_a_usual_step(rank: int, out: Path) -> list[bool]:
    run = Run(Net())
    with tracking(run, out):
        run.ddp(x()).sum().backward()
        run.end_step()
        run.ddp.module(x()).sum().backward()
        run.end_step()
    return run.agreed


@case("DDC304")
def second_backward(rank: int, out: Path) -> list[bool]:
    run = Run(Net())
    with tracking(run, out):
        for _ in range(2):
            loss = run.ddp(x()).sum()
            loss.backward(retain_graph=True)
            loss.backward()
            run.end_step()
    return run.agreed


@case("DDC304")
def two_forwards_two_backwards(rank: int, out: Path) -> list[bool]:
    run = Run(Net())
    with tracking(run, out):
        for _ in range(2):
            one, other = run.ddp(x()).sum(), run.ddp(x()).sum()
            one.backward()
            other.backward()
            run.end_step()
    return run.agreed


@case("DDC100", "DDC304")
def second_backward_with_unused(rank: int, out: Path) -> list[bool]:
    run = Run(Net(), find_unused_parameters=True)
    with tracking(run, out):
        for _ in range(2):
            loss = run.ddp(x(), "a").sum()
            loss.backward(retain_graph=True)
            loss.backward()
            run.end_step()
    return run.agreed


@case("DDC203", "DDC304")
def one_of_two_wrappers(rank: int, out: Path) -> list[bool]:
    both = nn.ModuleDict({"g": DDP(Net()), "d": DDP(Net())})
    run = Run(Net())
    run.optimizer = torch.optim.SGD(both.parameters(), lr=0.01)
    with tracking(run, out, both):
        for _ in range(2):
            both["g"](x()).sum().backward()
            both["d"].module(x()).sum().backward()
            run.end_step(both)
    return run.agreed


# Nothing is lost.


@case()
def usual(rank: int, out: Path) -> list[bool]:
    run = Run(Net())
    with tracking(run, out):
        for _ in range(3):
            run.ddp(x()).sum().backward()
            run.end_step()
    return run.agreed


@case()
def forward_called_directly(rank: int, out: Path) -> list[bool]:
    run = Run(Net())
    with tracking(run, out):
        for _ in range(2):
            run.ddp.forward(x()).sum().backward()
            run.end_step()
    return run.agreed


@case()
def accumulation(rank: int, out: Path) -> list[bool]:
    run = Run(Net())
    with tracking(run, out):
        for _ in range(2):
            with run.ddp.no_sync():
                for _ in range(2):
                    run.ddp(x()).sum().backward()
            run.ddp(x()).sum().backward()
            run.end_step()
    return run.agreed


@case()
def forward_before_the_block(rank: int, out: Path) -> list[bool]:
    run = Run(Net())
    loss = run.ddp(x()).sum()
    with tracking(run, out):
        loss.backward()
        run.end_step()
    return run.agreed


@case()
def two_forwards_one_backward(rank: int, out: Path) -> list[bool]:
    run = Run(Net())
    with tracking(run, out):
        for _ in range(2):
            (run.ddp(x()) + run.ddp(x())).sum().backward()
            run.end_step()
    return run.agreed


@case()
def no_grad_between(rank: int, out: Path) -> list[bool]:
    run = Run(Net())
    with tracking(run, out):
        for _ in range(2):
            loss = run.ddp(x()).sum()
            run.ddp.eval()
            with torch.no_grad():
                run.ddp(x())
            run.ddp.train()
            loss.backward()
            run.end_step()
    return run.agreed


@case()
def made_good(rank: int, out: Path) -> list[bool]:
    run = Run(Net())
    with tracking(run, out):
        for _ in range(2):
            run.ddp.module(x()).sum().backward()
            run.ddp(x()).sum().backward()  # averages what has accumulated
            run.end_step()
    return run.agreed


@case("DDC203")
def losses_apart(rank: int, out: Path) -> list[bool]:
    run = Run(Apart())
    with tracking(run, out):
        for _ in range(2):
            for output in run.ddp(x()):
                output.sum().backward()
            run.end_step()
    return run.agreed


@case("DDC100", "DDC201")
def two_wrappers(rank: int, out: Path) -> list[bool]:
    generator, critic = DDP(nn.Linear(3, 3)), DDP(nn.Linear(3, 1))
    both = nn.ModuleList([generator, critic])
    run = Run(Net())
    run.optimizer = torch.optim.SGD(both.parameters(), lr=0.01)
    with tracking(run, out, both):
        for _ in range(3):
            fake = generator(x())  # prepared, and not touched by the first pass
            (critic(x()) + critic(fake.detach())).square().sum().backward()
            run.end_step(both)
            critic(fake).sum().backward()
            run.end_step(both)
    return run.agreed


@case()
def compiled(rank: int, out: Path) -> list[bool]:
    run = Run(Net())
    model = torch.compile(run.ddp, backend="eager")
    with tracking(run, out, model):
        for _ in range(2):
            model(x()).sum().backward()
            run.end_step()
    return run.agreed


# The reduction was left unfinished.


@case("DDC100", "DDC201", "DDC310")
def silent_in_the_last_step(rank: int, out: Path) -> list[bool]:
    run = Run(Net())
    with tracking(run, out):
        for names in (), (), ("a",):
            run.ddp(x(), *names).sum().backward()
            run.end_step()
    return run.agreed


@case("DDC100", "DDC310")
def raised_at_the_next_forward(rank: int, out: Path) -> list[bool]:
    run = Run(Net())
    with tracking(run, out):
        for _ in range(3):
            run.ddp(x(), "a").sum().backward()
            run.end_step()
    return run.agreed


@case("DDC303", "DDC310", "DDC401", "DDC403")
def replaced_without_the_flag(rank: int, out: Path) -> list[bool]:
    run = Run(Net())
    run.ddp.module.b = nn.Linear(3, 2)
    with tracking(run, out):
        for _ in range(3):
            run.ddp(x()).sum().backward()
            run.end_step()
    return run.agreed


# The graph that was promised.


@case("DDC100", "DDC201", "DDC308")
def static_graph_changed(rank: int, out: Path) -> list[bool]:
    run = Run(Net(), static_graph=True)
    with tracking(run, out):
        for names in (), (), ("a",):
            run.ddp(x(), *names).sum().backward()
            run.end_step()
    return run.agreed


@case("DDC100")
def static_graph_never_used(rank: int, out: Path) -> list[bool]:
    run = Run(Net(), static_graph=True)
    with tracking(run, out):
        for _ in range(4):
            run.ddp(x(), "a").sum().backward()
            run.end_step()
    return run.agreed


# What the optimizer holds.


@case("DDC303", "DDC401", "DDC403")
def replaced_later(rank: int, out: Path) -> list[bool]:
    run = Run(Net(), find_unused_parameters=True)
    with tracking(run, out):
        for step in range(3):
            if step == 1:
                run.ddp.module.b = nn.Linear(3, 2)
            run.ddp(x()).sum().backward()
            run.end_step()
    return run.agreed


@case()
def another_model_in_the_optimizer(rank: int, out: Path) -> list[bool]:
    run = Run(Net())
    other = nn.Linear(3, 3)
    run.optimizer.add_param_group({"params": list(other.parameters())})
    with tracking(run, out):
        for _ in range(2):
            (run.ddp(x()).sum() + other(x()).sum()).backward()
            run.end_step()
    return run.agreed


# And what was found.


def run_all(rank: int, names: list[str]) -> dict[str, list[bool]]:
    torch.manual_seed(rank)
    return {name: CASES[name].run(rank, Path(f"{name}.bin")) for name in names}


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, list[bool]]]:
    folder = tmp_path_factory.mktemp("wrapper")
    ranks = run_ranks(run_all, 2, [list(CASES)], folder=folder, time_limit=120)
    return folder, ranks[0].result


def found(runs: tuple[Path, Any], name: str, code: str) -> ddpcov.Finding:
    (finding,) = (f for f in ddpcov.read(runs[0] / f"{name}.bin").findings if f.code == code)
    return finding


CAUSES = {"DDC101", "DDC102", "DDC103", "DDC104", "DDC105", "DDC106"}  # say why, in place of DDC100, where it is known


@pytest.mark.parametrize("name", CASES)
def test_codes(runs: tuple[Path, Any], name: str) -> None:
    codes = {f.code for f in ddpcov.read(runs[0] / f"{name}.bin").findings}
    assert {"DDC100" if code in CAUSES else code for code in codes} == CASES[name].codes


LOCAL = {"DDC303", "DDC304", "DDC308", "DDC310"}


@pytest.mark.parametrize("name", CASES)
def test_what_is_found_is_what_happened(runs: tuple[Path, dict[str, list[bool]]], name: str) -> None:
    steps = {
        step
        for f in ddpcov.read(runs[0] / f"{name}.bin").findings
        if f.code in LOCAL
        for first, last in f.steps
        for step in range(first, last + 1)
    }
    assert steps == {step for step, agreed in enumerate(runs[1][name]) if not agreed}


def test_who_and_when(runs: tuple[Path, Any]) -> None:
    everything = ("a.bias", "a.weight", "b.bias", "b.weight", "trunk.bias", "trunk.weight")
    for name, steps in {"inner_module": (0, 1), "inner_module_after_a_usual_step": (1, 1), "second_backward": (0, 1)}.items():
        f = found(runs, name, "DDC304")
        assert (f.parameters, f.ranks, f.steps, f.severity) == (everything, (0, 1), (steps,), "error")
        assert "ddp(x), not ddp.module(x)" in f.fix
    assert found(runs, "one_of_two_wrappers", "DDC304").parameters == tuple(f"d.{name}" for name in everything)
    b = ("b.bias", "b.weight")
    for name, code, steps in [
        ("silent_in_the_last_step", "DDC310", (2, 2)),
        ("raised_at_the_next_forward", "DDC310", (0, 0)),
        ("static_graph_changed", "DDC308", (2, 2)),
    ]:
        f = found(runs, name, code)
        assert (f.parameters, f.ranks, f.steps, f.severity) == (b, (0, 1), (steps,), "error")


def test_an_unfinished_reduction_says_what_followed(runs: tuple[Path, Any]) -> None:
    assert "no error follows" in " ".join(found(runs, "silent_in_the_last_step", "DDC310").evidence)
    assert "Expected to have finished reduction" in " ".join(found(runs, "raised_at_the_next_forward", "DDC310").evidence)
    gone = found(runs, "replaced_without_the_flag", "DDC310")
    assert gone.parameters == () and "2 tensors no longer in the model" in gone.message


def test_what_the_optimizer_holds(runs: tuple[Path, Any]) -> None:
    later = found(runs, "replaced_later", "DDC403")
    assert later.parameters == ("b.bias", "b.weight") and "once b.weight" in later.evidence[0]
    before = found(runs, "replaced_without_the_flag", "DDC403")
    assert before.parameters == () and "group 0, index 4: shape (2, 3)" in before.evidence[0]
    assert before.severity == "error"
