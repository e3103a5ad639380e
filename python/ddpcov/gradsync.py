"""Whether ranks hold equal gradients when an optimizer is about to step, in every N-th step.

A gradient's bits, read as integers and summed up with multipliers that depend on the place, make its fingerprint. One digest
of all fingerprints is compared; only where ranks differ is it asked which parameters do, and on which ranks.
"""

from __future__ import annotations

import functools
import hashlib
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from ddpcov.hooks import Hooks
from ddpcov.ranks import Ranks, RoundsOver
from ddpcov.wrappers import is_trainable

__all__ = ["GradSync", "fingerprints"]

_MAX_NAMES = 1000
"""Parameters that are told apart by rank in one check, and all in all; the rest is counted."""

_CHUNK, _CPU_CHUNK = 1 << 20, 1 << 16
"""Elements that are summed up at once: so many that starting the kernels does not count, so few that a CPU has them in its
cache and that a check takes some tens of megabytes at most."""

_MASK = (1 << 64) - 1
_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class GradSync:
    """Compares the gradients of one model across ranks. `tell` is called on one of them if they stop comparing; nothing else
    stops with it."""

    def __init__(self, every: int, hooks: Hooks, ranks: Ranks, *, tell: Callable[[str], None]) -> None:
        self._every = every
        self._hooks = hooks
        self._rounds = ranks.rounds()
        self._tell = tell
        self._num_checks = self._num_cut = 0
        self._differ: dict[str, dict[str, Any]] = {}
        self._off: str | None = None

    def is_due(self, step: int) -> bool:
        """Whether the optimizers' steps that end this step are to be checked."""
        return self._off is None and step % self._every == 0

    def check(self, optimizer: Optimizer, step: int) -> None:
        """Compares the gradients of the model's parameters that the optimizer holds; every rank comes to it, or none waits
        for long."""
        try:
            with torch.no_grad():
                self._check(optimizer, step)
        except RoundsOver as over:
            self._turn_off(f"step {step}: {over}")
        except Exception as error:  # ours; the others need not wait for us
            self._turn_off(f"step {step}: {type(error).__name__}: {error}"[:300])
            self._rounds.leave()

    def finish(self) -> dict[str, Any]:
        """What was found, to be noted in the capture. No rank waits for this one any more."""
        if self._off is None:
            self._rounds.leave()
        found = {"every": self._every, "checks": self._num_checks, "differ": dict(sorted(self._differ.items()))}
        return found | ({"cut": self._num_cut} if self._num_cut else {}) | ({"off": self._off} if self._off else {})

    def _turn_off(self, reason: str) -> None:
        self._off = reason
        if self._rounds.may_speak():
            self._tell(f"sync_check: gradients are no longer compared, training and recording go on: {reason}")

    def _check(self, optimizer: Optimizer, step: int) -> None:
        # What is known to differ is not asked for again: it would differ in most steps to come.
        held = {name: p for name, p in self._held_by(optimizer) if name not in self._differ}
        layout = hashlib.sha256(repr([(name, p.shape, p.dtype) for name, p in held.items()]).encode())
        prints = fingerprints([p.grad for p in held.values()])
        digest = hashlib.sha256(repr((step, layout.hexdigest(), prints)).encode()).hexdigest()
        is_same = self._rounds.is_same(digest)
        self._num_checks += 1
        if not is_same:
            self._find(step, layout.digest(), list(held), prints)

    def _find(self, step: int, layout: bytes, names: list[str], prints: list[int | None]) -> None:
        # On the CPU, whatever the user's default device: the ranks talk through gloo.
        head = torch.tensor([step, int.from_bytes(layout[:8], "little", signed=True)], device="cpu")
        if not self._rounds.is_equal(head).all():
            self._rounds.leave()
            raise RoundsOver("the ranks are at different steps, or their optimizers hold different parameters")
        is_defined = torch.tensor([p is not None for p in prints], device="cpu")
        words = torch.tensor([_signed(p or 0) for p in prints], dtype=torch.int64, device="cpu")
        is_equal, is_complete = self._rounds.is_equal(torch.stack([words, is_defined.long()]))
        is_complete &= is_defined
        places = (is_complete & ~is_equal).nonzero().flatten()
        room = _MAX_NAMES - len(self._differ)
        self._num_cut += max(0, len(places) - room)
        places = places[:room]
        if not len(places):
            return
        theirs = self._rounds.gather(words[places])
        for number, place in enumerate(places.tolist()):
            groups: defaultdict[int, list[int]] = defaultdict(list)
            for rank, own in theirs.items():
                groups[int(own[number])].append(rank)
            self._differ[names[place]] = {"first": step, "groups": sorted(groups.values())}

    def _held_by(self, optimizer: Optimizer) -> Iterator[tuple[str, Tensor]]:
        """The model's parameters in the optimizer whose gradients ought to be equal: not those that DDP was told to ignore,
        nor shards."""
        ids = {id(p) for group in optimizer.param_groups for p in group["params"]}
        ids.difference_update(map(id, self._hooks.averaging.ignored))
        for param_id, parameter in self._hooks.parameters():
            if id(parameter) in ids and is_trainable(parameter) and not hasattr(parameter, "to_local"):
                yield self._hooks.definition(param_id)[0], parameter


def _signed(number: int) -> int:
    return number - (1 << 64) if number >> 63 else number


def fingerprints(tensors: Iterable[Tensor | None]) -> list[int | None]:
    """A 64-bit number for each tensor, equal for equal elements and, almost surely, for these alone; zeros have no sign here.

    Computed on the tensors' devices, with one transfer from each.
    """
    out: list[int | None] = []
    pieces: defaultdict[tuple[torch.device, torch.dtype], list[tuple[int, int, Tensor]]] = defaultdict(list)
    for place, tensor in enumerate(tensors):
        out.append(None if tensor is None else 0)
        parts = [] if tensor is None else _parts(tensor)
        for number, part in enumerate(parts):
            limit = _chunk(part.device)
            cut = [part] if part.numel() <= limit else torch.split(part, limit)
            pieces[part.device, part.dtype] += ((place, _hash(index, number), piece) for index, piece in enumerate(cut))
    sums: defaultdict[torch.device, list[Tensor]] = defaultdict(list)
    owners: defaultdict[torch.device, list[tuple[int, int]]] = defaultdict(list)
    for (device, _), own in pieces.items():
        multipliers = _multipliers(max(piece.numel() for _, _, piece in own), device)
        for batch in _batches(own, _chunk(device)):
            sums[device].append(_sum_up([piece for _, _, piece in batch], multipliers))
            owners[device] += [(place, factor) for place, factor, _ in batch]
    for device, batches in sums.items():
        for (place, factor), number in zip(owners[device], torch.cat(batches).tolist(), strict=True):
            out[place] = (out[place] or 0) + number * factor & _MASK
    return out


def _parts(tensor: Tensor) -> list[Tensor]:
    """All that makes up the tensor, flat, in an order that does not depend on strides."""
    if tensor.layout is not torch.strided:
        tensor = tensor.coalesce() if tensor.layout is torch.sparse_coo else tensor.to_sparse()
        return [*_parts(tensor.indices()), *_parts(tensor.values())]
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor.resolve_conj())
    return [tensor.resolve_neg().reshape(-1)]


def _chunk(device: torch.device) -> int:
    return _CPU_CHUNK if device.type == "cpu" else _CHUNK


def _batches(pieces: list[tuple[int, int, Tensor]], limit: int) -> Iterator[list[tuple[int, int, Tensor]]]:
    batch: list[tuple[int, int, Tensor]] = []
    size = 0
    for piece in pieces:
        if batch and size + piece[2].numel() > limit:
            yield batch
            batch, size = [], 0
        batch.append(piece)
        size += piece[2].numel()
    if batch:
        yield batch


def _sum_up(pieces: list[Tensor], multipliers: Tensor) -> Tensor:
    """Of each piece, its elements times the multipliers, modulo 2⁶⁴."""
    joined = torch.cat(pieces)
    if joined.is_floating_point() and joined.itemsize > 1:
        joined = joined + 0.0  # turns negative zeros into zeros
    bits = joined.view(_INTEGERS[joined.itemsize]).long()
    if joined.itemsize == 8:
        # A product has no place for the upper bits: two changed signs would cancel, whatever the multipliers.
        bits ^= bits >> 32
    if len(pieces) == 1:
        return (bits * multipliers[: len(bits)]).sum().reshape(1)
    sizes = [len(piece) for piece in pieces]
    bits *= torch.cat([multipliers[:size] for size in sizes])
    # Integers, so that differences of running sums are exact.
    ends = torch.tensor(sizes).cumsum(0).sub_(1).to(bits.device, non_blocking=True)
    totals = bits.cumsum(0)[ends]
    return totals.diff(prepend=totals.new_zeros(1))


def _multipliers(number: int, device: torch.device) -> Tensor:
    """Odd, and without order: a multiplier that grew evenly would let an exchange of elements go unseen."""
    x = torch.arange(1, number + 1, device=device) * _signed(0x9E3779B97F4A7C15)
    x = (x ^ (x >> 30)) * _signed(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> 27)) * _signed(0x94D049BB133111EB)
    return (x ^ (x >> 31)) | 1


@functools.lru_cache(maxsize=4096)
def _hash(*numbers: int) -> int:
    digest = hashlib.blake2b(repr(numbers).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") | 1
