"""A simple plan for any model: every weight travels, every block and tensor is handled as one asks for.

Not a good plan, but a complete one that is easy to read; the engine's tests run it. Weights of blocks of one parity
share their arena range, forward and backward copies of one weight have different places. All gradients for the host
arrive at the same addresses there, so that every copy waits for the update before.
"""

from __future__ import annotations

import copy
from collections import OrderedDict, defaultdict
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from lt_offload.execute.program import owners
from lt_offload.model.blocks import Structure
from lt_offload.plan.assembly.groups import group_tensors
from lt_offload.plan.assembly.ops import Draft
from lt_offload.schema.plan import ALIGNMENT, Plan, Prediction, one_batch
from lt_offload.schema.profile import fingerprint


def structure_fingerprint(structure: Structure) -> str:
    used = owners([block.tensors for block in structure.blocks])
    rows = [
        (tuple(p.shape), str(p.dtype).removeprefix("torch."), p.requires_grad, tuple(used[i]))
        for i, (_, p) in enumerate(structure.tensors)
    ]
    return fingerprint(rows, len(structure.blocks))


def state_bytes(structure: Structure, optimizer: torch.optim.Optimizer) -> tuple[int, ...]:
    """Bytes of state per tensor, by stepping clones."""
    sizes = []
    groups = {p: g for g in optimizer.param_groups for p in g["params"]}
    for _, param in structure.tensors:
        if param not in groups:
            sizes.append(0)
            continue
        clone = torch.nn.Parameter(param.detach().clone())
        clone.grad = torch.zeros_like(clone)
        twin = copy.copy(optimizer)
        vars(twin).update({k: v for k, v in vars(optimizer).items() if k not in vars(twin)})  # no copy has these
        twin.param_groups = [{**groups[param], "params": [clone]}]
        vars(twin).pop("step", None)  # of a schedule, which steps the optimizer that it was made for
        twin._optimizer_step_pre_hooks, twin._optimizer_step_post_hooks = OrderedDict(), OrderedDict()
        entries = {key: value for key, value in optimizer.state.items() if not isinstance(key, torch.Tensor)}
        twin.state = defaultdict(dict, entries)
        for _ in range(2):
            twin.step()
        found = [v for v in tree_leaves(twin.state[clone]) if isinstance(v, torch.Tensor) and v.numel() > 1]
        sizes.append(sum(-(-v.numel() * v.element_size() // 8) * 8 for v in found))
    return tuple(sizes)


TRAVELLING = ("offload", "mixed", "reload")


class _Ops:
    def __init__(self) -> None:
        self.ops: list[Draft] = []

    def add(self, kind: Any, step: int, block: int, lane: Any, **fields: Any) -> None:
        self.ops.append(Draft(id=len(self.ops), kind=kind, step=step, block=block, lane=lane, **fields))


def _up(nbytes: int) -> int:
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


def _layout(
    blocks: Sequence[Sequence[int]], alone: dict[int, bool], sizes: Sequence[int], states: Sequence[int]
) -> tuple[tuple[list[int], list[int]], list[int], int]:
    """Return offsets of weights in the forward and in the backward, of states, and the extent.

    States and tensors that are ``alone`` (tied or resident) have ranges of their own; the weights of even blocks share
    one range, those of odd blocks another; in the backward each is moved by one unit of alignment.
    """
    forward, state_at = [0] * len(sizes), [0] * len(sizes)
    at = 0
    for i, own_range in alone.items():
        if own_range:
            forward[i], at = at, at + _up(sizes[i]) + ALIGNMENT
        state_at[i], at = at, at + _up(states[i])
    own = [[i for i in tensors if not alone[i]] for tensors in blocks]
    zone = max(sum(_up(sizes[i]) for i in tensors) for tensors in own) + ALIGNMENT
    for block, tensors in enumerate(own):
        offset = at + block % 2 * zone
        for i in tensors:
            forward[i], offset = offset, offset + _up(sizes[i])
    return (forward, [offset + ALIGNMENT for offset in forward]), state_at, at + 2 * zone


def _in_one_slot(ops: Sequence[Draft], sizes: Sequence[int]) -> tuple[list[Draft], int]:
    """Return ``ops`` with all gradients at one place on the host, and how large that is."""
    found = list(ops)
    copies = [op for op in ops if op.payload == "grad"]
    updates = [op.id for op in ops if op.kind == "update" and op.lane == "host"]
    for at, op in enumerate(copies):
        found[op.id] = replace(op, host_offset=0, after=(updates[at - 1],) if len(copies) > 1 else ())
    return found, max((sum(_up(sizes[t]) for t in op.tensors) for op in copies), default=0)


def streamed(
    structure: Structure,
    optimizer: torch.optim.Optimizer,
    *,
    options: Sequence[str],
    places: Sequence[str],
    last_option: str | None = None,
    chunk_tokens: int = 0,
    lag: int = 1,
    lead: int = 1,
    resident: bool = False,
    roomy: bool = False,
) -> Plan:
    """Return the plan.

    Args:
        options: per block, repeated as needed.
        last_option: of the last block instead.
        chunk_tokens: tokens per chunk, if that is ``chunked``.
        places: per trainable tensor, repeated as needed.
        lag: steps after which offloaded memory is given back.
        lead: steps by which activations are fetched ahead.
        resident: everything stays on the device, updates there.
        roomy: no two copies share an arena range, so that nothing is ordered by the reuse of memory.
    """
    blocks = [block.tensors for block in structure.blocks]
    count, last = len(blocks), 2 * len(blocks) - 1
    uses = owners(blocks)
    sizes = [p.numel() * p.element_size() for _, p in structure.tensors]
    states = state_bytes(structure, optimizer)
    place = [places[i % len(places)] if p.requires_grad else "none" for i, (_, p) in enumerate(structure.tensors)]
    place = ["device" if resident and p != "none" else p for p in place]
    intervals = [resident or place[i] == "device" and i % 2 == 0 for i in range(len(sizes))]
    alone = {i: roomy or len(used) > 1 or intervals[i] for i, used in uses.items()}
    weight_at, state_at, arena = _layout(blocks, alone, sizes, states)
    if roomy:
        weight_at = (weight_at[0], [arena + offset for offset in weight_at[0]])
        arena *= 2
    option = [options[i % len(options)] for i in range(count)]
    option[-1] = last_option or option[-1]
    first_use = {i: used[0] for i, used in uses.items()}
    on_device = [p in ("device", "paged") for p in place]
    initial: dict[Any, int] = {("weight", i): weight_at[0][i] for i in range(len(sizes)) if intervals[i]}
    here = {i for _, i in initial}
    initial |= {("state", i): state_at[i] for i in range(len(sizes)) if place[i] == "device" and states[i]}
    plan = _Ops()

    def bring(step: int, block: int) -> None:
        missing = [i for i in blocks[block] if i not in here]
        if missing:
            here.update(missing)
            offsets = tuple(weight_at[step >= count or block == last // 2][i] for i in missing)
            plan.add("prefetch", step, block, "h2d", payload="weight", tensors=tuple(missing), offsets=offsets)

    for step in range(last + 1):
        backward = step >= count
        block = last - step if backward else step
        following = step + 1 if step + 1 < count else last - step - 1
        ends = [i for i in blocks[block] if backward and first_use[i] == block and on_device[i]]
        paged = [i for i in ends if place[i] == "paged" and states[i]]
        bring(step, block)
        if backward and option[block] in TRAVELLING and not (lead and step > count):
            plan.add("prefetch", step, block, "h2d", payload="activation")
        if backward and lead and following >= 0 and option[following] in TRAVELLING:
            plan.add("prefetch", step, following, "h2d", payload="activation")
        if paged:
            offsets = tuple(state_at[i] for i in paged)
            plan.add("prefetch", step, block, "h2d", payload="state", tensors=tuple(paged), offsets=offsets)
        if following >= 0:
            bring(step, following)
        plan.add("backward" if backward else "forward", step, block, "compute")
        if backward:
            host = [i for i in blocks[block] if place[i] == "host" and first_use[i] == block]
            if host:
                release_after = min(step + lag, last)
                plan.add(
                    "offload", step, block, "d2h", payload="grad", tensors=tuple(host), release_after=release_after
                )
            if ends:
                plan.add("update", step, block, "compute", tensors=tuple(ends))
            if host:
                plan.add("update", step, block, "host", tensors=tuple(host))
        elif option[block] in TRAVELLING:
            plan.add("offload", step, block, "d2h", payload="activation", release_after=min(step + lag, last))
        if paged:
            plan.add("offload", step, block, "d2h", payload="state", tensors=tuple(paged), release_after=step)
        keep = set(blocks[following]) if following >= 0 else set()
        gone = [i for i in blocks[block] if not intervals[i] and i not in keep]
        dirty = [i for i in gone if i in ends]
        if dirty:
            plan.add("offload", step, block, "d2h", payload="weight", tensors=tuple(dirty), release_after=step)
        clean = [i for i in gone if i not in ends]
        if clean:
            plan.add("drop", step, block, "none", payload="weight", tensors=tuple(clean))
        here.difference_update(gone)
    drafts, gradient_bytes = _in_one_slot(plan.ops, sizes)
    grouped = group_tensors(
        drafts,
        initial,
        weight_bytes=[_up(size) for size in sizes],
        state_bytes=[_up(size) for size in states],
        first_block=[first_use[i] for i in range(len(sizes))],
    )
    return Plan(
        fingerprint=structure_fingerprint(structure),
        model="test",
        planner="test",
        batch_size=1,
        sequence_length=1,
        budget_bytes=1 << 40,
        host_budget_bytes=1 << 40,
        options=tuple(option),
        update_places=tuple(place),
        timeline=one_batch(count),
        groups=grouped.groups,
        initial=grouped.initial,
        ops=grouped.ops,
        arena_bytes=arena,
        gradient_bytes=gradient_bytes,
        chunk_tokens=chunk_tokens,
        predicted=Prediction(
            iteration_s=1.0, lower_bound_s=1.0, no_offload_s=1.0, device_peak_bytes=1, host_peak_bytes=1
        ),
    )
