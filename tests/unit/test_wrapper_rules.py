"""What the rules and the advice make of the forward's outputs, which the diagnosis notes."""

from __future__ import annotations

import json
from typing import Any

from ddpcov import Report, _core, reading

A, B = 0, 1


def run(
    steps: list[dict[int, bool]],
    outputs: list[dict[str, Any]] | None = None,
    end: str = "clean",
    message: str = "",
    **flags: bool,
) -> Report:
    """One rank of a DDP run: for each step which parameters were reached, and whether with a gradient."""
    recorder = _core.Recorder(None, started=1, nonce=1, ranks=[(0, 0)], rank=0, optimizer_given=False)
    recorder.define(0, [(f"{name}.weight", [], [2], "float32", 4, "torch.nn.Linear") for name in "ab"])
    both = [A, B]
    recorder.set_situation(
        registered=both,
        trainable=both,
        awaited=both,
        wrapped=both,
        ignored=[],
        optimized=[],
        num_orphans=0,
        has_wrapper=True,
    )
    wrapper = {"kind": "ddp", "find_unused_parameters": False, "static_graph": False, **flags}
    recorder.note("run", json.dumps({"torch": "2", "wrapper": wrapper}))
    for step, reached in enumerate(steps):
        for param_id, is_defined in reached.items():
            slot = recorder.slot(param_id)
            slot("a gradient" if is_defined else None)
            slot.accumulated("the parameter")
        recorder.close_pass(0)
        recorder.close_step()
        if outputs is not None and step < 1:
            recorder.note("outputs", json.dumps({"step": step, "outputs": outputs}))
    if message:
        recorder.note("exception", json.dumps({"message": message, "in_pass": False, "named": {}}))
    recorder.finish(end)
    return reading.build(recorder.capture())


def output(path: str, *, found: bool = True, got: bool | None = True, **more: Any) -> dict[str, Any]:
    return {"path": path, "needs_grad": True, "found": found, "sunk": True, "got": got, **more}


USED = output("[0]")
TWICE = "Expected to mark a variable ready only once."
ALL = {A: True, B: True}


def the(report: Report, code: str) -> Any:
    (finding,) = (f for f in report.findings if f.code == code)
    return finding


def codes(report: Report) -> set[str]:
    return {f.code for f in report.findings}


def test_an_output_that_the_search_does_not_find() -> None:
    hidden = output(".logits", found=False)
    flags = {"find_unused_parameters": True}
    grave = the(run([ALL], [USED, hidden], "exception: RuntimeError: " + TWICE, TWICE, **flags), "DDC305")
    assert (grave.severity, grave.parameters, grave.steps) == ("error", (), ((0, 0),))
    assert ".logits" in grave.message and "dataclass" in grave.fix
    assert the(run([ALL, ALL], [USED, hidden], **flags), "DDC305").severity == "warning", "it was survived"
    unused = output(".logits", found=False, got=False)
    assert "DDC305" not in codes(run([ALL], [USED, unused], **flags)), "DDP is right to take it for unused"
    assert "DDC305" not in codes(run([ALL], [USED, hidden]))
    assert "DDC305" not in codes(run([ALL], [USED, hidden], static_graph=True, **flags))


def test_an_output_without_a_gradient_under_static_graph() -> None:
    unused = output('["mask"]', got=False)
    passed_through = {A: True, B: False}
    f = the(run([passed_through], [USED, unused], static_graph=True), "DDC308")
    assert f.parameters == ("b.weight",) and '["mask"]' in f.message and f.severity == "error"
    assert "DDC308" not in codes(run([ALL, ALL], [USED, unused], static_graph=True)), "others lead to all behind it"
    assert "DDC308" not in codes(run([passed_through], [USED, unused]))
    assert "DDC308" not in codes(run([passed_through], [USED, output("[1]", got=None)], static_graph=True))


def test_a_set_that_changes_under_static_graph() -> None:
    later = the(run([ALL, ALL, {A: True}], static_graph=True), "DDC308")
    assert (later.parameters, later.steps) == (("b.weight",), ((2, 2),))
    assert the(run([{A: True}, {A: True}, ALL], static_graph=True), "DDC308").steps == ((2, 2),)
    assert "DDC308" not in codes(run([{A: True}, {A: True}], static_graph=True)), "never used is no change"
    assert "DDC308" not in codes(run([ALL, {A: True}]))


def static_graph(*args: Any, **flags: bool) -> tuple[str, str]:
    advice = run(*args, **flags).advice
    (known,) = (p for p in advice.preconditions if p.option == "static_graph")
    assert advice.static_graph == {True: "safe", False: "unsafe", None: "unknown"}[known.met]
    return advice.static_graph, " ".join(known.reasons)


def test_whether_static_graph_is_safe() -> None:
    unused = output("[1]", got=False)
    assert static_graph([ALL, ALL], [USED]) == ("safe", "")
    assert static_graph([{A: True}, {A: True}], [USED]) == ("safe", "")
    assert static_graph([ALL], [USED]) == ("unknown", "fewer than two steps were finished on some rank")
    assert static_graph([ALL, ALL])[0] == "unknown"
    assert static_graph([ALL, ALL], [USED, output("[1]", got=None)])[0] == "unknown"
    assert static_graph([{A: True}, {A: True}], [USED, unused]) == ("unsafe", "no gradient arrives at output [1]")
    assert static_graph([ALL, ALL], [USED, unused])[0] == "unknown"
    varies = "b.weight: no gradient in step 1 on rank 0, one in step 0"
    assert static_graph([ALL, {A: True}], [USED]) == ("unsafe", varies)


def test_what_skipping_unused_parameters_takes_for_granted() -> None:
    def skip(steps: list[dict[int, bool]], **flags: bool) -> Any:
        return run(steps, **flags).to_dict()["advice"]["preconditions"]["skip_all_reduce_unused_params"]

    flags = {"find_unused_parameters": True}
    assert skip([{A: True}, {A: True}], **flags) == {"met": True, "reasons": []}
    varies = skip([ALL, {A: True}], **flags)
    assert varies["met"] is False and "b.weight: not reached in step 1 on rank 0" in varies["reasons"][0]
    assert skip([ALL, ALL])["met"] is False
    assert skip([ALL], **flags)["met"] is None


def test_what_no_longer_belongs_to_the_model() -> None:
    recorder = _core.Recorder(None, started=1, nonce=1, ranks=[(0, 0)], rank=0, optimizer_given=False)
    stale = {"optimizer": "SGD", "group": 0, "index": 3, "shape": [2, 2]}
    recorder.note("optimizers", json.dumps({"stale": [stale, {**stale, "index": 4, "name": "head.weight"}]}))
    recorder.finish("clean")
    f = the(reading.build(recorder.capture()), "DDC403")
    assert f.parameters == ("head.weight",) and f.ranks == (0,) and "SGD holds 2 trainable tensors" in f.message
    assert "group 0, index 3: shape (2, 2)" in f.evidence[0]
