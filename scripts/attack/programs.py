"""Programs as users write them, drawn by seeds: blocks, what goes through them, hooks, a loop and its habits."""

# ruff: noqa: D101, D102 - users write none
from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint

from tests.support.user_nets import HIDDEN, VOCAB

CHOICES: dict[str, tuple[Any, ...]] = {
    "carried": ("dict", "list", "tuple", "namedtuple", "dataclass", "keyword"),
    "between": ("float64", "bfloat16"),
    "shared": (True,),
    "tied": (True,),
    "final": ("none", "float32"),
    "frozen": ("embed", "first", "all but norms", "last"),
    "dtype": ("bfloat16", "autocast"),
    "sequential": (True,),
    "outside": (True,),
    "hook": ("forward", "pre", "backward", "parameter", "counter", "accumulated", "hidden"),
    "loop": ("own", "own", "own", "own"),
    "accumulate": (2, 3),
    "clip": ("norm", "value"),
    "optimizer": ("fused", "amsgrad", "sgd", "momentum", "rmsprop", "adagrad", "nadam", "radam", "adafactor"),
    "groups": (True,),
    "schedule": ("lambda", "cosine", "one cycle"),
    "habit": (
        *("average", "unfreeze", "skip", "gradients", "edit", "norms", "clamp", "decay", "states", "validate"),
        *("generate", "rate", "copy"),
    ),
    "shorter": (True,),
}
"""The values of each feature but its default, which is the plainest one. A value is as likely as it is often there."""


@dataclass(frozen=True, kw_only=True)
class Program:
    """One program: each field is a feature."""

    blocks: tuple[str, ...] = ("residual",) * 3
    carried: str = "tensor"
    """Which form blocks are called in: with the hidden states alone, or with what they write to or return, too."""
    between: str = ""
    """The dtype of hidden states between blocks, if it is not that of the weights."""
    shared: bool = False
    """Whether all blocks use one matrix, too."""
    tied: bool = False
    final: str = "norm"
    frozen: str = ""
    dtype: str = "float32"
    sequential: bool = False
    """Whether blocks are held and called as one ``nn.Sequential``, where they take and return hidden states only."""
    outside: bool = False
    """Whether the loss is computed outside the model."""
    hook: str = ""
    loop: str = "lightning"
    accumulate: int = 1
    clip: str = ""
    optimizer: str = "adamw"
    groups: bool = False
    schedule: str = ""
    habit: str = ""
    """Something that a callback, or the loop itself, does between steps."""
    shorter: bool = False
    """Whether the last batch has fewer rows."""

    @classmethod
    def of(cls, seed: int) -> Program:
        """Draw a program: one to three kinds of blocks, one to five features."""
        draw = random.Random(seed)
        kinds = draw.sample(sorted(KINDS), draw.choice((1, 1, 2, 3)))
        blocks = tuple(draw.choice(kinds) for _ in range(draw.choice((2, 3, 4))))
        chosen = draw.sample(sorted(CHOICES), draw.choice((1, 2, 3, 4, 5)))
        return cls(blocks=blocks, **{name: draw.choice(CHOICES[name]) for name in chosen})

    def features(self) -> dict[str, Any]:
        """Return what is not the plainest."""
        return {f.name: getattr(self, f.name) for f in fields(self) if getattr(self, f.name) != f.default}

    def simpler(self) -> list[Program]:
        """Return the programs that have one feature less, or one block that is plainer."""
        plain, kinds = type(self)(), dict.fromkeys(self.blocks)
        found = [replace(self, **{name: getattr(plain, name)}) for name in self.features()]
        if len(self.blocks) > 2:
            found.append(replace(self, blocks=self.blocks[1:]))
        return found + [
            replace(self, blocks=tuple("residual" if k == kind else k for k in self.blocks))
            for kind in kinds
            if kind != "residual" and len(kinds) > 1
        ]


# -- kinds of blocks ---------------------------------------------------------------------------------------------------


class Residual(nn.Module):
    """A normed layer whose input is added; ``layer`` is what stands in for its matrix."""

    def __init__(self, layer: Callable[[], nn.Module] | None = None) -> None:
        super().__init__()
        self.norm, self.inner = nn.LayerNorm(HIDDEN), (layer or _linear)()

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = x + F.gelu(self.inner(self.norm(x)))
        return y


def _linear() -> nn.Module:
    return nn.Linear(HIDDEN, HIDDEN)


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(HIDDEN, 3 * HIDDEN), nn.Linear(HIDDEN, HIDDEN)

    def forward(self, x: Tensor) -> Tensor:
        heads = self.qkv(x).unflatten(-1, (3, 4, -1)).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(heads[0], heads[1], heads[2], is_causal=True)
        y: Tensor = self.out(mixed.transpose(1, 2).flatten(2))
        return y


class MultiHead(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(HIDDEN, 4, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.attention(x, x, x, need_weights=False)[0]
        return y


class Transposed(nn.Module):
    """Layers that want channels second."""

    def __init__(self, *layers: nn.Module) -> None:
        super().__init__()
        self.layers = nn.Sequential(*layers)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.layers(x.transpose(1, 2)).transpose(1, 2)
        return y


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cells = nn.GRU(HIDDEN, HIDDEN, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.cells(x)[0]
        return y


class Squared(torch.autograd.Function):
    """A function of a user's own, which leaves a number for its backward, too."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, factor: float) -> Tensor:
        ctx.save_for_backward(x)
        ctx.factor = factor
        return x.square() * factor

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        (x,) = ctx.saved_tensors
        return grads[0] * 2 * ctx.factor * x, None


class OwnFunction(nn.Module):
    """Calls a function of a user's own, with a count of its calls if it is ``counted``."""

    def __init__(self, counted: bool = False) -> None:
        super().__init__()
        self.inner, self.counted, self.calls = _linear(), counted, 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += self.counted
        y: Tensor = Squared.apply(self.inner(x), 0.1 * (1 + self.calls))  # type: ignore[no-untyped-call]
        return x + y


class InPlace(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = _linear()

    def forward(self, x: Tensor) -> Tensor:
        y = self.inner(x)
        y += x
        y[..., :4].mul_(0.5)
        y.relu_()
        z: Tensor = y.clone().mul_(0.9)
        return z


class Experts(nn.Module):
    """Each token goes to one of three matrices, of which some may get none."""

    def __init__(self) -> None:
        super().__init__()
        self.router, self.experts = nn.Linear(HIDDEN, 3), nn.ModuleList(_linear() for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        flat = x.flatten(0, 1)
        weights = self.router(flat).softmax(-1)
        chosen, y = weights.argmax(-1), torch.zeros_like(flat)
        for number, expert in enumerate(self.experts):
            rows = (chosen == number).nonzero()[:, 0]
            if len(rows):
                y = y.index_add(0, rows, expert(flat[rows]) * weights[rows, number, None])
        return x + y.view_as(x)


class Adapted(nn.Module):
    """A frozen matrix with a trained one of low rank."""

    def __init__(self) -> None:
        super().__init__()
        self.base, self.a = _linear().requires_grad_(False), nn.Linear(HIDDEN, 2, bias=False)
        self.b = nn.Linear(2, HIDDEN, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.base(x) + self.b(self.a(x))
        return x + y


class Running(nn.Module):
    """Subtracts a running mean, which its forward writes."""

    mean: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.inner = _linear()
        self.register_buffer("mean", torch.zeros(HIDDEN))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.mean.lerp_(x.detach().mean((0, 1)).to(self.mean.dtype), 0.1)
        y: Tensor = self.inner(x - self.mean)
        return y


class Again(nn.Module):
    """Checkpoints its layer itself."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Residual()

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = checkpoint(self.inner, x, use_reentrant=False)
        return y


class Functional(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = _linear()

    def forward(self, x: Tensor) -> Tensor:
        doubled = {name: 2 * parameter for name, parameter in self.inner.named_parameters()}
        y: Tensor = torch.func.functional_call(self.inner, doubled, (x,))
        return y.tanh()


class InnerGradient(nn.Module):
    """Descends once along the gradient of its input, as models of energies and of test-time training do."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = _linear()

    def forward(self, x: Tensor) -> Tensor:
        with torch.enable_grad():
            leaf = x.detach().requires_grad_()
            (slope,) = torch.autograd.grad(self.inner(leaf).square().sum(), leaf)
        y: Tensor = self.inner(x) - 0.1 * slope.detach()
        return y


class Scaled(nn.Module):
    """Has a scale of one value, and a parameter that nothing uses."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.scale = _linear(), nn.Parameter(torch.tensor(0.5))
        self.unused = nn.Parameter(torch.ones(3))

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = x + self.scale * self.inner(x)
        return y


class Dropped(nn.Module):
    """A layer that is left out at random, by Python's generator and by torch's."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = _linear()

    def forward(self, x: Tensor) -> Tensor:
        if self.training and (random.random() < 0.3 or torch.rand(()).item() < 0.2):
            return x
        y: Tensor = x + self.inner(x)
        return y


class Fourier(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = _linear()

    def forward(self, x: Tensor) -> Tensor:
        mixed = torch.fft.fft(x.float(), dim=1).real.to(x.dtype)
        y: Tensor = x + self.inner(mixed)
        return y


KINDS: Mapping[str, Callable[[], nn.Module]] = {
    "residual": Residual,
    "plain": lambda: nn.Sequential(_linear(), nn.GELU(), _linear()),
    "attention": Attention,
    "multi-head": MultiHead,
    "dropout": lambda: Residual(lambda: nn.Sequential(_linear(), nn.Dropout(0.2))),
    "batch norm": lambda: Transposed(nn.BatchNorm1d(HIDDEN), nn.Conv1d(HIDDEN, HIDDEN, 1)),
    "convolution": lambda: Transposed(nn.Conv1d(HIDDEN, HIDDEN, 3, padding=1), nn.SiLU()),
    "recurrent": Recurrent,
    "own function": OwnFunction,
    "counted function": lambda: OwnFunction(counted=True),
    "in place": InPlace,
    "experts": Experts,
    "adapted": Adapted,
    "running mean": Running,
    "checkpointed": Again,
    "functional": Functional,
    "inner gradient": InnerGradient,
    "scaled": Scaled,
    "dropped": Dropped,
    "fourier": Fourier,
    "weight norm": lambda: Residual(lambda: parametrizations.weight_norm(nn.Linear(HIDDEN, HIDDEN))),
}


# -- the model ---------------------------------------------------------------------------------------------------------


class Named(NamedTuple):
    hidden: Tensor
    mean: Tensor


@dataclass
class Carried:
    hidden: Tensor
    means: Tensor


class Block(nn.Module):
    """What blocks of all kinds have in common: how they are called."""

    def __init__(self, kind: str, program: Program, shared: nn.Module | None) -> None:
        super().__init__()
        self.inner, self.form = KINDS[kind](), program.carried
        self.shared = shared

    def forward(self, hidden: Any, beside: Any = None) -> Any:
        x = hidden.hidden if isinstance(hidden, Carried) else hidden
        weights = next(self.inner.parameters()).dtype
        y = self.inner(x.to(weights))
        if self.shared is not None:
            y = y + 0.1 * self.shared(y)
        y, mean = y.to(x.dtype), y.float().square().mean()
        if self.form == "dict":
            beside["calls"] = beside.get("calls", 0) + 1
            beside["mean"] = beside.get("mean", 0.0) + mean * beside["calls"]
        elif self.form == "list":
            beside.append(mean)
        elif self.form == "keyword":
            y = y * beside
        forms = {"tuple": (y, mean), "namedtuple": Named(y, mean)}
        return Carried(y, hidden.means + mean) if self.form == "dataclass" else forms.get(self.form, y)


class Model(nn.Module):
    """Embedding, blocks and head; returns the loss, or logits and what is added to their loss."""

    def __init__(self, program: Program) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.program = program
        self.embed = nn.Embedding(VOCAB, HIDDEN)
        shared = _linear() if program.shared else None
        blocks = [Block(kind, program, shared) for kind in program.blocks]
        self.layers = nn.Sequential(*blocks) if program.sequential else nn.ModuleList(blocks)
        self.norm = nn.LayerNorm(HIDDEN) if program.final != "none" else nn.Identity()
        self.head = nn.Linear(HIDDEN, VOCAB, bias=not program.tied)
        if program.dtype == "bfloat16":
            self.bfloat16()
        if program.final == "float32":
            self.norm.float()
        if program.tied:
            self.head.weight = self.embed.weight
        self.freeze(program.frozen)

    def freeze(self, what: str) -> None:
        """Freeze a part."""
        parts: dict[str, list[nn.Module]] = {
            "": [],
            "embed": [self.embed],
            "first": [self.embed, self.layers[0]],
            "last": [self.layers[-1]],
            "all but norms": [m for m in self.modules() if isinstance(m, (nn.Linear, nn.Embedding, nn.Conv1d))],
        }
        for module in parts[what]:
            if module is not self.head:
                for parameter in module.parameters(recurse=True):
                    parameter.requires_grad_(False)

    def forward(self, ids: Tensor, labels: Tensor) -> Any:
        x = self.embed(ids)
        if self.program.between:
            x = x.to(getattr(torch, self.program.between))
        x, aux = self.through(x)
        if self.program.hook == "hidden" and x.requires_grad:
            x.register_hook(lambda grad: grad * 0.5)  # type: ignore[no-untyped-call]
        if self.program.final == "float32":
            logits = self.head(self.norm(x.float()).to(self.head.weight.dtype))
        else:
            logits = self.head(self.norm(x.to(self.head.weight.dtype)))
        if self.program.outside:
            return {"logits": logits, "aux": aux}
        return {"loss": loss_of(logits, aux, labels)}

    def through(self, x: Tensor) -> tuple[Tensor, Any]:
        """Return what blocks make of ``x``, and what they give beside."""
        form = self.program.carried
        if self.program.sequential and form == "tensor":
            return self.layers(x), 0.0
        state: dict[str, Any] = {}
        means: list[Tensor] = []
        held: Any = Carried(x, x.new_zeros((), dtype=torch.float32)) if form == "dataclass" else x
        for layer in self.layers:
            if form in ("dict", "list"):
                held = layer(held, state if form == "dict" else means)
            elif form == "keyword":
                held = layer(hidden=held, beside=torch.full_like(x[:, :1], 0.9))
            else:
                held = layer(held)
            if form in ("tuple", "namedtuple"):
                held, mean = held
                means.append(mean)
        if form == "dataclass":
            return held.hidden, held.means
        return held, state.get("mean", 0.0) if form == "dict" else sum(means)


def loss_of(logits: Tensor, aux: Any, labels: Tensor) -> Tensor:
    """Return the loss of a batch."""
    loss: Tensor = F.cross_entropy(logits.float().flatten(0, 1), labels.flatten()) + 0.01 * aux
    return loss
