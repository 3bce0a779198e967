from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor, nn

from lt_offload.errors import ConfigError
from lt_offload.finetune.data.formats import IGNORED
from lt_offload.finetune.data.module import FineTuneData
from tests.support import tiny

TEXT = "".join(chr(97 + i % 26) for i in range(1000))


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(tiny.tokenizer(tmp_path_factory.mktemp("tokenizer")))


@pytest.fixture
def text(tmp_path: Path) -> str:
    (tmp_path / "text.txt").write_text(TEXT)
    return str(tmp_path / "text.txt")


@pytest.fixture
def alpaca(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    rows = [{"instruction": f"say {'very ' * n}{n}", "input": "", "output": "yes " * (n + 1)} for n in range(12)]
    (tmp_path / "rows.json").write_text(json.dumps(rows))
    return str(tmp_path / "rows.json")


def made(tokenizer: str, **settings: Any) -> FineTuneData:
    data = FineTuneData(tokenizer, **settings)
    data.setup("fit")
    return data


def test_packed_text(tokenizer: str, text: str) -> None:
    data = made(tokenizer, path=text, max_length=50, batch_size=2, validation_share=0.25)
    training, validation = list(data.train_dataloader()), list(data.val_dataloader())
    assert len(training) == 7  # 1001 tokens are 20 sequences, 15 of them for training
    assert [batch["input_ids"].shape for batch in validation] == [(2, 50), (2, 50), (1, 50)]
    assert all(torch.equal(batch["input_ids"], batch["labels"]) for batch in training + validation)
    heldout = [data.tokenizer.decode(ids) for batch in validation for ids in batch["input_ids"]]
    assert "".join(heldout) == TEXT[750:1000]
    trained = {data.tokenizer.decode(ids) for batch in training for ids in batch["input_ids"]}
    assert trained < {TEXT[i : i + 50] for i in range(0, 750, 50)}


def test_padded_instructions(tokenizer: str, alpaca: str, caplog: pytest.LogCaptureFixture) -> None:
    settings = {"path": alpaca, "format": "alpaca", "pack": False, "batch_size": 3, "validation_share": 0.0}
    data = made(tokenizer, max_length=400, **settings)
    assert list(data.val_dataloader()) == []
    widths = set()
    for batch in data.train_dataloader():
        widths.add(batch["input_ids"].shape[1])
        for ids, mask, labels in zip(*(batch[k] for k in ("input_ids", "attention_mask", "labels")), strict=True):
            learned = data.tokenizer.decode(labels[labels != IGNORED])
            assert learned.startswith("yes ")
            assert learned.endswith("</s>")
            assert mask.sum() == ids.ne(0).sum()
    assert len(widths) > 1, "short batches are narrow"
    assert not [record for record in caplog.records if record.levelno > logging.INFO]


def test_what_is_cut_is_said(tokenizer: str, alpaca: str, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        data = made(tokenizer, path=alpaca, format="alpaca", pack=False, max_length=190, validation_share=0.0)
    assert "data.max_length=190 cuts" in caplog.text
    lengths = [int(batch["attention_mask"].sum()) for batch in data.train_dataloader()]
    assert max(lengths) == 190
    assert f"{12 - len(lengths)} examples have nothing to learn" in caplog.text
    assert all((batch["labels"] != IGNORED).any() for batch in data.train_dataloader())


@pytest.mark.parametrize("pack", [True, False])
def test_the_worst_case_is_as_large_as_batches_get(tokenizer: str, alpaca: str, pack: bool) -> None:
    data = made(tokenizer, path=alpaca, format="alpaca", pack=pack, max_length=300, batch_size=2, validation_share=0.0)
    worst = data.worst_case_batch()
    for batch in data.train_dataloader():
        assert sorted(batch) == sorted(worst)
        assert all(batch[key].numel() <= worst[key].numel() for key in batch)
        assert all(batch[key].dtype == worst[key].dtype for key in batch)
    assert worst["input_ids"].shape == (2, 300)
    if not pack:
        assert 0 < int((worst["attention_mask"] == 0).sum()) < worst["attention_mask"].numel()
    data.batch_size = 5  # as a plan may choose
    assert data.worst_case_batch()["input_ids"].shape == (5, 300)


def test_own_validation_data(tokenizer: str, text: str, tmp_path: Path) -> None:
    (tmp_path / "held.txt").write_text("held out " * 30)
    data = made(tokenizer, path=text, validation_path=str(tmp_path / "held.txt"), max_length=50)
    assert len(data.train_dataloader()) == 20
    batches = list(data.val_dataloader())
    assert data.tokenizer.decode(batches[0]["input_ids"][0]) == ("held out " * 30)[:50]


def test_pydoc_topics(tokenizer: str) -> None:
    data = made(tokenizer, path="pydoc_topics", max_length=256)
    assert len(data.train_dataloader()) > 1000
    assert len(data.val_dataloader()) > 100


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"max_length": 1}, "data.max_length=1 is too small"),
        ({"batch_size": 0}, "data.batch_size=0 is too small"),
        ({"validation_share": 1.0}, "data.validation_share=1.0 is not a share"),
    ],
)
def test_settings_that_cannot_be(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        FineTuneData("unused", path="unused", **settings)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"max_length": 5000}, "do not fill one sequence of data.max_length=5000"),
        ({"max_length": 50, "batch_size": 20}, "fewer than data.batch_size=20"),
        ({"format": "alpaca"}, "no column 'instruction'"),
        ({"validation_path": "gone.txt"}, r"data\.validation_path='gone.txt' does not exist"),
    ],
)
def test_data_that_cannot_be_used(tokenizer: str, text: str, settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        made(tokenizer, path=text, **settings).train_dataloader()


def test_nothing_to_learn(tokenizer: str, alpaca: str) -> None:
    with pytest.raises(ConfigError, match=r"no trainable tokens within data\.max_length=40"):
        made(tokenizer, path=alpaca, format="alpaca", pack=False, max_length=40)


def test_pydoc_topics_are_text() -> None:
    with pytest.raises(ConfigError, match="data.format=text"):
        FineTuneData("unused", path="pydoc_topics", format="alpaca").setup("fit")


def test_an_empty_prompt(tokenizer: str) -> None:
    data = FineTuneData(tokenizer, path="unused", format="text")
    assert data.prompt("ab", max_new_tokens=3)["input_ids"].shape == (1, 2)
    with pytest.raises(ConfigError, match="prompt is empty"):
        data.prompt("")


class Recorder(LightningModule):
    """Remembers the batches it was given."""

    def __init__(self, asks: bool) -> None:
        super().__init__()
        self.asks = asks
        """Whether it asks for the number of steps, which makes Lightning set up the loaders before it restores them."""
        self.layer = nn.Linear(1, 1)
        self.seen: list[list[int]] = []

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        self.seen.append(batch["input_ids"][:, 0].tolist())
        return self.layer(torch.ones(1)).sum()

    def validation_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        """The data module has held-out batches."""

    def configure_optimizers(self) -> torch.optim.Optimizer:
        if self.asks:
            assert self.trainer.estimated_stepping_batches
        return torch.optim.SGD(self.parameters(), lr=0.1)


@pytest.mark.filterwarnings("ignore:.*does not have many workers.*", "ignore:.*LeafSpec.*")
@pytest.mark.filterwarnings("ignore:.*GPU available.*", "ignore:.*tensorboardX.*")
@pytest.mark.parametrize("asks", [False, True])
@pytest.mark.parametrize("stop", [3, 7, 9])
def test_lightning_resumes_in_the_middle_of_an_epoch(
    tokenizer: str, text: str, tmp_path: Path, stop: int, asks: bool
) -> None:
    def fit(steps: int, ckpt_path: Path | None = None) -> tuple[Recorder, Trainer]:
        data = FineTuneData(tokenizer, path=text, max_length=50, batch_size=2, validation_share=0.25, seed=5)
        module = Recorder(asks)
        quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
        trainer = Trainer(
            accelerator="cpu", max_steps=steps, max_epochs=-1, enable_model_summary=False, log_every_n_steps=1, **quiet
        )
        trainer.fit(module, datamodule=data, ckpt_path=ckpt_path, weights_only=True)
        return module, trainer

    whole, _ = fit(12)
    begun, trainer = fit(stop)
    trainer.save_checkpoint(tmp_path / "stop.ckpt")
    resumed, _ = fit(12, tmp_path / "stop.ckpt")
    assert begun.seen + resumed.seen == whole.seen
    assert len(whole.seen) == 12  # an epoch has 7 batches
