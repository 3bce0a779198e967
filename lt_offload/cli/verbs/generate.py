"""``lt-finetune generate``: the model continues a prompt."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils.data import DataLoader

from lt_offload.cli.app import App
from lt_offload.cli.preflight import check_early
from lt_offload.errors import ConfigError, OverBudget, first_line
from lt_offload.finetune import load
from lt_offload.finetune.generation import Sampler, room_for_answer
from lt_offload.finetune.run.samples import prompts
from lt_offload.finetune.terminal import clear, status


def generate(
    app: App,
    *,
    prompt: str | None = None,
    max_new_tokens: int = 64,
    temperature: float = 0.0,
    top_p: float = 1.0,
    seed: int = 0,
    ckpt_path: str | None = None,
) -> int:
    """Let the model continue a prompt, streaming the weights.

    Args:
        app: the settings.
        prompt: text, or an instruction if the recipe trains on instructions; default: the recipe's (first)
            sample_prompt.
        max_new_tokens: where to stop if the model does not.
        temperature: 0: always the most likely token; higher: more variety.
        top_p: draw from the most likely tokens that together have this probability.
        seed: of the draws; the same one gives the same text.
        ckpt_path: checkpoint to use; if not given, the newest one of a run folder, else the pretrained model.
    """
    text = prompt if prompt is not None else next(iter(prompts(app.datamodule)), None)
    if text is None:
        raise ConfigError("generate needs --prompt: the recipe has no data.sample_prompt")
    if not text.strip():
        raise ConfigError(f"the prompt is empty: {text!r}; give some text with --prompt")
    if max_new_tokens < 1:
        raise ConfigError(f"max_new_tokens={max_new_tokens} is too small; it must be at least 1")
    sampler = Sampler(temperature=temperature, top_p=top_p, seed=seed)
    check_early(app, ckpt_path, reads_data=False)
    request: Any = [app.datamodule.prompt(text, max_new_tokens=max_new_tokens) | {"choose": sampler}]
    loader: DataLoader[Any] = DataLoader(request, batch_size=None)
    count = request[0]["input_ids"].shape[1]
    architecture = app.model.architecture if app.model.init == "random" else None
    room = room_for_answer(load.load_config(app.model.name, architecture), count, max_new_tokens)
    if room < max_new_tokens:
        raise ConfigError(
            f"a prompt of {count} tokens and an answer of max_new_tokens={max_new_tokens} are longer than the model's "
            f"context of {count + room}; lower --max_new_tokens, or write less"
        )
    status("loading the model")
    try:
        results: Any = app.trainer.predict(app.model, loader, ckpt_path=ckpt_path, weights_only=True)
    except (OverBudget, torch.OutOfMemoryError) as error:
        raise ConfigError(
            f"a prompt of {count} tokens and max_new_tokens={max_new_tokens} more need more device memory "
            f"({first_line(error)}); shorten them, or give it more with --trainer.strategy.memory"
        ) from None
    clear()
    print(app.datamodule.tokenizer.decode(results[0], skip_special_tokens=True))
    return 0
