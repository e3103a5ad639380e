"""When a step is traced, and what of it is noted in the capture.

A pass is traced in the first steps, until `_QUIET` passes in a row brought no new coverage pattern; and again from the pass
after one that brought a new pattern untraced. A pattern that comes once, late, is therefore recorded and not explained.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from typing import Any

from torch import nn

from ddpcov import _core, steps, wrappers
from ddpcov.diagnosis import evidence, graph, source
from ddpcov.diagnosis.trace import Trace
from ddpcov.hooks import Hooks

__all__ = ["Observer"]

_QUIET = 8
_MAX_NOTES = 512


class Observer:
    """Follows the passes of one model.

    `mode` is that of `track(diagnose=…)`; `tell` is called, once, if the diagnosis breaks down. Coverage is recorded then all
    the same.
    """

    def __init__(
        self, model: nn.Module, hooks: Hooks, recorder: _core.Recorder, mode: str, *, tell: Callable[[str], None]
    ) -> None:
        self._model = model
        self._hooks = hooks
        self._recorder = recorder
        self._mode = mode
        self._tell = tell
        self._trace: Trace | None = None
        self._version = -1  # of the model, when the trace was made
        self._quiet = self._step = 0
        self._noted: dict[str, tuple[int, int]] = {}  # text → its number among the evidence, and the last step it was noted for
        self._num_notes = self._num_evidence = 0
        self._current: evidence.Observed | None = None
        self._differentiated: list[Any] = []
        self._derived: set[Any] = set()
        if mode == "off":
            self._note("diagnosis", {"off": "off"})
        else:
            self._contain(self._begin_trace)

    def pass_begins(self, run: steps.EngineRun) -> None:
        """A run of the engine is about to begin."""
        if self._trace is not None:
            self._contain(lambda: self._watch_pass(run))

    def foresee(self, missed: set[int], reached: frozenset[int], step: int) -> list[dict[str, Any]]:
        """Of a pass that has just begun, and will reach `reached`: what is known of the parameters that it will not; noted as
        if it had ended. Nothing where it is not traced.

        What leads to a parameter is no part of the pass then, so no gradient could have arrived there.
        """
        found: list[dict[str, Any]] = []

        def look() -> None:
            if self._trace is not None and self._current is not None:
                self._current.reached = self._current.covered = reached
                found.extend(evidence.gather(self._trace, self._hooks, missed, self._current))
                self._step = step
                self._note("evidence", {"groups": found, "blind": self._trace.blind})

        self._contain(look)
        return found

    def pass_ends(self, run: steps.EngineRun | None) -> None:
        """It ended, or autograd ran unseen. Whether it was a pass of this model, `pass_closed` has said before."""
        if self._current is not None:
            self._contain(self._drop_pass)
        if self._trace is not None and run is not None and not run.is_backward:
            self._derived.update(node for node in map(graph.root_of, run.given) if node is not None)

    def pass_closed(self, run: steps.EngineRun | None, step: int, *, is_new: bool) -> None:
        """It was a pass of this model, in that step, and the recorder has it; `is_new` if it had none like it before."""
        self._step = step
        if self._mode != "off":
            self._contain(lambda: self._take_pass(run, is_new=is_new))

    def step_ended(self) -> None:
        """The step ended."""
        if self._trace is not None:
            self._contain(self._end_step)

    def stop(self) -> None:
        """Takes every hook off."""
        if self._current is not None:
            self._contain(self._drop_pass)
        if self._trace is not None:
            self._contain(self._end_trace)
        self._mode = "off"

    def abandon(self) -> None:
        """Takes the hooks off and notes nothing: this is a forked child."""
        trace, self._trace, self._mode = self._trace, None, "off"
        if trace is not None:
            trace.stop()

    def _contain(self, action: Callable[[], None]) -> None:
        try:
            action()
        except Exception as error:
            self.abandon()
            reason = f"{type(error).__name__}: {error}"
            self._note("diagnosis", {"off": reason})
            self._tell(f"no further diagnosis, coverage is recorded without it: {reason}")

    # The trace.

    def _begin_trace(self) -> None:
        self._trace = Trace(self._model, self._hooks.bits())
        self._version = self._hooks.version
        self._quiet = 0

    def _end_trace(self) -> None:
        if self._trace is not None:
            self._note_outputs()
            self._trace.stop()
            self._trace = None

    def _end_step(self) -> None:
        self._note_outputs()
        if self._trace is not None and not self._trace.is_inside:
            self._differentiated.clear()
            self._derived.clear()
            self._trace.end_step()
            if self._quiet >= _QUIET and self._mode == "auto":
                self._end_trace()
            elif self._version != self._hooks.version:
                self._end_trace()
                quiet = self._quiet
                self._begin_trace()
                self._quiet = quiet

    # A pass.

    def _watch_pass(self, run: steps.EngineRun) -> None:
        assert self._trace is not None
        if not run.is_backward:
            self._differentiated += (node for node in map(graph.root_of, run.tensors) if node is not None)
            return
        self._trace.begin_pass()
        roots = [node for node in map(graph.root_of, run.tensors) if node is not None]
        self._current = evidence.Observed(roots, graph.Flow(roots), self._differentiated, self._derived)

    def _drop_pass(self) -> None:
        current, self._current = self._current, None
        if current is not None and current.flow is not None:
            current.flow.stop()

    def _take_pass(self, run: steps.EngineRun | None, *, is_new: bool) -> None:
        if not is_new and self._trace is None:
            return
        reached, covered = map(frozenset, self._recorder.last_pass())
        if is_new and not reached:
            self._note("idle", {"where": source.place_of_line(source.caller(sys._getframe()))})
        if self._trace is not None:
            self._judge(run, reached, covered)
            self._quiet = 0 if is_new else self._quiet + 1
            if not self._trace.has_pending or self._quiet >= _QUIET:
                self._end_step()
        elif is_new and self._mode == "auto":
            self._begin_trace()

    def _judge(self, run: steps.EngineRun | None, reached: frozenset[int], covered: frozenset[int]) -> None:
        trace, hooks = self._trace, self._hooks
        assert trace is not None
        observed = self._current or evidence.Observed([], None, self._differentiated, self._derived)
        observed.reached, observed.covered = reached, covered
        for leaf in evidence.unregistered(trace, hooks):
            self._note("unregistered", leaf)
        if reached and (run is None or run.error is None):
            missed = [i for i, leaf in hooks.leaves.items() if i not in covered and wrappers.is_trainable(leaf)]
            groups = evidence.gather(trace, hooks, missed, observed)
            if groups:
                self._note("evidence", {"groups": groups, "blind": trace.blind})

    def _note_outputs(self) -> None:
        if self._trace is not None and self._trace.outputs:
            self._note("outputs", {"outputs": evidence.outputs(self._trace)})

    # The capture.

    def _note(self, topic: str, fact: dict[str, Any]) -> None:
        """Notes a fact with the first step in which it was so; evidence with every step, in full the first time only."""
        text = json.dumps({"topic": topic, **fact}, sort_keys=True)
        known = self._noted.get(text)
        if self._num_notes >= _MAX_NOTES or (known is not None and (topic != "evidence" or known[1] == self._step)):
            return
        if known is not None:
            self._noted[text] = known[0], self._step
            fact = {"again": known[0]}
        else:
            self._noted[text] = self._num_evidence, self._step
            self._num_evidence += topic == "evidence"
        self._num_notes += 1
        self._recorder.note(topic, json.dumps({"step": self._step, **fact}, sort_keys=True))
