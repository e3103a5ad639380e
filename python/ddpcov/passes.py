"""The passes and steps of one model, out of those that autograd and the optimizers of this process make."""

from __future__ import annotations

import contextlib
import functools
import json
import threading
from collections.abc import Callable
from typing import Any, TypeVar

from torch.optim import Optimizer

from ddpcov import _core, steps
from ddpcov.bypass import Reducers
from ddpcov.diagnosis.observer import Observer
from ddpcov.gears import Gears
from ddpcov.gradsync import GradSync
from ddpcov.guard import Guard
from ddpcov.hooks import Hooks
from ddpcov.lockstep import Lockstep
from ddpcov.stale import Holdings
from ddpcov.values import Values

__all__ = ["Passes"]

_F = TypeVar("_F", bound=Callable[..., None])


def _contained(method: _F) -> _F:
    """A bug of ours, in a call that training makes, ends the recording and nothing else."""

    @functools.wraps(method)
    def call(self: Passes, *args: Any, **kwargs: Any) -> None:
        if not self._has_given_up:
            try:
                method(self, *args, **kwargs)
            except Exception as error:
                self._has_given_up = True
                self._give_up(f"{type(error).__name__}: {error}")

    return call  # type: ignore[return-value]


class Passes:
    """Closes passes and steps of a recorder. A `steps.Listener`: training calls it, and is not troubled by its bugs.

    `give_up` is called, once, with what went wrong; `tell_failure` when the recorder can no longer write its file.
    """

    def __init__(
        self,
        recorder: _core.Recorder,
        hooks: Hooks,
        observer: Observer,
        optimizers: list[Optimizer],
        *,
        values: Values | None,
        sync: GradSync | None,
        lockstep: Lockstep | None,
        tell: Callable[[str], None],
        give_up: Callable[[str], None],
        tell_failure: Callable[[str], None],
    ) -> None:
        self._live = recorder
        self._hooks = hooks
        self._reducers = Reducers(hooks, recorder)
        self._reducers.refresh()
        self._gears = Gears(hooks, recorder, tell=tell)
        self._holdings = Holdings(hooks, optimizers)
        self._holdings.refresh()
        self._observer = observer
        self._optimizers = optimizers
        self._values = values
        self._sync = sync
        self._guard = None
        if lockstep is not None:
            self._guard = Guard(hooks, self._reducers, observer, lockstep, note=self._note, tell=tell)
        self._give_up = give_up
        self._tell_failure = tell_failure
        self._has_given_up = self._has_failed = False
        self._lock = threading.RLock()
        self.num_passes = self.num_steps = 0  # closed
        self._num_open = 0  # runs of the engine under way; more than one only from several threads
        self._deferred: list[Optimizer] = []
        self._stepped: list[Any] = []  # who ended the last step, as long as no pass followed

    @_contained
    def pass_begins(self, run: steps.EngineRun) -> None:
        """See `steps.Listener`."""
        with self._lock:
            if self._num_open == 0:
                self.close_touched()
            self._num_open += 1
            self._hooks.refresh()
            self._reducers.refresh()
            self._holdings.refresh()
            self._observer.pass_begins(run)
            if self._num_open > 1:
                self._gears.disturbed("passes at the same time")
            if run.is_backward:
                if self._num_open == 1:
                    self._gears.pass_begins(run)
                if self._guard is not None and self._num_open == 1:
                    self._guard.pass_begins(run, self._open_step)
                if self._values is not None:
                    self._values.pass_begins(self._open_step)

    @_contained
    def inner_run_begins(self) -> None:
        """See `steps.Listener`."""
        with self._lock:
            self._gears.disturbed("backward inside backward")

    @_contained
    def pass_ends(self, run: steps.EngineRun) -> None:
        """See `steps.Listener`."""
        with self._lock:
            if self._num_open == 0:
                return  # it began before the block did
            self._num_open -= 1
            self._gears.pass_ends(is_last=self._num_open == 0)
            if self._guard is not None:
                self._guard.pass_ends(run)
            if self._is_ours(run):
                self._close_pass(run)
            elif self._num_open == 0:
                self._live.drop_pass()
            self._observer.pass_ends(run)
            # An optimizer may step inside the pass, from a hook; its step ends with the pass.
            deferred, self._deferred = self._deferred, []
            for optimizer in deferred:
                self._end_step(optimizer)

    @_contained
    def optimizer_steps(self, optimizer: Optimizer) -> None:
        """See `steps.Listener`."""
        if self._sync is None or steps.is_inside_engine():
            return
        with self._lock:
            step = self.num_steps if self._ends_step(optimizer) else self.num_steps - 1
            if self._sync.is_due(step) and self._trains_us(optimizer):
                self._sync.check(optimizer, step)

    @_contained
    def optimizer_stepped(self, optimizer: Optimizer) -> None:
        """See `steps.Listener`."""
        with self._lock:
            if not self._trains_us(optimizer):
                return
            self._holdings.stepped(optimizer)
            if self._values is not None:
                self._values.optimizer_stepped(optimizer)
            if steps.is_inside_engine():
                self._deferred.append(optimizer)
            else:
                self._end_step(optimizer)

    @_contained
    def step(self) -> None:
        """A step was closed by hand; nothing happens if no pass was seen since the last."""
        with self._lock:
            self.close_touched()
            if self._live.has_passes():
                self._end_step(self)

    def _trains_us(self, optimizer: Optimizer) -> bool:
        return any(o is optimizer for o in self._optimizers) or any(
            self._hooks.owns(group["params"]) for group in optimizer.param_groups
        )

    @property
    def _open_step(self) -> int:
        """Number of the step that a pass falls in now; until an optimizer stepped, if none was given, each pass is one."""
        return self.num_steps or (0 if self._optimizers else self.num_passes)

    def _is_ours(self, run: steps.EngineRun) -> bool:
        """Whether a run of the engine is a pass of this model.

        It is if it touched the model. If not, it is all the same, one that reached nothing, unless it trained another model:
        of two models, each sees the passes of both.
        """
        is_alone = self._num_open == 0
        if is_alone and self._live.is_touched():
            return True
        if not run.is_backward:
            return False
        is_other = run.has_inner_parameters
        for leaf in run.leaves():
            if self._hooks.owns([leaf]):
                return True
            is_other = is_other or steps.is_parameter(leaf)
            if is_other and is_alone and run.error is None and not run.inputs:
                break  # all that it reaches has run, and nothing of it was ours
        return not is_other

    def close_touched(self) -> None:
        """Closes what autograd did without Python's knowledge, run from C++."""
        if self._live.is_touched():
            self._gears.disturbed("passes run from C++")
            self._close_pass()

    def stop(self, *, has_failed: bool) -> None:
        """Lets go of what it watches, and notes what only the end shows."""
        self._reducers.stop()
        self._note("gears", self._gears.finish())
        if self._guard is not None:
            self._guard.stop("it left the block" + (" with an exception" if has_failed else ""))
        if self._values is not None:
            self._note("values", self._values.finish(has_failed=has_failed))
        if self._sync is not None:
            self._note("sync", self._sync.finish())
        if (num := len(self._hooks.averaging.ddps)) > 1:
            self._note("wrappers", {"num": num})
        if stale := self._holdings.finish():
            self._note("optimizers", {"stale": stale})

    def _note(self, topic: str, fact: dict[str, Any]) -> None:
        self._live.note(topic, json.dumps(fact))

    def _close_pass(self, run: steps.EngineRun | None = None) -> None:
        flags = 0
        if run is not None and (error := run.error) is not None:
            flags = _core.RAISED
            with contextlib.suppress(AttributeError):  # an exception with slots
                error._ddpcov_in_pass = True  # type: ignore[attr-defined]  # to hold the error would hold its frames' tensors
        is_partial = run is None or len(run.inputs) > 0
        flags |= self._reducers.flags(is_partial=is_partial, has_raised=flags != 0)
        is_new = self._live.close_pass(flags)
        self._observer.pass_closed(run, self._open_step, is_new=is_new)
        if self._values is not None:
            self._values.pass_closed(self._open_step)
        self.num_passes += 1
        if not self._has_failed and (failure := self._live.failure) is not None:
            self._has_failed = True
            self._tell_failure(failure)

    def _end_step(self, by: Any) -> None:
        self.close_touched()
        if self._ends_step(by):
            self._live.close_step()
            self.num_steps += 1
            self._observer.step_ended()
            if self._values is not None:
                self._values.step_ended()
            self._stepped = [by]
        else:
            self._stepped.append(by)  # several optimizers, one after the other: one step

    def _ends_step(self, by: Any) -> bool:
        # The same optimizer once more, with no pass between: a step in which nothing was covered.
        is_again = not self._stepped or any(by is other for other in self._stepped)
        return is_again or self._live.has_passes() or self._live.is_touched()
