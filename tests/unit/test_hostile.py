"""Captures from elsewhere, sound in form and hostile in content: each gives a report that can be shown, and obeys nothing."""

from __future__ import annotations

import io
import json
import random
import resource
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import ddpcov
from ddpcov import _core, reading
from ddpcov.reporters import FORMATS
from ddpcov.reporters.layout import Options
from recorded import capture, shard

OTHER_TOPICS = ["degraded", "divergence", "idle", "optimizers", "sync", "unregistered", "values", "wrappers"]
NASTY = [None, True, -1, 2**70, 1e308, "", "\x1b[2J", "</script>", "../../etc/passwd", "n" * 300, [], {}, [[]], {"a": None}]


class Unused(nn.Module):
    """Misses gradients by several causes, so that much is noted."""

    def __init__(self) -> None:
        super().__init__()
        self.used, self.never, self.cut, self.left = (nn.Linear(3, 3) for _ in range(4))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.used(x) + self.cut(x).detach(), self.left(x)


@pytest.fixture(scope="module")
def notes() -> list[tuple[str, Any]]:
    """What a real run noted, by topic."""
    model = Unused()
    with pytest.raises(ValueError), ddpcov.track(model) as cov:
        for _ in range(3):
            model(torch.ones(2, 3))[0].sum().backward()
        raise ValueError("at the end")
    assert cov._recorder is not None
    (lane,) = cov._recorder.capture().analyse().lanes
    return [(topic, json.loads(body)) for topic, body in lane["facts"]]


def mutated(value: Any, choose: random.Random) -> Any:
    """The value with one thing in it changed."""
    if choose.random() < 0.15 or not isinstance(value, (dict, list)) or not value:
        return choose.choice(NASTY)
    if isinstance(value, list):
        at = choose.randrange(len(value))
        return [*value[:at], mutated(value[at], choose), *value[at + 1 :]]
    key = choose.choice(list(value))
    rest = {k: v for k, v in value.items() if k != key}
    return rest if choose.random() < 0.2 else {**rest, key: mutated(value[key], choose)}


def shown(recorder: _core.Recorder) -> dict[str, str]:
    """The report in every format."""
    report = reading.build(recorder.capture())
    assert report.run.steps == 2
    assert [p.missed for p in report.parameters][1:] == [{0: ((0, 1),)}] * (len(report.parameters) - 1)
    streams = {format: io.StringIO() for format in FORMATS}
    for format, stream in streams.items():
        FORMATS[format](Options(show_all=True)).render(report, stream)
    return {format: stream.getvalue() for format, stream in streams.items()}


@pytest.mark.parametrize("seed", range(8))
def test_notes_of_any_kind(notes: list[tuple[str, Any]], seed: int) -> None:
    choose = random.Random(seed)
    names = tuple(name for name, _ in Unused().named_parameters())
    for _ in range(40):
        recorder = shard(None, names=names, world_size=1)
        for topic, value in notes:
            recorder.note(topic, json.dumps(mutated(value, choose)))
        recorder.note(choose.choice(OTHER_TOPICS), json.dumps(choose.choice(NASTY)))
        for format, text in shown(recorder).items():
            assert format == "json" or "\x1b" not in text


def test_notes_that_are_nested_without_end() -> None:
    recorder = shard(None, world_size=1)
    recorder.note("run", "[" * 100_000 + "]" * 100_000)
    assert "is dropped" in shown(recorder)["text"]


def test_names_of_ten_million_letters(tmp_path: Path) -> None:
    name = "x" * 10_000_000
    path = tmp_path / "run.bin"
    capture(path, names=("a", name))
    done = subprocess.run(
        [sys.executable, "-m", "ddpcov", "report", path], capture_output=True, text=True, check=True, preexec_fn=little_memory
    )
    assert len(done.stdout) < 5_000
    assert "x" * 200 not in done.stdout


def little_memory() -> None:
    resource.setrlimit(resource.RLIMIT_AS, (2 << 30, 2 << 30))


@pytest.mark.parametrize("name", ["../../etc/passwd", "/etc/passwd", "a/b.weight", "C:\\x"])
def test_separators_in_names_lead_nowhere(tmp_path: Path, name: str) -> None:
    path = tmp_path / "run.bin"
    capture(path, names=("a", name))
    report = ddpcov.read(path)
    assert [p.name for p in report.parameters] == ["a", name]
    assert list(tmp_path.iterdir()) == [path]
