"""Which modules are run a few tokens at a time, on meta tensors as on real ones; what tiles compute, and refusals."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn
from torch.nn import functional

import lt_offload
from lt_offload.model.tiles import tokens_of
from tests.support import models

WIDTH = 8
NORMS = {"input_layernorm", "post_attention_layernorm"}
FOUR_NORMS = NORMS | {"pre_feedforward_layernorm", "post_feedforward_layernorm"}
PICKED = {
    "llama": {"mlp", *NORMS},
    "gemma": {"mlp", *NORMS},
    "gemma3": {"mlp", "self_attn.q_norm", "self_attn.k_norm", *FOUR_NORMS},
    "qwen3": {"mlp", "self_attn.q_norm", "self_attn.k_norm", *NORMS},
    "mixtral": NORMS,  # experts of one product for all: tokens are sorted by expert
    # nn.LayerNorm saves its input and nothing else that counts.
    "phi": {"mlp"},
    "bloom": {"mlp"},
    "gpt2": {"mlp"},
}


def built(family: str) -> nn.Module:
    if family == "gpt2":
        config = transformers.GPT2Config(vocab_size=97, n_embd=32, n_layer=2, n_head=4, bos_token_id=1, eos_token_id=2)
        return transformers.GPT2LMHeadModel(config)
    options: dict[str, Any] = {"num_key_value_heads": 4, "head_dim": 8} if family in ("gemma", "qwen3") else {}
    return models.build(family, layers=2, **options)


@pytest.mark.parametrize("family", PICKED)
def test_mlps_and_norms_are_picked_and_attention_is_not(family: str) -> None:
    model = built(family)
    with torch.device("meta"):
        empty = copy.deepcopy(model).to("meta")
    before = torch.get_rng_state()
    names = lt_offload.tile_tokens(model, 5)
    assert torch.equal(torch.get_rng_state(), before)
    layers = [name.partition("layers." if "layers." in name else "h.")[2] for name in names]
    assert {name.partition(".")[2] for name in layers if name} == PICKED[family]
    assert len(names) == 2 * len(PICKED[family]) + ("model.norm" in names)
    assert lt_offload.tile_tokens(empty, 5) == names
    assert tokens_of(model) == tokens_of(empty) == 5
    assert tokens_of(copy.deepcopy(model)) == 0
    assert lt_offload.tile_tokens(model, None) == ()
    assert tokens_of(model) == 0
    assert not any("forward" in vars(module) for module in model.modules())


class Layer(nn.Module):
    """A layer whose inner part computes ``what``."""

    def __init__(self, what: Callable[[Any, Tensor], Tensor]) -> None:
        super().__init__()
        self.inner = Inner(what)
        self.outer = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, scale: float) -> Tensor:
        out: Tensor = x + scale * self.outer(self.inner(x))
        return out


class Inner(nn.Module):
    def __init__(self, what: Callable[[Any, Tensor], Tensor]) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.positions = nn.Parameter(torch.ones(7, WIDTH))
        self.register_buffer("seen", torch.zeros(WIDTH))
        self.what = what

    def forward(self, x: Tensor) -> Tensor:
        return self.what(self, self.down(torch.tanh(self.up(x))))


def net(what: Callable[[Any, Tensor], Tensor]) -> nn.Module:
    return nn.Sequential(*(Layer(what) for _ in range(3)))


def into_buffer(inner: Any, x: Tensor) -> Tensor:
    inner.seen.add_(x.detach()[0, 0])
    return x


def into_new(inner: Any, x: Tensor) -> Tensor:
    out = torch.zeros(*x.shape)
    out[...] = x
    return out


def by_hand(inner: Any, x: Tensor) -> Tensor:
    out = torch.empty_like(x)
    out.data.numpy()[:] = 0  # as a kernel of one's own writes, which no mode sees
    return out * inner.positions[0]


ELSEWHERE = nn.Parameter(torch.ones(WIDTH))
ALONE: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "a product": lambda inner, x: inner.down(inner.up(x).relu()),
    "softmax": lambda inner, x: x.softmax(-1),
    "mean": lambda inner, x: x - x.mean(2, keepdim=True),
    "heads": lambda inner, x: functional.normalize(x.view(*x.shape[:-1], 2, -1), dim=-1).flatten(-2),
    "halves": lambda inner, x: torch.cat(x.chunk(2, dim=-1)[::-1], dim=-1),
    "rows": lambda inner, x: x.reshape(-1, WIDTH).sigmoid().view(x.shape),
    "dropout": lambda inner, x: functional.dropout(x, 0.5, inner.training),
    "a norm": lambda inner, x: functional.layer_norm(x, (WIDTH,)),
}
MIXED: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "softmax": lambda inner, x: x.softmax(1),
    "mean": lambda inner, x: x - x.mean(1, keepdim=True),
    "mean of all": lambda inner, x: x - x.mean(),
    "of samples": lambda inner, x: x - x.mean(0, keepdim=True),
    "sum": lambda inner, x: x.cumsum(-2),
    "flip": lambda inner, x: x.flip(1),
    "shift": lambda inner, x: functional.pad(x, (0, 0, 1, -1)),
    "attention": lambda inner, x: functional.scaled_dot_product_attention(x, x, x, is_causal=True),
    "scores": lambda inner, x: x @ x.transpose(1, 2) @ x,
    "positions": lambda inner, x: x * inner.positions[: x.shape[1]] if x.shape[1] <= 7 else x,
    "other rows": lambda inner, x: x.reshape(-1, 3 * WIDTH).softmax(-1).view(x.shape),
    "a choice": lambda inner, x: x[x.sum(-1) > 0].sum() + x,
    "a number": lambda inner, x: x * float(x.detach().abs().max() > 0) if not x.is_meta else x.flip(0),
    "a buffer": into_buffer,
    "a new tensor": into_new,
    "a result of its own": lambda inner, x: (
        torch.mul(x, 2, out=torch.zeros(*x.shape)) if not x.requires_grad else x.flip(0)
    ),
    "a product over tokens": lambda inner, x: x + (x.sum(-1) @ torch.ones(x.shape[1], x.shape[1]))[..., None],
    "code of one's own": by_hand,
    "a draw for all tokens": lambda inner, x: x * torch.rand(WIDTH).to(x),
    "another module's weight": lambda inner, x: x * ELSEWHERE.to(x),
}


@pytest.mark.parametrize("name", ALONE)
def test_what_treats_each_token_alone_is_tiled(name: str) -> None:
    model, x = net(ALONE[name]).double(), torch.randn(2, 11, WIDTH, dtype=torch.float64)
    expected = gradients(model, x)
    names = lt_offload.tile_tokens(model, 5)
    assert set(names) == {f"{at}{inner}" for at in range(3) for inner in ("", ".inner")}
    for mine, other in zip(gradients(model, x), expected, strict=True):
        torch.testing.assert_close(mine, other)


def gradients(model: nn.Module, x: Tensor) -> list[Tensor]:
    torch.manual_seed(3)
    entered = x.clone().requires_grad_()
    out = entered
    for layer in model.children():
        out = layer(out, 0.5)
    wanted = [entered, *(p for p in model.parameters() if p.ndim == 2 and len(p) != 7)]
    return [out, *torch.autograd.grad(out.square().sum(), wanted), torch.rand(1)]


@pytest.mark.parametrize("name", MIXED)
def test_what_mixes_tokens_or_might_is_not(name: str) -> None:
    model = net(MIXED[name])
    with pytest.raises(lt_offload.ConfigError, match="tile_tokens=5: no part of Sequential .* leave it out"):
        lt_offload.tile_tokens(model, 5)
    assert all(not inner.seen.any() for inner in model.modules() if isinstance(inner, Inner))


def test_dropout_is_drawn_tile_by_tile_and_again() -> None:
    model, x = net(ALONE["dropout"]), torch.randn(2, 11, WIDTH)
    lt_offload.tile_tokens(model, 5)
    inner: Any = model.get_submodule("0.inner")
    torch.manual_seed(0)
    entered = x.clone().requires_grad_()
    out = inner(entered)
    after = torch.rand(1)
    out.sum().backward()
    torch.manual_seed(0)
    again = x.clone().requires_grad_()
    rows = again.view(22, -1).tensor_split(5)
    tiles = [ALONE["dropout"](inner, inner.down(torch.tanh(inner.up(tile)))) for tile in rows]
    assert torch.equal(out.view(22, -1), torch.cat(tiles))
    assert torch.equal(after, torch.rand(1))
    torch.cat(tiles).sum().backward()
    assert entered.grad is not None
    assert again.grad is not None
    torch.testing.assert_close(entered.grad, again.grad)


def test_weights_of_a_functional_call_get_their_gradients() -> None:
    model, x = net(ALONE["a product"]), torch.randn(2, 11, WIDTH)
    inner = model.get_submodule("0.inner")
    weights = {name: p.detach().clone().requires_grad_() for name, p in inner.named_parameters()}
    lt_offload.tile_tokens(model, 5)
    torch.func.functional_call(inner, weights, (x,)).sum().backward()
    inner(x).sum().backward()
    for name, p in inner.named_parameters():
        grad = weights[name].grad
        assert grad is p.grad is None or torch.equal(grad, p.grad)  # type: ignore[arg-type]


def test_a_dropout_that_is_raised_later_is_drawn_again() -> None:
    layers = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Dropout(0.0), nn.Tanh()) for _ in range(2)]
    model = nn.Sequential(*layers)
    lt_offload.tile_tokens(model, 5)
    layers[0].get_submodule("1").p = 0.5  # type: ignore[assignment]
    x = torch.randn(2, 11, WIDTH)
    out = layers[0](x)
    out.sum().backward()
    kept = (1 - out.square()) * (out != 0) * 2
    bias = layers[0].get_parameter("0.bias")
    assert bias.grad is not None
    torch.testing.assert_close(bias.grad, kept.sum((0, 1)))


def test_gradients_are_added_up_from_the_first_tile_on() -> None:
    model, x = net(ALONE["a product"]), torch.randn(1, 12, WIDTH)
    plain: Any = copy.deepcopy(model.get_submodule("0.inner"))
    lt_offload.tile_tokens(model, 5)
    inner = model.get_submodule("0.inner")
    inner(x).square().sum().backward()
    for tile in x.tensor_split(3, dim=1):
        plain(tile).square().sum().backward()
    for mine, other in zip(inner.parameters(), plain.parameters(), strict=True):
        assert (mine.grad is None) == (other.grad is None)
        assert mine.grad is None or torch.equal(mine.grad, other.grad)


def test_hooks_autocast_and_other_calls_keep_working() -> None:
    model = net(ALONE["a product"])
    inner, other = model.get_submodule("0.inner"), model.get_submodule("1.inner")
    seen: list[torch.Size] = []
    inner.register_forward_hook(lambda module, args, out: seen.append(out.shape))
    other.get_submodule("up").register_forward_hook(lambda module, args, out: seen.append(out.shape))
    assert "1.inner" not in lt_offload.tile_tokens(model, 5)  # a hook within it would see tiles
    x = torch.randn(2, 11, WIDTH)
    with torch.autocast("cpu", torch.bfloat16):
        out = inner(x)
        assert out.dtype == torch.bfloat16
        other(x)
    out.sum().backward()
    assert all(p.grad is None or p.grad.dtype == torch.float32 for p in inner.parameters())
    assert inner.get_parameter("up.weight").grad is not None
    with torch.no_grad():
        flat, whole = inner(x.view(22, WIDTH)), inner(x)
    assert torch.equal(flat, whole.view(22, WIDTH))
    assert seen[:2] == [(2, 11, WIDTH), (2, 11, 4 * WIDTH)]


@pytest.mark.parametrize("value", [0, -1, 2.5, True, "many"])
def test_numbers_that_are_none_are_refused(value: Any) -> None:
    with pytest.raises(lt_offload.ConfigError, match=r"tile_tokens=.* must be at least 1"):
        lt_offload.tile_tokens(models.build("llama"), value)
    with pytest.raises(lt_offload.ConfigError, match=r"tile_tokens=.* must be at least 1"):
        lt_offload.OffmateStrategy(tile_tokens=value)


def test_compiled_blocks_are_refused() -> None:
    model = models.build("llama")
    model.get_submodule("model.layers.0").compile()
    with pytest.raises(lt_offload.ConfigError, match="tile_tokens=5 cannot be combined with compiled blocks"):
        lt_offload.tile_tokens(model, 5)


def test_layers_of_one_class_are_told_apart() -> None:
    model = nn.Sequential(Layer(ALONE["softmax"]), Layer(MIXED["softmax"]), Layer(ALONE["softmax"]))
    assert lt_offload.tile_tokens(model, 5) == ("0", "0.inner", "2", "2.inner")
