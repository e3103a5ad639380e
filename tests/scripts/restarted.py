"""A script for torchrun that restarts it: rank 1 fails in the first attempt, with or without a `track` block of its own."""

import contextlib
import os
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

torch.set_num_threads(1)


class Net(nn.Module):
    def __init__(self, is_complete):
        super().__init__()
        self.used, self.now_and_then = nn.Linear(4, 4), nn.Linear(4, 4)
        self.is_complete = is_complete

    def forward(self, x):
        x = self.used(x)
        return self.now_and_then(x) if self.is_complete else x


dist.init_process_group("gloo")
attempt = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
model = DDP(Net(is_complete=attempt > 0), find_unused_parameters=True)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
block = contextlib.nullcontext()
if "track" in sys.argv:
    import ddpcov

    block = ddpcov.track(model, out="run.bin")
with block:
    for step in range(3):
        optimizer.zero_grad()
        model(torch.ones(2, 4)).sum().backward()
        optimizer.step()
        if (attempt, step, dist.get_rank()) == (0, 1, 1):
            raise ValueError("in the first attempt")
dist.barrier()
dist.destroy_process_group()
