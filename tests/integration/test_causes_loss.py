"""Why a parameter was missed, DDC105 to DDC111 and DDC402: computed, and lost before the loss, in the loss or on the way back.

Models written as people write them, each with the one cause that is right.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence
from torch.utils.checkpoint import checkpoint, checkpoint_sequential

from causes import Cases, check, linear, model, tracked, vector, x
from reference import Undefine

CASES = Cases()
case = CASES.add


# DDC105: an output that the loss does not use.


@dataclasses.dataclass
class Detection:
    boxes: Tensor
    extra: dict[str, list[Any]]


class Pair(NamedTuple):
    mean: Tensor
    spread: Tensor


class Box:
    __slots__ = ("inner",)

    def __init__(self, inner: Any) -> None:
        self.inner = inner


def returned_in(wrap: Callable[[Tensor, Tensor], Any], used: Callable[[Any], Tensor]) -> Callable[[], Any]:
    def build() -> Any:
        net = model(lambda self, x: wrap(self.main(x), self.aux(x)), main=linear(), aux=linear())
        return net, lambda: used(net(x())).sum()

    return build


for _name, _wrap, _used, _path in (
    ("tuple", lambda a, b: (a, b), lambda out: out[0], "output [1]"),
    ("list", lambda a, b: [b, [a]], lambda out: out[1][0], "output [0]"),
    ("dict", lambda a, b: {"main": a, "aux": {3: b}}, lambda out: out["main"], 'output ["aux"][3]'),
    ("dataclass", lambda a, b: Detection(a, {"masks": [b]}), lambda out: out.boxes, 'output .extra["masks"][0]'),
    ("named_tuple", lambda a, b: Pair(a, b), lambda out: out.mean, "output .spread"),
    ("plain_object", lambda a, b: SimpleNamespace(a=a, b=Box(b)), lambda out: out.a, "output .b.inner"),
    ("generator", lambda a, b: (one for one in (a, b)), lambda out: next(out) + next(out).detach(), ""),
):
    code = "DDC105" if _path else "DDC100"  # what a generator holds is not known before it gives it
    case(code, "aux", _path, name=f"returned_in_a_{_name}")(returned_in(_wrap, _used))


@case("DDC105", "aux", "It leads only to output [1]", "the loss does not use it")
def output_that_the_loss_detaches() -> Any:
    net = model(lambda self, x: (self.main(x), self.aux(x)), main=linear(), aux=linear())

    def loss() -> Tensor:
        main, aux = net(x())  # <- DDC105
        return (main * aux.detach()).sum()

    return net, loss


@case("DDC105", "head", "It leads only to the output of the forward")
def only_a_hook_is_listened_to() -> Any:
    seen: list[Tensor] = []
    net = model(lambda self, x: self.head(self.trunk(x)), trunk=linear(), head=linear())
    net.trunk.register_forward_hook(lambda module, args, output: seen.append(output))

    def loss() -> Tensor:
        net(x())  # <- DDC105
        return seen.pop().sum()

    return net, loss


@case("DDC105", "aux")
def checkpointed_output_unused() -> Any:
    def forward(self: Any, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.main(x), checkpoint(self.aux, x, use_reentrant=False)

    net = model(forward, main=linear(), aux=linear())
    return net, lambda: net(x())[0].sum()


@case("DDC105", "decoder", "outputs [1], [2]")
def decoder_of_unused_outputs() -> Any:
    def forward(self: Any, x: Tensor) -> tuple[Tensor, ...]:
        first, second = self.decoder(x).chunk(2, -1)
        return self.main(x), first, second

    net = model(forward, main=linear(), decoder=linear())
    return net, lambda: net(x())[0].sum()


# DDC106: computed, and thrown away.


@case("DDC106", "probe", "The result of probe is discarded", "left torch at `item`")
def logged_and_no_more() -> Any:
    def forward(self: Any, x: Tensor) -> Tensor:
        self.log = {"probe": self.probe(x).mean().item()}  # <- DDC106
        return self.main(x)

    net = model(forward, main=linear(), probe=linear())
    return net, lambda: net(x()).sum()


@case("DDC106", "aux", "The result of aux is discarded")
def kept_in_an_attribute() -> Any:
    def forward(self: Any, x: Tensor) -> Tensor:
        y = self.trunk(x)
        self.last = self.aux(y).square()  # <- DDC106
        return y

    net = model(forward, trunk=linear(), aux=linear())
    return net, lambda: net(x()).sum()


@case("DDC106", "aux", "The result of aux is discarded")
def used_in_an_assertion() -> Any:
    def forward(self: Any, x: Tensor) -> Tensor:
        assert torch.isfinite(self.aux(x)).all()  # <- DDC106
        return self.main(x)

    net = model(forward, main=linear(), aux=linear())
    return net, lambda: net(x()).sum()


@case("DDC106", "second")
def one_of_the_losses_forgotten() -> Any:
    def forward(self: Any, x: Tensor) -> Tensor:
        self.losses = [self.first(x).square().mean()]
        self.losses.append(self.second(x).square().mean())  # <- DDC106
        return self.main(x)

    net = model(forward, main=linear(), first=linear(), second=linear())
    return net, lambda: net(x()).sum() + net.losses[0]


@case("DDC106", "bias")
def shadowed_by_a_second_try() -> Any:
    def forward(self: Any, x: Tensor) -> Tensor:
        y = self.main(x)
        try:
            y = y + self.bias  # <- DDC106
            y = y.view(7)
        except RuntimeError:
            y = self.main(x)
        return y

    net = model(forward, main=linear(), bias=vector())
    return net, lambda: net(x()).sum()


@case("DDC106", "recurrent")
def recurrent_states_thrown_away() -> Any:
    def forward(self: Any, x: Tensor) -> Tensor:
        packed = pack_padded_sequence(x, torch.tensor([3, 2]), batch_first=True)
        self.states, _ = self.recurrent(packed)  # <- DDC106
        return self.head(x[:, -1])

    net = model(forward, recurrent=nn.GRU(4, 4, batch_first=True, bidirectional=True), head=linear())
    return net, lambda: net(x(2, 3, 4)).sum()


@case("DDC106", "attention", "What attention gives at [0], [1] is discarded")
def attention_thrown_away() -> Any:
    def forward(self: Any, x: Tensor) -> Tensor:
        self.attention(x, x, x)  # <- DDC106
        return self.main(x)

    net = model(forward, attention=nn.MultiheadAttention(4, 2), main=linear())
    return net, lambda: net(x(2, 3, 4)).sum()


@case("DDC106", "head.weight")
def weight_used_by_a_function() -> Any:
    def forward(self: Any, x: Tensor) -> Tensor:
        nn.functional.linear(x, self.head.weight)  # <- DDC106
        return self.main(x)

    net = model(forward, main=linear(), head=nn.Linear(4, 4, bias=False))
    return net, lambda: net(x()).sum()


@case("DDC106", "aux")
def after_ten_thousand_operations() -> Any:
    def forward(self: Any, x: Tensor) -> Tensor:
        y = self.main(x)
        for _ in range(10_000):
            y = y + 1
        self.aux(y)
        return y

    net = model(forward, main=linear(), aux=linear())
    return net, lambda: net(x()).sum()


# DDC107: the loss hangs on nothing.


def lost(how: Callable[[Tensor], Tensor]) -> Callable[[], Any]:
    def build() -> Any:
        net = linear()
        return net, lambda: how(net(x()).sum())

    return build


for _name, _how in (
    ("number", lambda loss: torch.tensor(loss.item(), requires_grad=True)),
    ("detached", lambda loss: loss.detach().requires_grad_()),
    ("constant", lambda loss: torch.zeros((), requires_grad=True)),
):
    case("DDC107", "weight bias", name=f"loss_is_{_name}")(lost(_how))


# DDC108: undefined on the way.


@case("DDC108", "main", "UndefineBackward was given one and handed none on", "in the backward of Undefine")
def function_without_a_gradient() -> Any:
    net = model(lambda self, x: self.head(Undefine.apply(self.main(x))), main=linear(), head=linear())
    return net, lambda: net(x()).sum()


class Scale(torch.autograd.Function):
    """Forgets the gradient of its second argument."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor) -> Tensor:
        ctx.save_for_backward(w)
        return x * w

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient * ctx.saved_tensors[0], None


@case("DDC108", "w", "in the backward of Scale")
def function_that_forgets_an_argument() -> Any:
    net = model(lambda self, x: Scale.apply(self.main(x), self.w.exp()), main=linear(), w=vector())
    return net, lambda: net(x()).sum()


# DDC110: reentrant checkpoints over inputs without a gradient.


@case("DDC110", "inner outer", "use_reentrant=False")
def nested_checkpoints() -> Any:
    def forward(self: Any, x: Tensor) -> Tensor:
        def both(x: Tensor) -> Tensor:
            return checkpoint(self.inner, self.outer(x), use_reentrant=True)  # <- DDC110

        return self.head(checkpoint(both, x, use_reentrant=True))  # <- DDC110

    net = model(forward, inner=linear(), outer=linear(), head=linear())
    return net, lambda: net(x()).sum()


@case("DDC110", "stack.0 stack.1")
def checkpointed_in_segments() -> Any:
    def forward(self: Any, x: Tensor) -> Tensor:
        return self.head(checkpoint_sequential(self.stack, 2, x, use_reentrant=True))  # <- DDC110

    stack = nn.Sequential(linear(), linear(), linear(), linear()).requires_grad_(False)
    stack[:2].requires_grad_(True)
    net = model(forward, stack=stack, head=linear())
    return net, lambda: net(x()).sum()


# DDC111: the loss is a gradient, and does not depend on it.


@case("DDC111", "last.bias")
def gradient_penalty_alone() -> Any:
    net = model(lambda self, x: self.last(torch.tanh(self.first(x))), first=linear(), last=nn.Linear(4, 1))

    def loss() -> Tensor:
        real = x().requires_grad_()
        (slope,) = torch.autograd.grad(net(real).sum(), real, create_graph=True)
        return (slope.norm(dim=1) - 1).square().mean()

    return net, loss


@case("DDC111", "last.bias")
def forces_alone() -> Any:
    def forward(self: Any, x: Tensor) -> tuple[Tensor, Tensor]:
        x = x.clone().requires_grad_()
        energy = self.last(torch.tanh(self.first(x))).sum()
        return energy, -torch.autograd.grad(energy, x, create_graph=True)[0]

    net = model(forward, first=linear(), last=nn.Linear(4, 1))
    return net, lambda: net(x())[1].square().sum()


# DDC402: trained by nobody.


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")
@pytest.mark.parametrize("name", CASES)
def test_the_cause_is_the_right_one(name: str) -> None:
    check(CASES[name])


@pytest.mark.parametrize(
    ("held", "factor", "said"),
    [
        ({"cells": [linear()]}, lambda net: net.cells[0](torch.ones(4)), "cells[0].weight"),
        ({"cells": {"a": (linear(),)}}, lambda net: net.cells["a"][0](torch.ones(4)), "cells['a'][0].weight"),
        ({"scales": [vector()]}, lambda net: net.scales[0], "scales[0], shape (4,)"),
        ({"scale": torch.ones(4, requires_grad=True)}, lambda net: net.scale, "scale, shape (4,)"),
    ],
    ids=["modules in a list", "modules in a dict", "parameter in a list", "plain tensor"],
)
def test_what_no_module_registers_is_found(held: dict[str, Any], factor: Callable[[Any], Tensor], said: str) -> None:
    net = model(lambda self, x: self.main(x) * factor(self), main=linear(), **held)
    report = tracked(net, lambda: net(x()).sum())
    (finding,) = report.findings
    assert (finding.code, finding.parameters) == ("DDC402", ())
    assert said in "\n".join(finding.evidence)
