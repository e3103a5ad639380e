"""What a user could choose instead: each a kind of training, to be set against the bare step."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as DDP

import ddpcov
from ddpcov.overhead import Kind

__all__ = ["kinds_of", "small_layers"]

Training = tuple[nn.Module, Callable[[nn.Module], Tensor]]
"""A model, and what computes its loss, given the model as it is wrapped."""


def small_layers(depth: int = 300) -> Training:
    """The worst case: next to nothing to compute for each parameter."""
    batch = torch.randn(4, 8)
    return nn.Sequential(*(nn.Linear(8, 8) for _ in range(depth))), lambda model: model(batch).sum()


def kinds_of(make: Callable[[], Training]) -> dict[str, Kind]:
    """The rivals, each on a model of its own, under DDP."""

    @contextlib.contextmanager
    def train(
        flags: dict[str, bool],
        watch: Callable[[nn.Module], contextlib.AbstractContextManager[Callable[[Tensor], None] | None]],
    ) -> Iterator[Callable[[], None]]:
        model, loss_of = make()
        wrapped = DDP(model, **flags)
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
        with watch(wrapped) as look:

            def step() -> None:
                loss = loss_of(wrapped)
                if look is not None:
                    look(loss)
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()

            yield step

    return {
        "bare": lambda: train({}, _nothing),
        "ddpcov": lambda: train({}, _tracked),
        "ddpcov, guard": lambda: train({}, lambda model: _tracked(model, guard=True)),
        "find_unused_parameters": lambda: train({"find_unused_parameters": True}, _nothing),
        "static_graph": lambda: train({"static_graph": True}, _nothing),
        "Python hooks": lambda: train({}, _python_hooks),
        "graph walk": lambda: train({}, _graph_walk),
    }


@contextlib.contextmanager
def _nothing(model: nn.Module) -> Iterator[None]:
    yield None


@contextlib.contextmanager
def _tracked(model: nn.Module, **options: Any) -> Iterator[None]:
    with ddpcov.track(model, diagnose="off", **options):
        yield None


@contextlib.contextmanager
def _python_hooks(model: nn.Module) -> Iterator[None]:
    """As exact as ddpcov, written by hand: whether a gradient came, and whether it was accumulated."""
    covered, arrived = set(), set()

    def watch(name: str, parameter: nn.Parameter) -> None:
        def arrives(gradient: Tensor | None) -> None:
            if gradient is not None:
                arrived.add(name)

        def accumulates(_: Tensor) -> None:
            if name in arrived:
                covered.add(name)

        handles.append(parameter.register_hook(arrives))
        handles.append(parameter.register_post_accumulate_grad_hook(accumulates))

    handles: list[Any] = []
    for name, parameter in model.named_parameters():
        watch(name, parameter)
    yield None
    for handle in handles:
        handle.remove()


@contextlib.contextmanager
def _graph_walk(model: nn.Module) -> Iterator[Callable[[Tensor], None]]:
    """As frameworks look for what takes no part in the loss: through the graph, in each step."""
    names = {id(p): name for name, p in model.named_parameters()}

    def look(loss: Tensor) -> None:
        used, seen, nodes = set(), set(), [loss.grad_fn]
        while nodes:
            node = nodes.pop()
            if node is None or node in seen:
                continue
            seen.add(node)
            if hasattr(node, "variable"):
                used.add(names[id(node.variable)])
            nodes += (following for following, _ in node.next_functions)

    yield look
