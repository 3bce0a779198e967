"""The check of a plan: structure, residency, order, recomputation, and budgets. It repairs nothing.

Every violation names the op and the rule that it breaks. Contradictions within a plan are known without the model, see
:func:`lt_offload.schema.plan.problems`; the rules about residency and order are in
:mod:`lt_offload.plan.verify.ordering`. Of each block that may run again either nothing, the input or everything is
saved; the input of a block that has saved nothing comes from running the block before again right before it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator

from lt_offload.plan.iteration.computations import SAVED
from lt_offload.plan.iteration.durations import computations_of, durations
from lt_offload.plan.iteration.memory import aligned, backward_steps, computation_bytes, host_bytes, state_room
from lt_offload.plan.verify.ordering import misordered
from lt_offload.schema.accesses import PAYLOADS, lanes_of
from lt_offload.schema.plan import ADDING, ALIGNMENT, Op, Pass, Plan, Save, Timeline, describe, one_batch, problems
from lt_offload.schema.profile import Profile, TensorProfile
from lt_offload.units import format_bytes, format_seconds


def check(plan: Plan, profile: Profile) -> list[str]:
    """Return the violations of ``plan`` for ``profile``, one sentence each; empty if it is sound."""
    # Each round takes for granted what the rounds before it have found to be sound, so it does not begin after a
    # violation.
    violations = list(mismatches(plan, profile)) or list(problems(plan)) or list(_groups(plan, profile))
    if violations:
        return violations
    violations = [
        *_structure(plan, profile),
        *_passes(plan),
        *_order_of_issue(plan),
        *_updates(plan, profile),
        *_activations(plan, profile),
    ]
    violations = violations or [*broken_recomputations(plan, profile)]
    if violations:
        return violations
    return [
        *_direct_bytes(plan, profile),
        *_missing_times(plan, profile),
        *misordered(plan, profile),
        *_budgets(plan, profile),
    ]


def mismatches(plan: Plan, profile: Profile) -> Iterator[str]:
    """Yield the differences between the model of ``plan`` and that of ``profile``."""
    if plan.fingerprint != profile.fingerprint:
        yield f"fingerprint: the plan is of {plan.fingerprint} ({plan.model}), the profile of {profile.fingerprint}"
    if len(plan.options) != len(profile.blocks):
        yield f"options: {len(plan.options)} are given, the model has {len(profile.blocks)} blocks"
    if len(plan.update_places) != len(profile.tensors):
        yield f"tensors: {len(plan.update_places)} update places are given, the model has {len(profile.tensors)}"
    if plan.timeline != one_batch(len(profile.blocks)):
        yield f"timeline: it is not that of one batch through {len(profile.blocks)} blocks"
    for block, option in zip(profile.blocks, plan.options, strict=False):
        if option not in [o.name for o in block.options]:
            yield f"options: block {block.name} does not offer {option!r}"


def _groups(plan: Plan, profile: Profile) -> Iterator[str]:
    """Every weight is in one group; groups have the sizes of the model's tensors, and room for gradients."""
    seen: dict[tuple[str, int, bool], int] = {}
    rows = {group for op in plan.ops if op.rows == "looked up" and op.payload == "grad" for group in op.groups}
    for number, group in enumerate(plan.groups):
        name = f"group {number}"
        payload = "rows" if number in rows else group.payload
        for t in group.tensors:
            # Gradients that begin sums are in a group beside that of later passes, which is no mistake.
            begins = group.payload == "grad" and group.host_offset is None
            if (payload, t, begins) in seen:
                first = seen[payload, t, begins]
                yield f"{name}: tensors: the {payload} of {profile.tensors[t].name} is in group {first}"
            seen[payload, t, begins] = number
        if group.sizes != tuple(_size(payload, profile.tensors[t]) for t in group.tensors):
            yield f"{name}: sizes: {group.sizes} are not those of the model's tensors"
        if group.host_offset is not None:
            end = group.host_offset + group.bytes
            if group.payload != "grad" or group.host_offset % ALIGNMENT:
                yield f"{name}: host_offset: only gradients have one, a multiple of {ALIGNMENT}"
            elif end > plan.gradient_bytes:
                yield f"{name}: host_offset: it ends at {end}, the extent is {plan.gradient_bytes}"
    for t, tensor in enumerate(profile.tensors):
        if ("weight", t, False) not in seen:
            yield f"tensor {tensor.name}: groups: its weight is in none"
        if ("sum", t, False) not in seen and tensor.trainable and plan.adds_up:
            yield f"tensor {tensor.name}: groups: the sum of its gradients is in none"


def _size(payload: str, tensor: TensorProfile) -> int:
    if payload == "rows":
        return aligned(tensor.lookup_bytes)
    return state_room(tensor.state_bytes) if payload == "state" else aligned(tensor.bytes)


def _passes(plan: Plan) -> Iterator[str]:
    """Every op belongs to the kinds of passes that have to carry it out, and to no others."""
    computing: set[Pass] = {which for which in plan.passes if which != "settling"}
    begun = {t for op in plan.ops if plan.begins_sums(op) for t in plan.tensors(op)}
    for op in plan.ops:
        # What begins a sum takes the place of the copy and the adding of later passes.
        # Rows that are looked up are sent and added up in all of them: what begins a sum is the last block's gradient.
        begins = op.rows != "looked up" and not begun.isdisjoint(plan.tensors(op))
        first: set[Pass] = {"beginning"} if begins else set()
        expected: set[Pass]
        if plan.begins_sums(op):
            expected = first
        elif op.computes or op.payload == "activation":
            expected = computing
        elif op.payload == "grad":
            expected = computing - first
        elif op.kind == "reduce":
            expected = computing.intersection(ADDING)
        elif op.uses_gradients:
            expected = {plan.passes[-1]} if op.kind == "update" else computing.intersection(ADDING) - first
        else:
            continue
        if {*op.passes} != expected:
            yield f"{describe(op)}: passes: it belongs to {' and '.join(sorted(expected))} passes, and to no others"


def _missing_times(plan: Plan, profile: Profile) -> Iterator[str]:
    """An op that works takes time. How much is the machine's affair: that of the profile may be another one by now."""
    for op, seconds in zip(plan.ops, durations(plan, profile), strict=True):
        if op.seconds == 0 and seconds > 0:
            yield f"{describe(op)}: seconds: it takes none, the machine of the profile needs {format_seconds(seconds)}"


def _structure(plan: Plan, profile: Profile) -> Iterator[str]:
    """Lanes, payloads and blocks of single ops."""
    for op in plan.ops:
        name = describe(op)
        lanes = lanes_of(op.kind, op.payload)
        if op.lane not in lanes:
            yield f"{name}: lane: it occupies {op.lane}, it should be {' or '.join(lanes)}"
        if op.writes_gradients and op.release_after is not None and op.release_after != op.step:
            yield f"{name}: release_after: a gradient that the backward writes to the host is gone in step {op.step}"
        yield from _payload(op, plan, profile)
        yield from _computed(op, plan, profile)


def _computed(op: Op, plan: Plan, profile: Profile) -> Iterator[str]:
    """Block, saving and direct access of computations and updates."""
    name = describe(op)
    block, forward = plan.timeline[op.step].block, plan.timeline[op.step].kind == "forward"
    if op.save is not None and (op.kind != "forward" or forward):
        yield f"{name}: save: only forwards that run again, in backward steps, say what they save"
    elif op.save is not None and op.block > block:
        yield f"{name}: block: the step is one of block {block}, only that and earlier ones may run again"
    elif op.save is None and op.kind in ("forward", "backward", "update", "accumulate", "reduce") and op.block != block:
        yield f"{name}: block: the step is one of block {block}"
    if op.zero_copy and not op.computes:
        yield f"{name}: zero_copy: only computations read weights in host memory"
        return
    for t in plan.tensors(op) if op.writes_gradients else plan.zero_copy(op):
        tensor = profile.tensors[t]
        if op.block not in tensor.blocks:
            yield f"{name}: zero_copy: tensor {t} is none of its block"
        elif tensor.zero_copy is None:
            yield f"{name}: zero_copy: {tensor.name} cannot be accessed in host memory"
    if op.zero_copy and op.kind == "backward" and not profile.blocks[op.block].has_backward:
        yield f"{name}: zero_copy: it computes nothing"
    if op.uses_gradients and op.bytes:
        yield f"{name}: bytes: updates copy nothing"
    if op.kind == "reduce" and op.bytes != (total := sum(profile.tensors[t].bytes for t in plan.tensors(op))):
        yield f"{name}: bytes: {op.bytes} are given, its tensors have {total}"


def _payload(op: Op, plan: Plan, profile: Profile) -> Iterator[str]:
    name = describe(op)
    moves = op.kind in PAYLOADS
    if moves != (op.payload is not None):
        yield f"{name}: payload: {'missing' if moves else 'only copies and drops have one'}"
    elif op.payload is not None and op.payload not in PAYLOADS[op.kind]:
        yield f"{name}: payload: there is no {op.kind} of it{', gradients are offloaded only' * (op.payload == 'grad')}"
    for group in op.groups if op.payload == "grad" else ():
        if op.writes_gradients and plan.groups[group].host_offset is not None:
            yield f"{name}: host_offset: gradients that the backward writes have none"
        if op.sends_gradients and plan.groups[group].host_offset is None and not plan.adds_up:
            yield f"{name}: host_offset: gradients that are copied to the host have one, unless they begin sums"
    if op.payload in ("grad", "activation") and op.kind == "offload" and op.release_after is None:
        yield f"{name}: release_after: it has to say when the device memory is given back"
    if (op.payload == "activation" or op.computes) == bool(op.groups):
        yield f"{name}: groups: {'none belong to it' if op.groups else 'missing'}"
    if moves:
        expected = _bytes(op, plan, profile)
        if op.bytes != expected:
            yield f"{name}: bytes: {op.bytes} are given, its tensors have {expected}"


def _bytes(op: Op, plan: Plan, profile: Profile) -> int:
    if op.payload == "activation":
        return profile.blocks[op.block].option(plan.options[op.block]).offload_bytes
    tensors = [profile.tensors[t] for t in plan.tensors(op)]
    if op.rows == "looked up":
        return sum(tensor.lookup_bytes for tensor in tensors)
    return sum(tensor.state_bytes if op.payload == "state" else tensor.bytes for tensor in tensors)


def _direct_bytes(plan: Plan, profile: Profile) -> Iterator[str]:
    """Computations say how much they read in host memory."""
    for number, computation in computations_of(plan, profile).items():
        op = plan.ops[number]
        nbytes, _ = computation.zero_copy(plan.zero_copy(op), profile)
        if op.bytes != nbytes:
            yield f"{describe(op)}: bytes: {op.bytes} are given, it reads {nbytes} directly"


def _order_of_issue(plan: Plan) -> Iterator[str]:
    """Steps ascend; within one, ops stand as the contract says; each has one computation that is no repetition."""
    count = [0] * len(plan.timeline)
    last = (-1, 0)
    for op in plan.ops:
        place = (op.step, _phase(op))
        if place < last:
            yield f"{describe(op)}: order: it is issued after ops of a later step or phase"
        # Not `place`: behind one op that stands too late, others that do would pass.
        last = max(last, place)
        if op.computes and op.save is None:
            count[op.step] += 1
            if op.kind != plan.timeline[op.step].kind:
                yield f"{describe(op)}: order: the step is a {plan.timeline[op.step].kind}"
        if (op.uses_gradients or op.kind == "reduce") and plan.timeline[op.step].kind == "forward":
            yield f"{describe(op)}: order: there are no updates in forward steps"
    for step, computed in enumerate(count):
        if computed != 1:
            yield f"step {step}: order: it has {computed} computations instead of one"


def _phase(op: Op) -> int:
    if op.kind == "prefetch":
        return 1
    if op.computes:
        # A forward that runs again has to leave what the backward behind it needs.
        return 3 if op.save is None else 2
    # What moves nothing and computes nothing works on gradients and their sums: updates, adding up.
    if op.payload in (None, "grad"):
        return 4
    return 5 if op.kind == "offload" else 6


def _updates(plan: Plan, profile: Profile) -> Iterator[str]:
    """Every trainable tensor is updated once, where the plan says; only the host's share sends gradients."""
    seen: dict[int, Op] = {}
    added: dict[int, Op] = {}
    sent: set[tuple[int, bool]] = set()
    yield from _in_rows(plan, profile)
    rows = {t for op in plan.ops if op.rows is not None for t in plan.tensors(op)}
    yield from _between_machines(plan, profile)
    for op in plan.ops:
        for t in plan.tensors(op) if op.kind == "accumulate" and op.rows != "others" else ():
            complete = _complete(profile.tensors[t], profile)
            if t in added or op.step != complete or (op.lane == "host") != (plan.update_places[t] == "host"):
                name = profile.tensors[t].name
                yield f"{describe(op)}: accumulate: {name} is added up once per pass, in step {complete}, where updated"
            added[t] = op
        if op.rows == "others":
            continue  # the rows that are looked up come last, and stand for the tensor
        if op.payload == "grad":
            for t in plan.tensors(op):
                if (t, plan.begins_sums(op)) in sent or plan.update_places[t] != "host":
                    yield f"{describe(op)}: gradient: {profile.tensors[t].name} sends it once, if the host updates it"
                elif op.step != (complete := _complete(profile.tensors[t], profile)):
                    yield f"{describe(op)}: gradient: that of {profile.tensors[t].name} is complete in step {complete}"
                sent.add((t, plan.begins_sums(op)))
        for t in plan.tensors(op) if op.kind == "update" else ():
            if t in seen:
                yield f"{describe(op)}: update: {profile.tensors[t].name} is updated by op {seen[t].id} already"
            seen[t] = op
            if (op.lane == "host") != (plan.update_places[t] == "host"):
                yield f"{describe(op)}: update: {profile.tensors[t].name} is to be updated at {plan.update_places[t]}"
    for t, (tensor, place) in enumerate(zip(profile.tensors, plan.update_places, strict=True)):
        if tensor.trainable != (place != "none"):
            kind = "trainable" if tensor.trainable else "frozen"
            yield f"tensor {tensor.name}: update: place {place!r} for a {kind} tensor"
        elif tensor.trainable and t not in seen:
            yield f"tensor {tensor.name}: update: no op updates it"
        elif tensor.trainable and plan.adds_up and t not in added:
            yield f"tensor {tensor.name}: accumulate: no op adds its gradients up"
        elif tensor.trainable:
            # A settling pass has the gradients of all rows at any step.
            complete = seen[t].step if plan.delayed and t in rows else _complete(tensor, profile)
            if seen[t].step != complete:
                yield f"{describe(seen[t])}: update: the gradient of {tensor.name} is complete in step {complete}"
            if place == "host" and (t, False) not in sent:
                yield f"{describe(seen[t])}: update: no op sends the gradient of {tensor.name}"


def _between_machines(plan: Plan, profile: Profile) -> Iterator[str]:
    """Sums for updates on the host go over the network once, when they are complete."""
    seen: dict[int, Op] = {}
    wanted = plan.delayed and profile.machines > 1 and profile.common_updates
    for op in plan.ops:
        for t in plan.tensors(op) if op.kind == "reduce" else ():
            tensor, complete = profile.tensors[t], _complete(profile.tensors[t], profile)
            if not wanted:
                yield f"{describe(op)}: reduce: nothing goes between machines in the training of the profile"
            elif t in seen:
                yield f"{describe(op)}: reduce: op {seen[t].id} adds {tensor.name} up between machines already"
            elif plan.update_places[t] != "host" or op.step != complete:
                yield f"{describe(op)}: reduce: {tensor.name} is complete in step {complete}, if the host updates it"
            seen[t] = op
    for t, place in enumerate(plan.update_places):
        if wanted and place == "host" and t not in seen:
            yield f"tensor {profile.tensors[t].name}: reduce: no op adds its sums up between machines"


def _in_rows(plan: Plan, profile: Profile) -> Iterator[str]:
    """A table in two parts sends and updates each once: first other rows, with the last block's gradient."""
    parts: dict[int, list[tuple[str, str | None, int]]] = defaultdict(list)
    for op in plan.ops:
        if op.rows is None:
            continue
        allowed = op.sends_gradients or (op.uses_gradients and op.lane == "host")
        if not allowed or (plan.delayed and op.kind == "update"):
            yield f"{describe(op)}: rows: only what the host gets and does has them, but for updates that wait"
        for t in plan.tensors(op):
            parts[t].append((op.kind, op.rows, op.step))
    for t, ops in parts.items():
        tensor = profile.tensors[t]
        first, last = (backward_steps(tensor.blocks, profile) + [-1, -1])[:2]
        used = [(kind, rows, step) for rows, step in (("others", first), ("looked up", last)) for kind in _SENT]
        never = "update" if plan.delayed else "accumulate" if not plan.adds_up else None
        expected = [one for one in used if one[0] != never]
        if plan.adds_up:
            expected.insert(0, expected[0])  # begins the sum
        if ops != expected or len(tensor.blocks) != 2 or not tensor.lookup_bytes:
            yield f"tensor {tensor.name}: rows: not the ops of a table in two parts, in steps {first} and {last}"
        for op in plan.ops:
            again = op.save is not None and op.block == tensor.blocks[0]
            if again or (op.computes and op.block == tensor.blocks[0] and t not in plan.zero_copy(op)):
                yield f"{describe(op)}: rows: {tensor.name} is read directly there, and not again in the backward"
        whole = (op for op in plan.ops if op.rows is None and t in plan.tensors(op) and _uses_all(op))
        if any(op.kind != "update" or not plan.delayed for op in whole):
            yield f"tensor {tensor.name}: rows: it is updated as a whole, too"


_SENT = ("offload", "accumulate", "update")


def _uses_all(op: Op) -> bool:
    return op.payload == "grad" or op.uses_gradients


def _complete(tensor: TensorProfile, profile: Profile) -> int | None:
    return max(backward_steps(tensor.blocks, profile), default=None)


def _activations(plan: Plan, profile: Profile) -> Iterator[str]:
    """Activations that are offloaded come back, once and in time."""
    positions = Timeline(plan.timeline)
    out: dict[int, Op] = {}
    back: dict[int, Op] = {}
    for op in plan.ops:
        if op.payload == "activation":
            target = out if op.kind == "offload" else back
            if op.block in target or op.kind == "drop":
                yield f"{describe(op)}: activation: offloaded and fetched once per iteration"
            target[op.block] = op
    for index, (block, option) in enumerate(zip(profile.blocks, plan.options, strict=True)):
        moves = block.has_backward and block.option(option).offload_bytes > 0
        if moves != (index in out) or moves != (index in back):
            copies = [describe(op) for op in (out.get(index), back.get(index)) if op] or ["no op"]
            needed = "both" if moves else "no"
            yield f"block {block.name}: activation: option {option!r} needs {needed} copies, has {', '.join(copies)}"
        elif moves:
            release_after, backward = out[index].release_after, positions.backward(index)
            if (
                out[index].step != positions.forward(index)
                or release_after is None
                or not out[index].step <= release_after < back[index].step <= backward
            ):
                yield (
                    f"{describe(out[index])}: activation: it leaves in steps {out[index].step} to {release_after} and "
                    f"returns in {back[index].step}; that has to be in this order between steps {index} and {backward}"
                )


def _budgets(plan: Plan, profile: Profile) -> Iterator[str]:
    memory = computation_bytes(plan, profile)
    worst = int(memory.argmax())
    if memory[worst] > plan.budget_bytes:
        op = [op for op in plan.ops if op.computes][worst]
        yield (
            f"{describe(op)}: budget: {format_bytes(int(memory[worst]))} are needed of "
            f"{format_bytes(plan.budget_bytes)} ({int(memory[worst]) - plan.budget_bytes} bytes too many)"
        )
    ram = host_bytes(plan, profile)
    if ram > plan.host_budget_bytes:
        yield f"host budget: {format_bytes(ram)} of RAM are needed of {format_bytes(plan.host_budget_bytes)}"


def broken_recomputations(plan: Plan, profile: Profile) -> Iterator[str]:
    """Yield the violations of forwards that run again, and of the backwards that need them."""
    walk = _Saved(plan, profile)
    for index, (block, option) in enumerate(zip(profile.blocks, plan.options, strict=True)):
        if block.has_backward and option == "discard" and not block.chained:
            yield f"block {block.name}: run again: option 'discard', {walk.lost(index)}"
    for op in plan.ops:
        if op.payload == "activation" and op.kind == "prefetch":
            walk.away.discard(op.block)
        elif op.save is not None:
            yield from walk.run_again(op)
        elif op.kind == "backward":
            yield from walk.backward(op)


class _Saved:
    """Saved tensors of each block, as the iteration goes on."""

    def __init__(self, plan: Plan, profile: Profile) -> None:
        self.blocks = profile.blocks
        self.saved: list[Save] = [
            SAVED[option] if block.has_backward else "nothing"
            for block, option in zip(profile.blocks, plan.options, strict=True)
        ]
        self.away = {
            index
            for index, block in enumerate(profile.blocks)
            if block.has_backward and block.option(plan.options[index]).offload_bytes
        }
        """Blocks whose saved tensors are on the host."""
        self.before: Op | None = None
        """The forward that ran again last."""

    def lost(self, index: int) -> str:
        """Return the reason for which a block has to have a saved input."""
        name = self.blocks[index].name
        return f"but the input of {name} is not what the block before returns: it has to stay saved"

    def run_again(self, op: Op) -> Iterator[str]:
        block, name = self.blocks[op.block], describe(op)
        before = self.before if self.before is not None and self.before.step == op.step else None
        if before is not None and before.block >= op.block:
            yield f"{name}: run again: block {before.block} has run again before it, and blocks ascend"
        if self.saved[op.block] == "all":
            yield f"{name}: run again: everything is saved of it already"
        elif self.saved[op.block] == "nothing" and op.block:
            if before is None or before.block != op.block - 1:
                yield f"{name}: run again: its input is not saved, nor has block {op.block - 1} run again right before"
            elif not block.chained:
                yield f"{name}: run again: its input is not saved, nor is it what the block before returns"
        if op.block in self.away:
            yield f"{name}: run again: its activations have not been fetched"
        offered = {option.name for option in block.options}
        if "keep" not in offered and (op.save == "all" or "recompute" not in offered):
            yield f"{name}: save: the block has no option 'keep', whose costs it would have"
        if not block.has_backward and (op.save == "all" or (op.save == "input" and op.block)):
            yield f"{name}: save: {op.save!r}, but the block has no backward"
        if op.save == "nothing" and op.block and block.has_backward and not block.chained:
            yield f"{name}: save: 'nothing', {self.lost(op.block)}"
        self.saved[op.block], self.before = op.save or "nothing", op

    def backward(self, op: Op) -> Iterator[str]:
        """Yield the violations of a backward; the first block always has its input."""
        if self.blocks[op.block].has_backward and self.saved[op.block] == "nothing" and op.block:
            yield f"{describe(op)}: run again: nothing is saved of the block"
