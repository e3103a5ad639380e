"""Which parameters the operations of a forward read, and where their values go.

A torch function mode sees every operation between entering the outermost module and leaving it. Each tensor that an operation
makes carries a mask: a bit for each parameter whose value went into it, and a bit for each cut, an operation that took a
tensor with a graph and gave one without. The method is dynamic taint tracking (Schwartz, Avgerinos and Brumley, 2010), with
integers as sets; masks stand beside the tensors, under their ids, and go when they go.
"""

from __future__ import annotations

import functools
import inspect
import sys
import weakref
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from types import CodeType, FrameType
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from ddpcov.diagnosis import graph, source

__all__ = ["Cut", "Reads", "Usage"]

# Results that depend on the shape, type or place of an argument, never on its values.
_VALUELESS = frozenset(
    "zeros_like ones_like empty_like full_like rand_like randn_like randint_like new_zeros new_ones new_empty new_full"
    " new_empty_strided requires_grad_ retain_grad register_hook grad _grad grad_fn _base layout names is_leaf".split()
)
# Operations that take nothing but shape, type or place from all arguments but the first.
_ALIKE = frozenset("type_as to expand_as view_as reshape_as".split())
# They give the same values without a graph, which is no use of them yet.
_LOOKING = frozenset(("data", "detach"))
# What a value leaves torch by. A truth value steers the program and is no data.
_LEAVING = frozenset("item tolist numpy __float__ __int__ __complex__ __index__ __array__ __dlpack__".split())
# In-place operations that do not read what they overwrite.
_OVERWRITING = frozenset("copy_ zero_ fill_ set_ normal_ uniform_ __set__ resize_ random_ bernoulli_ exponential_".split())
_MIN_SWEPT = 4096  # entries of tensors, among them those that are gone


_SET_GRAD: Any = torch._C._set_grad_enabled


@dataclass
class Usage:
    """How a parameter was read first: by which operation, in which line."""

    by: str
    line: source.Line | None


@dataclass
class InFunction(Usage):
    """Read inside the forward of a `torch.autograd.Function`, where gradient mode is off."""

    needs_grad: bool
    """Whether an argument of the Function required a gradient, so that its backward runs at all."""


@dataclass
class Cut(Usage):
    """Where a value went on without its graph."""

    leaves_torch: bool
    is_smooth: bool = False
    """Whether what it gave could have had a gradient: floating point, not an index or a truth value."""
    grad_off: bool = False
    """Whether gradient mode was off, which is then what cut it."""
    mask: int = 0
    """What went into it."""


class Reads(TorchFunctionMode):
    """Sees the operations of the forwards of one step; `bits` gives each parameter (by id) its bit."""

    def __init__(self, bits: dict[int, int]) -> None:
        super().__init__()
        self._bits = bits
        self._first_cut = max(bits.values(), default=-1) + 1
        self.with_grad: dict[int, Usage] = {}
        self.without_grad: dict[int, Usage] = {}
        self.in_function: dict[int, InFunction] = {}
        self.hidden: dict[Any, int] = {}
        """Node of an autograd Function → mask of what its forward read without being given it."""
        self.cuts: list[Cut] = []
        self.failure: Exception | None = None
        self._known_cuts: dict[tuple[Any, ...], int] = {}
        self._taint: dict[int, tuple[weakref.ref[Tensor], int]] = {}
        self._sweep_at = _MIN_SWEPT
        self._left: dict[int, tuple[Any, int]] = {}
        self._has_views_written = False
        self.is_transformed = False
        """Whether `torch.func` was at work, inside which tensors come and go unseen."""
        # What the program set. The forward of an autograd Function runs with gradient mode off besides, which nobody set.
        self._grad_was_set = torch.is_grad_enabled()

    def __enter__(self) -> Reads:
        self._grad_was_set = torch.is_grad_enabled()
        return super().__enter__()  # type: ignore[no-any-return, no-untyped-call]

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Runs the operation, then looks at it."""
        if torch.compiler.is_compiling():  # the compiler takes this function in, and must find nothing of ours in it
            return func(*args, **(kwargs or {}))
        if func is _SET_GRAD and _function_round(sys._getframe(1)) is None:
            self._grad_was_set = bool(args[0])
        result = func(*args, **kwargs) if kwargs else func(*args)
        if self.failure is None and torch._C._current_graph_task_id() == -1:
            try:
                self._look_at(func, args, kwargs, result)
            except Exception as error:  # ours: the trace is of no use any more, the forward goes on
                self.failure = error
        return result

    def mask_of(self, value: Any) -> int:
        """The bits of a tensor, or of all tensors inside lists, tuples and dicts."""
        return sum_masks(self._mask(t) for t in _tensors(value))

    def cuts_in(self, mask: int) -> Iterator[tuple[int, Cut]]:
        """The cuts whose bits are set, in the order in which they ran."""
        mask >>= self._first_cut
        while mask:
            index = (mask & -mask).bit_length() - 1
            yield index, self.cuts[index]
            mask &= mask - 1

    def _mask(self, tensor: Tensor) -> int:
        bit = self._bits.get(id(tensor))
        mask = 0 if bit is None else 1 << bit
        seen = [tensor]
        if self._has_views_written and tensor._is_view() and tensor._base is not None:
            seen.append(tensor._base)
        for one in seen:
            entry = self._taint.get(id(one))
            if entry is not None and entry[0]() is one:
                mask |= entry[1]
        if not mask and tensor.grad_fn is not None:
            mask = self._mask_of_unseen(tensor)
        return mask

    def _mask_of_unseen(self, tensor: Tensor) -> int:
        """Of a tensor that an operation made which does not come by here (TorchScript, an extension): what its graph says."""
        root = graph.root_of(tensor)
        mask = graph.reach([root], self._bits, {}).get(root, 0)
        for bit in _bits(mask):
            self.with_grad.setdefault(bit, Usage("an operation that the trace does not see", None))
        self._set(tensor, mask)
        return mask

    def _look_at(self, func: Any, args: Any, kwargs: Any, result: Any) -> None:
        name = _name(func)
        self.is_transformed = self.is_transformed or torch._C._functorch.peek_interpreter_stack() is not None
        made = [result] if isinstance(result, Tensor) else list(_tensors(result))
        is_writing = result is None and name in ("__setitem__", "__set__")
        is_leaving = not made and name in _LEAVING
        if not (made or is_writing or is_leaving) or name in _VALUELESS:
            return
        is_in_place = is_writing or (bool(args) and result is args[0])
        mask = read = 0
        needs_grad = False
        everything = args[:1] if name in _ALIKE else (*args, *kwargs.values()) if kwargs else args
        for position, value in enumerate(everything):
            for tensor in (value,) if isinstance(value, Tensor) else _tensors(value):
                is_target = position == 0 and is_in_place
                if is_target and name in _OVERWRITING:
                    continue
                mask |= self._mask(tensor)
                if not is_target and id(tensor) in self._bits and name not in _LOOKING:
                    read |= 1 << self._bits[id(tensor)]
                needs_grad = needs_grad or (tensor.requires_grad and not is_target)
            if self._left and not isinstance(value, Tensor):
                mask |= self._mask_of_left(value)
        if read:
            self._note_reads(read, name)
        if not mask:
            return
        if is_leaving:
            self._note_left(result, mask | self._cut(name, mask, leaves_torch=True, is_smooth=True))
            return
        needs_grad = needs_grad or name == "detach_"
        for tensor in [args[0]] if is_writing else made:
            own = mask
            if needs_grad and not tensor.requires_grad:
                is_smooth = tensor.is_floating_point() or tensor.is_complex()
                own |= self._cut(name, mask, leaves_torch=False, is_smooth=is_smooth)
            self._set(tensor, own)
            if is_in_place:
                self._has_views_written = True
                if tensor._is_view() and tensor._base is not None:
                    self._set(tensor._base, own | self._mask(tensor._base))

    def _set(self, tensor: Tensor, mask: int) -> None:
        entry = self._taint.get(id(tensor))
        ref = entry[0] if entry is not None and entry[0]() is tensor else weakref.ref(tensor)
        self._taint[id(tensor)] = ref, mask
        # Not by a callback of the reference: a Ctrl-C that arrives while a callback runs is lost.
        if len(self._taint) >= self._sweep_at:
            self._taint = {key: entry for key, entry in self._taint.items() if entry[0]() is not None}
            self._sweep_at = 2 * len(self._taint) + _MIN_SWEPT

    def _cut(self, name: str, mask: int, *, leaves_torch: bool, is_smooth: bool) -> int:
        grad_off = not torch.is_grad_enabled()
        if grad_off and not leaves_torch and _function_round(sys._getframe(3)) is not None:
            return 0  # everything looks cut there; whether it is, the Function's own node says
        line = source.caller(sys._getframe(3))
        key = (name, *(line or ()))
        index = self._known_cuts.get(key)
        if index is None:
            index = self._known_cuts[key] = len(self.cuts)
            self.cuts.append(Cut(name, line, leaves_torch, is_smooth, grad_off))
        self.cuts[index].mask |= mask
        return 1 << (self._first_cut + index)

    def _note_left(self, value: Any, mask: int) -> None:
        values = value if isinstance(value, (list, tuple)) else (value,)
        for one in (value, *_flat(values)):
            if not isinstance(one, bool):
                self._left[id(one)] = one, mask  # held, so that its id stays its own

    def _mask_of_left(self, value: Any) -> int:
        mask = 0
        for one in (value, *_flat((value,))):
            while one is not None:
                known = self._left.get(id(one))
                # Small integers are shared by everybody: that it is the same object proves nothing.
                if known is not None and not (isinstance(one, int) and -6 < one < 257):
                    mask |= known[1]
                one = getattr(one, "base", None)  # of a view of a numpy array
        return mask

    def _note_reads(self, read: int, name: str) -> None:
        with_grad = torch.is_grad_enabled()
        known = self.with_grad if with_grad else self.without_grad
        if not with_grad:
            self._note_in_function(read, name)
        for bit in _bits(read):
            if bit not in known:
                known[bit] = Usage(name, source.caller(sys._getframe(3)))

    def _note_in_function(self, read: int, name: str) -> None:
        found = _function_round(sys._getframe(3)) if self._grad_was_set else None
        if found is None:
            return
        frame, function, ctx = found
        arguments = _arguments(frame)
        needs_grad = any(t.requires_grad for t in arguments) if ctx is None else any(ctx.needs_input_grad)
        given = sum_masks(1 << self._bits[id(t)] for t in arguments if id(t) in self._bits)
        for bit in _bits(read & given) if needs_grad else ():  # the Function's own node leads to it
            self.with_grad.setdefault(bit, Usage(function, source.caller(frame)))
        if ctx is not None and read & ~given:
            self.hidden[ctx] = self.hidden.get(ctx, 0) | (read & ~given)
        for bit in _bits(read & ~given):
            known = self.in_function.get(bit)
            if known is None or (needs_grad and not known.needs_grad):
                self.in_function[bit] = InFunction(function, source.caller(frame), needs_grad)


def _arguments(frame: FrameType) -> list[Tensor]:
    """The tensors that a function was given."""
    code = frame.f_code
    number = code.co_argcount + code.co_kwonlyargcount + bool(code.co_flags & inspect.CO_VARARGS)
    return list(_tensors([frame.f_locals.get(name) for name in code.co_varnames[:number]]))


def _function_round(frame: FrameType | None) -> tuple[FrameType, str, Any] | None:
    """The forward of an autograd Function that is being run: its frame, the Function's name, and its ctx if it has one."""
    while frame is not None:
        code = frame.f_code
        if code.co_name == "forward":
            first = frame.f_locals.get(code.co_varnames[0]) if code.co_argcount else None
            if isinstance(first, torch.autograd.function.FunctionCtx):
                return frame, type(first).__name__.removesuffix("Backward"), first
            if (name := _functions_without_ctx(code)) is not None:
                return frame, name, None
        frame = frame.f_back
    return None


@functools.lru_cache(maxsize=512)
def _functions_without_ctx(code: CodeType) -> str | None:
    """The Function whose forward this is the code of, if it is one that has a `setup_context`."""
    kinds = list(torch.autograd.Function.__subclasses__())
    while kinds:
        kind = kinds.pop()
        if getattr(kind.forward, "__code__", None) is code:
            return kind.__name__
        kinds += kind.__subclasses__()
    return None


def sum_masks(masks: Iterable[int]) -> int:
    """The union."""
    out = 0
    for mask in masks:
        out |= mask
    return out


def _bits(mask: int) -> Iterator[int]:
    while mask:
        yield (mask & -mask).bit_length() - 1
        mask &= mask - 1


def _tensors(value: Any, depth: int = 0) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (list, tuple)) and depth < 3:
        for one in value:
            yield from _tensors(one, depth + 1)
    elif isinstance(value, dict) and depth < 3:
        for one in value.values():
            yield from _tensors(one, depth + 1)


def _flat(values: Any, depth: int = 0) -> Iterator[Any]:
    for one in values:
        if isinstance(one, (list, tuple)) and depth < 4:
            yield one
            yield from _flat(one, depth + 1)
        elif one is not None and not isinstance(one, (str, bool)):
            yield one


def _name(func: Any) -> str:
    name: str = getattr(func, "__name__", "") or type(func).__name__
    if name == "__get__":
        return getattr(func.__self__, "__name__", name)
    return name
