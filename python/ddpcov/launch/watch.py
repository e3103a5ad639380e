"""Calls of modules from outside any module, as long as somebody wants to know of them."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from torch import nn

__all__ = ["Watch"]


class Watch:
    """Calls `tell(module)` before each such call, until `stop`.

    It stands in place of `nn.Module.__call__`, which every class of module has by inheritance, and stands back while the
    module runs: calls inside cost nothing, and a compiler that looks at them sees torch's own method.
    """

    def __init__(self, tell: Callable[[nn.Module], None]) -> None:
        self._tell = tell
        module_class: Any = nn.Module
        self._original = module_class.__call__
        self._is_over = False
        watch = self

        @functools.wraps(self._original)
        def call(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            module_class.__call__ = watch._original
            try:
                if not watch._is_over:
                    watch._tell(module)
                return module(*args, **kwargs)
            finally:
                if not watch._is_over:
                    module_class.__call__ = watch._call

        self._call: Any = call
        module_class.__call__ = call

    def stop(self) -> None:
        """Puts torch's own method back, for good."""
        self._is_over = True
        module_class: Any = nn.Module
        if module_class.__call__ is self._call:
            module_class.__call__ = self._original
