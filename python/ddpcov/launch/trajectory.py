"""Where a training went: its losses, the time of its steps, and its weights at the end, to be held against another's."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from ddpcov.launch.section import Section

__all__ = ["Trajectory"]

_NUM_SAMPLES = 64
"""Elements of each parameter that are kept, evenly spaced, beside the digest of all."""


class Trajectory:
    """That of this process."""

    def __init__(self, folder: str) -> None:
        self._folder = Path(folder)
        self._losses: list[list[float]] = []
        self._times: list[float] = []

    def note_loss(self, roots: Sequence[Any]) -> None:
        """A backward pass begins from these."""
        scalars = (t for t in roots if isinstance(t, torch.Tensor) and t.numel() == 1)
        self._losses.append([float(t.detach()) for t in scalars])

    def note_step(self) -> None:
        """An optimizer stepped."""
        self._times.append(time.monotonic())
        (self._folder / "progress").touch()

    def save(self, section: Section) -> None:
        """Writes down how far this model came. Of corrections it is DDP models that are compared, and only they are whole on
        each rank."""
        if section.order is None:
            return
        weights = {name: _describe(p.detach()) for name, p in section.trainable().items()}
        fact = {"losses": self._losses, "times": self._times, "weights": weights}
        name = f"trajectory.{section.order}.{section.rank}.json"
        (self._folder / name).write_text(json.dumps(fact))


def _describe(weight: torch.Tensor) -> list[Any]:
    """Digest of its bytes, and some of its elements."""
    flat = weight.cpu().contiguous().flatten()
    digest = hashlib.sha256(flat.view(torch.uint8).numpy().tobytes()).hexdigest()
    samples = flat[:: max(1, flat.numel() // _NUM_SAMPLES)][:_NUM_SAMPLES]
    return [digest, samples.double().tolist()]
