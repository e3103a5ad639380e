"""Ranks compare a word or two before each pass: one SUM all-reduce of nine integers.

A rank that does not come is found out: it may have left, stopped comparing, died, or simply not have come in time.
"""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch

__all__ = ["Absent", "Lockstep", "Over"]

_SLICE = timedelta(seconds=1)
"""How often a rank that waits looks whether the others still come."""
_GRACE_SECONDS = 2.0
"""How far apart ranks may notice that one is missing: more than a slice."""
_NUM_CHUNKS = 4  # 16-bit pieces of a digest


class Over(Exception):
    """Some rank compares no longer, or the comparison failed: there will be no further one. Says why."""


class Absent(Exception):
    """Ranks that did not come, and why as far as it is known."""

    def __init__(self, ranks: Sequence[int], reason: str) -> None:
        super().__init__(reason)
        self.ranks = tuple(ranks)


class Lockstep:
    """Comparisons of all ranks, one after the other; a rank must come to each, or say that it comes to no more.

    `make_group` makes the group that the sums are taken in, and returns what begins one.
    """

    def __init__(
        self,
        members: list[int],
        rank: int,
        store: Any,
        timeout: timedelta,
        make_group: Callable[[], Callable[[torch.Tensor], Any]],
    ) -> None:
        self._members = members
        self._rank = rank
        self._timeout = timeout
        self._make_group = make_group
        self._begin_sum: Callable[[torch.Tensor], Any] | None = None
        self._number = 0
        try:
            self._store = store.clone()  # whoever waits on a shared connection keeps the process's other threads from it
        except (AttributeError, RuntimeError, NotImplementedError):
            self._store = store

    def is_same(self, digest: bytes, *, is_void: bool) -> bool | None:
        """Whether all ranks came with the same digest; None if one of them says that this comparison is void.

        See `Ranks.is_same_everywhere` for how sums tell it.

        Raises:
            Absent: not all came, within the timeout.
            Over: there are no comparisons any more.
        """
        chunks = [int.from_bytes(digest[i : i + 2], "little") for i in range(0, 2 * _NUM_CHUNKS, 2)]
        words = torch.tensor([int(is_void), *chunks, *(c * c for c in chunks)], dtype=torch.int64, device="cpu")
        deadline = time.monotonic() + self._timeout.total_seconds()
        self._number += 1
        try:
            if self._begin_sum is None:
                self._wait_for_all(deadline)
                self._begin_sum = self._make_group()
            work = self._begin_sum(words)
            self._until(lambda: work.wait(_SLICE), work.is_completed, deadline)
        except (RuntimeError, ValueError) as error:
            raise self._what_happened(error) from None
        num_void, *summed = words.tolist()
        if num_void:
            return None
        sums, squares = summed[:_NUM_CHUNKS], summed[_NUM_CHUNKS:]
        return all(len(self._members) * q == s * s for s, q in zip(sums, squares, strict=True))

    def share(self, detail: dict[str, Any], join: Callable[[dict[int, dict[str, Any]]], Any]) -> Any:
        """After a comparison that failed, on all ranks: what the first rank makes of everybody's details, as JSON.

        Raises:
            Over: a rank did not send its detail.
        """
        try:
            self._store.set(self._key(f"of/{self._rank}"), json.dumps(detail))
            if self._rank == self._members[0]:
                keys = {rank: self._key(f"of/{rank}") for rank in self._members}
                self._store.wait(list(keys.values()), self._timeout)
                joined = join({rank: json.loads(self._store.get(key)) for rank, key in keys.items()})
                self._store.set(self._key("joined"), json.dumps(joined))
            self._store.wait([self._key("joined")], self._timeout)
            return json.loads(self._store.get(self._key("joined")))
        except RuntimeError as error:
            raise Over(f"the store does not answer ({_first_line(error)})") from None

    def leave(self, why: str) -> None:
        """Says that this rank comes to no further comparison because it left the block."""
        self._say("left", why)

    def stop(self, why: str) -> None:
        """Says that this rank compares no longer, so that the others do not either, and nobody waits for it."""
        self._say("over", why)

    def may_speak(self, topic: str) -> bool:
        """Whether it is this rank that tells the user, so that not all do: that which asks first."""
        try:
            return bool(self._store.add(f"guard/spoken/{topic}", 1) == 1)
        except RuntimeError:
            return True

    def _key(self, topic: str) -> str:
        return f"guard/{self._number}/{topic}"

    def _say(self, topic: str, why: str) -> None:
        with contextlib.suppress(RuntimeError):
            self._store.set(f"guard/{topic}/{self._rank}", why)
            self._store.set(f"guard/{topic}", str(self._rank))

    def _wait_for_all(self, deadline: float) -> None:
        """To make a group waits for all ranks, whatever became of them; so it begins when every one is known to come."""
        if self._store.add("guard/arrived", 1) == len(self._members):
            self._store.set("guard/open", "")
        self._until(lambda: self._store.wait(["guard/open"], _SLICE), lambda: False, deadline)

    def _until(self, wait: Callable[[], Any], is_completed: Callable[[], bool], deadline: float) -> None:
        """Waits, slice by slice, until it is done, failed, or will not be."""
        while True:
            try:
                wait()
                return
            except RuntimeError:
                if is_completed() or time.monotonic() >= deadline:
                    raise
                is_hopeless = any(self._store.check([key]) for key in ("guard/over", "guard/left", self._key("failed")))
                if is_hopeless and not is_completed():
                    raise

    def _what_happened(self, error: Exception) -> Absent | Over:
        """After a comparison that did not come about. Those that waited say so; the others are the absent ones."""
        try:
            if self._store.check(["guard/over"]):
                rank = int(self._store.get("guard/over"))
                return Over(f"rank {rank}: {self._store.get(f'guard/over/{rank}').decode()}")
            self._store.set(self._key(f"waited/{self._rank}"), "")
            self._store.set(self._key("failed"), "")
            time.sleep(_GRACE_SECONDS)
            absent = [rank for rank in self._members if not self._store.check([self._key(f"waited/{rank}")])]
            if not absent:
                return Over(f"a transfer failed ({_first_line(error)})")
            gone = [rank for rank in absent if self._store.check([f"guard/left/{rank}"])]
        except RuntimeError as lost:  # with the process that hosts it
            others = [rank for rank in self._members if rank != self._rank]
            return Absent(others if len(others) == 1 else [], f"the store does not answer any more ({_first_line(lost)})")
        if gone:
            return Absent(gone, self._store.get(f"guard/left/{gone[0]}").decode())
        if "timed out" in str(error).lower() or "timeout" in str(error).lower():
            return Absent(absent, f"not within {self._timeout.total_seconds():g} s")
        return Absent(absent, f"its connection is lost ({_first_line(error)})")


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [""])[0][:200]
