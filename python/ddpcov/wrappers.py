"""All that is known of data-parallel wrappers: how they name parameters, their flags, and what they wait for."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DataParallel, DistributedDataParallel

from ddpcov.report import Wrapper

__all__ = [
    "Averaging",
    "Sharding",
    "ddps_in",
    "examine",
    "is_compiled",
    "is_fsdp1",
    "is_lazy",
    "is_trainable",
    "is_wrapper",
    "reducing_leaves",
    "sharding_of",
    "walk",
]

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


def is_wrapper(module: nn.Module) -> bool:
    """Whether it only stands round a module that bears its name."""
    return isinstance(module, _WRAPPERS_WITH_MODULE) or not _TRANSPARENT.isdisjoint(module._modules)


def is_compiled(module: nn.Module, inner: nn.Module) -> bool:
    """Whether `module` is what torch.compile made of `inner`."""
    return module._modules.get("_orig_mod") is inner


@dataclass
class Sharding:
    """How FSDP modules split parameters into those that a user knows and those that autograd accumulates into."""

    leaves: dict[int, Tensor] = field(default_factory=dict)
    """FSDP2, by id: parameter of the model → the gathered copy that the forward computes with."""
    owners: dict[int, nn.Parameter] = field(default_factory=dict)
    """The way back; a gathered copy may stand in the module in place of its parameter."""
    flat: dict[int, nn.Parameter] = field(default_factory=dict)
    """FSDP1 with `use_orig_params`, by id of the FSDP module: the flat parameter, which no module registers."""
    hidden: dict[int, nn.Parameter] = field(default_factory=dict)
    """By id of an original parameter: the flat one that stands for it. Autograd never sees the original."""
    is_complete: bool = True
    """Whether all gathered copies exist; FSDP2 makes them in the first forward."""


def sharding_of(modules: Iterable[nn.Module]) -> Sharding:
    """Looks at the FSDP modules among them."""
    out = Sharding()
    for module in modules:
        find_state: Any = getattr(module, "_get_fsdp_state", None)
        state = find_state() if isinstance(find_state, MethodType) else None
        for shard in (s for group in _fsdp2_groups(state) for s in group.fsdp_params):
            gathered = getattr(shard, "_unsharded_param", None)
            out.is_complete &= gathered is not None
            if gathered is not None:
                out.leaves[id(shard.sharded_param)] = gathered
                out.owners[id(gathered)] = shard.sharded_param
        handle = getattr(module, "_handle", None) if is_fsdp1(module) else None
        if handle is not None and handle._use_orig_params:
            out.flat[id(module)] = handle.flat_param
            out.hidden.update((id(p), handle.flat_param) for p in handle.flat_param._params)
    return out


def _fsdp2_groups(state: Any) -> Iterable[Any]:
    if hasattr(state, "_fsdp_param_groups"):  # one per mesh, in later versions of torch
        return state._fsdp_param_groups  # type: ignore[no-any-return]
    group = getattr(state, "_fsdp_param_group", None)
    return () if group is None else (group,)


def reducing_leaves(modules: Iterable[nn.Module]) -> list[tuple[Tensor, bool]] | None:
    """FSDP2: the leaves whose gradients the coming pass reduces, and whether each holds one of an earlier pass, to be reduced
    with it; None where that is not known."""
    out: list[tuple[Tensor, bool]] = []
    for module in modules:
        find_state: Any = getattr(module, "_get_fsdp_state", None)
        state = find_state() if isinstance(find_state, MethodType) else None
        for group in _fsdp2_groups(state):
            if not hasattr(group, "reduce_grads"):
                return None
            if group.reduce_grads and not getattr(group, "reduce_scatter_unused_params", False):
                out += (
                    (leaf, leaf.grad is not None or getattr(shard, "unsharded_accumulated_grad", None) is not None)
                    for shard in group.fsdp_params
                    if (leaf := getattr(shard, "_unsharded_param", None)) is not None
                )
    return out


def is_fsdp1(module: nn.Module) -> bool:
    """Whether it is a `FullyShardedDataParallel` module."""
    return type(module).__name__ == "FullyShardedDataParallel"


@dataclass
class Averaging:
    """What the DDP modules inside a model wait for. Empty where there is none."""

    wrapper: Wrapper
    ddps: list[DistributedDataParallel] = field(default_factory=list)
    awaited: list[Tensor] = field(default_factory=list)  # held, so that their ids stay theirs
    awaited_by: list[list[Tensor]] = field(default_factory=list)  # the same, of each in `ddps`
    compiled: set[int] = field(default_factory=set)  # ids of those in `ddps` that torch.compile was given whole
    wrapped: list[Tensor] = field(default_factory=list)
    ignored: list[Tensor] = field(default_factory=list)

    def is_synchronised(self) -> bool:
        """Whether the forward that ran last prepared the reducer, so that the coming pass is averaged.

        DDP remembers it in this flag: `no_sync`, and a forward without gradients, clear it.
        """
        return any(ddp.require_forward_param_sync for ddp in self.ddps)


def examine(model: nn.Module) -> Averaging:
    """Looks for wrappers anywhere in `model`."""
    ddps = ddps_in(model.modules())
    if not ddps:
        return Averaging(Wrapper(kind=_sharding(model)))
    wrapper = Wrapper(
        "ddp",
        find_unused_parameters=any(ddp.find_unused_parameters for ddp in ddps),
        static_graph=any(ddp.static_graph for ddp in ddps),
    )
    awaited_by = [_awaited(ddp) for ddp in ddps]
    return Averaging(
        wrapper,
        ddps,
        awaited=[p for awaited in awaited_by for p in awaited],
        awaited_by=awaited_by,
        compiled={id(d) for m in model.modules() if "_orig_mod" in m._modules for d in ddps_in(m.modules())}
        | {id(ddp) for ddp in ddps if ddp.__dict__.get("_compiled_call_impl") is not None},
        wrapped=[p for ddp in ddps for p in ddp._module_parameters],
        ignored=[p for ddp in ddps for n, p in ddp.module.named_parameters() if n in ddp.parameters_to_ignore],
    )


def ddps_in(modules: Iterable[nn.Module]) -> list[DistributedDataParallel]:
    """The DDP modules among them, each once."""
    return list({id(m): m for m in modules if isinstance(m, DistributedDataParallel)}.values())


def _sharding(model: nn.Module) -> str:
    for module in model.modules():
        if hasattr(module, "_get_fsdp_state"):
            return "fsdp2"
        if is_fsdp1(module):
            return "fsdp1"
    return "none"


def _awaited(ddp: DistributedDataParallel) -> list[Tensor]:
    """The tensors that DDP's reducer was built with: those that required a gradient at that moment."""
    known: list[Tensor] = ddp._module_parameters
    logged = ddp._get_ddp_logging_data()  # type: ignore[no-untyped-call]
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
