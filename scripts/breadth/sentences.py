"""Models of sentence-transformers around tiny encoders, and a contrastive loss: under Lightning, or by its Trainer."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import lt_offload
from scripts.attack.compared import Ended
from tests.support.trainers import Stepping

Make = Callable[[nn.Module], torch.optim.Optimizer]
ENCODERS = ("bert", "distilbert", "modernbert", "mpnet", "qwen3", "xlm-roberta")
TRAINER = "SentenceTransformerTrainer"
"""Kinds end with it that its own Trainer trains."""
ROWS, STEPS = 4, 3
_WIDTH, _WORDS = 32, 128
_SPECIAL = {"pad_token": 0, "unk_token": 1, "cls_token": 2, "sep_token": 3}


def kinds() -> list[str]:
    """Return the encoders, and those of them that are trained in another way, too."""
    return sorted([*ENCODERS, f"bert by {TRAINER}"])


def build(config: Any) -> nn.Module:
    """Return a model around an encoder of ``config``, the same each time, in training mode."""
    import transformers
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.sentence_transformer.modules import Normalize, Pooling, Transformer

    torch.manual_seed(0)
    with tempfile.TemporaryDirectory() as folder:  # it reads encoders from folders only
        transformers.AutoModel.from_config(config).save_pretrained(folder)
        _tokenizer().save_pretrained(folder)
        modules = [Transformer(folder), Pooling(_WIDTH), Normalize()]
    # Float32 is what it was made in, whatever a configuration says.
    model: nn.Module = SentenceTransformer(modules=modules, device="cpu").float()
    return model.train()


@cache
def _tokenizer() -> Any:
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import Whitespace
    from transformers import PreTrainedTokenizerFast

    tokens = {name: f"[{name.removesuffix('_token').upper()}]" for name in _SPECIAL}
    words = {tokens[name]: number for name, number in _SPECIAL.items()}
    words |= {f"w{number}": number for number in range(len(_SPECIAL), _WORDS)}
    made = Tokenizer(WordLevel(words, unk_token=tokens["unk_token"]))
    made.pre_tokenizer = Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=made, model_max_length=32, **tokens)


def texts(name: str) -> list[str]:
    """Return the texts of a training, of 4 to 9 words; half of them are of 9, so that batches are of one size."""
    generator = torch.Generator().manual_seed(len(name))
    counts = [9 if at % 2 else 4 + at % 5 for at in range(ROWS * STEPS)]
    words = [torch.randint(len(_SPECIAL), _WORDS, (count,), generator=generator).tolist() for count in counts]
    return [" ".join(f"w{number}" for number in row) for row in words]


def batches() -> list[dict[str, dict[str, Tensor]]]:
    """Return batches of anchors and positives, as tokens."""
    rows = {name: texts(name) for name in ("anchor", "positive")}
    return [
        {
            name: dict(_tokenizer()(those[at : at + ROWS], padding=True, return_tensors="pt"))
            for name, those in rows.items()
        }
        for at in range(0, ROWS * STEPS, ROWS)
    ]


def _loss(model: Any) -> Any:
    from sentence_transformers.sentence_transformer.losses import MultipleNegativesRankingLoss

    return MultipleNegativesRankingLoss(model)


class Contrasting(Stepping):
    """Learns which positive is of which anchor: two forwards in a step."""

    def __init__(self, config: Any, make: Make) -> None:
        super().__init__(build(config), make)
        self.contrast = _loss(self.model)

    def training_step(self, batch: dict[str, Any]) -> Tensor:
        """Compare each anchor with all positives."""
        loss: Tensor = self.contrast([dict(batch["anchor"]), dict(batch["positive"])], None)
        self.losses.append(loss.detach())
        return loss


def trained(config: Any, make: Make, ours: dict[str, Any] | None) -> Ended:
    """Train by the library's own Trainer."""
    from datasets import Dataset
    from sentence_transformers import SentenceTransformerTrainer, SentenceTransformerTrainingArguments
    from transformers import PrinterCallback

    model = build(config)
    with tempfile.TemporaryDirectory() as folder:
        arguments = SentenceTransformerTrainingArguments(
            output_dir=str(Path(folder)),
            per_device_train_batch_size=ROWS,
            max_steps=STEPS,
            learning_rate=1e-2,
            logging_steps=1,
            report_to=[],
            save_strategy="no",
            disable_tqdm=True,
            seed=7,
        )
        data = Dataset.from_dict({name: texts(name) for name in ("anchor", "positive")})

        def made() -> Any:
            settings = {"model": model, "args": arguments, "train_dataset": data, "loss": _loss(model)}
            return SentenceTransformerTrainer(**settings, optimizers=(make(model), None))

        if ours is None:
            trainer = made()
        else:
            with lt_offload.hf_trainer(solver_time_limit=2.0, **ours):
                trainer = made()
        trainer.remove_callback(PrinterCallback)
        trainer.train()
    optimizer = trainer.optimizer
    while hasattr(optimizer, "optimizer"):
        optimizer = optimizer.optimizer
    losses = [record["loss"] for record in trainer.state.log_history if "loss" in record]
    return Ended.of(model, optimizer, {"losses": losses}, trainer.offmate.plan if ours is not None else None)
