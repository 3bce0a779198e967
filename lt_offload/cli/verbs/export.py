"""``lt-finetune export``: a model folder that Hugging Face reads, adapters, or a GGUF file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from lt_offload.cli import recipes
from lt_offload.cli.app import App
from lt_offload.cli.verbs.check import check_early
from lt_offload.compat.hugging_face import set_name
from lt_offload.errors import ConfigError
from lt_offload.finetune import load
from lt_offload.finetune.export import ExportDtype, Format, check_target
from lt_offload.finetune.export import export as write
from lt_offload.finetune.module import FineTune
from lt_offload.finetune.unused import refuse_unused
from lt_offload.finetune.weights.gguf import Bits, check_writable
from lt_offload.finetune.weights.left_out import KEY
from lt_offload.strategy.checkpoint import files as checkpoint
from lt_offload.strategy.checkpoint import sums
from lt_offload.units import format_bytes, parse_bytes

_NAMES = {"hf": "model", "adapter": "adapter", "gguf": "model.gguf"}
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
        quantize: q8_0 writes the matrices of a GGUF file in 8 bits.
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
    check_early(app, ckpt_path, reads_data=False)
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
    else:  # layers of four bits take their scales out of the state themselves
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
    print(f"{written}: {_LOADED[format].format(size=_size(written), path=repr(str(written)), file=written)}")
    return 0


def _size(path: Path) -> str:
    """Return the size of a file, or of all files of a folder."""
    files = [path] if path.is_file() else [file for file in path.rglob("*") if file.is_file()]
    return format_bytes(sum(file.stat().st_size for file in files))


def _of_checkpoint(module: FineTune, content: dict[str, Any]) -> torch.nn.Module:
    """Return the model with the weights of a whole checkpoint; the pretrained ones are not loaded."""
    with torch.device("meta"):
        model = module.build(init="random")
    state = {name.removeprefix("model."): tensor for name, tensor in content["state_dict"].items()}
    model.load_state_dict(state, assign=True)
    base = load.base_of(model)
    # With assign each name has its own tensor from the file, which parts embeddings that were one.
    base.tie_weights()
    base.name_or_path = load.shown_name(module.name)
    set_name(base.config, base.name_or_path)
    if module.init == "pretrained":
        load.add_generation_config(base, module.name)
    return model
