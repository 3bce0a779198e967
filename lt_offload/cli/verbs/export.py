"""``lt-finetune export``: a model folder that Hugging Face reads, adapters, or a GGUF file.

Exporting needs one copy of the weights at most, and none that a checkpoint's file already is.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import nn

from lt_offload.cli import recipes
from lt_offload.cli.app import App
from lt_offload.compat.hugging_face import untie
from lt_offload.errors import ConfigError
from lt_offload.finetune import load
from lt_offload.finetune.module import FineTune
from lt_offload.finetune.terminal import clear
from lt_offload.finetune.unused import refuse_unused
from lt_offload.finetune.weights.gguf import Bits, check_writable, write_gguf
from lt_offload.finetune.weights.hub import is_full, number_of
from lt_offload.finetune.weights.left_out import KEY
from lt_offload.finetune.weights.vocabulary import has_grown, names_of_embeddings
from lt_offload.model.forms import is_stored, open_weights
from lt_offload.replacing import replacing
from lt_offload.resources import user_path
from lt_offload.strategy.checkpoint import files as checkpoint
from lt_offload.strategy.checkpoint import sums
from lt_offload.units import format_bytes, parse_bytes

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Format = Literal["hf", "adapter", "gguf"]
ExportDtype = Literal["float32", "bfloat16", "float16"]
GGUF_FILE = "model.gguf"
_NAMES = {"hf": "model", "adapter": "adapter", "gguf": GGUF_FILE}
_LOADED = {
    "hf": "Hugging Face folder, {size}; load it with AutoModelForCausalLM.from_pretrained({path})",
    "adapter": "adapters, {size}; load them with PeftModel.from_pretrained(model, {path})",
    "gguf": "GGUF file, {size}; load it with llama-cli -m {file}",
}
"""Messages about the written files, by their kind."""


def export(
    app: App,
    *,
    output: str | None = None,
    ckpt_path: str | None = None,
    format: Format | None = None,
    merge: bool = True,
    dtype: ExportDtype | None = None,
    quantize: Bits | None = None,
    max_shard_size: str = "5GB",
) -> int:
    """Write the model as a folder that Hugging Face's from_pretrained reads, as adapters, or as a GGUF file.

    Args:
        app: the settings.
        output: the folder, new or empty, or the name of a new GGUF file, e.g. model.gguf; if not given, model, adapter
            or model.gguf in the run folder, or here for a recipe.
        ckpt_path: checkpoint to export; if not given, the newest one of a run folder, else the pretrained model.
        format: hf, a folder with safetensors, tokenizer, chat template and generation settings; adapter, the adapters
            alone as peft reads them; gguf, one file for llama.cpp; if not given, gguf where output ends in .gguf, else
            hf.
        merge: merge adapters into the weights; if false, the adapters alone are written.
        dtype: of what is written, e.g. bfloat16; as it was trained if not given.
        quantize: q8_0 writes the matrices of a GGUF file in 8 bits; q4_1 and q4_0 in 4, but for embeddings and output.
        max_shard_size: of one file of a whole model's folder.
    """
    written_as = format or ("gguf" if output is not None and output.endswith(".gguf") else "hf")
    if not merge and written_as == "gguf":
        raise ConfigError("--format gguf holds whole models; leave out --merge false, or export --format adapter")
    format = written_as if merge else "adapter"
    if output is None:  # in its run folder, or named after the recipe in the working folder
        folder, name = app.recipe.parent, _NAMES[format]
        is_run = (folder / "checkpoints").is_dir()
        output = str(folder / name if is_run else f"{recipes.run_name(app.recipe)}-{name}")
    # Slips are noticed here; the export itself would notice them once the model is loaded, minutes later.
    target = check_target(output, format, dtype=dtype, quantize=quantize)
    parse_bytes(max_shard_size, setting="max_shard_size", least=1)
    if format == "adapter" and app.model.lora is None and app.model.adapter is None:
        raise ConfigError(
            f"--{'format adapter' if merge else 'merge false'}: the recipe has no adapters, neither model.lora nor "
            "model.adapter; leave the flag out to export the model"
        )
    if format != "hf":
        what = f"--format {format}" if merge else "--merge false, with which adapters are written, as one file"
        refuse_unused(export, "--", {"max_shard_size": max_shard_size}, what, instead="export a whole model as hf")
    if format == "gguf":
        config = load.load_config(app.model.name, app.model.architecture if app.model.init == "random" else None)
        check_writable(config, app.datamodule.tokenizer)
    content = None
    if ckpt_path is not None:
        content = checkpoint.load(ckpt_path, weights_only=True)
        # Only weights are checked: states of the optimizer may be most of a checkpoint, and are not exported.
        sums.check(Path(ckpt_path), content, only="state_dict")
    if content is None:
        model = app.model.build()
    elif app.model.quantize is None and KEY not in content:
        model = _of_checkpoint(app.model, content)
    else:
        app.model.configure_model()
        app.model.on_load_checkpoint(content)
        app.model.load_state_dict(content["state_dict"])
        assert app.model.model is not None
        model = app.model.model
    written = write(
        model,
        app.datamodule.tokenizer,
        target,
        format=format,
        dtype=dtype,
        max_shard_size=max_shard_size,
        quantize=quantize,
        ends=app.datamodule.encoder.ends,
    )
    files = [written] if written.is_file() else [file for file in written.rglob("*") if file.is_file()]
    size = sum(file.stat().st_size for file in files)
    clear()
    print(f"{written}: {_LOADED[format].format(size=format_bytes(size), path=repr(str(written)), file=written)}")
    return 0


def _of_checkpoint(module: FineTune, content: dict[str, Any]) -> torch.nn.Module:
    """Return the model with the weights of a whole checkpoint; the pretrained ones are not loaded."""
    with torch.device("meta"):
        model = module.build(init="random")
    state = {name.removeprefix("model."): tensor for name, tensor in content["state_dict"].items()}
    model.load_state_dict(state, assign=True)
    base = load.base_of(model)
    # With assign each name has its own tensor from the file, which parts embeddings that were one.
    base.tie_weights()
    load.named(base, module.name, pretrained=module.init == "pretrained")
    return model


def write(
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

    The settings are the flags of the verb. The weights of ``model``, a Hugging Face model, must be
    complete on the host; a stored base is written as what it stands for, in the dtype of the model. Answers end
    at ``ends``, too: the generation settings of a whole model's folder say so, so that other programs stop there.
    Raises ``ConfigError`` if there is something already, or it cannot be written in this format.
    """
    shard_bytes = parse_bytes(max_shard_size, setting="max_shard_size", least=1)
    target = check_target(folder, format, dtype=dtype, quantize=quantize)
    whole: Any = model
    if format == "adapter":
        config, base = next(iter(whole.peft_config.values())), load.base_of(whole)
        # Embeddings that grew are saved with the adapters, which may hold them anyway.
        held = set(names_of_embeddings(base)[:1]) & set(config.modules_to_save or ())
        with _appearing(target) as new:
            whole.save_pretrained(new, save_embedding_layers=has_grown(base) and not held)
            tokenizer.save_pretrained(new)
        return target
    if format == "gguf":
        check_writable(load.base_of(whole).config, tokenizer)
    with _to_generate(whole, ends):
        # This comes before adapters are merged, which have to be added to numbers that are open.
        if is_stored(whole):
            whole = open_weights(whole)
        if hasattr(whole, "merge_and_unload"):
            whole = whole.merge_and_unload()
        output, inputs = whole.get_output_embeddings(), whole.get_input_embeddings()
        tied = output is not None and whole.config.tie_word_embeddings
        if tied and output.weight is not inputs.weight and not torch.equal(output.weight, inputs.weight):
            whole.config.tie_word_embeddings = False  # adapters have parted them
            untie(whole)
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
        with replacing(target) as new:
            yield new
            if target.is_file():
                raise ConfigError(f"{str(target)!r} has appeared meanwhile; choose another name with --output")
    except Exception as error:
        if is_full(error):
            full = "the disk is full; make room, or choose another disk with --output"
            raise ConfigError(f"{target} was not written: {full}") from error
        number = number_of(error)
        if number is None and not isinstance(error, OSError):
            raise
        why = error if number is None else os.strerror(number)
        raise ConfigError(f"{str(target)!r} cannot be written: {why}; choose another one with --output") from error


@contextmanager
def _to_generate(model: Any, ends: Sequence[int]) -> Iterator[None]:
    """Let the settings allow a cache in generation, as before training, and say that answers end at ``ends``, too."""
    settings = getattr(model, "generation_config", None)
    before = getattr(settings, "eos_token_id", None)
    known = [] if before is None else [before] if isinstance(before, int) else list(before)
    with ExitStack() as undo:
        undo.callback(setattr, model.config, "use_cache", model.config.use_cache)
        model.config.use_cache = True
        if settings is not None and not set(ends) <= set(known):
            undo.callback(setattr, settings, "eos_token_id", before)
            settings.eos_token_id = list(dict.fromkeys([*known, *ends]))
        yield


def _cast(model: nn.Module, dtype: torch.dtype) -> None:
    for name, parameter in model.named_parameters():
        cast = parameter.data.to(dtype)
        if dtype == torch.float16 and not bool(torch.isfinite(cast).all()) and bool(torch.isfinite(parameter).all()):
            raise ConfigError(f"--dtype float16 cannot hold the values of {name}, which are too large; use bfloat16")
        parameter.data = cast
