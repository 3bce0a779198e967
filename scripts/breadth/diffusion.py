"""Transformers of diffusers, tiny, trained as its scripts for text and images do: a network that takes noise away."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from tests.support.trainers import Stepping

ROWS, TOKENS, FRAMES, SIDE, STEPS = 2, 8, 2, 8, 3
"""Of a batch of latent images or clips and their texts; batches of a training."""
CHANNELS, WIDTH = 4, 32
PACKED = 4 * CHANNELS
"""Channels of a patch of 2 by 2, as the scripts pack them for some models."""
PATCHES = SIDE // 2

IMAGE, CLIP = (CHANNELS, SIDE, SIDE), (CHANNELS, FRAMES, SIDE, SIDE)
SEQUENCE = (PATCHES * PATCHES, PACKED)
TEXT: dict[str, tuple[int, ...]] = {"encoder_hidden_states": (TOKENS, WIDTH)}
POOLED: dict[str, tuple[int, ...]] = {"pooled_projections": (WIDTH,)}
HEADS: dict[str, Any] = {"num_attention_heads": 2, "attention_head_dim": 16, "num_layers": 4}
ROTARY: dict[str, Any] = HEADS | {"axes_dims_rope": (4, 4, 8), "joint_attention_dim": WIDTH, "in_channels": PACKED}


@dataclass(frozen=True)
class Case:
    """One architecture: its class, its sizes, and what it is called with."""

    name: str
    settings: dict[str, Any]
    latents: tuple[int, ...]
    """Shape of the latent variables of a row."""
    states: dict[str, tuple[int, ...]]
    """Shapes of what encoders of texts return for a row, by argument."""
    more: Callable[[], dict[str, Any]] = dict
    """Returns the other arguments."""
    scale: float = 1.0
    """By what a time between 0 and 1000 is divided."""


def _mask() -> Tensor:
    """Return which tokens of the texts there are, of two lengths."""
    return torch.arange(TOKENS)[None] < torch.tensor([[TOKENS], [TOKENS // 2]])


def _places(dimensions: int) -> dict[str, Any]:
    patches = torch.zeros(PATCHES, PATCHES, dimensions)
    patches[..., 1] += torch.arange(PATCHES)[:, None]
    patches[..., 2] += torch.arange(PATCHES)[None]
    return {"img_ids": patches.flatten(0, 1), "txt_ids": torch.zeros(TOKENS, dimensions)}


def _hunyuan_dit() -> dict[str, Any]:
    from diffusers.models.embeddings import get_2d_rotary_pos_embed

    corners = ((0, 0), (PATCHES, PATCHES))
    return {
        "text_embedding_mask": _mask().long(),
        "text_embedding_mask_t5": _mask().long(),
        "image_meta_size": torch.tensor([[1024, 1024, 1024, 1024, 0, 0]] * ROWS),
        "style": torch.zeros(ROWS, dtype=torch.long),
        "image_rotary_emb": get_2d_rotary_pos_embed(16, corners, (PATCHES, PATCHES), output_type="pt"),
    }


CASES: dict[str, Case] = {
    "cogvideox": Case(
        "CogVideoXTransformer3DModel",
        {
            **HEADS,
            **{"in_channels": CHANNELS, "out_channels": CHANNELS, "time_embed_dim": 16, "text_embed_dim": WIDTH},
            **{"sample_width": SIDE, "sample_height": SIDE, "sample_frames": 5, "max_text_seq_length": TOKENS},
        },
        (FRAMES, CHANNELS, SIDE, SIDE),
        TEXT,
    ),
    "flux": Case(
        "FluxTransformer2DModel",
        {**ROTARY, "num_single_layers": 4, "pooled_projection_dim": WIDTH},
        SEQUENCE,
        TEXT | POOLED,
        lambda: _places(3),
        scale=1000.0,
    ),
    "flux2": Case(
        "Flux2Transformer2DModel",
        {**ROTARY, "num_single_layers": 4, "axes_dims_rope": (4, 4, 4, 4), "timestep_guidance_channels": 16},
        SEQUENCE,
        TEXT,
        lambda: _places(4) | {"guidance": torch.full((ROWS,), 3.5)},
        scale=1000.0,
    ),
    "hunyuan-dit": Case(
        "HunyuanDiT2DModel",
        {
            **HEADS,
            **{"in_channels": CHANNELS, "patch_size": 2, "sample_size": SIDE, "hidden_size": WIDTH},
            **{"cross_attention_dim": WIDTH, "cross_attention_dim_t5": WIDTH, "pooled_projection_dim": 16},
            **{"text_len": TOKENS, "text_len_t5": TOKENS},
        },
        IMAGE,
        TEXT | {"encoder_hidden_states_t5": (TOKENS, WIDTH)},
        _hunyuan_dit,
    ),
    "hunyuan-video": Case(
        "HunyuanVideoTransformer3DModel",
        {
            **HEADS,
            **{"in_channels": CHANNELS, "out_channels": CHANNELS, "num_single_layers": 4, "rope_axes_dim": (4, 4, 8)},
            **{"text_embed_dim": WIDTH, "pooled_projection_dim": WIDTH},
        },
        CLIP,
        TEXT | POOLED,
        lambda: {"encoder_attention_mask": _mask(), "guidance": torch.full((ROWS,), 6000.0)},
    ),
    "ltx": Case(
        "LTXVideoTransformer3DModel",
        {
            **HEADS,
            **{"in_channels": CHANNELS, "out_channels": CHANNELS, "cross_attention_dim": WIDTH},
            "caption_channels": WIDTH,
        },
        (FRAMES * SIDE * SIDE, CHANNELS),
        TEXT,
        lambda: {
            "encoder_attention_mask": _mask(),
            "num_frames": FRAMES,
            "height": SIDE,
            "width": SIDE,
            "rope_interpolation_scale": (8 / 25, 32, 32),
        },
    ),
    "pixart": Case(
        "PixArtTransformer2DModel",
        {
            **HEADS,
            **{"cross_attention_dim": WIDTH, "caption_channels": WIDTH, "sample_size": SIDE},
        },
        IMAGE,
        TEXT,
        lambda: {
            "encoder_attention_mask": _mask().float(),
            "added_cond_kwargs": {"resolution": None, "aspect_ratio": None},
        },
    ),
    "qwen-image": Case(
        "QwenImageTransformer2DModel",
        {**ROTARY, "out_channels": CHANNELS},
        SEQUENCE,
        TEXT,
        lambda: {"encoder_hidden_states_mask": _mask(), "img_shapes": [[(1, PATCHES, PATCHES)]] * ROWS},
        scale=1000.0,
    ),
    "sana": Case(
        "SanaTransformer2DModel",
        {
            **HEADS,
            **{"in_channels": CHANNELS, "out_channels": CHANNELS, "sample_size": SIDE, "caption_channels": WIDTH},
            **{"num_cross_attention_heads": 2, "cross_attention_head_dim": 16, "cross_attention_dim": WIDTH},
        },
        IMAGE,
        TEXT,
        lambda: {"encoder_attention_mask": _mask().float()},
    ),
    "sd3": Case(
        "SD3Transformer2DModel",
        {
            **HEADS,
            **{"in_channels": CHANNELS, "out_channels": CHANNELS, "sample_size": SIDE, "pos_embed_max_size": SIDE},
            **{"joint_attention_dim": WIDTH, "caption_projection_dim": WIDTH, "pooled_projection_dim": WIDTH},
        },
        IMAGE,
        TEXT | POOLED,
    ),
    "wan": Case(
        "WanTransformer3DModel",
        {
            **HEADS,
            **{"in_channels": CHANNELS, "out_channels": CHANNELS, "text_dim": WIDTH, "freq_dim": 16, "ffn_dim": 64},
            "rope_max_seq_len": 16,
        },
        CLIP,
        TEXT,
    ),
    "z-image": Case(
        "ZImageTransformer2DModel",
        {
            **{
                "dim": WIDTH,
                "n_layers": 4,
                "n_refiner_layers": 2,
                "n_heads": 2,
                "n_kv_heads": 2,
                "cap_feat_dim": WIDTH,
            },
            **{"in_channels": CHANNELS, "axes_dims": [4, 4, 8], "axes_lens": [64, 64, 64]},
        },
        (CHANNELS, 1, SIDE, SIDE),
        {"cap_feats": (TOKENS, WIDTH)},
        scale=1000.0,
    ),
}
"""The default configurations, with other sizes."""


def build(kind: str) -> nn.Module:
    """Return a model of ``kind``, the same each time, in training mode."""
    import diffusers

    torch.manual_seed(0)
    case = CASES[kind]
    model: nn.Module = getattr(diffusers, case.name)(**case.settings)
    with torch.no_grad():
        for parameter in model.parameters():  # some begin with zeros, and learn nothing in a few steps
            parameter += torch.randn_like(parameter) / 50
    return model.train()


def batches(kind: str) -> list[dict[str, Tensor]]:
    """Return latent variables of images or clips, and states of their texts."""
    generator = torch.Generator().manual_seed(1)
    shapes = {"latents": CASES[kind].latents} | CASES[kind].states
    return [
        {name: torch.randn((ROWS, *shape), generator=generator) for name, shape in shapes.items()} for _ in range(STEPS)
    ]


class Denoising(Stepping):
    """Learns by flow matching what leads from a row's noise to its latent variables."""

    def __init__(self, kind: str, make: Callable[[nn.Module], torch.optim.Optimizer]) -> None:
        super().__init__(build(kind), make)
        self.kind = kind

    def training_step(self, batch: dict[str, Tensor]) -> Tensor:
        """Draw noise and times, and compare the model's answer with the way from noise to data."""
        case, latents = CASES[self.kind], batch["latents"]
        noise = torch.randn_like(latents)
        times = torch.randint(1, 1000, (len(latents),), device=latents.device)
        sigmas = (times / 1000).view(-1, *[1] * (latents.dim() - 1))
        noisy = (1 - sigmas) * latents + sigmas * noise
        states = {name: batch[name] for name in case.states} | _moved(case.more(), latents.device)
        predicted = self._predicted(noisy, times / case.scale, states)
        loss = (predicted.float() - (noise - latents).float()).square().flatten(1).mean(1).mean()
        self.losses.append(loss.detach())
        return loss

    def _predicted(self, noisy: Tensor, times: Tensor, states: dict[str, Any]) -> Tensor:
        if self.kind == "z-image":  # takes lists of images and texts
            images, texts = list(noisy.unbind()), list(states["cap_feats"].unbind())
            return torch.stack(self.model(images, times, texts, return_dict=False)[0])
        predicted: Tensor = self.model(hidden_states=noisy, timestep=times, **states, return_dict=False)[0]
        # Those that learn a variance, too, have it after the mean.
        return predicted.chunk(2, dim=1)[0] if predicted.shape != noisy.shape else predicted


def _moved(arguments: dict[str, Any], device: torch.device) -> dict[str, Any]:
    from lightning.fabric.utilities import move_data_to_device

    moved: dict[str, Any] = move_data_to_device(arguments, device)
    return moved
