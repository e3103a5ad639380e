"""A training script as they are written for `mp.spawn`; its model has parameters that nothing uses."""

import argparse
import math
import os

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from texture import TextureNet
from torch import nn
from torch.nn.parallel import DistributedDataParallel

best_accuracy = 0.0


class Options:
    def __init__(self):
        parser = argparse.ArgumentParser()
        parser.add_argument("--batch-size", type=int, default=4)
        parser.add_argument("--epochs", type=int, default=1)
        parser.add_argument("--images", type=int, default=48)
        parser.add_argument("--workers", type=int, default=0)
        parser.add_argument("--lr", type=float, default=0.05)
        parser.add_argument("--world-size", type=int, default=1)
        parser.add_argument("--rank", type=int, default=0)
        parser.add_argument("--num-devices", type=int, default=2)
        parser.add_argument("--dist-url", default="tcp://127.0.0.1:23456")
        self.parser = parser

    def parse(self):
        return self.parser.parse_args()


class Images(torch.utils.data.Dataset):
    def __init__(self, num):
        self.num = num

    def __len__(self):
        return self.num

    def __getitem__(self, index):
        generator = torch.Generator().manual_seed(index)
        return torch.randn(3, 16, 16, generator=generator), index % 5


def main():
    args = Options().parse()
    devices = args.num_devices
    args.world_size = devices * args.world_size
    args.lr = args.lr * args.world_size
    mp.spawn(main_worker, nprocs=devices, args=(devices, args))


def main_worker(device, devices, args):
    global best_accuracy
    torch.set_num_threads(1)
    args.rank = args.rank * devices + device
    dist.init_process_group("gloo", init_method=args.dist_url, world_size=args.world_size, rank=args.rank)
    torch.manual_seed(1)
    trainset, valset = Images(args.images), Images(8)
    sampler = torch.utils.data.distributed.DistributedSampler(trainset)
    loader = torch.utils.data.DataLoader(trainset, args.batch_size, num_workers=args.workers, sampler=sampler, drop_last=True)
    val_loader = torch.utils.data.DataLoader(valset, args.batch_size)
    model = TextureNet(num_classes=5)
    if args.rank == 0:
        print(model)
    criterion = nn.CrossEntropyLoss()
    model = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=args.lr, momentum=0.9, weight_decay=1e-4)
    num_steps = args.epochs * len(loader)

    def train(epoch):
        sampler.set_epoch(epoch)
        model.train()
        for i, (image, target) in enumerate(loader):
            for group in optimizer.param_groups:
                group["lr"] = args.lr * 0.5 * (1 + math.cos(math.pi * (epoch * len(loader) + i) / num_steps))
            optimizer.zero_grad()
            loss = criterion(model(image), target)
            loss.backward()
            optimizer.step()
            if args.rank == 0:
                print(f"epoch {epoch} iteration {i} loss {loss.item():.4f}", flush=True)

    def validate():
        model.eval()
        right = torch.zeros(())
        with torch.no_grad():
            for image, target in val_loader:
                right += (model(image).argmax(1) == target).sum()
        dist.all_reduce(right)
        return right.item() / (len(valset) * args.world_size)

    for epoch in range(args.epochs):
        train(epoch)
        accuracy = validate()
        best_accuracy = max(best_accuracy, accuracy)
        if args.rank == 0:
            os.makedirs("runs", exist_ok=True)
            state = {"epoch": epoch, "model": model.module.state_dict(), "optimizer": optimizer.state_dict()}
            torch.save(state, "runs/checkpoint.pth.tar")
            print(f"validated {accuracy:.3f}", flush=True)


if __name__ == "__main__":
    main()
