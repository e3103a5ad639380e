"""What the rules make of evidence that is not as this version writes it, and of steps that were not traced."""

from __future__ import annotations

import json
from typing import Any

import pytest

from ddpcov import Report, _core, reading

KNOWN = {
    "names": ["b"],
    "calls": 0,
    "grad_calls": 0,
    "read": None,
    "read_without_grad": None,
    "reached": False,
    "in_loss": False,
    "differentiated": False,
    "has_outputs": True,
    "leading": [],
    "carrying": [],
    "never_ran": {
        "module": "b",
        "spelled": "b",
        "class": "Linear",
        "where": {"file": "m.py", "line": 3, "function": "Net.forward"},
    },
}


def run(*notes: tuple[str, dict[str, Any]], num_steps: int = 2) -> Report:
    """A parameter a that is covered in every step, and b that never is."""
    recorder = _core.Recorder(None, started=1, nonce=1, ranks=[(0, 0)], rank=0, optimizer_given=False)
    recorder.define(0, [(name, [], [2], "float32", 4, "torch.nn.Linear") for name in "ab"])
    recorder.set_situation(
        registered=[0, 1], trainable=[0, 1], awaited=[], wrapped=[], ignored=[], optimized=[], num_orphans=0, has_wrapper=False
    )
    for _ in range(num_steps):
        slot = recorder.slot(0)
        slot("a gradient")
        slot.accumulated("the parameter")
        recorder.close_pass(0)
        recorder.close_step()
    for topic, note in notes:
        recorder.note(topic, json.dumps(note))
    recorder.finish("clean")
    return reading.build(recorder.capture())


def evidence(step: int, **more: Any) -> tuple[str, dict[str, Any]]:
    return "evidence", {"step": step, "groups": [{**KNOWN, **more}], "blind": None}


def test_a_cause_and_the_steps_in_which_it_was_seen() -> None:
    (f,) = run(evidence(0), ("evidence", {"step": 2, "again": 0}), num_steps=4).findings
    assert (f.code, f.parameters, f.steps) == ("DDC101", ("b",), ((0, 3),))
    assert f.where is not None and (f.where.file, f.where.line) == ("m.py", 3)
    assert "seen in steps 0, 2; other steps were not traced" in f.evidence


def test_the_commonest_cause_is_the_primary_one() -> None:
    read = {"by": "linear", "line": None}
    other = evidence(0, calls=1, grad_calls=1, read=read, never_ran=None)
    (f,) = run(other, evidence(1), ("evidence", {"step": 2, "again": 1}), num_steps=3).findings
    assert f.code == "DDC101" and "in step 0 the cause was another: DDC106" in f.evidence


def test_the_cause_of_the_pass_in_which_it_came_furthest() -> None:
    leading = evidence(0, calls=1, grad_calls=1, read={"by": "linear", "line": None}, leading=[["[1]", False]], never_ran=None)
    assert [f.code for f in run(evidence(0), leading, evidence(0), num_steps=1).findings] == ["DDC105"]


@pytest.mark.parametrize(
    "note",
    [
        {},
        {"groups": 3},
        {"groups": [3]},
        {"groups": [{}]},
        {"groups": [{"names": ["b"]}]},
        {"groups": [{**KNOWN, "leading": 7}]},
        {"again": 5},
        {"again": "x"},
    ],
)
def test_evidence_of_another_version_proves_nothing(note: dict[str, Any]) -> None:
    (f,) = run(("evidence", {"step": 0, **note})).findings
    assert f.code == "DDC100" and f.parameters == ("b",)


def test_a_place_that_is_none() -> None:
    (f,) = run(evidence(0, never_ran={**KNOWN["never_ran"], "where": {"file": "m.py"}})).findings
    assert f.code == "DDC101" and f.where is None


def test_why_nothing_is_known() -> None:
    assert run(("diagnosis", {"off": "off"})).findings[0].evidence == ("the diagnosis was off",)
    assert run().findings[0].evidence == ("no pass was traced",)
