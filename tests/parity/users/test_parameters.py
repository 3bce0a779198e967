"""Hooks on parameters and inside blocks, parameters that are exchanged, ways around the engine: exact, or refused."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import lt_offload
from lt_offload.errors import UnsupportedError
from tests.support.engines import differences
from tests.support.user_nets import (
    RUNS,
    Loop,
    Net,
    adamw,
    between,
    by_budget,
    changing,
    fault,
    in_every_run,
    ordinary,
    ours,
    plain,
    recorded_or_run_again,
    rows,
    with_every_budget,
)


class Shared(Net):
    def __init__(self) -> None:
        super().__init__()
        self.head.weight = self.embed.weight


CHANGES: dict[str, tuple[Callable[[Any, torch.optim.Optimizer], Any], str]] = {
    "frozen": (lambda m, o: m.layers[0].requires_grad_(False), "requires_grad of weight layers.0"),
    "group": (lambda m, o: o.add_param_group({"params": [nn.Parameter(torch.zeros(2))]}), "added to the optimizer"),
    "hook": (
        lambda m, o: m.head.weight.register_post_accumulate_grad_hook(lambda p: None),
        "post-accumulate hook on weight embed.weight",
    ),
    "shared hook": (lambda m, o: m.head.weight.register_hook(lambda g: g * 2), "tensor hook on weight embed.weight"),
    "joint hook": (
        lambda m, o: torch.autograd.graph.register_multi_grad_hook(list(m.parameters()), lambda grads: None),
        "register_multi_grad_hook on weight embed.weight",
    ),
    "joint hook, any": (
        lambda m, o: torch.autograd.graph.register_multi_grad_hook([m.layers[1].norm.bias], print, mode="any"),
        "register_multi_grad_hook on weight layers.1.norm.bias",
    ),
    "swapped": (
        lambda m, o: torch.utils.swap_tensors(m.head.bias, nn.Parameter(m.head.bias.detach() * 0.5)),
        "another tensor was swapped into weight head.bias",
    ),
    "assigned": (
        lambda m, o: m.load_state_dict({k: v.clone() for k, v in m.state_dict().items()}, assign=True),
        "embed.weight was replaced by another Parameter",
    ),
    "module": (
        lambda m, o: setattr(m.layers[1], "linear", nn.Linear(32, 32)),
        "layers.1.linear was replaced by another Linear",
    ),
    "shared memory": (lambda m, o: m.share_memory(), "was moved to shared memory"),
    "shape": (lambda m, o: setattr(m.head.bias, "data", torch.zeros(2)), "was given float32[2]"),
    "dtype": (lambda m, o: m.to(torch.bfloat16), "was given bfloat16"),
}


@pytest.mark.parametrize("name", CHANGES)
def test_changes_that_no_plan_is_made_for_are_refused(name: str) -> None:
    act, message = CHANGES[name]
    assert message in fault(RUNS["both"], changing(act), Shared)


@pytest.mark.parametrize("name", ["hook", "shared hook", "joint hook"])
def test_hooks_that_are_there_already_are_refused_before_training(name: str) -> None:
    model = Shared()
    optimizer = adamw(model)
    CHANGES[name][0](model, optimizer)
    with pytest.raises(UnsupportedError, match=r"hook on weight"), lt_offload.offloaded(model, optimizer, rows()[0]):
        pass


def halve(net: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    for parameter in net.parameters():
        parameter.register_hook(lambda gradient: gradient.clamp(-1e-3, 1e-3))


@in_every_run
def test_tensor_hooks_on_weights_of_one_block(options: tuple[str, ...]) -> None:
    loop = changing(halve)
    assert differences(plain(Net, loop), ours(Net, options, loop)) == []


@in_every_run
def test_hooks_where_gradients_are_accumulated(options: tuple[str, ...]) -> None:
    kept: dict[str, list[Any]] = {}

    def loop(model: nn.Module, optimizer: torch.optim.Optimizer, batches: list[dict[str, Tensor]]) -> list[Tensor]:
        nodes = [torch.autograd.graph.get_gradient_edge(p).node for p in model.parameters()]
        norms: list[Any] = kept.setdefault(str(len(kept)), [])
        for at, node in enumerate(nodes):
            node.register_prehook(lambda grads, at=at: norms.append((at, float(grads[0].norm()))))
            node.register_hook(lambda inputs, grads, at=at: norms.append((at, float(grads[0].norm()))))
        return ordinary(model, optimizer, batches)

    assert differences(plain(Net, loop), ours(Net, options, loop)) == []
    expected, found = kept.values()
    assert sorted(expected) == sorted(found)


def with_option(value: Any) -> Loop:
    def act(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        optimizer.param_groups[0]["lr"] = value

    return between(act)


def clipping_hook(model: nn.Module, optimizer: torch.optim.Optimizer, batches: list[dict[str, Tensor]]) -> list[Tensor]:
    def clip(*_: Any) -> None:
        nn.utils.clip_grad_norm_([p for p in model.parameters() if p.grad is not None], 1e-3)

    optimizer.register_step_pre_hook(clip)
    return ordinary(model, optimizer, batches)


def exchanging(model: nn.Module, optimizer: torch.optim.Optimizer, batches: list[dict[str, Tensor]]) -> list[Tensor]:
    losses = ordinary(model, optimizer, batches[:2])
    backup = {name: p.data for name, p in model.named_parameters()}
    for p in model.parameters():
        p.data = torch.zeros_like(p)
    for name, p in model.named_parameters():
        p.data = backup[name]
    return losses + ordinary(model, optimizer, batches[2:])


def substituting(model: nn.Module, optimizer: torch.optim.Optimizer, batches: list[dict[str, Tensor]]) -> list[Tensor]:
    halves = {name: p * 0.5 for name, p in model.named_parameters()}
    torch.func.functional_call(model, halves, (), batches[0])["loss"].backward()
    return []


def transformed(model: nn.Module, optimizer: torch.optim.Optimizer, batches: list[dict[str, Tensor]]) -> list[Tensor]:
    torch.func.grad(lambda scale: model(**batches[0])["loss"] * scale)(torch.ones(()))
    return []


def mapped(model: nn.Module, optimizer: torch.optim.Optimizer, batches: list[dict[str, Tensor]]) -> list[Tensor]:
    with torch.no_grad():
        torch.vmap(lambda ids: model(ids[None], ids[None])["loss"])(batches[0]["ids"])
    return []


def elsewhere(model: nn.Module, optimizer: torch.optim.Optimizer, batches: list[dict[str, Tensor]]) -> list[Tensor]:
    errors: list[BaseException] = []

    def work() -> None:
        try:
            ordinary(model, optimizer, batches)
        except UnsupportedError as error:
            errors.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    raise errors[0]


FOUND: dict[str, tuple[Loop, str]] = {
    "learning rate": (with_option(0.5), "lr of parameter group 0 was changed from 0.01 to 0.5"),
    "clipping in a hook": (clipping_hook, "was used by"),
    "exchanged memory": (exchanging, "was given other memory: "),
    "functional_call": (substituting, "was called with another tensor as"),
    "torch.func.grad": (transformed, "was called in a transform"),
    "torch.vmap": (mapped, "was called in a transform"),
    "another thread": (elsewhere, "a training forward ran in thread"),
}


@recorded_or_run_again
@pytest.mark.parametrize("name", FOUND)
def test_ways_around_the_engine_are_refused(name: str, options: tuple[str, ...]) -> None:
    loop, message = FOUND[name]
    assert message in fault(options, loop)


# -- forward hooks inside blocks ---------------------------------------------------------------------------------------


def spied(net: Net | None = None) -> Net:
    """Its hooks count calls and keep sums of what they see."""
    net = net or Net()
    net.__dict__["sums"] = sums = []
    net.layers[1].linear.register_forward_hook(lambda module, args, out: sums.append(float(out.detach().sum())))
    net.layers[2].norm.register_forward_pre_hook(lambda module, args: sums.append(float(args[0].detach().sum())))
    return net


def seen_by(net: Any) -> list[float]:
    return list(net.sums)


@with_every_budget
def test_forward_hooks_inside_blocks_are_called_once(budget: str) -> None:
    expected, found = plain(spied), by_budget(spied, budget)
    assert differences(expected, found) == []
    assert seen_by(expected.model) == seen_by(found.model)
    assert len(seen_by(found.model)) == 2 * len(rows())


def test_profiling_leaves_what_forward_hooks_collect_as_it_was() -> None:
    net = spied()
    profile = lt_offload.profile(net, rows()[0], optimizer=adamw(net))
    assert seen_by(net) == []
    offered = [{option.name for option in block.options} - {"keep", "offload"} for block in profile.blocks]
    assert [bool(names) for names in offered] == [False, True, False, False, True, False]


LATE_HOOKS: dict[str, Callable[[Any], Any]] = {
    "hook": lambda net: net.layers[2].linear.register_forward_hook(lambda *_: None),
    "pre-hook": lambda net: net.layers[2].linear.register_forward_pre_hook(lambda *_: None),
    "global": lambda net: nn.modules.module.register_module_forward_hook(lambda *_: None),
}


@pytest.mark.own_plan("a block that runs once takes hooks later, too")
@pytest.mark.parametrize("name", LATE_HOOKS)
def test_forward_hooks_that_come_later_are_refused_where_a_block_runs_again(name: str) -> None:
    handles: list[Any] = []
    loop = changing(lambda net, optimizer: handles.append(LATE_HOOKS[name](net)))
    try:
        assert "block layers." in fault(RUNS["run again"], loop)
        found = ours(Net, RUNS["recorded"], loop)
    finally:
        for handle in handles:
            handle.remove()
    assert differences(plain(Net), found) == []


@pytest.mark.parametrize("when", ["before", "after the forward"])
def test_forward_hooks_that_no_plan_was_made_for_are_refused(when: str) -> None:
    def loop(model: nn.Module, optimizer: torch.optim.Optimizer, batches: list[dict[str, Tensor]]) -> list[Tensor]:
        loss = model(**batches[0])["loss"]
        spied(model)  # type: ignore[arg-type]
        loss.backward()
        return []

    message = fault(RUNS["run again"], loop, spied if when == "before" else Net)
    assert "forward hook" in message
    assert "in block layers.1" in message


def old_norms() -> Net:
    """Reparametrised in torch's old way, by hooks."""
    net = Net()
    nn.utils.spectral_norm(net.layers[1].linear)
    return net


@in_every_run
def test_hooks_of_libraries_may_run_again(options: tuple[str, ...]) -> None:
    assert differences(plain(old_norms), ours(old_norms, options)) == []
