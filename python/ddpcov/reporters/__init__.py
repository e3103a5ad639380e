"""Reporters: a `Report` and its options in, a text stream out. They see no paths, no arguments, no core."""

from __future__ import annotations

from typing import Protocol, TextIO

from ddpcov.report import Report
from ddpcov.reporters.json import JsonReporter
from ddpcov.reporters.layout import Options
from ddpcov.reporters.markdown import MarkdownReporter
from ddpcov.reporters.text import TextReporter

__all__ = ["FORMATS", "Options", "Reporter"]


class Reporter(Protocol):
    """What a format is."""

    def __init__(self, options: Options) -> None: ...

    def render(self, report: Report, stream: TextIO) -> None:
        """Writes the report."""


FORMATS: dict[str, type[Reporter]] = {"text": TextReporter, "json": JsonReporter, "markdown": MarkdownReporter}
"""Format → reporter."""
