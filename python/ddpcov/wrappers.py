"""All that is known of data-parallel wrappers: how they name parameters, their flags, and what they wait for."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.nn.parallel import DataParallel, DistributedDataParallel

from ddpcov.report import Wrapper

__all__ = ["Averaging", "examine", "walk"]

# Attributes under which a wrapper keeps the module it wraps. `module` is an ordinary name elsewhere, so it counts only where
# the owner is a wrapper by class.
_TRANSPARENT = {"_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"}
_WRAPPERS_WITH_MODULE = (DistributedDataParallel, DataParallel)

# DDP's list of parameters can be read back from copies of its gradient buckets. Below this size that costs nothing.
_SMALL_BYTES = 64 << 20


def walk(module: nn.Module, name: str = "", path: tuple[nn.Module, ...] = ()) -> Iterator[tuple[str, nn.Module]]:
    """Every module with its fully qualified name without wrapper prefixes, in the order of `named_modules`.

    A module registered in several places comes once for each, so that all names of a tied parameter are seen; only a cycle is
    cut.
    """
    yield name, module
    path = (*path, module)
    for key, child in module._modules.items():
        if child is None or any(child is above for above in path):
            continue
        is_wrapped = key in _TRANSPARENT or (key == "module" and isinstance(module, _WRAPPERS_WITH_MODULE))
        yield from walk(child, name if is_wrapped else f"{name}.{key}" if name else key, path)


@dataclass
class Averaging:
    """What the DDP modules inside a model wait for. Empty where there is none."""

    wrapper: Wrapper
    ddps: list[DistributedDataParallel] = field(default_factory=list)
    awaited: list[Tensor] = field(default_factory=list)  # held, so that their ids stay theirs
    wrapped: list[Tensor] = field(default_factory=list)
    ignored: list[Tensor] = field(default_factory=list)

    def is_synchronised(self) -> bool:
        """Whether the forward that ran last prepared the reducer, so that the coming pass is averaged.

        DDP remembers it in this flag: `no_sync`, and a forward without gradients, clear it.
        """
        return any(ddp.require_forward_param_sync for ddp in self.ddps)


def examine(model: nn.Module) -> Averaging:
    """Looks for wrappers anywhere in `model`."""
    ddps = [m for m in model.modules() if isinstance(m, DistributedDataParallel)]
    if not ddps:
        return Averaging(Wrapper(kind=_sharding(model)))
    wrapper = Wrapper(
        "ddp",
        find_unused_parameters=any(ddp.find_unused_parameters for ddp in ddps),
        static_graph=any(ddp.static_graph for ddp in ddps),
    )
    return Averaging(
        wrapper,
        ddps,
        awaited=[p for ddp in ddps for p in _awaited(ddp)],
        wrapped=[p for ddp in ddps for p in ddp._module_parameters],
        ignored=[p for ddp in ddps for n, p in ddp.module.named_parameters() if n in ddp.parameters_to_ignore],
    )


def _sharding(model: nn.Module) -> str:
    for module in model.modules():
        if hasattr(module, "_get_fsdp_state"):
            return "fsdp2"
        if type(module).__name__ == "FullyShardedDataParallel":
            return "fsdp1"
    return "none"


def _awaited(ddp: DistributedDataParallel) -> list[Tensor]:
    """The tensors that DDP's reducer was built with: those that required a gradient at that moment."""
    known: list[Tensor] = ddp._module_parameters
    logged = ddp._get_ddp_logging_data()
    if logged["num_parameter_tensors"] == len(known):
        return known
    trainable = [p for p in known if p.requires_grad]
    size = logged["total_parameter_size_bytes"]
    is_plausible = len(trainable) == logged["num_parameter_tensors"] and size == sum(map(_num_bytes, trainable))
    if is_plausible and size > _SMALL_BYTES:
        return trainable
    in_buckets = {id(p) for bucket in ddp.reducer._get_zeros_like_grad_buckets() for p in bucket.parameters()}
    return [p for p in known if id(p) in in_buckets]


def _num_bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def is_trainable(parameter: Tensor) -> bool:
    """Whether gradients can be accumulated into it: a leaf that requires them."""
    return parameter.requires_grad and parameter.is_leaf


def is_lazy(parameter: Tensor) -> bool:
    """Whether it still waits for its first input to know its shape."""
    return torch.nn.parameter.is_lazy(parameter)
