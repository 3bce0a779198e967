"""``lt-finetune new``: the recipe it writes, why, and what it refuses."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from lt_offload.cli.main import main
from lt_offload.cli.models import named
from lt_offload.cli.verbs import ways
from lt_offload.cli.verbs.new import figures, header
from lt_offload.cli.verbs.ways import METHODS, Drafts, Machine, Method, WayToTrain, best
from lt_offload.profiling.hardware import load_hardware
from lt_offload.schema.plan import Plan
from lt_offload.schema.profile import Profile
from scripts.recipes.headers import hardware_of, lines_of, title_of, with_header
from tests.support.commands import fails
from tests.support.samples import make_plan, make_profile
from tests.unit.finetune.test_load import write_gguf

pytestmark = pytest.mark.slow

CARD = ("--hardware", "rtx-3060")
PLAN = make_plan(make_profile(layers=4, tensors_per_layer=2))
LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "vocab_size": 259,
    "max_position_embeddings": 128,
}


@pytest.fixture(autouse=True)
def somewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)


def described(**changes: Any) -> str:
    Path("small.json").write_text(json.dumps(LLAMA | changes))
    return "small.json"


def test_a_recipe_for_a_folder_is_planned_explained_checked_and_never_overwritten(
    model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    args = ["new", str(model), "--memory", "900MB", *CARD, "--data", "rows.json", "--output", "mine.yaml"]
    assert main(args) == 0, capsys.readouterr().err
    out = capsys.readouterr().out
    text, architecture = Path("mine.yaml").read_text(), Path(f"{model.name.lower()}.json")
    assert all(method.title in out for method in METHODS)
    assert max(map(len, out.splitlines()[1:-1])) <= 80  # all but the names of files
    assert "Chosen: all weights in fp32, the most exact one that fits; its step takes" in out
    assert len(text.splitlines()) <= 30
    assert "#   lt-finetune mine.yaml\n#   lt-finetune plan mine.yaml --hardware rtx-3060\n# Simulated there: " in text
    assert json.loads(architecture.read_text())["hidden_size"] == 32
    Path("rows.json").write_text("[]")
    assert main(["check", "mine.yaml"]) == 0, capsys.readouterr().err
    assert main(["plan", "mine.yaml", *CARD, "--save", "plan.json"]) == 0, capsys.readouterr().err
    again = figures(Plan.load("plan.json"))
    assert header(title_of(text), "mine.yaml", "rtx-3060", again, flags="") == lines_of(text)
    assert "--output: mine.yaml exists already; give another name" in fails(capsys, *args)
    assert Path("mine.yaml").read_text() == text


def test_models_that_do_not_take_batches_in_parts_take_them_one_after_the_other(
    capsys: pytest.CaptureFixture[str],
) -> None:
    bloom = {"model_type": "bloom", "n_layer": 2, "n_head": 4, "hidden_size": 32, "vocab_size": 259}
    Path("bloom.json").write_text(json.dumps(bloom | {"_name_or_path": "some/Bloom-Tiny"}))
    assert main(["new", "bloom.json", "--memory", "900MB", "--method", "full", "--host_memory", "8GB"]) == 0
    assert "planning for rtx-4060-8gb; --hardware names another" in capsys.readouterr().err
    text = Path("bloom-tiny-full-900mb.yaml").read_text()
    one_after_the_other = yaml.safe_load(text)["trainer"]["accumulate_grad_batches"]
    assert one_after_the_other > 1
    assert one_after_the_other * yaml.safe_load(text)["data"]["batch_size"] == 16
    assert "micro_batches" not in text
    assert "      host_memory: 8GB  #" in text
    assert "--hardware rtx-4060-8gb,free=8GB" in text
    assert "# some/Bloom-Tiny, all weights in fp32 (" in text


def way(at: int, seconds: float | None) -> WayToTrain:
    plan = None if seconds is None else replace(PLAN, predicted=replace(PLAN.predicted, iteration_s=seconds))
    return WayToTrain(METHODS[at], 512, plan=plan)


def test_the_most_exact_way_is_taken_that_is_not_much_slower() -> None:
    assert best([way(0, 2.0), way(1, 1.5), way(3, 1.0)]).method == METHODS[0]
    assert best([way(0, 2.1), way(1, 1.5), way(3, 1.0)]).method == METHODS[1]
    assert best([way(0, None), way(1, None), way(3, 1.0)]).method == METHODS[3]


def test_a_recipe_goes_from_folder_to_folder_with_its_architecture(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("sub").mkdir()
    name = described(_name_or_path="a/b")
    args = ("--memory", "900MB", *CARD, "--method", "full", "--output", "sub/mine.yaml", "--data", "rows.json")
    assert main(["new", name, *args]) == 0, capsys.readouterr().err
    assert "  architecture: b.json  #" in Path("sub/mine.yaml").read_text()
    Path("rows.json").write_text("[]")
    assert main(["check", "sub/mine.yaml"]) == 0, capsys.readouterr().err
    Path("sub").rename("moved")
    monkeypatch.chdir("moved")
    Path("rows.json").write_text("[]")
    assert main(["check", "mine.yaml"]) == 0, capsys.readouterr().err
    assert main(["check", "mine.yaml", "--model.architecture", "gone.json"]) == 2, "a flag is from the working folder"


def breaks(monkeypatch: pytest.MonkeyPatch, broken: Sequence[Method], at: str) -> None:
    """Let methods end in an error that nobody has foreseen, in their rough plans or in those at length."""
    profile, profiled = Drafts._profile, list[Method]()

    def sometimes(drafts: Drafts, way: WayToTrain, *args: Any) -> Any:
        profiled.append(way.method)
        if way.method in broken and profiled.count(way.method) == (1 if at == "a glance" else 2):
            raise RuntimeError(f"not {METHODS.index(way.method)}\nand more")
        return profile(drafts, way, *args)

    monkeypatch.setattr(Drafts, "_profile", sometimes)


BF16 = ("--memory", "900MB", *CARD, "--method", "bf16", "--output", "mine.yaml")


@pytest.mark.parametrize("at", ["a glance", "length"])
def test_a_method_that_fails_leaves_the_others(
    at: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    breaks(monkeypatch, METHODS[1:2], at)
    assert main(["new", described(_name_or_path="a/b"), *BF16]) == 0
    out = capsys.readouterr().out
    assert f"\n{METHODS[1].title}: RuntimeError: not 1\n" in out
    assert f"Chosen: {METHODS[2].title}, the " in out
    assert "stochastic_rounding: true" in Path("mine.yaml").read_text()


@pytest.mark.parametrize("at", ["a glance", "length"])
def test_the_first_error_is_told_if_every_method_fails(
    at: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    breaks(monkeypatch, METHODS, at)
    assert main(["new", described(_name_or_path="a/b"), *BF16]) == 1
    assert "error: RuntimeError: not 1 (--debug shows where)" in capsys.readouterr().err
    assert not Path("mine.yaml").exists()


@pytest.mark.parametrize("plans", [1, 3])
def test_ctrl_c_writes_the_best_recipe_until_then(
    plans: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    plan, seconds = Drafts._plan, list[float]()

    def few(drafts: Drafts, profile: Profile, limit: float, accumulate: int) -> Plan:
        if len(seconds) == plans:
            raise KeyboardInterrupt
        seconds.append(limit)
        return plan(drafts, profile, limit, accumulate)

    monkeypatch.setattr(Drafts, "_plan", few)
    assert main(["new", described(_name_or_path="a/b"), *BF16, "--data", "rows.json"]) == 130
    captured = capsys.readouterr()
    assert set(seconds) == {0.5}
    assert captured.err.count(": yes, ") == plans
    assert f"Chosen: {METHODS[1].title}, " in captured.out
    said = " ".join(captured.out.split())
    assert "Stopped by Ctrl-C: this is the best plan until then." in said
    assert " so far; training, or 'lt-finetune plan', finds a better plan" in said
    Path("rows.json").write_text("[]")
    assert main(["check", "mine.yaml"]) == 0, capsys.readouterr().err


def test_a_method_that_is_impossible_is_not_called_too_large(capsys: pytest.CaptureFixture[str]) -> None:
    name = described(model_type="gpt2", architectures=None, _name_or_path="a/b")
    error = fails(capsys, "new", name, "--memory", "900MB", *CARD, "--method", "qlora")
    assert "error: form=nf4: most weights of GPT2LMHeadModel are neither of an nn.Linear nor of experts" in error


def test_a_model_that_is_shipped_in_four_bits_has_adapters_on_these(capsys: pytest.CaptureFixture[str]) -> None:
    shipped = {"quant_method": "fp8", "weight_block_size": [128, 128], "modules_to_not_convert": ["lm_head"]}
    name = described(_name_or_path="a/b", quantization_config=shipped)
    assert "--method full trains weights, and those of a/b are stored as FP8" in fails(
        capsys, "new", name, "--memory", "900MB", *CARD, "--method", "full"
    )
    assert main(["new", name, "--memory", "900MB", *CARD, "--output", "mine.yaml"]) == 0, capsys.readouterr().err
    text = Path("mine.yaml").read_text()
    assert "quantize: fp8  # weights under the adapters stay as they are shipped" in text
    assert "LoRA on its FP8 weights" in text


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({}, 'small.json does not say which model it is of; add "_name_or_path"'),
        ({"_name_or_path": "a/b", "architectures": ["BertForMaskedLM"]}, "not a causal language model but BertForMask"),
        ({"_name_or_path": "a/b", "model_type": "t5", "architectures": None}, "but of type t5"),
        ({"_name_or_path": "a/b", "quantization_config": {"quant_method": "gptq", "bits": 4}}, "is stored in gptq"),
    ],
)
def test_models_that_cannot_be_trained(
    changes: dict[str, Any], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert message in fails(capsys, "new", described(**changes), *CARD)


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (("llama2-7c", *CARD), "did you mean llama2-7b"),
        (("meta-llama/Llama-2-9b-hf", *CARD), "did you mean meta-llama/Llama-2-7b-hf"),
        (("qqqq", *CARD), "without the hub give a folder, a config.json or one of bloom-3b, "),
        (("phi2",), "there is no GPU here to plan for; say how much memory yours has"),
        (("phi2", "--memory", "2TB"), "more than any card has that is described here (141 GB)"),
        (("phi2", "--memory", "12"), 'did you mean "12GB"?'),
        (("phi2", "--hardware", "rtx-9999"), "hardware='rtx-9999'"),
        (("phi2", *CARD, "--output", "gone/mine.yaml"), "there is no folder gone"),
        (("phi2", *CARD, "--output", "mine"), "--output: 'mine' is not the name of a recipe; did you mean mine.yaml?"),
        (("phi2", *CARD, "--output", "mine/"), "'mine/' is not the name of a recipe; did you mean mine.yaml?"),
        (("phi2", *CARD, "--output", "plan"), "--output: 'plan' is not the name of a recipe; did you mean plan.yaml?"),
        (("phi2", *CARD, "--output", ""), "--output: '' is not the name of a recipe; did you mean recipe.yaml?"),
        (("phi2", *CARD, "--output", "folder.yaml"), "--output: cannot write folder.yaml: it is a folder; add the"),
        (("phi2", *CARD, "--output", "kept.yaml"), "--output: kept.yaml exists already; give another name"),
        (("phi2", *CARD, "--output", "kept.yaml/mine.yaml"), "there is no folder kept.yaml, it is a file"),
        (("phi2", *CARD, "--output", "locked/mine.yaml"), "the folder locked is read-only for you"),
    ],
)
def test_mistakes(
    args: tuple[str, ...], message: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for folder in ("folder.yaml", "locked"):
        Path(folder).mkdir()
    Path("kept.yaml").write_text("")
    monkeypatch.setattr(os, "access", lambda path, _mode: str(path) != "locked")  # root may write anywhere
    assert message in fails(capsys, "new", *args)


def test_too_little_memory_names_the_least_that_works(capsys: pytest.CaptureFixture[str]) -> None:
    error = fails(capsys, "new", described(_name_or_path="a/b"), "--memory", "500MB", *CARD, "--method", "full")
    assert "a/b cannot be trained in memory=500MB with 128 GB of RAM, even with sequences of 128 tokens" in error
    assert "all weights in fp32 needs memory=5" in error


def test_a_recipe_without_a_name_takes_one_that_is_free(monkeypatch: pytest.MonkeyPatch) -> None:
    chosen = way(0, 1.0)
    for name, result in (("ways", None), ("improved", None), ("choose", ([chosen], chosen))):
        monkeypatch.setattr(Drafts, name, lambda *_, result=result: result)
    text = "kept"
    Path("recipe.yaml").mkdir()
    Path("phi2-full-12gb-4.yaml").mkdir()
    for path in ("phi2-full-12gb.yaml", "phi2-full-12gb-2.yaml", "phi2-full-12gb-3.yaml", "phi2-full-12gb-5.yaml"):
        assert not Path(path).exists()
        assert main(["new", "phi2", "--memory", "12GB", *CARD]) == 0
        assert path in Path(path).read_text()
        Path(path).write_text(text)
    assert [path.read_text() for path in Path().glob("*.yaml") if path.is_file()].count(text) == 4


@pytest.mark.parametrize("at", ["the first plan", "a division that promises more", "its plan", "the end"])
def test_ctrl_c_leaves_to_the_plan_of_the_training_what_was_not_compared(
    at: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first number of parts that fits is not the recipe's, unless others have been looked at."""
    made = list[int]()

    def stop(*_: Any) -> None:
        raise KeyboardInterrupt

    def planned(_drafts: Drafts, profile: Profile, _seconds: float, _accumulate: int) -> Plan:
        if len(made) == {"its plan": 1, "the end": 2}.get(at):
            raise KeyboardInterrupt
        made.append(profile.parts)
        return replace(PLAN, predicted=replace(PLAN.predicted, iteration_s=4.0 - len(made), no_offload_s=0.5))

    def promised(_profile: Profile, split: Any, _settings: Any) -> float:
        if at == "a division that promises more":
            raise KeyboardInterrupt
        return 2.0 - (split.parts == 16)

    monkeypatch.setattr(Drafts, "_plan", planned)
    monkeypatch.setattr(ways, "promised_s", promised)
    if at == "the first plan":
        monkeypatch.setattr(Drafts, "improved", stop)
    args = ("--memory", "900MB", *CARD, "--method", "lora", "--output", "mine.yaml")
    assert main(["new", described(_name_or_path="a/b"), *args]) == 130
    settings = yaml.safe_load(Path("mine.yaml").read_text())["trainer"]["strategy"]["init_args"]
    assert made == ([4, 16] if at == "the end" else [4])
    assert settings["micro_batches"] == (16 if at == "the end" else "auto")


def test_what_is_written_after_ctrl_c_is_improved_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    drafts = Drafts(
        named(described(_name_or_path="a/b")), Machine(load_hardware("rtx-3060"), None, "1GB", None), None, tmp_path
    )
    drafts.known = [way(0, 9.0), way(3, 4.0), way(4, 3.0)]
    improved = list[str]()

    def likely(_drafts: Drafts, one: WayToTrain) -> None:
        improved.append(one.method.title)
        raise KeyboardInterrupt

    monkeypatch.setattr(Drafts, "_likely", likely)
    with pytest.raises(KeyboardInterrupt):
        drafts.improved()
    assert improved == [best(drafts.known).method.title] == [METHODS[3].title]


@pytest.mark.parametrize("fast", [(1, 1), (16, 1)])
def test_a_first_plan_is_of_one_division_and_a_better_one_of_the_likely_one(
    fast: tuple[int, int], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    divisions = list[tuple[int, int]]()

    def planned(_drafts: Drafts, profile: Profile, _seconds: float, accumulate: int) -> Plan:
        divisions.append((profile.parts, accumulate))
        seconds = 1.0 if divisions[-1] == fast else 2.0
        return replace(PLAN, predicted=replace(PLAN.predicted, iteration_s=seconds, no_offload_s=0.5))

    monkeypatch.setattr(Drafts, "_plan", planned)
    monkeypatch.setattr(ways, "promised_s", lambda _profile, split, _settings: 1.0 + ((split.parts, 1) != fast))
    machine = Machine(load_hardware("rtx-3060"), "rtx-3060", "900MB", None)
    drafts = Drafts(named(described(_name_or_path="a/b")), machine, None, tmp_path)
    drafts.ways("lora")
    assert divisions == [(4, 1)]
    (better,) = drafts.improved()
    assert divisions == [(4, 1), fast]
    assert (better.parts, better.accumulate, better.iteration_s) == (*fast, 1.0)


def test_what_is_there_is_not_replaced_by_another_architecture(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(Drafts, "ways", None)  # nothing is planned before
    name = described(_name_or_path="a/b")
    for content in (json.dumps(LLAMA | {"hidden_size": 64}), "[1]"):
        Path("b.json").write_text(content)
        error = fails(capsys, "new", name, "--memory", "900MB", *CARD, "--method", "full")
        assert "b.json exists already and is of another model" in error
        assert Path("b.json").read_text() == content
    Path("b.json").unlink()
    Path("b.json").mkdir()
    assert "b.json exists already" in fails(capsys, "new", name, "--memory", "900MB", *CARD, "--method", "full")
    assert not Path("b-full-900mb.yaml").exists()


def test_the_very_file_that_is_given_is_the_architecture(capsys: pytest.CaptureFixture[str]) -> None:
    Path(described(_name_or_path="a/Small")).rename("small.json")
    given = Path("small.json").read_text()
    args = ("new", "small.json", "--memory", "900MB", *CARD, "--method", "full")
    assert main(args) == 0, capsys.readouterr().err
    assert Path("small.json").read_text() == given
    Path("small-full-900mb.yaml").rename("before.yaml")
    Path("small.json").write_text(json.dumps(LLAMA | {"_name_or_path": "other/name"}))
    assert named("small.json").has_architecture_of(Path("small.json"))
    assert not named("small.json").has_architecture_of(Path("before.yaml"))


def test_a_gguf_file_is_a_model_like_a_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    write_gguf(Path("Mine.gguf"), layers=2)
    args = ("--memory", "900MB", *CARD, "--method", "full", "--data", "rows.json")
    assert main(["new", "Mine.gguf", *args]) == 0, capsys.readouterr().err
    assert "  name: Mine.gguf\n  architecture: mine.json  #" in Path("mine-full-900mb.yaml").read_text()
    Path("rows.json").write_text("[]")
    assert main(["check", "mine-full-900mb.yaml"]) == 0, capsys.readouterr().err
    written = json.loads(Path("mine.json").read_text())
    assert (written["hidden_size"], "quantization_config" in written) == (64, False)


def test_a_file_of_weights_is_no_configuration(capsys: pytest.CaptureFixture[str]) -> None:
    Path("model.safetensors").write_bytes(b"\x80\x00")
    error = fails(capsys, "new", "model.safetensors", *CARD)
    assert "'model.safetensors' is no text; give a JSON file with a model's configuration, a folder with" in error
    Path("false.gguf").write_bytes(b"\x80\x00")
    assert "'false.gguf' is no GGUF file, whatever its name says" in fails(capsys, "new", "false.gguf", *CARD)


def test_names_on_the_hub_that_are_known_need_no_hub() -> None:
    for name in ("meta-llama/Llama-3.2-1B-Instruct", "meta-llama/llama-3.2-1b", "llama3.2-1b"):
        found = named(name)
        assert (found.architecture, found.shipped) == ("llama3.2-1b", True)
    assert named("llama3.2-1b").name == "meta-llama/Llama-3.2-1B"


def test_a_header_is_replaced_and_read() -> None:
    step = {"samples": 16, "sequence_length": 512, "iteration_s": 2.0, "no_offload_s": 1.5}
    peaks = {"device_peak_bytes": 10**9, "host_peak_bytes": 2}
    lines = header("A model (7 GB of RAM)", "name", "rtx-3060,ram=28GB", step | peaks)
    assert lines[0] == "# A model (1 GB of RAM)"
    text = with_header("# A\n#   b\nmodel: {}\n", lines)
    assert text == "\n".join([*lines, "model: {}"]) + "\n"
    assert (title_of(text), hardware_of(text)) == ("A model", "rtx-3060,ram=28GB")
    assert hardware_of("# A\nmodel: {}") is None


def test_memory_that_cuda_takes_alone_is_refused_before_anything_is_planned(
    model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    error = fails(capsys, "new", str(model), "--memory", "60MB")
    assert "memory='60MB' is not enough for any model: on rtx-" in error
    assert "CUDA takes 500 MB before the first weight; give more, e.g. --memory 2GB" in error
