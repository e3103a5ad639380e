"""The slow reference instrument, and the means to run it beside ddpcov on one training script.

`Reference` shares nothing with ddpcov but the definition: covered means that a defined gradient was accumulated. It is
told where passes and steps end, and puts new Python hooks on every parameter before each pass, so that none goes stale.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from types import TracebackType
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

import ddpcov

Missed = dict[str, list[tuple[int, int]]]

AT_NODES = False
"""Watch autograd's own nodes, and leave the parameters without hooks, where ddpcov is to be without, too."""

PREFIXES = {"module", "_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"}


class Reference:
    """Which trainable parameters accumulated a defined gradient, by pass and by step.

        ref = Reference(model)
        with ref.backward_pass():
            loss.backward()
        optimizer.step()
        ref.end_step()

    If no step is ever ended, each pass is one.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._ended: list[_Seen] = []  # steps
        self._open: list[_Seen] = []  # passes since the last step
        self.num_passes = 0

    @contextmanager
    def backward_pass(self) -> Iterator[set[str]]:
        """Watches one user-level backward, which may raise; gives the set that holds the covered names afterwards."""
        trainable, seen = self._trainable(), _Seen(set(), set())
        handles = [h for name, p in trainable.items() for h in _watch(p, partial(seen.covered.add, name))]
        try:
            yield seen.covered
        finally:
            for handle in handles:
                handle.remove()
            seen.trainable.update(trainable)
            self._open.append(seen)
            self.num_passes += 1

    def end_step(self) -> None:
        """Ends a step: its passes are those since the last one, and may be none."""
        self._ended.append(_Seen.union(self._open or [_Seen(set(self._trainable()), set())]))
        self._open = []

    def steps(self) -> list[_Seen]:
        """The steps so far, also the one that is open."""
        if not self._ended:
            return self._open
        return [*self._ended, _Seen.union(self._open)] if self._open else self._ended

    def missed(self) -> Missed:
        """Inclusive ranges of steps by parameter; parameters that missed nothing are absent."""
        missed = [step.trainable - step.covered for step in self.steps()]
        return {n: _ranges(i for i, names in enumerate(missed) if n in names) for n in sorted(set().union(*missed))}

    def hits(self) -> Counter[str]:
        """Number of steps that covered each parameter."""
        return Counter(name for step in self.steps() for name in step.covered)

    def _trainable(self) -> dict[str, Tensor]:
        return {bare(name): p for name, p in self._model.named_parameters() if p.requires_grad}


@dataclass
class _Seen:
    """Names in a pass or a step."""

    trainable: set[str]
    covered: set[str]

    @staticmethod
    def union(several: list[_Seen]) -> _Seen:
        return _Seen(set().union(*(s.trainable for s in several)), set().union(*(s.covered for s in several)))


def _watch(parameter: Tensor, on_covered: Callable[[], None]) -> list[Any]:
    # The tensor hook alone sees `autograd.grad`, the other alone sees undefined gradients. One follows the other.
    if torch.nn.parameter.is_lazy(parameter):
        return []
    if AT_NODES:
        return _watch_node(parameter, on_covered)
    is_defined = [False]

    def arrived(gradient: Tensor | None) -> None:
        is_defined[0] = gradient is not None

    def accumulated(parameter: Tensor) -> None:
        if is_defined[0] and parameter.requires_grad:  # if frozen since the forward, it fires and nothing was accumulated
            on_covered()

    return [parameter.register_hook(arrived), parameter.register_post_accumulate_grad_hook(accumulated)]


def _watch_node(parameter: Tensor, on_covered: Callable[[], None]) -> list[Any]:
    with torch.enable_grad():
        node: Any = parameter.view_as(parameter).grad_fn.next_functions[0][0]  # type: ignore[union-attr]

    def runs(gradients: tuple[Tensor | None, ...]) -> None:
        if gradients[0] is not None and parameter.requires_grad:
            on_covered()

    class Handle:
        kept = node  # else it would go where no graph keeps it, hook and all
        remove = node.register_prehook(runs).remove

    return [Handle]


def bare(name: str) -> str:
    """The name without the prefixes of wrappers."""
    return ".".join(part for part in name.split(".") if part not in PREFIXES)


def _ranges(steps: Iterable[int]) -> list[tuple[int, int]]:
    ranges: list[tuple[int, int]] = []
    for step in steps:
        if ranges and ranges[-1][1] == step - 1:
            ranges[-1] = (ranges[-1][0], step)
        else:
            ranges.append((step, step))
    return ranges


def assert_agree(report: ddpcov.Report, ref: Reference, rank: int = 0) -> None:
    """Holds what `report` says of `rank` against the reference: steps, passes, and each parameter's missed and hits."""
    missed, hits, num_steps = ref.missed(), ref.hits(), len(ref.steps())
    told = {p.name: p for p in report.parameters}
    compared = [("steps", report.run.steps, num_steps), ("passes", report.run.backward_passes, ref.num_passes)]
    for name in sorted(told.keys() | missed.keys() | hits.keys()):
        ours, p = (missed.get(name, []), hits[name]), told.get(name)
        if p is None:
            compared.append((name, "absent", ours))
            continue
        theirs = [tuple(r) for r in p.missed.get(rank, ())], p.hits.get(rank, 0)
        compared.append((f"{name}: missed", theirs[0], ours[0]))
        compared.append((f"{name}: hits", theirs[1], ours[1]))
        if num_steps:
            compared.append((f"{name}: coverage", p.coverage, _coverage(*ours)))
    lines = [f"  {what}: ddpcov {a}, reference {b}" for what, a, b in compared if a != b]
    assert not lines, "\n".join(["ddpcov and the reference disagree", *lines])


def _coverage(missed: list[tuple[int, int]], hits: int) -> str:
    if missed:
        return "some" if hits else "never"
    return "always" if hits else "frozen"


class Both:
    """ddpcov and the reference on one run. The script tells the reference what ddpcov has to find out."""

    def __init__(self, model: nn.Module, **options: Any) -> None:
        self.cov = ddpcov.track(model, **options)
        self.ref = Reference(model)

    def __enter__(self) -> Both:
        self.cov.__enter__()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.cov.__exit__(kind, error, tb)

    def backward(self, loss: Tensor, **options: Any) -> None:
        with self.ref.backward_pass():
            loss.backward(**options)

    def end_step(self) -> None:
        """Tells the reference that a step ended here."""
        self.ref.end_step()

    def train(self, optimizer: Optimizer, *losses: Tensor) -> None:
        """One step of the usual kind: a pass for each loss, then the optimizer."""
        for loss in losses:
            self.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        self.end_step()

    def check(self, *, steps: int, missed: Missed) -> ddpcov.Report:
        """Both agree, and on these very facts; `missed` names every parameter that missed a step."""
        assert (len(self.ref.steps()), self.ref.missed()) == (steps, missed)
        report = self.cov.report()
        assert_agree(report, self.ref)
        return report


class Net(nn.Module):
    """Layers by name, each with one parameter; the forward runs those it is told to, or all."""

    def __init__(self, *names: str) -> None:
        super().__init__()
        for name in names:
            self.add_module(name, layer())

    def forward(self, x: Tensor, *names: str) -> Tensor:
        for name in names or tuple(self._modules):
            x = self.get_submodule(name)(x)
        return x

    def loss(self, *names: str) -> Tensor:
        return self(torch.ones(2, 3), *names).sum()


class Undefine(torch.autograd.Function):
    """Passes its input on, and no gradient back."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> None:
        return None


class Fail(torch.autograd.Function):
    """Passes its input on, and raises when a gradient comes back."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        raise RuntimeError("in backward")


def layer() -> nn.Linear:
    return nn.Linear(3, 3, bias=False)


def sgd(*models: nn.Module) -> Optimizer:
    return torch.optim.SGD([p for model in models for p in model.parameters()], lr=0.1)
