"""A script for torchrun. Its first argument says what else happens in step 2, on rank 1."""

import os
import signal
import sys
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

torch.set_num_threads(1)
event = sys.argv[1] if len(sys.argv) > 1 else ""


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.used = nn.Linear(4, 4)
        self.unused = nn.Linear(4, 10)

    def forward(self, x):
        return self.used(x)


dist.init_process_group("gloo")
rank = dist.get_rank()
net = Net()
if rank == 0:
    net(torch.ones(1, 4))  # a look at it, as some take
model = DDP(net, find_unused_parameters=event != "as-is")
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(4):
    try:
        loss = model(torch.randn(2, 4)).sum()
    except RuntimeError:
        if event != "as-is":
            raise
        print(f"rank {rank} goes on without step {step}", flush=True)
        break
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    if step == 2 and rank == 1:
        if event == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        if event == "raises":
            raise ValueError("the data ended")
    if step == 2 and event == "sleeps":
        print(f"rank {rank} sleeps", flush=True)
        time.sleep(100)
    if step == 2 and event == "exits":
        dist.barrier()
        os._exit(0)
dist.destroy_process_group()
