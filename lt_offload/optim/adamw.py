"""AdamW for weights of any float dtype, which keeps fp32 masters of low-precision ones, or rounds them with noise.

The masters are ordinary optimizer state. So whoever moves or pages state tensors moves them as well, and bfloat16
weights and gradients are all that travels where an update runs in place, next to its fp32 state.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from typing_extensions import override

from lt_offload.compat.torch import foreach_add_
from lt_offload.errors import ConfigError
from lt_offload.optim import native, plain
from lt_offload.optim.plain import Entry, Options

_LOW = (torch.bfloat16, torch.float16)
_FOREIGN = ("fused", "foreach", "capturable", "differentiable")
"""Options of torch's AdamW that a checkpoint may bring and that choose an implementation there."""
_NUMBER = "_adamw_number"
"""Attribute of a parameter: its number among those of its optimizer. Stand-ins that are updated for it get it, too."""


def adamw_(
    params: Sequence[Tensor],
    grads: Sequence[Tensor],
    masters: Sequence[Tensor | None],
    exp_avgs: Sequence[Tensor],
    exp_avg_sqs: Sequence[Tensor],
    steps: Sequence[float],
    *,
    seeds: Sequence[int | None] | None = None,
    lr: float | Tensor,
    betas: tuple[float, float],
    eps: float,
    weight_decay: float,
    maximize: bool = False,
    grad_scale: float | Tensor = 1.0,
) -> None:
    """Update ``params`` in place by AdamW, all small ones together in one go.

    Args:
        params: weights of any float dtype, on any device.
        grads: their gradients, which stay as they are.
        masters: per weight the fp32 tensor to update in its place, from which it is then rounded (to nearest, ties to
            even); None: the weight itself is updated.
        exp_avgs: first moments, in the dtype of what is updated.
        exp_avg_sqs: second moments.
        steps: per weight the number of this update, 1 for the first.
        seeds: per bfloat16 weight without a master 32 bits from which the noise is made that rounds it; its moments are
            fp32 then. None: no weight is rounded so.
        lr: learning rate.
        betas: decay rates of the moments.
        eps: added to the root of the second moment.
        weight_decay: decoupled weight decay.
        maximize: go up the gradient instead of down.
        grad_scale: factor on all gradients, applied in the precision of the moments: for clipping by a norm,
            accumulation, or loss scaling.
    """
    options = Options(
        lr=lr,
        beta1=betas[0],
        beta2=betas[1],
        eps=eps,
        weight_decay=weight_decay,
        maximize=maximize,
        grad_scale=grad_scale,
    )
    rows = zip(params, grads, masters, exp_avgs, exp_avg_sqs, steps, seeds or [None] * len(params), strict=True)
    entries = [Entry(*row) for row in rows]
    with torch.no_grad():
        left = native.update(entries, options)
        plain.update(left, options)


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
    ) -> None:
        if fused is False:
            raise ConfigError("fused=False: lt_offload.AdamW is always fused; torch.optim.AdamW(foreach=...) is not")
        if isinstance(lr, Tensor) and lr.numel() != 1:
            raise ConfigError(f"lr has {lr.numel()} elements; a tensor must have one")
        defaults = {"lr": lr, "betas": tuple(betas), "eps": eps, "weight_decay": weight_decay, "maximize": maximize}
        defaults["stochastic_rounding"] = stochastic_rounding
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
        for parameter in group["params"]:
            if not parameter.is_floating_point():
                raise ConfigError(f"parameter of dtype {parameter.dtype}: AdamW updates float tensors")
            if parameter.dtype == torch.float16 and group["stochastic_rounding"]:
                raise ConfigError(
                    "stochastic_rounding=True is for bfloat16 weights, not for torch.float16; leave it out for fp32 "
                    "masters, or load the model in bfloat16"
                )
        self._number_parameters()

    @override
    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        for group in self.param_groups:  # those of torch's AdamW lack it
            group.setdefault("stochastic_rounding", self.defaults["stochastic_rounding"])
        self._number_parameters()

    def _number_parameters(self) -> None:
        """Let each parameter know its number: copies of the optimizer may hold some of them only."""
        parameters = (parameter for group in self.param_groups for parameter in group["params"])
        for number, parameter in enumerate(parameters):
            setattr(parameter, _NUMBER, number)

    @override
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update all parameters that have a gradient.

        Args:
            closure: computes the loss anew and returns it.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        with torch.no_grad():
            for group in self.param_groups:
                self._update(group)
        return loss

    def _update(self, group: dict[str, Any]) -> None:
        parameters = [parameter for parameter in group["params"] if parameter.grad is not None]
        noisy = group["stochastic_rounding"]
        states = [self._state(parameter, noisy) for parameter in parameters]
        if not states:
            return
        foreach_add_([state["step"] for state in states], 1)
        adamw_(
            parameters,
            [parameter.grad for parameter in parameters],
            [state.get("master") for state in states],
            [state["exp_avg"] for state in states],
            [state["exp_avg_sq"] for state in states],
            [float(state["step"]) for state in states],
            seeds=[_seed(p, state) if noisy else None for p, state in zip(parameters, states, strict=True)],
            lr=group["lr"],
            betas=group["betas"],
            eps=group["eps"],
            weight_decay=group["weight_decay"],
            maximize=group["maximize"],
            grad_scale=self.grad_scale,
        )

    def _state(self, parameter: Tensor, noisy: bool) -> dict[str, Any]:
        """Return the state of ``parameter``, a new one before its first update."""
        assert parameter.grad is not None
        if parameter.grad.is_sparse:
            raise ConfigError("AdamW takes no sparse gradients; use Embedding(sparse=False), or torch.optim.SparseAdam")
        state: dict[str, Any] = self.state[parameter]
        if not state:
            dtype = _state_dtype(parameter)
            # As torch's AdamW has it, whose checkpoints have to fit.
            state["step"] = torch.zeros((), dtype=torch.float32)
            if dtype != parameter.dtype and not noisy:
                state["master"] = torch.empty_like(parameter, dtype=dtype).copy_(parameter)
            state["exp_avg"] = torch.zeros_like(parameter, dtype=dtype)
            state["exp_avg_sq"] = torch.zeros_like(parameter, dtype=dtype)
        elif state["exp_avg"].device != parameter.device:  # it was loaded while the parameter was elsewhere
            for name in state.keys() - {"step"}:
                state[name] = state[name].to(parameter.device)
        return state

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load what ``state_dict()`` returned, in its precision.

        Raises:
            ConfigError: if it is of weights of another precision, or of another kind of optimizer.
        """
        given: dict[str, Any] = {}
        noisy = [group["stochastic_rounding"] for group in self.param_groups]
        before = self.register_load_state_dict_pre_hook(lambda _, final: given.update(final))
        # By hooks, as torch casts states to the dtype of their weight in between; first, so that hooks of users see the
        # states in their precision.
        after = self.register_load_state_dict_post_hook(lambda _: self._restore(given, noisy), prepend=True)
        try:
            super().load_state_dict(state_dict)
        finally:
            before.remove()
            after.remove()

    def _restore(self, given: dict[str, Any], noisy: list[bool]) -> None:
        """Undo the cast of states to the dtype of their weight; keep what groups had as ``stochastic_rounding``."""
        indices = [index for group in given["param_groups"] for index in group["params"]]
        groups = list(zip(noisy, self.param_groups, strict=True))
        parameters = [(parameter, own) for own, group in groups for parameter in group["params"]]
        for own, group in groups:
            _refuse_amsgrad(group)
            group["stochastic_rounding"] = own
            for name in _FOREIGN:
                group.pop(name, None)
        for index, (parameter, own) in zip(indices, parameters, strict=True):
            saved = given["state"].get(index)
            if not saved:
                continue
            dtype = _state_dtype(parameter)
            if ("master" in saved) != (dtype != parameter.dtype and not own):
                held = "fp32 masters" if "master" in saved else "no fp32 masters"
                raise ConfigError(
                    f"the checkpoint has {held} for a weight that is {parameter.dtype} now, with "
                    f"stochastic_rounding={own}; load it into the optimizer and the dtype that it was saved with"
                )
            for name in saved.keys() - {"step"}:
                self.state[parameter][name] = saved[name].to(device=parameter.device, dtype=dtype)


def _seed(parameter: Tensor, state: dict[str, Any]) -> int | None:
    """Return the seed of the noise for the update that ``state`` has counted already; None: there is no noise."""
    if parameter.dtype != torch.bfloat16:
        return None
    key = f"{getattr(parameter, _NUMBER, 0)} {int(state['step'])}"
    return int.from_bytes(hashlib.blake2s(key.encode(), digest_size=4).digest(), "little")


def _state_dtype(parameter: Tensor) -> torch.dtype:
    return torch.float32 if parameter.dtype in _LOW else parameter.dtype


def _refuse_amsgrad(options: dict[str, Any]) -> None:
    if options.get("amsgrad"):
        raise ConfigError("amsgrad=True is not offered by lt_offload.AdamW; torch.optim.AdamW has it")
