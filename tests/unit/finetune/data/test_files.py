"""Which files of a folder are the data: those about them are not, and names may tell splits."""

from __future__ import annotations

from pathlib import Path

import pytest

from lt_offload.errors import ConfigError
from lt_offload.finetune.data.sources import Source, sources


def find(folder: Path, names: str, split: str = "train", setting: str = "data.path") -> Source:
    for name in names.split():
        file = folder / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.touch()
    return of_path(str(folder), split, setting)


def of_path(path: str, split: str, setting: str) -> Source:
    [source] = sources(path, subset=None, split=split, setting=setting)
    return source


def names_of(folder: Path, found: Source) -> str:
    return " ".join(file.relative_to(folder).as_posix() for file in found.files)


@pytest.mark.parametrize(
    ("there", "taken", "note"),
    [
        ("a.jsonl b.jsonl", "a.jsonl b.jsonl", ""),
        ("README.md a.jsonl", "a.jsonl", "left out: README.md"),
        ("README_zh.md LICENSE.txt dataset_infos.json a.csv", "a.csv", None),
        ("a.jsonl sub/b.csv", "a.jsonl", ""),
        ("README.md data/part-00000-of-00001.parquet", "data/part-00000-of-00001.parquet", None),
        (".git/config.json README.md .gitattributes some/b.json", "some/b.json", "in some; left out: README.md"),
        ("b.md a.txt readmes-of-others.txt", "a.txt b.md readmes-of-others.txt", ""),
        ("a.txt README.md", "a.txt", "left out: README.md"),
    ],
)
def test_what_is_about_the_data_is_left_out(tmp_path: Path, there: str, taken: str, note: str | None) -> None:
    found = find(tmp_path, there)
    assert names_of(tmp_path, found) == taken
    assert note is None or found.note == note
    assert found.place == "files"


HUB = "README.md data/train-00000-of-00002.parquet data/train-00001-of-00002.parquet data/test-00000-of-00001.parquet"
SFT = "train_sft-00000-of-00001.parquet test_sft-00000-of-00001.parquet train_gen-00000-of-00001.parquet"


@pytest.mark.parametrize(
    ("there", "split", "taken"),
    [
        ("train.jsonl test.jsonl", "train", "train.jsonl"),
        ("train.jsonl test.jsonl", "test", "test.jsonl"),
        ("train.jsonl train_more.jsonl val.jsonl", "train", "train.jsonl train_more.jsonl"),
        ("my-training.csv my-dev.csv my.csv", "train", "my-training.csv"),
        ("training.csv dev.csv", "dev", "dev.csv"),
        ("training.csv valid.csv", "val", "valid.csv"),
        ("train.json eval2.json", "evaluation", "eval2.json"),
        ("train.jsonl notes.md", "train", "train.jsonl"),
        ("train.txt test.txt", "train", "train.txt"),
        ("train/a.csv train/b.csv test/a.csv", "train", "train/a.csv train/b.csv"),
        (HUB, "train", "data/train-00000-of-00002.parquet data/train-00001-of-00002.parquet"),
        (HUB, "test", "data/test-00000-of-00001.parquet"),
        (SFT, "train_sft", "train_sft-00000-of-00001.parquet"),
    ],
)
def test_names_tell_splits(tmp_path: Path, there: str, split: str, taken: str) -> None:
    found = find(tmp_path, there, split)
    assert names_of(tmp_path, found) == taken
    assert found.place == "splits"


@pytest.mark.parametrize("there", ["train.txt trees.txt", "strain.csv latest.csv", "c-00000-of-00002.csv c.csv"])
def test_words_that_are_no_splits(tmp_path: Path, there: str) -> None:
    found = find(tmp_path, there)
    assert found.place == "files"
    assert len(found.files) == 2


def test_what_is_left_out_is_said(tmp_path: Path) -> None:
    assert find(tmp_path, HUB).note == "in data; split train; left out: README.md, data/test-00000-of-00001.parquet"
    files = " ".join(f"test{number}.jsonl" for number in range(5))
    (tmp_path / "more").mkdir()
    note = find(tmp_path / "more", f"train.jsonl {files}").note
    assert note == "split train; left out: test0.jsonl, test1.jsonl, test2.jsonl and 2 more"


def test_validation_takes_the_split_that_is_for_it(tmp_path: Path) -> None:
    validation = "data.validation_path"
    assert names_of(tmp_path, find(tmp_path, "train.csv test.csv", setting=validation)) == "test.csv"
    assert names_of(tmp_path, find(tmp_path, "dev.csv", setting=validation)) == "dev.csv"
    assert names_of(tmp_path, find(tmp_path, "", "test", validation)) == "test.csv"


@pytest.mark.parametrize(
    ("there", "split", "message"),
    [
        ("README.md LICENSE.txt", "train", "is a folder with no data files beside LICENSE.txt, README.md, nor are any"),
        ("README.md deep/er/a.json", "train", "is a folder with no data files beside README.md, nor are any one level"),
        (
            "one/a.json two/a.json",
            "train",
            "folders with some: 'one', 'two'; name one of them, for",
        ),
        ("a.json b.csv", "train", r"several kinds \(csv, json\)"),
        ("train.json train.csv", "train", r"several kinds \(csv, json\)"),
        (
            "train.csv test.csv",
            "dev",
            r"data.split='dev': .* the splits 'test' \(test.csv\), 'train' \(train.csv\);",
        ),
        ("all.csv test.csv", "train", r"'test' \(test.csv\), and files of no split \(all.csv\); choose one of these"),
        (SFT, "train", "has the splits 'test_sft' .*, 'train_gen' .*, 'train_sft' "),
    ],
)
def test_folders_that_leave_it_open(tmp_path: Path, there: str, split: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        find(tmp_path, there, split)


def test_a_split_of_a_glob_is_the_globs(tmp_path: Path) -> None:
    find(tmp_path, "train.csv test.csv")
    for path, count in ((f"{tmp_path}/*.csv", 2), (f"{tmp_path}/test.csv", 1)):
        found = of_path(path, "train", "data.path")
        assert len(found.files) == count
        assert found.place == "files"
