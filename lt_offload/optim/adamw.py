"""AdamW for weights of any float dtype, which keeps fp32 masters of low-precision ones, or rounds them with noise.

Its moments may be kept in bfloat16 or in eight bits. The masters are ordinary optimizer state. So whoever moves or
pages state tensors moves them as well, and bfloat16 weights and gradients are all that travels where an update runs in
place, next to its state.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from typing import Any, Literal, get_args

import torch
from torch import Tensor
from torch.optim import Optimizer
from typing_extensions import override

from lt_offload.compat.torch import foreach_add_
from lt_offload.errors import ConfigError
from lt_offload.optim import blockwise, native, plain
from lt_offload.optim.plain import Entry, Options
from lt_offload.units import dtype_name

_LOW = (torch.bfloat16, torch.float16)
_FOREIGN = ("fused", "foreach", "capturable", "differentiable")
"""Options of torch's AdamW that a checkpoint may bring and that choose an implementation there."""
StateDtype = Literal["bfloat16", "8bit"]
_KEPT = ("stochastic_rounding", "state_dtype", "min_8bit_size")
"""Options of groups that say what states are, and that no checkpoint changes."""
_SCALES = {"exp_avg": "exp_avg_scale", "exp_avg_sq": "exp_avg_sq_scale"}
_NUMBER = "_adamw_number"
"""Attribute of a parameter: its number among those of its optimizer. Stand-ins that are updated for it get it, too."""


def options_of(group: Mapping[str, Any], grad_scale: float | Tensor) -> Options:
    """Return what an update needs of the options ``group``."""
    common = {name: group[name] for name in ("lr", "eps", "weight_decay", "maximize")}
    return Options(beta1=group["betas"][0], beta2=group["betas"][1], grad_scale=grad_scale, **common)


def entry_of(
    weight: Tensor, grad: Tensor, state: Mapping[str, Any], seeds: tuple[int | None, int] = (None, 0)
) -> Entry:
    """Return the update of ``weight`` that ``state`` has counted; ``seeds`` are of the weight and its moment."""
    return Entry(
        weight,
        grad,
        state.get("master"),
        state["exp_avg"],
        state["exp_avg_sq"],
        float(state["step"]),
        seeds[0],
        exp_avg_scale=state.get("exp_avg_scale"),
        exp_avg_sq_scale=state.get("exp_avg_sq_scale"),
        moment_seed=seeds[1],
    )


class AdamW(Optimizer):
    """AdamW whose updates of bfloat16 and float16 weights are not rounded away.

    For such a weight the state holds an fp32 ``master`` beside fp32 moments: the update is computed in fp32, and the
    weight is the master, rounded. On the host all of it is one pass over memory. Weights of other dtypes get the very
    numbers of ``torch.optim.AdamW(fused=True)``, and the same state.

    If you change a low-precision weight by other means after its first update, delete its state as well: the next
    update would bring the old value back.

    With ``stochastic_rounding`` a bfloat16 weight has no master, which saves four bytes per weight: the update is
    computed in fp32 from the weight itself, and rounded up or down at random so that it is right on average, however
    small the step (Gupta et al., 2015; for AdamW and bfloat16 Zamirai et al., Revisiting BFloat16 Training, 2020).
    The noise depends on the parameter's number in the optimizer, on the step and on the element, and on nothing else:
    the order of updates, where they run, and whether the run was resumed change no bit. There is nothing to seed.

    With ``state_dtype`` both moments take less memory; arithmetic is fp32 in any case, and masters are, too.
    ``"bfloat16"`` takes 4 instead of 8 bytes per weight: the first moment is rounded to nearest, the second at random,
    as it changes by less than bfloat16 shows and would never decrease otherwise. ``"8bit"`` takes 2: blocks of 256
    numbers have a scale each, by the definition of bitsandbytes' ``AdamW8bit`` (Dettmers et al., 8-bit Optimizers via
    Block-wise Quantization, 2022), and each number becomes the nearest of 256 values. Values and sizes of blocks are
    the same as there, last bits of the results are not. Tensors of less than ``min_8bit_size`` elements keep full
    moments.

    Args:
        params: parameters, or groups of them.
        lr: learning rate; a tensor of one element may be changed from outside.
        betas: decay rates of the moments.
        eps: added to the root of the second moment.
        weight_decay: decoupled weight decay.
        amsgrad: not offered; False.
        maximize: go up the gradient instead of down.
        fused: as for ``torch.optim.AdamW``; there is no other way here than the fused one.
        stochastic_rounding: round bfloat16 weights at random instead of keeping fp32 masters of them. Weights of full
            precision are updated as without it.
        state_dtype: what both moments are kept in: ``"bfloat16"`` (``torch.bfloat16``), or ``"8bit"``; None: fp32, or
            the dtype of weights of full precision. Groups may have their own.
        min_8bit_size: elements from which on a tensor has moments of 8 bits, as in bitsandbytes; more than 256.

    Raises:
        ConfigError: for arguments that are out of range or not offered.
    """

    grad_scale: float | Tensor = 1.0
    """Factor on all gradients in the updates to come, which leaves the gradients themselves alone. Set it where
    gradients are clipped by a norm, accumulated or scaled; a tensor is read when the update runs."""

    def __init__(
        self,
        params: Any,
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        amsgrad: bool = False,
        *,
        maximize: bool = False,
        fused: bool | None = None,
        stochastic_rounding: bool = False,
        state_dtype: StateDtype | torch.dtype | None = None,
        min_8bit_size: int = 4096,
    ) -> None:
        if fused is False:
            raise ConfigError("fused=False: lt_offload.AdamW is always fused; torch.optim.AdamW(foreach=...) is not")
        if isinstance(lr, Tensor) and lr.numel() != 1:
            raise ConfigError(f"lr has {lr.numel()} elements; a tensor must have one")
        defaults: dict[str, Any] = {
            "lr": lr,
            "betas": tuple(betas),
            "eps": eps,
            "weight_decay": weight_decay,
            "maximize": maximize,
        }
        defaults |= {
            "stochastic_rounding": stochastic_rounding,
            "state_dtype": state_dtype,
            "min_8bit_size": min_8bit_size,
        }
        _refuse_amsgrad({"amsgrad": amsgrad})
        super().__init__(params, defaults)

    @override
    def add_param_group(self, param_group: dict[str, Any]) -> None:
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        for name in ("lr", "eps", "weight_decay"):
            # Not ``< 0``, which would let NaN pass.
            if not group[name] >= 0:
                raise ConfigError(f"{name}={group[name]} must not be negative")
        if not all(0 <= beta < 1 for beta in group["betas"]):
            raise ConfigError(f"betas={group['betas']} must be at least 0 and less than 1")
        if isinstance(group["state_dtype"], torch.dtype):
            group["state_dtype"] = dtype_name(group["state_dtype"])
        if group["state_dtype"] not in (None, *get_args(StateDtype)):
            raise ConfigError(f"state_dtype={group['state_dtype']!r} is not offered; use 'bfloat16', '8bit' or None")
        if not group["min_8bit_size"] > blockwise.BLOCK:
            raise ConfigError(f"min_8bit_size={group['min_8bit_size']} must be more than a block, {blockwise.BLOCK}")
        for parameter in group["params"]:
            if not parameter.is_floating_point():
                raise ConfigError(f"parameter of dtype {parameter.dtype}: AdamW updates float tensors")
            if parameter.dtype == torch.float16 and group["stochastic_rounding"]:
                raise ConfigError(
                    "stochastic_rounding=True is for bfloat16 weights, not for torch.float16; leave it out for fp32 "
                    "masters, or load the model in bfloat16"
                )
            if group["state_dtype"] is not None and _wide_dtype(parameter) != torch.float32:
                raise ConfigError(
                    f"state_dtype={group['state_dtype']!r} is not for weights of {parameter.dtype}, whose moments "
                    "are not fp32; leave it out, or load the model in float32"
                )
        self._number_parameters()

    @override
    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        for group in self.param_groups:  # those of torch's AdamW lack them
            for name in _KEPT:
                group.setdefault(name, self.defaults[name])
        self._number_parameters()

    def _number_parameters(self) -> None:
        """Let each parameter know its number: copies of the optimizer may hold some of them only."""
        parameters = (parameter for group in self.param_groups for parameter in group["params"])
        for number, parameter in enumerate(parameters):
            setattr(parameter, _NUMBER, number)

    @override
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update all parameters that have a gradient; ``closure`` computes the loss anew and returns it."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        with torch.no_grad():
            for group in self.param_groups:
                self._update(group)
        return loss

    def scratch_bytes(self, parameter: Tensor) -> int:
        """Return the most bytes that an update of ``parameter`` on a device takes for a moment, beside its state."""
        group = next(group for group in self.param_groups if any(parameter is own for own in group["params"]))
        noisy = group["stochastic_rounding"] and parameter.dtype == torch.bfloat16
        return plain.scratch_bytes(parameter, _moment_dtype(parameter, group), noisy=noisy)

    def _update(self, group: dict[str, Any]) -> None:
        parameters = [parameter for parameter in group["params"] if parameter.grad is not None]
        states = [self._state(parameter, group) for parameter in parameters]
        if not states:
            return
        foreach_add_([state["step"] for state in states], 1)
        pairs = zip(parameters, states, strict=True)
        entries = [entry_of(p, p.grad, state, self.seeds(p, state, group)) for p, state in pairs]
        options = options_of(group, self.grad_scale)
        plain.update(native.update(entries, options), options)

    def _state(self, parameter: Tensor, group: dict[str, Any]) -> dict[str, Any]:
        assert parameter.grad is not None
        if parameter.grad.is_sparse:
            raise ConfigError("AdamW takes no sparse gradients; use Embedding(sparse=False), or torch.optim.SparseAdam")
        state: dict[str, Any] = self.state[parameter]
        if not state:
            state.update(self.new_state(parameter, group))
        elif state["exp_avg"].device != parameter.device:  # it was loaded while the parameter was elsewhere
            for name in state.keys() - {"step"}:
                state[name] = state[name].to(parameter.device)
        return state

    @staticmethod
    def new_state(parameter: Tensor, group: Mapping[str, Any]) -> dict[str, Any]:
        """Return the state of ``parameter`` before its first update, with the options ``group``."""
        # As torch's AdamW has it, whose checkpoints have to fit.
        state: dict[str, Any] = {"step": torch.zeros((), dtype=torch.float32)}
        if _has_master(parameter, group):
            state["master"] = torch.empty_like(parameter, dtype=torch.float32).copy_(parameter)
        for moment, scale in _SCALES.items():
            dtype = _moment_dtype(parameter, group)
            state[moment] = torch.zeros_like(parameter, dtype=dtype)
            if dtype == torch.uint8:
                # With a scale of 0 any byte is 0.
                state[scale] = torch.zeros(blockwise.blocks(parameter.numel()), device=parameter.device)
        return state

    @staticmethod
    def seeds(parameter: Tensor, state: Mapping[str, Any], group: Mapping[str, Any]) -> tuple[int | None, int]:
        """Return what the noise of the step that ``state`` has counted is made from: of the weight, of its moment."""
        noisy = group["stochastic_rounding"] and parameter.dtype == torch.bfloat16
        kept = group["state_dtype"] == "bfloat16"
        return _seed(parameter, state) if noisy else None, _seed(parameter, state, "exp_avg_sq") if kept else 0

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load what ``state_dict()`` returned, in its precision.

        Raises:
            ConfigError: if it is of weights of another precision, or of another kind of optimizer.
        """
        original: dict[str, Any] = {}
        kept = [{name: group[name] for name in _KEPT} for group in self.param_groups]
        before = self.register_load_state_dict_pre_hook(lambda _, final: original.update(final))
        # By hooks, as torch casts states to the dtype of their weight in between; first, so that hooks of users see the
        # states in their precision.
        after = self.register_load_state_dict_post_hook(lambda _: self._restore(original, kept), prepend=True)
        try:
            super().load_state_dict(state_dict)
        finally:
            before.remove()
            after.remove()

    def _restore(self, original: dict[str, Any], kept: list[dict[str, Any]]) -> None:
        """Undo the cast of states to the dtype of their weight; keep what groups had as options of states."""
        indices = [index for group in original["param_groups"] for index in group["params"]]
        parameters = [(parameter, group) for group in self.param_groups for parameter in group["params"]]
        for own, group in zip(kept, self.param_groups, strict=True):
            _refuse_amsgrad(group)
            group.update(own)
            for name in _FOREIGN:
                group.pop(name, None)
        for index, (parameter, group) in zip(indices, parameters, strict=True):
            saved = original["state"].get(index)
            if not saved:
                continue
            _check_saved(saved, parameter, group)
            for name in saved.keys() - {"step"}:
                dtype = _moment_dtype(parameter, group) if name in _SCALES else _wide_dtype(parameter)
                self.state[parameter][name] = saved[name].to(device=parameter.device, dtype=dtype)


def _check_saved(saved: dict[str, Any], parameter: Tensor, group: dict[str, Any]) -> None:
    """Raise ``ConfigError`` if the state ``saved`` is not of the kind that ``parameter`` has here."""
    rounding, wanted = group["stochastic_rounding"], group["state_dtype"]
    if ("master" in saved) != _has_master(parameter, group):
        held = "fp32 masters" if "master" in saved else "no fp32 masters"
        raise ConfigError(
            f"the checkpoint has {held} for a weight that is {parameter.dtype} now, with "
            f"stochastic_rounding={rounding}; load it into the optimizer and the dtype that it was saved with"
        )
    stored, dtype = saved["exp_avg"].dtype, _moment_dtype(parameter, group)
    # Full moments may have been of a weight of another precision, and are those of this one when they are cast.
    if stored != dtype and (torch.uint8 in (stored, dtype) or wanted is not None):
        raise ConfigError(
            f"the checkpoint has moments of {stored} for a weight of {parameter.numel()} elements, whose moments are "
            f"{dtype} with state_dtype={wanted!r} and min_8bit_size={group['min_8bit_size']}; load it with the "
            "settings that it was saved with"
        )


def _seed(parameter: Tensor, state: Mapping[str, Any], what: str = "") -> int:
    """Return the seed of the noise for the update that ``state`` has counted already."""
    key = f"{getattr(parameter, _NUMBER, 0)} {int(state['step'])}{what and f' {what}'}"
    return int.from_bytes(hashlib.blake2s(key.encode(), digest_size=4).digest(), "little")


def _has_master(parameter: Tensor, group: Mapping[str, Any]) -> bool:
    return parameter.dtype in _LOW and not group["stochastic_rounding"]


def _wide_dtype(parameter: Tensor) -> torch.dtype:
    return torch.float32 if parameter.dtype in _LOW else parameter.dtype


def _moment_dtype(parameter: Tensor, group: Mapping[str, Any]) -> torch.dtype:
    if group["state_dtype"] == "8bit" and parameter.numel() >= group["min_8bit_size"]:
        return torch.uint8
    return torch.bfloat16 if group["state_dtype"] == "bfloat16" else _wide_dtype(parameter)


def _refuse_amsgrad(options: dict[str, Any]) -> None:
    if options.get("amsgrad"):
        raise ConfigError("amsgrad=True is not offered by lt_offload.AdamW; torch.optim.AdamW has it")
