from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback

from lt_offload import AdamW
from lt_offload.errors import ConfigError
from lt_offload.finetune import load
from lt_offload.finetune.adapters import LoraArgs, add_lora
from lt_offload.finetune.data.module import FineTuneData
from lt_offload.finetune.module import FineTune
from lt_offload.finetune.optimizers import lr_factor
from tests.support import models
from tests.unit.finetune.conftest import data, trainer


def test_validation_counts_tokens_not_batches(folder: str, tmp_path: Path) -> None:
    rows = "\n".join(["x" * 60, "abc", "the quick brown fox"])
    (tmp_path / "rows.csv").write_text("text\n" + rows)
    source = FineTuneData(folder, path=str(tmp_path / "rows.csv"), pack=False, max_length=100, validation_share=0.999)
    module = FineTune(folder)
    [metrics] = trainer(1, limit_val_batches=None).validate(module, datamodule=source, verbose=False)
    total = tokens = 0.0
    for row in rows.split("\n"):
        ids = torch.tensor([[*source.tokenizer(row)["input_ids"], source.tokenizer.eos_token_id]])
        with torch.no_grad():
            total += float(module.model(input_ids=ids, labels=ids).loss) * (ids.numel() - 1)
        tokens += ids.numel() - 1
    assert metrics["val_loss"] == pytest.approx(total / tokens, rel=1e-5)


def test_matrices_decay_and_vectors_do_not(folder: str, text: str) -> None:
    module = FineTune(folder, weight_decay=0.1, lr=0.5, betas=(0.8, 0.9))
    trainer(1).fit(module, datamodule=data(folder, text))
    [optimizer] = module.trainer.optimizers
    decayed, plain = optimizer.param_groups
    assert {p.ndim for p in decayed["params"]} == {2}
    assert {p.ndim for p in plain["params"]} == {1}
    assert (decayed["weight_decay"], plain["weight_decay"]) == (0.1, 0.0)
    assert decayed["betas"] == (0.8, 0.9)
    assert decayed["fused"]
    assert sum(len(g["params"]) for g in optimizer.param_groups) == len(list(module.parameters()))


@pytest.mark.parametrize("name", ["adamw", "adam", "sgd", "adafactor"])
def test_optimizers(name: Any) -> None:
    weight = torch.nn.Parameter(torch.ones(4, 4))
    settings = {"betas": (0.9, 0.99)} if name.startswith("adam") else {}
    optimizer = FineTune("a/b", optimizer=name, lr=0.1, **settings).make_optimizer([{"params": [weight]}])
    weight.grad = torch.ones_like(weight)
    optimizer.step()
    assert type(optimizer).__name__.lower() == name
    assert (weight < 1).all()


def test_master_weights(folder: str, text: str) -> None:
    module = FineTune(folder, dtype="bfloat16", master_weights=True, weight_decay=0.1, lr=1e-5, betas=(0.8, 0.9))
    trainer(2).fit(module, datamodule=data(folder, text))
    [optimizer] = module.trainer.optimizers
    assert isinstance(optimizer, AdamW)
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.1, 0.0]
    assert optimizer.param_groups[0]["betas"] == (0.8, 0.9)
    for parameter in module.parameters():
        assert parameter.dtype == torch.bfloat16
        assert torch.equal(parameter, optimizer.state[parameter]["master"].bfloat16())


@pytest.mark.parametrize(
    ("settings", "dtypes"),
    [
        ({"optimizer": "adamw8bit"}, {torch.uint8, torch.float32}),
        ({"optimizer": "adamw8bit", "dtype": "bfloat16", "master_weights": True}, {torch.uint8, torch.float32}),
        ({"state_dtype": "bfloat16", "dtype": "bfloat16", "stochastic_rounding": True}, {torch.bfloat16}),
        ({"dtype": "bfloat16", "stochastic_rounding": True}, {torch.float32}),
    ],
)
def test_moments_of_fewer_bits(folder: str, text: str, settings: dict[str, Any], dtypes: set[torch.dtype]) -> None:
    module = FineTune(folder, **settings)
    trainer(1).fit(module, datamodule=data(folder, text))
    [optimizer] = module.trainer.optimizers
    states = [optimizer.state[p] for p in module.parameters()]
    assert {state["exp_avg"].dtype for state in states} == dtypes
    assert {"master" in state for state in states} == {settings.get("master_weights", False)}
    assert {group["stochastic_rounding"] for group in optimizer.param_groups} == {"stochastic_rounding" in settings}


def test_adapters_are_float32_whatever_the_model() -> None:
    """So that master weights would change nothing for them."""
    model = add_lora(models.build("llama", dtype=torch.bfloat16), LoraArgs())
    assert {p.dtype for p in model.parameters() if p.requires_grad} == {torch.float32}


def test_schedules() -> None:
    cosine = lr_factor("cosine", warmup=4, total=14, floor=0.1)
    assert [cosine(step) for step in range(4)] == [0.2, 0.4, 0.6, 0.8]
    assert cosine(4) == 1
    assert cosine(9) == pytest.approx(0.55)
    assert cosine(14) == cosine(20) == pytest.approx(0.1)
    linear = lr_factor("linear", warmup=0, total=10, floor=0.0)
    assert [linear(step) for step in (0, 5, 10)] == [1, 0.5, 0]
    assert lr_factor("constant", warmup=1, total=math.inf, floor=0.0)(1000) == 1


def test_a_schedule_without_an_end(folder: str, text: str) -> None:
    source = data(folder, text)
    with pytest.raises(ConfigError, match=r"model.schedule='cosine' needs an end"):
        trainer(-1).fit(FineTune(folder), datamodule=source)


def test_lora_through_the_module(folder: str, text: str) -> None:
    module = FineTune(folder, lora=LoraArgs(r=2, target_modules=["q_proj"]), lr=0.1)
    frozen = {k: v.clone() for k, v in load.load_model(folder).state_dict().items()}
    trainer(2).fit(module, datamodule=data(folder, text))
    after = dict(module.named_parameters())
    for name, before in frozen.items():
        found = [p for k, p in after.items() if k.replace("base_layer.", "").endswith(name)]
        assert all(torch.equal(before, p) for p in found), name
    assert any(p.abs().sum() > 0 for k, p in after.items() if "lora_B" in k)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"lr": 0.0}, "model.lr=0.0 is not positive"),
        ({"lora": LoraArgs(r=0)}, "model.lora.r=0 is too small"),
        ({"weight_decay": -0.1}, "model.weight_decay=-0.1 is not 0 or a positive number"),
        ({"betas": (0.9, 1.0)}, r"model.betas=\[0.9, 1.0\] are no two shares below 1"),
        ({"warmup_steps": -1}, "model.warmup_steps=-1 is no number of steps; it must be at least 0"),
        ({"warmup_steps": 1.5}, "model.warmup_steps=1.5 is no whole number of steps"),
        ({"min_lr_ratio": 2.0}, "model.min_lr_ratio=2.0 is not a share"),
        ({"min_lr_ratio": 0.1, "schedule": "constant"}, "model.min_lr_ratio=0.1 changes nothing with"),
        (
            {"betas": (0.9, 0.95), "optimizer": "sgd"},
            r"model\.betas=\[0.9, 0.95\] changes nothing with model\.optimizer=sgd.*; set it to \[0.9, 0.999\], or",
        ),
        ({"betas": (0.9, 0.95), "optimizer": "adafactor"}, r"changes nothing with model\.optimizer=adafactor"),
        ({"dropout": 1.0}, "model.dropout=1.0 is no probability below 1"),
        (
            {"master_weights": True},
            r"model\.master_weights=true changes nothing with model\.dtype=float32; set it to false, or set "
            r"model\.dtype=bfloat16",
        ),
        (
            {"master_weights": True, "dtype": "bfloat16", "lora": LoraArgs()},
            r"model\.master_weights=true changes nothing with model\.lora or model\.adapter, whose adapters are",
        ),
        (
            {"stochastic_rounding": True},
            r"model\.stochastic_rounding=true changes nothing with model\.dtype=float32; set it to false, or set "
            r"model\.dtype=bfloat16",
        ),
        (
            {"stochastic_rounding": True, "master_weights": True, "dtype": "bfloat16"},
            r"model\.stochastic_rounding=true does without the copies that model\.master_weights=true keeps",
        ),
        (
            {"master_weights": True, "dtype": "bfloat16", "optimizer": "sgd"},
            r"model\.master_weights=true is not offered with model\.optimizer=sgd; use adamw",
        ),
        (
            {"optimizer": "adamw8bit", "dtype": "bfloat16"},
            r"model\.optimizer=adamw8bit with model\.dtype=bfloat16 needs model\.stochastic_rounding=true or model\.m",
        ),
        (
            {"state_dtype": "bfloat16", "dtype": "bfloat16"},
            r"model\.state_dtype=bfloat16 with model\.dtype=bfloat16 needs model\.stochastic_rounding=true",
        ),
        (
            {"state_dtype": "bfloat16", "optimizer": "adamw8bit"},
            r"model\.state_dtype=bfloat16 is not offered with model\.optimizer=adamw8bit; use adamw",
        ),
    ],
)
def test_settings_that_cannot_be(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        FineTune("unused", **settings)


def test_adapters_have_moments_of_fewer_bits_whatever_the_model() -> None:
    assert FineTune("unused", optimizer="adamw8bit", dtype="bfloat16", lora=LoraArgs()).optimizer == "adamw8bit"


def test_defaults_that_do_not_apply_are_no_matter() -> None:
    assert FineTune("unused", optimizer="sgd", betas=(0.9, 0.999)).optimizer == "sgd"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"weight_decay": 0.3}, "model.weight_decay=0.3 cannot take effect where .*, whose run had 0.2; set it to"),
        ({"betas": (0.5, 0.9)}, r"model.betas=\[0.5, 0.9\] cannot take effect where .* whose run had \[0.8, 0.9\]"),
        ({"optimizer": "adam"}, "model.optimizer=adam cannot take effect where .* whose run had adamw"),
    ],
)
def test_a_checkpoint_would_replace_settings_of_the_optimizer(
    checkpoint: str, folder: str, text: str, change: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        trainer(3).fit(FineTune(folder, **OPTIMIZER | change), datamodule=data(folder, text), ckpt_path=checkpoint)
    validated = trainer(3).validate(FineTune(folder, **OPTIMIZER | change), data(folder, text), ckpt_path=checkpoint)
    assert validated[0]["val_loss"] > 0


def test_other_updates_of_bfloat16_are_no_other_states(folder: str, text: str, tmp_path: Path) -> None:
    """AdamW of PyTorch takes the states of ours, and leaves the fp32 copies in them as they are."""
    settings: dict[str, Any] = {"dtype": "bfloat16", **OPTIMIZER}
    run = trainer(1)
    run.fit(FineTune(folder, **settings, master_weights=True), datamodule=data(folder, text))
    run.save_checkpoint(tmp_path / "one.ckpt")
    for change in ({}, {"stochastic_rounding": True}):
        module = FineTune(folder, **settings, **change)
        with pytest.raises(ConfigError, match=r"model\.master_weights=false cannot take effect .* whose run had true"):
            trainer(2, strategy="auto").fit(
                module, datamodule=data(folder, text), ckpt_path=tmp_path / "one.ckpt", weights_only=True
            )


def test_a_checkpoint_that_does_not_say_how_its_optimizer_was_set(checkpoint: str, folder: str) -> None:
    content = torch.load(checkpoint, weights_only=True)
    assert content.pop("optimizer_settings")["lr"] == 0.1
    assert FineTune(folder, lr=0.1).check_continues(content) is None
    assert FineTune(folder, lr=0.2).check_continues(content) == 0.1
    assert FineTune(folder).check_continues({"optimizer_states": []}) is None


class Rates(Callback):
    """Notes the learning rate of every update, and what moments begin with."""

    def __init__(self) -> None:
        self.rates: list[float] = []
        self.moments: list[Any] = []

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        self.moments = [state["exp_avg"].clone() for state in trainer.optimizers[0].state.values()]

    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        self.rates += {group["lr"] for group in optimizer.param_groups}


@pytest.mark.parametrize("strategy", ["offmate", "auto"])
def test_a_run_goes_on_with_another_learning_rate(
    strategy: str, folder: str, text: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The schedule and the moments are those of the run, the rate is the new one, also in what is saved."""
    schedule: dict[str, Any] = OPTIMIZER | {"schedule": "linear", "warmup_steps": 0}
    whole, later = Rates(), Rates()
    trainer(4, whole, strategy=strategy).fit(FineTune(folder, **schedule), datamodule=data(folder, text))
    run = trainer(2, strategy=strategy)
    run.fit(FineTune(folder, **schedule), datamodule=data(folder, text))
    run.save_checkpoint(tmp_path / "two.ckpt")
    content = torch.load(tmp_path / "two.ckpt", weights_only=True)
    again = trainer(4, later, strategy=strategy)
    module = FineTune(folder, **schedule | {"lr": 0.05})
    again.fit(module, datamodule=data(folder, text), ckpt_path=tmp_path / "two.ckpt", weights_only=True)
    assert later.rates == pytest.approx([rate / 2 for rate in whole.rates[2:]])
    saved = [state["exp_avg"] for state in content["optimizer_states"][0]["state"].values()]
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(later.moments, saved, strict=True))
    assert "model.lr=0.05 from step 2 on" in caplog.text
    again.save_checkpoint(tmp_path / "four.ckpt")
    assert module.check_continues(torch.load(tmp_path / "four.ckpt", weights_only=True)) is None


class Finding(Callback):
    """Finds a learning rate when training begins, as Lightning's LearningRateFinder does."""

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        pl_module.lr = 0.3


def test_a_learning_rate_that_is_found_is_no_other_setting(folder: str, text: str, tmp_path: Path) -> None:
    run = trainer(1, Finding())
    run.fit(FineTune(folder, **OPTIMIZER), datamodule=data(folder, text))
    run.save_checkpoint(tmp_path / "one.ckpt")
    FineTune(folder, **OPTIMIZER).check_continues(torch.load(tmp_path / "one.ckpt", weights_only=True))


def test_a_schedule_may_change_where_training_goes_on(checkpoint: str, folder: str, text: str) -> None:
    module = FineTune(folder, **OPTIMIZER, schedule="linear", warmup_steps=1)
    run = trainer(4)
    run.fit(module, datamodule=data(folder, text), ckpt_path=checkpoint)
    assert run.global_step == 4


class Cycling(Callback):
    """Changes what schedules of one's own change."""

    def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
        for group in trainer.optimizers[0].param_groups:
            group["betas"], group["weight_decay"] = (0.85, 0.95), group["weight_decay"] / 2


@pytest.mark.parametrize("settings", [{}, {"train_only": ["*norm*"]}], ids=["all", "vectors alone"])
def test_what_callbacks_make_of_the_settings_is_gone_on_with(
    settings: dict[str, Any], folder: str, text: str, tmp_path: Path
) -> None:
    settings = OPTIMIZER | settings
    run = trainer(1, Cycling())
    run.fit(FineTune(folder, **settings), datamodule=data(folder, text))
    run.save_checkpoint(tmp_path / "one.ckpt")
    run = trainer(2, Cycling())
    run.fit(FineTune(folder, **settings), datamodule=data(folder, text), ckpt_path=str(tmp_path / "one.ckpt"))
    assert run.global_step == 2
    assert {group["betas"] for group in run.optimizers[0].param_groups} == {(0.85, 0.95)}
    with pytest.raises(ConfigError, match=r"model\.weight_decay=0\.5 cannot take effect"):
        FineTune(folder, **settings | {"weight_decay": 0.5}).check_continues(torch.load(tmp_path / "one.ckpt"))


def test_an_optimizer_of_ones_own_goes_on(folder: str, text: str, tmp_path: Path) -> None:
    class Module(FineTune):
        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW(self.parameters(), lr=2 * self.lr)

    run = trainer(1)
    run.fit(Module(folder), datamodule=data(folder, text))
    run.save_checkpoint(tmp_path / "one.ckpt")
    run = trainer(2)
    run.fit(Module(folder, betas=(0.8, 0.9)), datamodule=data(folder, text), ckpt_path=str(tmp_path / "one.ckpt"))
    assert run.global_step == 2
    assert "optimizer_settings" not in torch.load(tmp_path / "one.ckpt")


OPTIMIZER: dict[str, Any] = {"lr": 0.1, "weight_decay": 0.2, "betas": (0.8, 0.9)}


@pytest.fixture
def checkpoint(folder: str, text: str, tmp_path: Path) -> str:
    """Of a run of two steps."""
    run = trainer(2)
    run.fit(FineTune(folder, **OPTIMIZER), datamodule=data(folder, text))
    run.save_checkpoint(tmp_path / "two.ckpt")
    return str(tmp_path / "two.ckpt")


def test_a_warm_up_that_is_longer_than_the_run(folder: str, text: str, caplog: pytest.LogCaptureFixture) -> None:
    for warmup, said in ((2, 1), (1, 0)):
        caplog.clear()
        trainer(2).fit(FineTune(folder, warmup_steps=warmup), datamodule=data(folder, text))
        assert caplog.text.count(f"model.warmup_steps={warmup} are not over when training ends after 2 steps") == said


@pytest.mark.parametrize(("steps", "share", "number"), [(4, 0.5, 2), (5, 0.3, 2), (4, 0.01, 1)])
def test_a_warm_up_over_a_share_of_all_steps(folder: str, text: str, steps: int, share: float, number: int) -> None:
    """Rounded up, as in the HF Trainer."""
    from transformers import TrainingArguments

    rates = []
    for warmup in (share, number):
        run = trainer(steps)
        run.fit(FineTune(folder, warmup_steps=warmup, schedule="linear"), datamodule=data(folder, text))
        schedule: Any = run.lr_scheduler_configs[0].scheduler
        rates.append([schedule.lr_lambdas[0](step) for step in range(steps + 1)])
    assert rates[0] == rates[1]
    assert TrainingArguments(warmup_steps=share, use_cpu=True).get_warmup_steps(steps) == number


def test_a_share_of_steps_without_an_end(folder: str, text: str) -> None:
    with pytest.raises(ConfigError, match=r"model.warmup_steps=0.1 is a share of all steps, and there is no last one"):
        trainer(-1).fit(FineTune(folder, warmup_steps=0.1, schedule="constant"), datamodule=data(folder, text))


def test_tokens_that_nobody_trains(folder: str, tmp_path: Path) -> None:
    """The way out is one that there is: adapters that are there already cannot be given other modules."""
    lora = LoraArgs(r=2, target_modules=["q_proj"])
    with pytest.warns(
        UserWarning, match=r"random .*: adapters leave embed_tokens as it is; set model\.lora\.modules_to_sav"
    ):
        made = FineTune(folder, new_tokens=["<a>"], lora=lora).build()
    with_embeddings, without = str(tmp_path / "with"), str(tmp_path / "without")
    made.save_pretrained(with_embeddings, save_embedding_layers=True)
    made.save_pretrained(without, save_embedding_layers=False)
    with pytest.warns(
        UserWarning, match=r"random .*; model\.adapter='.*' brings none; make new adapters instead, with mod"
    ):
        FineTune(folder, new_tokens=["<a>"], adapter=without).build()
    again = FineTune(folder, new_tokens=["<a>"], adapter=with_embeddings).build()
    assert torch.equal(again.get_input_embeddings().weight, made.get_input_embeddings().weight)


def test_sequences_longer_than_the_model(folder: str, text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(load, "load_model", _never)
    with pytest.raises(ConfigError, match=r"data.max_length=200 is longer than the model's context; set it to 128"):
        trainer(1).fit(FineTune(folder), datamodule=data(folder, text, max_length=200))


def _never(*args: object, **kwargs: object) -> None:
    raise AssertionError("weights are loaded before the settings are checked")
