"""What a traced pass proves about the parameters that it left without a gradient: plain facts, ready to be written down.

Causes are not named here; that is for the rules, when a report is read.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from ddpcov.diagnosis import graph, source
from ddpcov.diagnosis.reads import Cut, Usage
from ddpcov.diagnosis.trace import ModuleRun, Trace
from ddpcov.hooks import Hooks

__all__ = ["Observed", "gather", "outputs", "unregistered"]

_MAX_LISTED = 8  # outputs, cuts and the like, named for one parameter
_MAX_COMPARED = 1 << 22  # elements, to tell whether one module is a copy of another


@dataclass
class Observed:
    """A backward pass, as far as it was watched."""

    roots: list[Any]
    """Nodes that it began at."""
    flow: graph.Flow | None
    differentiated: list[Any] = field(default_factory=list)
    """Nodes that `autograd.grad` began at, since the last pass."""
    derived: set[Any] = field(default_factory=set)
    """Nodes of what it gave, with a graph of their own (`create_graph`)."""
    reached: frozenset[int] = frozenset()
    covered: frozenset[int] = frozenset()


def gather(trace: Trace, hooks: Hooks, missed: Iterable[int], observed: Observed) -> list[dict[str, Any]]:
    """For each parameter in `missed` what is known of it; those of which the same is known stand together."""
    look = _Look(trace, hooks, sorted(missed), observed)
    groups: dict[str, dict[str, Any]] = {}
    for param_id in look.missed:
        facts = look.at(param_id)
        group = groups.setdefault(json.dumps(facts, sort_keys=True), {**facts, "names": []})
        group["names"].append(hooks.definition(param_id)[0])
    return list(groups.values())


class _Look:
    """Looks at one parameter after another."""

    def __init__(self, trace: Trace, hooks: Hooks, missed: list[int], observed: Observed) -> None:
        self.trace, self.hooks, self.missed, self.observed = trace, hooks, missed, observed
        self.by_name = {name: run for run in trace.runs.values() for name in run.names}
        bits = {id(hooks.leaves[i]): i for i in missed if i in hooks.leaves}
        self.in_loss = self._union(observed.roots, bits)
        self.in_grad = self._union(observed.differentiated, bits)
        # Whether the pass went through what `autograd.grad` gave: then it is its result that the loss is made of.
        self.has_second_order = bool(observed.derived) and not observed.derived.isdisjoint(graph.nodes(observed.roots))
        self.is_blind = trace.blind is not None
        self._tops: dict[int, dict[str, Any]] = {}
        self._of_kind: dict[type, dict[Any, list[ModuleRun]]] = {}
        self._values: dict[Any, dict[Any, list[ModuleRun]]] = {}
        self._used = self._find_used()

    def _union(self, roots: list[Any], bits: dict[int, int]) -> int:
        masks = graph.reach(roots, bits, self.trace.reads.hidden)
        out = 0
        for root in roots:
            out |= masks.get(root, 0)
        return out

    def at(self, param_id: int) -> dict[str, Any]:
        bit = 1 << param_id
        reads = self.trace.reads
        name, aliases, *_ = self.hooks.definition(param_id)
        names = [] if self.is_blind else [name, *aliases]
        owners = [owner for n in names if (owner := self._owner(n)) is not None]
        calls = sum(owner.calls for owner in owners)
        facts: dict[str, Any] = {
            "calls": min(calls, 2) if owners and len(owners) == len(names) else None,
            "grad_calls": min(sum(owner.grad_calls for owner in owners), 2),
            "read": _usage(reads.with_grad.get(param_id)),
            "read_without_grad": _usage(reads.without_grad.get(param_id)),
            "reached": param_id in self.observed.reached,
            "in_loss": bool(self.in_loss & bit),
            "differentiated": bool(self.in_grad & bit) and self.has_second_order,
        }
        leading = [o for o in self.trace.outputs if o.leads & bit]
        carrying = [o for o in self.trace.outputs if o.mask & bit]
        facts["has_outputs"] = bool(self.trace.outputs)
        if self.trace.unseen:
            facts["unseen"] = _listed(self.trace.unseen)
        if reads.is_transformed:
            facts["is_transformed"] = True
        if any(owner.has_raised for owner in owners):
            facts["has_raised"] = True
        facts["leading"] = _listed([[o.path, o.got_gradient] for o in leading])
        facts["carrying"] = _listed([o.path for o in carrying])
        if leading:
            facts["forward"] = source.place_of_line(leading[0].caller)
        if (known := reads.in_function.get(param_id)) is not None:
            facts["in_function"] = {**(_usage(known) or {}), "needs_grad": known.needs_grad}
        if not calls and owners and param_id not in reads.with_grad and param_id not in reads.without_grad:
            facts["never_ran"] = self._never_ran(owners[0])
        elif not leading:
            facts |= self._where_lost(param_id, owners, [o.mask for o in carrying])
        # Before torch 2.5 an accumulator that is given nothing does not run.
        if (facts["reached"] or facts["in_loss"]) and self.observed.flow is not None:
            facts["undefined_at"] = self._boundaries(param_id)
        return facts

    def _owner(self, name: str) -> ModuleRun | None:
        """The module that has a forward and holds the parameter, itself or in a ParameterList."""
        prefix = name.rpartition(".")[0]
        while (run := self.by_name.get(prefix)) is None or not _has_forward(run.module):
            if not prefix:
                return None
            prefix = prefix.rpartition(".")[0]
        return run

    def _above(self, run: ModuleRun) -> Iterator[ModuleRun]:
        """The modules round it that have a forward, from the inside out."""
        prefix = run.names[0]
        while prefix:
            prefix = prefix.rpartition(".")[0]
            above = self.by_name.get(prefix)
            if above is not None and _has_forward(above.module):
                yield above

    # What did not run.

    def _never_ran(self, owner: ModuleRun) -> dict[str, Any]:
        """Of the outermost module round it of which nothing ran."""
        top, ran = owner, None
        partly: list[ModuleRun] = []
        for above in self._above(owner):
            if above.calls:
                ran = above
                break
            if partly or above.names[0] in self._used:
                partly.append(above)
            else:
                top = above
        if id(top.module) not in self._tops:
            self._tops[id(top.module)] = self._describe_top(top, ran, partly[:1])
        return self._tops[id(top.module)]

    def _find_used(self) -> set[str]:
        """Names of the modules of which something ran, or was read."""
        names: list[str] = []
        for run in self.trace.runs.values():
            names += self._likely(run.names) if run.calls else []
        reads = self.trace.reads
        for param_id in {*reads.with_grad, *reads.without_grad}:
            name, aliases, *_ = self.hooks.definition(param_id)
            names += self._likely([one.rpartition(".")[0] for one in (name, *aliases)])
        used = set()
        for name in names:
            while name not in used:
                used.add(name)
                name = name.rpartition(".")[0]
        return used

    def _likely(self, names: list[str]) -> list[str]:
        """Of several names of a shared module those round which something ran."""
        if len(names) < 2:
            return names
        parents = {name: self.by_name.get(name.rpartition(".")[0]) for name in names}
        return [name for name, parent in parents.items() if parent is not None and parent.calls] or names

    def _describe_top(self, top: ModuleRun, ran: ModuleRun | None, partly: list[ModuleRun]) -> dict[str, Any]:
        facts: dict[str, Any] = {
            "module": top.names[0],
            "spelled": source.spelled(top.names[0], self.trace.model),
            "class": type(top.module).__name__,
            "is_used": top.names[0] in self._used,
            **self._likely_mistake(top),
        }
        for above in partly:
            forward, name = _forward_of(above.module), top.names[0].removeprefix(f"{above.names[0]}.").partition(".")[0]
            mention = source.mentions(forward, name, above.module)
            facts["partly"] = {"class": type(above.module).__name__, "mention": mention}
        if ran is None:
            lines = [run.line for run in self.trace.runs.values() if run.calls]
            facts["where"] = source.best(*map(source.place_of_line, lines[:1]))
            return facts
        forward = _forward_of(ran.module)
        prefix = f"{ran.names[0]}." if ran.names[0] else ""
        attribute = top.names[0].removeprefix(prefix).partition(".")[0]
        mention, called = source.mentions(forward, attribute, ran.module), source.place_of_line(ran.line)
        facts |= {
            "ancestor": ran.names[0],
            "ancestor_class": type(ran.module).__name__,
            "attribute": attribute,
            "mention": mention,
            "is_readable": source.is_readable(forward),
            "where": source.best(
                mention, source.place_of_code(forward), *([self._first_call_below(ran)] if forward is None else []), called
            ),
        }
        if (guard := source.guard(forward, attribute)) is not None:
            facts["guard"] = _guard(guard, ran)
        return facts

    def _first_call_below(self, above: ModuleRun) -> dict[str, Any] | None:
        """Where the first of the modules below it that ran was called."""
        prefix = f"{above.names[0]}." if above.names[0] else ""
        below = (r for r in self.trace.runs.values() if r is not above and r.calls and r.names[0].startswith(prefix))
        return next((source.place_of_line(run.line) for run in below), None)

    def _likely_mistake(self, top: ModuleRun) -> dict[str, Any]:
        """A module just like it that ran twice; or the only one of equal values elsewhere that ran."""
        likeness = _likeness(top)
        alike = [run for run in self._alike(type(top.module)).get(likeness, ()) if run is not top]
        siblings = [r for r in alike if r.calls > 1 and _parent(r) == _parent(top) and r.calls > self._usual_calls(r)]
        if siblings:
            return {"twice": source.spelled(siblings[0].names[0], self.trace.model)}
        if not alike or id(top.module) in self.trace.singular:
            return {}
        if (copy := self._copy_of(top, likeness)) is None:
            self.trace.singular.add(id(top.module))
            return {}
        return {"copy": source.spelled(copy.names[0], self.trace.model)}

    def _copy_of(self, top: ModuleRun, likeness: Any) -> ModuleRun | None:
        if not _is_telling(top.module):
            return None
        equal = self._by_first_values(likeness).get(self._first_values(top), [])
        copies = [run for run in equal if run is not top and _is_copy(run.module, top.module)]
        # Several, or in the same list: layers that were made as clones.
        return copies[0] if len(copies) == 1 and not _is_beside(copies[0], top) else None

    def _alike(self, kind: type) -> dict[Any, list[ModuleRun]]:
        """Modules of a class that ran, by the shapes of their parameters."""
        alike = self._of_kind.get(kind)
        if alike is None:
            alike = self._of_kind[kind] = {}
            for run in self.trace.runs.values():
                if run.calls and type(run.module) is kind:
                    alike.setdefault(_likeness(run), []).append(run)
        return alike

    def _by_first_values(self, likeness: Any) -> dict[Any, list[ModuleRun]]:
        known = self._values.get(likeness)
        if known is None:
            known = self._values[likeness] = {}
            for run in self._alike(likeness[0])[likeness]:
                known.setdefault(self._first_values(run), []).append(run)
        return known

    @staticmethod
    def _first_values(run: ModuleRun) -> Any:
        """One value of each parameter: of modules that differ, most differ here."""
        with torch.no_grad():
            return tuple(p[(0,) * p.ndim].item() for p in run.module.parameters() if p.numel())

    def _usual_calls(self, run: ModuleRun) -> int:
        """How often the module round it ran: no more is to be expected of it."""
        return next((above.calls for above in self._above(run)), 1)

    # What ran, and was lost on the way.

    def _where_lost(self, param_id: int, owners: list[ModuleRun], carried: list[int]) -> dict[str, Any]:
        bit, reads = 1 << param_id, self.trace.reads
        reached = 0
        for mask in carried:
            reached |= mask
        own = [cut for _, cut in reads.cuts_in(reached) if cut.mask & bit]
        own.sort(key=lambda cut: not cut.is_smooth)
        facts: dict[str, Any] = {"cuts": _listed([_cut(cut) for cut in own])}
        if not carried:
            left = [cut for cut in reads.cuts if cut.leaves_torch and cut.mask & bit]
            facts["left_torch"] = _listed([_cut(cut) for cut in left])
            if (highest := self._highest(bit)) is not None:
                spelled = source.spelled(highest.names[0], self.trace.model)
                paths = _listed([path for path, mask in highest.carried.items() if mask & bit])
                facts["carried_to"] = {"module": spelled, "paths": paths, "line": source.place_of_line(highest.line)}
        runs = [run for owner in owners for run in (owner, *self._above(owner)) if run.nograd_line is not None]
        if runs:
            top = max(runs, key=lambda run: -len(_path(run)))
            facts["grad_off"] = {
                "module": source.spelled(top.names[0], self.trace.model),
                "line": source.place_of_line(top.nograd_line),
            }
        if param_id not in reads.with_grad and param_id not in reads.without_grad and owners:
            name = self.hooks.definition(param_id)[0]
            owner = owners[0]
            attribute = name.removeprefix(f"{owner.names[0]}." if owner.names[0] else "").partition(".")[0]
            declared = source.set_in_init(type(owner.module), attribute)
            facts["declared"] = source.best(declared, source.place_of_line(owner.line))
            forward = _forward_of(owner.module)
            facts["mention"] = source.mentions(forward, attribute, owner.module)
            facts["is_readable"] = source.is_readable(forward)
            if (guard := source.guard(forward, attribute)) is not None:
                facts["guard"] = _guard(guard, owner)
        return facts

    def _highest(self, bit: int) -> ModuleRun | None:
        """The outermost module whose outputs carried it."""
        carrying = [run for run in self.trace.runs.values() if any(mask & bit for mask in run.carried.values())]
        return min(carrying, key=lambda run: len(_path(run)), default=None)

    def _boundaries(self, param_id: int) -> list[dict[str, Any]]:
        assert self.observed.flow is not None
        nodes = self.observed.flow.boundaries(self.hooks.leaves[param_id])
        found = {}
        for node in nodes[:_MAX_LISTED]:
            function = getattr(type(node), "_forward_cls", None)
            backward = getattr(function, "backward", None)
            found[node.name()] = {"node": node.name(), "place": source.place_of_code(backward) if backward else None}
        return list(found.values())


def outputs(trace: Trace) -> list[dict[str, Any]]:
    """The outputs of the forwards, whether DDP's search finds each, and whether a gradient arrived at it in any pass."""
    known: dict[str, dict[str, Any]] = {}
    for output in trace.outputs:
        one = known.setdefault(output.path, {"path": output.path, "needs_grad": False, "found": True, "got": True})
        one["needs_grad"] |= output.needs_grad
        one["found"] &= output.is_found is not False
        one["got"] &= output.ever_got_gradient or not output.needs_grad
    return list(known.values())


def unregistered(trace: Trace, hooks: Hooks) -> list[dict[str, Any]]:
    """Trainable leaves that the outputs lead to and that no module registers."""
    known = {id(leaf) for leaf in hooks.leaves.values()}  # which the trace may not know yet
    leaves = {key: tensor for key, tensor in trace.unregistered.items() if key not in known}
    if not leaves:
        return []
    held = {key: (path, place) for key, path, place in _held(trace)}
    out = []
    for key, tensor in leaves.items():
        path, place = held.get(key, (None, None))
        out.append({"held": path, "where": place, "shape": list(tensor.shape)})
    return out


def _held(trace: Trace) -> Iterator[tuple[int, str, dict[str, Any] | None]]:
    """Ids of tensors that modules keep in plain attributes, lists and dicts; the path to each, and the line that set it."""
    for run in trace.runs.values():
        prefix = source.spelled(run.names[0], trace.model)
        for key, value in vars(run.module).items():
            if not key.startswith("_") or key not in _MODULE_FIELDS:
                for tensor, path in _held_in(value, f"{prefix}.{key}" if prefix else key, 0):
                    yield tensor, path, source.set_in_init(type(run.module), key)


_MODULE_FIELDS = frozenset(vars(nn.Module()))


def _held_in(value: Any, path: str, depth: int) -> Iterator[tuple[int, str]]:
    if isinstance(value, torch.Tensor):
        yield id(value), path
    elif isinstance(value, nn.Module):
        yield from ((id(p), f"{path}.{name}") for name, p in value.named_parameters())
    elif isinstance(value, (list, tuple)) and depth < 3:
        for i, one in enumerate(value):
            yield from _held_in(one, f"{path}[{i}]", depth + 1)
    elif isinstance(value, dict) and depth < 3:
        for key, one in value.items():
            yield from _held_in(one, f"{path}[{key!r}]", depth + 1)


def _guard(guard: tuple[str, int, frozenset[str]], run: ModuleRun) -> dict[str, Any]:
    text, line, names = guard
    return {"text": text[:200], "line": line, "none": sorted(names & set(run.none_arguments))}


def _usage(usage: Usage | None) -> dict[str, Any] | None:
    return None if usage is None else {"by": usage.by, "line": source.place_of_line(usage.line)}


def _cut(cut: Cut) -> dict[str, Any]:
    return {**(_usage(cut) or {}), "leaves_torch": cut.leaves_torch, "grad_off": cut.grad_off}


def _listed(values: list[Any]) -> list[Any]:
    unique = list({json.dumps(v): v for v in values}.values())
    return unique[:_MAX_LISTED]


def _has_forward(module: nn.Module) -> bool:
    return "forward" in vars(module) or type(module).forward is not nn.Module.forward


def _forward_of(module: nn.Module) -> Any:
    """The function; None where another one was in its place for the time of the call, as Lightning does it."""
    own = vars(module).get("forward")
    if own is None:
        return type(module).forward
    return None if getattr(own, "__func__", None) is type(module).forward else own


def _path(run: ModuleRun) -> list[str]:
    return run.names[0].split(".") if run.names[0] else []


def _parent(run: ModuleRun) -> str:
    return run.names[0].rpartition(".")[0]


def _is_beside(one: ModuleRun, other: ModuleRun) -> bool:
    """Whether both stand in the same list."""
    return _parent(one) == _parent(other) and all(run.names[0].rpartition(".")[2].isdigit() for run in (one, other))


def _likeness(run: ModuleRun) -> Any:
    return type(run.module), tuple((name, p.shape) for name, p in run.module.named_parameters())


def _is_telling(module: nn.Module) -> bool:
    """Whether a module of equal parameters is a copy of it: they are all here, not too large to look at, and not constant."""
    parameters = list(module.parameters())
    if any(type(p.data) is not torch.Tensor for p in parameters) or sum(p.numel() for p in parameters) > _MAX_COMPARED:
        return False  # to look at a DTensor would be a collective
    with torch.no_grad():
        return any(p.numel() > 1 and bool((p != p.flatten()[0]).any()) for p in parameters)


def _is_copy(one: nn.Module, other: nn.Module) -> bool:
    """Whether all their parameters are equal, and none is the same."""
    pairs = list(zip(one.parameters(), other.parameters(), strict=True))
    with torch.no_grad():
        return all(a is not b for a, b in pairs) and all(torch.equal(a, b) for a, b in pairs)
