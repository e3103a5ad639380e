"""Calls of modules from outside any module, as long as somebody wants to know of them."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from torch import nn

__all__ = ["Watch"]

_SEAM = "_compiled_call_impl"


class Watch:
    """Calls `tell(module)` before each such call, until `stop`.

    Every call of a module looks for an attribute in which `Module.compile` keeps what it made. The watch stands in the class
    under that name, and stands back while a module runs: calls inside cost nothing, and a compiler finds all as it should be.
    To replace `Module.__call__` instead would not do, as `torch.compile` binds that and would compile the replacement.
    """

    def __init__(self, tell: Callable[[nn.Module], None]) -> None:
        self._tell = tell
        self._is_over = False
        self._set(self)

    def stop(self) -> None:
        """Leaves torch as it was, for good."""
        self._is_over = True
        self._set(None)

    @staticmethod
    def _set(value: Watch | None) -> None:
        setattr(nn.Module, _SEAM, value)

    def __get__(self, module: nn.Module | None, owner: Any = None) -> Any:
        return None if module is None else functools.partial(self._call, module)

    def __set__(self, module: nn.Module, compiled: Any) -> None:
        module.__dict__[_SEAM] = compiled

    def _call(self, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        self._set(None)
        try:
            if not self._is_over:
                self._tell(module)
            return (module.__dict__.get(_SEAM) or module._call_impl)(*args, **kwargs)
        finally:
            if not self._is_over:
                self._set(self)
