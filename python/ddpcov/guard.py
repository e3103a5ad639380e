"""Before the first gradient of a pass, whether the wrapper can survive what the ranks are about to do.

From a hook on the tensor that a pass begins at, autograd's engine tells which gradient accumulators it will run. From that
follows whether this rank's reducer will come to its end, and whether the others' do is compared. Ranks whose reducers end
wait for those whose do not, for good.
"""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import torch

from ddpcov import stakes, steps, wrappers
from ddpcov.bypass import Reducers
from ddpcov.diagnosis.observer import Observer
from ddpcov.diagnosis.rules.causes import MODULE, TWIN, cause_of
from ddpcov.divergence import RankDivergence
from ddpcov.hooks import Hooks
from ddpcov.lockstep import Absent, Lockstep, Over
from ddpcov.report import as_ranges, some

__all__ = ["Guard"]

_MAX_NAMES = 6


class Guard:
    """Watches the passes of one model. Raises `RankDivergence` out of the pass; whatever else goes wrong ends the guard only.

    `note` writes a fact into the capture, `tell` says something on stderr.
    """

    def __init__(
        self,
        hooks: Hooks,
        reducers: Reducers,
        observer: Observer,
        lockstep: Lockstep,
        *,
        note: Callable[[str, dict[str, Any]], None],
        tell: Callable[[str], None],
    ) -> None:
        self._hooks = hooks
        self._reducers = reducers
        self._observer = observer
        self._lockstep = lockstep
        self._note = note
        self._tell = tell
        self._is_over = False
        self._version = -1
        self._accumulators: dict[int, Any] = {}
        self._handles: list[Any] = []
        self._is_asked = False
        self._said: set[str] = set()
        self._has_inner_runs = False

    # Called around each pass.

    def pass_begins(self, run: steps.EngineRun, step: int) -> None:
        """A pass is about to begin; it may be another model's."""
        if self._is_over:
            return
        try:
            self._is_asked = False
            self._refresh()
            self._handles = run.when_under_way(lambda: self._ask(run, step))
        except Exception as error:
            self._end(f"{type(error).__name__}: {error}"[:300])

    def pass_ends(self, run: steps.EngineRun) -> None:
        """It ended, or raised."""
        self._has_inner_runs |= run.has_inner_parameters
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def stop(self, why: str) -> None:
        """This rank comes to no further pass; says so, and why, to those that wait for it."""
        if not self._is_over:
            self._is_over = True
            self._lockstep.leave(why)

    def _ask(self, run: steps.EngineRun, step: int) -> None:
        """In the hook of the first node that the engine runs."""
        if self._is_asked or self._is_over:
            return
        self._is_asked = True
        try:
            self._compare(run, step)
        except RankDivergence:
            self._is_over = True
            raise
        except Over as over:
            self._end(str(over))
        except Exception as error:
            self._end(f"{type(error).__name__}: {error}"[:300])

    def _end(self, why: str) -> None:
        self._is_over = True
        self._lockstep.stop(why)
        if self._lockstep.may_speak("over"):
            self._tell(f"guard: ranks are no longer compared, training and recording go on: {why}")

    # What this rank is about to do.

    def _refresh(self) -> None:
        if self._version != self._hooks.version:
            self._version = self._hooks.version
            self._find_accumulators()

    def _find_accumulators(self) -> None:
        with torch.enable_grad():
            self._accumulators = {
                i: leaf.view_as(leaf).grad_fn.next_functions[0][0]  # type: ignore[union-attr]
                for i, leaf in self._hooks.leaves.items()
                if wrappers.is_trainable(leaf) and not wrappers.is_lazy(leaf)
            }

    def _reached(self) -> int:
        """The parameters whose accumulators this pass will run, as a row."""
        will_run = torch._C._will_engine_execute_node
        row = bytearray(max(self._accumulators, default=-1) // 8 + 1)
        for i, accumulator in self._accumulators.items():
            if will_run(accumulator):
                row[i // 8] |= 1 << i % 8
        return int.from_bytes(row, "little")

    def _compare(self, run: steps.EngineRun, step: int) -> None:
        if why := self._reducers.blind:
            raise Over(why)
        stake = stakes.foresee(self._hooks, self._reducers)
        if stake is None:
            return
        row = self._reached()
        lacking = stake.lacking(row)
        if lacking:
            # An accumulator may have been replaced under us (`.data` of another type): what accuses is looked up anew.
            self._find_accumulators()
            row = self._reached()
            lacking = stake.lacking(row)
        if not row and _is_of_others(run):
            return
        why_void = stake.blind or (self._why_blind(run) if lacking else "")
        if why_void and why_void not in self._said:
            self._said.add(why_void)
            if self._lockstep.may_speak(why_void):
                self._tell(f"guard: passes are not guarded where it cannot be foreseen what they reach: {why_void}")
        digest = hashlib.sha256(repr(stake.signature(row)).encode()).digest()
        try:
            is_same = self._lockstep.is_same(digest, is_void=bool(why_void))
        except Absent as absent:
            raise self._alone(absent, step) from None
        if is_same is False:
            names = [self._hooks.definition(i)[0] for i in _members(lacking) if i in self._hooks.leaves]
            causes = self._causes(lacking, row, step)
            told = self._lockstep.share({"names": names, "is_idle": not row, "causes": causes}, _join)
            raise self._divergence(told, step)

    def _why_blind(self, run: steps.EngineRun) -> str:
        """Why the engine may not have told of all that the pass will reach; nothing if it has."""
        if self._has_inner_runs or any("CheckpointFunction" in type(node).__name__ for node in run.nodes()):
            return "reentrant checkpointing, whose inner passes nobody can foresee (use_reentrant=False can be guarded)"
        return ""

    # What is said.

    def _causes(self, lacking: int, row: int, step: int) -> list[dict[str, Any]]:
        groups = self._observer.foresee(set(_members(lacking)), frozenset(_members(row)), step) if row else []
        found = []
        for group in groups:
            cause = cause_of(group, None)
            if cause.code != "DDC100":
                where = f" ({cause.where.file}:{cause.where.line} in {cause.where.function})" if cause.where else ""
                text = cause.message.replace(MODULE, cause.module).replace(TWIN, cause.twin)
                found.append({"names": group["names"], "says": f"{cause.code} {text}{where}"})
        return found

    def _divergence(self, told: list[dict[str, Any]], step: int) -> RankDivergence:
        lacking = {rank: tuple(group["names"]) for group in told for rank in group["ranks"] if group["names"]}
        self._note("divergence", {"step": step, "groups": told})
        lines = []
        for group in (g for g in told if g["names"]):
            what = "reach no parameter at all" if group["is_idle"] else f"not reach {some(group['names'], _MAX_NAMES)}"
            lines.append(f"in the backward pass of step {step}, {_ranks(group['ranks'])} would {what}, and others would")
            lines += (f"  {some(cause['names'], _MAX_NAMES)}: {cause['says']}" for cause in group["causes"])
        is_idle = any(group["is_idle"] for group in told)
        return RankDivergence("\n".join([*lines, stakes.consequence(self._hooks, is_idle=is_idle)]), lacking)

    def _alone(self, absent: Absent, step: int) -> RankDivergence:
        who = _ranks(list(absent.ranks)) if absent.ranks else "another rank"
        self._note("divergence", {"step": step, "absent": list(absent.ranks), "why": str(absent)})
        return RankDivergence(
            f"in the backward pass of step {step} this rank would wait for {who}, which did not come to it: {absent}."
            " Let every rank make the same number of passes (see torch's Join for uneven data); if it is only slow, give it"
            " more time with stall_after=",
            absent=absent.ranks,
        )


def _join(details: dict[int, dict[str, Any]]) -> list[dict[str, Any]]:
    """On the first rank: ranks that lack the same, together, without what all of them lack."""
    common = set.intersection(*(set(d["names"]) for d in details.values()))
    groups: defaultdict[tuple[Any, ...], list[int]] = defaultdict(list)
    causes: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    for rank, detail in sorted(details.items()):
        names = tuple(n for n in detail["names"] if n not in common)
        key = (names, bool(detail["is_idle"]))
        groups[key].append(rank)
        causes.setdefault(key, [c for c in detail["causes"] if not common.issuperset(c["names"])])
    return [{"ranks": ranks, "names": list(key[0]), "is_idle": key[1], "causes": causes[key]} for key, ranks in groups.items()]


def _is_of_others(run: steps.EngineRun) -> bool:
    """Whether a pass that reaches nothing of this model trains another one."""
    return run.has_inner_parameters or any(map(steps.is_parameter, run.leaves()))


def _members(row: int) -> list[int]:
    return [i for i, bit in enumerate(reversed(bin(row)[2:])) if bit == "1"] if row else []


def _ranks(ranks: list[int]) -> str:
    listed = ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in as_ranges(ranks))
    return f"rank{'s' if len(ranks) > 1 else ''} {listed}"
