"""Results of a fine-tuning: a Hugging Face folder, adapters, a GGUF file.

Exporting needs one copy of the weights at most, and none that a checkpoint's file already is.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import nn

from lt_offload.compat.hugging_face import untie
from lt_offload.errors import ConfigError
from lt_offload.finetune.load import base_of
from lt_offload.finetune.quantize import dequantized
from lt_offload.finetune.weights.gguf import Bits, check_writable, write_gguf
from lt_offload.finetune.weights.hub import explain_full_disk
from lt_offload.finetune.weights.vocabulary import has_grown
from lt_offload.model.quantized import packed_layers
from lt_offload.replacing import replacing
from lt_offload.resources import user_path
from lt_offload.units import parse_bytes

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Format = Literal["hf", "adapter", "gguf"]
ExportDtype = Literal["float32", "bfloat16", "float16"]
GGUF_FILE = "model.gguf"


def export(
    model: nn.Module,
    tokenizer: PreTrainedTokenizerBase,
    folder: str | Path,
    *,
    format: Format = "hf",
    dtype: ExportDtype | None = None,
    max_shard_size: str = "5GB",
    quantize: Bits | None = None,
    ends: Sequence[int] = (),
) -> Path:
    """Write ``model``, with its adapters merged, or its adapters alone, and ``tokenizer``, and return their path.

    The settings are the flags of ``lt-finetune export``. The weights of ``model``, a Hugging Face model, must be
    complete on the host; a base of four bits is written as what it stands for, in the dtype of the model. Answers end
    at ``ends``, too: the generation settings of a whole model's folder say so, so that other programs stop there.
    Raises ``ConfigError`` if there is something already, or it cannot be written in this format.
    """
    shard_bytes = parse_bytes(max_shard_size, setting="max_shard_size", least=1)
    target = check_target(folder, format, dtype=dtype, quantize=quantize)
    whole: Any = model
    if format == "adapter":
        with _appearing(target) as new:
            whole.save_pretrained(new, save_embedding_layers=_embeddings_changed(whole))
            tokenizer.save_pretrained(new)
        return target
    if format == "gguf":
        check_writable(base_of(whole).config, tokenizer)
    with _to_generate(whole, ends):
        # This comes before adapters are merged: a merge into four bits would round away most of what was learned.
        if any(True for _ in packed_layers(whole)):
            whole = dequantized(whole)
        if hasattr(whole, "merge_and_unload"):
            whole = whole.merge_and_unload()
        _untie_if_different(whole)
        if dtype is not None:
            _cast(whole, getattr(torch, dtype))
        with _appearing(target) as new:
            if format == "gguf":
                file = new if target.suffix == ".gguf" else new / GGUF_FILE
                file.parent.mkdir(exist_ok=True)
                write_gguf(whole, tokenizer, file, quantize=quantize)
            else:
                whole.save_pretrained(new, max_shard_size=shard_bytes)
                tokenizer.save_pretrained(new)
    return target / GGUF_FILE if format == "gguf" and target.is_dir() else target


def check_target(
    folder: str | Path, format: Format, *, dtype: ExportDtype | None = None, quantize: Bits | None = None
) -> Path:
    """Return the path of ``folder``, a file where it ends in ``.gguf``.

    Raises ``ConfigError`` if there is something already, it cannot be made, or ``format`` has no such settings.
    """
    target = user_path(folder)
    is_gguf_file = target.suffix == ".gguf"
    if format != "gguf" and is_gguf_file:
        raise ConfigError(
            f"--format {format} writes a folder, and {str(folder)!r} is the name of a GGUF file; leave the flag out, "
            "or name a folder with --output"
        )
    if format != "gguf" and quantize is not None:
        raise ConfigError(f"--quantize {quantize} is for GGUF files; name one with --output, e.g. model.gguf")
    if format == "adapter" and dtype is not None:
        raise ConfigError(f"--dtype {dtype} is for whole models; adapters are written in float32, as they are trained")
    if target.exists() and (is_gguf_file or not target.is_dir() or any(target.iterdir())):
        why = "exists" if is_gguf_file else "exists and is not an empty folder"
        raise ConfigError(f"{str(folder)!r} {why}; choose another name with --output")
    # The folder itself may have to be made; what counts is the first one above it that is there.
    above = next(path for path in target.absolute().parents if path.exists())
    if not above.is_dir() or not os.access(above, os.W_OK | os.X_OK):
        why = "is read-only for you" if above.is_dir() else "is no folder"
        raise ConfigError(f"{str(folder)!r} cannot be written: {above} {why}; choose another one with --output")
    return target


@contextmanager
def _appearing(target: Path) -> Iterator[Path]:
    """Yield a path to write to, which becomes ``target`` once all is written, and is removed after an error."""
    try:
        with (
            explain_full_disk(f"{target} was not written", "choose another disk with --output"),
            replacing(target) as new,
        ):
            yield new
            if target.is_file():
                raise ConfigError(f"{str(target)!r} has appeared meanwhile; choose another name with --output")
    except OSError as error:
        why = error.strerror or error
        raise ConfigError(f"{str(target)!r} cannot be written: {why}; choose another one with --output") from error


@contextmanager
def _to_generate(model: Any, ends: Sequence[int]) -> Iterator[None]:
    """Let the settings allow a cache in generation, as before training, and say that answers end at ``ends``, too."""
    settings, cached = getattr(model, "generation_config", None), model.config.use_cache
    before = getattr(settings, "eos_token_id", None)
    known = [] if before is None else [before] if isinstance(before, int) else list(before)
    model.config.use_cache = True
    if settings is not None and not set(ends) <= set(known):
        settings.eos_token_id = list(dict.fromkeys([*known, *ends]))
    try:
        yield
    finally:
        model.config.use_cache = cached
        if settings is not None:
            settings.eos_token_id = before


def _embeddings_changed(model: Any) -> bool:
    """Return whether the embeddings grew and are no module that the adapters hold."""
    config = next(iter(model.peft_config.values()))
    base = model.get_base_model()
    names = [name.rpartition(".")[2] for name, module in base.named_modules() if module is base.get_input_embeddings()]
    return has_grown(base) and not set(names) & set(config.modules_to_save or ())


def _untie_if_different(model: Any) -> None:
    """Let the configuration say whether input and output embeddings are one tensor: adapters may have parted them."""
    output = model.get_output_embeddings()
    if output is not None and model.config.tie_word_embeddings:
        mine, other = output.weight, model.get_input_embeddings().weight
        if mine is not other and not torch.equal(mine, other):
            model.config.tie_word_embeddings = False
            untie(model)


def _cast(model: nn.Module, dtype: torch.dtype) -> None:
    """Cast the weights of ``model`` one by one."""
    for name, parameter in model.named_parameters():
        cast = parameter.data.to(dtype)
        if dtype == torch.float16 and not bool(torch.isfinite(cast).all()) and bool(torch.isfinite(parameter).all()):
            raise ConfigError(f"--dtype float16 cannot hold the values of {name}, which are too large; use bfloat16")
        parameter.data = cast
