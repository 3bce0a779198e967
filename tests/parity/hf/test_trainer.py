"""transformers' Trainer, offloaded: its own losses, norms, weights, states and checkpoints, bit for bit."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import Dataset
from transformers import Trainer, TrainerCallback

import lt_offload
from lt_offload.errors import ConfigError, OverBudget
from lt_offload.hf.run import Run
from lt_offload.strategy.first.survey import FirstIteration
from scripts.hf import cases
from scripts.hf.runs import BUDGETS, compare, ended, least, quiet, train
from tests.sampling import grid, some


@pytest.mark.parametrize(("case", "budget"), grid(cases.HF, BUDGETS, count=2))
def test_a_run_is_the_plain_one(case: str, budget: str, tmp_path: Path) -> None:
    _, differs = compare(cases.HF[case], budget, tmp_path)
    assert differs == []


class Mixed(lt_offload.OffloadedTrainerMixin, cases.OwnBackward):
    """A Trainer of one's own, with a training step of its own, that is offloaded wherever it is made."""


@pytest.mark.parametrize("budget", some(["middle", "recompute", "tight"], 1))
def test_a_trainer_of_a_class_that_is_offloaded_is_the_plain_one(budget: str, tmp_path: Path) -> None:
    settings = {"gradient_accumulation_steps": 2, **cases.EVALUATED}
    make = cases.plain(kind=cases.OwnBackward, **settings)
    plain = ended(train(make, tmp_path))
    least_bytes = least(make, tmp_path, **({"activation_offload": False} if budget == "recompute" else {}))
    options = {"memory": least_bytes * 2 if budget == "middle" else least_bytes}
    options |= {"activation_offload": False} if budget == "recompute" else {}
    trainer = train(cases.plain(kind=partial(Mixed, offload=options), **settings), tmp_path)
    assert plain.differs(ended(trainer)) == []
    assert type(trainer).__name__ == "Mixed"
    assert isinstance(trainer, Mixed)
    assert trainer.offmate.plan.budget_bytes <= options["memory"]


def with_gradients() -> Any:
    model = cases.lora()
    model.enable_input_require_grads()
    return model


CHECKPOINTED = {
    f"reentrant: {reentrant}": cases.plain(
        cases.lora, gradient_checkpointing=True, gradient_checkpointing_kwargs={"use_reentrant": reentrant}
    )
    for reentrant in (False, True)
} | {"only inputs that require gradients": cases.plain(with_gradients)}


@pytest.mark.parametrize(("case", "budget"), grid(CHECKPOINTED, ("tight", "recompute"), count=2))
def test_adapters_as_most_people_train_them_fit_into_the_smallest_memory(
    case: str, budget: str, tmp_path: Path
) -> None:
    _, differs = compare(CHECKPOINTED[case], budget, tmp_path)
    assert differs == []


class WithoutBackward(Trainer):  # type: ignore[misc]
    def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> Any:
        return self.compute_loss(model, inputs).detach()


class OtherBackward(Trainer):  # type: ignore[misc]
    def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> Any:
        loss = self.compute_loss(model, inputs)
        torch.autograd.backward(loss)
        return loss.detach()


@pytest.mark.parametrize("kind", [WithoutBackward, OtherBackward])
def test_a_step_without_a_backward_is_refused_before_training(kind: type[Trainer], tmp_path: Path) -> None:
    makes: list[Any] = []

    def make(folder: Path) -> Any:
        makes.append(cases.plain(kind=kind)(folder))
        return makes[-1]

    said = rf"{kind.__name__}\.training_step .*; call self\.accelerator\.backward"
    with pytest.raises(ConfigError, match=said):
        train(make, tmp_path, lt_offload.hf_trainer(memory="1GB", planner="resident"))
    (trainer,) = makes
    expected = cases.llama().state_dict()
    assert all(torch.equal(weight, expected[name]) for name, weight in trainer.model.state_dict().items())
    trainer.model(torch.ones(1, 4, dtype=torch.long)).logits.sum().backward()  # it is an ordinary model again


def test_checkpoints_that_cannot_be_saved_are_refused_before_training(tmp_path: Path) -> None:
    def stored() -> Any:
        model = cases.llama()
        lt_offload.store_weights(model, "int8")
        return model

    with pytest.raises(ConfigError, match="save_strategy='steps': .*; train adapters"):
        train(cases.plain(stored, save_strategy="steps"), tmp_path, lt_offload.hf_trainer(memory="1GB"))
    trainer = train(cases.plain(stored, save_strategy="no"), tmp_path, lt_offload.hf_trainer(memory="1GB"))
    assert trainer.state.global_step == trainer.state.max_steps
    with pytest.raises(ConfigError, match="open_weights"):
        trainer.save_model(tmp_path)
    lt_offload.open_weights(trainer.model).save_pretrained(tmp_path)


def test_with_a_larger_batch_that_is_given_a_step_is_measured_aside(tmp_path: Path) -> None:
    make = cases.plain(gradient_accumulation_steps=2)
    plain = ended(train(make, tmp_path / "plain"))
    shortest, *_, longest = sorted(cases.rows(), key=lambda row: len(row["input_ids"]))
    batch = cases.collate([longest, shortest])
    context = lt_offload.hf_trainer(memory="200kB", planner="stream", sample_batch=batch)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(FirstIteration, "forward", lambda *_: pytest.fail("a step of the training shows what to plan"))
        found = train(make, tmp_path, context)
    assert plain.differs(ended(found)) == []
    path = tmp_path / "out" / "lt_offload" / "plan.json"
    again = train(make, tmp_path / "again", lt_offload.hf_trainer(plan=path))
    assert plain.differs(ended(again)) == []
    assert again.offmate.plan == found.offmate.plan


class Noting(cases.OwnLoss):  # type: ignore[misc]
    """Notes how often a step of an evaluation runs."""

    def __init__(self, *args: Any, **options: Any) -> None:
        self.steps = 0
        super().__init__(*args, **options)

    def prediction_step(self, *args: Any, **options: Any) -> Any:
        self.steps += 1
        return super().prediction_step(*args, **options)


class BrokenRows(Dataset[Any]):
    def __len__(self) -> int:
        return 4

    def __getitem__(self, at: int) -> Any:
        raise ValueError("a broken row")


class TriesToEvaluate(Trainer):  # type: ignore[misc]
    """Evaluates rows that cannot be read after its second step, and goes on."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.engines: list[bool] = []
        trainer = self

        class Tries(TrainerCallback):  # type: ignore[misc]
            def on_step_end(self, args: Any, state: Any, control: Any, **more: Any) -> None:
                if state.global_step == 2:
                    with pytest.raises(ValueError, match="a broken row"):
                        trainer.evaluate(BrokenRows())
                run = getattr(trainer, "offmate", None)
                trainer.engines.append(run is None or run.engine is not None)

        self.add_callback(Tries())


def test_training_goes_on_with_its_engine_after_an_evaluation_that_fails(tmp_path: Path) -> None:
    make = cases.plain(kind=TriesToEvaluate, gradient_accumulation_steps=2)
    plain = train(make, tmp_path / "plain")
    made = train(make, tmp_path / "ours", lt_offload.hf_trainer(memory="200kB", planner="stream"))
    assert ended(plain).differs(ended(made)) == []
    assert all(made.engines)


@pytest.mark.parametrize("steps", [1, None])
def test_predictions_that_go_to_the_host_take_no_device_memory(steps: int | None, tmp_path: Path) -> None:
    """Together they are larger than the budget; a Trainer that is to keep them on the device says what helps."""
    kept = []
    for context in (nullcontext(), lt_offload.hf_trainer(memory="300KB")):
        with quiet(), context:
            trainer = cases.plain(eval_accumulation_steps=steps)(tmp_path)
        helps = pytest.raises(OverBudget, match="eval_accumulation_steps, or memory= to more")
        with quiet(), helps if kept and steps is None else nullcontext():
            kept.append(trainer.predict(cases.rows(400)).predictions)
    assert kept[0].nbytes > 300_000
    assert all((kept[0] == other).all() for other in kept)
    assert len(kept) == (2 if steps else 1)


@pytest.mark.parametrize("room", [False, True])
def test_an_evaluation_has_the_place_of_the_training_until_it_is_known_to_fit_beside(
    room: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No step of it is run before."""
    settings: dict[str, Any] = {"eval_strategy": "steps", "eval_steps": 1, "per_device_eval_batch_size": 4}
    make = cases.plain(kind=Noting, _eval_dataset=cases.rows(9, seed=5), **settings)
    plain = train(make, tmp_path / "plain")
    has_room, asked = Run._has_room, list[bool]()

    def noted(run: Run, data: Any) -> bool:
        asked.append(has_room(run, data))
        return room and asked[-1]

    monkeypatch.setattr(Run, "_has_room", noted)
    found = train(make, tmp_path / "ours", lt_offload.hf_trainer(memory="200kB", planner="stream"))
    assert ended(plain).differs(ended(found)) == []
    assert found.steps == plain.steps
    assert asked == [False] + [True] * (len(asked) - 1)


def files(folder: Path) -> dict[str, Any]:
    from safetensors.torch import load_file

    found: dict[str, Any] = {}
    for path in sorted(folder.iterdir()):
        if path.suffix == ".safetensors":
            found[path.name] = load_file(path)
        elif path.suffix in (".pt", ".pth"):
            found[path.name] = torch.load(path, weights_only=False)
    return found


def flat(thing: Any) -> list[Any]:
    if isinstance(thing, dict):
        return [part for key in sorted(thing, key=str) for part in [str(key), *flat(thing[key])]]
    if isinstance(thing, (list, tuple)):
        return [part for item in thing for part in flat(item)]
    return [thing.tolist() if hasattr(thing, "tolist") else thing]


def test_checkpoints_are_the_plain_ones_and_go_on_in_both_directions(tmp_path: Path) -> None:
    """A run that saves after two steps, with dropout, and its other half from the checkpoint of the other kind."""
    make = cases.plain(lambda: cases.llama(attention_dropout=0.2), save_strategy="steps", save_steps=2)
    folders = {kind: tmp_path / kind for kind in ("plain", "offloaded")}
    contexts: dict[str, Callable[[], Any]] = {
        "plain": lambda: None,
        "offloaded": lambda: lt_offload.hf_trainer(memory="150kB", planner="stream"),
    }
    whole = {kind: ended(train(make, folders[kind], contexts[kind]())) for kind in folders}
    assert whole["plain"].differs(whole["offloaded"]) == []
    saved = {kind: folder / "out" / "checkpoint-2" for kind, folder in folders.items()}
    assert flat(files(saved["plain"])) == flat(files(saved["offloaded"]))
    for mine, theirs in (("plain", "offloaded"), ("offloaded", "plain")):
        resumed = train(make, tmp_path / f"on {mine}", contexts[mine](), resume_from_checkpoint=str(saved[theirs]))
        assert whole["plain"].differs(ended(resumed)) == []


class Interrupting(TrainerCallback):  # type: ignore[misc]
    """Presses Ctrl-C in the forward of the third step, or ends the process."""

    def __init__(self, number: int) -> None:
        self.number = number

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.global_step == 2:
            os.kill(os.getpid(), self.number)


@pytest.fixture
def listening() -> Iterator[None]:
    """Ctrl-C is an exception, as in a terminal; processes in the background ignore it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    ended = signal.signal(signal.SIGTERM, signal.default_int_handler)  # the process is to go on here
    yield
    signal.signal(signal.SIGINT, before)
    signal.signal(signal.SIGTERM, ended)


@pytest.mark.usefixtures("listening")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM], ids=["Ctrl-C", "SIGTERM"])
def test_ctrl_c_ends_the_update_and_leaves_a_checkpoint(number: int, tmp_path: Path) -> None:
    whole = ended(train(cases.plain(), tmp_path / "plain"))
    with pytest.raises(KeyboardInterrupt):
        train(
            cases.plain(_callbacks=[Interrupting(number)]),
            tmp_path,
            lt_offload.hf_trainer(memory="1GB", planner="resident"),
        )
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    resumed = train(
        cases.plain(), tmp_path, lt_offload.hf_trainer(memory="1GB", planner="resident"), resume_from_checkpoint=True
    )
    assert whole.differs(ended(resumed)) == []
    kept = {path.name for path in (tmp_path / "out" / "lt_offload").iterdir()}
    assert kept == {"plan.json", "profile.json", "trace.json", "trace.perfetto.json", "metrics.csv", "report.html"}


class Failing(TrainerCallback):  # type: ignore[misc]
    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.global_step == 2:
            raise ZeroDivisionError


def used(folder: Path, context: Any) -> list[Any]:
    """A user's afternoon: evaluates before training, fails in the middle, trains twice, with another Trainer beside."""
    with context:
        first = cases.plain(_eval_dataset=cases.rows(5))(folder / "first")
        second = cases.plain(kind=cases.OwnLoss)(folder / "second")
        first.add_callback(failing := Failing())
        before = first.evaluate()["eval_loss"]
        with pytest.raises(ZeroDivisionError):
            first.train()
        halfway = {name: tensor.clone() for name, tensor in first.model.state_dict().items()}
        first.remove_callback(failing)
        second.train()
        first.train()
    first.train()
    predicted = first.predict(cases.rows(3)).predictions
    first.save_model(folder / "saved")
    weights = files(folder / "saved")
    return flat([before, halfway, predicted, weights, first.evaluate()["eval_loss"], second.model.state_dict()])


@pytest.mark.slow
@pytest.mark.sampled
def test_an_afternoon_with_two_trainers_leaves_what_it_leaves_plainly(tmp_path: Path) -> None:
    with quiet():
        plain = used(tmp_path / "plain", nullcontext())
        assert used(tmp_path / "offloaded", lt_offload.hf_trainer(memory="400kB", planner="stream")) == plain
