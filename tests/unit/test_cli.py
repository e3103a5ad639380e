"""The command line: exit codes, one line for an error, whole files."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from ddpcov import commands
from ddpcov.commands import COMMANDS, main
from recorded import capture, header, shard


def ddpcov(*arguments: str, folder: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "ddpcov", *arguments]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)


def damaged(path: Path) -> None:
    data = bytearray(capture(path))
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


UNREADABLE: dict[str, tuple[Callable[[Path], object], list[str]]] = {
    "missing": (lambda path: None, ["no such capture", "check the path"]),
    "folder": (Path.mkdir, ["a folder", "expected a capture", "give the file"]),
    "empty": (
        lambda path: path.write_bytes(b""),
        ["an empty file", "expected a file written by ddpcov", "check the path"],
    ),
    "text": (lambda path: path.write_text("{}"), ["JSON text", "expected a file written by ddpcov"]),
    "future": (lambda path: path.write_bytes(header(9)), ["format 9 is too new", "reads formats up to 1", "upgrade ddpcov"]),
    "past": (lambda path: path.write_bytes(header(0)), ["format 0 is too old", "reads formats from 1", "record the run again"]),
    "truncated": (lambda path: path.write_bytes(capture(path)[:-9]), ["truncated", "bytes", "copy the file again"]),
    "damaged": (damaged, ["damaged at offset", "copy the file again"]),
}


@pytest.mark.parametrize("name", UNREADABLE)
def test_unreadable_capture(tmp_path: Path, name: str) -> None:
    make, parts = UNREADABLE[name]
    make(tmp_path / "run.bin")
    done = ddpcov("report", "run.bin", folder=tmp_path)
    assert (done.returncode, done.stdout) == (3, "")
    (line,) = done.stderr.splitlines()
    assert line.startswith("ddpcov report: run.bin: ")
    assert [part for part in parts if part not in line] == []


def test_report_of_shards(tmp_path: Path) -> None:
    shard(tmp_path / "run.bin.rank1", 1, end=None)
    done = ddpcov("report", "run.bin", "--format", "json", folder=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    told = json.loads(done.stdout)
    assert told["run"]["end"] == {"1": "killed"}
    assert "DDC502" in [f["code"] for f in told["findings"]]


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["no-such-command"],
        ["report"],
        ["report", "run.bin", "--format", "pdf"],
        ["report", "run.bin", "--depth", "0"],
        ["report", "run.bin", "--depth", "x"],
        ["report", "run.bin", "--by", "colour"],
        ["report", "run.bin", "--no-such-option"],
    ],
    ids=" ".join,
)
def test_usage(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(arguments)
    assert caught.value.code == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.startswith("usage: ddpcov")


@pytest.mark.parametrize("command", [None, *COMMANDS])
def test_help(command: str | None, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main([command, "--help"] if command else ["--help"])
    assert caught.value.code == 0
    out = " ".join(capsys.readouterr().out.split())
    for name in [command] if command else COMMANDS:
        first_line = (COMMANDS[name].__doc__ or "").strip().splitlines()[0]
        assert first_line in out


def test_output_goes_to_a_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    capture(tmp_path / "run.bin")
    assert main(["report", str(tmp_path / "run.bin"), "--format", "json", "--output", str(tmp_path / "report.json")]) == 0
    assert json.loads((tmp_path / "report.json").read_text())["verdict"] == "findings"
    assert capsys.readouterr() == ("", "")
    assert sorted(file.name for file in tmp_path.iterdir()) == ["report.json", "run.bin"]


def test_output_is_whole_or_as_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Broken:
        def __init__(self, options: object) -> None:
            pass

        def render(self, report: object, stream: object) -> None:
            stream.write("half of")  # type: ignore[attr-defined]
            raise OSError("No space left on device")

    monkeypatch.setitem(commands.report.FORMATS, "json", Broken)
    capture(tmp_path / "run.bin")
    (tmp_path / "report.json").write_text("the old one")
    assert main(["report", str(tmp_path / "run.bin"), "--format", "json", "--output", str(tmp_path / "report.json")]) != 0
    assert (tmp_path / "report.json").read_text() == "the old one"
    assert sorted(file.name for file in tmp_path.iterdir()) == ["report.json", "run.bin"]


def test_output_into_a_missing_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    capture(tmp_path / "run.bin")
    assert main(["report", str(tmp_path / "run.bin"), "--output", str(tmp_path / "missing" / "report.txt")]) != 0
    (line,) = capsys.readouterr().err.splitlines()
    assert "No such file or directory" in line
    assert "missing" in line


@pytest.mark.parametrize("num_parameters", [2, 5000], ids=["short", "long"])
@pytest.mark.parametrize("format_name", ["text", "json", "markdown"])
def test_reader_that_had_enough(tmp_path: Path, num_parameters: int, format_name: str) -> None:
    capture(tmp_path / "run.bin", names=tuple(f"layer{i}.weight" for i in range(num_parameters)))
    command = [sys.executable, "-m", "ddpcov", "report", "run.bin", "--all", "--format", format_name]
    with subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None and process.stderr is not None
        if num_parameters > 2:
            assert process.stdout.readline()
        process.stdout.close()
        assert process.stderr.read() == ""
    assert process.returncode == 0
