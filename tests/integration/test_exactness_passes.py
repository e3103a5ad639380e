"""What happens inside and between backward passes: ddpcov against the reference."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from reference import Both, Fail, Net, sgd

ONES = torch.ones(2, 3)


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


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad=True:UserWarning")
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


def test_backward_called_inside_backward_is_one_pass() -> None:
    """Reversible layers do it: their backward recomputes and differentiates."""

    class Reversible(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            ctx.save_for_backward(x)
            return model(x, "b").detach()

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> Tensor:
            x = ctx.saved_tensors[0].detach().requires_grad_()
            with torch.enable_grad():
                torch.autograd.backward(model(x, "b"), gradient)
            return x.grad

    model = Net("a", "b", "spare")
    with Both(model) as run:
        for _ in range(2):
            run.backward(Reversible.apply(model(ONES, "a")).sum())
    report = run.check(steps=2, missed={"spare.weight": [(0, 1)]})
    assert report.run.backward_passes == 2


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
    report = run.check(steps=1 + then_step, missed={"a.weight": [(0, 0)], "b.weight": [(1, 1)]} if then_step else {})
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
        scaled = model.b.weight.grad
        for handle in [*before, *later]:
            handle.remove()
        assert torch.equal(scaled, 4 * torch.autograd.grad(model.loss(), model.b.weight)[0])
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
