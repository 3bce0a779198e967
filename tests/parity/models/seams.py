"""Nets whose seams are drawn: what stands between blocks, what these return, what lies outside of them."""

from __future__ import annotations

import random
from collections import namedtuple
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.support.trials import Trial

VOCAB = 61
Pair = namedtuple("Pair", ["x", "mean"])

BETWEEN: dict[str, Callable[[Tensor], Tensor]] = {
    "nothing": lambda x: x,
    "double": lambda x: x.double(),
    "float": lambda x: x.float(),
    "there and back": lambda x: x.double().to(x.dtype),
    "copy": lambda x: x.clone(),
    "bent": lambda x: x.tanh(),
    "cut": lambda x: x[:, :-1],
    "copied rows": lambda x: x[:, 1:].contiguous(),
    "turned": lambda x: x.transpose(0, 1).contiguous().transpose(0, 1),
    "half the bytes": lambda x: x.bfloat16(),
    "longer": lambda x: torch.cat([x, x], dim=1),
}
OUTPUTS: dict[str, Callable[[Tensor], Any]] = {
    "tensor": lambda x: x,
    "tuple": lambda x: (x,),
    "with its mean": lambda x: Pair(x, x.mean()),
    "with a copy": lambda x: (x, x * 2),
    "dict": lambda x: {"x": x, "mean": x.float().square().mean(-1)},
    "with a constant": lambda x: (x, torch.ones_like(x)),
}


@dataclass(frozen=True, kw_only=True)
class Seams:
    """One net, and how it is trained."""

    dtype: str
    hidden: int
    rows: int
    length: int
    layers: int
    layer: str
    output: str
    between: tuple[str, ...]
    """Behind the embedding and each layer."""
    norm: str
    outside: str
    adapters: bool
    frozen: str
    """What is: nothing, the embedding, or that with outputs that require a gradient."""
    mask: bool
    bias: bool
    optimizer: str

    @classmethod
    def drawn(cls, seed: int) -> Seams:
        """Return the net that ``seed`` draws; about a half of all seams are plain."""
        draw = random.Random(seed)
        layers = draw.randint(2, 4)

        def plain_or(values: Any) -> str:
            first, *others = values
            return first if draw.random() < 0.5 else draw.choice(others)

        between = tuple(plain_or(BETWEEN) for _ in range(layers + 1))
        return cls(
            dtype=draw.choice(["float32", "bfloat16"]),
            hidden=draw.choice([16, 32, 48]),
            rows=draw.randint(2, 6),
            length=draw.randint(8, 24),
            layers=layers,
            layer=draw.choice(["residual", "linear", "saved input"]),
            output=plain_or(OUTPUTS),
            between=between,
            norm=draw.choice(["none", "own", "in float", "in float, weights too"]),
            outside=plain_or(["nothing", "scale", "positions", "wide", "buffer", "after the head"]),
            adapters=draw.random() < 0.4,
            frozen=draw.choice(["nothing", "embedding", "input grads"]),
            mask=draw.random() < 0.3,
            bias=draw.random() < 0.5,
            optimizer=draw.choice(["sgd", "adamw", "adamw-fused"]),
        )


class Adapted(nn.Module):
    """A frozen projection, and two narrow ones."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.base = nn.Linear(hidden, hidden).requires_grad_(False)
        self.a, self.b = nn.Linear(hidden, 2, bias=False), nn.Linear(2, hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.b(self.a(x))


class Layer(nn.Module):
    def __init__(self, seams: Seams) -> None:
        super().__init__()
        hidden = seams.hidden
        self.kind, self.output = seams.layer, OUTPUTS[seams.output]
        self.norm = nn.LayerNorm(hidden).requires_grad_(not seams.adapters)
        self.linear = Adapted(hidden) if seams.adapters else nn.Linear(hidden, hidden, bias=seams.bias)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Any:
        y = x.to(self.norm.weight.dtype)
        if self.kind == "linear":
            y = self.linear(y)
        elif self.kind == "residual":
            y = x + F.gelu(self.linear(self.norm(y)))
        else:
            y = x.square() * self.linear(y).tanh()
        return self.output(y if mask is None else y * mask[:, : y.shape[1]])


class Net(nn.Module):
    """Embedding, layers, norm and head with a loss, joined as ``seams`` says."""

    def __init__(self, seams: Seams) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.seams = seams
        hidden = seams.hidden
        self.embed = nn.Embedding(VOCAB, hidden)
        self.layers = nn.ModuleList(Layer(seams) for _ in range(seams.layers))
        if seams.norm != "none":
            self.norm = nn.LayerNorm(hidden)
        self.head = nn.Linear(hidden, VOCAB)
        if seams.outside in ("scale", "after the head"):
            self.scale = nn.Parameter(torch.ones(hidden if seams.outside == "scale" else VOCAB))
        elif seams.outside == "positions":
            self.positions = nn.Parameter(torch.randn(2 * seams.length, hidden) / 8)
        elif seams.outside == "wide":
            self.wide = nn.Parameter(torch.randn(8 * hidden, hidden) / 8)
        elif seams.outside == "buffer":
            self.register_buffer("positions", torch.randn(2 * seams.length, hidden) / 8)
        self.to(getattr(torch, seams.dtype))
        if seams.norm == "in float, weights too":
            self.norm.float()
        if seams.adapters or seams.frozen != "nothing":
            self.embed.requires_grad_(False)
        if seams.frozen == "input grads":
            self.embed.register_forward_hook(lambda module, args, out: out.requires_grad_(True))

    def forward(self, ids: Tensor) -> dict[str, Tensor]:
        seams, loss = self.seams, torch.zeros(())
        dtype = self.head.weight.dtype
        mask = torch.ones(ids.shape[0], 8 * ids.shape[1], 1, dtype=dtype) if seams.mask else None
        x = self.embed(ids)
        if seams.outside in ("positions", "buffer"):
            x = x + self.positions[: x.shape[1]]
        x = BETWEEN[seams.between[0]](x)
        for layer, between in zip(self.layers, seams.between[1:], strict=True):
            out = layer(x) if mask is None else layer(x, mask=mask)
            if isinstance(out, dict):
                out = tuple(out.values())
            x = out[0] if isinstance(out, tuple) else out
            if isinstance(out, tuple) and len(out) > 1:
                loss = loss + out[1].float().mean()
            del out
            if seams.outside == "scale":
                x = x * self.scale
            elif seams.outside == "wide":
                x = x + (self.wide @ x.to(dtype).mean((0, 1))).mean()
            x = BETWEEN[between](x)
        if seams.norm == "own":
            x = self.norm(x.to(dtype))
        elif seams.norm == "in float":
            x = F.layer_norm(x.float(), x.shape[-1:])
            x = self.norm(x.to(dtype))
        elif seams.norm == "in float, weights too":
            x = self.norm(x.float())
        logits = self.head(x.to(dtype))
        if seams.outside == "after the head":
            logits = logits * self.scale
        labels = ids.new_zeros(logits.shape[:2])
        labels[:, : ids.shape[1]] = ids[:, : labels.shape[1]]
        return {"loss": loss + F.cross_entropy(logits.float().flatten(0, 1), labels.flatten())}


def batches(seams: Seams, steps: int = 3) -> list[dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    return [{"ids": torch.randint(VOCAB, (seams.rows, seams.length), generator=generator)} for _ in range(steps)]


def optimizer_of(seams: Seams, model: nn.Module) -> torch.optim.Optimizer:
    params = [p for p in model.parameters() if p.requires_grad]
    if seams.optimizer == "sgd":
        return torch.optim.SGD(params, lr=1e-2, momentum=0.9)
    return torch.optim.AdamW(params, lr=1e-2, fused=seams.optimizer == "adamw-fused")


def trial(number: int) -> Trial:
    """Return the training of the net that ``number`` draws."""
    seams = Seams.drawn(number)
    return Trial(partial(Net, seams), partial(batches, seams), partial(optimizer_of, seams))
