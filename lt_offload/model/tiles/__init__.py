"""Tiles of tokens: parts of a model that treat each token on its own run a few tokens at a time.

A gated MLP makes several tensors a few times as wide as its input, a norm copies in float32. Nothing in them depends on
other tokens, so that such a module can take tile after tile, in the forward and in the backward, which runs each tile
again from its part of the input: all that is saved. :func:`tile_tokens` changes a model so, and the changed model in
plain PyTorch defines the numbers: training, profiling and planning see a model with smaller peaks.

Modules are found by running them on a few tokens (``token_wise.py``), not by their names.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from typing_extensions import override

from lt_offload.arguments import checked
from lt_offload.compat.torch import parameters_of
from lt_offload.errors import ConfigError, PlanError
from lt_offload.model.compiled import StandIn, cover, is_compiled, kernels_of
from lt_offload.model.parts import sizes_of
from lt_offload.model.saving import in_tiles, run_in_tiles
from lt_offload.model.state.contexts import ambient, within
from lt_offload.model.state.generators import drawing, states_for
from lt_offload.model.tiles.token_wise import modules_of
from lt_offload.units import is_count

Forward = Callable[..., Tensor]


def check_tile_tokens(value: object) -> None:
    """Raise ``ConfigError`` for a value that is no number of tokens, nor None."""
    if value is not None and not is_count(value):
        raise ConfigError(f"tile_tokens={value!r} must be at least 1, for example 4096, or None: tokens per tile")


@checked
def tile_tokens(model: nn.Module, tokens: int | None, *, blocks: str | None = None) -> tuple[str, ...]:
    """Let the parts of ``model`` that treat each token on its own run ``tokens`` at a time, from now on.

    A module is tiled if it returns one tensor, if in it nothing that depends on a token is used for another one, and if
    it saves more than its input: gated MLPs, norms that compute in float32, layers with adapters. Of those within each
    other the outermost runs in tiles; attention and the output projection stay whole.

    The numbers are these: the tokens of a call, samples after each other, are divided into the fewest parts of at most
    ``tokens``, as ``torch.tensor_split`` does. The forward runs part after part, without a graph. So does the backward,
    which runs each part again, with the same random numbers, and adds its gradients of weights, in their own dtype, to
    those of the parts before it. A call of no more than ``tokens`` is one of the plain module. Hooks of a tiled module
    see all tokens; hooks of modules within it, if they are set later, see tiles.

    Args:
        model: with a block sequence; also without memory for its weights (``meta``).
        tokens: per tile; None: whole again.
        blocks: name of what holds the model's layers; None: it is found by structure.

    Returns:
        The names of these modules.

    Raises:
        ConfigError: if ``tokens`` is no such number, a block is compiled, or there is nothing to tile.
        ModelError: if the model has no block sequence.
    """
    check_tile_tokens(tokens)
    tiled = list(_tiled(model))
    if tokens is not None and tiled and {tile.tokens for _, tile in tiled} == {tokens}:
        return tuple(name for name, _ in tiled)
    for _, tile in tiled:
        tile.end()
    if tokens is None:
        return ()
    if any(map(is_compiled, model.modules())):
        raise ConfigError(
            f"tile_tokens={tokens} cannot be combined with compiled blocks, which save what their compiler chooses; "
            "leave one of them out"
        )
    names = {module: name for name, module in model.named_modules()}
    chosen = list(modules_of(model, blocks))
    if not chosen:
        raise ConfigError(
            f"tile_tokens={tokens}: no part of {type(model).__name__} that saves more than its input is known to treat "
            f"each token on its own; {'set model.kernels=null, or ' * bool(kernels_of(model))}leave it out"
        )
    for module, draws in chosen:
        Tile(module, tokens, draws=draws)
    return tuple(names[module] for module, _ in chosen)


def tokens_of(model: nn.Module) -> int:
    """Return the tokens per tile of a model that :func:`tile_tokens` has changed; 0 of another one."""
    return next((tile.tokens for _, tile in _tiled(model)), 0)


def check_tiles(planned: int, tokens: int) -> None:
    """Raise ``PlanError`` if a model runs in other tiles than those that its plan was made for; 0: in none."""
    if planned != tokens:
        raise PlanError(
            f"the plan has tile_tokens={planned or None}, which decides about the order of sums, and the model runs "
            f"with tile_tokens={tokens or None}; set tile_tokens={planned or None}, or plan again"
        )


@contextmanager
def tiled(model: nn.Module, tokens: int | None, blocks: str | None = None) -> Iterator[None]:
    """Enclose a training with :func:`tile_tokens`; None: the model is left as it is."""
    before = tokens_of(model) or None
    if tokens is not None:
        tile_tokens(model, tokens, blocks=blocks)
    try:
        yield
    finally:
        if tokens is not None:
            tile_tokens(model, before, blocks=blocks)


def _tiled(model: nn.Module) -> Iterator[tuple[str, Tile]]:
    for name, module in model.named_modules():
        forward = vars(module).get("forward")
        if isinstance(forward, Tile):
            yield name, forward


# -- the numbers -------------------------------------------------------------------------------------------------------


class Tile(StandIn):
    """The forward of a module that runs ``tokens`` at a time; ``draws``: it may draw random numbers."""

    def __init__(self, module: nn.Module, tokens: int, *, draws: bool) -> None:
        super().__init__(module, "forward", vars(module).get("forward"), self._run)
        self.module, self.tokens, self.draws = module, tokens, draws
        self.plain: Forward = module.forward
        self.end = cover(module, "forward", self)

    def _run(self, *args: Any, **kwargs: Any) -> Tensor:
        if in_tiles() or kwargs or not _alike(args) or math.prod(_tokens(args[0])) <= self.tokens:
            return self.plain(*args, **kwargs)
        weights = [p for p in self.module.parameters() if p.requires_grad]
        if torch.is_grad_enabled() and any(x.requires_grad for x in (*args, *weights)):
            out: Tensor = _InTiles.apply(self, weights, *args, *weights)  # type: ignore[no-untyped-call]
            return out
        return _joined(args[0], self.parts(args, self.plain))

    def parts(self, inputs: Sequence[Tensor], run: Callable[..., Any]) -> Iterator[tuple[int, Any]]:
        """Yield the number of each tile's first token, and what ``run`` returns for its part of all ``inputs``."""
        lead = _tokens(inputs[0])
        at, count = 0, math.prod(lead)
        rows = [x.reshape(count, *x.shape[len(lead) :]) for x in inputs]
        for size in sizes_of(count, -(-count // self.tokens)):
            parts = (x.narrow(0, at, size) for x in rows)
            with run_in_tiles():
                result = run(*(x if len(lead) == 1 else x[None] for x in parts))
            yield at, result
            del result
            at += size


def _tokens(x: Tensor) -> torch.Size:
    """Return the sizes of the dimensions that are those of tokens: samples and tokens, or one for both."""
    return x.shape[: 1 if x.ndim == 2 else 2]


def _alike(args: tuple[Any, ...]) -> bool:
    """Return whether all arguments are numbers of the same tokens."""
    tensors = all(isinstance(x, Tensor) and x.ndim > 1 and x.is_floating_point() for x in args)
    return tensors and len({_tokens(x) for x in args}) == 1


def _joined(first: Tensor, tiles: Iterator[tuple[int, Tensor]]) -> Tensor:
    """Return the results of tiles side by side, for the tokens of ``first``."""
    whole: Tensor | None = None
    for at, tile in tiles:
        if whole is None:
            whole = tile.new_empty((*_tokens(first), *tile.shape[len(_tokens(first)) :]))
        _put(whole, at, tile)
        del tile  # or it would lie beside the next one
    assert whole is not None
    return whole


def _put(whole: Tensor, at: int, tile: Tensor) -> None:
    rows = tile if tile.ndim == 2 else tile[0]
    lead = whole.ndim - rows.ndim + 1
    whole.view(math.prod(whole.shape[:lead]), *whole.shape[lead:])[at : at + len(rows)] = rows


class _InTiles(torch.autograd.Function):
    """One call of a tiled module, with each trained weight among its inputs: one use, one gradient."""

    @staticmethod
    @override
    def forward(ctx: Any, tile: Tile, weights: Sequence[nn.Parameter], *inputs: Tensor) -> Tensor:
        args = inputs[: len(inputs) - len(weights)]
        ctx.tile, ctx.weights, ctx.needed = tile, weights, ctx.needs_input_grad[2 : 2 + len(args)]
        # As they are now: torch.func.functional_call puts others there for the forward alone.
        ctx.places = _places(tile.module, weights)
        # Without autocast's cache: it would give the casts of this run, which has no graph, to a run that has one.
        ctx.ambient = ambient()._replace(caches_casts=False)
        ctx.draws = states_for(args[0]) if tile.draws else []
        ctx.save_for_backward(*args)
        with within(ctx.ambient):
            return _joined(args[0], tile.parts(args, tile.plain))

    @staticmethod
    @override
    @once_differentiable
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor | None, ...]:
        args, needed, tile = ctx.saved_tensors, ctx.needed, ctx.tile
        # Leaves of their own, with their own sums: hooks and gradients of the weights are for what is returned here.
        leaves = [weight.detach().requires_grad_() for weight in ctx.weights]

        def run(*tensors: Tensor) -> list[Tensor | None]:
            *parts, grad = tensors
            entered = [x.detach().requires_grad_(need) for x, need in zip(parts, needed, strict=True)]
            out = tile.plain(*entered)
            if out.requires_grad:
                wanted = [x for x in (*entered, *leaves) if x.requires_grad]
                torch.autograd.backward(out, grad.view_as(out), inputs=wanted)
            return [x.grad for x in entered]

        wholes: list[Tensor | None] = [None] * len(args)
        with ExitStack() as stack:
            stack.enter_context(within(ctx.ambient))
            stack.enter_context(drawing([args[0].device], ctx.draws))
            stack.enter_context(_in_place(ctx.places, leaves))
            stack.enter_context(torch.enable_grad())
            for at, gradients in tile.parts((*args, grads[0]), run):
                for slot, gradient in enumerate(gradients):
                    if gradient is not None:
                        whole = wholes[slot]
                        wholes[slot] = whole = args[slot].new_empty(args[slot].shape) if whole is None else whole
                        _put(whole, at, gradient)
                del gradients
        return None, None, *wholes, *(leaf.grad for leaf in leaves)


Places = list[tuple[dict[str, Any], str, int]]
"""Parameters of modules, a name among them, and the number of the weight that has it."""


def _places(module: nn.Module, weights: Sequence[nn.Parameter]) -> Places:
    numbers = {weight: number for number, weight in enumerate(weights)}
    owned = [parameters_of(other) for other in module.modules()]
    return [(own, name, numbers[weight]) for own in owned for name, weight in own.items() if weight in numbers]


@contextmanager
def _in_place(places: Places, leaves: Sequence[Tensor]) -> Iterator[None]:
    """Let modules compute with ``leaves`` in the ``places`` of their weights."""
    with ExitStack() as undo:
        for own, name, number in places:
            undo.callback(own.__setitem__, name, own[name])
            own[name] = leaves[number]
        yield
