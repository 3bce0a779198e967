"""An engine that is closed holds no device memory, although it refers to itself: garbage need not be collected."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from dataclasses import replace

import pytest

from lt_offload.execute.engine import Engine
from lt_offload.model.blocks import find_blocks
from tests.support import engines, models, plans
from tests.support.hostile.device import HostileDevice


@pytest.fixture(autouse=True)
def no_collector() -> Iterator[None]:
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def fail(engine: Engine) -> None:
    with engine.iteration():
        raise KeyError(engine.model(**models.batch(engine.model)).loss)


@pytest.mark.parametrize("optimizer", ["adamw-fused", "adafactor", "sgd"])
@pytest.mark.parametrize("mode", ["lazy", "thread"])
@pytest.mark.parametrize("fails", [False, True])
def test_the_arena_is_gone_with_the_device(optimizer: str, mode: str, fails: bool) -> None:
    case = engines.Case(options=("keep", "recompute", "offload", "mixed"), places=("device", "paged", "host"))
    model = engines.build(case)
    optimizer_ = engines.make_optimizer(model, optimizer)
    plan = plans.streamed(find_blocks(model), optimizer_, options=case.options, places=case.places)
    device = HostileDevice(engines.BUDGET, mode)  # type: ignore[arg-type]
    engine = Engine(model, optimizer_, plan, device)
    engine.install()
    slab = weakref.ref(device._arena.slab.untyped_storage())
    for _ in range(3):
        with engine.iteration(grad_norm=True):
            model(**models.batch(model)).loss.backward()
            optimizer_.step()
        optimizer_.zero_grad()
    if fails:
        with pytest.raises(KeyError):
            fail(engine)
    assert slab() is not None
    engine.close()
    device.close()
    assert slab() is None
    assert engine.stats.iterations == 3


@pytest.mark.parametrize("parts", [1, 2])
@pytest.mark.parametrize("option", ["keep", "recompute"])
def test_what_blocks_have_saved_is_gone_with_the_graph_and_after_the_backward(option: str, parts: int) -> None:
    model = engines.build(engines.Case())
    optimizer = engines.make_optimizer(model, "sgd")
    plan = plans.streamed(find_blocks(model), optimizer, options=(option,), places=("host",))
    with engines.installed(model, optimizer, replace(plan, parts=parts)) as engine:
        installed = engine.device.memory()
        with engine.iteration():
            loss = model(**models.batch(model)).loss
            loss.backward()
            optimizer.step()
        optimizer.zero_grad()
        assert engine.device.memory() == installed + loss.nbytes  # with the outer graph, which the loss holds
        with engine.iteration():
            loss = model(**models.batch(model)).loss
            assert engine.device.memory() > installed + loss.nbytes
            del loss
            assert engine.device.memory() == installed
