"""`ddpcov demo`."""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
import tempfile
import textwrap
from pathlib import Path

from ddpcov.reading import read
from ddpcov.reporters import FORMATS, Options

__all__ = ["Demo"]

_JOB = Path(__file__).with_name("demo_job.py")
_NUM_RANKS = 2
_TIMEOUT = 120


class Demo:
    """Train a model with the famous defect on two real ranks, and look at it twice: with DDP's eyes and with ddpcov's.

    The model keeps a backbone whole, classifier head included, and never calls that head.
    """

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        """Declares the arguments."""
        parser.add_argument("--out", type=Path, metavar="FILE", help="keep the recorded run under this name")

    def run(self, args: argparse.Namespace) -> int:
        """Starts the ranks, shows the error that DDP gives, then the report of the same run."""
        with tempfile.TemporaryDirectory() as folder:
            out = args.out or Path(folder, "run.bin")
            print(f"Two ranks train this model under DistributedDataParallel:\n\n{_source()}")
            errors = _train(Path(folder), out)
            print("What DDP says at the second step, on every rank:\n")
            for line in errors:
                print(textwrap.fill(line, 100, initial_indent="    ", subsequent_indent="    "))
            print(f"\nWhat `python -m ddpcov report {out.name}` says of the same run:\n", flush=True)
            FORMATS["text"](Options()).render(read(out), sys.stdout)
        return 0


def _train(folder: Path, out: Path) -> list[str]:
    """Runs the job; returns the error of the first rank, without its traceback."""
    script = shutil.copy(_JOB, folder)
    command = [sys.executable, Path(script).name, str(folder / "store"), str(_NUM_RANKS), str(out.absolute())]
    logs = [folder / f"rank{rank}.log" for rank in range(_NUM_RANKS)]
    processes = []
    for rank, log in enumerate(logs):
        with log.open("wb") as stream:
            processes.append(subprocess.Popen([*command, str(rank)], cwd=folder, stdout=stream, stderr=subprocess.STDOUT))
    try:
        for process in processes:
            process.wait(_TIMEOUT)
    except subprocess.TimeoutExpired:
        pass
    finally:
        for process in processes:
            process.kill()
            process.wait()
    lines = [line.removeprefix("[rank0]: ") for line in logs[0].read_text(errors="replace").splitlines()]
    begins = [i for i, line in enumerate(lines) if line.startswith("RuntimeError: ")]
    end = next((i for i, line in enumerate(lines) if line.startswith("ddpcov: on rank")), len(lines))
    return lines[begins[0] : end] if begins else lines


def _source() -> str:
    """The model, as it stands in the job's source between two marks."""
    text = _JOB.read_text()
    return "\n".join(f"    {line}".rstrip() for line in text.split("# ---\n")[1].strip().splitlines()) + "\n"
