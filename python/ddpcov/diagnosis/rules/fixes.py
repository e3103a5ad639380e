"""What to do about a missed parameter: the cause's own mend, and what the pattern of its misses and the wrapper permit."""

from __future__ import annotations

from dataclasses import dataclass

from ddpcov.diagnosis.facts import Facts, Profile
from ddpcov.diagnosis.rules.causes import Cause

__all__ = ["Pattern", "fix", "freezing", "pattern_of"]

_MAX_LISTED = 6


@dataclass(frozen=True)
class Pattern:
    """How a parameter is missed."""

    varies: bool
    """Covered in some step on some rank."""
    is_static: bool
    """Whether `static_graph` is safe in this run."""
    is_awaited: bool
    """Whether DDP waits for it."""
    is_fatal: bool


def pattern_of(facts: Facts, profile: Profile, *, is_static: bool) -> Pattern:
    """The pattern in which the parameters of a profile are missed."""
    return Pattern(
        varies=bool(profile.of_kind("covered")),
        is_static=is_static,
        is_awaited=facts.wrapper.kind == "ddp" and bool(facts.awaited_in_vain(profile)),
        is_fatal=facts.is_fatal(profile),
    )


def fix(cause: Cause, pattern: Pattern, facts: Facts, names: tuple[str, ...]) -> str:
    """The advice for these parameters. For a set that never changes it is never the flag, which would only hide it."""
    if pattern.varies:
        return _varying(cause, pattern, facts, names)
    parts = [part for part in (cause.suspicion, cause.mend) if part]
    if cause.suspicion:
        parts.append("Do not freeze it before that is settled: freezing would only hide the mistake.")
    elif cause.code not in _TRAINED and (freeze := freezing(facts, names)):
        when = ", before the model is wrapped" if pattern.is_awaited else ""
        parts.append(f"If it is not to be trained, freeze it{when}: {freeze}")
    if cause.code == "DDC111" and pattern.is_awaited:
        parts.append("find_unused_parameters=True is no cure: its search begins at the outputs, which do lead to it.")
    return " ".join(parts)


_TRAINED = ("DDC108", "DDC111")
"""What has these causes is meant to be trained."""


def _varying(cause: Cause, pattern: Pattern, facts: Facts, names: tuple[str, ...]) -> str:
    # A cause that holds in some steps only is seldom a mistake in them.
    parts = [part for part in (cause.suspicion, cause.mend if cause.code in _TRAINED else "") if part]
    if not pattern.is_awaited:
        parts.append("If it is to be absent in these steps, nothing is to be mended: no wrapper waits for it.")
        return " ".join(parts)
    name, is_module = _wholes(facts, names)[0]
    term = f"sum(p.sum() for p in {_spelled(name, is_module)}.parameters())" if is_module else f"{_spelled(name, False)}.sum()"
    path = f"give what is absent a path of weight zero: loss = loss + 0.0 * {term}"
    if facts.wrapper.static_graph:
        parts.append(f"The set varies: wrap with find_unused_parameters=True in place of static_graph=True, or {path}")
    elif facts.wrapper.find_unused_parameters:
        parts.append(f"The set varies: keep find_unused_parameters=True, or {path}")
    else:
        static = " (or, as each rank's own set stays the same, static_graph=True)" if pattern.is_static else ""
        parts.append(f"The set varies: wrap with find_unused_parameters=True{static}, or {path}")
    return " ".join(parts)


def freezing(facts: Facts, names: tuple[str, ...]) -> str:
    """Python that freezes these parameters of `model`, and no others; nothing if they are all that is trained."""
    wholes = _wholes(facts, names)
    if wholes == [("", True)]:
        return ""
    if len(wholes) <= _MAX_LISTED:
        return "; ".join(f"{_spelled(*one)}.requires_grad_(False)" for one in wholes)
    tails = sorted({_tail(name) for name in names})
    if all(tails) and set(names) == {p.name for p in facts.parameters if p.trainable and p.name.endswith(tuple(tails))}:
        chosen = f"if name.endswith({tuple(tails)!r})"
    else:
        chosen = f"if name in {{{', '.join(map(repr, names))}}}"
    return f"[p.requires_grad_(False) for name, p in model.named_parameters() {chosen}]"


def _tail(name: str) -> str:
    """What follows the last number in a name."""
    parts = name.split(".")
    last = max((i for i, part in enumerate(parts) if part.isdigit()), default=-1)
    return "".join(f".{part}" for part in parts[last + 1 :]) if last >= 0 else ""


def _wholes(facts: Facts, names: tuple[str, ...]) -> list[tuple[str, bool]]:
    """The outermost modules of which these are all that is trained (true), and what parameters are left (false)."""
    ours = set(names)
    others: set[str] = set()
    for parameter in facts.parameters:
        if parameter.trainable and parameter.name not in ours:
            others.update(prefix for name in (parameter.name, *parameter.aliases) for prefix in _prefixes(name))
    found: dict[tuple[str, bool], None] = {}
    for name in names:
        whole = next((prefix for prefix in _prefixes(name) if prefix not in others), None)
        found[(name, False) if whole is None else (whole, True)] = None
    return list(found)


def _prefixes(name: str) -> list[str]:
    """The modules round a parameter, from the outside in."""
    parts = name.split(".")[:-1]
    return [".".join(parts[:i]) for i in range(len(parts) + 1)]


def _spelled(name: str, is_module: bool) -> str:
    if all(part.isidentifier() for part in name.split(".")):
        return f"model.{name}"
    return f"model.{'get_submodule' if is_module else 'get_parameter'}({name!r})"
