"""Random models, ways through them and steps: ddpcov must equal the reference, and the reference what `.grad` shows."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from reference import Both, Undefine, bare, sgd


class Lookup(nn.Embedding):
    def forward(self, x: Tensor) -> Tensor:
        return x + super().forward(torch.tensor([0, 2]))


class Scales(nn.Module):
    """A list of parameters, of which the last is never read."""

    def __init__(self) -> None:
        super().__init__()
        self.items = nn.ParameterList([torch.ones(3), torch.ones(()), torch.ones(2)])

    def forward(self, x: Tensor) -> Tensor:
        return x * self.items[0] * self.items[1]


LEAVES = {
    "linear": lambda: nn.Linear(3, 3),
    "norm": lambda: nn.LayerNorm(3),
    "lookup": lambda: Lookup(4, 3),
    "sparse": lambda: Lookup(4, 3, sparse=True),
    "scales": Scales,
}
WAYS = ["chain", "chain", "branch", "skip", "drop", "detach", "no_grad", "checkpoint", "reentrant", "undefine"]
Tree = str | list["Tree"]  # a leaf's kind, or children


@dataclass(frozen=True)
class Pass:
    """One forward and backward: the way that each leaf is used, and what happens to the model before."""

    ways: tuple[str, ...]
    flip: int | None  # the parameter whose requires_grad changes
    renew: int | None  # the leaf whose parameters are replaced


@dataclass(frozen=True)
class Script:
    tree: list[Tree]
    ties: tuple[tuple[int, int], ...]  # pairs of linear leaves
    frozen: tuple[int, ...]
    steps: tuple[tuple[Pass, ...], ...]
    ending: str  # what ends a step


trees = st.lists(
    st.recursive(st.sampled_from(sorted(LEAVES)), lambda inner: st.lists(inner, min_size=1, max_size=3), max_leaves=5),
    min_size=1,
    max_size=3,
)
small = st.integers(0, 20)
passes = st.builds(
    Pass,
    ways=st.tuples(*[st.sampled_from(WAYS)] * 15),  # enough for any tree
    flip=st.none() | small,
    renew=st.sampled_from([None, None, None, *range(15)]),
)
scripts = st.builds(
    Script,
    tree=trees,
    ties=st.lists(st.tuples(small, small), max_size=2).map(tuple),
    frozen=st.lists(small, max_size=3).map(tuple),
    steps=st.lists(st.lists(passes, max_size=3).map(tuple), min_size=1, max_size=5).map(tuple),
    ending=st.sampled_from(["optimizer", "optimizer", "two optimizers", "by hand", "nothing"]),
)


def build(tree: Tree) -> nn.Module:
    return LEAVES[tree]() if isinstance(tree, str) else nn.ModuleList(map(build, tree))


def leaves(module: nn.Module) -> Iterator[nn.Module]:
    for child in module.children():
        yield from leaves(child) if isinstance(child, nn.ModuleList) else [child]


def forward(model: nn.Module, ways: tuple[str, ...]) -> Tensor:
    """A loss that needs a gradient in any case, if only for its input."""
    x = torch.ones(2, 3, requires_grad=True)
    outputs = [x]
    for leaf, way in zip(leaves(model), ways, strict=False):
        match way:
            case "chain":
                x = leaf(x)
            case "branch":
                outputs.append(leaf(x))
            case "drop":
                leaf(x)
            case "detach":
                x = leaf(x).detach()
            case "no_grad":
                with torch.no_grad():
                    x = leaf(x)
            case "checkpoint" | "reentrant":
                x = checkpoint(leaf, x, use_reentrant=way == "reentrant")
            case "undefine":
                x = x + Undefine.apply(leaf(x))
    return torch.stack([output.sum() for output in [*outputs, x]]).sum()


def change(model: nn.Module, flip: int | None, renew: int | None) -> None:
    parameters, modules = list(model.parameters()), list(leaves(model))
    if flip is not None:
        parameters[flip % len(parameters)].requires_grad_(not parameters[flip % len(parameters)].requires_grad)
    if renew is not None:
        for module in modules[renew % len(modules)].modules():
            for name, p in list(module.named_parameters(recurse=False)):
                setattr(module, name, nn.Parameter(p.detach().clone()))


def train(run: Both, model: nn.Module, script: Script) -> None:
    optimizers = [sgd(model) for _ in range({"optimizer": 1, "two optimizers": 2}.get(script.ending, 0))]
    for step in script.steps:
        for one in step:
            change(model, one.flip, one.renew)
            model.zero_grad()
            loss = forward(model, one.ways)
            with run.ref.backward_pass() as covered:
                loss.backward()
            assert covered == {bare(name) for name, p in model.named_parameters() if p.grad is not None}
        for optimizer in optimizers:
            optimizer.param_groups[0]["params"] = list(model.parameters())
            optimizer.step()
        if script.ending == "by hand":
            run.cov.step()
        if optimizers or (step and script.ending == "by hand"):  # by hand, a step without a pass does not count
            run.end_step()


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad=True:UserWarning")
@settings(max_examples=60, deadline=None, derandomize=True, database=None, suppress_health_check=[HealthCheck.too_slow])
@given(scripts)
def test_random_models(script: Script) -> None:
    torch.manual_seed(0)
    model = build(script.tree)
    linear = [leaf for leaf in leaves(model) if isinstance(leaf, nn.Linear)]
    for a, b in script.ties if linear else ():
        linear[b % len(linear)].weight = linear[a % len(linear)].weight
    parameters = list(model.parameters())
    for i in script.frozen:
        parameters[i % len(parameters)].requires_grad_(False)
    with Both(model) as run:
        train(run, model, script)
    run.check(steps=len(run.ref.steps()), missed=run.ref.missed())
