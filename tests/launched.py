"""Runs commands as a user's shell would, and reads what a launch left."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ddpcov

__all__ = ["SCRIPTS", "TORCHRUN", "Ended", "free_port", "run", "start", "wait_for"]

SCRIPTS = Path(__file__).with_name("scripts")
TORCHRUN = ["-m", "torch.distributed.run", "--nproc-per-node=2", "--rdzv-backend=c10d", "--rdzv-endpoint=127.0.0.1:0"]


@dataclass(frozen=True)
class Ended:
    """How a command ended; negative codes are signals."""

    code: int
    stdout: str
    stderr: str
    folder: Path

    @property
    def report(self) -> ddpcov.Report:
        """The report of the capture, or of the shards, that it left."""
        return ddpcov.read(self.folder / "run.bin")

    @property
    def said(self) -> list[str]:
        """What ddpcov said on stderr, beside the report."""
        return [line for line in self.stderr.splitlines() if line.startswith("ddpcov")]


def run(folder: Path, *arguments: str | Path, time_limit: float = 150, **options: Any) -> Ended:
    """Runs `python ARGUMENTS` in that folder. Whatever it does, it is over after the time limit."""
    process = start(folder, *arguments, **options)
    try:
        stdout, stderr = process.communicate(options.get("input"), timeout=time_limit)
    finally:
        process.kill()
    return Ended(process.returncode, stdout, stderr, folder)


def start(folder: Path, *arguments: str | Path, env: dict[str, str] | None = None, **_: Any) -> subprocess.Popen[str]:
    """Starts it."""
    return subprocess.Popen(
        [sys.executable, *map(os.fspath, arguments)],
        cwd=folder,
        env={**os.environ, **(env or {})},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def wait_for(condition: Callable[[], Any], seconds: float = 60) -> None:
    """Returns when it holds."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not come"
        time.sleep(0.02)


def free_port() -> int:
    """A port that nobody listens on now."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])
