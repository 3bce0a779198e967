"""Everything of the user's is called as often as under the plain Trainer, in the same order and with the same values.

That begins with the first step, which shows what to plan: it is the user's own one, and counts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode
from transformers import PrinterCallback, Trainer, TrainerCallback

import lt_offload
from lt_offload.compat.torch import all_function_modes
from lt_offload.model.blocks import find_blocks
from lt_offload.profiling.step.first import FirstStep
from scripts.attack.compared import Ended
from scripts.hf import cases
from scripts.hf.runs import ended, home, quiet
from tests.parity.callbacks.calls import Noted, drawn, note, noting
from tests.parity.callbacks.test_first_steps import Unused
from tests.sampling import some

EVENTS = [name for name in vars(TrainerCallback) if name.startswith("on_") and name not in ("on_log", "on_save")]
OWN = ("step_s", "step_vs_plan", "device_peak_gb", "host_peak_gb", "tokens_per_s")
"""What is logged of the engine, beside what the user logs."""
STEPS = 5


def made(name: str) -> Callable[..., None]:
    """Return a method of a callback that notes that it is called, and draws."""

    def called(self: Any, args: Any, state: Any, control: Any, model: Any = None, **others: Any) -> None:
        note("callback", name, state.global_step, drawn(), model.training)
        if name in ("on_step_begin", "on_step_end"):
            note("weights", name, *(p.detach() for p in model.parameters()))

    return called


Noting: Any = type("Noting", (TrainerCallback,), {name: made(name) for name in EVENTS})
"""A callback that notes all that happens."""


class Drawing(torch.utils.data.Dataset[Any]):
    """Rows, every one of which is changed by chance when it is asked for; each is longer than those before."""

    def __init__(self, rows: Any) -> None:
        self._rows = rows

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> Any:
        chance = drawn()
        found = {name: list(ids) for name, ids in self._rows[index].items()}
        if chance[0] < 0.5 and "input_ids" in found:
            found["input_ids"][0] = 5
        note("dataset", index, found, chance)
        return found


def collate(rows: Any) -> Any:
    found = cases.collate(rows)
    note("collate", len(rows), found)
    return found


class Watched(Trainer):  # type: ignore[misc]
    """Notes what is called of it, and of its model's blocks."""

    def _get_train_sampler(self, train_dataset: Any = None) -> Any:
        return torch.utils.data.SequentialSampler(self.train_dataset)  # type: ignore[arg-type]

    def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> Tensor:
        note("training_step", self.state.global_step, inputs, num_items_in_batch, drawn(), self.steps())
        loss = super().training_step(model, inputs, num_items_in_batch)
        note("training_step", "loss", loss, drawn())
        return loss

    def steps(self) -> int:
        self.count = getattr(self, "count", 0) + 1
        return self.count

    def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        note("compute_loss", model.training, inputs, drawn())
        print("a step")
        return super().compute_loss(model, inputs, *args, **kwargs)

    def log(self, logs: Any, *args: Any, **kwargs: Any) -> None:
        users = {name: value for name, value in logs.items() if name not in OWN}
        note("log", self.state.global_step, *([users] if "loss" in users else users))
        super().log(logs, *args, **kwargs)


class PerRow(Watched):
    """Calls the backward of its losses itself, one for each row."""

    def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> Tensor:
        model.train()
        total = torch.tensor(0.0)
        for row in range(len(inputs["input_ids"])):
            each = {name: tensor[row : row + 1] for name, tensor in inputs.items()}
            loss = self.compute_loss(model, each) / (2 * self.args.gradient_accumulation_steps)
            loss.backward()
            note("training_step", "row", each, loss, drawn())
            total += loss.detach()
        return total


class Editing(Watched):
    """Puts other gradients in place of those of a micro-batch."""

    def training_step(self, *args: Any, **kwargs: Any) -> Tensor:
        loss = super().training_step(*args, **kwargs)
        for name, parameter in self.model.named_parameters():
            if "q_proj" in name:
                parameter.grad = parameter.grad * 0.5
        return loss


class Mode(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


class Counting(Watched):
    """Encloses its steps in a mode of torch, as counters of operations are."""

    def training_step(self, *args: Any, **kwargs: Any) -> Tensor:
        with Mode() as mode, torch.device("cpu"):  # a mode of functions
            loss = super().training_step(*args, **kwargs)
            note("training_step", "on top", _get_current_dispatch_mode() is mode, type(all_function_modes()[-1]))
        return loss


class Twice(Watched):
    """Calls the model twice in a step."""

    def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        first, second = (super(Twice, self).compute_loss(model, dict(inputs), *args, **kwargs) for _ in range(2))
        return first + 0.5 * second


def hook(trainer: Any) -> None:
    """Let blocks, and some of their weights, note what comes to them."""
    structure = find_blocks(trainer.model)
    first, second, *_ = [block.module for block in structure.blocks if block.kind == "layer"]
    first.register_forward_pre_hook(lambda module, args: note("pre-hook", "first", args))
    second.register_forward_hook(lambda module, args, out: note("hook", "second", out))
    second.register_full_backward_hook(lambda module, ins, outs: note("backward", "second", ins, outs))
    weights = [(name, p) for name, p in second.named_parameters() if p.requires_grad]
    for name, weight in weights:
        weight.register_hook(seen(name))  # type: ignore[no-untyped-call]


def seen(name: str) -> Callable[[Tensor], Tensor]:
    def changed(gradient: Tensor) -> Tensor:
        note("gradient", name, gradient)
        return gradient * 0.5

    return changed


def growing(count: int) -> Any:
    return sorted(cases.rows(count), key=lambda row: len(row["input_ids"]))


def trainer_of(folder: Path, kind: type[Watched] = Watched, model: Callable[[], Any] = cases.llama, **args: Any) -> Any:
    options = {"max_steps": STEPS, "dataloader_num_workers": 0, **args}
    rows = Drawing(growing(2 * STEPS * options.get("gradient_accumulation_steps", 1)))
    settings: Any = {"_callbacks": [Noting()], "_train_dataset": rows, "_data_collator": collate}
    return cases.plain(model, kind=kind, **options, **settings)(folder)


def recorded(
    make: Callable[[], Any],
    context: Any = None,
    *,
    hooked: bool = True,
    parts: int = 1,
    tokens: int | None = None,
) -> tuple[Ended, list[Noted]]:
    """Train, plainly with blocks in so many ``parts`` and tiles, and return what is left and what was called."""
    torch.manual_seed(3)
    with quiet(), noting() as noted:
        with context or nullcontext():
            trainer = make()
        trainer.remove_callback(PrinterCallback)  # it would print what is logged of the engine
        if hooked:
            hook(trainer)
        if tokens is not None:
            lt_offload.tile_tokens(trainer.model, tokens)
        with lt_offload.micro_batched_reference(trainer.model, parts) if parts > 1 else nullcontext():
            trainer.train()
        return ended(trainer), noted()


def compared(
    make: Callable[[], Any],
    memories: list[str],
    *,
    hooked: bool = True,
    least: int = 1,
    parts: int = 1,
    tokens: int | None = None,
) -> None:
    """Train both ways, with each of ``memories``; ``least``: so many steps show what to plan in the smallest one."""
    plain, expected = recorded(make, hooked=hooked, parts=parts, tokens=tokens)
    kinds = {"callback", "training_step", "log"} | ({"pre-hook", "hook", "backward"} if hooked else set())
    assert kinds <= {kind for kind, *_ in expected}
    showing: list[FirstStep] = []
    returned = FirstStep.returned

    def noted(first: FirstStep, result: Any) -> Any:
        showing.append(first)
        return returned(first, result)

    for memory in memories:
        showing.clear()
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(FirstStep, "returned", noted)
            context = lt_offload.hf_trainer(memory=memory, host_memory="4GB", micro_batches=parts, tile_tokens=tokens)
            found, called = recorded(make, context, hooked=hooked)
        assert called == expected
        assert plain.differs(found) == []
        assert found.travels or memory == RESIDENT
        assert len(showing) >= (1 if memory == RESIDENT else least)


RESIDENT = "2GB"
KINDS: dict[str, dict[str, Any]] = {
    "plain": {},
    "accumulation": {"gradient_accumulation_steps": 2, "max_grad_norm": 0.1},
    "bf16, dropout": {"bf16": True, "model": lambda: cases.llama(attention_dropout=0.2)},
    "tied weights": {"model": lambda: cases.llama(tie_word_embeddings=True)},
    "backward per row": {"kind": PerRow},
    "two forwards": {"kind": Twice},
    "a mode": {"kind": Counting},
}


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_of_a_trainer(kind: str, tmp_path: Path) -> None:
    options = KINDS[kind]
    memories = some(["170kB", RESIDENT], 2, kind)
    compared(lambda: trainer_of(tmp_path, **options), memories, hooked=options.get("kind") is not Twice, least=2)


@pytest.mark.slow
def test_of_parts(tmp_path: Path) -> None:
    compared(lambda: trainer_of(tmp_path), ["170kB", RESIDENT], hooked=False, parts=2)


@pytest.mark.slow
def test_of_tiles(tmp_path: Path) -> None:
    compared(lambda: trainer_of(tmp_path), ["170kB", RESIDENT], tokens=5)


class OtherLayers(Unused):
    """Has larger layers than those that it calls, whose first step trains without a plan."""

    def forward(self, input_ids: Tensor, labels: Tensor, attention_mask: Tensor | None = None, **_: Any) -> Any:
        return super().forward(input_ids, labels.clamp(min=0))


@pytest.mark.slow
def test_of_other_layers(tmp_path: Path) -> None:
    compared(lambda: trainer_of(tmp_path, model=OtherLayers), ["300kB", RESIDENT], hooked=False, least=2)


@pytest.mark.sampled
def test_of_other_gradients_in_a_window_that_is_planned_again(tmp_path: Path) -> None:
    compared(lambda: trainer_of(tmp_path, kind=Editing, gradient_accumulation_steps=2), ["170kB"], least=2)


@pytest.mark.slow
def test_of_adapters(tmp_path: Path) -> None:
    compared(lambda: trainer_of(tmp_path, model=cases.lora), ["170kB", RESIDENT])


@pytest.fixture(scope="module")
def folder() -> Iterator[Path]:
    pytest.importorskip("trl")
    with home() as found:
        yield found


TRL = {"SFT": "11MB", "DPO": "24MB", "DPO, LoRA": "24MB"}


@pytest.mark.parametrize("name", some(list(TRL), 2))
def test_of_trl(name: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CI", "1")  # TRL sends word of every Trainer elsewhere

    def make() -> Any:
        trainer = cases.TRL[name](folder)
        trainer.add_callback(Noting())
        for method in ("compute_loss", "data_collator", "training_step", "log"):
            vars(trainer)[method] = noted_call(method, getattr(trainer, method))
        return trainer

    # Weights of adapters have a gradient per forward, of which there are two: no hook of theirs sees them.
    compared(make, [TRL[name], RESIDENT], hooked=name != "DPO, LoRA")


def noted_call(name: str, call: Callable[..., Any]) -> Callable[..., Any]:
    def called(*args: Any, **kwargs: Any) -> Any:
        given = [value for value in (*args, *kwargs.values()) if not isinstance(value, nn.Module)]
        note(name, "called", *(given if name != "log" else []), drawn())
        return call(*args, **kwargs)

    return called
