"""Loops with accelerate train as plainly; what cannot be trained is refused, with what works instead."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator, cpu_offload
from accelerate.hooks import remove_hook_from_submodules
from accelerate.state import AcceleratorState
from torch import Tensor, nn

import lt_offload
from lt_offload.errors import ConfigError, InfeasibleError, OverBudget, UnsupportedError
from scripts.attack.compared import BUDGETS, attacked
from tests import sampling
from tests.support import accelerated
from tests.support.engines import Result, differences
from tests.support.user_nets import Net, adamw, by_budget, plain, planned, rows, seed, with_every_budget


@pytest.fixture
def accelerator() -> Iterator[Accelerator]:
    AcceleratorState._reset_state(True)
    yield Accelerator(cpu=True)
    AcceleratorState._reset_state(True)


def loop_of(accelerator: Accelerator, model: Any, prepared: Any) -> list[Tensor]:
    """The loop that accelerate's users write."""
    losses = []
    for batch in rows():
        loss = model(**batch)["loss"]
        accelerator.backward(loss)
        prepared.step()
        prepared.zero_grad()
        losses.append(loss.detach().clone())
    return losses


def test_a_prepared_optimizer_is_refused(accelerator: Accelerator) -> None:
    model = Net()
    model, prepared = accelerator.prepare(model, adamw(model))
    named = pytest.raises(UnsupportedError, match=r"optimizer AcceleratedOptimizer: .* prepared\.optimizer")
    with named as caught, lt_offload.offloaded(model, prepared, rows()[0], memory="1GB", accelerator="cpu"):
        raise AssertionError
    assert str(caught.value).count("\n- ") == 1


@with_every_budget
def test_the_optimizer_inside_trains_as_plainly(accelerator: Accelerator, budget: str) -> None:
    model = Net()
    model, prepared = accelerator.prepare(model, adamw(model))
    seed()
    expected = Result(loop_of(accelerator, model, prepared), model, prepared.optimizer)

    model = Net()
    model, prepared = accelerator.prepare(model, adamw(model))
    with lt_offload.offloaded(model, prepared.optimizer, rows()[0], plan=planned(Net, budget), accelerator="cpu"):
        seed()
        losses = loop_of(accelerator, model, prepared)
    assert differences(expected, Result(losses, model, prepared.optimizer)) == []


def given_back() -> nn.Module:
    model = cpu_offload(Net(), torch.device("cpu"))
    remove_hook_from_submodules(model)
    return model


@with_every_budget
def test_a_model_without_its_hooks_trains_as_plainly(budget: str) -> None:
    assert differences(plain(Net), by_budget(given_back, budget)) == []


@pytest.mark.parametrize(("case", "budget"), sampling.grid(accelerated.CASES, BUDGETS, count=6))
def test_a_loop_trains_as_plainly(case: str, budget: str, tmp_path: Path) -> None:
    [found] = attacked(partial(accelerated.train, case, tmp_path, accelerated.SMALL), (budget,))
    assert (found.outcome, found.says) == ("equal", "")
    assert found.travels == (budget != "resident") or budget == "middle"


def prepared(**options: Any) -> tuple[Any, Any, Any]:
    """Return an accelerator with a model and its optimizer, offloaded."""
    with lt_offload.accelerated(memory="1GB", planner="resident", host_update=False):
        accelerator = accelerated.Script(Path(), None, accelerated.SMALL).start(**options)
        model = Net()
        return accelerator, *accelerator.prepare(model, adamw(model))


def test_a_larger_batch_that_is_named_is_planned_for() -> None:
    """Its trial leaves no trace, and the later batch of its size makes no other plan."""
    expected = plain(Net)
    sample = {name: tensor.repeat(2, 1) for name, tensor in rows()[0].items()}
    with lt_offload.accelerated(memory="300kB", sample_batch=sample):
        accelerator = accelerated.Script(Path(), None, accelerated.SMALL).start()
        model = Net()
        model, optimizer = accelerator.prepare(model, adamw(model))
        seed()
        losses = loop_of(accelerator, model, optimizer)
        plan = accelerator.offmate.plan
        loss = model(**sample)["loss"]
        accelerator.backward(loss)
        optimizer.step()
        assert accelerator.offmate.plan is plan
        assert plan.batch_size == len(sample["ids"])
    assert [*map(float, losses)] == [*map(float, expected.losses)]


def test_forwards_before_the_first_step_and_copies_of_the_model() -> None:
    batch = rows()[0]
    with torch.no_grad():
        expected = Net()(**batch)["loss"]
    accelerator, model, optimizer = prepared()
    with torch.no_grad():
        assert torch.equal(model(**batch)["loss"], expected)
    loss = model(**batch)["loss"]
    assert torch.equal(loss, expected)
    accelerator.backward(loss)
    optimizer.step()
    optimizer.zero_grad()
    twin = copy.deepcopy(accelerator.unwrap_model(model))
    with torch.no_grad():
        assert torch.equal(model(**batch)["loss"], twin(**batch)["loss"])
    twin(**batch)["loss"].backward()  # an ordinary model, with gradients
    assert all(weight.grad is not None for weight in twin.parameters())
    state = accelerator.get_state_dict(model)
    assert all(torch.equal(state[name], tensor) for name, tensor in twin.state_dict().items())
    accelerator.free_memory()
    with torch.no_grad():
        assert torch.equal(model(**batch)["loss"], twin(**batch)["loss"])


def test_another_model_may_follow() -> None:
    accelerator, model, optimizer = prepared()
    before = loop_of(accelerator, model, optimizer)
    accelerator.free_memory()
    model = Net()
    after = loop_of(accelerator, *accelerator.prepare(model, adamw(model)))
    accelerator.end_training()
    assert [*map(float, after)] == [*map(float, before)]


def test_cells_of_a_notebook_that_run_again_without_an_end() -> None:
    before = loop_of(*prepared())
    accelerator, model, optimizer = prepared()  # what the loop before went by has no name any more
    with pytest.raises(UnsupportedError, match="one after another with accelerator.end_training"):
        model(**rows()[0])
    accelerator.end_training()
    after = loop_of(accelerator, *accelerator.prepare(model, optimizer))
    accelerator.end_training()
    assert [*map(float, after)] == [*map(float, before)]


@pytest.mark.parametrize("by_value", [False, True])
@pytest.mark.parametrize("count", [None, 5])
def test_partial_sums_and_some_of_the_weights_are_clipped(count: int | None, by_value: bool) -> None:
    def loop(accelerator: Any, model: Any, optimizer: Any) -> list[Tensor]:
        seen = []
        for batch in rows():
            with accelerator.accumulate(model):
                accelerator.backward(model(**batch)["loss"])
                some = [*model.parameters()][:count]
                if by_value:
                    accelerator.clip_grad_value_(some, 1e-3)
                else:
                    seen.append(accelerator.clip_grad_norm_(some, 0.1))
                optimizer.step()
                optimizer.zero_grad()
        accelerator.end_training()
        return [*seen, *model.parameters()]

    model = Net()
    accelerator = accelerated.Script(Path(), None, accelerated.SMALL).start(gradient_accumulation_steps=2)
    expected = loop(accelerator, *accelerator.prepare(model, adamw(model)))
    assert all(map(torch.equal, loop(*prepared(gradient_accumulation_steps=2)), expected))


def test_each_context_counts_for_what_is_prepared_in_it() -> None:
    accelerator = accelerated.Script(Path(), None, accelerated.SMALL).start()
    for memory in (1_000_000_000, 2_000_000_000):
        with lt_offload.accelerated(memory=memory, planner="resident"):
            model = Net()
            optimizer = accelerator.prepare_optimizer(adamw(model))
            loop_of(accelerator, accelerator.prepare_model(model), optimizer)
            assert accelerator.offmate.plan.budget_bytes == memory
        assert type(model(**rows()[0])["loss"].grad_fn).__name__ == "NllLossBackward0"


def test_what_the_loop_raises_leaves_a_model_that_trains() -> None:
    model = Net()
    expected = model(**rows()[0])["loss"]
    inner = adamw(model)

    def loop() -> None:
        with lt_offload.accelerated(memory="1GB"):
            accelerator = accelerated.Script(Path(), None, accelerated.SMALL).start()
            accelerator.prepare(model, inner)[0](**rows()[0])
            raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        loop()
    loss = model(**rows()[0])["loss"]
    assert torch.equal(loss, expected)
    loss.backward()
    inner.step()


def test_a_memory_that_is_too_small_for_a_block_is_named() -> None:
    batch, model = rows()[0], Net()
    with torch.no_grad():
        expected = model(**batch)["loss"]
        accelerator = accelerated.Script(Path(), None, accelerated.SMALL).start()
        with lt_offload.accelerated(memory="1kB"):
            accelerator.prepare(model, adamw(model))
            with pytest.raises(OverBudget, match="memory=1 kB: set memory= to more"):
                model(**batch)
        assert torch.equal(model(**batch)["loss"], expected)


def _second(accelerator: Any) -> None:
    accelerator.prepare(Net())


def _no_optimizer(accelerator: Any) -> None:
    accelerator.free_memory()
    accelerator.prepare(Net())(**rows()[0])


def _no_backward(accelerator: Any) -> None:
    model = accelerator._models[0]
    torch.autograd.backward(model(**rows()[0])["loss"])


def _beside(accelerator: Any) -> None:
    accelerator._models[0](**rows()[0])
    with lt_offload.accelerated(memory="1GB"):
        other, model = Accelerator(cpu=True), Net()
        other.prepare(model, adamw(model))[0](**rows()[0])


def _of_another_thread(accelerator: Any) -> None:
    with ThreadPoolExecutor(1) as threads:
        threads.submit(accelerator._models[0], **rows()[0]).result()


def _not_itself(accelerator: Any) -> None:
    accelerator.backward(accelerator._models[0].head.weight.sum())


def _before_the_context(_accelerator: Any) -> None:
    other = Accelerator(cpu=True)
    model = other.prepare(Net())
    with lt_offload.accelerated(memory="1GB"):
        other.backward(model(**rows()[0])["loss"])


@pytest.mark.parametrize(
    ("use", "options", "message"),
    [
        (None, {"mixed_precision": "fp8"}, r"Accelerator\(mixed_precision='fp8'\): .* use mixed_precision='bf16' or"),
        (None, {"dynamo_backend": "eager"}, r"Accelerator\(dynamo_backend='EAGER'\): .* layer\.compile\(\)"),
        (_second, {}, r"Net beside Net: .* call requires_grad_\(False\)"),
        (_no_optimizer, {}, "0 optimizers that accelerator.prepare.. got have weights of Net"),
        (_beside, {}, r"Net beside Net: .* one after another with accelerator\.end_training\(\)"),
        (_of_another_thread, {}, "Net is called in another thread than accelerator.prepare.. was"),
        (_not_itself, {}, "Net was not called before accelerator.backward.*: call what accelerator.prepare.. returned"),
        (_before_the_context, {}, "call prepare.. within the context"),
        (_no_backward, {}, "Net was called with gradients, and no backward of a loss followed"),
    ],
)
def test_what_cannot_be_trained(
    use: Callable[[Any], None] | None, options: dict[str, Any], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if options.get("mixed_precision") == "fp8":  # accelerate itself refuses it on a CPU
        monkeypatch.setattr(Accelerator, "mixed_precision", "fp8")
        options = {}

    def loop() -> None:
        accelerator, _, _ = prepared(**options)
        assert use is not None
        try:
            use(accelerator)
        finally:
            accelerator.end_training()

    with pytest.raises((ConfigError, UnsupportedError), match=message):
        loop()


def test_settings_are_refused_where_the_context_opens() -> None:
    with pytest.raises(ConfigError, match="memory="):
        lt_offload.accelerated(memory="lots")
    with pytest.raises(ConfigError, match="micro_batches"):
        lt_offload.accelerated(micro_batches=0)


def test_another_try_with_more_memory(capsys: pytest.CaptureFixture[str]) -> None:
    """Nothing of a loop whose budget was too small is left, though nobody has ended it."""
    with lt_offload.accelerated(memory=1000):
        accelerator = accelerated.Script(Path(), None, accelerated.SMALL).start()
        model = Net()
        model, optimizer = accelerator.prepare(model, adamw(model))
    with pytest.raises(InfeasibleError, match="memory=.* is too small for Net"):
        loop_of(accelerator, model, optimizer)
    again, model, optimizer = prepared()
    seed()
    losses = loop_of(again, model, optimizer)
    again.end_training()
    plain_net = plain(Net)
    assert losses == plain_net.losses
