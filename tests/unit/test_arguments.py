"""Bad arguments of public functions: one error with the argument, its value and what works, before anything is done."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import nn

import lt_offload
from lt_offload.arguments import checked, shown
from lt_offload.errors import ConfigError
from lt_offload.plan import Settings
from lt_offload.profiling import measure
from tests.support import models
from tests.support.samples import make_plan, make_profile

PROFILE = make_profile()
PLAN = make_plan(PROFILE)
DOORS: dict[str, Callable[..., Any]] = {
    "OffmateStrategy": lt_offload.OffmateStrategy,
    "hf_trainer": lt_offload.hf_trainer,
    "accelerated": lt_offload.accelerated,
    "solve": lambda **settings: lt_offload.solve(PROFILE, **settings),
    "offloaded": lambda **settings: lt_offload.offloaded(*fresh(), **settings).__enter__(),
    "Settings": Settings,
}
NUMBER = "must be a number"
PLANNING: list[tuple[str, Any, str]] = [
    ("memory", "ten", "is not a size; write"),
    ("memory", [1], "is not a size; write"),
    ("memory", -1, "is not a size that anything fits into"),
    ("host_memory", True, "is not a size; write"),
    ("planner", None, "does not exist; choose one of auto, offmate"),
    ("host_update", "no", "must be True or False"),
    ("host_update", None, "must be True or False"),
    ("activation_offload", 1, "must be True or False"),
    ("recompute", "false", "must be True or False"),
    ("chunked_loss", 0, "must be True or False"),
    ("gradient_reserve", "0.5", f"{NUMBER} or None"),
    ("gradient_reserve", True, f"{NUMBER} or None"),
    ("gradient_reserve", float("nan"), "is not a part of the gradients; choose a number from 0 to 1"),
    ("solver_time_limit", "30", NUMBER),
    ("solver_time_limit", None, NUMBER),
    ("solver_time_limit", float("nan"), "must be a positive number of seconds"),
]
OWN: list[tuple[str, str, Any, str]] = [
    ("OffmateStrategy", "batch_size", True, "must be at least 1, 'auto', or None"),
    ("OffmateStrategy", "async_checkpoint", "no", "must be True or False"),
    *(
        (door, name, value, message)
        for door in ("OffmateStrategy", "hf_trainer", "accelerated")
        for name, value, message in (
            ("memory", "12", 'is not a size but 12 bytes; did you mean "12GB"'),
            ("micro_batches", None, "must be at least 1, or 'auto'"),
            ("tile_tokens", True, "must be at least 1, for example 4096, or None"),
            ("blocks", 3, "must be a name or None"),
            ("plan", 3, "must be a path or None"),
            ("plan", PLAN, "must be a path or None"),
            ("report_dir", [], "must be a path or None"),
        )
    ),
    *((door, "accumulate", True, "must be at least 1") for door in ("solve", "offloaded", "Settings")),
    *((door, "delayed", "yes", "must be True or False") for door in ("solve", "offloaded", "Settings")),
    ("offloaded", "plan", "plan.json", "must be a Plan or None"),
    ("offloaded", "accelerator", None, "must be a name"),
    ("offloaded", "run", 3, "must be a function or None"),
]
GIVEN = [*((door, *row) for door in DOORS for row in PLANNING), *OWN]


def fresh() -> tuple[nn.Module, torch.optim.Optimizer, Any]:
    model = models.build()
    return model, torch.optim.AdamW(model.parameters(), fused=True), models.batch(model)


@pytest.fixture(autouse=True)
def nothing_slow(monkeypatch: pytest.MonkeyPatch) -> None:
    def slow(*_: object, **__: object) -> None:
        raise AssertionError("too late: something slow has begun")

    monkeypatch.setattr(measure, "measure_machine", slow)
    monkeypatch.setattr("lt_offload.profiling.from_config._build", slow)


@pytest.mark.parametrize(("door", "name", "value", "message"), GIVEN)
def test_a_value_of_another_type_or_range_is_named(door: str, name: str, value: Any, message: str) -> None:
    with pytest.raises(ConfigError) as raised:
        DOORS[door](**{name: value})
    assert str(raised.value).startswith(f"{name}=")
    assert shown(value) in str(raised.value)
    assert message in str(raised.value)


@pytest.mark.parametrize("door", ["OffmateStrategy", "hf_trainer", "accelerated", "solve"])
def test_a_misspelt_name_is_told_the_nearest_one(door: str) -> None:
    with pytest.raises(TypeError, match=rf"^{door} has no option 'memroy'; did you mean memory\?"):
        DOORS[door](memroy="10GB")


@pytest.mark.parametrize(
    ("offload", "error", "message"),
    [
        ("10GB", ConfigError, "offload='10GB' must be a mapping or None"),
        ({"memroy": "10GB"}, TypeError, r"hf_trainer has no option 'memroy'; did you mean memory\?"),
        ({"memory": "12"}, ConfigError, "memory='12' is not a size but 12 bytes"),
    ],
)
def test_the_mixin_checks_what_it_is_given(offload: Any, error: type[Exception], message: str) -> None:
    class Mine(lt_offload.OffloadedTrainerMixin, transformers.Trainer):  # type: ignore[misc]
        pass

    with pytest.raises(error, match=message):
        Mine(offload=offload)


@pytest.mark.parametrize(
    ("position", "value", "message"),
    [
        (0, None, "model=None must be a Module"),
        (1, "adamw", "optimizer='adamw' must be an Optimizer"),
        (1, torch.optim.AdamW, r"optimizer=<class 'torch.optim.adamw.AdamW'> must be an Optimizer"),
        (1, fresh()[0], "optimizer=<LlamaForCausalLM> must be an Optimizer"),
        (2, None, "sample_batch=None holds no tensor; give a batch as the model takes it"),
        (2, {}, "sample_batch={} holds no tensor"),
        (2, {"x": 1}, "sample_batch={'x': 1} holds no tensor"),
    ],
)
def test_an_own_loop_is_told_what_it_mixes_up(position: int, value: Any, message: str) -> None:
    arguments: list[Any] = [*fresh()]
    arguments[position] = value
    with pytest.raises(ConfigError, match=message), lt_offload.offloaded(*arguments, accelerator="cpu"):
        pass


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("model", 3, "model=3 must be a Module"),
        ("optimizer", None, "optimizer=None must be an Optimizer, a function or a name"),
        ("optimizer", "adamx", "optimizer='adamx' is not known by name; known are adamw, adamw8bit, adam, sgd"),
        ("optimizer", nn.Linear, "makes no torch.optim.Optimizer of a list of parameters .*missing 1 required"),
        ("optimizer", lambda _: None, "makes no torch.optim.Optimizer of a list of parameters; give torch.optim.AdamW"),
        ("device", "gpu", "device='gpu' is not known; 'auto', 'cuda', 'cuda:1' and 'cpu' are"),
        ("device", "cuda", "device='cuda': torch finds no GPU here; device='cpu' carries"),
        ("device", "meta", "device='meta' is not known"),
        ("hardware", "rtx-3060", "hardware='rtx-3060' must be a HardwareProfile or None"),
        ("run", 3, "run=3 must be a function or None"),
        ("structure", 3, "structure=3 must be a Structure or None"),
        ("micro_batches", "auto", "micro_batches='auto' must be at least 1"),
        ("sample_batch", 3, "sample_batch=3 holds no tensor"),
    ],
)
def test_profile_refuses_what_it_cannot_measure(name: str, value: Any, message: str) -> None:
    model, optimizer, batch = fresh()
    arguments = {"model": model, "sample_batch": batch, "optimizer": optimizer} | {name: value}
    with pytest.raises(ConfigError, match=message):
        lt_offload.profile(**arguments)


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("config", None, "config=None must be a configuration of transformers, a name or a path"),
        ("batch_size", "4", "batch_size='4' must be a whole number of at least 1"),
        ("batch_size", 0, "batch_size=0 must be a whole number of at least 1"),
        ("sequence_length", 2.5, "sequence_length=2.5 must be a whole number of at least 1"),
        ("dtype", None, "dtype=None must be a name or a dtype"),
        ("dtype", torch.int8, "dtype='int8': rtx-3060-12gb has figures for float32, bfloat16, float16 only"),
        ("autocast", "bf16", "autocast='bf16': rtx-3060-12gb has figures for"),
        ("hardware", None, "hardware=None must be a path or a HardwareProfile"),
        ("optimizer", 3, "optimizer=3 must be an Optimizer, a function or a name"),
        ("lora", True, "lora=True must be a mapping or None"),
        ("padding", "no", "padding='no' must be True or False"),
        ("micro_batches", None, "micro_batches=None must be at least 1"),
        ("prepare", 3, "prepare=3 must be a function or None"),
        ("host_memory", "lots", "host_memory='lots' is not a size"),
    ],
)
def test_profile_config_refuses_what_it_cannot_estimate(name: str, value: Any, message: str) -> None:
    arguments: dict[str, Any] = {"config": "phi2", "batch_size": 1, "sequence_length": 8, "hardware": "rtx-3060"}
    with pytest.raises(ConfigError, match=message):
        lt_offload.profile_config(**arguments | {name: value})


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: lt_offload.solve(PLAN), "profile=.* must be a Profile"),  # type: ignore[arg-type]
        (lambda: lt_offload.simulate(PROFILE, PLAN), "plan=.* must be a Plan"),  # type: ignore[arg-type]
        (lambda: lt_offload.Plan.load(None), "path=None must be a path"),  # type: ignore[arg-type]
        (lambda: PLAN.save(3), "path=3 must be a path"),  # type: ignore[arg-type]
        (lambda: PLAN.save("."), r"path='\.' is a folder; add the name of a file"),
        (lambda: lt_offload.tile_tokens(None, 4), "model=None must be a Module"),  # type: ignore[arg-type]
        (
            lambda: lt_offload.store_weights(nn.Linear(1, 1), "int8", dtype="int8"),
            "dtype='int8' is no dtype of",
        ),
        (
            lambda: lt_offload.store_weights(nn.Linear(1, 1), "int8", dtype="bf16"),
            "dtype='bf16' is no dtype of",
        ),
        (lambda: lt_offload.AdamW([torch.ones(1)], state_dtype=torch.int8), "state_dtype='int8' is not offered"),
    ],
)
def test_plans_weights_and_states_too(call: Callable[[], object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        call()


def test_a_dtype_is_taken_as_pytorch_has_it_and_by_its_name() -> None:
    for dtype in (torch.bfloat16, "bfloat16"):
        weight = nn.Parameter(torch.ones(2))
        assert lt_offload.AdamW([weight], state_dtype=dtype).param_groups[0]["state_dtype"] == "bfloat16"
        layer = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
        assert lt_offload.store_weights(layer, "int8", dtype=dtype)
        lt_offload.open_weights(layer)
        assert {parameter.dtype for name, parameter in layer.named_parameters() if "weight" in name} == {torch.bfloat16}


def test_types_are_those_of_the_signature_and_unknown_names_stand_for_any() -> None:
    @checked
    def function(path: str | Path, *others: int, flag: bool = False, count: int | None = None, any: Absent = 1) -> str:  # type: ignore[name-defined]  # noqa: A002, F821
        return f"{path} {others} {flag} {count} {any}"

    assert function("a", 1, flag=True, any=[]) == "a (1,) True None []"
    with pytest.raises(TypeError, match="missing a required argument: 'path'"):
        function()  # type: ignore[call-arg]
    with pytest.raises(ConfigError, match="flag=1 must be True or False"):
        function("a", flag=1)  # type: ignore[arg-type]
    assert shown("a\nb" * 80) == "<str>"
