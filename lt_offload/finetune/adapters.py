"""Parameters that are trained: adapters on a frozen model, as peft has them (LoRA, DoRA, rsLoRA), or chosen by name."""

from __future__ import annotations

import json
import re
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import nn

from lt_offload.errors import ConfigError, first_line
from lt_offload.resources import is_dir, user_path
from lt_offload.suggest import did_you_mean, nearest

if TYPE_CHECKING:
    from peft import LoraConfig

CONFIG = "adapter_config.json"
_OF_PEFT = {"alpha": "lora_alpha", "dropout": "lora_dropout", "dora": "use_dora", "rslora": "use_rslora"}
"""Peft's names of settings that have another one there."""
_WEIGHTS = ("adapter_model.safetensors", "adapter_model.bin")


@dataclass(frozen=True, kw_only=True, slots=True)
class LoraArgs:
    """Train low-rank adapters and leave the model itself as it is.

    Args:
        r: rank of the adapters.
        alpha: their scale is ``alpha / r``.
        dropout: probability of dropping an adapter's input.
        target_modules: the layers that get one: a list of names, or of ends of names; a regular expression that a
            whole name matches; or ``all-linear``, every one but the output projection.
        target_parameters: parameters of experts that get one beside these layers, by names or ends of names, e.g.
            ``[mlp.experts.gate_up_proj, mlp.experts.down_proj]``.
        dora: train the length of each column of the weights, too (DoRA).
        rslora: scale by ``alpha / sqrt(r)``, so that high ranks learn as fast as low ones (rsLoRA).
        modules_to_save: other modules that are trained in full and saved with the adapters, e.g. ``[lm_head]``.
        bias: biases to train: ``none``, ``lora_only`` (of the layers with adapters) or ``all``.
    """

    r: int = 8
    alpha: int = 16
    dropout: float = 0.0
    target_modules: list[str] | str = "all-linear"
    target_parameters: list[str] | None = None
    dora: bool = False
    rslora: bool = False
    modules_to_save: list[str] | None = None
    bias: Literal["none", "lora_only", "all"] = "none"

    def peft(self) -> dict[str, Any]:
        """Return the arguments of ``peft.LoraConfig``."""
        return {_OF_PEFT.get(name, name): value for name, value in asdict(self).items()} | {"task_type": "CAUSAL_LM"}


def check_adapters(lora: LoraArgs | None, adapter: str | None, chosen: Mapping[str, Sequence[str] | None]) -> None:
    """Raise ``ConfigError`` for settings that no model can have, or adapters beside parameters ``chosen`` by name."""
    if lora is not None and lora.r < 1:
        raise ConfigError(f"model.lora.r={lora.r} is too small; it must be at least 1")
    if lora is not None and lora.alpha < 1:
        raise ConfigError(f"model.lora.alpha={lora.alpha} is too small; it must be at least 1, e.g. twice model.lora.r")
    if lora is not None and not 0 <= lora.dropout < 1:
        raise ConfigError(f"model.lora.dropout={lora.dropout} is no probability below 1; set it to 0 or 0.05")
    if lora is not None and not lora.target_modules:
        raise ConfigError("model.lora.target_modules is empty; name layers, or set it to all-linear")
    if lora is not None and adapter is not None:
        raise ConfigError(
            f"model.adapter={adapter!r} brings its own settings; set model.lora=null, or make new "
            "adapters without model.adapter"
        )
    for setting, patterns in chosen.items():
        if patterns and (lora is not None or adapter is not None):
            raise ConfigError(
                f"model.{setting}={list(patterns)!r} has no use with adapters, beside which everything is frozen; "
                "choose with model.lora.target_modules, or set model.lora and model.adapter to null"
            )


def add_lora(model: nn.Module, args: LoraArgs) -> nn.Module:
    """Return ``model`` with new adapters, everything else frozen; where its tensors are on meta, theirs are, too.

    Raises:
        ConfigError: if peft is not installed, no layer has one of the names, or no bias is there to be trained.
    """
    peft = _peft("model.lora")
    _check_names(model, args)
    adapted = _adapted(model, peft.LoraConfig(**args.peft()), f"model.lora.target_modules={args.target_modules!r}")
    trained = (name for name, parameter in adapted.named_parameters() if parameter.requires_grad)
    if args.bias != "none" and not any(name.endswith(".bias") for name in trained):
        where = "the model has" if args.bias == "all" else "the layers with adapters have"
        raise ConfigError(f"model.lora.bias={args.bias} changes nothing, as {where} no biases; set it to none")
    return adapted


@dataclass(frozen=True, slots=True)
class SavedAdapters:
    """Adapters in a folder, as peft's ``save_pretrained`` writes them."""

    setting: str
    """``model.adapter`` and its value."""
    config: LoraConfig
    weights: Mapping[str, torch.Tensor]

    @classmethod
    def read(cls, folder: str) -> SavedAdapters:
        """Read the adapters in ``folder``; ``ConfigError`` if there are none, or none that can be read."""
        peft, path, what = _peft("model.adapter"), user_path(folder), f"model.adapter={folder!r}"
        if not is_dir(path):
            raise ConfigError(f"{what} is not a folder; give one that peft's save_pretrained() wrote")
        absent = [CONFIG] if not (path / CONFIG).is_file() else []
        absent += [] if any((path / name).is_file() for name in _WEIGHTS) else [_WEIGHTS[0]]
        if absent:
            raise ConfigError(
                f"{what} has no {' and no '.join(absent)}; give a folder that peft's save_pretrained() or "
                "'lt-finetune export --format adapter' wrote"
            )
        try:
            kind = json.loads((path / CONFIG).read_text(encoding="utf-8")).get("peft_type")
            config: LoraConfig | None = peft.LoraConfig.from_pretrained(str(path)) if kind == "LORA" else None
        except (OSError, ValueError, TypeError, AttributeError) as error:
            raise ConfigError(f"{what}: {CONFIG} cannot be read: {first_line(error)}") from None
        if config is None:
            raise ConfigError(f"{what} has adapters of type {kind!r}; only those of type 'LORA' can be trained here")
        # Saved adapters are meant for inference: with what their file says, peft would freeze them.
        config.inference_mode = False
        try:
            return cls(what, config, peft.load_peft_weights(str(path), device="cpu"))
        except Exception as error:  # the readers of both formats raise whatever broken bytes lead them to
            raise ConfigError(
                f"{what}: its weights cannot be read ({first_line(error)}); copy the folder again"
            ) from None

    def holds(self, module: str) -> bool:
        """Return whether the module with this last name has weights of its own here."""
        saved = any(name.endswith(f".{module}.weight") for name in self.weights)
        return saved or module in (self.config.modules_to_save or ())

    def add(self, model: nn.Module) -> nn.Module:
        """Return ``model`` with these adapters, to be trained on; ``ConfigError`` if they are of another model."""
        adapted = _adapted(model, self.config, self.setting)
        if any(parameter.is_meta for parameter in adapted.parameters()):
            return adapted  # without weights, names and shapes are enough
        try:
            result = _peft("model.adapter").set_peft_model_state_dict(adapted, dict(self.weights))
        except RuntimeError as error:
            lines = [line.strip() for line in str(error).splitlines() if "size mismatch" in line]
            raise ConfigError(f"{self.setting} is of another model: {(lines or [first_line(error)])[0]}") from None
        trained = {name for name, parameter in adapted.named_parameters() if parameter.requires_grad}
        missing = sorted(trained.intersection(result.missing_keys))
        if missing or result.unexpected_keys:
            name = missing[0] if missing else result.unexpected_keys[0]
            raise ConfigError(
                f"{self.setting} does not fit this model: {'it lacks' if missing else 'this model has no'} {name} "
                f"({len(missing)} tensors are missing, {len(result.unexpected_keys)} are unknown); set model.name to "
                f"the model that it was trained on, {self.config.base_model_name_or_path!r}"
            )
        return adapted


def _adapted(model: nn.Module, config: LoraConfig, what: str) -> nn.Module:
    from peft import get_peft_model

    on_meta = any(parameter.is_meta for parameter in model.parameters())
    if getattr(getattr(model, "config", None), "tie_word_embeddings", False):
        # peft trains a copy of each module to save: a copy of one of two tied embeddings alone would part them.
        config.ensure_weight_tying = bool(config.modules_to_save)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # peft asks transformers with a name that is going away
            # Patterns of parameters, which peft itself makes for fused experts, and looks up among modules.
            warnings.filterwarnings("ignore", r"The following \w+_pattern keys did not match any targeted module")
            warnings.filterwarnings("ignore", "The PEFT config's `base_model_name_or_path` was renamed")  # folders move
            adapted: nn.Module = get_peft_model(model, config, low_cpu_mem_usage=on_meta)
    except (ValueError, re.error) as error:
        raise ConfigError(f"{what}: {first_line(error)}") from error
    return adapted.train()


def _check_names(model: nn.Module, args: LoraArgs) -> None:
    """Raise ``ConfigError`` if a name of a list is no module's; peft says so only if none of them is."""
    known = [name for name, _ in model.named_modules() if name]
    lists = {
        "target_modules": args.target_modules if isinstance(args.target_modules, list) else [],
        "modules_to_save": args.modules_to_save or [],
    }
    for setting, names in lists.items():
        for name in names:
            if not any(one == name or one.endswith(f".{name}") for one in known):
                ends = sorted({one.rpartition(".")[2] for one in known if not one.rpartition(".")[2].isdigit()})
                hint = did_you_mean(name, ends, cutoff=0.5, most=1) or f"; there are {', '.join(ends)}"
                raise ConfigError(f"model.lora.{setting}={names!r}: no layer is called {name!r}{hint}")


def _peft(setting: str) -> Any:
    try:
        import peft
    except ImportError:
        raise ConfigError(f"{setting} needs the package peft: pip install peft") from None
    return peft


def choose_trained(model: nn.Module, *, freeze: Sequence[str] = (), train_only: Sequence[str] = ()) -> None:
    """Train only the parameters of ``model`` that ``train_only`` names, or all, without those that ``freeze`` names.

    A name is that of a parameter or of a module that it is in, with ``*`` for anything, or a regular expression that
    matches all of it. A tensor that has several names (tied embeddings) is meant by each of them. Raises
    ``ConfigError`` if a pattern names nothing, or nothing is left to be trained.
    """
    if train_only:
        chosen = _matching(model, train_only, "train_only")
        for parameter in model.parameters():
            parameter.requires_grad_(id(parameter) in chosen)
        for pattern in freeze:
            if not _matching(model, [pattern], "freeze") & chosen:
                raise ConfigError(
                    f"model.freeze={list(freeze)!r}: {pattern!r} changes nothing with "
                    f"model.train_only={list(train_only)!r}, which leaves it frozen; take it out"
                )
    frozen = _matching(model, freeze, "freeze")
    for parameter in model.parameters():
        if id(parameter) in frozen:
            parameter.requires_grad_(False)
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise ConfigError(f"model.freeze={list(freeze)!r} leaves nothing to be trained; take a pattern out")


def _matching(model: nn.Module, patterns: Sequence[str], setting: str) -> set[int]:
    """Return the ids of the parameters that one of ``patterns`` names."""
    # Every name of a tensor counts: tied embeddings are named once otherwise, and a pattern may mean the other name.
    named = list(model.named_parameters(remove_duplicate=False))
    chosen: set[int] = set()
    for pattern in patterns:
        ids = {id(parameter) for name, parameter in named if _matches(name, pattern)}
        if not ids:
            known = [*(name for name, _ in named), *(name for name, _ in model.named_modules())]
            near = nearest(pattern, sorted(known), cutoff=0.3, most=1)
            raise ConfigError(
                f"model.{setting}={list(patterns)!r}: no parameter is called {pattern!r}; the nearest is "
                f"{near[0] if near else named[0][0]!r}; a pattern is a name, a name with *, or a regular expression "
                "for all of it"
            )
        chosen |= ids
    return chosen


def _matches(name: str, pattern: str) -> bool:
    """Return whether ``pattern`` names a parameter, or a module that it is in."""
    if fnmatchcase(name, pattern) or fnmatchcase(name, f"{pattern}.*"):
        return True
    try:
        return re.fullmatch(pattern, name) is not None
    except re.error:
        return False
