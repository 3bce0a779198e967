"""Each private name of torch does what it is used for. A test that fails here says what breaks in the package."""

from __future__ import annotations

import ast
import pickle
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from lt_offload.compat import torch as compat

CHECKS: list[Any] = []
CHECKED: set[str] = set()
CUDA = {
    *("current_stream_key", "cuda_memory_stats", "reset_cuda_peaks", "clear_cublas_workspaces", "set_allocator"),
    "sleep_on_device",
}
"""Run by tests/gpu, on a GPU or the fake one."""


def check(what: str, *names: str) -> Callable[[Callable[[], object]], Callable[[], object]]:
    """Add a test of ``names``; ``what`` breaks without them."""

    def add(test: Callable[[], object]) -> Callable[[], object]:
        CHECKS.append(pytest.param(test, id=what))
        CHECKED.update(names)
        return test

    return add


def plus_one(tensor: Tensor) -> Tensor:
    return tensor + 1


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, slope: Tensor) -> Tensor:
        return slope * 2


class Seen(compat.TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.operations: list[Any] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.operations.append(func)
        return func(*args, **(kwargs or {}))


class Calls(TorchFunctionMode):
    def __init__(self) -> None:
        super().__init__()
        self.calls = 0
        self.others: list[object] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.calls, self.others = self.calls + 1, compat.all_function_modes()
        return func(*args, **(kwargs or {}))


class Subclass(Tensor):
    pass


class Hollow(Tensor):
    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise NotImplementedError


@check("whose memory a tensor is", "address_of", "has_storage", "storage_uses", "typed_storage")
def memory() -> None:
    tensor = torch.ones(4)
    view, other = tensor[1:], torch.ones(4)
    address = compat.address_of(tensor.untyped_storage())
    assert address == compat.address_of(view.untyped_storage()) != compat.address_of(other.untyped_storage())
    assert compat.has_storage(tensor)
    assert not compat.has_storage(torch.eye(2).to_sparse())
    storage = tensor.untyped_storage()
    uses = compat.storage_uses(storage)
    more = tensor.view(2, 2)
    assert compat.storage_uses(storage) == uses + 1
    assert compat.typed_storage(more)._untyped_storage.nbytes() == 16


@check("that a tensor was written", "version_of")
def versions() -> None:
    tensor = torch.ones(4)
    before = compat.version_of(tensor)
    tensor.add_(1)
    assert compat.version_of(tensor) == before + 1


@check("the pieces of sparse tensors", "rows_of_sparse")
def sparse() -> None:
    tensor = torch.sparse_coo_tensor([[1, 1]], [2.0, 3.0], (3,), check_invariants=True)
    rows, values = (part(tensor) for part in compat.rows_of_sparse)
    assert (rows.tolist(), values.tolist()) == ([[1, 1]], [2.0, 3.0])


@check("tensors that stand for others", "make_wrapper_subclass")
def stand_ins() -> None:
    made = compat.make_wrapper_subclass(Hollow, (2, 3), dtype=torch.float16)
    assert (type(made), made.shape, made.dtype) == (Hollow, (2, 3), torch.float16)


@check(
    "dispatch modes, in their order", "TorchDispatchMode", "DisableTorchDispatch", "dispatch_modes",
    "push_dispatch_mode", "pop_dispatch_mode", "all_dispatch_modes", "without_dispatch_modes",
)  # fmt: skip
def dispatch() -> None:
    mode = Seen()
    assert compat.dispatch_modes() == 0
    with mode:
        assert compat.all_dispatch_modes() == [mode]
        with compat.DisableTorchDispatch():
            torch.ones(2)
        with compat.without_dispatch_modes():
            torch.ones(2)
        assert compat.dispatch_modes() == 1
        assert mode.operations == []
        torch.ones(2)
        assert compat.pop_dispatch_mode() is mode
        torch.ones(2)
        compat.push_dispatch_mode(mode)
    assert mode.operations == [torch.ops.aten.ones.default]


@check("fast paths of attention under autocast", "FAST_PATHS", "before_dispatch", "exclude_key", "AUTOCAST_ON_CPU")
def fast_paths() -> None:
    found: list[Any] = []

    class Fast(compat.TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            assert not torch.is_autocast_enabled("cpu")
            with compat.before_dispatch():
                assert torch.is_autocast_enabled("cpu")
            found.append(func)
            with compat.exclude_key(compat.AUTOCAST_ON_CPU, False):
                return func(*args, **(kwargs or {}))

    layers = nn.TransformerEncoderLayer(8, 2, 8, batch_first=True), nn.MultiheadAttention(8, 2, batch_first=True)
    x = torch.ones(1, 2, 8)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16), Fast():
        for layer, inputs in zip(layers, ((x,), (x, x, x)), strict=True):
            out = layer.eval()(*inputs)
            assert (out if isinstance(out, Tensor) else out[0]).dtype is torch.bfloat16
    assert [one for one in found if one in compat.FAST_PATHS] == list(compat.FAST_PATHS)


@check("gradients computed in another way within a dispatch mode", "ASKING", "ASKING_NODES")
def asking() -> None:
    operations: list[Any] = []

    class Noting(compat.TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            operations.append(func)
            return func(*args, **(kwargs or {}))

    x, mask, fill = torch.ones(2, requires_grad=True), torch.tensor([True, False]), torch.ones((), requires_grad=True)
    with Noting():
        made = [x.prod(), x.prod(0), x.masked_fill(mask, fill), (x * 1).masked_fill_(mask, fill)]
    assert [one for one in operations if one in compat.ASKING] == list(compat.ASKING)
    assert all(out.grad_fn is not None and out.grad_fn.name().startswith(compat.ASKING_NODES) for out in made)


@check(
    "function modes, in their order", "function_modes", "push_function_mode", "pop_function_mode", "all_function_modes",
    "DisableTorchFunction", "DeviceContext",
)  # fmt: skip
def functions() -> None:
    mode, tensor = Calls(), torch.ones(2)
    compat.push_function_mode(mode)
    try:
        assert compat.all_function_modes() == [mode]
        with compat.DisableTorchFunction():
            torch.add(tensor, tensor)
        assert mode.calls == 0
        torch.add(tensor, tensor)
        assert (mode.calls, mode.others) == (1, [])  # inside its own call it is not there
        with torch.device("meta"):
            assert [type(one) for one in compat.all_function_modes()] == [Calls, compat.DeviceContext]
    finally:
        assert compat.function_modes() == 1
        assert compat.pop_function_mode() is mode


@check("questions of ours that users' subclasses must not hear", "DisableTorchFunctionSubclass")
def subclasses() -> None:
    tensor = torch.ones(2).as_subclass(Subclass)
    with compat.DisableTorchFunctionSubclass():
        assert type(tensor + 1) is Tensor
    assert type(tensor + 1) is Subclass


@check("that blocks are not called within torch.func", "functorch_level")
def functorch() -> None:
    assert compat.functorch_level() is None
    inside: list[object] = []
    torch.func.vmap(lambda x: (inside.append(compat.functorch_level()), x + 1)[1])(torch.ones(2))
    assert inside != [None]


@check("what an operation writes, and what it costs", "schema_of", "packet_of")
def schemas() -> None:
    schema = compat.schema_of(torch.ops.aten.add_.Tensor)
    assert schema.is_mutable
    assert [argument.name for argument in schema.arguments if argument.alias_info is not None] == ["self"]
    assert compat.packet_of(torch.ops.aten.mm.default) is torch.ops.aten.mm


@check("the order in which a norm of all gradients takes dtypes", "grouped_by_device_and_dtype")
def dtypes() -> None:
    grads = [torch.tensor([x], dtype=d) for x, d in ((3.0, torch.float32), (1.0, torch.bfloat16), (2.0, torch.float32))]
    found = compat.grouped_by_device_and_dtype([grads])
    assert {key: [t.item() for t in group[0]] for key, (group, _) in found.items()} == {
        (torch.device("cpu"), torch.float32): [3.0, 2.0],
        (torch.device("cpu"), torch.bfloat16): [1.0],
    }


@check("copies and sums of many tensors at once", "foreach_add_", "foreach_copy_", "foreach_norm", "FOREACH_COPY")
def many() -> None:
    left, right = [torch.zeros(2), torch.zeros(3)], [torch.ones(2), torch.full((3,), 2.0)]
    with Seen() as mode:
        compat.foreach_copy_(left, right)
    assert mode.operations == [compat.FOREACH_COPY]
    compat.foreach_add_(left, 1)
    assert [tensor.tolist() for tensor in left] == [[2, 2], [3, 3, 3]]
    assert torch.equal(torch.stack(compat.foreach_norm(left)), torch.stack([tensor.norm() for tensor in left]))


@check("the gradients that a scaled loss leaves", "UNSCALE_GRADIENTS", "UNSCALES_ITSELF")
def unscaled() -> None:
    weight = nn.Parameter(torch.ones(2))
    weight.grad = torch.tensor([2.0, 6.0])
    optimizer, verdict = torch.optim.SGD([weight], lr=0.1), torch.zeros(())
    unscale = getattr(torch.amp.GradScaler("cpu"), compat.UNSCALE_GRADIENTS)
    assert unscale(optimizer, torch.tensor(0.5), verdict, False) == {weight.device: 0.0}
    assert weight.grad.tolist() == [1.0, 3.0]
    assert getattr(torch.optim.AdamW([weight], fused=True), compat.UNSCALES_ITSELF)


@check("the library that loads MKL, for the roots of torch's AdamW", "LIBRARY")
def library() -> None:
    assert Path(compat.LIBRARY).is_file()


@check("updates on the host with the bits of AdamW(fused=True)", "fused_adamw_")
def adamw() -> None:
    ours, theirs = nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(3))
    theirs.grad = torch.full((3,), 0.5)
    torch.optim.AdamW([theirs], lr=0.1, fused=True).step()
    numbers = {"lr": 0.1, "beta1": 0.9, "beta2": 0.999, "weight_decay": 0.01, "eps": 1e-8}
    states = ([torch.zeros(3)], [torch.zeros(3)], [], [torch.ones(())])
    with torch.no_grad():
        compat.fused_adamw_([ours], [theirs.grad], *states, amsgrad=False, maximize=False, **numbers)
    assert torch.equal(ours, theirs)


@check("the bits of losses that are computed a few tokens at a time", "log_softmax_backward")
def log_softmax() -> None:
    logits, slope = torch.randn(2, 5, requires_grad=True), torch.randn(2, 5)
    output = logits.log_softmax(1)
    (expected,) = torch.autograd.grad(output, logits, slope)
    assert torch.equal(compat.log_softmax_backward(slope, output.detach(), 1, torch.float32), expected)


@check("that attention is costly", "FLASH_ON_CPU", "FLASH_ON_CPU_BACKWARD", "ATTENTIONS")
def attention() -> None:
    given = torch.randn(1, 2, 4, 8, requires_grad=True)
    with Seen() as mode:
        nn.functional.scaled_dot_product_attention(given, given, given).sum().backward()
    assert {compat.FLASH_ON_CPU, compat.FLASH_ON_CPU_BACKWARD} <= set(mode.operations)
    assert compat.FLASH_ON_CPU in compat.ATTENTIONS
    assert len(compat.ATTENTIONS) == 5


@check("hooks of gradients, and where a backward is", "tensor_hooks_of", "accumulated_hooks_of", "after_backward")
def hooks() -> None:
    weight, seen = nn.Parameter(torch.ones(2)), []
    assert not compat.tensor_hooks_of(weight)
    assert not compat.accumulated_hooks_of(weight)
    weight.register_hook(lambda grad: compat.after_backward(lambda: seen.append("ended")))
    weight.register_post_accumulate_grad_hook(lambda param: seen.append("gradient"))
    assert len(compat.tensor_hooks_of(weight)) == len(compat.accumulated_hooks_of(weight)) == 1
    weight.sum().backward()
    assert seen == ["gradient", "ended"]


@check("which nodes a backward runs", "will_run")
def nodes() -> None:
    weight, found = torch.ones(2, requires_grad=True), []
    doubled = Doubled.apply(weight)
    other = plus_one(weight)
    loss = (doubled * 3).sum() + other.sum()
    doubled.register_hook(lambda _: found.extend(compat.will_run(one.grad_fn) for one in (doubled, other)))
    torch.autograd.grad(loss, doubled, retain_graph=True)
    loss.backward()
    assert found[-1]
    assert not all(found)


@check("other hooks of saved tensors around blocks", "top_saved_tensors_hooks")
def saved() -> None:
    assert compat.top_saved_tensors_hooks(True) is None
    with torch.autograd.graph.saved_tensors_hooks(plus_one, abs):
        assert compat.top_saved_tensors_hooks(True) == (plus_one, abs)


@check(
    "what a module has and what hooks it", "parameters_of", "buffers_of", "MODULE_PARTS", "HOOKS",
    "FORWARD_PRE_HOOKS", "FORWARD_PRE_HOOKS_WITH_KWARGS", "forward_hooks_of", "all_hooks_of",
    "GLOBAL_FORWARD_HOOKS", "BatchNorm",
)  # fmt: skip
def module() -> None:
    net = nn.Sequential(nn.BatchNorm1d(2))
    norm: Any = net[0]
    assert isinstance(norm, compat.BatchNorm)
    assert list(compat.parameters_of(norm)) == ["weight", "bias"]
    assert "running_mean" in compat.buffers_of(norm)
    assert set(vars(net)) >= compat.HOOKS | compat.MODULE_PARTS - {compat.COMPILED_CALL}
    before, behind = net.register_forward_pre_hook(print, with_kwargs=True), net.register_forward_hook(print)
    assert [list(hooks) for hooks in compat.forward_hooks_of(net)] == [[before.id], [behind.id]]
    assert [list(hooks) for hooks in compat.all_hooks_of(net)][:2] == [[behind.id], [before.id]]
    assert list(vars(net)[compat.FORWARD_PRE_HOOKS]) == [before.id]
    assert list(vars(net)[compat.FORWARD_PRE_HOOKS_WITH_KWARGS]) == [before.id]
    places = (nn.modules.module.register_module_forward_pre_hook, nn.modules.module.register_module_forward_hook)
    for register, kept in zip(places, compat.GLOBAL_FORWARD_HOOKS, strict=True):
        handle = register(lambda *_: None)
        assert handle.id in kept
        handle.remove()
        assert handle.id not in kept


@check("hooks around an optimizer's step", "step_pre_hooks_of", "step_post_hooks_of", "STEP_HOOKS", "forget_step_hooks")
def steps() -> None:
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.1)
    before, behind = optimizer.register_step_pre_hook(print), optimizer.register_step_post_hook(print)
    assert list(compat.step_pre_hooks_of(optimizer)) == [before.id]
    assert list(compat.step_post_hooks_of(optimizer)) == [behind.id]
    assert set(vars(optimizer)) >= compat.STEP_HOOKS
    compat.forget_step_hooks(optimizer)
    optimizer.step()


@check(
    "blocks that are compiled, and their memory", "compiled_call_of", "COMPILED_CALL", "plain_call_of", "PLAIN_CALL",
    "WRAPPED_MODULE", "compiled_allocations", "allocate_compiled_with", "skip_in_dynamo", "reset_dynamo",
    "lower_graphs", "Operation",
)  # fmt: skip
def compiled() -> None:
    net, allocated = nn.Linear(2, 2), []
    plain, given = compat.plain_call_of(net), torch.ones(1, 2)
    assert compat.compiled_call_of(net) is None
    assert getattr(net, compat.PLAIN_CALL) == plain
    try:
        net.compile(backend="eager")
        assert compat.compiled_call_of(net) is getattr(net, compat.COMPILED_CALL) is not None
        assert torch.equal(plain(given), nn.functional.linear(given, net.weight, net.bias))
        assert getattr(torch.compile(net, backend="eager"), compat.WRAPPED_MODULE) is net

        def allocate(size: Any, stride: Any, dtype: torch.dtype) -> Tensor:
            allocated.append(size)
            return compat.compiled_allocations["cpu"](size, stride, dtype)

        compat.allocate_compiled_with({"cpu": allocate})
        torch._C._dynamo.guards._empty_strided_cpu((2,), (1,), torch.float32)
        compat.allocate_compiled_with(compat.compiled_allocations)
        torch._C._dynamo.guards._empty_strided_cpu((3,), (1,), torch.float32)
        assert allocated == [(2,)]
        compat.skip_in_dynamo(plus_one)
        graphs: list[Any] = []
        torch.compile(plus_one, backend=lambda graph, _: graphs.append(graph) or graph.forward)(given)
        assert graphs == []
        lowered: list[Any] = []

        def lower(graph: Any) -> Any:
            lowered.append(graph)
            return lambda arguments: graph(*arguments)

        product = torch.compile(
            lambda x: nn.functional.linear(x, net.weight, net.bias),
            backend=lambda graph, inputs: compat.lower_graphs(graph, inputs, lower),
        )
        product(given).sum().backward()
        assert net.bias.grad is not None
        assert torch.equal(net.bias.grad, torch.ones(2))
        assert len(lowered) == 2  # forward and backward
        called = [n.target for graph in lowered for n in graph.graph.nodes if isinstance(n.target, compat.Operation)]
        assert torch.ops.aten.permute.default in called
    finally:
        compat.reset_dynamo()


@check("what torch chooses kernels by", "KERNEL_SWITCHES", "fp32_precision")
def switches() -> None:
    for read, write in compat.KERNEL_SWITCHES:
        before = read()
        changed = tuple(not value for value in before) if isinstance(before, tuple) else not before
        try:
            write(changed)
            assert read() == changed
        finally:
            write(before)
        assert read() == before
    assert compat.fp32_precision("mkldnn", "matmul") in ("none", "ieee", "tf32", "bf16")


@check("parametrized weights that are kept for a context", "parametrized", "set_parametrized")
def parametrizations() -> None:
    assert compat.parametrized() == (0, {})
    layer = nn.utils.parametrizations.weight_norm(nn.Linear(2, 2))
    with nn.utils.parametrize.cached():
        assert compat.parametrized() == (1, {})
        kept = layer.weight
        assert any(value is kept for value in compat.parametrized()[1].values())
        compat.set_parametrized(1, {})
        assert layer.weight is not kept
    assert compat.parametrized() == (0, {})


@check("modules that take others' places in blocks", "submodules_of")
def submodules() -> None:
    first, second = nn.Linear(2, 2), nn.Linear(2, 2)
    model = nn.Sequential(first)
    model[0] = second
    assert list(compat.submodules_of(model).values()) == [second]


@check("whose error is told when one of several processes fails", "default_store")
def stores() -> None:
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        compat.default_store().set("key", "value")
        assert compat.default_store().get("key") == b"value"
    finally:
        torch.distributed.destroy_process_group()


@check("the order in which a checkpoint is written", "save_records")
def files() -> None:
    names: list[str] = []

    class Archive:
        def __getattr__(self, name: str) -> Any:
            return lambda record, *_: names.append(record)

    compat.save_records({"a": torch.ones(2)}, Archive(), pickle, torch.serialization.DEFAULT_PROTOCOL, False)
    assert "data.pkl" in names
    assert "data/0" in names


@check("arguments and outputs of blocks", "TreeSpec", "tree_flatten", "tree_leaves", "tree_map", "tree_unflatten")
def trees() -> None:
    tree = {"a": [1, (2, 3)]}
    leaves, spec = compat.tree_flatten(tree)
    assert isinstance(spec, compat.TreeSpec)
    assert leaves == compat.tree_leaves(tree) == [1, 2, 3]
    assert compat.tree_unflatten([value + 1 for value in leaves], spec) == compat.tree_map(lambda x: x + 1, tree)


@check(
    "profiles without weights",
    *("FakeTensorMode", "FakeTensor", "is_fake", "beside_fake"),
    *("DataDependentOutputException", "DynamicOutputShapeException"),
)
def fakes() -> None:
    assert not compat.is_fake(torch.ones(1))
    with compat.FakeTensorMode():
        made = torch.ones(2**40)
        assert made.shape == (2**40,)
        assert compat.is_fake(made)
        table = compat.beside_fake(made, (2, 3), torch.int8)
        assert (table.shape, table.dtype, table.device) == ((2, 3), torch.int8, made.device)
        assert compat.is_fake(table + 1)
        with pytest.raises(compat.DynamicOutputShapeException):
            torch.ones(2).nonzero()
        with pytest.raises(compat.DataDependentOutputException):
            made.sum().item()


@pytest.mark.parametrize("test", CHECKS)
def test_what_breaks_without_it(test: Callable[[], object]) -> None:
    test()


def test_every_name_is_checked() -> None:
    tree, names = ast.parse(Path(str(compat.__file__)).read_text(encoding="utf-8")), set()
    for node in tree.body:
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            names.add(node.name)
        elif isinstance(node, (ast.Assign, ast.AnnAssign)):
            for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
                names |= {one.id for one in ast.walk(target) if isinstance(one, ast.Name)}
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("torch"):
            names |= {alias.name for alias in node.names}
    assert {name for name in names if not name.startswith("_")} == CHECKED | CUDA


def test_a_torch_without_cuda_has_nothing_in_its_place() -> None:
    if not torch.cuda.is_available() and "tests.fake_cuda.runtime" not in sys.modules:
        names = ("current_stream_key", "cuda_memory_stats", "reset_cuda_peaks", "sleep_on_device")
        assert [getattr(compat, name) for name in names] == [None] * 4
