"""The passes and steps of one model, out of those that autograd and the optimizers of this process make."""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable
from typing import Any, TypeVar

from torch.optim import Optimizer

from ddpcov import _core, steps
from ddpcov.hooks import Hooks

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
        optimizers: list[Optimizer],
        *,
        give_up: Callable[[str], None],
        tell_failure: Callable[[str], None],
    ) -> None:
        self._live = recorder
        self._hooks = hooks
        self._optimizers = optimizers
        self._give_up = give_up
        self._tell_failure = tell_failure
        self._has_given_up = self._has_failed = False
        self._lock = threading.RLock()
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
            if run.is_backward:
                self._live.begin_pass()

    @_contained
    def pass_ends(self, run: steps.EngineRun) -> None:
        """See `steps.Listener`."""
        with self._lock:
            if self._num_open == 0:
                return  # it began before the block did
            self._num_open -= 1
            if self._is_ours(run):
                self._close_pass(run.error)
            elif self._num_open == 0:
                self._live.drop_pass()
            # An optimizer may step inside the pass, from a hook; its step ends with the pass.
            deferred, self._deferred = self._deferred, []
            for optimizer in deferred:
                self._end_step(optimizer)

    @_contained
    def optimizer_stepped(self, optimizer: Optimizer) -> None:
        """See `steps.Listener`."""
        with self._lock:
            is_ours = any(o is optimizer for o in self._optimizers) or any(
                self._hooks.owns(group["params"]) for group in optimizer.param_groups
            )
            if not is_ours:
                return
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
            self._close_pass()

    def _close_pass(self, error: BaseException | None = None) -> None:
        flags = 0
        if error is not None:
            flags = _core.RAISED
            with contextlib.suppress(AttributeError):  # an exception with slots
                error._ddpcov_in_pass = True  # type: ignore[attr-defined]  # to hold the error would hold its frames' tensors
        if self._hooks.averaging.ddps and not self._hooks.averaging.is_synchronised():
            flags |= _core.NO_SYNC
        self._live.close_pass(flags)
        if not self._has_failed and (failure := self._live.failure) is not None:
            self._has_failed = True
            self._tell_failure(failure)

    def _end_step(self, by: Any) -> None:
        self.close_touched()
        if self._live.has_passes() or not self._stepped or any(by is other for other in self._stepped):
            # The same optimizer once more, with no pass between: a step in which nothing was covered.
            self._live.close_step()
            self._stepped = [by]
        else:
            self._stepped.append(by)  # several optimizers, one after the other: one step
