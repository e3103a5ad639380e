"""A recording that a launch makes: that of `track`, except that ranks never wait for one another."""

from __future__ import annotations

import contextlib
import os
import sys
from typing import Any

from torch import nn

from ddpcov import _core, wrappers
from ddpcov.launch.plan import Plan, Registry
from ddpcov.note import note
from ddpcov.tracker import Tracker

__all__ = ["Section"]


class Section(Tracker):
    """One model of the script. It leaves its shard where it is, for the supervisor to merge.

    `order` is the number of the DDP among those that its process built; None for a model without one.
    """

    def __init__(self, model: nn.Module, plan: Plan, order: int | None) -> None:
        options = plan.options
        super().__init__(
            model,
            _name(model, order),  # until the run has a number: see `_new_recorder`
            [],
            None,
            True,
            options.get("diagnose", "auto"),
            values_every=options.get("values"),
            sync_every=options.get("sync_check"),
            stall_after=options.get("stall_after", 60.0),
            guard=options.get("guard", False),
        )
        self.model = model
        self.is_wrapped = order is not None
        self.order = order
        self._plan = plan
        self._registry = Registry(plan)
        self._has_trained = False
        self._end_as = "clean"

    @property
    def num_passes(self) -> int:
        """Backward passes seen so far; 0 after the end."""
        return 0 if self._passes is None else self._passes.num_passes

    @property
    def num_steps(self) -> int:
        """Steps that ended so far; 0 after the end."""
        return 0 if self._passes is None else self._passes.num_steps

    @property
    def rank(self) -> int:
        """The rank of this process among those that train the model."""
        return self._ranks.rank

    def trainable(self) -> dict[str, nn.Parameter]:
        """Name → parameter, of those that can be trained now."""
        named = ((self._hooks.definition(i)[0], p) for i, p in self._hooks.parameters())
        return {name: p for name, p in named if wrappers.is_trainable(p) and isinstance(p, nn.Parameter)}

    def shares_with(self, model: nn.Module) -> bool:
        """Whether a module of `model` is one of those tracked here."""
        own = set(map(id, self.model.modules()))
        return any(id(module) in own for module in model.modules())

    def mark_trained(self) -> None:
        """Tells the supervisor, once, that a pass was seen."""
        if not self._has_trained and self.num_passes:
            self._has_trained = True
            self._registry.mark_trained(self._nonce)

    def explain(self, error: Exception) -> None:
        """Adds to an exception, which the script may yet catch, what was missed so far and why."""
        if self._passes is None or hasattr(error, "_ddpcov_explained"):
            return
        with contextlib.suppress(AttributeError):  # an exception with slots
            error._ddpcov_explained = True  # type: ignore[attr-defined]
        self._note_exception(error)
        text = note(self.report(), self._ranks.rank, self._out)
        if text is not None:
            error.__notes__ = [*getattr(error, "__notes__", []), text]
            if sys.version_info < (3, 11):  # where tracebacks do not show it
                print(text, file=sys.stderr, flush=True)

    def close(self, error: BaseException | None = None, end: str = "clean") -> None:
        """Ends the recording: with an exception, or as `end` says."""
        self._end_as = end
        self._end(error)

    def discard(self) -> None:
        """Ends the recording, and leaves nothing of it."""
        self._end(None)
        self._contain(self._remove_shard)
        self._contain(lambda: self._registry.release(self._nonce, self._ranks.rank))

    # As `Tracker` asks.

    def _new_recorder(self, started: int, nonce: int) -> _core.Recorder:
        self._nonce = nonce
        out = self._registry.claim(nonce, self._ranks.members, self._ranks.rank, is_wrapped=self.is_wrapped)
        self._out = os.fspath(out)
        return super()._new_recorder(started, nonce)

    def _describe(self) -> dict[str, Any]:
        inner = next(m for name, m in wrappers.walk(self.model) if not name and not wrappers.is_wrapper(m))
        launch = {"id": self._plan.launch, "model": type(inner).__qualname__, "order": self.order}
        corrections = [os.path.basename(name) for name in self._plan.corrections]
        return {**super()._describe(), "launch": {**launch, "corrections": corrections, "freeze": self._frozen()}}

    def _frozen(self) -> list[str]:
        return self._plan.freeze.get(str(self.order), []) if "freeze" in self._plan.corrections else []

    def _finish_cleanly(self) -> None:
        self._live.finish(self._end_as)

    def _finish_failed(self, error: BaseException) -> None:
        if not hasattr(error, "_ddpcov_explained"):
            self._note_exception(error)
        self._finish_with(error)

    def _leave(self) -> None:
        """Nobody waits."""


def _name(model: nn.Module, order: int | None) -> str:
    """By which the ranks find one another, though some may call more models than others before they build their DDP."""
    return type(model).__qualname__ if order is None else f"ddp {order}"
