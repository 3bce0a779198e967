"""A Trainer that goes on from a checkpoint: it has the plan, the RAM and the trained weights of its run."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import TrainerCallback

import lt_offload
from lt_offload.errors import ConfigError
from lt_offload.hf.report import RECORD
from lt_offload.strategy import replay
from scripts.hf import cases
from scripts.hf.runs import ended, train

SAVING = {"save_strategy": "steps", "save_steps": 2}


def two_steps(folder: Path) -> str:
    return str(folder / "out" / "checkpoint-2")


def unmeasured(patch: pytest.MonkeyPatch) -> None:
    """Only the model may be measured."""
    for name in ("measure_hardware", "measure_optimizer", "measure_contention"):
        patch.setattr(
            f"lt_offload.profiling.machine.{name}", lambda *_, name=name, **__: pytest.fail(f"{name} is called")
        )


def shrinking() -> list[Any]:
    """Rows of which the first batch is the largest, and has padding."""
    shortest, *others, longest = sorted(cases.rows(8), key=lambda row: len(row["input_ids"]))
    return [longest, shortest, *others]


@pytest.mark.slow
@pytest.mark.parametrize("evaluates", [False, True])
def test_it_has_the_plan_of_its_run(evaluates: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    evaluation = {"eval_strategy": "steps", "eval_steps": 3, "_eval_dataset": cases.rows(5)} if evaluates else {}
    make = cases.plain(kind=cases.InOrder, _train_dataset=shrinking(), **SAVING, **evaluation)
    context = partial(lt_offload.hf_trainer, host_memory="4GB", planner="stream")
    whole = train(make, tmp_path, context(memory="150kB"))
    monkeypatch.setattr("lt_offload.profiling.hardware.available_host_bytes", lambda: 8 * 10**9)
    unmeasured(monkeypatch)
    again = {"resume_from_checkpoint": two_steps(tmp_path)}
    resumed = train(make, tmp_path / "again", context(memory="150kB"), **again)
    assert resumed.offmate.plan == whole.offmate.plan
    assert ended(whole).differs(ended(resumed)) == []
    # Another budget is another plan, for which the process takes what it took.
    other = train(make, tmp_path / "other", context(memory="300kB"), **again)
    assert other.offmate.plan.budget_bytes == 300_000
    assert other.offmate.plan.process_bytes == whole.offmate.plan.process_bytes
    assert ended(whole).differs(ended(other)) == []


class Swapping(TrainerCallback):  # type: ignore[misc]
    """After the first step the embedding trains, and the head does not any more."""

    def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
        if state.global_step == 1:
            model.model.embed_tokens.requires_grad_(True)
            model.lm_head.requires_grad_(False)


def swapped(model: Any) -> Any:
    model.model.embed_tokens.requires_grad_(False)
    return model


def held(folder: Path) -> Any:
    """A Trainer whose optimizer holds all weights, the frozen ones, too."""
    model = swapped(cases.llama())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    settings: Any = {"_optimizers": (optimizer, None), "_callbacks": [Swapping()]}
    return cases.plain(lambda: model, **SAVING, **settings)(folder)


class Freezing(TrainerCallback):  # type: ignore[misc]
    def on_train_begin(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
        swapped(model)


@pytest.mark.slow
def test_it_trains_the_weights_that_its_run_trained(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    context = partial(lt_offload.hf_trainer, memory="200kB", planner="stream")
    whole = train(held, tmp_path / "plain")
    assert ended(whole).differs(ended(train(held, tmp_path, context()))) == []
    resumed = train(held, tmp_path / "again", context(), resume_from_checkpoint=two_steps(tmp_path))
    assert ended(whole).differs(ended(resumed)) == []
    said: list[str] = []
    monkeypatch.setattr(replay, "rank_zero_warn", said.append)

    def freezing(folder: Path) -> Any:
        trainer = held(folder)
        trainer.add_callback(Freezing())
        return trainer

    train(freezing, tmp_path / "frozen", context(), resume_from_checkpoint=two_steps(tmp_path))
    assert [sentence.split(": ")[-1].split(";")[0] for sentence in said] == ["model.embed_tokens.weight"]


@pytest.mark.slow
def test_weights_that_no_optimizer_holds_are_named(tmp_path: Path) -> None:
    """A Trainer's own has those that train when it is made."""
    context = partial(lt_offload.hf_trainer, memory="1GB", planner="resident")
    train(held, tmp_path, context())
    make: Callable[[Path], Any] = cases.plain(lambda: swapped(cases.llama()), **SAVING)
    said = r"no optimizer of this run holds: model\.embed_tokens\.weight; a Trainer's own .* in optimizers="
    with pytest.raises(ConfigError, match=said):
        train(make, tmp_path / "again", context(), resume_from_checkpoint=two_steps(tmp_path))
    (Path(two_steps(tmp_path)) / RECORD).write_text("{")
    with pytest.raises(ConfigError, match=rf"{RECORD}' is damaged \(JSONDecodeError.*; use another checkpoint, or"):
        train(make, tmp_path / "again", context(), resume_from_checkpoint=two_steps(tmp_path))
