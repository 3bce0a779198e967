"""What a caller changes between a block's two runs: the second run sees what the first saw, or none takes place.

In every program plain PyTorch's backward is of the numbers that were there in the forward.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from tests import sampling
from tests.support.engines import differences
from tests.support.profiles.budgets import BUDGETS
from tests.support.user_nets import (
    HIDDEN,
    Layer,
    Loop,
    Net,
    by_budget,
    fault,
    ordinary,
    ours,
    plain,
    recorded_or_run_again,
    with_every_budget,
)

OF_MODULE = {"scale": 1.0}


@dataclass
class Config:
    scale: float = 1.0


class Reading(Layer):
    """Computes with all that a caller may reach."""

    of_class = 1.0

    def __init__(self) -> None:
        super().__init__()
        self.scale, self.dropout = 1.0, nn.Dropout(0.1)
        self.shared: dict[str, Any] = {"scale": 1.0}
        self.namespace, self.config = SimpleNamespace(scale=1.0), Config()
        self.of_closure: Callable[[], float] = lambda: 1.0
        self.register_buffer("table", torch.ones(HIDDEN))

    def forward(self, x: Tensor, positions: Tensor | None = None, mask: Tensor | None = None) -> Tensor:
        scale = self.scale * self.shared["scale"] * self.namespace.scale * self.config.scale
        scale *= OF_MODULE["scale"] * self.of_class * self.of_closure()
        y = F.gelu(self.inner(self.norm(x)) * scale) * (1 * self.table)  # what is written to in place is not saved
        if positions is not None:
            y = y * torch.cos(positions)[:, None]
        if mask is not None:
            y = y + mask
        return x + self.dropout(y)


class Called(Net):
    """A net whose blocks are called by a program."""

    def __init__(self, program: Callable[[Any, Tensor], Tensor]) -> None:
        super().__init__(Reading)
        self.program = program
        self.register_buffer("cache_position", torch.arange(6))
        first = self.layers[0]
        for layer in self.layers:
            layer.shared, layer.namespace, layer.config = first.shared, first.namespace, first.config  # type: ignore

    def forward(self, ids: Tensor, labels: Tensor) -> dict[str, Tensor]:
        logits = self.head(self.program(self, self.embed(ids)))
        return {"loss": F.cross_entropy(logits.flatten(0, 1), labels.flatten())}


Write = Callable[[Net, Any, float], object]


def setting(write: Write) -> Callable[[Net, Tensor], Tensor]:
    """Write something else before every layer, and the default after the last one."""

    def program(net: Net, x: Tensor) -> Tensor:
        for at, layer in enumerate(net.layers):
            write(net, layer, 0.5 + 0.1 * at)
            x = layer(x)
        for layer in net.layers:
            write(net, layer, 1.0)
        return x

    return program


def within(context: Callable[[], AbstractContextManager[Any]]) -> Callable[[Net, Tensor], Tensor]:
    def program(net: Net, x: Tensor) -> Tensor:
        with context():
            for layer in net.layers:
                x = layer(x)
        return x

    return program


class Doubling(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        return 2 * out if func is F.gelu else out


class Halving(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        return out / 2 if func is torch.ops.aten.gelu.default else out


@contextmanager
def precision(name: str) -> Iterator[None]:
    torch.set_float32_matmul_precision(name)
    try:
        yield
    finally:
        torch.set_float32_matmul_precision("highest")


@contextmanager
def without_mkldnn() -> Iterator[None]:
    torch.backends.mkldnn.enabled = False
    try:
        yield
    finally:
        torch.backends.mkldnn.enabled = True


@contextmanager
def deterministic() -> Iterator[None]:
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


def advancing(net: Net, x: Tensor) -> Tensor:
    positions = torch.arange(6)
    for layer in net.layers:
        x = layer(x, positions=positions)
        positions += 1
    return x


def fading(net: Net, x: Tensor) -> Tensor:
    mask = torch.ones(6, 1)
    for layer in net.layers:
        x = layer(x, mask=mask)
        mask.mul_(0.5)
    return x


def of_the_model(net: Any, x: Tensor) -> Tensor:
    for at, layer in enumerate(net.layers):
        net.cache_position.copy_(torch.arange(6) + at)
        x = layer(x, positions=net.cache_position)
    return x


def cleared(net: Any, x: Tensor) -> Tensor:
    for layer in net.layers:
        x = layer(x, positions=net.cache_position.copy_(torch.arange(6)))
    net.cache_position.zero_()
    return x


def scaling(net: Any, x: Tensor) -> Tensor:
    """As adapters are scaled for a while."""
    before = [layer.scale for layer in net.layers]
    for layer in net.layers:
        layer.scale = 0.5
    try:
        for layer in net.layers:
            x = layer(x)
        return x
    finally:
        for layer, scale in zip(net.layers, before, strict=True):
            layer.scale = scale


def evaluating(net: Net, x: Tensor) -> Tensor:
    net.train()
    for layer in net.layers:
        x = layer(x)
    net.eval()
    return x


PROGRAMS: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "attribute": setting(lambda net, layer, scale: setattr(layer, "scale", scale)),
    "namespace": setting(lambda net, layer, scale: setattr(layer.namespace, "scale", scale)),
    "dataclass": setting(lambda net, layer, scale: setattr(layer.config, "scale", scale)),
    "another dataclass": setting(lambda net, layer, scale: setattr(layer, "config", Config(scale))),
    "dictionary": setting(lambda net, layer, scale: layer.shared.update(scale=scale)),
    "global": setting(lambda net, layer, scale: OF_MODULE.update(scale=scale)),
    "class": setting(lambda net, layer, scale: setattr(Reading, "of_class", scale)),
    "closure": setting(lambda net, layer, scale: setattr(layer, "of_closure", lambda: scale)),
    "Dropout.p": setting(lambda net, layer, scale: setattr(layer.dropout, "p", 1 - scale)),
    "buffer": setting(lambda net, layer, scale: setattr(layer, "table", torch.full((HIDDEN,), scale))),
    "buffer in place": setting(lambda net, layer, scale: layer.table.fill_(scale)),
    "positions": advancing,
    "mask": fading,
    "buffer of the model": of_the_model,
    "cleared buffer of the model": cleared,
    "scaled adapters": scaling,
    "evaluation": evaluating,
    "function mode": within(Doubling),
    "dispatch mode": within(Halving),
    "device": within(lambda: torch.device("cpu")),
    "mkldnn": within(without_mkldnn),
    "precision": within(lambda: precision("medium")),
    "deterministic": within(deterministic),
}


def make_of(name: str) -> Callable[[], nn.Module]:
    if name not in _MADE:
        _MADE[name] = lambda: Called(PROGRAMS[name]).train()
    return _MADE[name]


_MADE: dict[str, Callable[[], nn.Module]] = {}
"""One per program, so that each is measured once."""


PLANNED_FOR = ["global", "class", "buffer in place", "positions", "mask", "buffer of the model"]
PLANNED_FOR += ["cleared buffer of the model", "function mode", "dispatch mode"]
"""What cannot be put back: plans are made so that no block runs twice."""
PUT_BACK = [name for name in PROGRAMS if name not in PLANNED_FOR]


@pytest.mark.parametrize(
    ("name", "budget"), [*sampling.grid(PLANNED_FOR, BUDGETS), *sampling.grid(PUT_BACK, BUDGETS, count=4)]
)
def test_what_the_step_changes(name: str, budget: str) -> None:
    make = make_of(name)
    assert differences(plain(make), by_budget(make, budget)) == []


@pytest.mark.parametrize("name", PUT_BACK)
def test_what_is_put_back_for_every_second_run(name: str) -> None:
    make = make_of(name)
    assert differences(plain(make), ours(make, ("recompute", "mixed", "reload"))) == []


def hooked() -> Net:
    """A net with a hook on a weight that counts its calls."""
    net, calls = Net(), [0]

    def growing(gradient: Tensor) -> Tensor:
        calls[0] += 1
        return gradient * (1 + 0.1 * calls[0])

    hook: Any = net.layers[0].linear.weight.register_hook
    hook(growing)
    return net


@with_every_budget
def test_what_hooks_of_weights_change_while_blocks_are_measured_is_put_back(budget: str) -> None:
    model = hooked()
    # The net that is measured is the one that is trained.
    assert differences(plain(hooked), by_budget(lambda: model, budget)) == []


# -- what the sample's step has not shown -----------------------------------------------------------------------------


def between(change: Callable[[Any, float], object]) -> Loop:
    """Change something between a forward and its backward, from the second step on."""

    def loop(model: nn.Module, optimizer: torch.optim.Optimizer, batches: list[dict[str, Tensor]]) -> list[Tensor]:
        losses = ordinary(model, optimizer, batches[:1])
        for batch in batches[1:]:
            loss = model(**batch)["loss"]
            change(model, 0.7)
            loss.backward()
            change(model, 1.0)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.detach().clone())
        return losses

    return loop


def of_layers(change: Callable[[Any, float], object]) -> Callable[[Any, float], object]:
    return lambda net, value: [change(layer, value) for layer in net.layers]


def rebound(layer: Any, value: float) -> None:
    layer.table = torch.full((HIDDEN,), value)


LATER: dict[str, Loop] = {
    "attribute": between(of_layers(lambda layer, value: setattr(layer, "scale", value))),
    "config": between(of_layers(lambda layer, value: setattr(layer.config, "scale", value))),
    "buffer": between(of_layers(rebound)),
    "Dropout.p": between(of_layers(lambda layer, value: setattr(layer.dropout, "p", 1 - value))),
    "precision": between(lambda net, value: torch.set_float32_matmul_precision("medium" if value < 1 else "highest")),
}


@recorded_or_run_again
@pytest.mark.parametrize("name", LATER)
def test_what_changes_later_is_put_back_for_a_second_run(name: str, options: tuple[str, ...]) -> None:
    make, loop = make_of("scaled adapters"), LATER[name]
    assert differences(plain(make, loop), ours(make, options, loop)) == []


def in_a_mode(model: nn.Module, optimizer: torch.optim.Optimizer, batches: list[dict[str, Tensor]]) -> list[Tensor]:
    return ordinary(model, optimizer, batches, around_forward=Doubling)


def counting(model: Any, optimizer: torch.optim.Optimizer, batches: list[dict[str, Tensor]]) -> list[Tensor]:
    model.positions = torch.arange(6)
    for batch in batches:
        loss = model(**batch)["loss"]
        model.positions += 1
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return []


REFUSED: dict[str, tuple[Loop, str]] = {
    "global": (
        between(lambda net, value: OF_MODULE.update(scale=value)),
        "block layers.3 gave other numbers when it ran again",
    ),
    "buffer in place": (
        between(of_layers(lambda layer, value: layer.table.fill_(value))),
        "buffer table of block layers.3",
    ),
    "mode": (in_a_mode, "Doubling around block embed"),
}


RUN_AGAIN = ("recompute", "mixed", "reload")


@pytest.mark.parametrize(("name", "option"), sampling.grid(REFUSED, RUN_AGAIN))
def test_what_cannot_be_put_back_is_refused(name: str, option: str) -> None:
    assert REFUSED[name][1] in refusal(REFUSED[name][0], option)


@pytest.mark.parametrize("option", RUN_AGAIN)
def test_a_mask_that_is_written_to_before_the_second_run_is_refused(option: str) -> None:
    assert "an argument of block layers.3, [6] of torch.int64" in refusal(counting, option)


def refusal(loop: Loop, option: str) -> str:
    def positioned(net: Any, x: Tensor) -> Tensor:
        for layer in net.layers:
            x = layer(x, positions=getattr(net, "positions", None))
        return x

    try:
        return fault((option,), loop, lambda: Called(positioned))
    finally:
        OF_MODULE["scale"] = 1.0
