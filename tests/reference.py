"""The slow reference instrument, and the means to run it beside ddpcov on one training script.

`Reference` shares nothing with ddpcov but the definition: covered means that a defined gradient was accumulated. It is told
where passes and steps end, and puts new Python hooks on every parameter before each pass, so that nothing can go stale.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

import ddpcov

Missed = dict[str, list[tuple[int, int]]]

PREFIXES = {"module", "_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"}


class Reference:
    """Which trainable parameters accumulated a defined gradient, by pass and by step.

    with Reference(model) as ref:
        with ref.backward_pass():
            loss.backward()
        optimizer.step()
        ref.end_step()
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._steps: list[tuple[set[str], set[str]]] = []  # names trainable, names covered
        self._passes: list[tuple[set[str], set[str]]] = []  # the same, of the open step
        self.num_passes = 0

    @property
    def num_steps(self) -> int:
        return len(self._steps)

    def __enter__(self) -> Reference:
        return self

    def __exit__(self, *_: object) -> None:
        if self._passes:  # a step that no optimizer ended counts too
            self.end_step()

    @contextmanager
    def backward_pass(self) -> Iterator[None]:
        """Watches one user-level backward, which may raise."""
        trainable, covered = self._trainable(), set[str]()
        handles = [h for name, p in trainable.items() for h in _watch(p, lambda name=name: covered.add(name))]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()
            self._passes.append((set(trainable), covered))
            self.num_passes += 1

    def end_step(self) -> None:
        """Ends a step: its passes are those since the last one, and may be none."""
        passes = self._passes or [(set(self._trainable()), set())]
        self._steps.append((set().union(*(t for t, _ in passes)), set().union(*(c for _, c in passes))))
        self._passes = []

    def missed(self) -> Missed:
        """Inclusive ranges of steps by parameter; parameters that missed nothing are absent."""
        names = sorted(set().union(*(t - c for t, c in self._steps)))
        return {n: _ranges(i for i, (t, c) in enumerate(self._steps) if n in t - c) for n in names}

    def hits(self) -> dict[str, int]:
        """Number of steps that covered each parameter; those never covered are absent."""
        names = set().union(*(c for _, c in self._steps))
        return {n: sum(n in c for _, c in self._steps) for n in names}

    def _trainable(self) -> dict[str, Tensor]:
        return {bare(name): p for name, p in self._model.named_parameters() if p.requires_grad}


def _watch(parameter: Tensor, on_covered: Callable[[], None]) -> list[Any]:
    # The tensor hook alone sees `autograd.grad`, the other alone sees undefined gradients. One follows the other.
    if torch.nn.parameter.is_lazy(parameter):
        return []
    is_defined = [False]

    def arrived(gradient: Tensor | None) -> None:
        is_defined[0] = gradient is not None

    def accumulated(_: Tensor) -> None:
        if is_defined[0]:
            on_covered()

    return [parameter.register_hook(arrived), parameter.register_post_accumulate_grad_hook(accumulated)]


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
    missed, hits = ref.missed(), ref.hits()
    told = {p.name: p for p in report.parameters}
    compared = [("steps", report.run.steps, ref.num_steps), ("passes", report.run.backward_passes, ref.num_passes)]
    for name in sorted(told.keys() | missed.keys() | hits.keys()):
        ours, p = (missed.get(name, []), hits.get(name, 0)), told.get(name)
        if p is None:
            compared.append((name, "absent", ours))
            continue
        theirs = [tuple(r) for r in p.missed.get(rank, ())], p.hits.get(rank, 0)
        compared.append((f"{name}: missed", theirs[0], ours[0]))
        compared.append((f"{name}: hits", theirs[1], ours[1]))
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
        self.ref.__enter__()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.ref.__exit__(kind, error, tb)
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
        assert (self.ref.num_steps, self.ref.missed()) == (steps, missed)
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


def layer() -> nn.Linear:
    return nn.Linear(3, 3, bias=False)


def sgd(*models: nn.Module) -> Optimizer:
    return torch.optim.SGD([p for model in models for p in model.parameters()], lr=0.1)
