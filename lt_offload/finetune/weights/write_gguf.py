"""Models of the Llama architecture as GGUF files, tensor by tensor, with their tokenizer.

The package ``gguf`` knows the format and the names of tensors. What differs between architectures (how heads are
rotated, which tokenizer is which) is llama.cpp's knowledge; other ones are left to its converter.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from lt_offload.errors import ConfigError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_CONVERTER = (
    "export a folder (--format hf) and convert it with llama.cpp's convert_hf_to_gguf.py, which knows more of them"
)
_ARCHITECTURE = "llama"
_LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+"
)
_ROTATED = ("q_proj", "k_proj")
"""llama.cpp rotates neighbouring elements of a head, transformers the first half with the second."""


def check_writable(model: Any, tokenizer: PreTrainedTokenizerBase) -> None:
    """Raise ``ConfigError`` if ``model`` or ``tokenizer`` is of a kind that is not written here."""
    config = model.config
    if config.model_type != _ARCHITECTURE:
        raise ConfigError(f"--format gguf writes llama models, and this is a {config.model_type} model; {_CONVERTER}")
    rope = getattr(config, "rope_parameters", None) or {}
    odd = [
        f"rope of type {rope['rope_type']}" if rope.get("rope_type", "default") != "default" else "",
        "biases in attention" if getattr(config, "attention_bias", False) else "",
        "biases in its MLPs" if getattr(config, "mlp_bias", False) else "",
    ]
    if any(odd):
        raise ConfigError(f"--format gguf does not write models with {next(filter(None, odd))}; {_CONVERTER}")
    _tokens(tokenizer)
    _gguf()


def write_gguf(model: Any, tokenizer: PreTrainedTokenizerBase, path: Path) -> None:
    """Write ``model``, whose weights are of one dtype, and ``tokenizer`` to ``path``; vectors are written in float32.

    Raises:
        ConfigError: see :func:`check_writable`.
    """
    check_writable(model, tokenizer)
    gguf = _gguf()
    config = model.config
    writer = gguf.GGUFWriter(path, _ARCHITECTURE)
    _describe(writer, config, model.dtype)
    _write_tokenizer(writer, tokenizer)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, config.num_hidden_layers)
    kinds = {torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16"}
    planned: list[tuple[str, Tensor]] = []
    # A tied output projection has no tensor of its own: readers take the embeddings.
    for name, tensor in model.named_parameters():
        target = names.get_name(name, try_suffixes=(".weight",))
        if target is None:
            raise ConfigError(f"--format gguf has no place for the tensor {name}; {_CONVERTER}")
        dtype = torch.float32 if tensor.ndim == 1 else tensor.dtype
        kind = gguf.GGMLQuantizationType[kinds[dtype]]
        nbytes = tensor.numel() * dtype.itemsize
        writer.add_tensor_info(target, list(tensor.shape), _numpy_dtype(), nbytes, raw_dtype=kind)
        planned.append((name, tensor))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    for name, tensor in planned:
        writer.write_tensor_data(_bytes(name, tensor, config).numpy())
    writer.close()


def _gguf() -> Any:
    try:
        import gguf
    except ImportError:
        raise ConfigError("--format gguf needs the package that writes it: pip install gguf") from None
    return gguf


def _numpy_dtype() -> Any:
    import numpy

    return numpy.dtype(numpy.float32)  # counts for nothing where the kind is named


def _bytes(name: str, tensor: Tensor, config: Any) -> Tensor:
    """Return the bytes of ``tensor`` as the format has them."""
    values = tensor.detach()
    if values.ndim == 1:
        values = values.float()
    for part, heads in zip(_ROTATED, (config.num_attention_heads, config.num_key_value_heads), strict=True):
        if f".{part}." in name:
            rows, columns = values.shape
            halves = values.reshape(heads, 2, rows // heads // 2, columns)
            values = halves.transpose(1, 2).reshape(rows, columns)
    return values.contiguous().view(torch.uint8)


def _describe(writer: Any, config: Any, dtype: torch.dtype) -> None:
    """Write what the architecture leaves open."""
    gguf = _gguf()
    heads = config.num_attention_heads
    head = getattr(config, "head_dim", None) or config.hidden_size // heads
    rope = getattr(config, "rope_parameters", None) or {}
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(head)
    writer.add_value_length(head)
    writer.add_rope_dimension_count(head)
    writer.add_rope_freq_base(float(rope.get("rope_theta", getattr(config, "rope_theta", 10000.0))))
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_vocab_size(config.vocab_size)
    types = gguf.LlamaFileType
    kinds = {torch.float32: types.ALL_F32, torch.float16: types.MOSTLY_F16, torch.bfloat16: types.MOSTLY_BF16}
    writer.add_file_type(kinds[dtype])


def _write_tokenizer(writer: Any, tokenizer: PreTrainedTokenizerBase) -> None:
    model, pre, content = _tokens(tokenizer)
    gguf = _gguf()
    vocabulary: dict[str, int] = tokenizer.get_vocab()
    added = {token["content"]: token["special"] for token in content["added_tokens"]}
    by_id = {index: token for token, index in vocabulary.items()}
    tokens = [by_id.get(index, f"[PAD{index}]") for index in range(max(by_id) + 1)]
    kinds = [
        _kind(token, index in by_id, added, content["model"], gguf.TokenType) for index, token in enumerate(tokens)
    ]
    merges = [merge if isinstance(merge, str) else " ".join(merge) for merge in content["model"]["merges"]]
    writer.add_tokenizer_model(model)
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(tokens)
    writer.add_token_types(kinds)
    if model == "llama" or not merges:  # llama.cpp joins what has the best score, others go by the order of merges
        ranks: dict[str, int] = {}
        for rank, merge in enumerate(merges):
            ranks.setdefault(merge.replace(" ", ""), rank)
        writer.add_token_scores([-float(ranks.get(token, 0)) for token in tokens])
    if merges:
        writer.add_token_merges(merges)
    for role in ("bos", "eos", "unk", "pad"):
        index = getattr(tokenizer, f"{role}_token_id")
        if index is not None:
            getattr(writer, f"add_{role}_token_id")(index)
    for role in ("bos", "eos"):
        if hasattr(tokenizer, f"add_{role}_token"):
            getattr(writer, f"add_add_{role}_token")(bool(getattr(tokenizer, f"add_{role}_token")))
    if isinstance(tokenizer.chat_template, str):
        writer.add_chat_template(tokenizer.chat_template)


def _kind(token: str, known: bool, added: dict[str, bool], model: dict[str, Any], types: Any) -> int:
    if not known:
        return int(types.UNUSED)
    if token in added:
        return int(types.CONTROL if added[token] else types.USER_DEFINED)
    if token == model.get("unk_token"):
        return int(types.UNKNOWN)
    if model.get("byte_fallback") and len(token) == 6 and token.startswith("<0x"):
        return int(types.BYTE)
    return int(types.NORMAL)


def _tokens(tokenizer: Any) -> tuple[str, str, dict[str, Any]]:
    """Return what GGUF calls the model and the first splitting of ``tokenizer``, and its own description.

    Raises:
        ConfigError: if it is none that is known here.
    """
    backend = getattr(tokenizer, "backend_tokenizer", None)
    content: dict[str, Any] = json.loads(backend.to_str()) if backend is not None else {}
    if content and content["model"]["type"] == "BPE":
        if content["model"].get("byte_fallback"):
            return "llama", "default", content
        splitting = content["pre_tokenizer"] or {}
        steps = [json.dumps(step) for step in splitting.get("pretokenizers", [splitting])]
        kinds = [json.loads(step)["type"] for step in steps if step != "{}"]
        if kinds == ["ByteLevel"]:
            return "gpt2", "gpt-2", content
        if kinds == ["Digits", "ByteLevel"] and json.loads(steps[0])["individual_digits"]:
            return "gpt2", "smollm", content
        if kinds == ["Split", "ByteLevel"] and json.loads(steps[0])["pattern"].get("Regex") == _LLAMA3:
            return "gpt2", "llama-bpe", content
    raise ConfigError(f"--format gguf does not know a tokenizer like this model's; {_CONVERTER}")
