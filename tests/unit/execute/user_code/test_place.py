"""Blocks run on the stream that their step began on; on the model of CUDA."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from lt_offload.errors import UnsupportedError
from lt_offload.execute.device.cuda import CudaDevice
from lt_offload.execute.engine import Engine
from lt_offload.model.blocks import find_blocks
from tests.gpu.target import LargeGpu
from tests.support import engines, models, plans
from tests.support.gpu_model import Stream

OWN = "block .* was called on another CUDA stream than its step began"


@pytest.fixture
def gpu() -> LargeGpu:
    return LargeGpu(free=engines.BUDGET)


def installed(model: Any, optimizer: Any, gpu: LargeGpu) -> Engine:
    plan = (
        plans.streamed(find_blocks(model), optimizer, options=("keep",), places=("device",))
        if optimizer is not None
        else None
    )
    engine = Engine(model, optimizer, plan, CudaDevice(engines.BUDGET, runtime=gpu))  # type: ignore[arg-type]
    engine.install()
    return engine


def step(model: Any, optimizer: Any) -> None:
    model(**models.batch(model)).loss.backward()
    optimizer.step()


def test_training(gpu: LargeGpu) -> None:
    model = models.build("llama")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    engine = installed(model, optimizer, gpu)
    side = Stream(gpu, "side")
    try:
        with engine.iteration():
            step(model, optimizer)
        with pytest.raises(UnsupportedError, match=OWN), engine.iteration(), gpu.use(side):
            step(model, optimizer)
        with gpu.use(side), engine.iteration():
            step(model, optimizer)
        with engine.iteration():
            step(model, optimizer)
        assert engine.stats.iterations == 3
    finally:
        engine.close()
        engine.device.close()


@pytest.mark.parametrize("within", [True, False])
def test_forwards_alone(within: bool, gpu: LargeGpu) -> None:
    model = models.build("llama")
    engine = installed(model, None, gpu)
    side = Stream(gpu, "side")
    try:
        with torch.no_grad():
            if within:
                with engine.inference(), gpu.use(side), pytest.raises(UnsupportedError, match=OWN):
                    model(**models.batch(model))
            else:
                with gpu.use(side), engine.inference():
                    model(**models.batch(model))
    finally:
        engine.close()
        engine.device.close()


def test_a_loop_is_on_the_stream_that_it_was_entered_on(gpu: LargeGpu) -> None:
    model = models.build("llama")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    engine = installed(model, optimizer, gpu)
    engine.follow(optimizer)
    try:
        with gpu.use(Stream(gpu, "side")), pytest.raises(UnsupportedError, match=OWN):
            model(**models.batch(model))
        loss = model(**models.batch(model)).loss
        with gpu.use(Stream(gpu, "side")):
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    finally:
        engine.close()
        engine.device.close()
