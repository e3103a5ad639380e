"""What a launch does inside a process of the script: it begins when torch is imported, and costs little until a model is seen.

DDP is met in its constructor, patched in the class itself, because scripts bind the class by name. Other models are met when
they are called.
"""

from __future__ import annotations

import contextlib
import functools
import multiprocessing
import multiprocessing.util
import os
import random
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ddpcov import wrappers
from ddpcov.launch.plan import Plan
from ddpcov.launch.watch import Watch

if TYPE_CHECKING:
    from torch.optim import Optimizer

    from ddpcov.launch.section import Section
    from ddpcov.launch.trajectory import Trajectory
    from ddpcov.steps import EngineRun

__all__ = ["begin"]

_SETTLED_STEPS = 3
"""After so many steps of all models without a new one, no further model is looked for."""

_F = TypeVar("_F", bound=Callable[..., None])


def begin() -> None:
    """Follows the plan that this process was started with, if it was."""
    plan = Plan.from_environment(os.environ)
    if plan is not None:
        Path(plan.folder, "torch").touch()
        Agent(plan)


def _seed() -> None:
    """The same random numbers in each run that is to be compared, as far as the script does not choose others."""
    torch.manual_seed(0)
    random.seed(0)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(0)


def _contained(method: _F) -> _F:
    """A bug of ours is said once, and is no reason to keep anyone from training."""

    @functools.wraps(method)
    def call(self: Agent, *args: Any, **kwargs: Any) -> None:
        try:
            method(self, *args, **kwargs)
        except Exception as error:
            self._say_once(f"{type(error).__name__}: {error}")

    return call  # type: ignore[return-value]


class Agent:
    """Tracks the models of this process. A `steps.Listener`, once there is one."""

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._sections: list[Section] = []
        self._num_ddps = 0
        self._num_other_passes = 0  # that were none of a section's, as long as no section had one
        self._trajectory: Trajectory | None = None
        self._said: set[str] = set()
        self._is_stopping = False
        self._exit = os._exit
        os._exit = self._exit_at_once  # type: ignore[assignment]
        if plan.follow:
            _seed()
        self._patch_ddp()
        self._watch = Watch(self._called)
        os.register_at_fork(after_in_child=self._sections.clear)

    def _say_once(self, message: str) -> None:
        if message not in self._said:
            self._said.add(message)
            print(f"ddpcov: {message}", file=sys.stderr, flush=True)

    # Models.

    def _patch_ddp(self) -> None:
        ddp_class: Any = DistributedDataParallel
        init, forward = ddp_class.__init__, ddp_class.forward
        agent = self

        @functools.wraps(init)
        def patched_init(ddp: Any, *args: Any, **kwargs: Any) -> None:
            if agent._plan.corrections:
                from ddpcov.launch.corrections import correct

                args, kwargs = correct(agent._plan, agent._num_ddps, init, ddp, args, kwargs)
            init(ddp, *args, **kwargs)
            agent._wrapped(ddp)

        @functools.wraps(forward)
        def patched_forward(ddp: Any, *inputs: Any, **kwargs: Any) -> Any:
            if torch.compiler.is_compiling():
                return forward(ddp, *inputs, **kwargs)
            try:
                return forward(ddp, *inputs, **kwargs)
            except Exception as error:
                agent._failed(error, ddp)
                raise

        ddp_class.__init__, ddp_class.forward = patched_init, patched_forward

    @_contained
    def _wrapped(self, ddp: DistributedDataParallel) -> None:
        order, self._num_ddps = self._num_ddps, self._num_ddps + 1
        self._supersede(ddp)
        self._track(ddp, order)

    @_contained
    def _called(self, module: nn.Module) -> None:
        """A module is about to be called, from outside any module."""
        if any(section.model is module for section in self._sections) or not self._is_training(module):
            if self._sections and all(section.num_steps >= _SETTLED_STEPS for section in self._sections):
                self._watch.stop()
            return
        for section in self._sections:
            if wrappers.is_compiled(module, section.model) and not section.num_passes:
                # Compiled after it was wrapped; hooks inside would make other graphs of it.
                self._supersede(module)
                self._track(module, section.order)
                return
        # A wrapper is what matters, unless it turns out that something else is trained.
        has_wrapper = any(section.is_wrapped for section in self._sections)
        if has_wrapper and (any(section.num_passes for section in self._sections) or not self._num_other_passes):
            return
        if not any(module is part for section in self._sections for part in section.model.modules()):
            self._supersede(module)
            self._track(module, None)

    def _is_training(self, module: nn.Module) -> bool:
        """Whether a call of the module may belong to a training step. A loss has no parameters of its own; what a data loader
        transforms with is not trained."""
        return (
            module.training
            and torch.is_grad_enabled()
            and any(p.requires_grad for p in module.parameters())
            and torch.utils.data.get_worker_info() is None
        )

    def _supersede(self, model: nn.Module) -> None:
        """Ends the recordings of what is now a part of `model`; those that saw no pass yet were no models."""
        for section in list(self._sections):
            if section.shares_with(model):
                self._sections.remove(section)
                if section.num_passes:
                    section.close()
                else:
                    section.discard()

    def _track(self, model: nn.Module, order: int | None) -> None:
        from ddpcov import steps
        from ddpcov.launch.section import Section
        from ddpcov.launch.trajectory import Trajectory

        if not self._sections:
            # Run at the end of a process of whatever kind, before multiprocessing's own `os._exit`.
            multiprocessing.util.Finalize(None, self._end, exitpriority=0)
            if self._plan.follow:
                self._trajectory = self._trajectory or Trajectory(self._plan.folder)
        section = Section(model, self._plan, order)
        self._sections.append(section)
        section.__enter__()
        steps.stop(self)
        steps.start(self)  # behind the section, so that it is told first

    # Passes and steps.

    @_contained
    def pass_begins(self, run: EngineRun) -> None:
        """See `steps.Listener`."""
        if self._trajectory is not None and run.is_backward:
            self._trajectory.note_loss(run.tensors)

    @_contained
    def inner_run_begins(self) -> None:
        """See `steps.Listener`."""

    def pass_ends(self, run: EngineRun) -> None:
        """See `steps.Listener`."""
        for section in self._sections:
            section.mark_trained()
        self._num_other_passes += not any(section.num_passes for section in self._sections)
        if isinstance(run.error, Exception):
            self._failed(run.error)
        self._stop_if_due()

    def optimizer_steps(self, optimizer: Optimizer) -> None:
        """See `steps.Listener`."""

    @_contained
    def optimizer_stepped(self, optimizer: Optimizer) -> None:
        """See `steps.Listener`."""
        if self._trajectory is not None:
            self._trajectory.note_step()
        self._stop_if_due()

    @_contained
    def _failed(self, error: Exception, ddp: Any = None) -> None:
        """An exception comes out of DDP's forward, or of a backward pass. The script may catch it."""
        for section in list(self._sections):
            if ddp is None or section.model is ddp:
                section.explain(error)

    # The end.

    def _stop_if_due(self) -> None:
        from ddpcov import ranks, steps

        limit = self._plan.stop_after
        trained = [section.num_steps for section in self._sections if section.num_passes]
        # Of several models one may step now and then only; it is not waited for without end.
        is_due = limit is not None and trained and (min(trained) >= limit or max(trained) >= 10 * limit)
        if not is_due or steps.is_inside_engine() or self._is_stopping:
            return
        self._is_stopping = True
        self._close()
        ranks.meet()
        for child in multiprocessing.active_children():
            if child.daemon:
                child.terminate()
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(Exception):
                stream.flush()
        self._exit(0)  # not by an exception, which scripts catch, and which may make them save and validate

    def _exit_at_once(self, status: int) -> None:
        self._close(end="clean" if status == 0 else f"exception: os._exit({status})")
        self._exit(status)

    def _end(self) -> None:
        """The process ends; in a child of multiprocessing, perhaps by an exception that is on its way."""
        error = sys.exc_info()[1] or getattr(sys, "last_exc", None) or getattr(sys, "last_value", None)
        if isinstance(error, SystemExit):
            error = error.__context__ if error.code else None
        self._close(error)

    @_contained
    def _close(self, error: BaseException | None = None, end: str = "clean") -> None:
        while self._sections:
            section = self._sections.pop(0)
            self._save(section)
            section.close(error, end)

    @_contained
    def _save(self, section: Section) -> None:
        if self._trajectory is not None:
            self._trajectory.save(section)
