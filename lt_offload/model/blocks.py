"""Finds the block sequence of a model by its structure, without a list of architectures or module names.

A block is one module call: the embeddings, each layer, the final norm, the output projection.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch
from torch import nn

from lt_offload.compat.hugging_face import unsplittable
from lt_offload.compat.torch import children_of, replace_children
from lt_offload.errors import ModelError
from lt_offload.model.quantized import named_tensors, prepare, tables, tensors_of
from lt_offload.model.snapshot import untouched
from lt_offload.schema.profile import BlockKind


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


ModuleSequence = nn.ModuleList | nn.Sequential
_SEQUENCES = (nn.ModuleList, nn.Sequential)
_CONTAINERS = (nn.ModuleList, nn.ModuleDict)
"""Nobody calls these themselves: what they hold is no block, unless it is what was looked for."""


def find_blocks(model: nn.Module, name: str | None = None) -> Structure:
    """Return the block sequence of ``model``, which may be wrapped (PEFT, a LightningModule).

    The layers are the ``nn.ModuleList`` whose children's class is named in the model's ``_no_split_modules``, otherwise
    the one with most parameter bytes; the ``nn.Sequential`` with most if there is no list. The other blocks are its
    siblings that own parameters, and the output embeddings.

    Args:
        model: with its weights anywhere.
        name: of the ``nn.ModuleList`` or ``nn.Sequential`` that holds the layers, its path or the end of it (``"h"``
            for ``transformer.h``); None: see above.

    Raises:
        ModelError: if there is no list or sequence of two or more modules of one class, or none of that name.
    """
    path, layers = _layers(model) if name is None else _named(model, name)
    owner, head = _output_embeddings(model, path)
    encoder = _encoder(model, path) if name is None else None
    modules = _stack(model, path, layers, head, called=encoder is not None)
    if encoder is not None:
        modules = [*_stack(model, *encoder, head, called=True), *modules]
    names = {module: name for name, module in model.named_modules()}
    last, kind = modules[-1]
    if head is not None:
        modules.append((head, "head"))
    # No output embeddings are named (a classifier, a model of the user's own), and a product comes last: that is the
    # head.
    elif kind == "other" and any(isinstance(module, nn.Linear) for module in last.modules()):
        modules[-1] = (last, "head")
    return _structure(model, owner, [(names[module], module, kind) for module, kind in modules])


def _stack(
    model: nn.Module, path: str, layers: ModuleSequence, head: nn.Module | None, *, called: bool
) -> list[tuple[nn.Module, BlockKind]]:
    """Return the layers and what is called before and after them, but for the output projection."""
    members = [module for module in layers if _owns_parameters(module)]
    before, after = _siblings(model, path, layers, exclude=head, called=called)
    repeated = Counter(type(module) for module in members).most_common(1)[0][0]
    modules: list[tuple[nn.Module, BlockKind]] = [(module, _kind(module)) for module in before]
    modules += [(module, "layer" if type(module) is repeated else _kind(module)) for module in members]
    return modules + [(module, "other") for module in after]


def _encoder(model: nn.Module, path: str) -> tuple[str, ModuleSequence] | None:
    """Return path and layers of the encoder of an encoder-decoder model whose decoder's layers are at ``path``.

    The module that holds both calls it its encoder, as Hugging Face models and ``nn.Transformer`` do.
    """
    parts = path.split(".")
    if "decoder" not in parts:
        return None
    above = ".".join(parts[: parts.index("decoder")])
    found = _sequences(model)
    prefix = f"{above}.encoder." if above else "encoder."
    return next((item for item in found if item[0].startswith(prefix) and _repeats(item[1])), None)


def _layers(model: nn.Module) -> tuple[str, ModuleSequence]:
    """Return path and list of the repeated layers."""
    found = _sequences(model)
    candidates = [(name, module) for name, module in found if _repeats(module)]
    lists = [(name, module) for name, module in candidates if isinstance(module, nn.ModuleList)]
    whole = {cls for module in model.modules() for cls in (unsplittable(module) or ())}
    named = [(name, module) for name, module in lists if type(module[0]).__name__ in whole]
    if not candidates:
        raise ModelError(
            f"{type(model).__name__} has no block sequence that could be streamed: looked for an nn.ModuleList or "
            "nn.Sequential with at least two modules of one class that own parameters (decoder layers); found: "
            f"{_shown(found)}. Hold the repeated layers in one nn.ModuleList, or name what holds them (blocks=...)"
        )
    return max(named or lists or candidates, key=lambda item: _parameter_bytes(item[1]))


def _named(model: nn.Module, name: str) -> tuple[str, ModuleSequence]:
    """Return path and module of what is called ``name``."""
    found = _sequences(model)
    matches = [item for item in found if item[0] == name] or [item for item in found if item[0].endswith(f".{name}")]
    if len(matches) != 1:
        those = f"{len(matches)} of these are called so" if matches else "none of these is called so"
        raise ModelError(
            f"blocks={name!r}: {those} in {type(model).__name__}: {_shown(matches or found)}; give the path of the "
            "nn.ModuleList or nn.Sequential that holds the layers"
        )
    return matches[0]


def _sequences(model: nn.Module) -> list[tuple[str, ModuleSequence]]:
    """Return every list and sequence of modules, by its path, the largest first."""
    found = [(name, module) for name, module in model.named_modules() if isinstance(module, _SEQUENCES)]
    found = [(name, module) for name, module in found if name or isinstance(module, nn.Sequential)]
    return sorted(found, key=lambda item: -_parameter_bytes(item[1]))


def _repeats(modules: ModuleSequence) -> bool:
    """Return whether this is a list of modules of one class, or calls two of one class."""
    classes = Counter(type(module) for module in modules if _owns_parameters(module))
    if isinstance(modules, nn.ModuleList) and len({type(module) for module in modules}) > 1:
        return False
    return max(classes.values(), default=0) >= 2


def _shown(found: list[tuple[str, ModuleSequence]]) -> str:
    return ", ".join(f"{name or 'the model'} ({_contents(module)})" for name, module in found[:5]) or "none at all"


def _contents(modules: ModuleSequence) -> str:
    classes = sorted({type(module).__name__ for module in modules})
    return f"{len(modules)} of {', '.join(classes)}" if classes else "empty"


def _parameter_bytes(module: nn.Module) -> int:
    return sum(parameter.nbytes for parameter in module.parameters())


def _owns_parameters(module: nn.Module) -> bool:
    return next(module.parameters(), None) is not None


def _kind(module: nn.Module) -> BlockKind:
    return "embedding" if any(isinstance(child, nn.Embedding) for child in module.modules()) else "other"


def _output_embeddings(model: nn.Module, path: str) -> tuple[nn.Module, nn.Module] | tuple[None, None]:
    """Return the innermost Hugging Face model around the layers that names an output projection, and that."""
    parts = path.split(".")
    for depth in range(len(parts) - 1, -1, -1):
        owner = model.get_submodule(".".join(parts[:depth]))
        getter = getattr(owner, "get_output_embeddings", None)
        head = getter() if callable(getter) else None
        if isinstance(head, nn.Module) and _owns_parameters(head):
            return owner, head
    return None, None


def _siblings(
    model: nn.Module, path: str, layers: ModuleSequence, *, exclude: nn.Module | None, called: bool
) -> tuple[list[nn.Module], list[nn.Module]]:
    """Return the modules that are called before and after the layers.

    Registration order answers that, except for a module that is registered before the layers and is no embedding: it
    may be the embeddings' norm (Bloom) or the final norm (OPT). Then, or if ``called``, a call decides.
    """
    if not path:
        return [], []
    parent, children = _surroundings(model, path)
    position = children.index(layers)
    own = [child for child in children if child is not layers and child is not exclude and _owns_parameters(child)]
    own = [child for child in own if not isinstance(child, _CONTAINERS)]
    early = [child for child in own if children.index(child) < position or _kind(child) == "embedding"]
    if (called or any(_kind(child) != "embedding" for child in early)) and not isinstance(parent, nn.Sequential):
        order = _call_order(parent, layers, own)
        if order is not None:
            split = order.index(layers)
            return order[:split], order[split + 1 :]
    return early, [child for child in own if child not in early]


def _surroundings(model: nn.Module, path: str) -> tuple[nn.Module, list[nn.Module]]:
    """Return the module that calls the layers at ``path``, and its children; those of containers count as its own."""
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
    return parent, children


def _call_order(parent: nn.Module, layers: ModuleSequence, siblings: list[nn.Module]) -> list[nn.Module] | None:
    """Return ``siblings`` and ``layers`` in the order in which ``parent`` calls them, on two tokens and with one layer.

    None if the parent cannot be called with token ids or does not call all of them.
    """
    order: list[nn.Module] = []
    watched = {module: module for module in siblings} | {layers[0]: layers}

    def note(module: nn.Module, _args: object) -> None:
        order.append(watched[module])

    handles = [module.register_forward_pre_hook(note) for module in watched]
    modules, first = children_of(layers), next(iter(children_of(layers).items()))
    device = next(layers.parameters()).device
    modes = [(module, module.training) for module in parent.modules()]
    try:
        # One layer is enough to see when layers are called, and takes no more time in a large model.
        replace_children(layers, dict([first]))
        # Nothing draws random numbers or counts statistics. Modules may be in different modes, so each gets its own
        # back below.
        parent.eval()
        # Compiled parts are not compiled for two tokens, whose shape nobody will see again.
        with untouched(model=parent), torch.no_grad(), torch.compiler.set_stance("force_eager"):
            parent(torch.zeros(1, 2, dtype=torch.long, device=device))
    except Exception:  # users' code, called as it may not expect: whatever it raises, registration order is left
        return None
    finally:
        replace_children(layers, modules)
        for module, training in modes:
            module.training = training
        for handle in handles:
            handle.remove()
    called = list(dict.fromkeys(order))
    return called if set(called) == set(watched.values()) else None


def _structure(
    model: nn.Module, owner: nn.Module | None, modules: Iterable[tuple[str, nn.Module, BlockKind]]
) -> Structure:
    """Number the parameters by first use."""
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
        rest=tuple(_rest(model, set(indices))),
        owner=owner,
    )


def _rest(model: nn.Module, used: set[nn.Parameter]) -> Iterator[tuple[str, nn.Parameter]]:
    for name, tensor in named_tensors(model):
        if tensor not in used:
            yield name, tensor
    yield from tables(model)
