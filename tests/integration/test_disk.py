"""Disks that take nothing, or no more: training goes on, one line says so, and the report comes from memory.

All of it is real: limits, permissions, mounts in a namespace of the rank's own, a system call that the kernel refuses.
"""

from __future__ import annotations

import ctypes
import os
import platform
import resource
import shutil
import signal
import struct
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

import ddpcov
from multirank import run_ranks
from reference import Both, Net, sgd

NAMES = "abcdefgh"
NUM_STEPS = 199
libc = ctypes.CDLL(None, use_errno=True)


def nothing() -> None:
    pass


def train(before: Callable[[], object] = nothing, when_begun: Callable[[], object] = nothing) -> None:
    """Many patterns, one in each step, under the reference instrument; trouble comes before the block or inside it."""
    model = Net(*NAMES)
    optimizer = sgd(model)
    before()
    with Both(model, out="folder/run.bin") as run:
        when_begun()
        for step in range(1, NUM_STEPS + 1):
            run.train(optimizer, model.loss(*(name for i, name in enumerate(NAMES) if step >> i & 1)))
    run.check(steps=NUM_STEPS, missed=run.ref.missed())


class CannotBeMade(Exception):
    """Here and now, such a trouble."""


# Trouble of a rank with the disk; each returns what the line on stderr has to say.


def full() -> str:
    mount("size=64k")
    with open("folder/others", "wb") as file:
        file.write(bytes(32 << 10))

    def fill() -> None:
        with open("folder/others", "ab", buffering=0) as file:
            try:
                while file.write(bytes(512)):
                    pass
            except OSError:
                pass

    train(when_begun=fill)
    return "No space left on device"


def limited() -> str:
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)

    def limit() -> None:
        size = Path("folder/run.bin.rank0").stat().st_size
        resource.setrlimit(resource.RLIMIT_FSIZE, (size + 1000, before[1]))

    train(when_begun=limit)
    resource.setrlimit(resource.RLIMIT_FSIZE, before)
    return "File too large"


def read_only() -> str:
    mount("ro")
    train()
    return "Read-only file system"


def forbidden() -> str:
    if os.geteuid() == 0:
        os.seteuid(65534)
    else:
        Path("folder").chmod(0o555)
    train()
    os.seteuid(os.getuid())
    return "Permission denied"


def deleted() -> str:
    train(when_begun=lambda: shutil.rmtree("folder"))
    return "No such file or directory"


def never_there() -> str:
    train(lambda: shutil.rmtree("folder"))
    return "No such file or directory"


def a_file() -> str:
    def replace() -> None:
        shutil.rmtree("folder")
        Path("folder").write_text("")

    train(replace)
    return "Not a directory"


def without_mmap() -> str:
    train(refuse_shared_mappings)
    return "No such device"


def without_mmap_later() -> str:
    """The first page is there when the kernel begins to refuse; a model that has grown needs another one."""
    model = Net("a")
    optimizer = sgd(model)
    with Both(model, out="folder/run.bin") as run:
        run.train(optimizer, model.loss("a"))
        refuse_shared_mappings()
        more = Net(*(f"m{i}" for i in range(2000)))
        model.add_module("more", more)
        optimizer.add_param_group({"params": list(more.parameters())})
        for _ in range(3):
            run.train(optimizer, model.loss("a"))
    run.check(steps=4, missed=run.ref.missed())
    return "No such device"


def mount(options: str) -> None:
    """An empty file system over the folder, seen by this process alone."""
    if libc.unshare(0x00020000):  # CLONE_NEWNS
        raise CannotBeMade("this user can mount nothing")
    for command in (["--make-rprivate", "/"], ["-t", "tmpfs", "-o", options, "none", "folder"]):
        subprocess.run(["mount", *command], check=True)


def refuse_shared_mappings() -> None:
    """From here on `mmap` with MAP_SHARED answers ENODEV, as some network file systems do."""
    if platform.machine() != "x86_64":
        raise CannotBeMade("the filter is written for x86-64")
    instructions = [
        (0x20, 0, 0, 0),  # load the number of the call
        (0x15, 0, 3, 9),  # is it mmap?
        (0x20, 0, 0, 40),  # load its flags
        (0x45, 0, 1, 1),  # is MAP_SHARED among them?
        (0x06, 0, 0, 0x00050000 | 19),  # then ENODEV
        (0x06, 0, 0, 0x7FFF0000),  # else go ahead
    ]
    code = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *i) for i in instructions))
    program = ctypes.create_string_buffer(struct.pack("HxxxxxxP", len(instructions), ctypes.addressof(code)))
    assert libc.prctl(38, 1, 0, 0, 0) == 0  # PR_SET_NO_NEW_PRIVS
    assert libc.prctl(22, 2, program) == 0, os.strerror(ctypes.get_errno())  # PR_SET_SECCOMP, with a filter


def in_trouble(rank: int, trouble: Callable[[], str]) -> tuple[str, str]:
    try:
        return trouble(), ""
    except CannotBeMade as error:
        return "", str(error)


TROUBLES = [full, limited, read_only, forbidden, deleted, never_there, a_file, without_mmap, without_mmap_later]


@pytest.mark.parametrize("trouble", TROUBLES)
def test_training_goes_on_and_the_report_is_whole(tmp_path: Path, trouble: Callable[[], str]) -> None:
    (tmp_path / "folder").mkdir()
    (rank,) = run_ranks(in_trouble, 1, args=[trouble], folder=tmp_path)
    expected, why_not = rank.result
    if why_not:
        pytest.skip(why_not)
    (line,) = rank.said
    assert "folder/run.bin" in line
    assert expected in line
    assert "memory" in line
    if trouble is limited:
        report = ddpcov.read(tmp_path / "folder" / "run.bin")  # what fitted: a run that just stops
        assert report.run.end == {0: "killed"}
        assert 0 < report.run.steps < NUM_STEPS


def deleted_under_two_ranks(rank: int) -> Any:
    model = Net("a", "b")
    optimizer = sgd(model)
    with ddpcov.track(model, out="folder/run.bin") as cov:
        dist.barrier()
        if rank == 0:
            shutil.rmtree("folder")
        dist.barrier()
        model.loss("a" if rank == 0 else "b").backward()
        optimizer.step()
    return {p.name: p.missed for p in cov.report().parameters}


def test_ranks_whose_folder_is_gone_still_merge(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    first, second = run_ranks(deleted_under_two_ranks, folder=tmp_path)
    assert first.result == {"a.weight": {1: ((0, 0),)}, "b.weight": {0: ((0, 0),)}}
    assert second.result == {"a.weight": {1: ((0, 0),)}, "b.weight": {}}
    (line,) = first.said
    assert "folder/run.bin: No such file or directory; the report is in memory only" in line
    assert second.said == []
