"""A job that torchrun restarts keeps the evidence of each attempt, and mixes none up."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

import ddpcov
from ddpcov import attempts
from launched import SCRIPTS, TORCHRUN, Ended, run

RESTARTING = [*TORCHRUN, "--max-restarts=2"]
# The store that torchrun shares with its workers outlives a restart, and with it the addresses of workers that are gone: a new
# worker may dial those. With a store of its own, an attempt is sure to begin.
OWN_STORE = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    shutil.copy(SCRIPTS / "restarted.py", tmp_path)
    return tmp_path


def check(done: Ended, *kept: str) -> None:
    assert done.code == 0, done.stderr
    folder, last = done.folder, done.report
    assert (last.run.attempt, last.run.world_size, last.run.steps) == (1, 2, 3)
    assert set(last.run.end.values()) == {"clean"}
    assert not last.totals.missed
    first = ddpcov.read(folder / "run.bin.attempt0")
    assert (first.run.attempt, first.run.ranks) == (0, (0, 1))
    assert first.run.end[1] == "exception: ValueError: in the first attempt"
    assert {p.name for p in first.parameters if p.missed} == {"now_and_then.weight", "now_and_then.bias"}
    shown = run(folder, "-m", "ddpcov", "report", "run.bin")
    assert "attempt 0 of this job is kept: `python -m ddpcov report run.bin.attempt0`" in " ".join(shown.stdout.split())
    assert run(folder, "-m", "ddpcov", "report", "run.bin.attempt0").code == 0
    assert not list(folder.glob("run.2.bin*"))
    assert sorted(f.name for f in folder.glob("run.bin*")) == ["run.bin", *(f"run.bin.attempt0{end}" for end in kept)]


def test_track_in_a_restarted_script(folder: Path) -> None:
    check(run(folder, *RESTARTING, "restarted.py", "track", env=OWN_STORE), ".rank0", ".rank1")


def test_run_of_a_restarting_launcher(folder: Path) -> None:
    done = run(folder, "-m", "ddpcov", "run", "--", "torchrun", *RESTARTING[2:], "restarted.py", env=OWN_STORE)
    check(done, ".rank0", ".rank1")


def test_run_below_a_restarting_launcher(folder: Path) -> None:
    check(run(folder, *RESTARTING, "-m", "ddpcov", "run", "restarted.py", env=OWN_STORE), "")


def test_a_new_job_sets_nothing_aside(folder: Path) -> None:
    assert run(folder, *RESTARTING, "restarted.py", "track", env=OWN_STORE).code == 0
    script = folder / "restarted.py"
    script.write_text(script.read_text().replace("(attempt, step, dist.get_rank()) == (0, 1, 1)", "False"))
    again = run(folder, *RESTARTING, "restarted.py", "track", env=OWN_STORE)
    assert again.code == 0, again.stderr
    assert (again.report.run.attempt, again.report.run.notes) == (0, ())
    assert [f.name for f in folder.glob("run.bin*")] == ["run.bin"]


def shard(folder: Path, rank: int, attempt: int) -> bytes:
    """Writes a shard, as rank `rank` of an attempt leaves it, and returns its bytes."""
    path = folder / f"run.bin.rank{rank}"
    recorder = ddpcov._core.Recorder(
        path, started=attempt + 1, nonce=attempt + 1, ranks=[(0, rank)], rank=rank, optimizer_given=False
    )
    recorder.note("run", f'{{"attempt": {attempt}}}')
    return path.read_bytes()


def test_a_smaller_world_leaves_no_rank_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = {rank: shard(tmp_path, rank, attempt=1) for rank in range(3)}
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "2")
    for rank in (1, 0):
        attempts.begin(tmp_path / "run.bin", rank, [0, 1])
    assert {f.name: f.read_bytes() for f in tmp_path.iterdir()} == {
        f"run.bin.attempt1.rank{rank}": data for rank, data in before.items()
    }


def test_only_what_an_earlier_attempt_wrote_is_set_aside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shard(tmp_path, 0, attempt=2)  # of another job, or of this attempt
    (tmp_path / "run.bin").write_text("something else")
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "2")
    attempts.begin(tmp_path / "run.bin", 0, [0])
    assert sorted(f.name for f in tmp_path.iterdir()) == ["run.bin", "run.bin.rank0"]
    monkeypatch.delenv("TORCHELASTIC_RESTART_COUNT")
    shard(tmp_path, 0, attempt=0)
    attempts.begin(tmp_path / "run.bin", 0, [0])
    assert (tmp_path / "run.bin.rank0").exists()
