"""Tiles of tokens: parts of a model that treat each token on its own run a few tokens at a time.

A gated MLP makes several tensors a few times as wide as its input, a norm copies in float32. Nothing in them depends on
other tokens, so that such a module can take tile after tile, in the forward and in the backward, which runs each tile
again from its part of the input: all that is saved. :func:`tile_tokens` changes a model so, and the changed model in
plain PyTorch defines the numbers: training, profiling and planning see a model with smaller peaks.

Modules are found by running them on a few tokens (:class:`_TokenWise`), not by their names.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from typing_extensions import override

from lt_offload.compat.torch import address_of, all_hooks_of, parameters_of, schema_of
from lt_offload.errors import ConfigError, PlanError
from lt_offload.machine.accounting import storage_bytes, tensors_in
from lt_offload.machine.dispatch import OperationMode
from lt_offload.model.blocks import find_blocks
from lt_offload.model.compiled import StandIn, cover, is_compiled
from lt_offload.model.parts import sizes_of
from lt_offload.model.saving import in_tiles, run_in_tiles
from lt_offload.model.state.contexts import ambient, within

Forward = Callable[..., Tensor]

_aten = torch.ops.aten


def check_tile_tokens(value: object) -> None:
    """Raise ``ConfigError`` for a value that is no number of tokens, nor None."""
    if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < 1):
        raise ConfigError(f"tile_tokens={value!r} must be at least 1, for example 4096, or None: tokens per tile")


def tile_tokens(model: nn.Module, tokens: int | None, *, blocks: str | None = None) -> tuple[str, ...]:
    """Let the parts of ``model`` that treat each token on its own run ``tokens`` at a time, from now on.

    A module is tiled if it returns one tensor, if in it nothing that depends on a token is used for another one, and if
    it saves more than its input: gated MLPs, norms that compute in float32, layers with adapters. Within
    each other the outermost counts; attention and the output projection stay whole.

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
        The names of the tiled modules.

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
    chosen = list(_to_be_tiled(model, blocks))
    if not chosen:
        raise ConfigError(
            f"tile_tokens={tokens}: no part of {type(model).__name__} that saves more than its input is known to treat "
            "each token on its own; leave it out"
        )
    for module, draws in chosen:
        Tile.put(module, tokens, draws=draws)
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
        self.end: Callable[[], None] = lambda: None

    @classmethod
    def put(cls, module: nn.Module, tokens: int, *, draws: bool) -> None:
        """Let ``module`` run so."""
        tile = cls(module, tokens, draws=draws)
        tile.end = cover(module, "forward", tile)

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
    """Write a tile to the tokens of ``whole`` from number ``at`` on."""
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
        # Without autocast's cache: it would give the casts of this run, which has no graph, to a run that has one.
        ctx.ambient = ambient()._replace(caches_casts=False)
        ctx.draws = _draws(args[0]) if tile.draws else []
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
            wanted = [x for x in (*entered, *leaves) if x.requires_grad]
            torch.autograd.backward(out, grad.view_as(out), inputs=wanted)
            return [x.grad for x in entered]

        wholes: list[Tensor | None] = [None] * len(args)
        with ExitStack() as stack:
            stack.enter_context(within(ctx.ambient))
            stack.enter_context(_drawing(args[0], ctx.draws))
            stack.enter_context(_in_place_of(tile.module, ctx.weights, leaves))
            stack.enter_context(torch.enable_grad())
            for at, gradients in tile.parts((*args, grads[0]), run):
                for slot, gradient in enumerate(gradients):
                    if gradient is not None:
                        whole = wholes[slot]
                        wholes[slot] = whole = args[slot].new_empty(args[slot].shape) if whole is None else whole
                        _put(whole, at, gradient)
                del gradients
        return None, None, *wholes, *(leaf.grad for leaf in leaves)


def _draws(x: Tensor) -> list[Tensor]:
    """Return the states of the generators that a module called with ``x`` may draw from; none without numbers."""
    if not _has_numbers(x):
        return []
    return [torch.get_rng_state(), *([torch.cuda.get_rng_state(x.device)] if x.is_cuda else [])]


def _has_numbers(x: Tensor) -> bool:
    return type(x) is Tensor and not x.is_meta


@contextmanager
def _drawing(x: Tensor, states: Sequence[Tensor]) -> Iterator[None]:
    """Let a module called with ``x`` draw what follows ``states`` (none: whatever), and nobody else notice."""
    now = _draws(x) if states else []
    for state in (states, now):
        if state is now:
            yield
        if state:
            torch.set_rng_state(state[0])
        if state[1:]:
            torch.cuda.set_rng_state(state[1], x.device)


@contextmanager
def _in_place_of(module: nn.Module, weights: Sequence[nn.Parameter], leaves: Sequence[Tensor]) -> Iterator[None]:
    """Let ``module`` compute with ``leaves`` in the place of its ``weights``."""
    by = dict(zip(weights, leaves, strict=True))
    owned = [parameters_of(other) for other in module.modules()]
    places = [(own, name, weight) for own in owned for name, weight in own.items() if weight in by]
    for own, name, weight in places:
        own[name] = by[weight]
    try:
        yield
    finally:
        for own, name, weight in places:
            own[name] = weight


# -- what can be tiled -------------------------------------------------------------------------------------------------

_SAMPLES, _TOKENS = 3, 7
"""The form of the input on which modules are tried."""
_WIDTHS = 4
"""So many widths of it are tried: those of the module's weights."""
_WORTH = 1.25
"""A module is tiled if it saves more than so many times its input."""


class _MixesError(Exception):
    """Tokens are mixed, or it is not known that they are not."""


def _to_be_tiled(model: nn.Module, blocks: str | None) -> Iterator[tuple[nn.Module, bool]]:
    """Yield the modules to be tiled, and whether each may draw random numbers."""
    known: dict[Any, bool | None] = {}
    dtype = next((p.dtype for p in model.parameters() if p.is_floating_point()), torch.get_default_dtype())
    waiting = [block.module for block in reversed(find_blocks(model, blocks).blocks) if block.kind != "head"]
    seen = set()
    while waiting:
        module = waiting.pop()
        if module in seen:
            continue
        seen.add(module)
        waiting += reversed([*module.children()])
        # In tiles, hooks of what is inside would see tiles, twice.
        if any(any(all_hooks_of(other)) for other in module.modules() if other is not module):
            continue
        kind = _kind(module)
        if kind not in known:
            known[kind] = _tried(module, dtype)
        draws = known[kind]
        if draws is not None:
            yield module, draws


def _kind(module: nn.Module) -> Any:
    """Return what two modules have in common that are of one kind."""
    tensors = [(name, p.shape, p.dtype, p.requires_grad) for name, p in module.named_parameters()]
    return type(module), repr(module), tuple(tensors)


def _tried(module: nn.Module, dtype: torch.dtype) -> bool | None:
    """Return whether ``module`` may draw random numbers; None: it cannot be tiled, or need not be.

    ``dtype``: of what blocks hand on.
    """
    weights = [*module.parameters()]
    inputs = [p for p in inspect.signature(module.forward).parameters.values() if p.default is p.empty]
    inputs = [p for p in inputs if p.kind is p.POSITIONAL_OR_KEYWORD]
    if type(module) is nn.Linear or not weights or not 1 <= len(inputs) <= 2:
        return None
    features = [getattr(other, "in_features", None) for other in module.modules()]
    sizes = [size for size in features if size] + [size for p in weights for size in reversed(p.shape[-2:])]
    # Layers of four bits, for example, note the dtype of the first input that they see.
    before = [(vars(other), dict(vars(other))) for other in module.modules()]
    try:
        for state, _ in before:
            state["training"] = True
        for width in [*dict.fromkeys(sizes)][:_WIDTHS]:
            x = torch.zeros(_SAMPLES, _TOKENS, width, dtype=dtype, device=weights[0].device)
            try:
                with _drawing(x, _draws(x)):
                    return _TokenWise.check(module, [x.clone() for _ in inputs])
            except _MixesError:
                return None
            except Exception:  # not its width, or not its kind of input: whatever it says
                continue
    finally:
        for state, known in before:
            state.clear()
            state.update(known)
    return None


_ALONE = {"_to_copy", "alias", "detach", "lift_fresh", "copy_", "fill_", "zero_", "bernoulli_", "native_dropout"}
_ALONE |= {"zeros_like", "ones_like", "full_like", "rand_like", "empty_like"}
"""Operations on each number alone that torch does not mark as such."""
_FORMS = {"view", "_unsafe_view", "reshape", "expand", "_reshape_alias"}
"""What keeps the order of numbers: tokens stay the first dimensions if these have the sizes for it."""
_ALONG = {"mean", "sum", "amax", "amin", "var", "std", "var_mean", "linalg_vector_norm", "_softmax", "_log_softmax"}
_ALONG |= {"cat", "stack", "split", "split_with_sizes", "chunk", "unbind", "slice", "select", "squeeze", "unsqueeze"}
_ALONG |= {"transpose", "glu", "topk", "sort", "argmax", "cumsum"}
"""Operations along dimensions that are arguments."""
_NORMS = {"native_layer_norm", "_fused_rms_norm"}
_PRODUCTS = {"mm": 0, "addmm": 1, "linear": 0, "gemm_4bit": 0}
"""Products, with the position of the matrix that has a row per token."""


class _TokenWise(OperationMode):
    """Follows what depends on the inputs of a module through its operations, and refuses what may mix tokens.

    Of all that depends on them tokens are the first dimensions: samples and tokens, or one for both.
    """

    def __init__(self, inputs: Sequence[Tensor]) -> None:
        super().__init__()
        self._inputs = [address_of(x.untyped_storage()) for x in inputs]
        self._alive = [*inputs]
        """What depends on the inputs, for as long as addresses of storages shall tell."""
        self._known = set(self._inputs)
        self._blank: set[int] = set()
        """Storages without numbers yet, which code that no mode sees might write."""
        self.draws = False

    @classmethod
    def check(cls, module: nn.Module, inputs: list[Tensor]) -> bool | None:
        """Return whether ``module``, called with ``inputs``, may draw random numbers; None if it saves too little.

        Raises:
            _MixesError: if it cannot be tiled.
        """
        saved: list[Tensor] = []

        def pack(tensor: Tensor) -> Tensor:
            saved.append(tensor.detach())
            return saved[-1]

        for x in inputs:
            x.requires_grad_()
        hooks = torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor)
        with torch.enable_grad(), hooks, cls(inputs) as mode:
            out = module.forward(*inputs)  # without its hooks
        if not isinstance(out, Tensor) or not mode._depends(out) or out.shape[:-1] != inputs[0].shape[:-1]:
            raise _MixesError("it returns something else than one tensor")
        own = storage_bytes(tensor for tensor in saved if mode._depends(tensor))
        return mode.draws if own > _WORTH * storage_bytes(inputs) else None

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        """Run the operation if it is known to treat each token alone.

        Raises:
            _MixesError: otherwise.
        """
        tensors = [*tensors_in((args, kwargs or {}))]
        depending = [x for x in tensors if self._depends(x)]
        schema = schema_of(func)
        written = address_of(args[0].untyped_storage()) if schema.is_mutable else None
        if written is not None and (written not in self._known or written in self._inputs):
            raise _MixesError(f"{schema.name} writes to what is not the module's own")
        if not depending or func.namespace == "prim":  # fake tensors are asked for their device
            return func(*args, **(kwargs or {}))
        name = schema.name.partition("::")[2]
        blank = {address_of(x.untyped_storage()) for x in depending} & self._blank
        if blank and not (blank == {written} and name in ("bernoulli_", "copy_", "fill_", "zero_")):
            raise _MixesError(f"{schema.name} reads what no operation has written")
        self._blank -= blank
        self.draws |= torch.Tag.nondeterministic_seeded in func.tags
        lead, longest = self._lead(depending[0]), max(x.ndim for x in depending)
        named = {a.name: a.default_value for a in schema.arguments}
        named |= dict(zip(named, args, strict=False)) | (kwargs or {})
        others = [x for x in tensors if not self._depends(x)]
        if name in _ALONE or torch.Tag.pointwise in func.tags:
            same = all(x.ndim == longest and self._lead(x) == lead for x in depending)
            # Aligned at the last dimension, where a table of positions would reach those of tokens.
            alone = same and all(math.prod(x.shape[: max(0, x.ndim - longest + lead)]) == 1 for x in others)
        elif name in _ALONG:
            dims = [value for key, value in named.items() if key in ("dim", "dim0", "dim1") and value is not None]
            flat = [dim for value in dims for dim in (value if isinstance(value, (list, tuple)) else [value])]
            last = longest + (name in ("unsqueeze", "stack"))
            alone = bool(flat) and not others and all(dim % last >= lead for dim in flat)
        elif name in _NORMS:
            alone = self._depends(args[0]) and len(depending) == 1 and len(args[1]) <= longest - lead
        elif name in _PRODUCTS:
            alone = self._depends(args[_PRODUCTS[name]]) and len(depending) == 1
            alone &= name != "addmm" or args[0].ndim == 1
        else:
            alone = name in _FORMS
        if not alone:
            raise _MixesError(schema.name)
        out = func(*args, **(kwargs or {}))
        for result in tensors_in(out):
            self._lead(result)
            if name in _FORMS and name != "expand" and result.numel() != depending[0].numel():
                raise _MixesError(schema.name)
            self._alive.append(result)
            self._known.add(address_of(result.untyped_storage()))
            if name == "empty_like":
                self._blank.add(address_of(result.untyped_storage()))
        return out

    def _depends(self, x: Tensor) -> bool:
        return address_of(x.untyped_storage()) in self._known

    @staticmethod
    def _lead(x: Tensor) -> int:
        """Return how many dimensions are those of tokens."""
        if x.shape[:2] == (_SAMPLES, _TOKENS):
            return 2
        if x.shape[:1] == (_SAMPLES * _TOKENS,):
            return 1
        raise _MixesError(f"a result of shape {list(x.shape)}")
