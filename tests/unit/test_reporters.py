"""Reporters on reports made by hand."""

import io
import json
import os
from dataclasses import replace
from pathlib import Path

import pytest

import ddpcov
from ddpcov import Advice, Finding, ParameterCoverage, Report, Run, Totals, Wrapper
from ddpcov.reporters import FORMATS, Options

GOLDEN = Path(__file__).parent.parent / "golden" / "reports"


class Terminal(io.StringIO):
    def isatty(self):
        return True


def parameter(name, missed=(), shape=(4, 4), coverage=None):
    steps = {rank: tuple(missed) for rank in (0, 1)} if missed else {}
    coverage = coverage or ("never" if missed else "always")
    numel = shape[0] * shape[1]
    module = name.rpartition(".")[0]
    hits = {0: 3, 1: 3}
    return ParameterCoverage(
        name, (), shape, numel, 4, "float32", coverage != "frozen", module, "torch.nn.Linear", coverage, steps, hits
    )


def report(parameters, findings=(), **run):
    defaults = {"world_size": 2, "ranks": (0, 1), "steps": 3, "backward_passes": 3, "torch": "2.13.0"}
    ends = {0: "clean", 1: "exception: RuntimeError: it broke"}
    made = Run(**{**defaults, "wrapper": Wrapper("ddp", find_unused_parameters=True), "end": ends, **run})
    missed = [p for p in parameters if p.missed]
    totals = Totals(
        parameters=len(parameters),
        trainable=sum(p.trainable for p in parameters),
        covered=sum(p.trainable and not p.missed for p in parameters),
        missed=len(missed),
        never=sum(p.coverage == "never" for p in missed),
        elements=sum(p.numel for p in parameters),
        elements_missed=sum(p.numel for p in missed),
        bytes_missed=sum(p.num_bytes for p in missed),
    )
    advice = Advice("off", "unknown", 3, 2, totals.bytes_missed, ("Freeze it before the model is wrapped.",))
    return Report(made, totals, parameters, findings, advice)


TYPICAL = report(
    [
        *(parameter(f"backbone.{i}.weight") for i in range(3)),
        parameter("head.weight", [(0, 2)]),
        parameter("head.bias", [(0, 2)], (1, 4)),
        parameter("aux.weight", [(0, 0), (2, 2)], coverage="some"),
        parameter("stem.weight", coverage="frozen"),
    ],
    [
        Finding(
            "DDC100", "missed", "error", ("head.bias", "head.weight"), (0, 1), ((0, 2),), "No gradient arrived.", fix="Use it."
        ),
        Finding("DDC201", "some-steps", "info", ("aux.weight",), (0, 1), ((0, 0), (2, 2)), "Missed in some steps."),
        Finding("DDC501", "shard-incomplete", "error", (), (1,), ((2, 2),), "Rank 1 raised.", ("nothing lacked",)),
    ],
    notes=("run.bin.rank7: damaged",),
)


def render(what, form="text", stream=None, **options):
    stream = stream or io.StringIO()
    FORMATS[form](Options(**options)).render(what, stream)
    return stream.getvalue()


@pytest.mark.parametrize(("form", "suffix"), [("text", "txt"), ("markdown", "md")])
def test_golden(form, suffix):
    golden = GOLDEN / f"typical.{suffix}"
    got = render(TYPICAL, form)
    if os.environ.get("DDPCOV_UPDATE_GOLDEN"):
        golden.write_text(got)
    assert got == golden.read_text()


def many(count):
    names = [f"model.layers.{i // 20}.block{i // 4 % 5}.sub{i // 2 % 2}.p{i}" for i in range(count)]
    missed = [parameter(name, [(0, 2)] if i % 3 else [(1, 1)]) for i, name in enumerate(names)]
    findings = [Finding("DDC100", "missed", "error", (n,), (0, 1), ((0, 2),), "No gradient arrived.") for n in names]
    return report(missed, findings)


@pytest.mark.parametrize("width", [80, 120])
def test_5000_parameters_fit_a_screen(monkeypatch, width):
    monkeypatch.setenv("COLUMNS", str(width))
    monkeypatch.setenv("TERM", "dumb")
    lines = render(many(5000), stream=Terminal()).splitlines()
    assert len(lines) <= 45
    assert max(map(len, lines)) <= width
    assert "more groups" not in render(many(5000), show_all=True)
    assert render(many(5000), show_all=True).count("\n") > 1000


def test_depth_and_grouping():
    assert "model.layers.*" in render(many(100), depth=2)
    assert "torch.nn.Linear" in render(TYPICAL, by="class")
    assert "head.bias" in render(TYPICAL, by="parameter").split("Findings")[0]
    assert "Frozen: stem.weight" in render(TYPICAL, show_all=True)


def test_colour_on_a_terminal_only(monkeypatch):
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.delenv("NO_COLOR", raising=False)
    assert "\x1b[" in render(TYPICAL, stream=Terminal())
    assert "\x1b" not in render(TYPICAL)


def test_nothing_in_a_name_is_obeyed():
    evil = "a.\x1b[31mred\n[bold]|`x`<b>" + "y" * 500
    found = Finding("DDC100", "missed", "error", (evil,), (0, 1), ((0, 2),), "No gradient arrived.")
    what = report([parameter(evil, [(0, 2)])], [found])
    text = render(what)
    assert "\x1b" not in text and "\\x1b[31mred\\n[bold]" in text.replace("\n", "") and "y" * 200 not in text
    table = [line for line in render(what, "markdown").splitlines() if line.startswith("| ")]
    assert len(table) == 3 and all(line.replace("\\|", "").count("|") == 5 for line in table)


def test_nothing_recorded_does_not_sound_clean():
    text = render(report([parameter("a.weight")], steps=0, backward_passes=0))
    assert "nothing can be said" in text and "All" not in text


def test_findings_without_missed_parameters():
    found = Finding("DDC307", "needless-flag", "warning", (), (0, 1), ((0, 2),), "Not needed.")
    text = render(report([parameter("a.weight")], [found])).replace("\n", " ")
    assert "All 1 trainable parameter received a gradient in every step" in text and "1 finding all the same" in text


def test_json_is_the_document():
    assert json.loads(render(TYPICAL, "json")) == TYPICAL.to_dict()
    assert TYPICAL.to_dict()["ddpcov_version"] == ddpcov.__version__
    assert replace(TYPICAL, findings=()).to_dict()["verdict"] == "clean"
