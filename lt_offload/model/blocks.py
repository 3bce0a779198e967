"""Finds the block sequence of a model by its structure, without a list of architectures or module names.

A block is one module call: the embeddings, each layer, the final norm, the output projection.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch
from torch import nn

from lt_offload.errors import ModelError
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
    """Every parameter of a block with its first name in ``named_parameters()``, tied ones once, by first use."""
    rest: tuple[tuple[str, nn.Parameter], ...]
    """Parameters outside all blocks; they stay on the device."""
    owner: nn.Module | None = None
    """The Hugging Face model that names the last block as its output projection; it computes the loss from that."""


def find_blocks(model: nn.Module) -> Structure:
    """Return the block sequence of ``model``, which may be wrapped (PEFT, a LightningModule).

    The layers are the ``nn.ModuleList`` whose children's class is named in the model's ``_no_split_modules``, otherwise
    the one with most parameter bytes. The other blocks are its siblings that own parameters, and the output embeddings.

    Raises:
        ModelError: if there is no ``nn.ModuleList`` of two or more modules of one class.
    """
    path, layers = _layers(model)
    parent = model.get_submodule(path.rpartition(".")[0])
    owner, head = _output_embeddings(model, path)
    before, after = _siblings(parent, layers, exclude=head)
    names = {module: name for name, module in model.named_modules()}
    modules: list[tuple[nn.Module, BlockKind]] = [(module, _kind(module)) for module in before]
    modules += [(module, "layer") for module in layers]
    modules += [(module, "other") for module in after]
    if head is not None:
        modules.append((head, "head"))
    elif after and any(isinstance(module, nn.Linear) for module in after[-1].modules()):
        modules[-1] = (after[-1], "head")
    return _structure(model, owner, [(names[module], module, kind) for module, kind in modules])


def _layers(model: nn.Module) -> tuple[str, nn.ModuleList]:
    """Return path and list of the repeated layers."""
    lists = [(name, module) for name, module in model.named_modules() if name and isinstance(module, nn.ModuleList)]
    candidates = [(name, module) for name, module in lists if len(module) >= 2 and len({type(m) for m in module}) == 1]
    candidates = [(name, module) for name, module in candidates if _parameter_bytes(module)]
    unsplittable = {cls for module in model.modules() for cls in (getattr(module, "_no_split_modules", None) or ())}
    named = [(name, module) for name, module in candidates if type(module[0]).__name__ in unsplittable]
    if not candidates:
        others = (
            ", ".join(f"{name or 'the model'} ({_contents(module)})" for name, module in lists[:5]) or "none at all"
        )
        raise ModelError(
            f"{type(model).__name__} has no block sequence that could be streamed: looked for an nn.ModuleList of at "
            f"least two modules of one class that own parameters (decoder layers); nn.ModuleLists found: {others}. "
            "Hold the repeated layers in one nn.ModuleList"
        )
    return max(named or candidates, key=lambda item: _parameter_bytes(item[1]))


def _contents(modules: nn.ModuleList) -> str:
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
    parent: nn.Module, layers: nn.ModuleList, *, exclude: nn.Module | None
) -> tuple[list[nn.Module], list[nn.Module]]:
    """Return the modules that are called before and after the layers.

    Registration order answers that, except for a module that is registered before the layers and is no embedding: it
    may be the embeddings' norm (Bloom) or the final norm (OPT). Then a call decides.
    """
    children = list(parent.children())
    position = children.index(layers)
    own = [child for child in children if child is not layers and child is not exclude and _owns_parameters(child)]
    early = [child for child in own if children.index(child) < position or _kind(child) == "embedding"]
    if any(_kind(child) != "embedding" for child in early):
        order = _call_order(parent, layers, own)
        if order is not None:
            split = order.index(layers)
            return order[:split], order[split + 1 :]
    return early, [child for child in own if child not in early]


def _call_order(parent: nn.Module, layers: nn.ModuleList, siblings: list[nn.Module]) -> list[nn.Module] | None:
    """Return ``siblings`` and ``layers`` in the order in which ``parent`` calls them, on two tokens and with one layer.

    None if the parent cannot be called with token ids or does not call all of them.
    """
    order: list[nn.Module] = []
    watched = {module: module for module in siblings} | {layers[0]: layers}

    def note(module: nn.Module, _args: object) -> None:
        order.append(watched[module])

    handles = [module.register_forward_pre_hook(note) for module in watched]
    modules, first = layers._modules, next(iter(layers._modules.items()))
    device = next(layers.parameters()).device
    modes = [(module, module.training) for module in parent.modules()]
    try:
        layers._modules = dict([first])
        parent.eval()
        with untouched(model=parent), torch.no_grad(), torch.compiler.set_stance("force_eager"):
            parent(torch.zeros(1, 2, dtype=torch.long, device=device))
    except Exception:  # users' code, called as it may not expect: whatever it raises, registration order is left
        return None
    finally:
        layers._modules = modules
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
    names = {parameter: name for name, parameter in model.named_parameters()}
    indices: dict[nn.Parameter, int] = {}
    blocks = tuple(
        Block(
            name=name,
            module=module,
            kind=kind,
            tensors=tuple(indices.setdefault(parameter, len(indices)) for parameter in module.parameters()),
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
    for name, parameter in model.named_parameters():
        if parameter not in used:
            yield name, parameter
