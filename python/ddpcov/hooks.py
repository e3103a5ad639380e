"""Which tensors are the model's parameters now, and the hooks on them.

A model changes while it trains: layers are frozen, thawed, replaced, added, tied. Before each backward pass `Hooks.refresh`
asks whether it did, at the cost of one pass in C over the modules' own dicts, and arms what is new.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, cast

from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from ddpcov import _core, wrappers

__all__ = ["Hooks"]

_DDP_NUMBERS = re.compile(r"Parameter at index (\d+)|indices which did not receive grad for rank \d+: ([\d ]+)")

Definition = tuple[str, list[str], list[int], str, int, str]  # as Recorder.define takes it


@dataclass
class _Armed:
    tensor: Tensor
    param_id: int
    cdata: int
    handles: tuple[RemovableHandle, ...]

    def remove(self) -> None:
        tensor: Any = self.tensor
        is_swapped = self.cdata != tensor._cdata
        for handle in self.handles:
            handle.remove()
        # Without a hook an empty dict of them would still be asked in each pass; with the other half of a tensor that was
        # swapped Python goes on listing the hooks of the one that is gone, and would add ours to those dead lists.
        if is_swapped or not tensor._backward_hooks:
            tensor._backward_hooks = None
        if is_swapped or not tensor._post_accumulate_grad_hooks:
            tensor._post_accumulate_grad_hooks = None


@dataclass
class _Seen:
    """The model as it was when it was last looked through; a change of any of this calls for another look."""

    tensors: list[Tensor] = field(default_factory=list)
    inventory: _core.Inventory | None = None  # none where something about it is not known yet
    num_optimized: int = -1

    def is_current(self, num_optimized: int, *, with_hooks: bool) -> bool:
        if self.inventory is None or num_optimized != self.num_optimized:
            return False
        return self.inventory.is_current(with_hooks)


class Hooks:
    """Keeps the native slots of a recorder on the parameters of a model."""

    _recorder: _core.Recorder

    def __init__(self, model: nn.Module, optimizers: list[Optimizer]) -> None:
        self.model = model
        self._optimizers = optimizers
        self._ids: dict[str, int] = {}
        self._definitions: list[Definition] = []
        self._armed: dict[int, _Armed] = {}
        self._seen = _Seen()
        self._own: set[int] = set()
        self.is_listening = True
        """Whether hooks are to be on the parameters."""
        self._tensor_ids: list[int] = []
        self.version = 0
        """Grows whenever the model is found changed."""
        self.leaves: dict[int, Tensor] = {}
        """Id in the recorder → the tensor that autograd accumulates into."""
        self.averaging = wrappers.examine(model)

    def attach(self, recorder: _core.Recorder) -> None:
        """Puts hooks on the parameters of the model as it is."""
        self._recorder = recorder
        self.refresh()

    def refresh(self, *, is_last: bool = False) -> None:
        """Takes in whatever changed about the model since the last call; types, which only sizes depend on, at the last."""
        num_optimized = sum(len(g["params"]) for o in self._optimizers for g in o.param_groups)
        if is_last or not self._seen.is_current(num_optimized, with_hooks=self.is_listening):
            self._look_through(num_optimized)

    def owns(self, tensors: Iterable[Any]) -> bool:
        """Whether one of the tensors is a parameter of the model."""
        return any(id(t) in self._own for t in tensors)

    def bits(self) -> dict[int, int]:
        """Id of each tensor that stands for a parameter → the parameter's id in the recorder."""
        return {id(tensor): param_id for param_id, tensor in (*self.parameters(), *self.leaves.items())}

    def parameters(self) -> Iterator[tuple[int, Tensor]]:
        """Each parameter's id in the recorder, and the tensor that the user and the optimizer know."""
        return zip(self._tensor_ids, self._seen.tensors, strict=True)

    def definition(self, param_id: int) -> Definition:
        """How the recorder knows a parameter."""
        return self._definitions[param_id]

    def named_by_ddp(self, message: str) -> dict[str, str]:
        """The parameters that a message of DDP gives by number, by name. It counts those that required a gradient when the
        model was wrapped."""
        numbers = {n for found in _DDP_NUMBERS.findall(message) for group in found for n in group.split()}
        names = {
            id(t): self._definitions[param_id][0] for t, param_id in zip(self._seen.tensors, self._tensor_ids, strict=True)
        }
        awaited = self.averaging.awaited
        within = sorted(int(n) for n in numbers if int(n) < len(awaited))
        return {str(n): names.get(id(awaited[n]), "(no longer in the model)") for n in within}

    def listen(self, wanted: bool) -> None:
        """Takes every hook off, or puts them on again."""
        if wanted != self.is_listening:
            self.is_listening = wanted
            if wanted:
                self._arm()
            else:
                self.remove()

    def strangers(self) -> bool:
        """Whether others have hooks on a parameter that are called when a gradient was accumulated."""
        lists: list[Any] = [leaf._post_accumulate_grad_hooks for leaf in self.leaves.values()]
        return sum(map(len, filter(None, lists))) > len(self._armed)

    def remove(self) -> None:
        """Takes every hook off again."""
        for armed in self._armed.values():
            armed.remove()
        self._armed.clear()

    def _look_through(self, num_optimized: int) -> None:
        modules = list(wrappers.walk(self.model))
        if wrappers.ddps_in(m for _, m in modules) != self.averaging.ddps:
            self.averaging = wrappers.examine(self.model)
        sharding = wrappers.sharding_of(m for _, m in modules)
        named = _named_parameters(modules, sharding)
        tensors = [tensor for tensor, _ in named]
        inventory = None
        if sharding.is_complete and not any(map(wrappers.is_lazy, tensors)):
            dicts = [cast(dict[str, Any], d) for _, m in modules for d in (m._parameters, m._modules)]
            inventory = _core.Inventory(dicts, tensors)
        self._seen = _Seen(tensors, inventory, num_optimized)
        self._own = {*map(id, tensors), *sharding.hidden}
        ids = self._define([definition for _, definition in named])
        self._tensor_ids = ids
        leaves = [sharding.leaves.get(id(t), t) for t in tensors]
        self.version += 1
        self.leaves = dict(zip(ids, leaves, strict=True))
        self._own.update(map(id, leaves))
        if self.is_listening:
            self._arm()
        held = (p for o in self._optimizers for g in o.param_groups for p in g["params"])
        self._state_situation(tensors, ids, optimized=[sharding.hidden.get(id(p), p) for p in held])

    def _define(self, definitions: list[Definition]) -> list[int]:
        """Tells the recorder of new names, and of known names with a new shape, type or alias; returns their ids."""
        first = len(self._definitions)
        for definition in definitions:
            known = self._ids.get(definition[0])
            if known is None:
                self._ids[definition[0]] = len(self._definitions)
                self._definitions.append(definition)
            elif self._definitions[known] != definition:
                self._definitions[known] = definition
                if known < first:
                    self._recorder.define(known, [definition])
        if len(self._definitions) > first:
            self._recorder.define(first, self._definitions[first:])
        return [self._ids[definition[0]] for definition in definitions]

    def _arm(self) -> None:
        wanted = {id(leaf): param_id for param_id, leaf in self.leaves.items()}
        for key, armed in list(self._armed.items()):
            if armed.cdata != armed.tensor._cdata or wanted.get(key) != armed.param_id:
                self._armed.pop(key).remove()
        for param_id, leaf in self.leaves.items():
            # Hooks cannot be put on a frozen leaf, nor on one without a shape. Those on one that was frozen later stay.
            if id(leaf) not in self._armed and wrappers.is_trainable(leaf) and not wrappers.is_lazy(leaf):
                slot = self._recorder.slot(param_id)
                # The first tells a defined gradient from none, the second that it was accumulated and not merely captured.
                # Either alone is wrong: see the tests of undefined gradients and of `autograd.grad`.
                handles = (
                    leaf.register_hook(slot),  # type: ignore[no-untyped-call]
                    leaf.register_post_accumulate_grad_hook(slot.accumulated),  # type: ignore[no-untyped-call]
                )
                self._armed[id(leaf)] = _Armed(leaf, param_id, leaf._cdata, handles)

    def _state_situation(self, tensors: list[Tensor], ids: list[int], optimized: list[Tensor]) -> None:
        def among(others: Iterable[Any]) -> list[int]:
            keys = set(map(id, others))
            return [param_id for t, param_id in zip(tensors, ids, strict=True) if id(t) in keys]

        averaging = self.averaging
        self._recorder.set_situation(
            registered=ids,
            trainable=among(filter(wrappers.is_trainable, tensors)),
            awaited=among(averaging.awaited),
            wrapped=among(averaging.wrapped),
            ignored=among(averaging.ignored),
            optimized=among(optimized),
            num_orphans=sum(id(p) not in self._own for p in averaging.awaited),
            has_wrapper=bool(averaging.ddps),
        )


def _named_parameters(modules: list[tuple[str, nn.Module]], sharding: wrappers.Sharding) -> list[tuple[Tensor, Definition]]:
    """Each parameter once, under its first name; the shape of one that has none yet is given as (0,)."""
    found: dict[int, tuple[Tensor, Definition]] = {}
    names: set[str] = set()
    for prefix, module in modules:
        module_class = f"{type(module).__module__}.{type(module).__qualname__}"
        flat = sharding.flat.get(id(module))
        for key, registered in (*module._parameters.items(), ("_flat_param", flat)):
            # A plain tensor stands in for a parameter while somebody computes with another (functional_call, FSDP1).
            if not isinstance(registered, nn.Parameter) or id(registered) in sharding.hidden:
                continue
            tensor = sharding.owners.get(id(registered), registered)
            name = f"{prefix}.{key}" if prefix else key
            if id(tensor) in found:
                definition = found[id(tensor)][1]
                if name != definition[0] and name not in definition[1]:
                    definition[1].append(name)
                continue
            while name in names:  # two wrappers side by side, each holding a parameter of that name
                name += "'"
            names.add(name)
            shape = [0] if wrappers.is_lazy(tensor) else list(tensor.shape)
            dtype = str(tensor.dtype).removeprefix("torch.")
            found[id(tensor)] = tensor, (name, [], shape, dtype, tensor.dtype.itemsize, module_class)
    return list(found.values())
