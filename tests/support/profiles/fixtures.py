"""Profiles with published numbers, which the scripts for the papers' tables use as well."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from lt_offload.schema.profile import Profile
from scripts.papers import profiles
from scripts.papers.profiles import (
    ADAM_3060,
    GB,
    RTX_3060,
    llama7b_b8_3090,
    option,
    tensor,
)

__all__ = [
    "ADAM_3060",
    "GB",
    "RTX_3060",
    "llama7b_b4",
    "llama7b_b8_3090",
    "option",
    "tensor",
    "with_bandwidth",
]


def llama7b_b4(layers: int = 32, **kwargs: Any) -> Profile:
    """Llama 2 7B with ``layers`` layers on an RTX 3060 with as much memory as any budget of a test."""
    found = profiles.llama7b_b4(layers, **kwargs)
    return replace(found, hardware=replace(found.hardware, device_bytes=int(80 * GB)))


def with_bandwidth(profile: Profile, gb_per_s: float) -> Profile:
    """``profile`` with another link, the same in both directions."""
    speed = gb_per_s * GB
    return replace(profile, hardware=replace(profile.hardware, h2d_bytes_per_s=speed, d2h_bytes_per_s=speed))
