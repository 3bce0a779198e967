"""What cannot take a batch in parts is refused with one clear error, before anything is trained."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import lt_offload
from lt_offload import ConfigError, OffmateStrategy, PlanError, UnsupportedError
from tests.parity.parts import nets


def refusal(layer: Any, **settings: Any) -> str:
    net = nets.net(layer)
    before = [parameter.clone() for parameter in net.parameters()]
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2, fused=True)
    with (
        pytest.raises(UnsupportedError) as error,
        lt_offload.offloaded(net, optimizer, (nets.ids(),), accelerator="cpu", **{"micro_batches": 2} | settings),
    ):
        pass
    assert all(map(torch.equal, before, net.parameters()))
    return str(error.value)


@pytest.mark.parametrize("value", [0, -1, 1.5, "many", True])
def test_numbers_of_parts_that_there_are_not(value: Any) -> None:
    with pytest.raises(ConfigError, match="micro_batches=.* must be at least 1, or 'auto'"):
        OffmateStrategy(micro_batches=value)
    net = nets.net(nets.Plain)
    optimizer = torch.optim.AdamW(net.parameters())
    with (
        pytest.raises(ConfigError, match="micro_batches=.* must be at least 1, or 'auto'"),
        lt_offload.offloaded(net, optimizer, (nets.ids(),), micro_batches=value, accelerator="cpu"),
    ):
        pass
    with pytest.raises(ConfigError, match="must be at least 1"), lt_offload.micro_batched_reference(net, value):
        pass


def test_more_parts_than_samples() -> None:
    net = nets.net(nets.Plain)
    optimizer = torch.optim.AdamW(net.parameters())
    with pytest.raises(ConfigError, match="micro_batches=9 is more than the 8 samples of the batch; set .*=8 or less"):
        lt_offload.profile(net, (nets.ids(),), optimizer=optimizer, micro_batches=9)
    with pytest.raises(ConfigError, match="micro_batches=4 is more than the 2 samples"):
        lt_offload.profile_config(
            "llama2-7b", batch_size=2, sequence_length=8, hardware="rtx-3060-12gb", micro_batches=4
        )


def test_a_batch_size_that_is_looked_for() -> None:
    with pytest.raises(ConfigError, match="max_batch_size=8 bounds what batch_size='auto' chooses, and batch_size=4"):
        OffmateStrategy(batch_size=4, max_batch_size=8)
    with pytest.raises(ConfigError, match="max_batch_size=0 must be at least 1"):
        OffmateStrategy(batch_size="auto", max_batch_size=0)


@pytest.mark.parametrize(
    ("layer", "words"),
    [
        (nets.Normed, "layers.0 takes statistics over a batch .BatchNorm1d norm"),
        (nets.Mixing, "samples of a batch depend on each other in block layers.0"),
        (nets.Counting, "layers.0 returned a tensor of shape .. for 2 samples"),
        (nets.Twice, "layers.0 uses its weight inner.weight several times"),
        (nets.Fixed, "layers.0 fails on a part of a batch"),
    ],
)
def test_blocks_that_do_not_treat_every_sample_on_its_own(layer: Any, words: str) -> None:
    with pytest.raises(UnsupportedError, match=words):
        raise UnsupportedError(refusal(layer))
    if layer is not nets.Mixing:  # whose weights and samples are as others in one part
        net = nets.net(layer)
        optimizer = torch.optim.AdamW(net.parameters())
        lt_offload.profile(net, (nets.ids(),), optimizer=optimizer)


def test_statistics_that_stay_are_no_obstacle() -> None:
    net = nets.net(nets.Normed)
    for module in net.modules():
        if isinstance(module, nn.BatchNorm1d):
            module.eval()
    batches = [nets.ids(8, seed=seed) for seed in range(2)]
    found, plainly = (nets.trained(net, 4, batches, plainly=plainly) for plainly in (False, True))
    assert all(map(torch.equal, found.losses, plainly.losses))


def test_a_replayed_plan_is_checked_with_the_model() -> None:
    plan = _plan(nets.net(nets.Twice), 1)
    forced = replace(plan, parts=2)
    with (
        pytest.raises(UnsupportedError, match="several times"),
        _offloaded(nets.net(nets.Twice), forced, micro_batches=2),
    ):
        pass
    with (
        pytest.raises(PlanError, match="the plan has micro_batches=1, micro_batches=2 was given"),
        _offloaded(nets.net(nets.Twice), plan, micro_batches=2),
    ):
        pass


def test_a_plan_says_in_how_many_parts(tmp_path: Path) -> None:
    plan = _plan(nets.net(nets.Plain), 2)
    assert "each block takes a batch in 2 parts" in plan.explain()
    assert lt_offload.Plan.load(plan.save(tmp_path / "plan.json")) == plan
    with (
        pytest.raises(PlanError, match="micro_batches=2, micro_batches=1 was given"),
        _offloaded(nets.net(nets.Plain), plan, micro_batches=1),
    ):
        pass
    with _offloaded(nets.net(nets.Plain), plan, micro_batches="auto") as engine:
        assert engine.plan is plan


def test_hooks_on_weights_would_see_the_gradient_of_a_part() -> None:
    net = nets.net(nets.Plain)
    plan = _plan(net, 2)
    net.get_parameter("layers.1.inner.weight").register_hook(lambda grad: grad)
    with (
        pytest.raises(UnsupportedError, match="layers.1.inner.weight, which has a gradient per part of the batch"),
        _offloaded(net, plan, micro_batches=2),
    ):
        pass


def test_casts_that_autocast_keeps() -> None:
    net = nets.net(nets.Plain)

    def run(batch: Any) -> Any:
        with torch.autocast("cpu", torch.bfloat16, cache_enabled=kept):
            return net(*batch)

    optimizer = torch.optim.AdamW(net.parameters())
    kept = False
    assert lt_offload.profile(net, (nets.ids(),), optimizer=optimizer, run=run, micro_batches=2).parts == 2
    kept = True
    with pytest.raises(UnsupportedError, match="for several parts of a batch"):
        lt_offload.profile(net, (nets.ids(),), optimizer=optimizer, run=run, micro_batches=2)


def test_several_forwards_before_a_backward() -> None:
    net = nets.net(nets.Plain)
    optimizer = torch.optim.AdamW(net.parameters())

    def pair(batch: Any) -> Any:
        return net(*batch) + net(*batch)

    with pytest.raises(UnsupportedError, match="calls the model again before the backward of an earlier call"):
        lt_offload.profile(net, (nets.ids(),), optimizer=optimizer, run=pair, micro_batches=2)


def _plan(net: nn.Module, micro_batches: int) -> lt_offload.Plan:
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2, fused=True)
    profile = lt_offload.profile(net, (nets.ids(),), optimizer=optimizer, micro_batches=micro_batches)
    return lt_offload.solve(profile, memory=1 << 30, planner="resident")


def _offloaded(net: nn.Module, plan: lt_offload.Plan, **settings: Any) -> Any:
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2, fused=True)
    return lt_offload.offloaded(net, optimizer, (nets.ids(),), plan=plan, accelerator="cpu", **settings)
