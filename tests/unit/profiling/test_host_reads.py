"""What reading weights in host memory is said to cost, layer by layer."""

import pytest
import torch
from torch import nn
from torch.nn.utils.parametrizations import weight_norm

import lt_offload
from lt_offload.model.forms.experts import is_routed
from lt_offload.profiling.hardware import load_hardware
from lt_offload.profiling.host_reads import reads
from tests.parity.models import quantized
from tests.support import models


def figures(module, *args):
    return {read.parameter: (read.forward_bytes, read.backward_bytes) for read in reads(module, args, module(*args))}


class Gated(nn.Module):
    """Has the parameter of a norm, and is called with a second tensor."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(8))

    def forward(self, x, gate):
        return x * self.weight * gate


class Scaled(nn.Linear):
    """Has a layer of its own beside the matrix."""

    def __init__(self):
        super().__init__(8, 8)
        self.inner = nn.Linear(8, 8)

    def forward(self, x):
        return self.inner(super().forward(x))


@pytest.mark.parametrize(
    ("module", "calls"),
    [(Gated(), 2), (Scaled(), 1), (weight_norm(nn.Linear(8, 8)), 1), (nn.BatchNorm1d(8), 1)],
    ids=["two tensors", "a layer within", "parametrized", "buffers"],
)
def test_layers_that_read_more_than_their_parameters_are_not_known(module, calls):
    assert figures(module, *[torch.zeros(3, 8)] * calls) == {}


@pytest.mark.parametrize("lora", [False, True])
@pytest.mark.parametrize("family", models.FAMILIES)
def test_every_tensor_of_every_family_is_known(family, lora):
    model = models.build(family, lora=lora)
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    hardware = load_hardware("h200")
    found = lt_offload.profile(model, models.batch(model), optimizer=optimizer, hardware=hardware)
    assert all(tensor.zero_copy is not None for tensor in found.tensors)
    assert not any(module._forward_hooks for module in model.modules())
    table = next(tensor for tensor in found.tensors if tensor.blocks[0] == 0 and len(tensor.shape) == 2)
    assert table.zero_copy.grad_s == table.bytes / hardware.d2h_bytes_per_s
    lookup, *others = table.zero_copy.reads
    assert (lookup.forward_bytes, lookup.backward_bytes) == (2 * 12 * models.HIDDEN * 4, 0)
    assert lookup.forward_s == lookup.forward_bytes / hardware.h2d_bytes_per_s
    # Where it is tied, the projection reads all of it.
    assert len(others) == len(table.blocks) - 1
    assert all(read.forward_bytes == read.backward_bytes == table.bytes for read in others)


def test_experts_that_are_called_by_name_read_as_others():
    def backwards(experts, args, _):
        return (), dict(zip(("top_k_weights", "top_k_index", "hidden_states"), args[::-1], strict=True))

    figures_of = []
    for by_name in (False, True):
        model = quantized.adapted(family="qwen3_moe", form="int8", num_experts=16)
        for module in model.modules():
            if by_name and is_routed(module):
                module.register_forward_pre_hook(backwards, with_kwargs=True)
        optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
        batch = models.batch(model, batch_size=1, sequence_length=3)
        found = lt_offload.profile(model, batch, optimizer=optimizer, hardware=load_hardware("h200"))
        figures_of.append([t.zero_copy for t in found.tensors if ".experts." in t.name])
    assert figures_of[0] == figures_of[1]
    assert 0 < figures_of[0][0].reads[0].forward_bytes < 16 * 64 * 64


class Functional(nn.Module):
    """Uses a matrix in a way that cannot be seen from outside, and one that has no owner among known layers."""

    def __init__(self):
        super().__init__()
        self.known = nn.Linear(8, 8, bias=False)
        self.hidden = nn.Linear(8, 8, bias=False)
        self.own = nn.Parameter(torch.ones(3, 8))

    def forward(self, x):
        return nn.functional.linear(self.known(x), self.hidden.weight) + self.own.sum(0)


class Chain(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(Functional() for _ in range(3))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x.sum()


def test_what_is_not_known_has_no_figures():
    model = Chain()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    found = lt_offload.profile(model, (torch.zeros(2, 8),), optimizer=optimizer, hardware=load_hardware("h200"))
    known = {tensor.name for tensor in found.tensors if tensor.zero_copy is not None}
    assert known == {f"layers.{i}.known.weight" for i in range(3)}
