"""Optimizers as users write them, most of them after the code that is published with a method."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

Groups = list[dict[str, Any]]


def _called(closure: Callable[[], Any] | None) -> Any:
    if closure is None:
        return None
    with torch.enable_grad():
        return closure()


def _pairs(optimizer: Optimizer) -> Iterator[tuple[dict[str, Any], nn.Parameter]]:
    """Yield the tensors that have a gradient, each with its group."""
    for group in optimizer.param_groups:
        for p in group["params"]:
            if p.grad is not None:
                yield group, p


def _orthogonal(grad: Tensor, steps: int) -> Tensor:
    a, b, c = 3.4445, -4.7750, 2.0315
    x = grad.bfloat16()
    if grad.size(-2) > grad.size(-1):
        x = x.mT
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(steps):
        square = x @ x.mT
        x = a * x + (b * square + c * square @ square) @ x
    return x.mT if grad.size(-2) > grad.size(-1) else x


def _muon(grad: Tensor, momentum: Tensor, beta: float) -> Tensor:
    momentum.lerp_(grad, 1 - beta)
    update = grad.lerp_(momentum, beta)
    update = _orthogonal(update, steps=2)
    return update * max(1, grad.size(-2) / grad.size(-1)) ** 0.5


def _adam(grad: Tensor, first: Tensor, second: Tensor, step: int, betas: tuple[float, float], eps: float) -> Tensor:
    first.lerp_(grad, 1 - betas[0])
    second.lerp_(grad.square(), 1 - betas[1])
    return first / (1 - betas[0] ** step) / ((second / (1 - betas[1] ** step)).sqrt() + eps)


class SingleDeviceMuonWithAuxAdam(Optimizer):
    """After Keller Jordan's: Muon for groups with ``use_muon``, Adam for others; tensors without gradient get zeros."""

    def __init__(self, param_groups: Groups) -> None:
        for group in param_groups:
            if group["use_muon"]:
                group.setdefault("lr", 0.02)
                group.setdefault("momentum", 0.95)
            else:
                group.setdefault("lr", 3e-4)
                group.setdefault("betas", (0.9, 0.95))
                group.setdefault("eps", 1e-10)
            group.setdefault("weight_decay", 0)
        super().__init__(param_groups, {})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        loss = _called(closure)
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    p.grad = torch.zeros_like(p)
                state = self.state[p]
                if group["use_muon"]:
                    if len(state) == 0:
                        state["momentum_buffer"] = torch.zeros_like(p)
                    update = _muon(p.grad, state["momentum_buffer"], group["momentum"])
                else:
                    if len(state) == 0:
                        state["exp_avg"] = torch.zeros_like(p)
                        state["exp_avg_sq"] = torch.zeros_like(p)
                        state["step"] = 0
                    state["step"] += 1
                    update = _adam(
                        p.grad, state["exp_avg"], state["exp_avg_sq"], state["step"], group["betas"], group["eps"]
                    )
                p.mul_(1 - group["lr"] * group["weight_decay"])
                p.add_(update.reshape(p.shape), alpha=-group["lr"])
        return loss


def muon_with_adam(groups: Groups) -> SingleDeviceMuonWithAuxAdam:
    """Return Muon for matrices, Adam for the rest."""
    params = [p for group in groups for p in group["params"]]
    kinds: Groups = [
        {"params": [p for p in params if p.ndim >= 2], "use_muon": True, "weight_decay": 0.1},
        {"params": [p for p in params if p.ndim < 2], "use_muon": False, "lr": 1e-2},
    ]
    return SingleDeviceMuonWithAuxAdam([kind for kind in kinds if kind["params"]])


class AdamWScheduleFree(Optimizer):
    """After Meta's schedule_free: counts steps in the groups, and begins a state with the weight itself."""

    def __init__(self, params: Any, lr: float = 1e-2, warmup_steps: int = 2) -> None:
        counts = {"k": 0, "train_mode": True, "weight_sum": 0.0, "lr_max": -1.0, "scheduled_lr": 0.0}
        super().__init__(params, {"lr": lr, "warmup_steps": warmup_steps, "weight_decay": 0.0} | counts)

    @torch.no_grad()
    def eval(self) -> None:
        self._switch(1 - 1 / 0.9, train_mode=False)

    @torch.no_grad()
    def train(self) -> None:
        self._switch(1 - 0.9, train_mode=True)

    def _switch(self, weight: float, *, train_mode: bool) -> None:
        for group in self.param_groups:
            if group["train_mode"] is not train_mode:
                for p in group["params"]:
                    if "z" in self.state[p]:
                        p.lerp_(end=self.state[p]["z"].to(p.device), weight=weight)
                group["train_mode"] = train_mode

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        loss = _called(closure)
        for group in self.param_groups:
            assert group["train_mode"]
            k = group["k"]
            lr = group["scheduled_lr"] = group["lr"] * min(1.0, (k + 1) / group["warmup_steps"])
            lr_max = group["lr_max"] = max(lr, group["lr_max"])
            group["weight_sum"] += lr_max**2
            share = lr_max**2 / group["weight_sum"]
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if "z" not in state:
                    state["z"] = torch.clone(p)
                    state["exp_avg_sq"] = torch.zeros_like(p)
                state["exp_avg_sq"].mul_(0.99).addcmul_(p.grad, p.grad, value=0.01)
                step = p.grad.div(state["exp_avg_sq"].div(1 - 0.99 ** (k + 1)).sqrt_().add_(1e-8))
                step.add_(p, alpha=group["weight_decay"])
                p.lerp_(end=state["z"], weight=share)
                p.add_(step, alpha=lr * (0.9 * (1 - share) - 1))
                state["z"].sub_(step, alpha=lr)
            group["k"] = k + 1
        return loss


class Lion(Optimizer):
    """After Google's."""

    def __init__(self, params: Any, lr: float = 1e-3) -> None:
        super().__init__(params, {"lr": lr, "betas": (0.9, 0.99), "weight_decay": 0.0})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        loss = _called(closure)
        for group, p in _pairs(self):
            p.data.mul_(1 - group["lr"] * group["weight_decay"])
            state = self.state[p]
            if len(state) == 0:
                state["exp_avg"] = torch.zeros_like(p)
            first, second = group["betas"]
            update = state["exp_avg"].clone().mul_(first).add(p.grad, alpha=1 - first).sign_()
            p.add_(update, alpha=-group["lr"])
            state["exp_avg"].mul_(second).add_(p.grad, alpha=1 - second)
        return loss


class Clipping(Lion):
    """Steps as its base class does, and takes more, as MuonClip does."""

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None, largest: Tensor | None = None) -> Any:  # type: ignore[override]
        loss = super().step(closure)
        for p in () if largest is None else (p for group in self.param_groups for p in group["params"]):
            p.clamp_(-largest, largest)
        return loss


class CountingItself(Lion):
    """Counts steps in an attribute, and has a table that the states of all tensors use, as bitsandbytes' does."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, lr=1e-2)
        self.steps = 0
        self.tables = {"signed": torch.linspace(-1, 1, 64)}

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        loss = _called(closure)
        self.steps += 1
        for group, p in _pairs(self):
            state = self.state[p]
            if len(state) == 0:
                state["table"] = self.tables["signed"]
                state["code"] = torch.zeros_like(p, dtype=torch.uint8)
            scale = p.grad.abs().max()
            mean = (state["table"][state["code"].long()] + p.grad / scale) / 2
            state["code"].copy_(torch.bucketize(mean.clamp(-1, 1), state["table"]).clamp_(max=63))
            p.sub_(mean.to(p.dtype), alpha=group["lr"] / self.steps)
        return loss


class Noisy(Optimizer):
    """Langevin's noise, for tensors that ``noise`` says it of; it returns the noise."""

    def __init__(self, params: Any, noise: Callable[[Tensor, dict[str, Any]], Tensor | float]) -> None:
        super().__init__(params, {"lr": 1e-2, "weight_decay": 0.0})
        self.noise = noise

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.add_(p.grad, alpha=-group["lr"])
                    p.add_(self.noise(p, self.state[p]))


class Nested(Optimizer):
    """Has states in lists and dictionaries, as SOAP, AggMo and AdaShift have; some are replaced in each step."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 1e-2, "betas": (0.5, 0.9), "weight_decay": 0.0})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        loss = _called(closure)
        for group, p in _pairs(self):
            state, grad = self.state[p], p.grad.float().reshape(p.shape[0], -1)
            if len(state) == 0:
                state["means"] = {beta: torch.zeros_like(p) for beta in group["betas"]}
                state["sides"] = [torch.eye(min(len(grad), 8)), [], {"count": torch.zeros(())}]
                state["last"] = []
                state["turn"] = (torch.ones(len(state["sides"][0]), 2).mT, 2)
            sides, small = state["sides"], grad[:8]
            sides[2]["count"] += 1
            sides[0] = torch.linalg.qr(sides[0] @ small @ small.mT + torch.eye(len(small)))[0].mT
            state["last"] = [*state["last"][-1:], p.grad.clone()]
            state["turn"][0].add_(sides[0][:1])
            for beta, mean in state["means"].items():
                mean.lerp_(state["last"][0], 1 - beta)
                p.add_(mean, alpha=-group["lr"] / float(sides[2]["count"]))
            rotated = grad.clone()
            rotated[:8] = sides[0] @ small * state["turn"][0].sum()
            p.add_(rotated.view(p.shape).to(p.dtype), alpha=-1e-3)
        return loss


class Replacing(Lion):
    """Puts another tensor into its state in each step, as SaRA does."""

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:  # type: ignore[override]
        for _, p in _pairs(self):
            state = self.state[p]
            state["kept"] = state.get("kept", torch.ones_like(p))
            state["mean"] = 0.9 * state["mean"] + p.grad if "mean" in state else p.grad.clone()
            p.sub_(state["mean"] * state["kept"], alpha=1e-2)
            state["kept"].mul_(0.9)


class Uneven(Lion):
    """Needs memory for a moment: most for matrices, and in every third step, as Shampoo and SOAP do."""

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:  # type: ignore[override]
        for _, p in _pairs(self):
            state = self.state[p]
            state["begin"] = state["begin"] if state else p.clone()
            state["step"] = state.get("step", 0) + 1
            if p.ndim == 2 and state["step"] % 3 == 0:
                p.add_(torch.stack([p] * 8).mean(0), alpha=-1e-3)
            if float(p.grad.abs().max()) > 0:
                p.lerp_(state["begin"] - p.grad, 0.01)


class Counting(Lion):
    """Has an entry of no parameter in its state, as SPAM has: a number, there from the beginning."""

    def __init__(self, params: Any) -> None:
        super().__init__(params)
        self.state["total"] = 0  # type: ignore[index, assignment]

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:  # type: ignore[override]
        total: Any = self.state["total"]  # type: ignore[index]
        for _, p in _pairs(self):
            mean = self.state[p].setdefault("mean", torch.zeros_like(p)).lerp_(p.grad, 0.5)
            p.sub_(mean, alpha=1e-2 / (1 + total))
        self.state["total"] = total + 1  # type: ignore[index]


class Feeling(Lion):
    """Has a mean of all tensors in its state, as EmoNavi has one of the losses."""

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:  # type: ignore[override]
        means: Any = self.state["ema"]  # type: ignore[index]
        means["short"] = 0.5 * means.get("short", 0.0)
        super().step()


class InnerGroups(Lion):
    """Has the groups of another optimizer, as Magma has."""

    def __init__(self, params: Any) -> None:
        self.inner = Lion(params)
        self.defaults = {}

    @property
    def param_groups(self) -> Groups:  # type: ignore[override]
        return self.inner.param_groups


class Closing(Lion):
    """Needs a closure, as AliG does."""

    def step(self, closure: Callable[[], Any] | None = None) -> None:  # type: ignore[override]
        if closure is None:
            raise TypeError("a closure is required")


class SideBySide(Optimizer):
    """Two optimizers in the clothes of one."""

    def __init__(self, params: Iterable[nn.Parameter]) -> None:
        found = list(params)
        self.muon = torch.optim.Muon([p for p in found if p.ndim == 2], lr=1e-2)
        self.adam = torch.optim.AdamW([p for p in found if p.ndim != 2], lr=1e-2)
        super().__init__([*self.muon.param_groups, *self.adam.param_groups], {})

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.muon.step()
        self.adam.step()
