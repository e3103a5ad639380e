"""Every code of the catalogue is made by at least one real run: those of `test_findings`, and these for the rest."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from test_findings import CASES
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.checkpoint import checkpoint

import ddpcov
from ddpcov.diagnosis.codes import SLUGS
from multirank import run_ranks
from reference import Net, Undefine, sgd

Loss = Callable[[nn.Module, Tensor], Tensor]


class Job:
    """A net with layers a and b, its forward and loss; `wrap` gives the options of DDP, `track` those of ddpcov."""

    def __init__(self, forward: Any, loss: Loss, wrap: dict[str, Any] | None, spare: bool, track: dict[str, Any]) -> None:
        self.forward, self.loss, self.wrap, self.spare, self.track = forward, loss, wrap, spare, track

    def run(self, out: Path) -> None:
        net = Net("a", "b")
        net.forward = self.forward.__get__(net)  # type: ignore[method-assign]
        net.a, net.b = nn.Linear(3, 3), nn.Linear(3, 3)
        if self.spare:
            net.spare = nn.Parameter(torch.zeros(3))
        object.__setattr__(net, "free", nn.Linear(3, 3))  # registered nowhere
        model = net if self.wrap is None else DDP(net, **self.wrap)
        optimizer = sgd(model)
        with contextlib.suppress(RuntimeError), ddpcov.track(model, out=out, **self.track):
            for _ in range(3):
                self.loss(model, torch.randn(2, 3)).backward()
                optimizer.step()
                optimizer.zero_grad()


def job(forward: Any, loss: Loss | None = None, *, wrap: Any = None, spare: bool = False, **track: Any) -> Job:
    return Job(forward, loss or (lambda model, x: model(x).sum()), wrap, spare, track)


def without_grad(net: Any, x: Tensor) -> Tensor:
    with torch.no_grad():
        y = net.b(x)
    return net.a(x) + y


def discarded(net: Any, x: Tensor) -> Tensor:
    net.b(x)
    return net.a(x)


def penalty(model: nn.Module, x: Tensor) -> Tensor:
    x.requires_grad_()
    (slope,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
    return slope.square().sum()


def through_the_inner_model(model: nn.Module, x: Tensor) -> Tensor:
    return model.module(x).sum()  # type: ignore[operator, union-attr]


def both(net: Any, x: Tensor) -> Tensor:
    return net.a(x) + net.b(x)


def pair(net: Any, x: Tensor) -> Any:
    return net.a(x), net.b(x)


FLAG = {"find_unused_parameters": True}
JOBS = {
    "DDC100": job(lambda net, x: net.a(x), diagnose="off"),
    "DDC102": job(lambda net, x: net.b(net.a(x)), spare=True),
    "DDC103": job(without_grad),
    "DDC104": job(lambda net, x: net.a(x) + net.b(x).detach()),
    "DDC105": job(pair, lambda model, x: model(x)[0].sum()),
    "DDC106": job(discarded),
    "DDC108": job(lambda net, x: net.a(x) + Undefine.apply(net.b(x))),
    "DDC109": job(lambda net, x: net.a(x) + 0.0 * net.b(x), values=1),
    "DDC110": job(lambda net, x: net.a(x) + checkpoint(net.b, x, use_reentrant=True)),
    "DDC111": job(lambda net, x: net.b(net.a(x).tanh()), penalty),
    "DDC304": job(both, through_the_inner_model, wrap={}),
    "DDC305": job(lambda net, x: SimpleNamespace(y=both(net, x)), lambda model, x: model(x).y.sum(), wrap=FLAG),
    "DDC308": job(pair, lambda model, x: model(x)[0].sum(), wrap={"static_graph": True}),
    "DDC309": job(both, through_the_inner_model, wrap={}, sync_check=1),
    "DDC402": job(lambda net, x: net.a(x) + net.free(x)),
}


def run_all(rank: int) -> None:
    torch.manual_seed(rank)
    for code, one in JOBS.items():
        one.run(Path(f"{code}.bin"))
    model = DDP(Net("a"))
    optimizer = sgd(model)
    model.module.a = nn.Linear(3, 3)
    with ddpcov.track(DDP(model.module), out=Path("DDC403.bin"), optimizer=optimizer) as cov:
        model.module(torch.ones(2, 3), "a").sum().backward()
        optimizer.step()
        cov.step()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("codes")
    for rank in run_ranks(run_all, 2, folder=folder, time_limit=120):
        assert rank.code == 0, rank.stderr
    return folder


@pytest.mark.parametrize("code", [*JOBS, "DDC403"])
def test_code(folder: Path, code: str) -> None:
    assert code in {f.code for f in ddpcov.read(folder / f"{code}.bin").findings}


def test_every_code_has_a_run() -> None:
    assert {*JOBS, "DDC403"}.union(*(case.codes for case in CASES.values())) == set(SLUGS)
