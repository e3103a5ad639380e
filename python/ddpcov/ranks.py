"""The ranks of a run: the only file that speaks torch.distributed.

What crosses between ranks: at the start, the name of the run; at a clean exit, first an agreement through the store that all
leave cleanly, then one SUM all-reduce, and the histories of ranks that differ. Whatever fails here leaves the shards where
they are, for `report` to merge. While the ranks train they compare gradients and passes, if that was asked for, and nothing
else.
"""

from __future__ import annotations

import contextlib
import hashlib
import secrets
import threading
import time
from collections import Counter
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from ddpcov import _core, attempts
from ddpcov.lockstep import Lockstep
from ddpcov.wrappers import ddps_in

__all__ = ["EXIT_TIMEOUT", "ROUND_TIMEOUT", "Ranks", "RoundsOver", "check_sums", "meet", "pack_counts"]

EXIT_TIMEOUT = timedelta(seconds=30)
"""How long a rank waits for the others at a clean exit, and for each transfer after that."""

ROUND_TIMEOUT = timedelta(seconds=30)
"""How long a rank waits for the others in a round of `Rounds`, and for each transfer in it."""

_MEETING_TIMEOUT = timedelta(seconds=10)
_NUM_CHUNKS = 16  # 16-bit pieces of a SHA-256
_started: Counter[str] = Counter()


class Ranks:
    """This process among those that track the same model: alone, in the default group, or in a given one."""

    def __init__(self, model: nn.Module, process_group: Any, out: str | None) -> None:
        self.members = [0]
        self.rank = 0
        self._group: Any = None
        self._store: Any = None
        if dist.is_available() and dist.is_initialized():
            ddps = ddps_in(model.modules())
            self._group = process_group or (ddps[0].process_group if ddps else dist.group.WORLD)
            self.rank = dist.get_rank()
            if self._group is dist.GroupMember.NON_GROUP_MEMBER:
                raise _core.Error(f"rank {self.rank} is no member of process_group=: call track() on its members only")
            self.members = dist.get_process_group_ranks(self._group)
            # Numbered by the blocks before it that would have the same name; every rank enters them in the same order.
            name = f"{self.members}-{Path(out).name if out else ''}"
            _started[name] += 1
            self._store = _store(f"{hashlib.sha256(name.encode()).hexdigest()[:16]}/{_started[name]}")

    @property
    def world_size(self) -> int:
        """Number of ranks that take part."""
        return len(self.members)

    @property
    def is_first(self) -> bool:
        """Whether this rank collects and writes what the ranks have in common."""
        return self.rank == self.members[0]

    def name_run(self) -> tuple[int, int]:
        """Start (ns since 1970) and nonce of the run, the same on all ranks: whoever comes first sets them; nobody waits."""
        own = f"{time.time_ns()} {secrets.randbits(64)}"
        if self.world_size > 1:
            own = self._store.compare_set("run", "", own).decode()
        started, nonce = own.split()
        return int(started), int(nonce)

    def leave(self) -> None:
        """Says that this rank does not leave cleanly, so that no other waits for it."""
        if self.world_size > 1:
            _bounded(lambda: self._decide("apart"))

    def agree(self, params_digest: str) -> str:
        """How all ranks go on: `merge`, `gather` (they track different parameters) or `apart` (some rank did not come).

        The first to write the outcome decides it for all, so that no rank enters a collective that another has given up.
        """
        return _bounded(lambda: self._agree(params_digest))

    def _agree(self, params_digest: str) -> str:
        store = self._store
        if store.compare_set("params", "", params_digest).decode() != params_digest:
            store.add("differing", 1)
        if store.add("arrived", 1) == self.world_size:
            return self._decide("gather" if store.add("differing", 0) else "merge")
        with contextlib.suppress(RuntimeError):  # timed out
            store.wait(["outcome"], EXIT_TIMEOUT)
        return self._decide("apart")

    def _decide(self, outcome: str) -> str:
        return str(self._store.compare_set("outcome", "", outcome).decode())

    def is_same_everywhere(self, history: bytes, counts: list[int]) -> bool:
        """One SUM all-reduce of everybody's counts and of the digest of everybody's history.

        `counts` has one word per parameter, of four 16-bit counters. The digest travels as 16-bit chunks c and c²: of n
        ranks all have the same chunk exactly where n·Σc² = (Σc)², by Cauchy and Schwarz, in integers and so without doubt.
        Returns whether all histories are equal. `counts` is overwritten by the sums.
        """
        digest = hashlib.sha256(history).digest()
        chunks = [int.from_bytes(digest[i : i + 2], "little") for i in range(0, 2 * _NUM_CHUNKS, 2)]
        words = torch.tensor([*chunks, *(c * c for c in chunks), *counts], dtype=torch.int64, device=self._device())
        self._finish(dist.all_reduce(words, group=self._group, async_op=True), words)
        summed = words.tolist()
        sums, squares = summed[:_NUM_CHUNKS], summed[_NUM_CHUNKS : 2 * _NUM_CHUNKS]
        counts[:] = summed[2 * _NUM_CHUNKS :]
        return all(self.world_size * q == s * s for s, q in zip(sums, squares, strict=True))

    def rounds(self) -> Rounds:
        """For comparisons while the ranks train."""
        return Rounds(self.members, self.rank, self._store)

    def gather(self, history: bytes) -> list[tuple[list[tuple[int, int]], bytes]]:
        """On the first rank, each different history with the ranks that have it; elsewhere nothing.

        Only the first rank of each history sends it.
        """
        digest = hashlib.sha256(history).digest()
        own = torch.frombuffer(bytearray(digest + len(history).to_bytes(8, "little")), dtype=torch.uint8)
        all_own = [torch.empty_like(own, device=self._device()) for _ in self.members]
        own = own.to(self._device())
        self._finish(dist.all_gather(all_own, own, group=self._group, async_op=True), own, *all_own)
        holders: dict[bytes, list[int]] = {}
        for rank, theirs in zip(self.members, all_own, strict=True):
            holders.setdefault(bytes(theirs.tolist()), []).append(rank)
        out: list[tuple[list[tuple[int, int]], bytes]] = []
        for key, ranks in holders.items():
            if ranks[0] == self.members[0]:
                data = history
            elif self.is_first:
                buffer = torch.empty(int.from_bytes(key[32:], "little"), dtype=torch.uint8, device=self._device())
                self._finish(dist.irecv(buffer, src=ranks[0], group=self._group), buffer)
                data = buffer.cpu().numpy().tobytes()
            elif self.rank == ranks[0]:
                buffer = torch.frombuffer(bytearray(history), dtype=torch.uint8).to(self._device())
                self._finish(dist.isend(buffer, dst=self.members[0], group=self._group), buffer)
                continue
            else:
                continue
            out.append(([(rank, rank) for rank in ranks], data))
        return out if self.is_first else []

    def tell_written(self, is_written: bool) -> None:
        """The first rank says whether the capture is on disk, and stays until the others know: it may host the store."""
        self._store.set("written", "yes" if is_written else "no")
        with contextlib.suppress(RuntimeError):
            self._store.wait(["known"], EXIT_TIMEOUT)

    def is_written(self) -> bool:
        """Whether the first rank wrote the capture, so that shards may go; waits for it, within bounds."""
        try:
            self._store.wait(["written"], EXIT_TIMEOUT)
            is_written = bool(self._store.get("written") == b"yes")
        except RuntimeError:
            return False
        with contextlib.suppress(RuntimeError):
            if self._store.add("knowing", 1) == self.world_size - 1:
                self._store.set("known", "yes")
        return is_written

    def lockstep(self, timeout: timedelta) -> Lockstep:
        """For comparisons before each pass; on the CPU and in a group of its own, so that the order of the training's
        collectives is as it was."""

        def make_group() -> Callable[[torch.Tensor], Any]:
            group = _gloo_group(self.members, timeout)
            return lambda words: dist.all_reduce(words, group=group, async_op=True)

        return Lockstep(self.members, self.rank, self._store, timeout, make_group)

    def _device(self) -> torch.device:
        types = {device.type for device in self._group._device_types}
        if "cpu" in types or not types:
            return torch.device("cpu")
        accelerator = types.pop()
        return torch.device(accelerator, getattr(torch, accelerator).current_device())

    def _finish(self, work: Any, *tensors: torch.Tensor) -> None:
        if work is not None:
            work.wait(EXIT_TIMEOUT)
        del work
        # A thread of gloo lets go of the tensors a moment later, for which it needs the interpreter. Were that gone by then,
        # as the job ends here, the process would die of it ("terminate called without an active exception").
        until = time.monotonic() + 1
        while any(getattr(t, "_use_count", int)() > 1 for t in tensors) and time.monotonic() < until:
            time.sleep(0.001)


class RoundsOver(Exception):
    """Some rank did not come to a round, or a transfer failed: there will be no further round. Says why."""


class Rounds:
    """Comparisons between all ranks, one after the other, while they train.

    A rank enters a collective only when all have come to the round, so none waits there for one that takes another way; and
    in a group of its own, so that the order of the training's collectives is as it was. A rank that does not come, within
    `ROUND_TIMEOUT`, ends the rounds for all.
    """

    def __init__(self, members: list[int], rank: int, store: Any) -> None:
        self._members = members
        self._rank = rank
        self._number = 0
        self._group: Any = None
        try:
            # With a connection of its own: whoever waits on a shared one keeps the process's other threads from it.
            self._store = store.clone()
        except (AttributeError, RuntimeError, NotImplementedError):
            self._store = store

    def is_same(self, digest: str) -> bool:
        """Begins a round: whether all ranks came to it with the same digest. The same answer on all.

        Raises:
            RoundsOver: not all came.
        """
        outcome = _bounded(lambda: self._compare(digest), ROUND_TIMEOUT, f"over {self._rank} the store does not answer")
        self._number += 1
        if outcome.startswith("over "):
            _, rank, reason = outcome.split(" ", 2)
            raise RoundsOver(f"rank {rank}: {reason}")
        return outcome == "same"

    def _compare(self, digest: str) -> str:
        store, key = self._store, f"round/{self._number}/"
        if store.compare_set(key + "digest", "", digest).decode() != digest:
            store.add(key + "differing", 1)
        if store.add(key + "arrived", 1) == len(self._members):
            outcome = self._decide("differ" if store.add(key + "differing", 0) else "same")
            self._forget(self._number - 1)  # which everybody has heard the outcome of
            return outcome
        with contextlib.suppress(RuntimeError):  # timed out
            store.wait([key + "outcome"], ROUND_TIMEOUT)
        return self._decide(f"over {self._rank} waited {ROUND_TIMEOUT.total_seconds():g} s for the others")

    def _decide(self, outcome: str) -> str:
        return str(self._store.compare_set(f"round/{self._number}/outcome", "", outcome).decode())

    def _forget(self, number: int) -> None:
        with contextlib.suppress(RuntimeError, NotImplementedError):
            for key in ("digest", "differing", "arrived", "outcome") if number >= 0 else ():
                self._store.delete_key(f"round/{number}/{key}")

    def leave(self) -> None:
        """Says that this rank comes to no further round, so that no other waits for it."""
        reason = f"over {self._rank} left the block, or stopped comparing"
        _bounded(lambda: self._decide(reason), min(ROUND_TIMEOUT, timedelta(seconds=5)), "")

    def may_speak(self) -> bool:
        """Whether it is this rank that tells the user, so that not all do: that which asks first."""
        return _bounded(lambda: str(self._store.add("round/spoken", 1)), ROUND_TIMEOUT, "1") == "1"

    def is_equal(self, words: torch.Tensor) -> torch.Tensor:
        """Where a vector of int64, of the same length on all ranks, is the same on all; one SUM all-reduce.

        For use in a round in which ranks differ. See `Ranks.is_same_everywhere` for how it is told.

        Raises:
            RoundsOver: the transfer failed.
        """
        chunks = torch.stack([words >> shift & 0xFFFF for shift in (0, 16, 32, 48)])
        summed = torch.stack([chunks, chunks * chunks])
        self._transfer(lambda group: dist.all_reduce(summed, group=group, async_op=True))
        sums, squares = summed
        is_equal: torch.Tensor = len(self._members) * squares == sums * sums
        return is_equal.all(dim=0)

    def gather(self, words: torch.Tensor) -> dict[int, torch.Tensor]:
        """Rank → its vector of int64, of the same length on all. Raises RoundsOver if the transfer fails."""
        out = [torch.empty_like(words) for _ in self._members]
        self._transfer(lambda group: dist.all_gather(out, words, group=group, async_op=True))
        return dict(zip(self._members, out, strict=True))

    def _transfer(self, begin: Callable[[Any], Any]) -> None:
        try:
            if self._group is None:
                self._group = _gloo_group(self._members, ROUND_TIMEOUT)
            begin(self._group).wait(ROUND_TIMEOUT)
        except (RuntimeError, ValueError) as error:
            self.leave()
            raise RoundsOver(f"a transfer failed ({str(error).splitlines()[0][:200]})") from error


def _store(key: str) -> Any:
    """Part of the job's store. One that outlives a restart still has what the attempt before wrote."""
    store = dist.distributed_c10d._get_default_store()
    return dist.PrefixStore(f"ddpcov/{attempts.number() or 0}/{key}", store)  # type: ignore[attr-defined]


def _gloo_group(members: list[int], timeout: timedelta) -> Any:
    return dist.new_group(members, timeout=timeout, backend="gloo", use_local_synchronization=True)


def _bounded(talk: Callable[[], str], timeout: timedelta | None = None, otherwise: str = "apart") -> str:
    """What was agreed on; `otherwise` if the process that hosts the store is gone, or does not answer.

    Torch limits some calls to the store in no way: to a host that is frozen, not dead, they would wait for good.
    """
    answers: list[str] = []

    def run() -> None:
        with contextlib.suppress(RuntimeError):
            answers.append(talk())

    thread = threading.Thread(target=run, name="ddpcov-ranks", daemon=True)
    thread.start()
    thread.join(1.1 * (timeout or EXIT_TIMEOUT).total_seconds())
    return answers[0] if answers else otherwise


def meet() -> None:
    """Waits, within bounds, until every rank of the job is here: what one rank's exit would break, none needs any more."""
    if not (dist.is_available() and dist.is_initialized()):
        return
    store = _store("meet")

    def come() -> str:
        if store.add("arrived", 1) == dist.get_world_size():
            store.set("all", "here")
        with contextlib.suppress(RuntimeError):  # timed out
            store.wait(["all"], _MEETING_TIMEOUT)
        return ""

    _bounded(come, _MEETING_TIMEOUT, "")
    if dist.get_rank() == 0:
        time.sleep(0.3)  # it may host the store, from which the others still hear


def pack_counts(analysis: _core.Analysis) -> list[int]:
    """A word for each parameter of a single rank: whether it was ever covered, always covered, ever missed, ever trainable;
    as counters of 16 bits, which 65,535 ranks can sum up."""
    words = [0] * len(analysis.parameters)
    for profile in analysis.profiles:
        kinds = profile["lanes"][0]
        covered, missed = "covered" in kinds, "missed" in kinds
        word = covered | (covered and not missed) << 16 | missed << 32 | profile["trainable"] << 48
        for param_id in profile["parameters"]:
            words[param_id] = word
    return words


def check_sums(analysis: _core.Analysis, sums: list[int]) -> None:
    """Holds a merged capture against the all-reduced counts; a difference would be a bug, and must not reach a report."""
    num_ranks = [sum(last - first + 1 for first, last in lane["ranks"]) for lane in analysis.lanes]
    for profile in analysis.profiles:
        ever = sum(num_ranks[i] for i, kinds in profile["lanes"].items() if "covered" in kinds)
        missed = sum(num_ranks[i] for i, kinds in profile["lanes"].items() if "missed" in kinds)
        for param_id in profile["parameters"]:
            word = sums[param_id]
            if (word & 0xFFFF, word >> 32 & 0xFFFF) != (ever, missed):
                name = analysis.parameters[param_id][0]
                raise _core.MergeError(f"{name}: ranks counted {word:#x}, their histories say {ever} covered, {missed} missed")
