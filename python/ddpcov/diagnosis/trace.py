"""What ran in the forwards of a step: modules, the operations inside them, and what they gave back.

Module hooks and a torch function mode (see `reads`) that are there while a step is traced and at no other time. Whatever is
kept of a step, nodes of its graph above all, goes when the step ends.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from types import FunctionType, MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.parametrize import ParametrizationList
from torch.utils.hooks import RemovableHandle

from ddpcov import wrappers
from ddpcov.diagnosis import graph, outputs, source
from ddpcov.diagnosis.reads import Reads

__all__ = ["ModuleRun", "Output", "Trace", "blindness"]

_MAX_OUTPUTS = 4096


@dataclass(eq=False)
class ModuleRun:
    """A module, and how it ran in the step."""

    module: nn.Module
    names: list[str]
    calls: int = 0
    grad_calls: int = 0
    line: source.Line | None = None
    """Who called it first."""
    nograd_line: source.Line | None = None
    """Who called it first from where gradient mode was on, with gradient mode off."""
    none_arguments: tuple[str, ...] = ()
    """Arguments of its forward that were None in the first call."""
    carried: dict[str, int] = field(default_factory=dict)
    """Path of each of its outputs → mask of what it carried."""
    has_raised: bool = False
    """Whether its forward ended by an exception."""
    handles: list[RemovableHandle] = field(default_factory=list)


@dataclass(eq=False)
class Output:
    """A tensor that a call from outside the model got back."""

    path: str
    caller: source.Line | None
    needs_grad: bool
    is_found: bool | None
    """Whether DDP's search finds it; unknown without DDP."""
    leads: int
    """Mask of the parameters that its graph leads to."""
    mask: int
    got_gradient: bool = False
    """Whether one arrived in the pass that is under way, or ended last."""
    ever_got_gradient: bool = False
    """Whether one arrived in any pass of the step."""
    forward: int = 0
    """Number of the call, in the step."""


def blindness(model: nn.Module) -> str | None:
    """Why the inside of this model's forward cannot be seen; nothing where it can."""
    for module in model.modules():
        is_compiled = type(module).__name__ == "OptimizedModule" or module.__dict__.get("_compiled_call_impl") is not None
        if is_compiled or hasattr(module.forward, "_torchdynamo_orig_callable"):
            return "the model is compiled, and its inside was not watched"
        if any(map(_is_compiled_method, (*vars(module).values(), *vars(type(module)).values()))):
            return f"methods of {type(module).__name__} are compiled, and their inside was not watched"
        if isinstance(module, torch.jit.ScriptModule):
            return "the model is a TorchScript module, and its inside was not watched"
        if isinstance(module, nn.DataParallel):
            return "DataParallel computes with copies of the parameters, which were not watched"
        if wrappers.is_fsdp1(module):
            return "FSDP computes with views of one flat parameter, and its inside was not watched"
    return None


def _is_compiled_method(value: Any) -> bool:
    """Whether it is a method that was compiled: whatever module it calls runs without its hooks."""
    original = getattr(value, "_torchdynamo_orig_callable", None) if isinstance(value, FunctionType) else None
    return isinstance(original, MethodType) or (isinstance(original, FunctionType) and "." in original.__qualname__)


class Trace:
    """The forwards of one step after another.

    Args:
        model: what is tracked.
        bits: id of a parameter, or of the tensor that stands for it in the forward → its bit.
    """

    def __init__(self, model: nn.Module, bits: dict[int, int]) -> None:
        self.model = model
        self._blind = blindness(model)
        self.runs: dict[int, ModuleRun] = {}
        self._inner: dict[int, nn.Module] = {}  # DDP's modules
        self._bits = bits
        self._is_stopped = False
        self.singular: set[int] = set()
        """Ids of modules that were looked at and are no copies of another; training does not make them such."""
        for name, module in wrappers.walk(model):
            if isinstance(module, nn.parallel.DistributedDataParallel):
                self._inner[id(module if self._blind else module.module)] = module
            if module is not model if self._blind else wrappers.is_wrapper(module):
                continue
            run = self.runs.get(id(module))
            if run is None:
                run = self.runs[id(module)] = ModuleRun(module, [name])
                self._watch(run)
            else:
                run.names.append(name)
        # Before the forward: one that it makes is nobody's parameter.
        self._held = {id(t): t for t in self._plain_tensors()}
        self.clear()

    def clear(self) -> None:
        """Forgets the step that ended."""
        self.reads = Reads(self._bits)
        self.outputs: list[Output] = []
        self.unregistered: dict[int, Tensor] = {}
        """Leaves that the outputs lead to, and neither the model nor what the forwards were given."""
        self.unseen: list[str] = []
        """Outputs that could not be looked into."""
        self.num_forwards = 0
        self._given: dict[int, Tensor] = {}
        self._caller: source.Line | None = None
        self._hidden_calls: str | None = None
        self._stack: list[tuple[ModuleRun, bool]] = []
        self._thread: int | None = None
        self._output_handles: list[RemovableHandle] = []
        for run in self.runs.values():
            run.calls = run.grad_calls = 0
            run.carried = {}
            run.has_raised = False
            run.line = run.nograd_line = None
            run.none_arguments = ()

    def end_step(self) -> None:
        """Takes the hooks off the outputs, and forgets the step."""
        for handle in self._output_handles:
            handle.remove()
        self._leave_mode()
        self.clear()

    def stop(self) -> None:
        """Takes every hook off."""
        self._is_stopped = True
        self.end_step()
        for run in self.runs.values():
            for handle in run.handles:
                handle.remove()

    @property
    def blind(self) -> str | None:
        """Why nothing is known of what happened inside the forward; nothing where it is."""
        failure = self.reads.failure
        if self._blind is None and failure is None and self.num_forwards == 0:
            return "no forward of the model was seen: it was compiled, or ran before the trace began"
        if self._blind is None and failure is None and self._hidden_calls is not None:
            return self._hidden_calls
        return self._blind if failure is None else f"the trace broke off ({type(failure).__name__}: {failure})"

    @property
    def is_inside(self) -> bool:
        """Whether a forward is under way."""
        return bool(self._stack)

    @property
    def has_pending(self) -> bool:
        """Whether the outputs of some forward, all of them, still wait for a gradient."""
        used = {o.forward for o in self.outputs if o.ever_got_gradient}
        return any(o.needs_grad and o.forward not in used for o in self.outputs)

    def begin_pass(self) -> None:
        """No output has received a gradient yet in the pass that begins."""
        for output in self.outputs:
            output.got_gradient = False

    def _is_evaluation(self, run: ModuleRun, has_grad: bool) -> bool:
        """Whether it is a forward of the whole model that no training can follow."""
        return not has_grad and not run.module.training and "" in run.names

    def _plain_tensors(self) -> Iterator[Tensor]:
        """Trainable tensors that modules keep in plain attributes."""
        for run in self.runs.values():
            for value in vars(run.module).values():
                if isinstance(value, Tensor) and value.requires_grad and value.is_leaf:
                    yield value
                elif isinstance(value, (list, tuple)):
                    yield from (t for t in value if isinstance(t, Tensor) and t.requires_grad and t.is_leaf)

    # Hooks.

    def _watch(self, run: ModuleRun) -> None:
        optional = _optional_arguments(run.module)

        def enter(module: nn.Module, args: Any, kwargs: Any) -> None:
            self._guarded(lambda: self._enter(run, optional, args, kwargs))

        def leave(module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
            self._guarded(lambda: self._leave(run, output))

        run.handles = [
            run.module.register_forward_pre_hook(_Hook(enter), prepend=True, with_kwargs=True),
            run.module.register_forward_hook(_Hook(leave), always_call=True, with_kwargs=True),
        ]

    def _guarded(self, action: Callable[[], None]) -> None:
        if self._is_stopped or self.reads.failure is not None or torch._C._current_graph_task_id() != -1:
            return  # inside the engine: a checkpoint computes once more what was seen already
        if self._thread is not None and self._thread != threading.get_ident():
            self._hidden_calls = "modules ran in other threads, which were not watched"
            return
        try:
            action()
        except Exception as error:
            self.reads.failure = error

    def _enter(self, run: ModuleRun, optional: list[tuple[int, str, bool]], args: Any, kwargs: Any) -> None:
        has_grad = torch.is_grad_enabled()
        if not self._stack and (self._is_evaluation(run, has_grad) or isinstance(run.module, ParametrizationList)):
            return
        if any(p is not None and id(p) not in self._bits for p in run.module._parameters.values()):
            self._hidden_calls = "other tensors stood in for the parameters (functional_call), or some were made in the forward"
        run.calls += 1
        run.grad_calls += has_grad
        is_outermost = not self._stack
        if run.calls == 1:
            run.line = source.caller(sys._getframe(3))
            run.none_arguments = tuple(
                name
                for i, name, is_none in optional
                if (args[i] is None if i < len(args) else kwargs[name] is None if name in kwargs else is_none)
            )
        if not has_grad and run.nograd_line is None and (is_outermost or self._stack[-1][1]):
            run.nograd_line = source.caller(sys._getframe(3))
        self._stack.append((run, has_grad))
        if is_outermost:
            self._thread = threading.get_ident()
            self._caller = source.caller(sys._getframe(3))
            given = [t for _, t in outputs.paths((args, kwargs)) if t.requires_grad]
            leaves = graph.leaves(graph.root_of(t) for t in given if t.grad_fn is not None)
            self._given.update((id(t), t) for t in (*(t for t in given if t.is_leaf), *leaves))
            if self._blind is None:
                self.reads.__enter__()

    def _leave(self, run: ModuleRun, output: Any) -> None:
        depth = next((i for i in reversed(range(len(self._stack))) if self._stack[i][0] is run), None)
        if depth is None:
            return
        del self._stack[depth:]  # those that an exception left behind too
        if not self._stack:
            self._leave_mode()
        if not self._stack:
            self.num_forwards += 1
        if output is None:
            run.has_raised = run.has_raised or sys.exc_info()[0] is not None
            return
        for path, tensor in [("", output)] if isinstance(output, Tensor) else outputs.paths(output):
            if mask := self.reads.mask_of(tensor):
                run.carried[path] = run.carried.get(path, 0) | mask
        if not self._stack:
            self._note_outputs(run, output)

    def _leave_mode(self) -> None:
        self._thread = None
        self._stack.clear()
        stack = torch.overrides._get_current_function_mode_stack()  # type: ignore[no-untyped-call]
        if any(mode is self.reads for mode in stack):
            # What lies above it was left there by an exception; a mode of somebody else is not ours to take away.
            if stack[-1] is self.reads:
                self.reads.__exit__(None, None, None)

    def _note_outputs(self, run: ModuleRun, value: Any) -> None:
        prefix = "" if "" in run.names else f"{source.spelled(run.names[0], self.model)}(…)"
        found = outputs.searched_by_ddp(value) if id(run.module) in self._inner else None
        tensors = list(outputs.paths(value, self.unseen))
        # Walked now: to keep the nodes until a backward pass would keep the graphs of forwards that none follows.
        roots = [graph.root_of(tensor) for _, tensor in tensors]
        masks = graph.reach(roots, self._bits, self.reads.hidden)
        for leaf in graph.leaves(roots):
            is_ours = id(leaf) in self._bits or id(leaf) in self._given
            if not is_ours and (isinstance(leaf, nn.Parameter) or id(leaf) in self._held):
                self.unregistered[id(leaf)] = leaf
        for (path, tensor), root in zip(tensors, roots, strict=True):
            if len(self.outputs) >= _MAX_OUTPUTS:
                self.unseen.append(path)
                return
            output = Output(
                path=prefix + path,
                caller=self._caller,
                needs_grad=tensor.requires_grad,
                is_found=None if found is None else id(tensor) in found,
                leads=masks.get(root, 0) | (1 << self._bits[id(tensor)] if id(tensor) in self._bits else 0),
                mask=self.reads.mask_of(tensor),
                forward=self.num_forwards,
            )
            self.outputs.append(output)
            if tensor.requires_grad:
                self._output_handles.append(tensor.register_hook(_receiver(output)))  # type: ignore[no-untyped-call]


class _Hook:
    """A hook that a copy of its module, pickled or not, does not take part in."""

    def __init__(self, call: Callable[..., None]) -> None:
        self._call = call

    def __call__(self, *args: Any) -> None:
        if not torch.compiler.is_compiling():  # the compiler takes the whole hook for nothing
            self._call(*args)

    def __reduce__(self) -> Any:
        # Takes any arguments and does nothing, and whoever reads a pickle has it, with or without ddpcov.
        return getattr, (contextlib.nullcontext(), "__exit__")


def _receiver(output: Output) -> Callable[[Any], None]:
    def receive(gradient: Any) -> None:
        if gradient is not None:
            output.got_gradient = output.ever_got_gradient = True

    return receive


def _optional_arguments(module: nn.Module) -> list[tuple[int, str, bool]]:
    """Position, name and whether None is the default, of each argument of the forward."""
    own = vars(module).get("forward")
    # Only what belongs to a class is kept: a forward of one module's own would keep the module alive.
    return _arguments.__wrapped__(own, 0) if own is not None else _arguments(type(module).forward, 1)


@functools.lru_cache(maxsize=4096)
def _arguments(forward: Any, num_bound: int) -> list[tuple[int, str, bool]]:
    with contextlib.suppress(TypeError, ValueError):
        kinds = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
        return [
            (i - num_bound if p.kind is kinds[0] else sys.maxsize, name, p.default is None)
            for i, (name, p) in enumerate(inspect.signature(forward).parameters.items())
            if p.kind in kinds and i >= num_bound
        ]
    return []
