"""Tensors that an optimizer holds and the model does not: what is left where parameters were replaced."""

from __future__ import annotations

import weakref
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from ddpcov.hooks import Hooks

__all__ = ["Holdings"]

_watched: weakref.WeakSet[Hooks] = weakref.WeakSet()
"""Of all recordings under way: one optimizer may train several models."""


def _is_in_a_model(tensor: Tensor) -> bool:
    return any(hooks.owns([tensor]) for hooks in _watched)


@dataclass
class _Held:
    """An optimizer that stepped, and the strange tensors in it that never had a gradient then."""

    optimizer: Optimizer
    seen: tuple[int, int] = (-1, -1)
    idle: list[Tensor] = field(default_factory=list)
    trained: list[Tensor] = field(default_factory=list)  # strange, and another model's


class Holdings:
    """Compares what optimizers hold with the models, at each of their steps; costs nothing where they agree."""

    def __init__(self, hooks: Hooks, optimizers: list[Optimizer]) -> None:
        self._hooks = hooks
        self._given = optimizers
        self._all: list[_Held] = []
        self._leaves: dict[int, Tensor] = {}
        self._former: dict[int, tuple[Tensor, str]] = {}  # by id: what left the model, its optimizer holds it anyway
        self._version = -1
        _watched.add(hooks)

    def refresh(self) -> None:
        """Takes in the names of parameters that left the model. No weak references: `swap_tensors` refuses such tensors."""
        if self._version == self._hooks.version:
            return
        self._version = self._hooks.version
        before, self._leaves = self._leaves, self._hooks.leaves
        gone = {id(t): (t, i) for i, t in before.items() if not self._hooks.owns([t])}
        if gone or self._former:
            held = {
                id(p) for o in (*self._given, *(h.optimizer for h in self._all)) for g in o.param_groups for p in g["params"]
            }
            named = {key: (t, self._hooks.definition(i)[0]) for key, (t, i) in gone.items()}
            self._former = {key: one for key, one in {**self._former, **named}.items() if key in held}

    def stepped(self, optimizer: Optimizer) -> None:
        """The optimizer stepped, and its gradients are still there."""
        held = next((h for h in self._all if h.optimizer is optimizer), None)
        if held is None:
            held = _Held(optimizer)
            self._all.append(held)
        now = self._version, sum(len(group["params"]) for group in optimizer.param_groups)
        if held.seen != now:
            held.seen = now
            known = {*map(id, held.trained)}
            strange = (p for g in optimizer.param_groups for p in g["params"] if not self._hooks.owns([p]))
            held.idle = [p for p in strange if p.requires_grad and id(p) not in known]
        if held.idle:
            held.trained += (p for p in held.idle if p.grad is not None or _is_in_a_model(p))
            held.idle = [p for p in held.idle if p.grad is None and not _is_in_a_model(p)]

    def finish(self) -> list[dict[str, Any]]:
        """Ends the comparison. What is idle: where it stands, its shape, and its former name if it had one."""
        out = []
        for held in self._all:
            idle = {id(p) for p in held.idle if p.requires_grad and p.grad is None and not _is_in_a_model(p)}
            for number, group in enumerate(held.optimizer.param_groups):
                for index, p in enumerate(group["params"]):
                    if id(p) in idle:
                        kind = type(held.optimizer).__name__
                        one = {"optimizer": kind, "group": number, "index": index, "shape": list(p.shape)}
                        former = self._former.get(id(p))
                        out.append({**one, "name": former[1]} if former is not None else one)
        _watched.discard(self._hooks)
        return out
