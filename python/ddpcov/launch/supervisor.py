"""Starts a script as it would be started by hand, and stays until it has ended. Needs no torch.

The script keeps its argv, its stdin and stdout, its exit code and the signals that are sent to it; its parent is this process.
"""

from __future__ import annotations

import contextlib
import ctypes
import glob
import hashlib
import os
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ddpcov.launch.plan import VARIABLE, Part, Plan, Registry
from ddpcov.launch.processes import unreached

__all__ = ["SITE", "Outcome", "die_like", "launch", "planned"]

SITE = Path(__file__).with_name("site")
"""Folder whose `sitecustomize` reaches the processes of the script."""

_LOOK_SECONDS = 0.5
_NOT_PASSED_ON = {
    signal.SIGKILL,
    signal.SIGSTOP,
    signal.SIGCHLD,
    signal.SIGCONT,
    signal.SIGTSTP,
    signal.SIGTTIN,
    signal.SIGTTOU,
}


@dataclass
class Outcome:
    """How a launch ended."""

    code: int
    """Exit code; negative: the signal that ended it."""
    parts: dict[Path, Part]
    """Capture → the model that it is of."""
    unreached: list[str] = field(default_factory=list)
    """Processes that use torch and that no plan reached: their command, and why."""
    saw_torch: bool = False
    was_stalled: bool = False


@contextlib.contextmanager
def planned(out: str | os.PathLike[str], **fields: Any) -> Iterator[Plan]:
    """A plan whose folder exists as long as the context."""
    folder = tempfile.mkdtemp(prefix="ddpcov-")
    try:
        rank = os.environ.get("RANK", "")
        copy = int(rank) if rank.isdecimal() else 0
        yield Plan(os.path.abspath(out), folder, _name(), copy=copy, **fields)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _name() -> str:
    """Of the launch; the same for all those that one torchrun made."""
    elastic = [os.environ.get(f"TORCHELASTIC_{key}") for key in ("RUN_ID", "RESTART_COUNT")]
    if elastic[0] is None:
        return secrets.token_hex(8)
    return hashlib.sha256(repr([*elastic, os.environ.get("MASTER_PORT")]).encode()).hexdigest()[:16]


def launch(
    command: Sequence[str], plan: Plan, *, output: Any = None, is_stalled: Callable[[], bool] = lambda: False
) -> Outcome:
    """Runs the command to its end.

    Args:
        command: program and arguments.
        plan: what the processes below are to do.
        output: where stdout and stderr go, if not where ours do.
        is_stalled: asked every half second; once it says yes the command is killed, with all that it started.

    Raises:
        OSError: it cannot be started.
    """
    environment = dict(os.environ)
    environment[VARIABLE] = plan.to_environment()
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, [str(SITE), environment.get("PYTHONPATH")]))
    with _Signals() as signals:
        process = subprocess.Popen(
            command,
            env=environment,
            stdout=output,
            stderr=output,
            preexec_fn=signals.restore_in_child,
            start_new_session=output is not None,  # so that all of it can be killed
        )
        outcome = Outcome(0, {})
        while process.poll() is None:
            signals.pass_on(process.pid, _LOOK_SECONDS)
            if process.poll() is None:
                outcome.unreached += [one for one in unreached(process.pid, SITE) if one not in outcome.unreached]
                if is_stalled():
                    outcome.was_stalled = True
                    with contextlib.suppress(ProcessLookupError):
                        os.killpg(process.pid, signal.SIGKILL)
    outcome.code = process.returncode
    outcome.saw_torch = Path(plan.folder, "torch").exists()
    outcome.parts = _settle(plan)
    return outcome


def _settle(plan: Plan) -> dict[Path, Part]:
    """The parts that were trained, with the first of them under the name that the user gave."""
    registry = Registry(plan)
    parts = registry.parts()
    idle = [n for n, part in parts.items() if not part.is_wrapped and not part.has_trained]
    if len(idle) == len(parts):
        idle = idle[1:]
    for number in idle:
        for file in _files_of(plan.file_of(number, parts.pop(number))):
            file.unlink(missing_ok=True)
    out = {plan.file_of(number, part): part for number, part in parts.items()}
    first = next(iter(parts), 1)
    if first != 1:
        old, new = plan.file_of(first, parts[first]), plan.file_of(1, parts[first])
        for file in _files_of(old):
            file.replace(new.with_name(new.name + file.name.removeprefix(old.name)))
        out = {new if path == old else path: part for path, part in out.items()}
    return out


def _files_of(capture: Path) -> list[Path]:
    return [capture] * capture.exists() + list(capture.parent.glob(f"{glob.escape(capture.name)}.rank*"))


class _Signals:
    """While this is entered, signals wait until they are passed on to the script.

    A signal from the keyboard reaches the script by itself, as the terminal sends it to the whole group; those that somebody
    sent to this process alone are sent on. The kernel tells which is which.
    """

    def __enter__(self) -> _Signals:
        self._before = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals() - _NOT_PASSED_ON)
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGCHLD})
        return self

    def __exit__(self, *error: object) -> None:
        while signal.sigtimedwait(signal.sigpending(), 0) if signal.sigpending() else None:
            pass  # meant for a script that is gone
        signal.pthread_sigmask(signal.SIG_SETMASK, self._before)

    def pass_on(self, pid: int, seconds: float) -> None:
        """Waits for a signal, or the end of a child, and passes it on."""
        info = signal.sigtimedwait(signal.valid_signals() - (_NOT_PASSED_ON - {signal.SIGCHLD}), seconds)
        if info is not None and info.si_signo != signal.SIGCHLD and info.si_pid != 0:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, info.si_signo)

    def restore_in_child(self) -> None:
        """In the child, before it becomes the script."""
        signal.pthread_sigmask(signal.SIG_SETMASK, self._before)
        _die_with_parent()


def _die_with_parent() -> None:
    """Whoever kills this process means the script."""
    if sys.platform == "linux":
        pr_set_pdeathsig = 1
        ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGKILL)


def die_like(code: int) -> int:
    """The exit code to end with for what a script ended with; does not return if that was a signal."""
    if code < 0:
        number = -code
        with contextlib.suppress(OSError, ValueError):
            signal.signal(number, signal.SIG_DFL)
        if number in (signal.SIGQUIT, signal.SIGABRT, signal.SIGSEGV, signal.SIGBUS, signal.SIGFPE, signal.SIGILL):
            _leave_no_core()
        os.kill(os.getpid(), number)
        time.sleep(1)  # if it is blocked or does not kill
        return 128 + number
    return code


def _leave_no_core() -> None:
    import resource

    resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))
