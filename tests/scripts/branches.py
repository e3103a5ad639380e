"""A script for torchrun that hangs: one rank takes a branch that the other does not, and each waits for the other."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

torch.set_num_threads(1)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.used = nn.Linear(4, 4)
        self.now_and_then = nn.Linear(4, 4)

    def forward(self, x):
        x = self.used(x)
        return self.now_and_then(x) if dist.get_rank() == 0 else x


dist.init_process_group("gloo")
model = DDP(Net())
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(4):
    optimizer.zero_grad()
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    dist.barrier()
dist.destroy_process_group()
