"""What comes out of a fine-tuning: a Hugging Face folder."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import nn

from lt_offload.errors import ConfigError
from lt_offload.finetune.quantize import dequantized
from lt_offload.model.quantized import packed_layers

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def export(model: nn.Module, tokenizer: PreTrainedTokenizerBase, folder: str | Path, *, merge: bool = True) -> Path:
    """Write ``model`` and ``tokenizer`` as ``from_pretrained`` reads them, and return the folder.

    Args:
        model: a Hugging Face model, possibly with adapters; its weights must be complete on the host.
        tokenizer: the one it was trained with.
        folder: must not exist or be empty.
        merge: write adapters into the weights; if false, the adapters alone are written. No matter without adapters.
            A base of four bits is written as what it stands for, in the dtype of the model.

    Raises:
        ConfigError: if the folder has something in it.
    """
    target = check_target(folder)
    whole: Any = model
    if merge and hasattr(whole, "merge_and_unload"):
        if any(True for _ in packed_layers(whole)):
            whole = dequantized(whole)
        whole = whole.merge_and_unload()
    whole.save_pretrained(target)
    tokenizer.save_pretrained(target)
    return target


def check_target(folder: str | Path) -> Path:
    """Return ``folder``, which can be written to.

    Raises:
        ConfigError: if the folder has something in it.
    """
    target = Path(folder).expanduser()
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise ConfigError(f"{str(folder)!r} exists and is not an empty folder; choose another one with --output")
    return target
