from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Trainer

from lt_offload.finetune.data.module import FineTuneData
from tests.support import tiny


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(tiny.model(tmp_path_factory.mktemp("model")))


@pytest.fixture
def text(tmp_path: Path) -> str:
    (tmp_path / "text.txt").write_text("the quick brown fox jumps over the lazy dog. " * 30)
    return str(tmp_path / "text.txt")


def data(folder: str, text: str, **settings: Any) -> FineTuneData:
    return FineTuneData(folder, path=text, **{"max_length": 32, "batch_size": 2, "validation_share": 0.2} | settings)


def trainer(steps: int, *callbacks: Any, **settings: Any) -> Trainer:
    quiet: dict[str, Any] = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    quiet |= {"enable_model_summary": False, "log_every_n_steps": 1, "accelerator": "cpu", "max_epochs": -1}
    quiet |= {"num_sanity_val_steps": 0, "limit_val_batches": 2}
    torch.manual_seed(0)
    return Trainer(max_steps=steps, callbacks=list(callbacks), **quiet | settings)
