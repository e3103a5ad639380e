"""What a forward returned, in the structure in which its caller sees it."""

from __future__ import annotations

import dataclasses
from collections import deque
from collections.abc import ItemsView, Iterator, KeysView, Mapping, ValuesView
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributions import Distribution

__all__ = ["paths", "searched_by_ddp"]

_MAX_DEPTH = 16
_MAX_MEMBERS = 10_000


def paths(value: Any, unseen: list[str] | None = None) -> Iterator[tuple[str, Tensor]]:
    """Every tensor in a return value, each once, with the path to it: `[1]`, `.aux`, `["mask"]`, or nothing at the top.

    `unseen` is given the paths of what may hold more and cannot be looked into.
    """
    seen: set[int] = set()
    left = _MAX_MEMBERS
    stack = [("", value, 0)]
    while stack and left:
        path, one, depth = stack.pop()
        if id(one) in seen:
            continue
        left -= 1
        if isinstance(one, Tensor):
            seen.add(id(one))
            yield path, one
        elif depth < _MAX_DEPTH:
            members = list(_members(one))
            if unseen is not None and not members and _may_hide(one):
                unseen.append(path)
            if members:
                seen.add(id(one))
            stack.extend((path + step, member, depth + 1) for step, member in reversed(members))
        elif unseen is not None:
            unseen.append(path)
    if stack and unseen is not None:
        unseen.append(stack[-1][0])


def _members(value: Any) -> Iterator[tuple[str, Any]]:
    """The parts of a value, each with the step that leads to it."""
    if value is None or isinstance(value, (str, bytes, bool, int, float, complex, type, nn.Module, torch.dtype)):
        return
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        yield from ((f".{field}", getattr(value, field)) for field in value._fields)
    elif dataclasses.is_dataclass(value):  # a ModelOutput too, which is a dict besides
        yield from ((f".{f.name}", getattr(value, f.name, None)) for f in dataclasses.fields(value))
    elif isinstance(value, Mapping):
        yield from ((f'["{k}"]' if isinstance(k, str) else f"[{k!r}]", v) for k, v in value.items())
    elif isinstance(value, (list, tuple, deque, ValuesView)):
        yield from ((f"[{i}]", v) for i, v in enumerate(value))
    elif isinstance(value, (set, frozenset)):
        yield from ((f"{{{i}}}", v) for i, v in enumerate(value))
    elif isinstance(value, Distribution) or type(value).__module__.split(".")[0] not in _CLOSED:
        names = [*getattr(value, "__dict__", ()), *_slots(type(value))]
        yield from ((f".{name}", getattr(value, name, None)) for name in names)


_CLOSED = ("builtins", "torch", "numpy", "functools", "collections")


def _may_hide(value: Any) -> bool:
    """Whether it is code that holds tensors out of sight: a closure, a bound method, a generator."""
    return callable(value) or isinstance(value, (Iterator, ItemsView, KeysView))


def _slots(kind: type) -> Iterator[str]:
    for owner in kind.__mro__:
        slots = owner.__dict__.get("__slots__", ())
        yield from (name for name in ((slots,) if isinstance(slots, str) else slots) if not name.startswith("__"))


def searched_by_ddp(value: Any) -> set[int] | None:
    """Ids of the tensors that DDP's own search finds in a return value; nothing where this torch has no such search."""
    search = getattr(torch.nn.parallel.distributed, "_find_tensors", None)
    return None if search is None else {id(t) for t in search(value) if isinstance(t, Tensor)}
