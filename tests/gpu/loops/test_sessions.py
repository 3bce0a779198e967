"""Sessions as they begin, fail and follow each other in one process, as in a notebook."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch

import lt_offload
from lt_offload.errors import ConfigError, InfeasibleError
from tests.gpu.loops.bench import LOOPS, Bench, Here, in_both_ways, plain_steps
from tests.gpu.users.runs import equal_updates
from tests.support.engines import Result, differences

pytestmark = [*LOOPS, pytest.mark.only("cuda", "fake")]


def own_session(bench: Bench, **settings: Any) -> tuple[Result, Any]:
    """Train in a session that measures and plans by itself."""
    model, optimizer = bench.fresh()
    batches = bench.batches()
    here = Here(model=model, optimizer=optimizer, batches=batches, device=bench.device)
    made = {"host_update": equal_updates(bench.device), "solver_time_limit": 2.0} | settings
    with lt_offload.offloaded(model, optimizer, batches[0], accelerator="cuda", **made) as engine:
        torch.manual_seed(1)
        losses = plain_steps(here)
    return Result(losses, model, optimizer), engine


@pytest.mark.parametrize("memory", [None, "2GB"])
def test_a_session_that_plans_by_itself(memory: str | None, bench: Bench) -> None:
    expected, _ = bench.plainly(plain_steps)
    found, engine = own_session(bench, memory=memory)
    assert differences(expected, found) == []
    assert engine.stats.device_peak_bytes <= engine.plan.budget_bytes


@in_both_ways
def test_two_sessions_go_on_as_one_loop(way: str, bench: Bench) -> None:
    def twice(here: Here) -> list[torch.Tensor]:
        return plain_steps(here) + plain_steps(here)

    expected, _ = bench.plainly(twice)
    model, optimizer = bench.fresh()
    here = Here(model=model, optimizer=optimizer, batches=bench.batches(), device=bench.device)
    losses = []
    torch.manual_seed(1)
    for _ in range(2):
        with bench.within(way, here) as inner:
            losses += plain_steps(inner)
    assert differences(expected, Result(losses, model, optimizer)) == []


class Stop(Exception):
    """An error of the loop's own."""


@in_both_ways
@pytest.mark.parametrize("where", ["after a forward", "after a backward", "after a step"])
def test_an_error_leaves_a_whole_model_and_a_usable_process(where: str, way: str, bench: Bench) -> None:
    model, optimizer = bench.fresh()
    here = Here(model=model, optimizer=optimizer, batches=bench.batches(), device=bench.device)

    def failing() -> None:
        with bench.within(way, here):
            plain_steps(here)
            loss = model(**here.batches[0]).loss
            if where == "after a forward":
                raise Stop
            loss.backward()
            if where == "after a backward":
                raise Stop
            here.step()
            raise Stop

    with pytest.raises(Stop):
        failing()
    assert all(p.isfinite().all() and p.device.type == "cpu" for p in model.parameters())
    assert bench.compare(way, plain_steps) == []


@in_both_ways
def test_memory_that_the_loop_has_not_left(way: str, bench: Bench) -> None:
    """Torch's own error, as in any loop; the loop may catch it between steps and go on."""

    def loop(here: Here) -> list[torch.Tensor]:
        losses = []
        for batch in here.batches:
            with pytest.raises(torch.OutOfMemoryError):
                torch.empty(torch.cuda.mem_get_info()[1], dtype=torch.uint8, device=here.device)
            loss = here.model(**batch).loss
            loss.backward()
            here.step()
            losses.append(loss.detach().clone())
        return losses

    assert bench.compare(way, loop) == []


@in_both_ways
def test_updates_on_the_host(way: str, bench: Bench) -> None:
    """Equal to plain training where weights that the plan gives to the host are updated there."""
    plan = bench.plan(way)
    names = [name for name, _ in bench.fresh()[0].named_parameters()]
    on_host = {name for name, place in zip(names, plan.update_places, strict=True) if place == "host"}

    master, _ = bench.fresh()
    twin, _ = bench.fresh(on_device=True)
    masters = dict(master.named_parameters())
    weights = dict(twin.named_parameters())
    updated = [masters[name] if name in on_host else weight for name, weight in weights.items()]
    optimizer = torch.optim.AdamW(updated, lr=1e-3, weight_decay=0.1, fused=True)
    losses = []
    torch.manual_seed(1)
    for batch in bench.batches():
        loss = twin(**batch).loss
        loss.backward()
        for name in on_host:
            gradient, weights[name].grad = weights[name].grad, None
            assert gradient is not None
            masters[name].grad = gradient.cpu()
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            for name in on_host:
                weights[name].copy_(masters[name])
        losses.append(loss.detach().cpu())
    expected = {name: weight.detach().cpu() for name, weight in weights.items()}
    del twin, weights, updated, optimizer
    gc.collect()
    found, _ = bench.ours(way, plain_steps)
    assert all(map(torch.equal, losses, (loss.cpu() for loss in found.losses)))
    assert all(torch.equal(expected[name], weight) for name, weight in found.model.named_parameters())


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"memory": "900GB"}, "memory=900 GB is more than there is"),
        ({"memory": "100MB"}, "memory=100 MB is too small"),
        ({"memory": "2GB", "host_memory": "50KB"}, "host_memory=50 kB is too small"),
    ],
)
def test_budgets_that_cannot_be(settings: dict[str, Any], message: str, bench: Bench) -> None:
    with pytest.raises((ConfigError, InfeasibleError), match=message):
        own_session(bench, **settings)


@pytest.mark.parametrize("accelerator", ["cuda:57", "gpu0"])
def test_devices_that_are_not_there(accelerator: str, bench: Bench) -> None:
    model, optimizer = bench.fresh()
    with (
        pytest.raises(ConfigError, match=accelerator),
        lt_offload.offloaded(model, optimizer, bench.batches(1)[0], accelerator=accelerator),
    ):
        pass
