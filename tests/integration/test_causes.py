"""Why a parameter was missed, DDC101 to DDC104: not run, not read, read without gradient mode, or cut off on the way.

Models written as people write them, each with the one cause that is right.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations

from causes import Cases, check, linear, model, vector, x

CASES = Cases()
case = CASES.add


# DDC101: never called.


class Backbone(nn.Module):
    """As in a model library: a classifier with a method for what comes before its head."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.blocks, self.head = linear(), nn.ModuleList([linear(), linear()]), linear()

    def features(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = torch.tanh(block(x))
        return x

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.features(x))


@case("DDC101", "backbone.head", "backbone.head (Linear) never ran", "parts of it were called on their own")
def features_of_a_backbone() -> Any:
    def forward(self: Any, x: Tensor) -> Tensor:
        return self.task(self.backbone.features(x))  # <- DDC101

    net = model(forward, backbone=Backbone(), task=linear())
    return net, lambda: net(x()).sum()


@case("DDC101", "head", "head (Linear) never ran")
def features_without_any_forward() -> Any:
    net = Backbone()
    return net, lambda: net.features(x()).sum()


@case("DDC101", "backbone.head backbone.stem")
def blocks_of_a_backbone() -> Any:
    def forward(self: Any, x: Tensor) -> Tensor:
        for block in self.backbone.blocks:  # <- DDC101
            x = block(x)
        return x

    net = model(forward, backbone=Backbone())
    return net, lambda: net(x()).sum()


@case("DDC101", "neck.lateral", "neck.lateral (Linear) never ran")
def forward_called_by_name() -> Any:
    neck = model(lambda self, x: self.top(x), top=linear(), lateral=linear())
    net = model(lambda self, x: self.neck.forward(x), neck=neck)
    return net, lambda: net(x()).sum()


@case("DDC101", "aux", "argument mask of the forward was None", "Pass mask to the forward")
def optional_argument() -> Any:
    def forward(self: Any, x: Tensor, mask: Tensor | None = None) -> Tensor:
        y = self.main(x)
        if mask is not None:
            y = y + self.aux(x) * mask  # <- DDC101
        return y

    net = model(forward, main=linear(), aux=linear())
    return net, lambda: net(x()).sum()


@case("DDC101", "key", "query ran more than once", "was one of the calls meant for key?")
def sibling_called_twice() -> Any:
    def forward(self: Any, x: Tensor) -> Tensor:
        return self.value(x) * torch.softmax(self.query(x) * self.query(x), -1)

    net = model(forward, query=linear(), key=linear(), value=nn.Linear(4, 4, bias=False))
    return net, lambda: net(x()).sum()


@case("DDC101", "pooler", "own is a copy of pooler")
def copy_trained_in_its_place() -> Any:
    pooler = linear()
    net = model(lambda self, x: self.own(x), pooler=pooler, own=copy.deepcopy(pooler))
    return net, lambda: net(x()).sum()


@case("DDC101", "heads.b", 'heads["b"] (Linear) never ran')
def branch_of_a_dict() -> Any:
    def forward(self: Any, x: Tensor, task: str) -> Tensor:
        return self.heads[task](x)  # <- DDC101

    net = model(forward, heads=nn.ModuleDict({"a": linear(), "b": linear()}))
    return net, lambda: net(x(), "a").sum()


@case("DDC101", "bank.rows.1.0 bank.rows.1.1")
def container_without_a_forward() -> Any:
    class Bank(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.rows = nn.ModuleList([nn.ModuleList([linear(), linear()]) for _ in range(2)])

    def forward(self: Any, x: Tensor) -> Tensor:
        for one in self.bank.rows[0]:  # <- DDC101
            x = one(x)
        return x

    net = model(forward, bank=Bank())
    return net, lambda: net(x()).sum()


@case("DDC101", "block.adapter.down block.adapter.up", "block.adapter (Sequential) never ran")
def adapter_not_switched_on() -> Any:
    def forward(self: Any, x: Tensor) -> Tensor:
        x = self.base(x)
        if self.is_adapted:
            x = x + self.adapter(x)  # <- DDC101
        return x

    adapter = nn.Sequential()
    adapter.add_module("down", nn.Linear(4, 2))
    adapter.add_module("up", nn.Linear(2, 4))
    block = model(forward, base=linear(), adapter=adapter, is_adapted=False)
    net = model(lambda self, x: self.block(x), block=block)
    return net, lambda: net(x()).sum()


@case("DDC101", "attention", "attention (MultiheadAttention) never ran")
def attention_unused() -> Any:
    net = model(lambda self, x: self.main(x), main=linear(), attention=nn.MultiheadAttention(4, 2))
    return net, lambda: net(x()).sum()


@case("DDC101", "rest")
def weight_normalised_unused() -> Any:
    net = model(lambda self, x: self.main(x), main=linear(), rest=parametrizations.weight_norm(linear()))
    return net, lambda: net(x()).sum()


# DDC102: its module ran, and did not read it.


@case("DDC102", "gamma mask_token", "no operation of the forward took it as an argument")
def options_that_are_off() -> Any:
    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.main, self.scaled = linear(), False
            self.register_parameter("gamma", vector())  # <- DDC102
            self.mask_token = vector()  # <- DDC102

        def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
            if mask is not None:
                x = torch.where(mask, self.mask_token, x)
            return self.main(x) * (self.gamma if self.scaled else 1)

    net = Block()
    return net, lambda: net(x()).sum()


@case("DDC102", "prompts.1 scales.b")
def entries_of_lists_and_dicts() -> Any:
    def forward(self: Any, x: Tensor) -> Tensor:
        return x * self.prompts[0] + self.scales["a"]

    prompts, scales = nn.ParameterList([vector(), vector()]), nn.ParameterDict({"a": vector(), "b": vector()})
    net = model(forward, prompts=prompts, scales=scales)
    return net, lambda: net(x()).sum()


@case("DDC102", "layer.bias")
def bias_that_is_left_out() -> Any:
    class NoBias(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return F.linear(x, self.weight)

    net = model(lambda self, x: self.layer(x), layer=NoBias(4, 4))
    return net, lambda: net(x()).sum()


@case("DDC102", "size")
def only_the_shape_is_asked_for() -> Any:
    def forward(self: Any, x: Tensor) -> Tensor:
        noise = torch.zeros_like(self.size) + self.size.shape[0] + self.size.new_ones(4)
        return self.main(x.to(self.size.device, self.size.dtype)) + noise

    net = model(forward, main=linear(), size=vector())
    return net, lambda: net(x()).sum()


# DDC103: without gradient mode.


@case("DDC103", "vision", "gradient mode was off when vision was called")
def no_grad_block() -> Any:
    def forward(self: Any, x: Tensor) -> Tensor:
        with torch.no_grad():
            seen = self.vision(x)  # <- DDC103
        return self.head(seen)

    net = model(forward, vision=nn.Sequential(linear(), nn.ReLU(), linear()), head=linear())
    return net, lambda: net(x()).sum()


@case("DDC103", "embed")
def inference_mode_of_a_helper() -> Any:
    @torch.inference_mode()
    def encode(embed: nn.Module, ids: Tensor) -> Tensor:
        embed.eval()
        return embed(ids)  # <- DDC103

    net = model(lambda self, ids: self.head(encode(self.embed, ids).clone()), embed=nn.EmbeddingBag(7, 4), head=linear())
    return net, lambda: net(torch.tensor([[1, 2]])).sum()


@case("DDC103", "teacher.a teacher.b")
def decorated_forward() -> Any:
    @torch.no_grad()
    def forward(self: Any, x: Tensor) -> Tensor:
        return self.b(self.a(x))  # <- DDC103

    net = model(lambda self, x: self.head(self.teacher(x)), teacher=model(forward, a=linear(), b=linear()), head=linear())
    return net, lambda: net(x()).sum()


@case("DDC103", "scale")
def read_with_gradients_switched_off() -> Any:
    def forward(self: Any, x: Tensor) -> Tensor:
        with torch.set_grad_enabled(self.is_warm):
            factor = self.scale.exp()  # <- DDC103
        return self.main(x) * factor

    net = model(forward, main=linear(), scale=vector(), is_warm=False)
    return net, lambda: net(x()).sum()


@case("DDC103", "encoder")
def transformer_in_its_fast_path() -> Any:
    def forward(self: Any, x: Tensor) -> Tensor:
        with torch.no_grad():
            x = self.encoder(x)  # <- DDC103
        return self.head(x)

    encoder = nn.TransformerEncoderLayer(4, 2, 8, batch_first=True).eval()
    net = model(forward, encoder=encoder, head=linear())
    return net, lambda: net(x(2, 3, 4)).sum()


# DDC104: read, and cut off on the way.


def cut_by(how: Callable[[Tensor], Any]) -> Callable[[], Any]:
    def build() -> Any:
        net = model(lambda self, x: self.main(x) * how(self.gate(x)), main=linear(), gate=linear())
        return net, lambda: net(x()).sum()

    return build


for _name, _how, *_says in (
    ("detach", lambda y: y.detach(), "`detach`", "drop the .detach()"),
    ("data", lambda y: y.data, "`data`", "drop the .data"),
    ("argmax", lambda y: F.one_hot(y.argmax(-1), 4), "`argmax`", "straight-through"),
    ("argsort", lambda y: y.argsort(-1), "`argsort`"),
    ("comparison", lambda y: y > 0, "`gt`"),
    ("integer", lambda y: y.long().float(), "`long`"),
    ("boolean", lambda y: y.bool(), "`bool`"),
    ("item", lambda y: y.mean().item(), "left torch at `item`", "Keep the value a tensor"),
    ("numpy", lambda y: torch.as_tensor(y.detach().numpy()), "went on without its graph at `detach`"),
    ("round_trip", lambda y: y.new_tensor(y.detach().numpy()), "`detach`"),
    ("list", lambda y: torch.tensor(y.mean(0).tolist()), "left torch at `tolist`"),
    ("sample", lambda y: torch.distributions.Normal(y, 1.0).sample(), "`normal`"),
):
    case("DDC104", "gate", *_says, name=f"cut_by_{_name}")(cut_by(_how))


@case("DDC104", "layer.weight")
def weight_through_data() -> Any:
    def forward(self: Any, x: Tensor) -> Tensor:
        return F.linear(x, self.weight.data, self.bias)  # <- DDC104

    net = model(lambda self, x: self.layer(x), layer=model(forward, weight=nn.Parameter(x(4, 4)), bias=vector()))
    return net, lambda: net(x()).sum()


@case("DDC104", "encoder")
def copied_into_a_buffer() -> Any:
    def forward(self: Any, x: Tensor) -> Tensor:
        self.memory[: len(x)].copy_(self.encoder(x).detach())  # <- DDC104
        return self.decoder(self.memory)

    net = model(forward, encoder=linear(), decoder=linear(), memory=nn.Buffer(torch.zeros(5, 4)))
    return net, lambda: net(x()).sum()


@case("DDC104", "centre")
def moving_average_of_a_parameter() -> Any:
    def forward(self: Any, x: Tensor) -> Tensor:
        self.average.lerp_(self.centre.detach(), 0.1)  # <- DDC104
        return self.main(x - self.average)

    net = model(forward, main=linear(), centre=vector(), average=nn.Buffer(torch.zeros(4)))
    return net, lambda: net(x()).sum()


@case("DDC104", "recurrent")
def recurrent_state_cut() -> Any:
    def forward(self: Any, x: Tensor) -> Tensor:
        states, _ = self.recurrent(x)
        return self.head(states[:, -1].detach())  # <- DDC104

    net = model(forward, recurrent=nn.LSTM(4, 4, 2, batch_first=True), head=linear())
    return net, lambda: net(x(2, 3, 4)).sum()


@case("DDC104", "b.bias b.parametrizations.weight.original0 b.parametrizations.weight.original1")
def normalised_weight_cut() -> Any:
    def forward(self: Any, x: Tensor) -> Tensor:
        return self.a(x) + self.b(x).detach()  # <- DDC104

    net = model(forward, a=parametrizations.weight_norm(linear()), b=parametrizations.weight_norm(linear()))
    return net, lambda: net(x()).sum()


@pytest.mark.parametrize("name", CASES)
def test_the_cause_is_the_right_one(name: str) -> None:
    check(CASES[name])
