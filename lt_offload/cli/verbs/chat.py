"""``lt-finetune generate`` and ``lt-finetune chat``: a prompt continued, and a conversation in terminal or pipes."""

from __future__ import annotations

import signal
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import FrameType
from typing import Any

import torch
from torch.utils.data import DataLoader
from transformers import TextStreamer

from lt_offload.cli.app import App
from lt_offload.errors import ConfigError, OverBudget, first_line
from lt_offload.finetune import load
from lt_offload.finetune.generation import Remembered, Sampler, room_for_answer
from lt_offload.finetune.run.summary import prompts
from lt_offload.finetune.terminal import clear, say, status

_COMMANDS = ("/reset", "/system TEXT", "/exit")
_MOST_TURNS = 2**31
_TOP_P = 0.95
_ENOUGH = 0.25
"""The part of the model's context for an answer below which the oldest turns are forgotten."""


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
    _check_tokens(max_new_tokens)
    sampler = Sampler(temperature=temperature, top_p=top_p, seed=seed)
    requests: Any = [app.datamodule.prompt(text, max_new_tokens=max_new_tokens) | {"choose": sampler}]
    count = requests[0]["input_ids"].shape[1]
    architecture = app.model.architecture if app.model.init == "random" else None
    room = room_for_answer(load.load_config(app.model.name, architecture), count, max_new_tokens)
    if room < max_new_tokens:
        raise ConfigError(
            f"a prompt of {count} tokens and an answer of max_new_tokens={max_new_tokens} are longer than the model's "
            f"context of {count + room}; lower --max_new_tokens, or write less"
        )
    what = f"a prompt of {count} tokens and max_new_tokens={max_new_tokens} more need"
    [answer] = _answered(app, DataLoader(requests, batch_size=None), ckpt_path, what)
    clear()
    print(app.datamodule.tokenizer.decode(answer, skip_special_tokens=True))
    return 0


def chat(
    app: App,
    *,
    system: str | None = None,
    max_new_tokens: int = 512,
    temperature: float = 0.7,
    top_p: float = _TOP_P,
    seed: int = 0,
    ckpt_path: str | None = None,
) -> int:
    """Talk to the model, its weights streamed as in training, in the template that it was trained with.

    On a terminal, Ctrl-C stops an answer and Ctrl-D ends; /reset forgets what was said, /system TEXT begins again with
    another system message, /exit ends. Through a pipe, each line of the input is a message and answers are all that is
    printed. Where the model's context gets short, the oldest turns are forgotten, and an answer ends with it. A message
    that is too long, for the model or for the device memory, stays unanswered and is left out of the conversation,
    which goes on; through a pipe the exit code is 2 then.

    Args:
        app: the settings.
        system: system message to begin with.
        max_new_tokens: where an answer stops if the model does not end it, and its context has room for so many.
        temperature: 0: always the most likely token; higher: more variety.
        top_p: draw from the most likely tokens that together have this probability.
        seed: of the draws; the same one gives the same answers.
        ckpt_path: checkpoint to use; if not given, the newest one of a run folder, else the pretrained model.
    """
    _check_tokens(max_new_tokens)
    # The default top_p is for draws; Sampler would refuse it beside temperature=0.
    sampler = Sampler(temperature=temperature, top_p=1.0 if temperature == 0 and top_p == _TOP_P else top_p, seed=seed)
    session = ChatSession(app, sampler, system=system, max_new_tokens=max_new_tokens)
    _answered(app, session, ckpt_path, "the model needs")
    return 2 if session.unanswered and not session.terminal else 0


def _check_tokens(max_new_tokens: int) -> None:
    if max_new_tokens < 1:
        raise ConfigError(f"max_new_tokens={max_new_tokens} is too small; it must be at least 1")


def _answered(app: App, loader: Any, ckpt_path: str | None, what: str) -> list[Any]:
    """Return the answers to the requests of ``loader``; ``ConfigError`` if ``what`` more than the device memory."""
    status("loading the model")
    try:
        return app.trainer.predict(app.model, loader, ckpt_path=ckpt_path, weights_only=True) or []
    except (OverBudget, torch.OutOfMemoryError) as error:
        reason = first_line(error.__cause__ or error)  # the strategy's own words are of evaluations
        raise ConfigError(
            f"{what} more device memory ({reason}); write less, or give it more with --trainer.strategy.memory"
        ) from None


class ChatSession:
    """A loader whose batches are messages, for a single prediction from the first turn to the last.

    So the engine and the weights on the device stay between turns, and so do the keys and values of earlier turns.
    """

    def __init__(self, app: App, sampler: Sampler, *, system: str | None, max_new_tokens: int) -> None:
        self._app = app
        self._sampler = sampler
        self._max_new_tokens = max_new_tokens
        app.datamodule.encode_conversation([{"role": "user", "content": "?"}])  # a template that is missing is missed
        self._system = system
        self._messages: list[dict[str, str]] = []
        self._remembered = Remembered()
        self.unanswered = 0
        """Messages that were too long."""
        self.terminal = sys.stdin.isatty() and sys.stdout.isatty()
        self._stopped = False

    def __len__(self) -> int:
        """More turns than anyone takes; a Trainer asks a loader without a length for the next turn too early."""
        return _MOST_TURNS

    def __iter__(self) -> Iterator[dict[str, Any]]:
        """Yield a batch for each message, and print the answers."""
        clear()
        if self.terminal:
            say("/reset forgets, /system TEXT sets the system message, /exit ends, Ctrl-C stops")
        for text in self._messages_typed():
            try:
                messages, ids, room = self._fitting([*self._messages, {"role": "user", "content": text}])
            except ConfigError as error:
                self._leave_out(str(error))
                continue
            tokens, errors = list[int](), list[Exception]()
            streamer: Any = TextStreamer(self._app.datamodule.tokenizer, skip_special_tokens=True)

            def heard(token: int, tokens: list[int] = tokens, streamer: Any = streamer) -> bool:
                tokens.append(token)
                streamer.put(torch.tensor([token]))
                return not self._stopped

            begun = time.perf_counter()
            with self._interruptible():
                yield {
                    "input_ids": torch.tensor([ids]),
                    "max_new_tokens": room,
                    "end": self._ends(),
                    "choose": self._sampler,
                    "heard": heard,
                    "remembered": self._remembered,
                    "refused": errors.append,
                }
            if tokens or not errors:
                streamer.end()
            if errors:
                self._leave_out(
                    f"{len(ids)} tokens with an answer need more device memory ({first_line(errors[0])}); write less, "
                    "begin again with /reset, or give it more with --trainer.strategy.memory"
                )
                continue
            if len(tokens) == room < self._max_new_tokens:
                say(f"(the answer ends after {room} tokens, where the model's context does)")
            said = str(self._app.datamodule.tokenizer.decode(tokens, skip_special_tokens=True))
            self._messages = [*messages, {"role": "assistant", "content": said}]
            if self.terminal:
                seconds = max(time.perf_counter() - begun, 1e-9)
                say(f"({len(tokens)} tokens, {len(tokens) / seconds:.2g} tokens/s)")

    def _ends(self) -> frozenset[int]:
        """Return the tokens that end an answer: those of its training, and those of its generation settings."""
        config = getattr(self._app.model.model, "generation_config", None)
        published = getattr(config, "eos_token_id", None)
        listed = published if isinstance(published, list) else [] if published is None else [published]
        return frozenset([*self._app.datamodule.encoder.ends, *listed])

    def _leave_out(self, why: str) -> None:
        """Report that the last message is not answered; the conversation stays as it was."""
        self.unanswered += 1
        clear()
        print(f"not answered: {why}", file=sys.stderr, flush=True)

    def _fitting(self, messages: Sequence[dict[str, str]]) -> tuple[list[dict[str, str]], list[int], int]:
        """Return ``messages``, their tokens, and the room for an answer; without the oldest turns if that is small.

        Raises:
            ConfigError: if the model's context is too short for the last message alone, or the chat template refuses
                them.
        """
        model: Any = self._app.model.model
        system = [] if self._system is None else [{"role": "system", "content": self._system}]
        enough = min(self._max_new_tokens, int(_ENOUGH * getattr(model.config, "max_position_embeddings", 0)))
        # Turns are two messages, question and answer: what is left has to begin with a question again.
        for first in range(0, len(messages), 2):
            left = [*messages[first:]]
            ids: list[int] = self._app.datamodule.encode_conversation([*system, *left])
            try:
                room = room_for_answer(model.config, len(ids), self._max_new_tokens)
            except ConfigError:
                if len(left) == 1:
                    raise
                continue
            # Room for a few words is none: better to forget a turn more than to cut each answer short.
            if room < enough and len(left) > 1:
                continue
            if first:
                oldest = "oldest turn is" if first == 2 else f"{first // 2} oldest turns are"
                say(f"(the {oldest} forgotten: the model's context is full)")
            return left, ids, room
        raise AssertionError("a message is the last of them")

    # -- the terminal ------------------------------------------------------------------------------------------------

    def _messages_typed(self) -> Iterator[str]:
        """Yield messages; obeys commands, and ends where the input does."""
        while True:
            try:
                line = input("> ") if self.terminal else sys.stdin.readline()
            except EOFError:
                print()
                return
            except KeyboardInterrupt:
                print()
                say("Ctrl-D or /exit ends")
                continue
            if not self.terminal and not line:
                return
            command, _, rest = line.strip().partition(" ")
            if command == "/exit":
                return
            if command in ("/reset", "/system"):
                self._messages.clear()
                if command == "/system":
                    self._system = rest.strip() or None
                say("(a new conversation)")
            elif command.startswith("/") and command[1:].isalpha():
                say(f"{command} is no command; there are " + ", ".join(_COMMANDS))
            elif line.strip():
                yield line.strip()

    @contextmanager
    def _interruptible(self) -> Iterator[None]:
        """Let the first Ctrl-C stop the answer after the present token, and the second one everything."""
        self._stopped = False

        def stop(number: int, frame: FrameType | None) -> None:
            if self._stopped:
                raise KeyboardInterrupt
            self._stopped = True

        # For the answer alone: while a message is typed, Ctrl-C has to raise, which ends input().
        before = signal.signal(signal.SIGINT, stop)
        try:
            yield
        finally:
            signal.signal(signal.SIGINT, before)
