"""A whole engine in one file: it trains three blocks by a plan, in a range of memory that does not hold them.

    python docs/tour/in_turn.py

The plan says everything (lt_offload/schema/plan.py): at which step what is copied where, and what each op waits for. An
engine does as it is told, so a small one is short. The "device" of this one is a range of the processor's memory, to
which weights, optimizer states, activations and gradients cross and from which they return as on a GPU.
docs/tour.md walks through it; overlapped.py, beside it, is the same with copies that run beside computations.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import groupby

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.func import functional_call

from lt_offload import Plan, Profile, profile, solve
from lt_offload.schema.plan import Op

LR, MOMENTUM = 0.1, 0.9
OPTIONS = {"keep", "recompute", "reload", "offload"}
Key = tuple[str, int]
"""A payload and a tensor, e.g. ``("weight", 3)``."""


class Block(nn.Module):
    """What models are made of."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        """Return a tensor of the same shape."""
        return x + self.down(torch.tanh(self.up(x)))


def update(weight: Tensor, momentum: Tensor, gradient: Tensor) -> None:
    """Do to one tensor what ``torch.optim.SGD(lr=LR, momentum=MOMENTUM)`` does."""
    momentum.mul_(MOMENTUM).add_(gradient)
    weight.add_(momentum, alpha=-LR)


class Lanes:
    """Carries out tasks at once, in the order in which the plan lists ops."""

    def submit(self, op: Op, task: Callable[[], None]) -> None:
        """Carry out ``task``: what ``op`` waits for has ended, as a plan lists it before."""
        task()

    def wait(self) -> None:
        """Everything has ended."""


class Saved:
    """What a block leaves on the device from its forward to its backward."""

    def __init__(self) -> None:
        self.leaves: list[Tensor] = []
        """The graph's: the block's input, then its weights."""
        self.output: Tensor | None = None
        """With the graph behind it; None: the forward will run again."""
        self.tensors: list[Tensor] = []
        """What the graph needs besides weights, or the input for the forward that runs again."""
        self.away: list[Tensor] = []
        """These on the host."""

    def leave(self, tensors: Sequence[Tensor]) -> None:
        """Copy to the host."""
        self.away = [tensor.clone() for tensor in tensors]

    def forget(self) -> None:
        """Let go of the device's memory."""
        self.tensors = []

    def come_back(self) -> None:
        """Copy to the device."""
        self.tensors = [tensor.clone() for tensor in self.away]


class Engine:
    """Trains ``blocks``, each of which takes what the one before returns, by ``plan``."""

    def __init__(self, blocks: Sequence[nn.Module], plan: Plan) -> None:
        assert plan.passes == ("updating",), "this engine has no windows"
        assert {*plan.options} <= OPTIONS, "this engine has fewer options"
        assert not any(op.zero_copy for op in plan.ops), "its computations read nothing in host memory"
        self.plan, self.blocks, self.lanes = plan, blocks, Lanes()
        named = [(block, name, p) for block, module in enumerate(blocks) for name, p in module.named_parameters()]
        self.names = [{t: name for t, (at, name, _) in enumerate(named) if at == block} for block in range(len(blocks))]
        """By block and tensor."""
        self.host: dict[Key, Tensor] = {("weight", t): param.detach() for t, (*_, param) in enumerate(named)}
        self.host |= {("state", t): torch.zeros_like(param) for t, (*_, param) in enumerate(named)}
        self.arena = torch.empty(plan.arena_bytes, dtype=torch.uint8)
        self.device: dict[Key, Tensor] = {}
        """What is in the arena: ranges of it."""
        self.newer: set[Key] = set()  # what has changed there
        self.saved: dict[int, Saved] = {}  # by block
        self.gradients: dict[int, Tensor] = {}  # by tensor, on the device
        memory = torch.empty(plan.gradient_bytes, dtype=torch.uint8)
        self.arrived: dict[int, Tensor] = {}
        """Where gradients come to on the host: ranges that they share by turns."""
        for number, group in enumerate(plan.groups):
            if group.host_offset is not None:
                self.arrived |= {t: view for (_, t), view in self._ranges(number, group.host_offset, memory)}
        for held in plan.initial:
            for key, view in self._ranges(held.group, held.offset, self.arena):
                self.device[key] = view.copy_(self.host[key])

    def _ranges(self, group: int, start: int, memory: Tensor) -> Iterator[tuple[Key, Tensor]]:
        """Yield where the tensors of a group are in ``memory`` if it begins at ``start``."""
        payload = self.plan.groups[group].payload
        for t, offset in self.plan.groups[group].offsets(start):
            like = self.host["weight", t]
            yield (payload, t), memory[offset : offset + like.nbytes].view(like.dtype).view(like.shape)

    def iteration(self, batch: Tensor, loss_of: Callable[[Tensor], Tensor]) -> Tensor:
        """Run forward, backward and updates; return the loss. Lanes may still be at work."""
        self.flowing = batch  # from block to block: outputs, then their gradients
        releases: dict[int, list[Callable[[], None]]] = {}
        for step, ops in groupby(self.plan.ops, key=lambda op: op.step):
            if step == len(self.blocks):  # the first backward
                output = self.flowing.requires_grad_()
                loss = loss_of(output)
                (self.flowing,) = torch.autograd.grad(loss, output)
            for op in ops:
                release = self.issue(op)
                if op.release_after is not None and release is not None:
                    releases.setdefault(op.release_after, []).append(release)
            for release in releases.pop(step, ()):
                release()
        return loss.detach()

    def issue(self, op: Op) -> Callable[[], None] | None:
        """Carry out one op; return what gives back the device memory that it leaves, if the plan says when."""
        keys: list[Key] = [(op.payload or "", t) for t in self.plan.tensors(op)]
        match op.kind, op.payload:
            case "forward", _:
                self.lanes.submit(op, partial(self.forward, op.block))
            case "backward", _:
                self.lanes.submit(op, partial(self.backward, op.block))
            case "update", _:
                self.lanes.submit(op, partial(self.update, op))
            case "prefetch", "activation":
                self.lanes.submit(op, self.saved[op.block].come_back)
            case "offload", "activation":
                saved = self.saved[op.block]
                self.lanes.submit(op, partial(saved.leave, saved.tensors))
                return saved.forget
            case "offload", "grad":
                pairs = [(self.arrived[t], self.gradients.pop(t)) for _, t in keys]
                self.lanes.submit(op, partial(_copy, pairs))
            case "prefetch", _:
                for group, offset in zip(op.groups, op.offsets, strict=True):
                    self.device |= dict(self._ranges(group, offset, self.arena))
                self.lanes.submit(op, partial(_copy, [(self.device[key], self.host[key]) for key in keys]))
            case "offload", _:
                self.newer.difference_update(keys)
                self.lanes.submit(op, partial(_copy, [(self.host[key], self.device[key]) for key in keys]))
                return partial(self.drop, keys)
            case "drop", _:
                self.drop(keys)
                self.lanes.submit(op, lambda: None)  # whoever waits for it waits for what it waits for
        return None

    def drop(self, keys: Sequence[Key]) -> None:
        """Let go of ranges of the arena; the next there waits for those who use them now."""
        for key in keys:
            del self.device[key]

    def forward(self, block: int) -> None:
        """Run a block; what its backward needs stays, or just its input if the forward is to run again."""
        saved = self.saved[block] = Saved()
        x = self.flowing
        if self.plan.options[block] in ("keep", "offload"):
            self.flowing = self.with_graph(block, x).detach()
        else:
            saved.tensors = [x]
            with torch.no_grad():
                weights = {name: self.device["weight", t] for t, name in self.names[block].items()}
                self.flowing = functional_call(self.blocks[block], weights, (x,))

    def with_graph(self, block: int, x: Tensor) -> Tensor:
        """Run a block so that autograd can go back through it."""
        saved = self.saved[block]
        # ``data``, as autograd counts writes to a tensor, and for it all ranges of the arena are one tensor.
        weights = {name: self.device["weight", t].data.requires_grad_() for t, name in self.names[block].items()}
        saved.leaves, saved.tensors = [x.detach().requires_grad_(), *weights.values()], []
        with saved_tensors_hooks(partial(self.pack, saved), partial(self.unpack, saved)):
            output: Tensor = functional_call(self.blocks[block], weights, (saved.leaves[0],))
        saved.output = output
        return output

    def pack(self, saved: Saved, tensor: Tensor) -> tuple[Key | int, Tensor]:
        """Return what the graph keeps of ``tensor``: where it will be found, and its form without its memory."""
        form = tensor.detach().to("meta")
        for key, view in self.device.items():
            if view.data_ptr() == tensor.data_ptr():
                return key, form
        saved.tensors.append(tensor.detach())
        return len(saved.tensors) - 1, form

    def unpack(self, saved: Saved, packed: tuple[Key | int, Tensor]) -> Tensor:
        """Return the tensor: a weight may have left the arena and come back to another place meanwhile."""
        where, form = packed
        found = saved.tensors[where] if isinstance(where, int) else self.device[where]
        return found.as_strided(form.shape, form.stride())

    def backward(self, block: int) -> None:
        """Compute the gradients of a block's weights and of its input."""
        saved = self.saved[block]
        output = self.with_graph(block, saved.tensors[0]) if saved.output is None else saved.output
        self.flowing, *gradients = torch.autograd.grad(output, saved.leaves, self.flowing)
        self.gradients |= zip(self.names[block], gradients, strict=True)
        del self.saved[block]

    def update(self, op: Op) -> None:
        """Update weights where the plan has them, their states and gradients."""
        for t in self.plan.tensors(op):
            if op.lane == "host":
                update(self.host["weight", t], self.host["state", t], self.arrived[t])
            else:
                update(self.device["weight", t], self.device["state", t], self.gradients.pop(t))
                self.newer |= {("weight", t), ("state", t)}

    def come_home(self) -> None:
        """Make all weights and states on the host complete."""
        self.lanes.wait()
        for key in self.newer:
            self.host[key].copy_(self.device[key])


def _copy(pairs: Sequence[tuple[Tensor, Tensor]]) -> None:
    for target, source in pairs:
        target.copy_(source)


def loss_of(output: Tensor) -> Tensor:
    """Return what is made small."""
    return output.square().mean()


def offered(costs: Profile) -> Profile:
    """Return what a planner may choose from: the options that this engine has."""
    blocks = [replace(block, options=tuple(o for o in block.options if o.name in OPTIONS)) for block in costs.blocks]
    return replace(costs, blocks=tuple(blocks))


def main() -> None:
    """Measure, plan, and train by the plan and in plain PyTorch."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Sequential(*(Block(64) for _ in range(3))))
    plain = copy.deepcopy(model)
    batch = torch.randn(32, 64)
    sgd = partial(torch.optim.SGD, lr=LR, momentum=MOMENTUM)
    optimizer = sgd(plain.parameters())
    costs = profile(model, (batch,), optimizer=sgd, run=lambda batch: loss_of(model(*batch)))
    plan = solve(offered(costs), memory=700_000, planner="stream")
    print(plan.explain())
    engine = Engine([*model[0].children()], plan)
    for _ in range(5):
        loss = engine.iteration(batch, loss_of)
        plain_loss = loss_of(plain(batch))
        plain_loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        print(f"loss {loss:.7f}, in plain PyTorch {plain_loss:.7f}")
    engine.come_home()
    equal = all(map(torch.equal, model.parameters(), plain.parameters()))
    print(f"{plan.arena_bytes:,} bytes of weights and states on the device; all weights equal: {equal}")


if __name__ == "__main__":
    main()
