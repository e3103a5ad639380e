"""What hangs on a pass: which gradients the wrapper will reduce in it, and what it needs of each rank for that."""

from __future__ import annotations

from typing import Any, Protocol

from ddpcov import wrappers
from ddpcov.bypass import Reducers
from ddpcov.hooks import Hooks

__all__ = ["Stake", "consequence", "foresee"]


class Stake(Protocol):
    """What hangs on the coming pass."""

    blind: str
    """Why that cannot be told of this pass; nothing if it can."""

    def lacking(self, row: int) -> int:
        """Of what the wrapper needs, what a pass that reaches `row` will not reach."""

    def signature(self, row: int) -> Any:
        """What must be the same on all ranks, for the wrapper to survive such a pass."""


def foresee(hooks: Hooks, reducers: Reducers) -> Stake | None:
    """What hangs on the coming pass of the model; None if nothing does: it is not averaged, or not by a wrapper."""
    if reducers.at_stake:
        return _Ddp(reducers)
    if hooks.averaging.wrapper.kind == "fsdp2":
        return _Fsdp2.of(hooks)
    return None


def consequence(hooks: Hooks, *, is_idle: bool) -> str:
    """What would happen, and what to do."""
    wrapper = hooks.averaging.wrapper
    if wrapper.kind == "fsdp2":
        return (
            "FSDP2 reduces what each rank has, and ranks that have different parameters wait for one another for good, or mix"
            " them up. Use the same parameters on every rank; where there is nothing to learn from, times zero."
        )
    if is_idle:
        return (
            "The other ranks would wait for it for good, with find_unused_parameters as without. Let the loss depend on the"
            " model on every rank; where there is nothing to learn from, with weight zero: loss = output.sum() * 0.0."
        )
    if wrapper.static_graph:
        return (
            "static_graph=True expects of each rank in every pass what its first pass reached; the others would wait for good."
            " Drop static_graph, and pass find_unused_parameters=True."
        )
    return (
        "With find_unused_parameters off, the ranks that reach them would wait for those that do not, for good. Use them on"
        " every rank, with weight zero where there is nothing to learn from, or pass find_unused_parameters=True."
    )


class _Ddp:
    """The reducers that a forward prepared. One that comes to its end waits for the same one on all other ranks."""

    def __init__(self, reducers: Reducers) -> None:
        self._all = reducers.at_stake
        is_seen = all(r.is_prepared for r in self._all)
        self.blind = "" if is_seen else "whether the wrapper's forward prepared it was not seen"

    def lacking(self, row: int) -> int:
        lacking = 0
        for reducer in self._all:
            lacking |= reducer.will_lack(row)
        return lacking

    def signature(self, row: int) -> Any:
        ends = [r.order for r in self._all if not r.will_lack(row) and not r.num_orphans]
        return sorted(ends)


class _Fsdp2:
    """The parameters that FSDP2 reduces; on every rank the same, as it sums up whole groups of them."""

    def __init__(self, mask: int, held: int, blind: str = "") -> None:
        self._mask = mask
        self._held = held
        self.blind = blind

    @classmethod
    def of(cls, hooks: Hooks) -> _Fsdp2 | None:
        """Of the model; None if the pass is not reduced."""
        leaves = wrappers.reducing_leaves(hooks.model.modules())
        if leaves is None:
            return cls(0, 0, "what FSDP2 of this torch reduces is not known")
        mask = held = 0
        bits = hooks.bits()
        for leaf, is_held in leaves:
            bit = 1 << bits[id(leaf)] if id(leaf) in bits else 0
            mask |= bit
            held |= bit if is_held else 0
        return cls(mask, held) if mask else None

    def lacking(self, row: int) -> int:
        return self._mask & ~(row | self._held)

    def signature(self, row: int) -> Any:
        return self._mask & (row | self._held)
