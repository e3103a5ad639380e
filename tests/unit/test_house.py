"""Rules of the house that are stated as absences."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "python" / "ddpcov"


def imported(path):
    """Modules that a file imports, at whatever depth of the file."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield node.module


def files(*places):
    return sorted(
        f for place in places for f in ([PACKAGE / place] if place.endswith(".py") else (PACKAGE / place).glob("*.py"))
    )


def test_only_one_file_speaks_torch_distributed():
    allowed = {PACKAGE / "ranks.py", PACKAGE / "commands" / "demo_job.py"}  # the demo is a user's script
    speakers = {f for f in PACKAGE.rglob("*.py") if any(m.startswith("torch.distributed") for m in imported(f))}
    assert speakers <= allowed


def test_only_one_module_names_pyo3():
    naming = (f.relative_to(ROOT / "src") for f in (ROOT / "src").rglob("*.rs") if "use pyo3" in f.read_text())
    named = {f.parts[0].removesuffix(".rs") for f in naming}
    assert named == {"python"}


@pytest.mark.parametrize("path", files("reporters"), ids=lambda path: path.stem)
def test_reporters_see_a_report_and_a_stream(path):
    ours = {m for m in imported(path) if m.startswith("ddpcov")}
    assert ours <= {"ddpcov", "ddpcov.report", *(f"ddpcov.reporters.{p.stem}" for p in files("reporters")), "ddpcov.reporters"}
    assert not {"argparse", "pathlib", "os"} & set(imported(path))


@pytest.mark.parametrize("module", ["ddpcov.reading", "ddpcov.diagnosis.rules", "ddpcov.diagnosis.codes", "ddpcov.commands"])
def test_analysing_and_reporting_need_no_torch(module):
    code = f"import sys; sys.modules['torch'] = None; import {module}"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


@pytest.mark.parametrize("folder", ["python", "src", "tests"])
def test_files_fit_in_the_head(folder):
    sources = [f for suffix in ("py", "rs") for f in (ROOT / folder).rglob(f"*.{suffix}")]
    assert {f.name: n for f in sources if (n := len(f.read_text().splitlines())) > 440} == {}
