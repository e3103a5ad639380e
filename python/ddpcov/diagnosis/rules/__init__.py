"""From facts to findings: pure functions, one for each code or pair of codes, made when a report is read."""

from __future__ import annotations

from collections.abc import Callable

from ddpcov.diagnosis.facts import Facts
from ddpcov.diagnosis.rules import capture, divergence, missed, optimizer, sync, values, wrapper
from ddpcov.diagnosis.rules.finding import Found
from ddpcov.report import Finding

__all__ = ["find"]


def find(facts: Facts) -> list[Finding]:
    """All findings, the gravest first."""
    grave = ["error", "warning", "info"]
    found = [finding for rule in _RULES for finding in rule(facts)]
    return sorted(_joined(found), key=lambda f: (grave.index(f.severity), f.code, f.parameters))


def _joined(found: list[Finding]) -> list[Finding]:
    """Findings that say the same of different parameters, as one."""
    same: dict[tuple[object, ...], list[Finding]] = {}
    for f in found:
        same.setdefault((f.code, f.severity, f.ranks, f.steps, f.message, f.evidence, f.where, f.fix), []).append(f)
    out = []
    for group in same.values():
        f = group[0]
        names = tuple(sorted(n for one in group for n in one.parameters))
        out.append(Finding(f.code, f.slug, f.severity, names, f.ranks, f.steps, f.message, f.evidence, f.where, f.fix))
    return out


_RULES: tuple[Callable[[Facts], Found], ...] = (
    missed.missed,
    missed.loss_detached,
    missed.some_steps_or_ranks,
    missed.some_passes,
    divergence.prevented,
    values.zero_gradient,
    wrapper.frozen_after_wrap,
    wrapper.unknown_to_wrapper,
    wrapper.bypassed,
    wrapper.opaque_output,
    wrapper.reached_twice,
    wrapper.needless_flag,
    wrapper.graph_changed,
    wrapper.unsynchronised,
    sync.gradients_differ,
    optimizer.not_in_optimizer,
    optimizer.unregistered,
    optimizer.stale,
    capture.incomplete,
    capture.parameters_differ,
    capture.nothing_recorded,
)
