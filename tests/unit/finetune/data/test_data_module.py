from __future__ import annotations

import json
import logging
import re
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor, nn

from lt_offload.errors import ConfigError
from lt_offload.finetune.data.formats import IGNORED
from lt_offload.finetune.data.module import FineTuneData, Pack
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
def rows(tmp_path: Path) -> str:
    """Twenty texts that begin with their number, of different lengths."""
    texts = [{"text": f"{number} " + TEXT[: 7 + 4 * (number * 7 % 9)]} for number in range(20)]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, texts)))
    return str(tmp_path / "rows.jsonl")


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
    assert len(training) == 8  # 1001 tokens are 21 sequences that overlap by one, 16 of them for training
    assert [batch["input_ids"].shape for batch in validation] == [(2, 50), (2, 50), (1, 50)]
    assert all(batch["labels"][:, 0].eq(IGNORED).all() for batch in training + validation)
    heldout = [data.tokenizer.decode(ids) for batch in validation for ids in batch["input_ids"]]
    assert heldout[:4] == [TEXT[i : i + 50] for i in range(16 * 49, 20 * 49, 49)]
    assert heldout[4].startswith(TEXT[20 * 49 :] + "</s><pad>")
    trained = {data.tokenizer.decode(ids) for batch in training for ids in batch["input_ids"]}
    assert trained == {TEXT[i : i + 50] for i in range(0, 16 * 49, 49)}


def test_running_text(tokenizer: str, text: str) -> None:
    data = made(tokenizer, path=text, max_length=50, batch_size=2, validation_share=0.25, pack="wrapped")
    training, validation = list(data.train_dataloader()), list(data.val_dataloader())
    assert len(training) == 8  # 1000 letters are 20 sequences, 15 of them for training; an end alone is no sequence
    assert all(sorted(batch) == ["input_ids", "labels"] for batch in training + validation)
    assert all(torch.equal(batch["input_ids"], batch["labels"]) for batch in training + validation)
    heldout = [data.tokenizer.decode(ids) for batch in validation for ids in batch["input_ids"]]
    assert "".join(heldout) == TEXT[750:1000]


def test_a_row_is_trained_or_held_out(tokenizer: str, alpaca: str) -> None:
    """Whole rows, whatever they share a sequence with."""

    def learned(batches: Any, data: FineTuneData) -> list[int]:
        tokens = [data.tokenizer.decode(row[row != IGNORED]) for batch in batches for row in batch["labels"]]
        return sorted(text.count("yes") for row in tokens for text in row.split("</s>") if text)

    for pack in (True, False):
        settings = {"path": alpaca, "format": "alpaca", "max_length": 600, "pack": pack, "validation_rows": 3}
        data = made(tokenizer, **settings)
        assert learned(data.train_dataloader(), data) == list(range(1, 10))
        assert learned(data.val_dataloader(), data) == [10, 11, 12]
        drawn = made(tokenizer, **settings, validation_seed=1)
        kept_back = learned(drawn.val_dataloader(), drawn)
        assert kept_back != [10, 11, 12]
        assert sorted(kept_back + learned(drawn.train_dataloader(), drawn)) == list(range(1, 13))


def test_workers_change_nothing(tokenizer: str, alpaca: str) -> None:
    settings = {"path": alpaca, "format": "alpaca", "max_length": 600, "batch_size": 2, "validation_rows": 3}
    alone, helped = made(tokenizer, **settings), made(tokenizer, **settings, num_workers=2)
    for loader in ("train_dataloader", "val_dataloader"):
        pairs = zip(getattr(alone, loader)(), getattr(helped, loader)(), strict=True)
        assert all(left[key].equal(right[key]) for left, right in pairs for key in left)


def test_like_lengths_need_less_padding(tokenizer: str, alpaca: str) -> None:
    settings = {"path": alpaca, "format": "alpaca", "max_length": 600, "batch_size": 3, "validation_share": 0.0}

    def padding(**more: Any) -> int:
        data = made(tokenizer, pack=False, **settings, **more)
        return sum(int((batch["attention_mask"] == 0).sum()) for batch in data.train_dataloader())

    assert padding(group_by_length=True) < padding() / 2


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
    lengths = [int(batch["attention_mask"].sum()) for batch in data.train_dataloader()]
    assert max(lengths) == 190
    whole = made(tokenizer, path=alpaca, format="alpaca", pack=False, max_length=600, validation_share=0.0)
    learned = sum(int((batch["labels"] != IGNORED).sum()) for batch in whole.train_dataloader())
    learned -= sum(int((batch["labels"] != IGNORED).sum()) for batch in data.train_dataloader())
    assert re.search(rf"data.max_length=190 cuts \d+ rows, and loses {learned} tokens to learn", caplog.text)
    behind = f"{12 - len(lengths)} rows have their whole answer behind data.max_length=190: raise it; of 12 examples"
    assert behind in caplog.text
    assert "no answer" not in caplog.text
    assert all((batch["labels"] != IGNORED).any() for batch in data.train_dataloader())


@pytest.mark.parametrize("pack", [True, False, "wrapped"])
def test_the_worst_case_is_as_large_as_batches_get(tokenizer: str, alpaca: str, pack: Pack) -> None:
    data = made(tokenizer, path=alpaca, format="alpaca", pack=pack, max_length=300, batch_size=2, validation_share=0.0)
    worst = data.worst_case_batch()
    for batch in data.train_dataloader():
        assert sorted(batch) == sorted(worst)
        assert all(batch[key].numel() <= worst[key].numel() for key in batch)
        assert all(batch[key].dtype == worst[key].dtype for key in batch)
    width = 300 if pack else max(batch["input_ids"].shape[1] for batch in data.train_dataloader())
    assert worst["input_ids"].shape == (2, width)
    if not pack:
        assert 0 < int((worst["attention_mask"] == 0).sum()) < worst["attention_mask"].numel()
    data.batch_size = 5  # as a plan may choose
    assert data.worst_case_batch()["input_ids"].shape == (5, width)


def test_own_validation_data(tokenizer: str, text: str, tmp_path: Path) -> None:
    (tmp_path / "held.txt").write_text("held out " * 30)
    data = made(tokenizer, path=text, validation_path=str(tmp_path / "held.txt"), max_length=50)
    assert len(data.train_dataloader()) == 21
    batches = list(data.val_dataloader())
    assert data.tokenizer.decode(batches[0]["input_ids"][0]) == ("held out " * 30)[:50]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"max_length": 1}, "data.max_length=1 is too small"),
        ({"batch_size": 0}, "data.batch_size=0 is too small"),
        ({"validation_share": 1.0}, "data.validation_share=1.0 is not a share"),
        ({"validation_rows": -1}, "data.validation_rows=-1 is too small"),
        ({"num_workers": -1}, "data.num_workers=-1 is too small"),
        ({"group_by_length": True}, "data.group_by_length=true changes nothing with data.pack=true"),
        ({"streaming": True}, r"set data\.validation_rows .* or give data\.validation_path"),
        (
            {"validation_path": "v.txt", "validation_rows": 2},
            r"validation_rows=2 changes nothing with data\.validation_path",
        ),
        (
            {"validation_path": "v.txt", "validation_seed": 0},
            r"validation_seed=0 changes nothing with data\.validation_path",
        ),
        ({"streaming": True, "group_by_length": True, "pack": False}, "data.group_by_length=true needs the lengths"),
        ({"streaming": True, "validation_rows": 0, "num_workers": 2}, "data.num_workers=2: with data.streaming=true"),
        ({"streaming": True, "validation_rows": 4, "validation_seed": 0}, "data.validation_seed=0 draws from rows"),
        ({"num_proc": 0}, "data.num_proc=0 is too small"),
        (
            {"streaming": True, "validation_rows": 0, "num_proc": 2},
            r"data\.num_proc=2 changes nothing with data\.streaming=true.*; set it to null, or set data\.stream",
        ),
        (
            {"streaming": True, "validation_rows": 0, "cache_dir": "here"},
            r"data\.cache_dir=here changes nothing with data\.streaming=true",
        ),
        (
            {"stream_buffer": 10},
            r"data\.stream_buffer=10 changes nothing with data\.streaming=false; set it to 1000, or set "
            r"data\.streaming=true",
        ),
        (
            {"path": "pydoc_topics", "validation_rows": 3},
            r"data\.validation_rows=3 changes nothing with data\.validation_path='pydoc_topics', which holds all",
        ),
        (
            {"validation_share": 0.0, "validation_seed": 1},
            r"data\.validation_seed=1 changes nothing with data\.validation_share=0",
        ),
        (
            {"validation_rows": 0, "validation_seed": 1},
            r"data\.validation_seed=1 changes nothing with data\.validation_rows=0",
        ),
        ({"stream_buffer": 0}, "data.stream_buffer=0 is too small"),
        ({"group_by_length": True, "pack": "wrapped"}, "changes nothing with data.pack=wrapped"),
    ],
)
def test_settings_that_cannot_be(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        FineTuneData("unused", **{"path": "unused"} | settings)


def test_what_does_not_apply_may_be_at_its_default() -> None:
    streamed = {"streaming": True, "validation_rows": 0, "stream_buffer": 1000}
    no_others = {"validation_path": "held", "validation_rows": 0}
    pydoc = {"path": "pydoc_topics", "streaming": True}
    for settings in (streamed | {"num_proc": 1}, {"stream_buffer": 1000}, pydoc, no_others, no_others | streamed):
        FineTuneData("unused", **{"path": "unused"} | settings)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"split": "test"},
            r"data\.split=test changes nothing with data\.path=.*; set it to train, or name a data set",
        ),
        ({"subset": "small"}, r"data\.subset=small changes nothing with data\.path=.*, which is not on the hub"),
        ({"path": "one", "split": "test"}, r"data\.split=test changes nothing with data\.path='one'"),
        ({"path": "both", "subset": "small"}, r"data\.subset=small changes nothing with data\.path='both'"),
        ({"path": "pydoc_topics", "split": "test"}, r"data\.split=test changes nothing"),
        ({"path": "both", "split": "test"}, None),
        ({"validation_path": "some/set", "split": "test", "subset": "small"}, None),
        ({"split": "train"}, None),
    ],
)
def test_parts_of_a_data_set_are_for_those_that_have_some(
    text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, settings: dict[str, Any], message: str | None
) -> None:
    monkeypatch.chdir(tmp_path)
    for folder, what in (("one", "state.json"), ("both", "dataset_dict.json")):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / what).touch()
    data = FineTuneData("unused", **{"path": text} | settings)
    if message is None:
        data.check_paths()
        return
    for check in (data.check_paths, lambda: data.setup("fit")):
        with pytest.raises(ConfigError, match=message):
            check()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"validation_rows": 30}, "data.validation_rows=30 is more than the 2 rows there are"),
        ({"validation_rows": 2}, "or data.validation_rows, which holds out 2 sequences"),
        ({"max_length": 5000}, "gives 0 training sequences of up to 5000 tokens"),
        ({"max_length": 50, "batch_size": 21}, "fewer than data.batch_size=21"),
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
        self.seen: list[list[list[int]]] = []

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        self.seen.append(batch["input_ids"].tolist())
        return self.layer(torch.ones(1)).sum()

    def validation_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        """The data module has held-out batches."""

    def configure_optimizers(self) -> torch.optim.Optimizer:
        if self.asks:
            assert self.trainer.estimated_stepping_batches
        return torch.optim.SGD(self.parameters(), lr=0.1)


def run(
    tokenizer: str,
    steps: int,
    *,
    asks: bool,
    ckpt: Path | None = None,
    epochs: int = -1,
    limit: int | None = None,
    **settings: Any,
) -> tuple[Recorder, Trainer]:
    data = FineTuneData(tokenizer, **settings, batch_size=2, seed=5)
    module = Recorder(asks)
    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    trainer = Trainer(
        accelerator="cpu",
        max_steps=steps,
        max_epochs=epochs,
        enable_model_summary=False,
        log_every_n_steps=1,
        limit_train_batches=limit,
        **quiet,
    )
    trainer.fit(module, datamodule=data, ckpt_path=ckpt, weights_only=True)
    return module, trainer


MODES: dict[str, dict[str, Any]] = {
    "packed": {},
    "wrapped": {"pack": "wrapped"},
    "padded": {"pack": False, "group_by_length": True},
    "limited": {"limit": 2},
    "streamed": {"streaming": True, "validation_rows": 2, "stream_buffer": 6},
    "streamed beside": {"streaming": True, "validation_rows": 1, "stream_buffer": 6, "num_workers": 1, "pack": False},
}


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*GPU available.*", "ignore:.*tensorboardX.*")
@pytest.mark.parametrize(
    ("mode", "asks", "stop"),
    [
        *[("packed", asks, stop) for asks in (False, True) for stop in (3, 7, 9)],
        *[(mode, True, 4) for mode in ("wrapped", "padded", "streamed beside", "limited")],
        ("limited", False, 3),
        *[("streamed", asks, stop) for asks in (False, True) for stop in (3, 9)],
    ],
)
def test_lightning_resumes_in_the_middle_of_an_epoch(
    tokenizer: str, rows: str, tmp_path: Path, mode: str, asks: bool, stop: int
) -> None:
    settings = {"path": rows, "max_length": 50, "validation_share": 0.25} | MODES[mode]
    whole, trainer = run(tokenizer, 12, asks=asks, **settings)
    assert len(whole.seen) == 12
    if "streaming" not in settings:
        assert trainer.num_training_batches < 12
    begun, trainer = run(tokenizer, stop, asks=asks, **settings)
    trainer.save_checkpoint(tmp_path / "stop.ckpt")
    resumed, _ = run(tokenizer, 12, asks=asks, ckpt=tmp_path / "stop.ckpt", **settings)
    assert begun.seen + resumed.seen == whole.seen


def test_a_streamed_run_goes_on_beyond_its_end(tokenizer: str, rows: str, tmp_path: Path) -> None:
    """However many epochs there should be: to a Trainer, all steps of a run are one."""
    settings = {"path": rows, "max_length": 50, "epochs": 1, "asks": True} | MODES["streamed"]
    whole, _ = run(tokenizer, 12, **settings)
    begun, trainer = run(tokenizer, 4, **settings)
    assert trainer.current_epoch == 1
    trainer.save_checkpoint(tmp_path / "end.ckpt")
    resumed, _ = run(tokenizer, 12, ckpt=tmp_path / "end.ckpt", **settings)
    assert begun.seen + resumed.seen == whole.seen


@pytest.mark.filterwarnings("ignore:.*max_epochs.*")
def test_streaming_needs_an_end(tokenizer: str, rows: str) -> None:
    with pytest.raises(ConfigError, match=r"data\.streaming=true has no end; set trainer\.max_steps"):
        run(tokenizer, -1, asks=False, path=rows, streaming=True, validation_rows=0)


def test_streams_hold_out_the_first_rows(tokenizer: str, rows: str) -> None:
    first = made(tokenizer, path=rows, max_length=50, pack=False, streaming=True, validation_rows=3, batch_size=3)
    expected = made(tokenizer, path=rows, max_length=50, pack=False, validation_rows=0, batch_size=3)
    assert first.worst_case_batch().keys() == expected.worst_case_batch().keys()
    [held_out] = first.val_dataloader()
    trained = [
        first.tokenizer.decode(ids) for batch in islice(first.train_dataloader(), 20) for ids in batch["input_ids"]
    ]
    named = [first.tokenizer.decode(ids).split()[0] for ids in held_out["input_ids"]]
    assert named == ["0", "1", "2"]
    assert {text.split()[0] for text in trained} == {str(number) for number in range(3, 20)}
    beside = made(tokenizer, path=rows, max_length=50, streaming=True, validation_path=rows)
    assert len(beside.val_dataloader()) == len(
        made(tokenizer, path=rows, max_length=50, validation_rows=0).train_dataloader()
    )


@pytest.mark.parametrize(
    ("held_out", "stage", "message"),
    [(21, "validate", "=21 is more than the 20 rows"), (20, "fit", "=20 leaves nothing to train on of the 20 rows")],
)
def test_streams_that_are_shorter_than_what_is_held_out(
    tokenizer: str, rows: str, held_out: int, stage: str, message: str
) -> None:
    data = FineTuneData(tokenizer, path=rows, streaming=True, validation_rows=held_out)
    with pytest.raises(ConfigError, match=message):
        data.setup(stage)


@pytest.mark.parametrize("streaming", [False, True])
def test_a_cloned_data_set_is_trained_on_its_split(
    tokenizer: str, rows: str, streaming: bool, caplog: pytest.LogCaptureFixture
) -> None:
    folder = Path(rows).parent / "cloned"
    (folder / "data").mkdir(parents=True)
    (folder / "README.md").write_text("# About")
    Path(rows).rename(folder / "data" / "train-00000-of-00001.jsonl")
    (folder / "data" / "test.jsonl").write_text('{"text": "TEST"}')
    caplog.set_level(logging.INFO)
    some: Any = {"validation_rows": 1, "pack": False, "max_length": 100, "streaming": streaming}
    data = made(tokenizer, path=str(folder), **some)
    training = data.examples() if streaming else data.examples().documents()
    texts = [data.tokenizer.decode(example.ids) for example in training]
    assert [text.split(" ")[0] for text in texts] == [str(number) for number in range(20)]
    assert f"data.path={str(folder)!r} (in data; split train; left out: README.md, data/test.jsonl)" in caplog.text
    with pytest.raises(ConfigError, match=r"data.split='dev': .* has the splits 'test' .test.jsonl., 'train'"):
        made(tokenizer, path=str(folder), split="dev", **some)
