"""What text and Markdown have in common: sentences, groups of missed parameters, numbers. Pure functions of a `Report`."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TextIO

from ddpcov import __version__
from ddpcov.report import Finding, ParameterCoverage, Range, Report, as_ranges

__all__ = ["Group", "Options"]  # the rest is for the reporters beside it

_MAX_RANGES = 4
_MAX_NAME = 120


@dataclass(frozen=True)
class Options:
    """What a user can ask of a reporter: everything, however long; how to group; how deep the names of groups go."""

    show_all: bool = False
    by: str = "module"
    depth: int | None = None

    def limit(self, count: int) -> int:
        """How many of something to show: `count`, unless everything was asked for."""
        return sys.maxsize if self.show_all else count


@dataclass(frozen=True)
class Group:
    """Missed parameters of one module, or class, that were missed in the same steps of the same ranks."""

    label: str
    kind: str
    parameters: tuple[ParameterCoverage, ...]

    @property
    def is_joined(self) -> bool:
        """Whether it spans several modules, so that `kind` counts them and is no class."""
        return len({p.module for p in self.parameters}) > 1

    @property
    def numel(self) -> int:
        """Elements of all of them."""
        return sum(p.numel for p in self.parameters)

    @property
    def num_bytes(self) -> int:
        """Their size, which is that of their gradients."""
        return sum(p.num_bytes for p in self.parameters)


def sections(report: Report) -> Iterator[tuple[str | None, Report]]:
    """The report and those of the other models of its launch, each with a heading if there are several."""
    reports = [report, *report.others]
    for i, one in enumerate(reports, 1):
        name = one.run.launch.model if one.run.launch else ""
        yield f"Model {i} of {len(reports)}: {visible(name)}" if len(reports) > 1 else None, one


def visible(text: str, limit: int = _MAX_NAME) -> str:
    """The text with control characters shown, not obeyed, and cut where it is longer than a name should be."""
    text = "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)
    return text if len(text) <= limit else text[: limit - 1] + "…"


def num(count: int, noun: str) -> str:
    """`1 step`, `1,000 steps`."""
    plural = noun + ("es" if noun.endswith("s") else "s")
    return f"{count:,} {noun if count == 1 else plural}"


def size(num_bytes: int) -> str:
    """Bytes in the unit that leaves few digits."""
    if num_bytes < 1024:
        return f"{num_bytes} B"
    value = float(num_bytes)
    for unit in ("KiB", "MiB", "GiB"):
        value /= 1024
        if value < 1023.95:  # from there on it would read 1024.0
            return f"{value:.1f} {unit}"
    return f"{value / 1024:.1f} TiB"


def ranges(found: Sequence[Range], limit: int = _MAX_RANGES) -> str:
    """`0-3, 5, 7-9`, and how many more where there are many."""
    shown = ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in found[:limit])
    return shown if len(found) <= limit else f"{shown}, … ({len(found) - limit} more)"


def capped(lines: Sequence[str], limit: int) -> list[str]:
    """The first lines, and how many more."""
    return list(lines) if len(lines) <= limit else [*lines[:limit], f"… and {len(lines) - limit:,} more (--all shows them)"]


def writable(text: str, stream: TextIO) -> str:
    """The text, with what the stream's encoding lacks shown as escapes: a report must not end in an encoding error."""
    encoding = stream.encoding or "utf-8"
    return text.encode(encoding, "backslashreplace").decode(encoding)


def some(names: Sequence[str], limit: int) -> str:
    """The first names, and how many more."""
    shown = ", ".join(visible(name) for name in names[:limit])
    return shown if len(names) <= limit else f"{shown} and {len(names) - limit:,} more"


def scope(report: Report, ranks: Sequence[int], steps: Sequence[Range]) -> str:
    """`all ranks, every step`; empty where neither ranks nor steps are given."""
    parts = []
    if ranks:
        listed = as_ranges(ranks)
        is_all = len(set(ranks)) == report.run.world_size > 1  # where a rank has no data, these are not all
        word = "rank" if len(ranks) == 1 else "ranks"
        parts.append("all ranks" if is_all else f"{word} {ranges(listed)}")
    if steps:
        is_every = list(steps) == [(0, report.run.steps - 1)] and report.run.steps > 1
        word = "step" if len(steps) == 1 and steps[0][0] == steps[0][1] else "steps"
        parts.append("every step" if is_every else f"{word} {ranges(steps)}")
    return ", ".join(parts)


def missed_where(report: Report, missed: Mapping[int, Sequence[Range]]) -> str:
    """Ranks and steps of a missed parameter."""
    of_steps: dict[tuple[Range, ...], list[int]] = {}
    for rank, steps in missed.items():
        of_steps.setdefault(tuple(steps), []).append(rank)
    if len(of_steps) > 2:
        return f"{num(len(missed), 'rank')}, steps differ"
    return "; ".join(scope(report, ranks, steps) for steps, ranks in of_steps.items())


def header(report: Report) -> str:
    """What was recorded, in a line."""
    run, wrapper = report.run, report.run.wrapper
    parts = [
        f"ddpcov {__version__}",
        num(run.world_size, "rank"),
        num(run.steps, "step"),
        num(run.backward_passes, "backward pass"),
    ]
    if wrapper.kind == "ddp":
        flags = ("find_unused_parameters", "static_graph")
        on = [f"{flag}=True" for flag in flags if getattr(wrapper, flag)]
        parts.append("DDP" + (f" ({', '.join(on)})" if on else ""))
    elif wrapper.kind != "none":
        parts.append(visible(wrapper.kind.upper(), 20))
    return " · ".join([*parts, f"torch {visible(run.torch, 40)}"])


def verdict(report: Report) -> str:
    """What a person wants to know first, as a sentence."""
    run, totals = report.run, report.totals
    if run.steps == 0:
        return "No backward pass was recorded: nothing can be said."
    seen = f"{num(run.steps, 'step')} on {num(len(run.ranks), 'rank')}"
    if not totals.trainable:
        return f"No parameter is trainable: none can receive a gradient ({seen})."
    if not totals.missed:
        told = f"All {num(totals.trainable, 'trainable parameter')} received a gradient in every step ({seen})."
        return told if not report.findings else f"{told} {num(len(report.findings), 'finding')} all the same."
    partly = totals.missed - totals.never
    of_all = f"of {num(totals.trainable, 'trainable parameter')}"
    if totals.never:
        told = f"{totals.never:,} {of_all} never received a gradient"
        told += f", {partly:,} not in every step" if partly else ""
    else:
        told = f"{partly:,} {of_all} did not receive a gradient in every step"
    share = 100 * totals.elements_missed / max(totals.elements, 1)
    what = f"{totals.elements_missed:,} of {totals.elements:,} elements, {share:.1f}%, {size(totals.bytes_missed)}"
    return f"{told}: {what}; {seen}."


def group_missed(report: Report, options: Options, limit: int) -> list[Group]:
    """Missed parameters by module (or class) and by ranks and steps, the largest first.

    Where that gives more groups than the limit, deeper modules are joined to their parents until it does not, unless the
    user chose the depth or asked for everything.
    """
    missed = [p for p in report.parameters if p.missed]
    deepest = max((p.module.count(".") + 1 for p in missed), default=1)
    if options.depth is not None:
        depths = [options.depth]
    elif options.show_all or options.by != "module":
        depths = [deepest]
    else:
        depths = list(range(deepest, 0, -1))
    for depth in depths:
        groups = _grouped(missed, options.by, depth)
        if len(groups) <= limit:
            break
    return sorted(groups, key=lambda g: (g.parameters[0].coverage != "never", -g.num_bytes, g.label))


def _grouped(missed: Iterable[ParameterCoverage], by: str, depth: int) -> list[Group]:
    found: dict[tuple[object, ...], list[ParameterCoverage]] = {}
    # Parameters that are alike share one table of ranks and steps, which may be long: each is taken in once.
    tables: dict[int, int] = {}
    numbers: dict[tuple[object, ...], int] = {}
    for p in missed:
        if id(p.missed) not in tables:
            tables[id(p.missed)] = numbers.setdefault(tuple(p.missed.items()), len(numbers))
        found.setdefault((_label(p, by, depth), tables[id(p.missed)]), []).append(p)
    groups = []
    for (label, _), members in found.items():
        classes = {p.module_class.rpartition(".")[2] for p in members}
        modules = {p.module for p in members}
        kind = classes.pop() if len(classes) == 1 and len(modules) == 1 else num(len(modules), "module")
        if by == "module" and len(modules) == 1:
            (label,) = modules  # nothing was joined
        groups.append(Group(visible(str(label)) or "(the model itself)", visible(kind), tuple(members)))
    return groups


def _label(p: ParameterCoverage, by: str, depth: int) -> str:
    if by == "parameter":
        return p.name
    if by == "class":
        return p.module_class
    parts = p.module.split(".")
    return p.module if len(parts) <= depth else ".".join(parts[:depth]) + ".*"


def shapes(group: Group, limit: int) -> str:
    """The group's parameters with their shapes; where they come from several modules, how many there are."""
    if group.is_joined:
        return num(len(group.parameters), "parameter")
    members = [f"{p.name.rpartition('.')[2]} [{', '.join(map(str, p.shape))}]" for p in group.parameters]
    return some(members, limit)


def alike(findings: Sequence[Finding]) -> list[list[Finding]]:
    """Findings that say the same of different parameters, ranks or steps, together."""
    found: dict[tuple[str, ...], list[Finding]] = {}
    for f in findings:
        found.setdefault((f.code, f.severity, f.message, f.fix), []).append(f)
    return list(found.values())


def advice(report: Report) -> list[tuple[str, str]]:
    """What is said about DDP's flags, in words: name and sentence."""
    given = report.advice
    if given.find_unused_parameters == "not-applicable":
        return []
    says = {
        "off": "off: not needed, and would only hide what is missed",
        "on": "on: the set of parameters without a gradient varies",
        "cannot-help": "cannot help: what is wrong here goes wrong with it, too",
        "safe": "safe: the set is the same in every step",
        "unsafe": "unsafe: the set varies from step to step",
        "unknown": "unknown: more would have to be observed",
    }
    lines = [
        (name, says[value])
        for name, value in (("find_unused_parameters", given.find_unused_parameters), ("static_graph", given.static_graph))
    ]
    why = next((p.reasons[0] for p in given.preconditions if p.option == "static_graph" and p.reasons), "")
    if why and given.static_graph == "unsafe":
        lines[1] = ("static_graph", visible(f"unsafe: {why}", 200))
    if given.bytes_reduced_for_nothing:
        lines.append(
            ("cost", f"{size(given.bytes_reduced_for_nothing)} reduced in each step for parameters that never get a gradient")
        )
    return lines


def advice_scope(report: Report) -> str:
    """How far the advice reaches."""
    return f"as seen in {num(report.advice.num_steps, 'finished step')} on {num(report.advice.num_ranks, 'rank')}"


def ends(report: Report) -> list[str]:
    """How the ranks ended that did not end cleanly."""
    by_end: dict[str, list[int]] = {}
    for rank, end in report.run.end.items():
        by_end.setdefault(end, []).append(rank)
    by_end.pop("clean", None)
    return [f"rank{'s' * (len(ranks) > 1)} {ranges(as_ranges(ranks))}: {visible(end, 100)}" for end, ranks in by_end.items()]


def closing(report: Report) -> str:
    """Totals, in a line."""
    t = report.totals
    frozen = t.parameters - t.trainable
    of_each = f"{t.covered:,} covered, {t.missed:,} missed, {frozen:,} frozen"
    return f"{num(t.parameters, 'parameter')}: {of_each}; {num(t.elements, 'element')}."
