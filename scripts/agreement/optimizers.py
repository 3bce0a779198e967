"""Whether the optimizers of another package give plain PyTorch's numbers, or are refused by name.

    pip install --no-deps pytorch_optimizer
    python -m scripts.agreement.optimizers

Each trains a small model in plain PyTorch, and in two plans: in the smallest memory in which the device makes all
updates, and with everything on the device. The result is results/optimizers.json.
"""

from __future__ import annotations

import contextlib
import logging
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import Optimizer

import lt_offload
from lt_offload import limits
from lt_offload.errors import InfeasibleError, OverBudget, UnsupportedError
from lt_offload.model.optimizers import is_known
from lt_offload.profiling.hardware import measure_hardware
from lt_offload.profiling.optimizer import UpdateSizes, measure_optimizer
from lt_offload.schema.profile import Profile
from scripts.common import arguments, read_json, save, versions

PACKAGE = "pytorch_optimizer"
_STEPS, _WIDTH, _WORDS = 4, 24, 61
Make = Callable[[nn.Module], Optimizer]
Outcome = tuple[str, str]
"""``equal``, ``refused``, ``not so`` (plain PyTorch does not train with it like this), ``over budget``, ``differs`` or
``error``; and the sentence that says so."""


class _Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(_WIDTH)
        self.up, self.down = nn.Linear(_WIDTH, 2 * _WIDTH), nn.Linear(2 * _WIDTH, _WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))  # type: ignore[no-any-return]


class _Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(_WORDS, _WIDTH)
        self.layers = nn.ModuleList(_Layer() for _ in range(3))
        self.head = nn.Linear(_WIDTH, _WORDS)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x)
        return F.cross_entropy(self.head(x).flatten(0, 1), ids.flatten())


def _batch(seed: int) -> Tensor:
    return torch.randint(0, _WORDS, (3, 7), generator=torch.Generator().manual_seed(seed))


def makers(cls: type[Optimizer]) -> Iterator[Make]:
    """Yield the ways to make an optimizer with its defaults: of all parameters, and of matrices and others apart."""

    def apart(model: nn.Module) -> Optimizer:
        matrices = [p for p in model.parameters() if p.ndim == 2]
        others = [p for p in model.parameters() if p.ndim != 2]
        return cls([{"params": matrices, "use_muon": True}, {"params": others, "use_muon": False}])  # type: ignore[call-arg]

    yield lambda model: cls(model.parameters())  # type: ignore[call-arg]
    yield lambda model: cls(model.parameters(), lr=1e-3)  # type: ignore[call-arg]
    yield apart
    yield lambda model: cls(model)  # type: ignore[call-arg]
    yield lambda model: cls(model.parameters(), num_iterations=_STEPS)  # type: ignore[call-arg]


def trained(make: Make, plan: lt_offload.Plan | None = None) -> list[Any]:
    """Return losses, weights and the states of an optimizer after a few steps."""
    model, losses = _Net(), []
    optimizer = make(model)
    inside = (
        contextlib.nullcontext()
        if plan is None
        else lt_offload.offloaded(model, optimizer, _batch(0), plan=plan, accelerator="cpu")
    )
    with inside:
        torch.manual_seed(5)
        for seed in range(_STEPS):
            loss = model(_batch(seed))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.detach().clone())
    return [*losses, *_leaves(model.state_dict()), *_leaves(optimizer.state_dict())]


def _leaves(value: Any) -> Iterator[Any]:
    """Yield numbers and tensors, dictionaries in the order of their keys."""
    if isinstance(value, Mapping):
        value = [part for _, part in sorted(value.items(), key=lambda item: str(item[0]))]
    if isinstance(value, (list, tuple)):
        for part in value:
            yield from _leaves(part)
    else:
        yield value


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor) or isinstance(other, Tensor):
        if not isinstance(one, Tensor) or not isinstance(other, Tensor):
            return False
        return one.shape == other.shape and one.dtype == other.dtype and torch.equal(one, other)
    return bool(one == other)


def outcome(cls: type[Optimizer], blocks: Profile) -> Outcome:
    """Return what becomes of one optimizer; ``blocks`` is the profile with another one."""
    reason = ""
    for make in makers(cls):
        try:
            expected, again = trained(make), trained(make)
        except Exception as error:  # made or used in another way, which its documentation tells
            reason = reason or f"{type(error).__name__}: {error}"
            continue
        if len(expected) != len(again) or not all(map(_same, expected, again)):
            return "not so", "two plain runs differ"
        return _offloaded(make, expected, blocks)
    return "not so", reason.splitlines()[0]


def _offloaded(make: Make, expected: list[Any], blocks: Profile) -> Outcome:
    model = _Net()
    optimizer = make(model)
    try:
        limits.check("optimizer", limits.Setup(model=model, optimizers=[optimizer]))
        profile = _with_updates_of(optimizer, model, blocks)
        try:
            lt_offload.solve(profile, memory=1000, host_update=False, time_limit=1)
        except InfeasibleError as error:
            least = error.needed_bytes
        assert least is not None
        for memory in (least, 1 << 30):
            found = trained(make, lt_offload.solve(profile, memory=memory, host_update=False, time_limit=1))
            if len(found) != len(expected) or not all(map(_same, expected, found)):
                return "differs", f"in {memory} bytes"
    except UnsupportedError as error:
        return "refused", str(error).splitlines()[-1].removeprefix("- ")
    except OverBudget as error:
        return "over budget", str(error)
    except Exception as error:
        return "error", f"{type(error).__name__}: {error}"
    return "equal", ""


def _with_updates_of(optimizer: Optimizer, model: nn.Module, blocks: Profile) -> Profile:
    cpu, weights = torch.device("cpu"), dict(model.named_parameters())
    sizes = UpdateSizes(optimizer, cpu)
    tensors = [
        replace(tensor, state_bytes=sizes.state(weight), scratch_bytes=sizes.scratch(weight))
        for tensor, weight in ((tensor, weights[tensor.name]) for tensor in blocks.tensors)
    ]
    updates = measure_optimizer(optimizer, cpu) if is_known(optimizer) else blocks.optimizer
    return replace(blocks, tensors=tuple(tensors), optimizer=updates)


def main() -> None:
    """Try all, or those named, and write the result."""
    parser = arguments(__doc__)
    parser.add_argument("names", nargs="*", help="of optimizers to try again, in the result; all without")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    import pytorch_optimizer

    model = _Net()
    plain = torch.optim.SGD(model.parameters())
    blocks = lt_offload.profile(model, _batch(0), optimizer=plain, device="cpu", hardware=measure_hardware("cpu"))
    found: dict[str, list[str]] = {}
    for name in options.names or sorted(pytorch_optimizer.get_supported_optimizers()):
        cls = pytorch_optimizer.load_optimizer(name)
        found[cls.__name__] = [*outcome(cls, blocks)]
        print(cls.__name__, *found[cls.__name__], flush=True)
    settings = {"package": PACKAGE, "version": versions(PACKAGE)[PACKAGE], "steps": _STEPS}
    if options.names:
        before = read_json(options.results / "optimizers.json")
        if before["settings"] != settings:
            raise SystemExit(f"the result is of {before['settings']}; try all of {settings}")
        found = before["figures"]["outcomes"] | found
    counts = Counter(kind for kind, _ in found.values())
    print(dict(counts))
    save("optimizers", "optimizers", settings, {"counts": dict(counts), "outcomes": found}, options.results)


if __name__ == "__main__":
    main()
