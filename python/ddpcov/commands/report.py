"""`ddpcov report`."""

from __future__ import annotations

import argparse
import contextlib
import sys
import threading
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from ddpcov.reading import Progress, read
from ddpcov.reporters import FORMATS, Options

__all__ = ["ReportCommand"]

_QUIET_SECONDS = 1.0


class ReportCommand:
    """Show which parameters received no gradient, on which ranks and in which steps.

    RUN is the file given to out=. If the run did not end cleanly, the shards beside it are merged in memory.
    """

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        """Declares the arguments."""
        parser.add_argument("run", metavar="RUN", type=Path)
        parser.add_argument("--format", choices=sorted(FORMATS), default="text")
        parser.add_argument("--output", type=Path, metavar="FILE", help="write there instead of to the terminal")
        parser.add_argument("--all", action="store_true", help="list everything, however long")
        parser.add_argument("--by", choices=("module", "class", "parameter"), default="module", help="how to group")
        parser.add_argument("--depth", type=_positive, metavar="N", help="group by the first N parts of module names")

    def run(self, args: argparse.Namespace) -> int:
        """Reads the run and renders the report."""
        with _progress() as progress:
            report = read(args.run, progress=progress)
        reporter = FORMATS[args.format](Options(show_all=args.all, by=args.by, depth=args.depth))
        if args.output is None:
            reporter.render(report, sys.stdout)
            return 0
        beside = args.output.with_name(args.output.name + ".new")
        try:
            with beside.open("w", encoding="utf-8") as stream:
                reporter.render(report, stream)
            beside.replace(args.output)  # so that a reader never sees half a report
        except OSError as error:
            print(
                f"ddpcov report: {args.output}: {error.strerror or error}; give --output a file that can be written",
                file=sys.stderr,
            )
            return 2
        finally:
            with contextlib.suppress(OSError):
                beside.unlink()
        return 0


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{value} is not positive")
    return value


@contextlib.contextmanager
def _progress() -> Iterator[Progress]:
    """A progress line on a terminal's stderr, once reading has taken a second; reading itself releases the interpreter."""
    if not sys.stderr.isatty():
        yield iter
        return
    from rich import progress
    from rich.console import Console

    columns = progress.SpinnerColumn(), *progress.Progress.get_default_columns()
    bar = progress.Progress(*columns, console=Console(stderr=True), transient=True)
    task = bar.add_task("reading", total=None)

    def count(files: Sequence[Path]) -> Iterable[Path]:
        bar.update(task, total=len(files), description="merging shards")
        for file in files:
            yield file
            bar.advance(task)

    timer = threading.Timer(_QUIET_SECONDS, bar.start)
    timer.daemon = True
    timer.start()
    try:
        yield count
    finally:
        timer.cancel()
        timer.join()
        bar.stop()
