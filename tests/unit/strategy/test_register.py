"""Registration in every Lightning namespace: each case in a process of its own that has loaded nothing of Lightning."""

from __future__ import annotations

import importlib
import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from lt_offload.strategy import register as _register

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[3]
NAMESPACES = {
    "lightning.pytorch": "import lightning.pytorch as L",
    "pytorch_lightning": "import pytorch_lightning as L",
}
TRAINER = "trainer = L.Trainer(strategy='offmate', accelerator='cpu', logger=False, enable_checkpointing=False)"
SHOW = (
    "strategy = trainer.strategy;"
    "show(type(strategy).__name__, strategy.namespace, isinstance(strategy, L.strategies.Strategy))"
)

ORDERS = {
    "before": "import lt_offload; {lightning}",
    "after": "{lightning}; import lt_offload",
    "before its submodules": "import lt_offload; from {namespace}.strategies import Strategy; {lightning}",
    "before and after": "import importlib, lt_offload; {lightning}; import lt_offload; importlib.reload(lt_offload)",
}
INSTANCE = "strategy=lt_offload.OffmateStrategy(memory='1GB')"
GIVEN = [
    TRAINER.replace("strategy='offmate'", INSTANCE),
    SHOW,
    "show(strategy.memory, trainer.precision_plugin is strategy.precision_plugin, strategy.root_device.type)",
]
MADE: list[object] = [10**9, True, "cpu"]


def shown(namespace: str) -> list[object]:
    return ["OffmateStrategy", namespace, True]


# Parsing takes long: every second one is for one namespace, the others are for the other.
COMMAND_LINES = [
    ["--trainer.strategy=offmate"],
    ["--trainer.strategy=OffmateStrategy"],
    ["--trainer.strategy=offmate", "--trainer.strategy.memory=2GB"],
    ["--trainer.strategy=lt_offload.OffmateStrategy", "--trainer.strategy.memory=2GB"],
    ['--trainer={"strategy": {"class_path": "offmate", "init_args": {"memory": "2GB"}}}'],
    ['--trainer={"strategy": {"class_path": "lt_offload.OffmateStrategy", "init_args": {"memory": "2GB"}}}'],
]
CASES: dict[str, tuple[list[str], list[list[object]]]] = {
    f"{order}, {namespace}": (
        [code.format(lightning=lightning, namespace=namespace), TRAINER, SHOW, *GIVEN],
        [shown(namespace), shown(namespace), MADE],
    )
    for order, code in ORDERS.items()
    for namespace, lightning in NAMESPACES.items()
}
"""By order of imports, a trainer that knows the strategy by its name, and one that is given an object."""
CASES |= {
    f"own command line, {namespace}": (
        [
            "import lt_offload",
            f"from {namespace}.cli import LightningCLI",
            f"from {namespace} import LightningModule",
            "class Mine(LightningModule): ...",
            f"for args in {lines}:",
            "    args.append('--trainer.accelerator=cpu')",
            "    strategy = LightningCLI(Mine, args=args, run=False, save_config_callback=None).trainer.strategy",
            "    show(type(strategy).__name__, strategy.namespace, strategy.memory)",
        ],
        [["OffmateStrategy", namespace, size] for size in (None, 2 * 10**9, 2 * 10**9)],
    )
    for namespace, lines in zip(NAMESPACES, (COMMAND_LINES[::2], COMMAND_LINES[1::2]), strict=True)
}
CASES |= {
    "both namespaces": (
        ["import lt_offload", *(line for each in NAMESPACES.values() for line in (each, TRAINER, SHOW))],
        [shown(namespace) for namespace in NAMESPACES],
    ),
    "object made before": (
        [
            f"import lt_offload; {INSTANCE}",
            NAMESPACES["pytorch_lightning"],
            *[line.replace(INSTANCE, "strategy=strategy") for line in GIVEN],
        ],
        [shown("pytorch_lightning"), MADE],
    ),
    "object, derived": (
        [
            "import lt_offload",
            NAMESPACES["pytorch_lightning"],
            "class Mine(lt_offload.OffmateStrategy): ...",
            "try:",
            "    L.Trainer(strategy=Mine(), accelerator='cpu')",
            "except ValueError as error:",
            "    show('Mine derives from lt_offload.OffmateStrategy' in str(error))",
            "    show(\"strategy_class('pytorch_lightning')\" in str(error))",
        ],
        [[True], [True]],
    ),
    "Fabric": (
        [
            "import lt_offload",
            "from lightning.fabric import Fabric",
            "try:",
            "    Fabric(strategy='offmate', accelerator='cpu')",
            "except lt_offload.UnsupportedError as error:",
            "    show('use lt_offload.offloaded(model, optimizer, batch) around your loop' in str(error))",
        ],
        [[True]],
    ),
    "imported twice": (
        [
            "import sys, lt_offload",
            "for name in [n for n in sys.modules if n.startswith('lt_offload')]: del sys.modules[name]",
            "import lt_offload",
            "show(sum(getattr(f, 'registers_offmate', False) for f in sys.meta_path))",
            NAMESPACES["lightning.pytorch"],
            TRAINER,
            SHOW,
        ],
        [[1], shown("lightning.pytorch")],
    ),
    "registered lazily": (
        [
            "import sys, lt_offload",
            NAMESPACES["pytorch_lightning"],
            "from pytorch_lightning.strategies import StrategyRegistry",
            "OURS = 'lt_offload.strategy.offmate'",
            "show('offmate' in StrategyRegistry, OURS in sys.modules, 'lightning.pytorch' in sys.modules)",
            TRAINER,
            "show('lightning.pytorch' in sys.modules)",
        ],
        [[True, False, False], [False]],
    ),
}
# One process imports what Lightning itself imports, most of the time it takes, then forks once per case.
FORKS = """
import json, os, sys, traceback
import torch, torch._dynamo, torchmetrics, torch.distributed.fsdp, rich.console
def show(*values):
    os.write(wire, (json.dumps(values) + "\\n").encode())
for name, lines in json.loads(sys.argv[1]).items():
    read, wire = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            assert not [n for n in sys.modules if n.split(".")[0] in ("lightning", "pytorch_lightning", "lt_offload")]
            exec("\\n".join(lines), {"show": show})
        except BaseException:
            show(traceback.format_exc())
        os._exit(0)
    os.close(wire)
    os.waitpid(child, 0)
    with os.fdopen(read) as answers:
        print(json.dumps([name, [json.loads(line) for line in answers]]))
"""


def run(code: str, *args: str, autoload: bool = False, path: Path = ROOT) -> subprocess.CompletedProcess[str]:
    env = os.environ | {"TORCH_DEVICE_BACKEND_AUTOLOAD": str(int(autoload)), "PYTHONPATH": f"{path}{os.pathsep}{ROOT}"}
    command = [sys.executable, "-W", "ignore", "-c", code, *args]
    done = subprocess.run(command, capture_output=True, text=True, env=env, check=False, cwd=path)
    assert done.returncode == 0, done.stderr
    return done


@pytest.fixture(scope="module")
def answers() -> dict[str, list[list[object]]]:
    lines = {name: lines for name, (lines, _) in CASES.items()}
    return dict(json.loads(line) for line in run(FORKS, json.dumps(lines)).stdout.splitlines() if line.startswith("["))


@pytest.mark.long
@pytest.mark.parametrize("case", CASES)
def test_the_name_and_the_class_are_known(answers: dict[str, list[list[object]]], case: str) -> None:
    assert answers[case] == CASES[case][1]


# -- without any import by the user -----------------------------------------------------------------------------------

ENTRY_POINT = "lt_offload:_autoload"


@pytest.fixture
def installed(tmp_path: Path) -> Path:
    """A folder with the metadata of an installed distribution, so that the test needs no installation."""
    info = tmp_path / "autoloaded-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: autoloaded\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[torch.backends]\nautoloaded = {ENTRY_POINT}\n")
    return tmp_path


def test_the_project_declares_the_entry_point() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["entry-points"]["torch.backends"] == {"lt_offload": ENTRY_POINT}


def test_no_import_at_all(installed: Path) -> None:
    lines = [*(line for lightning in NAMESPACES.values() for line in (lightning, TRAINER, SHOW))]
    out = run("show = print\n" + "\n".join(lines), autoload=True, path=installed).stdout
    assert out.splitlines()[-2:] == [f"OffmateStrategy {namespace} True" for namespace in NAMESPACES]


def test_importing_torch_stays_light_and_can_be_kept_free_of_it(installed: Path) -> None:
    names = ("lt_offload", "lightning", "pytorch_lightning", "pydantic")
    code = f"import sys, torch; print([n in sys.modules for n in {names}])"
    assert run(code, autoload=True, path=installed).stdout.strip() == "[True, False, False, False]"
    assert run(code, autoload=False, path=installed).stdout.strip() == "[False, False, False, False]"


def test_the_name_can_be_switched_off_and_the_object_is_there(installed: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LT_OFFLOAD_AUTOLOAD", "0")
    code = (
        "import lightning.pytorch as pl, lt_offload\n"
        "from lightning.pytorch.strategies import StrategyRegistry\n"
        "strategy = lt_offload.OffmateStrategy(memory='1GB')\n"
        "pl.Trainer(accelerator='cpu', strategy=strategy, logger=False)\n"
        "print('offmate' in StrategyRegistry)"
    )
    assert run(code, autoload=True, path=installed).stdout.splitlines()[-1] == "False"


# -- nothing may break an import --------------------------------------------------------------------------------------


DEPENDENCIES = """
import sys
class Missing:
    def find_spec(self, name, path, target=None):
        if name.partition(".")[0] in {names}:
            raise ModuleNotFoundError(name)
sys.meta_path.insert(0, Missing())
"""


def test_torch_is_imported_without_any_of_our_dependencies(installed: Path) -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    names = {re.split(r"\W", requirement.replace("-", "_"))[0] for requirement in project["dependencies"]}
    names = {"yaml" if name == "PyYAML" else name for name in names} - {"torch", "numpy"}
    code = DEPENDENCIES.format(names=names) + "import torch, lt_offload; print(torch.ones(1).item())"
    done = run(code, autoload=True, path=installed)
    assert (done.stdout, done.stderr) == ("1.0\n", "")


@pytest.mark.parametrize("lost", ["errors.py", "strategy/namespaces.py", "strategy"])
def test_torch_is_imported_beside_a_broken_installation_which_says_so(installed: Path, lost: str) -> None:
    shutil.copytree(ROOT / "lt_offload", installed / "lt_offload", ignore=shutil.ignore_patterns("__pycache__"))
    gone = installed / "lt_offload" / lost
    shutil.rmtree(gone) if gone.is_dir() else gone.unlink()
    done = run("import torch; print(torch.ones(1).item())", autoload=True, path=installed)
    assert done.stdout == "1.0\n"
    said = r"lt_offload: the strategy 'offmate' is not registered, as .* is broken \(.*\);.*\n"
    assert re.fullmatch(said, done.stderr)


@pytest.mark.parametrize("contents", ["", "StrategyRegistry = None", "__getattr__ = lambda name: 1 / 0"])
def test_a_strange_namespace_is_imported_all_the_same(
    contents: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "strange_strategies.py").write_text(f"{contents}\nvalue = 7\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setitem(_register._REGISTRIES, "strange_strategies", "strange")
    assert importlib.import_module("strange_strategies").value == 7
    monkeypatch.delitem(sys.modules, "strange_strategies")
