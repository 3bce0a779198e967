"""Loops with accelerate, as scripts write them: each trains plainly, or within a budget."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState
from accelerate.utils import GradScalerKwargs
from torch import Tensor, nn
from torch.utils.data import DataLoader

import lt_offload
from scripts.attack.compared import Ended
from tests.parity.models import quantized
from tests.support import models

ROWS = 7
"""With two in a batch the last one is smaller, and the last window shorter."""
SMALL: dict[str, Any] = {"layers": 4}
LARGE: dict[str, Any] = {"layers": 6} | models.WIDE
"""For GPUs."""


@dataclass
class Script:
    """What a case has: its accelerator, and what it has seen."""

    folder: Path
    settings: dict[str, Any] | None
    """Those of ``accelerated``; None: it trains plainly."""
    sizes: dict[str, Any]
    options: dict[str, Any] = field(default_factory=dict)
    seen: dict[str, list[Any]] = field(default_factory=lambda: {"seen": []})
    accelerator: Any = None

    @property
    def within(self) -> Any:
        return nullcontext() if self.settings is None else lt_offload.accelerated(**self.settings)

    def start(self, **options: Any) -> Any:
        """Return a new accelerator."""
        AcceleratorState._reset_state(True)
        GradientState._reset_state()
        if options.get("mixed_precision") == "fp16":
            scale = GradScalerKwargs(2.0**30, backoff_factor=2.0**-14, growth_factor=2.0**14, growth_interval=1)
            options["kwargs_handlers"] = [scale]
        self.accelerator = Accelerator(cpu=not torch.cuda.is_available(), **options)
        return self.accelerator

    def model(self, **options: Any) -> Any:
        return models.build(**self.sizes | options)

    def notes(self, *values: Any) -> None:
        self.seen["seen"] += [value.detach().cpu().clone() if isinstance(value, Tensor) else value for value in values]

    def loader(self, batch_size: int = 2, *, shuffle: bool = True) -> DataLoader[Any]:
        batch = models.batch(nn.Linear(1, 1), batch_size=ROWS, sequence_length=12)
        rows = [{name: tensor[i] for name, tensor in batch.items()} for i in range(ROWS)]
        order = torch.Generator().manual_seed(3)
        return DataLoader(rows, batch_size=batch_size, shuffle=shuffle, generator=order)  # type: ignore[arg-type]

    def ended(self, model: nn.Module, optimizer: Any) -> Ended:
        loop = vars(self.accelerator).get("offmate")
        plan = None if loop is None else loop.plan
        while hasattr(optimizer, "optimizer"):
            optimizer = optimizer.optimizer
        return Ended.of(self.accelerator.unwrap_model(model), optimizer, self.seen, plan)


def adamw(model: nn.Module, **options: Any) -> torch.optim.AdamW:
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    return torch.optim.AdamW(trained, lr=1e-2, fused=True, **options)


def sgd(model: nn.Module) -> torch.optim.SGD:
    return torch.optim.SGD(model.parameters(), lr=1e-2, momentum=0.9)


def of_examples(
    script: Script,
    *,
    make: Callable[[nn.Module], torch.optim.Optimizer] = adamw,
    accumulate: int = 1,
    clip: float | None = None,
    evaluates: bool = False,
    shuffle: bool = True,
    tile: int | None = None,
    model: Callable[[Script], nn.Module] = Script.model,
    **options: Any,
) -> Ended:
    """The loop of accelerate's own examples; ``tile``: tokens at a time."""
    if script.settings is not None and tile is not None:
        script.settings = script.settings | {"tile_tokens": tile}
    with script.within:
        accelerator = script.start(gradient_accumulation_steps=accumulate, **options)
        made = model(script)
        if script.settings is None and tile is not None:
            lt_offload.tile_tokens(made, tile)
        optimizer: Any = make(made)
        schedule: Any = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.9**step)
        net, optimizer, loader, schedule = accelerator.prepare(
            made, optimizer, script.loader(shuffle=shuffle), schedule
        )
        for _epoch in range(2):
            for batch in loader:
                with accelerator.accumulate(net):
                    loss = net(**batch).loss
                    accelerator.backward(loss)
                    if clip is not None and accelerator.sync_gradients:
                        script.notes(accelerator.clip_grad_norm_(net.parameters(), clip).nan_to_num())
                    optimizer.step()
                    schedule.step()
                    optimizer.zero_grad()
                script.notes(accelerator.gather(loss), schedule.get_last_lr(), accelerator.sync_gradients)
                script.notes(accelerator.optimizer_step_was_skipped, scale_of(accelerator))
            if evaluates:
                evaluate(script, net)
        return script.ended(net, optimizer)


def scale_of(accelerator: Any) -> float:
    """Return the factor of the loss."""
    return 1.0 if accelerator.scaler is None else float(accelerator.scaler.get_scale())


def evaluate(script: Script, model: Any) -> None:
    model.eval()
    with torch.no_grad():
        for batch in script.accelerator.prepare_data_loader(script.loader(3)):
            script.notes(*script.accelerator.gather_for_metrics((model(**batch).loss,)))
    model.train()


def by_hand(script: Script) -> Ended:
    """Batches of one's own, ``loss.backward()``, groups, clipping by value, and no context around the loop."""
    accelerator = script.start()
    made = script.model(family="llama-tied")
    rest = [p for p in made.parameters() if p.ndim < 2]
    groups = [{"params": [p for p in made.parameters() if p.ndim > 1], "weight_decay": 0.1}, {"params": rest}]
    inner = torch.optim.AdamW(groups, lr=1e-3, fused=True)
    with script.within:
        model = accelerator.prepare(made)
        optimizer = accelerator.prepare(inner)
    try:
        for i in range(4):
            batch = {name: tensor.to(accelerator.device) for name, tensor in models.batch(made, seed=i).items()}
            loss = model(**batch).loss
            loss.backward()
            accelerator.clip_grad_value_(model.parameters(), 1e-3)
            optimizer.step()
            optimizer.zero_grad(set_to_none=False)
            script.notes(loss, *(weight.sum() for weight in model.parameters()))
        ended = script.ended(model, optimizer)
    finally:
        accelerator.end_training()
    if script.settings is not None:
        assert {parameter.device.type for parameter in made.parameters()} == {"cpu"}
    return ended


def with_dropout(script: Script) -> nn.Module:
    model: nn.Module = script.model(dropout=0.1)
    return model


def resumed(
    script: Script, *, model: Callable[[Script], nn.Module] = with_dropout, shuffle: bool = True, **options: Any
) -> Ended:
    """Saved in the middle of an epoch, and gone on with by another accelerator."""

    def run(epochs: int, *, goes_on: bool) -> Ended:
        accelerator = script.start(gradient_accumulation_steps=2, **options)
        made = model(script)
        optimizer: Any = adamw(made)
        schedule: Any = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.9**step)
        net, optimizer, loader, schedule = accelerator.prepare(
            made, optimizer, script.loader(shuffle=shuffle), schedule
        )
        if goes_on:
            accelerator.load_state(str(script.folder))
        for _epoch in range(epochs):
            net.train()
            batches = accelerator.skip_first_batches(loader, 2) if goes_on else loader
            for index, batch in enumerate(batches):
                with accelerator.accumulate(net):
                    loss = net(**batch).loss
                    accelerator.backward(loss)
                    optimizer.step()
                    schedule.step()
                    optimizer.zero_grad()
                script.notes(loss, scale_of(accelerator))
                if index == 1 and not goes_on:
                    accelerator.save_state(str(script.folder))
        ended = script.ended(net, optimizer)
        accelerator.free_memory()
        return ended

    with script.within:
        run(1, goes_on=False)
        return run(1, goes_on=True)


def with_lora(script: Script) -> nn.Module:
    model: nn.Module = script.model(lora=True, dropout=0.1, dtype=torch.bfloat16)
    return model


def with_stored_weights(script: Script) -> nn.Module:
    return quantized.adapted(form="fp8", lora_dropout=0.1, **script.sizes)


def diffusion(script: Script) -> Ended:
    """A transformer of diffusers beside a frozen encoder, with a moving average, as its text-to-image scripts."""
    from diffusers import SD3Transformer2DModel
    from diffusers.training_utils import EMAModel

    width = 256 if script.sizes is LARGE else 32
    torch.manual_seed(0)
    made = SD3Transformer2DModel(
        sample_size=8,
        patch_size=2,
        in_channels=4,
        num_layers=6 if script.sizes is LARGE else 3,
        attention_head_dim=8,
        num_attention_heads=width // 8,
        joint_attention_dim=32,
        caption_projection_dim=width,
        pooled_projection_dim=32,
        out_channels=4,
        pos_embed_max_size=16,
    )
    encoder = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 32)).requires_grad_(False)
    with script.within:
        accelerator = script.start(gradient_accumulation_steps=2)
        encoder = encoder.to(accelerator.device)
        optimizer: Any = adamw(made)
        model, optimizer = accelerator.prepare(made, optimizer)
        average = EMAModel(model.parameters(), decay=0.9)
        average.to(accelerator.device)
        for i in range(4):
            generator = torch.Generator().manual_seed(i)
            latents, noise = torch.randn(2, 2, 4, 8, 8, generator=generator).to(accelerator.device)
            text = encoder(torch.randn(2, 5, 16, generator=generator).to(accelerator.device))
            sigma = torch.rand(2, generator=generator).to(accelerator.device)
            with accelerator.accumulate(model):
                mixed = torch.lerp(latents, noise, sigma.view(-1, 1, 1, 1))
                out = model(
                    hidden_states=mixed,
                    timestep=1000 * sigma,
                    encoder_hidden_states=text,
                    pooled_projections=text.mean(1),
                    return_dict=False,
                )[0]
                loss = nn.functional.mse_loss(out.float(), (noise - latents).float())
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    script.notes(accelerator.clip_grad_norm_(model.parameters(), 1.0))
                optimizer.step()
                optimizer.zero_grad()
            if accelerator.sync_gradients:
                average.step(model.parameters())
            script.notes(loss)
        script.notes(*average.shadow_params)
        return script.ended(model, optimizer)


def two_lists(script: Script) -> Ended:
    """A transformer of diffusers with two lists of layers, whose steps are measured aside as they are added up."""
    from diffusers import FluxTransformer2DModel

    heads = {"attention_head_dim": 16, "num_attention_heads": 16 if script.sizes is LARGE else 2}
    widths = {"joint_attention_dim": 32, "pooled_projection_dim": 32, "in_channels": 4, "axes_dims_rope": (4, 4, 8)}
    torch.manual_seed(0)
    made = FluxTransformer2DModel(patch_size=1, num_layers=2, num_single_layers=4, **heads, **widths)
    with script.within:
        accelerator = script.start(gradient_accumulation_steps=2)
        optimizer: Any = adamw(made)
        model, optimizer = accelerator.prepare(made, optimizer)
        for i in range(4):
            generator = torch.Generator().manual_seed(i)
            image, text, pooled = (torch.randn(2, *size, generator=generator) for size in ((16, 4), (6, 32), (32,)))
            batch = {"hidden_states": image, "encoder_hidden_states": text, "pooled_projections": pooled}
            batch |= {"timestep": torch.rand(2, generator=generator)}
            batch |= {"img_ids": torch.zeros(16, 3), "txt_ids": torch.zeros(6, 3)}
            with accelerator.accumulate(model):
                out = model(**{name: x.to(accelerator.device) for name, x in batch.items()}, return_dict=False)[0]
                loss = out.float().pow(2).mean()
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    script.notes(accelerator.clip_grad_norm_(model.parameters(), 1.0))
                optimizer.step()
                optimizer.zero_grad()
            script.notes(loss)
        return script.ended(model, optimizer)


CASES: dict[str, Callable[[Script], Ended]] = {
    "every batch an update": of_examples,
    "accumulated, clipped, evaluated": partial(of_examples, accumulate=3, clip=0.1, evaluates=True),
    "mixed precision": partial(of_examples, accumulate=2, mixed_precision="bf16"),
    "in tiles": partial(of_examples, accumulate=2, clip=0.1, tile=5),
    "LoRA": partial(of_examples, accumulate=2, clip=0.1, shuffle=False, model=with_lora),
    "by hand": by_hand,
    "resumed": resumed,
    "stored weights, resumed": partial(resumed, model=with_stored_weights, shuffle=False),
    "diffusion": diffusion,
    "two lists": two_lists,
}
ON_A_GPU: dict[str, Callable[[Script], Ended]] = {
    f"fp16, {name}": partial(of_examples, accumulate=2, mixed_precision="fp16", **options)
    for name, options in {"clipped": {"clip": 0.1, "evaluates": True}, "not clipped": {}, "SGD": {"make": sgd}}.items()
} | {"fp16, resumed": partial(resumed, mixed_precision="fp16")}
"""What accelerate refuses on a CPU. Every second step is left out, beginning with the first."""


def train(case: str, folder: Path, sizes: dict[str, Any], settings: dict[str, Any] | None) -> Ended:
    """Train ``case`` plainly, or with the ``settings`` of ``accelerated``."""
    gc.collect()
    try:
        return (CASES | ON_A_GPU)[case](Script(folder, settings, sizes))
    finally:
        AcceleratorState._reset_state(True)
        GradientState._reset_state()


@contextmanager
def accelerator_of_ones_own(**options: Any) -> Iterator[Any]:
    """Yield an accelerator that no later one inherits from."""
    try:
        yield Script(Path(), None, SMALL).start(**options)
    finally:
        AcceleratorState._reset_state(True)
        GradientState._reset_state()
