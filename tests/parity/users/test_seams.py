"""What users' code does at the seams between blocks: the same numbers as plain PyTorch, or refused by name."""

from __future__ import annotations

import copy
import pickle
import random
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
import transformers
from torch import Tensor, nn

import lt_offload
from lt_offload.errors import UnsupportedError
from lt_offload.execute.engine import Engine
from lt_offload.model.blocks import find_blocks
from tests.support import models, plans
from tests.support.engines import Result, differences, installed

RUNS = {
    "recorded": ("keep", "offload"),
    "run again": ("recompute", "mixed", "reload"),
    "both": ("recompute", "keep", "mixed", "offload"),
}
"""Options of a plan's blocks, in turn."""
HIDDEN, VOCAB = 32, 61


class Layer(nn.Module):
    """A residual layer that uses its input twice."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.linear = nn.LayerNorm(HIDDEN), nn.Linear(HIDDEN, HIDDEN)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.inner(self.norm(x))

    def inner(self, x: Tensor) -> Tensor:
        return F.gelu(self.linear(x))


class Net(nn.Module):
    """Embedding, layers and head with a loss; ``between`` and ``after`` are what a case adds."""

    def __init__(self, layer: Callable[[], nn.Module] = Layer, **hooks: Callable[..., Any]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(VOCAB, HIDDEN)
        self.layers = nn.ModuleList(layer() for _ in range(4))
        self.head = nn.Linear(HIDDEN, VOCAB)
        self.after: Callable[..., Tensor] = hooks.get("after", lambda net, loss, hidden: loss)
        self.context: Callable[[], Any] = hooks.get("context", nullcontext)

    def forward(self, ids: Tensor, labels: Tensor) -> dict[str, Tensor]:
        with self.context():
            x = self.embed(ids)
            hidden: list[Tensor] = []
            for layer in self.layers:
                x = layer(x)
                if self.after is deep_supervision:
                    hidden.append(x)
            logits = self.head(x)
            loss = F.cross_entropy(logits.float().flatten(0, 1), labels.flatten())
            return {"loss": self.after(self, loss, hidden)}


def rows(steps: int = 4) -> list[dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    made = [torch.randint(VOCAB, (2, 6), generator=generator) for _ in range(steps)]
    return [{"ids": ids, "labels": ids.roll(1, 1)} for ids in made]


def seed() -> None:
    torch.manual_seed(5)
    random.seed(5)
    np.random.seed(5)  # noqa: NPY002 - that it is global is the point


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)


Loop = Callable[[nn.Module, torch.optim.Optimizer, list[dict[str, Tensor]]], list[Tensor]]


def ordinary(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    batches: list[dict[str, Tensor]],
    around_forward: Callable[[], AbstractContextManager[Any]] = nullcontext,
) -> list[Tensor]:
    losses = []
    for batch in batches:
        with around_forward():
            loss = model(**batch)["loss"]
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach().clone())
    return losses


def plain(make: Callable[[], nn.Module], loop: Loop = ordinary) -> Result:
    model = make()
    optimizer = adamw(model)
    seed()
    return Result(loop(model, optimizer, rows()), model, optimizer)


@contextmanager
def engine_of(model: nn.Module, optimizer: torch.optim.Optimizer, options: tuple[str, ...]) -> Iterator[Engine]:
    """An engine in a loop of our own, with a plan that streams everything and has every place for updates."""
    structure = find_blocks(model)
    plan = plans.streamed(structure, optimizer, options=options, places=("device", "host", "paged"))
    with installed(model, optimizer, plan) as engine:
        yield engine


def ours(make: Callable[[], nn.Module], options: tuple[str, ...], loop: Loop = ordinary) -> Result:
    model = make()
    optimizer = adamw(model)
    with engine_of(model, optimizer, options):
        seed()
        losses = loop(model, optimizer, rows())
    return Result(losses, model, optimizer)


def by_budget(make: Callable[[], nn.Module], budget: str, loop: Loop = ordinary) -> Result:
    """The public way: measured, planned for a share of what training takes, and carried out."""
    model = make()
    optimizer = adamw(model)
    profile = lt_offload.profile(model, rows()[0], optimizer=optimizer)
    with pytest.raises(lt_offload.InfeasibleError) as caught:
        lt_offload.solve(profile, memory=1000)
    assert caught.value.needed_bytes is not None
    memory = int(caught.value.needed_bytes * {"tight": 1.02, "middle": 1.6, "resident": 20.0}[budget])
    planner = "resident" if budget == "resident" else "auto"
    plan = lt_offload.solve(profile, memory=memory, planner=planner)
    with lt_offload.offloaded(model, optimizer, rows()[0], plan=plan, accelerator="cpu"):
        seed()
        losses = loop(model, optimizer, rows())
    return Result(losses, model, optimizer)


def refusal(make: Callable[[], nn.Module]) -> str:
    """The error of the profile, which comes before any training."""
    model = make()
    with pytest.raises(UnsupportedError) as caught:
        lt_offload.profile(model, rows()[0], optimizer=adamw(model))
    return str(caught.value)


def fault(options: tuple[str, ...], loop: Loop, make: Callable[[], nn.Module] = Net) -> str:
    """The error that a loop ends with."""
    with pytest.raises(UnsupportedError) as caught:
        ours(make, options, loop)
    return str(caught.value)


@pytest.mark.parametrize("budget", ["tight", "middle", "resident"])
def test_an_ordinary_loop(budget: str) -> None:
    assert differences(plain(Net), by_budget(Net, budget)) == []


# -- weights outside their block --------------------------------------------------------------------------------------


PENALTIES: dict[str, Callable[..., Tensor]] = {
    "a layer's weight": lambda net, loss, hidden: loss + 0.1 * net.layers[1].linear.weight.square().sum(),
    "all weights": lambda net, loss, hidden: loss + 0.1 * sum(p.norm() for p in net.parameters()),
    "the head": lambda net, loss, hidden: loss + F.linear(torch.ones(HIDDEN), net.head.weight).mean(),
}


class TiedByFunction(Net):
    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(HIDDEN, HIDDEN)

    def forward(self, ids: Tensor, labels: Tensor) -> dict[str, Tensor]:
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x)
        logits = F.linear(self.head(x), self.embed.weight)
        return {"loss": F.cross_entropy(logits.flatten(0, 1), labels.flatten())}


@pytest.mark.parametrize("name", ["tied", *PENALTIES])
def test_a_loss_of_weights_outside_their_block_is_refused_before_training(name: str) -> None:
    assert "outside its block" in refusal(lambda: TiedByFunction() if name == "tied" else Net(after=PENALTIES[name]))


@pytest.mark.parametrize("options", RUNS.values(), ids=RUNS)
def test_such_a_loss_later_on_is_refused_when_it_comes(options: tuple[str, ...]) -> None:
    def make() -> Net:
        calls = iter(range(100))
        return Net(after=lambda n, loss, h: PENALTIES["all weights"](n, loss, h) if next(calls) > 1 else loss)

    assert "outside its block" in fault(options, ordinary, make)


def log_norms(net: nn.Module, loss: Tensor, hidden: list[Tensor]) -> Tensor:
    net.__dict__.setdefault("norms", []).append([float(p.norm().detach()) for p in net.parameters()])
    return loss


@pytest.mark.parametrize("budget", ["tight", "middle", "resident"])
def test_norms_in_the_step(budget: str) -> None:
    def make() -> Net:
        return Net(after=log_norms)

    expected, found = plain(make), by_budget(make, budget)
    assert expected.model.norms == found.model.norms[-len(expected.model.norms) :]  # type: ignore[union-attr, operator]
    assert differences(expected, found) == []


def test_a_weight_that_meets_a_tensor_of_the_device_is_named() -> None:
    model = Net()
    optimizer = adamw(model)
    refused = pytest.raises(UnsupportedError, match=r"head\.weight.*outside its block")
    with engine_of(model, optimizer, ("keep",)), refused:
        F.linear(torch.empty(3, HIDDEN, device="meta"), model.head.weight)


# -- what is inside a block -------------------------------------------------------------------------------------------


class Auxiliary(Layer):
    def forward(self, x: Tensor) -> Tensor:
        out = super().forward(x)
        self.aux = self.linear(x).square().mean()
        return out


class Returning(Layer):
    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        return super().forward(x), self.linear(x).square().mean()


class NetOfPairs(Net):
    def forward(self, ids: Tensor, labels: Tensor) -> dict[str, Tensor]:
        x, extra = self.embed(ids), []
        for layer in self.layers:
            x, aux = layer(x)
            extra.append(aux)
        loss = F.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())
        return {"loss": loss + 0.1 * torch.stack(extra).sum()}


def of_attribute() -> Net:
    return Net(Auxiliary, after=lambda net, loss, hidden: loss + sum(layer.aux for layer in net.layers))


def of_hooks() -> Net:
    caught: list[Tensor] = []
    net = Net(after=lambda net, loss, hidden: loss + caught.pop().mean())
    net.layers[2].linear.register_forward_hook(lambda module, args, out: caught.append(out))
    return net


@pytest.mark.parametrize("make", [of_attribute, of_hooks])
def test_a_loss_of_inner_tensors_is_refused_before_training(make: Callable[[], nn.Module]) -> None:
    assert "from inside block layers." in refusal(make)


class Keeping(Layer):
    """Keeps inner tensors in attributes of several kinds, some from the beginning and others later."""

    kinds: tuple[str, ...] = ("plain", "detached", "listed", "paired", "buffer")

    def __init__(self) -> None:
        super().__init__()
        self.calls, self.late = 0, 2
        self.listed: list[Tensor] = []
        self.register_buffer("buffer", None)

    def inner(self, x: Tensor) -> Tensor:
        self.calls += 1
        kept = self.linear(x).square().mean()
        self.plain, self.detached, self.last = kept, kept.detach(), x.detach().mean()
        self.listed[:] = [kept * 1]
        self.paired, self.buffer = (self.calls, kept * 1), kept * 1
        self.average = 0.9 * getattr(self, "average", 0.0) + 0.1 * self.detached
        if self.calls > self.late:
            self.fresh, self.loose = kept * 1, kept.detach()
        return super().inner(x) + self.average


def with_auxiliary(pick: Callable[[Any], Tensor], late: int = 2) -> Callable[[], Net]:
    """A net whose loss uses something of a layer from its third iteration on."""

    def make() -> Net:
        calls = iter(range(100))

        def after(net: Net, loss: Tensor, hidden: list[Tensor]) -> Tensor:
            return loss + 0.1 * pick(net.layers[1]) if next(calls) >= late else loss

        return Net(Keeping, after=after)

    return make


LATE_TENSORS: dict[str, Callable[[Any], Tensor]] = {
    "plain": lambda layer: layer.plain,
    "listed": lambda layer: layer.listed[0],
    "paired": lambda layer: layer.paired[1],
    "buffer": lambda layer: layer.buffer,
    "fresh": lambda layer: layer.fresh,
}
LOGGED: dict[str, Callable[[Any], Tensor]] = {
    "detached by us": lambda layer: layer.plain.detach() + layer.fresh.detach(),
    "detached": lambda layer: layer.detached,
    "average": lambda layer: layer.average + float(layer.last.numpy()),
    "late": lambda layer: layer.loose + layer.listed[0].item(),
}


@pytest.mark.parametrize("options", RUNS.values(), ids=RUNS)
@pytest.mark.parametrize("name", LATE_TENSORS)
def test_a_loss_that_uses_inner_tensors_later_on_is_refused(name: str, options: tuple[str, ...]) -> None:
    assert "the loss uses" in fault(options, ordinary, with_auxiliary(LATE_TENSORS[name]))


@pytest.mark.parametrize("options", RUNS.values(), ids=RUNS)
@pytest.mark.parametrize("name", LOGGED)
def test_inner_tensors_without_gradients_may_be_used(name: str, options: tuple[str, ...]) -> None:
    make = with_auxiliary(LOGGED[name])
    expected, found = plain(make), ours(make, options)
    assert differences(expected, found) == []
    for left, right in zip(expected.model.layers, found.model.layers, strict=True):  # type: ignore[arg-type]
        for kept in ("plain", "detached", "fresh", "loose", "average"):
            assert torch.equal(getattr(left, kept), getattr(right, kept))
            assert getattr(left, kept).requires_grad == getattr(right, kept).requires_grad


class OfInput(Layer):
    def inner(self, x: Tensor) -> Tensor:
        return super().inner(x)

    def forward(self, x: Tensor) -> Tensor:
        self.aux = x.square().mean()
        return super().forward(x)


@pytest.mark.parametrize("options", RUNS.values(), ids=RUNS)
def test_a_loss_of_a_block_input_that_is_kept_is_refused(options: tuple[str, ...]) -> None:
    def make() -> Net:
        calls = iter(range(100))
        return Net(OfInput, after=lambda net, loss, h: loss + net.layers[1].aux if next(calls) > 1 else loss)

    assert "from inside block layers.1" in fault(options, ordinary, make)


@pytest.mark.parametrize("budget", ["tight", "middle", "resident"])
def test_what_a_block_returns_may_be_part_of_the_loss(budget: str) -> None:
    def make() -> Net:
        return NetOfPairs(Returning)

    assert differences(plain(make), by_budget(make, budget)) == []


def test_router_logits_and_collected_outputs_are_refused() -> None:
    options = {"num_key_value_heads": 2, "num_local_experts": 2, "num_experts_per_tok": 1}
    model = models.build("mixtral", **options, output_router_logits=True)
    with pytest.raises(UnsupportedError, match="from inside block"):
        lt_offload.profile(model, models.batch(model), optimizer=adamw(model))
    model = models.build()
    for argument in ("use_cache", "output_attentions"):
        batch = models.batch(model) | {argument: True}
        with pytest.raises(UnsupportedError, match="past_key_values|use_cache|attentions"):
            lt_offload.profile(model, batch, optimizer=adamw(model))


def test_inner_tensors_of_a_model_without_a_loss_are_refused() -> None:
    model = models.build(attn_implementation="eager")
    batch = {"input_ids": models.batch(model)["input_ids"], "output_attentions": True}
    with pytest.raises(UnsupportedError, match="attentions|depends on weight"):
        lt_offload.profile(model, batch, optimizer=adamw(model))


@pytest.mark.parametrize("options", RUNS.values(), ids=RUNS)
def test_a_cache_that_comes_later_is_refused(options: tuple[str, ...]) -> None:
    model = models.build()
    batch = models.batch(model)
    optimizer = adamw(model)
    with engine_of(model, optimizer, options):
        model(**batch).loss.backward()
        optimizer.step()
        with pytest.raises(UnsupportedError, match=r"block .* was called with (past_key_values|use_cache)="):
            model(**batch, use_cache=True)


def spied(net: Net | None = None) -> Net:
    """Its hooks count calls and keep sums of what they see."""
    net = net or Net()
    net.__dict__["sums"] = sums = []
    net.layers[1].linear.register_forward_hook(lambda module, args, out: sums.append(float(out.detach().sum())))
    net.layers[2].norm.register_forward_pre_hook(lambda module, args: sums.append(float(args[0].detach().sum())))
    return net


def seen_by(net: Any) -> list[float]:
    return list(net.sums)


@pytest.mark.parametrize("budget", ["tight", "middle", "resident"])
def test_forward_hooks_inside_blocks_are_called_once(budget: str) -> None:
    expected, found = plain(spied), by_budget(spied, budget)
    assert differences(expected, found) == []
    assert seen_by(expected.model) == seen_by(found.model)
    assert len(seen_by(found.model)) == 2 * len(rows())


def test_profiling_leaves_what_forward_hooks_collect_as_it_was() -> None:
    net = spied()
    profile = lt_offload.profile(net, rows()[0], optimizer=adamw(net))
    assert seen_by(net) == []
    offered = [{option.name for option in block.options} - {"keep", "offload"} for block in profile.blocks]
    assert [bool(names) for names in offered] == [False, True, False, False, True, False]


LATE_HOOKS: dict[str, Callable[[Any], Any]] = {
    "hook": lambda net: net.layers[2].linear.register_forward_hook(lambda *_: None),
    "pre-hook": lambda net: net.layers[2].linear.register_forward_pre_hook(lambda *_: None),
    "global": lambda net: nn.modules.module.register_module_forward_hook(lambda *_: None),
}


@pytest.mark.parametrize("name", LATE_HOOKS)
def test_forward_hooks_that_come_later_are_refused_where_a_block_runs_again(name: str) -> None:
    handles: list[Any] = []
    loop = changing(lambda net, optimizer: handles.append(LATE_HOOKS[name](net)))
    try:
        assert "block layers." in fault(RUNS["run again"], loop)
        found = ours(Net, RUNS["recorded"], loop)
    finally:
        for handle in handles:
            handle.remove()
    assert differences(plain(Net), found) == []


@pytest.mark.parametrize("when", ["before", "after the forward"])
def test_forward_hooks_that_no_plan_was_made_for_are_refused(when: str) -> None:
    def loop(model: nn.Module, optimizer: torch.optim.Optimizer, batches: list[dict[str, Tensor]]) -> list[Tensor]:
        loss = model(**batches[0])["loss"]
        spied(model)  # type: ignore[arg-type]
        loss.backward()
        return []

    message = fault(RUNS["run again"], loop, spied if when == "before" else Net)
    assert "forward hook" in message
    assert "in block layers.1" in message


def old_norms() -> Net:
    """Reparametrised in torch's old way, by hooks."""
    net = Net()
    nn.utils.spectral_norm(net.layers[1].linear)
    return net


@pytest.mark.parametrize("options", RUNS.values(), ids=RUNS)
def test_hooks_of_libraries_may_run_again(options: tuple[str, ...]) -> None:
    assert differences(plain(old_norms), ours(old_norms, options)) == []


# -- several consumers ------------------------------------------------------------------------------------------------


def deep_supervision(net: Net, loss: Tensor, hidden: list[Tensor]) -> Tensor:
    return loss + sum(h.square().mean() for h in hidden)


class Skips(Net):
    def forward(self, ids: Tensor, labels: Tensor) -> dict[str, Tensor]:
        x = self.embed(ids)
        first = self.layers[0](x)
        x = self.layers[2](self.layers[1](first))
        logits = self.head(self.layers[3](x + first))
        return {"loss": F.cross_entropy(logits.flatten(0, 1), labels.flatten())}


class Sequential(Layer):
    """Uses its input once."""

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x)


@pytest.mark.parametrize("make", [Skips, lambda: Net(after=deep_supervision)], ids=["skips", "supervision"])
def test_several_consumers_of_a_residual_block_are_refused_before_training(make: Callable[[], nn.Module]) -> None:
    assert "is used in several places" in refusal(make)


@pytest.mark.parametrize("options", RUNS.values(), ids=RUNS)
@pytest.mark.parametrize(
    "make",
    [lambda: Skips(Sequential), lambda: Net(Sequential, after=deep_supervision)],
    ids=["skips", "supervision"],
)
def test_several_consumers_of_a_block_that_uses_its_input_once(
    make: Callable[[], nn.Module], options: tuple[str, ...]
) -> None:
    model = make()
    lt_offload.profile(model, rows()[0], optimizer=adamw(model))
    assert differences(plain(make), ours(make, options)) == []


def supervised_late(layer: Callable[[], nn.Module] = Layer, late: int = 2) -> Callable[[], Net]:
    """A net whose loss uses the outputs of all layers from its third iteration on."""

    def make() -> Net:
        net = Net(layer, after=deep_supervision)
        calls = iter(range(100))

        def later(module: nn.Module, args: Any, kwargs: Any) -> None:
            net.after = deep_supervision if next(calls) >= late else plainly

        net.register_forward_pre_hook(later, with_kwargs=True)
        return net

    return make


def plainly(net: Net, loss: Tensor, hidden: list[Tensor]) -> Tensor:
    return loss


class SkippingLate(Skips):
    """Adds a skip from its third iteration on."""

    def forward(self, ids: Tensor, labels: Tensor) -> dict[str, Tensor]:
        self.__dict__["calls"] = vars(self).get("calls", 0) + 1
        return super().forward(ids, labels) if self.calls > 2 else Net.forward(self, ids, labels)


@pytest.mark.parametrize("options", RUNS.values(), ids=RUNS)
@pytest.mark.parametrize("make", [supervised_late(), SkippingLate], ids=["supervision", "skip"])
def test_several_consumers_that_come_later_are_refused(make: Callable[[], nn.Module], options: tuple[str, ...]) -> None:
    assert "is used in several places" in fault(options, ordinary, make)


@pytest.mark.parametrize("options", RUNS.values(), ids=RUNS)
def test_outputs_of_blocks_may_be_watched(options: tuple[str, ...]) -> None:
    """Logged with a graph, with hooks and gradients of their own, and used by the loss later where that is exact."""

    def watching(net: Net, loss: Tensor, hidden: list[Tensor]) -> Tensor:
        net.__dict__.setdefault("norms", []).extend(float(h.norm().detach()) for h in net.outputs)
        return loss

    def make(layer: Callable[[], nn.Module] = Layer) -> Net:
        net = Net(layer, after=watching)

        def keep(module: nn.Module, args: Any, out: Tensor) -> None:
            out.register_hook(lambda gradient: gradient * 0.9)
            out.retain_grad()
            net.__dict__["outputs"] = [out]

        net.layers[1].register_forward_hook(keep)
        return net

    expected, found = plain(make), ours(make, options)
    assert differences(expected, found) == []
    assert torch.equal(expected.model.outputs[0].grad, found.model.outputs[0].grad)  # type: ignore[union-attr, index]
    assert expected.model.norms == found.model.norms
    make = supervised_late(Sequential)
    assert differences(plain(make), ours(make, options)) == []


class Wrapped(nn.Module):
    """A model of transformers, called as the nets here are."""

    def __init__(self, make: Callable[[], nn.Module]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.model = make()

    def forward(self, ids: Tensor, labels: Tensor) -> dict[str, Tensor]:
        return {"loss": self.model(input_ids=ids, labels=labels).loss}


def bert(tied: bool = True) -> Wrapped:
    sizes = {"num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32, "max_position_embeddings": 16}
    config = transformers.BertConfig(vocab_size=VOCAB, hidden_size=16, tie_word_embeddings=tied, **sizes)
    return Wrapped(lambda: transformers.BertForMaskedLM(config))


def t5() -> Wrapped:
    sizes = {"d_model": 16, "d_kv": 8, "d_ff": 32, "num_layers": 2, "num_heads": 2, "decoder_start_token_id": 0}
    config = transformers.T5Config(vocab_size=VOCAB, **sizes)
    return Wrapped(lambda: transformers.T5ForConditionalGeneration(config))


def test_a_tied_embedding_that_is_no_block_is_refused_before_training() -> None:
    assert "decoder.weight outside its block" in refusal(bert)


@pytest.mark.parametrize("budget", ["tight", "resident"])
def test_a_masked_language_model(budget: str) -> None:
    def make() -> Wrapped:
        return bert(tied=False)

    assert differences(plain(make), by_budget(make, budget)) == []


def test_an_encoder_whose_output_every_layer_of_a_decoder_uses_is_refused_before_training() -> None:
    assert "is used in several places" in refusal(t5)


# -- gradients in a loop of one's own ---------------------------------------------------------------------------------


def between(act: Callable[[nn.Module, torch.optim.Optimizer], Any]) -> Loop:
    """A loop that does something between the backward and the step."""

    def loop(model: nn.Module, optimizer: torch.optim.Optimizer, batches: list[dict[str, Tensor]]) -> list[Tensor]:
        for batch in batches:
            model(**batch)["loss"].backward()
            act(model, optimizer)
            optimizer.step()
            optimizer.zero_grad()
        return []

    return loop


def scaled(model: nn.Module, optimizer: torch.optim.Optimizer, batches: list[dict[str, Tensor]]) -> list[Tensor]:
    scaler = torch.amp.GradScaler("cpu")
    for batch in batches:
        scaler.scale(model(**batch)["loss"]).backward()
        scaler.step(optimizer)
        scaler.update()
    return []


def accumulating(model: nn.Module, optimizer: torch.optim.Optimizer, batches: list[dict[str, Tensor]]) -> list[Tensor]:
    for at, batch in enumerate(batches):
        model(**batch)["loss"].backward()
        if at % 2:
            optimizer.step()
            optimizer.zero_grad()
    return []


def skipping(model: nn.Module, optimizer: torch.optim.Optimizer, batches: list[dict[str, Tensor]]) -> list[Tensor]:
    for batch in batches:
        model(**batch)["loss"].backward()
        optimizer.zero_grad()
    return []


def twice(model: nn.Module, optimizer: torch.optim.Optimizer, batches: list[dict[str, Tensor]]) -> list[Tensor]:
    loss = model(**batches[0])["loss"]
    loss.backward(retain_graph=True)
    loss.backward()
    return []


def stepping_twice(
    model: nn.Module, optimizer: torch.optim.Optimizer, batches: list[dict[str, Tensor]]
) -> list[Tensor]:
    model(**batches[0])["loss"].backward()
    optimizer.step()
    optimizer.step()
    return []


def not_zeroing(model: nn.Module, optimizer: torch.optim.Optimizer, batches: list[dict[str, Tensor]]) -> list[Tensor]:
    for batch in batches:
        model(**batch)["loss"].backward()
        optimizer.step()
    return []


def each(act: Callable[[nn.Parameter], Any]) -> Loop:
    return between(lambda model, optimizer: [act(p) for p in model.parameters()])


def removed(parameter: nn.Parameter) -> None:
    parameter.grad = None


def replaced(parameter: nn.Parameter) -> None:
    parameter.grad = torch.zeros_like(parameter)


GRADIENTS: dict[str, Loop] = {
    "norm": between(lambda model, optimizer: nn.utils.clip_grad_norm_(model.parameters(), 1.0)),
    "value": between(lambda model, optimizer: nn.utils.clip_grad_value_(model.parameters(), 1.0)),
    "read": each(lambda p: p.grad.norm()),  # type: ignore[union-attr]
    "edited": each(lambda p: p.grad.mul_(2)),  # type: ignore[union-attr]
    "removed": each(removed),
    "replaced": each(replaced),
    "scaler": scaled,
    "accumulated": accumulating,
    "skipped": skipping,
    "backward twice": twice,
    "step twice": stepping_twice,
    "not zeroed": not_zeroing,
    "weights read": each(lambda p: p.norm()),
    "weights written": each(lambda p: p.data.mul_(2)),
    "state_dict": between(lambda model, optimizer: model.state_dict()),
    "optimizer": between(lambda model, optimizer: optimizer.state_dict()),
}


@pytest.mark.parametrize("options", [RUNS["recorded"], RUNS["run again"]], ids=["recorded", "run again"])
@pytest.mark.parametrize("name", GRADIENTS)
def test_what_cannot_be_done_with_gradients_is_refused_at_once(name: str, options: tuple[str, ...]) -> None:
    message = fault(options, GRADIENTS[name])
    assert "weight" in message or "backward" in message


def test_gradients_may_be_looked_at_without_using_them() -> None:
    shapes: list[Any] = []

    def look(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        shapes.extend((p.grad is not None, p.grad.shape == p.shape, f"{p.grad}") for p in model.parameters())  # type: ignore[union-attr]

    expected = plain(Net)
    found = ours(Net, RUNS["both"], between(look))
    assert {pair[:2] for pair in shapes} == {(True, True)}
    assert "ConsumedGradient(weight embed.weight" in shapes[0][2]
    found.losses = expected.losses
    assert differences(expected, found) == []
    assert all(p.grad is None for p in found.model.parameters())


def by_closure(model: nn.Module, optimizer: torch.optim.Optimizer, batches: list[dict[str, Tensor]]) -> list[Tensor]:
    def closure(batch: dict[str, Tensor]) -> Tensor:
        optimizer.zero_grad()
        loss: Tensor = model(**batch)["loss"]
        loss.backward()
        return loss

    return [optimizer.step(lambda batch=batch: closure(batch)).detach().clone() for batch in batches]  # type: ignore[misc]


@pytest.mark.parametrize("budget", ["tight", "middle", "resident"])
def test_a_step_with_a_closure(budget: str) -> None:
    assert differences(plain(Net, by_closure), by_budget(Net, budget, by_closure)) == []


def evaluating(model: nn.Module, optimizer: torch.optim.Optimizer, batches: list[dict[str, Tensor]]) -> list[Tensor]:
    """Forwards with a graph that nobody uses, reading and saving in between."""
    found = []
    for batch in batches:
        found.append(model(**batch)["loss"].detach().clone())
        found += [value.clone() for value in model.state_dict().values()]
        found += ordinary(model, optimizer, [batch])
        found += [state["exp_avg"].clone() for state in optimizer.state.values()]
        found += [copy.deepcopy(model)(**batch)["loss"].detach()]
        found += [p.clone() for p in pickle.loads(pickle.dumps(model.layers)).parameters()]
    return found


@pytest.mark.parametrize("options", RUNS.values(), ids=RUNS)
def test_reading_saving_and_copying_between_steps(options: tuple[str, ...]) -> None:
    assert differences(plain(Net, evaluating), ours(Net, options, evaluating)) == []


class Numbered(torch.optim.Optimizer):
    """Signed descent whose states are a Python counter and the size of the last gradient."""

    def __init__(self, params: Any, lr: float = 1e-2) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    state = self.state[p]
                    state["steps"] = state.get("steps", 0) + 1
                    state["size"] = float(p.grad.abs().max())
                    p.add_(p.grad.sign(), alpha=-group["lr"] / state["steps"])


@pytest.mark.parametrize("options", RUNS.values(), ids=RUNS)
def test_states_that_are_numbers(options: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(globals(), "adamw", lambda model: Numbered(model.parameters()))

    def loop(model: nn.Module, optimizer: torch.optim.Optimizer, batches: list[dict[str, Tensor]]) -> list[Tensor]:
        found = []
        for batch in batches:
            found += ordinary(model, optimizer, [batch])
            states = [optimizer.state[p] for p in model.parameters()]
            found += [torch.tensor([state["steps"], state["size"]]) for state in states]
        return found

    assert differences(plain(Net, loop), ours(Net, options, loop)) == []


@pytest.mark.parametrize("options", RUNS.values(), ids=RUNS)
def test_the_guard_knows_the_memory_of_states_whatever_happens_to_them(options: tuple[str, ...]) -> None:
    model = Net()
    optimizer = adamw(model)
    with engine_of(model, optimizer, options) as engine:
        for at, batch in enumerate(rows()):
            ordinary(model, optimizer, [batch])
            if at == 1:
                optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
            values = [value for state in optimizer.state.values() for value in state.values()]
            assert all(engine._guard.find(value) is not None for value in values)
            assert engine._guard._of_states.keys() == {value.untyped_storage()._cdata for value in values}


# -- other backwards --------------------------------------------------------------------------------------------------


def other(act: Callable[[nn.Module, Tensor], Any]) -> Loop:
    def loop(model: nn.Module, optimizer: torch.optim.Optimizer, batches: list[dict[str, Tensor]]) -> list[Tensor]:
        for batch in batches:
            act(model, model(**batch)["loss"])
            optimizer.step()
            optimizer.zero_grad()
        return []

    return loop


PARTIAL: dict[str, Loop] = {
    "grad of weights": other(lambda model, loss: torch.autograd.grad(loss, list(model.parameters()))),
    "inputs": other(lambda model, loss: loss.backward(inputs=[model.between])),
    "grad of an input": other(lambda model, loss: torch.autograd.grad(loss, model.between)),
    "create_graph": other(lambda model, loss: loss.backward(create_graph=True)),
}


class Between(Net):
    """Keeps a tensor from before the layers, for adversarial training."""

    def forward(self, ids: Tensor, labels: Tensor) -> dict[str, Tensor]:
        x = self.embed(ids)
        self.__dict__["between"] = x
        for layer in self.layers:
            x = layer(x)
        return {"loss": F.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())}


@pytest.mark.filterwarnings("ignore:Using backward\\(\\) with create_graph=True")
@pytest.mark.parametrize("options", [RUNS["recorded"], RUNS["run again"]], ids=["recorded", "run again"])
@pytest.mark.parametrize("name", PARTIAL)
def test_other_ways_to_differentiate_are_refused(name: str, options: tuple[str, ...]) -> None:
    assert "call loss.backward()" in fault(options, PARTIAL[name], Between)


# -- parameters and hooks ---------------------------------------------------------------------------------------------


class Shared(Net):
    def __init__(self) -> None:
        super().__init__()
        self.head.weight = self.embed.weight


def changing(act: Callable[[Any, torch.optim.Optimizer], Any]) -> Loop:
    def loop(model: nn.Module, optimizer: torch.optim.Optimizer, batches: list[dict[str, Tensor]]) -> list[Tensor]:
        losses = ordinary(model, optimizer, batches[:2])
        act(model, optimizer)
        return losses + ordinary(model, optimizer, batches[2:])

    return loop


CHANGES: dict[str, tuple[Callable[[Any, torch.optim.Optimizer], Any], str]] = {
    "frozen": (lambda m, o: m.layers[0].requires_grad_(False), "requires_grad of weight layers.0"),
    "group": (lambda m, o: o.add_param_group({"params": [nn.Parameter(torch.zeros(2))]}), "added to the optimizer"),
    "hook": (
        lambda m, o: m.head.weight.register_post_accumulate_grad_hook(lambda p: None),
        "post-accumulate hook on weight embed.weight",
    ),
    "shared hook": (lambda m, o: m.head.weight.register_hook(lambda g: g * 2), "tensor hook on weight embed.weight"),
    "joint hook": (
        lambda m, o: torch.autograd.graph.register_multi_grad_hook(list(m.parameters()), lambda grads: None),
        "register_multi_grad_hook on weight embed.weight",
    ),
    "joint hook, any": (
        lambda m, o: torch.autograd.graph.register_multi_grad_hook([m.layers[1].norm.bias], print, mode="any"),
        "register_multi_grad_hook on weight layers.1.norm.bias",
    ),
    "swapped": (
        lambda m, o: torch.utils.swap_tensors(m.head.bias, nn.Parameter(m.head.bias.detach() * 0.5)),
        "another tensor was swapped into weight head.bias",
    ),
    "shared memory": (lambda m, o: m.share_memory(), "was moved to shared memory"),
    "shape": (lambda m, o: setattr(m.head.bias, "data", torch.zeros(2)), "was given float32[2]"),
    "dtype": (lambda m, o: m.to(torch.bfloat16), "was given bfloat16"),
}


@pytest.mark.parametrize("name", CHANGES)
def test_changes_that_no_plan_is_made_for_are_refused(name: str) -> None:
    act, message = CHANGES[name]
    assert message in fault(RUNS["both"], changing(act), Shared)


@pytest.mark.parametrize("name", ["hook", "shared hook", "joint hook"])
def test_hooks_that_are_there_already_are_refused_before_training(name: str) -> None:
    model = Shared()
    optimizer = adamw(model)
    CHANGES[name][0](model, optimizer)
    with pytest.raises(UnsupportedError, match=r"hook on weight"), lt_offload.offloaded(model, optimizer, rows()[0]):
        pass


def halve(net: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    for parameter in net.parameters():
        parameter.register_hook(lambda gradient: gradient.clamp(-1e-3, 1e-3))


@pytest.mark.parametrize("options", RUNS.values(), ids=RUNS)
def test_tensor_hooks_on_weights_of_one_block(options: tuple[str, ...]) -> None:
    loop = changing(halve)
    assert differences(plain(Net, loop), ours(Net, options, loop)) == []


@pytest.mark.parametrize("options", RUNS.values(), ids=RUNS)
def test_hooks_where_gradients_are_accumulated(options: tuple[str, ...]) -> None:
    kept: dict[str, list[Any]] = {}

    def loop(model: nn.Module, optimizer: torch.optim.Optimizer, batches: list[dict[str, Tensor]]) -> list[Tensor]:
        nodes = [torch.autograd.graph.get_gradient_edge(p).node for p in model.parameters()]
        norms: list[Any] = kept.setdefault(str(len(kept)), [])
        for at, node in enumerate(nodes):
            node.register_prehook(lambda grads, at=at: norms.append((at, float(grads[0].norm()))))
            node.register_hook(lambda inputs, grads, at=at: norms.append((at, float(grads[0].norm()))))
        return ordinary(model, optimizer, batches)

    assert differences(plain(Net, loop), ours(Net, options, loop)) == []
    expected, found = kept.values()
    assert sorted(expected) == sorted(found)


def holding(hold: Callable[[nn.Module], list[Any]]) -> tuple[Callable[[], Net], Loop]:
    """A net whose memory somebody else holds before training, and a loop that reads and writes through that."""

    def make() -> Net:
        net = Net()
        net.__dict__["kept"] = hold(net)
        return net

    def loop(model: Any, optimizer: torch.optim.Optimizer, batches: list[dict[str, Tensor]]) -> list[Tensor]:
        found = []
        for batch in batches:
            found += ordinary(model, optimizer, [batch])
            found += [torch.tensor(np.asarray(kept)) for kept in model.kept]
            for kept in model.kept[::3]:
                kept *= 0.9
        return found

    return make, loop


HOLDERS: dict[str, Callable[[nn.Module], list[Any]]] = {
    "state dict": lambda net: list(net.state_dict().values()),
    "arrays": lambda net: [p.detach().numpy() for p in net.parameters()],
    "a view": lambda net: [net.layers[1].linear.weight.detach()[3]],  # type: ignore[union-attr, index]
    "dlpack": lambda net: [torch.from_dlpack(p.detach()) for p in net.parameters()],
    "shared memory": lambda net: [p.detach() for p in net.share_memory().parameters()],
}


@pytest.mark.parametrize("options", RUNS.values(), ids=RUNS)
@pytest.mark.parametrize("name", HOLDERS)
def test_memory_that_somebody_holds_before_training(name: str, options: tuple[str, ...]) -> None:
    make, loop = holding(HOLDERS[name])
    expected, found = plain(make, loop), ours(make, options, loop)
    assert differences(expected, found) == []
    for left, right in zip(expected.model.kept, found.model.kept, strict=True):
        assert np.array_equal(np.asarray(left), np.asarray(right))


# -- blocks that run twice --------------------------------------------------------------------------------------------


class Normed(Layer):
    def __init__(self) -> None:
        super().__init__()
        self.batch = nn.BatchNorm1d(HIDDEN)

    def inner(self, x: Tensor) -> Tensor:
        return self.batch(super().inner(x).transpose(1, 2)).transpose(1, 2)


class Spectral(Layer):
    def __init__(self) -> None:
        super().__init__()
        nn.utils.parametrizations.spectral_norm(self.linear)


class Counting(Layer):
    def __init__(self) -> None:
        super().__init__()
        self.calls, self.history = 0, [0.0]

    def inner(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.history.append(self.history[-1] + 0.1)
        return super().inner(x) * (1 + 0.1 * self.calls) + self.history[-1]


class Drawing(Layer):
    def inner(self, x: Tensor) -> Tensor:
        return super().inner(x) * random.random() + float(np.random.rand())  # noqa: NPY002


class OwnGenerators(Layer):
    def __init__(self) -> None:
        super().__init__()
        self.torch, self.python = torch.Generator().manual_seed(1), random.Random(2)
        self.numpy = np.random.default_rng(3)

    def inner(self, x: Tensor) -> Tensor:
        noise = torch.rand(x.shape, generator=self.torch) * self.python.random() + float(self.numpy.random())
        return super().inner(x) * noise


class Nested(Layer):
    """Has generators in a tuple and a history in a dictionary of lists."""

    def __init__(self) -> None:
        super().__init__()
        self.own = torch.Generator().manual_seed(1), [random.Random(2)]
        self.seen: dict[str, list[float]] = {"means": [0.0]}

    def inner(self, x: Tensor) -> Tensor:
        generator, (python,) = self.own
        self.seen["means"].append(self.seen["means"][-1] + python.random())
        return super().inner(x) * torch.rand(x.shape, generator=generator) + self.seen["means"][-1]


class Assigning(Layer):
    """Replaces a buffer instead of writing to it."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(HIDDEN))

    def inner(self, x: Tensor) -> Tensor:
        self.mean = 0.9 * self.mean + 0.1 * x.detach().mean((0, 1))
        return super().inner(x - self.mean)


class Late(Counting):
    """Begins to count long after the first pass."""

    def inner(self, x: Tensor) -> Tensor:
        return super().inner(x) if self.torch_calls() > 2 else Layer.inner(self, x)

    def torch_calls(self) -> int:
        self.passes = getattr(self, "passes", 0) + 1
        return self.passes


@pytest.mark.parametrize("options", RUNS.values(), ids=RUNS)
@pytest.mark.parametrize(
    "layer",
    [Normed, Spectral, Counting, Drawing, OwnGenerators, Nested, Assigning, Late],
    ids=lambda c: c.__name__,
)
def test_state_that_a_block_changes(layer: type[nn.Module], options: tuple[str, ...]) -> None:
    def make() -> Net:
        return Net(layer)

    expected, found = plain(make), ours(make, options)
    assert differences(expected, found) == []
    for left, right in zip(expected.model.layers, found.model.layers, strict=True):  # type: ignore[arg-type]
        assert vars(left).get("calls") == vars(right).get("calls")
        assert vars(left).get("history") == vars(right).get("history")
        assert vars(left).get("seen") == vars(right).get("seen")


@pytest.mark.parametrize("options", RUNS.values(), ids=RUNS)
def test_another_mode_before_the_backward(options: tuple[str, ...]) -> None:
    class Dropping(Layer):
        def inner(self, x: Tensor) -> Tensor:
            return F.dropout(super().inner(x), 0.5, self.training)

    def loop(model: nn.Module, optimizer: torch.optim.Optimizer, batches: list[dict[str, Tensor]]) -> list[Tensor]:
        for batch in batches:
            loss = model.train()(**batch)["loss"]
            model.eval()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        return [torch.rand(1)]

    def make() -> Net:
        return Net(Dropping)

    found = ours(make, options, loop)
    assert differences(plain(make, loop), found) == []
    assert not any(module.training for module in found.model.modules())


# -- contexts around the call -----------------------------------------------------------------------------------------


class Attending(Layer):
    def inner(self, x: Tensor) -> Tensor:
        x = super().inner(x)[:, None]
        return F.scaled_dot_product_attention(x, x, x)[:, 0]


@contextmanager
def autocast_without_cache() -> Iterator[None]:
    with torch.autocast("cpu", dtype=torch.bfloat16, cache_enabled=False):
        yield


CONTEXTS: dict[str, Callable[[], Any]] = {
    "autocast": lambda: torch.autocast("cpu", dtype=torch.bfloat16),
    "no cache": autocast_without_cache,
    "off": lambda: torch.autocast("cpu", enabled=False),
    "kernel": lambda: nn.attention.sdpa_kernel(nn.attention.SDPBackend.MATH),
}


@pytest.mark.parametrize("options", RUNS.values(), ids=RUNS)
@pytest.mark.parametrize("name", CONTEXTS)
def test_contexts_inside_the_step(name: str, options: tuple[str, ...]) -> None:
    def make() -> Net:
        return Net(Attending, context=CONTEXTS[name])

    assert differences(plain(make), ours(make, options)) == []


@pytest.mark.parametrize("budget", ["tight", "middle", "resident"])
def test_autocast_is_planned_for(budget: str) -> None:
    def make() -> Net:
        return Net(Attending, context=CONTEXTS["autocast"])

    assert differences(plain(make), by_budget(make, budget)) == []


@pytest.mark.parametrize("options", RUNS.values(), ids=RUNS)
def test_autocast_around_the_backward_too(options: tuple[str, ...]) -> None:
    def loop(model: nn.Module, optimizer: torch.optim.Optimizer, batches: list[dict[str, Tensor]]) -> list[Tensor]:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return ordinary(model, optimizer, batches[:1])

    def make() -> Net:
        return Net(Attending)

    assert differences(plain(make, loop), ours(make, options, loop)) == []


# -- a plan that is given ---------------------------------------------------------------------------------------------


def saved_plan(model: nn.Module) -> Any:
    optimizer = adamw(model)
    return lt_offload.solve(lt_offload.profile(model, rows()[0], optimizer=optimizer), memory="10MB")


def test_a_replayed_plan_is_no_way_around_the_refusals() -> None:
    plan = saved_plan(Net())
    model = Net(after=PENALTIES["all weights"])
    context = lt_offload.offloaded(model, adamw(model), rows()[0], plan=plan, accelerator="cpu")
    with pytest.raises(UnsupportedError, match="outside its block"), context:
        pass


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"memory": "1MB"}, r"the plan needs memory=10 MB, memory=1 MB was given"),
        ({"planner": "l2l"}, r"planner='l2l' is a setting of planning, and a plan was given"),
        ({"memory": "900TB"}, r"memory=900 TB is more than there is"),
    ],
)
def test_settings_that_a_replayed_plan_leaves_no_room_for(settings: dict[str, Any], message: str) -> None:
    model = Net()
    plan = saved_plan(model)
    context = lt_offload.offloaded(model, adamw(model), rows()[0], plan=plan, accelerator="cpu", **settings)
    with pytest.raises(lt_offload.ConfigError, match=message), context:
        pass


# -- what other users found -------------------------------------------------------------------------------------------


def with_option(value: Any) -> Loop:
    def act(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        optimizer.param_groups[0]["lr"] = value

    return between(act)


def clipping_hook(model: nn.Module, optimizer: torch.optim.Optimizer, batches: list[dict[str, Tensor]]) -> list[Tensor]:
    def clip(*_: Any) -> None:
        nn.utils.clip_grad_norm_([p for p in model.parameters() if p.grad is not None], 1e-3)

    optimizer.register_step_pre_hook(clip)
    return ordinary(model, optimizer, batches)


def exchanging(model: nn.Module, optimizer: torch.optim.Optimizer, batches: list[dict[str, Tensor]]) -> list[Tensor]:
    losses = ordinary(model, optimizer, batches[:2])
    backup = {name: p.data for name, p in model.named_parameters()}
    for p in model.parameters():
        p.data = torch.zeros_like(p)
    for name, p in model.named_parameters():
        p.data = backup[name]
    return losses + ordinary(model, optimizer, batches[2:])


def substituting(model: nn.Module, optimizer: torch.optim.Optimizer, batches: list[dict[str, Tensor]]) -> list[Tensor]:
    halves = {name: p * 0.5 for name, p in model.named_parameters()}
    torch.func.functional_call(model, halves, (), batches[0])["loss"].backward()
    return []


def transformed(model: nn.Module, optimizer: torch.optim.Optimizer, batches: list[dict[str, Tensor]]) -> list[Tensor]:
    torch.func.grad(lambda scale: model(**batches[0])["loss"] * scale)(torch.ones(()))
    return []


def mapped(model: nn.Module, optimizer: torch.optim.Optimizer, batches: list[dict[str, Tensor]]) -> list[Tensor]:
    with torch.no_grad():
        torch.vmap(lambda ids: model(ids[None], ids[None])["loss"])(batches[0]["ids"])
    return []


def elsewhere(model: nn.Module, optimizer: torch.optim.Optimizer, batches: list[dict[str, Tensor]]) -> list[Tensor]:
    errors: list[BaseException] = []

    def work() -> None:
        try:
            ordinary(model, optimizer, batches)
        except UnsupportedError as error:
            errors.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    raise errors[0]


FOUND: dict[str, tuple[Loop, str]] = {
    "learning rate": (with_option(0.5), "lr of parameter group 0 was changed from 0.01 to 0.5"),
    "clipping in a hook": (clipping_hook, "was used by"),
    "exchanged memory": (exchanging, "was given other memory: "),
    "functional_call": (substituting, "was called with another tensor as"),
    "torch.func.grad": (transformed, "was called in a transform"),
    "torch.vmap": (mapped, "was called in a transform"),
    "another thread": (elsewhere, "a training forward ran in thread"),
}


@pytest.mark.parametrize("options", [RUNS["recorded"], RUNS["run again"]], ids=["recorded", "run again"])
@pytest.mark.parametrize("name", FOUND)
def test_ways_around_the_engine_are_refused(name: str, options: tuple[str, ...]) -> None:
    loop, message = FOUND[name]
    assert message in fault(options, loop)


def scheduling(model: nn.Module, optimizer: torch.optim.Optimizer, batches: list[dict[str, Tensor]]) -> list[Tensor]:
    """A schedule after the step, a hook of one's own that reads and clamps weights after it."""
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)

    def clamp(*_: Any) -> None:
        with torch.no_grad():
            for p in model.parameters():
                p.clamp_(-0.1, 0.1)

    optimizer.register_step_post_hook(clamp)
    losses = []
    for batch in batches:
        losses += ordinary(model, optimizer, [batch])
        schedule.step()
    return losses


@pytest.mark.parametrize("options", RUNS.values(), ids=RUNS)
def test_schedules_and_hooks_after_the_step(options: tuple[str, ...]) -> None:
    assert differences(plain(Net, scheduling), ours(Net, options, scheduling)) == []


class ByMode(Layer):
    def inner(self, x: Tensor) -> Tensor:
        return super().inner(x) * (2 if torch.is_grad_enabled() else 1)


class Frozen(Layer):
    """In evaluation mode torch's attention is another kernel without gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.TransformerEncoderLayer(HIDDEN, 4, 2 * HIDDEN, batch_first=True).eval()

    def train(self, mode: bool = True) -> Layer:
        super().train(mode)
        self.attention.eval()
        return self

    def inner(self, x: Tensor) -> Tensor:
        return self.attention(super().inner(x))


COUNTS = {"calls": 0}


class OfGlobals(Layer):
    def inner(self, x: Tensor) -> Tensor:
        COUNTS["calls"] += 1
        return super().inner(x) + 0.01 * COUNTS["calls"]


class OfHelper(Layer):
    def __init__(self) -> None:
        super().__init__()
        self.helper = SimpleNamespace(calls=0)

    def inner(self, x: Tensor) -> Tensor:
        self.helper.calls += 1
        return super().inner(x) + 0.01 * self.helper.calls


class WritingItsInput(Layer):
    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x.mul_(2))


@pytest.mark.parametrize("layer", [ByMode, OfGlobals, OfHelper], ids=lambda c: c.__name__)
def test_blocks_that_a_second_run_would_change_are_refused_before_training(layer: type[nn.Module]) -> None:
    assert "gave other numbers when it ran again" in refusal(lambda: Net(layer))


def test_an_attention_that_is_another_kernel_without_gradients_is_refused_before_training() -> None:
    assert "gave other numbers when it ran again" in refusal(lambda: Net(Frozen).train())


def test_blocks_that_write_to_their_input_are_refused_before_training() -> None:
    assert "block layers.0" in refusal(lambda: Net(WritingItsInput))


class Swaying(Layer):
    """Computes more, less or something else in the second run of its second iteration."""

    how = ""

    def inner(self, x: Tensor) -> Tensor:
        COUNTS["calls"] += bool(self.how)
        if not self.how or COUNTS["calls"] <= 3:
            return super().inner(x)
        return {
            "more": lambda: super(Swaying, self).inner(self.linear(x)),
            "less": lambda: x,
            "other": lambda: torch.bmm(x, self.linear.weight.expand(2, -1, -1)),
        }[self.how]()


@pytest.mark.parametrize("how", ["more", "less", "other"])
def test_a_second_run_that_computes_something_else_is_refused(how: str) -> None:
    def make() -> Net:
        net = Net(Swaying)
        net.layers[1].how = how  # type: ignore[assignment]
        COUNTS["calls"] = 0
        return net

    assert "a block" in fault(("mixed",), ordinary, make)


class Hooking(Layer):
    """Cannot do without a graph: a tensor hook, and a gradient that is kept."""

    def inner(self, x: Tensor) -> Tensor:
        out = super().inner(x)
        out.register_hook(lambda gradient: gradient.clamp(-1e-3, 1e-3))
        out.retain_grad()
        return out


class Differentiating(Layer):
    """Uses a gradient as an activation."""

    def inner(self, x: Tensor) -> Tensor:
        energy = super().inner(x).square().sum()
        return super().inner(x) + torch.autograd.grad(energy, x, create_graph=True)[0]


@pytest.mark.parametrize("budget", ["tight", "middle", "resident"])
@pytest.mark.parametrize("layer", [Hooking, Differentiating], ids=lambda c: c.__name__)
def test_blocks_that_need_a_graph(layer: type[nn.Module], budget: str) -> None:
    def make() -> Net:
        return Net(layer)

    assert differences(plain(make), by_budget(make, budget)) == []


class OfTensor(Layer):
    """State in a tensor that is a plain attribute, and a generator of NumPy's old kind."""

    def __init__(self) -> None:
        super().__init__()
        self.average, self.noise = torch.zeros(HIDDEN), np.random.RandomState(3)  # noqa: NPY002

    def inner(self, x: Tensor) -> Tensor:
        self.average.mul_(0.9).add_(x.detach().mean((0, 1)), alpha=0.1)
        return super().inner(x - self.average) + float(self.noise.rand())


@pytest.mark.parametrize("options", RUNS.values(), ids=RUNS)
def test_state_in_plain_tensors_and_old_generators(options: tuple[str, ...]) -> None:
    def make() -> Net:
        return Net(OfTensor)

    lt_offload.profile(make(), rows()[0], optimizer=adamw(make()))
    assert differences(plain(make), ours(make, options)) == []


@contextmanager
def double_precision() -> Iterator[None]:
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.set_default_dtype(torch.float32)


class Making(Layer):
    def inner(self, x: Tensor) -> Tensor:
        return super().inner(x) * torch.full((1,), 1 / 3).float()


@pytest.mark.parametrize("options", RUNS.values(), ids=RUNS)
def test_another_default_dtype_around_the_forward(options: tuple[str, ...]) -> None:
    def loop(model: nn.Module, optimizer: torch.optim.Optimizer, batches: list[dict[str, Tensor]]) -> list[Tensor]:
        return ordinary(model, optimizer, batches, around_forward=double_precision)

    def make() -> Net:
        return Net(Making)

    assert differences(plain(make, loop), ours(make, options, loop)) == []
