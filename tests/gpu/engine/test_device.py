"""What a model says about where it is, and tensors that it gets from elsewhere: as if all of it were on the device."""

from __future__ import annotations

from contextlib import nullcontext
from functools import partial
from typing import Any

import lightning.pytorch as L
import pytest
import torch
from torch import Tensor, nn

import lt_offload
from tests.gpu.engine.runs import SOMEWHERE, fit, on, trainer, travelling
from tests.gpu.target import ROOM, Target
from tests.support import models, trainers
from tests.support.user_nets import ordinary

pytestmark = SOMEWHERE


class Module(trainers.Module):
    """Asks the model where it is, and lets it generate."""

    host_inputs = False

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        positions = torch.arange(batch["input_ids"].shape[1], device=self.model.device)[None]
        loss = self.model(**batch, position_ids=positions).loss
        self.losses.append(loss.detach().clone())
        return loss

    def validation_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        super().validation_step(batch, batch_idx)
        ids = batch["input_ids"][:1, :4]
        self.validation.append(self.model.generate(ids, max_new_tokens=3, do_sample=False))
        if self.host_inputs:
            batch = on(torch.device("cpu"), batch)
        self.validation.append(self.model(**batch).logits.clone())


class Generates(L.Callback):
    def __init__(self) -> None:
        self.tokens: list[Tensor] = []
        self.devices: set[torch.device] = set()

    def on_train_batch_end(self, trainer: Any, module: Any, *args: Any) -> None:
        self.devices |= {module.device, module.model.device, module.model.get_decoder().device}
        ids = torch.tensor([[3, 4, 5]], device=module.model.device)
        module.eval()
        self.tokens.append(module.model.generate(ids, max_new_tokens=3, do_sample=False))
        module.train()


@pytest.mark.parametrize("lora", [False, True], ids=["full", "lora"])
def test_models_generate_in_validation_and_callbacks(lora: bool, target: Target) -> None:
    runs, calls = [], []
    for strategy in ("auto", travelling()):
        module = Module(lora=lora)
        module.host_inputs = strategy != "auto"  # in plain PyTorch they would have to be there
        calls.append(Generates())
        runs.append(fit(target, strategy, module, callbacks=[calls[-1]]))
    assert trainers.differences(*runs) == []
    assert len(calls[0].tokens) == 2 * trainers.BATCHES
    assert all(map(torch.equal, calls[0].tokens, calls[1].tokens))
    assert calls[0].devices == calls[1].devices == {target.torch_device}
    assert runs[1].module.model.device == torch.device("cpu")


def test_forwards_alone(target: Target) -> None:
    found = []
    for strategy in ("auto", lt_offload.OffmateStrategy(memory=ROOM)):
        module = Module()
        module.host_inputs = strategy != "auto"
        trainer(target, strategy).validate(module, verbose=False)
        found.append(module.validation)
    assert len(found[0]) == 3
    assert all(map(torch.equal, *found))


@pytest.mark.parametrize("micro_batches", [1, 2])
def test_a_loop_whose_batches_are_on_the_host(micro_batches: int, target: Target) -> None:
    """All of what blocks are given: token ids, masks, labels of a loss that is computed with the projection."""
    results = []
    for ours in (False, True):
        model = models.build("llama")
        batches = [models.batch(model, seed=seed) for seed in range(3)]
        model = model if ours else model.to(target.torch_device)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        options: dict[str, Any] = {"accelerator": target.accelerator, "host_update": False}
        options |= {"micro_batches": micro_batches, "memory": ROOM}
        if not ours:
            batches = [on(target.torch_device, batch) for batch in batches]
            parts = lt_offload.micro_batched_reference(model, micro_batches) if micro_batches > 1 else nullcontext()
        with parts if not ours else lt_offload.offloaded(model, optimizer, batches[0], **options):
            losses = [loss.cpu() for loss in ordinary(model, optimizer, batches)]
        results.append([*losses, *(parameter.detach().cpu() for parameter in model.parameters())])
    assert all(map(torch.equal, *results))


class Own(nn.Module):
    """People's own: a layer that asks its weights, one that wants lengths on the host."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(3))

    @property
    def device(self) -> torch.device:
        return next(self.parameters()).device

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        shift = torch.ones(1, 4, device=next(self.parameters()).device)
        for layer in self.layers:
            x = layer(x, shift, lengths)
        return x.square().mean()


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)

    @property
    def device(self) -> torch.device:
        return self.inner.weight.device

    def forward(self, x: Tensor, shift: Tensor, lengths: Tensor) -> Tensor:
        assert lengths.device.type == "cpu"
        assert x.device == shift.device == self.device == self.inner.weight.device
        packed = nn.utils.rnn.pack_padded_sequence(x + shift, lengths, batch_first=True)
        return nn.utils.rnn.pad_packed_sequence(packed._replace(data=self.inner(packed.data)), batch_first=True)[0]


def test_models_of_ones_own(target: Target) -> None:
    results = []
    lengths = torch.tensor([3, 2])
    for ours in (False, True):
        torch.manual_seed(0)
        model = Own()
        x = torch.randn(2, 3, 4).to(target.torch_device)
        if ours:
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            options: dict[str, Any] = {"accelerator": target.accelerator, "host_update": False, "memory": ROOM}
            with lt_offload.offloaded(model, optimizer, (x, lengths), run=partial(run, model), **options):
                assert model.device == model.layers[1].device == x.device
                losses = loop(3, model, optimizer, x, lengths)
            assert model.device == torch.device("cpu")
        else:
            model.to(target.torch_device)
            losses = loop(3, model, torch.optim.SGD(model.parameters(), lr=0.1), x, lengths)
        results.append([*losses, *(parameter.detach().cpu() for parameter in model.parameters())])
    assert all(map(torch.equal, *results))


def loop(steps: int, model: nn.Module, optimizer: torch.optim.Optimizer, *inputs: Tensor) -> list[Tensor]:
    losses = []
    for _ in range(steps):
        loss = model(*inputs)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach().cpu())
    return losses


def run(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    x, lengths = batch
    loss: Tensor = model(x, lengths.cpu())
    return loss


class Rest(nn.Module):
    """Has a parameter and a buffer outside its blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.shift = nn.Parameter(torch.ones(4))
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))
        self.register_buffer("scale", torch.full((4,), 2.0))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x) * self.scale
        return (x + self.shift).square().mean()


def move(model: nn.Module, optimizer: torch.optim.Optimizer, device: torch.device) -> None:
    """What people do who go on elsewhere."""
    model.to(device)
    optimizer.load_state_dict(optimizer.state_dict())


@pytest.mark.parametrize("fused", [False, True])
def test_optimizer_states_come_and_go_with_their_parameters(fused: bool, target: Target) -> None:
    """A loop that goes on on the host and comes back."""
    results = []
    host, there = torch.device("cpu"), target.torch_device
    for ours in (False, True):
        torch.manual_seed(0)
        model = Rest()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, fused=fused)
        x, losses = torch.randn(2, 4), []
        for device in (there, there, host, there, there, host):
            if ours and device is there and losses:
                options: dict[str, Any] = {"accelerator": target.accelerator, "host_update": False, "memory": ROOM}
                with lt_offload.offloaded(model, optimizer, (x.to(there),), **options):
                    losses += loop(2, model, optimizer, x.to(there))
            else:
                move(model, optimizer, device)
                losses += loop(2, model, optimizer, x.to(device))
            if ours and len(losses) > 2:
                states = [value for state in optimizer.state.values() for value in state.values()]
                assert {tensor.device for tensor in (*states, *model.parameters())} == {host}
        results.append([*losses, *(parameter.detach().cpu() for parameter in model.parameters())])
    assert all(map(torch.equal, *results))
