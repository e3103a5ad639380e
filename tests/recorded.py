"""Shards and captures for tests of reading, made by the recorder itself, without torch."""

from __future__ import annotations

import struct
import zlib
from pathlib import Path

from ddpcov import _core

__all__ = ["capture", "header", "shard"]


def shard(
    path: Path | None,
    rank: int = 0,
    *,
    world_size: int = 2,
    started: int = 1,
    names: tuple[str, ...] = ("a.weight", "b.weight"),
    end: str | None = "clean",
    in_pass: bool = False,
) -> _core.Recorder:
    """One rank of a run of two steps in which the first parameter alone gets its gradients; `started` tells runs apart."""
    ranks = [(0, world_size - 1)]
    recorder = _core.Recorder(path, started=started, nonce=started, ranks=ranks, rank=rank, optimizer_given=False)
    recorder.define(0, [(name, [], [3, 3], "float32", 4, "torch.nn.Linear") for name in names])
    ids = list(range(len(names)))
    recorder.set_situation(
        registered=ids,
        trainable=ids,
        awaited=[],
        wrapped=[],
        ignored=[],
        optimized=[],
        num_orphans=0,
        has_wrapper=False,
    )
    for _ in range(2):
        recorder.begin_pass()
        slot = recorder.slot(0)
        slot("a gradient")
        slot.accumulated("the parameter")
        recorder.close_pass(0)
        recorder.close_step()
    if in_pass:
        recorder.begin_pass()
    if end is not None:
        recorder.finish(end)
    return recorder


def capture(path: Path, *, started: int = 1, world_size: int = 2, names: tuple[str, ...] = ("a.weight", "b.weight")) -> bytes:
    """Writes the merged run, and returns its bytes."""
    recorder = shard(None, world_size=world_size, started=started, names=names)
    data = recorder.merge([([(0, world_size - 1)], recorder.history())]).encode()
    path.write_bytes(data)
    return data


def header(version: int) -> bytes:
    """The first bytes of a capture of that format version."""
    start = b"\x89DDPCOV\n" + struct.pack("<III", version, 2, 0)
    return start + struct.pack("<I", zlib.crc32(start))
