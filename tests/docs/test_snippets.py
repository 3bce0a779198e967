"""The Python code of the documentation runs, each block by itself, on a tiny model."""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import TrainingArguments

import lt_offload
from lt_offload.finetune.data.module import FineTuneData
from lt_offload.finetune.module import FineTune
from scripts.hf.runs import quiet
from tests.docs import pages
from tests.support import models, tiny
from tests.support.accelerated import accelerator_of_ones_own

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*tensorboardX.*", "ignore:.*smaller than the logging interval.*"),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model and a text."""
    made = tmp_path_factory.mktemp("docs")
    tiny.model(made / "model")
    (made / "text.txt").write_text("the quick brown fox jumps over the lazy dog. " * 60)
    return made


@pytest.fixture(scope="module", autouse=True)
def once() -> Iterator[None]:
    """Profiles of configurations and their plans are made once for all pages; most snippets plan the same."""
    known: dict[Any, Any] = {}
    quickly = partial(lt_offload.solve, solver_time_limit=1.0)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(lt_offload, "profile_config", _remembered(lt_offload.profile_config, known))
        patch.setattr(lt_offload, "solve", _remembered(quickly, known))
        yield


def _remembered(make: Any, known: dict[Any, Any]) -> Any:
    def made(*args: Any, **settings: Any) -> Any:
        plain = (str, int)
        key = make, *(one if isinstance(one, plain) else id(one) for one in args), *sorted(settings.items())
        if key not in known:
            known[key] = make(*args, **settings)
        return known[key]

    return made


@pytest.fixture
def names(folder: Path) -> dict[str, Any]:
    """What the snippets take for granted."""
    torch.manual_seed(0)
    model = models.build()
    data = {"path": str(folder / "text.txt"), "max_length": 32, "batch_size": 2}
    return {
        "module": FineTune(str(folder / "model")),
        "datamodule": FineTuneData(str(folder / "model"), **data),
        "model": model,
        "optimizer": torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True),
        "batches": [models.batch(model, seed=seed) for seed in (0, 0, 0)],
    }


def complete(block: pages.Block) -> bool:
    return block in SCRIPTS or block in OF_TRAINERS or block in OF_ACCELERATE


SCRIPTS = [block for block in pages.blocks("python") if "(L.LightningModule)" in block.text]
OF_TRAINERS = [block for block in pages.blocks("python") if "lt_offload.hf_trainer(" in block.text]

OF_ACCELERATE = [block for block in pages.blocks("python") if "lt_offload.accelerated(" in block.text]


def test_scripts_are_where_people_look_and_the_same() -> None:
    assert {"README.md", "docs/trainer.md"} <= {block.page for block in SCRIPTS}
    assert len({block.text for block in SCRIPTS}) == 1


@pytest.mark.long
def test_a_script_is_complete(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It runs as it is: with no name that it does not define, in an empty folder, without the hub."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    names: dict[str, Any] = {"__name__": "__main__"}
    exec(compile(SCRIPTS[0].text, str(SCRIPTS[0]), "exec"), names)
    assert names["trainer"].global_step == names["trainer"].max_steps
    assert list(tmp_path.glob("lightning_logs/*/plan.json"))


@pytest.mark.parametrize("block", OF_TRAINERS, ids=str)
def test_a_script_with_a_trainer_is_complete(
    block: pages.Block, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where a library is missing, so is its script; README's begins where there are model and data."""
    if "from trl" in block.text:
        pytest.importorskip("trl")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("CI", "1")  # TRL sends word of every Trainer elsewhere
    tiny.model(tmp_path / "my-model")
    names: dict[str, Any] = {}
    with quiet():
        if block.page == "README.md":
            ids = torch.arange(40).view(4, 10)
            names["rows"] = [{"input_ids": row, "labels": row} for row in ids]
            names["model"], names["arguments"] = models.build(), TrainingArguments("out", max_steps=2, use_cpu=True)
        exec(compile(block.text, str(block), "exec"), names)
    assert names["trainer"].state.global_step == names["trainer"].args.max_steps
    assert (tmp_path / "out/lt_offload/report.html").is_file()


def test_a_script_with_accelerate_is_complete(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    [block] = OF_ACCELERATE
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {}
    with accelerator_of_ones_own(), quiet():
        exec(compile(block.text, str(block), "exec"), names)
    assert names["optimizer"].optimizer.state[next(names["model"].parameters())]["step"] == 4
    assert (tmp_path / "checkpoint/model.safetensors").is_file()
    assert (tmp_path / "checkpoint/lt_offload.json").is_file()


@pytest.mark.parametrize("block", [block for block in pages.blocks("python") if not complete(block)], ids=str)
def test_code_runs(block: pages.Block, names: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    before = names["model"](**names["batches"][0]).loss.item()
    exec(compile(block.text, str(block), "exec"), names)
    if "trainer.fit(" in block.text:
        assert names["trainer"].global_step == names["trainer"].max_steps
    if "optimizer.step()" in block.text:
        assert names["model"](**names["batches"][0]).loss.item() < before
    if "plan" in names:
        assert names["plan"].predicted.device_peak_bytes <= names["plan"].budget_bytes


@pytest.mark.parametrize("block", pages.blocks("json"), ids=str)
def test_rows_are_data(block: pages.Block, folder: Path, tmp_path: Path) -> None:
    (tmp_path / "rows.json").write_text(json.dumps([json.loads(block.text)]))
    data = FineTuneData(
        str(folder / "model"),
        path=str(tmp_path / "rows.json"),
        format="preference" if "chosen" in block.text else "auto",
        template=None if "prompt" in block.text or "text" in block.text else "chatml",
        pack=False,
        validation_share=0,
        max_length=256,
        cache_dir=str(tmp_path / "cache"),
    )
    data.setup("fit")
    labels = next(iter(data.train_dataloader()))["labels"]
    assert (labels != -100).any()
