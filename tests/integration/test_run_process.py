"""What `ddpcov run` leaves as it is: a script's arguments, streams, imports, exit codes, signals and children."""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from launched import SCRIPTS, TORCHRUN, Ended, run, start, wait_for

pytestmark = pytest.mark.timeout(300)
RUN = ["-m", "ddpcov", "run"]
OLD = {"old.weight", "old.bias"}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A project's folder, with the scripts in it."""
    for script in SCRIPTS.glob("*.py"):
        shutil.copy(script, tmp_path)
    return tmp_path


def missed(report) -> set[str]:
    return {p.name for p in report.parameters if p.missed}


def codes(report) -> set[str]:
    return {f.code for f in report.findings}


# A process.


def test_arguments_streams_and_imports_are_as_without(folder: Path) -> None:
    plain = run(folder, "unwrapped.py", "--flag", "-m", input="a line\n")
    done = run(folder, *RUN, "unwrapped.py", "--flag", "-m", input="a line\n")
    assert (done.code, done.stdout) == (plain.code, plain.stdout) == (0, plain.stdout)
    seen = json.loads(plain.stdout)
    assert (seen["argv"], seen["stdin"]) == (["unwrapped.py", "--flag", "-m"], "a line\n")
    as_module = run(folder, *RUN, "-m", "unwrapped", "--flag", input="")
    assert json.loads(as_module.stdout)["argv"] == [str(folder / "unwrapped.py"), "--flag"]
    assert plain.stderr == "" and done.stderr.count("Findings\n") == 1


def test_models_without_a_wrapper(folder: Path) -> None:
    """The outermost modules that are called; neither a loss, nor what they call in turn."""
    done = run(folder, *RUN, "unwrapped.py", "")
    encoder, (decoder,) = done.report, done.report.others
    assert (encoder.run.launch.model, decoder.run.launch.model) == ("Encoder", "Sequential")
    assert (missed(encoder), codes(encoder)) == (OLD, {"DDC101"})
    assert (decoder.verdict, codes(decoder)) == ("clean", set())  # the optimizer's other parameters are the encoder's
    assert [r.run.steps for r in (encoder, decoder)] == [4, 4]


@pytest.mark.parametrize(
    ("how", "code", "end"),
    [
        ("sys.exit", 6, "clean"),
        ("os._exit", 5, "exception: os._exit(5)"),
        ("raise", 1, "exception: KeyError: 'how'"),
    ],
)
def test_exit_codes(folder: Path, how: str, code: int, end: str) -> None:
    done = run(folder, *RUN, "unwrapped.py", how)
    assert (done.code, done.report.run.end) == (code, {0: end})
    assert done.stderr.count("Model 1 of 2") == 1 and missed(done.report) == OLD


@pytest.mark.parametrize("how", ["fork", "forkserver", "spawn"])
def test_children_that_train_nothing_are_no_models(folder: Path, how: str) -> None:
    done = run(folder, *RUN, "unwrapped.py", how)
    assert done.code == 0, done.stderr
    assert (len(done.report.others), done.report.run.steps, done.report.run.end) == (1, 4, {0: "clean"})


def test_a_forked_child_that_trains_is_a_model_of_its_own(folder: Path) -> None:
    done = run(folder, *RUN, "unwrapped.py", "os.fork")
    assert done.code == 0, done.stderr
    report = done.report
    assert [r.run.launch.model for r in (report, *report.others)] == ["Encoder", "Sequential", "Encoder"]
    assert [r.run.backward_passes for r in (report, *report.others)] == [4, 4, 3]


def test_a_script_without_torch_is_just_run(folder: Path) -> None:
    done = run(folder, *RUN, "nothing.py", "3", "--out", "x")
    assert (done.code, done.stdout) == (3, "False ['3', '--out', 'x']\n")
    (said,) = done.said
    assert "DDC504" in said and "no process imported torch" in said
    assert run(folder, *RUN, "nothing.py").code == 1  # never a clean run
    assert not list(folder.glob("run.bin*"))


def test_another_sitecustomize_is_loaded_all_the_same(folder: Path) -> None:
    (folder / "site").mkdir()
    (folder / "site" / "sitecustomize.py").write_text("import builtins\nbuiltins.greeting = 'hello'\n")
    (folder / "greet.py").write_text("import sitecustomize\nprint(greeting, sitecustomize.__file__)\n")
    env = {"PYTHONPATH": str(folder / "site")}
    assert run(folder, *RUN, "greet.py", env=env).stdout == run(folder, "greet.py", env=env).stdout


# Signals.


def sleeping(folder: Path, before: Sequence[str] = ()) -> subprocess.Popen[str]:
    """A script that says when it has trained, and then sleeps."""
    (folder / "sleeps.py").write_text(
        "import signal, sys, time, torch\n"
        "model = torch.nn.Linear(2, 2)\n"
        "model(torch.ones(2)).sum().backward()\n"
        "print('sleeps', flush=True)\n"
        "time.sleep(100)\n"
    )
    process = start(folder, *before, *RUN, "sleeps.py")
    assert process.stdout is not None and process.stdout.readline().rstrip() == "sleeps"
    return process


def ended(process: subprocess.Popen[str], folder: Path) -> Ended:
    stdout, stderr = process.communicate(timeout=60)
    return Ended(process.returncode, stdout, stderr, folder)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGUSR1])
def test_a_signal_to_the_launcher_is_the_scripts(folder: Path, number: signal.Signals) -> None:
    process = sleeping(folder)
    process.send_signal(number)
    done = ended(process, folder)
    assert done.code == -number
    assert done.stderr.count("1 backward pass") == 1
    if number == signal.SIGINT:
        assert done.stderr.index("KeyboardInterrupt") < done.stderr.index("1 backward pass")
        assert done.report.run.end == {0: "exception: KeyboardInterrupt"}
    else:
        assert done.report.run.end == {0: "killed"}


def test_ctrl_c_in_a_terminal_reaches_the_script_once(folder: Path) -> None:
    """The terminal sends it to the whole group, and so it is not passed on."""
    process = sleeping(folder, before=["-c", "import pty, sys; pty.spawn(sys.argv[1:])", sys.executable])
    assert process.stdin is not None
    process.stdin.write("\x03")
    process.stdin.flush()
    done = ended(process, folder)
    assert (done.stdout.count("\nKeyboardInterrupt\n"), done.stdout.count("1 backward pass")) == (1, 1)
    assert done.report.run.end == {0: "exception: KeyboardInterrupt"}


def test_a_launcher_that_is_killed_takes_the_script_along(folder: Path) -> None:
    process = sleeping(folder)
    (children,) = Path(f"/proc/{process.pid}/task").glob("*/children")
    (child,) = children.read_text().split()
    process.kill()
    process.communicate(timeout=60)
    wait_for(lambda: not Path(f"/proc/{child}/cmdline").exists() or not Path(f"/proc/{child}/cmdline").read_bytes(), 10)
    assert Ended(0, "", "", folder).report.run.end == {0: "killed"}


# Ranks.


def two_ranks(folder: Path, event: str) -> Ended:
    return run(folder, *RUN, "--", "torchrun", *TORCHRUN[2:], "two_ranks.py", event)


@pytest.mark.parametrize(("event", "of_rank_1"), [("killed", "killed"), ("raises", "exception: ValueError: the data ended")])
def test_a_rank_that_dies(folder: Path, event: str, of_rank_1: str) -> None:
    done = two_ranks(folder, event)
    assert done.code == 1
    assert done.stderr.count("Findings\n") == 1  # by the parent, when all is over
    report = done.report
    assert missed(report) == {"unused.weight", "unused.bias"} and report.run.world_size == 2
    assert report.run.end[1] == of_rank_1
    assert report.run.steps >= 3 and "DDC101" in codes(report)


def test_ranks_that_leave_without_a_word(folder: Path) -> None:
    done = two_ranks(folder, "exits")
    assert done.code == 0, done.stderr
    assert (done.report.run.steps, done.report.run.end) == (3, {0: "clean", 1: "clean"})


def test_data_are_on_disk_while_it_runs(folder: Path) -> None:
    process = start(folder, *RUN, "--", "torchrun", *TORCHRUN[2:], "two_ranks.py", "sleeps")
    try:
        assert process.stdout is not None
        assert {process.stdout.readline() for _ in range(2)} == {"rank 0 sleeps\n", "rank 1 sleeps\n"}
        shown = run(folder, "-m", "ddpcov", "report", "run.bin", "--format", "json")
        told = json.loads(shown.stdout)
        assert {p["name"] for p in told["parameters"] if p["missed"]} == {"unused.weight", "unused.bias"}
        assert told["run"]["steps"] == 3
        begun = time.monotonic()
        process.send_signal(signal.SIGTERM)
        done = ended(process, folder)
    finally:
        process.kill()
    assert done.code != 0 and time.monotonic() - begun < 50
    assert done.stderr.count("Findings\n") == 1


# What cannot be reached.

TRAINS = "import torch, time; torch.nn.Linear(2, 2)(torch.ones(2)).sum().backward(); time.sleep(3)"


@pytest.mark.skipif(sys.platform != "linux", reason="the kernel shows processes there")
def test_a_process_that_is_not_reached_is_said(folder: Path) -> None:
    (folder / "starts.py").write_text(
        "import subprocess, sys\n"
        f"subprocess.run([sys.executable, '-I', '-c', {TRAINS!r}], check=True)\n"
        f"subprocess.run([sys.executable, '-c', {TRAINS!r}], check=True, env={{'PATH': '/usr/bin'}})\n"
    )
    done = run(folder, *RUN, "starts.py")
    assert done.code == 1
    unreached = [line for line in done.said if "was not reached" in line]
    assert len(unreached) == 2
    assert "Python was started with -I" in unreached[0] and "an environment of its own" in unreached[1]
    assert "DDC504" in done.said[-1]


# Command lines that cannot be.


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([], "nothing to run; give a script"),
        (["--"], "nothing to run; give a script"),
        (["torchrun", "x.py"], "torchrun: no such script; for a whole command line, as of torchrun, put -- before it"),
        (["--", "no-such-command"], "no-such-command: No such file or directory"),
        (["--out", "nowhere/run.bin", "nothing.py"], "nowhere is no folder; make it first"),
        (["--apply", "wish", "nothing.py"], "--apply wish: expected freeze, find-unused, static-graph, no-flags, or a Python"),
        (["--apply", "freeze", "nothing.py"], "no run at run.bin says what never gets a gradient; run without --apply first"),
        (["--stop-after", "few", "nothing.py"], "few is no whole number from 1 on"),
    ],
)
def test_bad_command_lines(folder: Path, arguments: list[str], said: str) -> None:
    done = run(folder, *RUN, *arguments)
    assert (done.code, done.stdout) == (2, "")
    assert said in done.stderr.splitlines()[-1] and "Traceback" not in done.stderr


def test_nothing_is_frozen_by_a_run_of_no_wrapped_model(folder: Path) -> None:
    assert run(folder, *RUN, "unwrapped.py", "").code == 0
    done = run(folder, *RUN, "--apply", "freeze", "unwrapped.py", "")
    assert done.code == 2 and "has no DDP model where some parameters got a gradient" in done.stderr


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("correct = 3\n", "defines no function correct(model)"),
        ("def correct(model):\n    return 3\n", "correct(model) returned int, expected a module"),
    ],
)
def test_a_correction_that_cannot_be_applied_stops_the_script(folder: Path, text: str, said: str) -> None:
    (folder / "fix.py").write_text(text)
    done = run(folder, *RUN, "--apply", "fix.py", "--", "torchrun", *TORCHRUN[2:], "two_ranks.py")
    assert done.code == 1 and said in done.stderr


def test_a_folder_that_goes_away_costs_the_report_and_nothing_else(folder: Path) -> None:
    (folder / "leaves.py").write_text(
        "import shutil, torch\n"
        "model = torch.nn.Linear(2, 2)\n"
        "model(torch.ones(2)).sum().backward()\n"
        "shutil.rmtree('gone')\n"
        "model(torch.ones(2)).sum().backward()\n"
        "raise SystemExit(7)\n"
    )
    (folder / "gone").mkdir()
    done = run(folder, *RUN, "--out", "gone/run.bin", "leaves.py")
    assert done.code == 7
    assert "ddpcov run: gone/run.bin: no such capture" in done.stderr.replace(f"{folder}/", "")
    assert "Traceback" not in done.stderr
