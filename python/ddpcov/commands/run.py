"""`ddpcov run`."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

from ddpcov import Error
from ddpcov.commands.script import UsageError, add_arguments, command_of, corrections_of, out_of, positive
from ddpcov.launch.collect import collect, never_covered
from ddpcov.launch.plan import Plan
from ddpcov.launch.supervisor import Outcome, die_like, launch, planned
from ddpcov.reading import read
from ddpcov.reporters import FORMATS, Options

__all__ = ["Run"]


class Run:
    """Track an unmodified training script, and report on stderr when it has ended.

    Every process that it starts is reached: ranks of mp.spawn, torchrun and accelerate, children by fork, forkserver and
    spawn. Every DDP model is tracked, or, where there is none, each module that is called in training mode. stdout, exit code
    and signals stay the script's; only where nothing to track was seen, an exit code of 0 becomes 1.
    """

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        """Declares the arguments."""
        add_arguments(parser)
        parser.add_argument("--stop-after", type=positive, metavar="N", help="end after N steps, with exit code 0")
        parser.add_argument(
            "--apply",
            action="append",
            default=[],
            metavar="CORRECTION",
            help="freeze (what never got a gradient in the run at --out), find-unused, static-graph, no-flags, or a Python file"
            " that defines correct(model), called before the model is wrapped",
        )
        parser.add_argument(
            "--values", type=positive, metavar="N", help="every N steps, look for zero and non-finite gradients"
        )
        parser.add_argument("--sync-check", type=positive, metavar="N", help="every N steps, compare gradients across ranks")
        parser.add_argument(
            "--guard", action="store_true", help="raise ddpcov.RankDivergence on every rank where DDP or FSDP2 would hang"
        )
        parser.add_argument(
            "--stall-after",
            type=positive,
            default=60,
            metavar="S",
            help="say what a backward pass waits for once it is open for S seconds; the guard's patience, too (default: 60)",
        )
        parser.add_argument("--diagnose", choices=("auto", "always", "off"), default="auto", help="when to trace for causes")

    def run(self, args: argparse.Namespace) -> int:
        """Runs the script; returns its exit code."""
        command, corrections, out = command_of(args.script), corrections_of(args.apply), out_of(args.out)
        options = {name: getattr(args, name) for name in ("values", "sync_check", "diagnose", "guard", "stall_after")}
        freeze = _names_to_freeze(out) if "freeze" in corrections else {}
        fields = {"stop_after": args.stop_after, "corrections": corrections, "freeze": freeze, "options": options}
        with planned(out, **fields) as plan:
            try:
                outcome = launch(command, plan)
            except OSError as error:
                raise UsageError(f"{command[0]}: {error.strerror or error}") from None
            _say_unreached(outcome)
            try:
                _report(outcome, plan)
            except (Error, OSError) as error:  # the folder may be gone; the exit code is the script's all the same
                print(f"ddpcov run: {error}", file=sys.stderr)
                outcome.code = outcome.code or 1
        return die_like(outcome.code if outcome.code or outcome.parts else 1)


def _say_unreached(outcome: Outcome) -> None:
    for one in outcome.unreached:
        print(f"ddpcov: a process that uses torch was not reached, and is not part of the report: {one}", file=sys.stderr)


def _report(outcome: Outcome, plan: Plan) -> None:
    if not outcome.parts:
        if not plan.copy:  # else the first of the copies says it
            print(_nothing_seen(outcome), file=sys.stderr)
        return
    # Of several launches that make one job, the one with the first rank tells.
    if any(part.members[0] in part.ranks for part in outcome.parts.values()):
        first = min(outcome.parts, key=lambda path: path != plan.file_of(1, outcome.parts[path]))
        report = collect(outcome, first)
        print(file=sys.stderr)
        FORMATS["text"](Options()).render(report, sys.stderr)
        print(f"`python -m ddpcov report {os.path.relpath(first)}` shows it again, with --all in full.", file=sys.stderr)


def _nothing_seen(outcome: Outcome) -> str:
    why = (
        "no DistributedDataParallel was built, and no module with trainable parameters was called in training mode with"
        " gradients on (calls inside a compiled function are not seen)"
        if outcome.saw_torch
        else "no process imported torch"
    )
    return (
        f"ddpcov: DDC504 nothing-recorded: nothing to track was seen: {why}. This says nothing about the model; did the script"
        " find its devices and data, and get as far as training?"
    )


def _names_to_freeze(out: Path) -> dict[str, list[str]]:
    hint = "run without --apply first, or use `python -m ddpcov verify`"
    try:
        report = read(out)
    except FileNotFoundError:
        raise UsageError(f"--apply freeze: no run at {out} says what never gets a gradient; {hint}") from None
    names = never_covered([report, *report.others])
    if not names:
        raise UsageError(
            f"--apply freeze: the run at {out} has no DDP model where some parameters got a gradient and others never; {hint}"
        )
    return names
