"""Pairs of answers: the forms of TRL's rows, and what becomes of rows that are no pairs, too long or alike."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from lt_offload.cli.main import main
from lt_offload.errors import ConfigError
from lt_offload.finetune.adapters import LoraArgs
from lt_offload.finetune.data.batches import REFERENCE
from lt_offload.finetune.data.module import FineTuneData
from lt_offload.finetune.module import FineTune
from lt_offload.schema.plan import Plan
from tests.support import tiny
from tests.unit.finetune.conftest import trainer

ASK, BLUE, GREEN = (
    {"role": role, "content": content}
    for role, content in (("user", "The sky?"), ("assistant", "Blue."), ("assistant", "Green, mostly."))
)
MORE = [ASK, {"role": "assistant", "content": "Pardon?"}, ASK]
FORMS: dict[str, dict[str, Any]] = {
    "texts": {"prompt": "The sky is", "chosen": " blue", "rejected": " green"},
    "texts without a prompt": {"chosen": "The sky is blue", "rejected": "The sky is green"},
    "messages": {"prompt": [ASK], "chosen": [BLUE], "rejected": [GREEN]},
    "messages without a prompt": {"chosen": [ASK, BLUE], "rejected": [ASK, GREEN]},
    "a question that is a text": {"prompt": "The sky?", "chosen": [BLUE], "rejected": [GREEN]},
    "a question that is in the answers, too": {"prompt": "The sky?", "chosen": [ASK, BLUE], "rejected": [ASK, GREEN]},
    "several turns": {"chosen": [*MORE, BLUE], "rejected": [*MORE, GREEN]},
}


@pytest.fixture(scope="session")
def chat(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(tiny.model(tmp_path_factory.mktemp("chat"), chat=True))


def made(folder: str, tmp_path: Path, *rows: Any, **settings: Any) -> FineTuneData:
    file = tmp_path / "pairs.jsonl"
    file.write_text("\n".join(map(json.dumps, rows)))
    defaults = {"format": "preference", "pack": False, "max_length": 128, "validation_rows": 0}
    return FineTuneData(folder, path=str(file), **defaults | settings)


def texts(data: FineTuneData) -> list[tuple[str, str]]:
    """Return all of each answer, and what of it is compared."""
    data.setup("fit")
    assert data._train is not None
    batch = data._collate([data._train[number] for number in range(len(data._train))])
    rows = zip(batch["input_ids"], batch["labels"], batch["attention_mask"], strict=True)
    return [
        (data.tokenizer.decode(ids[mask > 0]), data.tokenizer.decode(ids[labels != -100])) for ids, labels, mask in rows
    ]


@pytest.mark.parametrize("form", FORMS)
def test_forms_of_rows(chat: str, tmp_path: Path, form: str) -> None:
    chosen, rejected = texts(made(chat, tmp_path, FORMS[form]))
    if "texts" in form:
        assert chosen == ("The sky is blue</s>", " blue</s>")
        assert rejected == ("The sky is green</s>", " green</s>")
        return
    before = "<|user|>The sky?</s>"
    before = f"{before}<|assistant|>Pardon?</s>{before}" if form == "several turns" else before
    assert chosen == (f"{before}<|assistant|>Blue.</s>", "Blue.</s>")
    assert rejected == (f"{before}<|assistant|>Green, mostly.</s>", "Green, mostly.</s>")


@pytest.mark.parametrize("form", [form for form in FORMS if not form.startswith("a question")])
def test_tokens_are_those_of_trl(chat: str, tmp_path: Path, form: str) -> None:
    data_utils = pytest.importorskip("trl.data_utils")
    row = data_utils.maybe_extract_prompt(FORMS[form])
    row = data_utils.maybe_apply_chat_template(row, made(chat, tmp_path, row).tokenizer)
    end = "" if "texts" not in form else "</s>"
    expected = [row["prompt"] + row[side] + end for side in ("chosen", "rejected")]
    assert [whole for whole, _ in texts(made(chat, tmp_path, FORMS[form]))] == expected


def test_a_batch_has_the_chosen_answers_first(folder: str, tmp_path: Path) -> None:
    rows = [{"prompt": "a", "chosen": "b" * n, "rejected": "c" * (12 - n)} for n in (3, 9)]
    data = made(folder, tmp_path, *rows, columns={})
    whole = [text for text, _ in texts(data)]
    assert whole == ["abbb</s>", "a" + "b" * 9 + "</s>", "a" + "c" * 9 + "</s>", "accc</s>"]
    assert data._train is not None
    batch = data._collate([data._train[0], data._train[1]])
    assert batch["input_ids"].shape == (4, 16)
    assert batch[REFERENCE].isnan().all()
    assert data.worst_case_batch()["input_ids"].shape == (2, 16)


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"prompt": "a", "chosen": "b"}, "row 2: rejected is missing"),
        ({"prompt": "a", "chosen": "b", "rejected": None}, "row 2: rejected is null, not a text"),
        ({"prompt": "a", "chosen": 3, "rejected": "b"}, r"row 2: chosen is a number \(3\), not a text"),
        ({"chosen": "b", "rejected": "c"}, "row 2: prompt is missing|row 2: prompt is null"),
    ],
)
def test_rows_that_are_no_pairs(folder: str, tmp_path: Path, row: dict[str, Any], message: str) -> None:
    good = FORMS["texts"]
    with pytest.raises(ConfigError, match=f"1 of 2 rows cannot be used.*{message}.*skip_bad_rows"):
        made(folder, tmp_path, good, row).setup("fit")
    assert len(texts(made(folder, tmp_path, good, row, skip_bad_rows=True))) == 2


def test_messages_that_are_none(chat: str, tmp_path: Path) -> None:
    bad = [{"chosen": [ASK, BLUE], "rejected": "no"}, {"chosen": [ASK, ASK], "rejected": [ASK, ASK]}]
    with pytest.raises(ConfigError, match=r"2 of 3 rows cannot be used \(.*rejected is no JSON.*no message of the ass"):
        made(chat, tmp_path, FORMS["messages without a prompt"], *bad).setup("fit")


def test_long_answers_are_cut_and_empty_ones_left_out(
    folder: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    rows = [
        {"prompt": "p", "chosen": "c" * 30, "rejected": "r"},
        {"prompt": "p" * 30, "chosen": "c", "rejected": "r"},
        {"prompt": "p", "chosen": "c", "rejected": " "},
        {"prompt": "p", "chosen": "same", "rejected": "same"},
    ]
    whole = texts(made(folder, tmp_path, *rows, max_length=10))
    assert whole == [
        ("p" + "c" * 9, "c" * 9),
        ("psame</s>", "same</s>"),
        ("pr</s>", "r</s>"),
        ("psame</s>", "same</s>"),
    ]
    assert "data.max_length=10 cuts 1 pairs; 2 pairs have an answer without words" in caplog.text
    assert "the chosen answer is the rejected one: nothing is learned from it (1 of 4 rows)" in caplog.text


def test_held_out_pairs_and_a_single_one(folder: str, tmp_path: Path) -> None:
    rows = [{"prompt": "p", "chosen": "c" * n, "rejected": "r"} for n in range(1, 6)]
    data = made(folder, tmp_path, *rows, validation_rows=2)
    data.setup("fit")
    assert data._train is not None
    assert data._validation is not None
    assert [len(data._train), len(data._validation)] == [3, 2]
    assert [batch["input_ids"].shape[0] for batch in data.val_dataloader()] == [2, 2]  # type: ignore[union-attr]
    assert len(texts(made(folder, tmp_path, rows[0]))) == 2


REFUSED: list[tuple[dict[str, Any], dict[str, Any], str]] = [
    ({"pack": True}, {}, "data.pack=true is not offered with data.format=preference; set it to false"),
    ({"streaming": True}, {}, "data.streaming=true is not offered with data.format=preference; set it to false"),
    ({"train_on": "all"}, {}, "data.train_on=all: data.format=preference compares answers, and no prompts"),
    ({"system": "Be brief."}, {}, "data.system has no place in data.format=preference: it is prompts and answers"),
    ({}, {"lora": None}, "model.lora=null: with data.format=preference the reference .* TRL's DPOTrainer within"),
    ({}, {"lora": None, "adapter": "some"}, "model.adapter='some': .* 'lt-finetune export'"),
    ({}, {"loss_average": "tokens"}, "model.loss_average=tokens: .* mean over pairs; set it to batches"),
    ({}, {"dropout": 0.1}, "model.dropout=0.1 would make the model differ from its reference; set it to 0"),
    ({}, {"lora": LoraArgs(dropout=0.1)}, "model.lora.dropout=0.1 would make"),
    ({}, {"lora": LoraArgs(bias="all")}, "model.lora.bias=all changes the reference .* set it to none"),
    ({}, {"dpo_beta": 0.0}, "model.dpo_beta=0.0 is not positive and finite; choose a number such as 0.1"),
    ({"format": "completion"}, {"dpo_beta": 0.2}, "model.dpo_beta=0.2 changes nothing with data that are no pairs"),
    ({"columns": {"chosen": "rejected"}}, {}, "rejected has no column, as 'rejected' is named for another role; name"),
    ({"format": "auto"}, {}, "holds preferences .*to learn to prefer .DPO., --data.format preference; to train on"),
]


@pytest.mark.parametrize(("settings", "model", "message"), REFUSED)
def test_what_pairs_are_not_offered_with(
    folder: str, tmp_path: Path, settings: dict[str, Any], model: dict[str, Any], message: str
) -> None:
    rows = [FORMS["texts"] | {"completion": "blue"}] * 3

    def train() -> None:
        data = made(folder, tmp_path, *rows, **settings)
        trainer(1).fit(FineTune(folder, **{"lora": LoraArgs(r=2)} | model), datamodule=data)

    with pytest.raises(ConfigError, match=message):
        train()


def test_dropout_of_the_model_itself_is_refused(tmp_path: Path) -> None:
    folder = str(tiny.model(tmp_path / "model", attention_dropout=0.1))
    module, data = FineTune(folder, lora=LoraArgs(r=2)), made(folder, tmp_path, *[FORMS["texts"]] * 3)
    with pytest.raises(
        ConfigError, match="model.dropout=null, with 0.1 in the model itself, would make .* set it to 0"
    ):
        trainer(1).fit(module, datamodule=data)
    run = trainer(1, limit_val_batches=0)
    run.fit(FineTune(folder, lora=LoraArgs(r=2), dropout=0.0), datamodule=data)
    assert run.callback_metrics["rewards/margins"] == 0


@pytest.mark.slow
def test_pairs_are_planned_without_weights_as_two_rows_each(
    folder: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(
        f"base: [configs/base.yaml, configs/lora.yaml, configs/data/preference.yaml]\nmodel: {{name: {folder}}}\n"
        "data: {batch_size: 3, max_length: 64}\n"
    )
    plan = ["plan", str(recipe), "--hardware", "rtx-3060-12gb", "--trainer.strategy.solver_time_limit", "1"]
    assert main([*plan, "--save", str(tmp_path / "plan.json")]) == 0
    made = Plan.load(tmp_path / "plan.json")
    assert (made.batch_size, made.sequence_length, made.forwards) == (6, 64, 1)
    assert "batch 6 x 64 tokens" in capsys.readouterr().out
    assert main([*plan, "--trainer.strategy.batch_size", "auto"]) != 0
    assert "trainer.strategy.batch_size=auto is not offered with" in " ".join(capsys.readouterr().err.split())


class Taken(FineTune):
    """Keeps the references of its pairs."""

    def on_train_start(self) -> None:
        self.taken: list[list[float]] = []

    def training_step(self, batch: dict[str, torch.Tensor], batch_idx: int) -> torch.Tensor:
        self.taken += batch[REFERENCE].view(2, -1).T.tolist()
        return super().training_step(batch, batch_idx)


@pytest.mark.parametrize(
    ("steps", "settings", "known"),
    [
        (2, {}, 4),
        (4, {}, 7),
        (5, {}, 7),
        (-1, {"limit_train_batches": 2, "max_epochs": 1}, 4),
        (5, {"limit_train_batches": 1, "max_epochs": 1}, 2),
        (1, {"limit_train_batches": 2, "accumulate_grad_batches": 2}, 4),
        pytest.param(3, {"overfit_batches": 1}, 2, marks=pytest.mark.filterwarnings("ignore:Total length")),
        (-1, {"limit_train_batches": 1, "max_epochs": 2}, None),
        (2, {"limit_train_batches": 1}, None),
    ],
)
def test_references_are_those_of_the_pairs_that_a_run_takes(
    folder: str, tmp_path: Path, steps: int, settings: dict[str, Any], known: int | None
) -> None:
    rows = [{"prompt": "p", "chosen": "c" * n, "rejected": "r" * (n % 3 + 1)} for n in range(1, 8)]
    data, module = made(folder, tmp_path, *rows, batch_size=2), Taken(folder, lora=LoraArgs(r=2))
    trainer(steps, limit_val_batches=0, **settings).fit(module, datamodule=data)
    assert data.reference is not None
    here = (~data.reference.isnan()).all(1)
    assert all(pair in data.reference[here].tolist() for pair in module.taken)
    if known is None:  # in one epoch or another, and those beside them in their batch of the first epoch
        assert 2 < int(here.sum()) < len(rows)
    else:
        assert int(here.sum()) == known


@pytest.mark.parametrize("change", ["answers", "labels"])
def test_references_are_not_those_of_other_pairs_with_as_many_tokens(chat: str, tmp_path: Path, change: str) -> None:
    row = {"prompt": [ASK], "chosen": [BLUE, ASK, GREEN], "rejected": [GREEN, ASK, BLUE]}
    before = made(chat, tmp_path, row, row)
    before.setup("fit")
    before.train_dataloader()
    if change == "answers":
        row = row | {"chosen": row["rejected"], "rejected": row["chosen"]}
    now = made(chat, tmp_path, row, row, train_on="last" if change == "labels" else "responses")
    now.setup("fit")
    now.load_state_dict(before.state_dict())
    with pytest.raises(
        ConfigError, match="the checksum of the pairs was .*, now it is .*; use the settings of the run"
    ):
        now.train_dataloader()


@pytest.mark.parametrize("color", [False, True])
def test_the_preview_shows_both_answers(
    chat: str, tmp_path: Path, color: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    made(chat, tmp_path, FORMS["messages"], FORMS["several turns"] | {"prompt": None})
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(
        f"base: [configs/base.yaml, configs/lora.yaml, configs/data/preference.yaml]\nmodel: {{name: {chat}}}\n"
        f"data: {{path: {tmp_path / 'pairs.jsonl'}, skip_bad_rows: true}}\n"
    )
    saved = tmp_path / ("preview.html" if color else "preview.txt")
    assert main(["data", str(recipe), "--save", str(saved)]) == 0
    out = capsys.readouterr().out
    assert re.search(r"row 1, chosen: \d+ tokens, 6 compared", out)
    assert re.search(r"row 1, rejected: \d+ tokens, 15 compared", out)
    assert "learned: chosen answers rather than rejected ones" in out
    assert "1 pairs of up to 1,024 tokens for each answer" in out
    assert "goes on in another sequence" not in out
    assert color or "«Green, mostly.</s>»" in out
    assert "Green" in saved.read_text()


def test_validation_by_the_command_line_speaks_of_pairs(
    folder: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    made(folder, tmp_path, *[{"prompt": "p", "chosen": "c" * n, "rejected": "r"} for n in range(1, 6)])
    monkeypatch.chdir(tmp_path)
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(
        f"base: [configs/base.yaml, configs/lora.yaml, configs/data/preference.yaml]\nmodel: {{name: {folder}}}\n"
        "trainer: {accelerator: cpu, strategy: {class_path: lt_offload.OffmateStrategy, init_args: {memory: 4MB}}}\n"
        f"data: {{path: {tmp_path / 'pairs.jsonl'}, max_length: 64}}\n"
    )
    assert main(["validate", str(recipe)]) == 0
    out = capsys.readouterr().out
    assert "val_loss 0.693147  (rewards/chosen 0, rewards/rejected 0, rewards/accuracies 0, rewards/margins 0," in out
