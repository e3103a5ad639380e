"""The report for a pull request or a chat."""

from __future__ import annotations

import re
from typing import TextIO

from ddpcov.report import Finding, Report
from ddpcov.reporters import layout
from ddpcov.reporters.layout import Options

__all__ = ["MarkdownReporter"]

_NUM_GROUPS = 20
_NUM_FINDINGS = 10
_NUM_PLACES = 5
_NUM_LINES = 4


class MarkdownReporter:
    """The same as the page for a terminal, shorter."""

    def __init__(self, options: Options) -> None:
        self._options = options

    def render(self, report: Report, stream: TextIO) -> None:
        """Writes the report."""
        pages = []
        for heading, one in layout.sections(report):
            pages += [f"## {_plain(heading)}\n\n"] if heading is not None else []
            pages.append("\n".join(self._page(one)) + "\n")
        stream.write(layout.writable("\n".join(pages), stream))

    def _page(self, report: Report) -> list[str]:
        lines = [f"### Gradient coverage: {_plain(layout.verdict(report))}", "", _plain(layout.header(report))]
        lines += [*self._missed(report), *self._findings(report)]
        advice = [f"- `{name}`: {_plain(sentence)}" for name, sentence in layout.advice(report)]
        advice += [f"- {_plain(layout.visible(action, 600))}" for action in report.advice.actions]
        if advice:
            lines += ["", f"**Advice**, {layout.advice_scope(report)}:", "", *advice]
        lines += ["", _plain(layout.closing(report))]
        notes = [layout.visible(note, 300) for note in report.run.notes]
        notes = [
            *layout.capped(layout.ends(report), self._options.limit(_NUM_LINES)),
            *layout.capped(notes, self._options.limit(_NUM_LINES)),
        ]
        return lines + [f"\n> {_plain(note)}" for note in notes]

    def _missed(self, report: Report) -> list[str]:
        groups = layout.group_missed(report, self._options, self._options.limit(_NUM_GROUPS))
        if not groups:
            return []
        lines = ["", f"| {self._options.by.capitalize()} | Missed parameters | Size | Where |", "| --- | --- | ---: | --- |"]
        for group in groups[: self._options.limit(_NUM_GROUPS)]:
            what = f"{group.kind}: {layout.shapes(group, 4)}"
            where = layout.missed_where(report, group.parameters[0].missed)
            label = _code(group.label).replace("|", r"\|")  # a table's cells end at a bar, in code too
            lines.append(f"| {label} | {_plain(what)} | {layout.size(group.num_bytes)} | {_plain(where)} |")
        if len(groups) > self._options.limit(_NUM_GROUPS):
            lines.append(f"| … and {len(groups) - self._options.limit(_NUM_GROUPS):,} more groups | | | |")
        return lines

    def _findings(self, report: Report) -> list[str]:
        groups = layout.alike(report.findings)
        lines = ["", "**Findings**", ""] if groups else []
        for group in groups[: self._options.limit(_NUM_FINDINGS)]:
            one = group[0]
            message = _plain(" ".join(filter(None, (layout.visible(one.message, 400), layout.visible(one.fix, 600)))))
            lines.append(f"- **{one.code} {one.slug}** ({one.severity}) {message}")
            limit = self._options.limit(_NUM_PLACES)
            lines += [f"  - {_place(report, finding)}" for finding in group[:limit]]
            if len(group) > limit:
                lines.append(f"  - … and {len(group) - limit:,} more of these")
        if len(groups) > self._options.limit(_NUM_FINDINGS):
            lines.append("- … and more")
        return lines


def _place(report: Report, finding: Finding) -> str:
    names = [_code(layout.visible(name)) for name in finding.parameters[:4]]
    if len(finding.parameters) > 4:
        names.append(f"{len(finding.parameters) - 4:,} more")
    at = layout.scope(report, finding.ranks, finding.steps)
    evidence = "; ".join(_plain(layout.visible(line, 400)) for line in finding.evidence)
    return ": ".join(part for part in (at, ", ".join(names), evidence) if part) or "the whole run"


def _plain(text: str) -> str:
    """The text with everything escaped that Markdown or HTML would read as its own."""
    text = text.replace("@", "@\u200b")  # no team is to be called by an exception's text
    return re.sub(r"([\\`*_\[\]<>|#~&])", r"\\\1", text)


def _code(text: str) -> str:
    """The text as code, in as many backticks as it takes."""
    fence = "`" * (max(map(len, re.findall("`+", text)), default=0) + 1)
    space = " " if "`" in text else ""
    return f"{fence}{space}{text}{space}{fence}"
