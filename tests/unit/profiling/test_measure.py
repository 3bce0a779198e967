from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import lt_offload
from lt_offload.errors import ConfigError, ModelError, OverBudget, UnsupportedError
from lt_offload.machine.accounting import Account
from lt_offload.model.parts import extent
from lt_offload.profiling.hardware import TakenHostBytes, load_hardware
from lt_offload.profiling.measure import profile
from lt_offload.schema.profile import BlockProfile, Profile
from tests.support import models

HARDWARE = load_hardware("rtx-3060")
FLOAT = 4


def measured(model: nn.Module, batch: Any = None, **options: Any) -> Profile:
    batch = models.batch(model) if batch is None else batch
    return profile(model, batch, optimizer=torch.optim.AdamW, device="cpu", hardware=HARDWARE, **options)


def layer(found: Profile, index: int = 0) -> BlockProfile:
    return [block for block in found.blocks if block.kind == "layer"][index]


@pytest.mark.parametrize("padding", [False, True])
def test_saved_bytes_of_a_llama_layer_equal_a_count_by_hand(padding: bool) -> None:
    model = models.build("llama")
    tokens, sequence, hidden, inner, heads = 2 * 12, 12, 32, 48, 4
    norm = 1 + 2 * hidden  # reciprocal root, normalised, times weight (which is the input of the projections)
    shared_heads = 2 * hidden // 2  # k and v as they are, or repeated for every head and a mask of floats
    attention = (
        hidden + (2 * hidden + sequence if padding else shared_heads) + hidden + heads
    )  # q, k and v, result, log-sum-exp
    mlp = 4 * inner  # gate, activated gate, up, product
    between = hidden  # input of the second norm; that of the first is the block's input
    expected = FLOAT * tokens * (2 * norm + attention + between + mlp)
    keep = layer(measured(model, models.batch(model, padding=padding))).option("keep")
    assert keep.saved_bytes == expected
    assert keep.keeps_input


@pytest.mark.parametrize("family", models.FAMILIES)
def test_bytes_add_up_to_those_of_a_plain_forward(family: str) -> None:
    model = models.build(family, dropout=0.1)
    batch = models.batch(model)
    found = measured(model, batch, run=lambda b: model(**b).loss)
    with Account() as account:
        loss = model(**batch).loss
        live = account.current
    outside = found.shared_bytes - sum(t.nbytes for t in batch.values()) - sum(b.nbytes for b in model.buffers())
    kept = [(block.option("keep"), block.input_bytes) for block in found.blocks]
    held = sum(option.saved_bytes + (nbytes if option.keeps_input else 0) for option, nbytes in kept)
    assert loss.requires_grad
    assert held <= live <= outside + held  # plain autograd lets go of masks that no operation saves


@pytest.mark.parametrize("family", ["llama", "phi", "bloom"])
@pytest.mark.parametrize("option", ["keep", "recompute"])
def test_predicted_peak_of_a_whole_iteration(family: str, option: str) -> None:
    """Against torch's own autograd and checkpointing, with gradients dropped as they come."""
    model = models.build(family, tie_word_embeddings=False)
    batch = models.batch(model)
    found = measured(model, batch, run=lambda b: model(**b).loss)
    for block in found.blocks:
        if option == "recompute" and block.kind == "layer":
            module = model.get_submodule(block.name)
            module.forward = partial(checkpoint, module.forward, use_reentrant=False)
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(lambda p: setattr(p, "grad", None))
    with Account() as account:
        model(**batch).loss.backward()
    chosen = [block.option(option if block.kind == "layer" else "keep") for block in found.blocks]
    outside = found.shared_bytes - sum(t.nbytes for t in batch.values()) - sum(b.nbytes for b in model.buffers())
    peaks, held = [], outside
    for block, of in zip(found.blocks, chosen, strict=True):
        at_work = held + of.saved_bytes + block.input_bytes + block.output_bytes
        gradient = max(p.nbytes for p in model.get_submodule(block.name).parameters())
        peaks += [at_work + of.forward_peak_bytes, at_work + block.input_bytes + of.backward_peak_bytes + gradient]
        held += of.saved_bytes + (block.input_bytes if of.keeps_input else 0)
    # the loss and its gradient may outlast the last block; the largest gradient may come after the peak
    assert account.peak - 64 <= max(peaks) <= 1.15 * account.peak


@pytest.mark.parametrize("family", models.FAMILIES)
def test_options_are_consistent(family: str) -> None:
    for block in measured(models.build(family, dropout=0.1)).blocks:
        keep = block.option("keep")
        assert keep.offload_bytes == 0
        assert {o.name for o in block.options} >= (
            {"keep", "recompute", "offload", "mixed"} if block.kind == "layer" else {"keep"}
        )
        for option in block.options:
            assert min(option.forward_peak_bytes, option.backward_peak_bytes, option.saved_bytes) >= 0
            assert option.forward_s > 0
            assert option.backward_s > 0
        if block.kind == "layer":
            offload, mixed, recompute = (block.option(name) for name in ("offload", "mixed", "recompute"))
            assert offload.saved_bytes + offload.offload_bytes == keep.saved_bytes + block.input_bytes
            assert mixed.offload_bytes < offload.offload_bytes
            assert not mixed.keeps_input
            assert not offload.keeps_input
            assert recompute.keeps_input
            assert recompute.saved_bytes == recompute.offload_bytes == 0
            rebuilt = keep.saved_bytes + keep.backward_peak_bytes
            assert recompute.backward_peak_bytes >= rebuilt
            assert offload.backward_peak_bytes + offload.saved_bytes == rebuilt
            reload = block.option("reload")
            assert reload == replace(recompute, name="reload", keeps_input=False, offload_bytes=block.input_bytes)


@pytest.mark.parametrize(("family", "index"), [("llama", 1), ("phi", 2), ("bloom", 1)])
def test_what_the_block_before_returns_need_not_be_saved(family: str, index: int) -> None:
    """Between Phi's embeddings and its first layer there is dropout; the last block's backward follows at once."""
    blocks = measured(models.build(family, dropout=0.1)).blocks
    assert [at for at, block in enumerate(blocks) if block.chained] == list(range(index, len(blocks)))
    offering = [at for at, block in enumerate(blocks) if any(option.name == "discard" for option in block.options)]
    assert offering == list(range(index, len(blocks) - 1))
    for block in blocks[index:-1]:
        discard, keep, recompute = (block.option(name) for name in ("discard", "keep", "recompute"))
        assert (discard.forward_s, discard.backward_s) == (recompute.forward_s, keep.backward_s)
        assert discard.forward_peak_bytes == recompute.forward_peak_bytes
        assert discard.saved_bytes == discard.offload_bytes == 0
        assert not discard.keeps_input
        assert keep.backward_peak_bytes < discard.backward_peak_bytes <= recompute.backward_peak_bytes


def test_what_is_changed_between_blocks_has_to_be_saved() -> None:
    """In place, by a new tensor, or not at all."""

    class Stack(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.ReLU()) for _ in range(4))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.layers[1](self.layers[0](x))
            x = self.layers[2](x.mul_(2))
            return self.layers[3](x * 2).sum()

    found = measured(Stack(), torch.ones(2, 8))
    assert [block.chained for block in found.blocks] == [False, True, False, False]


def test_a_batch_that_is_too_large_for_the_device_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any, **__: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr("lt_offload.profiling.step.first.measure_block", full)
    with pytest.raises(OverBudget, match="^2 samples of 12 tokens, .* than cpu has left; lower the batch size"):
        measured(models.build("llama"))


def test_tensors_and_states() -> None:
    model = models.build("llama-tied")
    found = measured(model)
    embedding = found.tensors[0]
    assert embedding.name == "model.embed_tokens.weight"
    assert embedding.blocks == (0, len(found.blocks) - 1)
    assert embedding.state_bytes == 2 * embedding.bytes == 2 * models.VOCAB * 32 * FLOAT
    assert sum(t.bytes for t in found.tensors) == sum(p.nbytes for p in model.parameters())
    assert all(t.state_bytes == 2 * t.bytes for t in found.tensors)
    assert (found.model, found.dtype, found.batch_size, found.sequence_length) == ("LlamaForCausalLM", "float32", 2, 12)
    assert not found.estimated


def test_blocks_with_other_flags_are_measured_apart() -> None:
    class Padded(nn.Linear):
        wide = False

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x.repeat(9, 1)[: len(x)] if self.wide else x)

    model = nn.Sequential(*(Padded(4, 4) for _ in range(4)))
    model[1].wide = model[3].wide = True
    found = measured(model, (torch.ones(2, 4),))
    assert [block.option("keep").saved_bytes for block in found.blocks] == [0, 9 * 2 * 4 * FLOAT] * 2


def test_there_is_room_for_what_the_model_holds_while_blocks_run() -> None:
    class Holding(nn.Sequential):
        numbers = 0

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            first, second, *others = self
            held = torch.ones(self.numbers)
            x = second(first(x))
            del held
            for layer in others:
                x = layer(x)
            return x

    def peaks(numbers: int) -> list[int]:
        model = Holding(*(nn.Linear(4, 4) for _ in range(4)))
        model.numbers = numbers
        return [b.option("keep").forward_peak_bytes for b in measured(model, (torch.ones(2, 4),)).blocks]

    assert peaks(1000)[:2] == [peak + 1000 * FLOAT for peak in peaks(0)[:2]]


@pytest.mark.parametrize(
    "spoil",
    [
        lambda model: model.eval(),
        lambda model: None,
        lambda model: model.requires_grad_(False).lm_head.requires_grad_(True),
    ],
)
def test_nothing_changes(spoil: Callable[[Any], Any]) -> None:
    model = models.build("phi", dropout=0.1, use_cache=True)
    spoil(model)
    batch = models.batch(model)
    for index, parameter in enumerate(model.parameters()):
        parameter.grad = torch.full_like(parameter, index) if parameter.requires_grad else None
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    grads = [parameter.grad for parameter in model.parameters()]
    addresses = [parameter.data_ptr() for parameter in model.parameters()]
    flags = [(m.training, "forward" in vars(m), len(m._forward_hooks)) for m in model.modules()]
    trainable = [parameter.requires_grad for parameter in model.parameters()]
    rng = torch.get_rng_state()
    measured(model, batch)
    assert torch.equal(rng, torch.get_rng_state())
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert [parameter.data_ptr() for parameter in model.parameters()] == addresses
    assert all(new.grad is old for new, old in zip(model.parameters(), grads, strict=True))
    assert all(g is None or bool((g == index).all()) for index, g in enumerate(grads))
    assert [(m.training, "forward" in vars(m), len(m._forward_hooks)) for m in model.modules()] == flags
    assert [parameter.requires_grad for parameter in model.parameters()] == trainable
    assert all(not parameter._post_accumulate_grad_hooks for parameter in model.parameters())
    assert model.config.use_cache is True


class Plain(nn.Module):
    def __init__(self, order: tuple[int, ...] = (0, 1)) -> None:
        super().__init__()
        self.embed = nn.Embedding(10, 8)
        self.stack = nn.ModuleList(nn.TransformerEncoderLayer(8, 2, 16, batch_first=True) for _ in range(2))
        self.norm = nn.BatchNorm1d(6)
        self.out = nn.Linear(8, 10)
        self.order = order

    def forward(self, ids: torch.Tensor) -> tuple[torch.Tensor]:
        hidden = self.embed(ids)
        for index in self.order:
            hidden = self.stack[index](hidden)
        return (self.out(self.norm(hidden)).mean(),)


@pytest.mark.parametrize(
    ("batch", "expected"),
    [
        ({"mask": torch.ones(4, 1, 7, 7), "input_ids": torch.zeros(4, 7, dtype=torch.long)}, (4, 7)),
        ((torch.zeros(8, 3, 32, 32), torch.zeros(8, dtype=torch.long)), (8, 1)),
        ((torch.zeros(8, 3, 32, 32, dtype=torch.uint8),), (8, 1)),
        ((torch.zeros(8, 64), torch.zeros(8, 10)), (8, 1)),
        ((torch.zeros(8, 50, 16),), (8, 50)),
        ((torch.zeros(8, dtype=torch.long), torch.tensor(0.5)), (8, 1)),
        (torch.tensor(0.5), (1, 1)),
    ],
)
def test_only_tokens_and_sequences_of_vectors_have_a_length(batch: Any, expected: tuple[int, int]) -> None:
    assert extent(batch) == expected


@pytest.mark.parametrize("order", [(1, 0), (0,)])
def test_blocks_are_what_is_called_in_turn(order: tuple[int, ...]) -> None:
    model = Plain(order)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    found = measured(model, torch.zeros(3, 6, dtype=torch.long))
    assert [block.name for block in found.blocks] == ["embed", *(f"stack.{at}" for at in order), "norm", "out"]
    first = next(tensor.name for tensor in found.tensors if "stack" in tensor.name)
    assert first.startswith(f"stack.{order[0]}.")
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


@pytest.mark.parametrize(
    ("order", "message"),
    [
        ((0, 0, 1), r"calls block stack\.0 2 times in 1 forwards"),
        ((), r"has called none of its layers, stack\.0, stack\.1"),
    ],
)
def test_layers_that_have_no_place_in_a_sequence_are_refused(order: tuple[int, ...], message: str) -> None:
    with pytest.raises(ModelError, match=message):
        measured(Plain(order), torch.zeros(3, 6, dtype=torch.long))


def test_nothing_to_train_is_refused() -> None:
    with pytest.raises(ConfigError, match="no trainable parameter"):
        measured(models.build("llama").requires_grad_(False))


def test_json_round_trip_and_fingerprint(tmp_path: Any) -> None:
    model = models.build("llama-tied")
    said: list[str] = []
    found = measured(model, on_progress=said.append)
    assert Profile.load(found.save(tmp_path / "profile.json")) == found
    assert any("LlamaDecoderLayer" in message for message in said)
    longer = measured(model, models.batch(model, sequence_length=16))
    assert longer.fingerprint == found.fingerprint
    assert measured(models.build("llama")).fingerprint != found.fingerprint
    assert replace(found, model="other").fingerprint == found.fingerprint


def test_what_the_model_takes_of_the_ram_is_there_for_the_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = replace(load_hardware("rtx-3060"), host_bytes=1000, pinnable_bytes=300)
    process = TakenHostBytes(all=10_000_000, private=8_000_000)
    monkeypatch.setattr("lt_offload.profiling.machine.measure_hardware", lambda *_, **__: machine)
    monkeypatch.setattr("lt_offload.profiling.machine.taken_host_bytes", lambda: process)
    model = models.build("llama")
    optimizer = torch.optim.SGD(model.parameters(), momentum=0.9)
    model(**models.batch(model)).loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    found = lt_offload.profile(model, models.batch(model), optimizer=optimizer).hardware
    taken = 2 * sum(p.nbytes for p in model.parameters())  # weights and momenta
    assert (found.host_bytes, found.pinnable_bytes) == (1000, 300)
    assert found.process_bytes == 10_000_000 - taken
    assert lt_offload.profile(model, models.batch(model), optimizer=optimizer, hardware=machine).hardware == machine


def test_an_optimizer_of_another_model_is_refused() -> None:
    model, other = models.build("llama"), models.build("llama")
    with pytest.raises(UnsupportedError, match=r"trainable parameter \S+ that the optimizer does not hold"):
        profile(model, models.batch(model), optimizer=torch.optim.SGD(other.parameters(), lr=0.1), device="cpu")
