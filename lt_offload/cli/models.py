"""Models by the names that people give: on the hub, of a folder or a file, or of a shipped architecture."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lt_offload.compat.hugging_face import NAME
from lt_offload.errors import ConfigError
from lt_offload.finetune import load
from lt_offload.finetune.quantize import stored_form
from lt_offload.finetune.weights.gguf import SMOLLM2, is_gguf
from lt_offload.replacing import write_text
from lt_offload.resources import is_dir, is_file, shipped_files, user_path
from lt_offload.suggest import did_you_mean

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

_VARIANT = re.compile(r"(-chat|-instruct|-base|-hf|-it|-pt)+$")


@dataclass(frozen=True, slots=True)
class NamedModel:
    """A model and its name."""

    name: str
    """The value of ``model.name``."""
    architecture: str
    """The name of a shipped architecture, or of the file to write."""
    config: PreTrainedConfig
    shipped: bool

    def save_architecture(self, path: Path) -> None:
        """Write the configuration to ``path``, without the defaults of its type."""
        values = self.config.to_diff_dict()
        write_text(path, json.dumps(values, indent=2, sort_keys=True) + "\n")

    def has_architecture_of(self, path: Path) -> bool:
        """Return whether the configuration in ``path`` is this one, whatever the model is called in it."""
        try:
            return _shape(load.load_config("", str(path))) == _shape(self.config)
        except ConfigError:  # no configuration at all
            return False


def _shape(config: PreTrainedConfig) -> dict[str, Any]:
    """Return the values of ``config`` as in a file, without the model's name."""
    values = json.loads(json.dumps(config.to_diff_dict()))
    return {key: value for key, value in values.items() if key != NAME}


def named(model: str) -> NamedModel:
    """Return the causal language model called ``model``; ``ConfigError`` if there is none, or it is of another kind."""
    located = _located(model)
    _check_causal(model, located.config)
    return located


def _located(model: str) -> NamedModel:
    path = user_path(model)
    if is_dir(path) or (is_file(path) and is_gguf(path)):
        return NamedModel(model, f"{_short(model)}.json", load.load_config(model), shipped=False)
    if is_file(path):
        config = load.load_config(model, str(path))
        name = str(path.parent) if path.name == "config.json" else str(config.name_or_path)
        if not name:
            raise ConfigError(
                f'new: {model} does not say which model it is of; add "_name_or_path": "NAME ON THE HUB" to it, '
                "or give the model's folder"
            )
        return NamedModel(name, f"{_short(name)}.json", config, shipped=False)
    shipped = shipped_files("configs/models", ".json")
    hubs = {name: str(json.loads(file.read_text(encoding="utf-8"))[NAME]) for name, file in shipped.items()}
    # Chat and base variants of a model have one shape: the description of one plans the other without a download.
    variants = {_without_variant(hub): name for name, hub in hubs.items()} | {SMOLLM2: "smollm2-135m"}
    architecture = model if model in shipped else variants.get(model, variants.get(_without_variant(model)))
    if architecture is not None:
        name = hubs.get(model, model)
        return NamedModel(name, architecture, load.load_config(name, architecture), shipped=True)
    try:
        return NamedModel(model, f"{_short(model)}.json", load.load_config(model), shipped=False)
    except ConfigError as error:
        hint = did_you_mean(model, [*hubs.values(), *shipped])
        raise ConfigError(
            f"new: {error}{hint or '; without the hub give a folder, a config.json or one of ' + ', '.join(shipped)}"
        ) from error


def _without_variant(name: str) -> str:
    """Return a name on the hub without endings about training, on which the shape does not depend."""
    return _VARIANT.sub("", name.lower())


def _short(name: str) -> str:
    """Return the last part of a model's name, as files are called."""
    path = user_path(name)
    return (path.resolve().name if is_dir(path) else path.stem if is_file(path) else name.rpartition("/")[2]).lower()


def _check_causal(model: str, config: PreTrainedConfig) -> None:
    """Raise ``ConfigError`` unless ``config`` is of a causal language model whose weights can be trained."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

    # The mapping alone is not enough: encoders such as BERT are in it, with a head that is not among their weights.
    auto_class: Any = MODEL_FOR_CAUSAL_LM_MAPPING.get(type(config), None)
    stated = config.architectures or []
    if auto_class is None or (stated and auto_class.__name__ not in stated):
        raise ConfigError(
            f"new: {model} is not a causal language model but {' or '.join(stated) or f'of type {config.model_type}'}; "
            "this package fine-tunes models that continue a text"
        )
    try:
        stored_form(config)
    except ConfigError as error:
        raise ConfigError(f"new: {model}: {error}") from None
