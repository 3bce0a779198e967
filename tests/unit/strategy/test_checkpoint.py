"""Checkpoint files: complete or absent, no second copy in RAM, readable by everybody."""

from __future__ import annotations

import errno
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from lightning.fabric.plugins.io.checkpoint_io import CheckpointIO
from lightning.pytorch.plugins import TorchCheckpointIO
from torch import nn

from lt_offload.errors import CheckpointError
from lt_offload.replacing import SUFFIX, new_file, new_part
from lt_offload.strategy.checkpoint import archive
from lt_offload.strategy.checkpoint import files as checkpoint
from lt_offload.strategy.namespaces import bind

ROOT = Path(__file__).parents[3]


@pytest.fixture
def io() -> Any:
    return bind(checkpoint.AtomicCheckpointIO, "lightning.pytorch", "plugins.TorchCheckpointIO")()


def contents() -> dict[str, Any]:
    torch.manual_seed(0)
    weight = torch.randn(50, 7)
    return {"state_dict": {"a": weight, "tied": weight, "b": torch.arange(3)}, "epoch": 4, "loops": {"x": [1, 2]}}


def same(left: dict[str, Any], right: dict[str, Any]) -> bool:
    tensors = all(torch.equal(left["state_dict"][key], right["state_dict"][key]) for key in right["state_dict"])
    return tensors and left["loops"] == right["loops"] and left["epoch"] == right["epoch"]


def test_round_trip_and_no_leftovers(io: Any, tmp_path: Path) -> None:
    path = tmp_path / "deep" / "last.ckpt"
    io.save_checkpoint(contents(), path)
    loaded = io.load_checkpoint(path)
    assert same(loaded, contents())
    assert loaded["state_dict"]["a"].data_ptr() == loaded["state_dict"]["tied"].data_ptr()
    assert [p.name for p in path.parent.iterdir()] == ["last.ckpt"]
    assert isinstance(io, CheckpointIO)


def test_lightning_reads_our_files_and_we_read_its(io: Any, tmp_path: Path) -> None:
    stock = TorchCheckpointIO()
    io.save_checkpoint(contents(), tmp_path / "ours.ckpt")
    stock.save_checkpoint(contents(), tmp_path / "theirs.ckpt")
    assert same(stock.load_checkpoint(tmp_path / "ours.ckpt", weights_only=True), contents())
    assert same(io.load_checkpoint(str(tmp_path / "theirs.ckpt")), contents())


def test_a_loaded_checkpoint_survives_its_file(io: Any, tmp_path: Path) -> None:
    path = tmp_path / "last.ckpt"
    io.save_checkpoint(contents(), path)
    loaded = io.load_checkpoint(path)
    io.save_checkpoint({"state_dict": {}, "epoch": 5, "loops": {}}, path)
    assert same(loaded, contents())
    loaded["state_dict"]["b"].add_(1)  # writes to private pages, not to the file
    assert io.load_checkpoint(path)["epoch"] == 5


def test_code_in_a_checkpoint_is_refused_unless_asked_for(io: Any, tmp_path: Path) -> None:
    io.save_checkpoint({"module": nn.Linear(1, 1)}, tmp_path / "odd.ckpt")
    with pytest.raises(Exception, match="[Ww]eights.only"):
        io.load_checkpoint(tmp_path / "odd.ckpt")
    assert isinstance(io.load_checkpoint(tmp_path / "odd.ckpt", weights_only=False)["module"], nn.Linear)


def test_a_failed_save_leaves_the_last_checkpoint(io: Any, tmp_path: Path) -> None:
    path = tmp_path / "last.ckpt"
    io.save_checkpoint(contents(), path)
    with pytest.raises(Exception, match="pickle|local"):
        io.save_checkpoint({"bad": lambda: None}, path)
    assert same(io.load_checkpoint(path), contents())
    assert [p.name for p in tmp_path.iterdir()] == ["last.ckpt"]


def test_a_file_that_is_not_there_is_named(io: Any, tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"nothing\.ckpt"):
        io.load_checkpoint(tmp_path / "nothing.ckpt")


def test_remote_paths_are_lightnings(io: Any) -> None:
    io.save_checkpoint(contents(), "memory://run/last.ckpt")
    assert same(io.load_checkpoint("memory://run/last.ckpt"), contents())
    io.remove_checkpoint("memory://run/last.ckpt")


# -- on disk ----------------------------------------------------------------------------------------------------------


def test_contents_are_on_disk_before_the_name_and_the_name_before_the_return(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A power cut after the renaming must not find the new name with old or no contents."""
    done: list[tuple[str, int, int]] = []
    fsync, replace = os.fsync, Path.replace

    def synced(descriptor: int) -> None:
        fsync(descriptor)
        status = os.fstat(descriptor)
        done.append(("sync", status.st_ino, status.st_size))

    def replaced(source: Path, target: Path) -> Path:
        done.append(("replace", source.stat().st_ino, source.stat().st_size))
        return replace(source, target)

    monkeypatch.setattr(os, "fsync", synced)
    monkeypatch.setattr(Path, "replace", replaced)
    path = tmp_path / "a.ckpt"
    checkpoint.save(contents(), path)
    file = path.stat()
    assert [what[:2] for what in done] == [
        ("sync", file.st_ino), ("replace", file.st_ino), ("sync", tmp_path.stat().st_ino)
    ]  # fmt: skip
    assert done[0][2] == done[1][2] == file.st_size


def test_leftovers_are_removed_but_not_what_a_living_run_writes(tmp_path: Path) -> None:
    dead = tmp_path / f".a.ckpt{SUFFIX}"
    dead.write_bytes(b"half")
    (tmp_path / "a.ckpt").write_bytes(b"whole")
    alive, descriptor = new_part(tmp_path / "b.ckpt", new_file)
    with os.fdopen(descriptor):
        checkpoint.prepare(tmp_path)
        assert sorted(p.name for p in tmp_path.iterdir()) == [alive.name, "a.ckpt"]
    checkpoint.prepare(tmp_path)
    assert [p.name for p in tmp_path.iterdir()] == ["a.ckpt"]


def test_what_others_have_left_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / ".download.partial").write_bytes(b"of another program")
    (tmp_path / ".folder.partial").mkdir()
    (tmp_path / f".link{SUFFIX}").symlink_to(".download.partial")
    checkpoint.prepare(tmp_path)
    assert len(list(tmp_path.iterdir())) == 3
    (tmp_path / f".a.ckpt{SUFFIX}").write_bytes(b"of another user")
    monkeypatch.setattr("os.geteuid", lambda: tmp_path.stat().st_uid + 1)
    checkpoint.prepare(tmp_path)
    assert len(list(tmp_path.iterdir())) == 4
    monkeypatch.setattr(Path, "glob", lambda folder, _: [folder / "removed by another run"])
    checkpoint.prepare(tmp_path)


def test_a_folder_is_tried_without_making_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs that begin in one folder at the same time do not meet each other's trials."""
    for call in ("os.mkdir", "os.rmdir"):
        monkeypatch.setattr(call, lambda *_: pytest.fail("a folder was made or removed"))
    checkpoint.prepare(tmp_path / "run" / "checkpoints")
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "file").touch()
    (tmp_path / "dangling").symlink_to("nowhere")
    for folder in (tmp_path / "file" / "checkpoints", tmp_path / "dangling"):
        with pytest.raises(CheckpointError, match=f"{folder}.* cannot be written"):
            checkpoint.prepare(folder)


@pytest.mark.parametrize(
    ("number", "said"),
    [
        (errno.EROFS, "is read-only .* dirpath= of ModelCheck"),
        (errno.EACCES, "is read-only .* dirpath= of ModelCheck"),
        (errno.ENOTDIR, "Not a directory; choose another"),
    ],
)
def test_a_folder_that_cannot_be_written_is_named_before_anything_is(
    number: int, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(dir: Path) -> None:
        raise OSError(number, os.strerror(number), str(dir))

    monkeypatch.setattr("tempfile.TemporaryFile", refuse)
    with pytest.raises(CheckpointError, match=f"{tmp_path}.* cannot be written.* {said}"):
        checkpoint.prepare(tmp_path)


def test_a_disk_without_room_is_named_before_the_first_byte(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=15_500))
    monkeypatch.setattr(archive, "fill", lambda *args: pytest.fail("the file was begun"))
    sentence = r"a\.ckpt was not written, the disk is full \(it takes 16.\d kB, 15.5 kB are free\); make room"
    state = {"weights": torch.zeros(4_000), "same": torch.zeros(1)}
    state["alias"] = state["weights"][:1_000]  # takes no room of its own
    with pytest.raises(CheckpointError, match=sentence):
        checkpoint.save(state, tmp_path / "a.ckpt")


@pytest.mark.parametrize(("call", "number"), [("pwrite", errno.ENOSPC), ("fsync", errno.EDQUOT)])
def test_a_disk_that_fills_up_meanwhile_is_named_too(
    call: str, number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "a.ckpt"
    checkpoint.save(contents(), path)

    def refuse(*_: object) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, call, refuse)
    with pytest.raises(CheckpointError, match="the disk is full"):
        checkpoint.save(contents(), path)
    monkeypatch.undo()
    assert same(checkpoint.load(path), contents())
    assert [p.name for p in tmp_path.iterdir()] == ["a.ckpt"]


def test_the_newest_complete_checkpoint(tmp_path: Path) -> None:
    whole: dict[str, Any] = {"state_dict": {}, "optimizer_states": [], "lr_schedulers": [], "loops": {}}
    assert checkpoint.newest(tmp_path) is None
    for age, name in enumerate(("cut", "weights", "text", "good", "older")):
        checkpoint.save({"state_dict": {}} if name == "weights" else whole, tmp_path / f"{name}.ckpt")
        os.utime(tmp_path / f"{name}.ckpt", ns=(10**18 - age, 10**18 - age))
    cut = tmp_path / "cut.ckpt"
    cut.write_bytes(cut.read_bytes()[:-10])
    (tmp_path / "text.ckpt").write_text("no checkpoint")
    (tmp_path / f".newer.ckpt{SUFFIX}").write_bytes((tmp_path / "good.ckpt").read_bytes())
    os.utime(tmp_path / "good.ckpt", ns=(10**17, 10**17))
    os.utime(tmp_path / "older.ckpt", ns=(10**16, 10**16))
    assert checkpoint.newest(tmp_path) == tmp_path / "good.ckpt"


# -- kill -9 ----------------------------------------------------------------------------------------------------------

WRITER = """
import sys, torch
from lt_offload.strategy.checkpoint import archive
from lt_offload.strategy.checkpoint.files import save
state = lambda epoch: {"state_dict": {str(i): torch.full((2 << 20,), float(epoch)) for i in range(12)}, "epoch": epoch}
def half(descriptor, content, at):
    if len(content) > 1 << 20:
        write(descriptor, content[: len(content) // 2], at)
        print("in the middle", flush=True)
        sys.stdin.read()
    return write(descriptor, content, at)
for epoch in range(2):
    save(state(epoch), sys.argv[1])
write, archive._write = archive._write, half
save(state(2), sys.argv[1])
"""


@pytest.mark.slow
def test_kill_during_a_write_leaves_the_last_complete_checkpoint(tmp_path: Path) -> None:
    path = tmp_path / "last.ckpt"
    command = [sys.executable, "-c", WRITER, str(path)]
    env, pipe = os.environ | {"PYTHONPATH": str(ROOT)}, subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, env=env) as writer:
        assert writer.stdout is not None
        said = writer.stdout.readline()
        writer.send_signal(signal.SIGKILL)
    assert said == "in the middle\n"
    [size] = [part.stat().st_size for part in tmp_path.glob(f".last.ckpt.*{SUFFIX}")]
    assert 1 << 20 < size < 90 << 20
    found = checkpoint.load(path)
    assert found["epoch"] == 1
    assert all(torch.equal(t, torch.full_like(t, found["epoch"])) for t in found["state_dict"].values())
    checkpoint.prepare(tmp_path)  # as the next run does
    assert [p.name for p in tmp_path.iterdir()] == ["last.ckpt"]


# -- RAM --------------------------------------------------------------------------------------------------------------

READ = """
import sys, torch
from torch import nn
from lt_offload.strategy.checkpoint.files import load, load_optimizer_state, reading_once, save
peak = lambda: int(next(l for l in open("/proc/self/status") if l.startswith("VmHWM")).split()[1]) >> 10
build = lambda: nn.Sequential(*(nn.Linear(1024, 4096, bias=False) for _ in range(8)))
if len(sys.argv) > 2:
    model = build()
    optimizer = torch.optim.Adam(model.parameters())
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    torch.save({}, sys.argv[1])
    before = peak()
    save({"state_dict": model.state_dict(), "optimizer": optimizer.state_dict()}, sys.argv[1])
    print(peak() - before)
else:
    model = build()
    optimizer = torch.optim.Adam(model.parameters())
    before = peak()
    saved = load(sys.argv[1])
    with reading_once(model, saved["state_dict"]):
        model.load_state_dict(saved["state_dict"])
    of_weights = peak() - before
    load_optimizer_state(optimizer, saved["optimizer"], set(model.parameters()))
    print(of_weights, peak() - before)
"""


@pytest.mark.slow
def test_saving_makes_no_second_copy_and_what_was_read_does_not_stay_in_ram(tmp_path: Path) -> None:
    """Weights of 128 MiB, into memory that is there, and states of 256 MiB, which take as much and no more."""

    def run(*more: str) -> list[int]:
        command = [sys.executable, "-c", READ, str(tmp_path / "a.ckpt"), *more]
        env = os.environ | {"PYTHONPATH": str(ROOT)}
        done = subprocess.run(command, check=True, capture_output=True, text=True, env=env)
        return [int(number) for number in done.stdout.split()]

    (saved,) = run("write")
    weights, both = run()
    assert saved < 32, f"saving 384 MiB took {saved} MiB more"
    assert weights < 48, f"loading weights of 128 MiB into a model took {weights} MiB"
    assert 250 < both < 256 + 48, f"weights and states of 384 MiB took {both} MiB"


def test_what_a_hook_has_written_to_a_loaded_tensor_stays(tmp_path: Path) -> None:
    """A page that was written is no page of the file any more; who holds the tensor would see the file's again."""
    model = torch.nn.Linear(1024, 1024)
    checkpoint.save(model.state_dict(), tmp_path / "a.ckpt")
    saved = checkpoint.load(tmp_path / "a.ckpt")
    saved["weight"].mul_(2)
    expected = saved["weight"].clone()
    with checkpoint.reading_once(model, saved):
        model.load_state_dict(saved)
    assert torch.equal(model.weight, expected)
    assert torch.equal(saved["weight"], expected)


# -- optimizer state --------------------------------------------------------------------------------------------------


def trained(dtype: torch.dtype, *, fp32_state: bool) -> tuple[nn.Parameter, torch.optim.Optimizer]:
    torch.manual_seed(1)
    parameter = nn.Parameter(torch.randn(8, 4).to(dtype))
    optimizer = torch.optim.Adam([parameter], lr=0.1)
    parameter.grad = torch.randn(8, 4).to(dtype)
    optimizer.step()
    if fp32_state:
        optimizer.state[parameter]["exp_avg"] = torch.randn(8, 4)
    return parameter, optimizer


def test_states_keep_the_dtype_in_which_they_were_saved() -> None:
    _, source = trained(torch.bfloat16, fp32_state=True)
    saved = source.state_dict()
    parameter, optimizer = trained(torch.bfloat16, fp32_state=False)
    optimizer.load_state_dict(saved)
    assert optimizer.state[parameter]["exp_avg"].dtype == torch.bfloat16, "torch casts no more: this code can go"
    checkpoint.load_optimizer_state(optimizer, saved, {parameter})
    for key, value in saved["state"][0].items():
        assert optimizer.state[parameter][key].dtype == value.dtype
        assert torch.equal(optimizer.state[parameter][key], value)
