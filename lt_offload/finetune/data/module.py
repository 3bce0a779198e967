"""The data module: rows, tokens, sequences, loaders. Uses public Lightning API only and works with any strategy."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from itertools import islice
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch
from lightning.pytorch import LightningDataModule
from lightning.pytorch.utilities import rank_zero_info
from lightning.pytorch.utilities.types import EVAL_DATALOADERS, TRAIN_DATALOADERS
from torch import Tensor

from lt_offload.errors import ConfigError
from lt_offload.finetune import load
from lt_offload.finetune.data import sources
from lt_offload.finetune.data.batches import (
    TOKENS,
    Batch,
    Batches,
    Collate,
    Place,
    ResumableLoader,
    Stretches,
    batches_of,
    check_end,
    epoch_is_over,
    held_out,
    padded_width,
    shuffled,
    sizes_for,
    trained_tokens,
)
from lt_offload.finetune.data.columns import NEEDED, FormatChoice, check_columns
from lt_offload.finetune.data.examples import Examples
from lt_offload.finetune.data.formats import Encoder, TrainOn
from lt_offload.finetune.data.rows import RowFault
from lt_offload.finetune.data.sequences import Documents, Integers, Pack, Row, Sequences, named, sequences_of
from lt_offload.finetune.data.templates import find_template
from lt_offload.finetune.processes import is_first, several, share_of
from lt_offload.finetune.unused import as_written, refuse_unused

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_log = logging.getLogger(__name__)
_log.addFilter(is_first)
_LINE = 80
"""Characters of a text that are a prompt."""


@dataclass(kw_only=True, eq=False, repr=False)
class _DataSettings:
    """The settings of :class:`FineTuneData`, each declared once."""

    model: str = field(kw_only=False)
    path: str | list[str]
    format: FormatChoice = "auto"
    columns: dict[str, str] | None = None
    template: str | None = None
    system: str | None = None
    train_on: TrainOn = "responses"
    subset: str | None = None
    split: str = "train"
    validation_path: str | list[str] | None = None
    validation_share: float = 0.05
    validation_rows: int | None = None
    validation_seed: int | None = None
    tokenizer: str | None = None
    new_tokens: list[str] | None = None
    max_length: int = 512
    pack: Pack = True
    group_by_length: bool = False
    batch_size: int = 1
    seed: int = 0
    streaming: bool = False
    stream_buffer: int = 1000
    num_workers: int = 0
    sample_prompt: str | list[str] | None = None
    skip_bad_rows: bool = False
    num_proc: int | None = None
    cache_dir: str | None = None

    def __post_init__(self) -> None:
        """Hand over to the class that has the settings."""


class FineTuneData(_DataSettings, LightningDataModule):
    """Text or instructions as token batches, from files or from the hub.

    The training order depends on ``seed`` and the epoch only; a resumed run takes it up in the middle of an epoch.

    Args:
        model: name of the model, whose tokenizer is used; set by the recipe's ``model.name``.
        path: file, folder with files of one kind (in itself or one level below) or glob (json, jsonl, csv, tsv, txt,
            md, each possibly with ``.gz``, parquet, arrow), name of a data set on the hub, ``pydoc_topics``, which is
            Python's language reference and which every Python has, or a list of these other than the last. A text file
            (txt, md) is one row.
        format: ``text`` (a column text, all of it learned), ``alpaca`` (instruction, input, output), ``chat`` (messages
            of OpenAI or conversations of ShareGPT, tools, system), ``completion`` (prompt, completion), ``preference``
            (prompt, chosen, rejected: adapters learn to prefer an answer, by DPO; without a prompt, it is what both
            answers begin with); ``auto``: what the columns are.
        columns: names of columns by what they hold, where they have other names: ``{text: content}``, ``{messages:
            dialogue}``, ``{prompt: question, completion: answer}``; ``role`` and ``content`` name the keys of messages.
        template: chat template: null for the tokenizer's own, name of a shipped one (chatml, alpaca, llama2, llama3,
            mistral, zephyr, phi3, gemma) or a file with Jinja. Instructions are written in Stanford Alpaca's words
            where there is none.
        system: system message of conversations that have none; null: they stay without.
        train_on: what is learned of a conversation: ``responses`` (all answers, with the token that ends them),
            ``last`` (the last answer) or ``all``. Text is learned as a whole.
        subset: configuration of a data set on the hub.
        split: split of a data set on the hub, or of a folder with several: one that ``datasets`` has saved, or one with
            a split in the names of its files (train, validation, test; valid, val, dev, eval).
        validation_path: like ``path``, for validation. If not given, ``validation_share`` applies.
        validation_share: share of the rows of the data that is held out for validation, whole rows before anything is
            packed; at least one, unless it is 0. Data of a single text are split inside it.
        validation_rows: how many rows are held out, instead of a share; sequences, if the data are a single text.
        validation_seed: draws the held-out rows at random; null takes the last ones.
        tokenizer: name or folder of a tokenizer, if not the model's.
        new_tokens: tokens that it gets beside its own; set by the recipe's ``model.new_tokens``.
        max_length: tokens per sequence. A longer text is split, each part beginning with the last token of the one
            before; a longer example of which only responses are learned is cut, and what is lost is said.
        pack: put several examples side by side into one sequence, as many as fit, without attention between them; if
            false, each is a sequence of its own, padded to the longest of its batch. ``wrapped`` is for running text,
            as in pretraining, and for models that cannot keep examples apart: all of it one after the other, cut into
            full sequences, with attention across examples.
        group_by_length: with ``pack: false``, make batches of sequences of like lengths, which need less padding.
        batch_size: sequences per training step, or pairs.
        seed: of the training order.
        streaming: read and tokenise the data while training, for data larger than RAM. Needs ``trainer.max_steps``,
            which alone says when training ends, whatever ``trainer.max_epochs`` is: after the last row the data begin
            again. And ``validation_path`` or ``validation_rows``, which are the first ones then.
        stream_buffer: rows that are read, shuffled and packed together when streaming.
        num_workers: processes that prepare batches beside the training; they change neither order nor resuming.
        sample_prompt: text (or instruction), or a list of them, that the model continues at each validation and at the
            end of the training, to be looked at; ``auto``: the first row's question, or the first line of a text.
        skip_bad_rows: leave out rows that cannot be used (a text is missing, null or a number, a conversation is
            malformed, the chat template refuses it) and say how many; if false, they are an error.
        num_proc: processes that tokenise before training; null: this one, whose tokenizer has threads.
        cache_dir: folder that keeps tokenised data for the next start; null: lt_offload/data in the user's cache.
    """

    @property
    def pairs(self) -> bool:
        """True if rows are a chosen and a rejected answer."""
        return self.format == "preference"

    @property
    def counts_tokens(self) -> bool:
        """True if batches say how many tokens are trained in all of their update, if the module asks for it."""
        return not self.pairs

    def __post_init__(self) -> None:
        super(_DataSettings, self).__init__()
        least = {"max_length": 2, "batch_size": 1, "num_workers": 0, "stream_buffer": 1}
        least |= {"validation_rows": 0, "validation_seed": 0, "num_proc": 1}
        for setting, low in least.items():
            value = getattr(self, setting)
            if value is not None and value < low:
                raise ConfigError(f"data.{setting}={value} is too small; it must be at least {low}")
        check_columns(self.columns or {})
        if self.path == sources.PYDOC and self.validation_path is None:
            self.validation_path = sources.PYDOC  # it brings validation rows of its own
        self._refuse_contradictions()
        self._refuse_unused()
        # The attribute is the tokenizer itself, which is loaded when it is first asked for.
        self.tokenizer_name: str = vars(self).pop("tokenizer") or self.model
        self._train: Sequences | None = None
        self._validation: Sequences | None = None
        self._streamed: Examples | None = None
        self._begin: Place = (0, 0)
        self._said = False
        self._loader: ResumableLoader | None = None
        self._resume_at: dict[str, Any] | None = None

    def _refuse_contradictions(self) -> None:
        if not -(2**63) <= self.seed < 2**63:
            raise ConfigError(f"data.seed={self.seed} is out of range; choose a number from 0 to {2**63 - 1}")
        if self.group_by_length and self.pack:
            raise ConfigError(
                f"data.group_by_length=true changes nothing with data.pack={str(self.pack).lower()}, whose sequences "
                "are of one length; set one of them to false"
            )
        for name, value in {"pack": self.pack, "streaming": self.streaming}.items() if self.pairs else ():
            if value:
                raise ConfigError(
                    f"data.{name}={as_written(value)} is not offered with data.format=preference; set it to false"
                )
        if not 0 <= self.validation_share < 1:
            raise ConfigError(
                f"data.validation_share={self.validation_share} is not a share; choose a number from 0 to less than 1"
            )
        if self.streaming and self.group_by_length:
            raise ConfigError(
                "data.group_by_length=true needs the lengths of all sequences, which data.streaming=true does not "
                "know; set one of them to false, or data.pack=true, which needs no padding"
            )
        if self.streaming and self.num_workers > 1:
            raise ConfigError(
                f"data.num_workers={self.num_workers}: with data.streaming=true rows are read one after the other, by "
                "one process; set it to 1 or 0"
            )
        if self.streaming and self.validation_seed is not None:
            raise ConfigError(
                f"data.validation_seed={self.validation_seed} draws from rows that data.streaming=true has not read; "
                "the first ones are held out, so set it to null"
            )
        if self.streaming and self.validation_path is None and self.validation_rows is None:
            raise ConfigError(
                "data.streaming=true cannot hold out a share of rows that nobody has counted; set "
                "data.validation_rows to the number of rows to hold out (0: none), or give data.validation_path"
            )

    def _refuse_unused(self) -> None:
        unused, rows = partial(refuse_unused, FineTuneData, "data."), self.validation_rows
        if self.streaming:
            settings = {"num_proc": None if self.num_proc == 1 else self.num_proc, "cache_dir": self.cache_dir}
            beside = "data.streaming=true, which tokenises rows in one process while training and keeps nothing"
            unused(settings, beside, instead="set data.streaming=false")
        else:
            unused({"stream_buffer": self.stream_buffer}, "data.streaming=false", instead="set data.streaming=true")
        settings = {"validation_seed": self.validation_seed}
        if self.validation_path is not None:
            beside = f"data.validation_path={self.validation_path!r}, which holds all the validation rows"
            settings["validation_rows"] = rows or None  # 0 is true: no others are
            unused(settings, beside, instead="set data.validation_path to null")
        elif rows == 0 or (rows is None and self.validation_share == 0):
            none = "validation_share=0" if rows is None else "validation_rows=0"
            unused(settings, f"data.{none}, which holds out nothing", instead="hold out some rows")

    # -- reading ----------------------------------------------------------------------------------------------------

    def prepare_data(self) -> None:
        """Let the first of several processes of a machine write the cache for the others."""
        if several(self.trainer) and not self.streaming:
            self.setup("fit")

    def setup(self, stage: str) -> None:
        """Read and tokenise everything, once; raises ``ConfigError`` if there is nothing to train on."""
        if self._train is not None or self._streamed is not None:
            return
        self.check_paths()
        if self.streaming:
            if stage == "fit" and self.trainer is not None:
                check_end(self.trainer)
                # To Lightning one epoch is all the steps of a run, and a run that goes on from its end has had it.
                self.trainer.fit_loop.max_epochs = -1
            self._set_up_stream(trains=stage == "fit")
            return
        training, held = self.examples().documents(), self.examples("validation_path")
        validation = held.documents() if held.sources else None
        share = partial(held_out, share=self.validation_share, rows=self.validation_rows, seed=self.validation_seed)
        setting = "data.path" if validation is None else "data.validation_path"
        if validation is None and len(training) == 1:
            # A single text is split inside it, else all or nothing would be held out.
            whole = self._sequences(training, setting)
            self._train, self._validation = (whole.take(numbers) for numbers in share(len(whole)))
            return
        if validation is None:
            training, validation = (training.select(numbers) for numbers in share(len(training)))
        self._train, self._validation = self._sequences(training, "data.path"), self._sequences(validation, setting)

    def _set_up_stream(self, *, trains: bool) -> None:
        """Read the held-out rows, and note where the rest begins; nothing to train on is an error if it ``trains``."""
        training, validation = self.examples(), self.examples("validation_path")
        for source in (*training.sources, *validation.sources):
            if source.note:
                rank_zero_info(source.said)
        self._streamed = training
        if validation.sources:
            self._validation = self._sequences(Documents.from_examples(validation), "data.validation_path")
            return
        rows = self.validation_rows or 0
        # One row more than is held out, which shows whether anything is left to train on.
        read = list(islice(training.read(), rows + 1))
        if len(read) < rows or (len(read) == rows and trains):
            left = "is more than" if len(read) < rows else "leaves nothing to train on of"
            raise ConfigError(f"data.validation_rows={rows} {left} the {len(read)} rows there are; lower it")
        if first := read[:rows]:
            self._begin = first[-1][0]
            documents = Documents.from_examples(example for _, example in first)
            self._validation = self._sequences(documents, "data.path")

    def check_paths(self) -> None:
        """Raise ``ConfigError`` if a local path is empty, or no path has a use for ``subset`` or ``split``.

        Nothing is read.
        """
        places = {source.place for source in (*self._sources("path"), *self._sources("validation_path"))}
        settings = {} if "hub" in places else {"subset": self.subset}
        settings |= {} if places & {"hub", "splits"} else {"split": self.split}
        beside = f"data.path={self.path!r}, which is not on the hub"
        refuse_unused(FineTuneData, "data.", settings, beside, instead="name a data set of the hub")

    def examples(self, name: Literal["path", "validation_path"] = "path") -> Examples:
        """Return the tokenised rows of a setting; of no sources if there are none for validation."""
        return Examples(data=self, sources=self._sources(name))

    def _sources(self, name: Literal["path", "validation_path"]) -> list[sources.Source]:
        path = getattr(self, name)
        if path is None:
            return []
        if path == sources.PYDOC and (
            self.format not in ("auto", "text") or self.columns not in (None, {}, {"text": "text"})
        ):
            raise ConfigError(f"data.{name}={sources.PYDOC} is text: set data.format=text and data.columns=null")
        return sources.sources(path, subset=self.subset, split=self.split, setting=f"data.{name}")

    def _sequences(self, documents: Documents, setting: str) -> Sequences:
        """Return documents as sequences; warn of losses, with the places of documents."""
        rows = sequences_of(documents, self.max_length, self.pack)
        self._warn(rows, setting, f"{len(documents)} examples{named(documents, rows.left_out, ' (left out: {})')}")
        if len(rows) == 0 < len(documents):
            path = self.path if setting == "data.path" else self.validation_path
            raise ConfigError(
                f"{setting}={path} has no trainable tokens within data.max_length={self.max_length}; "
                "raise data.max_length, or check data.format and the columns"
            )
        return rows

    def _warn(self, rows: Sequences, setting: str, of: str) -> bool:
        if rows.losses:
            _log.warning("%s: %s; of %s", setting, "; ".join(rows.losses), of)
        return bool(rows.losses)

    # -- tokens and prompts -----------------------------------------------------------------------------------------

    @cached_property
    def tokenizer(self) -> PreTrainedTokenizerBase:  # type: ignore[override]
        """The tokenizer, with the chat template that is used; loaded when first asked for."""
        return self.encoder.tokenizer

    @cached_property
    def encoder(self) -> Encoder:
        """The converter of rows and conversations into tokens."""
        tokenizer = load.load_tokenizer(self.tokenizer_name, self.new_tokens or ())
        template, notes = find_template(self.template, tokenizer)
        for note in notes:
            _log.warning("%s", note)
        if self.template is not None and template is not None:
            tokenizer.chat_template = template.text  # so that it is exported with the model
        return Encoder(tokenizer, template=template, train_on=self.train_on, system=self.system)

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
        if self.encoder.template is None:
            raise ConfigError(
                "a conversation needs a chat template, and this tokenizer has none; choose one, for example "
                "--data.template chatml; a model trained on instructions without one knows --data.template alpaca"
            )
        return self.encoder.prompt(messages, tools, ask=add_generation_prompt)

    def prompt(self, text: str | Sequence[Mapping[str, Any]], *, max_new_tokens: int = 64) -> dict[str, Any]:
        """Return a batch for ``predict_step`` that asks for a continuation of ``text``, written as in training.

        Args:
            text: an instruction, a text to be continued if the data are texts, or the messages of a conversation.
            max_new_tokens: tokens after which to stop if the model does not.

        Raises:
            ConfigError: if there is no text.
        """
        if not text:
            raise ConfigError("the prompt is empty; give some text")
        if not isinstance(text, str):
            ids = self.encode_conversation(text)
        elif self.asks_questions:
            ids = self.encoder.prompt([{"role": "user", "content": text}], ask=True)
        else:
            ids = self.encoder.text_prompt(text)
        return {"input_ids": torch.tensor([ids]), "max_new_tokens": max_new_tokens, "end": self.encoder.ends}

    @cached_property
    def asks_questions(self) -> bool:
        """True if the data are instructions or conversations, and no texts that are continued."""
        if self.format not in ("auto", "completion", "preference"):
            return self.format in ("alpaca", "chat")
        try:
            source = self._sources("path")[0]
        except ConfigError as error:
            raise ConfigError(
                f"{error}; how a prompt is written depends on the data with data.format={self.format}: set it to "
                "text, alpaca or chat to do without them"
            ) from None
        return not self.examples().layout(source).of_texts

    @property
    def prompts(self) -> list[str]:
        """The sample prompts."""
        prompt = self._own_prompt if self.sample_prompt == "auto" else self.sample_prompt
        return [prompt] if isinstance(prompt, str) else list(prompt or ())

    @cached_property
    def _own_prompt(self) -> str | None:
        """The question of the first row, or the first line of its text; None if there is none."""
        source = self._sources("path")[0]
        layout, (_, row) = self.examples().layout(source), source.first(streaming=True)
        try:
            if layout.of_texts:
                return layout.text(row, NEEDED[layout.format][0]).strip().partition("\n")[0][:_LINE] or None
            messages = self.encoder.conversation(row, layout).messages
        except RowFault:  # of which reading the data will tell
            return None
        return next((str(message["content"]) for message in messages if message["role"] == "user"), None)

    # -- batches ----------------------------------------------------------------------------------------------------

    def train_dataloader(self) -> TRAIN_DATALOADERS:
        """Return the training batches in their seeded order."""
        self._loader = self._stream_loader() if self.streaming else self._row_loader()
        if self._resume_at is not None:
            self._loader.load_state_dict(self._resume_at)
            self._resume_at = None
        return self._loader

    def _row_loader(self) -> ResumableLoader:
        assert self._train is not None, "setup() comes first"
        share = share_of(self.trainer)
        if len(self._train) < self.batch_size * share.of:
            few = len(self._validation or ())
            setting = "data.validation_share" if self.validation_rows is None else "data.validation_rows"
            keep = f", or {setting}, which holds out {few} sequences" if few and not len(self._train) else ""
            keep += f", or have fewer than {share.of} processes, each of which takes a batch" if share.of > 1 else ""
            each = f" for each of {share.of} processes" if share.of > 1 else ""
            raise ConfigError(
                f"data.path={self.path!r} gives {len(self._train)} training sequences of up to {self.max_length} "
                f"tokens, fewer than data.batch_size={self.batch_size}{each}; lower data.batch_size or "
                f"data.max_length{keep}"
            )
        sizes = sizes_for(self.trainer)
        settings = {"tokens": int(self._train.lengths.sum())}  # other data have another number
        if self.pairs:  # whose references are of a checkpoint
            settings["the checksum of the pairs"] = self._train.documents.checksum()
        order = self._order(
            partial(_whole, self._train),
            count=len(self._train),
            grouped=self.group_by_length,
            reshuffled=not getattr(self.trainer, "overfit_batches", 0),  # which are the same in all epochs
            silent=share.of > 1 and sizes is not None,  # a mean over each batch needs a loss in it
            settings=settings,
        )
        over = partial(epoch_is_over, self.trainer)
        return ResumableLoader(order, num_workers=self.num_workers, sizes=sizes, over=over)

    def _stream_loader(self) -> ResumableLoader:
        settings = {"max_length": self.max_length, "pack": self.pack, "stream_buffer": self.stream_buffer}
        order = self._order(self._stretches, first=self._begin, settings=settings, data=f"data.path={self.path}")
        length = batches_of(self.trainer) if self.trainer is not None else sys.maxsize
        return ResumableLoader(order, num_workers=self.num_workers, sizes=sizes_for(self.trainer), length=length)

    def _stretches(self, place: Place) -> Iterator[tuple[Place, Sequences]]:
        """Yield streamed rows from ``place`` on as sequences, some at a time; warn of losses the first time."""
        assert self._streamed is not None, "setup() comes first"
        examples = self._streamed.read(place)
        while some := list(islice(examples, self.stream_buffer)):
            documents = Documents.from_examples(example for _, example in some)
            rows = sequences_of(documents, self.max_length, self.pack)
            if not self._said:
                self._said = self._warn(rows, "data.path", f"the {len(some)} first rows, as of later ones")
            yield some[-1][0], rows

    def val_dataloader(self) -> EVAL_DATALOADERS:
        """Return the held-out batches, none if nothing is held out.

        Processes that evaluate together all take as many, and no row counts twice.
        """
        if not self._validation:
            return []
        order = self._order(partial(_whole, self._validation), seed=None, count=len(self._validation), silent=True)
        return ResumableLoader(order, num_workers=self.num_workers)

    def _order(self, stretches: Stretches, **settings: Any) -> Batches:
        known: dict[str, Any] = {"collate": self._collate, "batch_size": self.batch_size, "seed": self.seed}
        return Batches(stretches=stretches, share=share_of(self.trainer), **known | settings)

    def state_dict(self) -> dict[str, Any]:
        """Return the position in the training order.

        The loader's own state is not enough: Lightning forgets to restore it if ``configure_optimizers`` has asked for
        the number of steps, as every schedule must.
        """
        state: dict[str, Any] = {} if self._loader is None else {"order": self._loader.state_dict()}
        return state if self.reference is None else state | {"reference": self.reference}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue at the position in the training order, with the references that are known of pairs."""
        self._resume_at = state_dict.get("order")
        before, now = state_dict.get("reference"), self.reference
        if before is not None and now is not None and before.shape == now.shape:
            now.copy_(before)

    @property
    def reference(self) -> Tensor | None:
        """Log-probabilities of the answers of the training pairs, ``[pairs, 2]``, NaN if not known; None: no pairs."""
        return None if self._train is None else self._train.reference

    def unknown_pairs(self) -> list[Integers]:
        """Return the numbers of the pairs without a reference that training may come to, with those beside them.

        Each item is a step of the first epoch, so that a reference has the same bits whatever else is trained.
        """
        assert self._train is not None and self._loader is not None and self.reference is not None, (
            "setup() comes first"
        )
        size, lengths = self.batch_size * share_of(self.trainer).of, self._train.lengths
        unknown, due = self.reference.isnan().any(1).numpy(), np.zeros(len(lengths), bool)
        for numbers in self._loader.batch_sampler.coming(self.trainer, lengths):
            due[numbers] = unknown[numbers]
            if due[unknown].all():
                break
        order = shuffled(lengths, self.batch_size if self.group_by_length else None, (self.seed, 0, 0))
        return [step for step in np.split(order, range(size, len(order), size)) if due[step].any()]

    def share_of_pairs(self, numbers: Integers) -> tuple[slice, Batch]:
        """Return the part of this process of the ``numbers`` of a step's pairs, and its batch."""
        assert self._train is not None, "setup() comes first"
        size, first = self.batch_size, share_of(self.trainer).first
        own = slice(first * size, (first + 1) * size)
        own = own if len(numbers[own]) else slice(size)
        return own, self._collate([self._train[int(number)] for number in numbers[own]])

    def worst_case_batch(self) -> Batch:
        """Return the largest batch that can come, for which a plan must have room. The tokens are arbitrary."""
        assert self._train is not None or self._streamed is not None, "setup() comes first"
        width = self.max_length
        if not self.pack and self._train is not None:  # rows that are not packed may all be shorter than they could be
            lengths = [int(rows.longest.max()) for rows in (self._train, self._validation) if rows]
            width = padded_width(max(lengths, default=width), width)
        generator = torch.Generator().manual_seed(self.seed)
        rows: list[Row] = []
        whole, reference = (2 * width, [torch.zeros(2)]) if self.pairs else (width, [])
        for number in range(1, self.batch_size + 1):
            # One padded position: without any, attention takes a cheaper path that real batches do not take.
            length = whole if self.pack or number < self.batch_size else whole - 1
            ids = torch.randint(len(self.tokenizer), (length,), generator=generator)
            # Two documents in each packed row: with one, there would be nothing to mask.
            rows.append((ids, ids, torch.arange(length) % ((whole + 1) // 2), *reference))
        batch = self._collate(rows)
        if sizes_for(self.trainer) is not None:
            batch[TOKENS] = torch.tensor(trained_tokens(batch))
        return batch

    @property
    def _collate(self) -> Collate:
        # Any token will do: it stands behind all others of its row, is
        # masked or a document of its own, and has no loss.
        pad = self.tokenizer.pad_token_id
        return Collate(int(pad if pad is not None else self.tokenizer.eos_token_id or 0), self.max_length, self.pack)


def _whole(rows: Sequences, place: Place) -> Iterator[tuple[Place, Sequences]]:
    """Yield ``rows`` as the only stretch of data in memory."""
    if place == (0, 0):
        yield (1, 0), rows
