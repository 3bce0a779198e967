"""What ``data.path`` may be: files of every kind, folders, globs, lists, saved data sets and names on the hub."""

from __future__ import annotations

import gzip
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet
import pytest

from lt_offload.errors import ConfigError
from lt_offload.finetune.data import sources

HUB: Any = {"subset": None, "split": "train", "setting": "data.path"}
ROWS = [{"text": "one", "n": 1}, {"text": "two", "n": 2}]


@pytest.fixture(autouse=True)
def _private_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")


def made(path: Path | str | list[str], **more: str) -> list[sources.Source]:
    return sources.sources(path if isinstance(path, list) else str(path), **HUB | more)


def load(path: Path | str | list[str], *, streaming: bool = False) -> list[str]:
    rows: list[Any] = [row for source in made(path) for _, row in source.rows(streaming=streaming)]
    return [row["text"] for row in rows]


def streamed(path: Path | str) -> list[str]:
    return load(path, streaming=True)


def write(path: Path) -> Path:
    name = path.name.removesuffix(".gz")
    if name.endswith(".parquet"):
        pyarrow.parquet.write_table(pa.Table.from_pylist(ROWS), path)
    elif name.endswith(".arrow"):
        table = pa.Table.from_pylist(ROWS)
        with pa.ipc.new_stream(str(path), table.schema) as writer:
            writer.write_table(table)
    else:
        if name.endswith(".json"):
            text = json.dumps(ROWS)
        elif name.endswith(".jsonl"):
            text = "\n".join(map(json.dumps, ROWS))
        else:
            text = "\n".join(
                "\t".join(row) if name.endswith("tsv") else ",".join(row)
                for row in (["text", "n"], ["one", "1"], ["two", "2"])
            )
        path.write_bytes(gzip.compress(text.encode()) if path.suffix == ".gz" else text.encode())
    return path


KINDS = ("json", "jsonl", "csv", "tsv", "parquet", "arrow", "json.gz", "jsonl.gz", "csv.gz", "tsv.gz")


@pytest.mark.parametrize("ending", KINDS)
def test_kinds_of_files(tmp_path: Path, ending: str) -> None:
    path = write(tmp_path / f"data.{ending}")
    assert load(path) == ["one", "two"]
    if not ending.startswith("json") or ending.startswith("jsonl"):
        assert streamed(path) == ["one", "two"]


def test_a_list_cannot_be_streamed(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="is one list or object, which data.streaming=true cannot read row by row"):
        streamed(write(tmp_path / "data.json"))


def test_a_text_file_is_one_row_and_a_folder_one_per_file(tmp_path: Path) -> None:
    (tmp_path / "b.md").write_text("zwei\n\nabsätze\n", encoding="utf-8")
    (tmp_path / "a.txt").write_text("eins")
    (tmp_path / "c.txt").write_text(" \n")
    (tmp_path / "d.txt.gz").write_bytes(gzip.compress(b"drei"))
    (tmp_path / "ignored.bin").write_bytes(b"\0")
    (tmp_path / ".hidden.txt").write_text("no")
    assert load(tmp_path / "b.md") == ["zwei\n\nabsätze\n"]
    assert load(tmp_path) == streamed(tmp_path) == ["eins", "zwei\n\nabsätze\n", "drei"]


def test_folders_globs_and_lists(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "sub").mkdir()
    for name in ("b.jsonl", "a.jsonl", "sub/c.jsonl"):
        (tmp_path / name).write_text(json.dumps({"text": name}))
    (tmp_path / "d.csv").write_text("text\nd\n")
    assert load(tmp_path / "*.jsonl") == ["a.jsonl", "b.jsonl"]
    assert load(tmp_path / "**" / "*.jsonl") == ["a.jsonl", "b.jsonl", "sub/c.jsonl"]
    assert load(tmp_path / "sub") == ["sub/c.jsonl"]
    assert load([str(tmp_path / "d.csv"), str(tmp_path / "sub")]) == ["d", "sub/c.jsonl"]
    assert [source.place for source in made([str(tmp_path / "d.csv"), "some/set"])] == ["files", "hub"]
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert load("sub/*.jsonl") == load("~/sub") == ["sub/c.jsonl"]


@pytest.mark.parametrize("streaming", [False, True])
def test_rows_are_named_by_their_files(tmp_path: Path, streaming: bool) -> None:
    for name in ("a", "b"):
        write(tmp_path / f"{name}.parquet")
        write(tmp_path / f"{name}.jsonl")
    for ending in ("parquet", "jsonl"):
        [source] = made(tmp_path / f"*.{ending}")
        places = [place for place, _ in source.rows(streaming=streaming)]
        assert places == [f"{name}.{ending} row {row}" for name in ("a", "b") for row in (1, 2)]


def test_folders_that_datasets_has_saved(tmp_path: Path) -> None:
    import datasets

    one = datasets.Dataset.from_list(ROWS)
    one.save_to_disk(tmp_path / "one")
    datasets.DatasetDict({"train": one, "test": one.select([1])}).save_to_disk(tmp_path / "both")
    assert load(tmp_path / "one") == streamed(tmp_path / "one") == load(tmp_path / "both") == ["one", "two"]
    assert [made(tmp_path / name)[0].place for name in ("both", "one")] == ["splits", "files"]
    [source] = made(tmp_path / "both", split="test")
    assert list(source.rows(streaming=False)) == [("row 1", ROWS[1])]
    [source] = made(tmp_path / "both", split="dev")
    with pytest.raises(ConfigError, match="data.split='dev': .* has 'train', 'test'"):
        next(source.rows(streaming=False))


def twice(path: Path) -> Path:
    table = pa.table([["a"], ["b"]], names=["text", "text"])
    if path.suffix == ".parquet":
        pyarrow.parquet.write_table(table, path)
    else:
        with pa.ipc.new_file(str(path), table.schema) as writer:
            writer.write_table(table)
    return path


def filled(path: Path, content: str = "") -> Path:
    path.write_text(content)
    return path


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda p: p / "missing.txt", "does not exist"),
        (lambda p: p / "missing" / "folder", "does not exist"),
        (lambda p: "", "data.path='' names no data"),
        (lambda p: p / "*.json", "matches no file"),
        (lambda p: [], "names no data"),
        (lambda p: ["a.json", "a.json"], "names 'a.json' twice"),
        (lambda p: filled(p / "data.xlsx", "x"), "of an unknown kind; it should end with one of .json, .jsonl"),
        (lambda p: filled(p / "data.parquet.gz", "x"), "of an unknown kind"),
        (lambda p: p, "no data files"),
        (
            lambda p: [str(filled(p / name, "[]").parent) for name in ("a.csv", "b.json")][:1],
            r"several kinds \(csv, json\)",
        ),
        (lambda p: filled(p / "a.parquet"), "a.parquet\\) cannot be read as parquet: Parquet file size is 0 bytes"),
        (lambda p: twice(p / "a.parquet"), r"cannot be read as parquet: several columns are called 'text'"),
        (lambda p: twice(p / "a.arrow"), r"cannot be read as arrow: .* \"text\" exists 2 times"),
    ],
)
def test_what_cannot_be_read(tmp_path: Path, make: Callable[[Path], Any], message: str) -> None:
    path = make(tmp_path)
    with pytest.raises(ConfigError, match=message) as caught:
        load(path)
    assert str(caught.value).startswith("data.path")


def test_names_that_no_file_can_have(tmp_path: Path) -> None:
    for name in ("x" * 5000 + ".json", "a\0.json"):
        with pytest.raises(ConfigError, match="does not exist"):
            load(name)
    folder = tmp_path / "a.json"
    os.mkdir(folder)
    with pytest.raises(ConfigError, match="is a folder with no data files"):
        load(folder)


def test_a_name_on_the_hub(monkeypatch: pytest.MonkeyPatch) -> None:
    import datasets

    def load_dataset(path: str, subset: str | None, *, split: str, streaming: bool = False) -> object:
        if path != "some/set":
            raise FileNotFoundError("no such data set")
        found = datasets.Dataset.from_list([{"text": f"{subset} {split}"}])
        return found.to_iterable_dataset() if streaming else found

    monkeypatch.setattr("datasets.load_dataset", load_dataset)
    [source] = sources.sources("some/set", subset="small", split="test", setting="data.path")
    for streaming in (False, True):
        assert list(source.rows(streaming=streaming)) == [("row 1", {"text": "small test"})]
    with pytest.raises(ConfigError, match="neither a file here nor a data set .* no such data set"):
        load("other/set")


def test_pydoc_topics_hold_out_whole_paragraphs() -> None:
    training, validation = sources.pydoc_topics()
    assert len(validation) >= 5
    assert len(training) >= 5 * len(validation)
    assert sources.pydoc_topics() == (training, validation)

    def paragraphs(rows: list[sources.Row]) -> list[str]:
        return [" ".join(p.split()) for row in rows for p in row["text"].split("\n\n")]

    seen = paragraphs(training)
    assert len(seen) == len(set(seen))
    assert not set(seen) & set(paragraphs(validation))
    assert sum(len(row["text"]) for row in training) > 200_000
    assert sum(len(row["text"]) for row in validation) > 20_000


def test_odd_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "run [1]"
    folder.mkdir()
    (folder / "a.jsonl").write_text('{"text": "a"}')
    assert load(folder / "*.jsonl") == ["a"]
    (folder / "b.jsonl").symlink_to("gone.jsonl")
    with pytest.raises(ConfigError, match=r"the link 'b\.jsonl' in it leads nowhere"):
        load(folder)

    def forbidden(*args: object, **kwargs: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "open", forbidden)
    monkeypatch.setattr(Path, "iterdir", forbidden)
    for path in (folder / "a.jsonl", folder):
        with pytest.raises(ConfigError, match=r"cannot be read: Permission denied"):
            load(path)


def test_the_language_reference_stands_alone() -> None:
    with pytest.raises(ConfigError, match="pydoc_topics cannot be one of several"):
        made([sources.PYDOC, "a.json"])
