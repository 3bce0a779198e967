"""Finds the block sequence of a model by its structure, without a list of architectures or module names.

A block is one module call: the embeddings, each layer, the final norm, the output projection. Which modules may be
blocks is seen in the structure; which of them are, and in which order, is known once the model has been called: where
:func:`find_blocks` has guessed otherwise, :func:`as_called` gives the sequence.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial

from torch import nn

from lt_offload.compat.hugging_face import unsplittable
from lt_offload.errors import ModelError
from lt_offload.model.quantized import named_tensors, prepare, tables, tensors_of
from lt_offload.schema.profile import BlockKind, BlockProfile


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Block:
    """One element of the block sequence."""

    name: str
    """Module path below the model that was searched."""
    module: nn.Module
    kind: BlockKind
    tensors: tuple[int, ...]
    """Indices into :attr:`Structure.tensors`; a tied tensor is listed by every block that uses it."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Structure:
    """The block sequence in the order of calls, and the parameters it uses."""

    blocks: tuple[Block, ...]
    tensors: tuple[tuple[str, nn.Parameter], ...]
    """Every parameter of a block with its first name in ``named_parameters()``, tied ones once, by first use. Scales
    follow their weight of four bits."""
    rest: tuple[tuple[str, nn.Parameter], ...]
    """Parameters outside all blocks, and small tables of weights of four bits; they stay on the device."""
    owner: nn.Module | None = None
    """The Hugging Face model that names the last block as its output projection; it computes the loss from that."""
    other: Callable[[], Structure | None] | None = None
    """Finds the next best, where the model calls no layer of this one."""


ModuleSequence = nn.ModuleList | nn.Sequential
_SEQUENCES = (nn.ModuleList, nn.Sequential)
_CONTAINERS = (nn.ModuleList, nn.ModuleDict)
"""Nobody calls these themselves: what they hold is no block, unless it is what was looked for."""
_SMALL = 8
"""Members of other lists are blocks where they have at least this part of a layer's bytes."""


def find_blocks(model: nn.Module, name: str | None = None) -> Structure:
    """Return the modules of ``model`` that may be its block sequence, in the order in which they are registered.

    The model may be wrapped (PEFT, a LightningModule). The layers are the ``nn.ModuleList`` whose children's class is
    named in the model's ``_no_split_modules``, otherwise the one with most parameter bytes; the ``nn.Sequential`` with
    most if there is no list. The other blocks are its siblings that own parameters, members of lists among them if they
    are of a layer's size, the output embeddings, and other modules that own a tensor which only one of these has.
    ``name`` is that of the ``nn.ModuleList`` or ``nn.Sequential`` that holds the layers, its path or the end of it
    (``"h"`` for ``transformer.h``). Raises ``ModelError`` if there is no list or sequence of two or more modules of one
    class, or none of that name.
    """
    return _around(model, *(_layers(model)[0] if name is None else _named(model, name)), guesses=name is None)


def _around(model: nn.Module, path: str, layers: ModuleSequence, *, guesses: bool) -> Structure:
    """Return the structure whose layers are at ``path``; ``guesses``: the call of the model may tell of others."""
    _, head = _output_projection(model, path)
    encoder = _encoder(model, path) if guesses else None
    modules = [pair for stack in (encoder, (path, layers)) if stack for pair in _stack(model, *stack, head)]
    if head is not None:
        modules.append((head, "head"))
    modules = [*_owners_of_tied(model, [module for module, _ in modules]), *modules]
    names = {module: name for name, module in model.named_modules()}
    structure = _structure(model, [(names[module], module, kind) for module, kind in modules])
    return replace(structure, other=partial(_other, model, path)) if guesses else structure


def _other(model: nn.Module, path: str) -> Structure | None:
    """Return the structure whose layers are those that follow the ones at ``path``, in the order of preference."""
    candidates = _layers(model)
    at = [name for name, _ in candidates].index(path) + 1
    return _around(model, *candidates[at], guesses=True) if at < len(candidates) else None


def as_called(model: nn.Module, blocks: Sequence[Block | BlockProfile]) -> Structure:
    """Return the block sequence of ``model`` that ``blocks`` name, in their order."""
    last = len(blocks) - 1
    kinds: list[BlockKind] = ["other" if b.kind == "head" and at < last else b.kind for at, b in enumerate(blocks)]
    modules = [(block.name, model.get_submodule(block.name)) for block in blocks]
    return _structure(model, [(name, module, kind) for (name, module), kind in zip(modules, kinds, strict=True)])


class CalledOtherwise(ModelError):
    """The model calls ``blocks`` in another order than they are registered in, or not all; perhaps no layer at all."""

    def __init__(self, message: str, blocks: Sequence[Block]) -> None:
        super().__init__(message)
        self.blocks = blocks


def _stack(
    model: nn.Module, path: str, layers: ModuleSequence, head: nn.Module | None
) -> list[tuple[nn.Module, BlockKind]]:
    """Return the layers and their siblings, embeddings first, but for the output projection."""
    least = _parameter_bytes(layers) / sum(map(_owns_parameters, layers)) / _SMALL
    modules: list[tuple[nn.Module, BlockKind]] = []
    for child in _surroundings(model, path) if path else [layers]:
        if child is layers or (isinstance(child, nn.ModuleList) and all(_parameter_bytes(m) >= least for m in child)):
            modules += _members(child)
        elif child is not head and not isinstance(child, _CONTAINERS) and _owns_parameters(child):
            modules.append((child, _kind(child)))
    return sorted(modules, key=lambda pair: pair[1] != "embedding")


def _members(modules: nn.Module) -> Iterator[tuple[nn.Module, BlockKind]]:
    """Yield what a list of layers holds; in a sequence, layers are the modules of the class that it has most of."""
    members = [module for module in modules.children() if _owns_parameters(module)]
    repeated = Counter(type(module) for module in members).most_common(1)[0][0] if members else None
    for module in members:
        whole = isinstance(modules, nn.ModuleList) or type(module) is repeated
        yield module, "layer" if whole else _kind(module)


def _owners_of_tied(model: nn.Module, blocks: list[nn.Module]) -> Iterator[tuple[nn.Module, BlockKind]]:
    """Yield modules outside ``blocks`` that own a tensor which only one of these has: it travels, so they must wait."""
    users = Counter(parameter for block in blocks for parameter in block.parameters())
    inside = {module for block in blocks for module in block.modules()}
    for module in model.modules():
        own = [parameter for parameter in module.parameters(recurse=False) if users[parameter] == 1]
        if own and inside.isdisjoint(module.modules()):
            yield module, _kind(module)


def _encoder(model: nn.Module, path: str) -> tuple[str, ModuleSequence] | None:
    """Return path and layers of the encoder of an encoder-decoder model whose decoder's layers are at ``path``.

    The module that holds both calls it its encoder, as Hugging Face models and ``nn.Transformer`` do.
    """
    parts = path.split(".")
    if "decoder" not in parts:
        return None
    above = ".".join(parts[: parts.index("decoder")])
    sequences = _sequences(model)
    prefix = f"{above}.encoder." if above else "encoder."
    return next((item for item in sequences if item[0].startswith(prefix) and _repeats(item[1])), None)


def _layers(model: nn.Module) -> list[tuple[str, ModuleSequence]]:
    """Return paths and lists of what may be the repeated layers, the best first."""
    sequences = _sequences(model)
    candidates = [(name, module) for name, module in sequences if _repeats(module)]
    lists = [(name, module) for name, module in candidates if isinstance(module, nn.ModuleList)]
    # In the order of ``modules()``: a model comes before the towers of other kinds that it consists of.
    whole = [set(unsplittable(module) or ()) for module in model.modules()]
    named = next((those for names in whole if (those := [it for it in lists if type(it[1][0]).__name__ in names])), [])
    if not candidates:
        raise ModelError(
            f"{type(model).__name__} has no block sequence that could be streamed: looked for an nn.ModuleList or "
            "nn.Sequential with at least two modules of one class that own parameters (decoder layers); found: "
            f"{_shown(sequences)}. Hold the repeated layers in one nn.ModuleList, or name what holds them (blocks=...)"
        )
    # Each of the three is the largest first already.
    return list(dict([*named, *lists, *candidates]).items())


def _named(model: nn.Module, name: str) -> tuple[str, ModuleSequence]:
    """Return path and module of what is called ``name``."""
    lists = _sequences(model)
    matches = [item for item in lists if item[0] == name] or [item for item in lists if item[0].endswith(f".{name}")]
    if len(matches) != 1:
        those = f"{len(matches)} of these are called so" if matches else "none of these is called so"
        raise ModelError(
            f"blocks={name!r}: {those} in {type(model).__name__}: {_shown(matches or lists)}; give the path of the "
            "nn.ModuleList or nn.Sequential that holds the layers"
        )
    return matches[0]


def _sequences(model: nn.Module) -> list[tuple[str, ModuleSequence]]:
    """Return every list and sequence of modules, by its path, the largest first."""
    sequences = [(name, module) for name, module in model.named_modules() if isinstance(module, _SEQUENCES)]
    sequences = [(name, module) for name, module in sequences if name or isinstance(module, nn.Sequential)]
    return sorted(sequences, key=lambda item: -_parameter_bytes(item[1]))


def _repeats(modules: ModuleSequence) -> bool:
    """Return whether this holds two modules of one class."""
    classes = Counter(type(module) for module in modules if _owns_parameters(module))
    return max(classes.values(), default=0) >= 2


def _shown(sequences: list[tuple[str, ModuleSequence]]) -> str:
    shown = []
    for name, modules in sequences[:5]:
        classes = ", ".join(sorted({type(module).__name__ for module in modules}))
        shown.append(f"{name or 'the model'} ({f'{len(modules)} of {classes}' if classes else 'empty'})")
    return ", ".join(shown) or "none at all"


def _parameter_bytes(module: nn.Module) -> int:
    return sum(parameter.nbytes for parameter in module.parameters())


def _owns_parameters(module: nn.Module) -> bool:
    return next(module.parameters(), None) is not None


def _kind(module: nn.Module) -> BlockKind:
    return "embedding" if any(isinstance(child, nn.Embedding) for child in module.modules()) else "other"


def _output_projection(model: nn.Module, path: str) -> tuple[nn.Module | None, nn.Module | None]:
    """Return the innermost Hugging Face model around ``path`` that names an output projection, and that module."""
    parts = path.split(".")
    for depth in range(len(parts) - 1, -1, -1):
        owner = model.get_submodule(".".join(parts[:depth]))
        getter = getattr(owner, "get_output_embeddings", None)
        head = getter() if callable(getter) else None
        if isinstance(head, nn.Module) and _owns_parameters(head):
            return owner, head
    return None, None


def _surroundings(model: nn.Module, path: str) -> list[nn.Module]:
    """Return the children of the module that calls the layers at ``path``.

    Those of containers around the layers count as its own, and so do members of dictionaries beside them.
    """
    parts = path.split(".")[:-1]
    parent = model.get_submodule(".".join(parts))
    children = list(parent.children())
    while parts and isinstance(parent, _CONTAINERS):
        inner, within = parent, children
        parts.pop()
        parent = model.get_submodule(".".join(parts))
        children = []
        for child in parent.children():
            children += within if child is inner else [child]
    members: list[nn.Module] = []
    for child in children:
        # Of a dictionary a model calls members, but not lists of layers, which may be another model's.
        own = [member for member in child.children() if not isinstance(member, _CONTAINERS)]
        members += own if isinstance(child, nn.ModuleDict) else [child]
    return members


def _structure(model: nn.Module, modules: list[tuple[str, nn.Module, BlockKind]]) -> Structure:
    """Number the parameters by first use."""
    name, last, kind = modules[-1]
    # No output embeddings are named (a classifier, a model of the user's own), and a product comes last: that is the
    # head.
    if kind == "other" and any(isinstance(module, nn.Linear) for module in last.modules()):
        modules[-1] = (name, last, "head")
    owner, head = _output_projection(model, name)
    # First: scales become parameters here, and parameters are what the names below are looked up by.
    prepare(model)
    names = {tensor: name for name, tensor in named_tensors(model)}
    indices: dict[nn.Parameter, int] = {}
    blocks = tuple(
        Block(
            name=name,
            module=module,
            kind=kind,
            tensors=tuple(indices.setdefault(parameter, len(indices)) for parameter in tensors_of(module)),
        )
        for name, module, kind in modules
    )
    return Structure(
        blocks=blocks,
        tensors=tuple((names[parameter], parameter) for parameter in indices),
        rest=(*((name, tensor) for tensor, name in names.items() if tensor not in indices), *tables(model)),
        owner=owner if head is last else None,
    )
