"""The data module: rows, tokens, sequences, loaders. Uses public Lightning API only and works with any strategy."""

from __future__ import annotations

import logging
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch
from lightning.pytorch import LightningDataModule
from lightning.pytorch.utilities.types import EVAL_DATALOADERS, TRAIN_DATALOADERS
from torch import Tensor
from torch.utils.data import DataLoader, Subset

from lt_offload.errors import ConfigError
from lt_offload.finetune import load
from lt_offload.finetune.data import sources
from lt_offload.finetune.data.formats import Example, Format, Row, columns, encode_prompt, encoder, optional_columns
from lt_offload.finetune.data.loaders import Items, ResumableBatches, ResumableLoader
from lt_offload.finetune.data.packing import Pad, Sequences, pack, stack

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_log = logging.getLogger(__name__)

Batch = dict[str, Tensor]


class FineTuneData(LightningDataModule):
    """Text or instructions as token batches, from files or from the hub.

    The training order depends on ``seed`` and the epoch only; a resumed run takes it up in the middle of an epoch.

    Args:
        model: name of the model, whose tokenizer is used; set by the recipe's ``model.name``.
        path: file or folder (txt, md, json, jsonl, csv, parquet), name of a data set on the hub, or ``pydoc_topics``,
            Python's language reference, which every Python has.
        format: ``text`` learns every token of one column, ``alpaca`` learns the responses to instructions.
        text_column: column with the text, for ``format: text``.
        subset: configuration of a data set on the hub.
        split: split of a data set on the hub.
        validation_path: like ``path``, for validation. If not given, ``validation_share`` applies.
        validation_share: share of the sequences, taken from the end of the data, that is held out for validation; at
            least one, unless it is 0.
        tokenizer: name or folder of a tokenizer, if not the model's.
        max_length: tokens per sequence.
        pack: put examples one after the other and cut them into full sequences; if false, each is a padded sequence.
        batch_size: sequences per training step.
        seed: of the training order.
        sample_prompt: text (or instruction) that the model continues at the end of the training, to be looked at.
        skip_bad_rows: leave out rows whose text is missing, null, a number or a list, and say how many; if false, they
            are an error.
    """

    def __init__(
        self,
        model: str,
        *,
        path: str,
        format: Format = "text",
        text_column: str = "text",
        subset: str | None = None,
        split: str = "train",
        validation_path: str | None = None,
        validation_share: float = 0.05,
        tokenizer: str | None = None,
        max_length: int = 512,
        pack: bool = True,
        batch_size: int = 1,
        seed: int = 0,
        sample_prompt: str | None = None,
        skip_bad_rows: bool = False,
    ) -> None:
        super().__init__()
        for setting, value, low in (("max_length", max_length, 2), ("batch_size", batch_size, 1)):
            if value < low:
                raise ConfigError(f"data.{setting}={value} is too small; it must be at least {low}")
        if not -(2**63) <= seed < 2**63:
            raise ConfigError(f"data.seed={seed} is out of range; choose a number from 0 to {2**63 - 1}")
        if not 0 <= validation_share < 1:
            raise ConfigError(
                f"data.validation_share={validation_share} is not a share; choose a number from 0 to less than 1"
            )
        self.model = model
        self.path = path
        self.format: Format = format
        self.text_column = text_column
        self.subset = subset
        self.split = split
        self.validation_path = validation_path
        self.validation_share = validation_share
        self.max_length = max_length
        self.pack = pack
        self.batch_size = batch_size
        self.seed = seed
        self.sample_prompt = sample_prompt
        self.skip_bad_rows = skip_bad_rows
        self.tokenizer_name = tokenizer or model
        self._train: Items | None = None
        self._validation: Items | None = None
        self._order: ResumableBatches | None = None
        self._resume_at: dict[str, int] | None = None

    def setup(self, stage: str) -> None:
        """Read and tokenise everything, once.

        Raises:
            ConfigError: if there is nothing to train on.
        """
        if self._train is not None:
            return
        training, validation = self._rows()
        items = self._sequences(training, "data.path")
        if validation is not None:
            self._train, self._validation = items, self._sequences(validation, "data.validation_path")
            return
        held_out = max(round(len(items) * self.validation_share), 1 if self.validation_share else 0)
        kept = len(items) - held_out
        self._train = Subset(items, range(kept))
        self._validation = Subset(items, range(kept, len(items)))

    @cached_property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        """The tokenizer; loaded when first asked for."""
        return load.load_tokenizer(self.tokenizer_name)

    def prompt(self, text: str, *, max_new_tokens: int = 64) -> dict[str, Any]:
        """Return a batch for ``predict_step`` that asks for a continuation of ``text``, formatted as in training.

        Raises:
            ConfigError: if there is no text.
        """
        ids = encode_prompt(self.format, self.tokenizer, text)
        if not ids:
            raise ConfigError("the prompt is empty; give some text")
        return {
            "input_ids": torch.tensor([ids]),
            "max_new_tokens": max_new_tokens,
            "end": self.tokenizer.eos_token_id,
        }

    def train_dataloader(self) -> TRAIN_DATALOADERS:
        """Return the training batches in their seeded order."""
        assert self._train is not None, "setup() comes first"
        if len(self._train) < self.batch_size:
            held_out = len(self._validation or ())
            keep = f", or data.validation_share, which holds out {held_out}" if held_out and not self._train else ""
            raise ConfigError(
                f"data.path={self.path!r} gives {len(self._train)} training sequences of {self.max_length} tokens, "
                f"fewer than data.batch_size={self.batch_size}; lower data.batch_size or data.max_length{keep}"
            )
        self._order = ResumableBatches(len(self._train), self.batch_size, seed=self.seed)
        if self._resume_at is not None:
            self._order.load_state_dict(self._resume_at)
            self._resume_at = None
        return ResumableLoader(self._train, batch_sampler=self._order, collate_fn=self._collate)

    def state_dict(self) -> dict[str, Any]:
        """Return the position in the training order.

        The loader's own state is not enough: Lightning forgets to restore it if ``configure_optimizers`` has asked for
        the number of steps, as every schedule must.
        """
        return {} if self._order is None else {"order": self._order.state_dict()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue at the position in the training order."""
        self._resume_at = state_dict.get("order")

    def val_dataloader(self) -> EVAL_DATALOADERS:
        """Return the held-out batches, none if nothing is held out."""
        if not self._validation:
            return []
        return DataLoader(self._validation, batch_size=self.batch_size, collate_fn=self._collate)

    def worst_case_batch(self) -> Batch:
        """Return the largest batch that can come: what a plan must have room for. The tokens are arbitrary."""
        assert self._train is not None, "setup() comes first"
        shape = (self.batch_size, self.max_length)
        generator = torch.Generator().manual_seed(self.seed)
        ids = torch.randint(len(self.tokenizer), shape, generator=generator)
        batch = {"input_ids": ids, "labels": ids.clone()}
        if not self.pack:
            batch["attention_mask"] = torch.ones_like(ids)
            # One padded position: without any, attention takes a cheaper path that real batches do not take.
            batch["attention_mask"][-1, -1] = 0
        return batch

    @property
    def _collate(self) -> Any:
        if self.pack:
            return stack
        pad = self.tokenizer.pad_token_id
        return Pad(int(pad if pad is not None else self.tokenizer.eos_token_id or 0), self.max_length)

    def _rows(self) -> tuple[list[Row] | Any, list[Row] | Any | None]:
        if self.path == sources.PYDOC:
            if self.format != "text" or self.text_column != "text":
                raise ConfigError(f"data.path={sources.PYDOC} is text: set data.format=text and data.text_column=text")
            training, validation = sources.pydoc_topics()
        else:
            training, validation = self._load(self.path, "path"), None
        if self.validation_path is not None:
            validation = self._load(self.validation_path, "validation_path")
        return training, validation

    def _load(self, path: str, setting: str) -> Any:
        return sources.load_rows(
            path,
            subset=self.subset,
            split=self.split,
            columns=columns(self.format, self.text_column),
            optional=optional_columns(self.format),
            setting=f"data.{setting}",
            skip_bad=self.skip_bad_rows,
        )

    def _sequences(self, rows: list[Row] | Any, setting: str) -> Sequences:
        encode = encoder(self.format, self.tokenizer, self.text_column)
        examples = [encode(row) for row in rows]
        if not self.pack:
            examples = self._cut(examples)
        where = f"{setting}={self.path if setting == 'data.path' else self.validation_path}"
        tokens = sum(len(example.ids) for example in examples)
        if not any(example.trainable for example in examples):
            raise ConfigError(
                f"{where} has no trainable tokens within data.max_length={self.max_length}; "
                "raise data.max_length, or check data.format and the columns"
            )
        if self.pack:
            examples = [packed for packed in pack(examples, self.max_length) if packed.trainable]
        sequences = Sequences(examples)
        if len(sequences) == 0:
            raise ConfigError(
                f"{where} has {tokens} tokens, which do not fill one sequence of data.max_length={self.max_length}; "
                "lower data.max_length, add text, or set data.pack=false"
            )
        return sequences

    def _cut(self, examples: list[Example]) -> list[Example]:
        """Return examples of at most ``max_length`` tokens that have something to learn; say what is lost."""
        longer = sum(len(example.ids) > self.max_length for example in examples)
        kept = [cut for example in examples if (cut := example.cut(self.max_length)).trainable]
        if longer or len(kept) < len(examples):
            _log.warning(
                "data.max_length=%d cuts %d of %d examples; %d examples have nothing to learn and are left out",
                self.max_length, longer, len(examples), len(examples) - len(kept),
            )  # fmt: skip
        return kept
