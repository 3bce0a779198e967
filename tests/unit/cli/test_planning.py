"""``lt-finetune plan`` and ``doctor``: files they write, sweeps, machines of one's own, what is said about mistakes."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest

from lt_offload.cli import recipes
from lt_offload.cli.main import main
from lt_offload.cli.verbs import doctor
from lt_offload.cli.verbs import plan as plan_verb
from lt_offload.plan import Settings, make_plan
from lt_offload.profiling.hardware import load_hardware
from lt_offload.resources import shipped_files
from lt_offload.schema.explain import brief
from lt_offload.schema.plan import Plan
from lt_offload.schema.profile import Profile
from tests.support.commands import fails

pytestmark = pytest.mark.slow

RECIPE = """\
# A tiny model on a little text
base: configs/base.yaml
trainer: {{accelerator: cpu, strategy: {{init_args: {{memory: 600MB}}}}}}
model: {{name: {model}}}
data: {{path: text.txt, max_length: 32, batch_size: 2}}
"""
CARD = ("--hardware", "rtx-3060")


def test_a_plan_is_explained_saved_drawn_and_traced(recipe: str, capsys: pytest.CaptureFixture[str]) -> None:
    files = ["--save", "plan.json", "--report", "new/plan.html", "--trace", "plan.perfetto.json"]
    assert main(["plan", recipe, *CARD, *files]) == 0
    captured = capsys.readouterr()
    plan = Plan.load("plan.json")
    assert plan.budget_bytes == 600_000_000
    assert brief(plan) in captured.out
    assert plan.explain() not in captured.out
    assert main(["plan", recipe, *CARD, "--explain"]) == 0
    assert plan.explain().partition("Not chosen:")[0] in capsys.readouterr().out
    written = [line.split(": ")[1] for line in captured.out.splitlines()[-3:]]
    assert written == ["plan.json", "plan.perfetto.json", "new/plan.html"]
    assert "What more would buy" in Path("new/plan.html").read_text()
    assert "planning with 1 GB more device memory" in captured.err
    trace = json.loads(Path("plan.perfetto.json").read_text())
    assert trace["otherData"]["iteration_s"] == pytest.approx(plan.predicted.iteration_s)
    names = {event["name"].split()[0] for event in trace["traceEvents"] if event["ph"] == "X"}
    assert {"forward", "backward"} <= names


def test_a_first_plan_is_told_at_once_and_kept_by_ctrl_c(
    recipe: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    limits = list[float]()

    def once(profile: Profile, settings: Settings, **options: Any) -> Plan:
        limits.append(settings.solver_time_limit)
        if len(limits) > 1:
            raise KeyboardInterrupt
        return make_plan(profile, settings, **options)

    monkeypatch.setattr(plan_verb, "make_plan", once)
    parts = ["--trainer.strategy.micro_batches", "2"]
    files = ["--save", "plan.json", "--report", "plan.html", "--trace", "plan.perfetto.json"]
    assert main(["plan", recipe, *CARD, *parts, *files]) == 130
    captured, plan = capsys.readouterr(), Plan.load("plan.json")
    assert limits == [0.5, 30.0]
    assert (plan.batch_size, plan.parts) == (2, 2)
    assert f"{brief(plan)}\n--explain shows it block by block.\nStopped by Ctrl-C: this is the best" in captured.out
    assert "it fits. A first plan: about " in captured.err
    assert all(Path(name).is_file() for name in files[1::2])


def test_ctrl_c_before_there_is_a_plan_is_one(
    recipe: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def never(*_: Any, **__: Any) -> Plan:
        raise KeyboardInterrupt

    monkeypatch.setattr(plan_verb, "make_plan", never)
    assert main(["plan", recipe, *CARD]) == 130
    captured = capsys.readouterr()
    assert (captured.out, captured.err.splitlines()[-1]) == ("", "interrupted")


def test_adapters_are_planned_with_peft(
    recipe: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert main(["plan", recipe, *CARD, "--model.lora.r", "2"]) == 0, capsys.readouterr().err
    monkeypatch.setitem(sys.modules, "peft", None)
    message = "model.lora needs the package peft: pip install peft"
    assert message in fails(capsys, "plan", recipe, *CARD, "--model.lora.r", "2")
    assert message in fails(capsys, recipe, "--model.lora.r", "2")


def test_a_plan_needs_no_report_to_be_quick(recipe: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", recipe, *CARD]) == 0
    assert "planning with" not in capsys.readouterr().err


def test_an_update_is_chosen_with_its_parts(recipe: str, capsys: pytest.CaptureFixture[str]) -> None:
    auto = [arg for name in ("batch_size", "micro_batches") for arg in (f"--trainer.strategy.{name}", "auto")]
    bound = ["--trainer.strategy.max_batch_size", "4", "--trainer.strategy.solver_time_limit", "2"]
    assert main(["plan", recipe, *CARD, *auto, *bound, "--save", "plan.json"]) == 0
    plan, said = Plan.load("plan.json"), " ".join(capsys.readouterr().out.split())
    assert "What binds: " in said
    assert "Batch sizes:" in said
    assert plan.batch_size * plan.accumulate <= 4
    message = "max_batch_size=4 is less than the 6 samples per update"
    assert message in fails(capsys, "plan", recipe, *CARD, *auto, *bound, "--trainer.accumulate_grad_batches", "3")


def test_a_budget_beyond_the_card(recipe: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", recipe, *CARD, "--trainer.strategy.memory", "40GB", "--save", "a.json"]) == 0
    assert "rtx-3060-12gb has 12.9 GB, not 40 GB as in the recipe" in capsys.readouterr().err
    assert Plan.load("a.json").budget_bytes == load_hardware("rtx-3060").device_bytes
    assert main(["plan", recipe, *CARD, "--memory", "40GB", "--save", "b.json"]) == 2
    assert "error: memory=40 GB is more than rtx-3060-12gb has; set memory=12884MB" in capsys.readouterr().err


def test_a_configuration_of_ones_own(recipe: str, capsys: pytest.CaptureFixture[str]) -> None:
    config = json.loads(shipped_files("configs/models", ".json")["smollm2-135m"].read_text()) | {"num_hidden_layers": 3}
    del config["_name_or_path"]
    Path("mine").mkdir()
    Path("mine/config.json").write_text(json.dumps(config))
    for architecture in ("mine", "mine/config.json"):
        flags = ["--model.architecture", architecture, "--memory", "2GB", "--save", "plan.json"]
        assert main(["plan", recipe, *CARD, *flags]) == 0
        plan = Plan.load("plan.json")
        assert plan.model == "mine"
        assert len(plan.options) == 3 + 3
    assert "mine, 6 blocks, batch 2 x 32 tokens" in capsys.readouterr().out


def test_a_sweep_over_memory(recipe: str, capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--sweep", "memory=400MB:600MB:100MB", "--save", "sweep.json"]
    assert main(["plan", recipe, *CARD, *flags]) == 0
    captured = capsys.readouterr()
    few, _, enough = json.loads(Path("sweep.json").read_text())
    assert (few["memory_bytes"], few["iteration_s"]) == (400_000_000, None)
    assert (enough["memory_bytes"], enough["planner"] in captured.out) == (600_000_000, True)
    assert enough["iteration_s"] > 0
    lines = captured.out.splitlines()
    assert max(map(len, lines)) <= 100
    assert "float32, batch " in lines[0]
    assert few["reason"] in captured.out
    assert "3 of 3: planning for 600 MB" in captured.err


def test_a_sweep_over_cards_and_over_ram(recipe: str, capsys: pytest.CaptureFixture[str]) -> None:
    cards = "hardware=rtx-3060,rtx-3090,host=ddr4-32gb,v100"
    assert main(["plan", recipe, "--model.dtype", "bfloat16", "--sweep", cards, "--save", "cards.json"]) == 0
    slow, fast, old = json.loads(Path("cards.json").read_text())
    named = [one["hardware"] for one in (slow, fast, old)]
    assert named == ["rtx-3060-12gb", "rtx-3090, ddr4-32gb", "v100-16gb"]
    assert fast["host_memory_bytes"] == 288 * 10**8
    assert fast["iteration_s"] <= slow["iteration_s"]
    assert old["reason"] == "there are no figures for bfloat16"
    assert main(["plan", recipe, *CARD, "--sweep", "host_memory=1KB,8GB", "--save", "ram.csv"]) == 0
    lines = Path("ram.csv").read_text().splitlines()
    assert ",1000," in lines[1]
    assert "needs host_memory=" in lines[1]
    assert ",8000000000," in lines[2]
    assert lines[2].endswith(",")


def test_several_cards(recipe: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", recipe, *CARD, "--devices", "2", "--save", "two.json"]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert Plan.load("two.json").processes == 2
    assert re.search(r"2 cards train [\d,.]+ tokens per second, \d\.\d\d times one card", said)
    assert re.search(r"adding gradients [\d.]+ .?s", said)
    assert "The plan is that of one of the 2 processes." in said
    assert main(["plan", recipe, *CARD, "--sweep", "devices=1:3:2", "--save", "n.json"]) == 0
    one, three = json.loads(Path("n.json").read_text())
    assert (one["devices"], three["devices"], three["hardware"]) == (1, 3, "rtx-3060-12gb")
    assert "3 cards are" in capsys.readouterr().out


def test_several_machines(recipe: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", recipe, "--hardware", "rtx-3060,net=12GB", "--devices", "2", "--nodes", "2"]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert re.search(r"4 cards in 2 machines train [\d,.]+ tokens per second", said)
    assert re.search(r"copies between machines [\d.]+ .?s", said)
    assert "All processes of a machine take" in said
    assert main(["plan", recipe, *CARD, "--sweep", "nodes=1,3", "--save", "n.json"]) == 0
    one, three = json.loads(Path("n.json").read_text())
    assert (one["nodes"], three["nodes"], three["devices"]) == (1, 3, 1)
    assert "3 machines are" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ([*CARD, "--sweep", "6GB:24GB"], "sweep='6GB:24GB' is not understood; write memory=6GB:24GB"),
        ([*CARD, "--sweep", "memory=6GB:24GB", "--memory", "8GB"], "cannot be combined with a sweep over memory"),
        ([*CARD, "--sweep", "hardware=h200"], "hardware='rtx-3060' cannot be combined with a sweep over hardware"),
        ([*CARD, "--sweep", "memory=6GB:24GB", "--trace", "t.json"], "trace='t.json' shows one plan"),
        ([*CARD, "--sweep", "memory=6GB:24GB", "--report", "s.html"], "--save table.csv keeps its table"),
        ([*CARD, "--sweep", "memory=6GB:24GB", "--save", "t.yaml"], "end the name with .csv or .json"),
        (
            ["--sweep", "hardware=rtx-3060,rtx-3091"],
            "hardware='rtx-3091' is no file and not known; did you mean",
        ),
        ([*CARD, "--devices", "0"], "devices=0 must be from 1 to 64: cards of one machine"),
        ([*CARD, "--nodes", "65"], "nodes=65 must be from 1 to 64: machines that are alike"),
        ([*CARD, "--sweep", "nodes=0:x"], "sweep='nodes=0:x' is not understood; write nodes=1:64, or nodes=1,2,4,8"),
        ([*CARD, "--sweep", "nodes=1:2", "--nodes", "2"], "cannot be combined with a sweep over nodes"),
        ([*CARD, "--sweep", "devices=1:x"], "sweep='devices=1:x' is not understood; write devices=1:8"),
        ([*CARD, "--sweep", "devices=1:2", "--devices", "2"], "cannot be combined with a sweep over devices"),
        (["--hardware", "rtx-30"], "could be rtx-3060-12gb or rtx-3070-8gb or rtx-3090"),
        (["--hardware", "h200,host=ddr3"], "host='ddr3' is no file and not known; did you mean"),
        ([*CARD, "--memory", "lots"], "memory='lots' is not a size"),
        ([*CARD, "--trainer.strategy.planner", "magic"], "planner"),
    ],
)
def test_a_mistake_says_what_works(
    recipe: str, capsys: pytest.CaptureFixture[str], flags: list[str], message: str
) -> None:
    assert message in fails(capsys, "plan", recipe, *flags)


def test_doctor_writes_a_machine_that_plans_are_made_for(
    recipe: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    machine = load_hardware("rtx-3070,ram=48GB")
    monkeypatch.setattr(doctor, "measure_machine", lambda **_: machine)
    assert main(["doctor", "--save", "mine.yaml"]) == 0
    assert "mine.yaml  (plan for this machine anywhere: --hardware mine.yaml)" in capsys.readouterr().out
    assert load_hardware("mine.yaml") == machine
    assert main(["plan", recipe, "--hardware", "mine.yaml", "--save", "plan.json"]) == 0
    assert Plan.load("plan.json").host_budget_bytes == 432 * 10**8
    assert "all is one word too many: lt-finetune doctor [--save SAVE]" in fails(capsys, "doctor", "all")
    assert "--save needs a value: lt-finetune doctor [--save SAVE]" in fails(capsys, "doctor", "--save")


def test_too_little_ram_names_a_recipe_that_fits(recipe: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", recipe, "--hardware", "rtx-3060,ram=1.9GB"]) == 2
    assert "the 2 GB of Python, PyTorch and libraries included" in capsys.readouterr().err
    assert recipes.largest_within(12 * 10**9, 32 * 10**9) == "qwen3-14b-qlora-12gb"
    assert recipes.largest_within(12 * 10**9, 16 * 10**9) == "mistral-nemo-qlora-12gb"
    assert recipes.largest_within(12 * 10**9, 4 * 10**9) is None
    flags = ["--model.architecture", "llama2-7b", "--trainer.strategy.host_memory", "32GB"]
    assert main(["plan", recipe, "--hardware", "rtx-3060", *flags]) == 2
    said = capsys.readouterr().err
    assert "of the recipes that come with lt_offload, qwen3-14b-qlora-12gb fits" in said
    assert re.search(r"at least host_memory=[\d.]+GB", said)


def test_too_little_ram_for_a_first_plan_is_too_little_for_any(
    recipe: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    estimate, sizes, said = plan_verb.estimate, list[Any](), list[str]()

    def noted(app: Any, hardware: Any, *size: Any, **others: Any) -> Profile:
        sizes.append(size)
        return estimate(app, hardware, *size, **others)

    monkeypatch.setattr(plan_verb, "estimate", noted)
    flags = ["--hardware", "rtx-3060,ram=1.9GB", "--data.batch_size", "8", "--trainer.strategy.micro_batches", "2"]
    for quiet in ([], ["--quiet"]):  # which tells no first plan
        said.append(fails(capsys, "plan", recipe, *flags, *quiet).rpartition("error: ")[2])
    assert sizes == [(4, 1), (8, 2)]
    assert said[0] == said[1]
