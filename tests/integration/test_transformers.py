"""A real loop of a real library, untouched but for one line."""

import subprocess
import sys
from pathlib import Path

import ddpcov


def test_gpt2_with_trainer_on_two_ranks(tmp_path):
    launch = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", "--rdzv-backend=c10d"]
    script = Path(__file__).with_name("gpt2_trainer.py")
    done = subprocess.run(
        [*launch, "--rdzv-endpoint=127.0.0.1:0", str(script), str(tmp_path)], capture_output=True, text=True, timeout=150
    )
    assert done.returncode == 0, done.stderr
    report = ddpcov.read(tmp_path / "run.bin")
    assert report.verdict == "clean"
    assert (report.run.ranks, report.run.steps, report.run.backward_passes) == ((0, 1), 4, 8)
    assert {p.coverage for p in report.parameters} == {"always"}
    assert report.totals.trainable == 28
    # The output layer is the embedding: one parameter, two names.
    assert {p.name: p.aliases for p in report.parameters if p.aliases} == {"transformer.wte.weight": ("lm_head.weight",)}
