"""Corrections that are applied to a script from outside: before its DDP is built, and in the flags that it is built with."""

from __future__ import annotations

import inspect
import runpy
from collections.abc import Callable
from typing import Any

from torch import nn

from ddpcov import _core, wrappers
from ddpcov.launch.plan import FLAGS, Plan

__all__ = ["correct"]


def correct(
    plan: Plan, order: int, init: Callable[..., None], ddp: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Arguments for the constructor of a DDP, as the plan's corrections want them.

    Raises:
        ddpcov.Error: a correction cannot be applied. The script must not run on as if it had been.
    """
    bound = inspect.signature(init).bind(ddp, *args, **kwargs)
    given = bound.arguments
    for name in plan.corrections:
        if name == "freeze":
            _freeze(given["module"], plan.freeze.get(str(order), []))
        elif name in FLAGS:
            given.update(FLAGS[name])
        else:
            given["module"] = _apply_file(name, given["module"])
    return bound.args[1:], bound.kwargs


def _freeze(model: nn.Module, names: list[str]) -> None:
    wanted = set(names)
    for prefix, module in wrappers.walk(model):
        for key, parameter in module._parameters.items():
            name = f"{prefix}.{key}" if prefix else key
            if parameter is not None and name in wanted:
                parameter.requires_grad_(False)
                wanted.discard(name)
    if wanted:
        raise _core.Error(
            f"freeze: the model has no parameter {', '.join(sorted(wanted))}; the run that named it was of another model"
        )


def _apply_file(path: str, model: nn.Module) -> nn.Module:
    function = runpy.run_path(path).get("correct")
    if not callable(function):
        raise _core.Error(f"{path}: defines no function correct(model), which is called with the module before it is wrapped")
    out = function(model)
    if out is None:
        return model
    if not isinstance(out, nn.Module):
        raise _core.Error(f"{path}: correct(model) returned {type(out).__name__}, expected a module, or None to keep the given")
    return out
