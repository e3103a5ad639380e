"""Reporters at their limits: huge, hostile, odd reports; narrow terminals, poor encodings."""

import io
import json
import math
import re
import subprocess
import sys

import pytest

from ddpcov.report import Advice, Finding, ParameterCoverage, Place, Report, Run, Totals, Wrapper
from ddpcov.reporters import FORMATS, Options

EVERY_STEP = {0: ((0, 2),), 1: ((0, 2),)}
SCREEN = (80, 45)


class Terminal(io.StringIO):
    def isatty(self):
        return True


def parameter(name, shape=(8, 8), missed=None, kind="torch.nn.modules.linear.Linear", trainable=True, ranks=(0, 1)):
    """A parameter over three steps; `missed` maps ranks to ranges of steps."""
    missed = missed or {}
    hits = {rank: 3 * trainable - sum(b - a + 1 for a, b in missed.get(rank, ())) for rank in ranks}
    coverage = "frozen" if not trainable else "always" if not missed else "some" if any(hits.values()) else "never"
    module = name.rpartition(".")[0]
    return ParameterCoverage(name, (), shape, math.prod(shape), 4, "float32", trainable, module, kind, coverage, missed, hits)


def report_of(parameters, findings=(), *, steps=3, ranks=(0, 1), end=None, notes=(), advice=None, world_size=None):
    trainable = [p for p in parameters if p.trainable]
    missed = [p for p in trainable if p.missed]
    totals = Totals(
        parameters=len(parameters),
        trainable=len(trainable),
        covered=len(trainable) - len(missed),
        missed=len(missed),
        never=sum(p.coverage == "never" for p in missed),
        elements=sum(p.numel for p in parameters),
        elements_missed=sum(p.numel for p in missed),
        bytes_missed=sum(p.num_bytes for p in missed),
    )
    run = Run(
        world_size=world_size or len(ranks),
        ranks=tuple(ranks),
        steps=steps,
        backward_passes=steps,
        torch="2.15.0",
        wrapper=Wrapper("ddp"),
        end=end or dict.fromkeys(ranks, "clean"),
        notes=notes,
    )
    return Report(run, totals, parameters, findings, advice or Advice("off", "unknown", steps, len(ranks), 0))


def finding(parameters, **changed):
    given = {
        "code": "DDC100",
        "slug": "missed",
        "severity": "error",
        "ranks": (0, 1),
        "steps": ((0, 2),),
        "message": "No gradient arrived in any step; cause not established.",
        "fix": "Use it in the loss, delete it, or freeze it before the model is wrapped.",
    }
    return Finding(parameters=tuple(p.name for p in parameters), **(given | changed))


def typical():
    head = [parameter("head.weight", (10, 8), EVERY_STEP), parameter("head.bias", (10,), EVERY_STEP)]
    gate = [parameter("blocks.1.gate.weight", (8, 8), {1: ((1, 1),)})]
    rest = [parameter("blocks.0.weight"), parameter("embed.weight", (4, 8), trainable=False)]
    varies = finding(
        gate,
        code="DDC202",
        slug="some-ranks",
        ranks=(1,),
        steps=((1, 1),),
        message="Covered on some ranks and missed on others in the same step.",
        evidence=("covered on rank 0",),
        where=Place("model.py", 12, "Net.forward"),
        fix="",
    )
    actions = ("head.bias, head.weight never got a gradient: use them, or delete them.", "Set find_unused_parameters=True.")
    return report_of(
        [*rest, *gate, *head],
        [finding(head), varies],
        end={0: "clean", 1: "exception: RuntimeError: boom"},
        notes=("1 file of an earlier run beside it is not part of this report",),
        advice=Advice("on", "unsafe", 3, 2, 360, actions),
    )


def huge(num_layers=625):
    """5,000 parameters, three quarters of them missed, in three patterns."""
    patterns = (None, EVERY_STEP, {0: ((0, 0),)}, {1: ((2, 2),)})
    leaves = [
        f"model.encoder.layers.{layer}.{module}.{leaf}"
        for layer in range(num_layers)
        for module in ("self_attn.q_proj", "self_attn.k_proj", "mlp.down_proj", "input_layernorm")
        for leaf in ("weight", "bias")
    ]
    parameters = [parameter(name, missed=patterns[i * 7 % 11 % 4]) for i, name in enumerate(leaves)]
    missed = [p for p in parameters if p.missed]
    return report_of(parameters, [finding(missed), finding(missed, code="DDC201", slug="some-steps", severity="info")])


def hostile():
    """Terminal escapes, line breaks and markup wherever a script's author chooses the words."""
    evil = parameter("a\x1b[31m|`x`.w\n[bold]", missed=EVERY_STEP, kind="m.\x1b]0;title\x07Net")
    said = finding(
        [evil],
        message="\x1b[2J\n| x | <b> *y*",
        evidence=("\x1b[1A",),
        where=Place("\x1b.py", 1, "\x1bf"),
    )
    return report_of([evil], [said], end={0: "exception: \x1b[0m\n# no", 1: "clean"}, notes=("\x1b[5m\n[/]",))


def render(report, format="text", stream=None, **options):
    stream = stream or io.StringIO()
    FORMATS[format](Options(**options)).render(report, stream)
    return stream.getvalue()


@pytest.fixture
def terminal(monkeypatch):
    """How a terminal of the given width shows a report, and whether in colour."""
    for name in ("FORCE_COLOR", "NO_COLOR", "TTY_COMPATIBLE", "TTY_INTERACTIVE"):
        monkeypatch.delenv(name, raising=False)

    def show(report, width=SCREEN[0], term="xterm-256color", **options):
        monkeypatch.setenv("COLUMNS", str(width))
        monkeypatch.setenv("TERM", term)
        return render(report, stream=Terminal(), **options)

    return show


def test_huge_report_fits_a_screen(terminal):
    assert len(terminal(huge()).splitlines()) <= SCREEN[1]
    assert len(render(huge()).splitlines()) <= SCREEN[1]


def test_what_was_left_out_is_said_and_shown_on_demand():
    brief = render(huge(), by="parameter")
    assert "more groups (--all shows them)" in brief
    everything = render(huge(num_layers=40), by="parameter", show_all=True)
    assert "--all" not in everything
    assert all(p.name in everything for p in huge(num_layers=40).parameters if p.missed)


def test_all_lists_what_is_frozen():
    assert "embed.weight" not in render(typical())
    assert "Frozen: embed.weight" in render(typical(), show_all=True)


def test_depth_is_obeyed():
    assert "model.*" in render(huge(), depth=1)
    assert "model.encoder.layers.*" in render(huge(), depth=3)


@pytest.mark.parametrize("width", [40, 80, 132])
@pytest.mark.parametrize("make", [typical, huge, hostile])
def test_terminal_width_is_respected(terminal, make, width):
    shown = re.sub(r"\x1b\[[\d;]*m", "", terminal(make(), width))
    assert max(map(len, shown.splitlines())) <= width


def test_a_pipe_gets_plain_text_of_one_width(monkeypatch):
    for name in ("FORCE_COLOR", "TTY_COMPATIBLE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("COLUMNS", "30")
    shown = render(huge())
    assert "\x1b" not in shown
    assert 30 < max(map(len, shown.splitlines())) <= 100


def test_a_terminal_gets_colour(terminal):
    assert "\x1b[" in terminal(typical())
    assert "\x1b" not in terminal(typical(), term="dumb")


@pytest.mark.parametrize("format", ["text", "markdown"])
def test_control_characters_are_shown_and_not_obeyed(format):
    shown = render(hostile(), format)
    assert set(filter(lambda c: not c.isprintable(), shown)) == {"\n"}
    assert r"\x1b[31m" in shown


def test_markup_is_not_read_as_markup():
    shown = render(hostile())
    assert "[bold]" in shown and "[/]" in shown


def test_very_long_names_are_cut():
    shown = render(report_of([parameter(f"{'x' * 5000}.weight", missed=EVERY_STEP)]))
    assert "…" in shown and "x" * 200 not in shown.replace("\n", "")
    assert len(shown.splitlines()) < 30


@pytest.mark.parametrize("format", ["text", "markdown"])
def test_nothing_recorded_does_not_sound_clean(format):
    shown = render(report_of([parameter("a.weight")], steps=0), format)
    assert "nothing can be said" in shown
    assert "received a gradient" not in shown


def test_findings_are_mentioned_where_nothing_was_missed():
    clean = [parameter("a.weight")]
    assert "finding" not in render(report_of(clean)).splitlines()[1]
    assert "1 finding " in render(report_of(clean, [finding([], code="DDC307", slug="needless-flag")])).splitlines()[1]


def test_missed_in_some_steps_is_not_never():
    shown = render(report_of([parameter("a.weight", missed={0: ((1, 1),)})])).splitlines()[1]
    assert "never" not in shown and "every step" in shown


def test_markdown_table_survives_hostile_names():
    rows = [line for line in render(hostile(), "markdown").splitlines() if line.startswith("|")]
    assert len(rows) == 3
    for row in rows:
        assert row.replace(r"\|", "").count("|") == 5


def test_json_is_the_report():
    for report in (typical(), hostile(), report_of([])):
        assert json.loads(render(report, "json")) == report.to_dict()


def test_importing_reporters_imports_neither_rich_nor_torch():
    code = "import sys, ddpcov.reporters; print(sorted({'rich', 'torch'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.strip() == "[]"


def test_a_model_without_trainable_parameters_does_not_sound_clean():
    shown = render(report_of([parameter("a.weight", trainable=False)]))
    assert "No parameter is trainable" in shown and "received a gradient" not in shown


def test_class_whose_name_ends_in_s_is_named():
    assert "BertEmbeddings: weight" in render(report_of([parameter("e.weight", missed=EVERY_STEP, kind="m.BertEmbeddings")]))


def test_ranks_without_data_are_not_among_all_ranks():
    shown = render(report_of([parameter("a.weight", missed=EVERY_STEP)], world_size=8))
    assert "all ranks" not in shown and "ranks 0-1" in shown


@pytest.mark.parametrize("format", ["text", "markdown"])
def test_a_thousand_ranks_that_all_ended_differently_fit_a_screen(format):
    ranks = range(1024)
    ends = {rank: f"exception: RuntimeError: rank {rank} failed" for rank in ranks}
    notes = tuple(f"rank {rank} could not write its shard" for rank in ranks)
    report = report_of([parameter("a.weight", ranks=ranks)], ranks=ranks, end=ends, notes=notes)
    assert len(render(report, format).splitlines()) <= SCREEN[1]
    assert "rank 700 failed" in render(report, format, show_all=True)


def test_long_evidence_fits_a_screen(terminal):
    wordy = finding([parameter("a.weight")], evidence=tuple(f"line {i}" for i in range(200)))
    assert len(terminal(report_of([parameter("a.weight", missed=EVERY_STEP)], [wordy])).splitlines()) <= SCREEN[1]


@pytest.mark.parametrize("format", ["text", "markdown"])
def test_a_fix_is_escaped_too(format):
    said = finding([parameter("a.weight")], fix="\x1b[2J\nnext")
    shown = render(report_of([parameter("a.weight", missed=EVERY_STEP)], [said]), format)
    assert "\x1b" not in shown and "\nnext" not in shown


@pytest.mark.parametrize("format", sorted(FORMATS))
def test_a_stream_that_cannot_encode_a_sign_gets_an_escape(format):
    stream = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    FORMATS[format](Options()).render(typical(), stream)
    stream.flush()


def test_markdown_names_in_lists_are_not_altered_and_nobody_is_called():
    said = finding([parameter("a|b.weight")], message="boom @team")
    shown = render(report_of([parameter("c.weight")], [said]), "markdown")
    assert "`a|b.weight`" in shown and "@team" not in shown


def test_size_is_not_rounded_up_to_a_unit():
    from ddpcov.reporters.layout import size

    assert size(1024 * 1024 - 1) == "1.0 MiB"


@pytest.mark.parametrize("by", ["module", "class", "parameter"])
def test_every_grouping_of_a_huge_report_fits_a_screen(terminal, by):
    assert len(terminal(huge(), by=by).splitlines()) <= SCREEN[1]
