"""What ddpcov does to the process around it: nothing that lasts, nothing that stops training."""

from __future__ import annotations

import copy
import gc
import io
import os
import pickle
import signal
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.autograd import Variable
from torch.optim import optimizer as torch_optimizer
from torch.utils.data import DataLoader, Dataset

import ddpcov
from ddpcov import _core
from ddpcov.hooks import Hooks
from reference import Missed, Net, sgd


def missed(report: ddpcov.Report) -> Missed:
    return {p.name: list(p.missed[0]) for p in report.parameters if p.missed}


def train(model: Net, *steps: list[str]) -> None:
    optimizer = sgd(model)
    for names in steps:
        model.loss(*names).backward()
        optimizer.step()
        optimizer.zero_grad()


def hooks_on(model: nn.Module) -> int:
    return sum(len(p._backward_hooks or ()) + len(p._post_accumulate_grad_hooks or ()) for p in model.parameters())


def said(capsys: pytest.CaptureFixture[str]) -> list[str]:
    return capsys.readouterr().err.splitlines()


# Entering and leaving.


@pytest.mark.parametrize("error", [None, ValueError("x"), KeyboardInterrupt(), SystemExit(1), MemoryError()], ids=repr)
def test_leaving_takes_everything_away(tmp_path: Path, error: BaseException | None) -> None:
    def state() -> tuple[Any, ...]:
        return (
            Variable._execution_engine,
            torch.amp.GradScaler.step,
            len(torch_optimizer._global_optimizer_pre_hooks),
            len(torch_optimizer._global_optimizer_post_hooks),
            sys.excepthook,
            signal.getsignal(signal.SIGINT),
        )

    model = Net("a", "b")
    before = state()
    with pytest.raises(type(error)) if error else pytest.MonkeyPatch.context():
        with ddpcov.track(model, out=tmp_path / "run.bin") as cov:
            train(model, ["a"])
            assert hooks_on(model) == 4
            assert Variable._execution_engine is not before[0]
            if error:
                raise error
    assert state() == before
    assert hooks_on(model) == 0
    assert not any(m._forward_hooks or m._forward_pre_hooks or m._backward_hooks for m in model.modules())
    assert missed(cov.report()) == {"b.weight": [(0, 0)]}
    end = "clean" if error is None else f"exception: {type(error).__name__}"
    assert ddpcov.read(tmp_path / "run.bin").run.end[0].startswith(end)
    assert [file.name for file in tmp_path.iterdir()] == ["run.bin.rank0" if error else "run.bin"]


def test_exception_gets_a_note() -> None:
    model = Net("a", "b")
    with pytest.raises(ValueError) as caught:
        with ddpcov.track(model):
            train(model, ["a"])
            raise ValueError("x")
    (note,) = caught.value.__notes__
    assert "1 of 2 trainable parameters missed a gradient:\n  b.weight: DDC101 b (Linear) never ran in the forward." in note


def test_entering_twice() -> None:
    model = Net("a")
    cov = ddpcov.track(model)
    with pytest.raises(ddpcov.Error, match="enter the block first"):
        cov.report()
    with cov, pytest.raises(ddpcov.Error, match="entered before"), cov:
        pass
    with pytest.raises(ddpcov.Error, match="entered before"), cov:
        pass
    assert hooks_on(model) == 0


def test_nested_trackers_of_one_model(tmp_path: Path) -> None:
    model = Net("a", "b")
    with ddpcov.track(model, out=tmp_path / "outer.bin") as outer:
        train(model, ["a"])
        with ddpcov.track(model, out=tmp_path / "inner.bin") as inner:
            train(model, ["b"], ["a", "b"])
        train(model, ["b"])
    assert missed(outer.report()) == {"a.weight": [(1, 1), (3, 3)], "b.weight": [(0, 0)]}
    assert missed(inner.report()) == {"a.weight": [(0, 0)]}
    assert (outer.report().run.steps, inner.report().run.steps) == (4, 2)
    assert hooks_on(model) == 0


def test_two_trackers_cannot_share_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    model, other = Net("a", "b"), Net("c")
    with ddpcov.track(model, out="run.bin") as cov:
        with pytest.raises(ddpcov.Error, match="another tracker in this process writes there"):
            ddpcov.track(other, out=tmp_path / "run.bin").__enter__()
        assert hooks_on(other) == 0
        train(model, ["a"])
    assert ddpcov.read("run.bin") == cov.report()


def test_the_same_model_again(tmp_path: Path) -> None:
    model = Net("a", "b")
    for names in ["a"], ["b"]:
        with ddpcov.track(model, out=tmp_path / "run.bin"):
            train(model, names, ["a", "b"])
        other = "b.weight" if names == ["a"] else "a.weight"
        assert missed(ddpcov.read(tmp_path / "run.bin")) == {other: [(0, 0)]}
    train(model, ["a"])  # and no longer tracked


def test_bad_arguments() -> None:
    model = Net("a")
    bad: list[tuple[type[Exception], str, Callable[[], Any]]] = [
        (TypeError, r"expects a torch\.nn\.Module, found str", lambda: ddpcov.track("model")),  # type: ignore[arg-type]
        (TypeError, "expects torch.optim.Optimizer.*found str", lambda: ddpcov.track(model, optimizer="x")),  # type: ignore[arg-type]
        (TypeError, "found Linear", lambda: ddpcov.track(model, optimizer=[sgd(model), model.a])),  # type: ignore[list-item]
        (ValueError, 'diagnose=\'x\': expected "auto", "always" or "off"', lambda: ddpcov.track(model, diagnose="x")),
    ]
    for kind, message, call in bad:
        with pytest.raises(kind, match=message):
            call()


# Copies.


def test_copies_of_a_tracked_model(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    loss = lambda m: m(torch.ones(2, 3)).sum()  # noqa: E731
    with ddpcov.track(model) as cov:
        loss(model).backward()
        twin = copy.deepcopy(model)
        buffer = io.BytesIO()
        torch.save(model, buffer)
        (tmp_path / "saved").write_bytes(buffer.getvalue())
        (tmp_path / "pickled").write_bytes(pickle.dumps(model))
        buffer.seek(0)
        for loaded in twin, pickle.loads(pickle.dumps(model)), torch.load(buffer, weights_only=False):
            assert hooks_on(loaded) == 0
            loss(loaded).backward()  # trains another model: no pass of this one
    assert cov.report().run.backward_passes == 1
    assert hooks_on(model) == 0
    program = (
        "import sys, pickle; sys.modules['ddpcov'] = sys.modules['ddpcov._core'] = None\n"
        "import torch\n"
        "for m in torch.load('saved', weights_only=False), pickle.load(open('pickled', 'rb')):\n"
        "    m(torch.ones(2, 3)).sum().backward()\n"
    )
    done = subprocess.run([sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


# Forks, in a process of their own: where autograd once ran on several threads, it refuses to run in a forked child.


@pytest.mark.parametrize("name", ["fork", "forked_data_loader", "spawn"])
def test_forks(name: str, tmp_path: Path) -> None:
    tests = Path(__file__).parent
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tests), str(tests.parent)])}
    program = f"import test_lifecycle; test_lifecycle.{name}()"
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert [file.name for file in tmp_path.iterdir()] == ["run.bin"]


def fork() -> None:
    model = Net("a", "b", "c")
    with ddpcov.track(model, out="run.bin") as cov:
        train(model, ["a"])
        shard = Path("run.bin.rank0")
        before = shard.read_bytes()
        child = os.fork()
        if child == 0:
            code = 1
            try:
                train(model, ["b"], ["c"])
                cov.step()
                cov.__exit__(None, None, None)
                train(model, ["b"])
                code = 0
            finally:
                os._exit(code)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        assert shard.read_bytes() == before
        train(model, ["a", "b"])
    assert missed(cov.report()) == {"b.weight": [(0, 0)], "c.weight": [(0, 1)]}
    assert ddpcov.read("run.bin") == cov.report()


def in_spawned_child(model: Net) -> None:
    train(model, ["b"], ["c"])


def spawn() -> None:
    model = Net("a", "b", "c")
    with ddpcov.track(model, out="run.bin") as cov:
        train(model, ["a"])
        before = Path("run.bin.rank0").read_bytes()
        child = torch.multiprocessing.get_context("spawn").Process(target=in_spawned_child, args=(model,))
        child.start()
        child.join()
        assert child.exitcode == 0
        assert Path("run.bin.rank0").read_bytes() == before
    assert missed(cov.report()) == {"b.weight": [(0, 0)], "c.weight": [(0, 0)]}


class Trains(Dataset[torch.Tensor]):
    """Data that somebody made with the help of the model, gradients included."""

    def __init__(self, model: Net) -> None:
        self.model = model

    def __len__(self) -> int:
        return 2

    def __getitem__(self, index: int) -> torch.Tensor:
        self.model.loss("b").backward()
        assert self.model.b.weight.grad is not None
        return self.model.b.weight.grad[0]


def forked_data_loader() -> None:
    model = Net("a", "b")
    optimizer = sgd(model)
    with ddpcov.track(model, out="run.bin") as cov:
        for x in DataLoader(Trains(model), num_workers=1, multiprocessing_context="fork"):
            model(x, "a").sum().backward()
            optimizer.step()
    assert missed(cov.report()) == {"b.weight": [(0, 1)]}
    assert cov.report().run.backward_passes == 2


# Trouble.


@pytest.mark.parametrize("is_late", [True, False], ids=["while it trains", "at the start"])
def test_a_bug_of_ours(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], is_late: bool
) -> None:
    def refresh(self: Hooks, **options: Any) -> None:
        raise RuntimeError("a bug")

    model = Net("a", "b")
    before = Variable._execution_engine
    if not is_late:
        monkeypatch.setattr(Hooks, "refresh", refresh)
    with ddpcov.track(model, out=tmp_path / "run.bin") as cov:
        if is_late:
            train(model, ["a"])
            monkeypatch.setattr(Hooks, "refresh", refresh)
        train(model, ["a"], ["b"])
        cov.step()
        assert Variable._execution_engine is before
    assert hooks_on(model) == 0
    (line,) = said(capsys)
    assert "training goes on: RuntimeError: a bug" in line
    report = cov.report()
    assert report.run.end == {0: "exception: ddpcov stopped recording: RuntimeError: a bug"}
    assert (report.run.steps, missed(report)) == ((1, {"b.weight": [(0, 0)]}) if is_late else (0, {}))
    assert ddpcov.read(tmp_path / "run.bin") == report


def test_nothing_is_kept_of_an_exception_in_backward() -> None:
    """Who runs out of memory wants it back."""
    model = Net("a")

    def fail() -> weakref.ref[torch.Tensor]:
        big = torch.zeros(2, 3)
        try:
            h = model(big)
            h.register_hook(lambda gradient: 1 / 0)
            h.sum().backward()
        except ZeroDivisionError:
            pass
        return weakref.ref(big)

    with ddpcov.track(model) as cov:
        ref = fail()
        gc.collect()
        assert ref() is None
        train(model, ["a"])
    assert cov.report().run.end == {0: "clean"}


def test_backward_in_several_threads() -> None:
    names = [str(i) for i in range(8)]
    model = Net(*names, "unused")
    losses = [model.loss(name) for name in names for _ in range(20)]
    with ddpcov.track(model) as cov:
        threads = [threading.Thread(target=lambda i=i: [loss.backward() for loss in losses[i::4]]) for i in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        sgd(model).step()
    report = cov.report()
    assert missed(report) == {"unused.weight": [(0, 0)]}
    assert (report.run.steps, report.run.backward_passes) == (1, len(losses))


# Imports.


def python(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, *arguments], capture_output=True, text=True, check=False)


def test_importing_changes_nothing() -> None:
    done = python(
        "-c",
        "import sys, signal, threading, warnings\n"
        "def state(): return sys.excepthook, sys.stdout, signal.getsignal(signal.SIGINT), threading.active_count(),"
        " list(warnings.filters), list(sys.path)\n"
        "before = state(); import ddpcov; assert state() == before\n"
        "assert 'torch' not in sys.modules and 'rich' not in sys.modules\n"
        "assert {'track', 'read', 'Report'} <= set(dir(ddpcov)) | set(ddpcov.__all__)",
    )
    assert (done.returncode, done.stderr) == (0, "")


def test_reports_need_no_torch(tmp_path: Path) -> None:
    model = Net("a", "b")
    with ddpcov.track(model, out=tmp_path / "run.bin"):
        train(model, ["a"])
    done = python("-X", "importtime", "-m", "ddpcov", "report", str(tmp_path / "run.bin"))
    assert done.returncode == 0
    assert "b.weight" in done.stdout
    assert not [line for line in done.stderr.splitlines() if line.split("|")[-1].strip().split(".")[0] == "torch"]


def test_version_is_the_same_everywhere() -> None:
    assert python("-m", "ddpcov", "--version").stdout == f"ddpcov {_core.__version__}\n"
