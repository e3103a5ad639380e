"""Models that miss a gradient for a known reason, and what ddpcov must say of them.

A case says which parameters are missed and by which code. A line of it that ends in `# <- DDC104` is where every finding of
that code must point to.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

import ddpcov

__all__ = ["Cases", "check", "linear", "model", "tracked", "vector", "x"]

Loss = Callable[[], Tensor]


class Case(NamedTuple):
    build: Callable[[], tuple[nn.Module, Loss]]
    """Gives a model, and what computes its loss."""
    expected: dict[str, str]
    """A parameter, or a module for all of its parameters → code."""
    says: tuple[str, ...]
    """What the findings say, among other things."""


class Cases(dict[str, Case]):
    """By name."""

    def add(self, code: str, missed: str, *says: str, name: str = "") -> Callable[[Callable[[], Any]], None]:
        """`missed` names parameters or modules, with spaces between."""

        def add(build: Callable[[], Any]) -> None:
            self[name or build.__name__] = Case(build, dict.fromkeys(missed.split(), code), says)

        return add


def model(forward: Callable[..., Any], **parts: Any) -> nn.Module:
    """A module of these parts, with that forward."""

    def build(self: nn.Module) -> None:
        nn.Module.__init__(self)
        for name, part in parts.items():
            setattr(self, name, part)

    return type("Net", (nn.Module,), {"__init__": build, "forward": forward})()


def linear() -> nn.Linear:
    return nn.Linear(4, 4)


def vector() -> nn.Parameter:
    return nn.Parameter(torch.randn(4))


def x(*size: int) -> Tensor:
    return torch.randn(*size or (3, 4))


def tracked(net: nn.Module, loss: Loss, *, steps: int = 1) -> ddpcov.Report:
    """Some steps of training."""
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    with ddpcov.track(net) as cov:
        for _ in range(steps):
            loss().backward()
            optimizer.step()
            optimizer.zero_grad()
    return cov.report()


def check(case: Case) -> None:
    """Exactly the expected parameters are missed, each by the expected code, said in the right words and at the right line."""
    torch.manual_seed(0)
    net, loss = case.build()
    findings = tracked(net, loss).findings
    said = {(name, finding.code) for finding in findings for name in finding.parameters or ["-"]}
    names = [name for name, _ in net.named_parameters()]
    assert said == {
        (name, code)
        for prefix, code in case.expected.items()
        for name in [n for n in names if f"{n}.".startswith(f"{prefix}.")] or [prefix]
    }
    text = "\n".join(line for f in findings for line in (f.message, *f.evidence, f.fix))
    assert [word for word in case.says if word not in text] == [], text
    lines, first = inspect.getsourcelines(case.build)
    for finding in findings:
        marked = [first + i for i, line in enumerate(lines) if line.rstrip().endswith(f"# <- {finding.code}")]
        if marked:
            assert finding.where is not None
            at = (Path(finding.where.file).resolve(), finding.where.line in marked)
            assert at == (Path(inspect.getfile(case.build)).resolve(), True), finding.where
