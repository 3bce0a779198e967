"""transformers' and TRL's Trainers on the device: the model stays on the host, and numbers are those of a plain run."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import lt_offload
from scripts.hf import cases
from scripts.hf.runs import ended, home, quiet, train, trained
from tests.gpu.target import Target
from tests.parity.hf.test_same_calls import OtherLayers

CASES = {
    "defaults": ("HF", "tight"),
    "bf16": ("HF", "middle"),
    "gradient_accumulation_steps=4, uneven end": ("HF", "recompute"),
    "load_best_model_at_end": ("HF", "tight"),
    "PEFT": ("HF", "resident"),
    "callback that reads and edits gradients": ("HF", "middle"),
    "own training_step that calls loss.backward() per row": ("HF", "resident"),
    "SFT, evaluated": ("TRL", "tight"),
    "SFT, LoRA": ("TRL", "middle"),
    "DPO": ("TRL", "tight"),
    "DPO, LoRA": ("TRL", "middle"),
    "DPO, precompute_ref_log_probs": ("TRL", "middle"),
}
if importlib.util.find_spec("trl") is None:
    CASES = {name: row for name, row in CASES.items() if row[0] == "HF"}


@pytest.fixture(scope="module")
def folder() -> Iterator[Path]:
    with home() as found:
        yield found


@pytest.mark.parametrize("case", CASES)
def test_a_run_is_the_plain_one(
    case: str, folder: Path, target: Target, deterministic: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CI", "1")  # TRL sends word of every Trainer elsewhere
    library, budget = CASES[case]
    make = getattr(cases, library)[case]
    plain = ended(train(make, folder))
    trainer = trained(make, budget, folder)
    assert plain.differs(ended(trainer)) == []
    reference = getattr(trainer, "ref_model", None)  # TRL loads it to the GPU
    assert reference is None or {parameter.device.type for parameter in reference.parameters()} == {"cpu"}


FP16: dict[str, tuple[str, dict[str, Any]]] = {
    "clipped": ("tight", {}),
    "not clipped": ("middle", {"max_grad_norm": 0.0, "gradient_accumulation_steps": 2}),
    "not fused": ("recompute", {"optim": "adamw_torch", "gradient_accumulation_steps": 2}),
    "callback that reads and edits gradients": ("middle", {"_callbacks": [cases.OfGradients()], "optim": "sgd"}),
    "evaluated": ("tight", {**cases.EVALUATED, "optim": "adafactor"}),
}


@pytest.mark.parametrize("case", FP16)
def test_a_run_in_fp16_is_the_plain_one(case: str, folder: Path, target: Target, deterministic: None) -> None:
    if not target.cuda:
        pytest.skip("transformers scales no loss on a CPU")
    budget, settings = FP16[case]
    make = cases.plain(kind=cases.Scaled, fp16=True, max_steps=5, **settings)
    plain = ended(train(make, folder))
    trainer = trained(make, budget, folder)
    assert plain.differs(ended(trainer)) == []
    scales = [record["scale"] for record in trainer.state.log_history if "scale" in record]
    assert set(scales) == {2.0**30, 2.0**16}


@pytest.mark.parametrize("step", [1, 2])
def test_a_run_in_fp16_is_resumed(step: int, tmp_path: Path, target: Target, deterministic: None) -> None:
    if not target.cuda:
        pytest.skip("transformers scales no loss on a CPU")
    make = cases.plain(kind=cases.Scaled, fp16=True, max_steps=4, save_strategy="steps", save_steps=1)
    plain = ended(train(make, tmp_path / "plain"))
    first = trained(make, "tight", tmp_path / "ours")
    assert plain.differs(ended(first)) == []
    context = lt_offload.hf_trainer(memory=first.offmate.plan.budget_bytes)
    checkpoint = str(tmp_path / "ours" / "out" / f"checkpoint-{step}")
    again = train(make, tmp_path / "ours", context, resume_from_checkpoint=checkpoint)
    assert plain.differs(ended(again)) == []


def test_a_trainer_evaluates_without_training_and_its_model_stays_on_the_host(
    folder: Path, target: Target, deterministic: None
) -> None:
    make = cases.plain(_eval_dataset=cases.rows(5))
    with quiet():
        plain = make(folder).evaluate()["eval_loss"]
        with lt_offload.hf_trainer(memory="3GB"):
            trainer: Any = make(folder)
        assert trainer.evaluate()["eval_loss"] == plain
    assert {parameter.device.type for parameter in trainer.model.parameters()} == {"cpu"}


@pytest.mark.parametrize("window", [1, 2])
def test_a_model_of_several_lists_and_its_saved_plan(
    window: int, tmp_path: Path, target: Target, deterministic: None
) -> None:
    """Alone, its first step trains without a plan; in a window a step is measured aside."""

    def model() -> OtherLayers:
        torch.manual_seed(1)
        return OtherLayers()

    make = cases.plain(model, gradient_accumulation_steps=window)
    plain = ended(train(make, tmp_path / "plain"))
    found = trained(make, "tight", tmp_path)
    assert plain.differs(ended(found)) == []
    path = Path(found.args.output_dir) / "lt_offload" / "plan.json"
    again = train(make, tmp_path / "again", lt_offload.hf_trainer(plan=path))
    assert plain.differs(ended(again)) == []
    assert again.offmate.plan == found.offmate.plan
