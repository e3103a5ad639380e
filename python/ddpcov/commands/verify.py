"""`ddpcov verify`."""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from ddpcov.commands.script import UsageError, add_arguments, command_of, out_of, positive
from ddpcov.launch.attempt import Attempt, attempt, compare
from ddpcov.launch.collect import never_covered
from ddpcov.report import Report
from ddpcov.reporters import FORMATS, Options

__all__ = ["Verify"]

_NUM_LOG_LINES = 12
_MEANS = {
    "freeze": "Freeze before wrapping; checkpoints of model and optimizer stay loadable, and DDP reduces less.",
    "find-unused": "Pass find_unused_parameters=True to DDP; it then searches the graph in every step, and hides the next"
    " such defect.",
    "static-graph": "Pass static_graph=True to DDP; right only as long as each rank's set never changes.",
    "no-flags": "Pass neither find_unused_parameters nor static_graph; DDP then searches no graph, and the next such defect"
    " shows.",
}


class Verify:
    """Run a script as it is, then with each correction that the advice names, for a few steps each, and compare.

    Prints cause, corrections and evidence on one page. The script's own output is shown only where it failed with a
    correction. Exit code 0 if there is nothing to correct or a correction is verified, else 1.
    """

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        """Declares the arguments."""
        add_arguments(parser)
        parser.add_argument("--steps", type=positive, default=8, metavar="N", help="steps of each run (default: 8)")
        parser.add_argument(
            "--timeout",
            type=positive,
            default=300,
            metavar="S",
            help="a run hangs if no step ends for S seconds (default: 300)",
        )

    def run(self, args: argparse.Namespace) -> int:
        """Runs the script several times."""
        command, out = command_of(args.script), out_of(args.out)
        with tempfile.TemporaryDirectory() as folder:
            bench = _Bench(command, Path(folder), args.steps, args.timeout)
            as_is = bench.run_as_is(out)
            if as_is.report is None:
                _show_log(as_is)
                print(
                    "ddpcov: DDC504 nothing-recorded: nothing to track was seen, so nothing can be verified.", file=sys.stderr
                )
                return 1
            FORMATS["text"](Options()).render(as_is.report, sys.stdout)
            tried = list(bench.correct(as_is))
            return _conclude(as_is, tried, bench)


class _Bench:
    """Runs one script, again and again."""

    def __init__(self, command: list[str], folder: Path, num_steps: int, patience: float) -> None:
        self._command = command
        self._folder = folder
        self._num_steps = num_steps
        self._patience = patience
        self._num_runs = 0

    def run_as_is(self, out: Path) -> Attempt:
        """The run that shows what is wrong; its capture stays."""
        print(f"ddpcov: running as it is, for {self._num_steps} steps", file=sys.stderr)
        try:
            return attempt(self._command, out=out, num_steps=self._num_steps, patience=self._patience, diagnose="auto")
        except OSError as error:
            raise UsageError(f"{self._command[0]}: {error.strerror or error}") from None

    def run(self, corrections: tuple[str, ...], freeze: dict[str, list[str]]) -> Attempt:
        """A run with corrections, of which nothing stays."""
        print(f"ddpcov: running with {_name(corrections)}", file=sys.stderr)
        self._num_runs += 1
        return attempt(
            self._command,
            out=self._folder / f"{self._num_runs}.bin",
            num_steps=self._num_steps,
            patience=self._patience,
            corrections=corrections,
            freeze=freeze,
        )

    def correct(self, as_is: Attempt) -> Iterator[Attempt]:
        """Runs with each correction that the advice names, and with those that earlier ones suggest."""
        freeze = never_covered(r for r in as_is.reports if r.run.wrapper.kind == "ddp")
        planned = _suggested(as_is.reports, has_constant=bool(freeze))
        for corrections in planned:
            done = self.run(corrections, freeze)
            yield done
            for more in _suggested_after(done):
                if more not in planned:
                    planned.append(more)


def _suggested(reports: list[Report], *, has_constant: bool) -> list[tuple[str, ...]]:
    ddps = [r for r in reports if r.run.wrapper.kind == "ddp"]
    advised = {r.advice.find_unused_parameters for r in ddps}
    if not ddps or "cannot-help" in advised:
        return []
    is_on = any(r.run.wrapper.find_unused_parameters or r.run.wrapper.static_graph for r in ddps)
    out: list[tuple[str, ...]] = []
    if has_constant and "on" not in advised:
        out += [("freeze", "no-flags")] if is_on else [("freeze",), ("find-unused",)]
    elif "on" in advised and not all(r.run.wrapper.find_unused_parameters for r in ddps):
        out.append(("find-unused",))
    elif any(f.code == "DDC307" for r in ddps for f in r.findings):
        out.append(("no-flags",))
    return out


def _suggested_after(done: Attempt) -> Iterator[tuple[str, ...]]:
    """More steps were seen than in the run as it is, which may have ended in the second."""
    ddps = [r for r in done.reports if r.run.wrapper.kind == "ddp"]
    if done.corrections == ("find-unused",) and done.is_verified and all(map(_is_constant, ddps)):
        yield ("static-graph",)
    if done.corrections == ("freeze",) and any(r.advice.find_unused_parameters == "on" for r in ddps):
        yield ("freeze", "find-unused")


def _is_constant(report: Report) -> bool:
    """Whether each rank missed the same parameters in every step."""
    whole = ((0, report.run.steps - 1),)
    return all(steps == whole for p in report.parameters for steps in p.missed.values())


def _conclude(as_is: Attempt, tried: list[Attempt], bench: _Bench) -> int:
    verified = [one for one in tried if one.is_verified]
    is_fine = as_is.is_verified and not any(f.severity != "info" for r in as_is.reports for f in r.findings)
    if not tried:
        print()
        if is_fine:
            print(f"Nothing to correct ({_ended(as_is)}).")
            return 0
        print("No correction can be applied from outside; what the findings say has to be mended in the code.")
        return 1
    reference = verified[0] if verified else None
    is_repeatable = True
    apart = [one for one in verified[1:] if reference is not None and not _is_equal(reference, one)]
    if apart and reference is not None:
        again = bench.run(reference.corrections, _frozen(reference))
        is_repeatable = _is_equal(reference, again)
    _show(as_is, tried, reference, is_repeatable=is_repeatable)
    for one in tried:
        if not one.is_verified:
            _show_log(one)
    return 0 if verified else 1


def _frozen(one: Attempt) -> dict[str, list[str]]:
    launches = [r.run.launch for r in one.reports if r.run.launch is not None]
    return {str(launch.order): list(launch.freeze) for launch in launches}


def _is_equal(one: Attempt, other: Attempt) -> bool:
    difference = compare(one, other)
    return difference is not None and difference.is_equal


def _show(as_is: Attempt, tried: list[Attempt], reference: Attempt | None, *, is_repeatable: bool) -> None:
    from rich import box
    from rich.console import Console
    from rich.table import Table

    table = Table(box=box.SIMPLE, title="Corrections, applied from outside to the unmodified script", title_justify="left")
    for column in ("correction", "ended", "missed", "ranks equal", "trajectory", "step time", "verified"):
        table.add_column(column, overflow="fold")
    for one in (as_is, *tried):
        table.add_row(
            _name(one.corrections),
            _ended(one),
            f"{sum(r.totals.missed for r in one.reports)} of {sum(r.totals.trainable for r in one.reports)}",
            {True: "yes", False: "no", None: "–"}[one.are_ranks_equal],
            _trajectory(one, reference, is_repeatable=is_repeatable),
            _step_time(one),
            "" if one is as_is else "yes" if one.is_verified else "no",
        )
    console = Console(width=None if sys.stdout.isatty() else 100, highlight=False, emoji=False, markup=False)
    console.print()
    console.print(table)
    for one in tried:
        if one.is_verified:
            for name in one.corrections:
                console.print(f"{name}: {_MEANS[name]}")
    if not is_repeatable:
        console.print("Two runs with the same correction differ as well: the script draws other numbers each time.")


def _name(corrections: tuple[str, ...]) -> str:
    return " + ".join(corrections) or "as it is"


def _ended(one: Attempt) -> str:
    steps = f"{one.num_steps} step{'s' if one.num_steps != 1 else ''}"
    if one.was_stalled:
        return f"hung after {steps}"
    if one.code == 0:
        return f"exit code 0, {steps}"
    raised = sorted({end.removeprefix("exception: ").partition(":")[0] for r in one.reports for end in r.run.end.values()})
    raised = [name for name in raised if name not in ("clean", "killed")]
    return f"{', '.join(raised) or f'exit code {one.code}'} in step {one.num_steps + (1 if raised else 0)}"


def _step_time(one: Attempt) -> str:
    if one.step_seconds is None:
        return "–"
    return f"{one.step_seconds:.2f} s" if one.step_seconds >= 1 else f"{1000 * one.step_seconds:.3g} ms"


def _trajectory(one: Attempt, reference: Attempt | None, *, is_repeatable: bool) -> str:
    if reference is None:
        return "–"
    if one is reference:
        return "reference"
    difference = compare(reference, one)
    if difference is None:
        return "–"
    compared = f"{difference.num_losses} losses" + f", {difference.num_weights} weights" * bool(difference.num_weights)
    if difference.is_exact:
        return f"equal, bit for bit ({compared})"
    if not is_repeatable:
        return "not comparable"
    return f"{'equal but for rounding' if difference.is_equal else 'differs'}, up to {difference.largest:.1g} ({compared})"


def _show_log(one: Attempt) -> None:
    lines = one.log.rstrip().splitlines()[-_NUM_LOG_LINES:]
    print(f"\nThe last lines of the script's output, {_name(one.corrections)}:", file=sys.stderr)
    print("\n".join(f"    {line}" for line in lines), file=sys.stderr)
