"""Which files a report is made of, and what is said of those it cannot be made of."""

from __future__ import annotations

from pathlib import Path

import pytest

import ddpcov
from recorded import capture, header, shard


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return tmp_path / "run.bin"


def beside(run: Path, rank: int) -> Path:
    return run.with_name(f"{run.name}.rank{rank}")


def codes(report: ddpcov.Report) -> list[str]:
    return [f.code for f in report.findings]


# Files that are no capture.


def test_capture(run: Path) -> None:
    capture(run)
    report = ddpcov.read(run)
    assert (report.run.ranks, report.run.steps, report.run.end) == ((0, 1), 2, {0: "clean", 1: "clean"})
    assert {p.name: p.coverage for p in report.parameters} == {"a.weight": "always", "b.weight": "never"}
    assert report.run.notes == ()
    assert ddpcov.read(str(run)) == report


BAD = {
    "empty": (b"", "an empty file"),
    "json": (b'  {"verdict": "clean"}', "JSON text"),
    "text": (b"epoch 1 loss 0.3\n", "a text file"),
    "zip": (b"PK\x03\x04rest", "a zip archive"),
    "pickle": (b"\x80\x04\x95rest", "a Python pickle"),
    "binary": (bytes(range(128, 160)), "begins with"),
    "header cut off": (header(1)[:11], "truncated"),
    "header alone": (header(1), "truncated"),
    "from the future": (header(7), r"format 7 is too new: this ddpcov reads formats up to 1; upgrade ddpcov"),
    "from the past": (header(0), r"format 0 is too old: this ddpcov reads formats from 1; record the run again"),
}


@pytest.mark.parametrize("name", BAD)
def test_not_a_capture(run: Path, name: str) -> None:
    data, message = BAD[name]
    run.write_bytes(data)
    with pytest.raises(ddpcov.CaptureError, match=message) as caught:
        ddpcov.read(run)
    assert str(caught.value).startswith(f"{run}: ")
    assert "\n" not in str(caught.value)


def test_every_truncation_is_found(run: Path) -> None:
    data = capture(run)
    for length in range(len(data)):
        run.write_bytes(data[:length])
        with pytest.raises(ddpcov.CaptureError):
            ddpcov.read(run)


def test_every_flipped_byte_is_found(run: Path) -> None:
    data = capture(run)
    for at in range(len(data)):
        run.write_bytes(data[:at] + bytes([data[at] ^ 0x10]) + data[at + 1 :])
        with pytest.raises(ddpcov.CaptureError):
            ddpcov.read(run)


def test_folder(tmp_path: Path) -> None:
    with pytest.raises(ddpcov.CaptureError, match="a folder, expected a capture"):
        ddpcov.read(tmp_path)


@pytest.mark.parametrize("path", ["run.bin", "missing/run.bin"])
def test_nothing_there(tmp_path: Path, path: str) -> None:
    with pytest.raises(FileNotFoundError, match=r"run\.bin: no such capture, and no shards \(run\.bin\.rank0, …\)"):
        ddpcov.read(tmp_path / path)


# Shards.


def test_shards_are_merged(run: Path) -> None:
    for rank in range(2):
        shard(beside(run, rank), rank)
    capture(run.with_name("merged.bin"))
    assert ddpcov.read(run) == ddpcov.read(run.with_name("merged.bin"))


def test_names_are_no_patterns(tmp_path: Path) -> None:
    shard(tmp_path / "run[1]+.bin.rank0", world_size=1)
    shard(tmp_path / "run1.bin.rank0", world_size=1)
    assert ddpcov.read(tmp_path / "run[1]+.bin").run.ranks == (0,)


def test_rank_that_was_killed(run: Path) -> None:
    shard(beside(run, 0), 0)
    shard(beside(run, 1), 1, end=None, in_pass=True)
    report = ddpcov.read(run)
    assert report.run.end == {0: "clean", 1: "killed"}
    assert [f.ranks for f in report.findings if f.code == "DDC501"] == [(1,)]


def test_one_shard_alone(run: Path) -> None:
    for rank in range(2):
        shard(beside(run, rank), rank)
    report = ddpcov.read(beside(run, 1))
    assert report.run.ranks == (1,)
    assert [f.ranks for f in report.findings if f.code == "DDC502"] == [(0,)]


def test_one_damaged_shard_among_several(run: Path) -> None:
    for rank in range(4):
        shard(beside(run, rank), rank, world_size=4)
    beside(run, 1).write_bytes(b"")
    damaged = bytearray(beside(run, 2).read_bytes())
    damaged[damaged.index(b"a.weight")] ^= 1
    beside(run, 2).write_bytes(damaged)
    report = ddpcov.read(run)
    assert report.run.ranks == (0, 3)
    assert [f.ranks for f in report.findings if f.code == "DDC502"] == [(1, 2)]
    first, second = report.run.notes
    assert first.startswith(f"{beside(run, 1)}: not a ddpcov capture: found an empty file")
    assert second.startswith(f"{beside(run, 2)}: damaged at offset")


def test_a_copied_shard_is_not_counted_twice(run: Path) -> None:
    shard(beside(run, 0), 0)
    run.with_name("run.bin.rank00").write_bytes(beside(run, 0).read_bytes())
    report = ddpcov.read(run)
    assert report.run.ranks == (0,)
    (note,) = report.run.notes
    assert "rank 0 twice" in note


def test_only_damaged_shards(run: Path) -> None:
    beside(run, 0).write_bytes(b"")
    with pytest.raises(ddpcov.CaptureError, match=r"run\.bin\.rank0: not a ddpcov capture"):
        ddpcov.read(run)


# Several runs of one name.


def test_newer_shards_beside_an_old_capture(run: Path) -> None:
    capture(run, started=1)
    shard(beside(run, 0), 0, started=2, end="exception: ValueError")
    report = ddpcov.read(run)
    assert report.run.end == {0: "exception: ValueError"}
    (note,) = report.run.notes
    assert "1 file(s) of an earlier run" in note


def test_old_shards_beside_a_newer_capture(run: Path) -> None:
    shard(beside(run, 0), 0, started=1, end=None)
    capture(run, started=2)
    report = ddpcov.read(run)
    assert (report.run.ranks, report.run.end) == ((0, 1), {0: "clean", 1: "clean"})
    (note,) = report.run.notes
    assert "1 file(s) of an earlier run" in note


def test_leftover_shards_of_a_larger_world(run: Path) -> None:
    for rank in range(4):
        shard(beside(run, rank), rank, world_size=4, started=1)
    for rank in range(2):
        shard(beside(run, rank), rank, world_size=2, started=2)
    report = ddpcov.read(run)
    assert (report.run.world_size, report.run.ranks) == (2, (0, 1))
    assert "DDC502" not in codes(report)
    (note,) = report.run.notes
    assert "2 file(s) of an earlier run" in note


def test_shards_that_outlived_their_merge(run: Path) -> None:
    shard(beside(run, 1), 1)
    capture(run)
    assert ddpcov.read(run).run.ranks == (0, 1)
    assert ddpcov.read(run).run.notes == ()
