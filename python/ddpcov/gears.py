"""Where the bits of a pass come from: hooks on every parameter, or, where that proves the same, one look at the gradients.

Hooks are the reference: exact always, at about 2 µs a parameter in a real step. A look costs a sixth of that. Before a pass
each gradient is remembered; once all of autograd's nodes have run, and before DDP writes averages, a gradient was accumulated
exactly where there is another one, or where it was written to; of the rest the engine tells which accumulators it ran.

When a look is not exact, or not cheaper, hooks stay:

| Situation | Why |
| --- | --- |
| FSDP | it takes gradients away in the middle of a pass |
| reentrant checkpointing, backward inside backward | inner runs of the engine; what is reached twice does not show |
| passes at the same time, or run from C++ | nobody knows what is whose |
| compiled autograd, DDP's mixed precision | accumulate otherwise |
| post-accumulate hooks of others | may step and clear gradients in the middle of a pass |
| kept gradients that are views, or in DDP's buckets | they share one count of writes |
| tensors of a class of their own | their gradients are what their class says |
| most parameters are missed | to ask about each would cost more than hooks |

Before the first look, and after every change of the model, `SETTLE` passes have both, and must agree; from then on one in
`AUDIT_EVERY` has both. What nobody foresaw shows there, and hooks stay.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Variable
from torch.utils.hooks import RemovableHandle

from ddpcov import _core, steps, wrappers
from ddpcov.hooks import Hooks

__all__ = ["AUDIT_EVERY", "MAX_MISSED", "SETTLE", "Gears"]

SETTLE = 32
"""Passes in a row in which a look must have found what the hooks saw."""
AUDIT_EVERY = 512
"""Of so many passes one is looked at with hooks in place."""
MAX_MISSED = 0.3
"""Of the parameters; where more are missed, hooks are cheaper."""


class Gears:
    """Fills the open row of the recorder, if it is not for the hooks to do. `tell` says something on stderr."""

    def __init__(self, hooks: Hooks, recorder: _core.Recorder, *, tell: Callable[[str], None]) -> None:
        self._hooks = hooks
        self._recorder = recorder
        self._tell = tell
        self._version = -1
        self._gradients: _core.Gradients | None = None
        self._num_agreed = self._num_since_audit = 0
        self._handles: list[RemovableHandle] = []
        self._is_open = self._is_look = False
        self._num_looks = 0
        self.why_hooks = ""
        """Why hooks stay for good; nothing if they may go."""

    def pass_begins(self, run: steps.EngineRun) -> None:
        """The first pass, of those that are open, is about to begin; says in the recorder that it is open."""
        is_unseen = False
        if self._version != self._hooks.version:
            self._version = self._hooks.version
            self._num_agreed = 0
            self._gradients = None
            self.why_hooks = self.why_hooks or self._why_never()
        if not self.why_hooks and self._is_exact():
            is_audit = self._num_since_audit >= AUDIT_EVERY
            is_unseen = self._num_agreed >= SETTLE and not is_audit
            self._is_open = True
            self._handles = run.when_under_way(lambda: Variable._execution_engine.queue_callback(self._take))
        self._is_look = is_unseen
        self._hooks.listen(not is_unseen)
        self._recorder.begin_pass(is_unseen)

    def pass_ends(self, *, is_last: bool) -> None:
        """An open pass ended, or raised; `is_last` if no other one is open."""
        if not is_last:
            return
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        if self._is_open:
            # It raised. What was reached and got nothing can no longer be told from what was not reached.
            if self._is_look:
                self._look(will_run=None)
            self._close()

    def disturbed(self, why: str) -> None:
        """What is open now, or comes next, is not for a look: takes what there is, and goes on with hooks for good."""
        if self._is_open and not self._hooks.is_listening:
            self._look(will_run=None)  # what hooks that come now do not see
        self.why_hooks = self.why_hooks or why
        self._hooks.listen(True)

    def finish(self) -> dict[str, Any]:
        """For the capture: how many passes were looked at, without hooks, and why it was not more."""
        return {"looks": self._num_looks, "hooks": self.why_hooks}

    # A look.

    def _take(self) -> None:
        """Called by the engine, once all of its nodes have run."""
        if not self._is_open or self._gradients is None:
            return
        try:
            if not self._is_look:
                self._compare()
            else:
                self._look(torch._C._will_engine_execute_node)
                self._num_looks += 1
                self._num_since_audit += 1
                self._close()
        except Exception as error:
            self._stay(f"{type(error).__name__}: {error}"[:200])

    def _look(self, will_run: Any) -> None:
        assert self._gradients is not None
        num_made, num_doubtful = self._gradients.take(will_run, _node_of, is_alone=not self._hooks.is_listening)
        if num_doubtful:
            self._stay("others put hooks on parameters, which may clear gradients")
        elif num_made > MAX_MISSED * len(self._hooks.leaves):
            self.why_hooks = "most parameters are missed"

    def _compare(self) -> None:
        assert self._gradients is not None
        if self.why_hooks:
            return  # what disturbed the pass made the two differ
        agrees = self._gradients.agrees(torch._C._will_engine_execute_node, _node_of)
        self._close()
        if agrees:
            self._num_agreed += 1
            self._num_since_audit = 0
        elif self._num_agreed >= SETTLE:
            self._stay("a look at the gradients did not show what hooks saw")
        else:
            self.why_hooks = "gradients do not show what hooks see"

    def _stay(self, why: str) -> None:
        self.disturbed(why)
        self._tell(f"hooks stay on all parameters from now on, and passes before may be recorded wrongly: {why}")

    def _close(self) -> None:
        self._is_open = False
        if self._gradients is not None:
            self._gradients.forget()

    # Where a look is exact.

    def _why_never(self) -> str:
        averaging = self._hooks.averaging
        if averaging.wrapper.kind not in ("ddp", "none"):
            return "FSDP"
        if averaging.compiled or any(getattr(ddp, "mixed_precision", None) is not None for ddp in averaging.ddps):
            return "DDP's mixed precision, or a compiled DDP"
        return ""

    def _is_exact(self) -> bool:
        """Whether a look at the coming pass is exact; remembers the gradients as they are."""
        compiled = sys.modules.get("torch._dynamo.compiled_autograd")
        if compiled is not None and getattr(compiled, "compiled_autograd_enabled", False):
            self._num_agreed = 0
            return False
        if self._gradients is None:
            self.why_hooks = self._why_not_now()
            if self.why_hooks:
                return False
            self._gradients = self._make()
        num_kept, has_views = self._gradients.remember()
        if num_kept and (has_views or any(ddp.gradient_as_bucket_view for ddp in self._hooks.averaging.ddps)):
            self._num_agreed = 0
            self._gradients.forget()
            return False
        return True

    def _why_not_now(self) -> str:
        if not all(map(_is_plain, self._hooks.leaves.values())):
            return "tensors of a class of their own"
        return "post-accumulate hooks of others" if self._hooks.strangers() else ""

    def _make(self) -> _core.Gradients:
        leaves = [(i, t) for i, t in self._hooks.leaves.items() if wrappers.is_trainable(t) and not wrappers.is_lazy(t)]
        # DDP keeps these nodes alive; kept by us, an accumulation would stay on the stream that was current when it was made.
        kept = set(map(id, self._hooks.averaging.awaited))
        return _core.Gradients(self._recorder, [(i, t, _node_of(t) if id(t) in kept else None) for i, t in leaves])


def _is_plain(leaf: Tensor) -> bool:
    kind: Any = type(leaf)
    return kind.__torch_function__ in (Tensor.__torch_function__, nn.Parameter.__torch_function__) and (
        kind.__torch_dispatch__ is Tensor.__torch_dispatch__
    )


def _node_of(leaf: Tensor) -> Any:
    """The node of autograd that accumulates into it, which exists as long as a graph leads there."""
    with torch.enable_grad():
        return leaf.view_as(leaf).grad_fn.next_functions[0][0]  # type: ignore[union-attr]
