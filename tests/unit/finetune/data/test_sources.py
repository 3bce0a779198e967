from __future__ import annotations

import json
from pathlib import Path

import pytest

from lt_offload.errors import ConfigError
from lt_offload.finetune.data import sources

ROWS = [{"text": "one", "n": 1}, {"text": "two", "n": 2}]


@pytest.fixture(autouse=True)
def _private_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")


def load(path: Path | str, columns: tuple[str, ...] = ("text",)) -> list[str]:
    rows = sources.load_rows(str(path), subset=None, split="train", columns=columns, setting="data.path")
    return [row["text"] for row in rows]


def write(path: Path) -> Path:
    if path.suffix == ".json":
        path.write_text(json.dumps(ROWS))
    elif path.suffix == ".jsonl":
        path.write_text("\n".join(map(json.dumps, ROWS)))
    elif path.suffix == ".csv":
        path.write_text("text,n\none,1\ntwo,2\n")
    else:
        import pyarrow
        import pyarrow.parquet

        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(ROWS), path)
    return path


@pytest.mark.parametrize("ending", ["json", "jsonl", "csv", "parquet"])
def test_tables(tmp_path: Path, ending: str) -> None:
    assert load(write(tmp_path / f"data.{ending}")) == ["one", "two"]


def test_a_text_file_is_one_row_and_a_folder_one_per_file(tmp_path: Path) -> None:
    (tmp_path / "b.md").write_text("zwei\n\nabsätze\n", encoding="utf-8")
    (tmp_path / "a.txt").write_text("eins")
    (tmp_path / "ignored.bin").write_bytes(b"\0")
    assert load(tmp_path / "b.md") == ["zwei\n\nabsätze\n"]
    assert load(tmp_path) == ["eins", "zwei\n\nabsätze\n"]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda p: p / "missing.txt", "does not exist"),
        (lambda p: p / "missing" / "folder", "does not exist"),
        (lambda p: (p / "empty.json").touch() or p / "empty.json", "is empty"),
        (lambda p: (p / "blank.txt").write_text(" \n") and p / "blank.txt", "has no rows"),
        (lambda p: (p / "none.json").write_text("[]") and p / "none.json", "(has no rows|cannot be read)"),
        (lambda p: (p / "broken.json").write_text('{"text": ') and p / "broken.json", "cannot be read as json"),
        (lambda p: (p / "latin.txt").write_bytes(b"\xe9\xe8") and p / "latin.txt", "not UTF-8"),
        (lambda p: (p / "data.xlsx").write_bytes(b"x") and p / "data.xlsx", "of an unknown kind"),
        (lambda p: p, "no data files"),
        (lambda p: write(p / "a.csv") and write(p / "b.json") and p, "files of several kinds"),
    ],
)
def test_what_cannot_be_read(tmp_path: Path, make: object, message: str) -> None:
    assert callable(make)
    path = make(tmp_path)
    with pytest.raises(ConfigError, match=message) as caught:
        load(path)
    assert "data.path=" in str(caught.value) or "data.path:" in str(caught.value)


def test_a_missing_column_is_named_with_those_there_are(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no column 'content', it has 'text', 'n'"):
        load(write(tmp_path / "data.csv"), columns=("content",))


def test_a_name_on_the_hub(monkeypatch: pytest.MonkeyPatch) -> None:
    import datasets

    def load_dataset(path: str, subset: str | None, *, split: str) -> object:
        if path != "some/set":
            raise FileNotFoundError("no such data set")
        return datasets.Dataset.from_list([{"text": f"{subset} {split}"}])

    monkeypatch.setattr("datasets.load_dataset", load_dataset)
    rows = sources.load_rows("some/set", subset="small", split="test", columns=("text",), setting="data.path")
    assert rows[0]["text"] == "small test"
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
