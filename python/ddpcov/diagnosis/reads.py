"""Which parameters the operations of a forward read, and where their values go.

A torch function mode sees every operation between entering the outermost module and leaving it. Each tensor that an operation
makes carries a mask: a bit for each parameter whose value went into it, and a bit for each cut, an operation that took a
tensor with a graph and gave one without. The method is dynamic taint tracking (Schwartz, Avgerinos and Brumley, 2010), with
integers as sets; masks stand beside the tensors, under their ids, and go when they go.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from types import FrameType
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from ddpcov.diagnosis import source

__all__ = ["Cut", "Reads", "Usage"]

# Results that depend on the shape, type or place of an argument, never on its values.
_VALUELESS = frozenset(
    "zeros_like ones_like empty_like full_like rand_like randn_like randint_like new_zeros new_ones new_empty new_full"
    " new_empty_strided requires_grad_ retain_grad register_hook grad _grad grad_fn _base layout names is_leaf".split()
)
# What a value leaves torch by. A truth value steers the program and is no data.
_LEAVING = frozenset("item tolist numpy __float__ __int__ __complex__ __index__ __array__ __dlpack__".split())
# In-place operations that do not read what they overwrite.
_OVERWRITING = frozenset("copy_ zero_ fill_ set_ normal_ uniform_ __set__ resize_ random_ bernoulli_ exponential_".split())


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
        self._left: dict[int, tuple[Any, int]] = {}
        self._has_views_written = False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Runs the operation, then looks at it."""
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
        entry = self._taint.get(id(tensor))
        if entry is not None and entry[0]() is tensor:
            mask |= entry[1]
        if self._has_views_written and tensor._is_view() and tensor._base is not None:
            entry = self._taint.get(id(tensor._base))
            mask |= entry[1] if entry is not None else 0
        return mask

    def _look_at(self, func: Any, args: Any, kwargs: Any, result: Any) -> None:
        name = _name(func)
        made = [result] if isinstance(result, Tensor) else list(_tensors(result))
        is_writing = result is None and name in ("__setitem__", "__set__")
        is_leaving = not made and name in _LEAVING
        if not (made or is_writing or is_leaving) or name in _VALUELESS:
            return
        is_in_place = is_writing or (bool(args) and result is args[0])
        mask = read = 0
        needs_grad = False
        for position, value in enumerate((*args, *kwargs.values()) if kwargs else args):
            for tensor in (value,) if isinstance(value, Tensor) else _tensors(value):
                is_target = position == 0 and is_in_place
                if is_target and name in _OVERWRITING:
                    continue
                own = self._mask(tensor)
                mask |= own
                if not is_target and id(tensor) in self._bits:
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
        targets = [args[0]] if is_writing else made
        if needs_grad and not any(t.requires_grad for t in targets):
            is_smooth = any(t.is_floating_point() or t.is_complex() for t in targets)
            mask |= self._cut(name, mask, leaves_torch=False, is_smooth=is_smooth)
        for tensor in targets:
            self._set(tensor, mask)
            if is_in_place and tensor._is_view() and tensor._base is not None:
                self._has_views_written = True
                self._set(tensor._base, mask | self._mask(tensor._base))

    def _set(self, tensor: Tensor, mask: int) -> None:
        key, taint = id(tensor), self._taint

        def forget(gone: Any) -> None:
            if (entry := taint.get(key)) is not None and entry[0] is gone:
                del taint[key]

        entry = taint.get(key)
        if entry is not None and entry[0]() is tensor:
            taint[key] = entry[0], mask
        else:
            taint[key] = weakref.ref(tensor, forget), mask

    def _cut(self, name: str, mask: int, *, leaves_torch: bool, is_smooth: bool) -> int:
        line = source.caller(sys._getframe(3))
        key = (name, *(line or ()))
        index = self._known_cuts.get(key)
        if index is None:
            index = self._known_cuts[key] = len(self.cuts)
            self.cuts.append(Cut(name, line, leaves_torch, is_smooth))
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
        frame: FrameType | None = sys._getframe(3)
        ctx = None
        while frame is not None:
            # The forward of an autograd Function is known by its first argument, which is the node that it will be.
            if frame.f_code.co_name == "forward" and frame.f_code.co_argcount:
                ctx = frame.f_locals.get(frame.f_code.co_varnames[0])
                if isinstance(ctx, torch.autograd.function.FunctionCtx):
                    break
            frame = frame.f_back
        if frame is None:
            return
        needs_grad = any(getattr(ctx, "needs_input_grad", ()))
        self.hidden[ctx] = self.hidden.get(ctx, 0) | read
        for bit in _bits(read):
            known = self.in_function.get(bit)
            if known is None or (needs_grad and not known.needs_grad):
                function = type(ctx).__name__.removesuffix("Backward")
                self.in_function[bit] = InFunction(function, source.caller(frame), needs_grad)


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
