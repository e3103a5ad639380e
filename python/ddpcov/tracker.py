"""`track`: what happens between entering and leaving the block. Lifecycle only; the work is in hooks, steps and ranks."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import sys
from collections.abc import Callable, Iterable
from dataclasses import asdict
from datetime import timedelta
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from ddpcov import _core, attempts, ranks, reading, steps
from ddpcov.diagnosis.observer import Observer
from ddpcov.gradsync import GradSync
from ddpcov.hooks import Hooks
from ddpcov.lockstep import Lockstep
from ddpcov.note import note
from ddpcov.passes import Passes
from ddpcov.report import Report, as_ranges
from ddpcov.values import Values

__all__ = ["Tracker", "track"]

_NO_STALL_SECONDS = 365 * 86400.0
_NOTE_MEMORY = 32 << 20

_active: list[Tracker] = []
_is_fork_watched = False


def track(
    model: nn.Module,
    out: str | os.PathLike[str] | None = None,
    *,
    optimizer: Optimizer | Iterable[Optimizer] | None = None,
    process_group: Any = None,
    diagnose: str = "auto",
    values: int | None = None,
    sync_check: int | None = None,
    rows: Any = None,
    same_parameters: bool = True,
    stall_after: float | None = 60.0,
    guard: bool = False,
) -> Tracker:
    """Records which parameters of `model` receive gradients in the `with` block.

    Args:
        model: any module: plain, DDP, compiled, nested in one another.
        out: where the first rank leaves the merged run; while it runs, rank r writes `out` + `.rank{r}`. Without it nothing
            is written and `report()` has the result. Give the same on every rank: ranks find one another by it.
        optimizer: one or several. When given, parameters that none of them holds are found, and passes before the first
            optimizer step are one step. Steps are seen without it.
        process_group: the ranks that train this model together; by default DDP's own group, else all.
        same_parameters: False if ranks may hold different parameters (pipeline stages).
        values: every so many steps, find the gradients that are exactly zero and those that are not finite. They are reduced
            on their device where a pass ends, and the result is read once, after the step.
        sync_check: every so many steps, just before an optimizer steps, find the parameters whose gradients are not equal on
            all ranks. Ranks compare fingerprints in a group of their own, and never wait long for one that does not come.
            Sharded models are not checked.
        diagnose: `"auto"` traces the first steps, and those after a new coverage pattern, to establish why a parameter is
            missed; `"always"` traces every step; `"off"` none.
        stall_after: seconds that a backward pass may stay open before it is said, once, on stderr, what this rank still lacks
            in it and what the other ranks did; and that `guard` waits for a rank. None: never, and without end.
        guard: before the first gradient of each pass that DDP averages, or FSDP2 reduces, ranks compare what it will reach. A
            difference that the wrapper would not survive with its present flags raises `ddpcov.RankDivergence` out of
            `backward()` on every rank, with names, ranks and, where it is known, the cause, in place of a hang.
        rows: a kind of observation that this version does not make yet.
            It says so when it is asked for, and records coverage all the same.

    Raises:
        TypeError: `model` is not a module, or `optimizer` no optimizer.
        ValueError: an option has a value that it cannot have.
        ddpcov.Error: another active tracker in this process writes to `out`.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"track() expects a torch.nn.Module, found {type(model).__name__}")
    optimizers = _optimizers(optimizer)
    if diagnose not in ("auto", "always", "off"):
        raise ValueError(f'diagnose={diagnose!r}: expected "auto", "always" or "off"')
    for name, every in ("values", values), ("sync_check", sync_check):
        if every is not None and (isinstance(every, bool) or not isinstance(every, int) or every < 1):
            raise ValueError(f"{name}={every!r}: expected a number of steps, 1 or more, or None")
    if stall_after is not None and not (isinstance(stall_after, int | float) and stall_after > 0):
        raise ValueError(f"stall_after={stall_after!r}: expected a number of seconds, more than 0, or None")
    if rows:
        _say(f"rows: not observed by ddpcov {_core.__version__}; coverage is recorded without it")
    return Tracker(
        model,
        out,
        optimizers,
        process_group,
        same_parameters,
        diagnose,
        values_every=values,
        sync_every=sync_check,
        stall_after=stall_after,
        guard=guard,
    )


def _optimizers(given: Any) -> list[Optimizer]:
    listed = [] if given is None else list(given) if isinstance(given, Iterable) else [given]
    for one in listed:
        if not hasattr(one, "param_groups"):
            raise TypeError(f"optimizer= expects torch.optim.Optimizer, one or several; found {type(one).__name__}")
    return listed


def _say(message: str) -> None:
    print(f"ddpcov: {message}", file=sys.stderr, flush=True)


class Tracker:
    """One recording. Made by `track`, entered once."""

    def __init__(
        self,
        model: nn.Module,
        out: Any,
        optimizers: list[Optimizer],
        process_group: Any,
        same_parameters: bool,
        diagnose: str,
        *,
        values_every: int | None,
        sync_every: int | None,
        stall_after: float | None,
        guard: bool,
    ) -> None:
        self._model = model
        self._out = None if out is None else os.fspath(out)
        self._optimizers = optimizers
        self._process_group = process_group
        self._same_parameters = same_parameters
        self._diagnose = diagnose
        self._values_every = values_every
        self._sync_every = sync_every
        self._stall_after = stall_after
        self._guard = guard
        self._recorder: _core.Recorder | None = None
        self._merged: _core.Capture | None = None
        self._passes: Passes | None = None  # as long as it records
        self._observer: Observer | None = None
        self._is_degraded = False  # could not write its shard

    def __enter__(self) -> Tracker:
        if self._recorder is not None:
            raise _core.Error("this tracker was entered before; call ddpcov.track again for another recording")
        clash = next((t for t in _active if t._out is not None and t._path() == self._path()), None)
        if clash is not None:
            raise _core.Error(f"{self._out}: another tracker in this process writes there; give each its own out=")
        self._pid = os.getpid()
        try:
            self._begin()
        except _core.Error:
            raise
        except Exception as error:  # ours, and no reason to keep anyone from training
            self._give_up(f"{type(error).__name__}: {error}")
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self._end(error)

    def _end(self, error: BaseException | None) -> None:
        if self._pid != os.getpid() or self._recorder is None:
            return  # a forked child leaves its parent's block; or nothing was recorded
        if self in _active:
            _active.remove(self)
        passes, self._passes = self._passes, None
        if passes is None:
            self._contain(self._leave)
            return
        steps.stop(passes)
        self._contain(passes.close_touched)
        if self._observer is not None:
            self._contain(self._observer.stop)
        self._contain(lambda: passes.stop(has_failed=error is not None))
        self._contain(lambda: self._hooks.refresh(is_last=True))
        self._contain(self._hooks.remove)
        if error is None:
            self._contain(self._finish_cleanly)
        else:
            self._contain(lambda: self._finish_failed(error))

    def step(self) -> None:
        """Closes a step by hand. Nothing happens if no pass was seen since the last step."""
        if self._passes is not None:
            self._passes.step()

    def report(self) -> Report:
        """The report: of all ranks on the first rank after a clean exit, of this rank before that and elsewhere.

        Raises:
            ddpcov.Error: the block was not entered yet.
        """
        if self._recorder is None:
            raise _core.Error("nothing is recorded: enter the block first, and see stderr if it was entered")
        return reading.build(self._merged or self._recorder.capture())

    # Beginning.

    def _begin(self) -> None:
        self._ranks = ranks.Ranks(self._model, self._process_group, self._out)
        self._hooks = Hooks(self._model, self._optimizers)
        recorder = self._new_recorder(*self._ranks.name_run())
        self._recorder = recorder
        self._hooks.attach(recorder)
        if self._stall_after is not None:
            recorder.watch(self._stall_after)
        self._note_run()
        _active.append(self)
        _watch_forks()
        self._observer = Observer(self._model, self._hooks, recorder, self._diagnose, tell=_say)
        self._passes = Passes(
            recorder,
            self._hooks,
            self._observer,
            self._optimizers,
            values=self._new_values(recorder),
            sync=self._new_sync(),
            lockstep=self._new_lockstep(),
            tell=_say,
            give_up=self._give_up,
            tell_failure=self._tell_failure,
        )
        steps.start(self._passes)

    @property
    def _live(self) -> _core.Recorder:
        assert self._recorder is not None
        return self._recorder

    def _new_recorder(self, started: int, nonce: int) -> _core.Recorder:
        def make(path: Path | None) -> _core.Recorder:
            return _core.Recorder(
                path,
                started=started,
                nonce=nonce,
                ranks=as_ranges(self._ranks.members),
                rank=self._ranks.rank,
                optimizer_given=bool(self._optimizers),
            )

        try:
            if (path := self._path()) is not None:
                attempts.begin(path, self._ranks.rank, self._ranks.members)
            return make(self._shard())
        except OSError as error:
            self._recorder = make(None)
            self._tell_failure(error.strerror or str(error))
            return self._recorder

    def _new_values(self, recorder: _core.Recorder) -> Values | None:
        every = self._values_every
        return None if every is None else Values(every, self._hooks, recorder, self._optimizers, tell=_say)

    def _new_sync(self) -> GradSync | None:
        if self._sync_every is None or self._ranks.world_size == 1:
            return None
        if self._hooks.averaging.wrapper.kind.startswith("fsdp"):
            if self._ranks.is_first:
                _say("sync_check: not made for a sharded model, whose ranks hold different gradients on purpose")
            return None
        return GradSync(self._sync_every, self._hooks, self._ranks, tell=_say)

    def _new_lockstep(self) -> Lockstep | None:
        if not self._guard or self._ranks.world_size == 1:
            return None
        kind = self._hooks.averaging.wrapper.kind
        why = "" if kind in ("ddp", "fsdp2") else "only DDP and FSDP2 can be guarded"
        if not self._same_parameters:
            why = "ranks hold different parameters (same_parameters=False)"
        if why:
            if self._ranks.is_first:
                _say(f"guard: not made: {why}")
            return None
        return self._ranks.lockstep(timedelta(seconds=self._stall_after or _NO_STALL_SECONDS))

    def _note_run(self) -> None:
        self._live.note("run", json.dumps(self._describe()))

    def _describe(self) -> dict[str, Any]:
        wrapper = asdict(self._hooks.averaging.wrapper)
        return {
            "torch": torch.__version__,
            "wrapper": wrapper,
            "same_parameters": self._same_parameters,
            "attempt": attempts.number(),
        }

    def _tell_failure(self, reason: str) -> None:
        self._is_degraded = True
        self._live.note("degraded", json.dumps({"reason": reason}))
        _say(f"{self._shard()}: {reason}; the recording goes on in memory")

    def _path(self) -> Path | None:
        return None if self._out is None else Path(self._out).absolute()

    def _shard(self) -> Path | None:
        path = self._path()
        return None if path is None else path.with_name(f"{path.name}.rank{self._ranks.rank}")

    # Ending.

    def _give_up(self, reason: str) -> None:
        passes, self._passes = self._passes, None
        if passes is not None:
            steps.stop(passes)
            self._contain(lambda: passes.stop(has_failed=True))
        _say(f"recording stopped, training goes on: {reason}")
        if self._recorder is None:
            return
        self._live.disable()
        if self._observer is not None:
            self._contain(self._observer.stop)
        self._contain(self._hooks.remove)
        self._contain(lambda: self._live.finish(f"exception: ddpcov stopped recording: {reason}"))

    def _contain(self, action: Callable[[], None]) -> None:
        try:
            action()
        except Exception as error:
            _say(f"at the end of the block: {type(error).__name__}: {error}")

    def _finish_cleanly(self) -> None:
        self._live.finish("clean")
        if self._ranks.world_size == 1:
            self._merged = self._live.capture()
            self._write(self._merged)
            return
        own = self._live.capture().analyse()
        outcome = self._ranks.agree(hashlib.sha256(repr(own.parameters).encode()).hexdigest())
        if outcome == "apart":
            then = f"`python -m ddpcov report {self._out}` merges the shards" if self._out else "each reports on itself"
            _say(f"rank {self._ranks.rank}: not every rank left the block cleanly; {then}")
            return
        history = self._live.history()
        sums = ranks.pack_counts(own)
        if outcome == "merge" and self._ranks.is_same_everywhere(history, sums):
            histories = [(as_ranges(self._ranks.members), history)]
        else:
            histories = self._ranks.gather(history)
        if self._ranks.is_first:
            is_written = False
            try:
                merged = self._live.merge(histories)
                if outcome == "merge":
                    ranks.check_sums(merged.analyse(), sums)
                self._merged = merged
                is_written = self._write(merged)
            finally:
                self._ranks.tell_written(is_written)  # the others wait to hear it
        elif self._ranks.is_written():
            self._remove_shard()

    def _write(self, capture: _core.Capture) -> bool:
        path = self._path()
        if path is None:
            return False
        beside = path.with_name(path.name + ".new")
        try:
            beside.write_bytes(capture.encode())
            beside.replace(path)  # so that a capture of that name is always whole
        except OSError as error:
            if not self._is_degraded:  # else it was said
                _say(f"{path}: {error.strerror or error}; the report is in memory only")
            with contextlib.suppress(OSError):
                beside.unlink()
            return False
        self._remove_shard()
        return True

    def _remove_shard(self) -> None:
        shard = self._shard()
        if shard is not None:
            shard.unlink(missing_ok=True)

    def _finish_failed(self, error: BaseException) -> None:
        self._note_exception(error)
        self._finish_with(error)
        self._leave()
        if isinstance(error, Exception):
            self._annotate(error)

    def _leave(self) -> None:
        self._ranks.leave()

    def _note_exception(self, error: BaseException) -> None:
        in_pass = any(hasattr(e, "_ddpcov_in_pass") for e in (error, error.__cause__, error.__context__))
        fact = {"type": type(error).__name__, "message": str(error)[:8000], "in_pass": in_pass}
        fact["named"] = self._hooks.named_by_ddp(str(error))
        self._live.note("exception", json.dumps(fact))

    def _finish_with(self, error: BaseException) -> None:
        line = str(error).strip().split("\n", 1)[0][:300]
        self._live.finish(f"exception: {type(error).__name__}: {line}".removesuffix(": "))

    def _annotate(self, error: Exception) -> None:
        bytearray(_NOTE_MEMORY)  # after running out of it: Rust aborts where it gets none, Python raises
        text = note(self.report(), self._ranks.rank, self._out)
        if text is not None:
            error.__notes__ = [*getattr(error, "__notes__", []), text]  # PEP 678, on 3.10 too


def _watch_forks() -> None:
    global _is_fork_watched
    if not _is_fork_watched:
        _is_fork_watched = True
        os.register_at_fork(after_in_child=_in_child)


def _in_child() -> None:
    # The mapped pages are shared with the parent: not a bit may be set in them from here.
    for tracker in _active:
        tracker._passes = None
        if tracker._observer is not None:
            tracker._observer.abandon()
        tracker._live.disable()
    _active.clear()
    steps.forget()
