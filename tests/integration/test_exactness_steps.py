"""Where a step ends: ddpcov, which has to find out, against the reference, which is told."""

from __future__ import annotations

import threading

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from reference import Both, Fail, Net, sgd


def test_without_an_optimizer_each_pass_is_a_step() -> None:
    model = Net("a", "b")
    with Both(model) as run:
        for names in (["a"], ["b"], ["a", "b"]):
            run.backward(model.loss(*names))
            run.end_step()
            with torch.no_grad():
                model.a.weight -= 0.1
    run.check(steps=3, missed={"a.weight": [(1, 1)], "b.weight": [(0, 0)]})


def test_step_by_hand() -> None:
    model = Net("a", "b")
    with Both(model) as run:
        for names in (["a", "b"], ["a", "a"], ["b", "b"]):
            for name in names:
                run.backward(model.loss(name))
            run.cov.step()
            run.end_step()
    report = run.check(steps=3, missed={"a.weight": [(2, 2)], "b.weight": [(1, 1)]})
    assert report.run.backward_passes == 6


def test_step_by_hand_without_a_pass_does_not_count() -> None:
    model = Net("a", "b")
    optimizer = sgd(model)
    with Both(model) as run:
        run.cov.step()
        run.train(optimizer, model.loss("a"))
        run.cov.step()
        run.cov.step()
        run.backward(model.loss("b"))
        run.cov.step()
        run.end_step()
        optimizer.step()  # of the same step
    run.check(steps=2, missed={"a.weight": [(1, 1)], "b.weight": [(0, 0)]})


def test_passes_after_the_last_optimizer_step_are_a_step() -> None:
    model = Net("a", "b")
    optimizer = sgd(model)
    with Both(model) as run:
        run.train(optimizer, model.loss("a"), model.loss("b"))
        run.backward(model.loss("a"))
        run.backward(model.loss("a"))
    run.check(steps=2, missed={"b.weight": [(1, 1)]})


def test_passes_before_the_first_optimizer_step_are_one_step() -> None:
    model = Net("a", "b", "c")
    optimizer = sgd(model)
    with Both(model) as run:
        run.train(optimizer, *(model.loss(name) for name in ("a", "b", "a")))
    run.check(steps=1, missed={"c.weight": [(0, 0)]})


def test_report_inside_the_block() -> None:
    model = Net("a", "b")
    optimizer = sgd(model)
    with Both(model) as run:
        run.train(optimizer, model.loss("a"))
        run.check(steps=1, missed={"b.weight": [(0, 0)]})
        run.train(optimizer, model.loss("b"))
        run.check(steps=2, missed={"a.weight": [(1, 1)], "b.weight": [(0, 0)]})
    run.check(steps=2, missed={"a.weight": [(1, 1)], "b.weight": [(0, 0)]})


def test_optimizers_one_after_the_other_are_one_step() -> None:
    model = Net("a", "b", "c")
    first, second = sgd(model.a), sgd(model.b, model.c)
    with Both(model) as run:
        for _ in range(3):
            run.backward(model.loss("a", "b"))
            first.step()
            second.step()
            run.end_step()
    run.check(steps=3, missed={"c.weight": [(0, 2)]})


def test_optimizers_with_passes_between_are_several_steps() -> None:
    model = Net("a", "b")
    first, second = sgd(model.a), sgd(model.b)
    with Both(model) as run:
        for _ in range(2):
            run.train(first, model.loss("a"))
            run.train(second, model.loss("b"))
    run.check(steps=4, missed={"a.weight": [(1, 1), (3, 3)], "b.weight": [(0, 0), (2, 2)]})


def test_optimizer_stepping_again_without_a_pass() -> None:
    model = Net("a", "b")
    optimizer = sgd(model)
    with Both(model) as run:
        run.train(optimizer, model.loss("a"))
        run.train(optimizer)
        run.train(optimizer)
        run.train(optimizer, model.loss("b"))
    run.check(steps=4, missed={"a.weight": [(1, 3)], "b.weight": [(0, 2)]})


def test_two_optimizers_stepping_again_without_a_pass() -> None:
    model = Net("a", "b")
    first, second = sgd(model.a), sgd(model.b)
    with Both(model) as run:
        run.backward(model.loss())
        for _ in range(2):
            first.step()
            second.step()
            run.end_step()
    run.check(steps=2, missed={"a.weight": [(1, 1)], "b.weight": [(1, 1)]})


def test_step_before_any_pass() -> None:
    model = Net("a")
    optimizer = sgd(model)
    with Both(model) as run:
        run.train(optimizer)
        run.train(optimizer, model.loss())
    run.check(steps=2, missed={"a.weight": [(0, 0)]})


def test_optimizer_holding_a_part() -> None:
    model = Net("a", "b", "c")
    optimizer = sgd(model.b)
    with Both(model) as run:
        run.train(optimizer, model.loss("a"), model.loss("b"))
        run.train(optimizer, model.loss("a"))
    run.check(steps=2, missed={"b.weight": [(1, 1)], "c.weight": [(0, 1)]})


@pytest.mark.parametrize("is_given", [False, True])
def test_optimizer_of_another_model_ends_no_step(is_given: bool) -> None:
    model, other = Net("a", "b"), Net("c")
    optimizer, others = sgd(model), sgd(other)
    with Both(model, optimizer=optimizer if is_given else None) as run:
        for _ in range(2):
            run.backward(model.loss("a"))
            others.step()
            run.train(optimizer, model.loss("b"))
            others.step()
    run.check(steps=2, missed={})


def test_passes_of_another_model_do_not_count() -> None:
    """A GAN: the discriminator's own pass is none of the generator's, the generator's goes through both."""
    generator, discriminator = Net("a", "b"), Net("c")
    optimizer, others = sgd(generator), sgd(discriminator)
    with Both(generator) as run:
        for _ in range(2):
            discriminator(generator(torch.ones(2, 3)).detach()).sum().backward()
            others.step()
            run.train(optimizer, discriminator(generator(torch.ones(2, 3), "a")).sum())
    report = run.check(steps=2, missed={"b.weight": [(0, 1)]})
    assert report.run.backward_passes == 2


def test_passes_of_another_model_under_reentrant_checkpoint_do_not_count() -> None:
    model, other = Net("a", "b"), Net("c")
    x = torch.ones(2, 3, requires_grad=True)
    with Both(model) as run:
        for _ in range(2):
            checkpoint(other, x, use_reentrant=True).sum().backward()
            run.backward(model.loss("a"))
    run.check(steps=2, missed={"b.weight": [(0, 1)]})


def test_passes_of_another_model_that_raise_do_not_count() -> None:
    model, other = Net("a", "b"), Net("c")
    with Both(model) as run:
        for _ in range(2):
            with pytest.raises(RuntimeError, match="in backward"):
                Fail.apply(other(torch.ones(2, 3))).sum().backward()
            run.backward(model.loss("a"))
    run.check(steps=2, missed={"b.weight": [(0, 1)]})


def test_passes_of_another_model_in_another_thread_do_not_count() -> None:
    """Here one of them lasts as long as two steps of the tracked model."""
    model, other = Net("a", "b"), Net("c")
    optimizer = sgd(model)
    has_begun, may_end = threading.Event(), threading.Event()
    other.c.weight.register_hook(lambda _: has_begun.set() or (may_end.wait(60), None)[1])
    with Both(model) as run:
        thread = threading.Thread(target=lambda: other.loss().backward())
        thread.start()
        assert has_begun.wait(60)
        for _ in range(2):
            run.train(optimizer, model.loss("a"))
        may_end.set()
        thread.join()
    run.check(steps=2, missed={"b.weight": [(0, 1)]})


def test_both_models_of_a_gan_tracked() -> None:
    generator, discriminator = Net("a", "b"), Net("c", "d")
    first, second = sgd(generator), sgd(discriminator)
    with Both(generator) as outer, Both(discriminator) as inner:
        for _ in range(2):
            inner.train(second, discriminator(generator(torch.ones(2, 3)).detach()).sum())
            with inner.ref.backward_pass():  # through both models: a pass of each
                outer.backward(discriminator(generator(torch.ones(2, 3), "a"), "c").sum())
            first.step()
            outer.end_step()
            second.zero_grad()
    outer.check(steps=2, missed={"b.weight": [(0, 1)]})
    inner.check(steps=3, missed={"d.weight": [(2, 2)]})


def test_optimizer_of_two_models() -> None:
    model, other = Net("a", "b"), Net("c")
    optimizer = sgd(other, model.a)
    with Both(model) as run:
        run.train(optimizer, model.loss("a"), model.loss("b"))
        run.train(optimizer, model.loss("b"))
    run.check(steps=2, missed={"a.weight": [(1, 1)]})


def test_pass_that_reaches_nothing_counts() -> None:
    model = Net("a")
    optimizer = sgd(model)
    with Both(model) as run:
        run.train(optimizer, torch.zeros((), requires_grad=True) * 1)
        run.train(optimizer, model.loss())
    report = run.check(steps=2, missed={"a.weight": [(0, 0)]})
    assert report.run.backward_passes == 2


def test_gradient_scaler_skipping_a_step() -> None:
    model = Net("a", "b")
    optimizer = sgd(model)
    scaler = torch.amp.GradScaler("cpu")
    with Both(model) as run:
        for name, factor in (("a", 1.0), ("b", torch.inf), ("a", 1.0)):
            before = model.b.weight.detach().clone()
            run.backward(scaler.scale(model.loss(name) * factor))
            scaler.step(optimizer)
            scaler.update()
            run.end_step()
            optimizer.zero_grad()
            assert torch.equal(model.b.weight, before)
    run.check(steps=3, missed={"a.weight": [(1, 1)], "b.weight": [(0, 0), (2, 2)]})


def test_gradient_scaler_skipping_one_of_two_optimizers() -> None:
    model = Net("a", "b", "c")
    first, second = sgd(model.a), sgd(model.b, model.c)
    scaler = torch.amp.GradScaler("cpu")
    with Both(model) as run:
        for factor in (1.0, torch.inf, 1.0):
            run.backward(scaler.scale(model.loss("a") + model.loss("b") * factor))
            for optimizer in (first, second):
                scaler.unscale_(optimizer)
                scaler.step(optimizer)
                optimizer.zero_grad()
            scaler.update()
            run.end_step()
    run.check(steps=3, missed={"c.weight": [(0, 2)]})


def test_closure_with_several_passes() -> None:
    model = Net("a", "b")
    optimizer = torch.optim.LBFGS(model.a.parameters(), max_iter=4)
    with Both(model) as run:
        for _ in range(2):

            def closure() -> Tensor:
                optimizer.zero_grad()
                loss = (model(torch.ones(2, 3), "a") - 1).square().sum()
                run.backward(loss)
                return loss

            optimizer.step(closure)
            run.end_step()
    report = run.check(steps=2, missed={"b.weight": [(0, 1)]})
    assert report.run.backward_passes > 2


def test_optimizer_stepping_inside_backward() -> None:
    model = Net("a", "b", "c")
    optimizers = {p: torch.optim.SGD([p], lr=0.1) for p in model.parameters()}

    def update(p: torch.nn.Parameter) -> None:
        optimizers[p].step()
        optimizers[p].zero_grad()

    for p in model.parameters():
        p.register_post_accumulate_grad_hook(update)
    with Both(model) as run:
        for names in (["a", "b"], ["b", "c"], ["b"]):
            run.backward(model.loss(*names))
            run.end_step()
    assert all(p.grad is None for p in model.parameters())
    run.check(steps=3, missed={"a.weight": [(1, 2)], "c.weight": [(0, 0), (2, 2)]})


def test_optimizer_class_that_extends_another() -> None:
    class Averaging(torch.optim.SGD):
        def step(self, closure: object = None) -> None:
            super().step()

    model = Net("a", "b")
    optimizer = Averaging(model.parameters(), lr=0.1)
    with Both(model) as run:
        run.train(optimizer, model.loss("a"))
        run.train(optimizer, model.loss("b"))
    run.check(steps=2, missed={"a.weight": [(1, 1)], "b.weight": [(0, 0)]})


def test_two_updates_of_one_batch() -> None:
    """Sharpness-aware minimisation: climb, a second pass, descend. Both updates end a step."""
    model = Net("a", "b")
    climb, descend = sgd(model), sgd(model)
    with Both(model) as run:
        for _ in range(2):
            run.train(climb, model.loss("a", "b"))
            run.train(descend, model.loss("a"))
    run.check(steps=4, missed={"b.weight": [(1, 1), (3, 3)]})


def test_learning_rate_scheduler() -> None:
    model = Net("a", "b")
    optimizer = sgd(model)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    with Both(model) as run:
        for _ in range(3):
            run.train(optimizer, model.loss("a"))
            scheduler.step()
    run.check(steps=3, missed={"b.weight": [(0, 2)]})


def test_many_steps() -> None:
    """Patterns come and go; ranges stay exact."""
    model = Net("a", "b", "c")
    optimizer = sgd(model)
    with Both(model) as run:
        for i in range(300):
            run.train(optimizer, model.loss("a", *(["b"] if i % 100 < 50 else []), *(["c"] if i % 7 == 0 else [])))
    run.check(
        steps=300,
        missed={
            "b.weight": [(50, 99), (150, 199), (250, 299)],
            "c.weight": [(i + 1, min(i + 6, 299)) for i in range(0, 299, 7)],
        },
    )
