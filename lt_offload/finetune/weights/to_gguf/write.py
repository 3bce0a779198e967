"""Writes a model as one GGUF file, tensor by tensor, with its tokenizer."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor

from lt_offload.errors import ConfigError
from lt_offload.finetune.weights.to_gguf.families import CONVERTER, Family, describe, family_of, more_tensors
from lt_offload.finetune.weights.to_gguf.tokens import describe_tokens, write_tokenizer

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Bits = Literal["q8_0"]
_BLOCK = 32
"""Numbers of a row that share a scale in Q8_0."""


def check_writable(config: Any, tokenizer: PreTrainedTokenizerBase) -> None:
    """Raise ``ConfigError`` if a model of ``config`` or ``tokenizer`` is of a kind that is not written here."""
    family_of(config)
    describe_tokens(tokenizer)
    _gguf()


def write_gguf(model: Any, tokenizer: PreTrainedTokenizerBase, path: Path, *, quantize: Bits | None = None) -> None:
    """Write ``model``, whose weights are of one dtype, and ``tokenizer`` to ``path``; vectors are written in float32.

    Args:
        model: a Hugging Face model.
        tokenizer: the one it was trained with.
        path: the file.
        quantize: write matrices in 8 bits, each 32 numbers of a row with a scale in float16. Those with rows that are
            no multiple of 32 stay as they are.

    Raises:
        ConfigError: see :func:`check_writable`; or if one of the model's tensors has no place in such a file.
    """
    gguf = _gguf()
    config, family = model.config, family_of(model.config)
    names = gguf.get_tensor_name_map(
        next(key for key, name in gguf.MODEL_ARCH_NAMES.items() if name == family.architecture),
        config.num_hidden_layers,
    )
    planned: dict[str, tuple[str, Tensor]] = {}
    # A tied output projection has no tensor of its own: readers take the embeddings.
    for name, tensor in model.named_parameters():
        spellings = (name, name.removeprefix(f"{model.base_model_prefix}."))
        found = (names.get_name(spelling, try_suffixes=(".weight", ".bias")) for spelling in spellings)
        target = next(filter(None, found), None)
        if target is None:
            raise ConfigError(f"--format gguf has no place for the tensor {name}; {CONVERTER}")
        planned[target] = name, tensor
    planned |= {target: ("", tensor) for target, tensor in more_tensors(config).items()}
    writer = gguf.GGUFWriter(path, family.architecture)
    if model.name_or_path:
        writer.add_name(Path(model.name_or_path).name)
    describe(writer, config, family)
    _say_type(writer, model.dtype, quantize)
    stops = getattr(getattr(model, "generation_config", None), "eos_token_id", None)
    write_tokenizer(writer, tokenizer, rows=config.vocab_size, stops=tuple(stops) if isinstance(stops, list) else ())
    # The names, shapes and kinds of all tensors come first in a file. So they are told before any
    # is converted, and each is converted when it is its turn: one in memory at a time.
    for target, (_, tensor) in planned.items():
        kind = _kind(tensor, quantize)
        block, size = gguf.GGML_QUANT_SIZES[kind]
        # the dtype counts for nothing where the kind is named
        writer.add_tensor_info(
            target, list(tensor.shape), torch.empty(0).numpy().dtype, tensor.numel() // block * size, raw_dtype=kind
        )
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    for name, tensor in planned.values():
        writer.write_tensor_data(_bytes(name, tensor, config, family, _kind(tensor, quantize)))
    writer.close()


def _say_type(writer: Any, dtype: torch.dtype, quantize: Bits | None) -> None:
    gguf = _gguf()
    types = gguf.LlamaFileType
    kinds = {torch.float32: types.ALL_F32, torch.float16: types.MOSTLY_F16, torch.bfloat16: types.MOSTLY_BF16}
    writer.add_file_type(kinds[dtype] if quantize is None else types.MOSTLY_Q8_0)
    if quantize is not None:
        writer.add_quantization_version(gguf.GGML_QUANT_VERSION)


def _kind(tensor: Tensor, quantize: Bits | None) -> Any:
    """Return what ``tensor`` is written as."""
    kinds = _gguf().GGMLQuantizationType
    if tensor.ndim == 1:
        return kinds.F32
    if quantize is not None and tensor.shape[-1] % _BLOCK == 0:
        return kinds.Q8_0
    return {torch.float32: kinds.F32, torch.float16: kinds.F16, torch.bfloat16: kinds.BF16}[tensor.dtype]


def _bytes(name: str, tensor: Tensor, config: Any, family: Family, kind: Any) -> Any:
    """Return the bytes of ``tensor`` as the file has them."""
    gguf = _gguf()
    values = family.stored(name, tensor.detach(), config)
    if kind == gguf.GGMLQuantizationType.Q8_0:
        return gguf.quants.quantize(values.float().contiguous().numpy(), kind)
    if values.ndim == 1:
        values = values.float()
    return values.contiguous().view(torch.uint8).numpy()


def _gguf() -> Any:
    try:
        import gguf
    except ImportError:
        raise ConfigError("--format gguf needs the package that writes it: pip install gguf") from None
    return gguf
