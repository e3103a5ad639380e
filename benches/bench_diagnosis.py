"""What the diagnosis costs: a traced step, and the steps after the trace was taken off.

    pytest benches/bench_diagnosis.py

Ratios only. A round trains one model for a few steps without ddpcov, without diagnosis and with it, in random order, in one
process; a ratio is that of the median steps of two kinds in the same round. Shown are the median over all rounds and a 95 %
bootstrap interval of it; a bound counts as broken when the whole interval lies beyond it. What must be nothing at all is
counted, not timed.
"""

from __future__ import annotations

import contextlib
import gc
import os
import random
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import ddpcov

TRACED_BOUND = 4.0  # × a plain step

# `diagnose=`, None for no ddpcov at all → how many steps are taken, and as what their times count, if they do. With "auto" the
# trace comes off in the ninth step, if none after the first brings anything new; until then a step is as with "always".
SCHEDULES: dict[str | None, tuple[tuple[int, str | None], ...]] = {
    None: ((1, None), (4, "plain")),
    "off": ((2, None), (4, "off")),
    "auto": ((2, None), (6, "traced"), (2, None), (4, "later")),
}
RATIOS = (("traced", "plain"), ("off", "plain"), ("later", "off"))


class Attention(nn.Module):
    """Causal self-attention."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.heads = width // 16
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        q, k, v = self.qkv(x).view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        mixed = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(mixed.transpose(1, 2).reshape(batch, length, width))


class Block(nn.Module):
    """Eleven modules; its `adapter` is never called."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(width)
        self.attention = Attention(width)
        self.dropout = nn.Dropout(0.1)
        self.mlp_norm = nn.LayerNorm(width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
        self.adapter = nn.Linear(width, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.dropout(self.attention(self.attention_norm(x)))
        return x + self.dropout(self.mlp(self.mlp_norm(x)))


class Transformer(nn.Module):
    """A pre-norm language model. It misses gradients by three causes: never called, detached, not in the loss."""

    def __init__(self, width: int = 64, depth: int = 33, vocabulary: int = 512) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(depth))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary)
        self.router = nn.Linear(width, 4)
        self.auxiliary = nn.Linear(width, 2)

    def forward(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        x = self.norm(x) * self.router(x).detach().softmax(-1).amax(-1, keepdim=True)
        return self.head(x), self.auxiliary(x)


class SmallLayers(nn.Module):
    """As many modules, with next to nothing to compute: what is left is the cost of each call. Every twentieth is skipped."""

    def __init__(self, depth: int = 400) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(depth))

    def forward(self, x: Tensor) -> Tensor:
        for i, layer in enumerate(self.layers):
            if i % 20:
                x = layer(x)
        return x


@dataclass
class Training:
    """A model that is trained on the same batch again and again."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    batch: Tensor
    loss_of: Callable[[Any], Tensor]

    def step(self) -> None:
        """One step, as everyone writes it."""
        self.loss_of(self.model(self.batch)).backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def tracked(self, diagnose: str | None) -> contextlib.AbstractContextManager[Any]:
        """A block in which ddpcov tracks the model, if it is to."""
        if diagnose is None:
            return contextlib.nullcontext()
        return ddpcov.track(self.model, optimizer=self.optimizer, diagnose=diagnose)

    def num_module_hooks(self) -> int:
        """Forward hooks on all modules."""
        return sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in self.model.modules())

    def watched(self) -> tuple[int, int]:
        """In one step: function modes that are active inside the forward, and calls of Python functions of ddpcov."""
        package = os.path.dirname(ddpcov.__file__)
        modes, calls = [], 0

        def look(*_: Any) -> None:
            modes.append(torch._C._len_torch_function_stack())

        def count(frame: Any, event: str, _: Any) -> None:
            nonlocal calls
            calls += event == "call" and frame.f_code.co_filename.startswith(package)

        innermost = [m for m in self.model.modules() if isinstance(m, nn.Linear)][1]
        with innermost.register_forward_pre_hook(look):
            sys.setprofile(count)
            try:
                self.step()
            finally:
                sys.setprofile(None)
        return max(modes), calls


def transformer() -> Training:
    """About 400 modules, 1.7 million parameters, 64 tokens."""
    model = Transformer()
    tokens = torch.randint(0, 512, (2, 32))

    def loss_of(output: tuple[Tensor, Tensor]) -> Tensor:
        return nn.functional.cross_entropy(output[0][:, :-1].flatten(0, 1), tokens[:, 1:].flatten())

    return Training(model, torch.optim.AdamW(model.parameters(), lr=1e-4), tokens, loss_of)


def small_layers() -> Training:
    """The worst case."""
    model = SmallLayers()
    return Training(model, torch.optim.SGD(model.parameters(), lr=1e-4), torch.randn(4, 8), Tensor.sum)


@dataclass
class Comparison:
    """Median step of each kind, round by round, in seconds."""

    training: Training
    rounds: list[dict[str, float]] = field(default_factory=list)

    def run_round(self) -> None:
        """Every schedule once."""
        medians = {}
        for diagnose in random.sample(list(SCHEDULES), len(SCHEDULES)):
            with self.training.tracked(diagnose):
                gc.collect()
                for num_steps, kind in SCHEDULES[diagnose]:
                    seconds = [_seconds(self.training.step) for _ in range(num_steps)]
                    if kind is not None:
                        medians[kind] = float(np.median(seconds))
        self.rounds.append(medians)

    def ratio(self, kind: str, to: str) -> tuple[float, float, float]:
        """Median of the paired ratios, and the ends of its 95 % bootstrap interval."""
        ratios = np.array([one[kind] / one[to] for one in self.rounds])
        drawn = np.random.default_rng(0).choice(ratios, (4000, len(ratios)))
        low, high = np.percentile(np.median(drawn, axis=1), (2.5, 97.5))
        return float(np.median(ratios)), float(low), float(high)

    def table(self, title: str) -> str:
        """The ratios, one a line."""
        plain = np.median([one["plain"] for one in self.rounds])
        modules = sum(1 for _ in self.training.model.modules())
        lines = [f"{title}: {modules} modules, a plain step takes {plain * 1e3:.1f} ms, {len(self.rounds)} rounds"]
        for kind, to in RATIOS:
            middle, low, high = self.ratio(kind, to)
            lines.append(f"  {kind:>6} / {to:<5}  {middle:6.3f}  [{low:.3f}, {high:.3f}]")
        return "\n".join(lines)


def _seconds(action: Callable[[], None]) -> float:
    # Of this thread, where all of it runs: other programs on the machine change them less than the time of day.
    start = time.thread_time()
    action()
    return time.thread_time() - start


@pytest.fixture(autouse=True)
def _alike() -> Iterator[None]:
    """One thread, one seed, and no collection of garbage in the middle of a step."""
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    random.seed(0)
    gc.disable()
    yield
    gc.enable()
    torch.set_num_threads(num_threads)


@pytest.mark.parametrize("make, num_rounds", [(transformer, 7), (small_layers, 5)], ids=["transformer", "small_layers"])
def test_ratios(benchmark: Any, capsys: pytest.CaptureFixture[str], make: Callable[[], Training], num_rounds: int) -> None:
    """Pytest-benchmark's own table shows the time of a round; the ratios are printed, and go with it as extra info."""
    comparison = Comparison(make())
    benchmark.pedantic(comparison.run_round, rounds=num_rounds)
    with capsys.disabled():
        print("\n" + comparison.table(make.__name__))
    for kind, to in RATIOS:
        benchmark.extra_info[f"{kind} / {to}"] = comparison.ratio(kind, to)
    middle, low, _ = comparison.ratio("traced", "plain")
    if make is transformer:  # the other one is the worst case, and shown only
        assert low < TRACED_BOUND, f"a traced step takes {middle:.2f} × a plain one; expected less than {TRACED_BOUND}"


@pytest.mark.parametrize("make", [transformer, small_layers])
def test_nothing_stays(capsys: pytest.CaptureFixture[str], make: Callable[[], Training]) -> None:
    """Once the trace is off no hook and no function mode is left, and ddpcov's own calls do not depend on the model's size."""
    training = make()
    hooks, modes, calls = {}, {}, {}
    for diagnose in ("off", "auto", "always"):
        with training.tracked(diagnose):
            for _ in range(10 if diagnose == "auto" else 2):
                training.step()
            hooks[diagnose] = training.num_module_hooks()
            modes[diagnose], calls[diagnose] = training.watched()
    with capsys.disabled():
        print(f"\n{make.__name__}, calls of ddpcov's Python functions in a later step: {calls}")
    assert hooks["always"] and modes["always"]  # where there is a trace, it is seen
    assert hooks["auto"] == modes["auto"] == 0
    assert calls["auto"] - calls["off"] < 10
