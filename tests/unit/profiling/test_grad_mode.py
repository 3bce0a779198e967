"""Blocks that call other operations, or give other numbers, without gradients than with them: the profile says so."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import lt_offload
from lt_offload.profiling.hardware import load_hardware
from lt_offload.schema.profile import BlockProfile, Profile
from tests.support.user_nets import HIDDEN, Layer, Net, adamw, rows

TOKENS = rows()[0]["ids"].shape[1]


class ComputedWeight(Layer):
    """Torch multiplies by such a weight in one product with gradients, and in one per sample without."""

    def inner(self, x: Tensor) -> Tensor:
        return (x.transpose(0, 1) @ (self.linear.weight * 2)).transpose(0, 1)


class Attending(Layer):
    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(HIDDEN, 4, batch_first=True)

    def inner(self, x: Tensor) -> Tensor:
        out: Tensor = self.attention(x, x, x, need_weights=False)[0]
        return out


class Mixing(Layer):
    """As in an MLP-Mixer: a layer over tokens, of activations whose last two dimensions are swapped."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Linear(TOKENS, TOKENS)

    def inner(self, x: Tensor) -> Tensor:
        return super().inner(self.tokens(x.transpose(1, 2)).transpose(1, 2))


class LittleMore(Layer):
    """Calls the same operations with another number."""

    def inner(self, x: Tensor) -> Tensor:
        return super().inner(x) + (0.0 if torch.is_grad_enabled() else 1e-3)


def autocast() -> AbstractContextManager[None]:
    """As Lightning has it. With a cache, weights are cast with a graph once and for all."""
    return torch.autocast("cpu", dtype=torch.bfloat16, cache_enabled=False)


def caching() -> AbstractContextManager[None]:
    return torch.autocast("cpu", dtype=torch.bfloat16)


def profiled(layer: Callable[[], nn.Module], context: Callable[[], AbstractContextManager[None]]) -> Profile:
    model = Net(layer, context=context)
    return lt_offload.profile(
        model, rows()[0], optimizer=adamw(model), device="cpu", hardware=load_hardware("rtx-3060")
    )


def names(block: BlockProfile) -> set[str]:
    return {option.name for option in block.options}


@pytest.mark.parametrize(
    ("layer", "context"),
    [
        (ComputedWeight, nullcontext),
        (ComputedWeight, autocast),
        (Attending, autocast),
        (Mixing, autocast),
        (LittleMore, nullcontext),
    ],
)
def test_blocks_that_differ_run_with_a_graph(
    layer: type[nn.Module], context: Callable[[], AbstractContextManager[None]]
) -> None:
    profile = profiled(layer, context)
    for block in profile.blocks[1:-1]:
        assert block.graphed
        assert names(block) == {"keep", "recompute", "reload", "offload", "discard"}
    assert not profile.blocks[0].graphed
    plan = lt_offload.solve(profile, memory="1GB")
    assert plan.graphed == tuple(range(1, len(profile.blocks) - 1))


@pytest.mark.parametrize(
    ("layer", "context"),
    [
        (Layer, nullcontext),
        (Layer, autocast),
        (Layer, caching),
        (Attending, nullcontext),
        (Attending, caching),
        (Mixing, nullcontext),
        (Mixing, caching),
    ],
)
def test_blocks_that_call_the_same_operations_run_without(
    layer: type[nn.Module], context: Callable[[], AbstractContextManager[None]]
) -> None:
    """The casts of weights that autocast has kept from a run without gradients are none of the next."""
    profile = profiled(layer, context)
    assert not any(block.graphed for block in profile.blocks)
    assert all("mixed" in names(block) for block in profile.blocks[1:-1])


def test_a_costly_result_that_is_written_to_is_kept_for_no_second_run() -> None:
    """The engine would refuse it: what it copies to the host is to be what the operation has returned."""

    class Writing(Layer):
        def forward(self, x: Tensor) -> Tensor:
            y: Tensor = super().forward(x)
            z = F.linear(y, torch.eye(y.shape[-1]))
            z += y
            return z.relu_()

    (block, *_) = [block for block in profiled(Writing, nullcontext).blocks if block.kind == "layer"]
    assert "recompute" in names(block)
    assert "mixed" not in names(block)


def test_a_frozen_block_that_differs_runs_with_gradients_switched_on() -> None:
    """As in plain PyTorch; it has no graph, as nothing in it requires gradients."""

    def make() -> nn.Module:
        model = Net(LittleMore)
        for parameter in (*model.embed.parameters(), *model.layers[0].parameters()):
            parameter.requires_grad_(False)
        return model

    model = make()
    profile = lt_offload.profile(model, rows()[0], optimizer=adamw(model), hardware=load_hardware("rtx-3060"))
    assert [block.has_backward for block in profile.blocks] == [False, False, True, True, True, True]
    assert [block.graphed for block in profile.blocks] == [False, True, True, True, True, False]


class LeftOut(Layer):
    """Is left out in two of five runs, the first two of those that are tried among them."""

    def inner(self, x: Tensor) -> Tensor:
        return super().inner(x) if torch.rand(()) < 0.6 else x


def test_blocks_that_are_left_out_at_random_are_measured_when_they_are_there() -> None:
    saved = [
        [block.option("keep").saved_bytes for block in profiled(layer, nullcontext).blocks[1:-1]]
        for layer in (Layer, LeftOut)
    ]
    assert saved[0] == saved[1]


class Counting(Layer):
    """Counts its runs in a file, as a profile puts back what it finds in memory, and ``here``, if that is a number."""

    def __init__(self, file: Path, here: int = 0) -> None:
        super().__init__()
        self.file, self.here, self.runs = str(file), here, 0

    def inner(self, x: Tensor) -> Tensor:
        with open(self.file, "a") as file:
            file.write("x")
        self.runs += self.here
        return super().inner(x)


class Dropping(Counting):
    def inner(self, x: Tensor) -> Tensor:
        return F.dropout(super().inner(x), 0.5)


def runs_of(layer: Callable[[Path], nn.Module], folder: Path) -> list[int]:
    """Return the number of runs of each layer of a model, while it is profiled."""
    files = [folder / str(number) for number in range(4)]
    left = iter(files)
    profiled(lambda: layer(next(left)), nullcontext)
    return [len(file.read_text()) for file in files]


def test_of_blocks_of_a_kind_the_first_alone_runs_twice_in_the_step(tmp_path: Path) -> None:
    first, *others = runs_of(Counting, tmp_path)
    assert first > 2  # its costs are measured, too
    assert others == [1] * len(others)


def test_blocks_that_draw_are_all_compared(tmp_path: Path) -> None:
    assert all(runs > 1 for runs in runs_of(Dropping, tmp_path))


def test_a_block_that_changes_itself_unlike_others_of_its_kind_runs_once(tmp_path: Path) -> None:
    changes = iter((0, 0, 7, 0))
    blocks = profiled(lambda: Counting(tmp_path / "runs", next(changes)), nullcontext).blocks[1:-1]
    assert [names(block) == {"keep", "offload"} for block in blocks] == [False, False, True, False]
