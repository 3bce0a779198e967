"""Private names of torch: the use of each, and the failure without it.

All of them are in torch 2.11.0 (the oldest that is supported), 2.13.0 (which the tests run with) and 2.14.1, those
that are written in Python with the same parameters. Names are torch's own objects where that is possible, and
``attrgetter`` is written in C: what stands on the path of every operation costs no frame of Python more.
"""

from __future__ import annotations

import gc
import sys
from collections import OrderedDict
from collections.abc import Callable
from functools import partial
from operator import attrgetter
from typing import Any

import torch
from torch._subclasses.fake_tensor import DataDependentOutputException as DataDependentOutputException
from torch._subclasses.fake_tensor import DynamicOutputShapeException as DynamicOutputShapeException
from torch._subclasses.fake_tensor import FakeTensor
from torch._subclasses.fake_tensor import FakeTensorMode as FakeTensorMode
from torch.utils._device import DeviceContext as DeviceContext
from torch.utils._python_dispatch import TorchDispatchMode as TorchDispatchMode
from torch.utils._pytree import TreeSpec as TreeSpec
from torch.utils._pytree import tree_flatten as tree_flatten
from torch.utils._pytree import tree_leaves as tree_leaves
from torch.utils._pytree import tree_map as tree_map
from torch.utils._pytree import tree_unflatten as tree_unflatten

_C: Any = torch._C
_aten: Any = torch.ops.aten
_dispatch: Any = torch.utils._python_dispatch
_overrides: Any = torch.overrides
_tensor: Any = torch.Tensor

# Above, with what breaks without them: fake tensors (profiles without weights, and what an optimizer's states will be),
# ``DeviceContext`` (a block that runs again under ``torch.device``), ``TorchDispatchMode`` (the guard, meters and
# accounting), trees (arguments and outputs of blocks).

# -- tensors and storages ----------------------------------------------------------------------------------------------

address_of: Callable[[Any], int] = attrgetter("_cdata")
"""The address of the C++ object behind a tensor or a storage: the same for all Python objects of it. The address
of its storage tells whose memory a tensor is: the guard, snapshots and accounting see nothing without it."""
version_of: Callable[[torch.Tensor], int] = attrgetter("_version")
"""The number of writes to a tensor. Arguments of blocks that are written to, and a user's tensors that a measured step
changes, are found by it."""
has_storage: Callable[[torch.Tensor], bool] = _C._has_storage
"""True for a tensor with memory; sparse ones have several pieces, and asking them for their storage raises."""
_storage_uses: Callable[[int], int] = _C._storage_Use_Count
typed_storage: Any = _tensor._typed_storage
"""The method behind ``Tensor.storage``. The guard has to know that it hands memory out of its sight."""
rows_of_sparse: tuple[Callable[[torch.Tensor], torch.Tensor], ...] = (_tensor._indices, _tensor._values)
"""The pieces of a sparse COO tensor; the public names refuse tensors whose rows are not added up."""
make_wrapper_subclass: Any = _tensor._make_wrapper_subclass
"""Makes a tensor of a subclass without memory: stand-ins for consumed gradients and for logits."""


def storage_uses(storage: torch.UntypedStorage) -> int:
    """Return the number of references to ``storage``, to notice holders of a weight's memory besides the model."""
    return int(_storage_uses(address_of(storage)))


def is_fake(tensor: torch.Tensor) -> bool:
    """Return whether ``tensor`` has a shape and no numbers: what depends on numbers has to be assumed then."""
    return isinstance(tensor, FakeTensor)


def beside_fake(tensor: Any, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Return a fake tensor like a fake ``tensor``, which no dispatch mode sees being made."""
    with DisableTorchDispatch():
        return FakeTensor(tensor.fake_mode, torch.empty(shape, dtype=dtype, device="meta"), tensor.device)


# -- modes -------------------------------------------------------------------------------------------------------------

DisableTorchDispatch: Any = _C._DisableTorchDispatch
"""Context in which no dispatch mode is asked, for the engine's own operations on tensors."""
DisableTorchFunctionSubclass: Any = _C.DisableTorchFunctionSubclass
"""Context in which subclasses of tensors are taken for tensors: their ``__torch_function__`` is a user's."""
DisableTorchFunction: Any = _C.DisableTorchFunction
"""... and function modes are not asked, either."""
dispatch_modes: Callable[[], int] = _C._len_torch_dispatch_stack
"""The number of dispatch modes of the thread. The guard is lifted out of the stack without leaving the others."""
push_dispatch_mode: Callable[[Any], None] = _C._push_on_torch_dispatch_stack
pop_dispatch_mode: Callable[[], Any] = partial(_C._pop_torch_dispatch_stack, None)
all_dispatch_modes: Callable[[], list[Any]] = _dispatch._get_current_dispatch_mode_stack
"""The dispatch modes of the thread: a block that runs again runs in those of its first run."""
without_dispatch_modes: Any = _dispatch._disable_current_modes
"""Context without any of them, whatever they are: threads of the emulated device begin in it."""
function_modes: Callable[[], int] = _C._len_torch_function_stack
push_function_mode: Callable[[Any], None] = _C._push_on_torch_function_stack
pop_function_mode: Callable[[], Any] = _C._pop_torch_function_stack
all_function_modes: Callable[[], list[Any]] = _overrides._get_current_function_mode_stack
"""The same for function modes, of which the guard and the watch of the logits are."""
functorch_level: Callable[[], Any] = _C._functorch.peek_interpreter_stack
"""The transform of ``torch.func`` that the thread is in, None outside: it cannot see through blocks, and is refused."""

# -- operations --------------------------------------------------------------------------------------------------------

schema_of: Callable[[Any], Any] = attrgetter("_schema")
"""Name, arguments and writes of an operation. Without it every operation on a weight would count as a write."""
packet_of: Callable[[Any], Any] = attrgetter("_overloadpacket")
"""The operation that an overload belongs to, by which torch counts floating point operations."""
Operation = torch._ops.OpOverload
"""The type of the operations that the nodes of a graph call."""
foreach_add_: Any = torch._foreach_add_
foreach_copy_: Any = torch._foreach_copy_
foreach_norm: Any = torch._foreach_norm
grouped_by_device_and_dtype: Any = torch.utils._foreach_utils._group_tensors_by_device_and_dtype
"""The order in which ``get_total_norm`` takes dtypes, for the same bits of a norm whose parts are known."""
fused_adamw_: Any = torch._fused_adamw_
"""The kernel of ``torch.optim.AdamW(fused=True)``: updates on the host run it for the same bits."""
LIBRARY: str = torch._C.__file__
"""The library by which torch's own are loaded."""
log_softmax_backward: Callable[..., torch.Tensor] = torch._log_softmax_backward_data
"""The backward of ``log_softmax``, for the same bits in losses that are computed a few tokens at a time."""
FOREACH_COPY: Any = _aten._foreach_copy_.default
"""``foreach_copy_`` as dispatch modes see it."""
FLASH_ON_CPU: Any = _aten._scaled_dot_product_flash_attention_for_cpu.default
FLASH_ON_CPU_BACKWARD: Any = _aten._scaled_dot_product_flash_attention_for_cpu_backward.default
ATTENTIONS: frozenset[Any] = frozenset(
    {
        FLASH_ON_CPU,
        _aten._scaled_dot_product_flash_attention.default,
        _aten._scaled_dot_product_efficient_attention.default,
        _aten._scaled_dot_product_cudnn_attention.default,
        _aten._scaled_dot_product_fused_attention_overrideable.default,
    }
)
"""Operations behind ``scaled_dot_product_attention``: too costly to compute again under the option ``mixed``."""

FAST_PATHS: tuple[Any, Any] = (
    _aten._transformer_encoder_layer_fwd.default,
    _aten._native_multi_head_attention.default,
)
"""Operations of ``nn.TransformerEncoderLayer`` and ``nn.MultiheadAttention`` in eval mode that call others, which
autocast has to see. Within a dispatch mode it does not, as for an operation that was seen already."""
ASKING: tuple[Any, ...] = (_aten.prod.default, _aten.prod.dim_int, _aten.masked_fill.Tensor, _aten.masked_fill_.Tensor)
"""Operations whose gradient torch computes in another way, with other last bits, within any dispatch mode."""
ASKING_NODES = ("ProdBackward", "MaskedFillBackward")
before_dispatch: Any = _C._RestorePythonTLSSnapshot
"""Context, in a dispatch mode, with the settings that were there when the operation was called."""
exclude_key: Any = _C._SetExcludeDispatchKeyGuard
"""Context in which a dispatch key is left out, or is not."""
AUTOCAST_ON_CPU: Any = _C.DispatchKey.AutocastCPU

# -- autograd ----------------------------------------------------------------------------------------------------------

will_run: Callable[[Any], bool] = _C._will_engine_execute_node
"""True if the backward that runs will come to a node. A backward for a few inputs alone is refused by it."""
top_saved_tensors_hooks: Callable[[bool], Any] = _C._autograd._top_saved_tensors_default_hooks
"""The innermost ``saved_tensors_hooks``: others than those known to be exact are refused around blocks."""
tensor_hooks_of: Callable[[torch.Tensor], Any] = attrgetter("_backward_hooks")
"""Hooks that ``register_hook`` has put on a tensor; None without any. They would not see the gradient of a block."""
accumulated_hooks_of: Callable[[torch.Tensor], Any] = attrgetter("_post_accumulate_grad_hooks")
"""Hooks that ``register_post_accumulate_grad_hook`` has put on a tensor."""


def after_backward(call: Callable[[], None]) -> None:
    """Have ``call`` made when the backward that runs has ended, before ``backward()`` returns."""
    engine: Any = torch.autograd.Variable._execution_engine
    engine.queue_callback(call)


# -- modules and optimizers --------------------------------------------------------------------------------------------

parameters_of: Callable[[Any], dict[str, Any]] = attrgetter("_parameters")
buffers_of: Callable[[Any], dict[str, Any]] = attrgetter("_buffers")
submodules_of: Callable[[Any], dict[str, Any]] = attrgetter("_modules")
"""A module's own dictionaries, to be replaced: the public names are iterators, and setting goes through users' code."""
BatchNorm: Any = torch.nn.modules.batchnorm._BatchNorm
"""The class below every batch norm, which computes with all samples of a batch, and so differently in parts of it."""

forward_hooks_of: Callable[[Any], tuple[dict[int, Any], dict[int, Any]]]
forward_hooks_of = attrgetter("_forward_pre_hooks", "_forward_hooks")
"""Hooks before and behind a module's forward: what they keep and change belongs to a block's run."""
FORWARD_PRE_HOOKS = "_forward_pre_hooks"
"""The name under which a module's dictionary has them, for copies of the model that leave ours out."""
FORWARD_PRE_HOOKS_WITH_KWARGS = "_forward_pre_hooks_with_kwargs"
"""The name of the dictionary that says which of them are given keyword arguments, too."""
COMPILED_CALL = "_compiled_call_impl"
MODULE_PARTS = frozenset({"_modules", "_parameters", "_buffers", COMPILED_CALL})
"""Attributes of modules that a forward does not change, or that are looked at as a part of their own."""
HOOKS = frozenset({"_forward_hooks", FORWARD_PRE_HOOKS, "_backward_hooks", "_backward_pre_hooks"})
HOOKS |= {"_forward_hooks_with_kwargs", FORWARD_PRE_HOOKS_WITH_KWARGS}
"""The dictionaries of a module's bookkeeping that a run depends on."""
compiled_call_of: Callable[[Any], Any] = attrgetter(COMPILED_CALL)
"""The compiled call that ``module.compile()`` has made; None without it."""
PLAIN_CALL = "_call_impl"
plain_call_of: Callable[[Any], Callable[..., Any]] = attrgetter(PLAIN_CALL)
"""A module's call without it."""
WRAPPED_MODULE = "_orig_mod"
"""The attribute in which ``torch.compile(module)`` keeps the module."""
all_hooks_of: Callable[[Any], tuple[dict[int, Any], ...]] = attrgetter(
    "_forward_hooks", FORWARD_PRE_HOOKS, "_backward_hooks", "_backward_pre_hooks"
)
"""All hooks of a module."""
GLOBAL_FORWARD_HOOKS: tuple[dict[int, Any], ...] = (
    torch.nn.modules.module._global_forward_pre_hooks,
    torch.nn.modules.module._global_forward_hooks,
)
"""Hooks of every module."""
step_pre_hooks_of: Callable[[Any], OrderedDict[int, Any]] = attrgetter("_optimizer_step_pre_hooks")
step_post_hooks_of: Callable[[Any], OrderedDict[int, Any]] = attrgetter("_optimizer_step_post_hooks")
"""Hooks of an optimizer's step. The engine's have to be the last before it and the first behind it."""
UNSCALE_GRADIENTS = "_unscale_grads_"
"""Method of a ``GradScaler``, the only one that looks for gradients: in parameters, where those of blocks are not."""
UNSCALES_ITSELF = "_step_supports_amp_scaling"
"""Attribute of an optimizer whose step takes scaled gradients: Lightning does not clip what it gets."""
STEP_HOOKS = frozenset({"_optimizer_step_pre_hooks", "_optimizer_step_post_hooks"})


def forget_step_hooks(optimizer: Any) -> None:
    """Give ``optimizer``, a copy that updates one tensor, no hooks: the user's are called once per step."""
    for name in STEP_HOOKS:
        setattr(optimizer, name, OrderedDict())


# -- the compiler ------------------------------------------------------------------------------------------------------

_eval_frame: Any = _C._dynamo.eval_frame
_guards: Any = _C._dynamo.guards
_ALLOCATIONS = {device: f"empty_strided_{device}" for device in ("cpu", "cuda")}
compiled_allocations: dict[str, Callable[..., torch.Tensor]] = {
    device: getattr(_guards, f"_{name}") for device, name in _ALLOCATIONS.items()
}
"""Allocating functions of compiled code, by device. No dispatch mode sees them; accounting and meters replace them."""


def allocate_compiled_with(functions: dict[str, Callable[..., torch.Tensor]]) -> None:
    """Let compiled code, that there is and that will be, allocate with ``functions``, by device."""
    inductor: Any = sys.modules.get("torch._inductor.codecache")
    generated = [vars(module) for module in inductor.PyCodeCache.modules] if inductor is not None else []
    for device, function in functions.items():
        name = _ALLOCATIONS[device]
        before = getattr(_guards, f"_{name}")
        setattr(_guards, f"_{name}", function)
        others: list[Any] = []
        if inductor is not None and inductor.config.force_disable_caches:
            # torch forgets each module as soon as it is loaded, and its code goes on in what were its globals.
            others = [holder for holder in gc.get_referrers(before) if type(holder) is dict]
        for names in (*generated, *others):
            if name in names:
                names[name] = function


def skip_in_dynamo(function: Any) -> None:
    """Keep ``torch.compile`` out of ``function``, as ``torch._dynamo.disable`` does, and without its wrapper."""
    skip = _eval_frame._FrameAction.SKIP
    _eval_frame.set_code_exec_strategy(function.__code__, _eval_frame._FrameExecStrategy(skip, skip))


def reset_dynamo() -> None:
    """Bring ``torch.compile`` back to where a process starts: the sizes that it has seen decide about its numbers."""
    torch._dynamo.reset()


def lower_graphs(module: Any, inputs: list[Any], lower: Callable[[Any], Callable[[list[Any]], Any]]) -> Any:
    """Return a callable that runs ``module``, a graph of Dynamo's, as inductor divides it in forward and backward.

    ``lower`` returns what runs a graph of inductor's, in place of generated code: it empties a list of arguments.
    """
    from torch._functorch import config
    from torch._inductor.compile_fx import compile_fx

    def inner(graph: Any, *_arguments: Any, **_settings: Any) -> Any:
        run = lower(graph)

        def call(arguments: list[Any]) -> Any:
            return run(arguments)

        call._boxed_call = True  # type: ignore[attr-defined]
        return call

    # Where the same graph was compiled before, a cache has code for it, and training has no use for what runs here.
    with config.patch(enable_autograd_cache=False):
        return compile_fx(module, inputs, inner_compile=inner)


# -- what torch computes with ------------------------------------------------------------------------------------------


def _reduction(write: Callable[[bool, bool], None]) -> Callable[[tuple[bool, bool]], None]:
    return lambda value: write(*value)


_CUDA, _MKLDNN, _CUDNN = torch.backends.cuda, torch.backends.mkldnn, torch.backends.cudnn
_PARAMETRIZE: Any = torch.nn.utils.parametrize


def parametrized() -> tuple[int, dict[Any, Any]]:
    """Return how many ``parametrize.cached()`` are around, and the weights that they keep."""
    return _PARAMETRIZE._cache_enabled, _PARAMETRIZE._cache


def set_parametrized(contexts: int, weights: dict[Any, Any]) -> None:
    """Let so many ``parametrize.cached()`` be around, which keep ``weights``."""
    _PARAMETRIZE._cache_enabled, _PARAMETRIZE._cache = contexts, weights


KERNEL_SWITCHES: tuple[tuple[Callable[[], Any], Callable[[Any], None]], ...] = (
    (_C._get_flash_sdp_enabled, _CUDA.enable_flash_sdp),
    (_C._get_mem_efficient_sdp_enabled, _CUDA.enable_mem_efficient_sdp),
    (_C._get_math_sdp_enabled, _CUDA.enable_math_sdp),
    (_C._get_cudnn_sdp_enabled, _CUDA.enable_cudnn_sdp),
    (_C._get_math_sdp_allow_fp16_bf16_reduction, _CUDA.allow_fp16_bf16_reduction_math_sdp),
    (_C._get_mkldnn_enabled, partial(setattr, _MKLDNN, "enabled")),
    (_C._get_mkldnn_deterministic, partial(setattr, _MKLDNN, "deterministic")),
    (_C._get_cudnn_enabled, partial(setattr, _CUDNN, "enabled")),
    (_C._get_cudnn_deterministic, partial(setattr, _CUDNN, "deterministic")),
    (_C._get_cudnn_benchmark, partial(setattr, _CUDNN, "benchmark")),
    (
        _C._get_cublas_allow_fp16_reduced_precision_reduction,
        _reduction(_C._set_cublas_allow_fp16_reduced_precision_reduction),
    ),
    (
        _C._get_cublas_allow_bf16_reduced_precision_reduction,
        _reduction(_C._set_cublas_allow_bf16_reduced_precision_reduction),
    ),
)
"""Readers and setters of the switches by which torch chooses kernels. The public readers take a microsecond each, and
every run of a block reads all; a block that ran again under other switches would have other last bits."""
fp32_precision: Callable[[str, str], str] = _C._get_fp32_precision_getter
"""The precision of products of float32 for a backend and a kind, where the new words for it are in use."""

# -- CUDA: what a torch without it lacks is None here ------------------------------------------------------------------

current_stream_key: Any = getattr(_C, "_cuda_getCurrentStream", None)
"""The present stream's numbers. ``torch.cuda.current_stream`` makes a new object of them at every question."""
cuda_memory_stats: Any = getattr(_C, "_cuda_memoryStats", None)
"""The allocator's statistics. ``torch.cuda.memory_reserved`` flattens and sorts all of them for one number."""
reset_cuda_peaks: Any = getattr(_C, "_cuda_resetPeakMemoryStats", None)
sleep_on_device: Callable[[int], None] | None = getattr(_C, "_cuda_sleep", None)
"""Launches a kernel that does nothing for so many cycles. Without it blocks are timed together with the gaps that a
device has while it waits for its first kernels."""


def set_allocator(settings: str) -> None:
    """Set the device's allocator up; nothing public does that in a process that runs."""
    _C._accelerator_setAllocatorSettings(settings)


def clear_cublas_workspaces() -> None:
    """Let cuBLAS give its memory, a part of every budget, back to torch's allocator."""
    _C._cuda_clearCublasWorkspaces()


# -- files -------------------------------------------------------------------------------------------------------------

save_records: Any = torch.serialization._save
"""The part of ``torch.save`` that fills an archive. A collector in the archive's place learns which records there would
be, so that checkpoints are written in the order in which memory changes."""


# -- processes ---------------------------------------------------------------------------------------------------------


def default_store() -> Any:
    """Return the store of ``torch.distributed``: where a process that fails says why, for those that wait for it."""
    from torch.distributed import distributed_c10d

    return distributed_c10d._get_default_store()
