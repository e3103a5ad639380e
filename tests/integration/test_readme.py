"""What the README shows is what happens."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()
BLOCKS = re.findall(r"^```(\w+)\n(.*?)^```", README, re.DOTALL | re.MULTILINE)


def run(*command, cwd):
    done = subprocess.run([sys.executable, *command], cwd=cwd, capture_output=True, text=True, timeout=150)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Where the Python example has run."""
    folder = tmp_path_factory.mktemp("readme")
    (example,) = (text for language, text in BLOCKS if language == "python")
    assert run("-c", example, cwd=folder) == "clean []\n"
    return folder


def test_commands(folder):
    commands = [line.split() for language, text in BLOCKS if language == "sh" for line in text.splitlines()]
    reports = [command[1:] for command in commands if command[:4] == ["python", "-m", "ddpcov", "report"]]
    assert len(reports) == 3
    for command in reports:
        run(*command, cwd=folder)
    assert (folder / "report.md").read_text().startswith("### Gradient coverage")


def test_report_is_that_of_the_demo(tmp_path):
    shown = README.split("<!-- demo -->\n```text\n")[1].split("```")[0]
    printed = run("-m", "ddpcov", "demo", cwd=tmp_path)
    assert "Expected to have finished reduction in the prior iteration" in printed
    report = printed[printed.index("\nddpcov 0") + 1 :]
    assert re.sub(r"torch [\w.+]+", "torch …", report) == re.sub(r"torch [\w.+…]+", "torch …", shown)


def test_test_command_is_what_ci_runs():
    assert "pip install '.[test]' && pytest\n" in README
    assert "pip install '.[test]' && pytest\n" in (ROOT / ".ci" / "run").read_text()


def test_every_code_is_listed():
    from ddpcov.diagnosis.codes import SLUGS

    assert dict(re.findall(r"^\| (DDC\d+) \| ([\w-]+) \|", README, re.MULTILINE)) == SLUGS
