"""Files of a path: a file itself, the matches of a glob, or the data of a folder, whose names may tell splits."""

from __future__ import annotations

import glob
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from lt_offload.errors import ConfigError
from lt_offload.resources import is_dir, is_file, may_be_local, user_path

KINDS = {
    ".json": "json", ".jsonl": "json", ".csv": "csv", ".tsv": "tsv", ".txt": "text", ".md": "text",
    ".parquet": "parquet", ".arrow": "arrow",
}  # fmt: skip
"""Kinds of files by their endings; those of text may be followed by ``.gz``."""
TABLES = ("parquet", "arrow")
_ENDINGS = f"{', '.join(KINDS)}, or .gz after one of text"
SAVED = ("state.json", "dataset_dict.json")
"""Files that mark a folder that ``datasets`` has saved: one with rows, one with splits."""

_SPLITS = {
    "train": "train", "training": "train",
    "validation": "validation", "valid": "validation", "val": "validation", "dev": "validation",
    "test": "test", "testing": "test", "eval": "test", "evaluation": "test",
}  # fmt: skip
"""Words in names of files, and the split that each of them means, as ``datasets`` has them."""
_WORD = re.compile(rf"(?:^|[-._ 0-9])({'|'.join(_SPLITS)})(?:$|[-._ 0-9])")
_SHARD = re.compile(r"(\w+(?:\.\w+)*)-\d{5}-of-\d{5}")
"""A part of a split, whose name stands in front."""
_ABOUT = re.compile(
    r"(readme|licen[cs]e|notice|copying|citation|changelog|contributing|code_of_conduct|authors|data_?(set)?[-_]?card)"
    r"([-_.].*)?\.(md|txt)(\.gz)?|(config|state|dataset_infos?|dataset_dict)\.json"
)
"""Files about the data, not with them."""
_MOST_NAMED = 3


@dataclass(frozen=True, kw_only=True, slots=True)
class DataFiles:
    """Files that a path names; none if it is a name on the hub, or a folder that ``datasets`` has saved.

    Args:
        files: in their order.
        of_split: whether they are one split of a folder with files of several, or with a split in their names.
        note: their part of a folder, in a few words; empty if they are all of it.
    """

    files: Sequence[Path] = ()
    of_split: bool = False
    note: str = ""


def kind_of_file(file: Path) -> str | None:
    """Return the kind of a file by its ending, None if it has no known one."""
    packed = file.suffix.lower() == ".gz"
    kind = KINDS.get((file.with_suffix("") if packed else file).suffix.lower())
    return None if packed and kind in TABLES else kind


def find_files(path: str, *, split: str, setting: str) -> DataFiles:
    """Return the files that ``path``, the value of ``setting``, names; nothing is read.

    Of a folder with a file for each split, ``split`` is taken; for validation, ``train`` means the split for that.
    Raises ``ConfigError`` if it is a path and there is nothing there, or files of several kinds.
    """
    local = user_path(path)
    if is_dir(local):
        return DataFiles() if any(is_file(local / name) for name in SAVED) else _of_folder(path, local, split, setting)
    if is_file(local):
        if kind_of_file(local) is None:
            raise ConfigError(f"{setting}={path!r} is of an unknown kind; it should end with one of {_ENDINGS}")
        return DataFiles(files=[local])
    if glob.has_magic(path):
        matches = [Path(name) for name in glob.glob(str(local), recursive=True)]
        if not matches and is_dir(local.parent):  # a folder with brackets in its name
            matches = [Path(name) for name in glob.glob(str(Path(glob.escape(str(local.parent))) / local.name))]
        if not matches:
            raise ConfigError(f"{setting}={path!r} matches no file (looked in {Path.cwd()})")
        files = sorted(file for file in matches if is_file(file) and _has_rows(file))
        return DataFiles(files=_of_one_kind(files, f"{setting}={path!r} matches"))
    if kind_of_file(local) is not None or may_be_local(path):
        raise ConfigError(f"{setting}={path!r} does not exist (looked in {Path.cwd()})")
    return DataFiles()


def _of_folder(path: str, folder: Path, split: str, setting: str) -> DataFiles:
    where = f"{setting}={path!r}"
    inside = _inside(folder, where)
    files, beside = _data_of(inside)
    below: dict[Path, list[Path]] = {}
    if not files:
        for each in inside:
            if is_dir(each) and not each.name.startswith(".") and (data := _data_of(_inside(each, where))[0]):
                below[each] = data
        if len(below) > 1 and not all(_split_in(each.name) for each in below):
            names = ", ".join(repr(each.name) for each in below)
            raise ConfigError(
                f"{where} has no data files itself, but folders with some: {names}; name one of them, for example "
                f"--{setting} {Path(path) / next(iter(below)).name}"
            )
        files = [file for data in below.values() for file in data]
    if not files:
        raise ConfigError(
            f"{where} is a folder with no data files{f' beside {_named(beside)}' if beside else ''}, nor are any one "
            f"level below; they should end with one of {_ENDINGS}"
        )
    splits: dict[str | None, list[Path]] = {}
    for file in files:
        name = _split_in(file.parent.name) if below else None
        splits.setdefault(name or _split_in(file.name), []).append(file)
    # Texts have titles for names, in which such a word means a split only if every file has one.
    of_split = None not in splits if all(kind_of_file(file) == "text" for file in files) else splits.keys() != {None}
    said = []
    if of_split:
        chosen = _chosen(splits, split, where, setting)
        said.append(f"split {chosen}")
        beside += [file for name, others in splits.items() if name != chosen for file in others]
        files = splits[chosen]
    if below:
        said.insert(0, f"in {', '.join(dict.fromkeys(file.parent.name for file in files))}")
    if beside:
        said.append(f"left out: {_named(beside, folder)}")
    kept = _of_one_kind(files, f"{where} is a folder with")
    return DataFiles(files=kept, of_split=of_split, note="; ".join(said))


def _inside(folder: Path, where: str) -> list[Path]:
    try:
        entries = sorted(folder.iterdir())
    except OSError as error:
        raise ConfigError(f"{where} cannot be read: {error.strerror or error}") from None
    for file in entries:
        # Folders of the hub's cache are such links: a file of the data would be missing without a word.
        if file.is_symlink() and not file.exists() and kind_of_file(file) is not None:
            raise ConfigError(f"{where}: the link {file.name!r} in it leads nowhere; mend or remove it")
    return entries


def _data_of(inside: Iterable[Path]) -> tuple[list[Path], list[Path]]:
    """Return the data files, and files about them such as a README."""
    files = [file for file in inside if _has_rows(file) and is_file(file)]
    about = [file for file in files if _ABOUT.fullmatch(file.name.lower())]
    return [file for file in files if file not in about], about


def _has_rows(file: Path) -> bool:
    return kind_of_file(file) is not None and not file.name.startswith(".")


def _split_in(name: str) -> str | None:
    """Return the split in the name of a file or folder: literally in that of a shard, else by the meaning of a word."""
    shard = _SHARD.match(name)
    word = _WORD.search((shard[1] if shard else name).lower().replace("_", "-"))
    if word is None:
        return None
    return shard[1] if shard and shard[1].lower() not in _SPLITS else _SPLITS[word[1]]


def _chosen(splits: dict[str | None, list[Path]], split: str, where: str, setting: str) -> str:
    wanted = split if split in splits else _SPLITS.get(split, split)
    if setting == "data.validation_path" and split == "train":
        wanted = next((name for name in ("validation", "test") if name in splits), wanted)
    if wanted not in splits:
        known = ", ".join(f"{name!r} ({_named(splits[name])})" for name in splits if name is not None)
        rest = f", and files of no split ({_named(splits[None])})" if None in splits else ""
        raise ConfigError(
            f"data.split={split!r}: {where} has the splits {known}{rest}; choose one of these splits, or name files "
            "instead of the folder"
        )
    return wanted


def _named(files: Sequence[Path], folder: Path | None = None) -> str:
    names = [str(file.relative_to(folder)) if folder is not None else file.name for file in files[:_MOST_NAMED]]
    more = f" and {len(files) - _MOST_NAMED:,} more" if len(files) > _MOST_NAMED else ""
    return ", ".join(names) + more


def _of_one_kind(files: Sequence[Path], where: str) -> Sequence[Path]:
    kinds = sorted({str(kind_of_file(file)) for file in files})
    if len(kinds) != 1:
        have = f"files of several kinds ({', '.join(kinds)})" if kinds else "no data files"
        raise ConfigError(f"{where} {have}; it should be one of {_ENDINGS}")
    return files
