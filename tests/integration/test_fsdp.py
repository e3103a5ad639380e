"""Sharded models: a gradient counts where autograd accumulates it, and is told under the names that the user knows."""

import pytest
import torch
from torch import nn

import ddpcov
from multirank import run_ranks

X = torch.ones(4, 8)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b, self.c = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x):
        return self.b(torch.relu(self.a(x)))


def train(model):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with ddpcov.track(model, out="run.bin", optimizer=optimizer):
        for step in range(3):
            output = model(X)
            (output if step != 1 else output.detach() + nn.Parameter(torch.ones(8))).sum().backward()
            optimizer.step()
            optimizer.zero_grad()


def fsdp2(rank):
    from torch.distributed.fsdp import fully_shard

    model = Net()
    for layer in (model.a, model.b, model.c):
        fully_shard(layer)
    fully_shard(model)
    train(model)


def fsdp1(rank, use_orig_params):
    from torch.distributed.fsdp import FullyShardedDataParallel

    model = Net()
    options = {"device_id": torch.device("cpu"), "use_orig_params": use_orig_params}
    model.c = FullyShardedDataParallel(model.c, **options)
    train(FullyShardedDataParallel(model, **options))


def coverage(folder):
    report = ddpcov.read(folder / "run.bin")
    why = "DDC101" if report.run.wrapper.kind == "fsdp2" else "DDC100"  # the inside of FSDP1 is not watched
    assert {f.code for f in report.findings} == {why, "DDC107", "DDC201"}
    assert report.run.ranks == (0, 1)
    missed = {p.name: p.missed for p in report.parameters}
    return report.run.wrapper.kind, {name: sorted(set(steps.values())) for name, steps in missed.items()}


@pytest.mark.skipif(torch.__version__ < (2, 6), reason="fully_shard needs a GPU there")
def test_fsdp2(tmp_path):
    for rank in run_ranks(fsdp2, folder=tmp_path):
        assert rank.result is None
    used, unused = [((1, 1),)], [((0, 2),)]
    layers = {"a": used, "b": used, "c": unused}
    assert coverage(tmp_path) == ("fsdp2", {f"{k}.{p}": v for k, v in layers.items() for p in ("weight", "bias")})


@pytest.mark.parametrize("use_orig_params", [False, True])
def test_fsdp1(tmp_path, use_orig_params):
    for rank in run_ranks(fsdp1, args=[use_orig_params], folder=tmp_path):
        assert rank.result is None
    assert coverage(tmp_path) == ("fsdp1", {"_flat_param": [((1, 1),)], "c._flat_param": [((0, 2),)]})
