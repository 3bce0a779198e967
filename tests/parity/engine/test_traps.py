"""Mistakes that such an engine makes silently, one test each."""

from __future__ import annotations

import gc
import itertools
import threading
import weakref
from _thread import interrupt_main
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from operator import call
from typing import Any

import pytest
import torch
from torch import nn

from lt_offload.errors import OverBudget, PlanError, UnsupportedError
from lt_offload.execute.engine import Engine
from lt_offload.execute.user_code.param_grad import ConsumedGradient
from lt_offload.model.blocks import find_blocks
from tests.support import models, plans
from tests.support.engines import (
    BUDGET,
    Case,
    batches,
    build,
    carried_out,
    differences,
    make_optimizer,
    offloaded,
    plain,
    scheduler,
)
from tests.support.hostile.device import HostileDevice

ALL = ("keep", "recompute", "offload", "mixed", "reload")
MIXED = Case(family="llama-tied", options=ALL, places=("device", "paged", "host"), dropout=0.1)


@contextmanager
def session(case: Case, model: nn.Module, optimizer: torch.optim.Optimizer, **options: Any) -> Iterator[Engine]:
    plan = plans.streamed(find_blocks(model), optimizer, options=case.options, places=case.places)
    device = HostileDevice(BUDGET, **{"mode": case.mode, "check": True} | options)
    with carried_out(model, optimizer, plan, device) as engine:
        yield engine


def iterate(engine: Engine, model: nn.Module, optimizer: torch.optim.Optimizer, batch: dict[str, Any]) -> torch.Tensor:
    with engine.iteration():
        loss = model(**batch).loss
        loss.backward()
        optimizer.step()
    return loss.detach().clone()


@pytest.mark.parametrize("family", models.FAMILIES)
def test_saved_views_of_weights_follow_the_weight(family: str) -> None:
    """The backward copy has another address than the forward copy, and what was there is overwritten."""
    case = Case(family=family, options=("keep",), places=("device",), roomy=True)
    assert differences(plain(case), offloaded(case, poison=True)) == []


@pytest.mark.parametrize("option", ["reload", "offload", "mixed"])
def test_activations_fetched_before_they_are_released(option: str) -> None:
    """The last blocks' activations return while the copies to the host still count as running."""
    case = Case(options=(option,), places=("host",), lag=2, lead=2)
    assert differences(plain(case), offloaded(case)) == []


def test_every_tensor_is_updated_once() -> None:
    model = build(MIXED)
    optimizer = make_optimizer(model, MIXED.optimizer)
    with session(MIXED, model, optimizer) as engine:
        iterate(engine, model, optimizer, batches(MIXED, model)[0])
        assert engine.gradients is not None
        assert engine.gradients.updated == len(list(model.parameters()))


@pytest.mark.parametrize("backward", [False, True])
def test_forward_without_backward_changes_nothing(backward: bool) -> None:
    """A training-mode forward whose loss is dropped, before and between iterations."""
    case = Case(options=ALL, places=("device", "paged", "host"))
    expected = plain(case)
    model = build(case)
    optimizer = make_optimizer(model, case.optimizer)
    schedule = scheduler(optimizer)
    losses = []
    with session(case, model, optimizer) as engine:
        torch.manual_seed(case.seed + 1)
        for batch in batches(case, model):
            if backward:
                model(**batch)
            else:
                with engine.iteration():
                    model(**batch)
            losses.append(iterate(engine, model, optimizer, batch))
            schedule.step()
        engine.drain()
    assert all(torch.equal(a, b) for a, b in zip(expected.losses, losses, strict=True))


@pytest.mark.parametrize("option", ALL)
def test_ctrl_c_comes_through_while_a_dropped_forward_is_taken_down(option: str) -> None:
    """Python ignores what is raised in finalizers: none may be the first code that could raise it."""
    case = Case(options=(option,), places=("host",))
    model = build(case)
    optimizer = make_optimizer(model, case.optimizer)
    with session(case, model, optimizer, check=False) as engine:  # the checker is in Python itself
        batch = batches(case, model)[0]
        held = [model(**batch)]
        with pytest.raises(KeyboardInterrupt):
            deque(map(call, [interrupt_main, held.clear]), maxlen=0)  # nothing between the two that would notice
        iterate(engine, model, optimizer, batch)


def test_lora_trains_the_adapters_of_the_first_layer() -> None:
    case = Case(lora=True, options=ALL, places=("paged", "host"))
    start = {n: p.clone() for n, p in build(case).named_parameters() if "lora" in n and ".0." in n}
    result = offloaded(case)
    assert start
    assert all(not torch.equal(p, start[n]) for n, p in result.model.named_parameters() if n in start)
    assert differences(plain(case), result) == []


@pytest.mark.parametrize("mode", ["lazy", "thread"])
def test_nothing_is_leaked(mode: str) -> None:
    case = Case(options=ALL, places=("device", "paged", "host"), mode=mode)
    model = build(case)
    optimizer = make_optimizer(model, case.optimizer)
    with session(case, model, optimizer, check=False) as engine:
        iterate(engine, model, optimizer, batches(case, model)[0])
        model(**batches(case, model)[0])  # left hanging
        watched = [weakref.ref(thing) for thing in (engine, engine.device, engine.pool, model, engine.gradients)]
    del engine, model, optimizer
    gc.collect()
    assert [ref() is None for ref in watched] == [True] * len(watched)


def test_removal_restores_the_model() -> None:
    case = Case(options=ALL, places=("device", "host"))
    model = build(case)
    optimizer = make_optimizer(model, case.optimizer)
    before = {name: module.forward.__func__ for name, module in model.named_modules() if hasattr(module, "forward")}
    with session(case, model, optimizer) as engine:
        iterate(engine, model, optimizer, batches(case, model)[0])
    assert {n: m.forward.__func__ for n, m in model.named_modules() if hasattr(m, "forward")} == before
    loss = model(**batches(case, model)[1]).loss
    with pytest.raises(UnsupportedError, match="was used by"):  # what plain PyTorch would add to is gone
        loss.backward()
    optimizer.zero_grad()
    model(**batches(case, model)[1]).loss.backward()
    assert all(p.grad is not None for p in model.parameters())


@pytest.mark.parametrize("mode", ["lazy", "thread"])
def test_an_error_anywhere_leaves_a_usable_engine(mode: str) -> None:
    """``OverBudget`` at every allocation in turn: the first error is reported, and the next iteration runs."""
    case = Case(options=ALL, places=("device", "paged", "host"), mode=mode)
    for at in itertools.count(step=7):
        model = build(case)
        optimizer = make_optimizer(model, case.optimizer)
        data = batches(case, model)
        with session(case, model, optimizer) as engine:
            place, calls = engine.device.place, itertools.count()

            def failing(*args: Any, place: Any = place, calls: Any = calls, at: int = at) -> Any:
                if next(calls) == at:
                    raise OverBudget("injected")
                return place(*args)

            engine.device.place = failing  # type: ignore[method-assign]
            failure = None
            try:
                iterate(engine, model, optimizer, data[0])
            except OverBudget as error:
                failure = str(error)
            if failure is None:
                assert at > 50, "nothing was injected"
                return
            assert failure == "injected"
            engine.device.place = place  # type: ignore[method-assign]
            assert all(p.isfinite().all() for p in model.parameters())
            assert all(p.grad is None or isinstance(p.grad, ConsumedGradient) for p in model.parameters())
            assert iterate(engine, model, optimizer, data[1]).isfinite()


def test_shapes_may_change() -> None:
    case = Case(options=ALL, places=("host",), mode="random", shapes=((2, 12), (1, 20), (3, 5), (2, 12)))
    assert differences(plain(case), offloaded(case)) == []


def test_backward_on_another_thread() -> None:
    """As CUDA does: grad mode, hooks and random state are per thread."""
    case = MIXED
    expected = plain(case)
    model = build(case)
    optimizer = make_optimizer(model, case.optimizer)
    schedule = scheduler(optimizer)
    losses = []
    with session(case, model, optimizer, counting=False) as engine:
        torch.manual_seed(case.seed + 1)
        for batch in batches(case, model):
            with engine.iteration():
                loss = model(**batch).loss
                worker = threading.Thread(target=loss.backward)
                worker.start()
                worker.join()
                optimizer.step()
            schedule.step()
            losses.append(loss.detach().clone())
    assert all(torch.equal(a, b) for a, b in zip(expected.losses, losses, strict=True))


@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode])
def test_validation_before_and_between_iterations(context: Any) -> None:
    case = Case(options=ALL, places=("device", "paged", "host"))
    expected = plain(case)
    reference = build(case).eval()
    model = build(case)
    optimizer = make_optimizer(model, case.optimizer)
    schedule = scheduler(optimizer)
    losses = []
    weights = {name: value.clone() for name, value in model.state_dict().items()}
    with session(case, model, optimizer) as engine:
        torch.manual_seed(case.seed + 1)
        for batch in batches(case, model):
            with context(), engine.inference():
                model.eval()
                found = model(**batch).logits
                model.train()
            reference.load_state_dict(weights)
            with torch.no_grad():
                assert torch.equal(reference(**batch).logits, found)
            losses.append(iterate(engine, model, optimizer, batch))
            schedule.step()
            engine.drain()
            weights = {name: value.clone() for name, value in model.state_dict().items()}
    assert all(torch.equal(a, b) for a, b in zip(expected.losses, losses, strict=True))


def test_no_grad_call_inside_an_iteration_is_refused() -> None:
    case = Case(options=("keep",))
    model = build(case)
    optimizer = make_optimizer(model, case.optimizer)
    batch = batches(case, model)[0]
    with session(case, model, optimizer) as engine:
        with engine.iteration():
            loss = model(**batch).loss
            with pytest.raises(UnsupportedError, match="between a forward and its backward"), torch.no_grad():
                model(**batch)
            loss.backward()
            optimizer.step()
        assert iterate(engine, model, optimizer, batch).isfinite()


def test_storages_that_die_and_return_are_not_confused() -> None:
    """Many small blocks: addresses of freed storages come back within one forward."""
    case = Case(options=("offload",), places=("host",), mode="random")
    model = models.build("llama", layers=24, seed=3)
    twin = models.build("llama", layers=24, seed=3)
    optimizer, other = (make_optimizer(m, "adamw-fused") for m in (model, twin))
    with session(case, model, optimizer) as engine:
        for seed in range(2):
            batch = models.batch(model, seed=seed)
            loss = iterate(engine, model, optimizer, batch)
            reference = twin(**batch).loss
            reference.backward()
            other.step()
            other.zero_grad()
            assert torch.equal(loss, reference)


def test_bookkeeping_does_not_grow() -> None:
    case = Case(options=ALL, places=("paged", "host"))
    model = build(case)
    optimizer = make_optimizer(model, case.optimizer)
    batch = batches(case, model)[0]
    with session(case, model, optimizer, check=False) as engine:
        sizes = []
        for _ in range(12):
            iterate(engine, model, optimizer, batch)
            engine.drain()
            gc.collect()
            sizes.append((len(gc.get_objects()), engine.pool.nbytes, engine.device.host_bytes))
        assert sizes[-1][1:] == sizes[2][1:]
        assert abs(sizes[-1][0] - sizes[5][0]) < 200


def test_a_saved_weight_that_is_gone_is_an_error() -> None:
    """Not garbage: a plan that drops a weight too early cannot go unnoticed."""
    case = Case(options=("keep",), places=("device",))
    model = build(case)
    optimizer = make_optimizer(model, case.optimizer)
    with session(case, model, optimizer) as engine:
        for op in engine.plan.ops:  # type: ignore[union-attr]
            if op.kind == "prefetch" and op.step >= len(engine.structure.blocks):
                engine._passes._walk._steps[op.step].before.clear()
        with pytest.raises(PlanError, match="does not bring"):
            iterate(engine, model, optimizer, batches(case, model)[0])
