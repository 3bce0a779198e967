"""Training as people do it: with kernels that are not deterministic, and with compiled blocks."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from tests.gpu import reference
from tests.gpu.reference import trained_plainly
from tests.gpu.target import Target
from tests.parity.engine import test_compiled
from tests.support import engines
from tests.support.engines import Case, Result, changed, differences, equal, planned, trained_on

PLAIN_RUNS = 4

LOOSE = [
    Case(
        options=("keep", "recompute", "offload", "mixed", "reload"),
        places=("device", "paged"),
        dtype=dtype,
        family=family,
        optimizer="sgd-plain",  # weights are as far apart as gradients are
        shapes=((2, 64), (2, 64)),
        seed=seed,
    )
    for seed, (dtype, family) in enumerate(itertools.product(("bfloat16", "float32"), ("llama-tied", "bloom")))
]


def distance(one: Result, other: Result) -> float:
    """How far all weights of two models are apart."""
    pairs = zip(one.model.parameters(), other.model.parameters(), strict=True)
    return sum((a.detach().cpu().double() - b.detach().cpu().double()).square().sum().item() for a, b in pairs) ** 0.5


@pytest.mark.quick
@pytest.mark.parametrize("case", LOOSE, ids=str)
def test_without_deterministic_algorithms(case: Case, target: Target, found: Callable[..., None]) -> None:
    """As near to plain training as that is to itself: attention may take other kernels then, and sums other orders.

    Where plain training gives the same bits every time, as on the CPU, so must the engine.
    """
    assert not torch.are_deterministic_algorithms_enabled()
    plan = planned(case)
    plain = [trained_plainly(case, plan, target.torch_device) for _ in range(PLAIN_RUNS)]
    actual, _ = trained_on(target.open(seed=case.seed), case, plan)
    assert any(equal(run.losses[0], actual.losses[0]) for run in plain), "the first loss: nothing was updated yet"
    spread = max(distance(a, b) for a, b in itertools.combinations(plain, 2))
    nearest = min(distance(run, actual) for run in plain)
    found(spread=spread, nearest=nearest)
    assert nearest <= spread
    assert changed(case, actual)


@pytest.fixture
def compiled_blocks(monkeypatch: pytest.MonkeyPatch, target: Target) -> Iterator[None]:
    """On the fake device without Triton's kernels: traced, and run as traced."""

    def compiled(case: Case) -> torch.nn.Module:
        model = test_compiled.eager(case)
        for layer in model.layers:
            layer.compile(backend="aot_eager" if target.kind == "fake" else "inductor")
        return model

    for module in (engines, reference):
        monkeypatch.setattr(module, "build", compiled)
    with torch._inductor.config.patch(test_compiled.QUICKLY):
        yield
    torch._dynamo.reset()


@pytest.mark.filterwarnings(
    "ignore:The .grad attribute of a Tensor:UserWarning",
    "ignore:TensorFloat32 tensor cores for float32:UserWarning",  # torch's compiler advises them; bits are compared
)
@pytest.mark.usefixtures("compiled_blocks", "deterministic")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_compiled_blocks(dtype: str, target: Target) -> None:
    """Equal to the same compiled model without the engine, also for the lengths that are compiled once for all."""
    options: Any = {"options": ("keep", "recompute", "offload", "reload"), "places": ("device", "paged")}
    case = Case(**options, dtype=dtype, dropout=0.1, shapes=test_compiled.SHAPES)
    torch._dynamo.reset()
    plan = planned(case)
    expected = trained_plainly(case, plan, target.torch_device)
    torch._dynamo.reset()
    actual, _ = trained_on(target.open(), case, plan)
    assert differences(expected, actual) == []
    assert changed(case, actual)
