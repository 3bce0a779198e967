"""The files of a model by its name, in a folder or on the hub, and the errors on the way to them in plain words."""

from __future__ import annotations

import errno
import json
import logging
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

from safetensors import SafetensorError, safe_open

from lt_offload.errors import ConfigError

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"

_OF_WEIGHTS = ("F64", "F32", "F16", "BF16")
IN_EIGHT_BITS = (*_OF_WEIGHTS, "F8_E4M3")
"""Dtypes of weights in files, and those that may beside scales."""
_FULL = (errno.ENOSPC, errno.EDQUOT)
_OFFLINE = {"LocalEntryNotFoundError", "OfflineModeIsEnabled", "ConnectionError", "ConnectError", "ConnectTimeout"}


@contextmanager
def in_words(name: str) -> Iterator[None]:
    """Raise ``ConfigError`` for errors within the context on the way to the model ``name``."""
    try:
        yield
    except ConfigError:
        raise
    except (OSError, ValueError, ImportError, KeyError, RuntimeError, EOFError, UnpicklingError) as error:
        raise ConfigError(_explained(name, error)) from error


def chain_of(error: BaseException) -> list[BaseException]:
    """Return ``error`` and the errors behind it."""
    chain = [error]
    while (cause := chain[-1].__cause__ or chain[-1].__context__) is not None:
        chain.append(cause)
    return chain


def _explained(name: str, error: BaseException) -> str:
    chain = chain_of(error)
    # The names of all errors in the chain are looked at: the hub's own one is often
    # wrapped in an OSError of transformers.
    kinds = {type(link).__name__ for link in chain}
    if "GatedRepoError" in kinds or "gated repo" in str(error):
        return f"model {name!r} is gated: accept its licence on its page on the hub, then log in with 'hf auth login'"
    if "RepositoryNotFoundError" in kinds:
        return (
            f"there is no model {name!r}, neither as a folder here nor on the hub; if it is a private one, log in with "
            "'hf auth login'"
        )
    if any(map(is_full, chain)):
        return f"model {name!r} does not fit on the disk of {_cache()}; make room, or set HF_HOME to another disk"
    if kinds & _OFFLINE or "couldn't connect" in str(error).lower():
        return (
            f"model {name!r} is neither a folder here nor in the cache {_cache()}, and the hub cannot be reached; "
            f"download it where it can ('hf download {name}'), or give a model folder"
        )
    if "backend tokenizer" in str(error):
        return (
            f"there is no tokenizer at {name!r}; put the model's tokenizer.json and tokenizer_config.json there, or "
            "name the model or folder that has it with data.tokenizer"
        )
    if "no file named" in str(error):
        return (
            f"model folder {name!r} has no weights, neither {SINGLE} nor pytorch_model.bin; download or copy them "
            "there, or train from random ones with model.init=random"
        )
    if "trust_remote_code" in str(error):
        from lt_offload.profiling.from_config import has_own_code

        return str(has_own_code(f"model {name!r}"))
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    whole = " ".join(lines) if lines and lines[0].endswith(":") else "".join(lines[:1])
    return f"model {name!r} cannot be loaded: {whole or type(error).__name__}"


@contextmanager
def without_advice() -> Iterator[None]:
    """Keep transformers from logging advice about models: our errors say it better, or no user can follow it."""
    logger, nothing = logging.getLogger("transformers.modeling_utils"), logging.Filter("nobody")
    logger.addFilter(nothing)
    try:
        yield
    finally:
        logger.removeFilter(nothing)


def is_full(error: BaseException) -> bool:
    """Return whether ``error`` says that a disk is full, or a limit reached."""
    return number_of(error) in _FULL


def number_of(error: BaseException) -> int | None:
    """Return the number of an error of the system, which an error of safetensors names in its words; None: no such."""
    named = re.search(r"os error (\d+)", str(error)) if isinstance(error, SafetensorError) else None
    number: int | None = int(named[1]) if named else getattr(error, "errno", None)
    return number


def _cache() -> str:
    from huggingface_hub.constants import HF_HUB_CACHE

    return HF_HUB_CACHE


def safetensors_of(where: str) -> list[Path]:
    """Return the safetensors files of the model at ``where``, downloaded if it is a name; none if it has other files.

    Raises ``ConfigError`` if a file that its index names is missing.
    """
    single = _file(where, SINGLE)
    if single is not None:
        return [single]
    index = _file(where, INDEX)
    if index is None:
        return []
    files = {name: _file(where, name) for name in _named(index)}
    absent = [name for name, path in files.items() if path is None]
    if absent:
        raise ConfigError(
            f"model {where!r} is incomplete: {absent[0]} is missing ({len(absent)} of {len(files)} files that {INDEX} "
            "names); copy or download it again"
        )
    return [path for path in files.values() if path is not None]


def _named(index: Path) -> list[str]:
    try:
        files = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
        if not all(isinstance(name, str) and name == Path(name).name for name in files):
            raise ValueError("a file name in it is none")
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise ConfigError(f"{index} is no index of weights ({type(error).__name__}: {error}); copy it again") from None
    return sorted(files)


def _file(where: str, name: str) -> Path | None:
    """Return the file ``name`` in a folder, or the local copy of that of a model on the hub; None if there is none."""
    from transformers.utils.hub import cached_file

    path = cached_file(where, name, _raise_exceptions_for_missing_entries=False)
    return None if path is None else Path(path)


def lazy_tensors(files: Sequence[Path], *, kinds: Sequence[str] = _OF_WEIGHTS) -> dict[str, Any]:
    """Return all tensors of safetensors ``files`` by name, each to be read by ``[...]`` into memory of its own.

    transformers itself maps such files into memory, and lets weights be pages of them where the dtype is the same. That
    costs all of its time later, page by page, where a profile measures; the pages count as free memory although weights
    that are trained take them; and a file that somebody writes to changes the model. Raises ``ConfigError`` if a file
    is damaged or cut short, or holds weights that are of none of ``kinds``.
    """
    tensors: dict[str, Any] = {}
    for path in files:
        try:
            file: Any = safe_open(path, framework="pt", backend="pread")
        except (SafetensorError, OSError) as error:
            raise ConfigError(
                f"{path} is damaged or cut short ({str(error) or type(error).__name__}); copy or download it again"
            ) from None
        of_file = {name: file.get_slice(name) for name in file.offset_keys()}
        for name, one in of_file.items():
            if name.endswith(".weight") and (kind := one.get_dtype()) not in kinds:
                raise ConfigError(
                    f"{path}: {name} is of dtype {kind}, not one of {', '.join(kinds)}; give the model that this "
                    "one was quantized from"
                )
        tensors |= of_file
    return tensors
