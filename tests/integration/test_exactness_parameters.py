"""Which tensors are the model's parameters, and when: ddpcov against the reference while the model changes under it."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import ddpcov
from reference import Both, Net, layer, sgd

ONES = torch.ones(2, 3)


def parameter(report: ddpcov.Report, name: str) -> ddpcov.ParameterCoverage:
    (found,) = (p for p in report.parameters if p.name == name)
    return found


def names(report: ddpcov.Report) -> set[str]:
    return {p.name for p in report.parameters}


def test_tied() -> None:
    model = Net("embed", "body", "head")
    model.head.weight = model.embed.weight
    with Both(model) as run:
        for layers in (["body", "head"], ["embed"], ["body"]):
            run.backward(model.loss(*layers))
    report = run.check(steps=3, missed={"body.weight": [(1, 1)], "embed.weight": [(2, 2)]})
    assert names(report) == {"embed.weight", "body.weight"}
    assert parameter(report, "embed.weight").aliases == ("head.weight",)


def test_untied_later() -> None:
    model = Net("a", "b")
    model.b.weight = model.a.weight
    with Both(model) as run:
        run.backward(model.loss("b"))
        model.b.weight = nn.Parameter(model.a.weight.detach().clone())
        run.backward(model.loss("b"))
        run.backward(model.loss("a"))
    run.check(steps=3, missed={"a.weight": [(1, 1)], "b.weight": [(2, 2)]})


def test_tied_later() -> None:
    model = Net("a", "b")
    with Both(model) as run:
        run.backward(model.loss("a"))
        model.b.weight = model.a.weight
        run.backward(model.loss("b"))
    run.check(steps=2, missed={"b.weight": [(0, 0)]})


def test_frozen() -> None:
    model = Net("a", "b")
    model.b.requires_grad_(False)
    with Both(model) as run:
        for _ in range(2):
            run.backward(model.loss())
    frozen = parameter(run.check(steps=2, missed={}), "b.weight")
    assert (frozen.coverage, frozen.trainable, frozen.hits.get(0, 0)) == ("frozen", False, 0)


def test_thawed_later() -> None:
    model = Net("a", "b", "c")
    model.b.requires_grad_(False)
    model.c.requires_grad_(False)
    with Both(model) as run:
        run.backward(model.loss())
        model.requires_grad_(True)
        run.backward(model.loss("a", "b"))
        run.backward(model.loss("a"))
    report = run.check(steps=3, missed={"b.weight": [(2, 2)], "c.weight": [(1, 2)]})
    assert parameter(report, "b.weight").coverage == "some" and parameter(report, "c.weight").coverage == "never"


def test_frozen_later() -> None:
    model = Net("a", "b")
    with Both(model) as run:
        run.backward(model.loss("a"))
        model.b.requires_grad_(False)
        run.backward(model.loss("a"))
        model.a.requires_grad_(False)
        model.b.requires_grad_(True)
        run.backward(model.loss("a", "b"))
    report = run.check(steps=3, missed={"b.weight": [(0, 0)]})
    assert parameter(report, "a.weight").hits[0] == 2


def test_frozen_and_thawed_within_one_step() -> None:
    """It counts as trainable if it was when one of the step's passes began."""
    model = Net("a", "b")
    optimizer = sgd(model)
    with Both(model) as run:
        run.backward(model.loss("a"))
        model.b.requires_grad_(False)
        run.train(optimizer, model.loss("a"))
        run.backward(model.loss("a"))
        model.b.requires_grad_(True)
        run.train(optimizer, model.loss("b"))
    run.check(steps=2, missed={"b.weight": [(0, 0)]})


def test_frozen_between_forward_and_backward() -> None:
    model = Net("a", "b")
    with Both(model) as run:
        loss = model.loss()
        model.b.requires_grad_(False)
        run.backward(loss)
        loss = model.loss()
        model.b.requires_grad_(True)
        run.backward(loss)
    assert model.b.weight.grad is None
    run.check(steps=2, missed={"b.weight": [(1, 1)]})


def test_replaced_module() -> None:
    model = Net("a", "b")
    with Both(model) as run:
        run.backward(model.loss())
        old, model.b = model.b, layer()
        run.backward(old(model(ONES, "a")).sum())
        run.backward(model.loss())
    report = run.check(steps=3, missed={"b.weight": [(1, 1)]})
    assert parameter(report, "b.weight").hits[0] == 2


def test_replaced_between_forward_and_backward() -> None:
    model = Net("a", "b")
    with Both(model) as run:
        loss = model.loss()
        model.b.weight = nn.Parameter(torch.ones(3, 3))
        run.backward(loss)
    run.check(steps=1, missed={"b.weight": [(0, 0)]})


def test_added_module() -> None:
    model = Net("a")
    optimizer = sgd(model)
    with Both(model) as run:
        run.train(optimizer, model.loss())
        model.add_module("b", layer())
        model.add_module("c", layer())
        run.train(optimizer, model.loss("a", "b"))
        run.train(optimizer, model.loss("a"))
    run.check(steps=3, missed={"b.weight": [(2, 2)], "c.weight": [(1, 2)]})


def test_removed_module() -> None:
    model = Net("a", "b", "c")
    with Both(model) as run:
        run.backward(model.loss("a", "b"))
        del model.b, model.c
        run.backward(model.loss("a"))
        model.b = layer()
        run.backward(model.loss("a"))
    run.check(steps=3, missed={"b.weight": [(2, 2)], "c.weight": [(0, 0)]})


def test_two_modules_change_places() -> None:
    model = Net("a", "b")
    with Both(model) as run:
        run.backward(model.loss("a"))
        model.a, model.b = model.b, model.a
        run.backward(model.loss("a"))
        run.backward(model.loss("b"))
    run.check(steps=3, missed={"a.weight": [(2, 2)], "b.weight": [(0, 1)]})


def test_parameter_set_to_none() -> None:
    model = nn.ModuleDict({"a": nn.Linear(3, 3)})
    with Both(model) as run:
        run.backward(nn.functional.linear(ONES, model["a"].weight).sum())
        model["a"].bias = None
        run.backward(model["a"](ONES).sum())
    run.check(steps=2, missed={"a.bias": [(0, 0)]})


def test_layer_created_in_the_first_forward() -> None:
    class Growing(Net):
        def forward(self, x: Tensor, *names: str) -> Tensor:
            if "late" not in self._modules:
                self.add_module("late", layer())
                self.add_module("idle", layer())
            return super().forward(x, *names)

    model = Growing("a")
    optimizer = sgd(model)
    with Both(model) as run:
        run.train(optimizer, model.loss("a", "late"))
        run.train(optimizer, model.loss("a", "late"))
    report = run.check(steps=2, missed={"idle.weight": [(0, 1)]})
    assert parameter(report, "late.weight").hits[0] == 2


def test_lazy_linear() -> None:
    model = nn.ModuleDict({"a": nn.LazyLinear(3), "b": nn.LazyLinear(3, bias=False)})
    with Both(model) as run:
        for _ in range(2):
            hidden = model["a"](ONES)
            run.backward(hidden.sum() + 0 * model["b"](hidden).detach().sum())
    report = run.check(steps=2, missed={"b.weight": [(0, 1)]})
    assert parameter(report, "a.weight").shape == (3, 3)


def test_lazy_linear_never_called() -> None:
    model = nn.ModuleDict({"a": layer(), "lazy": nn.LazyLinear(3, bias=False)})
    with Both(model) as run:
        run.backward(model["a"](ONES).sum())
        run.backward(model["lazy"](ONES).sum())
    run.check(steps=2, missed={"a.weight": [(1, 1)], "lazy.weight": [(0, 0)]})


def test_state_dict_assigned() -> None:
    model = Net("a", "b")
    other = Net("a", "b")
    with Both(model) as run:
        run.backward(model.loss())
        model.load_state_dict(other.state_dict(), assign=True)
        run.backward(model.loss("a"))
        run.backward(model.loss("b"))
    run.check(steps=3, missed={"a.weight": [(2, 2)], "b.weight": [(1, 1)]})


@pytest.mark.parametrize("overwrite", [False, True])
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
def test_dtype_changes(dtype: torch.dtype, overwrite: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    model = Net("a", "b")
    monkeypatch.setattr(torch.__future__, "_overwrite_module_params_on_conversion", overwrite)
    with Both(model) as run:
        run.backward(model.loss())
        model.zero_grad()
        before = model.a.weight
        model.to(dtype)
        assert (model.a.weight is before) is not overwrite
        run.backward(model(ONES.to(dtype), "a").sum())
    run.check(steps=2, missed={"b.weight": [(1, 1)]})


def test_data_replaced() -> None:
    model = Net("a", "b")
    with Both(model) as run:
        run.backward(model.loss())
        model.zero_grad()
        for p in model.parameters():
            p.data = torch.ones(3, 3, dtype=torch.float64)
        run.backward(model(ONES.double(), "a").sum())
    run.check(steps=2, missed={"b.weight": [(1, 1)]})


def test_tensors_swapped() -> None:
    """The parameter stays the same object, and the hooks on it silently stop: those of the reference too."""
    model = Net("a", "b")
    with ddpcov.track(model) as cov:
        model.loss().backward()
        for p in model.parameters():
            torch.utils.swap_tensors(p, nn.Parameter(torch.ones(3, 3)))
        model.loss("a").backward()
    assert model.a.weight.grad is not None
    report = cov.report()
    assert report.run.steps == 2
    assert {p.name: p.missed for p in report.parameters} == {"a.weight": {}, "b.weight": {0: ((1, 1),)}}


class Bag(nn.Module):
    """Parameters by name; the loss is of those it is told."""

    def __init__(self, **tensors: Tensor) -> None:
        super().__init__()
        for name, tensor in tensors.items():
            self.register_parameter(name, nn.Parameter(tensor))

    def forward(self, *names: str) -> Tensor:
        return torch.stack([(self.get_parameter(n) * 2).abs().sum() for n in names]).sum()


def test_parameters_of_odd_kinds() -> None:
    model = Bag(
        scalar=torch.tensor(1.0),
        empty=torch.empty(0, 3),
        wave=torch.ones(2, dtype=torch.complex64),
        plain=torch.ones(2),
    )
    with Both(model) as run:
        run.backward(model("scalar", "empty", "wave"))
        run.backward(model("plain"))
    report = run.check(steps=2, missed={n: [(1, 1)] for n in ("scalar", "empty", "wave")} | {"plain": [(0, 0)]})
    assert [parameter(report, n).shape for n in ("scalar", "empty")] == [(), (0, 3)]
    assert (parameter(report, "empty").numel, parameter(report, "wave").dtype) == (0, "complex64")


def test_integer_parameter_is_frozen() -> None:
    model = Net("a")
    model.code = nn.Parameter(torch.zeros(2, dtype=torch.int8), requires_grad=False)
    with Both(model) as run:
        run.backward(model.loss("a"))
    assert parameter(run.check(steps=1, missed={}), "code").coverage == "frozen"


def test_shared_submodule() -> None:
    model = Net("a", "b")
    model.again = model.a
    with Both(model) as run:
        run.backward(model.loss("a", "again"))
        run.backward(model.loss("again"))
        run.backward(model.loss("b"))
    report = run.check(steps=3, missed={"a.weight": [(2, 2)], "b.weight": [(0, 1)]})
    assert parameter(report, "a.weight").aliases == ("again.weight",)
    assert parameter(report, "a.weight").hits[0] == 2


def test_parameter_containers() -> None:
    model = nn.Module()
    model.several = nn.ParameterList([torch.ones(2), torch.ones(2)])
    model.named = nn.ParameterDict({"x": torch.ones(2), "y": torch.ones(2)})
    with Both(model) as run:
        run.backward((model.several[0] * model.named["x"]).sum())
        model.several.append(torch.ones(2))
        run.backward((model.several[0] * model.several[2]).sum())
    run.check(steps=2, missed={"named.x": [(1, 1)], "named.y": [(0, 1)], "several.1": [(0, 1)]})


def test_copy_of_the_model_is_another_model() -> None:
    model = Net("a", "b")
    with Both(model) as run:
        run.backward(model.loss("a"))
        twin = copy.deepcopy(model)
        twin.loss().backward()
        assert twin.b.weight.grad is not None
    run.check(steps=1, missed={"b.weight": [(0, 0)]})


def test_container_of_no_parameters() -> None:
    model: Any = nn.Module()
    with Both(model) as run:
        run.backward(ONES.clone().requires_grad_().sum())
        model.a = layer()
        run.backward(model.a(ONES).sum())
    run.check(steps=2, missed={})
