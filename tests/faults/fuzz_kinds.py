"""The kinds of input that ``fuzz.py`` breaks: from sound files and flags to what reads them."""

from __future__ import annotations

import contextlib
import io
import json
from pathlib import Path
from random import Random
from typing import Any, ClassVar, Protocol

import torch
import yaml
from torch import nn

from lt_offload import Plan, Profile, profile_config, simulate, solve
from lt_offload.cli import recipes
from lt_offload.cli.main import main
from lt_offload.finetune.data.module import FineTuneData
from lt_offload.plan import check
from lt_offload.plan.sweep import parse_sweep
from lt_offload.profiling.hardware import hardware_names, load_hardware
from lt_offload.resources import shipped_root
from lt_offload.schema.files import to_json
from lt_offload.strategy.checkpoint.files import load, load_optimizer_state
from lt_offload.strategy.checkpoint.foreign import check_checkpoint, check_optimizer, check_weights, loading_state
from lt_offload.units import parse_bytes
from scripts.common import ROOT
from tests.faults import fuzz_mutations as broken


class Refused(Exception):
    """``lt-finetune`` has left with exit code 2 and this sentence."""


class Kind(Protocol):
    """One kind of input; a folder of its own is given to it."""

    share: ClassVar[int]
    """How many of a thousand inputs are of this kind."""

    def attempt(self, random: Random) -> None:
        """Make one input and hand it over."""


class _InFolder:
    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)


class Sizes(_InFolder):
    """Sizes, and ranges of sizes for a sweep."""

    share = 150

    def attempt(self, random: Random) -> None:
        """See the class."""
        sound = random.choice(("12GB", "10GiB", "640MB", "1.5e3 kB", "memory=6GB:24GB:2GB", "host_memory=1GB,2GB"))
        value = random.choice((broken.text(random, sound), random.choice(broken.JUNK)))
        if isinstance(value, str) and random.random() < 0.5:
            parse_sweep(value)
        else:
            assert parse_bytes(value) > 0


class Hardware(_InFolder):
    """Descriptions of machines, and names with changes."""

    share = 120

    def attempt(self, random: Random) -> None:
        """See the class."""
        if random.random() < 0.3:
            load_hardware(broken.text(random, random.choice(("rtx-3060,host=ddr4-64gb,link=6GB", "h200,ram=48GB"))))
            return
        sound = (shipped_root() / "configs" / "hardware" / f"{random.choice(hardware_names())}.yaml").read_text()
        path = self.folder / "machine.yaml"
        if random.random() < 0.5:
            sound = yaml.safe_dump(broken.data(random, yaml.safe_load(sound)))
        else:
            sound = broken.text(random, sound)
        path.write_bytes(sound.encode("utf-8", "surrogatepass"))
        machine = load_hardware(path)
        assert machine.h2d_bytes_per_s > 0
        assert machine.device_bytes > 0


class Recipes(_InFolder):
    """Recipe files up to what the parser is given."""

    share = 150

    def attempt(self, random: Random) -> None:
        """See the class."""
        names = sorted(recipes.shipped())
        path = _write_recipe(self.folder, random, recipes.shipped()[random.choice(names)].read_text())
        files = recipes.chain(path)
        recipes.compose([*files, *recipes.for_gpu(files)], ["--model.lora.r", "8"])


class Plans(_InFolder):
    """Saved plans, and whether what is still accepted can be shown, simulated and checked."""

    share = 160

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.profile = tiny_profile()
        floor = 700_000_000  # the context of the card counts
        planners: tuple[Any, ...] = ("resident", "offmate", "greedy", "l2l", "memferry")
        made = [solve(self.profile, memory=floor, planner=planner, solver_time_limit=2) for planner in planners]
        made.append(solve(self.profile, memory=floor, accumulate=3, solver_time_limit=2))
        made.append(solve(self.profile, memory=floor, accumulate=2, delayed=True, solver_time_limit=2))
        self.sound = [json.loads(to_json(plan)) for plan in made]

    def attempt(self, random: Random) -> None:
        """See the class."""
        path = _write_json(self.folder / "plan.json", random, random.choice(self.sound))
        plan = Plan.load(path)
        plan.explain()
        if not check(plan, self.profile):
            simulate(plan, self.profile)


class Profiles(_InFolder):
    """Saved profiles, and whether what is still accepted can be planned for."""

    share = 100

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.sound = [json.loads(to_json(tiny_profile())), json.loads(to_json(tiny_profile(lora={"r": 2})))]

    def attempt(self, random: Random) -> None:
        """See the class."""
        profile = Profile.load(_write_json(self.folder / "profile.json", random, random.choice(self.sound)))
        planner: Any = random.choice(("resident", "l2l", "greedy", "offmate"))
        plan = solve(
            profile,
            memory=random.choice(("510MB", "600MB", "12GB")),
            planner=planner,
            accumulate=random.choice((1, 2, 5)),
            delayed=random.random() < 0.3,
            solver_time_limit=1,
        )
        assert check(plan, profile) == []


class Rows(_InFolder):
    """Data files: broken rows, broken files."""

    share = 150
    text = tuple({"text": f"row {n} of a text that is there"} for n in range(4))
    alpaca = tuple({"instruction": f"say {n}", "input": "", "output": f"yes, {n}"} for n in range(4))

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.tokenizer = _tiny().tokenizer(folder / "tokenizer")

    def attempt(self, random: Random) -> None:
        """See the class."""
        form: Any = random.choice(("text", "alpaca"))
        rows = broken.data(random, list(self.text if form == "text" else self.alpaca))
        path = self.folder / random.choice(("rows.json", "rows.jsonl", "rows.txt"))
        if path.suffix == ".jsonl" and isinstance(rows, list):
            content = "\n".join(json.dumps(row) for row in rows)
        else:
            content = json.dumps(rows)
        if random.random() < 0.3:
            content = broken.text(random, content)
        path.write_bytes(content.encode("utf-8", "surrogatepass"))
        made = FineTuneData(
            str(self.tokenizer), path=str(path), format=form, max_length=random.choice((4, 32)),
            pack=random.random() < 0.5, skip_bad_rows=random.random() < 0.3, batch_size=random.choice((1, 3)),
        )  # fmt: skip
        made.setup("fit")
        for batch in made.train_dataloader():
            assert (batch["labels"][:, 1:] != -100).any(), "a batch without anything to learn"


class CommandLines(_InFolder):
    """Verbs and flags; of the verbs those that neither train nor measure."""

    share = 70
    flags = tuple(
        f"--{name}"
        for name in (
            *(f"data.{n}" for n in ("path", "batch_size", "max_length", "format", "validation_share", "seed")),
            *(f"model.{n}" for n in ("lr", "lora.r", "lora", "name", "dtype", "betas", "warmup_steps")),
            *(f"trainer.{n}" for n in ("max_steps", "callbacks", "precision", "devices", "accelerator", "strategy")),
            *(f"trainer.{n}" for n in ("accumulate_grad_batches", "gradient_clip_val", "gradient_clip_algorithm")),
            *(f"trainer.strategy.{n}" for n in ("memory", "host_memory", "planner", "batch_size", "plan")),
            *("trainer", "model", "data", "ckpt_path", "base", "gpu", "config", "seed_everything"),
            "trainer.default_root_dir",
        )
    )
    values = (
        "2",
        "0.8",
        "12GB",
        "80%",
        "null",
        "[]",
        "{}",
        "text.txt",
        "offmate",
        "cpu",
        "gpu",
        "nan",
        "-1",
        "1e3",
        "x",
    )

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        _tiny().tokenizer(folder / "model")
        (folder / "model" / "config.json").write_text(json.dumps({"model_type": "llama"}))
        (folder / "text.txt").write_text("some text " * 20)
        self.sound = (
            f"base: configs/base.yaml\ntrainer: {{accelerator: cpu}}\nmodel: {{name: {folder / 'model'}}}\n"
            f"data: {{path: {folder / 'text.txt'}}}\n"
        )

    def attempt(self, random: Random) -> None:
        """See the class."""
        recipe = self.folder / "recipe.yaml"
        recipe.write_text(self.sound)
        if random.random() < 0.3:
            _write_recipe(self.folder, random, self.sound)
        args = ["check", str(recipe)]
        for _ in range(random.randint(0, 2)):
            flag = random.choice(self.flags)
            flag = broken.text(random, flag) if random.random() < 0.2 else flag
            value = random.choice(self.values)
            args += [f"{flag}={value}"] if random.random() < 0.5 else [flag, value]
        if random.random() < 0.2:
            args = [broken.text(random, random.choice(("plan", "ls", "--version", "cp", "generate", "quickstart")))]
        lt_finetune([arg.replace("\0", "") for arg in args])


class Checkpoints(_InFolder):
    """Checkpoint files: broken bytes, and the state of other trainings."""

    share = 100

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(4, 3), nn.LayerNorm(3))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.1)
        self.model(torch.ones(2, 4)).sum().backward()
        self.optimizer.step()
        self.sound = {
            "pytorch-lightning_version": "2.6.0",
            "state_dict": dict(self.model.state_dict()),
            "optimizer_states": [self.optimizer.state_dict()],
            "lr_schedulers": [],
            "loops": {},
        }
        self.initial = self.optimizer.state_dict()

    def attempt(self, random: Random) -> None:
        """See the class."""
        path = self.folder / "step.ckpt"
        found = self.sound if random.random() < 0.4 else broken.data(random, self.sound)
        torch.save(found, path)
        if random.random() < 0.5:
            content = bytearray(path.read_bytes())
            for _ in range(random.randint(1, 30)):
                content[random.randrange(len(content))] = random.randrange(256)
            path.write_bytes(content[: random.choice((len(content), random.randrange(len(content))))])
        content_of = load(path, weights_only=True)
        check_checkpoint(content_of, path)
        check_weights(content_of["state_dict"], self.model.state_dict())
        self.model.load_state_dict(content_of["state_dict"])
        for state in content_of.get("optimizer_states", ()):
            check_optimizer(self.optimizer, state)
            with loading_state(self.optimizer):
                load_optimizer_state(self.optimizer, state, set(self.model.parameters()))


KINDS: dict[str, type[Any]] = {
    "sizes": Sizes,
    "hardware": Hardware,
    "recipes": Recipes,
    "plans": Plans,
    "profiles": Profiles,
    "rows": Rows,
    "command lines": CommandLines,
    "checkpoints": Checkpoints,
}


def lt_finetune(args: list[str]) -> None:
    """Run ``lt-finetune`` here; raise ``Refused`` for exit code 2 with one sentence."""
    errors = io.StringIO()
    with contextlib.redirect_stderr(errors), contextlib.redirect_stdout(io.StringIO()):
        try:
            code: Any = main(args)
        except SystemExit as left:  # --help and --print_config leave by themselves
            code = left.code or 0
    lines = [line for line in errors.getvalue().splitlines() if line.startswith("error: ")]
    if code == 2 and len(lines) == 1:
        raise Refused(lines[0])
    assert code == 0, f"exit code {code} for {args}: {lines or errors.getvalue()[-500:]}"


def tiny_profile(**options: Any) -> Profile:
    """Return the estimated profile of a Llama of four small layers on a small card."""
    from transformers import LlamaConfig

    config = LlamaConfig(
        vocab_size=500, hidden_size=32, intermediate_size=48, num_hidden_layers=4, num_attention_heads=4
    )
    return profile_config(config, batch_size=2, sequence_length=32, hardware="rtx-3070", **options)


def _tiny() -> Any:
    import sys

    sys.path.insert(0, str(ROOT))
    from tests.support import tiny

    return tiny


def _write_recipe(folder: Path, random: Random, sound: str) -> Path:
    path = folder / "recipe.yaml"
    path.write_bytes(broken.text(random, sound).encode("utf-8", "surrogatepass"))
    return path


def _write_json(path: Path, random: Random, sound: Any) -> Path:
    content = json.dumps(broken.data(random, sound))
    content = broken.text(random, content) if random.random() < 0.15 else content
    path.write_bytes(content.encode("utf-8", "surrogatepass"))
    return path
