"""DPO on pairs: the numbers of a plain loop and of the stock strategy, the loss of TRL, and runs that go on."""

from __future__ import annotations

import copy
import json
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import lightning.pytorch
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor
from torch.nn.functional import logsigmoid

from lt_offload import OffmateStrategy
from lt_offload.errors import ConfigError
from lt_offload.finetune.adapters import LoraArgs
from lt_offload.finetune.data.module import FineTuneData
from lt_offload.finetune.module import FineTune
from lt_offload.finetune.preferences import METRICS, pair_loss
from lt_offload.report.runs import read_run
from scripts.hf.runs import quiet
from tests import sampling
from tests.support import tiny
from tests.support.engines import equal
from tests.support.profiles.budgets import named_by
from tests.support.trainers import Run, differences, state_differences, trainer

STEPS = 4


class Recording(FineTune):
    """Keeps its losses, figures and batches, and the model as it was before the training."""

    def __init__(self, *args: Any, **settings: Any) -> None:
        super().__init__(*args, **settings)
        self.losses: list[Tensor] = []
        self.validation: list[Tensor] = []
        self.figures: list[Tensor] = []
        self.lrs: list[float] = []
        self.batches: list[dict[str, Tensor]] = []
        self.kept: dict[str, Any] = {}

    def on_fit_start(self) -> None:
        self.kept["model"] = copy.deepcopy(self.model)

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        self.batches.append({name: tensor.clone() for name, tensor in batch.items()})
        loss = super().training_step(batch, batch_idx)
        self.losses.append(loss.detach().clone())
        return loss

    def on_train_batch_end(self, *args: Any) -> None:
        logged = self.trainer.callback_metrics
        self.figures += [logged[name].clone() for name in METRICS if name in logged]

    def on_validation_epoch_end(self) -> None:
        self.validation += [self.trainer.callback_metrics[f"val_{name}"].clone() for name in ("loss", *METRICS)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tiny.model(tmp_path_factory.mktemp("model"), num_hidden_layers=3)
    numbers = [" ".join(map(str, range(n % 7 + 1))) for n in range(15)]
    rows = [
        {"prompt": f"Count to {n % 7}: ", "chosen": numbers[n], "rejected": "no " * (n % 4 + 1)}
        for n in range(len(numbers))
    ]
    (folder / "pairs.jsonl").write_text("\n".join(map(json.dumps, rows)))
    return folder


def data(folder: Path, **settings: Any) -> FineTuneData:
    defaults = {"format": "preference", "pack": False, "max_length": 48, "batch_size": 2, "validation_rows": 3}
    return FineTuneData(str(folder), path=str(folder / "pairs.jsonl"), **defaults | settings)


def fit(
    strategy: Any, folder: Path, *, ckpt: Path | None = None, kind: type[Recording] = Recording, **settings: Any
) -> Run:
    lightning.pytorch.seed_everything(7, verbose=False)
    options: dict[str, Any] = {name: settings.pop(name) for name in ("quantize", "dtype") if name in settings}
    module = kind(str(folder), lr=1e-2, schedule="constant", lora=LoraArgs(r=4), dpo_beta=0.3, **options)
    made = trainer(strategy, **{"max_steps": STEPS, "max_epochs": -1} | settings)
    made.fit(module, datamodule=data(folder), ckpt_path=ckpt, weights_only=False)
    return Run(module, made)


def alike(some: Sequence[Tensor], others: Sequence[Tensor]) -> bool:
    return len(some) == len(others) > 0 and all(map(equal, some, others))


@pytest.fixture(scope="module")
def stock(folder: Path) -> Any:
    return cache(lambda **settings: fit("auto", folder, **settings))


BUDGETS = ("tight", "900kB", "100MB")


def smallest(folder: Path, **settings: Any) -> int:
    """Return the smallest budget in which there is a plan."""
    return named_by(lambda: fit(OffmateStrategy(memory=1000, solver_time_limit=1, **settings), folder))


@pytest.mark.slow
@pytest.mark.parametrize(("budget", "recompute"), sampling.grid(BUDGETS, (True, False), count=2))
def test_training_is_that_of_the_stock_strategy(folder: Path, stock: Any, budget: str, recompute: bool) -> None:
    memory = smallest(folder, recompute=recompute) if budget == "tight" else budget
    run = fit(OffmateStrategy(memory=memory, solver_time_limit=2, recompute=recompute), folder)
    assert differences(stock(), run) == []
    assert alike(stock().module.figures, run.module.figures)
    assert run.trainer.strategy.plan.forwards == 1
    assert run.trainer.strategy.plan.deferred_forwards == 0


@pytest.mark.slow
@pytest.mark.parametrize(
    "settings", [{"accumulate_grad_batches": 2}, {"quantize": "nf4", "dtype": "bfloat16"}, {"micro_batches": 2}]
)
def test_windows_stored_weights_and_parts(folder: Path, stock: Any, settings: dict[str, Any]) -> None:
    ours = dict(settings)
    parts = {name: ours.pop(name) for name in ("micro_batches",) if name in ours}
    run = fit(OffmateStrategy(memory="900kB", solver_time_limit=2, **parts), folder, **ours)
    if parts:  # other products: the loss is that of the stock strategy but for its last bits
        assert all(map(torch.allclose, run.module.losses, stock().module.losses))
    else:
        assert differences(stock(**ours), run) == []


def plainly(model: Any, batches: list[dict[str, Tensor]]) -> tuple[list[Tensor], torch.optim.Optimizer]:
    """Train in plain PyTorch by the formula of the paper, with a reference in each step."""
    weights = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(weights, lr=1e-2, weight_decay=0.0, fused=True)
    losses = []

    def log_probs(batch: dict[str, Tensor]) -> Tensor:
        logits = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits.float()
        labels = torch.cat([batch["labels"][:, 1:], torch.full_like(batch["labels"][:, :1], -100)], 1)
        learned = logits.log_softmax(-1).gather(-1, labels.clamp(min=0)[..., None])[..., 0]
        return torch.where(labels == -100, 0, learned).sum(1)

    for batch in batches:
        with torch.no_grad(), model.disable_adapter():
            reference = log_probs(batch)
        chosen, rejected = (log_probs(batch) - reference).chunk(2)
        loss = -logsigmoid(0.3 * (chosen - rejected)).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return losses, optimizer


def test_a_hook_that_does_not_call_its_base_s_leaves_no_reference_out(folder: Path, stock: Any) -> None:
    class Own(Recording):
        def on_train_start(self) -> None:
            pass

    assert alike(stock().module.losses, fit("auto", folder, kind=Own).module.losses)


def test_training_is_that_of_a_plain_loop(folder: Path, stock: Any) -> None:
    run, model = stock(), copy.deepcopy(stock().module.kept["model"])
    losses, optimizer = plainly(model, run.module.batches)
    assert alike(losses, run.module.losses)
    assert len({float(loss) for loss in losses}) == STEPS
    assert alike(list(model.parameters()), list(run.module.model.parameters()))
    states, expected = run.optimizer.state_dict()["state"], optimizer.state_dict()["state"]
    assert all(equal(states[number][key], expected[number][key]) for number in expected for key in expected[number])


def test_the_loss_is_trls(folder: Path, stock: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Their log-probabilities are sums over tiles of the vocabulary, so that last bits differ."""
    trl = pytest.importorskip("trl")
    monkeypatch.setenv("CI", "1")  # TRL sends word of every Trainer elsewhere
    from datasets import Dataset
    from transformers import AutoTokenizer

    module = stock().module
    rows = list(map(json.loads, (folder / "pairs.jsonl").read_text().splitlines()))
    model, tokenizer = copy.deepcopy(module.kept["model"]), AutoTokenizer.from_pretrained(folder)
    with quiet():
        args = trl.DPOConfig(output_dir=str(tmp_path), use_cpu=True, bf16=False, report_to=[], beta=0.3, max_length=48)
        theirs = trl.DPOTrainer(model, args=args, train_dataset=Dataset.from_list(rows), processing_class=tokenizer)
    # Their reference is a copy of the adapters, which change nothing yet; and then it is trained.
    assert not model.load_state_dict(module.model.state_dict(), strict=False).unexpected_keys
    for ours in module.batches:
        batch = {name: ours[name] for name in ("input_ids", "attention_mask")}
        batch["completion_mask"] = (ours["labels"] != -100).long()
        with quiet():
            loss = theirs.compute_loss(model, batch)
        own, *figures = pair_loss(module.model, ours, 0.3)
        assert torch.allclose(loss, own, rtol=5e-6, atol=0)
        for name, figure in zip(METRICS, figures, strict=True):
            assert theirs._metrics["train"][name][-1] == pytest.approx(float(figure), rel=1e-4, abs=1e-6)
    made = data(folder, validation_rows=0)
    made.setup("fit")
    assert made._train is not None
    # The rows are theirs, too: tokens and what of them is compared.
    collated = theirs.data_collator([theirs.train_dataset[number] for number in range(len(rows))])
    batch = made._collate([made._train[number] for number in range(len(rows))])
    width = collated["input_ids"].shape[1]
    for one, other in ((batch, batch), (collated, collated)):
        one["input_ids"] = one["input_ids"] * other["attention_mask"]
    assert equal(batch["input_ids"][:, :width], collated["input_ids"])
    assert equal((batch["labels"][:, :width] != -100).long(), collated["completion_mask"])


@pytest.mark.slow
@pytest.mark.parametrize(("before", "after"), [("auto", "900kB"), ("900kB", "auto"), ("900kB", "900kB")])
def test_a_run_that_goes_on_is_the_one_that_never_stopped(
    folder: Path, stock: Any, before: str, after: str, tmp_path: Path
) -> None:
    def strategy(name: str) -> Any:
        return name if name == "auto" else OffmateStrategy(memory=name, solver_time_limit=2)

    begun = fit(strategy(before), folder, max_steps=2)
    begun.trainer.save_checkpoint(tmp_path / "begun.ckpt")
    # Its references are those of two steps: the rest is computed where the run goes on.
    run = fit(strategy(after), folder, ckpt=tmp_path / "begun.ckpt")
    assert alike([*begun.module.losses, *run.module.losses], stock().module.losses)
    assert state_differences(stock(), run) == []


@pytest.mark.parametrize("form", [{"quantize": "nf4"}, {"dtype": "bfloat16"}])
def test_references_of_weights_in_another_form_are_not_gone_on_with(
    folder: Path, tmp_path: Path, form: dict[str, str]
) -> None:
    fit("auto", folder, max_steps=1).trainer.save_checkpoint(tmp_path / "one.ckpt")
    [(name, value)] = form.items()
    with pytest.raises(ConfigError, match=f"model.{name}={value} cannot take effect"):
        fit("auto", folder, ckpt=tmp_path / "one.ckpt", **form)


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_while_references_are_computed_leaves_those_that_are_known(
    folder: Path, stock: Any, number: signal.Signals, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    validates = {"val_check_interval": 2, "num_sanity_val_steps": 0}  # there is no sanity check where a run goes on

    def settings() -> dict[str, Any]:
        every = ModelCheckpoint(dirpath=tmp_path, every_n_train_steps=100)
        return {"callbacks": [every], "enable_checkpointing": True, **validates}

    calls: list[int] = []
    predict_step = FineTune.predict_step

    def counted(module: FineTune, batch: Any, batch_idx: int = 0) -> Any:
        calls.append(batch_idx)
        if len(calls) == 2:
            os.kill(os.getpid(), number)
        return predict_step(module, batch, batch_idx)

    monkeypatch.setattr(FineTune, "predict_step", counted)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(SystemExit):
            fit(OffmateStrategy(memory="900kB", solver_time_limit=2), folder, **settings())
    finally:
        signal.signal(signal.SIGINT, before)
    saved = torch.load(tmp_path / "interrupted.ckpt", weights_only=False)
    assert saved["global_step"] == 0
    assert len(calls) == 2
    strategy = OffmateStrategy(memory="900kB", solver_time_limit=2)
    run = fit(strategy, folder, ckpt=tmp_path / "interrupted.ckpt", **settings())
    assert len(calls) == STEPS
    assert differences(stock(**validates), run) == []
    assert run.trainer.fit_loop.epoch_loop._batches_that_stepped == STEPS


@pytest.mark.long
def test_two_processes_with_pairs_of_unlike_lengths_train_as_one_that_accumulates_and_as_ddp(
    folder: Path, tmp_path: Path
) -> None:
    """Padded batches are of another size in each process, which must plan at the same moment all the same."""
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(
        f"base: [configs/base.yaml, configs/lora.yaml, configs/data/preference.yaml]\nmodel: {{name: {folder}}}\n"
        "trainer: {accelerator: cpu, max_epochs: -1, max_steps: 2, val_check_interval: null, limit_val_batches: 0,\n"
        "  log_every_n_steps: 1, strategy: {class_path: lt_offload.OffmateStrategy, init_args: {memory: 4MB}}}\n"
        f"data: {{path: {folder / 'pairs.jsonl'}, max_length: 48, batch_size: 2, cache_dir: {tmp_path / 'cache'}}}\n"
    )
    losses, weights = [], []
    two = ["--trainer.devices", "2"]
    for number, flag in enumerate(
        (two, ["--trainer.accumulate_grad_batches", "2"], [*two, "--trainer.strategy", "ddp"])
    ):
        (tmp_path / str(number)).mkdir()
        command = [sys.executable, "-m", "lt_offload.cli.main", str(recipe), *flag]
        environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[3])}
        ran = subprocess.run(
            command, capture_output=True, text=True, cwd=tmp_path / str(number), env=environment, check=False
        )
        assert ran.returncode == 0, ran.stderr
        [run] = (tmp_path / str(number) / "runs").iterdir()
        losses.append(read_run(run).curve("train_loss"))
        [checkpoint] = (run / "checkpoints").glob("step*.ckpt")
        weights.append(torch.load(checkpoint, weights_only=False)["state_dict"])
    assert losses[0] == losses[1] == losses[2]
    assert weights[0].keys() == weights[1].keys() == weights[2].keys()
    assert all(equal(weights[0][name], other[name]) for other in weights[1:] for name in weights[0])
    assert len({loss for _, loss in losses[0]}) == 2
