"""What the guard raises. Needs no torch."""

from __future__ import annotations

from collections.abc import Mapping

from ddpcov._core import Error

__all__ = ["RankDivergence"]


class RankDivergence(Error):
    """Ranks are about to go apart in a way that the wrapper does not survive: raised on every rank in place of a hang."""

    lacking: Mapping[int, tuple[str, ...]]
    """Rank → names of the parameters that its pass does not reach, and that of another rank does."""
    absent: tuple[int, ...]
    """Ranks that did not come to the pass at all."""

    def __init__(self, message: str, lacking: Mapping[int, tuple[str, ...]] | None = None, absent: tuple[int, ...] = ()):
        super().__init__(message)
        self.lacking = dict(lacking or {})
        self.absent = absent


RankDivergence.__module__ = "ddpcov"  # where users find it, and tracebacks name it
