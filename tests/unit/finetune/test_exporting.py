"""``lt-finetune export`` and what goes on from it, from a run to models that Hugging Face, peft and we read."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch

from lt_offload.cli.main import main
from lt_offload.finetune import load
from lt_offload.strategy.checkpoint import files
from tests.support import tiny
from tests.support.commands import fails

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing.*:FutureWarning"),  # what peft asks transformers
]

RECIPE = """\
base: configs/base.yaml
trainer:
  accelerator: cpu
  strategy: auto
  max_steps: 2
  limit_val_batches: 0
model:
  name: {model}
  lr: 0.01
data:
  path: {text}
  max_length: 32
"""


@pytest.fixture
def recipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (tmp_path / "text.txt").write_text("the quick brown fox jumps over <a> the lazy dog. " * 20)
    model = tiny.model(tmp_path / "model", chat=True)
    (tmp_path / "tiny.yaml").write_text(RECIPE.format(model=model, text=tmp_path / "text.txt"))
    return "tiny.yaml"


def run(recipe: str, folder: str, *flags: str) -> tuple[str, dict[str, torch.Tensor]]:
    """Train, and return the last checkpoint and its weights."""
    assert main([recipe, "--trainer.default_root_dir", folder, *flags]) == 0
    checkpoint = files.newest(Path(folder) / "checkpoints")
    assert checkpoint is not None
    state = files.load(checkpoint, weights_only=True)["state_dict"]
    return str(checkpoint), {name.removeprefix("model."): tensor for name, tensor in state.items()}


@pytest.mark.slow
def test_other_programs_stop_where_trained_answers_end(recipe: str, capsys: pytest.CaptureFixture[str]) -> None:
    from transformers import AutoModelForCausalLM

    Path("rows.jsonl").write_text(
        '{"messages": [{"role": "user", "content": "Who?"}, {"role": "assistant", "content": "A dog."}]}\n' * 20
    )
    tokens = ["--model.new_tokens=[<|im_start|>,<|im_end|>]", "--data.template=chatml"]
    flags = [*tokens, "--data.path=rows.jsonl", "--data.format=chat", "--data.pack=false"]
    assert main([recipe, *flags]) == 0
    [folder] = Path("runs").iterdir()
    assert main(["export", str(folder), "--output", "out"]) == 0
    end = load.load_tokenizer("./out").convert_tokens_to_ids("<|im_end|>")
    model = AutoModelForCausalLM.from_pretrained("out")
    assert model.generation_config.eos_token_id == [load.load_tokenizer("./model").eos_token_id, end]
    capsys.readouterr()
    assert main(["export", str(folder)]) == 0
    (line,) = [line for line in capsys.readouterr().out.splitlines() if "load it" in line]
    load_it = rf"AutoModelForCausalLM\.from_pretrained\('{folder}/model'\)"
    assert re.fullmatch(rf"{folder}/model: Hugging Face folder, [\d.]+ kB; load it with {load_it}", line)
    assert "exists and is not an empty folder" in fails(capsys, "export", str(folder))
    assert main(["export", recipe, *flags]) == 0
    assert capsys.readouterr().out.startswith("tiny-model: Hugging Face folder")
    assert main(["export", recipe, *flags, "--output", "pretrained"]) == 0
    said = f"taking the pretrained weights; 'lt-finetune export {folder}' takes those of the last run"
    assert said in capsys.readouterr().err
    assert main(["export", str(folder), "--output", "again"]) == 0
    assert "pretrained" not in capsys.readouterr().err


@pytest.mark.slow
def test_a_checkpoint_is_exported_as_it_was_trained(recipe: str, capsys: pytest.CaptureFixture[str]) -> None:
    from transformers import AutoModelForCausalLM

    pytest.importorskip("gguf")
    flags = ["--model.new_tokens=[<a>,<b>]", "--model.freeze=[model.layers.0]"]
    checkpoint, state = run(recipe, "run", *flags)
    export = ["export", recipe, *flags, "--ckpt_path", checkpoint, "--output"]
    assert main([*export, "out"]) == 0
    exported = AutoModelForCausalLM.from_pretrained("out").state_dict()
    assert exported.keys() == state.keys()
    assert [name for name, tensor in exported.items() if not torch.equal(tensor, state[name])] == []
    tokenizer = load.load_tokenizer("./out")
    assert tokenizer("<b>").input_ids == [260]
    assert tokenizer.chat_template == tiny.CHAT_TEMPLATE
    capsys.readouterr()
    assert main([*export, "out.gguf", "--dtype", "bfloat16"]) == 0
    line = r"out\.gguf: GGUF file, [\d.]+ kB; load it with llama-cli -m out\.gguf"
    assert re.fullmatch(line, capsys.readouterr().out.strip())
    stored = load.load_model("./out.gguf", dtype="bfloat16").state_dict()
    assert [name for name, tensor in stored.items() if not torch.equal(tensor, state[name].bfloat16())] == []
    for output, message in (("out", "is not an empty folder"), ("out.gguf", "exists; choose another name")):
        assert message in fails(capsys, *export, output, "--format", "gguf")
    assert "holds whole models; leave out --merge false" in fails(capsys, *export, "other.gguf", "--merge", "false")
    assert "--format hf writes a folder" in fails(capsys, *export, "other.gguf", "--format", "hf")
    assert "--quantize q8_0 is for GGUF files; name one" in fails(capsys, *export, "other", "--quantize", "q8_0")
    assert "does not fit this model" in fails(capsys, *export, "other", "--model.new_tokens=[<a>]")
    assert "max_shard_size='many'" in fails(capsys, *export, "other", "--max_shard_size", "many")
    assert "cannot be written" in fails(capsys, *export, "/proc/other")
    assert "has no adapters" in fails(capsys, *export, "other", "--format", "adapter")
    assert "--merge false: the recipe has no adapters" in fails(capsys, *export, "other", "--merge", "false")
    line = fails(capsys, *export, "other", "--format", "gguf", "--max_shard_size", "1GB")
    assert "--max_shard_size=1GB changes nothing with --format gguf; set it to 5GB" in line
    assert "'./nowhere' is not a folder" in fails(
        capsys, "export", recipe, "--output", "x", "--model.adapter", "./nowhere"
    )


@pytest.mark.slow
def test_adapters_go_from_run_to_run(recipe: str, capsys: pytest.CaptureFixture[str]) -> None:
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    def logits(model: Any) -> torch.Tensor:
        with torch.no_grad():
            result: torch.Tensor = model.eval()(input_ids=torch.arange(3, 40)[None]).logits
        return result

    lora = ["--model.lora.r", "2", "--model.lora.dora", "true"]
    checkpoint, state = run(recipe, "first", *lora)
    assert main(["export", recipe, *lora, "--ckpt_path", checkpoint, "--output", "adapter", "--format", "adapter"]) == 0
    assert main(["export", recipe, *lora, "--ckpt_path", checkpoint, "--output", "merged"]) == 0
    theirs = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained("model"), "adapter")
    saved = {name: tensor for name, tensor in theirs.state_dict().items() if "lora" in name}
    assert saved
    assert [name for name, tensor in saved.items() if not torch.equal(tensor, state[name])] == []
    expected = logits(theirs)
    assert torch.equal(logits(load.load_model("./merged")), logits(theirs.merge_and_unload()))
    assert torch.allclose(logits(load.load_model("./merged")), expected, atol=1e-5)

    more = ["--model.adapter", "adapter"]
    _, after = run(recipe, "second", *more)
    trained = [name for name, tensor in after.items() if not torch.equal(tensor, state[name])]
    assert {name.rpartition(".lora_")[2].partition(".")[0] for name in trained} == {"A", "B", "magnitude_vector"}
    assert "lr: 0.0001" in (Path("second") / "config.yaml").read_text(), "what adapters need comes with them"
    assert "model.adapter='adapter' brings its own settings" in fails(capsys, recipe, *more, *lora)
