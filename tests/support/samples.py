"""A plausible profile, plan and pair of traces, made by hand: for tests that need one and no real model."""

from __future__ import annotations

import random
from dataclasses import replace

from lt_offload.plan.assembly.groups import group_tensors
from lt_offload.plan.assembly.ops import Draft
from lt_offload.schema.plan import Alternative, Plan, Prediction, one_batch
from lt_offload.schema.profile import (
    BlockProfile,
    HardwareProfile,
    OptimizerProfile,
    OptionProfile,
    Profile,
    TensorProfile,
)
from lt_offload.schema.trace import Span, Trace

MB = 10**6
FORWARD_S = 0.014
LINK = 3.0e9


def make_profile(layers: int = 30, tensors_per_layer: int = 9) -> Profile:
    """Embedding, ``layers`` decoder layers and a head, about the size of a 135M-parameter model."""

    def options(scale: float) -> tuple[OptionProfile, ...]:
        return tuple(
            OptionProfile(
                name=name,  # type: ignore[arg-type]
                forward_s=FORWARD_S * scale,
                backward_s=FORWARD_S * scale * factor,
                saved_bytes=int(saved * scale * MB),
                keeps_input=True,
                offload_bytes=int(moved * scale * MB),
                forward_peak_bytes=2 * MB,
                backward_peak_bytes=4 * MB,
            )
            for name, factor, saved, moved in (
                ("keep", 2.0, 18, 0),
                ("recompute", 3.0, 0, 0),
                ("offload", 2.1, 0, 18),
                ("mixed", 2.4, 4, 7),
            )
        )

    count = layers + 2
    names = ["model.embed_tokens", *(f"model.layers.{i}" for i in range(layers)), "lm_head"]
    tensors = [
        TensorProfile(
            name="model.embed_tokens.weight",
            shape=(49152, 576),
            dtype="float32",
            bytes=113 * MB,
            trainable=True,
            blocks=(0, count - 1),
            state_bytes=226 * MB,
        )
    ]
    for block in range(1, count - 1):
        tensors += [
            TensorProfile(
                name=f"{names[block]}.w{k}",
                shape=(576, 690),
                dtype="float32",
                bytes=14 * MB // tensors_per_layer,
                trainable=True,
                blocks=(block,),
                state_bytes=28 * MB // tensors_per_layer,
            )
            for k in range(tensors_per_layer)
        ]
    blocks = tuple(
        BlockProfile(
            name=name,
            kind="embedding" if i == 0 else "head" if i == count - 1 else "layer",
            input_bytes=0 if i == 0 else 2 * MB,
            output_bytes=2 * MB,
            launch_s=1e-4,
            options=options(0.2 if i == 0 else 4.0 if i == count - 1 else 1.0),
        )
        for i, name in enumerate(names)
    )
    return Profile(
        model="SmolLM2-135M-Instruct",
        dtype="float32",
        batch_size=4,
        sequence_length=256,
        tensors=tuple(tensors),
        blocks=blocks,
        optimizer=OptimizerProfile(name="AdamW", host_bytes_per_s=2.2e9, device_bytes_per_s=2e10),
        hardware=HardwareProfile(
            name="emulated device",
            device_bytes=440 * MB,
            host_bytes=24_000 * MB,
            pinnable_bytes=24_000 * MB,
            h2d_bytes_per_s=LINK,
            d2h_bytes_per_s=LINK,
            source="measured",
        ),
    )


def _up(nbytes: int) -> int:
    return -(-nbytes // 512) * 512


def make_plan(profile: Profile) -> Plan:
    """Layers in thirds: resident with host update, streamed with offloaded activations, streamed with recomputation."""
    count = len(profile.blocks)
    option_names = tuple(
        "keep" if p.kind != "layer" else ("keep", "offload", "recompute")[3 * i // count]
        for i, p in enumerate(profile.blocks)
    )
    streamed = [i for i in range(1, len(profile.tensors)) if profile.tensors[i].blocks[0] > count // 3]
    ops: list[Draft] = []
    durations: list[float] = []

    def add(kind: str, step: int, block: int, lane: str, seconds: float, **rest: object) -> int:
        ops.append(Draft(id=len(ops), kind=kind, step=step, block=block, lane=lane, **rest))  # type: ignore[arg-type]
        durations.append(seconds)
        return len(ops) - 1

    def tensors_of(block: int) -> list[int]:
        return [i for i, t in enumerate(profile.tensors) if t.blocks[0] == block]

    for step in range(2 * count):
        backward = step >= count
        block = 2 * count - 1 - step if backward else step
        option = profile.blocks[block].option(option_names[block])
        for i in tensors_of(block):
            if i in streamed:
                size = profile.tensors[i].bytes
                add(
                    "prefetch",
                    step,
                    block,
                    "h2d",
                    size / LINK,
                    payload="weight",
                    tensors=(i,),
                    offsets=(512 * i,),
                    bytes=size,
                )
        if backward and option.offload_bytes:
            add(
                "prefetch",
                step,
                block,
                "h2d",
                option.offload_bytes / LINK,
                payload="activation",
                bytes=option.offload_bytes,
            )
        if backward and block == 0:
            add("prefetch", step, 0, "h2d", 0.06, payload="state", tensors=(0,), offsets=(0,), bytes=226 * MB)
        compute = add(
            "backward" if backward else "forward",
            step,
            block,
            "compute",
            option.backward_s if backward else option.forward_s,
        )
        if not backward and option.offload_bytes:
            add(
                "offload",
                step,
                block,
                "d2h",
                option.offload_bytes / LINK,
                payload="activation",
                bytes=option.offload_bytes,
                after=(compute,),
                release_after=step + 1,
            )
        if backward:
            for i in tensors_of(block) if block else []:
                size = profile.tensors[i].bytes
                down = add(
                    "offload",
                    step,
                    block,
                    "d2h",
                    size / LINK,
                    payload="grad",
                    tensors=(i,),
                    bytes=size,
                    after=(compute,),
                    release_after=step,
                    host_offset=sum(_up(t.bytes) for t in profile.tensors[:i]),
                )
                add("update", step, block, "host", size / 2.2e9, tensors=(i,), bytes=size, after=(down,))
            if block == 0:
                add("update", step, 0, "compute", 0.02, tensors=(0,), bytes=113 * MB, after=(compute,))
                add("offload", step, 0, "d2h", 0.06, payload="state", tensors=(0,), bytes=226 * MB, release_after=step)
                add("offload", step, 0, "d2h", 0.03, payload="weight", tensors=(0,), bytes=113 * MB)
    grouped = group_tensors(
        ops,
        {("weight", i): 512 * i for i in range(len(profile.tensors)) if i not in streamed},
        weight_bytes=[_up(t.bytes) for t in profile.tensors],
        state_bytes=[_up(t.state_bytes) for t in profile.tensors],
        first_block=[t.blocks[0] for t in profile.tensors],
    )
    return Plan(
        fingerprint=profile.fingerprint,
        model=profile.model,
        planner="offmate",
        batch_size=4,
        sequence_length=256,
        budget_bytes=440 * MB,
        host_budget_bytes=24_000 * MB,
        options=option_names,  # type: ignore[arg-type]
        update_places=tuple("paged" if i == 0 else "host" for i in range(len(profile.tensors))),
        gradient_bytes=sum(_up(t.bytes) for t in profile.tensors),
        timeline=one_batch(count),
        groups=grouped.groups,
        initial=grouped.initial,
        ops=tuple(replace(op, seconds=seconds) for op, seconds in zip(grouped.ops, durations, strict=True)),
        arena_bytes=300 * MB,
        predicted=Prediction(
            iteration_s=1.81,
            lower_bound_s=1.76,
            no_offload_s=1.42,
            device_peak_bytes=431 * MB,
            host_peak_bytes=2_310 * MB,
        ),
        notes=("the embedding is updated on the device: its gradient is complete only at the end",),
        alternatives=(
            Alternative(planner="stream", iteration_s=1.93, reason="slower by 6.6 %"),
            Alternative(planner="resident", iteration_s=None, reason="needs 2.61 GB, the budget is 440 MB"),
        ),
    )


def make_trace(plan: Plan, *, source: str = "simulated", noise: float = 0.0, seed: int = 0) -> Trace:
    """Run ``plan`` on four first-in first-out lanes; ``noise`` stretches durations at random."""
    rng = random.Random(seed)
    free = dict.fromkeys(("compute", "h2d", "d2h", "host"), 0.0)
    ready: dict[int, float] = {}
    computed: dict[int, float] = {}
    end: dict[int, float] = {}
    spans: list[Span] = []
    for op in plan.ops:
        start = max([free[op.lane], *(end[i] for i in op.after)])
        if op.kind in ("forward", "backward"):
            start = max(start, ready.get(op.step, 0.0))
        elif op.kind == "prefetch":
            start = max(start, computed.get(op.step - 2, 0.0))
        stop = start + op.seconds * (1 + noise * rng.random())
        free[op.lane] = end[op.id] = stop
        if op.kind == "prefetch":
            ready[op.step] = stop
        elif op.kind in ("forward", "backward"):
            computed[op.step] = stop
        label = " ".join(part for part in (op.kind, op.payload, str(op.block)) if part)
        spans.append(Span(op=op.id, lane=op.lane, label=label, start=start, end=stop))
    total = max(free.values())
    curve = sorted({span.start for span in spans})
    memory = [
        (t, int(plan.arena_bytes + 125 * MB * min(t, total - t) / (total / 2) + rng.random() * 4 * MB)) for t in curve
    ]
    return Trace(
        source=source,  # type: ignore[arg-type]
        iteration_time=total,
        device_peak=max(size for _, size in memory),
        host_peak=2_290 * MB,
        budget_bytes=plan.budget_bytes,
        spans=tuple(spans),
        memory=tuple(memory),
    )
