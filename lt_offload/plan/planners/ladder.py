"""Activation options to give up first when memory is short: the cheapest seconds per byte."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from lt_offload.plan.planners.request import Allowed, self_contained, taken_bytes
from lt_offload.schema.profile import BlockProfile, OptionName, OptionProfile, Profile


@dataclass(frozen=True, kw_only=True, slots=True)
class Rung:
    """One block gives memory up."""

    price: float
    """Seconds per byte."""
    block: int
    option: OptionName
    """The option that it uses from here on."""


@dataclass(frozen=True, kw_only=True, slots=True)
class OptionLadder:
    """The fastest options, and what replaces them one after the other; never one that needs other blocks' forwards."""

    top: tuple[OptionName, ...]
    """The fastest option of each block."""
    rungs: tuple[Rung, ...]

    def after(self, count: int) -> tuple[OptionName, ...]:
        """Return the options when so many rungs have been taken."""
        options = list(self.top)
        for rung in self.rungs[:count]:
            options[rung.block] = rung.option
        return tuple(options)


def ladder(profile: Profile, allowed: Allowed, *, link_price: float = 1.0) -> OptionLadder:
    """Return the ladder of ``profile``; of equal prices the first block comes first: it holds its memory longest.

    ``link_price``: what a second of copying costs: 1 if computations wait for it, less if it hides behind them. A
    copy that takes longer than the block's own computations cannot hide.
    """
    usable, hardware = self_contained(allowed), profile.hardware

    def seconds(option: OptionProfile) -> float:
        out, back = option.offload_bytes / hardware.d2h_bytes_per_s, option.offload_bytes / hardware.h2d_bytes_per_s
        # Per block: its copy has its own forward to hide behind, and its own backward on the way back.
        exposed = max(out - option.forward_s, 0.0) + max(back - option.backward_s, 0.0)
        return option.forward_s + option.backward_s + exposed + link_price * (out + back - exposed)

    top = tuple(min(options, key=seconds) for options in usable)
    rungs = [
        rung
        for at, (block, now, options) in enumerate(zip(profile.blocks, top, usable, strict=True))
        for rung in _of_block(at, block, now, options, seconds)
    ]
    return OptionLadder(
        top=tuple(option.name for option in top),
        rungs=tuple(sorted(rungs, key=lambda rung: (rung.price, rung.block))),
    )


def _of_block(
    at: int,
    block: BlockProfile,
    now: OptionProfile,
    options: Sequence[OptionProfile],
    seconds: Callable[[OptionProfile], float],
) -> Iterator[Rung]:
    price = 0.0
    while True:
        taken = taken_bytes(block, now)
        swaps = [
            ((seconds(option) - seconds(now)) / (taken - taken_bytes(block, option)), option)
            for option in options
            if taken_bytes(block, option) < taken
        ]
        if not swaps:
            return
        cheapest, now = min(swaps, key=lambda swap: swap[0])
        # Later ones may be cheaper per byte, but come after those before them.
        price = max(price, cheapest)
        yield Rung(price=price, block=at, option=now.name)
