"""Covered means: a defined gradient was accumulated. ddpcov against the reference, by the ways in which gradients come or stay away."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from reference import Both, Net, layer, sgd
from torch import Tensor, nn
from torch.nn.utils.parametrizations import weight_norm
from torch.utils.checkpoint import checkpoint

ONES = torch.ones(2, 3)


class Undefine(torch.autograd.Function):
    """Passes its input on, and no gradient back."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> None:
        return None


class Fail(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        raise RuntimeError("in backward")


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


def test_graph_kept_for_a_second_pass() -> None:
    model = Net("a", "b")
    optimizer = sgd(model)
    with Both(model) as run:
        for second in ([model.a.weight], [model.b.weight]):
            loss = model.loss()
            run.backward(loss, retain_graph=True, inputs=[model.a.weight])
            run.backward(loss, inputs=second)
            optimizer.step()
            run.end_step()
    report = run.check(steps=2, missed={"b.weight": [(0, 0)]})
    assert report.run.backward_passes == 4


def test_two_losses_share_a_step() -> None:
    model = Net("trunk", "a", "b", "c")
    optimizer = sgd(model)
    with Both(model) as run:
        for _ in range(2):
            run.train(optimizer, model.loss("trunk", "a"), model.loss("trunk", "b"))
    report = run.check(steps=2, missed={"c.weight": [(0, 1)]})
    assert report.run.backward_passes == 4


def test_two_losses_in_one_call_are_one_pass() -> None:
    model = Net("a", "b")
    with Both(model) as run, run.ref.backward_pass():
        torch.autograd.backward([model.loss("a"), model.loss("b")])
    report = run.check(steps=1, missed={})
    assert report.run.backward_passes == 1


def test_gradient_accumulation() -> None:
    model = Net("a", "b")
    optimizer = sgd(model)
    with Both(model) as run:
        run.train(optimizer, model.loss("a"), model.loss("a", "b"), model.loss("a"))
        run.train(optimizer, model.loss("a"), model.loss("a"), model.loss("a"))
    report = run.check(steps=2, missed={"b.weight": [(1, 1)]})
    assert report.run.backward_passes == 6


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_checkpoint(use_reentrant: bool) -> None:
    model = Net("a", "b", "c", "spare")
    optimizer = sgd(model)
    with Both(model) as run:
        for _ in range(2):
            hidden = checkpoint(model.b, model(ONES, "a"), use_reentrant=use_reentrant)
            run.train(optimizer, model(hidden, "c").sum())
    report = run.check(steps=2, missed={"spare.weight": [(0, 1)]})
    assert report.run.backward_passes == 2


def test_two_reentrant_checkpoints_of_one_module_are_one_pass() -> None:
    model = Net("a", "b", "c")
    with Both(model) as run:
        hidden = checkpoint(model.b, model(ONES, "a"), use_reentrant=True)
        run.backward(checkpoint(model.b, hidden, use_reentrant=True).sum())
    report = run.check(steps=1, missed={"c.weight": [(0, 0)]})
    assert report.run.backward_passes == 1


def test_nested_reentrant_checkpoints_are_one_pass() -> None:
    model = Net("a", "b", "c")

    def inner(x: Tensor) -> Tensor:
        return checkpoint(model.b, model(x, "a"), use_reentrant=True)

    with Both(model) as run:
        run.backward(checkpoint(inner, ONES.clone().requires_grad_(), use_reentrant=True).sum())
    report = run.check(steps=1, missed={"c.weight": [(0, 0)]})
    assert report.run.backward_passes == 1


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad=True:UserWarning")
def test_reentrant_checkpoint_over_inputs_without_gradient() -> None:
    model = Net("a", "b")
    with Both(model) as run:
        run.backward(model(checkpoint(model.a, ONES, use_reentrant=True), "b").sum())
    run.check(steps=1, missed={"a.weight": [(0, 0)]})


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


@pytest.mark.filterwarnings("ignore:Using backward\\(\\) with create_graph=True:UserWarning")
def test_backward_of_a_backward() -> None:
    model = Net("a", "b")
    optimizer = sgd(model)
    with Both(model) as run:
        run.backward(model.loss("a").square(), create_graph=True)
        run.backward(model.a.weight.grad.square().sum() + model.loss("b"))
        optimizer.step()
        run.end_step()
        optimizer.zero_grad()
        run.train(optimizer, model.loss("a"))
    report = run.check(steps=2, missed={"b.weight": [(1, 1)]})
    assert report.run.backward_passes == 3


@pytest.mark.parametrize("then_step", [False, True])
def test_exception_inside_backward(then_step: bool) -> None:
    """What came before it counts; without a step the next batch belongs to the same step."""
    model = Net("a", "b")
    optimizer = sgd(model)
    with Both(model) as run:
        with pytest.raises(RuntimeError, match="in backward"):
            run.backward(model(Fail.apply(model(ONES, "a")), "b").sum())
        assert model.a.weight.grad is None and model.b.weight.grad is not None
        if then_step:
            optimizer.step()
            run.end_step()
        run.train(optimizer, model.loss("a"))
    report = run.check(
        steps=1 + then_step, missed={"a.weight": [(0, 0)], "b.weight": [(1, 1)]} if then_step else {}
    )
    assert report.run.backward_passes == 2


def test_exception_before_any_gradient() -> None:
    model = Net("a")
    with Both(model) as run:
        run.backward(model.loss())
        with pytest.raises(RuntimeError, match="does not require grad"):
            run.backward(torch.ones(()))
        loss = model.loss()
        run.backward(loss)
        with pytest.raises(RuntimeError, match="a second time"):
            run.backward((loss * loss).sum())
    run.check(steps=4, missed={"a.weight": [(1, 1), (3, 3)]})


def test_gradients_cleared_while_backward_runs() -> None:
    model = Net("a", "b", "spare")
    for p in model.parameters():
        p.register_post_accumulate_grad_hook(lambda p: setattr(p, "grad", None))
    with Both(model) as run:
        for _ in range(2):
            run.backward(model.loss("a", "b"))
    assert all(p.grad is None for p in model.parameters())
    run.check(steps=2, missed={"spare.weight": [(0, 1)]})


@pytest.mark.parametrize("set_to_none", [False, True])
def test_gradients_cleared_between_passes(set_to_none: bool) -> None:
    model = Net("a", "b")
    optimizer = sgd(model)
    with Both(model) as run:
        for names in (["a", "b"], ["a"], ["b"]):
            model.zero_grad(set_to_none)
            run.backward(model.loss(*names))
            model.zero_grad(set_to_none)  # a gradient counts when it arrives
            optimizer.step()
            run.end_step()
    run.check(steps=3, missed={"a.weight": [(2, 2)], "b.weight": [(1, 1)]})


def test_hooks_of_the_user() -> None:
    model = Net("a", "b")
    calls: list[str] = []

    def put_hooks(when: str) -> list[Any]:
        return [
            handle
            for p in model.parameters()
            for handle in (
                p.register_hook(lambda g: calls.append(when) or g * 2),
                p.register_post_accumulate_grad_hook(lambda p: calls.append(when)),
            )
        ]

    before = put_hooks("before")
    with Both(model) as run:
        later = put_hooks("later")
        run.backward(model.loss())
        assert sorted(calls) == ["before"] * 4 + ["later"] * 4
        assert torch.equal(model.b.weight.grad, 4 * torch.autograd.grad(model.loss(), model.b.weight)[0])
        for handle in [*before, *later]:
            handle.remove()
        calls.clear()
        run.backward(model.loss("a"))
        assert not calls
        kept = put_hooks("kept")
        run.backward(model.loss("b"))
    calls.clear()
    model.loss("a").backward()
    assert calls == ["kept", "kept"] and len(kept) == 4
    run.check(steps=3, missed={"a.weight": [(2, 2)], "b.weight": [(1, 1)]})


def test_module_hooks_of_the_user() -> None:
    model = Net("a", "b")
    model.a.register_full_backward_hook(lambda *_: None)
    model.register_full_backward_pre_hook(lambda *_: None)
    with Both(model) as run:
        run.backward(model(ONES.clone().requires_grad_(), "a").sum())
    run.check(steps=1, missed={"b.weight": [(0, 0)]})


def test_retained_gradients() -> None:
    model = Net("a", "b", "spare")
    model.a.weight.retain_grad()
    with Both(model) as run:
        hidden = model(ONES, "a")
        hidden.retain_grad()
        run.backward(model(hidden, "b").sum())
    assert hidden.grad is not None
    run.check(steps=1, missed={"spare.weight": [(0, 0)]})


def test_backward_in_another_thread() -> None:
    model = Net("a", "b")
    optimizer = sgd(model)
    with Both(model) as run:
        for _ in range(2):
            thread = threading.Thread(target=run.backward, args=(model.loss("a"),))
            thread.start()
            thread.join()
            optimizer.step()
            run.end_step()
    run.check(steps=2, missed={"b.weight": [(0, 1)]})


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
