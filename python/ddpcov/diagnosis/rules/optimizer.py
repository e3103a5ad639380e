"""Findings 401 to 403: the optimizer."""

from __future__ import annotations

from ddpcov.diagnosis.facts import Facts
from ddpcov.diagnosis.rules.finding import Found, across_ranks, as_place, make
from ddpcov.report import some


def not_in_optimizer(facts: Facts) -> Found:
    """DDC401: gets gradients, and none of the optimizers that the user named holds it."""
    if not facts.optimizer_given:
        return
    for profile in facts.profiles:
        at = profile.of_kind("unheld")
        if at:
            message = "Gets gradients, and none of the optimizers given to track() holds it: it is never updated."
            fix = "Add it to the optimizer's parameters (add_param_group), or freeze it."
            yield make(facts, "DDC401", "error", message, names=profile.names, at=at, fix=fix)


@across_ranks
def unregistered(facts: Facts) -> Found:
    """DDC402: the forward's graph ends in a trainable tensor that no module registers."""
    for lane in facts.lanes:
        leaves = lane.noted.get("unregistered", [])
        if not leaves:
            continue
        held = [str(leaf["held"]) for leaf in leaves if leaf.get("held")]
        are = "s that no module registers" if len(leaves) > 1 else " that no module registers"
        message = (
            f"The forward leads to {len(leaves)} trainable tensor{are}: the optimizer and the state dict do not know it by the"
            " model, and no wrapper averages its gradient."
        )
        found = [f"{leaf.get('held') or 'held by no module'}, shape {tuple(leaf.get('shape', ()))}" for leaf in leaves]
        first = held[0].partition("[")[0].partition(".")[0] if held else "name"
        fix = (
            f"Register it before the model is wrapped: a plain list of modules as self.{first} = nn.ModuleList(...), a dict as"
            " nn.ModuleDict, a tensor as nn.Parameter in an attribute; build the optimizer after that."
        )
        where = next((as_place(leaf["where"]) for leaf in leaves if leaf.get("where")), None)
        steps = [(step, step) for step in sorted({int(leaf.get("step", 0)) for leaf in leaves})]
        evidence = (some(found, 8),)
        yield make(facts, "DDC402", "error", message, ranks=lane.ranks, steps=steps, evidence=evidence, where=where, fix=fix)


@across_ranks
def stale(facts: Facts) -> Found:
    """DDC403: an optimizer that trains the model holds a tensor that is not, or no longer, in it."""
    fix = "Build the optimizer after parameters are replaced, or build it again then."
    for lane in facts.lanes:
        held = [one for one in lane.facts.get("optimizers", {}).get("stale", ()) if isinstance(one, dict)]
        if not held:
            continue
        names = tuple(sorted({str(one["name"]) for one in held if one.get("name")}))
        kinds = " and ".join(sorted({str(one.get("optimizer")) for one in held}))
        message = (
            f"{kinds} holds {len(held)} trainable tensor{'s' if len(held) > 1 else ''} that {'are' if len(held) > 1 else 'is'}"
            " no parameter of the model and had no gradient at any step: what stands in the model instead may be in no"
            " optimizer."
        )
        where = [
            f"group {one.get('group')}, index {one.get('index')}: shape {tuple(one.get('shape', ()))}"
            + (f", once {one['name']}" if one.get("name") else "")
            for one in held
        ]
        yield make(facts, "DDC403", "error", message, names=names, ranks=lane.ranks, evidence=(some(where, 5),), fix=fix)
