"""Two networks, each wrapped, in one process a rank; the generator has a layer that it never calls."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

torch.set_num_threads(1)


class Generator(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Linear(4, 8)
        self.skip = nn.Linear(4, 8)

    def forward(self, z):
        return self.body(z)


class Discriminator(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 1))

    def forward(self, x):
        return self.body(x)


dist.init_process_group("gloo")
torch.manual_seed(dist.get_rank())
generator = DistributedDataParallel(Generator(), find_unused_parameters=True)
discriminator = DistributedDataParallel(Discriminator())
of_generator = torch.optim.Adam(generator.parameters())
of_discriminator = torch.optim.Adam(discriminator.parameters())
for _ in range(5):
    fake = generator(torch.randn(6, 4))
    of_discriminator.zero_grad()
    loss = discriminator(fake.detach()).mean() - discriminator(torch.randn(6, 8)).mean()
    loss.backward()
    of_discriminator.step()
    of_generator.zero_grad()
    for parameter in discriminator.parameters():
        parameter.requires_grad_(False)
    (-discriminator.module(fake).mean()).backward()
    for parameter in discriminator.parameters():
        parameter.requires_grad_(True)
    of_generator.step()
dist.destroy_process_group()
