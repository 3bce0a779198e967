"""The data module: rows, tokens, sequences, loaders. Uses public Lightning API only and works with any strategy."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal

import torch
from lightning.pytorch import LightningDataModule
from lightning.pytorch.utilities import rank_zero_info
from lightning.pytorch.utilities.types import EVAL_DATALOADERS, TRAIN_DATALOADERS
from torch import Tensor
from torch.utils.data import DataLoader, Subset

from lt_offload.errors import ConfigError
from lt_offload.finetune import load
from lt_offload.finetune.data import sources
from lt_offload.finetune.data.chat.templates import ChatTemplate, find_template
from lt_offload.finetune.data.columns import FormatChoice, check_columns
from lt_offload.finetune.data.examples import Examples, Preparation, Stream
from lt_offload.finetune.data.formats import Encoder, Example, TrainOn
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
        path: file, folder of files of one kind or glob (json, jsonl, csv, tsv, txt, md, each possibly with ``.gz``,
            parquet, arrow), name of a data set on the hub, ``pydoc_topics``, which is Python's language reference and
            which every Python has, or a list of these. A text file (txt, md) is one row.
        format: ``text`` (a column text, all of it learned), ``alpaca`` (instruction, input, output), ``chat`` (messages
            of OpenAI or conversations of ShareGPT, tools, system), ``completion`` (prompt, completion); ``auto``: what
            the columns are.
        columns: names of columns by what they hold, where they have other names: ``{text: content}``, ``{messages:
            dialogue}``, ``{prompt: question, completion: answer}``; ``role`` and ``content`` name the keys of messages.
        template: chat template: null for the tokenizer's own, name of a shipped one (chatml, alpaca, llama2, llama3,
            mistral, zephyr, phi3, gemma) or a file with Jinja. Instructions are written in Stanford Alpaca's words
            where there is none.
        system: system message of conversations that have none; null: they stay without.
        train_on: what is learned of a conversation: ``responses`` (all answers, with the token that ends them),
            ``last`` (the last answer) or ``all``. Text is learned as a whole.
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
        skip_bad_rows: leave out rows that cannot be used (a text is missing, null or a number, a conversation is
            malformed, the chat template refuses it) and say how many; if false, they are an error.
        streaming: read the rows while training, instead of all of them before; for files larger than RAM.
        num_proc: processes that tokenise; null: this one, whose tokenizer has threads.
        cache_dir: folder that keeps tokenised data for the next start; null: lt_offload/data in the user's cache.
    """

    def __init__(
        self,
        model: str,
        *,
        path: str | list[str],
        format: FormatChoice = "auto",
        columns: dict[str, str] | None = None,
        template: str | None = None,
        system: str | None = None,
        train_on: TrainOn = "responses",
        subset: str | None = None,
        split: str = "train",
        validation_path: str | list[str] | None = None,
        validation_share: float = 0.05,
        tokenizer: str | None = None,
        max_length: int = 512,
        pack: bool = True,
        batch_size: int = 1,
        seed: int = 0,
        sample_prompt: str | None = None,
        skip_bad_rows: bool = False,
        streaming: bool = False,
        num_proc: int | None = None,
        cache_dir: str | None = None,
    ) -> None:
        super().__init__()
        for setting, value, low in (("max_length", max_length, 2), ("batch_size", batch_size, 1)):
            if value < low:
                raise ConfigError(f"data.{setting}={value} is too small; it must be at least {low}")
        if num_proc is not None and num_proc < 1:
            raise ConfigError(f"data.num_proc={num_proc} is too small; it must be at least 1")
        check_columns(columns or {})
        if not -(2**63) <= seed < 2**63:
            raise ConfigError(f"data.seed={seed} is out of range; choose a number from 0 to {2**63 - 1}")
        if not 0 <= validation_share < 1:
            raise ConfigError(
                f"data.validation_share={validation_share} is not a share; choose a number from 0 to less than 1"
            )
        self.model = model
        self.path = path
        self.format: FormatChoice = format
        self.columns = dict(columns or {})
        self.template = template
        self.system = system
        self.train_on: TrainOn = train_on
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
        self.streaming = streaming
        self.num_proc = num_proc
        self.cache_dir = cache_dir
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
        training, validation = self.examples()
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
        """The tokenizer, with the chat template that is used; loaded when first asked for."""
        return self._tokenizer_and_template[0]

    @cached_property
    def encoder(self) -> Encoder:
        """Makes tokens of rows and conversations."""
        tokenizer, template = self._tokenizer_and_template
        return Encoder(
            tokenizer,
            template=template,
            train_on=self.train_on,
            system=self.system,
            explicit_template=self.template is not None,
        )

    @cached_property
    def preparation(self) -> Preparation:
        """Makes examples of files."""
        return Preparation(
            encoder=self.encoder,
            format=self.format,
            columns=self.columns,
            skip_bad_rows=self.skip_bad_rows,
            cache_dir=self.cache_dir,
            num_proc=self.num_proc,
            say=rank_zero_info,
        )

    @cached_property
    def _tokenizer_and_template(self) -> tuple[PreTrainedTokenizerBase, ChatTemplate | None]:
        tokenizer = load.load_tokenizer(self.tokenizer_name)
        template, notes = find_template(self.template, tokenizer)
        for note in notes:
            _log.warning("%s", note)
        if self.template is not None and template is not None:
            tokenizer.chat_template = template.text  # so that it is exported with the model
        return tokenizer, template

    def encode_conversation(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
    ) -> list[int]:
        """Return the tokens of a conversation, written as in training.

        Args:
            messages: with role and content, as in data of ``format: chat``; ``data.system`` is put in front if there is
                no system message.
            tools: functions that the assistant may call.
            add_generation_prompt: end where the assistant goes on.

        Raises:
            ConfigError: if there is no chat template, or it refuses the conversation.
        """
        return self.encoder.prompt(messages, tools, ask=add_generation_prompt)

    def prompt(self, text: str | Sequence[Mapping[str, Any]], *, max_new_tokens: int = 64) -> dict[str, Any]:
        """Return a batch for ``predict_step`` that asks for what follows ``text``, written as in training.

        Args:
            text: an instruction, a text to be continued if the data are texts, or the messages of a conversation.
            max_new_tokens: where to stop if the model does not.

        Raises:
            ConfigError: if there is no text.
        """
        if not text:
            raise ConfigError("the prompt is empty; give some text")
        if not isinstance(text, str):
            ids = self.encode_conversation(text)
        elif not self.asks_questions:
            ids = self.encoder.text_prompt(text)
        elif self.encoder.template is None:
            ids = self.encoder.alpaca_prompt(text)
        else:
            ids = self.encode_conversation([{"role": "user", "content": text}])
        return {
            "input_ids": torch.tensor([ids]),
            "max_new_tokens": max_new_tokens,
            "end": self.encoder.ends,
        }

    @cached_property
    def asks_questions(self) -> bool:
        """Whether the data are instructions or conversations, and no texts that are continued."""
        if self.format == "auto":
            if self.path == sources.PYDOC:
                return False
            source = sources.sources(self.path, subset=self.subset, split=self.split, setting="data.path")[0]
            layout = self.preparation.layout(source)
            return layout.format in ("alpaca", "chat") or (layout.format == "completion" and layout.of_messages)
        return self.format in ("alpaca", "chat")

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

    def examples(self) -> tuple[Examples, Examples | None]:
        """Return the tokenised rows for training, and for validation if they are others."""
        training, validation = self._sources("path"), self._sources("validation_path")
        return self.preparation.examples(training), self.preparation.examples(validation) if validation else None

    def streams(self) -> tuple[list[Stream], list[Stream]]:
        """Return tokenised rows for training and for validation, one after the other, for ``data.streaming``."""
        training, validation = self._sources("path"), self._sources("validation_path")
        return [self.preparation.stream(each) for each in training], [self.preparation.stream(e) for e in validation]

    def _sources(self, name: Literal["path", "validation_path"]) -> list[sources.Source]:
        path = getattr(self, name)
        if path == sources.PYDOC:
            if self.format not in ("auto", "text") or self.columns:
                raise ConfigError(
                    f"data.path={sources.PYDOC} is text: set data.format=text and leave data.columns unset"
                )
            return [sources.pydoc()[0]]
        if path is None:
            return [sources.pydoc()[1]] if self.path == sources.PYDOC else []
        return sources.sources(path, subset=self.subset, split=self.split, setting=f"data.{name}")

    def _sequences(self, examples: Examples | list[Example], setting: str) -> Sequences:
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

    def _cut(self, examples: Examples | list[Example]) -> list[Example]:
        """Return examples of at most ``max_length`` tokens that have something to learn; say what is lost."""
        longer = sum(len(example.ids) > self.max_length for example in examples)
        kept = [cut for example in examples if (cut := example.cut(self.max_length)).trainable]
        if longer or len(kept) < len(examples):
            _log.warning(
                "data.max_length=%d cuts %d of %d examples; %d examples have nothing to learn and are left out",
                self.max_length, longer, len(examples), len(examples) - len(kept),
            )  # fmt: skip
        return kept
