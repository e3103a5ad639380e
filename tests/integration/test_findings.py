"""Every finding that this version can make, made by a real run; and runs in which there is nothing to find."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.checkpoint import checkpoint

import ddpcov
from ddpcov import ranks as ddpcov_ranks
from ddpcov.diagnosis.codes import SLUGS
from multirank import run_ranks
from reference import Net, layer, sgd

X = torch.ones(2, 3)


class Case(NamedTuple):
    """A run, on so many ranks, and all that may be found in it."""

    run: Callable[[int, Path], None]
    codes: set[str]
    advice: str
    world_size: int = 1


CASES: dict[str, Case] = {}


def case(advice: str, *codes: str, world_size: int = 1) -> Callable[[Callable[[int, Path], None]], None]:
    def add(run: Callable[[int, Path], None]) -> None:
        CASES[run.__name__] = Case(run, set(codes), advice, world_size)

    return add


@contextlib.contextmanager
def training(model: nn.Module, out: Path, **options: Any) -> Iterator[Callable[..., None]]:
    """Gives a function that makes a step: a pass for each of the given lists of layers. Errors end the block, no more."""
    optimizer = sgd(model)

    def step(*passes: list[str]) -> None:
        for names in passes or ([],):
            model(X, *names).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    with contextlib.suppress(RuntimeError), ddpcov.track(model, out=out, **options):
        yield step


def ddp(*names: str, **options: Any) -> DDP:
    return DDP(Net(*names), **options)


# What is missed, when and where.


@case("off", "DDC101")
def never(rank: int, out: Path) -> None:
    with training(ddp("a", "b", "c", find_unused_parameters=True), out) as step:
        for _ in range(3):
            step(["a"])


@case("off", "DDC101", "DDC310")
def never_without_the_flag(rank: int, out: Path) -> None:
    with training(ddp("a", "b"), out) as step:
        step(["a"])
        step(["a"])


@case("not-applicable", "DDC101")
def never_without_a_wrapper(rank: int, out: Path) -> None:
    with training(Net("a", "b"), out) as step:
        step(["a"])


@case("on", "DDC101", "DDC201")
def some_steps(rank: int, out: Path) -> None:
    with training(ddp("a", "b", find_unused_parameters=True), out) as step:
        for names in ["a"], [], ["a"]:
            step(names)


@case("on", "DDC101", "DDC202", world_size=2)
def some_ranks(rank: int, out: Path) -> None:
    with training(ddp("a", "b", find_unused_parameters=True), out) as step:
        step([])
        step(["a"] if rank else ["a", "b"])


@case("not-applicable", "DDC203")
def some_passes(rank: int, out: Path) -> None:
    with training(Net("a", "b"), out) as step:
        step(["a"], [])
        step([], ["a"])


@case("cannot-help", "DDC107", "DDC201")
def idle(rank: int, out: Path) -> None:
    model = ddp("a", find_unused_parameters=True)
    optimizer = sgd(model)
    with training(model, out) as step:
        step()
        torch.zeros((), requires_grad=True).backward()
        optimizer.step()


# The wrapper.


@case("off", "DDC203")
def two_wrappers_in_turn(rank: int, out: Path) -> None:
    net = nn.ModuleDict({"generator": DDP(Net("a")), "critic": DDP(Net("b"))})
    generator, critic = net["generator"], net["critic"]
    optimizer = sgd(net)
    with ddpcov.track(net, out=out):
        for _ in range(2):
            made = generator(X, "a")
            critic(made.detach(), "b").sum().backward()
            critic.requires_grad_(False)
            critic(made, "b").sum().backward()
            critic.requires_grad_(True)
            optimizer.step()
            optimizer.zero_grad()


@case("off", "DDC301")
def frozen_after_wrap(rank: int, out: Path) -> None:
    model = ddp("a", "b", find_unused_parameters=True)
    model.module.b.requires_grad_(False)
    with training(model, out) as step:
        step()
        step()


@case("off", "DDC302")
def thawed_after_wrap(rank: int, out: Path) -> None:
    net = Net("a", "b")
    net.b.requires_grad_(False)
    model = DDP(net)
    with training(model, out) as step:
        step()
        net.b.requires_grad_(True)
        step()


@case("off", "DDC303")
def replaced_after_wrap(rank: int, out: Path) -> None:
    model = ddp("a", "b", find_unused_parameters=True)
    model.module.b = layer()
    with training(model, out) as step:
        step()
        step()


class Checkpointed(Net):
    """A reentrant checkpoint round each call of the same layer."""

    def forward(self, x: torch.Tensor, *names: str) -> torch.Tensor:
        x = self.first(x.clone().requires_grad_())
        for name in names:
            x = checkpoint(self.get_submodule(name), x, use_reentrant=True)  # type: ignore[assignment]
        return x


@case("cannot-help", "DDC306", "DDC501")
def accumulated_twice(rank: int, out: Path) -> None:
    with training(DDP(Checkpointed("first", "a")), out) as step:
        step(["a", "a"])


@case("cannot-help", "DDC306")
def accumulated_twice_unnoticed(rank: int, out: Path) -> None:
    net = Checkpointed("first", "a")
    net.first = nn.Identity()
    with training(DDP(net), out) as step:  # DDP is done after the first of the two
        step(["a", "a"])


@case("cannot-help", "DDC306", "DDC501")
def unused_and_reached(rank: int, out: Path) -> None:
    with training(DDP(Checkpointed("first", "a"), find_unused_parameters=True), out) as step:
        step(["a"])


@case("off", "DDC307")
def needless_flag(rank: int, out: Path) -> None:
    with training(ddp("a", "b", find_unused_parameters=True), out) as step:
        step()
        step()


# The optimizer.


@case("not-applicable", "DDC401")
def not_in_optimizer(rank: int, out: Path) -> None:
    model = Net("a", "b")
    optimizer = sgd(model.a)
    with training(model, out, optimizer=optimizer):
        model.loss().backward()
        optimizer.step()


# The capture.


@case("not-applicable", "DDC501")
def ended_inside_a_pass(rank: int, out: Path) -> None:
    model = Net("a", "b")
    with contextlib.suppress(ZeroDivisionError), training(model, out) as step:
        step()
        model.a.weight.register_hook(lambda gradient: 1 / 0)
        step()


@case("not-applicable", "DDC502", world_size=2)
def rank_missing(rank: int, out: Path) -> None:
    if rank == 0:
        ddpcov_ranks.EXIT_TIMEOUT = timedelta(seconds=0.2)
        with training(Net("a"), out) as step:
            step()


@case("not-applicable", "DDC503", world_size=2)
def parameters_differ(rank: int, out: Path) -> None:
    ddpcov_ranks.EXIT_TIMEOUT = timedelta(seconds=10)
    with training(Net("a", f"b{rank}"), out) as step:
        step()


@case("not-applicable", "DDC504")
def nothing_recorded(rank: int, out: Path) -> None:
    with training(Net("a"), out):
        pass


# Nothing to find.


@case("off")
def clean(rank: int, out: Path) -> None:
    with training(ddp("a", "b"), out, optimizer=[]) as step:
        step()
        step()


@case("off")
def tied(rank: int, out: Path) -> None:
    net = Net("a", "b")
    net.b.weight = net.a.weight
    with training(DDP(net), out) as step:
        step()
        step()


@case("off")
def frozen_before(rank: int, out: Path) -> None:
    net = Net("a", "b")
    net.a.requires_grad_(False)
    with training(DDP(net), out) as step:
        step()
        step()


@case("off")
def accumulation(rank: int, out: Path) -> None:
    model = ddp("a", "b")
    with training(model, out) as step:
        for _ in range(2):
            with model.no_sync():
                model(X).sum().backward()
            step()


@case("off")
def two_forwards_one_backward(rank: int, out: Path) -> None:
    model = ddp("a", "b")
    optimizer = sgd(model)
    with training(model, out):
        for _ in range(2):
            (model(X) + model(2 * X)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()


@case("off")
def ignored_by_wrapper(rank: int, out: Path) -> None:
    net = Net("a", "b")
    DDP._set_params_and_buffers_to_ignore_for_model(net, ["b.weight"])
    with training(DDP(net), out) as step:
        step()
        step()


# And what was found.


def run_all(rank: int, names: list[str]) -> None:
    for name in names:
        CASES[name].run(rank, Path(f"{name}.bin"))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("findings")
    for world_size in (1, 2):
        names = [name for name, case in CASES.items() if case.world_size == world_size]
        for rank in run_ranks(run_all, world_size, [names], folder=folder):
            assert rank.code == 0, rank.stderr
    return folder


def found(folder: Path, name: str, code: str) -> ddpcov.Finding:
    (finding,) = (f for f in ddpcov.read(folder / f"{name}.bin").findings if f.code == code)
    return finding


@pytest.mark.parametrize("name", CASES)
def test_codes_and_advice(folder: Path, name: str) -> None:
    report = ddpcov.read(folder / f"{name}.bin")
    assert {f.code for f in report.findings} == CASES[name].codes
    assert all(f.slug == SLUGS[f.code] for f in report.findings)
    assert report.advice.find_unused_parameters == CASES[name].advice


WHO_AND_WHEN = {
    ("never", "DDC101"): (("b.weight", "c.weight"), (0,), ((0, 2),), "warning"),
    ("never_without_the_flag", "DDC101"): (("b.weight",), (0,), ((0, 0),), "error"),
    ("some_steps", "DDC201"): (("b.weight",), (0,), ((0, 0), (2, 2)), "info"),
    ("some_ranks", "DDC202"): (("b.weight",), (1,), ((1, 1),), "info"),
    ("idle", "DDC107"): (("a.weight",), (0,), ((1, 1),), "error"),
    ("some_passes", "DDC203"): (("b.weight",), (0,), ((0, 1),), "info"),
    ("frozen_after_wrap", "DDC301"): (("b.weight",), (0,), ((0, 1),), "warning"),
    ("thawed_after_wrap", "DDC302"): (("b.weight",), (0,), ((1, 1),), "error"),
    ("replaced_after_wrap", "DDC303"): (("b.weight",), (0,), ((0, 1),), "error"),
    ("needless_flag", "DDC307"): ((), (0,), ((0, 1),), "warning"),
    ("not_in_optimizer", "DDC401"): (("b.weight",), (0,), ((0, 0),), "error"),
    ("ended_inside_a_pass", "DDC501"): (("a.weight",), (0,), ((1, 1),), "error"),
    ("rank_missing", "DDC502"): ((), (1,), (), "error"),
    ("nothing_recorded", "DDC504"): ((), (0,), (), "warning"),
}


@pytest.mark.parametrize(("name", "code"), WHO_AND_WHEN)
def test_who_and_when(folder: Path, name: str, code: str) -> None:
    f = found(folder, name, code)
    assert (f.parameters, f.ranks, f.steps, f.severity) == WHO_AND_WHEN[name, code]
    assert f.message


def test_reached_twice_says_how(folder: Path) -> None:
    def evidence(name: str) -> str:
        report = ddpcov.read(folder / f"{name}.bin")
        twice = [f for f in report.findings if f.code == "DDC306"]
        assert {f.parameters for f in twice} == {("a.weight",)}
        return " ".join(text for f in twice for text in (f.message, *f.evidence))

    ran_twice = "Accumulated more than once"
    assert ran_twice in evidence("accumulated_twice") and "ready only once" in evidence("accumulated_twice")
    assert ran_twice in evidence("accumulated_twice_unnoticed")
    assert "ready only once" in evidence("unused_and_reached")
    assert ran_twice not in evidence("unused_and_reached")


def test_cost(folder: Path) -> None:
    def cost(name: str) -> int:
        return ddpcov.read(folder / f"{name}.bin").advice.bytes_reduced_for_nothing

    size = 4 * 3 * 3
    assert cost("never") == 2 * size
    assert cost("frozen_after_wrap") == size
    assert cost("some_steps") == cost("clean") == cost("never_without_a_wrapper") == 0


def test_actions(folder: Path) -> None:
    def actions(name: str) -> str:
        return " ".join(ddpcov.read(folder / f"{name}.bin").advice.actions)

    assert "b.weight, c.weight never got a gradient" in actions("never")
    assert "drop find_unused_parameters" in actions("never")
    assert "Keep find_unused_parameters=True" in actions("some_steps")
    assert "cannot mend" in actions("idle")
    assert "Drop find_unused_parameters" in actions("needless_flag")
    assert "Wrap the model again" in actions("replaced_after_wrap")
    assert actions("clean") == actions("nothing_recorded") == ""
