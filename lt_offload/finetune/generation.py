"""Text from a model whose weights may be streamed: token by token, greedily or drawn, as a conversation if need be."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Sequence
from os.path import commonprefix
from typing import Any

import torch
from torch import Tensor

from lt_offload.errors import ConfigError, OverBudget
from lt_offload.finetune import load
from lt_offload.finetune.unused import refuse_unused


class Sampler:
    """A choice of the next token from the logits of the last one, as the flags of these names say.

    Draws are made on the host, and so are the same on every device.
    """

    def __init__(self, *, temperature: float = 0.0, top_p: float = 1.0, seed: int = 0) -> None:
        if not 0 <= temperature < float("inf"):
            raise ConfigError(f"temperature={temperature} is not 0 or a positive number; choose 0 (greedy) to about 1")
        if not 0 < top_p <= 1:
            raise ConfigError(f"top_p={top_p} is not a share; choose a number above 0 and up to 1, such as 0.9")
        if not 0 <= seed < 2**63:
            raise ConfigError(f"seed={seed} is out of range; choose a number from 0 to {2**63 - 1}")
        if temperature == 0:
            beside = "temperature=0, with which nothing is drawn"
            refuse_unused(Sampler, "", {"top_p": top_p, "seed": seed}, beside, instead="set a temperature, such as 0.7")
        self._generator = torch.Generator().manual_seed(seed)
        self._warpers: list[Any] = []
        if temperature > 0:
            # The library's own warpers, so that the same seed draws what its generate() draws.
            from transformers.generation.logits_process import TemperatureLogitsWarper, TopPLogitsWarper

            self._warpers = [TemperatureLogitsWarper(float(temperature))]
            self._warpers += [TopPLogitsWarper(float(top_p))] if top_p < 1 else []

    def __call__(self, logits: Tensor) -> int:
        """Return a token for ``logits`` of shape (vocabulary,)."""
        if not self._warpers:
            return int(logits.argmax())
        scores = logits.float()[None].cpu()
        for warper in self._warpers:
            scores = warper(None, scores)
        return int(torch.multinomial(scores.softmax(-1)[0], 1, generator=self._generator))


def room_for_answer(config: Any, tokens: int, max_new_tokens: int) -> int:
    """Return the number of tokens that may follow a prompt of ``tokens``: the setting, or the rest of the context.

    Raises ``ConfigError`` if it leaves none.
    """
    longest = getattr(config, "max_position_embeddings", None)
    if longest is None:
        return max_new_tokens
    if tokens >= longest:
        raise ConfigError(
            f"a prompt of {tokens} tokens leaves no room for an answer in the model's context of {longest}; write less"
        )
    return min(max_new_tokens, int(longest) - tokens)


class Remembered:
    """Keys and values of the tokens that a model has seen, for prompts that begin with the same tokens."""

    def __init__(self) -> None:
        self.cache: Any = None
        self.ids: list[int] = []

    def begin(self, ids: Sequence[int]) -> int:
        """Return the number of tokens of ``ids`` that need no second pass, all but one at most; forget all others."""
        same = min(len(commonprefix([self.ids, list(ids)])), len(ids) - 1)
        if self.cache is not None and same < len(self.ids):
            try:
                self.cache.crop(same - len(self.ids))
            except (RuntimeError, AttributeError):  # a window has slid on, or states were summed up: no way back
                same = 0
        if same == 0:
            self.cache = None
        self.ids = list(ids[:same])
        return same


@torch.no_grad()
def continuation(
    model: Any,
    ids: Tensor,
    *,
    max_new_tokens: int,
    end: int | Collection[int] | None,
    choose: Callable[[Tensor], int] | None = None,
    heard: Callable[[int], bool] | None = None,
    remembered: Remembered | None = None,
    refused: Callable[[Exception], None] | None = None,
) -> list[int]:
    """Return the tokens that follow the prompt ``ids``, of shape (1, n), up to and without an ``end``.

    The whole model runs once for each token, so weights that are streamed travel once per token. ``choose`` takes the
    next token from its logits (None: the most likely one). ``heard`` is told every token at once, and stops by
    returning False. ``remembered`` are tokens that the model has seen; afterwards also ``ids`` and the answer.
    ``refused`` is told of an error for want of device memory, instead of raising it; nothing follows or is remembered
    then.
    """
    choose = choose or Sampler()
    remembered = remembered or Remembered()
    prompt: list[int] = ids[0].tolist()
    known = remembered.begin(prompt)
    unseen, cache = ids[:, known:], remembered.cache
    remembered.cache, remembered.ids = None, []  # an error on the way would leave it half written
    ends = {end} if isinstance(end, int) else set(end or ())
    parameters = inspect.signature(load.base_of(model).forward).parameters
    held_in = "cache" if "cache" in parameters else "past_key_values"  # another name since transformers 5.24
    last = {"logits_to_keep": 1} if "logits_to_keep" in parameters else {}  # spares the logits of all other tokens
    new: list[int] = []
    try:
        while len(new) < max_new_tokens:
            output = model(input_ids=unseen, use_cache=True, **{held_in: cache}, **last)
            cache = getattr(output, held_in)
            token = choose(output.logits[0, -1])
            if token in ends:
                break
            new.append(token)
            unseen = ids.new_tensor([[token]])
            if heard is not None and not heard(token):
                break
    except (OverBudget, torch.OutOfMemoryError) as error:
        if refused is None:
            raise
        refused(error)
        return []
    if cache is not None:
        remembered.cache, remembered.ids = cache, [*prompt, *new][: cache.get_seq_length()]
    return new
