"""Models in which nothing is missed, however oddly written; and that the diagnosis changes nothing and keeps nothing."""

from __future__ import annotations

import contextlib
import copy
import gc
import pickle
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint, checkpoint_sequential

import ddpcov
from causes import linear, model, tracked, vector, x

CLEAN: dict[str, Callable[[], tuple[nn.Module, Callable[[], Tensor]]]] = {}


def clean(build: Callable[[], Any]) -> None:
    CLEAN[build.__name__] = build


def plain(forward: Callable[..., Any], **parts: Any) -> tuple[nn.Module, Callable[[], Tensor]]:
    net = model(forward, **parts)
    return net, lambda: net(x()).square().sum()


@clean
def tied_weights() -> Any:
    embed, head = nn.Embedding(7, 4), nn.Linear(4, 7, bias=False)
    head.weight = embed.weight
    net = model(lambda self, ids: self.head(self.embed(ids)), embed=embed, head=head)
    return net, lambda: net(torch.arange(3)).sum()


@clean
def tied_to_a_module_that_never_runs() -> Any:
    head, shadow = linear(), linear()
    shadow.weight, shadow.bias = head.weight, head.bias
    return plain(lambda self, x: self.head(x), shadow=shadow, head=head)


@clean
def weight_used_by_a_function() -> Any:
    return plain(lambda self, x: F.linear(x, self.head.weight, self.head.bias), head=linear())


@clean
def attention_and_its_projection() -> Any:
    net = model(lambda self, x: self.attention(x, x, x)[0], attention=nn.MultiheadAttention(4, 2))
    return net, lambda: net(x(2, 3, 4)).sum()


@clean
def transformer_in_evaluation_mode() -> Any:
    layer = nn.TransformerEncoderLayer(4, 2, 8, batch_first=True).eval()
    net = model(lambda self, x: self.layer(x), layer=layer)
    return net, lambda: net(x(2, 3, 4)).square().sum()


@clean
def recurrent() -> Any:
    net = model(lambda self, x: self.lstm(x)[0], lstm=nn.LSTM(4, 4, 2))
    return net, lambda: net(x(2, 3, 4)).sum()


@clean
def parametrized() -> Any:
    a, b = parametrizations.weight_norm(linear()), parametrizations.orthogonal(linear())
    return plain(lambda self, x: self.b(self.a(x)), a=a, b=b)


@clean
def reentrant_checkpoint() -> Any:
    def forward(self: Any, x: Tensor) -> Tensor:
        return checkpoint(self.inside, self.before(x), use_reentrant=True)

    return plain(forward, before=linear(), inside=nn.Sequential(linear(), nn.Tanh(), linear()))


@clean
def nested_checkpoints_of_both_kinds() -> Any:
    def forward(self: Any, x: Tensor) -> Tensor:
        def both(x: Tensor) -> Tensor:
            return checkpoint(self.inner, self.outer(x), use_reentrant=True)

        return checkpoint(both, x, use_reentrant=False)

    return plain(forward, inner=linear(), outer=linear())


@clean
def checkpointed_in_segments() -> Any:
    stack = nn.Sequential(linear(), nn.Tanh(), linear(), nn.Dropout(0.5))
    return plain(lambda self, x: checkpoint_sequential(self.stack, 2, x, use_reentrant=False), stack=stack)


@clean
def checkpoint_that_stops_early() -> Any:
    def forward(self: Any, x: Tensor) -> Tensor:
        def inside(x: Tensor) -> Tensor:
            y = torch.sin(self.inner(x))
            torch.zeros(3).exp()  # not needed again
            return y

        return checkpoint(inside, x, use_reentrant=False, early_stop=True)

    return plain(forward, inner=linear())


@clean
def used_outside_the_forward() -> Any:
    net = model(lambda self, x: self.main(x), main=linear(), temperature=vector(), prior=vector())
    return net, lambda: (net(x()) * net.temperature.exp()).sum() + net.prior.square().sum()


@clean
def two_forwards_one_backward() -> Any:
    net = model(lambda self, x, name: self.get_submodule(name)(x), a=linear(), b=linear())
    return net, lambda: net(x(), "a").sum() * net(x(), "b").sum()


@clean
def parts_called_one_by_one() -> Any:
    net = model(lambda self, x: self.b(self.a(x)), a=linear(), b=linear())
    return net, lambda: net.b(torch.tanh(net.a(x()))).sum()


@clean
def losses_kept_in_a_list() -> Any:
    def forward(self: Any, x: Tensor) -> Tensor:
        self.losses = []
        for layer in self.layers:
            x = torch.tanh(layer(x))
            self.losses.append(self.gauge(x).square().mean())
        return x

    net = model(forward, layers=nn.ModuleList([linear(), linear()]), gauge=linear())
    return net, lambda: net(x()).sum() + sum(net.losses)


@clean
def hook_that_changes_the_output() -> Any:
    net = model(lambda self, x: self.main(x), main=linear(), extra=linear())
    net.main.register_forward_hook(lambda module, args, output: net.extra(output))
    return net, lambda: net(x()).sum()


@clean
def a_part_of_one_output() -> Any:
    net = model(lambda self, x: torch.cat([self.a(x), self.b(x)], -1), a=linear(), b=linear())
    return net, lambda: net(x())[:, :3].sum()


@clean
def straight_through() -> Any:
    def forward(self: Any, x: Tensor) -> Tensor:
        y = self.main(x)
        return y + (y.round() - y).detach()

    return plain(forward, main=linear())


@clean
def generator_of_outputs() -> Any:
    def forward(self: Any, x: Tensor) -> Iterator[Tensor]:
        for layer in self.layers:
            x = layer(x)
            yield x

    net = model(forward, layers=nn.ModuleList([linear(), linear()]))
    return net, lambda: sum(y.sum() for y in net(x()))


@clean
def error_caught_inside() -> Any:
    def forward(self: Any, x: Tensor) -> Tensor:
        with contextlib.suppress(RuntimeError):
            self.main(x[:, :2])
        return self.main(x)

    return plain(forward, main=linear())


@clean
def branches_in_threads() -> Any:
    def forward(self: Any, x: Tensor) -> Tensor:
        with ThreadPoolExecutor(2) as pool:
            return sum(pool.map(lambda branch: branch(x), self.branches))

    return plain(forward, branches=nn.ModuleList([linear(), linear()]))


@clean
def layers_dropped_with_weight_zero() -> Any:
    def forward(self: Any, x: Tensor) -> Tensor:
        for i, layer in enumerate(self.layers):
            x = x + layer(x) * float(i != 1)
        return x

    return plain(forward, layers=nn.ModuleList([linear(), linear(), linear()]))


@clean
def vectorised() -> Any:
    return plain(lambda self, x: torch.vmap(lambda row: self.main(row) * self.scale)(x), main=linear(), scale=vector())


@clean
def autocast() -> Any:
    def forward(self: Any, x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return self.b(torch.relu(self.a(x))).float()

    return plain(forward, a=linear(), b=linear())


@clean
def penalty_beside_the_loss() -> Any:
    net = model(lambda self, x: self.b(torch.tanh(self.a(x))), a=linear(), b=linear())

    def loss() -> Tensor:
        real = x().requires_grad_()
        score = net(real)
        (slope,) = torch.autograd.grad(score.sum(), real, create_graph=True)
        return score.mean() + slope.square().sum()

    return net, loss


@clean
def inner_loop_of_meta_learning() -> Any:
    net = model(lambda self, x: self.b(torch.tanh(self.a(x))), a=linear(), b=linear())

    def loss() -> Tensor:
        weights = dict(net.named_parameters())
        inner = torch.func.functional_call(net, weights, x()).square().sum()
        slopes = torch.autograd.grad(inner, list(weights.values()), create_graph=True)
        fast = {name: w - 0.1 * g for (name, w), g in zip(weights.items(), slopes, strict=True)}
        return torch.func.functional_call(net, fast, x()).square().sum()

    return net, loss


@clean
def input_that_requires_a_gradient() -> Any:
    net, delta = linear(), nn.Parameter(torch.zeros(3, 4))
    return net, lambda: net(x() + delta).sum() + net(delta).sum()


@clean
def lazily_built() -> Any:
    return plain(lambda self, x: self.stack(x), stack=nn.Sequential(nn.LazyLinear(4), nn.LazyLinear(2)))


@pytest.mark.filterwarnings("ignore:Lazy modules are a new feature")
@pytest.mark.parametrize("name", CLEAN)
def test_nothing_is_found_where_nothing_is_missed(name: str) -> None:
    torch.manual_seed(0)
    report = tracked(*CLEAN[name](), steps=3)
    assert (report.verdict, report.findings) == ("clean", ())


# What the diagnosis leaves behind.


class Zoo(nn.Module):
    """Much of what the diagnosis watches, and something that is missed in each way."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm, self.drop = nn.Conv1d(4, 4, 3, padding=1), nn.BatchNorm1d(4), nn.Dropout(0.2)
        self.attention, self.lstm = nn.MultiheadAttention(4, 2, dropout=0.1), nn.LSTM(4, 4)
        self.gate, self.aux, self.unused, self.lost = linear(), linear(), linear(), linear()

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x = self.drop(self.norm(self.conv(x)))
        x = x + self.attention(x, x, x)[0]
        x = checkpoint(lambda x: self.lstm(x)[0], x, use_reentrant=False)
        self.lost(x)
        return x * (self.gate(x) > 0), self.aux(x)


def train(*, is_tracked: bool) -> list[Tensor]:
    torch.manual_seed(0)
    net = Zoo()
    optimizer = torch.optim.Adam(net.parameters(), lr=0.01)
    losses = []
    with ddpcov.track(net) if is_tracked else contextlib.nullcontext():
        for _ in range(4):
            loss = net(x(2, 4, 4))[0].square().sum()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.detach())
    return [*losses, *net.state_dict().values(), torch.rand(3)]


def test_training_is_the_same_to_the_bit() -> None:
    bare, watched = train(is_tracked=False), train(is_tracked=True)
    assert [torch.equal(a, b) for a, b in zip(bare, watched, strict=True)] == [True] * len(bare)


def hooks_on(net: nn.Module) -> list[Any]:
    kept = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
    on_modules = [hook for module in net.modules() for name in kept for hook in getattr(module, name).values()]
    return on_modules + [hook for p in net.parameters() for hook in (p._backward_hooks or {}).values()]


@pytest.mark.parametrize("does_fail", [False, True])
def test_no_hook_stays_on_the_model(does_fail: bool) -> None:
    net = Zoo()
    with contextlib.suppress(KeyError), ddpcov.track(net):
        loss = net(x(2, 4, 4))[0].sum()
        assert hooks_on(net)
        if does_fail:
            raise KeyError
        loss.backward()
    assert hooks_on(net) == []


@pytest.mark.parametrize("does_go_back", [False, True])
def test_nothing_of_a_graph_is_kept_after_the_block(does_go_back: bool) -> None:
    net, seen = Zoo(), []
    with ddpcov.track(net) as cov:
        for _ in range(3):
            outputs = net(x(2, 4, 4))
            seen += [weakref.ref(output) for output in outputs]
            token = type("Token", (), {})()  # lives as long as the node
            outputs[0].grad_fn.metadata["token"] = token
            seen.append(weakref.ref(token))
            if does_go_back:
                outputs[0].sum().backward()
            del outputs, token
    gc.collect()
    assert [ref() for ref in seen if ref() is not None] == []
    assert cov.report().run.steps == (3 if does_go_back else 0)


def test_a_copy_made_inside_is_a_plain_model() -> None:
    net = Zoo()
    with ddpcov.track(net) as cov:
        twins = copy.deepcopy(net), pickle.loads(pickle.dumps(net))
        for twin in twins:
            twin(x(2, 4, 4))[1].sum().backward()
        net(x(2, 4, 4))[0].sum().backward()
    codes = {name: f.code for f in cov.report().findings for name in f.parameters if name.endswith("weight")}
    assert codes == {"aux.weight": "DDC105", "gate.weight": "DDC104", "lost.weight": "DDC106", "unused.weight": "DDC101"}


def test_what_a_compiled_method_calls_is_not_said_never_to_run() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = linear(), linear()
            self.inside = torch.compile(self.both, backend="eager")

        def both(self, x: Tensor) -> Tensor:
            return self.a(x) + self.b(x).detach()

        def forward(self, x: Tensor) -> Tensor:
            return self.inside(x)

    net = Net()
    (finding,) = tracked(net, lambda: net(x()).sum()).findings
    assert finding.code == "DDC100" and "compiled" in finding.evidence[0]
