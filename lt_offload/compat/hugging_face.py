"""Private names of transformers, datasets and TRL: the use of each, and the failure without it.

All of them are in the versions of constraints.txt; `make newest` runs tests that use those of transformers with the
newest. Libraries are imported where they are used: most programs need one of them, or none.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from copy import copy
from operator import attrgetter
from typing import Any

LOSS_FUNCTION = "_loss_function"
"""The attribute of a model that holds its loss, which is set there: the engine's loss stands in for it."""
NAME = "_name_or_path"
"""The key of a saved configuration under which its model's name is."""
STORED_IN_FOUR_BITS, STORED_IN_EIGHT_BITS = "_load_in_4bit", "_load_in_8bit"
"""Keys of a saved configuration of quantization, beside the public ones: older versions wrote only these."""
ACCELERATES_HOOK = "_hf_hook"
"""The attribute of a module that holds accelerate's hook around its forward: the one that offloads has the weights."""
optimizers_of: Callable[[Any], list[Any]] = attrgetter("_optimizers")
"""The optimizers that an Accelerator has prepared, in its wrappers: a model is trained by the one with its weights."""
CHUNKED_LOG_PROBS, FUSED_FORWARD = "_ChunkedLogProbFunction", "_fused_forward"
"""TRL's losses that read the head's weight themselves; they are given the device's copy of it."""


# -- models -----------------------------------------------------------------------------------------------------------


def class_of_model(auto: Any, config: Any) -> Any:
    """Return the class that ``auto`` would make a model of: weights that are read one by one are given to it."""
    from transformers.models.auto.auto_factory import _get_model_class

    find: Callable[[Any, Any], Any] = _get_model_class
    return find(config, auto._model_mapping)


def is_known(auto: Any, config: Any) -> bool:
    """Return whether transformers has a model for ``config``, of its own."""
    return type(config) in auto._model_mapping


def set_name(config: Any, name: str) -> None:
    """Let ``config`` name the source of its model instead of a folder of a cache."""
    config._name_or_path = name


def set_attention(config: Any, implementation: str) -> None:
    """Set the implementation of attention before there is a model whose public setter could check it."""
    config._attn_implementation = implementation


def untie(model: Any) -> None:
    """Let files hold all weights of ``model``, also those that were others under a second name before."""
    model._tied_weights_keys = None


def class_of_all_models() -> Any:
    """Return the class that models of transformers are of; None as long as there can be no such model."""
    modeling = sys.modules.get("transformers.modeling_utils")
    return None if modeling is None else modeling.PreTrainedModel


def saves_adapters_only(model: Any) -> bool:
    """Return whether ``save_pretrained`` of a model of transformers writes adapters, added by ``add_adapter``."""
    return bool(getattr(model, "_hf_peft_config_loaded", False))


def unsplittable(module: Any) -> Any:
    """Return the names of the classes that a model's author says are layers; None where nobody has said so."""
    # The class's own: an object has those of all models within it, too.
    names = getattr(type(module), "_no_split_modules", None)
    return None if isinstance(names, property) else names  # SentenceTransformer's tells of what it holds


def is_base(module: Any) -> bool:
    """Return whether ``module`` is a model of transformers itself, and not a wrapper of one."""
    return hasattr(module, "_no_split_modules")


def ignored_in_files(model: Any) -> Iterable[str]:
    """Return regular expressions of names that files may have beside the tensors of ``model``."""
    return model._keys_to_ignore_on_load_unexpected or ()


@contextmanager
def one_sequence_per_row() -> Iterator[None]:
    """Let models take each row for one sequence; of fake tensors they see no numbers, and would make masks for several.

    Such a mask has a number per pair of tokens, which no real batch of single sequences needs.
    """
    from transformers import masking_utils

    known = masking_utils.find_packed_sequence_indices
    masking_utils.find_packed_sequence_indices = lambda position_ids: None
    try:
        yield
    finally:
        masking_utils.find_packed_sequence_indices = known


_QUANTIZED = {"is_loaded_in_4bit", "is_quantized", "quantization_method", "hf_quantizer"}


def forget_quantization(model: Any) -> None:
    """Let ``model`` count as one of plain numbers: else transformers and peft refuse to move it or to write it so."""
    for module in model.modules():
        for attribute in _QUANTIZED & vars(module).keys():
            delattr(module, attribute)
        if hasattr(getattr(module, "config", None), "quantization_config"):
            del module.config.quantization_config


# -- data and Trainers ------------------------------------------------------------------------------------------------


def compile_template(text: str) -> Any:
    """Compile a chat template as transformers will; its mistakes are errors before training."""
    from transformers.utils.chat_template_utils import _compile_jinja_template

    return _compile_jinja_template(text)


def items_in_batch(trainer: Any, batches: list[Any], device: Any) -> Any:
    """Return the divisor of the losses of an update, so that a measured step has the loss of a real one."""
    return trainer._get_num_items_in_batch(batches, device)


# -- experts -----------------------------------------------------------------------------------------------------------

_STORED = "lt_offload_stored"
"""The name under which transformers finds the function of stored experts."""
_SHARED = "lt_offload_shared_config"


def experts_weights(module: Any) -> list[str]:
    """Return the names of the weights of a module of experts that computes as its configuration says; else none."""
    # Attributes that the decorator use_experts_implementation gives.
    if not all(hasattr(module, name) for name in ("has_gate", "is_transposed", "_apply_gate", "has_bias")):
        return []
    return ["gate_up_proj" if module.has_gate else "up_proj", "down_proj"]


def gated_by(module: Any, hidden: Any) -> Any:
    """Return what the gate of a module of experts makes of both halves of its first product."""
    return module._apply_gate(hidden)


def use_experts(module: Any, forward: Callable[..., Any]) -> None:
    """Let a module of experts compute by ``forward``; others with the same configuration go on as before."""
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

    ALL_EXPERTS_FUNCTIONS.register(_STORED, forward)
    if _SHARED not in vars(module):
        vars(module)[_SHARED] = module.config
        module.config = copy(module.config)
        # The setter would go through to configurations that others have, too.
        module.config._experts_implementation_internal = _STORED


def without_experts(module: Any) -> None:
    """Let a module of experts compute as the configuration of its model says."""
    module.config = vars(module).pop(_SHARED)
