"""Models small enough to be planned by hand: weights of 1000 bytes, one byte per second on every link."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from lt_offload.plan.iteration.decisions import Decisions, Interval, TensorDecision
from lt_offload.schema.plan import Op, Plan
from lt_offload.schema.profile import (
    BlockProfile,
    HardwareProfile,
    OptimizerProfile,
    OptionProfile,
    Profile,
    ReadProfile,
    TensorProfile,
    ZeroCopyProfile,
)

HUGE = 10**12
READ = ReadProfile(forward_s=2.0, backward_s=3.0, forward_bytes=100, backward_bytes=200)


def small_profile(
    blocks: int = 3,
    *,
    tied: bool = False,
    states: int = 2,
    frozen: tuple[int, ...] = (),
    no_backward: int = 0,
    launch_s: float = 0.0,
    speed: float = 1.0,
) -> Profile:
    """Blocks of one 1000-byte tensor each; 10 s forward, 20 s backward; ``tied``: the last uses the first one's."""
    owners: list[tuple[int, ...]] = [(block,) for block in range(blocks)]
    if tied:
        owners[0] = (0, blocks - 1)
        del owners[-1]
    return Profile(
        model="small",
        dtype="float32",
        batch_size=2,
        sequence_length=8,
        tensors=tuple(
            TensorProfile(
                name=f"weight{index}",
                shape=(250,),
                dtype="float32",
                bytes=1000,
                trainable=index not in frozen,
                blocks=owner,
                state_bytes=0 if index in frozen else 1000 * states,
            )
            for index, owner in enumerate(owners)
        ),
        blocks=tuple(
            BlockProfile(
                name=f"block{index}",
                kind="layer",
                input_bytes=10 if index else 0,
                output_bytes=10 if index < blocks - 1 else 0,
                launch_s=launch_s,
                options=(
                    OptionProfile(
                        name="keep",
                        forward_s=10.0,
                        backward_s=20.0,
                        saved_bytes=300,
                        keeps_input=True,
                        offload_bytes=0,
                        forward_peak_bytes=5,
                        backward_peak_bytes=7,
                    ),
                    OptionProfile(
                        name="offload",
                        forward_s=10.0,
                        backward_s=20.0,
                        saved_bytes=0,
                        keeps_input=False,
                        offload_bytes=300,
                        forward_peak_bytes=305,
                        backward_peak_bytes=307,
                    ),
                    OptionProfile(
                        name="recompute",
                        forward_s=10.0,
                        backward_s=30.0,
                        saved_bytes=0,
                        keeps_input=True,
                        offload_bytes=0,
                        forward_peak_bytes=305,
                        backward_peak_bytes=307,
                    ),
                ),
                has_backward=index >= no_backward,
            )
            for index in range(blocks)
        ),
        optimizer=OptimizerProfile(name="Adam", host_bytes_per_s=100.0 * speed, device_bytes_per_s=1000.0 * speed),
        hardware=HardwareProfile(
            name="paper machine",
            device_bytes=HUGE,
            host_bytes=HUGE,
            pinnable_bytes=HUGE,
            h2d_bytes_per_s=100.0 * speed,
            d2h_bytes_per_s=200.0 * speed,
            context_bytes=50,
        ),
        shared_bytes=20,
    )


def resident(profile: Profile, option: str = "keep") -> Decisions:
    """Everything stays on the device."""
    return Decisions(
        tensors=tuple(TensorDecision(place="device" if t.trainable else "none") for t in profile.tensors),
        options=(option,) * len(profile.blocks),  # type: ignore[arg-type]
    )


def chained(profile: Profile) -> Profile:
    """``profile`` with blocks that may run again: but the first, all take what the one before returns."""

    def block(old: BlockProfile) -> BlockProfile:
        recompute = next((option for option in old.options if option.name == "recompute"), None)
        if recompute is None:
            return old
        reload = replace(recompute, name="reload", keeps_input=False, offload_bytes=old.input_bytes)
        discard = replace(recompute, name="discard", keeps_input=False, backward_s=old.option("keep").backward_s)
        return replace(old, chained=True, options=(*old.options, reload, discard))

    first, *others = profile.blocks
    return replace(profile, blocks=(first, *(block(other) for other in others)))


def with_zero_copy(profile: Profile, *reads: ReadProfile) -> Profile:
    """``profile`` with tensors that may be read in host memory: the first uses of each cost ``reads``, others READ."""

    def zero_copy(tensor: TensorProfile) -> ZeroCopyProfile:
        uses = len(tensor.blocks)
        return ZeroCopyProfile(reads=(*reads, *[READ] * uses)[:uses], grad_s=1.0)

    return replace(profile, tensors=tuple(replace(tensor, zero_copy=zero_copy(tensor)) for tensor in profile.tensors))


def changed(decisions: Decisions, tensor: int, decision: TensorDecision) -> Decisions:
    """Return ``decisions`` with another decision about one tensor."""
    tensors = list(decisions.tensors)
    tensors[tensor] = decision
    return replace(decisions, tensors=tuple(tensors))


def with_options(decisions: Decisions, *options: str) -> Decisions:
    """Return ``decisions`` with other options, one per block."""
    return replace(decisions, options=options)  # type: ignore[arg-type]


def stays(*pairs: tuple[int, int]) -> tuple[Interval, ...]:
    """Return stays from a first use to a last one each."""
    return tuple(Interval(start=start, end=end) for start, end in pairs)


def words(op: Op) -> str:
    """E.g. ``"2 prefetch weight 1"``: step, op, block."""
    return " ".join(str(part) for part in (op.step, op.kind, op.payload, op.block) if part is not None)


def named(plan: Plan, text: str) -> Op:
    """Return the op that is written like this."""
    (found,) = [op for op in plan.ops if words(op) == text]
    return found


def waits_for(plan: Plan, text: str) -> set[str]:
    """Return what an op waits for, as texts; a leading ``-`` means the iteration before."""
    op = named(plan, text)
    return {("-" if other >= op.id else "") + words(plan.ops[other]) for other in op.after}


def with_op(plan: Plan, op: Op, **fields: Any) -> Plan:
    """Return ``plan`` with other fields of one op."""
    ops = list(plan.ops)
    ops[op.id] = replace(op, **fields)
    return replace(plan, ops=tuple(ops))


def edited(plan: Plan, ops: Sequence[Op]) -> Plan:
    """Return ``plan`` with these of its ops, ids and dependencies renumbered; what is gone is not waited for."""
    position = {op.id: at for at, op in enumerate(ops)}

    def after(op: Op) -> tuple[int, ...]:
        return tuple(sorted(position[other] for other in op.after if other in position))

    return replace(plan, ops=tuple(replace(op, id=position[op.id], after=after(op)) for op in ops))


def without(plan: Plan, *gone: Op) -> Plan:
    """Return ``plan`` less some ops."""
    return edited(plan, [op for op in plan.ops if op not in gone])


def swapped(plan: Plan, first: int) -> Plan:
    """Return ``plan`` with an op and the next one in the other order."""
    ops = list(plan.ops)
    ops[first], ops[first + 1] = ops[first + 1], ops[first]
    return edited(plan, ops)


def all_on_the_host(blocks: int, seconds: float) -> tuple[Profile, Decisions]:
    """Every weight is updated on the host, ``seconds`` each; links cost nothing, backwards take 20 s."""
    profile = small_profile(blocks)
    profile = replace(
        profile,
        optimizer=replace(profile.optimizer, host_bytes_per_s=1000 / seconds),
        hardware=replace(profile.hardware, h2d_bytes_per_s=1e6, d2h_bytes_per_s=1e6),
    )
    places = (TensorDecision(place="host", stays=stays((block, 2 * blocks - 1 - block))) for block in range(blocks))
    return profile, replace(resident(profile), tensors=tuple(places))
