"""Chains for the tables of MemFerry (2024): the modules of transformers, timed from their shapes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from lt_offload.plan.papers.memferry.model import MemFerryLayer, MemFerryWeight

VALUE = 4
"""Bytes per value: single precision."""
TILE = 128
"""Rows of activations for which a product reads its matrix once, if the cache does not hold it."""
DIRECT = 0.8
"""Part of the link's speed that direct reads and writes reach."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Machine:
    """What the chains are computed with; bytes and operations per second."""

    name: str
    flops: float
    memory: float
    cache: float
    """Bytes."""
    update: float
    """Parameter bytes per second of Adam on the host: 28 bytes of traffic for 4."""
    link: float = 12e9


@dataclass(frozen=True, kw_only=True, slots=True)
class Shape:
    """A transformer."""

    name: str
    hidden: int
    layers: int
    vocabulary: int
    batch: int
    length: int
    head: bool = True
    """Whether it has an output projection."""
    relative: bool = False
    """Whether its layers project relative positions (TransformerXL)."""

    @property
    def tokens(self) -> int:
        """Per batch."""
        return self.batch * self.length


A100 = Machine(name="A100", flops=78e12, memory=1.935e12, cache=40e6, update=120e9 / 7)
V100 = Machine(name="V100", flops=10.4e12, memory=0.9e12, cache=6e6, update=75e9 / 7)
BERT_BASE = Shape(name="BERT-base", hidden=768, layers=12, vocabulary=30522, batch=8, length=512, head=False)
BERT_LARGE = replace(BERT_BASE, name="BERT-large", hidden=1024, layers=24)
ROBERTA = replace(BERT_BASE, name="RoBERTa", vocabulary=50265)
GPT2_MEDIUM = Shape(name="GPT-2-medium", hidden=1024, layers=24, vocabulary=50257, batch=8, length=1024)
XL = Shape(name="", hidden=2048, layers=0, vocabulary=32768, batch=8, length=378, relative=True)
XL_1B = replace(XL, name="TransformerXL 1B", layers=16)
XL_4B = replace(XL, name="TransformerXL 4.3B", hidden=4096, layers=18, vocabulary=65536)
XL_7B = replace(XL, name="TransformerXL 6.7B", hidden=4096, layers=26, vocabulary=130528)
SMALL = (BERT_BASE, ROBERTA, BERT_LARGE, GPT2_MEDIUM)
XLS = (XL_1B, XL_4B, XL_7B)


def chain(shape: Shape, machine: Machine) -> list[MemFerryLayer]:
    """Return the modules of ``shape`` in order; those without weights are the paper's computations between layers."""
    hidden, tokens = shape.hidden, shape.tokens
    rows = tokens * hidden * VALUE
    norm = _norm(shape, machine)
    table = _lookup(shape.vocabulary * hidden * VALUE, rows, machine)
    scores = MemFerryLayer(  # the products of queries, keys and values, and the softmax between them
        forward_s=4 * tokens * shape.length * hidden / machine.flops
        + 4 * tokens * shape.length * (hidden // 64) * VALUE / machine.memory,
        backward_s=8 * tokens * shape.length * hidden / machine.flops
        + 8 * tokens * shape.length * (hidden // 64) * VALUE / machine.memory,
    )
    gelu = MemFerryLayer(forward_s=8 * rows / machine.memory, backward_s=12 * rows / machine.memory)
    square = _product(hidden, hidden, tokens, machine)
    block = [
        *[square] * (4 if shape.relative else 3),
        scores,
        square,
        norm,
        _product(hidden, 4 * hidden, tokens, machine),
        gelu,
        _product(4 * hidden, hidden, tokens, machine),
        norm,
    ]
    positions = [] if shape.relative else [_lookup(max(512, shape.length) * hidden * VALUE, rows, machine)]
    head = [_product(hidden, shape.vocabulary, tokens, machine)] if shape.head else []
    return [table, *positions, norm, *block * shape.layers, *head]


def _product(inputs: int, outputs: int, rows: int, machine: Machine) -> MemFerryLayer:
    size = (inputs + 1) * outputs * VALUE
    passes = 1 if size <= machine.cache else -(-rows // TILE)
    seconds = 2 * rows * inputs * outputs / machine.flops
    return _layer(seconds, 2 * seconds, size, passes * size, passes * size, machine)


def _norm(shape: Shape, machine: Machine) -> MemFerryLayer:
    seconds = 2 * shape.tokens * shape.hidden * VALUE / machine.memory
    size = 2 * shape.hidden * VALUE
    return _layer(seconds, 2 * seconds, size, size, size, machine)


def _lookup(size: int, rows: int, machine: Machine) -> MemFerryLayer:
    """Return an embedding; its backward fills a gradient of the table's size."""
    return _layer(2 * rows / machine.memory, (size + 2 * rows) / machine.memory, size, min(rows, size), 0, machine)


def _layer(
    forward_s: float, backward_s: float, size: int, read: int, read_back: int, machine: Machine
) -> MemFerryLayer:
    direct = DIRECT * machine.link
    weight = MemFerryWeight(
        transfer_s=size / machine.link,
        forward_s=read / direct,
        backward_s=read_back / direct,
        gradient_bytes=size,
        gradient_transfer_s=size / machine.link,
        gradient_s=size / direct,
    )
    return MemFerryLayer(forward_s=forward_s, backward_s=backward_s, weights=(weight,))


def parameter_bytes(layers: Sequence[MemFerryLayer]) -> int:
    """Return the bytes of all weights."""
    return sum(weight.gradient_bytes for layer in layers for weight in layer.weights)
