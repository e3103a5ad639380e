"""For all tests."""

from __future__ import annotations

import pytest
import torch

import reference
from ddpcov import gears

torch.set_num_threads(1)

BOTH_GEARS = ("test_exactness_", "test_random_models", "test_ranks", "test_cases")
"""Modules whose tests run with hooks on all parameters, and once more with none from the first pass on."""


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if metafunc.module.__name__.rpartition(".")[2].startswith(BOTH_GEARS):
        metafunc.parametrize("gear", ["hooks", "looks"], indirect=True)


@pytest.fixture(autouse=True)
def gear(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the bits of a pass come from; see `ddpcov.gears`."""
    if getattr(request, "param", "") == "looks":
        monkeypatch.setattr(gears, "SETTLE", 0)
        monkeypatch.setattr(gears, "MAX_MISSED", 1.0)
        monkeypatch.setattr(reference, "AT_NODES", True)
