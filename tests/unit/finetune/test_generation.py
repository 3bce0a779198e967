"""Text token by token is what the library generates, however little of a conversation is computed again."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from lt_offload.errors import ConfigError, OverBudget
from lt_offload.finetune.generation import Remembered, Sampler, continuation
from tests.support import models


@pytest.mark.parametrize("family", models.FAMILIES)
def test_continuation_is_greedy_and_stops_at_the_end(family: str) -> None:
    model = models.build(family).eval()
    ids = torch.tensor([[5, 6, 7]])
    new = continuation(model, ids, max_new_tokens=6, end=None)
    whole = ids
    for token in new:
        with torch.no_grad():
            assert int(model(input_ids=whole, use_cache=False).logits[0, -1].argmax()) == token
        whole = torch.cat([whole, torch.tensor([[token]])], dim=1)
    assert len(new) == 6
    first = new.index(new[3])
    assert continuation(model, ids, max_new_tokens=6, end=new[3]) == new[:first]
    assert continuation(model, ids, max_new_tokens=6, end={-1, new[3]}) == new[:first]


@pytest.mark.parametrize(("temperature", "top_p"), [(1.0, 1.0), (0.7, 1.0), (1.3, 0.8)])
def test_draws_are_those_of_the_library(temperature: float, top_p: float) -> None:
    model: Any = models.build("llama").eval()
    ids = torch.tensor([[5, 6, 7]])
    choose = Sampler(temperature=temperature, top_p=top_p, seed=3)
    ours = continuation(model, ids, max_new_tokens=12, end=None, choose=choose)
    torch.manual_seed(3)
    theirs = model.generate(
        ids, attention_mask=torch.ones_like(ids), do_sample=True, temperature=temperature, top_p=top_p, top_k=0,
        max_new_tokens=12, min_new_tokens=12, pad_token_id=0,
    )  # fmt: skip
    assert ours == theirs[0, 3:].tolist()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"temperature": -1}, "temperature=-1 is not 0 or a positive"),
        ({"temperature": float("nan")}, "temperature=nan"),
        ({"temperature": 1, "top_p": 0}, "top_p=0 is not a share"),
        ({"temperature": 1, "top_p": 1.5}, "top_p=1.5 is not a share"),
        ({"top_p": 0.9}, "top_p=0.9 changes nothing with temperature=0"),
        ({"seed": 5}, "seed=5 changes nothing with temperature=0"),
        ({"seed": -1}, "seed=-1 is out of range"),
    ],
)
def test_samplers_that_cannot_be(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as error:
        Sampler(**settings)
    assert message in str(error.value)


def test_whoever_hears_the_tokens_may_stop_them() -> None:
    model = models.build("llama").eval()
    told: list[int] = []

    def heard(token: int) -> bool:
        told.append(token)
        return len(told) < 3

    new = continuation(model, torch.tensor([[5, 6, 7]]), max_new_tokens=9, end=None, heard=heard)
    assert new == told
    assert len(new) == 3


@pytest.mark.parametrize("family", ["llama", "phi3", "mistral", "bloom"])
def test_a_second_turn_runs_only_what_is_new(family: str) -> None:
    model = models.build(family).eval()
    widths: list[int] = []
    model.register_forward_pre_hook(
        lambda _, args, kwargs: widths.append(kwargs["input_ids"].shape[1]), with_kwargs=True
    )
    remembered = Remembered()

    def turn(ids: list[int]) -> list[int]:
        widths.clear()
        prompt = torch.tensor([ids])
        new = continuation(model, prompt, max_new_tokens=4, end=None, remembered=remembered)
        ran = list(widths)
        assert new == continuation(model, prompt, max_new_tokens=4, end=None)
        widths[:] = ran
        return new

    first = turn([5, 6, 7])
    assert widths == [3, 1, 1, 1]
    second = turn([5, 6, 7, *first, 8, 9])
    assert widths[0] == 3  # the last token of the answer has not been read yet
    turn([5, 6, 7, *first, 8, 10, *second])
    assert widths[0] == 5
    turn([5, 6, 7])  # the same again: one token is left to begin with
    assert widths[0] == 1
    turn([9, 6, 7])
    assert widths[0] == 3


@pytest.mark.parametrize("refuse", [True, False])
def test_want_of_memory_leaves_nothing_half_written(refuse: bool) -> None:
    """Layers before the one that had no room have got further than those behind it."""
    model = models.build("llama").eval()
    widths: list[int] = []
    model.register_forward_pre_hook(
        lambda _, args, kwargs: widths.append(kwargs["input_ids"].shape[1]), with_kwargs=True
    )
    remembered, told = Remembered(), list[Exception]()
    first = continuation(model, torch.tensor([[5, 6, 7]]), max_new_tokens=4, end=None, remembered=remembered)

    def full(module: torch.nn.Module, args: object) -> None:
        raise OverBudget("no room")

    handle = model.model.layers[-1].mlp.register_forward_pre_hook(full)
    ids = torch.tensor([[5, 6, 7, *first, 8, 9, 10, 11]])
    options: dict[str, Any] = {"max_new_tokens": 4, "end": None, "remembered": remembered}
    if not refuse:
        with pytest.raises(OverBudget):
            continuation(model, ids, **options)
        assert remembered.cache is None
        return
    assert continuation(model, ids, **options, refused=told.append) == []
    assert [str(error) for error in told] == ["no room"]
    handle.remove()
    ids = torch.tensor([[5, 6, 7, *first, 8]])
    widths.clear()
    new = continuation(model, ids, **options)
    assert widths == [8, 1, 1, 1], "everything is read once more"
    assert new == continuation(model, ids, max_new_tokens=4, end=None)


def test_a_cache_that_cannot_go_back_is_left_behind() -> None:
    class Forward:
        def crop(self, count: int) -> None:
            raise RuntimeError("no way back")

    remembered = Remembered()
    remembered.cache, remembered.ids = Forward(), [1, 2, 3]
    assert remembered.begin([1, 2, 4]) == 0
    assert remembered.cache is None
    remembered.cache, remembered.ids = Forward(), [1, 2, 3]
    assert remembered.begin([1, 2, 3, 4]) == 3
    assert remembered.cache is not None
