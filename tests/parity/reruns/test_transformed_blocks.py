"""torch.func, torch.jit and hooks for saved tensors within blocks: equal numbers, or a refusal by the profile."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Collection
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks
from torch.func import functional_call, jvp, vmap
from torch.utils.checkpoint import checkpoint

from lt_offload.execute.program import Program
from lt_offload.model.blocks import find_blocks
from tests.support import plans
from tests.support.engines import Result, differences, installed
from tests.support.user_nets import (
    HIDDEN,
    Layer,
    Net,
    adamw,
    by_budget,
    fault,
    in_every_run,
    ordinary,
    ours,
    plain,
    refusal,
    rows,
    seed,
    with_every_budget,
)


class WithOwn(Layer):
    def inner(self, x: Tensor) -> Tensor:
        return F.gelu(functional_call(self.linear, dict(self.linear.named_parameters()), (x,)))


class WithScaled(Layer):
    def inner(self, x: Tensor) -> Tensor:
        scaled = {"weight": self.linear.weight * 0.5, "bias": self.linear.bias}
        return F.gelu(functional_call(self.linear, scaled, (x,)))


class WithAnother(Layer):
    def __init__(self) -> None:
        super().__init__()
        self.other = nn.Parameter(torch.randn(HIDDEN, HIDDEN) * 0.1)

    def inner(self, x: Tensor) -> Tensor:
        return F.gelu(functional_call(self.linear, {"weight": self.other}, (x,))) + self.linear(x)


class Mapped(Layer):
    def inner(self, x: Tensor) -> Tensor:
        return vmap(lambda row: F.gelu(self.linear(row)))(x)


class Forward(Layer):
    def inner(self, x: Tensor) -> Tensor:
        out, tangent = jvp(lambda y: F.gelu(self.linear(y)), (x,), (torch.ones_like(x),))
        return out + tangent


def net_of(layer: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
    return NETS.setdefault(layer, lambda: Net(layer))


NETS: dict[Any, Callable[[], nn.Module]] = {}
EQUAL = [WithOwn, WithScaled, WithAnother, Mapped, Forward]


@with_every_budget
@pytest.mark.parametrize("layer", EQUAL)
def test_transforms_train_as_plainly(layer: type[Layer], budget: str) -> None:
    assert differences(plain(net_of(layer)), by_budget(net_of(layer), budget)) == []


@in_every_run
@pytest.mark.parametrize("layer", EQUAL)
def test_transforms_under_every_option(layer: type[Layer], options: tuple[str, ...]) -> None:
    assert differences(plain(net_of(layer)), ours(net_of(layer), options)) == []


class Reversed(Layer):
    """Calls a transform that goes backward."""

    def __init__(self, transform: str) -> None:
        super().__init__()
        self.transform = transform

    def inner(self, x: Tensor) -> Tensor:
        if self.transform == "vjp":
            out, back = torch.func.vjp(lambda y: F.gelu(self.linear(y)), x)
            return out + back(torch.ones_like(out))[0]
        gradient = getattr(torch.func, self.transform)(lambda y: F.gelu(self.linear(y)).sum())
        return F.gelu(self.linear(x) + gradient(x))


@pytest.mark.parametrize("transform", ["grad", "vjp", "jacrev"])
def test_transforms_that_go_backward_are_refused(transform: str) -> None:
    said = refusal(lambda: Net(lambda: Reversed(transform)))
    assert "a block calls torch.func.grad, vjp, jacrev or hessian: " in said
    assert "torch.func.jvp" in said


class Replaced(Layer):
    """What that refusal names instead."""

    def inner(self, x: Tensor) -> Tensor:
        with torch.enable_grad():
            y = self.linear(x)
            (gradient,) = torch.autograd.grad(F.gelu(y).sum(), y, create_graph=True)
        return F.gelu(y + gradient)


@with_every_budget
def test_gradients_of_ones_own_within_a_block(budget: str) -> None:
    assert differences(plain(net_of(Replaced)), by_budget(net_of(Replaced), budget)) == []


def traced() -> nn.Module:
    made: nn.Module = torch.jit.trace(Layer(), torch.randn(2, 6, HIDDEN))
    return made


class Scripted(Layer):
    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.jit.script(self.linear)


SCRIPTED: dict[str, Callable[[], nn.Module]] = {
    "script": lambda: torch.jit.script(Layer()),
    "trace": traced,
    "part": Scripted,
}
deprecated = pytest.mark.filterwarnings("ignore:`torch.jit")


def gelu(x: Tensor) -> Tensor:
    return x * 0.5 * (1.0 + torch.tanh(0.79788456 * x * (1 + 0.044715 * x * x)))


class WithScriptedFunction(Layer):
    def __init__(self) -> None:
        super().__init__()
        self.function = torch.jit.script(gelu)

    def inner(self, x: Tensor) -> Tensor:
        out: Tensor = self.function(self.linear(x))
        return out


@deprecated
def test_scripted_functions_are_refused() -> None:
    said = refusal(lambda: Net(WithScriptedFunction))
    assert "function tests.parity.reruns.test_transformed_blocks.gelu, of torch.jit: " in said
    assert "PYTORCH_JIT=0" in said


@deprecated
@pytest.mark.parametrize("kind", SCRIPTED)
def test_scripted_modules_are_refused(kind: str) -> None:
    said = refusal(lambda: Net(SCRIPTED[kind]))
    assert said.startswith("module layers.0")
    assert "PYTORCH_JIT=0" in said


def test_what_is_named_instead_of_scripted_modules() -> None:
    environment = os.environ | {"PYTORCH_JIT": "0"}
    subprocess.run([sys.executable, "-W", "ignore", "-m", __name__], env=environment, check=True)


# -- hooks for saved tensors -------------------------------------------------------------------------------------------


class Checkpointed(Net):
    """Checkpoints its blocks itself."""

    def forward(self, ids: Tensor, labels: Tensor) -> dict[str, Tensor]:
        x = self.embed(ids)
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False)
        logits = checkpoint(self.head, x, use_reentrant=False)
        return {"loss": F.cross_entropy(logits.flatten(0, 1), labels.flatten())}


@pytest.mark.parametrize("steady", [(), (0,), (1,), (2, 3), (5,), range(6)], ids=str)
def test_own_checkpointing_of_blocks(steady: Collection[int], monkeypatch: pytest.MonkeyPatch) -> None:
    # Plans decide by measured times whose weights stay in their places: no set of such blocks may matter.
    monkeypatch.setattr(Program, "_steady", lambda program: {*steady})
    model = Checkpointed()
    optimizer = adamw(model)
    layout = {"options": ("keep", "keep", "recompute"), "places": ("device",), "resident": True}
    plan = plans.streamed(find_blocks(model), optimizer, **layout)
    with installed(model, optimizer, plan):
        seed()
        losses = ordinary(model, optimizer, rows())
    assert differences(plain(Checkpointed), Result(losses, model, optimizer)) == []


def in_few_bits() -> AbstractContextManager[Any]:
    return saved_tensors_hooks(lambda x: x.bfloat16() if x.is_floating_point() else x, lambda x: x.float())


@in_every_run
def test_hooks_that_keep_the_numbers(options: tuple[str, ...]) -> None:
    make = partial(Net, context=save_on_cpu)
    assert differences(plain(make), ours(make, options)) == []


def test_hooks_that_change_numbers_are_refused_before_training() -> None:
    assert "saved_tensors_hooks(in_few_bits.<lambda>, ...) around block embed" in refusal(
        partial(Net, context=in_few_bits)
    )


def test_hooks_that_come_later_are_refused_at_the_blocks_call() -> None:
    def loop(model: nn.Module, optimizer: torch.optim.Optimizer, batches: list[dict[str, Tensor]]) -> list[Tensor]:
        ordinary(model, optimizer, batches[:1])
        return ordinary(model, optimizer, batches[1:], around_forward=in_few_bits)

    assert "saved_tensors_hooks(in_few_bits.<lambda>, ...) around block embed" in fault(("keep",), loop)


if __name__ == "__main__":  # torch reads the variable when it is imported
    for kind in SCRIPTED:
        for budget in ("tight", "resident"):
            assert differences(plain(net_of(SCRIPTED[kind])), by_budget(net_of(SCRIPTED[kind]), budget)) == [], kind
