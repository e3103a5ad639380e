"""Gradient coverage for PyTorch: which parameters received a gradient, on which rank, in which step.

    with ddpcov.track(model, out="run.bin"):
        for batch in loader:
            model(batch).loss.backward()
            optimizer.step()
            optimizer.zero_grad()

and then `python -m ddpcov report run.bin`, or `ddpcov.read("run.bin")`. Importing ddpcov changes nothing, and reading a
run imports no torch.
"""

from typing import TYPE_CHECKING, Any

from ddpcov._core import CaptureError, Error, MergeError, __version__
from ddpcov.divergence import RankDivergence
from ddpcov.reading import read
from ddpcov.report import Advice, Finding, ParameterCoverage, Place, Report, Run, Totals, Wrapper

if TYPE_CHECKING:
    from ddpcov.tracker import Tracker, track

__all__ = [
    "Advice",
    "CaptureError",
    "Error",
    "Finding",
    "MergeError",
    "ParameterCoverage",
    "Place",
    "RankDivergence",
    "Report",
    "Run",
    "Totals",
    "Tracker",
    "Wrapper",
    "__version__",
    "read",
    "track",
]


def __getattr__(name: str) -> Any:
    if name in ("track", "Tracker"):  # the two names that need torch
        from ddpcov import tracker

        return getattr(tracker, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
