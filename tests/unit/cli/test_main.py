from __future__ import annotations

import io
import json
import logging
import os
import re
import socket
import subprocess
import sys
import warnings
from pathlib import Path
from types import SimpleNamespace

import pytest

from lt_offload import __version__
from lt_offload.cli import messages, recipes
from lt_offload.cli.main import main
from lt_offload.cli.messages import Messages
from lt_offload.errors import OffloadError
from lt_offload.finetune.terminal import keeping_quiet, say, status

PROGRAM = [sys.executable, "-m", "lt_offload.cli.main"]


def cli(*args: str, cwd: Path | None = None, **variables: str) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(Path(__file__).parents[3])])} | variables
    return subprocess.run([*PROGRAM, *args], capture_output=True, text=True, cwd=cwd, env=environment, check=False)


def test_ls_shows_every_recipe_with_its_first_line(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("psutil.virtual_memory", lambda: SimpleNamespace(total=32 * 10**9))
    assert main(["ls"]) == 0
    out = capsys.readouterr().out
    lines = [line for line in out.splitlines() if line.startswith(("  ", "* ")) and "of this machine" not in line]
    shown = {line[2:].split()[0]: line for line in lines}
    assert len(shown) == len(lines)
    small = [name for name, path in recipes.shipped().items() if recipes.ram_gigabytes(path) <= 32]
    assert {name for name, line in shown.items() if line.startswith("  ")} == set(small) >= {"llama3-8b-qlora-8gb"}
    assert out.index("llama3-8b-lora-12gb") < out.index("bloom-3b-12gb"), "what the machine has the RAM for comes first"
    assert "* more RAM than the 32 GB of this machine" in out
    assert shown.keys() == recipes.shipped().keys()
    for name, path in recipes.shipped().items():
        assert recipes.describe(path)
        assert shown[name].endswith(recipes.describe(path))
    assert main(["ls", "--json"]) == 0
    found = {recipe.pop("name"): recipe for recipe in json.loads(capsys.readouterr().out)}
    assert found.keys() == shown.keys()
    path = recipes.shipped()["phi2-8gb"]
    assert found["phi2-8gb"] == {"gpu_gb": 8, "ram_gb": 58, "about": recipes.describe(path), "file": str(path)}


@pytest.mark.slow
def test_nothing_slow_is_imported_for_answers_that_need_nothing_slow(tmp_path: Path) -> None:
    """All in one process, as each of them would show what another has imported."""
    lines = [
        "ls",
        "--version",
        "--help",
        "fit --help",
        "quickstart --help",
        "quickstart --trainer.help",
        f"cp quickstart {tmp_path}/mine.yaml",
        "nothing",
        "chek quickstart",
        "quickstart --model.lrr 1",
        "quickstart --trainer.strategy.memry 1",
        "new phi2 --memory 12GB --output README.md",
        "new phi2 --hardware rtx-9999",
    ]
    code = """
import sys
from lt_offload.cli.main import main
print(*(main(line.split()) for line in sys.argv[1:]), file=sys.stderr)
slow = {"torch", "lightning", "transformers", "datasets", "jsonargparse", "rich", "numpy"} & set(sys.modules)
sys.exit(", ".join(slow) or 0)
"""
    done = subprocess.run(
        [sys.executable, "-c", code, *lines],
        capture_output=True, text=True, cwd=Path(__file__).parents[3], check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stderr.splitlines()[-1].split() == ["0"] * 7 + ["2"] * 6


def test_version_and_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"lt-finetune {__version__}\n"
    assert main(["--help"]) == 0
    assert "plan RECIPE" in capsys.readouterr().out
    assert main([]) == 2


def test_cp_makes_a_recipe_that_still_finds_its_bases(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["cp", "quickstart", str(tmp_path / "mine.yaml")]) == 0
    assert str(tmp_path / "mine.yaml") in capsys.readouterr().out
    ours = recipes.chain(tmp_path / "mine.yaml")
    assert ours[:-1] == recipes.chain(recipes.find("quickstart"))[:-1]
    assert len(ours) > 1
    assert main(["cp", "phi2-8gb", str(tmp_path)]) == 0
    assert (tmp_path / "phi2-8gb.yaml").is_file()


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["cp", "quickstart"], "cp needs FILE: lt-finetune cp RECIPE FILE"),
        (["cp", "quickstart", "{}/there.yaml"], "exists already"),
        (["cp", "quickstart", "{}/no/folder.yaml"], "there is no folder"),
        (["cp", "quikstart", "{}/x.yaml"], "did you mean quickstart"),
        (["ls", "all"], "ls: all is one word too many"),
        (["export", "quickstart", "full"], "the folder or file to write is --output full"),
        (["train", "quickstart"], "the verb of training is fit, and may be left out: lt-finetune RECIPE"),
        (["fit"], "fit needs a recipe"),
        (["plan", "--memory", "8GB"], "plan needs a recipe"),
        (["quikstart"], "did you mean quickstart"),
    ],
)
def test_one_line_for_each_mistake(
    args: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "there.yaml").write_text("mine")
    assert main([arg.format(tmp_path) for arg in args]) == 2
    captured = capsys.readouterr()
    assert captured.err.startswith("error: ")
    assert message in captured.err
    assert captured.err.count("\n") == 1
    assert (tmp_path / "there.yaml").read_text() == "mine"


@pytest.mark.parametrize(("error", "code"), [(OffloadError("ours"), 2), (RuntimeError("theirs\nat length"), 1)])
def test_the_traceback_is_there_for_those_who_ask(
    error: Exception, code: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(*args: object) -> object:
        raise error

    monkeypatch.setattr(recipes, "shipped", fail)
    assert main(["ls"]) == code
    assert "Traceback" not in capsys.readouterr().err
    assert main(["ls", "--debug"]) == code
    captured = capsys.readouterr().err
    assert "Traceback" in captured
    assert "in fail" in captured


def test_an_interrupt_is_one_line(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def interrupt(*args: object) -> object:
        raise KeyboardInterrupt

    monkeypatch.setattr(recipes, "shipped", interrupt)
    assert main(["ls"]) == 130
    assert capsys.readouterr().err == "\ninterrupted\n"


@pytest.mark.slow
@pytest.mark.parametrize("args", [("check", "quickstart"), ("new", "phi2", "--hardware", "rtx-3060")])
def test_something_is_visible_before_anything_slow_begins(args: tuple[str, ...]) -> None:
    command = [PROGRAM[0], "-X", "importtime", *PROGRAM[1:], *args]
    imported: list[str] = []
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, cwd=Path(__file__).parents[3]) as process:
        assert process.stderr is not None
        for line in process.stderr:
            if "starting PyTorch and Lightning" in line:
                break
            imported.append(line.rsplit("|", 1)[-1].strip())
        process.kill()
    assert "lt_offload.cli.main" in imported or "lt_offload.errors" in imported
    slow = ("torch", "lightning", "transformers", "datasets", "jsonargparse")
    assert [name for name in imported if name.split(".")[0] in slow] == []


@pytest.mark.slow
def test_output_that_nobody_reads(tmp_path: Path) -> None:
    done = subprocess.run(
        f"{' '.join(PROGRAM)} ls | true", shell=True, capture_output=True, text=True,
        cwd=Path(__file__).parents[3], check=False,
    )  # fmt: skip
    assert done.stderr == ""


# -- messages --------------------------------------------------------------------------------------------------------


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def told(name: str, path: str, level: int, message: str) -> None:
    Messages().handle(logging.LogRecord(name, level, path, 1, message, None, None))


@pytest.mark.slow
def test_names_and_texts_are_in_utf8_whatever_the_system_has(tmp_path: Path) -> None:
    (tmp_path / "tëxt.txt").touch()
    model = "model: {name: microsoft/phi-2, architecture: phi2}"
    recipe = f"# größer\nbase: configs/base.yaml\n{model}\ndata: {{path: tëxt.txt}}\n"
    (tmp_path / "rëzept.yaml").write_text(recipe, encoding="utf-8")
    done = cli("check", "rëzept.yaml", cwd=tmp_path, LC_ALL="C", PYTHONUTF8="0")
    said = "rëzept.yaml: every setting is known and of the right type\n"
    assert (done.returncode, done.stdout) == (0, said), done.stderr


def test_libraries_tell_warnings_and_we_tell_what_matters(capsys: pytest.CaptureFixture[str]) -> None:
    ours = str(Path(messages.__file__).parents[1] / "strategy" / "offmate.py")
    told("lightning.pytorch.utilities.rank_zero", "/lightning/setup.py", logging.INFO, "GPU available: False")
    told("lightning.pytorch.utilities.rank_zero", ours, logging.INFO, "offmate: the plan stays")
    told("lightning.pytorch.utilities.rank_zero", "/lightning/setup.py", logging.WARNING, "a thing\n  to mend")
    with keeping_quiet(True):
        told("x", ours, logging.INFO, "offmate: hidden")
        told("x", ours, logging.WARNING, "shown")
    assert capsys.readouterr().err == "the plan stays\nwarning: a thing to mend\nwarning: shown\n"


def test_what_goes_on_is_one_line_per_phase_elsewhere_than_on_a_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    with keeping_quiet(False):
        for message in ("measuring a", "measuring b", "planning c", "measuring d"):
            status(message)
    assert capsys.readouterr().err == "measuring a ...\nplanning c ...\nmeasuring d ...\n"


def test_what_goes_on_is_drawn_anew_on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = Terminal()
    for name in ("stderr", "__stderr__"):
        monkeypatch.setattr(sys, name, terminal)
    for name in ("NO_COLOR", "CI"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "20")
    with keeping_quiet(False):
        status("measuring")
        status("measuring something with a long name")
        say("a fact")
        say("another")
        status("planning")
    parts = re.split(r"[\r\n]|\x1b\[[?0-9]*[A-Za-z]", terminal.getvalue())
    assert list(dict.fromkeys(filter(None, map(str.strip, parts)))) == [
        "measuring ...",
        "measuring something",
        "a fact",
        "another",
        "planning ...",
    ]
    terminal.seek(0)
    terminal.truncate()
    told("lightning", messages.__file__, logging.INFO, "words that a terminal breaks-up in runs/a-long-name/b.ckpt")
    assert terminal.getvalue() == "words that a\nterminal breaks-up\nin\nruns/a-long-name/b.ckpt\n"
    other = Terminal()
    monkeypatch.setattr(sys, "stderr", other)
    status("writing")
    assert other.getvalue() == "", "somebody draws a line of theirs"


def test_warnings_of_libraries_are_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    messages.install()
    warnings.showwarning(UserWarning("two\n  lines"), UserWarning, "/site-packages/library.py", 3)
    assert capsys.readouterr().err == "warning: two lines\n"


def test_a_hub_that_does_not_answer_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    messages.install()
    hub = logging.getLogger("huggingface_hub.utils._http")
    for number in range(3):
        hub.warning("'[Errno -2] Name or service not known' thrown while requesting HEAD https://hub/%d", number)
        hub.warning("Retrying in %ds [Retry %d/5].", 2**number, number)
    captured = capsys.readouterr()
    assert captured.err == "waiting for the hub, which does not answer ...\n"


def test_without_a_network_nothing_is_asked_of_it_again() -> None:
    messages.install()
    hub = logging.getLogger("huggingface_hub.utils._http")

    def asked() -> None:
        try:
            raise ConnectionError("the hub's own") from socket.gaierror(-2, "Name or service not known")
        except ConnectionError:
            hub.warning("'...' thrown while requesting HEAD https://hub/")

    with pytest.raises(ConnectionError, match="the hub's own"):
        asked()
