"""Bad input on the command line: one sentence with setting, value and way out, before anything slow."""

from __future__ import annotations

import io
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from lt_offload.cli import recipes, table
from lt_offload.cli.main import main
from lt_offload.cli.static.settings import check as check_settings
from lt_offload.cli.verbs import check, doctor
from lt_offload.errors import ConfigError
from lt_offload.finetune.data import module as data
from lt_offload.profiling.hardware import load_hardware
from tests.support.commands import fails


@pytest.fixture
def nothing_slow(monkeypatch: pytest.MonkeyPatch) -> None:
    """Reading data, loading weights and measuring are failures."""

    def slow(*args: object, **kwargs: object) -> None:
        raise AssertionError("too late: something slow has begun")

    monkeypatch.setattr(data.sources.Source, "rows", slow)
    monkeypatch.setattr("transformers.LlamaForCausalLM.from_pretrained", slow)
    monkeypatch.setattr("lt_offload.profiling.measure.profile", slow)
    monkeypatch.setattr(doctor, "measure_machine", slow)


def test_options_and_verbs_that_are_nearly_right(capsys: pytest.CaptureFixture[str]) -> None:
    assert fails(capsys, "--versoin") == "error: unknown option '--versoin'; did you mean --version?"
    assert "no verb or recipe 'pln'; did you mean plan?" in fails(capsys, "pln", "quickstart")
    for verb, hint in (("train", "lt-finetune RECIPE"), ("resume", "RUN --resume"), ("report", "has a report.html")):
        assert hint in fails(capsys, verb, "quickstart")


@pytest.mark.usefixtures("nothing_slow")
@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--trainer.max_step", "2"], "unknown setting 'trainer.max_step'; did you mean trainer.max_steps?"),
        (
            ["--data.columns.messages", "x"],
            "unknown setting 'data.columns.messages'; data.columns is given as one value",
        ),
        (["--data.batch", "1"], "unknown setting 'data.batch'; did you mean data.batch_size?"),
        (
            ["--data.batch_size", "auto"],
            "data.batch_size: 'auto' is a value of another setting; set trainer.strategy.bat",
        ),
        (
            ["--model.tokenizer", "x"],
            "model.tokenizer='x' cannot be set by itself; set data.tokenizer, which it follows",
        ),
        (["--data.split", "test"], "data.split=test changes nothing with data.path="),
        (["--trainer.strategy", "auto", "--explain"], "--explain: trainer.strategy=SingleDeviceStrategy makes no plan"),
        (["--data.batch=1"], "unknown setting 'data.batch'; did you mean data.batch_size?"),
        (["--ckpt", "x"], "unknown setting 'ckpt'; did you mean ckpt_path?"),
        (["--trainer.strategy.memory", "0.8"], "memory='0.8' is not a size but 0.8 bytes; did you mean \"0.8GB\"?"),
        (["--trainer.strategy.memory", "12"], 'did you mean "12GB"?'),
        (["--trainer.strategy.memory", "0"], "memory='0' is not a size that anything fits into; write \"10GB\" or"),
        (["--trainer.strategy.memory", "-3GB"], "memory='-3GB' is not a size that anything fits into; write"),
        (["--trainer.strategy.memroy", "3GB"], "'trainer.strategy.memroy'; did you mean trainer.strategy.memory?"),
        (["--trainer.precision", "16-mixed"], "trainer.precision=16-mixed needs a GPU"),
        (["--trainer.max_steps", "5", "--trainer.max_epochs", "0"], "trainer.max_epochs=0 trains nothing; raise it"),
        (["--trainer.max_steps", "0"], "trainer.max_steps=0 trains nothing; raise it, or set it to -1 for no limit"),
        (["--trainer.strategy.memory", "80%"], "memory='80%' is not a size but a share; did you mean \"12GB\"?"),
        (["--trainer.strategy.host_memory", "12"], "host_memory='12' is not a size but 12 bytes; did you mean"),
        (["--trainer.strategy.memory", "900TB"], "memory=900 TB is more than there is: RAM, where the emulated"),
        (["--trainer.accelerator", "gpu"], "trainer.accelerator='gpu' with trainer.devices=1 does not work here"),
        (["--trainer.devices", "0"], "trainer.devices='0' does not work here"),
        (["--trainer.default_root_dir", "text.txt/run"], "trainer.default_root_dir='text.txt/run' cannot be written"),
        (["--model.name", "empty"], "model folder 'empty' has no config.json"),
        (["--model.name", "text.txt"], "model 'text.txt' is not a folder"),
        (["--data.tokenizer", "empty"], "there is no tokenizer at 'empty'; put the model's"),
        (["--seed_everything", "-1"], "seed_everything=-1 is out of bounds; choose a number from 0 to 4294967295"),
        (["--data.path", "none.json"], "data.path='none.json' does not exist"),
        (["--model.lr", "inf"], "model.lr"),
        (["--ckpt_path", "gone.ckpt"], "ckpt_path='gone.ckpt' does not exist"),
        (["--ckpt_path", "text.txt"], "checkpoint 'text.txt' cannot be read"),
        (["--ckpt_path", "empty"], "checkpoint 'empty' is a folder"),
        (["--ckpt_path", "weights.ckpt"], "'weights.ckpt' holds a model's weights alone, not the state of a training"),
        (["--ckpt_path", "other.ckpt"], "the checkpoint does not fit this model or its adapters: it has no model."),
        (["--ckpt_path", "half.ckpt"], "ckpt_path='half.ckpt' has weights only"),
        (["--trainer.strategy.plan", "gone.json"], "cannot read Plan file 'gone.json'"),
        (["--trainer.strategy.plan", "text.txt"], "'text.txt' is not a valid Plan file"),
        (["--trainer.strategy.plan", "old.json"], "'old.json' has schema 0"),
        (["--max_steps", "1"], "unknown setting 'max_steps'; did you mean trainer.max_steps?"),
        (["--model.lora.rank", "1"], "unknown setting 'model.lora.rank'; did you mean model.lora.r or"),
        (["--model.lr", "fast"], "model.lr: expected float, got fast"),
        (["--data.format", "csv"], "data.format: there is no 'csv'; choose auto, text, alpaca"),
        (["--model.name", "./gone"], "model './gone' is not a folder"),
        (["--trainer.callbacks", "{class_path: no.such.thing}"], "No module named 'no'"),
        (["--trainer.strategy", "nonesuch"], "nonesuch"),
        (["stray"], "unknown setting 'stray'"),
        (["--prompt", "hello"], "--prompt is a flag of generate, not of fit"),
    ],
)
def test_it_is_said_before_anything_slow(
    recipe: str, capsys: pytest.CaptureFixture[str], args: list[str], message: str
) -> None:
    Path("empty").mkdir()
    Path("old.json").write_text('{"schema": 0}')
    torch.save({"a.weight": torch.ones(2)}, "weights.ckpt")
    state = {"pytorch-lightning_version": "2.6.0", "state_dict": {"x": torch.ones(2)}, "optimizer_states": []}
    torch.save(state, "other.ckpt")
    torch.save({key: value for key, value in state.items() if key != "optimizer_states"}, "half.ckpt")
    assert message in fails(capsys, recipe, *args)


@pytest.mark.usefixtures("nothing_slow")
def test_safetensors_are_no_checkpoint(recipe: str, model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    line = fails(capsys, recipe, "--ckpt_path", str(model / "model.safetensors"))
    assert "is a safetensors file, a model's weights alone" in line
    assert "--model.name" in line


@pytest.mark.usefixtures("nothing_slow")
@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["doctor", "--save", "gone/machine.yaml"], "--save: cannot write gone/machine.yaml: there is no folder gone"),
        (["doctor", "--save", "."], "it is a folder; add the name of a file"),
        (["plan", "tiny.yaml", "--sweep", "banana="], "sweep='banana=' is not understood; write one of memory=6GB"),
        (["plan", "tiny.yaml", "--save", "text.txt/plan.json"], "--save: cannot write text.txt/plan.json: there is no"),
        (["plan", "tiny.yaml", "--memory", "12"], "memory='12' is not a size but 12 bytes; did you mean \"12GB\"?"),
        (
            ["plan", "tiny.yaml", "--explain", "--sweep", "memory=1GB:2GB"],
            "--explain shows one plan and a sweep makes many",
        ),
        (["plan", "tiny.yaml", "--trainer.strategy.plan", "a.json"], "trainer.strategy.plan='a.json' is replayed by"),
        (["generate", "tiny.yaml", "--prompt", ""], "the prompt is empty: ''; give some text with --prompt"),
        (["generate", "tiny.yaml", "--max_new_tokens", "0"], "max_new_tokens=0 is too small"),
        (["check", "tiny.yaml", "--model.name", "empty"], "model folder 'empty' has no config.json"),
        (["check", "tiny.yaml", "--trainer.strategy.blocks", "layer"], "blocks='layer': none of these is called so in"),
    ],
)
@pytest.mark.usefixtures("recipe")
def test_other_verbs_say_it_early_too(capsys: pytest.CaptureFixture[str], args: list[str], message: str) -> None:
    Path("empty").mkdir()
    assert message in fails(capsys, *args, *(["--hardware", "v100"] if args[0] == "plan" else []))


@pytest.mark.usefixtures("recipe")
@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("modle: {name: x}", "unknown setting 'modle' in child.yaml; did you mean model?"),
        ("model: {lora: {rank: 1}}", "unknown setting 'model.lora.rank' in child.yaml"),
        ("trainer: {strategy: {init_args: {memry: 1}}}", "did you mean trainer.strategy.memory"),
        ("data: {batch_size: many}", "data.batch_size: expected int, got many"),
        ("model: null", "recipe child.yaml: model: has no settings; remove it"),
        ("data: text.txt", "recipe child.yaml: data: 'text.txt' is no group of settings"),
        ("data: {path: a.txt, path: b.txt}", "'path' stands twice in one group"),
        ("data: {sample_prompt: [1]}", "data.sample_prompt: expected one of str, list[str], null; got [1]"),
        ("data: {pack: Wrapped}", "data.pack: there is no 'Wrapped' in child.yaml; did you mean wrapped?"),
        (
            "data: {new_tokens: [a]}",
            "data.new_tokens=['a'] in child.yaml cannot be set by itself; set model.new_tokens",
        ),
        (
            "data: {batch_size: auto}",
            "'auto' in child.yaml is a value of another setting; set trainer.strategy.batch_size",
        ),
        ("model: {lr: .nan}", "model.lr=nan is not positive"),
        ("seed_everythin: 1", "unknown setting 'seed_everythin' in child.yaml; did you mean seed_everything?"),
        ("bas: configs/base.yaml", "unknown setting 'bas' in child.yaml; did you mean base?"),
        ("2001-01-01: 3", "is not the name of a setting"),
        ("true: 3", "True is not the name of a setting"),
        ("seed_everything: 2001-99-99", "is not valid YAML: '2001-99-99' is no timestamp (month must be in 1..12)"),
        ("data: &a {path: *a}", "alias *a is not taken; write what it stands for once more"),
        ("seed_everything: !!timestamp 'x'", "is not valid YAML: 'x' is no timestamp"),
        (f"data: {'[' * 3000}", "is nested too deeply"),
        (
            "trainer: {strategy: {init_args: {memory: 0.8}}}",
            'memory=0.8 is not a size but 0.8 bytes; did you mean "0.8',
        ),
        ("trainer: {strategy: {init_args: {memory: 12}}}", 'did you mean "12GB"?'),
    ],
)
def test_recipes_that_cannot_be_meant(capsys: pytest.CaptureFixture[str], change: str, message: str) -> None:
    Path("child.yaml").write_text(f"base: tiny.yaml\n{change}\n")
    error = fails(capsys, "check", "child.yaml")
    assert message in error
    assert "config:" not in error


def test_a_few_lines_that_stand_for_billions_of_values(tmp_path: Path) -> None:
    lines = ["a0: &a0 [x, x, x, x, x, x, x, x, x]"]
    lines += [f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]" for n in range(1, 40)]
    path = tmp_path / "laughs.yaml"
    path.write_text("\n".join(lines))
    with pytest.raises(ConfigError, match=r"laughs.yaml is not valid YAML: alias \*a0 is not taken"):
        recipes.chain(path)
    with pytest.raises(ConfigError, match=r"hardware description .*laughs.yaml': alias \*a0 is not taken"):
        load_hardware(path)
    path.write_text("name: !!bool x")
    with pytest.raises(ConfigError, match=r"laughs.yaml': 'x' is no bool"):
        load_hardware(path)


@pytest.mark.slow
def test_a_checkpoint_of_the_run_is_taken(recipe: str, tmp_path: Path) -> None:
    assert main([recipe, "--trainer.default_root_dir", "run", "--quiet"]) == 0
    [checkpoint] = (tmp_path / "run" / "checkpoints").glob("step*.ckpt")
    check.check_early(_App(recipe), str(checkpoint), resume=True)
    with pytest.raises(ConfigError, match="does not fit this model or its adapters: it has no model.base_model"):
        check.check_early(_App(recipe, "--model.lora.r", "2"), str(checkpoint))
    other = _App(recipe, "--model.weight_decay", "0.5")
    with pytest.raises(ConfigError, match=r"model\.weight_decay=0.5 cannot take effect where training goes on from a"):
        check.check_early(other, str(checkpoint), resume=True)
    check.check_early(other, str(checkpoint))
    check.check_early(_App(recipe, "--model.lr", "0.5"), str(checkpoint), resume=True)
    cut = checkpoint.read_bytes()
    Path("cut.ckpt").write_bytes(cut[: len(cut) // 2])
    with pytest.raises(ConfigError, match="'cut.ckpt' cannot be read"):
        check.check_early(_App(recipe), "cut.ckpt")


def _App(recipe: str, *args: str) -> Any:
    from lt_offload.cli import app, recipes
    from lt_offload.cli.verbs import fit

    return app.App(fit.fit, Path(recipe), recipes.chain(Path(recipe)), args)


# -- what adds to a recipe --------------------------------------------------------------------------------------------


def printed(capsys: pytest.CaptureFixture[str], *args: str) -> dict[str, Any]:
    capsys.readouterr()
    with pytest.raises(SystemExit) as left:
        main([*args, "--print_config"])
    assert left.value.code == 0
    settings: dict[str, Any] = yaml.safe_load(capsys.readouterr().out)
    return settings


@pytest.mark.usefixtures("recipe")
@pytest.mark.parametrize(
    ("text", "flags", "lr"),
    [
        ("model: {lr: 0.002}", ["--model.lora.r", "8"], 1e-4),
        ("model: {lr: 0.002}", ["--model.lora.r=8"], 1e-4),
        ("model: {lr: 0.002}", ["--model.lora.r", "8", "--model.lr", "0.3"], 0.3),
        ("model: {lr: 0.002}", ["--model.lr", "0.3", "--model.lora", '{"r": 2}'], 0.3),
        ("model: {lr: 0.002}", ["--model.lora", "null"], 0.002),
        ("model: {lr: 0.002}", [], 0.002),
        ("model: {lora: {r: 4}}", [], 1e-4),
        ("model: {lora: {r: 4}, lr: 0.002}", ["--model.lora.r", "8"], 0.002),
    ],
)
def test_adapters_bring_their_learning_rate(
    capsys: pytest.CaptureFixture[str], text: str, flags: list[str], lr: float
) -> None:
    Path("child.yaml").write_text(f"base: tiny.yaml\n{text}\n")
    assert printed(capsys, "child.yaml", *flags)["model"]["lr"] == lr


def names(settings: dict[str, Any]) -> Iterator[str]:
    for callback in settings["trainer"]["callbacks"]:
        yield callback["class_path"].rpartition(".")[2]


OURS = ["ModelCheckpoint", "ModelCheckpoint", "ExactResume", "ProgressLine"]


def test_callbacks_are_appended(recipe: str, capsys: pytest.CaptureFixture[str]) -> None:
    stopping = "{class_path: EarlyStopping, init_args: {monitor: val_loss}}"
    assert list(names(printed(capsys, recipe))) == OURS
    assert list(names(printed(capsys, recipe, "--trainer.callbacks", stopping))) == [*OURS, "EarlyStopping"]
    assert list(names(printed(capsys, recipe, f"--trainer.callbacks=[{stopping}]"))) == [*OURS, "EarlyStopping"]
    Path("child.yaml").write_text(f"base: tiny.yaml\ntrainer: {{callbacks: [{stopping}]}}\n")
    assert list(names(printed(capsys, "child.yaml"))) == [*OURS, "EarlyStopping"]
    Path("grandchild.yaml").write_text("base: child.yaml\ntrainer: {callbacks: {class_path: RichModelSummary}}\n")
    assert list(names(printed(capsys, "grandchild.yaml"))) == [*OURS, "EarlyStopping", "RichModelSummary"]
    for empty in ("null", "[]"):
        Path("none.yaml").write_text(f"base: child.yaml\ntrainer: {{callbacks: {empty}}}\n")
        assert not printed(capsys, "none.yaml")["trainer"]["callbacks"]


def test_a_bar_of_ones_own_replaces_the_recipes(recipe: str) -> None:
    app = _App(recipe, "--trainer.callbacks", "{class_path: TQDMProgressBar, init_args: {refresh_rate: 7}}")
    bar = app.trainer.progress_bar_callback
    assert bar.refresh_rate == 7


@pytest.mark.slow
def test_quiet_says_results_only(recipe: str, capfd: pytest.CaptureFixture[str]) -> None:
    assert main([recipe, "--quiet", "--trainer.default_root_dir", "run"]) == 0
    captured = capfd.readouterr()
    assert "report  " in captured.out
    for noise in ("starting PyTorch", "offmate:", "Epoch", "Seed set", "GPU available"):
        assert noise not in captured.err + captured.out
    assert main(["check", recipe, "--quiet", "--data.batch", "1"]) == 2
    assert capfd.readouterr().err == "error: unknown setting 'data.batch'; did you mean data.batch_size?\n"


# -- code that comes with a model -------------------------------------------------------------------------------------

CODE = """
from pathlib import Path
Path({marker!r}).touch()
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
class OwnConfig(LlamaConfig): model_type = "own"
class OwnModel(LlamaForCausalLM): config_class = OwnConfig
class OwnTokenizer(PreTrainedTokenizerFast): pass
"""
VERBS = {
    "fit": ("tiny.yaml",),
    "plan": ("plan", "tiny.yaml", "--hardware", "v100"),
    "data": ("data", "tiny.yaml"),
    "validate": ("validate", "tiny.yaml"),
    "generate": ("generate", "tiny.yaml", "--prompt", "a"),
    "chat": ("chat", "tiny.yaml"),
    "export": ("export", "tiny.yaml", "--output", "out"),
    "check": ("check", "tiny.yaml"),
    "new": ("new", "own", "--memory", "1GB"),
    "new of a file": ("new", "own/config.json", "--memory", "1GB"),
    "architecture": ("plan", "tiny.yaml", "--hardware", "v100", "--model.architecture", "own/config.json"),
    "random": ("check", "tiny.yaml", "--model.init", "random"),
}


@pytest.mark.usefixtures("recipe")
@pytest.mark.parametrize(
    ("part", "verb"),
    [*(("model", verb) for verb in VERBS), *(("tokenizer", verb) for verb in ("fit", "data", "chat", "check"))],
)
def test_code_in_a_model_folder_is_never_run(
    part: str,
    verb: str,
    model: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    own = tmp_path / "own"
    shutil.copytree(model, own)
    (own / "code.py").write_text(CODE.format(marker=str(tmp_path / "marker")))
    if part == "model":
        own_type = {"model_type": "own", "architectures": ["OwnModel"]}
        change(own / "config.json", own_type, {"AutoConfig": "code.OwnConfig", "AutoModelForCausalLM": "code.OwnModel"})
    else:
        own_class = {"tokenizer_class": "OwnTokenizer"}
        change(own / "tokenizer_config.json", own_class, {"AutoTokenizer": [None, "code.OwnTokenizer"]})
    Path("tiny.yaml").write_text(Path("tiny.yaml").read_text().replace(str(model), "own"))
    monkeypatch.setattr("sys.stdin", io.StringIO("yes\n" * 100))
    message = fails(capsys, *VERBS[verb])
    assert "needs Python code that comes with it (auto_map), which is never run here; use a model of a type" in message
    assert not (tmp_path / "marker").exists()


def change(config: Path, values: dict[str, Any], auto_map: dict[str, Any]) -> None:
    config.write_text(json.dumps(json.loads(config.read_text()) | values | {"auto_map": auto_map}))


@pytest.mark.parametrize(
    ("verb", "flag"), [("generate", "--prompt"), ("fit", "--data.sample_prompt"), ("fit", "--data.system")]
)
def test_a_text_that_yaml_takes_for_a_map_is_a_text(verb: str, flag: str) -> None:
    check_settings([], [flag, "Question: why?"], table.VERBS[verb])
