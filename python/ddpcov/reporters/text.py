"""The report for a terminal, and as plain text for a pipe."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import TYPE_CHECKING, TextIO

from ddpcov.report import Finding, Report
from ddpcov.reporters import layout
from ddpcov.reporters.layout import Options

if TYPE_CHECKING:
    from rich.console import Console

__all__ = ["TextReporter"]

_PIPE_WIDTH = 100
_NUM_GROUPS = 8
_NUM_FINDINGS = 4
_NUM_PLACES = 3
_NUM_LINES = 4
_NUM_NAMES = 3
_STYLES = {"error": "bold red", "warning": "bold yellow", "info": "bold blue"}


class TextReporter:
    """A page that fits a screen: the verdict, what was missed, findings, advice, totals. `show_all` gives the rest."""

    def __init__(self, options: Options) -> None:
        self._options = options

    def render(self, report: Report, stream: TextIO) -> None:
        """Writes the page; in colour, and as wide as the terminal, if the stream is one."""
        from rich.console import Console  # here, so that importing ddpcov costs nothing

        width = None if stream.isatty() else _PIPE_WIDTH
        console = Console(file=stream, width=width, highlight=False, emoji=False, markup=False)
        with console.capture() as page:
            for heading, one in layout.sections(report):
                if heading is not None:
                    console.print(f"{'' if one is report else chr(10)}{heading}", style="bold")
                self._page(one, console)
        stream.write(layout.writable(re.sub(r" +$", "", page.get(), flags=re.MULTILINE), stream))

    def _page(self, report: Report, console: Console) -> None:
        console.print(layout.header(report), style="dim")
        is_grave = report.totals.never or any(f.severity == "error" for f in report.findings)
        is_clean = report.run.steps and report.totals.trainable and not report.totals.missed and not report.findings
        colour = "red" if is_grave else "green" if is_clean else "yellow"
        console.print(layout.verdict(report), style=f"bold {colour}")
        self._missed(report, console)
        self._findings(report, console)
        self._advice(report, console)
        console.print("\n" + layout.closing(report), style="dim")
        if self._options.show_all:
            frozen = [layout.visible(p.name) for p in report.parameters if p.coverage == "frozen"]
            if frozen:
                console.print("Frozen: " + ", ".join(frozen), style="dim")
        notes = [layout.visible(note, 300) for note in report.run.notes]
        for line in (
            *layout.capped(layout.ends(report), self._options.limit(_NUM_LINES)),
            *layout.capped(notes, self._options.limit(_NUM_LINES)),
        ):
            console.print(f"Note: {line}", style="yellow")

    def _missed(self, report: Report, console: Console) -> None:
        from rich.table import Table

        groups = layout.group_missed(report, self._options, self._options.limit(_NUM_GROUPS))
        if not groups:
            return
        console.print("\nMissed", style="bold")
        table = Table.grid(padding=(0, 2))
        table.add_column()  # indents a label's second line, too
        table.add_column(overflow="fold", max_width=44)
        table.add_column(overflow="fold")
        table.add_column(justify="right", no_wrap=True)
        table.add_column(overflow="fold")
        for group in groups[: self._options.limit(_NUM_GROUPS)]:
            table.add_row(
                "",
                group.label,
                layout.shapes(group, 4) if group.is_joined else f"{group.kind}: {layout.shapes(group, 4)}",
                layout.size(group.num_bytes),
                layout.missed_where(report, group.parameters[0].missed),
            )
        console.print(table)
        if len(groups) > self._options.limit(_NUM_GROUPS):
            console.print(
                f"  … and {len(groups) - self._options.limit(_NUM_GROUPS):,} more groups (--all shows them)", style="dim"
            )

    def _findings(self, report: Report, console: Console) -> None:
        groups = layout.alike(report.findings)
        if not groups:
            return
        console.print("\nFindings", style="bold")
        for group in groups[: self._options.limit(_NUM_FINDINGS)]:
            self._finding(report, group, console)
        if len(groups) > self._options.limit(_NUM_FINDINGS):
            codes = sorted({f.code for group in groups[self._options.limit(_NUM_FINDINGS) :] for f in group})
            console.print(f"  … and more ({', '.join(codes)}; --all shows them)", style="dim")

    def _finding(self, report: Report, group: list[Finding], console: Console) -> None:
        from rich.padding import Padding
        from rich.text import Text

        one = group[0]
        style = _STYLES.get(one.severity, "bold")
        console.print(Text.assemble("  ", (f"{one.code} {one.slug}", style), f" ({one.severity})"))
        lines = [layout.visible(one.message, 400)]
        limit = self._options.limit(_NUM_PLACES)
        for finding in group[:limit]:
            lines += self._places(report, finding)
        if len(group) > limit:
            lines.append(f"… and {len(group) - limit:,} more of these (--all shows them)")
        if one.fix:
            lines.append(f"Fix: {layout.visible(one.fix, 600)}")
        for line in lines:
            console.print(Padding(Text(line), (0, 0, 0, 4), expand=False))

    def _places(self, report: Report, finding: Finding) -> Iterable[str]:
        at = layout.scope(report, finding.ranks, finding.steps)
        names = layout.some(finding.parameters, self._options.limit(_NUM_NAMES))
        if names or at:
            yield ": ".join(part for part in (at, names) if part)
        yield from layout.capped([layout.visible(line, 400) for line in finding.evidence], self._options.limit(_NUM_LINES))
        if finding.where is not None:
            place = finding.where
            yield f"at {layout.visible(place.file)}:{place.line} in {layout.visible(place.function)}"

    def _advice(self, report: Report, console: Console) -> None:
        from rich.table import Table

        lines = [f"{name}: {sentence}" for name, sentence in layout.advice(report)]
        lines += [layout.visible(action, 600) for action in report.advice.actions]
        if not lines:
            return
        console.print(f"\nAdvice, {layout.advice_scope(report)}", style="bold")
        bullets = Table.grid(padding=(0, 1))
        for line in lines:
            bullets.add_row("  -", line)
        console.print(bullets)
