"""Processes that die at a random moment, each beside a diary that no death can take: what ddpcov left says the same.

The diary is written by hooks of its own in memory shared with the parent. Of a process that dies between ddpcov's hook on a
gradient and the diary's, one knows one gradient more than the other, and no two differ by more.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import IntEnum
from pathlib import Path

import pytest

import ddpcov
from launched import SCRIPTS

NAMES = [f"{name}.weight" for name in "abcdef"]
NUM_COVERED = 3  # in each pass


class Mark(IntEnum):
    """What stands in a diary beside the number of a parameter, counted from 1."""

    IN_PASS = 0xF1
    STEPPED = 0xF2
    LEAVING = 0xF3
    LEFT = 0xF4


DEATHS = {
    # how: (times, exit code, how a rank that died so in a block may have ended)
    "kill": (300, -signal.SIGKILL, {"killed"}),
    "terminate": (50, -signal.SIGTERM, {"killed"}),
    "bus": (30, -signal.SIGBUS, {"killed"}),
    "segfault": (50, -signal.SIGSEGV, {"killed"}),
    "abort": (50, -signal.SIGABRT, {"killed"}),
    "exit": (50, 3, {"killed"}),
    "interrupt": (50, 99, {"exception: KeyboardInterrupt"}),
}


@dataclass
class Block:
    """What the diary says of one `track` block."""

    steps: list[set[str]] = field(default_factory=list)
    """The covered parameters of each step that the optimizer ended."""
    passes: list[set[str]] = field(default_factory=list)
    """Those of each pass of the step that it did not; the last one may be open still."""
    state: int = 0
    """`LEAVING` or `LEFT`, if it came to that."""


def blocks(diary: bytes) -> list[Block]:
    told = [Block()]
    for code in diary:
        block = told[-1]
        match code:
            case Mark.IN_PASS:
                block.passes.append(set())
            case Mark.STEPPED:
                block.steps.append(set().union(*block.passes))
                block.passes = []
            case Mark.LEAVING | Mark.LEFT:
                block.state = code
                if code == Mark.LEFT:
                    told.append(Block())
            case _:
                block.passes[-1].add(NAMES[code - 1])
    return told


def recorded(report: ddpcov.Report) -> list[set[str]]:
    """The covered parameters of each step."""
    missed = {p.name: p.missed.get(0, ()) for p in report.parameters}
    return [
        {name for name in NAMES if not any(first <= step <= last for first, last in missed[name])}
        for step in range(report.run.steps)
    ]


def as_steps(block: Block, passes: list[set[str]]) -> list[list[set[str]]]:
    """What may be recorded of the block, if those are the passes of its last step."""
    if not passes:
        return [block.steps]
    in_a_step = [*block.steps, set().union(*passes)]
    return [in_a_step] if block.steps else [in_a_step, passes]  # without an optimizer's step each pass is one


def one_off(known: set[str]) -> list[set[str]]:
    return [known ^ change for change in (set(), *({name} for name in NAMES))]


def check(report: ddpcov.Report, block: Block, ends: set[str]) -> None:
    """Holds what ddpcov left of a block against the diary."""
    if block.state == Mark.LEFT:
        ends = {"clean"}
    elif block.state == Mark.LEAVING or not (block.steps or block.passes):
        ends = {*ends, "clean", "killed"}  # it died on the way out, or on the way in
    assert report.run.end[0] in ends
    open_passes = [f for f in report.findings if f.code == "DDC501"]
    may_be = [block.passes]
    if block.passes:
        *ended, last = block.passes
        if open_passes:
            may_be = [[*ended, known] for known in one_off(last)]
            (finding,) = open_passes
            assert set(NAMES) - set(finding.parameters) in one_off(last)
            step = len(block.steps or ended)
            assert finding.steps == ((step, step),)
        elif len(last) < NUM_COVERED:
            assert len(last) <= 1
            may_be = [ended]  # that a pass began ddpcov had yet to hear
    assert any(recorded(report) in as_steps(block, passes) for passes in may_be)


def read(folder: Path) -> Iterator[tuple[Path, ddpcov.Report, Block]]:
    """What ddpcov and the diaries say of each block."""
    for child in sorted(entry for entry in folder.iterdir() if entry.is_dir()):
        for number, block in enumerate(blocks((child / "diary").read_bytes())):
            out = child / f"{number}.bin"
            if (
                block.steps or block.passes or block.state or out.with_name(f"{out.name}.rank0").exists()
            ):  # else it had not begun
                yield child, ddpcov.read(out), block


def die(folder: Path, how: str, times: int, **env: str) -> set[int]:
    """The exit codes, all of them."""
    command = [sys.executable, SCRIPTS / "dies.py", how, str(times), "7"]
    subprocess.run(command, cwd=folder, env={**os.environ, **env}, check=True, timeout=390)
    return {int(code.read_text()) for code in folder.glob("*/code")}


@pytest.mark.timeout(400)
@pytest.mark.parametrize("how", DEATHS)
def test_nothing_is_lost_by_dying(how: str, tmp_path: Path) -> None:
    times, how_it_ends, ends = DEATHS[how]
    assert die(tmp_path, how, times) == {how_it_ends}
    num_steps = num_open = 0
    for _, report, block in read(tmp_path):
        check(report, block, ends)
        num_steps += report.run.steps
        num_open += any(f.code == "DDC501" for f in report.findings)
    assert num_steps > times
    assert how != "kill" or num_open > times / 20  # deaths inside a pass


def test_killed_for_memory(tmp_path: Path) -> None:
    group = Path(f"/sys/fs/cgroup/memory/ddpcov-{os.getpid()}")
    try:
        group.mkdir()
    except OSError as error:
        pytest.skip(f"no memory group can be made here: {error}")
    try:
        (group / "memory.limit_in_bytes").write_text(str(64 << 20))
        assert die(tmp_path, "eat", 10, DIES_IN_CGROUP=str(group)) == {-signal.SIGKILL}
    finally:
        group.rmdir()
    for _, report, block in read(tmp_path):
        check(report, block, {"killed"})


def test_no_memory_left(tmp_path: Path) -> None:
    """Under a limit of the process's own every allocation fails, ddpcov's too. Rust aborts where it gets no memory."""
    assert die(tmp_path, "dry", 40) <= {99, -signal.SIGABRT}
    for child, report, block in read(tmp_path):
        finished = recorded(report)[: len(block.steps)]
        assert finished == block.steps[: len(finished)]
        assert len(finished) == len(block.steps) or "recording stopped, training goes on" in (child / "stderr").read_text()
