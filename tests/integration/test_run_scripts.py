"""Whole training scripts of the kinds that people run, as they are, under `ddpcov run` and `ddpcov verify`."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from launched import SCRIPTS, TORCHRUN, Ended, free_port, run

pytestmark = pytest.mark.timeout(400)
RUN = ["-m", "ddpcov", "run"]
VERIFY = ["-m", "ddpcov", "verify"]
FAMOUS = "RuntimeError: Expected to have finished reduction in the prior iteration"
CLASSIFIER = {"pretrained.classifier.weight", "pretrained.classifier.bias"}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A project's folder, with the scripts in it."""
    for script in SCRIPTS.glob("*.py"):
        shutil.copy(script, tmp_path)
    return tmp_path


def spawned(*more: str) -> list[str]:
    return ["spawned.py", "--dist-url", f"tcp://127.0.0.1:{free_port()}", *more]


def missed(report) -> set[str]:
    return {p.name for p in report.parameters if p.missed}


def found(report) -> dict[str, list[str]]:
    """Code → parameters, of findings that are more than a remark."""
    return {f.code: sorted(f.parameters) for f in report.findings if f.severity != "info"}


def is_split_up(folder: Path) -> bool:
    """Whether shards were left, as where a rank never came to its end."""
    return bool(list(folder.glob("*.rank*")))


@pytest.fixture(scope="module")
def as_it_is(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ended]:
    """mp.spawn, DDP bound by name, the rank as an argument; a backbone is kept whole and its stages are called one by one."""
    folder = tmp_path_factory.mktemp("spawned")
    for name in "spawned.py", "texture.py":
        shutil.copy(SCRIPTS / name, folder)
    yield run(folder, *RUN, *spawned("--workers", "1"))


def test_the_script_fails_as_ever(as_it_is: Ended) -> None:
    assert as_it_is.code == 1
    assert "epoch 0 iteration 0 loss" in as_it_is.stdout and "iteration 1" not in as_it_is.stdout
    assert "ddpcov" not in as_it_is.stdout
    assert as_it_is.stderr.count(FAMOUS) >= 2  # the traceback, and the report


def test_the_report_is_exact(as_it_is: Ended) -> None:
    report = as_it_is.report
    assert (report.run.world_size, report.run.steps, report.totals.trainable) == (2, 1, 13)
    assert missed(report) == CLASSIFIER
    assert found(report) == {"DDC101": sorted(CLASSIFIER), "DDC310": sorted(CLASSIFIER)}
    cause = next(f for f in report.findings if f.code == "DDC101")
    assert cause.ranks == (0, 1)
    assert (Path(cause.where.file).name, cause.where.function) == ("texture.py", "TextureNet.forward")
    line = (SCRIPTS / "texture.py").read_text().splitlines()[cause.where.line - 1]
    assert "self.pretrained.stem(x)" in line


def test_it_is_printed_once_on_stderr_at_the_end(as_it_is: Ended) -> None:
    assert as_it_is.stderr.count("Findings\n") == 1
    assert as_it_is.stderr.index("Findings\n") > as_it_is.stderr.rindex("Traceback")


def test_the_error_carries_names_cause_and_place(as_it_is: Ended) -> None:
    # mp.spawn shows the traceback of one rank only.
    note = re.search(r"ddpcov: on rank (\d), 2 of 13 trainable parameters missed a gradient:\n(.*)\n", as_it_is.stderr)
    assert note is not None
    assert {name for name in CLASSIFIER if name in note[2]} == CLASSIFIER
    assert "DDC101" in note[2] and "texture.py:" in note[2]


def test_nothing_else_is_left(as_it_is: Ended) -> None:
    left = {p.name for p in as_it_is.folder.iterdir()} - {"__pycache__"}
    assert left == {"spawned.py", "texture.py", "run.bin"}


def test_corrections_let_it_finish(as_it_is: Ended, folder: Path) -> None:
    shutil.copy(as_it_is.folder / "run.bin", folder)
    (folder / "fix.py").write_text("def correct(model):\n    model.pretrained.classifier = None\n")
    for correction, num_trainable, still in ("freeze", 11, set()), ("fix.py", 11, set()):
        done = run(folder, *RUN, "--apply", correction, *spawned())
        assert done.code == 0, done.stderr
        assert "validated" in done.stdout and (folder / "runs" / "checkpoint.pth.tar").exists()
        report = done.report
        assert (report.run.steps, report.totals.trainable, missed(report)) == (6, num_trainable, still)
        assert report.run.launch.corrections == (correction,)
        assert f"corrections applied from outside: {correction}" in done.stderr
    assert found(done.report) == {}


def test_a_flag_is_a_correction_too_and_the_run_can_be_cut_short(folder: Path) -> None:
    done = run(folder, *RUN, "--apply", "find-unused", "--stop-after", "3", *spawned("--epochs", "20", "--workers", "1"))
    assert done.code == 0, done.stderr
    assert "iteration 1" in done.stdout and "iteration 2" not in done.stdout
    assert "validated" not in done.stdout and not (folder / "runs").exists()
    report = done.report
    assert (report.run.steps, missed(report)) == (3, CLASSIFIER)
    assert set(report.run.end.values()) == {"clean"} and not is_split_up(folder)
    assert report.advice.find_unused_parameters == "off"


def test_verify_tells_cause_corrections_and_evidence(folder: Path) -> None:
    done = run(folder, *VERIFY, "--steps", "4", *spawned(), time_limit=300)
    assert done.code == 0, done.stderr
    page = done.stdout
    assert page.index("DDC101") < page.index("Corrections, applied from outside to the unmodified script")
    table = page[page.index("Corrections, applied") :]
    assert re.search(r"as it is +RuntimeError in +2 of 13 +no ", table)
    assert re.search(r"freeze +exit code 0, 4 +0 of 11 +yes +reference .* yes *\n", table)
    for flag in "find-unused", "static-graph":
        assert re.search(rf"{flag} +exit code 0, 4 +2 of 13 +yes +equal, bit for .* yes *\n", table)
    assert "8 losses" in table.replace("\n", " ")
    assert missed(done.report) == CLASSIFIER and not (folder / "runs").exists()


def test_no_devices_are_not_a_clean_run(folder: Path) -> None:
    done = run(folder, *RUN, *spawned("--num-devices", "0"))
    assert done.code == 1 and not (folder / "run.bin").exists()
    (said,) = done.said
    assert "DDC504" in said and "no DistributedDataParallel was built" in said


@pytest.mark.parametrize("command", [[*TORCHRUN, *RUN], [*RUN, "--", "torchrun", *TORCHRUN[2:]]], ids=["in", "round"])
def test_torchrun(folder: Path, command: list[str]) -> None:
    """The launcher in each rank, or one round the whole command line. The script catches the error itself, and goes on."""
    done = run(folder, *command, "two_ranks.py", "as-is")
    assert done.code == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == [f"rank {rank} goes on without step 1" for rank in (0, 1)]
    assert done.stderr.count("Findings\n") == 1
    report = done.report
    assert missed(report) == {"unused.weight", "unused.bias"} and report.run.world_size == 2
    assert {"DDC101", "DDC310"} == set(found(report))
    assert not is_split_up(folder)


def test_accelerate_launch(folder: Path) -> None:
    (folder / "train.py").write_text(
        "import accelerate, torch\n"
        "accelerator = accelerate.Accelerator(cpu=True)\n"
        "net = torch.nn.Linear(2, 2)\n"
        "net.spare = torch.nn.Linear(2, 2)\n"
        "model, optimizer = accelerator.prepare(net, torch.optim.SGD(net.parameters(), lr=0.1))\n"
        "accelerator.backward(model(torch.ones(1, 2)).sum())\n"
        "optimizer.step()\n"
        "accelerator.end_training()\n"
    )
    launcher = ["accelerate", "launch", "--multi_gpu", "--num_processes", "2", "--num_machines", "1", "--mixed_precision", "no"]
    launcher += ["--dynamo_backend", "no", "--main_process_port", str(free_port())]
    done = run(folder, *RUN, "--", *launcher, "train.py")
    assert done.code == 0, done.stderr
    assert missed(done.report) == {"spare.weight", "spare.bias"} and done.report.run.world_size == 2


def test_two_models_in_a_process_are_two_sections(folder: Path) -> None:
    done = run(folder, *RUN, "--", "torchrun", *TORCHRUN[2:], "gan.py")
    assert done.code == 0, done.stderr
    generator, (discriminator,) = done.report, done.report.others
    assert missed(generator) == {"skip.weight", "skip.bias"}
    assert (generator.run.steps, generator.run.launch.model) == (5, "Generator")
    assert (discriminator.verdict, discriminator.run.launch.model) == ("clean", "Discriminator")
    assert (folder / "run.2.bin").exists() and not is_split_up(folder)
    shown = run(folder, "-m", "ddpcov", "report", "run.bin", "--format", "json")
    assert [other["run"]["launch"]["model"] for other in json.loads(shown.stdout)["others"]] == ["Discriminator"]


def test_trainer_of_transformers(folder: Path) -> None:
    done = run(folder, *TORCHRUN, *RUN, "trainer.py")
    assert done.code != 0 and FAMOUS in done.stderr
    pooler = {"bert.pooler.dense.weight", "bert.pooler.dense.bias"}
    assert missed(done.report) == pooler
    assert found(done.report)["DDC106"] == sorted(pooler)
    flagged = run(folder, *TORCHRUN, *RUN, "--out", "flagged.bin", "trainer.py", "flagged")
    assert flagged.code == 0, flagged.stderr
    shown = json.loads(run(folder, "-m", "ddpcov", "report", "flagged.bin", "--format", "json").stdout)
    assert {p["name"] for p in shown["parameters"] if p["missed"]} == pooler
    assert (shown["run"]["steps"], shown["run"]["wrapper"]["find_unused_parameters"]) == (8, True)


def test_lightning(folder: Path) -> None:
    """It starts the second rank itself, as a subprocess of the same command line."""
    done = run(folder, *RUN, "lightning_fit.py")
    assert done.code == 0, done.stderr
    report = done.report
    assert (missed(report), report.run.world_size) == ({"projector.weight", "projector.bias"}, 2)
    (finding,) = [f for f in report.findings if f.severity != "info"]
    assert (finding.code, finding.where.function.rpartition(".")[2]) == ("DDC101", "training_step")


def test_fsdp2(folder: Path) -> None:
    (folder / "train.py").write_text(
        "import torch, torch.distributed as dist\n"
        "from torch.distributed.device_mesh import init_device_mesh\n"
        "from torch.distributed.fsdp import fully_shard\n"
        "torch.set_num_threads(1)\n"
        "dist.init_process_group('gloo')\n"
        "class Net(torch.nn.Module):\n"
        "    def __init__(self):\n"
        "        super().__init__()\n"
        "        self.used, self.spare = torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)\n"
        "    def forward(self, x):\n"
        "        return self.used(x)\n"
        "model = fully_shard(Net(), mesh=init_device_mesh('cpu', (2,)))\n"
        "optimizer = torch.optim.SGD(model.parameters(), lr=0.1)\n"
        "for _ in range(3):\n"
        "    model(torch.ones(2, 4)).sum().backward()\n"
        "    optimizer.step()\n"
        "    optimizer.zero_grad()\n"
        "dist.destroy_process_group()\n"
    )
    done = run(folder, *TORCHRUN, *RUN, "train.py")
    assert done.code == 0, done.stderr
    report = done.report
    assert (report.run.wrapper.kind, report.run.steps, report.run.world_size) == ("fsdp2", 3, 2)
    assert missed(report) == {"spare.weight", "spare.bias"}


def test_verify_has_nothing_to_correct(folder: Path) -> None:
    done = run(folder, *VERIFY, "--steps", "2", "--", "torchrun", *TORCHRUN[2:], "clean.py")
    assert done.code == 1 and "DDC504" in done.stderr  # no such script
    (folder / "clean.py").write_text((folder / "two_ranks.py").read_text().replace("self.unused = nn.Linear(4, 10)", "pass"))
    done = run(folder, *VERIFY, "--steps", "2", "--", "torchrun", *TORCHRUN[2:], "clean.py", "as-is")
    assert done.code == 0, done.stderr
    assert "Nothing to correct (exit code 0, 2 steps)." in done.stdout


def test_verify_of_a_job_that_hangs(folder: Path) -> None:
    done = run(
        folder, *VERIFY, "--steps", "3", "--timeout", "10", "--", "torchrun", *TORCHRUN[2:], "branches.py", time_limit=300
    )
    assert done.code == 0, done.stdout + done.stderr
    assert re.search(r"as it is +hung after 1 +2 of 4 ", done.stdout)
    assert re.search(r"find-unused +exit code 0, 3 .* yes *\n", done.stdout)
    report = done.report
    assert report.advice.find_unused_parameters == "on"
    assert {p.name for p in report.parameters if 1 in p.missed} == {"now_and_then.weight", "now_and_then.bias"}


def test_a_branch_on_one_rank_under_the_guard(folder: Path) -> None:
    done = run(folder, *RUN, "--guard", "--", "torchrun", *TORCHRUN[2:], "branches.py", time_limit=120)
    assert done.code == 1
    assert done.stderr.count("rank 1 would not reach now_and_then.weight, now_and_then.bias") >= 2  # on both ranks
    found = {f.code: f for f in done.report.findings}
    assert found["DDC202"].parameters == ("now_and_then.bias", "now_and_then.weight")
    assert (found["DDC202"].ranks, found["DDC101"].ranks) == ((1,), (1,))
    assert done.report.advice.find_unused_parameters == "on"
