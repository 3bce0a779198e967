"""Chains of convolutional networks from the shapes of their layers, for the tables of POFO. Imports no torch.

A residual block, a dense layer or a module of inception is one layer of the chain, as their implementations in
torchvision say: what a convolution, a normalisation or a pooling reads for its backward is saved, an in-place rectifier
saves what it writes, which the next one reads. Times are those of the arithmetic plus those of the memory traffic.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field

from lt_offload.plan.papers.pofo.chain import Chain, ChainLayer

BATCH, PIXELS, BYTES = 16, 500, 4
FLOPS_PER_S = 11e12
"""Sustained by convolutions in single precision on a V100, whose peak is 15.7e12."""
MEMORY_BYTES_PER_S = 750e9
"""Of the 900e9 of its memory."""
LINK_BYTES_PER_S = 12e9
_PASSES = 5
"""Times that normalisation and rectifier read or write the output of a convolution, in a forward."""

Shape = tuple[int, int]
"""Channels and pixels per side."""


@dataclass(slots=True)
class _Cost:
    """What has been added to one layer so far."""

    flops: float = 0.0
    traffic: float = 0.0
    saved: int = 0
    largest: int = 0
    sizes: list[int] = field(default_factory=list)

    def conv(self, shape: Shape, out: int, kernel: tuple[int, int] = (1, 1), stride: int = 1, copies: int = 2) -> Shape:
        """Convolution, normalisation, rectifier; saves ``copies`` tensors of the output's size."""
        channels, side = shape
        new = (out, -(-side // stride))
        self.flops += 2.0 * BATCH * kernel[0] * kernel[1] * channels * out * new[1] ** 2
        self.traffic += _PASSES * tensor_bytes(new)
        self.keep(new, copies)
        return new

    def keep(self, shape: Shape, copies: int = 1) -> None:
        """Save ``copies`` tensors."""
        self.saved += copies * tensor_bytes(shape)
        self.largest = max(self.largest, tensor_bytes(shape))

    def layer(self, output: Shape) -> ChainLayer:
        """Return the layer. A backward does twice the work, and holds the gradients of two tensors beside."""
        seconds = self.flops / FLOPS_PER_S + self.traffic / MEMORY_BYTES_PER_S
        return ChainLayer(
            forward_s=seconds,
            backward_s=2 * seconds,
            output_bytes=tensor_bytes(output),
            saved_bytes=self.saved,
            gradient_bytes=tensor_bytes(output),
            saving_overhead_bytes=self.largest,
            forward_overhead_bytes=self.largest,
            backward_overhead_bytes=2 * self.largest,
        )


def tensor_bytes(shape: Shape) -> int:
    """Return the size of a tensor of the batch."""
    return BATCH * shape[0] * shape[1] ** 2 * BYTES


def resnet(blocks: Sequence[int] = (3, 4, 23, 3)) -> Chain:
    """ResNet with bottlenecks; 101 layers by default."""
    shape, layers = _stem(64)
    for stage, count in enumerate(blocks):
        for at in range(count):
            cost, stride, width = _Cost(), 2 if stage and not at else 1, 64 << stage
            inner = cost.conv(cost.conv(shape, width), width, (3, 3), stride)
            output = cost.conv(inner, 4 * width)
            if not at:
                # Its normalisation reads it; the sum goes into the output of the main path.
                cost.conv(shape, 4 * width, stride=stride, copies=1)
            shape = output
            layers.append(cost.layer(shape))
    return _chain(layers, shape)


def densenet(blocks: Sequence[int] = (6, 12, 24, 16), growth: int = 32) -> Chain:
    """DenseNet; 121 layers by default. The output of a dense layer is all features so far, side by side."""
    shape, layers = _stem(2 * growth)
    for stage, count in enumerate(blocks):
        for _ in range(count):
            cost = _Cost()
            cost.keep(shape)
            cost.traffic += _PASSES * tensor_bytes(shape)
            cost.conv(cost.conv(shape, 4 * growth), growth, (3, 3), copies=0)
            shape = (shape[0] + growth, shape[1])
            cost.keep(shape)
            cost.traffic += 2 * tensor_bytes(shape)
            layers.append(cost.layer(shape))
        if stage < len(blocks) - 1:
            cost = _Cost()
            cost.keep(shape)
            half = cost.conv(shape, shape[0] // 2, copies=1)
            shape = (half[0], half[1] // 2)
            cost.keep(shape)
            layers.append(cost.layer(shape))
    return _chain(layers, shape)


def inception() -> Chain:
    """Inception v3 without its auxiliary classifier."""
    shape: Shape = (3, PIXELS)
    layers = []
    for out, kernel, stride, pool in ((32, 3, 2, 1), (32, 3, 1, 1), (64, 3, 1, 2), (80, 1, 1, 1), (192, 3, 1, 2)):
        cost = _Cost()
        shape = cost.conv(shape, out, (kernel, kernel), stride)
        if pool > 1:
            shape = (out, shape[1] // pool)
            cost.keep(shape)
        layers.append(cost.layer(shape))
    for paths in _INCEPTION:
        cost, ends = _Cost(), []
        for path in paths:
            end = shape
            for out, kernel, stride in path:
                end = cost.conv(end, out, kernel, stride)
            ends.append(end)
        shape = (sum(end[0] for end in ends), ends[0][1])
        cost.keep(shape)
        cost.traffic += 2 * tensor_bytes(shape)
        layers.append(cost.layer(shape))
    return _chain(layers, shape)


def synthetic(layers: int, seed: int = 0) -> Chain:
    """Layers with random sizes and times, whose outputs the link carries in 0.6 of the time of a forward."""
    rng = random.Random(seed)
    found = []
    for _ in range(layers):
        output, seconds = rng.randint(20, 40) * 10**6, rng.uniform(0.5, 1.5)
        found.append(
            ChainLayer(
                forward_s=seconds,
                backward_s=2 * seconds,
                output_bytes=output,
                saved_bytes=output * rng.randint(2, 5),
                gradient_bytes=output,
                backward_overhead_bytes=output,
            )
        )
    rate = sum(layer.output_bytes for layer in found) / (0.6 * sum(layer.forward_s for layer in found))
    loss = ChainLayer(forward_s=0.0, backward_s=0.0, output_bytes=0, saved_bytes=0, gradient_bytes=0)
    return Chain(layers=tuple(found), loss=loss, input_bytes=30 * 10**6, bytes_per_s=rate)


def _stem(channels: int) -> tuple[Shape, list[ChainLayer]]:
    cost = _Cost()
    shape = cost.conv((3, PIXELS), channels, (7, 7), 2)
    shape = (channels, shape[1] // 2)
    cost.keep(shape, 3)  # the pooled maxima and where they were, in eight bytes each
    return shape, [cost.layer(shape)]


def _chain(layers: Sequence[ChainLayer], last: Shape) -> Chain:
    """Close the chain with average pooling and classifier, which are the loss."""
    cost = _Cost(traffic=tensor_bytes(last))
    cost.keep((1000 + last[0], 1))
    end = cost.layer((0, 0))
    return Chain(layers=tuple(layers), loss=end, input_bytes=tensor_bytes((3, PIXELS)), bytes_per_s=LINK_BYTES_PER_S)


_Path = tuple[tuple[int, tuple[int, int], int], ...]


def _module_a(pool: int) -> tuple[_Path, ...]:
    one, three, five = (1, 1), (3, 3), (5, 5)
    return (
        ((64, one, 1),),
        ((48, one, 1), (64, five, 1)),
        ((64, one, 1), (96, three, 1), (96, three, 1)),
        ((pool, one, 1),),
    )


def _module_c(width: int) -> tuple[_Path, ...]:
    one, row, column = (1, 1), (1, 7), (7, 1)
    return (
        ((192, one, 1),),
        ((width, one, 1), (width, row, 1), (192, column, 1)),
        ((width, one, 1), (width, column, 1), (width, row, 1), (width, column, 1), (192, row, 1)),
        ((192, one, 1),),
    )


def _module_e() -> tuple[_Path, ...]:
    one, row, column, three = (1, 1), (1, 3), (3, 1), (3, 3)
    return (
        ((320, one, 1),),
        ((384, one, 1), (384, row, 1)),
        ((384, column, 1),),
        ((448, one, 1), (384, three, 1), (384, row, 1)),
        ((384, column, 1),),
        ((192, one, 1),),
    )


_INCEPTION: tuple[tuple[_Path, ...], ...] = (
    *(_module_a(pool) for pool in (32, 64, 64)),
    (((384, (3, 3), 2),), ((64, (1, 1), 1), (96, (3, 3), 1), (96, (3, 3), 2)), ((288, (1, 1), 2),)),
    *(_module_c(width) for width in (128, 160, 160, 192)),
    (
        ((192, (1, 1), 1), (320, (3, 3), 2)),
        ((192, (1, 1), 1), (192, (1, 7), 1), (192, (7, 1), 1), (192, (3, 3), 2)),
        ((768, (1, 1), 2),),
    ),
    _module_e(),
    _module_e(),
)
"""The modules of inception v3: parallel paths of (channels, kernel, stride). A pooling that passes all channels on is
a convolution of one pixel here; the second halves of module E read the input of the module instead of their first."""
