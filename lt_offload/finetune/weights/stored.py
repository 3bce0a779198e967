"""Files of weights that are read into a storage form, piece by piece: no weight is in memory with all its numbers.

The files hold pieces (gpt-oss in MXFP4, DeepSeek and Qwen in FP8 by squares), or numbers that are stored as they are
read. Experts are in them together, as in the model, or each by itself, as most files have them.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from lt_offload.compat.hugging_face import ignored_in_files
from lt_offload.errors import ConfigError
from lt_offload.model.forms import check_weights, described, form_named, put_weight, weights_in
from lt_offload.model.forms.base import as_bytes
from lt_offload.model.forms.experts import experts_in
from lt_offload.model.forms.fp8 import SQUARE
from lt_offload.model.forms.layer import Stored

Files = Mapping[str, Any]
"""Tensors by name, each read by ``[...]``, or a part of it by an index."""

_OF_EXPERTS = {"gate_up_proj": (("gate_proj", "up_proj"), ("w1", "w3")), "down_proj": (("down_proj",), ("w2",))}
"""Names of the matrices of one expert in files, one above the other."""
_PLACES = (("mlp.experts", "block_sparse_moe.experts"), ("mlp.gate.", "block_sparse_moe.gate."))
"""Places of Mixtral's experts in models and in files."""
_ENDS = {"mxfp4": ("_blocks", "_scales"), "fp8": ("", "_scale_inv")}
"""Ends of the names of pieces in files."""


def read_stored(model: Any, files: Files, quantize: str, dtype: torch.dtype, *, shipped: bool) -> bool:
    """Give ``model``, whose parameters are on meta, its weights, stored in the form ``quantize``.

    Args:
        model: without weights.
        files: what is read.
        quantize: name of the form.
        dtype: of all else, and of what is opened.
        shipped: whether the files hold pieces.

    Returns:
        Whether the model has experts or pieces to be read, and all names are as expected; otherwise it has no weights.

    Raises:
        ConfigError: if there are pieces, and tensors are missing or of another shape.
    """
    if not shipped and not any(True for _ in experts_in(model)):
        return False
    form = form_named(quantize, "model.quantize")
    taken = {*check_weights(model, form, dtype).taken}
    weights = {name: (module, getattr(module, weight)) for name, module, weight in weights_in(model) if name in taken}
    used: set[str] = set()
    tied = set(getattr(model, "all_tied_weights_keys", None) or ())
    sources = {name: _sources(name, files) for name, _ in model.named_parameters() if name not in tied}
    missing = [name for name, parts in sources.items() if not parts and not (shipped and name in weights)]
    if missing and not shipped:
        return False
    worker = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    for name, (module, weight) in weights.items():
        stored = described(module, weight, form, dtype)
        pieces = (
            _shipped(stored, name, files, used, missing) if shipped else _closed(stored, sources[name], files, worker)
        )
        if pieces is not None:
            put_weight(model, name, stored, pieces)
            used |= {one for part in sources[name] for one in part}
    for name, parameter in [*model.named_parameters()]:
        if parameter.is_meta and sources.get(name):
            numbers = _joined(sources[name], files, tuple(parameter.shape)).to(dtype)
            owner, _, last = name.rpartition(".")
            setattr(model.get_submodule(owner), last, nn.Parameter(numbers, requires_grad=parameter.requires_grad))
            used |= {one for part in sources[name] for one in part}
    ignored = [re.compile(pattern) for pattern in ignored_in_files(model)]
    others = sorted(one for one in files.keys() - used - tied if not any(pattern.search(one) for pattern in ignored))
    for names, says in ((missing, "lack"), (others, "have, beside what its configuration knows,")):
        if names:
            raise ConfigError(
                f"the files of the model {says} {names[0]} ({len(names)} such tensors); they and its config.json are "
                "of different models, or not complete"
            )
    return True


Parts = list[list[str]]
"""Names of tensors: of each expert, or of all that a parameter is; those of one are matrices one above the other."""


def _sources(name: str, files: Files) -> Parts:
    """Return what the parameter that is called ``name`` is read from; none if it is not there."""
    for ours, theirs in (("", ""), *_PLACES):
        other = name.replace(ours, theirs) if ours else name
        if other in files:
            return [[other]]
        path, _, last = other.rpartition(".")
        for names in _OF_EXPERTS.get(last, ()):
            parts: Parts = []
            while all(f"{path}.{len(parts)}.{one}.weight" in files for one in names):
                parts.append([f"{path}.{len(parts)}.{one}.weight" for one in names])
            if parts:
                return parts
    return []


def _joined(parts: Parts, files: Files, shape: tuple[int, ...]) -> Tensor:
    matrices = [torch.cat([files[name][...] for name in part]) for part in parts]
    whole = matrices[0] if len(parts) == 1 else torch.stack(matrices)
    if tuple(whole.shape) != shape:
        raise ConfigError(
            f"the files of the model have {parts[0][0]} of shape {tuple(whole.shape)}, and by its config.json it is "
            f"{shape}; they are of different models"
        )
    return whole


def _closed(stored: Stored, parts: Parts, files: Files, worker: torch.device) -> Sequence[Tensor]:
    """Return the pieces of numbers that are read and stored, a matrix at a time."""
    if len(stored.shape) == 2:
        return stored.close(_joined(parts, files, stored.shape), worker)
    if len(parts) == 1:
        file = files[parts[0][0]]
        return stored.close_each((file[number] for number in range(stored.shape[0])), worker)
    shape = stored.matrix[::-1] if stored.transposed else stored.matrix
    return stored.close_each((_joined([part], files, shape) for part in parts), worker)


def _shipped(stored: Stored, name: str, files: Files, used: set[str], missing: list[str]) -> Sequence[Tensor] | None:
    """Return the pieces of a weight from files that have them; None if they have its numbers, or nothing of it."""
    ends = _ENDS[stored.form.name]
    names = [name + end for end in ends]
    if all(one in files for one in names):
        used |= {*names}
        return [*_formed(stored, [files[one][...] for one in names], name)]
    experts = _sources(name, files)
    if not experts or not all(one + end in files for part in experts for one in part for end in ends):
        if not experts:
            missing.append(name)
        return None
    rows, matrices = stored.matrix[0], len(experts[0])
    if matrices > 1 and stored.form.name == "fp8" and rows // matrices % SQUARE:
        raise ConfigError(
            f"{name}: its {matrices} matrices per expert have {rows // matrices} rows each in the model's files, no "
            f"multiple of {SQUARE}, so that their scales cannot stand one above the other; give the model that it was "
            "made of, with model.quantize=fp8"
        )
    pieces = [torch.empty(shape, dtype=dtype) for shape, dtype in stored.layout()]
    for number, part in enumerate(experts):
        read = [torch.cat([as_numbers(files[one + end][...]) for one in part]) for end in ends]
        used |= {one + end for one in part for end in ends}
        for piece, tensor in zip(pieces, _formed(stored, read, name, single=True), strict=True):
            piece[number] = tensor
    return pieces


def _formed(stored: Stored, tensors: Sequence[Tensor], name: str, *, single: bool = False) -> Iterator[Tensor]:
    """Yield pieces as a form has them: bytes."""
    layout = stored.form.layout(stored.matrix) if single else stored.layout()
    for tensor, (shape, _) in zip(tensors, layout, strict=True):
        piece = as_bytes(as_numbers(tensor))
        piece = piece.flatten(-2) if piece.shape[-2:] == stored.matrix else piece
        if tuple(piece.shape) != tuple(shape):
            raise ConfigError(
                f"the files of the model have a piece of {name} of {tuple(piece.shape)} bytes, and by its config.json "
                f"they are {tuple(shape)}; they are of different models"
            )
        yield piece


def as_numbers(tensor: Tensor) -> Tensor:
    """Return scales in float32, and everything else, of which nothing is computed here, as bytes."""
    return tensor.float() if tensor.dtype in (torch.bfloat16, torch.float32) else tensor.view(torch.uint8)
