"""The error of a request that no plan fits: it names the budget, batch size or sequence length that would do."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from lt_offload.errors import InfeasibleError
from lt_offload.plan.iteration.memory import lasting_host_bytes
from lt_offload.plan.planners.baselines import fits, resident_decisions, smallest_for
from lt_offload.plan.planners.request import Allowed, Request, allowed_options
from lt_offload.schema.profile import BlockProfile, OptionProfile, Profile, TensorProfile
from lt_offload.units import format_bytes

_LONG, _TILE = 4096, 2048
"""A sequence of so many tokens is helped by tiles of so many, which are large enough for the rate of products."""


def explain_infeasible(request: Request) -> InfeasibleError:
    """Return the error for a request that no plan of its planner fits into."""
    profile, allowed, planner = request.profile, request.allowed, request.settings.planner
    length = f" and sequence_length={profile.sequence_length}" if profile.sequence_length > 1 else ""
    case = f"{profile.model} with batch_size={profile.batch_size}{length}"
    # The setting is the machine's, and plans count what one of its processes takes.
    count = profile.processes
    memory, ram = format_bytes(request.budget_bytes), format_bytes(count * request.host_budget_bytes)
    least = smallest_for(request)
    if least is None:
        needed_ram = count * smallest_ram(profile, allowed)
        return InfeasibleError(
            f"host_memory={ram} is too small for {case}: the host copies of the parameters, and what travels, need at "
            f"least host_memory={as_setting(needed_ram)}{_of_process(profile)}{_of_several(profile)}"
            + _smaller_precision(profile, allowed, request.host_budget_bytes),
            needed_host_bytes=needed_ram,
        )
    if planner == "resident":
        needed = min((nbytes for _, nbytes in resident_decisions(profile, allowed)), default=None)
        way = f"needs memory={as_setting(needed)}" if needed else "is impossible if activations may only be offloaded"
        return InfeasibleError(
            f"memory={memory} is too small for {case}: planner='resident' keeps everything on the device, "
            f"which {way}; planner='auto' needs less",
            needed_bytes=needed,
        )
    if least.device_bytes <= request.budget_bytes:
        return InfeasibleError(
            f"planner={planner!r} finds no plan for {case} in memory={memory} with host_memory={ram}; planner='auto' "
            "does",
            needed_bytes=least.device_bytes,
        )
    ways = [f"memory={as_setting(least.device_bytes)} is enough", *_smaller_inputs(request)]
    if not profile.tile_tokens and profile.sequence_length >= _LONG:
        whole = " with model.kernels=null" if profile.kernels else ""  # modules with kernels of their own stay whole
        ways.append(f"tile_tokens={_TILE}{whole} lets MLPs and norms take so many tokens at a time")
    off = [name for name in ("host_update", "activation_offload", "recompute") if not getattr(request.settings, name)]
    if off:
        ways.append(f"{' and '.join(f'{name}=True' for name in off)} may help")
    return InfeasibleError(
        f"memory={memory} is too small for {case} with host_memory={ram}: {'; '.join(ways)}",
        needed_bytes=least.device_bytes,
    )


def _of_process(profile: Profile) -> str:
    own = profile.processes * profile.hardware.process_bytes
    return f", the {format_bytes(own)} of Python, PyTorch and libraries included" if own else ""


def _of_several(profile: Profile) -> str:
    if profile.processes == 1:
        return ""
    what = "frozen weights and those that the host updates" if profile.common_updates else "frozen weights"
    return f", for {profile.processes} processes, which have {what} in common"


def as_setting(nbytes: int) -> str:
    """Return ``nbytes``, rounded up, as the settings accept it."""
    if nbytes >= 10**10 or not nbytes % 10**9:  # as people write sizes of RAM
        return f"{math.ceil(nbytes / 1e8) / 10:g}GB"
    return f"{math.ceil(nbytes / 1e6)}MB" if nbytes >= 10**8 else f"{math.ceil(nbytes / 1e3)}KB"


def smallest_ram(profile: Profile, allowed: Allowed) -> int:
    """Return the host bytes of a plan that has all states on the device and copies as few activations as possible."""
    options = tuple(min(options, key=lambda o: o.offload_bytes).name for options in allowed)
    return lasting_host_bytes(options, (), profile)


_LOW, _FLAGS = "bfloat16 weights and ", "lt-finetune: --model.dtype bfloat16"
_PRECISIONS = (
    ("fp32 weights (lt-finetune: --model.dtype float32)", "float32", 4, 8),
    (
        f"{_LOW}lt_offload.AdamW, which keeps fp32 masters ({_FLAGS} --model.master_weights true)",
        "bfloat16", 2, 12,
    ),
    (
        f"{_LOW}lt_offload.AdamW(stochastic_rounding=True) ({_FLAGS} --model.stochastic_rounding true)",
        "bfloat16", 2, 8,
    ),
    (
        f"{_LOW}8-bit moments ({_FLAGS} --model.stochastic_rounding true --model.optimizer adamw8bit)",
        "bfloat16", 2, 2,
    ),
)  # fmt: skip
"""Ways to train with Adam, the most precise first: bytes per parameter of the weight, and of the optimizer's state."""


def _smaller_precision(profile: Profile, allowed: Allowed, host_budget: int) -> str:
    """Return a precision that needs less RAM, as the end of a sentence: the best that fits, else the smallest."""
    trained = [tensor for tensor in profile.tensors if tensor.trainable]
    count = sum(math.prod(tensor.shape) for tensor in trained)
    if profile.optimizer.name not in ("Adam", "AdamW") or not count:
        return ""
    present = sum(2 * tensor.bytes + tensor.state_bytes for tensor in trained) / count
    hint = ""
    for name, dtype, weight, state in _PRECISIONS:
        # Only what takes less than now: weight and gradient, and the states.
        if 2 * weight + state >= present:
            continue
        tensors = tuple(_as(tensor, dtype, weight, state) for tensor in profile.tensors)
        needed = profile.processes * smallest_ram(replace(profile, tensors=tensors), allowed)
        hint = (
            f"; with {name}, {2 * weight + state} bytes per parameter, gradients included, instead of {present:.3g}, "
            f"host_memory={as_setting(needed)} is the least"
        )
        if needed <= profile.processes * host_budget:
            return hint
    return hint if len(trained) < len(profile.tensors) else f"{hint}; adapters (LoRA) need far less"


def _as(tensor: TensorProfile, dtype: str, weight: int, state: int) -> TensorProfile:
    if not tensor.trainable:
        return tensor
    count = math.prod(tensor.shape)
    return replace(tensor, dtype=dtype, bytes=count * weight, state_bytes=count * state, sum_bytes=0)


def _smaller_inputs(request: Request) -> Iterator[str]:
    """Yield the largest batch and sequence that fit, if activations are proportional to them."""
    profile = request.profile
    for name, present in (("batch_size", profile.batch_size), ("sequence_length", profile.sequence_length)):
        low, high = 0, present
        # Halving ends at a part of what was asked: the answer is an estimate.
        while high - low > max(1, present // 64):
            middle = (low + high) // 2
            part = _scaled(profile, middle / present)
            allowed = tuple(allowed_options(block, request.settings) for block in part.blocks)
            low, high = (middle, high) if fits(replace(request, profile=part, allowed=allowed)) else (low, middle)
        if low:
            yield f"or {name}={low} (estimated)"


def _scaled(profile: Profile, ratio: float) -> Profile:
    def sizes(part: BlockProfile | OptionProfile, *names: str) -> dict[str, Any]:
        return {name: int(getattr(part, name) * ratio) for name in names}

    # Gradients do not shrink, so that peaks with them are not known.
    unknown: dict[str, Any] = dict.fromkeys(("held_peak_bytes", "passing_peak_bytes", "before_loss_bytes"))
    of_option = "saved_bytes", "offload_bytes", "forward_peak_bytes", "backward_peak_bytes"
    blocks = []
    for block in profile.blocks:
        options = tuple(replace(option, **sizes(option, *of_option), **unknown) for option in block.options)
        blocks.append(replace(block, **sizes(block, "input_bytes", "output_bytes"), options=options))
    return replace(profile, blocks=tuple(blocks))
