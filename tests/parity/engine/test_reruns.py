"""Forwards that run again in the backward: the same numbers, the same random numbers, the memory that is planned."""

from __future__ import annotations

import functools
import random
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from lt_offload import micro_batched_reference
from lt_offload.errors import PlanError, UnsupportedError
from lt_offload.execute.blocks.run import BlockRun
from lt_offload.execute.engine import Engine
from lt_offload.execute.user_code.param_grad import ConsumedGradient
from lt_offload.model.blocks import find_blocks
from lt_offload.plan.iteration.decisions import Decisions, Interval, Recomputation, TensorDecision, uses
from lt_offload.plan.iteration.memory import backward_steps, device_bytes
from lt_offload.plan.verify.check import check
from lt_offload.profiling.hardware import load_hardware
from lt_offload.profiling.measure import profile
from lt_offload.schema.plan import Plan, Save
from lt_offload.schema.profile import OptionName, Profile
from tests import sampling
from tests.support import models, plans
from tests.support.engines import Result, carried_out, differences, make_optimizer
from tests.support.hostile.device import HostileDevice
from tests.support.profiles.by_hand import built
from tests.support.user_nets import ordinary

LAYERS = 5
ITERATIONS = 3
Reruns = Mapping[int, tuple[Recomputation, ...]]


# -- models ----------------------------------------------------------------------------------------------------------


def fresh(family: str, *, lora: bool = False) -> tuple[nn.Module, torch.optim.Optimizer]:
    if family != "gpt2":
        model = models.build(family, layers=LAYERS, dropout=0.1, lora=lora)
        return model, make_optimizer(model, "adamw-fused")
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    sizes = {"vocab_size": models.VOCAB, "n_embd": models.HIDDEN, "n_layer": LAYERS, "n_head": 4, "n_positions": 64}
    config = GPT2Config(**sizes, use_cache=False, pad_token_id=0, bos_token_id=1, eos_token_id=2)
    model = GPT2LMHeadModel(config).train()
    return model, make_optimizer(model, "adamw-fused")


@functools.cache
def plainly(family: str, *, lora: bool = False, parts: int = 1) -> Result:
    """The states of the random generator after each iteration are among the losses."""
    model, optimizer = fresh(family, lora=lora)
    result = Result([], model, optimizer)
    torch.manual_seed(1)
    with micro_batched_reference(model, parts) if parts > 1 else nullcontext():
        for seed in range(ITERATIONS):
            result.losses += ordinary(model, optimizer, [models.batch(model, seed=seed)])
            result.losses.append(torch.get_rng_state())
    return result


@contextmanager
def session(
    plan: Plan, family: str, *, lora: bool = False, mode: Any = "lazy", seed: int = 0
) -> Iterator[tuple[Engine, nn.Module, torch.optim.Optimizer]]:
    """Within the plan's budget, every allocation counted and every access checked."""
    model, optimizer = fresh(family, lora=lora)
    device = HostileDevice(plan.budget_bytes, mode, seed=seed, check=True)
    with carried_out(model, optimizer, plan, device) as engine:
        torch.manual_seed(1)
        yield engine, model, optimizer


def iterate(engine: Engine, model: nn.Module, optimizer: torch.optim.Optimizer, seed: int) -> torch.Tensor:
    with engine.iteration():
        out = model(**models.batch(model, seed=seed))  # holds the logits as well, as the profile supposes
        out.loss.backward()
        optimizer.step()
    loss: torch.Tensor = out.loss
    return loss.detach().clone()


def by_plan(
    plan: Plan, family: str, *, lora: bool = False, mode: str = "lazy", seed: int = 0
) -> tuple[Result, list[int]]:
    """Return what has become of the model, and the peak in each step of the last iteration."""
    with session(plan, family, lora=lora, mode=mode, seed=seed) as (engine, model, optimizer):
        result = Result([], model, optimizer)
        for at in range(ITERATIONS):
            result.losses += [iterate(engine, model, optimizer, at), torch.get_rng_state()]
        return result, [peak for _, peak in engine.trace().memory]


@functools.cache
def profiled(family: str, *, lora: bool = False) -> Profile:
    model, optimizer = fresh(family, lora=lora)
    hardware = replace(load_hardware("h200"), context_bytes=0)
    return profile(model, models.batch(model), optimizer=optimizer, device="cpu", hardware=hardware)


# -- plans -----------------------------------------------------------------------------------------------------------


def planned(
    found: Profile,
    options: list[OptionName],
    recomputations: Reruns,
    *,
    place: str = "device",
    streamed: bool = False,
    lead: int = 0,
) -> Plan:
    """Return a plan that ``check`` accepts and whose budget is the peak that it predicts."""
    tensors = tuple(
        _tensor(found, index, place if tensor.trainable else "none", streamed, recomputations)
        for index, tensor in enumerate(found.tensors)
    )
    decisions = Decisions(tensors=tensors, options=tuple(options), recomputations=recomputations)
    plan = built(decisions, found, **_times(found, decisions, lead))
    plan = replace(plan, budget_bytes=int(device_bytes(plan, found).max()))
    assert check(plan, found) == []
    return plan


def _times(found: Profile, decisions: Decisions, lead: int) -> dict[str, Any]:
    """Activations leave until the end of the next step, and come back ``lead`` steps early."""
    times = {}
    for index in range(len(found.blocks)):
        needed = decisions.activations_needed(index, found)
        release_after = min(index + 1, needed - 1)
        times[index] = (release_after, max(needed - lead, release_after + 1))
    return {"activations": times}


def _tensor(found: Profile, index: int, place: Any, streamed: bool, recomputations: Reruns) -> TensorDecision:
    """On the device in every step that uses it and, if ``streamed``, in no other."""
    tensor = found.tensors[index]
    stays = (
        tuple(Interval(start=step, end=step) for step in uses(tensor.blocks, found, recomputations)) if streamed else ()
    )
    last = backward_steps(tensor.blocks, found)
    if place == "host":
        if not streamed:  # the host's update makes the device copy stale: away after it, back for the next forward
            stays = (Interval(start=min(tensor.blocks), end=last[-1]),)
        return TensorDecision(place=place, stays=stays)
    return TensorDecision(place=place, stays=stays, write_back=last[-1] if stays and place == "device" else None)


def layers(found: Profile) -> range:
    """The blocks that are decoder layers."""
    indices = [index for index, block in enumerate(found.blocks) if block.kind == "layer"]
    return range(indices[0], indices[-1] + 1)


def options_of(found: Profile, **chosen: OptionName) -> list[OptionName]:
    """``keep``, but for the layers given as ``layer0="recompute"``."""
    first = layers(found)[0]
    options: list[OptionName] = ["keep"] * len(found.blocks)
    for name, option in chosen.items():
        options[first + int(name.removeprefix("layer"))] = option
    return options


def chain(*items: tuple[int, Save]) -> tuple[Recomputation, ...]:
    return tuple(Recomputation(block=block, save=save) for block, save in items)


class Schedule:
    """A random valid schedule."""

    def __init__(self, found: Profile, rng: random.Random) -> None:
        self.blocks, self.rng = found.blocks, rng
        self.options: list[OptionName] = []
        self.saved: list[Save] = []
        """Of each block, at the point that the walk has reached."""
        for index in range(len(self.blocks)):
            self._choose(index)
        self.recomputations = dict(self._walk())

    def _choose(self, index: int) -> None:
        block, before = self.blocks[index], index - 1
        offered = [option.name for option in block.options if option.name != "discard"]
        if block.chained and self._recoverable(before):
            offered += [option.name for option in block.options if option.name == "discard"]
        weights = {"recompute": 3, "reload": 2, "discard": 6}
        option = self.rng.choices(offered, [weights.get(name, 1) for name in offered])[0]
        self.options.append(option)
        saves: dict[OptionName, Save] = {"recompute": "input", "reload": "input", "discard": "nothing"}
        self.saved.append(saves.get(option, "all") if block.has_backward else "nothing")

    def _recoverable(self, index: int) -> bool:
        """Return whether the block can run again: from its input, or after those before it."""
        if self.saved[index] != "nothing" or index == 0:
            return self.saved[index] != "all"
        return self.blocks[index].chained and self._recoverable(index - 1)

    def _walk(self) -> Iterator[tuple[int, tuple[Recomputation, ...]]]:
        for last in reversed(range(len(self.blocks))):
            if not self.blocks[last].has_backward or self.saved[last] == "all":
                continue
            if self.saved[last] == "nothing" or self.rng.random() < 0.4:
                yield 2 * len(self.blocks) - 1 - last, tuple(self._chain(last))

    def _chain(self, last: int) -> Iterator[Recomputation]:
        for index in range(self._begin(last), last + 1):
            trains = self.blocks[index].has_backward
            saves: list[Save] = ["all", "input"] if index == last else ["nothing", "nothing", "input", "all"]
            save: Save = self.rng.choice(saves) if trains else "nothing"
            self.saved[index] = save
            if save != "all" and not self._recoverable(index):
                self.saved[index] = "input"
            yield Recomputation(block=index, save=self.saved[index])

    def _begin(self, last: int) -> int:
        """Return a block with an input from which the forwards can run again up to ``last``."""
        found = []
        for index in range(last, -1, -1):
            if self.saved[index] == "all":
                break
            if self.saved[index] == "input" or index == 0:
                found.append(index)
            elif not self.blocks[index].chained:
                break
        return self.rng.choice(found)


def nested(found: Profile) -> tuple[list[OptionName], Reruns]:
    """Three chains begin at layer 1; the first leaves the input of layer 2, which the second uses up."""
    first, last = layers(found)[0], 2 * len(found.blocks) - 1
    options = options_of(found, layer1="recompute", layer2="discard", layer3="discard", layer4="discard")
    one, two, three, four = (first + i for i in range(1, 5))
    return options, {
        last - four: chain((one, "input"), (two, "input"), (three, "nothing"), (four, "all")),
        last - three: chain((two, "nothing"), (three, "input")),
        last - two: chain((one, "input"), (two, "all")),
        last - one: chain((one, "all")),
    }


def from_the_first(found: Profile, option: OptionName = "recompute") -> tuple[list[OptionName], Reruns]:
    """Only the input of layer 0 is saved; before each backward everything runs again from there."""
    first, last = layers(found)[0], 2 * len(found.blocks) - 1
    options = options_of(found, layer0=option, **{f"layer{i}": "discard" for i in range(1, LAYERS)})
    recomputations: dict[int, tuple[Recomputation, ...]] = {}
    for at in range(1, LAYERS):
        between: list[tuple[int, Save]] = [(first + i, "nothing") for i in range(1, at)]
        recomputations[last - first - at] = chain((first, "input"), *between, (first + at, "all"))
    return options, recomputations


# -- tests -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("family", "place"), sampling.grid(["llama", "phi", "bloom", "gpt2"], ["device", "host"]))
def test_nested_chains(family: str, place: str) -> None:
    streamed = place == "host"
    found = profiled(family)
    options, recomputations = nested(found)
    plan = planned(found, options, recomputations, place=place, streamed=streamed)
    assert differences(plainly(family), by_plan(plan, family)[0]) == []


@pytest.mark.parametrize("option", ["recompute", "reload"])
def test_one_checkpoint_for_all_layers(option: OptionName) -> None:
    found = profiled("llama")
    plan = planned(found, *from_the_first(found, option), place="host", lead=1)
    assert sum(op.save is not None for op in plan.ops) == LAYERS * (LAYERS + 1) // 2 - 1
    result, _ = by_plan(plan, "llama", mode="random")
    assert differences(plainly("llama"), result) == []


def test_what_is_discarded_is_free() -> None:
    """In every step the memory is off by the same few bytes whether activations are kept, recomputed or discarded."""
    found = profiled("llama")
    everything: dict[str, OptionName] = {f"layer{i}": "recompute" for i in range(LAYERS)}
    kept, recomputed = (planned(found, options_of(found, **chosen), {}) for chosen in ({}, everything))
    off, peaks = [], []
    for plan in (kept, recomputed, planned(found, *nested(found)), planned(found, *from_the_first(found))):
        peaks.append(by_plan(plan, "llama")[1])
        off.append((device_bytes(plan, found) - peaks[-1]).tolist())
    assert off == [off[0]] * len(off)
    middle = len(found.blocks) - 1
    assert peaks[0][middle] - peaks[1][middle] > LAYERS * found.blocks[1].input_bytes
    assert peaks[1][middle] - peaks[3][middle] == (LAYERS - 1) * found.blocks[1].input_bytes


def scheduled(seed: int) -> tuple[dict[str, Any], Schedule]:
    rng = random.Random(seed)
    case = {"family": ["llama", "phi", "bloom", "gpt2", "llama-tied", "mistral"][seed % 6], "lora": seed % 12 in (0, 8)}
    return case, Schedule(profiled(**case), rng)


SEEDS = range(12)


@pytest.mark.parametrize("seed", sampling.some(SEEDS, 7))
def test_random_schedules(seed: int) -> None:
    case, schedule = scheduled(seed)
    print(seed, case, schedule.options, schedule.recomputations)
    found = profiled(**case)
    plan = planned(
        found,
        schedule.options,
        schedule.recomputations,
        place="host" if seed % 2 else "device",
        streamed=seed % 3 > 0,
        lead=seed % 2,
    )
    roomy = replace(plan, budget_bytes=plan.budget_bytes * 21 // 20)
    result, _ = by_plan(roomy, **case, mode="random" if seed % 2 else "lazy", seed=seed)
    assert differences(plainly(**case), result) == []


@pytest.mark.slow
def test_random_schedules_have_everything() -> None:
    schedules = [scheduled(seed)[1] for seed in SEEDS]
    recomputations = [
        recomputation for schedule in schedules for found in schedule.recomputations.values() for recomputation in found
    ]
    assert {recomputation.save for recomputation in recomputations} == {"nothing", "input", "all"}
    names = {"keep", "recompute", "offload", "mixed", "reload", "discard"}
    assert {option for schedule in schedules for option in schedule.options} == names
    repeated = [[r.block for found in s.recomputations.values() for r in found] for s in schedules]
    assert max(blocks.count(block) for blocks in repeated for block in blocks) >= 3
    assert any(0 in blocks for blocks in repeated)  # from a frozen embedding


def test_a_validation_and_a_forward_without_backward_in_between() -> None:
    found = profiled("llama")
    plan = planned(found, *nested(found))
    losses = []
    with session(plan, "llama") as (engine, model, optimizer):
        for at in range(ITERATIONS):
            before = torch.get_rng_state()
            model(**models.batch(model, seed=9))
            with torch.no_grad(), engine.inference():
                model(**models.batch(model, seed=8))
            torch.set_rng_state(before)
            losses.append(iterate(engine, model, optimizer, at))
    assert all(torch.equal(a, b) for a, b in zip(plainly("llama").losses[::2], losses, strict=True))


@pytest.mark.parametrize("at", [0, 3, 7])
def test_an_error_while_running_again_leaves_a_usable_engine(at: int, monkeypatch: pytest.MonkeyPatch) -> None:
    found = profiled("llama")
    plan = planned(found, *nested(found), place="host", streamed=True)
    recompute, calls = BlockRun.recompute, iter(range(at + 1))

    def failing(self: BlockRun, *args: Any) -> Any:
        if next(calls, None) == at:
            raise ValueError("injected")
        return recompute(self, *args)

    with session(plan, "llama") as (engine, model, optimizer):
        installed = engine.device.memory()
        monkeypatch.setattr(BlockRun, "recompute", failing)
        with pytest.raises(ValueError, match="injected"):
            iterate(engine, model, optimizer, 0)
        assert all(p.grad is None or isinstance(p.grad, ConsumedGradient) for p in model.parameters())
        assert engine.device.memory() == installed == plan.arena_bytes + sum(b.nbytes for b in model.buffers())
        assert iterate(engine, model, optimizer, 1).isfinite()


def test_a_block_that_is_called_with_something_else_cannot_be_discarded() -> None:
    """Phi drops out of the embeddings before layer 0; a profile that says otherwise is not believed."""
    found = profiled("phi")
    assert [block.chained for block in found.blocks] == [False, False, *[True] * LAYERS, True][: len(found.blocks)]
    options = options_of(found, layer0="discard")
    assert not any(option.name == "discard" for option in found.blocks[1].options)
    blocks = list(found.blocks)
    blocks[0] = replace(blocks[0], options=(*blocks[0].options, replace(blocks[0].option("keep"), name="recompute")))
    nothing = replace(blocks[1].option("recompute"), name="discard", keeps_input=False)
    blocks[1] = replace(blocks[1], chained=True, options=(*blocks[1].options, nothing))
    lying = replace(found, blocks=tuple(blocks))
    options[0] = "recompute"
    last = 2 * len(blocks) - 1
    plan = planned(lying, options, {last - 1: chain((0, "input"), (1, "all"))})
    with (
        session(plan, "phi") as (engine, model, optimizer),
        pytest.raises(PlanError, match=r"model.layers.0 \(option 'discard'\).*'recompute' or 'reload'"),
    ):
        iterate(engine, model, optimizer, 0)


class Rectified(nn.Module):
    """Needs its input in no backward, only to run again."""

    def __init__(self, *, inside: bool) -> None:
        super().__init__()
        self.linear, self.inside = nn.Linear(32, 32), inside

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x.relu_() if self.inside else x.relu())


class Overwriting(nn.Module):
    """Writes to the input of a layer, in the layer or after it."""

    def __init__(self, *, inside: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.inside = inside
        self.layers = nn.ModuleList(Rectified(inside=inside) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x * 2
        for layer in self.layers:
            out = layer(x)
            if not self.inside:
                x.zero_()
            x = out
        return x.sum()


@pytest.mark.parametrize("inside", [True, False])
@pytest.mark.parametrize("option", ["recompute", "reload", "mixed"])
def test_an_input_that_is_overwritten_is_not_used_again(option: str, inside: bool) -> None:
    model, x = Overwriting(inside=inside), torch.ones(16, 32)
    model(x).backward()  # plainly nothing is wrong with it
    model.zero_grad()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    plan = plans.streamed(find_blocks(model), optimizer, options=(option,), places=("device",))
    with (
        carried_out(model, optimizer, plan, HostileDevice(1 << 30, "lazy", check=True)) as engine,
        pytest.raises(UnsupportedError, match="was written to"),
        engine.iteration(),
    ):
        model(x).backward()
    start = Overwriting(inside=inside)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), start.parameters(), strict=True))


def test_a_plan_that_loses_an_input_is_refused() -> None:
    found = profiled("llama")
    plan = planned(found, *nested(found))
    first = next(op.id for op in plan.ops if op.save == "input")
    lost = replace(plan, ops=tuple(replace(op, save="nothing") if op.id == first else op for op in plan.ops))
    with (
        session(lost, "llama") as (engine, model, optimizer),
        pytest.raises(PlanError, match="runs block model.layers.1"),
    ):
        iterate(engine, model, optimizer, 0)
