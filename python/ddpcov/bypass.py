"""Whether DDP averages a pass, as its reducers know it: which of them a forward prepared, and which of them a pass used up.

DDP averages the first pass that comes after a forward of the wrapper, whatever that pass goes back through, until every
parameter that the reducer waits for was reached. Any pass after that, and any pass when no forward came first, leaves its
gradients local without a word. Forwards are seen where DDP prepares its reducer; a hook on the module would not see
`ddp.forward(x)`, and would be copied with the module.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel

from ddpcov import _core
from ddpcov.hooks import Hooks

__all__ = ["Reducers"]

_watched: dict[int, list[_Reducer]] = {}  # by id of the DDP module, which each holds
_original: Any = None


@dataclass
class _Reducer:
    """What is known of the reducer of one DDP module."""

    ddp: DistributedDataParallel
    order: int = 0
    """Its number among the DDP modules of the model."""
    mask: int = 0
    """The parameters that it waits for, as a row."""
    num_orphans: int = 0
    """Tensors that it waits for and that are no longer in the model, so that nobody sees them reached."""
    pending: int = 0
    """What it still waits for, if a forward prepared it."""
    is_prepared: bool | None = None
    """None where that was not seen: it may have been before the block."""
    is_local: bool = False
    """A forward inside `no_sync` ran since it was prepared last, so that passes may be local as the user wished."""
    first: int | None = field(default=None, repr=False)
    """What the first pass reached, which `static_graph` expects of all."""

    def forward_ended(self) -> None:
        """Called for each forward of the wrapper, after it; cheap."""
        if torch.is_grad_enabled():
            if self.ddp.require_backward_grad_sync:
                self.is_prepared, self.is_local, self.pending = True, False, self.mask
            else:
                self.is_local = True

    def judge(self, row: int, *, is_partial: bool, has_raised: bool) -> str:
        """What becomes of a pass that reached `row`, of which some is its own."""
        if self.is_prepared is False:
            return "local" if self.is_local or not self.ddp.require_backward_grad_sync else "bypassed"
        verdict = "unknown" if self.is_prepared is None else "averaged"
        self.pending &= ~row
        if has_raised:
            self.is_prepared, self.pending = None, self.mask
        elif self._is_done(row, is_partial):
            self.is_prepared = False
        elif self.ddp.static_graph or self.ddp.find_unused_parameters or self.num_orphans:
            self.is_prepared = None
        return verdict

    def will_lack(self, row: int) -> int:
        """Of what a pass must reach to let this reducer come to its end, what one that reaches `row` will not; of a reducer
        that searches for unused parameters nothing, if the pass reaches any: its search has seen to the rest."""
        if self.ddp.static_graph:
            return self.first & ~row if self.first is not None else 0 if row & self.mask else self.mask
        if self.ddp.find_unused_parameters:
            return 0 if row & self.mask else self.mask
        return self.pending & ~row

    def _is_done(self, row: int, is_partial: bool) -> bool:
        """Whether it was used up, if it was prepared. Without flags it goes on until all was reached, pass by pass."""
        if self.ddp.static_graph:
            if self.first is None and self.is_prepared:
                self.first = row & self.mask
                return not is_partial
            return not self.pending or (self.first is not None and not self.first & ~row)
        if self.ddp.find_unused_parameters:
            return not is_partial  # the search found what is unused, and all else was reached
        return not self.pending and not self.num_orphans


class Reducers:
    """Follows the reducers of the DDP modules of a model, for the flags of each pass."""

    def __init__(self, hooks: Hooks, recorder: _core.Recorder) -> None:
        self._hooks = hooks
        self._recorder = recorder
        self._version = -1
        self._all: list[_Reducer] = []
        self._is_broken = False

    def refresh(self) -> None:
        """Takes in what changed about the model; called before each pass, and at first."""
        if self._version != self._hooks.version and not self._is_broken:
            self._version = self._hooks.version
            try:
                self._take_in()
            except Exception:  # of a torch that is built otherwise: no claim is made
                self._break()

    def flags(self, *, is_partial: bool, has_raised: bool) -> int:
        """The flags of the pass that ends now; `is_partial` if autograd was told what to go back to."""
        averaging = self._hooks.averaging
        if not averaging.ddps:
            return 0
        verdicts: set[str] = set()
        if self._all:
            try:
                row = int.from_bytes(self._recorder.reached(), "little")
                touched = [r for r in self._all if row & r.mask]
                verdicts = {r.judge(row, is_partial=is_partial, has_raised=has_raised) for r in touched}
            except Exception:
                self._break()
        if "averaged" in verdicts:  # of several, the rest cannot be said of the same pass
            return 0
        if not verdicts or "unknown" in verdicts:
            return 0 if averaging.is_synchronised() else _core.NO_SYNC
        return _core.NO_SYNC | _core.BYPASSED if verdicts == {"bypassed"} and not has_raised else _core.NO_SYNC

    @property
    def at_stake(self) -> list[_Reducer]:
        """Those that a forward prepared, so that the coming pass is theirs; or may have."""
        return [r for r in self._all if r.is_prepared is not False]

    @property
    def blind(self) -> str:
        """Why what the wrapper does cannot be foreseen at all; nothing if it can."""
        averaging = self._hooks.averaging
        if self._is_broken or len(self._all) < len(averaging.ddps):
            return "a DDP that is compiled, or does not reduce by itself, cannot be followed"
        if any(getattr(getattr(r.ddp, "_join_config", None), "enable", False) for r in self._all):
            return "inside torch's Join, ranks may run out of data"
        return ""

    def stop(self) -> None:
        """Looks at forwards no longer."""
        for reducer in self._all:
            _forget(reducer)
        self._all = []

    def _break(self) -> None:
        self._is_broken = True
        self.stop()

    def _take_in(self) -> None:
        averaging = self._hooks.averaging
        known = {id(r.ddp): r for r in self._all}
        bits = self._hooks.bits()
        watched = []
        for order, (ddp, awaited) in enumerate(zip(averaging.ddps, averaging.awaited_by, strict=True)):
            if id(ddp) in averaging.compiled or not _prepares_by_itself(ddp):
                continue
            reducer = known.pop(id(ddp), None)
            if reducer is None:
                # Prepared before it was watched, maybe. If no forward ran at all, certainly not.
                reducer = _Reducer(ddp, is_prepared=None if getattr(ddp, "_lazy_init_ran", True) else False)
                _watch(reducer)
            ids = [bits[id(p)] for p in awaited if id(p) in bits]
            mask = _row(ids)
            reducer.pending = reducer.pending & mask | mask & ~reducer.mask if reducer.mask else mask
            reducer.order, reducer.mask, reducer.num_orphans = order, mask, len(awaited) - len(ids)
            watched.append(reducer)
        for reducer in known.values():
            _forget(reducer)
        self._all = watched


def _row(ids: list[int]) -> int:
    row = bytearray(max(ids, default=-1) // 8 + 1)
    for i in ids:
        row[i // 8] |= 1 << i % 8
    return int.from_bytes(row, "little")


def _prepares_by_itself(ddp: Any) -> bool:
    """Whether its forward prepares a reducer, and no reduction of another kind takes its place."""
    return not (getattr(ddp, "_use_python_reducer", False) or getattr(ddp, "_delay_all_reduce_all_params", False))


def _watch(reducer: _Reducer) -> None:
    global _original
    if _original is None:
        _original = DistributedDataParallel._post_forward
        DistributedDataParallel._post_forward = _telling(_original)  # type: ignore[method-assign]
    _watched.setdefault(id(reducer.ddp), []).append(reducer)


def _forget(reducer: _Reducer) -> None:
    global _original
    left = [r for r in _watched.pop(id(reducer.ddp), ()) if r is not reducer]
    if left:
        _watched[id(reducer.ddp)] = left
    if not _watched and _original is not None:
        # Whoever replaced it after us keeps their replacement; ours inside it then only passes calls on.
        if hasattr(DistributedDataParallel._post_forward, "_is_ddpcov"):
            DistributedDataParallel._post_forward = _original  # type: ignore[method-assign]
        _original = None


def _telling(post_forward: Any) -> Any:
    @functools.wraps(post_forward)
    def tell(self: DistributedDataParallel, output: Any) -> Any:
        result = post_forward(self, output)
        for reducer in _watched.get(id(self), ()):
            reducer.forward_ended()
        return result

    tell._is_ddpcov = True  # type: ignore[attr-defined]
    return tell
