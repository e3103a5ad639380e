"""One rank of the demo: an ordinary training script, with one line of ddpcov in it."""

import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import ddpcov


# ---
class Backbone(nn.Module):
    def __init__(self):
        super().__init__()
        self.stages = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU())
        self.head = nn.Linear(64, 1000)

    def forward(self, x):
        return self.head(self.stages(x))


class Segmenter(nn.Module):
    def __init__(self):
        super().__init__()
        self.backbone = Backbone()
        self.decoder = nn.Linear(64, 2)

    def forward(self, x):
        return self.decoder(self.backbone.stages(x))  # the backbone's own head is never called


# ---
def main(store: str, world_size: int, out: str, rank: int) -> None:
    torch.set_num_threads(1)
    torch.manual_seed(rank)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world_size)
    model = DistributedDataParallel(Segmenter())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with ddpcov.track(model, out=out, optimizer=optimizer):
        for _ in range(3):
            model(torch.randn(8, 32)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), sys.argv[3], int(sys.argv[4]))
