"""Conversations, and what a run folder stands for."""

from __future__ import annotations

import io
import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch

from lt_offload.cli.main import main
from lt_offload.finetune import load
from lt_offload.finetune.generation import Sampler
from lt_offload.strategy.offmate import OffmateStrategy
from tests.support import tiny
from tests.support.commands import fails

pytestmark = pytest.mark.slow

RECIPE = """\
base: configs/base.yaml
trainer: {{accelerator: cpu, strategy: {{init_args: {{memory: 2MB}}}}}}
model: {{name: {model}}}
data: {{path: text.txt, max_length: 32}}
"""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.model(tmp_path_factory.mktemp("talker"), chat=True, max_position_embeddings=256)


def expected(folder: Path, messages: list[dict[str, str]], tokens: int) -> str:
    """The greedy answer of the plain model."""
    tokenizer: Any = load.load_tokenizer(str(folder))
    model: Any = load.load_model(str(folder)).eval()
    prompt = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt")["input_ids"]
    with torch.no_grad():
        whole = model.generate(
            prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=tokens, do_sample=False, use_cache=True
        )
    return str(tokenizer.decode(whole[0, prompt.shape[1] :], skip_special_tokens=True))


def test_a_conversation_through_a_pipe(
    recipe: str, model: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """One engine for all turns, each of which has the history; commands are no messages."""
    engines: list[object] = []
    install = OffmateStrategy._install

    def counted(self: Any, *args: Any) -> None:
        install(self, *args)
        engines.append(self.engine)

    monkeypatch.setattr(OffmateStrategy, "_install", counted)
    lines = ["hello", "", "again", "/nonsense", "/system be brief", "hello", "/reset", "hello", "/exit", "unheard"]
    monkeypatch.setattr("sys.stdin", io.StringIO("\n".join(lines)))
    assert main(["chat", recipe, "--temperature", "0", "--max_new_tokens", "8"]) == 0
    captured = capsys.readouterr()
    first: list[dict[str, str]] = [{"role": "user", "content": "hello"}]
    one = expected(model, first, 8)
    second = [*first, {"role": "assistant", "content": one}, {"role": "user", "content": "again"}]
    system = [{"role": "system", "content": "be brief"}, *first]
    two, three = expected(model, second, 8), expected(model, system, 8)
    assert captured.out == "".join(f"{text}\n" for text in (one, two, three, three))
    assert "/nonsense is no command" in captured.err
    assert len(engines) == 1


def test_a_seed_makes_the_answers_repeatable(
    recipe: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    answers = []
    for seed in ("1", "1", "2"):
        monkeypatch.setattr("sys.stdin", io.StringIO("hello"))
        assert main(["chat", recipe, "--quiet", "--max_new_tokens", "12", "--temperature", "2", "--seed", seed]) == 0
        answers.append(capsys.readouterr().out)
    assert answers[0] == answers[1] != answers[2]


def test_an_interrupt_stops_an_answer_and_not_the_conversation(
    recipe: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    chosen: list[int] = []
    choose = Sampler.__call__

    def interrupted(self: Sampler, logits: torch.Tensor) -> int:
        chosen.append(choose(self, logits))
        if len(chosen) == 3:
            signal.raise_signal(signal.SIGINT)
        return chosen[-1]

    before = signal.getsignal(signal.SIGINT)
    monkeypatch.setattr(Sampler, "__call__", interrupted)
    monkeypatch.setattr("sys.stdin", io.StringIO("hello\nagain"))
    assert main(["chat", recipe, "--max_new_tokens", "8", "--temperature", "0"]) == 0
    assert len(chosen) == 3 + 8
    assert signal.getsignal(signal.SIGINT) == before


def test_the_oldest_turns_make_room(
    recipe: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("\n".join(["a" * 90, "b" * 90, "c" * 90])))
    assert main(["chat", recipe, "--max_new_tokens", "8"]) == 0
    assert capsys.readouterr().err.count("the oldest turn is forgotten") == 1


def test_an_answer_ends_with_the_context(
    recipe: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """By default there may be more tokens than the model's context has; the first turn makes room for the third."""
    model = tiny.model(tmp_path / "talker", chat=True, max_position_embeddings=64)
    monkeypatch.setattr("sys.stdin", io.StringIO("hello\nagain"))
    capsys.readouterr()
    assert main(["chat", recipe, "--model.name", str(model), "--temperature", "0"]) == 0
    captured = capsys.readouterr()
    tokenizer: Any = load.load_tokenizer(str(model))
    messages = [[{"role": "user", "content": text}] for text in ("hello", "again")]
    prompts = [tokenizer.apply_chat_template(each, add_generation_prompt=True)["input_ids"] for each in messages]
    rooms = [64 - len(prompt) for prompt in prompts]
    answers = [expected(model, each, room) for each, room in zip(messages, rooms, strict=True)]
    assert captured.out == "".join(f"{answer}\n" for answer in answers)
    assert captured.err.count(f"(the answer ends after {rooms[0]} tokens, where the model's context does)") == 2
    assert captured.err.count("the oldest turn is forgotten") == 1


@pytest.mark.parametrize(
    ("context", "length", "why"),
    [
        (256, 250, "tokens leaves no room for an answer in the model's context of 256; write less"),
        (8192, 3000, "tokens with an answer need more device memory (aten"),
    ],
)
def test_a_message_that_is_too_long_does_not_end_the_conversation(
    recipe: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    context: int,
    length: int,
    why: str,
) -> None:
    model = tiny.model(tmp_path / "talker", chat=True, max_position_embeddings=context)
    flags = ["--model.name", str(model), "--temperature", "0", "--max_new_tokens", "8", "--quiet"]
    monkeypatch.setattr("sys.stdin", io.StringIO("\n".join(["hello", "a" * length, "again"])))
    capsys.readouterr()  # what was said while the model was made
    assert main(["chat", recipe, *flags]) == 2, "whoever has written the input is told that a message was left out"
    captured = capsys.readouterr()
    [line] = captured.err.splitlines()
    assert line.startswith("not answered: ")
    assert why in line
    first: list[dict[str, str]] = [{"role": "user", "content": "hello"}]
    one = expected(model, first, 8)
    two = expected(model, [*first, {"role": "assistant", "content": one}, {"role": "user", "content": "again"}], 8)
    assert captured.out == f"{one}\n{two}\n"


def test_what_chat_cannot_do(recipe: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "max_new_tokens=0 is too small" in fails(capsys, "chat", recipe, "--max_new_tokens", "0")
    line = fails(capsys, "chat", recipe, "--temperature", "0", "--top_p", "0.5")
    assert "top_p=0.5 changes nothing with temperature=0" in line
    without = tiny.model(tmp_path / "without")
    assert "needs a chat template" in fails(capsys, "chat", recipe, "--model.name", str(without))


def test_generate_draws(recipe: str, capsys: pytest.CaptureFixture[str]) -> None:
    texts = []
    for options in (["--temperature", "2", "--seed", "4"], ["--temperature", "2", "--seed", "4"], []):
        assert main(["generate", recipe, "--prompt", "fox", "--max_new_tokens", "12", *options]) == 0
        texts.append(capsys.readouterr().out)
    assert texts[0] == texts[1] != texts[2]
    assert not Path("runs").exists(), "what is no training leaves no folder of a run"


def test_a_prompt_that_is_too_long(recipe: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    line = fails(capsys, "generate", recipe, "--prompt", "a" * 250)
    assert "and an answer of max_new_tokens=64 are longer than the model's context of 256" in line
    long = str(tiny.model(tmp_path / "long", max_position_embeddings=8192))
    line = fails(capsys, "generate", recipe, "--model.name", long, "--prompt", "a" * 3000)
    assert "a prompt of 3000 tokens and max_new_tokens=64 more need more device memory (aten" in line
    assert "with --trainer.strategy.memory" in line


def test_a_run_folder_stands_for_its_newest_checkpoint(recipe: str, capsys: pytest.CaptureFixture[str]) -> None:
    fit = [recipe, "--trainer.max_steps", "2", "--trainer.default_root_dir", "run", "--model.lr", "0.1"]
    assert main([*fit, "--quiet"]) == 0
    newest = max(Path("run/checkpoints").glob("*.ckpt"), key=os.path.getmtime)
    texts = []
    generate = ["--prompt", "fox", "--max_new_tokens", "12", "--quiet"]
    for given in (["run"], ["run/config.yaml", "--ckpt_path", str(newest)], ["run/config.yaml"]):
        capsys.readouterr()
        assert main(["generate", *given, *generate]) == 0
        texts.append(capsys.readouterr().out)
    assert texts[0] == texts[1] != texts[2]
    for path in Path("run/checkpoints").iterdir():
        path.unlink()
    assert "there is no complete checkpoint in run/checkpoints" in fails(capsys, "generate", "run", *generate)
    assert main(["check", "run"]) == 0
    Path("empty").mkdir()
    assert "'empty' is a folder without config.yaml" in fails(capsys, "check", "empty")


def test_what_is_trained_on_may_be_gone(recipe: str, capsys: pytest.CaptureFixture[str]) -> None:
    generate = ["generate", recipe, "--prompt", "fox", "--max_new_tokens", "12", "--quiet"]
    assert main(generate) == 0
    said = capsys.readouterr().out
    Path("text.txt").unlink()
    line = fails(capsys, *generate)
    assert "data.path='text.txt' does not exist" in line
    assert "with data.format=auto: set it to text, alpaca or chat" in line
    assert main([*generate, "--data.format", "text"]) == 0
    assert capsys.readouterr().out == said
    assert main(["export", recipe, "--output", "exported"]) == 0
    assert Path("exported/model.safetensors").is_file()
    assert "data.path='text.txt' does not exist" in fails(capsys, recipe)


def test_a_conversation_needs_no_data(
    recipe: str, model: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("text.txt").unlink()
    monkeypatch.setattr("sys.stdin", io.StringIO("hello"))
    assert main(["chat", recipe, "--temperature", "0", "--max_new_tokens", "8", "--quiet"]) == 0
    assert capsys.readouterr().out == expected(model, [{"role": "user", "content": "hello"}], 8) + "\n"
