"""Losses of several forwards: pairs, a reference without gradients, forwards in between; all equal plain PyTorch."""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_

import lt_offload
from lt_offload.errors import UnsupportedError
from lt_offload.execute.engine import Engine
from lt_offload.plan import Plan, solve
from lt_offload.schema.explain import OTHER_BITS, brief
from lt_offload.schema.profile import Profile
from tests import sampling
from tests.parity.windows.training import budgets
from tests.support import models
from tests.support.engines import Result, carried_out, differences, make_optimizer

Batch = dict[str, Any]
Step = Callable[[nn.Module, Batch], Tensor]


def scores(model: nn.Module, batch: Batch) -> Tensor:
    """The log-probability of each sample."""
    logits = model(input_ids=batch["input_ids"]).logits[:, :-1]
    chosen = logits.log_softmax(-1).gather(-1, batch["input_ids"][:, 1:, None])
    return chosen.sum((-1, -2))


def preference(model: nn.Module, batch: Batch) -> Tensor:
    """As in DPO: two forwards, and two of a reference before them."""
    with torch.no_grad():
        reference = scores(model, batch["chosen"]) - scores(model, batch["rejected"])
    return -F.logsigmoid(0.1 * (scores(model, batch["chosen"]) - scores(model, batch["rejected"]) - reference)).mean()


def reference_between(model: nn.Module, batch: Batch) -> Tensor:
    """One forward, and one without gradients after it."""
    own = scores(model, batch["chosen"])
    with torch.no_grad():
        reference = scores(model, batch["rejected"])
    return (own - reference).square().mean()


def reference_last(model: nn.Module, batch: Batch) -> Tensor:
    """Two forwards, one without gradients between them and one after them."""
    chosen = scores(model, batch["chosen"])
    with torch.no_grad():
        before = scores(model, batch["rejected"])
    rejected = scores(model, batch["rejected"])
    with torch.no_grad():
        after = scores(model, batch["chosen"])
    return ((chosen - after).square() + (rejected - before - 1).square()).mean()


def three(model: nn.Module, batch: Batch) -> Tensor:
    """Three forwards of other lengths."""
    short = {"input_ids": batch["chosen"]["input_ids"][:, :5], "labels": batch["chosen"]["input_ids"][:, :5]}
    first = model(**batch["chosen"]).loss
    return first + model(**batch["rejected"]).loss * 0.5 + model(**short).loss


def batches(model: nn.Module, count: int = 3) -> list[Batch]:
    """Pairs, no two alike."""
    return [
        {
            "chosen": models.batch(model, batch_size=2, sequence_length=9, seed=2 * seed),
            "rejected": models.batch(model, batch_size=2, sequence_length=7 + seed, seed=2 * seed + 1),
        }
        for seed in range(count)
    ]


class Apart:
    """Gives each forward of a plain model a backward of its own, the last one first."""

    def __init__(self, model: nn.Module) -> None:
        self._pairs: list[tuple[Tensor, Tensor]] = []
        model.get_output_embeddings().register_forward_hook(self._cut)  # type: ignore[operator, union-attr]

    def _cut(self, module: nn.Module, args: Any, logits: Tensor) -> Tensor:
        if not torch.is_grad_enabled():
            return logits
        leaf = logits.detach().requires_grad_()
        self._pairs.append((logits, leaf))
        return leaf

    def finish(self) -> None:
        """To be called after the backward of the loss."""
        for logits, leaf in reversed(self._pairs):
            logits.backward(leaf.grad)
        self._pairs.clear()


def train(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    step: Step,
    window: int,
    engine: Engine | None = None,
    apart: Apart | None = None,
    *,
    clip: bool = False,
) -> Result:
    """Train on some batches, with ``window`` backwards per update."""
    torch.manual_seed(7)
    losses = []
    for at, batch in enumerate(batches(model, 3 if window == 1 else 2 * window)):
        with engine.device.accounting() if engine is not None else nullcontext():
            loss = step(model, batch) / window
            loss.backward()
        if apart is not None:
            apart.finish()
        losses.append(loss.detach().clone())
        if at % window == window - 1:
            if clip and engine is None:
                losses.append(clip_grad_norm_(model.parameters(), 0.05))
            elif clip and engine is not None:
                losses.append(engine.clip_grad_norm_(0.05))
            optimizer.step()
            optimizer.zero_grad()
    return Result(losses, model, optimizer)


def profiled(start: nn.Module, step: Step) -> Profile:
    model = copy.deepcopy(start)
    optimizer = make_optimizer(model, "adamw-fused")
    lengths = {"chosen": 9, "rejected": 10}
    largest = {
        name: models.batch(model, batch_size=2, sequence_length=length, seed=50) for name, length in lengths.items()
    }
    return lt_offload.profile(model, largest, optimizer=optimizer, run=lambda batch: step(model, batch))


def by(plan: Plan, start: nn.Module, step: Step, window: int = 1) -> Result:
    """Train by ``plan``, on an emulated device that checks every access and holds the budget."""
    model = copy.deepcopy(start)
    optimizer = make_optimizer(model, "adamw-fused")
    with carried_out(model, optimizer, plan) as engine:
        engine.follow(optimizer)
        result = train(model, optimizer, step, window, engine, clip=plan.delayed)
        assert engine.stats.device_peak_bytes <= min(plan.budget_bytes, plan.predicted.device_peak_bytes)
    return result


def plainly(start: nn.Module, step: Step, window: int = 1, *, apart: bool = False, clip: bool = False) -> Result:
    model = copy.deepcopy(start)
    optimizer = make_optimizer(model, "adamw-fused")
    return train(model, optimizer, step, window, apart=Apart(model) if apart else None, clip=clip)


COUNTS = {preference: (2, 1), reference_between: (1, 1), reference_last: (2, 2), three: (3, 2)}
MODELS: list[dict[str, Any]] = [{"dropout": 0.1, "family": "bloom", "tie_word_embeddings": False}, {"lora": True}]
SETTINGS: list[dict[str, Any]] = [{}, {"accumulate": 2}, {"delayed": True}]


@pytest.mark.parametrize(("step", "options"), sampling.grid(COUNTS, MODELS, count=3))
def test_losses_of_several_forwards_equal_plain_training(step: Step, options: dict[str, Any]) -> None:
    start = models.build(**options)
    profile, expected = profiled(start, step), plainly(start, step)
    assert (profile.forwards, profile.deferred_forwards) == COUNTS[step]
    for memory in budgets(profile):
        plan = solve(profile, memory=memory)
        assert (plan.forwards, plan.accumulate) == (profile.forwards, 1)
        assert differences(expected, by(plan, start, step)) == []


@pytest.mark.slow
@pytest.mark.parametrize(("step", "settings"), sampling.grid(COUNTS, SETTINGS, count=3))
def test_weights_that_blocks_share_and_windows_sum_forward_by_forward(step: Step, settings: dict[str, Any]) -> None:
    """As if each forward had a backward of its own, the last one first: the plan says so."""
    start = models.build("llama-tied", dropout=0.1)
    window = settings.get("accumulate", 1)
    expected = plainly(start, step, window, apart=True, clip="delayed" in settings)
    profile = profiled(start, step)
    for memory in budgets(profile, **settings):
        plan = solve(profile, memory=memory, **settings)
        assert plan.accumulate == window
        assert ("forward by forward" in "".join(plan.notes)) is (plan.forwards > 1)
        assert (OTHER_BITS in " ".join(brief(plan).split())) is (plan.forwards > 1)
        assert differences(expected, by(plan, start, step, window)) == []


# -- loops of one's own ------------------------------------------------------------------------------------------------


def both(model: nn.Module, batch: Batch) -> Tensor:
    return model(**batch["chosen"]).loss + model(**batch["rejected"]).loss  # type: ignore[no-any-return]


def in_one_backward(model: nn.Module, batch: Batch) -> None:
    both(model, batch).backward()


def the_last_one_first(model: nn.Module, batch: Batch) -> None:
    first, second = (model(**batch[name]).loss for name in ("chosen", "rejected"))
    second.backward()
    first.backward()


def only_one(model: nn.Module, batch: Batch) -> None:
    model(**batch["chosen"]).loss.backward()


def one_is_dropped(model: nn.Module, batch: Batch) -> None:
    model(**batch["chosen"]).loss.item()
    model(**batch["rejected"]).loss.backward()


def after_an_error(model: nn.Module, batch: Batch) -> None:
    with pytest.raises(ValueError, match="exactly one"):
        model(**batch["chosen"]).loss + model()
    both(model, batch).backward()


def loop(model: nn.Module, backward: Callable[[nn.Module, Batch], None], optimizer: torch.optim.Optimizer) -> Result:
    for batch in batches(model):
        backward(model, batch)
        optimizer.step()
        optimizer.zero_grad()
    return Result([], model, optimizer)


def offloaded_loop(backward: Callable[[nn.Module, Batch], None], *, said: bool = True, memory: int = 700_000) -> Result:
    model = models.build()
    optimizer = make_optimizer(model, "adamw-fused")
    sample = batches(model)[-1]
    run = (lambda batch: both(model, batch)) if said else None
    batch = sample if said else sample["rejected"]
    with lt_offload.offloaded(model, optimizer, batch, run=run, memory=memory, accelerator="cpu"):
        return loop(model, backward, optimizer)


@pytest.mark.parametrize(
    "backward",
    [in_one_backward, the_last_one_first, only_one, one_is_dropped, after_an_error],
    ids=lambda backward: backward.__name__,
)
def test_loops_may_call_the_model_as_often_as_the_sample_did_or_less(
    backward: Callable[[nn.Module, Batch], None],
) -> None:
    plain = models.build()
    expected = loop(plain, backward, make_optimizer(plain, "adamw-fused"))
    assert differences(expected, offloaded_loop(backward)) == []


_held: list[Tensor] = []


def the_first_one_first(model: nn.Module, batch: Batch) -> None:
    losses = [model(**batch[name]).loss for name in ("chosen", "rejected")]
    for loss in losses:
        loss.backward()


def one_is_kept(model: nn.Module, batch: Batch) -> None:
    _held.append(model(**batch["chosen"]).loss)
    model(**batch["rejected"]).loss.backward()


def without_gradients_between(model: nn.Module, batch: Batch) -> None:
    loss = model(**batch["chosen"]).loss
    with torch.no_grad():
        loss = loss * model(**batch["rejected"]).loss
    loss.backward()


@pytest.mark.parametrize(
    ("backward", "said", "error"),
    [
        (the_first_one_first, True, "a forward had its backward before a later one"),
        (one_is_kept, True, "1 forwards with gradients had no backward"),
        (in_one_backward, False, "the model was called again between a forward and its backward"),
        (without_gradients_between, False, "called without gradients between a forward and its backward"),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_other_calls_than_the_sample_had_are_refused(
    backward: Callable[[nn.Module, Batch], None], said: bool, error: str
) -> None:
    with pytest.raises(UnsupportedError, match=error):
        offloaded_loop(backward, said=said)
    _held.clear()


def test_weights_cannot_be_written_while_a_forward_waits() -> None:
    def writing(model: nn.Module, batch: Batch) -> None:
        first = model(**batch["chosen"]).loss
        with torch.no_grad():
            next(model.parameters()).mul_(2)
        (first + model(**batch["rejected"]).loss).backward()

    with pytest.raises(UnsupportedError, match="was written to"):
        offloaded_loop(writing)


def test_blocks_with_hooks_inside_cannot_wait() -> None:
    model = models.build()
    model.get_submodule("model.layers.1.mlp").register_forward_hook(lambda *_: None)
    optimizer = make_optimizer(model, "adamw-fused")
    with pytest.raises(UnsupportedError, match=r"model.layers.1, which must run once for its hooks"):
        lt_offload.profile(model, batches(model)[0], optimizer=optimizer, run=lambda batch: both(model, batch))
