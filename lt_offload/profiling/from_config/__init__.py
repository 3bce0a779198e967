"""The profile of a model from its configuration alone: fake tensors for weights, a count of work for a clock.

Bytes come from the very code that measures real models; times are what the hardware's description allows, and are
labelled as estimates.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable, Mapping
from contextlib import ExitStack, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from lt_offload.arguments import checked, shown
from lt_offload.compat.hugging_face import is_known, one_sequence_per_row
from lt_offload.compat.torch import FakeTensorMode, buffers_of, parameters_of, reset_dynamo
from lt_offload.errors import ConfigError, InfeasibleError, first_line
from lt_offload.model import tiles
from lt_offload.model.blocks import Structure, find_blocks
from lt_offload.model.compiled import uncompiled
from lt_offload.model.forms import form_named, store_weights
from lt_offload.model.parts import check_micro_batches
from lt_offload.profiling.assemble import assemble
from lt_offload.profiling.from_config.compiled import compile_planned
from lt_offload.profiling.hardware import load_hardware
from lt_offload.profiling.measure import ran
from lt_offload.profiling.meters import Roofline
from lt_offload.profiling.optimizer import (
    AnyOptimizer,
    UpdateSizes,
    build_optimizer,
    estimate_optimizer,
    named_optimizer,
)
from lt_offload.profiling.step.first import FirstStep
from lt_offload.resources import is_dir, is_file, shipped_files
from lt_offload.schema.profile import Contention, HardwareProfile, Profile
from lt_offload.units import Budget, dtype_name, format_bytes, is_count

if TYPE_CHECKING:
    from transformers import PreTrainedConfig


@checked
def profile_config(
    config: str | Path | PreTrainedConfig,
    *,
    batch_size: int,
    sequence_length: int,
    dtype: str | torch.dtype = "float32",
    autocast: str | torch.dtype | None = None,
    hardware: str | Path | HardwareProfile,
    optimizer: AnyOptimizer = "adamw",
    lora: Mapping[str, Any] | None = None,
    quantize: str | None = None,
    padding: bool = True,
    packing: bool = False,
    blocks: str | None = None,
    micro_batches: int = 1,
    tile_tokens: int | None = None,
    compile_blocks: bool = False,
    prepare: Callable[[nn.Module], nn.Module] | None = None,
    loss: Callable[[nn.Module, dict[str, Tensor]], Tensor] | None = None,
    host_memory: str | int | float | None = None,
    on_progress: Callable[[str], None] | None = None,
) -> Profile:
    """Return the profile of a causal language model without its weights and without the machine it would run on.

    Args:
        config: a Hugging Face configuration, the name of a shipped one, a JSON file, or a folder with ``config.json``.
        batch_size: sequences per batch.
        sequence_length: tokens per sequence.
        dtype: of the weights: ``"float32"``, ``"bfloat16"`` or ``"float16"``, as text or as PyTorch has it.
        autocast: dtype that operations choose where they can do with less than that of the weights, as under
            ``Trainer(precision="bf16-mixed")``: ``"bfloat16"``; None: they compute in that of the weights.
        hardware: a machine, the name of a shipped description, or a YAML file.
        optimizer: ``adamw``, ``adam``, ``sgd`` (fused), ``adafactor``, or ``adamw8bit``, which keeps fp32 masters of
            bfloat16 weights, or what makes one from a list of parameters.
        lora: arguments of ``peft.LoraConfig``, e.g. ``{"r": 8, "target_modules": "all-linear"}``; None: all parameters
            are trained.
        quantize: storage form of the weights under ``lora``, as of :func:`lt_offload.store_weights`; None: all weights
            are of ``dtype``.
        padding: whether batches are padded, so that attention gets a mask.
        packing: whether sequences hold several documents, which positions that begin again tell apart, so that
            attention gets a mask of all pairs of tokens.
        blocks: name of the ``nn.ModuleList`` that holds the layers, e.g. ``"h"``; None: it is found.
        micro_batches: parts of the batch that go through each block in turn.
        tile_tokens: tokens at a time in what treats each on its own, as by :func:`lt_offload.tile_tokens`.
        compile_blocks: whether every layer is compiled by itself, ``layer.compile()``: what it saves is then what
            torch's compiler decides, and cheap operations between two costly ones are taken as one kernel. What
            ``torch.compile`` has compiled in this process is forgotten, as by ``profile``.
        prepare: takes the model, on meta, and returns the one that is trained, e.g. with parts of it frozen.
        loss: takes the model and a batch of ``input_ids`` and ``labels``, and returns the loss; None: the model's own.
        host_memory: RAM that training may take, ``"32GB"`` or bytes: what weights and states alone exceed is refused
            before the model is run. None: any.
        on_progress: is told what is being done.

    Raises:
        InfeasibleError: if weights and optimizer states take more than ``host_memory``.
        ConfigError: if the configuration, hardware, dtype, optimizer, sequence length, ``quantize``,
            ``micro_batches`` or ``tile_tokens`` cannot be used.
        ModelError: if the model has no block sequence, or asks for numbers, which only weights give.
    """
    say = on_progress or (lambda _message: None)
    machine = hardware if isinstance(hardware, HardwareProfile) else load_hardware(hardware)
    for setting, count in (("batch_size", batch_size), ("sequence_length", sequence_length)):
        if not is_count(count):
            raise ConfigError(f"{setting}={count!r} must be a whole number of at least 1")
    check_micro_batches(micro_batches)
    dtype, autocast = dtype_name(dtype), None if autocast is None else dtype_name(autocast)
    for setting, name in (("dtype", dtype), ("autocast", autocast)):
        if name is not None and name not in machine.flops_per_s:
            known = ", ".join(machine.flops_per_s)
            raise ConfigError(f"{setting}={name!r}: {machine.name} has figures for {known} only")
    if quantize is not None:
        form_named(quantize)
    if quantize is not None and lora is None and prepare is None:
        raise ConfigError(f"quantize={quantize!r} needs lora, e.g. {{'r': 8}}, as stored weights are never trained")
    factory, ram = named_optimizer(optimizer), Budget.of(host_memory, setting="host_memory", least=1).nbytes
    model_config = load_model_config(config)
    longest = getattr(model_config, "max_position_embeddings", None)
    if longest is not None and 0 < longest < sequence_length:  # XLNet has -1: any length
        raise ConfigError(f"sequence_length={sequence_length} is longer than the model's {longest} positions")
    say("building the model without weights")
    model = _build(model_config, getattr(torch, dtype), lora, prepare, quantize)
    fakes = FakeTensorMode()
    with fakes:
        _make_fake(model)
        structure = find_blocks(model, blocks)
    made = build_optimizer(factory, [p for p in model.parameters() if p.requires_grad])
    sizes = UpdateSizes(made, torch.device("cpu"))
    if ram is not None:
        _check_ram(structure, sizes, machine, ram)
    with fakes, ExitStack() as stack:
        if compile_blocks:
            stack.callback(reset_dynamo)
            compile_planned(structure)
        if tile_tokens is not None:
            tiles.tile_tokens(model, tile_tokens, blocks=blocks)
        # Layers that see fewer tokens than a sequence has have a mask for that.
        text = model_config.get_text_config()
        windows = [getattr(text, name, None) for name in ("sliding_window", "attention_chunk_size")]
        windowed = any(window is not None and window <= sequence_length for window in windows)
        unmasked = not packing and (batch_size == 1 or not padding) and not windowed
        batch = _batch(batch_size, sequence_length, padding=padding and not unmasked, packing=packing)
        if unmasked:
            stack.enter_context(one_sequence_per_row())
        with Roofline(machine, unmasked=unmasked) as meter:
            say("running the model once")
            how: dict[str, Any] = {"meter": meter, "parts": micro_batches, "code": uncompiled, "say": say}
            first = partial(FirstStep, model, optimizer=None, device=torch.device("cpu"), **how)
            run = _run(model, autocast, loss or (lambda model, batch: model(**batch).loss))
            with ran(first, structure, lambda: nullcontext(dict(batch)), run) as step:
                measured = step.costs(micro_batches)
    updates = estimate_optimizer(made, machine)
    profile = assemble(model, batch, measured, sizes=sizes, updates=updates, hardware=machine)
    peak = machine.peak_flops_per_s.get(autocast or dtype, 0.0)
    # A copy reads or writes each byte in the host's memory once; an update is as fast as that memory, by its estimate.
    h2d, d2h = (
        min(1.0, rate / machine.host_memory_bytes_per_s) for rate in (machine.h2d_bytes_per_s, machine.d2h_bytes_per_s)
    )
    contention = Contention(h2d=h2d, d2h=d2h, host=1.0)
    return replace(profile, contention=contention, peak_flops_per_s=peak, estimated=True)


def _check_ram(structure: Structure, sizes: UpdateSizes, machine: HardwareProfile, host_memory: int) -> None:
    """Raise ``InfeasibleError`` if the host copies of weights and states take more than ``host_memory`` bytes."""
    needed = machine.process_bytes + sum(p.nbytes + sizes.state(p) for _, p in structure.tensors)
    if needed > host_memory:
        raise InfeasibleError(
            f"host_memory={format_bytes(host_memory)} is too small for the host copies of the parameters, which need "
            f"at least {format_bytes(needed)}",
            needed_host_bytes=needed,
        )


def _run(model: nn.Module, autocast: str | None, loss: Callable[[nn.Module, Any], Any]) -> Callable[[Any], Any]:
    def run(batch: Any) -> Any:
        # Lightning does not keep casts, either; fake tensors are on the CPU, whatever they stand for.
        dtype = getattr(torch, autocast or "bfloat16")
        with torch.autocast("cpu", dtype=dtype, enabled=autocast is not None, cache_enabled=False):
            return loss(model, batch)

    return run


def load_model_config(config: str | Path | PreTrainedConfig) -> PreTrainedConfig:
    """Return a Hugging Face configuration from a shipped name, a JSON file or a folder; or ``ConfigError``."""
    from transformers import AutoConfig, PreTrainedConfig

    if isinstance(config, PreTrainedConfig):
        return config
    if not isinstance(config, (str, Path)):
        raise ConfigError(f"config={shown(config)} must be a configuration of transformers, a name or a path")
    shipped = shipped_files("configs/models", ".json")
    path = shipped.get(str(config), Path(config))
    path = path / "config.json" if is_dir(path) else path
    if not is_file(path):
        raise ConfigError(
            f"config={str(config)!r} is no file, no folder with a config.json and not known; known are "
            f"{', '.join(shipped)}"
        )
    content: Any = None
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        loaded: PreTrainedConfig = AutoConfig.for_model(**content)
    except UnicodeDecodeError:
        raise ConfigError(
            f"config {str(path)!r} is no text; give a JSON file with a model's configuration, a folder with a "
            f"config.json or one of {', '.join(shipped)}"
        ) from None
    except (ValueError, TypeError) as error:
        if isinstance(content, dict) and "auto_map" in content:
            raise has_own_code(f"config {str(path)!r}") from None
        raise ConfigError(f"config {str(path)!r} is not a Hugging Face model configuration: {error}") from None
    return loaded


def has_own_code(what: str) -> ConfigError:
    """Return the refusal of ``what``, a model whose type only code beside it defines; such code is never run."""
    return ConfigError(
        f"{what} needs Python code that comes with it (auto_map), which is never run here; use a model of a type that "
        "transformers has, or, if you trust that code, a script of your own that loads the model with "
        'trust_remote_code=True and trains it by Trainer(strategy="offmate")'
    )


def _build(
    config: PreTrainedConfig,
    dtype: torch.dtype,
    lora: Mapping[str, Any] | None,
    prepare: Callable[[nn.Module], nn.Module] | None,
    quantize: str | None,
) -> nn.Module:
    """Return the model in training mode, without memory for its tensors."""
    from transformers import AutoModelForCausalLM

    auto: Any = AutoModelForCausalLM
    with torch.device("meta"):
        try:
            model: nn.Module = auto.from_config(config, dtype=dtype, trust_remote_code=False)
        except ValueError:
            if not is_known(auto, config) and hasattr(config, "auto_map"):
                raise has_own_code(f"a model of type {config.model_type!r}") from None
            raise
        if quantize is not None:
            store_weights(model, quantize)
        if lora is not None:
            model = _with_lora(model, lora)
        if prepare is not None:
            model = prepare(model)
    return model.train()


def _with_lora(model: nn.Module, arguments: Mapping[str, Any]) -> nn.Module:
    try:
        from peft import LoraConfig, get_peft_model
    except ImportError:
        raise ConfigError(f"lora={dict(arguments)!r} needs the package peft: pip install peft") from None
    with warnings.catch_warnings():  # peft asks transformers with a name that is going away
        warnings.simplefilter("ignore", FutureWarning)
        warnings.filterwarnings("ignore", r"The following \w+_pattern keys did not match any targeted module")
        try:
            adapted: nn.Module = get_peft_model(model, LoraConfig(**arguments), low_cpu_mem_usage=True)
        except (ValueError, TypeError) as error:  # no layer has one of the names, or peft no such argument
            raise ConfigError(f"lora={dict(arguments)!r}: {first_line(error)}") from None
    return adapted


def _make_fake(model: nn.Module) -> None:
    """Replace the tensors of ``model`` by fake ones on the CPU, tied ones by the same; under a ``FakeTensorMode``."""
    made: dict[int, Tensor] = {}
    for module in model.modules():
        for held in (parameters_of(module), buffers_of(module)):
            for name, tensor in held.items():
                if tensor is not None and id(tensor) not in made:
                    empty, weight = torch.empty(tensor.shape, dtype=tensor.dtype), isinstance(tensor, nn.Parameter)
                    # By identity, so that tied weights stay tied: a profile counts them once.
                    made[id(tensor)] = nn.Parameter(empty, requires_grad=tensor.requires_grad) if weight else empty
                held[name] = None if tensor is None else made[id(tensor)]


def _batch(batch_size: int, sequence_length: int, *, padding: bool, packing: bool) -> dict[str, Tensor]:
    ids = torch.zeros(batch_size, sequence_length, dtype=torch.long)
    batch = {"input_ids": ids, "labels": ids.clone()}
    if padding:
        batch["attention_mask"] = torch.ones_like(ids)
    if packing:
        batch["position_ids"] = torch.zeros_like(ids)  # their values do not count: models ask a fake tensor for none
    return batch
