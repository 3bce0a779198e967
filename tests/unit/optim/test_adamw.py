"""lt_offload.AdamW: torch's AdamW for fp32 weights, the same on fp32 copies for low-precision ones."""

from __future__ import annotations

import copy
import hashlib
import io
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lt_offload import AdamW, ConfigError
from lt_offload.machine.accounting import Account
from lt_offload.optim import blockwise, native, plain
from lt_offload.strategy.checkpoint.files import load_optimizer_state

SHAPES = [(40, 60), (7,), (3, 5, 2), (1,), (130, 130)]
SETTINGS = {"lr": 1e-2, "betas": (0.8, 0.95), "eps": 1e-6, "weight_decay": 0.1}


def parameters(dtype: torch.dtype) -> list[nn.Parameter]:
    torch.manual_seed(0)
    return [nn.Parameter(torch.randn(shape).to(dtype)) for shape in SHAPES]


def give_gradients(found: list[nn.Parameter], step: int) -> None:
    torch.manual_seed(100 + step)
    for parameter in found:
        parameter.grad = torch.randn(parameter.shape).to(parameter.dtype)


def train(found: list[nn.Parameter], optimizer: torch.optim.Optimizer, steps: range) -> None:
    for step in steps:
        give_gradients(found, step)
        optimizer.step()


def assert_same(left: Any, right: Any) -> None:
    """Parameters and states are equal bit for bit, dtypes included."""
    a, b = left.state_dict(), right.state_dict()
    assert a["state"].keys() == b["state"].keys()
    for key, state in a["state"].items():
        assert state.keys() == b["state"][key].keys()
        for name, value in state.items():
            assert value.dtype == b["state"][key][name].dtype
            assert torch.equal(value, b["state"][key][name]), (key, name)
    for one, other in zip(left.param_groups, right.param_groups, strict=True):
        assert all(torch.equal(p, q) for p, q in zip(one["params"], other["params"], strict=True))


class Scheme:
    """What the optimizer promises, written down with torch's: fp32 copies, rounded after every step."""

    def __init__(self, found: list[nn.Parameter], **settings: Any) -> None:
        self.found = found
        self.masters = [nn.Parameter(p.detach().float()) for p in found]
        self.optimizer = torch.optim.AdamW(self.masters, fused=True, **settings)

    def step(self, scale: float = 1.0) -> None:
        for parameter, master in zip(self.found, self.masters, strict=True):
            master.grad = parameter.grad.float() * scale  # type: ignore[union-attr]
        self.optimizer.step()
        with torch.no_grad():
            for parameter, master in zip(self.found, self.masters, strict=True):
                parameter.copy_(master)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("maximize", [False, True])
def test_equal_to_torchs_for_full_precision(dtype: torch.dtype, maximize: bool) -> None:
    mine, theirs = parameters(dtype), parameters(dtype)
    ours = AdamW(mine, maximize=maximize, stochastic_rounding=maximize, **SETTINGS)  # which is for bfloat16 only
    reference = torch.optim.AdamW(theirs, maximize=maximize, fused=True, **SETTINGS)
    train(mine, ours, range(4))
    train(theirs, reference, range(4))
    assert_same(ours, reference)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_low_precision_follows_its_masters(dtype: torch.dtype) -> None:
    mine, theirs = parameters(dtype), parameters(dtype)
    optimizer, scheme = AdamW(mine, **SETTINGS), Scheme(theirs, **SETTINGS)
    for step in range(4):
        give_gradients(mine, step)
        give_gradients(theirs, step)
        optimizer.step()
        scheme.step()
    for parameter, other, master in zip(mine, theirs, scheme.masters, strict=True):
        state, expected = optimizer.state[parameter], scheme.optimizer.state[master]
        assert list(state) == ["step", "master", "exp_avg", "exp_avg_sq"]
        assert torch.equal(parameter, other)
        assert torch.equal(state["master"], master)
        assert all(torch.equal(state[name], expected[name]) for name in ("step", "exp_avg", "exp_avg_sq"))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("scale", [0.37, torch.tensor(0.37)])
def test_scale_equals_scaling_first(dtype: torch.dtype, scale: float | Tensor) -> None:
    mine, theirs = parameters(dtype), parameters(dtype)
    optimizer, scheme = AdamW(mine, **SETTINGS), Scheme(theirs, **SETTINGS)
    optimizer.grad_scale = scale
    for step in range(3):
        give_gradients(mine, step)
        give_gradients(theirs, step)
        before = [p.grad.clone() for p in mine]  # type: ignore[union-attr]
        optimizer.step()
        scheme.step(0.37)
        assert all(torch.equal(p.grad, grad) for p, grad in zip(mine, before, strict=True))  # type: ignore[arg-type]
    assert all(torch.equal(p, q) for p, q in zip(mine, theirs, strict=True))
    assert AdamW(mine).grad_scale == 1


def test_groups_schedules_and_learning_rates_in_tensors() -> None:
    mine, theirs = parameters(torch.float32), parameters(torch.float32)
    made = []
    for cls, found, lr, options in (
        (AdamW, mine, torch.tensor(1e-2), {}),
        (torch.optim.AdamW, theirs, 1e-2, {"fused": True}),
    ):
        groups = [{"params": found[:2], "weight_decay": 0.3}, {"params": found[2:], "lr": 5e-2, "betas": (0.5, 0.6)}]
        optimizer = cls(groups, lr=lr, **options)  # type: ignore[operator]
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
        for step in range(4):
            give_gradients(found, step)
            optimizer.step()
            schedule.step()
        made.append(optimizer)
    rates = [[float(group["lr"]) for group in optimizer.param_groups] for optimizer in made]
    assert rates[0] == pytest.approx(rates[1])
    # a tensor holds the rate in fp32
    assert all(torch.allclose(p, q, rtol=1e-6, atol=1e-7) for p, q in zip(mine, theirs, strict=True))
    assert torch.equal(mine[-1], theirs[-1])


def test_closure_and_parameters_without_gradient() -> None:
    used, unused = nn.Parameter(torch.ones(20)), nn.Parameter(torch.ones(3))
    optimizer = AdamW([used, unused], lr=0.1)

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = (used**2).sum()
        loss.backward()
        return loss

    assert float(optimizer.step(closure).detach()) == 20
    assert (used < 1).all()
    assert (unused == 1).all()
    assert unused not in optimizer.state


def through_a_file(optimizer: torch.optim.Optimizer) -> Any:
    file = io.BytesIO()
    torch.save(optimizer.state_dict(), file)
    file.seek(0)
    return torch.load(file)


NOISY = SETTINGS | {"stochastic_rounding": True}
EIGHT: dict[str, Any] = {"state_dtype": "8bit", "min_8bit_size": 300}
HALF: dict[str, Any] = {"state_dtype": "bfloat16"}


def test_noise_instead_of_masters() -> None:
    mine, theirs = parameters(torch.bfloat16), parameters(torch.bfloat16)
    optimizer = AdamW(mine, **NOISY)
    for step in range(3):
        give_gradients(mine, step)
        before = [p.detach().float() for p in mine]
        states = [{name: value.clone() for name, value in optimizer.state[p].items()} for p in mine]
        optimizer.step()
        for parameter, old, state in zip(mine, before, states, strict=True):
            assert list(optimizer.state[parameter]) == ["step", "exp_avg", "exp_avg_sq"]
            exact = nn.Parameter(old)
            exact.grad = parameter.grad.float()  # type: ignore[union-attr]
            reference = torch.optim.AdamW([exact], fused=True, **SETTINGS)
            reference.state[exact] = state
            reference.step()
            assert all(torch.equal(optimizer.state[parameter][n], v) for n, v in reference.state[exact].items())
            ulp = 2.0 ** (exact.abs().log2().floor() - 7)
            assert ((parameter - exact).abs() < ulp).all(), "it is not one of the two neighbours"
    assert not all(torch.equal(p, q) for p, q in zip(mine, theirs, strict=True))


def test_noise_does_not_depend_on_the_order() -> None:
    together, alone = parameters(torch.bfloat16), parameters(torch.bfloat16)
    both = [AdamW(found, **NOISY) for found in (together, alone)]
    for step in range(3):
        give_gradients(together, step)
        give_gradients(alone, step)
        both[0].step()
        grads = [p.grad for p in alone]
        for turn in reversed(range(len(alone))):
            for number, parameter in enumerate(alone):
                parameter.grad = grads[number] if number == turn else None
            both[1].step()
    assert all(torch.equal(p, q) for p, q in zip(together, alone, strict=True))


def test_noise_differs_between_parameters_and_steps() -> None:
    twins = [nn.Parameter(torch.ones(4096, dtype=torch.bfloat16)) for _ in range(2)]
    optimizer = AdamW(twins, lr=1e-3, stochastic_rounding=True)
    ups = []
    for _ in range(2):
        for twin in twins:
            twin.grad = torch.ones_like(twin)
        before = [twin.detach().clone() for twin in twins]
        optimizer.step()
        ups += [(twin != old).double() for twin, old in zip(twins, before, strict=True)]
    assert torch.corrcoef(torch.stack(ups))[~torch.eye(4, dtype=torch.bool)].abs().max() < 0.1


class Reference:
    """The words of the docstring with operations of torch: moments in fp32 for a step, then what is kept of them."""

    def __init__(self, found: list[nn.Parameter], settings: dict[str, Any], kept: dict[str, Any]) -> None:
        self.found = found
        self.wide = [nn.Parameter(p.detach().float()) for p in found]
        self.optimizer = torch.optim.AdamW(self.wide, fused=True, **settings)
        self.kept = kept
        self.steps = 0

    def step(self) -> None:
        for parameter, wide in zip(self.found, self.wide, strict=True):
            wide.grad = parameter.grad.float()  # type: ignore[union-attr]
        self.optimizer.step()
        self.steps += 1
        for number, wide in enumerate(self.wide):
            state = self.optimizer.state[wide]
            if self.kept["state_dtype"] == "bfloat16":
                seed = hashlib.blake2s(f"{number} {self.steps} exp_avg_sq".encode(), digest_size=4).digest()
                noisy = plain.stochastic(state["exp_avg_sq"], int.from_bytes(seed, "little"))
                state["exp_avg"], state["exp_avg_sq"] = state["exp_avg"].bfloat16().float(), noisy.float()
            elif wide.numel() >= self.kept["min_8bit_size"]:
                for name, signed in (("exp_avg", True), ("exp_avg_sq", False)):
                    state[name] = blockwise.decode(*blockwise.encode(state[name], signed=signed), signed=signed)
        with torch.no_grad():
            for parameter, wide in zip(self.found, self.wide, strict=True):
                parameter.copy_(wide)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kept", [EIGHT, HALF], ids=["8bit", "bfloat16"])
def test_moments_of_fewer_bits(dtype: torch.dtype, kept: dict[str, Any]) -> None:
    mine, theirs = parameters(dtype), parameters(dtype)
    optimizer, reference = AdamW(mine, **SETTINGS, **kept), Reference(theirs, SETTINGS, kept)
    for step in range(4):
        give_gradients(mine, step)
        give_gradients(theirs, step)
        optimizer.step()
        reference.step()
    dtypes = set()
    for parameter, other, wide in zip(mine, theirs, reference.wide, strict=True):
        state, expected = optimizer.state[parameter], reference.optimizer.state[wide]
        assert torch.equal(parameter, other)
        assert dtype == torch.float32 or torch.equal(state["master"], wide)
        for name, signed in (("exp_avg", True), ("exp_avg_sq", False)):
            value = state[name]
            dtypes.add(value.dtype)
            if value.dtype == torch.uint8:
                assert state[f"{name}_scale"].shape == (-(-value.numel() // 256),)
                value = blockwise.decode(value, state[f"{name}_scale"], signed=signed)
            assert torch.equal(value.float(), expected[name])
    assert dtypes == ({torch.uint8, torch.float32} if kept is EIGHT else {torch.bfloat16})


@pytest.mark.parametrize("steps", [0, 2])
@pytest.mark.parametrize(
    ("dtype", "settings"),
    [
        (torch.float32, SETTINGS),
        *((torch.bfloat16, s) for s in (SETTINGS, NOISY)),
        (torch.float32, SETTINGS | EIGHT),
        (torch.bfloat16, NOISY | EIGHT),
        (torch.bfloat16, SETTINGS | HALF),
    ],
)
@pytest.mark.parametrize("way", ["torch", "checkpoint", "pickle", "deepcopy"])
def test_resume(dtype: torch.dtype, settings: dict[str, Any], way: str, steps: int) -> None:
    straight = parameters(dtype)
    expected = AdamW(straight, **settings)
    train(straight, expected, range(5))
    first = parameters(dtype)
    optimizer = AdamW(first, **settings)
    train(first, optimizer, range(steps))
    if way == "pickle":
        resumed = pickle.loads(pickle.dumps(optimizer))
    elif way == "deepcopy":
        resumed = copy.deepcopy(optimizer)
    else:
        kept = {name: value for name, value in settings.items() if name not in SETTINGS}
        resumed = AdamW([nn.Parameter(p.detach().clone()) for p in first], lr=9.0, **kept)
        if way == "torch":
            resumed.load_state_dict(through_a_file(optimizer))
        else:
            load_optimizer_state(resumed, through_a_file(optimizer), set(resumed.param_groups[0]["params"]))
    train(resumed.param_groups[0]["params"], resumed, range(steps, 5))
    assert_same(resumed, expected)


def test_checkpoints_of_torchs() -> None:
    theirs = parameters(torch.float32)
    reference = torch.optim.AdamW(theirs, fused=True, **SETTINGS)
    train(theirs, reference, range(2))
    mine = [nn.Parameter(p.detach().clone()) for p in theirs]
    ours = AdamW(mine)
    ours.load_state_dict(copy.deepcopy(reference.state_dict()))
    assert not {"fused", "foreach", "capturable", "differentiable"} & ours.param_groups[0].keys()
    train(mine, ours, range(2, 4))
    train(theirs, reference, range(2, 4))
    assert_same(ours, reference)


@pytest.mark.parametrize(
    ("dtype", "saved", "settings", "message"),
    [
        (
            torch.bfloat16,
            {},
            {"stochastic_rounding": True},
            "fp32 masters for a weight .* with stochastic_rounding=True",
        ),
        (torch.bfloat16, {"stochastic_rounding": True}, {}, "no fp32 masters for .* with stochastic_rounding=False"),
        (torch.float32, EIGHT, {}, r"has moments of torch\.uint8 for a weight of 2400 elements, whose moments are"),
        (torch.float32, {}, EIGHT, r"are torch\.uint8 with state_dtype='8bit' and min_8bit_size=300"),
    ],
)
def test_checkpoints_of_other_settings(
    dtype: torch.dtype, saved: dict[str, Any], settings: dict[str, Any], message: str
) -> None:
    optimizer = AdamW(found := parameters(dtype), **saved)
    train(found, optimizer, range(1))
    with pytest.raises(ConfigError, match=message):
        AdamW(parameters(dtype), **settings).load_state_dict(optimizer.state_dict())


def test_checkpoints_that_do_not_fit() -> None:
    low, full = parameters(torch.bfloat16), parameters(torch.float32)
    theirs = torch.optim.AdamW(low, fused=True)
    train(low, theirs, range(1))
    with pytest.raises(ConfigError, match=r"no fp32 masters for a weight that is torch\.bfloat16 now"):
        AdamW(low).load_state_dict(theirs.state_dict())
    ours = AdamW(low)
    train(low, ours, range(1))
    with pytest.raises(ConfigError, match=r"fp32 masters for a weight that is torch\.float32 now"):
        AdamW(full).load_state_dict(ours.state_dict())
    with pytest.raises(ConfigError, match="amsgrad=True is not offered"):
        AdamW(full).load_state_dict(torch.optim.AdamW(full, amsgrad=True).state_dict())


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"amsgrad": True}, r"amsgrad=True is not offered by lt_offload\.AdamW; torch\.optim\.AdamW has it"),
        ({"fused": False}, r"fused=False: lt_offload\.AdamW is always fused"),
        ({"lr": -1.0}, "lr=-1.0 must not be negative"),
        ({"lr": float("nan")}, "lr=nan must not be negative"),
        ({"lr": torch.ones(2)}, "lr has 2 elements"),
        ({"betas": (0.9, 1.0)}, r"betas=\(0\.9, 1\.0\) must be at least 0 and less than 1"),
        ({"state_dtype": "int8"}, "state_dtype='int8' is not offered; use 'bfloat16', '8bit' or None"),
        ({"state_dtype": "8bit", "min_8bit_size": 256}, "min_8bit_size=256 must be more than a block, 256"),
    ],
)
def test_settings_that_cannot_be(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        AdamW(parameters(torch.float32), **settings)


def test_tensors_that_cannot_be() -> None:
    with pytest.raises(ConfigError, match=r"state_dtype='8bit' is not for weights of torch\.float64"):
        AdamW(parameters(torch.float64), state_dtype="8bit")
    with pytest.raises(ConfigError, match=r"stochastic_rounding=True is for bfloat16 weights, not for torch\.float16"):
        AdamW(parameters(torch.float16), stochastic_rounding=True)
    with pytest.raises(ConfigError, match=r"dtype torch\.complex64: AdamW updates float tensors"):
        AdamW([nn.Parameter(torch.ones(2, dtype=torch.complex64))])
    table = nn.Embedding(4, 3, sparse=True)
    table(torch.tensor([1])).sum().backward()
    with pytest.raises(ConfigError, match="no sparse gradients"):
        AdamW(table.parameters()).step()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("noisy", [False, True])
@pytest.mark.parametrize("state_dtype", [None, "bfloat16", "8bit"])
def test_what_updates_take_for_a_moment(dtype: torch.dtype, noisy: bool, state_dtype: Any) -> None:
    parameter = nn.Parameter(torch.zeros(300, 300, dtype=dtype))
    optimizer = AdamW([parameter], stochastic_rounding=noisy, state_dtype=state_dtype)
    train([parameter], optimizer, range(1))
    with native.left_out(), Account() as account:
        optimizer.step()
    most = optimizer.scratch_bytes(parameter)
    assert account.peak <= most <= 1.6 * account.peak + 4 * parameter.numel() + 4096
