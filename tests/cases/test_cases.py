"""Small training runs with a known right answer, each modelled on a way in which real jobs lose gradients.

`run_cases.py` starts one process a rank, kills what hangs, and holds the report against what the case expects.
"""

from pathlib import Path

import pytest
import run_cases

# The runner leaves its log files to the garbage collector.
pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")

CASES = sorted(Path(__file__).parent.glob("[0-9]*_*.py"))


@pytest.mark.parametrize("path", CASES, ids=lambda path: path.stem)
def test_case(path, tmp_path):
    case = run_cases.load(path)
    ends = run_cases.launch(path, case, tmp_path, oracle=False, timeout=getattr(case, "TIMEOUT", 60))
    assert run_cases.judge_report(case, tmp_path, str(tmp_path / "run.bin")) == []
    assert (set(ends) == {"clean"}) == (case.EXPECT.get("ends", "clean") == "clean"), ends
