"""The report for programs."""

from __future__ import annotations

import json
from typing import TextIO

from ddpcov.report import Report
from ddpcov.reporters.layout import Options

__all__ = ["JsonReporter"]


class JsonReporter:
    """The whole report, in the layout of `Report.to_dict`; no option changes it."""

    def __init__(self, options: Options) -> None:
        pass

    def render(self, report: Report, stream: TextIO) -> None:
        """Writes one JSON document."""
        json.dump(report.to_dict(), stream, allow_nan=False)
        stream.write("\n")
