"""Forward hooks inside blocks: called once per forward, or refused where a block runs again."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import lt_offload
from tests.support.engines import differences
from tests.support.user_nets import (
    RUNS,
    Net,
    adamw,
    by_budget,
    changing,
    fault,
    in_every_run,
    ours,
    plain,
    rows,
    with_every_budget,
)


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
