"""Where backward passes and steps begin and end, seen from the places that every training loop goes through.

A pass is one call of autograd's engine from outside the engine: `Variable._execution_engine` is where `Tensor.backward`,
`torch.autograd.backward` and reentrant checkpointing all arrive. A step ends where an optimizer stepped, which torch's own
optimizer hooks tell, or where a gradient scaler decided not to let it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.autograd import Variable
from torch.autograd.graph import GradientEdge
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle

__all__ = ["EngineRun", "Listener", "forget", "is_inside_engine", "is_parameter", "start", "stop"]


@dataclass
class EngineRun:
    """One run of autograd's engine, called from outside it."""

    tensors: Sequence[Any]
    """What it ran from: tensors or gradient edges."""
    inputs: Sequence[Any]
    """What it ran to, if it was told."""
    is_backward: bool
    """False for `autograd.grad`, which accumulates nothing by itself."""
    error: BaseException | None = None
    """What it raised."""
    given: Sequence[Any] = ()
    """What it gave back, as long as listeners are told of it: the gradients of `autograd.grad`."""
    has_inner_parameters: bool = False
    """Whether a run inside it (reentrant checkpoint) reached a parameter, of whatever model."""

    def leaves(self) -> Iterator[Tensor]:
        """The leaf tensors that it can accumulate into, as far as the graph outside inner runs shows them."""
        if self.inputs:
            yield from (t for t in self.inputs if isinstance(t, Tensor))
            return
        for node in self.nodes():
            if isinstance(leaf := getattr(node, "variable", None), Tensor):
                yield leaf

    def when_under_way(self, action: Callable[[], None]) -> list[RemovableHandle]:
        """Calls `action` before the first gradient is accumulated, in the engine; once for each tensor that it runs from,
        unless the handles are removed before."""
        handles = []
        for root in self.tensors:
            if isinstance(root, GradientEdge):
                handles.append(root.node.register_prehook(lambda _: action()))
            elif isinstance(root, Tensor) and root.requires_grad:
                handles.append(root.register_hook(lambda _: action()))  # type: ignore[no-untyped-call]
        return handles

    def nodes(self) -> Iterator[Any]:
        """The nodes of its graph."""
        roots = (t.node if isinstance(t, GradientEdge) else t.grad_fn for t in self.tensors)
        nodes: list[Any] = [node for node in roots if node is not None]
        seen = set(nodes)
        while nodes:
            node = nodes.pop()
            yield node
            for following, _ in node.next_functions:
                if following is not None and following not in seen:
                    seen.add(following)
                    nodes.append(following)


class Listener(Protocol):
    """Wants to know of passes and steps in this process. None of its methods may raise."""

    def pass_begins(self, run: EngineRun) -> None:
        """Autograd is about to run."""

    def inner_run_begins(self) -> None:
        """Autograd is about to run once more inside a run: for a reentrant checkpoint, or from a hook."""

    def pass_ends(self, run: EngineRun) -> None:
        """It ran, or raised."""

    def optimizer_steps(self, optimizer: Optimizer) -> None:
        """The optimizer is about to step, or a gradient scaler has skipped its step; its gradients are final."""

    def optimizer_stepped(self, optimizer: Optimizer) -> None:
        """The optimizer stepped, or a gradient scaler skipped its step."""


_listeners: list[Listener] = []
_runs: list[EngineRun] = []  # under way; more than one only from several threads
_handles: list[RemovableHandle] = []
_original_engine: Any = Variable._execution_engine
_original_scaler_step: Any = torch.amp.GradScaler.step
# Optimizers whose step began and has not been told of yet. A subclass that calls its parent's step runs the hooks of both.
_stepping: list[Optimizer] = []
_last_stepped: list[Optimizer] = []


def start(listener: Listener) -> None:
    """Tells `listener` of passes and steps from now on."""
    if not _listeners:
        _install()
    _listeners.append(listener)


def stop(listener: Listener) -> None:
    """Tells `listener` no more; after the last one torch is as it was."""
    if listener in _listeners:
        _listeners.remove(listener)
        if not _listeners:
            _uninstall()


def forget() -> None:
    """Drops all listeners: this is a forked child, and its parent's records are none of its business."""
    if _listeners:
        _listeners.clear()
        _runs.clear()
        _uninstall()


def _install() -> None:
    global _original_engine, _original_scaler_step
    _original_engine = Variable._execution_engine
    Variable._execution_engine = _Engine()
    _original_scaler_step = torch.amp.GradScaler.step
    torch.amp.GradScaler.step = _with_skipped_steps(_original_scaler_step)  # type: ignore[method-assign]
    _handles.append(register_optimizer_step_pre_hook(_before_step))
    _handles.append(register_optimizer_step_post_hook(_after_step))


def _uninstall() -> None:
    # Whoever replaced these after us keeps their replacement; what is left of ours inside it then only passes calls on.
    if isinstance(Variable._execution_engine, _Engine):
        Variable._execution_engine = _original_engine
    if hasattr(torch.amp.GradScaler.step, "_is_ddpcov"):
        torch.amp.GradScaler.step = _original_scaler_step  # type: ignore[method-assign]
    while _handles:
        _handles.pop().remove()
    _stepping.clear()
    _last_stepped.clear()


class _Engine(type(Variable._execution_engine)):  # type: ignore[misc]
    """Autograd's engine, telling the listeners of each run."""

    def run_backward(self, tensors: Sequence[Any], *args: Any, **kwargs: Any) -> Any:
        if not _listeners:
            return super().run_backward(tensors, *args, **kwargs)
        inputs = args[3] if len(args) > 3 else kwargs.get("inputs", ())
        is_backward = bool(args[5] if len(args) > 5 else kwargs.get("accumulate_grad", True))
        run = EngineRun(tensors, inputs or (), is_backward)
        if is_inside_engine():
            # A reentrant checkpoint, or a hook that calls backward. It belongs to the pass outside.
            for outer in _runs:
                outer.has_inner_parameters = outer.has_inner_parameters or any(map(is_parameter, run.leaves()))
            for listener in list(_listeners) if is_backward else ():
                listener.inner_run_begins()
            return super().run_backward(tensors, *args, **kwargs)
        listeners = list(_listeners)
        for listener in listeners:
            listener.pass_begins(run)
        _runs.append(run)
        try:
            given = super().run_backward(tensors, *args, **kwargs)
            run.given = [t for t in given or () if isinstance(t, Tensor)]
            return given
        except BaseException as error:
            run.error = error
            raise
        finally:
            _runs[:] = (other for other in _runs if other is not run)
            for listener in listeners:
                listener.pass_ends(run)
            run.error, run.given = None, ()  # whose traceback holds this frame


def is_inside_engine() -> bool:
    """Whether this thread is in the middle of a backward pass."""
    return bool(torch._C._current_graph_task_id() != -1)


def is_parameter(tensor: Any) -> bool:
    """Whether it is a parameter, of whatever model."""
    return isinstance(tensor, torch.nn.Parameter)


def _before_step(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    if not any(o is optimizer for o in _stepping):
        _stepping.append(optimizer)
        if len(_stepping) == 1:  # an optimizer inside another one holds a part of what the outer one holds
            _tell_of_coming_step(optimizer)


def _after_step(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    for i, known in enumerate(_stepping):
        if known is optimizer:
            del _stepping[i]
            _tell_of_step(optimizer)
            return


def _tell_of_coming_step(optimizer: Optimizer) -> None:
    for listener in list(_listeners):
        listener.optimizer_steps(optimizer)


def _tell_of_step(optimizer: Optimizer) -> None:
    _last_stepped[:] = [optimizer]
    for listener in list(_listeners):
        listener.optimizer_stepped(optimizer)


def _with_skipped_steps(scaler_step: Any) -> Any:
    @functools.wraps(scaler_step)
    def step(self: Any, optimizer: Optimizer, *args: Any, **kwargs: Any) -> Any:
        _last_stepped.clear()
        result = scaler_step(self, optimizer, *args, **kwargs)
        if not any(o is optimizer for o in _last_stepped):
            _tell_of_coming_step(optimizer)
            _tell_of_step(optimizer)
        _last_stepped.clear()
        return result

    step._is_ddpcov = True  # type: ignore[attr-defined]
    return step
