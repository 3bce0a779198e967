"""Faults of a checkpoint that is not this run's: another kind of file, another model, another optimizer.

The errors here say so in one sentence, before torch or Lightning fail with errors of their own.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from lt_offload.errors import ConfigError

_SAFETENSORS = "a model's weights alone"


@contextmanager
def reading(path: Path) -> Iterator[None]:
    """Raise ``ConfigError`` for every error while the checkpoint file ``path`` is read."""
    what = f"checkpoint {str(path)!r}"
    if path.is_dir():
        raise ConfigError(f"{what} is a folder; give a .ckpt file that a Trainer has written")
    if path.suffix == ".safetensors" or _has_safetensors_header(path):
        raise ConfigError(
            f"{what} is a safetensors file, {_SAFETENSORS}: nothing to continue from; give its folder as the model "
            "(--model.name), or a .ckpt file that a Trainer has written"
        )
    try:
        yield
    except Exception as error:  # the readers of zip archives and pickles raise whatever broken bytes lead them to
        why = f"{type(error).__name__}: {' '.join(str(error).split('. ')[0].split())[:120]}"
        raise ConfigError(
            f"{what} cannot be read ({why}): it is incomplete, or no checkpoint; give a .ckpt file that a Trainer has "
            "written"
        ) from error


def _has_safetensors_header(path: Path) -> bool:
    with path.open("rb") as file:
        # The format begins with eight bytes that are the length of a header, which is JSON.
        head = file.read(9)
        file.seek(0, 2)
        return len(head) == 9 and head[8:] == b"{" and 0 < int.from_bytes(head[:8], "little") <= file.tell() - 8


def check_checkpoint(checkpoint: Any, path: str | Path) -> None:
    """Raise ``ConfigError`` unless ``checkpoint`` has the form that a Trainer writes."""
    what = f"checkpoint {str(path)!r}"
    if not isinstance(checkpoint, Mapping):
        raise ConfigError(f"{what} holds a {type(checkpoint).__name__}; give one that a Trainer has written")
    if "state_dict" not in checkpoint:
        tensors = sum(isinstance(value, Tensor) for value in checkpoint.values())
        kind = _SAFETENSORS if tensors else f"{', '.join(map(str, list(checkpoint)[:3])) or 'nothing'}"
        raise ConfigError(f"{what} holds {kind}, not the state of a training; give one that a Trainer has written")
    kinds = {"state_dict": Mapping, "loops": Mapping, "optimizer_states": list, "lr_schedulers": list}
    for key, expected in kinds.items():
        if key in checkpoint and not isinstance(checkpoint[key], expected):
            raise ConfigError(f"{what} is damaged: its {key!r} is a {type(checkpoint[key]).__name__}")


def check_weights(saved: Mapping[str, Any], expected: Mapping[str, Tensor], *, strict: bool = True) -> None:
    """Raise ``ConfigError`` if the weights ``saved`` are not those of the model whose state is ``expected``."""
    for name, tensor in saved.items():
        mine = expected.get(name)
        if isinstance(mine, Tensor) and getattr(tensor, "shape", None) != mine.shape:
            shape = tuple(getattr(tensor, "shape", ()))
            raise ConfigError(
                f"the checkpoint does not fit this model: {name} has shape {shape} there and {tuple(mine.shape)} here; "
                "use the config.yaml of its run folder as the recipe"
            )
    missing, alien = [n for n in expected if n not in saved], [n for n in saved if n not in expected]
    if strict and (missing or alien):
        name, where = (missing[0], "has no") if missing else (alien[0], "has a tensor that this model does not have:")
        raise ConfigError(
            f"the checkpoint does not fit this model or its adapters: it {where} {name} ({len(missing)} tensors are "
            f"missing, {len(alien)} are not in this model); use the config.yaml of its run folder as the recipe"
        )


def check_optimizer(optimizer: Optimizer, saved: Any) -> None:
    """Raise ``ConfigError`` if ``saved`` is not a state of such an ``optimizer`` over the same tensors."""
    kind = type(optimizer).__name__
    hint = "use the settings of its run (config.yaml in its folder)"
    groups = saved.get("param_groups") if isinstance(saved, Mapping) else None
    states = saved.get("state") if isinstance(saved, Mapping) else None
    if not isinstance(groups, list) or not isinstance(states, Mapping) or not all(map(_is_group, groups)):
        raise ConfigError(f"the checkpoint's state of the optimizer is damaged; {hint}")
    counts = [len(group["params"]) for group in groups]
    mine = [len(group["params"]) for group in optimizer.param_groups]
    if counts != mine:
        raise ConfigError(
            f"the checkpoint's optimizer has groups of {counts} tensors, {kind} has groups of {mine} here: another "
            f"model, other adapters or other groups; {hint}"
        )
    # A checkpoint does not name the class of its optimizer: the names of options tell one from another.
    saved_options, own = ({str(key) for group in each for key in group} for each in (groups, optimizer.param_groups))
    alien = sorted((saved_options ^ own) - _OF_SCHEDULERS)
    if alien:
        raise ConfigError(
            f"the checkpoint was written with another optimizer than {kind}: they differ in {', '.join(alien)}; {hint}"
        )
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    indices = [index for group in groups for index in group["params"]]
    for index, parameter in zip(indices, parameters, strict=True):
        _check_state(states.get(index, {}), parameter, f"the checkpoint's {kind} state of tensor {index}", hint)


_OF_SCHEDULERS = {"initial_lr", "swa_lr", "max_lr", "min_lr", "base_momentum", "max_momentum"}
"""Options that learning rate schedules put into groups, some of them in the middle of a run."""


@contextmanager
def loading_state(optimizer: Optimizer) -> Iterator[None]:
    """Raise ``ConfigError`` for an optimizer's errors about a state that it cannot take."""
    try:
        yield
    except (AttributeError, IndexError, KeyError, RuntimeError, TypeError, ValueError) as error:
        raise ConfigError(
            f"the checkpoint's state of {type(optimizer).__name__} cannot be loaded ({type(error).__name__}: "
            f"{' '.join(str(error).split())[:200]}); use the settings of its run (config.yaml in its folder)"
        ) from error


def _is_group(group: Any) -> bool:
    params = group.get("params") if isinstance(group, Mapping) else None
    return isinstance(params, list) and all(isinstance(index, int) for index in params)


def _check_state(state: Any, parameter: nn.Parameter, what: str, hint: str) -> None:
    if not isinstance(state, Mapping):
        raise ConfigError(f"{what} is damaged; {hint}")
    for key, value in state.items():
        # Adafactor keeps a row and a column; what is as long as the tensor must have its shape, but for counters of
        # steps, which have no dimensions beside a weight of one element, too.
        whole = isinstance(value, Tensor) and value.ndim and value.numel() >= parameter.numel()
        if whole and value.shape != parameter.shape:
            raise ConfigError(f"{what}: {key} has shape {tuple(value.shape)}, not {tuple(parameter.shape)}; {hint}")
