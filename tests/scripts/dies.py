"""Children that train and die: `dies.py HOW TIMES SEED`, with one folder for each child in the current one.

Beside ddpcov each child keeps a diary in memory that it shares with this process: what no death can take. It is written by
hooks that know nothing of ddpcov.
"""

import ctypes
import itertools
import mmap
import os
import random
import resource
import signal
import sys
import threading
import time
from pathlib import Path

import torch
from torch import nn

import ddpcov

NAMES = "abcdef"
IN_PASS, STEPPED, LEAVING, LEFT = 0xF0, 0xF1, 0xF2, 0xF3


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        for name in NAMES:
            self.add_module(name, nn.Linear(4, 4, bias=False))

    def forward(self, x, names):
        for name in names:
            x = getattr(self, name)(x)
        return x


def train(diary, choose):
    """Trains forever, in one `track` block after the other."""
    for block in itertools.count():
        model = Net()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        for code, name in enumerate(NAMES):
            getattr(model, name).weight.register_post_accumulate_grad_hook(lambda p, code=code: diary(code))
        with ddpcov.track(model, out=f"{block}.bin"):
            for _ in range(choose.randrange(2, 30)):
                for _ in range(choose.choice([1, 1, 3])):
                    diary(IN_PASS)
                    model(torch.ones(2, 4), choose.sample(NAMES, 3)).sum().backward()
                optimizer.step()
                diary(STEPPED)
                optimizer.zero_grad()
            diary(LEAVING)
        diary(LEFT)


def warm_up():
    """What is imported late is imported here, once for all children."""
    model = Net()
    with ddpcov.track(model, out="warm_up.bin"):
        model(torch.ones(2, 4), NAMES).sum().backward()
        torch.optim.SGD(model.parameters()).step()


def after(diary, delay, die):
    """Dies so, at whatever this process is doing `delay` seconds after its first pass began."""

    def wait():
        while not diary[0]:
            time.sleep(0.001)
        time.sleep(delay)
        die()

    threading.Thread(target=wait, daemon=True).start()


eaten = []


def eat():
    """Takes memory, in large pieces, until something stops it."""
    while True:
        eaten.append(torch.ones(1 << 18))


def run_dry():
    """Leaves no memory at all within a limit of this process's own; its training then asks for some, a little at a time."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    limit = pages * resource.getpagesize() + (16 << 20)
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    for size in (1 << 18, 1 << 12, 1 << 8):
        try:
            while True:
                eaten.append(torch.ones(size))
        except (RuntimeError, MemoryError):
            pass


# What a thread of the child does, and what this process sends it.
FROM_INSIDE = {
    "exit": lambda: os._exit(3),
    "segfault": lambda: ctypes.string_at(0),
    "abort": os.abort,
    "dry": run_dry,
    "eat": eat,
}
FROM_OUTSIDE = {"kill": signal.SIGKILL, "terminate": signal.SIGTERM, "interrupt": signal.SIGINT, "bus": signal.SIGBUS}


def child(how, delay, seed, diary):
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    os.dup2(os.open("stderr", os.O_CREAT | os.O_WRONLY), 2)
    position = itertools.count()

    def write(code):
        diary[next(position)] = code + 1
        if how == "dry" and eaten:
            eaten.append(torch.ones(1 << 8))

    if how in FROM_INSIDE:
        after(diary, delay, FROM_INSIDE[how])
    try:
        train(write, random.Random(seed))
    except BaseException as error:
        print(type(error).__name__, error, file=sys.stderr, flush=True)
        os._exit(99)


def main(how, times, seed):
    torch.set_num_threads(1)
    warm_up()
    choose = random.Random(seed)
    group = os.environ.get("DIES_IN_CGROUP")
    for number in range(times):
        folder = Path(str(number))
        folder.mkdir()
        diary = mmap.mmap(-1, 1 << 16)
        delay, of_child = choose.uniform(0, 0.08), choose.random()
        pid = os.fork()
        if pid == 0:
            os.chdir(folder)
            if group:
                Path(group, "cgroup.procs").write_text(str(os.getpid()))
            child(how, delay, of_child, diary)
        if how in FROM_OUTSIDE:
            while not diary[0]:
                time.sleep(0.001)
            time.sleep(delay)
            os.kill(pid, FROM_OUTSIDE[how])
        code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        (folder / "diary").write_bytes(diary[:].rstrip(b"\0"))
        (folder / "code").write_text(str(code))
        diary.close()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
