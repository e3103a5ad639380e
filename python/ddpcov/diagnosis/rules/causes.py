"""Why a parameter was missed: from the evidence of a traced pass to one cause, or to what is ruled out.

The order of the causes is how far a parameter came: not run, not read, read without gradient mode, computed and lost, left out
of the loss, and undefined on the way. Of several passes of a step the one in which it came furthest tells.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ddpcov.diagnosis.rules.finding import as_place
from ddpcov.report import Place

__all__ = ["MODULE", "ORDER", "TWIN", "Cause", "cause_of"]

ORDER = ("DDC100", "DDC101", "DDC102", "DDC103", "DDC104", "DDC110", "DDC106", "DDC105", "DDC111", "DDC108")

Known = Mapping[str, Any]

MODULE, TWIN = "{module}", "{twin}"
"""Left open in the texts of a cause."""


@dataclass(frozen=True)
class Cause:
    """A cause with its proof. `mend` is what to do about it whatever the pattern; `suspicion` what to look at before that."""

    code: str
    message: str
    evidence: tuple[str, ...] = ()
    where: Place | None = None
    mend: str = ""
    suspicion: str = ""
    module: str = field(default="", compare=False)
    """What stands for `MODULE` in the texts, as Python reaches it from the model."""
    twin: str = field(default="", compare=False)
    """What stands for `TWIN`."""
    reads: tuple[str, ...] = field(default=(), compare=False)
    """Where it was read, which may differ among parameters that share the cause."""


def cause_of(known: Known, blind: str | None) -> Cause:
    """The cause that the evidence proves; DDC100 where it proves none."""
    for rule in () if known.get("has_raised") else _RULES:
        if (cause := rule(known, blind)) is not None:
            return cause
    return _not_established(known, blind)


def _gradient_vanished(known: Known, blind: str | None) -> Cause | None:
    """DDC108: an output that leads to it, or the loss itself, had a gradient, and none arrived."""
    at = known.get("undefined_at") or []
    got = [path for path, got in known["leading"] if got]
    if not at or not (got or (known["in_loss"] and not known["leading"])):
        return None
    nodes = ", ".join(one["node"] for one in at)
    where = next((as_place(one["place"]) for one in at if one["place"]), None)
    function = at[0]["node"].removesuffix("Backward").removesuffix("Backward0")
    return Cause(
        "DDC108",
        f"Autograd arrived without a gradient: {nodes} was given one and handed none on.",
        (
            *([f"a gradient arrived at {_outputs(got)}, which leads to it"] if got else []),
            f"the gradient became undefined at {nodes}",
        ),
        where,
        f"Return a gradient for that input in the backward of {function}; None stands for inputs that need none."
        if where
        else f"See what {nodes} computes: its gradient with respect to this parameter is not defined.",
    )


def _independent(known: Known, blind: str | None) -> Cause | None:
    """DDC111: in the graph that `autograd.grad` went through, and not in that of the loss, which is made of the result."""
    if not known["differentiated"] or known["in_loss"] or any(got for _, got in known["leading"]):
        return None
    return Cause(
        "DDC111",
        "The loss does not depend on it: the loss is made of a gradient (autograd.grad with create_graph=True) that is the"
        " same whatever its value.",
        (
            "it is in the graph that autograd.grad went through",
            "the loss is made of what autograd.grad gave, and its graph does not lead to it",
        ),
        as_place(known.get("forward")),
        "Add the term that does depend on it to the same loss (one backward pass for the loss and its penalty), or leave it"
        " out of what this pass trains.",
    )


def _not_in_loss(known: Known, blind: str | None) -> Cause | None:
    """DDC105: the graph leads from outputs to it, and none of them received a gradient."""
    leading = known["leading"]
    if not leading or any(got for _, got in leading):
        return None
    if known["in_loss"] and not known["reached"]:
        return None  # backward(inputs=…): the loss does depend on it
    one = _outputs([path for path, _ in leading])
    return Cause(
        "DDC105",
        f"It leads only to {one} of the forward, and no gradient arrived there: the loss does not use it, or only detached.",
        (f"the graph leads from {one} to it", f"no gradient arrived at {one} in the pass"),
        as_place(known.get("forward")),
        f"Use {one} in the loss, or do not compute it.",
        reads=_read_line(known),
    )


def _never_called(known: Known, blind: str | None) -> Cause | None:
    """DDC101: its module never ran, and nothing read it. The texts hold for each module of which the same is known."""
    never = known.get("never_ran")
    if blind or known["calls"] != 0 or never is None or known["in_loss"] or known["carrying"] or known["leading"]:
        return None
    twin = ""
    evidence = [f"{MODULE} ran 0 times, and no operation of the forward read the parameter"]
    if partly := never.get("partly"):
        mention = as_place(partly["mention"])
        calls = f", which calls it{_at(mention)}," if mention else ""
        evidence.append(f"the forward of {partly['class']}{calls} did not run; parts of it were called on their own")
    if "ancestor" in never:
        mention, name = as_place(never["mention"]), never["attribute"]
        says = f", and mentions {name!r}{_at(mention)}" if mention else ", and nowhere mentions it"
        evidence.append(f"the forward of {never['ancestor_class']} ran{says if mention or never.get('is_readable') else ''}")
    guarded, suspicion = _guarded(never.get("guard"), MODULE)
    evidence += guarded
    if "twice" in never:
        twin = never["twice"]
        evidence.append(f"{TWIN}, of the same class and shapes, ran more than once")
        suspicion = f"Check the wiring: {TWIN} ran more than once; was one of the calls meant for {MODULE}?"
    elif "copy" in never:
        twin = never["copy"]
        evidence.append(f"{TWIN}, of equal values, ran")
        suspicion = f"{TWIN} is a copy of {MODULE} and ran in its place: keep one of the two."
    return Cause(
        "DDC101",
        f"{MODULE} ({never['class']}) never ran in the forward.",
        tuple(evidence),
        as_place(never["where"]),
        f"Call {MODULE} as a whole, or delete what only its forward uses."
        if never.get("is_used")
        else f"Call {MODULE}, or delete what is not needed (put torch.nn.Identity() in its place).",
        suspicion,
        never["spelled"] or "the model",
        twin,
    )


def _not_read(known: Known, blind: str | None) -> Cause | None:
    """DDC102, and DDC103 where its module ran with gradient mode off only: it ran, and read nothing of the parameter."""
    was_used = known["read"] or known["read_without_grad"] or known.get("in_function") or known["carrying"]
    if blind or not known["calls"] or was_used or known["in_loss"] or known["leading"]:
        return None
    if not known["grad_calls"]:
        return _grad_mode_off(known)
    mention = as_place(known.get("mention"))
    guarded, suspicion = _guarded(known.get("guard"), "it")
    return Cause(
        "DDC102",
        "Its module ran, and no operation of the forward read the parameter.",
        (
            "the module ran with gradient mode on",
            "no operation of the forward took it as an argument",
            *([f"the module's forward mentions it{_at(mention)}"] if mention else []),
            *(["the module's forward does not mention it"] if not mention and known.get("is_readable") else []),
            *guarded,
        ),
        as_place(known.get("declared")),
        "Let the module's forward read it, or delete it; a constant belongs in a buffer (register_buffer).",
        suspicion,
    )


def _guarded(guard: Known | None, what: str) -> tuple[list[str], str]:
    """Under which condition a forward uses `what`: evidence, and what to look at first if an argument was not given."""
    if not guard:
        return [], ""
    evidence = [f"there it stands under the condition `{guard['text']}` (line {guard['line']})"]
    if not guard["none"]:
        return evidence, ""
    missing = ", ".join(guard["none"])
    evidence.append(f"argument {missing} of the forward was None")
    return evidence, f"Pass {missing} to the forward: without it `{guard['text']}` (line {guard['line']}) skips {what}."


def _without_grad(known: Known, blind: str | None) -> Cause | None:
    """DDC103: read with gradient mode off, and never with it on."""
    if (
        blind
        or known["read"]
        or not known["read_without_grad"]
        or known.get("in_function")
        or known["in_loss"]
        or known["leading"]
    ):
        return None
    return _grad_mode_off(known)


def _grad_mode_off(known: Known) -> Cause:
    off, read = known.get("grad_off"), known["read_without_grad"]
    where = as_place(off["line"]) if off else as_place(read["line"]) if read else None
    evidence = [f"every operation that read it ran with gradient mode off{_in_line(read)}" if read else "no operation read it"]
    if off:
        evidence.append(f"gradient mode was off when {off['module'] or 'the model'} was called{_in_line(off)}")
    return Cause(
        "DDC103",
        "Used only while gradient mode was off (no_grad, inference_mode or set_grad_enabled(False)).",
        tuple(evidence),
        where,
        "If it is to be trained, take the call out of the no_grad block.",
    )


def _in_a_function(known: Known, blind: str | None) -> Cause | None:
    """DDC110, and DDC104 for other Functions: read inside an autograd Function that was not given it."""
    inside = known.get("in_function")
    if blind or inside is None or known["read"] or known["reached"]:
        return None
    name = inside["by"]
    ran_back = known["in_loss"] or known["carrying"] or any(got for _, got in known["leading"])
    if inside["needs_grad"] and ("Checkpoint" in name or not ran_back):
        return None  # a checkpoint leads to what it read; of another Function that never ran back nothing is proved
    if not inside["needs_grad"] and (known["leading"] or known["in_loss"]):
        return None
    if "Checkpoint" in name:
        return Cause(
            "DDC110",
            "Reentrant checkpointing over inputs that need no gradient: the checkpoint's backward never runs.",
            (
                f"it was read inside {name}{_in_line(inside)}",
                "none of the tensors given to the checkpoint required a gradient",
            ),
            as_place(inside["line"]),
            "Pass use_reentrant=False to torch.utils.checkpoint.checkpoint; or make the input require a gradient"
            " (x.requires_grad_(), model.enable_input_require_grads() in transformers).",
        )
    return Cause(
        "DDC104",
        f"The graph is cut at {name}: its forward reads the parameter without taking it as an argument.",
        (f"it was read inside the forward of the autograd Function {name}{_in_line(inside)}", *_carrying(known)),
        as_place(inside["line"]),
        f"Give the parameter to {name}.apply as an argument, and return its gradient in backward.",
    )


def _cut_off(known: Known, blind: str | None) -> Cause | None:
    """DDC104: its value goes into an output, and the graph does not lead back."""
    if blind or known["leading"] or not known["carrying"] or known["in_loss"]:
        return None
    cuts = known.get("cuts") or []
    if not cuts:
        return None
    first = cuts[0]
    lost = "left torch at" if first["leaves_torch"] else "went on without its graph at"
    off = ", while gradient mode was off" if first.get("grad_off") and not first["leaves_torch"] else ""
    outputs = _outputs(known["carrying"])
    return Cause(
        "DDC104",
        f"Its value {lost} {_operation(first['by'])}{_in_line(first)}{off}, and goes into {outputs} that way only.",
        (
            *(f"cut by {_operation(cut['by'])}{_in_line(cut)}" for cut in cuts),
            *_carrying(known),
            "the graph leads from no output to it",
        ),
        as_place(first["line"]),
        "If it is to be trained, take this operation out of the no_grad block." if off else _mend_cut(first["by"]),
        reads=_read_line(known),
    )


def _left_torch(known: Known, blind: str | None) -> Cause | None:
    """DDC104: its value left torch as an array, and its graph gets to no output. What became of the array is not followed."""
    left = [cut for cut in known.get("left_torch") or () if cut["by"] in _ARRAYS]
    if blind or not left or _is_open(known):
        return None
    return Cause(
        "DDC104",
        f"Its value left torch at {_operation(left[0]['by'])}{_in_line(left[0])}; whatever comes of it has no graph.",
        (
            *(f"cut by {_operation(cut['by'])}{_in_line(cut)}" for cut in left),
            "the graph leads from no output to it; what became of the array was not followed",
        ),
        as_place(left[0]["line"]),
        _mend_cut(left[0]["by"]),
        reads=_read_line(known),
    )


_ARRAYS = ("numpy", "__array__", "__dlpack__")


def _is_open(known: Known) -> bool:
    """Whether something may still lead to it: an output, the loss, or an output that could not be looked into."""
    is_unsure = known.get("unseen") or known.get("is_transformed") or not known["has_outputs"]
    return bool(known["leading"] or known["carrying"] or known["in_loss"] or is_unsure)


def _mend_cut(by: str) -> str:
    if by in ("detach", "detach_", "data"):
        dot = f".{by}" if by == "data" else f".{by}()"
        return f"If it is to be trained, drop the {dot}, or add a term to the loss that depends on the parameter without it."
    if by in ("item", "tolist", "numpy", "__float__", "__int__", "__array__"):
        return "Keep the value a tensor until the loss is computed."
    return (
        f"{_operation(by)} has no gradient: use a differentiable form, or pass the gradient round it (straight-through:"
        " x + (q - x).detach())."
    )


def _discarded(known: Known, blind: str | None) -> Cause | None:
    """DDC106: computed with gradient, and neither graph nor value gets to any output."""
    inside = known.get("in_function")
    read = known["read"] or (inside if inside and inside["needs_grad"] else None)
    if blind or not read or _is_open(known):
        return None
    to = known.get("carried_to")
    line = as_place(to["line"]) if to else as_place(read["line"])
    what = _result(to) if to else "What was computed with it"
    left = [
        f"a number of it left torch at `{cut['by']}`{_in_line(cut)}, and was not followed"
        for cut in known.get("left_torch") or ()
    ]
    return Cause(
        "DDC106",
        f"{what[0].upper()}{what[1:]} is discarded: it was computed with gradient and reaches no output of the forward.",
        (
            *([f"its value got as far as {_result(to)}, called{_at(line)}"] if to else []),
            "neither the graph nor a tensor of its value gets to an output of the forward",
            *left,
        ),
        line,
        "Return or use the result, or do not compute it.",
        reads=_read_line(known),
    )


def _result(to: Known) -> str:
    paths = [path for path in to.get("paths", ()) if path]
    module = to["module"] or "the model"
    return f"what {module} gives at {', '.join(paths[:4])}" if paths else f"the result of {module}"


def _not_established(known: Known, blind: str | None) -> Cause:
    ruled_out = [blind] if blind else []
    if known.get("has_raised"):
        ruled_out.append("the forward of its module ended by an exception")
    if known.get("is_transformed"):
        ruled_out.append("torch.func (vmap, grad) was at work, and what became of values in it was not seen")
    if known.get("unseen"):
        ruled_out.append(f"{_outputs(known['unseen'])} could not be looked into")
    if known["calls"]:
        ruled_out.append("its module ran")
    ruled_out += _read_line(known)
    if known["leading"]:
        ruled_out.append(f"{_outputs([path for path, _ in known['leading']])} leads to it")
        got = [path for path, got in known["leading"] if got]
        ruled_out.append(f"a gradient arrived at {_outputs(got)}" if got else "no gradient arrived there")
    elif not blind and known["has_outputs"]:
        ruled_out.append("the graph leads from no output to it")
    if known["in_loss"] and not known["reached"]:
        ruled_out.append("the loss depends on it, and backward() did not go there: was it given inputs=…?")
    return Cause("DDC100", "Cause not established.", tuple(ruled_out))


_RULES = (
    _gradient_vanished,
    _independent,
    _not_in_loss,
    _never_called,
    _not_read,
    _without_grad,
    _in_a_function,
    _cut_off,
    _left_torch,
    _discarded,
)


def _at(place: Place | None) -> str:
    return f" in {place.file}:{place.line}" if place else ""


def _in_line(usage: Known | None) -> str:
    return _at(as_place(usage["line"])) if usage else ""


def _read_line(known: Known) -> tuple[str, ...]:
    read = known["read"]
    return (f"read by {_operation(read['by'])}{_in_line(read)} with gradient mode on",) if read else ()


def _carrying(known: Known) -> tuple[str, ...]:
    return (f"its value goes into {_outputs(known['carrying'])}",) if known["carrying"] else ()


def _operation(by: str) -> str:
    return "the assignment to an element" if by == "__setitem__" else f"`{by}`"


def _outputs(paths: list[str]) -> str:
    if paths == [""]:
        return "the output"
    shown = [path or "the output" for path in paths[:4]]
    more = f" and {len(paths) - 4} more" if len(paths) > 4 else ""
    return f"output{'s' if len(paths) > 1 else ''} {', '.join(shown)}{more}"
