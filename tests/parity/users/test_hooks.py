"""Users' hooks that read and write weights and optimizer states in flight see what stock Lightning shows them."""

from __future__ import annotations

import copy
import functools
import io
import tempfile
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from lightning.pytorch import Callback
from torch import Tensor, nn

from lt_offload import OffmateStrategy
from lt_offload.errors import UnsupportedError
from lt_offload.plan.settings import Settings
from lt_offload.schema.plan import Plan
from lt_offload.schema.profile import Profile
from tests import sampling
from tests.support.profiles import budgets
from tests.support.trainers import Forced, Run, differences, fit, seeded_module
from tests.support.trainers import profiled as measured

OPTIONS: dict[str, Any] = {"family": "llama-tied", "dropout": 0.1}
BUDGETS = (*budgets.BUDGETS, "every place")
HOOKS = (
    "on_train_start",
    "on_train_epoch_start",
    "on_train_batch_start",
    "on_train_batch_end",
    "on_validation_start",
    "on_validation_batch_end",
    "on_validation_epoch_end",
    "on_validation_end",
    "on_train_epoch_end",
    "on_train_end",
)

pytestmark = [
    pytest.mark.usefixtures("_late"),
]


@functools.cache
def profiled() -> Profile:
    """Measure the model once for all tests of this file."""
    found: list[Profile] = []

    class Stop(Exception): ...

    def keep(measure: Callable[[], Profile], _: Any) -> Profile:
        found.append(measure())
        raise Stop

    with pytest.MonkeyPatch.context() as patch:
        measured(patch, keep)
        with pytest.raises(Stop):
            fit(OffmateStrategy(), seeded_module(**OPTIONS))
    return found[0]


@functools.cache
def planned(budget: str) -> Plan:
    return budgets.planned(profiled(), budget)


class Planned(OffmateStrategy):
    """Has the plan of a budget, made once."""

    def __init__(self, budget: str) -> None:
        super().__init__(memory=planned(budget).budget_bytes)
        self.budget = budget

    def _make_plan(self, profile: Profile, settings: Settings) -> Plan:
        return planned(self.budget)


def strategy(budget: str) -> OffmateStrategy:
    return Forced() if budget == "every place" else Planned(budget)


@pytest.fixture
def _late(hostile: None, monkeypatch: pytest.MonkeyPatch) -> None:
    profile = profiled()
    measured(monkeypatch, lambda *_: profile)


# -- what is accessed -------------------------------------------------------------------------------------------------

Param = nn.Parameter
ONE: dict[str, Callable[[Param, dict[str, Tensor]], Any]] = {
    "clone": lambda p, s: p.detach().clone(),
    "numpy": lambda p, s: p.data.numpy().copy(),
    "norm": lambda p, s: p.data.norm(),
    "norm with a graph": lambda p, s: p.norm().detach(),
    "tolist": lambda p, s: p.tolist(),
    "item": lambda p, s: p.flatten()[0].item(),
    "histogram": lambda p, s: torch.histc(p.detach(), bins=8),
    "foreach": lambda p, s: torch._foreach_norm([p.detach()])[0],
    "deepcopy": lambda p, s: copy.deepcopy(p).detach(),
    "saved": lambda p, s: saved(p),
    "repr": lambda p, s: repr(p),
    "state": lambda p, s: s["exp_avg"].clone(),
    "state as numpy": lambda p, s: s["exp_avg_sq"].numpy().copy(),
    "state as list": lambda p, s: s["exp_avg"].tolist(),
    "saved state": lambda p, s: saved(s["exp_avg_sq"]),
    "step": lambda p, s: s["step"].item(),
    "array": lambda p, s: np.asarray(s["exp_avg"]).copy(),
}


def saved(tensor: Tensor) -> Tensor:
    file = io.BytesIO()
    torch.save(tensor, file)
    file.seek(0)
    found: Tensor = torch.load(file)
    return found.detach()


def averaged(module: Any) -> Any:
    if "average" not in vars(module):
        module.__dict__["average"] = torch.optim.swa_utils.AveragedModel(module.model)
    module.average.update_parameters(module.model)
    return {name: value.clone() for name, value in module.average.module.state_dict().items()}


def pretrained(module: Any) -> Any:
    from safetensors.torch import load_file

    with tempfile.TemporaryDirectory() as folder:
        module.model.save_pretrained(folder)
        return load_file(f"{folder}/model.safetensors")


def answers_of_a_copy(module: Any) -> Tensor:
    twin = copy.deepcopy(module.model).eval()
    ids = torch.arange(3, 9)[None]
    with torch.no_grad():
        before = twin(input_ids=ids).logits.clone()
        for parameter in twin.parameters():
            parameter.zero_()
        assert not twin(input_ids=ids).logits.any(), "the copy calls the original's blocks"
    return before


WHOLE: dict[str, Callable[[Any, Any], Any]] = {
    "state_dict": lambda m, o: {name: value.clone() for name, value in m.model.state_dict().items()},
    "variables": lambda m, o: {name: value.tolist() for name, value in m.model.state_dict(keep_vars=True).items()},
    "optimizer": lambda m, o: copy.deepcopy(o.state_dict()),
    "vector": lambda m, o: nn.utils.parameters_to_vector(m.parameters()).detach(),
    "average": lambda m, o: averaged(m),
    "pretrained": lambda m, o: pretrained(m),
    "copy": lambda m, o: answers_of_a_copy(m),
}


def same(a: Any, b: Any) -> bool:
    if isinstance(a, Tensor):
        return torch.equal(a, b)
    if isinstance(a, np.ndarray):
        return bool(np.array_equal(a, b))
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(same, a, b))
    return bool(a == b)


class Acting(Callback):
    """Calls ``act`` in one hook."""

    def __init__(self, hook: str, act: Callable[[Any, Any, int], Any]) -> None:
        self.seen: list[Any] = []

        def called(trainer: Any, module: Any, *args: Any) -> None:
            if not trainer.sanity_checking:
                self.seen.append(act(module, trainer.optimizers[0], len(self.seen)))

        setattr(self, hook, called)


def reads(module: Any, optimizer: Any, turn: int) -> list[Any]:
    """Access every weight in one way each, or the model as a whole: the first access is the one that may be stale."""
    found = []
    if turn % 2 == 0:
        parameters = [p for p in module.parameters() if p.requires_grad]
        for at, parameter in enumerate(parameters):
            name = list(ONE)[(at + turn // 2 * 5) % len(ONE)]
            state = optimizer.state.get(parameter)
            if state or "sta" not in name and name not in ("step", "array"):
                found.append((name, at, ONE[name](parameter, state)))
    name = list(WHOLE)[turn // 2 % len(WHOLE)]
    return [*found, (name, WHOLE[name](module, optimizer))]


def trained(made: Any, act: Callable[..., Any], hook: str, **settings: Any) -> tuple[Run, list[Any]]:
    callback = Acting(hook, act)
    epochs = 3 if "epoch" in hook or "validation" in hook else 2
    length = {"max_epochs": epochs, "limit_train_batches": 2} | settings
    return fit(made, seeded_module(**OPTIONS), callbacks=[callback], **length), callback.seen


@functools.cache
def stock(act: Callable[..., Any], hook: str) -> tuple[Run, list[Any]]:
    return trained("auto", act, hook)


@pytest.mark.parametrize(("budget", "hook"), sampling.grid(BUDGETS, HOOKS, count=12))
def test_reading_in_a_hook(budget: str, hook: str) -> None:
    plain, expected = stock(reads, hook)
    ours, seen = trained(strategy(budget), reads, hook)
    assert expected
    for wanted, found in zip(expected, seen, strict=True):
        assert [w[:-1] for w, f in zip(wanted, found, strict=True) if not same(w, f)] == []
    assert differences(plain, ours) == []


# -- what is written --------------------------------------------------------------------------------------------------


def assign(p: Param) -> None:
    p.data = p.data * 0.5


def through_numpy(p: Param) -> None:
    p.data.numpy()[...] *= 0.5


def loaded(module: Any, optimizer: Any) -> None:
    weights = {name: value * 0.9 for name, value in module.model.state_dict().items()}
    module.model.load_state_dict(weights)


def optimizer_loaded(module: Any, optimizer: Any) -> None:
    content = copy.deepcopy(optimizer.state_dict())
    for state in content["state"].values():
        state["exp_avg"] *= 0.5
    optimizer.load_state_dict(content)


def states(optimizer: Any, name: str) -> Iterator[Tensor]:
    return (state[name] for state in optimizer.state.values())


def with_gradients_off(act: Callable[[Param], Any]) -> Callable[[Any, Any], None]:
    def run(module: Any, optimizer: Any) -> None:
        with torch.no_grad():
            for parameter in module.parameters():
                act(parameter)

    return run


WRITES: dict[str, Callable[[Any, Any], Any]] = {
    "clamp": with_gradients_off(lambda p: p.data.clamp_(-0.05, 0.05)),
    "mul": with_gradients_off(lambda p: p.mul_(0.9)),
    "a row": with_gradients_off(lambda p: p[:1].zero_()),
    "init": with_gradients_off(lambda p: nn.init.constant_(p, 0.01)),
    "assigned": with_gradients_off(assign),
    "numpy": with_gradients_off(through_numpy),
    "foreach": lambda m, o: torch._foreach_mul_([p.data for p in m.parameters()], 0.9),
    "load_state_dict": loaded,
    "moments": lambda m, o: [value.zero_() for value in states(o, "exp_avg")],
    "moments as numpy": lambda m, o: [value.numpy().fill(0) for value in states(o, "exp_avg")],
    "steps": lambda m, o: [value.fill_(5) for value in states(o, "step")],
    "new states": lambda m, o: o.state.clear(),
    "optimizer": optimizer_loaded,
}


@functools.cache
def writes(name: str) -> Callable[[Any, Any, int], Any]:
    def act(module: Any, optimizer: Any, turn: int) -> None:
        if turn % 2 == 1:
            WRITES[name](module, optimizer)

    return act


@pytest.mark.parametrize(("name", "budget"), sampling.grid(WRITES, BUDGETS, count=16))
@pytest.mark.sampled("init")
def test_writing_between_steps(name: str, budget: str) -> None:
    act = writes(name)
    hook = "on_train_batch_end" if budget in ("tight", "middle") else "on_train_batch_start"
    plain, _ = stock(act, hook)
    ours, _ = trained(strategy(budget), act, hook)
    assert differences(plain, ours) == []


@pytest.mark.parametrize("budget", BUDGETS)
def test_writing_before_a_validation(budget: str) -> None:
    """Device copies of a streamed forward must not hide what was written, and training sees it afterwards."""
    act = writes("mul")
    plain, _ = stock(act, "on_validation_batch_end")
    ours, _ = trained(strategy(budget), act, "on_validation_batch_end")
    assert differences(plain, ours) == []


@pytest.mark.parametrize("budget", BUDGETS)
def test_views_that_are_kept(budget: str) -> None:
    """Made once, read and written without torch in every later hook."""

    def act(module: Any, optimizer: Any, turn: int) -> Any:
        if turn == 1:
            named = [(p, optimizer.state[p]["exp_avg"]) for p in module.parameters()]
            module.__dict__["views"] = [p.data.numpy() for p, _ in named]
            module.views += [torch.from_dlpack(state).numpy() for _, state in named]
            module.__dict__["dictionary"] = module.model.state_dict()
        if turn == 3:
            for view in module.views:
                view *= 0.5
        if turn < 1:
            return None
        return [view.copy() for view in module.views], {k: v.clone() for k, v in module.dictionary.items()}

    plain, expected = trained("auto", act, "on_train_batch_end")
    ours, seen = trained(strategy(budget), act, "on_train_batch_end")
    assert same(expected, seen)
    assert differences(plain, ours) == []


def after_steps(module: Any, optimizer: Any, turn: int) -> None:
    """Read and write weights and states in a hook of ``optimizer.step()``."""
    found = module.__dict__["after_steps"] = []

    def after(*_: Any) -> None:
        found.append(reads(module, optimizer, len(found)))
        changes(module, optimizer, len(found))

    def changes(module: Any, optimizer: Any, turn: int) -> None:
        with torch.no_grad():
            for parameter in [p for p in module.parameters() if p.requires_grad][turn % 2 :: 3]:
                parameter.clamp_(-0.05, 0.05)
                optimizer.state[parameter]["exp_avg"].mul_(0.5)

    optimizer.register_step_post_hook(after)


@pytest.mark.parametrize("budget", BUDGETS)
def test_hooks_after_the_optimizer_step(budget: str) -> None:
    plain, _ = stock(after_steps, "on_train_start")
    ours, _ = trained(strategy(budget), after_steps, "on_train_start")
    expected, found = plain.module.after_steps, ours.module.after_steps
    assert len(expected) == len(found) > 2
    assert all(map(same, expected, found))
    assert differences(plain, ours) == []


# -- other backwards and gradients ------------------------------------------------------------------------------------


def own_backward(module: Any, optimizer: Any, turn: int) -> None:
    if turn == 2:
        ids = torch.arange(3, 9)[None]
        with torch.enable_grad():
            module.model(input_ids=ids, labels=ids).loss.backward()


@pytest.mark.parametrize("hook", ["on_train_batch_start", "on_train_batch_end", "on_train_epoch_end"])
def test_a_backward_in_a_hook_is_refused(hook: str) -> None:
    act = own_backward if "batch" in hook else lambda m, o, turn: own_backward(m, o, turn + 2)
    with pytest.raises(UnsupportedError, match="a backward ran through the model outside the training step"):
        trained(strategy("middle"), act, hook)


def test_a_forward_with_gradients_before_the_first_step_is_refused() -> None:
    def forward(module: Any, optimizer: Any, turn: int) -> None:
        module.model(input_ids=torch.arange(3, 9)[None])  # as log_graph of TensorBoardLogger does

    with pytest.raises(UnsupportedError, match=r"block .* was called with gradients outside the training step"):
        trained(strategy("middle"), forward, "on_train_start")


def test_a_gradient_that_a_hook_looks_for_says_that_it_is_consumed() -> None:
    def norms(module: Any, optimizer: Any, turn: int) -> list[Tensor]:
        return [p.grad.norm() for p in module.parameters() if p.grad is not None]

    with pytest.raises(UnsupportedError, match=r"the gradient of weight .* was used by norm"):
        trained(strategy("middle"), norms, "on_train_batch_end")


def test_a_backward_inside_the_step_is_refused() -> None:
    module = seeded_module(**OPTIONS)
    step = module.training_step

    def training_step(batch: Any, batch_idx: int) -> Tensor:
        if module.global_step == 1:
            module.model(**batch).loss.backward()
        found: Tensor = step(batch, batch_idx)
        return found

    module.training_step = training_step
    with pytest.raises(UnsupportedError, match="called a second time after a backward"):
        fit(strategy("middle"), module)
