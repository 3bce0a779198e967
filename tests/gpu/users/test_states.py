"""Optimizer states that callbacks read and change, and that go where another plan updates weights that thaw."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from lightning.pytorch import Callback

from tests.gpu.users.runs import USERS, Bench, in_both_ways, module
from tests.gpu.users.test_between_steps import Reads, compared
from tests.support.trainers import Run, differences

pytestmark = [*USERS, pytest.mark.usefixtures("planned_once")]


class ReadsStates(Reads):
    def on_train_batch_end(self, trainer: Any, pl_module: Any, *args: Any) -> None:
        self.keep(*list(pl_module.parameters())[::5])
        states = [trainer.optimizers[0].state[p] for p in list(pl_module.parameters())[::7]]
        self.keep(*[state[name] for state in states for name in ("exp_avg", "exp_avg_sq", "step")])
        self.keep(*list(pl_module.state_dict().values())[::9])

    def on_train_batch_start(self, trainer: Any, pl_module: Any, *args: Any) -> None:
        self.keep(pl_module.model.model.norm.weight, pl_module.model.lm_head.weight)


@in_both_ways
def test_reading_weights_and_states(way: str, bench: Bench) -> None:
    assert len(compared(bench, way, ReadsStates)) > 100


class KeepsOnTheHost(Reads):
    """Keeps the last weights and states as scripts for a GPU do it: what comes to the host is a copy."""

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *args: Any) -> None:
        self.seen += [value.cpu() for value in list(pl_module.state_dict().values())[::3]]
        self.seen += [p.detach().to("cpu", non_blocking=True) for p in list(pl_module.parameters())[::5]]
        self.seen += [torch.from_numpy(p.numpy(force=True)) for p in list(pl_module.parameters())[::7]]
        self.seen += [state["exp_avg"].cpu() for state in list(trainer.optimizers[0].state.values())[::9]]


@in_both_ways
def test_what_is_brought_to_the_host_is_a_copy(way: str, bench: Bench) -> None:
    if bench.device.type == "cpu":
        pytest.skip("there it is the tensor itself, in plain PyTorch, too")
    assert len(compared(bench, way, KeepsOnTheHost)) > 100


class WritesStates(Callback):
    """Changes weights and states between steps, in place and by assignment, where they are and from elsewhere."""

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *args: Any) -> None:
        layers = pl_module.model.model.layers
        with torch.no_grad():
            layers[1].mlp.up_proj.weight.mul_(0.9)
            weight = layers[5].self_attn.q_proj.weight
            weight.copy_(torch.full(weight.shape, 0.01))
            # Where they are already no copy is made, so that these writes count.
            for written in (layers[2].mlp.up_proj.weight, trainer.optimizers[0].state[weight]["exp_avg"]):
                written.to(written.device).mul_(0.9)
                written.to(weight).mul_(0.9)
        layers[3].mlp.down_proj.weight.data = layers[3].mlp.down_proj.weight.data * 0.5
        state = trainer.optimizers[0].state[layers[6].mlp.gate_proj.weight]
        state["exp_avg"].mul_(0.5)
        state["step"].add_(1)

    def on_train_batch_start(self, trainer: Any, pl_module: Any, *args: Any) -> None:
        for group in trainer.optimizers[0].param_groups:
            group["weight_decay"] *= 0.5


@in_both_ways
def test_writing_weights_and_states(way: str, bench: Bench) -> None:
    compared(bench, way, WritesStates)


# -- weights that thaw -------------------------------------------------------------------------------------------------


class Thaws(Callback):
    """Trains the upper half first, and everything from the second epoch on."""

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        pl_module.model.model.layers[:4].requires_grad_(False)
        pl_module.model.model.embed_tokens.requires_grad_(False)

    def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
        if trainer.current_epoch == 1:
            pl_module.requires_grad_(True)


@in_both_ways
def test_thawing_in_the_middle(way: str, bench: Bench) -> None:
    def scene(strategy: Any) -> Run:
        made = module()
        made.configure_optimizers = lambda: torch.optim.AdamW(made.parameters(), lr=1e-2, fused=True)
        return bench.fit(strategy, made, callbacks=[Thaws()], max_epochs=3)

    assert differences(*bench.compare(way, scene)) == []
