from __future__ import annotations

from pathlib import Path

import pytest

from lt_offload.cli import recipes
from lt_offload.cli.recipes import compose
from lt_offload.errors import ConfigError
from lt_offload.resources import shipped_root


def write(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


def test_a_path_wins_over_a_shipped_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert recipes.find("quickstart") == shipped_root() / "recipes" / "quickstart.yaml"
    assert recipes.find("recipes/quickstart.yaml") == recipes.find("quickstart.yaml") == recipes.find("quickstart")
    write(tmp_path / "quickstart", "model: {}")
    assert recipes.find("quickstart") == Path("quickstart")


def test_runs_are_called_by_their_recipe_or_their_folder() -> None:
    assert recipes.run_name(Path("mine.yaml")) == "mine"
    assert recipes.run_name(Path("runs/mine-20261124-054330/config.yaml")) == "mine"
    assert recipes.run_name(Path("somewhere/first/config.yaml")) == "first"
    assert recipes.run_name(Path("/config.yaml")) == "config"


def test_a_misspelled_recipe() -> None:
    with pytest.raises(ConfigError, match="did you mean quickstart"):
        recipes.find("quikstart")
    with pytest.raises(ConfigError, match="lt-finetune ls"):
        recipes.find("zzz.yaml")


def test_bases_come_first_in_three_generations(tmp_path: Path) -> None:
    write(tmp_path / "shared" / "grandparent.yaml", "a: 1")
    parent = write(tmp_path / "shared" / "parent.yaml", "base: grandparent.yaml")
    child = write(tmp_path / "child.yaml", "base: [configs/bf16.yaml, shared/parent.yaml]")
    assert recipes.chain(child) == [
        shipped_root() / "configs" / "bf16.yaml",
        tmp_path / "shared" / "grandparent.yaml",
        parent,
        child,
    ]


def test_a_base_beside_the_recipe_wins_over_a_shipped_one(tmp_path: Path) -> None:
    own = write(tmp_path / "configs" / "base.yaml", "a: 1")
    child = write(tmp_path / "child.yaml", "base: configs/base.yaml")
    assert recipes.chain(child) == [own, child]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("base: gone.yaml", "'gone.yaml' in .*child.yaml does not exist"),
        ("base: child.yaml", "builds on itself"),
        ("base: {a: 1}", "is not a file or a list of files"),
        ("base: [1]", "is not a file or a list of files"),
        ("", "is empty"),
        ("- a", "is not a mapping of settings"),
        ("a: [", "is not valid YAML"),
    ],
)
def test_recipes_that_cannot_be_read(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        recipes.chain(write(tmp_path / "child.yaml", text))


def test_a_circle_of_bases(tmp_path: Path) -> None:
    write(tmp_path / "a.yaml", "base: b.yaml")
    with pytest.raises(ConfigError, match="builds on itself"):
        recipes.chain(write(tmp_path / "b.yaml", "base: a.yaml"))


def test_a_file_for_gpus_overrides_the_recipe_there(tmp_path: Path) -> None:
    extra = write(tmp_path / "gpu.yaml", "a: 1")
    child = write(tmp_path / "child.yaml", "gpu: gpu.yaml")
    assert recipes.chain(child) == [child]
    assert recipes.for_gpu([child]) == [extra]
    assert recipes.for_gpu(recipes.chain(recipes.find("quickstart"))) != []
    with pytest.raises(ConfigError, match="gpu: 'gone.yaml' in"):
        recipes.for_gpu([write(tmp_path / "other.yaml", "gpu: gone.yaml")])


def test_an_architecture_is_found_beside_the_file_that_names_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    base = write(Path("bases/base.yaml"), "model: {architecture: own.json}")
    child = write(Path("child.yaml"), "base: bases/base.yaml\nmodel: {architecture: folder}")
    files = recipes.chain(child)
    plain = ["--config", "bases/base.yaml", "--config", "child.yaml"]
    assert compose(files, []) == plain
    write(Path("own.json"), "{}")
    assert compose(files, []) == plain, "the parser takes it from the working folder"
    write(Path("bases/own.json"), "{}")
    write(Path("folder/config.json"), "{}")
    flags = ["--model.architecture=bases/own.json", "--model.architecture=folder"]
    assert compose(files, ["--model.lr=1"]) == [*plain[:2], flags[0], *plain[2:], flags[1], "--model.lr=1"]
    write(base, "model: {architecture: llama3-8b}")
    write(Path("bases/llama3-8b"), "{}")
    write(child, "base: bases/base.yaml\nmodel: {architecture: null}")
    assert compose(files, []) == plain, "names of shipped ones are no paths"
