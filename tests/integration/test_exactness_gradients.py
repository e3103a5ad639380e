"""Covered means: a defined gradient was accumulated. ddpcov against the reference, by what becomes of gradients."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.parametrizations import weight_norm

from reference import Both, Net, Undefine, layer, sgd

ONES = torch.ones(2, 3)


def test_undefined_gradient_over_a_stale_one() -> None:
    model = Net("a", "b")
    with Both(model) as run:
        run.backward(model.loss())
        stale = model.b.weight.grad.clone()
        run.backward(model.loss("a") + Undefine.apply(model.b.weight).sum())
    assert torch.equal(model.b.weight.grad, stale)
    run.check(steps=2, missed={"b.weight": [(1, 1)]})


def test_undefined_gradient_upstream_of_the_parameter() -> None:
    model = Net("a", "b")
    with Both(model) as run:
        run.backward(Undefine.apply(model(ONES, "a")).sum() + model.loss("b"))
    assert model.a.weight.grad is None
    run.check(steps=1, missed={"a.weight": [(0, 0)]})


def test_defined_and_undefined_gradients_meet() -> None:
    model = Net("a")
    with Both(model) as run:
        run.backward(Undefine.apply(model.a.weight).sum() + model.loss())
    run.check(steps=1, missed={})


def test_zero_gradient_is_a_gradient() -> None:
    model = Net("a")
    with Both(model) as run:
        run.backward(model.loss() * 0)
    assert not model.a.weight.grad.any()
    run.check(steps=1, missed={})


def test_output_left_out() -> None:
    model = Net("a", "b", "head", "aux")
    optimizer = sgd(model)
    with Both(model) as run:
        for i in range(4):
            trunk = model(ONES, "a", "b")
            head, aux = model(trunk, "head"), model(trunk, "aux")
            run.train(optimizer, head.sum() if i % 2 else head.sum() + aux.sum())
    run.check(steps=4, missed={"aux.weight": [(1, 1), (3, 3)]})


@pytest.mark.parametrize("off", [torch.no_grad, torch.inference_mode])
def test_region_without_gradients(off: Any) -> None:
    model = Net("a", "b")
    with Both(model) as run:
        with off():
            hidden = model(ONES, "a")
        run.backward(model(hidden.clone(), "b").sum())
    run.check(steps=1, missed={"a.weight": [(0, 0)]})


def test_detached() -> None:
    model = Net("a", "b")
    with Both(model) as run:
        run.backward(model(model(ONES, "a").detach(), "b").sum())
        run.backward(model(model(ONES, "a"), "b").sum())
    run.check(steps=2, missed={"a.weight": [(0, 0)]})


def test_autograd_grad_alone_is_no_pass() -> None:
    model = Net("a", "b")
    optimizer = sgd(model)
    with Both(model) as run:
        for _ in range(2):
            for p, gradient in zip(
                model.parameters(), torch.autograd.grad(model.loss(), list(model.parameters())), strict=True
            ):
                p.grad = gradient
            optimizer.step()
            run.end_step()
    report = run.check(steps=2, missed={"a.weight": [(0, 1)], "b.weight": [(0, 1)]})
    assert report.run.backward_passes == 0


def test_autograd_grad_does_not_cover_for_a_later_undefined_gradient() -> None:
    model = Net("a", "b")
    with Both(model) as run:
        loss = model.loss("b") + Undefine.apply(model.a.weight).sum()
        torch.autograd.grad(model.loss("a"), [model.a.weight])
        run.backward(loss)
        torch.autograd.grad(model.loss("a"), [model.a.weight])
        run.backward(model.loss("b"))
    run.check(steps=2, missed={"a.weight": [(0, 1)]})


def test_functional_gradients_are_no_pass() -> None:
    model = Net("a", "b")

    def loss(parameters: dict[str, Tensor]) -> Tensor:
        return torch.func.functional_call(model, parameters, (ONES,)).sum()

    with Both(model) as run:
        torch.func.grad(loss)(dict(model.named_parameters()))
        run.backward(model.loss("a"))
    run.check(steps=1, missed={"b.weight": [(0, 0)]})


def test_backward_to_chosen_inputs() -> None:
    model = Net("a", "b")
    x = ONES.clone().requires_grad_()
    with Both(model) as run:
        run.backward(model.loss(), inputs=[model.a.weight])
        run.backward(model.loss())
        run.backward(model(x).sum(), inputs=[x])  # a pass that reaches no parameter
    run.check(steps=3, missed={"a.weight": [(2, 2)], "b.weight": [(0, 0), (2, 2)]})


def test_sparse_embedding() -> None:
    model = nn.ModuleDict({"used": nn.Embedding(5, 3, sparse=True), "idle": nn.Embedding(5, 3, sparse=True)})
    optimizer = torch.optim.SparseAdam(model.parameters())
    with Both(model) as run:
        for indices in ([1, 1, 4], []):  # no row at all is a defined gradient still
            run.train(optimizer, model["used"](torch.tensor(indices, dtype=torch.long)).sum())
    run.check(steps=2, missed={"idle.weight": [(0, 1)]})


def test_functional_call() -> None:
    model = Net("a", "b")
    own = dict(model.named_parameters())
    others = {n: p.detach().requires_grad_() for n, p in own.items()}
    derived = {n: p * 2 for n, p in own.items()}
    with Both(model) as run:
        for parameters in (own, others, derived):
            run.backward(torch.func.functional_call(model, parameters, (ONES, "a")).sum())
    run.check(steps=3, missed={"a.weight": [(1, 1)], "b.weight": [(0, 2)]})


def test_weight_norm() -> None:
    model = Net("a", "b")
    weight_norm(model.a)
    optimizer = sgd(model)
    with Both(model) as run:
        run.train(optimizer, model.loss("a", "b"))
        run.train(optimizer, model.loss("b"))
    report = run.check(
        steps=2,
        missed={f"a.parametrizations.weight.original{i}": [(1, 1)] for i in (0, 1)},
    )
    assert len(report.parameters) == 3


def test_autocast() -> None:
    model = Net("a", "b", "spare")
    optimizer = sgd(model)
    with Both(model) as run:
        for _ in range(2):
            with torch.autocast("cpu", torch.bfloat16):
                output = model(ONES, "a", "b")
            assert output.dtype == torch.bfloat16
            run.train(optimizer, output.sum())
    run.check(steps=2, missed={"spare.weight": [(0, 1)]})


def test_gradient_penalty() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 1))
    optimizer = sgd(model)
    x = ONES.clone().requires_grad_()
    with Both(model) as run:
        for _ in range(2):
            (slope,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
            run.train(optimizer, slope.square().sum())  # whatever the last bias is, the slope is the same
    run.check(steps=2, missed={"2.bias": [(0, 1)]})


@pytest.mark.skipif(torch.__version__ < (2, 5), reason="torch 2.4 takes tensors only")
def test_backward_from_an_edge_of_the_graph() -> None:
    model = Net("a", "b")
    with Both(model) as run, run.ref.backward_pass():
        torch.autograd.backward([torch.autograd.graph.get_gradient_edge(model(ONES, "a"))], [ONES])
    run.check(steps=1, missed={"b.weight": [(0, 0)]})


def test_layers_used_with_and_without_their_bias() -> None:
    model = nn.ModuleDict({"norm": nn.LayerNorm(3), "linear": nn.Linear(3, 3), "plain": layer()})
    with Both(model) as run:
        run.backward(model["norm"](ONES).sum())
        run.backward(nn.functional.linear(ONES, model["linear"].weight).sum())
    run.check(
        steps=2,
        missed={
            "norm.weight": [(1, 1)],
            "norm.bias": [(1, 1)],
            "linear.weight": [(0, 0)],
            "linear.bias": [(0, 1)],
            "plain.weight": [(0, 1)],
        },
    )
