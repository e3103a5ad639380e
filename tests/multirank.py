"""Runs a function on several ranks: real processes, real gloo, the store at rank 0 as under `mp.spawn`.

Each rank is forked from a process that has torch loaded and nothing else done, so starting them takes a moment only. They
end through `os._exit`: gloo's worker threads never see an interpreter go down, which now and then aborts it.
"""

from __future__ import annotations

import multiprocessing
import os
import pickle
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import reference
from ddpcov import gears

__all__ = ["Rank", "count_collectives", "run_ranks"]

_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(["torch.distributed", "torch._dynamo", "pytest", "ddpcov.tracker"])


@dataclass(frozen=True)
class Rank:
    """How a rank ended."""

    code: int | None
    """Its exit code; negative: the signal that ended it; None: it still ran when the time was up, and was killed."""
    stderr: str
    returned: bytes | None

    @property
    def result(self) -> Any:
        """What the function returned."""
        assert self.code == 0 and self.returned is not None, f"exit code {self.code}\n{self.stderr}"
        return pickle.loads(self.returned)

    @property
    def said(self) -> list[str]:
        """What ddpcov said on stderr."""
        return [line for line in self.stderr.splitlines() if line.startswith("ddpcov")]


def run_ranks(
    function: Callable[..., Any],
    world_size: int = 2,
    args: Sequence[Any] = (),
    *,
    folder: Path,
    time_limit: float = 60,
    timeout: timedelta = timedelta(seconds=20),
) -> list[Rank]:
    """Calls `function(rank, *args)`, which a module can be asked for by name, on `world_size` ranks with `folder` as the
    current one. They are killed after `time_limit` seconds; `timeout` is that of their process group."""
    with tempfile.TemporaryDirectory() as private:
        files = [Path(private, str(rank)) for rank in range(world_size)]
        ranks = [
            _context.Process(
                target=_run_rank,
                args=(function, rank, world_size, args, folder, file, timeout, gears.SETTLE, reference.AT_NODES),
                daemon=True,
            )
            for rank, file in enumerate(files)
        ]
        for rank in ranks:
            rank.start()
        deadline = time.monotonic() + time_limit
        for rank in ranks:
            rank.join(max(0.0, deadline - time.monotonic()))
        codes = [rank.exitcode for rank in ranks]
        for rank in ranks:
            rank.kill()
            rank.join()
        return [Rank(code, *_left_by(file)) for code, file in zip(codes, files, strict=True)]


def count_collectives() -> list[str]:
    """The names of the collectives and transfers that Python code in this process calls from now on."""
    called: list[str] = []

    def counting(name: str, original: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            called.append(name)
            return original(*args, **kwargs)

        return call

    for name in ("all_reduce", "all_gather", "isend", "irecv"):
        setattr(dist, name, counting(name, getattr(dist, name)))
    return called


def _left_by(file: Path) -> tuple[str, bytes | None]:
    stderr, returned = file.with_suffix(".stderr"), file.with_suffix(".returned")
    return (
        stderr.read_text(errors="replace") if stderr.exists() else "",
        returned.read_bytes() if returned.exists() else None,
    )


def _run_rank(
    function: Callable[..., Any],
    rank: int,
    world_size: int,
    args: Sequence[Any],
    folder: Path,
    file: Path,
    timeout: timedelta,
    settle: int,
    at_nodes: bool,
) -> None:
    gears.SETTLE, reference.AT_NODES = settle, at_nodes
    gears.MAX_MISSED = 1.0 if at_nodes else gears.MAX_MISSED
    with file.with_suffix(".stderr").open("w") as stderr:
        os.dup2(stderr.fileno(), 2)
    sys.stderr = os.fdopen(2, "w", buffering=1, closefd=False)
    os.chdir(folder)
    torch.set_num_threads(1)
    torch.manual_seed(0)
    store = _store(rank, file.with_name("port"))
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size, timeout=timeout)
    returned = function(rank, *args)
    if dist.is_initialized():
        dist.destroy_process_group()
    file.with_suffix(".returned").write_bytes(pickle.dumps(returned))


def _store(rank: int, port: Path) -> dist.Store:
    if rank == 0:
        store = dist.TCPStore("127.0.0.1", 0, is_master=True)
        beside = port.with_suffix(".new")
        beside.write_text(str(store.port))
        beside.rename(port)
        return store
    while not port.exists():
        time.sleep(0.005)
    return dist.TCPStore("127.0.0.1", int(port.read_text()), is_master=False)
