"""A recipe's settings together: each way to save memory, with accumulation, clipping and adapters, in resumed runs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

import lightning.pytorch as L
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import nn
from torch.utils.data import DataLoader

from lt_offload import OffmateStrategy
from lt_offload.finetune import kernels
from lt_offload.finetune.adapters import LoraArgs
from lt_offload.finetune.module import FineTune
from lt_offload.model import head
from lt_offload.schema.plan import Plan
from lt_offload.schema.profile import Profile
from tests.parity.engine.test_compiled import QUICKLY
from tests.parity.engine.test_head import CHUNK, use_reference
from tests.parity.models import liger
from tests.support import tiny
from tests.support.profiles.fixed_times import with_fixed_times
from tests.support.trainers import Run, Tokens, profiled, state_differences, trainer

pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")

MODEL = {"hidden_size": 64, "intermediate_size": 96}


class InChunks(FineTune):
    """Computes its loss by the reference for a head that takes a few tokens at a time."""

    def build(self, **settings: Any) -> nn.Module:
        model = super().build(**settings)
        use_reference(model, CHUNK)
        return model


@dataclass(frozen=True)
class Mechanism:
    """What is tried, and how a run shows that it was there."""

    settings: dict[str, Any] = field(default_factory=dict)
    strategy: dict[str, Any] = field(default_factory=dict)
    plain: type[FineTune] = FineTune
    seen: Callable[[Run], bool] | None = None
    """Of a run in little memory."""
    not_with: tuple[str, ...] = ()
    """Situations in which it is not there."""
    slow_copies: bool = False


def plan_of(run: Run) -> Plan:
    plan = run.trainer.strategy.plan
    assert plan is not None
    return plan


def with_moments_of(*dtypes: torch.dtype) -> Callable[[Run], bool]:
    return lambda run: {state["exp_avg"].dtype for state in run.optimizer.state.values()} == set(dtypes)


EIGHT_BITS = with_moments_of(torch.uint8, torch.float32)  # small tensors keep theirs
MECHANISMS = {
    "8 bits": Mechanism({"optimizer": "adamw8bit"}, seen=EIGHT_BITS),
    "8 bits, masters": Mechanism(
        {"optimizer": "adamw8bit", "dtype": "bfloat16", "master_weights": True}, seen=EIGHT_BITS
    ),
    "bf16 moments": Mechanism({"state_dtype": "bfloat16"}, seen=with_moments_of(torch.bfloat16)),
    "chunks": Mechanism(
        strategy={"chunked_loss": True}, plain=InChunks, seen=lambda run: plan_of(run).options[-1] == "chunked"
    ),
    "rows": Mechanism(
        seen=lambda run: any(op.rows for op in plan_of(run).ops),
        not_with=("clipped", "adapters"),  # updates wait anyway; the table does not train
        slow_copies=True,
    ),
    "kernels": Mechanism({"kernels": "liger"}),
    "compiled": Mechanism({"compile_blocks": True}),
}
SITUATIONS: dict[str, dict[str, Any]] = {
    "alone": {},
    "accumulated": {"accumulate_grad_batches": 2},  # of 3 batches in an epoch: updates of 2 and of 1
    "clipped": {"gradient_clip_val": 0.5},
    "accumulated, clipped": {"accumulate_grad_batches": 2, "gradient_clip_val": 0.5},
    "adapters": {"accumulate_grad_batches": 2, "gradient_clip_val": 0.5, "lora": LoraArgs(r=64, dropout=0.1)},
}
ROWS: list[Any] = [(name, situation) for name in MECHANISMS if name != "compiled" for situation in SITUATIONS]
ROWS += [pytest.param("compiled", name, marks=pytest.mark.long) for name in ("accumulated, clipped", "adapters")]

BUDGETS = {"full": (2.0, 5.0, 1000.0), "adapters": (1.2, 2.0, 1000.0)}
"""In bytes per byte of weights: everything travels, some of it does, nothing has to."""


@pytest.fixture(autouse=True)
def small_models(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Let chunks be few tokens, kernels need no GPU, and compiling be quick."""
    monkeypatch.setattr(head, "_LEAST_TOKENS", CHUNK)
    monkeypatch.setattr(head, "_PART_BYTES", CHUNK * 4 * 259)
    monkeypatch.setattr(kernels, "liger_functions", lambda device: liger.FUNCTIONS)
    with torch._inductor.config.patch(QUICKLY):
        yield
    torch._dynamo.reset()


@cache
def folder() -> str:
    import tempfile

    return str(tiny.model(Path(tempfile.mkdtemp()), **MODEL))


def trained(
    strategy: Any, made_by: type[FineTune], settings: dict[str, Any], *callbacks: Any, ckpt: Path | None, **flags: Any
) -> Run:
    torch._dynamo.reset()  # as in a process that starts
    L.seed_everything(3, verbose=False)
    module = made_by(folder(), **{"lr": 1e-2, "schedule": "constant", "dropout": 0.1} | settings)
    made = trainer(strategy, callbacks=list(callbacks), enable_checkpointing=bool(callbacks), **flags)
    rows = Tokens(tiny_model(), 6, 0)
    L.seed_everything(4, verbose=False)
    made.fit(module, DataLoader(rows, batch_size=2), DataLoader(rows, batch_size=2), ckpt_path=ckpt)
    return Run(module, made)


@cache
def tiny_model() -> nn.Module:
    return FineTune(folder()).build()


@pytest.mark.slow
@pytest.mark.parametrize(("name", "situation"), ROWS)
def test_resumed_in_more_and_more_memory(
    name: str, situation: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An epoch in little memory, one in more and one with enough, each resumed from a file: one plain run's numbers."""
    mechanism, flags = MECHANISMS[name], dict(SITUATIONS[situation])
    settings = mechanism.settings | {key: flags.pop(key) for key in ("lora",) if key in flags}
    if "lora" in settings:  # masters are of weights that train, and adapters are float32
        settings = {key: value for key, value in settings.items() if key != "master_weights"}

    def measured(measure: Callable[[], Profile], _: Any) -> Profile:
        found = with_fixed_times(measure())
        speeds = dict.fromkeys(("h2d_bytes_per_s", "d2h_bytes_per_s"), 4e8 if mechanism.slow_copies else 2e9)
        return replace(found, hardware=replace(found.hardware, **speeds))

    profiled(monkeypatch, measured)
    plain = trained("auto", mechanism.plain, settings, ckpt=None, max_epochs=3, **flags)
    weights = sum(p.nbytes for p in plain.module.parameters())
    run, ckpt = plain, None
    for epoch, share in enumerate(BUDGETS["adapters" if "lora" in settings else "full"], start=1):
        saver = ModelCheckpoint(tmp_path, filename=f"{epoch}", every_n_epochs=1, save_on_train_epoch_end=True)
        strategy = OffmateStrategy(memory=int(share * weights), **mechanism.strategy)
        run = trained(strategy, FineTune, settings, saver, ckpt=ckpt, max_epochs=epoch, **flags)
        if epoch == 1 and mechanism.seen is not None:
            assert mechanism.seen(run) is (situation not in mechanism.not_with)
        ckpt = tmp_path / f"{epoch}.ckpt"
    assert run.trainer.global_step == plain.trainer.global_step
    assert state_differences(plain, run) == []
