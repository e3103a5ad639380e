"""One process, no wrapper: an encoder and a decoder that are called one after the other. What it sees goes to stdout."""

import json
import multiprocessing
import os
import sys

import torch
from torch import nn

torch.set_num_threads(1)


class Encoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Linear(4, 4)
        self.old = nn.Linear(4, 4)

    def forward(self, x):
        return self.body(x)


def child(queue):
    """Imports all that this file imports, and trains nothing."""
    queue.put(nn.Linear(2, 2)(torch.ones(2)).sum().item())


def main():
    imported = [name for name in sys.modules if name.partition(".")[0] in ("torch", "numpy")]
    print(json.dumps({"argv": sys.argv, "path": sys.path, "imported": imported, "stdin": sys.stdin.read()}), flush=True)
    torch.manual_seed(0)
    encoder, decoder = Encoder(), nn.Sequential(nn.Linear(4, 4), nn.ReLU())
    criterion = nn.MSELoss()
    optimizer = torch.optim.SGD([*encoder.parameters(), *decoder.parameters()], lr=0.1)
    how = sys.argv[1]
    for step in range(4):
        loss = criterion(decoder(encoder(torch.randn(2, 4))), torch.zeros(2, 4))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if step == 1 and how == "os.fork":
            pid = os.fork()
            if not pid:
                for _ in range(3):  # in a child that is not part of the training
                    encoder(torch.randn(2, 4)).sum().backward()
                os._exit(0)
            os.waitpid(pid, 0)
        if step == 1 and how in ("fork", "forkserver", "spawn"):
            context = multiprocessing.get_context(how)
            queue = context.Queue()
            process = context.Process(target=child, args=(queue,))
            process.start()
            queue.get()
            process.join()
    if how == "os._exit":
        os._exit(5)
    if how == "sys.exit":
        sys.exit(6)
    if how == "raise":
        raise KeyError("how")


if __name__ == "__main__":
    main()
