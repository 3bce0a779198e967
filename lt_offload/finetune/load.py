"""Models and tokenizers by name: from the hub, from a folder, from an architecture alone, or from an installed package.

Every failure is a ``ConfigError`` that says what to do.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, Literal

from lt_offload.compat.hugging_face import class_of_model, set_name
from lt_offload.errors import ConfigError
from lt_offload.finetune.quantize import Quantize, stored_form
from lt_offload.finetune.weights.gguf import SMOLLM2, converted, is_gguf, source_of
from lt_offload.finetune.weights.hub import IN_EIGHT_BITS, in_words, lazy_tensors, safetensors_of, without_advice
from lt_offload.finetune.weights.stored import read_stored
from lt_offload.finetune.weights.vocabulary import check_tokens
from lt_offload.resources import is_dir, is_file, may_be_local, user_path
from lt_offload.suggest import some

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

Dtype = Literal["float32", "bfloat16"]
Attention = Literal["sdpa", "eager", "flash_attention_2", "flex_attention"]
Init = Literal["pretrained", "random"]

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

    Raises ``ConfigError`` if there is no such model or file.
    """
    from transformers import AutoConfig

    from lt_offload.profiling.from_config import load_model_config

    if architecture is None:
        with in_words(name):
            config: PreTrainedConfig = AutoConfig.from_pretrained(locate(name), trust_remote_code=False)
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
    quantize: Quantize | None = None,
) -> PreTrainedModel:
    """Return model ``name`` in host memory, in training mode, with the settings of ``FineTune``.

    With ``as_stored`` pretrained weights have the dtype of their file, so that it may stay where they are. With
    ``quantize`` experts, and weights whose files hold pieces, are read into that form. Raises ``ConfigError`` if the
    model cannot be had.
    """
    import torch

    if attention == "flash_attention_2" and find_spec("flash_attn") is None:
        raise ConfigError(
            "model.attention=flash_attention_2 needs a package that is not installed: pip install flash-attn "
            "--no-build-isolation; or set it to sdpa, which has flash attention of its own on a GPU"
        )
    if attention not in (None, "sdpa", "eager") and not torch.cuda.is_available():
        raise ConfigError(f"model.attention={attention} trains on a GPU only, and there is none; set it to sdpa")
    config = load_config(name, architecture if init == "random" else None)
    planned = load_config(name, architecture) if init == "pretrained" and architecture is not None else config
    for key in _SHAPE_KEYS:
        actual, expected = (getattr(one, key, getattr(one.get_text_config(), key, None)) for one in (config, planned))
        if actual != expected:
            raise ConfigError(
                f"model.name={name!r} has {key}={actual}, but the configuration in model.architecture has {expected}; "
                "set model.architecture=null or to the configuration of this model"
            )
    if dropout is not None:
        set_dropout(config, dropout)
    # Without this, every training call would keep keys and values. Generation says use_cache=True, an export resets it.
    config.use_cache = False
    options: dict[str, Any] = {"dtype": getattr(torch, dtype), "trust_remote_code": False}
    if as_stored and init == "pretrained":
        options["dtype"] = "auto"
        if hasattr(config, "quantization_config"):  # it would go to a GPU whole
            options["device_map"] = "cpu"
    if attention is not None:
        options["attn_implementation"] = attention
    with in_words(name):
        if init == "random":
            model = _auto().from_config(config, **options)
        else:
            stored = None if quantize is None else _stored(name, config, options, quantize, dtype)
            model = stored or _pretrained(name, config, options, as_stored)
    result: PreTrainedModel = model.train()
    return result


def _auto() -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM


def _pretrained(name: str, config: PreTrainedConfig, options: dict[str, Any], as_stored: bool) -> Any:
    """Return the model with its weights, each of them the only copy in memory that is not the system's cache."""
    where = locate(name)
    # Whatever does not fit is reported, and refused in our words by _check_complete.
    options = options | {"output_loading_info": True, "ignore_mismatched_sizes": True}
    files = [] if as_stored else safetensors_of(where)
    with without_advice():
        if files:
            # Without a name, transformers looks for no files: it takes
            # what it is given, as lazily as it reads its own.
            made = class_of_model(_auto(), config)
            model, report = made.from_pretrained(None, config=config, state_dict=lazy_tensors(files), **options)
        else:
            model, report = _auto().from_pretrained(where, config=config, **options)
            # As stored, they stay pages of the files: quantizing takes them one by one, never all in memory together.
            for tensor in () if as_stored else (*model.parameters(), *model.buffers()):
                if not tensor.untyped_storage().resizable():  # pages of the file
                    tensor.data = tensor.data.clone()
    _check_complete(name, report)
    return named(model, name)


def _stored(name: str, config: PreTrainedConfig, options: dict[str, Any], quantize: Quantize, dtype: Dtype) -> Any:
    """Return the model with weights that its files hold as pieces, or that are stored as they are read; None: others.

    Experts are read one by one: transformers would have all of a layer in memory as they are in the files.
    """
    import torch

    shipped, files = stored_form(config), safetensors_of(locate(name))
    if shipped == "nf4" or not files:
        return None
    kept = {key: value for key, value in options.items() if key == "attn_implementation"}
    empty: Any = import_module("accelerate")  # peft, which stored weights are trained with, needs it
    with empty.init_empty_weights():
        model: Any = _auto().from_config(config, dtype=getattr(torch, dtype), **kept)
    tensors = lazy_tensors(files, kinds=IN_EIGHT_BITS)
    if not read_stored(model, tensors, quantize, getattr(torch, dtype), shipped=shipped is not None):
        return None
    model.tie_weights()
    return named(model, name)


def named(model: Any, name: str, *, pretrained: bool = True) -> Any:
    """Return ``model`` with its name, and with its settings for generation, which are those of its ``pretrained`` one.

    To other programs the name of a converted model is its folder.
    """
    model.name_or_path = locate(name) if source_of(name) is not None else name
    set_name(model.config, model.name_or_path)
    if pretrained:
        from transformers import GenerationConfig

        with suppress(OSError):  # many have none, and one is made of their configuration
            model.generation_config = GenerationConfig.from_pretrained(locate(name))
    return model


def base_of(model: Any) -> Any:
    """Return the Hugging Face model in ``model``, which may have adapters."""
    return model.get_base_model() if hasattr(model, "get_base_model") else model


def _check_complete(name: str, report: dict[str, Any]) -> None:
    """Raise ``ConfigError`` unless the files of the model had all of its weights, and no other tensors."""
    if report["mismatched_keys"]:
        key, stored, configured = sorted(report["mismatched_keys"])[0]
        raise ConfigError(
            f"model {name!r}: {key} has shape {tuple(stored)} in its files and {tuple(configured)} by its config.json "
            f"({len(report['mismatched_keys'])} such tensors); they are of different models"
        )
    for kind, says in (("missing", "lacks"), ("unexpected", "has tensors that its configuration does not know:")):
        keys = sorted(report[f"{kind}_keys"])
        if keys:
            raise ConfigError(
                f"model {name!r} {says} {some(keys)}; its files and its config.json are of different models, or not "
                "complete"
            )
    if report.get("error_msgs"):
        raise ConfigError(f"model {name!r} cannot be loaded: {report['error_msgs'][0]}")


def load_tokenizer(name: str, new_tokens: Sequence[str] = ()) -> PreTrainedTokenizerBase:
    """Return the tokenizer of model ``name``, with ``new_tokens`` behind its own; ``ConfigError`` if there is none."""
    from transformers import AutoTokenizer

    with in_words(name):
        tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(
            locate(name, needs=None), trust_remote_code=False
        )
    check_tokens(new_tokens)
    tokenizer.add_tokens(list(new_tokens))
    return tokenizer


def locate(name: str, *, needs: str | None = "config.json") -> str:
    """Return the place of ``name`` for Hugging Face: a folder, which must hold ``needs``, or a name on the hub.

    Raises ``ConfigError`` if ``name`` is a path and there is no model at it.
    """
    check_name(name, needs=needs)
    if (source := source_of(name)) is not None:
        return str(converted(name, source))
    local = user_path(name)
    return str(local) if is_dir(local) else name


def check_name(name: str, *, needs: str | None = "config.json") -> None:
    """Raise ``ConfigError`` if ``name`` is a path and there is no model at it; nothing is converted for that."""
    if name == SMOLLM2:
        return
    local = user_path(name)
    if is_dir(local):
        if needs is not None and not (local / needs).is_file():
            held = sorted(path.name for path in local.iterdir() if is_gguf(path))
            if held:
                raise ConfigError(f"model folder {name!r} has no {needs}, but {held[0]}; give that file")
            raise ConfigError(f"model folder {name!r} has no {needs}; give the folder that save_pretrained() wrote")
        return
    if is_file(local) and is_gguf(local):
        return
    if is_file(local) or is_gguf(local) or may_be_local(name):
        raise ConfigError(
            f"model {name!r} is {'not a folder' if is_file(local) or not is_gguf(local) else 'no file here'}; give a "
            f"model folder, a GGUF file, a name on the hub, or {SMOLLM2!r}"
        )


def dropouts(config: PreTrainedConfig) -> dict[str, float]:
    """Return the dropout probabilities of ``config``, by their names there."""
    return {name: getattr(config, name) or 0.0 for name in _DROPOUTS if hasattr(config, name)}


def set_dropout(config: PreTrainedConfig, value: float) -> None:
    """Set every dropout probability of ``config``; raises ``ConfigError`` if the architecture has none."""
    present = dropouts(config)
    if not present:
        raise ConfigError(f"model.dropout={value}: a {config.model_type} model has no dropout; set it to null")
    for name in present:
        setattr(config, name, value)
