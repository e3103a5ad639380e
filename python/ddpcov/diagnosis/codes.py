"""The catalogue of findings: stable codes, like a linter's."""

from __future__ import annotations

__all__ = ["SLUGS"]

SLUGS = {
    "DDC100": "missed",
    "DDC201": "some-steps",
    "DDC202": "some-ranks",
    "DDC203": "some-passes",
    "DDC301": "frozen-after-wrap",
    "DDC302": "thawed-after-wrap",
    "DDC303": "replaced-after-wrap",
    "DDC306": "reached-twice",
    "DDC307": "needless-flag",
    "DDC401": "not-in-optimizer",
    "DDC501": "shard-incomplete",
    "DDC502": "rank-missing",
    "DDC503": "parameters-differ",
    "DDC504": "nothing-recorded",
}
"""Code → slug of every finding that this version can make."""
