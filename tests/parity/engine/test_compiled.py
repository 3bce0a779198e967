"""Blocks under ``torch.compile``: the engine gives, bit for bit, what the same compiled model gives without it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.utils import counters

from lt_offload.errors import PlanError
from lt_offload.execute.engine import Engine
from lt_offload.machine.accounting import Account
from lt_offload.model.blocks import find_blocks
from lt_offload.plan import check, solve
from lt_offload.profiling.hardware import load_hardware
from lt_offload.profiling.measure import profile
from lt_offload.schema.profile import Profile
from tests.support import engines, models, plans
from tests.support.engines import Case, changed, differences, offloaded, plain, trained_on
from tests.support.hostile.device import HostileDevice

pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")

QUICKLY = {"cpp.simdlen": 1, "compile_threads": 1}
"""Compile for no particular processor."""

SHAPES = ((2, 12), (2, 12), (2, 8), (2, 10))
"""Code is compiled for the first one, and then once more, for any length."""


class Layer(nn.Module):
    """Small enough to be compiled in seconds: a matrix, a vector, and random numbers."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(models.HIDDEN))
        self.linear = nn.Linear(models.HIDDEN, models.HIDDEN)
        self.dropout = dropout

    def forward(self, x: Tensor) -> Tensor:
        inner = torch.tanh(self.linear(x * self.scale)) * x.sigmoid()
        return x + nn.functional.dropout(inner, self.dropout, self.training)


class Model(nn.Module):
    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.embedding = nn.Embedding(models.VOCAB, models.HIDDEN)
        self.layers = nn.ModuleList(Layer(dropout) for _ in range(4))
        self.head = nn.Linear(models.HIDDEN, models.VOCAB)

    def forward(self, input_ids: Tensor, labels: Tensor, attention_mask: Tensor) -> Result:
        x = self.embedding(input_ids) * attention_mask[..., None]
        for layer in self.layers:
            x = layer(x)
        return Result(nn.functional.cross_entropy(self.head(x).flatten(0, 1), labels.flatten()))


class Result(dict[str, Tensor]):
    """What Hugging Face models return, as far as it is needed."""

    def __init__(self, loss: Tensor) -> None:
        super().__init__(loss=loss)
        self.loss = loss


def eager(case: Case) -> Model:
    torch.manual_seed(case.seed)
    return Model(case.dropout).to(getattr(torch, case.dtype)).train()


def compiled(case: Case) -> Model:
    model = eager(case)
    for layer in model.layers:
        layer.compile()
    return model


@pytest.fixture(autouse=True)
def compiled_models(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Leave nothing behind."""
    monkeypatch.setattr(engines, "build", compiled)
    with torch._inductor.config.patch(QUICKLY):
        yield
    torch._dynamo.reset()


def start() -> None:
    """As in a new process."""
    torch._dynamo.reset()
    counters.clear()


def graphs() -> int:
    return int(counters["stats"]["unique_graphs"])


CASES = [
    Case(
        options=("keep", "recompute", "offload", "reload"),
        places=("host", "device", "paged"),
        mode="random",
        dropout=0.1,
        shapes=SHAPES,
    ),
    Case(options=("recompute",), places=("host",), mode="thread", dropout=0.1, lag=0, lead=0, shapes=SHAPES),
]


@pytest.mark.long
@pytest.mark.parametrize("counting", [True, False])
@pytest.mark.parametrize("case", CASES, ids=["every option", "recompute"])
def test_equal_to_the_compiled_model(case: Case, counting: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    start()
    expected = plain(case)
    made = graphs()
    start()
    actual = offloaded(case, counting=counting)
    assert differences(expected, actual) == []
    assert graphs() == made > 1  # the same graphs, for the first shapes and for those that follow
    assert changed(case, actual)
    monkeypatch.setattr(engines, "build", eager)
    assert differences(expected, plain(case))  # compiled code draws other random numbers


def broken(case: Case) -> Model:
    model = eager(case)
    for layer in model.layers:
        layer.__class__ = Broken
        layer.compile(backend="eager")
    return model


class Broken(Layer):
    """Compiled in two pieces, between which operations run that are not compiled."""

    def forward(self, x: Tensor) -> Tensor:
        x = super().forward(x)
        torch._dynamo.graph_break()
        return x + torch.tanh(self.linear(x)) * leave_alone(x)


@torch._dynamo.disable(recursive=False)
def leave_alone(x: Tensor) -> Tensor:
    return torch.exp(-x * x) * x.sigmoid()


def test_a_layer_that_cannot_be_compiled_as_a_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engines, "build", broken)
    start()
    expected = plain(CASES[0])
    start()
    assert differences(expected, offloaded(CASES[0])) == []


def measured(case: Case, batch: dict[str, Tensor]) -> Profile:
    model = compiled(case)
    optimizer = engines.make_optimizer(model, case.optimizer)
    machine = replace(load_hardware("h200"), context_bytes=0)
    return profile(model, batch, optimizer=optimizer, device="cpu", hardware=machine)


@pytest.mark.slow
def test_profiled_planned_and_trained() -> None:
    """Profiling on a batch of another shape leaves no trace in what is compiled for training."""
    case = Case(dropout=0.1, mode="thread", shapes=SHAPES)
    start()
    expected = plain(case)
    found = measured(case, models.batch(eager(case), batch_size=2, sequence_length=16))
    assert [o.name for o in found.blocks[2].options] == ["keep", "recompute", "reload", "offload", "discard"]
    keep, recompute = (found.blocks[2].option(name) for name in ("keep", "recompute"))
    assert keep.saved_bytes > 0
    assert recompute.forward_peak_bytes >= keep.saved_bytes  # its first forward builds a graph, too
    roomy = solve(found, memory="1GB", planner="resident")
    plan = solve(found, memory=int(roomy.predicted.device_peak_bytes * 0.6), solver_time_limit=5)
    assert check(plan, found) == []
    actual, peak = trained_on(HostileDevice(plan.budget_bytes, check=True), case, plan)
    assert differences(expected, actual) == []
    assert peak <= plan.predicted.device_peak_bytes


@pytest.mark.filterwarnings("ignore:dynamo_pgo force disabled:UserWarning")
@pytest.mark.slow
@pytest.mark.parametrize("cached", [True, False], ids=["cached", "not cached"])
def test_buffers_of_compiled_code_are_counted(cached: bool) -> None:
    """Also where torch does without caches, and forgets what it has loaded (TORCHINDUCTOR_FORCE_DISABLE_CACHES)."""
    start()
    with torch._inductor.config.patch(force_disable_caches=not cached):
        check_account()


def check_account() -> None:
    layer = compiled(Case(dropout=0.1)).layers[0]
    x = torch.randn(2, 12, models.HIDDEN, requires_grad=True)
    layer(x)
    with Account() as account:
        out = layer(x)
        saved = account.current - out.nbytes
        assert saved >= x.nbytes  # what tanh and dropout need
        account.reset_peak()
        out.sum().backward()
    assert x.grad is not None
    assert account.peak > account.current
    del out
    kept = sum(p.grad.nbytes for p in (x, *layer.parameters()) if p.grad is not None)
    assert account.current == kept
    layer(x)
    assert account.current == kept  # the account has ended


def test_the_model_is_given_back_compiled() -> None:
    model = compiled(Case())
    optimizer = engines.make_optimizer(model, "sgd")
    plan = plans.streamed(find_blocks(model), optimizer, options=("keep",), places=("device",))
    calls = [layer._compiled_call_impl for layer in model.layers]
    device = HostileDevice(engines.BUDGET, mode="lazy")
    engine = Engine(model, optimizer, plan, device)
    engine.install()
    assert all(layer._compiled_call_impl is not call for layer, call in zip(model.layers, calls, strict=True))
    engine.remove()
    device.close()
    assert [layer._compiled_call_impl for layer in model.layers] == calls
    assert not any("forward" in vars(block.module) for block in find_blocks(model).blocks)


def test_mixed_is_not_for_compiled_blocks() -> None:
    with pytest.raises(PlanError, match=r"layers\.0 with option 'mixed', .*compiled"):
        offloaded(Case(options=("keep", "mixed")))
