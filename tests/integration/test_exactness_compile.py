"""torch.compile: autograd sees the parameters as before, and what the compiler made of everything between."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn

from reference import Both, Net, sgd

ONES = torch.ones(2, 3)

# The compiler itself looks at the gradients of tensors that are no leaves.
pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")


@pytest.fixture(autouse=True)
def _fresh_compiler() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


class TwoHeads(Net):
    def __init__(self) -> None:
        super().__init__("trunk", "head", "aux", "spare")

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        hidden = self.trunk(x).relu()
        return self.head(hidden), self.aux(hidden)


@pytest.mark.parametrize("tracked", ["wrapper", "inner"])
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_whole_model(backend: str, tracked: str) -> None:
    model = TwoHeads()
    compiled = torch.compile(model, backend=backend)
    optimizer = sgd(model)
    with Both(compiled if tracked == "wrapper" else model) as run:
        for i in range(3):
            head, aux = compiled(ONES)
            # An output left out gets zeros from the compiled backward, so its head is covered all the same.
            run.train(optimizer, head.sum() + aux.sum() if i else head.sum())
            assert model.aux.weight.grad is None
    report = run.check(steps=3, missed={"spare.weight": [(0, 2)]})
    assert {p.name for p in report.parameters} == {f"{n}.weight" for n in ("trunk", "head", "aux", "spare")}


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_compiled_in_place_with_branches(backend: str) -> None:
    model = Net("a", "b", "c")
    model.compile(backend=backend)
    optimizer = sgd(model)
    with Both(model) as run:
        for names in (["a", "b"], ["a"], ["a", "b"]):
            run.train(optimizer, model(ONES, *names).sum())
    run.check(steps=3, missed={"b.weight": [(1, 1)], "c.weight": [(0, 2)]})


def test_compiled_part() -> None:
    model = Net("a", "b", "spare")
    model.b = torch.compile(model.b, backend="aot_eager")
    optimizer = sgd(model)
    with Both(model) as run:
        run.train(optimizer, model(ONES, "a", "b").sum())
        run.train(optimizer, model(ONES, "a").sum())
    run.check(steps=2, missed={"b.weight": [(1, 1)], "spare.weight": [(0, 1)]})


def test_graph_break() -> None:
    class Broken(Net):
        def forward(self, x: Tensor) -> Tensor:
            x = self.a(x)
            torch._dynamo.graph_break()
            return self.b(x)

    model = Broken("a", "b", "spare")
    compiled = torch.compile(model, backend="aot_eager")
    with Both(model) as run:
        for _ in range(2):
            run.backward(compiled(ONES).sum())
    run.check(steps=2, missed={"spare.weight": [(0, 1)]})


def test_compiled_before_and_used_after_tracking() -> None:
    """Hooks that come and go must not spoil what was compiled."""
    model = nn.Sequential(nn.Linear(3, 3), nn.ReLU())
    compiled = torch.compile(model, backend="aot_eager")
    compiled(ONES).sum().backward()
    with Both(model) as run:
        run.backward(compiled(ONES).sum())
    compiled(ONES).sum().backward()
    run.check(steps=1, missed={})
