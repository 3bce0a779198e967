"""Hooks that look at gradients and edit them: the offmate strategy against the stock one, bit for bit."""

from __future__ import annotations

import functools
import types
from collections.abc import Callable
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule
from lightning.pytorch.utilities import grad_norm
from torch import Tensor, nn

from lt_offload import OffmateStrategy
from lt_offload.errors import UnsupportedError
from tests import sampling
from tests.parity.lightning.test_clipping import Pictures
from tests.support.engines import equal
from tests.support.trainers import Run, budgets, differences, fit, seeded_module, tight

OPTIONS: dict[str, Any] = {"layers": 3, "dropout": 0.1}
HOOKS = ("on_after_backward", "on_before_optimizer_step", "on_before_zero_grad")
Act = Callable[[LightningModule, list[Any]], Any]


class Looking(Callback):
    """Calls ``act`` in a hook, with the module and a list for what it sees."""

    def __init__(self, hook: str, act: Act) -> None:
        self.act, self.seen = act, list[Any]()
        setattr(self, hook, self._call)

    def _call(self, trainer: Any, pl_module: Any, *args: Any) -> None:
        self.act(pl_module, self.seen)


def copies(module: LightningModule, seen: list[Any]) -> None:
    seen += [None if p.grad is None else p.grad.clone() for p in module.parameters()]


def norms(module: LightningModule, seen: list[Any]) -> None:
    seen += list(grad_norm(module, norm_type=2).values())
    seen += [p.grad.abs().max() for p in module.parameters() if p.grad is not None]


def through_other_ways(module: LightningModule, seen: list[Any]) -> None:
    """Read without operations on the tensors themselves."""
    for parameter in module.parameters():
        if parameter.grad is not None:
            seen.append(torch.from_numpy(parameter.grad.float().numpy().copy()))
            seen.append(torch.tensor(parameter.grad.data.view(-1)[0].item()))


def halve(module: LightningModule, seen: list[Any]) -> None:
    for parameter in module.parameters():
        if parameter.grad is not None:
            parameter.grad.mul_(0.5)


def by_torch(module: LightningModule, seen: list[Any]) -> None:
    seen.append(nn.utils.clip_grad_norm_(module.parameters(), 0.05))


def assign(module: LightningModule, seen: list[Any]) -> None:
    for at, parameter in enumerate(module.parameters()):
        if parameter.grad is not None:
            if at % 3 == 0:
                parameter.grad = parameter.grad * 2
            elif at % 3 == 1:
                parameter.grad.data = parameter.grad.sign()


def remove(module: LightningModule, seen: list[Any]) -> None:
    """Leave some weights out, others only now and then."""
    turn = len(seen)
    seen.append(None)
    for at, parameter in enumerate(module.parameters()):
        if at % 4 == 0 or (at + turn) % 4 == 1:
            parameter.grad = None


def by_numpy(module: LightningModule, seen: list[Any]) -> None:
    for parameter in module.parameters():
        if parameter.grad is not None:
            parameter.grad.numpy()[...] *= 0.25


def kept(module: LightningModule, seen: list[Any]) -> None:
    """Compare with the gradients of the update before, which nobody changes any more."""
    before = vars(module).setdefault("before", {})
    for name, parameter in module.named_parameters():
        if name in before and before[name] is not None:
            seen.append((before[name] * parameter.grad).sum())
        before[name] = parameter.grad


def looked_at(strategy: Any, hook: str, act: Act, module: Any = None, **settings: Any) -> tuple[Run, list[Any]]:
    callback = Looking(hook, act)
    module = seeded_module(**OPTIONS) if module is None else module
    return fit(strategy, module, callbacks=[callback], **settings), callback.seen


def require_equal(hook: str, act: Act, make: Callable[[], Any] | None = None, **settings: Any) -> Run:
    stock, expected = looked_at("auto", hook, act, make() if make else None, **settings)
    for memory in budgets(stock.module):
        ours, found = looked_at(OffmateStrategy(memory=memory), hook, act, make() if make else None, **settings)
        assert len(expected) == len(found)
        assert [i for i, (a, b) in enumerate(zip(expected, found, strict=True)) if not same(a, b)] == []
        assert differences(stock, ours) == [] if make is None else states_equal(stock, ours)
        assert ours.trainer.strategy.plan.delayed
        own = vars(ours.trainer.precision_plugin)
        assert not {"post_backward", "_after_closure", "_clip_gradients"} & own.keys()
    return stock


def same(a: Any, b: Any) -> bool:
    return a is b is None or (isinstance(a, Tensor) and isinstance(b, Tensor) and equal(a, b))


def states_equal(a: Run, b: Run) -> bool:
    left, right = a.module.state_dict(), b.module.state_dict()
    return all(equal(value, right[name]) for name, value in left.items())


WINDOWS: list[dict[str, Any]] = [{}, {"accumulate_grad_batches": 2, "gradient_clip_val": 0.1}]


@pytest.mark.parametrize(("hook", "settings"), sampling.grid(HOOKS, WINDOWS, count=3))
def test_what_hooks_see_is_what_stock_shows(hook: str, settings: dict[str, Any]) -> None:
    require_equal(hook, copies, **settings)


@pytest.mark.parametrize("act", [norms, through_other_ways])
def test_other_ways_to_look(act: Act) -> None:
    require_equal("on_before_optimizer_step", act)


EDITS = {"halve": halve, "clip": by_torch, "assign": assign, "remove": remove, "numpy": by_numpy}


@pytest.mark.parametrize("name", sampling.some(list(EDITS), 2))
def test_updates_use_what_hooks_have_made_of_gradients(name: str) -> None:
    stock = require_equal("on_before_optimizer_step", EDITS[name])
    assert differences(stock, fit("auto", seeded_module(**OPTIONS))) != [], "the hook does nothing"


@pytest.mark.parametrize("name", sampling.some(["halve", "assign"], 1))
def test_edits_in_the_middle_of_a_window(name: str) -> None:
    require_equal("on_after_backward", EDITS[name], accumulate_grad_batches=3, gradient_clip_val=0.5)


@pytest.mark.slow
def test_clipping_by_value_comes_after_the_hook() -> None:
    clip = {"gradient_clip_val": 1e-3, "gradient_clip_algorithm": "value"}
    require_equal("on_before_optimizer_step", halve, **clip)
    require_equal("on_before_zero_grad", copies, **clip)


@pytest.mark.slow
def test_weights_outside_the_blocks() -> None:
    require_equal("on_before_optimizer_step", halve, Pictures)
    require_equal("on_before_zero_grad", copies, Pictures)


def test_gradients_that_are_kept_after_the_last_hook() -> None:
    require_equal("on_before_optimizer_step", kept)


@pytest.mark.slow
def test_adapters_and_frozen_weights() -> None:
    require_equal("on_after_backward", copies, lambda: seeded_module(layers=3, lora=True))


# -- before the step after it ------------------------------------------------------------------------------------------


def sizes(module: LightningModule, seen: list[Any]) -> None:
    """As numbers, which take no device memory."""
    seen += [None if p.grad is None else float(p.grad.norm()) for p in module.parameters()]


LATER = ("on_train_batch_end", "on_train_batch_start", "training_step")


def looking(place: str, act: Act, *, keeps: bool, make: Callable[[], Any] | None = None) -> tuple[Any, list[Any]]:
    """Return a module that calls ``act`` in ``place``, and what that sees; ``keeps``: the plan is to keep gradients."""
    module, seen = make() if make else seeded_module(**OPTIONS), list[Any]()
    original = getattr(module, place)

    @functools.wraps(original)
    def look(*args: Any) -> Any:
        act(module, seen)
        return original(*args)

    setattr(module, place, look)
    if keeps:
        module.on_before_zero_grad = types.MethodType(lambda self, optimizer: None, module)
    return module, seen


@pytest.mark.slow
@pytest.mark.parametrize(("place", "settings"), sampling.grid(LATER, WINDOWS, count=3))
def test_gradients_that_are_kept_are_shown_until_they_are_cleared(place: str, settings: dict[str, Any]) -> None:
    module, expected = looking(place, sizes, keeps=True)
    stock = fit("auto", module, **settings)
    for memory in budgets(module):
        module, found = looking(place, sizes, keeps=True)
        ours = fit(OffmateStrategy(memory=memory, activation_offload=memory > tight(module)), module, **settings)
        assert expected == found
        assert differences(stock, ours) == []


@pytest.mark.parametrize(("place", "settings"), sampling.grid(LATER, [{}, {"accumulate_grad_batches": 2}], count=3))
def test_gradients_that_are_gone_are_refused_until_they_are_cleared(place: str, settings: dict[str, Any]) -> None:
    for name in ("model.lm_head.weight", "model.model.layers.1.mlp.up_proj.weight"):

        def norm(module: LightningModule, seen: list[Any], name: str = name) -> None:
            gradient = module.get_parameter(name).grad
            seen.append(None if gradient is None else gradient.norm())

        module, seen = looking(place, norm, keeps=False)
        memory = tight(module) if "head" in name else 200_000_000
        with pytest.raises(UnsupportedError, match=rf"the gradient of weight {name} was used by norm: .*zero_grad"):
            fit(OffmateStrategy(memory=memory), module, **settings)
        assert seen == ([] if place == "on_train_batch_end" else [None])


def test_gradients_outside_the_blocks_are_always_there() -> None:
    def classes(module: LightningModule, seen: list[Any]) -> None:
        gradient = module.model.classifier.weight.grad
        seen.append(None if gradient is None else float(gradient.norm()))

    module, expected = looking("training_step", classes, keeps=False, make=Pictures)
    fit("auto", module)
    for memory in budgets(module):
        ours, found = looking("training_step", classes, keeps=False, make=Pictures)
        fit(OffmateStrategy(memory=memory), ours)
        assert expected == found


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:`training_step` returned `None`")
def test_a_step_without_a_loss() -> None:
    def module() -> Any:
        made = seeded_module(**OPTIONS)
        step = made.training_step
        made.training_step = lambda batch, batch_idx: None if batch_idx == 1 else step(batch, batch_idx)
        return made

    for hook in HOOKS:
        require_equal(hook, copies, module)


# -- after training ----------------------------------------------------------------------------------------------------


def test_a_validation_clears_them() -> None:
    for strategy in ("auto", OffmateStrategy(memory="200MB")):
        run = fit(strategy, seeded_module(**OPTIONS), max_epochs=1)
        assert all(p.grad is None for p in run.module.parameters())


# -- what cannot be ----------------------------------------------------------------------------------------------------


def test_gradients_that_are_kept_while_they_change_are_refused() -> None:
    callback = Looking("on_after_backward", kept)
    with pytest.raises(UnsupportedError, match=r"the gradient of weight .* was kept: .*p.grad.clone\(\)"):
        fit(OffmateStrategy(memory="200MB"), seeded_module(**OPTIONS), callbacks=[callback])


def test_an_error_in_a_hook_is_the_one_that_is_raised() -> None:
    def failing(module: LightningModule, seen: list[Any]) -> None:
        raise RuntimeError("on purpose")

    module = seeded_module(**OPTIONS)
    before = {name: p.detach().clone() for name, p in module.named_parameters()}
    for hook in HOOKS[:2]:
        with pytest.raises(RuntimeError, match="on purpose"):
            looked_at(OffmateStrategy(memory="200MB"), hook, failing, module)
        assert all(torch.equal(before[name], p) for name, p in module.named_parameters())
        # Plain training leaves gradients there.
        with pytest.raises(UnsupportedError, match="call optimizer.zero_grad"):
            nn.utils.clip_grad_norm_(module.parameters(), 1.0)


@pytest.mark.parametrize("place", ["training_step", "on_before_backward"])
def test_gradients_that_are_set_before_the_backward_are_refused(place: str) -> None:
    def set_all(module: LightningModule, seen: list[Any]) -> None:
        for p in module.parameters():
            p.grad = torch.full_like(p, 0.01)

    module, callbacks = seeded_module(layers=2), []
    step = module.training_step

    def training_step(batch: Any, batch_idx: int) -> Any:
        loss = step(batch, batch_idx)
        set_all(module, [])
        return loss

    if place == "training_step":
        module.training_step = training_step
    else:
        callbacks.append(Looking(place, set_all))
    with pytest.raises(UnsupportedError, match=r"weight .* has a gradient before the backward: "):
        fit(OffmateStrategy(memory="200MB"), module, max_epochs=1, callbacks=callbacks)
