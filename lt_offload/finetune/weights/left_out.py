"""Checkpoints of adapters without the frozen model under them, which the recipe loads anyway.

A checkpoint names the tensors that it leaves out, with dtypes, shapes and a digest of a few numbers of each. Loading it
takes them from the model, which must be the same one.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, MutableMapping
from copy import copy
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lt_offload.errors import ConfigError
from lt_offload.finetune.weights.vocabulary import has_grown
from lt_offload.units import dtype_name

KEY = "frozen_base"
"""The key of the left-out tensors in a checkpoint."""
_PREFIX = "model."
"""Beginning of names in a checkpoint: the module's attribute of its model."""
_SAMPLES = 64

Description = tuple[str, tuple[int, ...], str | None]
"""Dtype, shape and digest; None: pieces of stored weights, which a GPU may have rounded in another way."""


def describe(tensor: Tensor) -> Description:
    """Return the properties that tell ``tensor`` from another of the same name."""
    digest = None
    if tensor.is_floating_point():
        flat = tensor.detach().reshape(-1)
        # An odd step, as a power of two would see one column of most matrices only.
        few = flat[:: flat.numel() // _SAMPLES | 1].cpu().contiguous()
        digest = hashlib.sha256(few.view(torch.uint8).numpy().tobytes()).hexdigest()[:16]
    return dtype_name(tensor.dtype), tuple(tensor.shape), digest


def frozen_base(model: Any) -> dict[str, Description]:
    """Return the frozen tensors under the adapters of ``model``, which was just built, by names as in a checkpoint.

    Embeddings that have grown are left out: the new rows are drawn at random, and no other run has them.
    """
    base = model.get_base_model()
    drawn: set[int] = set()
    if has_grown(base):
        ends = [base.get_input_embeddings(), base.get_output_embeddings()]
        drawn = {id(parameter) for end in ends if end is not None for parameter in end.parameters()}
    return {
        _PREFIX + name: describe(parameter)
        for name, parameter in model.named_parameters(remove_duplicate=False)
        if not (parameter.requires_grad or parameter.is_meta or id(parameter) in drawn)
    }


def leave_out(
    checkpoint: dict[str, Any],
    model: nn.Module,
    base: Mapping[str, Description],
    *,
    name: str,
    optimizers: Iterable[Optimizer],
) -> None:
    """Take the unchanged tensors of ``base`` (:func:`frozen_base`) out of ``checkpoint``, and note which.

    Tensors that ``optimizers`` train, or have trained, stay in it.
    """
    state = checkpoint["state_dict"]
    # Parameters that an optimizer holds count as trained: a callback may have trained
    # one and frozen it again before this save.
    trained = {id(p) for optimizer in optimizers for group in optimizer.param_groups for p in group["params"]}
    frozen = {
        _PREFIX + name
        for name, parameter in model.named_parameters(remove_duplicate=False)
        if not parameter.requires_grad and id(parameter) not in trained
    }
    # A digest of some numbers is compared as well: a tensor that something else has written to stays in.
    out = {key: mine for key, mine in base.items() if key in frozen and key in state and describe(state[key]) == mine}
    if not out:
        return
    for key in out:
        del state[key]
    checkpoint[KEY] = {"model": name, "tensors": out}


def take_up(checkpoint: Mapping[str, Any], model: nn.Module, *, name: str) -> MutableMapping[str, Tensor]:
    """Return the state dictionary of ``checkpoint`` with the left-out tensors of ``model``; no copies are made.

    Raises ``ConfigError`` if the tensors of ``model``, which is called ``name``, differ; on meta only shapes are
    compared.
    """
    state: MutableMapping[str, Tensor] = checkpoint["state_dict"]
    if KEY not in checkpoint:
        return state
    base, tensors = checkpoint[KEY]["model"], checkpoint[KEY]["tensors"]
    mine = {_PREFIX + key: tensor for key, tensor in model.state_dict().items()}
    has = f"the checkpoint holds adapters without the model under them, model.name={base!r}"
    another = f"set model.name to the model that they were trained on ({base!r})"
    # Names and shapes first, which say more than numbers.
    for key, (_, shape, _) in tensors.items():
        if key not in mine:
            raise ConfigError(
                f"{has}; model.name={name!r} has no {key} with the present settings of model; use the config.yaml of "
                "its run folder as the recipe"
            )
        if (here := tuple(mine[key].shape)) != tuple(shape):
            raise ConfigError(
                f"{has}; {key} has shape {tuple(shape)} there and {here} in model.name={name!r}; {another}"
            )
    for key, (dtype, _, digest) in tensors.items():
        if mine[key].is_meta:  # some models have tensors in float32 whatever is asked for, which meta knows not
            continue
        my_dtype, _, my_digest = describe(mine[key])
        if my_dtype != dtype:
            raise ConfigError(
                f"{has}; {key} is {dtype} there and {my_dtype} here; set model.dtype and model.quantize as in that run"
            )
        if digest != my_digest:
            raise ConfigError(f"{has}; {key} has other numbers there than in model.name={name!r}; {another}")
    missing = {key: tensor for key, tensor in mine.items() if key not in state and key in tensors}
    whole = copy(state)  # with its attributes, which torch reads
    whole.update(missing)
    return whole
