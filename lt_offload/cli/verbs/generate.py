"""``lt-finetune generate``: the model continues a prompt."""

from __future__ import annotations

from typing import Any

from torch.utils.data import DataLoader

from lt_offload.cli.app import App
from lt_offload.cli.early import check_early
from lt_offload.errors import ConfigError


def generate(app: App, *, prompt: str | None = None, max_new_tokens: int = 64, ckpt_path: str | None = None) -> int:
    """Let the model continue a prompt, streaming the weights.

    Args:
        app: the settings.
        prompt: text, or an instruction if the recipe trains on instructions; default: the recipe's sample_prompt.
        max_new_tokens: where to stop if the model does not.
        ckpt_path: checkpoint to use; the pretrained model if not given.
    """
    text = prompt if prompt is not None else app.datamodule.sample_prompt
    if text is None:
        raise ConfigError("generate needs --prompt: the recipe has no data.sample_prompt")
    if not text.strip():
        raise ConfigError(f"the prompt is empty: {text!r}; give some text with --prompt")
    if max_new_tokens < 1:
        raise ConfigError(f"max_new_tokens={max_new_tokens} is too small; it must be at least 1")
    check_early(app, ckpt_path)
    request: Any = [app.datamodule.prompt(text, max_new_tokens=max_new_tokens)]
    loader: DataLoader[Any] = DataLoader(request, batch_size=None)
    results: Any = app.trainer.predict(app.model, loader, ckpt_path=ckpt_path, weights_only=True)
    print(app.datamodule.tokenizer.decode(results[0], skip_special_tokens=True))
    return 0
