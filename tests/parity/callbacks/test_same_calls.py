"""Everything of the user's is called as often as in stock Lightning, in the same order and with the same values.

That begins with the first step, which shows what to plan: it is the user's own one, and counts. What is called is noted
in one list, by name and with a digest of what it was called with, and the whole lists are compared.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import lightning.pytorch as L
import numpy as np
import pytest
import torch
import torch.nn.functional as F
import transformers
from lightning.pytorch.loggers import Logger
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, IterableDataset

from lt_offload import OffmateStrategy
from lt_offload.execute.blocks.run import BlockRun
from lt_offload.model.blocks import find_blocks
from lt_offload.profiling.step.first import FirstStep
from tests.parity.callbacks.calls import Noted, drawn, note, noting
from tests.support.engines import equal
from tests.support.trainers import BATCHES, Module, Run, Tokens, budgets, differences, fit, tight
from tests.support.user_nets import HIDDEN, VOCAB, Net

Batch = dict[str, Tensor]

OWN_METRICS = ("tokens_per_s", "step_s", "step_vs_plan", "device_peak_gb", "host_peak_gb", "grad_norm")
"""What the strategy logs of itself, beside what the user logs."""

RESIDENT = 200_000_000
OPTIONS: dict[str, Any] = {"layers": 3, "dropout": 0.1}

steps = 0


class Tally:
    """Counts, outside of the module."""

    steps = served = 0


tally = Tally()


# -- what users have ---------------------------------------------------------------------------------------------------


class Rows(Dataset[Batch]):
    """Rows of numbers, every one of which is changed by chance when it is asked for."""

    def __init__(self, rows: list[Batch]) -> None:
        self._rows = rows

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> Batch:
        tally.served += 1
        found, (chance, *_) = dict(self._rows[index]), drawn()
        if chance < 0.5 and "input_ids" in found:
            found["input_ids"] = found["input_ids"].roll(1)
        note("dataset", index, found, chance, tally.served)
        return found


class Stream(IterableDataset[Batch]):
    """The same rows, one after the other."""

    def __init__(self, rows: Rows) -> None:
        self._rows = rows

    def __iter__(self) -> Iterator[Batch]:
        note("dataset", "begin", drawn())
        for index in range(len(self._rows)):
            yield self._rows[index]
        note("dataset", "end", drawn())


def collate(rows: list[Batch]) -> Batch:
    found: Batch = torch.utils.data.default_collate(rows)
    note("collate", len(rows), found)
    return found


class Noting(Logger):
    """A logger that notes what it is given of the user's."""

    name, version = "noting", 0
    _users = True
    """Whether anything of the last record was."""

    def log_metrics(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        users = {name: value for name, value in metrics.items() if name not in OWN_METRICS}
        self._users = bool(users.keys() - {"epoch"})  # Lightning adds it to whatever is logged
        if self._users:
            note("log_metrics", step, users)

    def log_hyperparams(self, params: Any, *args: Any, **kwargs: Any) -> None:
        note("log_hyperparams", params)

    def save(self) -> None:
        """Note what is called after each record."""
        if self._users:
            note("logger", "save")

    def finalize(self, status: str) -> None:
        note("logger", "finalize", status)


class Reading(L.Callback):
    """Reads all weights before and after each batch, and keeps an average of them."""

    def __init__(self) -> None:
        self.average: list[Tensor] = []

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        note("callback", "before", batch, *pl_module.parameters())

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        weights = [p.detach() for p in pl_module.parameters()]
        self.average = self.average or [torch.zeros_like(weight) for weight in weights]
        torch._foreach_lerp_(self.average, weights, 0.1)
        note("callback", "after", outputs, *weights, *self.average)


class Traced(Module):  # type: ignore[misc]
    """Notes what is called of it, of its data, and of its model's forward and backward."""

    inside = True
    """Whether there are forward hooks inside of blocks, too: such a block runs once."""

    def __init__(self) -> None:
        super().__init__(**OPTIONS)
        self.model = self.built()
        blocks = find_blocks(self.model).blocks
        first, second, *_ = [block.module for block in blocks if block.kind == "layer"]
        linear = [module for module in first.modules() if isinstance(module, nn.Linear)]
        if self.inside:
            linear[0].register_forward_pre_hook(lambda module, args: note("pre-hook", "linear", args))
            linear[-1].register_forward_hook(lambda module, args, out: note("hook", "linear", args, out))
        first.register_forward_pre_hook(lambda module, args: note("pre-hook", "first", args))
        second.register_forward_hook(lambda module, args, out: note("hook", "second", args, out))
        first.register_full_backward_hook(lambda module, ins, outs: note("backward", "first", ins, outs))
        second.register_full_backward_pre_hook(lambda module, outs: note("backward", "second begins", outs))
        second.register_full_backward_hook(lambda module, ins, outs: note("backward", "second", ins, outs))
        for name, weight in self.hooked().items():
            weight.register_hook(self._gradient(name))  # type: ignore[no-untyped-call]

    def hooked(self) -> dict[str, nn.Parameter]:
        """Return the weights that have a tensor hook."""
        named = dict(self.model.named_parameters())
        chosen = (
            "embed_tokens.weight",
            "0.mlp.up_proj.weight",
            "1.self_attn.q_proj.weight",
            "1.input_layernorm.weight",
            "lm_head.weight",
        )
        return {name: p for name, p in named.items() if name.endswith(chosen)}

    @staticmethod
    def _gradient(name: str) -> Callable[[Tensor], Tensor]:
        def hook(gradient: Tensor) -> Tensor:
            note("gradient", name, gradient)
            return gradient * 0.5

        return hook

    model: Any

    def built(self) -> Any:
        return self.model

    def loss(self, batch: Batch) -> Tensor:
        loss: Tensor = self.model(**batch)["loss"]
        return loss

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor | None:
        global steps
        steps, tally.steps = steps + 1, tally.steps + 1
        draws = drawn()
        print("step", batch_idx)
        note("training_step", batch_idx, batch, draws, steps, tally.steps, self.global_step, self.training)
        loss = self.loss(batch) * (0.5 + draws[0])
        self.log("loss", loss, prog_bar=True)
        self.losses.append(loss.detach().clone())
        note("training_step", "loss", loss, drawn())
        return loss

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        loss = self.loss(batch)
        self.log("val_loss", loss)
        self.validation.append(loss.detach().clone())

    def rows(self, count: int, seed: int) -> Rows:
        return Rows(Tokens(self.model, count, seed).rows)

    def train_dataloader(self) -> Any:
        return DataLoader(self.rows(2 * BATCHES, 0), batch_size=2, shuffle=True, collate_fn=collate)

    def val_dataloader(self) -> Any:
        return DataLoader(self.rows(2, 100), batch_size=2, collate_fn=collate)


def recorded(strategy: Any, kind: type[Traced], **settings: Any) -> tuple[Run, list[Noted]]:
    """Train, and return what was called from the Trainer's ``fit`` to its end."""
    global steps
    L.seed_everything(7, verbose=False)
    module = kind()
    steps = tally.steps = tally.served = 0
    with noting() as noted:
        run = fit(strategy, module, logger=Noting(), log_every_n_steps=1, **settings)
        note("counted", "steps", steps, tally.steps, tally.served)
        return run, noted()


def compared(
    kind: type[Traced], callback: Callable[[], Any] = L.Callback, *, memory: str = "", **settings: Any
) -> tuple[Run, list[Any]]:
    """Train both ways and compare; return stock's run, and its callback before those of ours.

    Args:
        kind: of the module.
        callback: makes one for each run.
        memory: "tight" or "resident"; else one of several budgets is drawn.
        settings: of the Trainer.
    """
    callbacks = [callback()]
    stock, expected = recorded("auto", kind, callbacks=callbacks, **settings)
    kinds = {"dataset", "collate", "hook", "pre-hook", "backward", "gradient", "print", "training_step", "log_metrics"}
    assert kinds <= {noted[0] for noted in expected} | ({"gradient"} if kind is Halves else set())
    named = {"tight": tight(stock.module), "resident": RESIDENT}
    for budget in [named[memory]] if memory else budgets(stock.module):
        callbacks.append(callback())
        ours, found = recorded(OffmateStrategy(memory=budget), kind, callbacks=callbacks[-1:], **settings)
        assert not ours.trainer.strategy._aside  # nothing was run on trial
        assert found == expected
        assert differences(stock, ours) == []
    return stock, callbacks


# -- models ------------------------------------------------------------------------------------------------------------


class Vision(Traced):
    """Classifies pictures."""

    def built(self) -> Any:
        sizes: dict[str, Any] = {"num_hidden_layers": 3, "num_attention_heads": 4, "intermediate_size": 48}
        sizes |= {"hidden_size": 32, "image_size": 16, "patch_size": 4, "num_labels": 5}
        sizes |= {"hidden_dropout_prob": 0.1, "attention_probs_dropout_prob": 0.1}
        model = transformers.ViTForImageClassification(transformers.ViTConfig(**sizes))
        return model.train()

    def hooked(self) -> dict[str, nn.Parameter]:
        return dict(self.model.named_parameters())

    def rows(self, count: int, seed: int) -> Rows:
        generator = torch.Generator().manual_seed(seed)
        pictures = torch.randn(count, 3, 16, 16, generator=generator)
        labels = torch.randint(5, (count,), generator=generator)
        return Rows([{"pixel_values": p, "labels": y} for p, y in zip(pictures, labels, strict=True)])


class Layer(nn.Module):
    """Counts its calls, and draws numbers of which its output depends."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.linear = nn.BatchNorm1d(HIDDEN), nn.Linear(HIDDEN, HIDDEN)
        self.calls, self.scales = 0, list[float]()

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.scales.append(random.random() + float(np.random.rand()))
        rows = F.dropout(F.gelu(self.linear(self.norm(x.flatten(0, 1)))), 0.1)
        return x + rows.view_as(x) * self.scales[-1] / (1 + self.calls)


class Counting(Traced):
    """Has blocks with a state of their own, of which one is read after each step."""

    def built(self) -> Any:
        return Net(Layer)

    def hooked(self) -> dict[str, nn.Parameter]:
        return dict(self.model.named_parameters())

    def rows(self, count: int, seed: int) -> Rows:
        ids = torch.randint(VOCAB, (count, 6), generator=torch.Generator().manual_seed(seed))
        return Rows([{"ids": row, "labels": row.roll(1)} for row in ids])

    def on_train_batch_end(self, *args: Any) -> None:
        super().on_train_batch_end(*args)
        note("state", "layers", [(layer.calls, layer.scales, layer.norm.running_mean) for layer in self.model.layers])


class Everywhere(Traced):
    """Has forward hooks on all modules, and backward hooks on all that multiply by weights."""

    def __init__(self) -> None:
        super().__init__()
        for name, module in self.model.named_modules():
            module.register_forward_pre_hook(self._hook("pre-hook", name))
            module.register_forward_hook(self._hook("hook", name))
            if isinstance(module, nn.Linear):
                module.register_full_backward_hook(self._hook("backward", name))

    @staticmethod
    def _hook(kind: str, name: str) -> Callable[..., None]:
        return lambda module, *values: note(kind, name, module.training, *values)


@pytest.mark.parametrize("kind", [Traced, Vision, Counting, Everywhere])
def test_of_models(kind: type[Traced]) -> None:
    compared(kind)


# -- steps -------------------------------------------------------------------------------------------------------------


class Halves(Traced):
    """Calls the model twice in a step. A forward that waits for another may have no hooks inside of its blocks."""

    inside = False

    def hooked(self) -> dict[str, nn.Parameter]:
        return {}

    def loss(self, batch: Batch) -> Tensor:
        first, second = ({name: tensor[half] for name, tensor in batch.items()} for half in (slice(1), slice(1, 2)))
        return super().loss(first) + 0.5 * super().loss(second)


class FirstLeftOut(Traced):
    """Leaves the first batch out before the model is called."""

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor | None:
        if self.current_epoch == batch_idx == 0:
            note("training_step", "left out", batch, drawn())
            return None
        return super().training_step(batch, batch_idx)


class FirstThrownAway(Traced):
    """Throws the first loss away."""

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor | None:
        loss = super().training_step(batch, batch_idx)
        return None if self.current_epoch == batch_idx == 0 else loss


class Tuned(FirstThrownAway):
    """Returns a dictionary, and throws the first two batches away."""

    def training_step(self, batch: Batch, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        return None if loss is None or (self.current_epoch == 0 and batch_idx == 1) else {"loss": loss, "of": batch_idx}


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:`training_step` returned `None`")
@pytest.mark.parametrize("kind", [Halves, FirstLeftOut, Tuned])
def test_of_steps(kind: type[Traced]) -> None:
    compared(kind)


# -- loops -------------------------------------------------------------------------------------------------------------


class Streaming(Traced):
    """Has data that only come one after the other."""

    def train_dataloader(self) -> Any:
        return DataLoader(Stream(self.rows(2 * BATCHES, 0)), batch_size=2, collate_fn=collate)


@pytest.mark.filterwarnings("ignore:`training_step` returned `None`")
@pytest.mark.parametrize(
    ("kind", "batches"), [(Streaming, 1), *((kind, 2) for kind in (Traced, Streaming, FirstLeftOut, FirstThrownAway))]
)
def test_of_windows(kind: type[Traced], batches: int) -> None:
    compared(kind, accumulate_grad_batches=batches)


@pytest.mark.slow
@pytest.mark.parametrize("kind", [Traced, Vision])
def test_of_callbacks_that_read_weights(kind: type[Traced]) -> None:
    _, (stock, *ours) = compared(kind, Reading)
    for found in ours:
        assert all(map(equal, stock.average, found.average))


# -- no room -----------------------------------------------------------------------------------------------------------


class Bare(Traced):
    """Has no hooks inside of blocks, each of which may run again."""

    inside = False


@pytest.mark.slow
@pytest.mark.parametrize("memory", ["tight", "resident"])
@pytest.mark.parametrize("kind", [Bare, Halves])
def test_where_the_host_has_no_room_for_activations(
    kind: type[Traced], memory: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Blocks run again in the backward of the first step: all but the first of a kind, which shows what one keeps."""
    again: set[str] = set()
    as_first = BlockRun.as_first

    def counted(run: BlockRun, *args: Any, **options: Any) -> Any:
        if steps == 1:
            again.add(run.name)
        return as_first(run, *args, **options)

    monkeypatch.setattr(BlockRun, "as_first", counted)
    monkeypatch.setattr(FirstStep, "host_room", lambda *_: 0)
    stock, _ = compared(kind, memory=memory)
    first, *others = [block.name for block in find_blocks(stock.module).blocks if block.kind == "layer"]
    assert len(others) == 2
    assert again >= set(others)
