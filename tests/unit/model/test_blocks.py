import pytest
import torch
from torch import nn

from lt_offload.errors import ModelError
from lt_offload.model.blocks import as_called, find_blocks
from tests.support import models


class Wrapper(nn.Module):
    """Like a LightningModule: the model is one attribute among others."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model
        self.scale = nn.Parameter(torch.ones(()))


@pytest.mark.parametrize("lora", [False, True])
@pytest.mark.parametrize("family", models.FAMILIES)
def test_every_family_is_found_with_every_parameter_once(family: str, lora: bool) -> None:
    model = models.build(family, lora=lora)
    structure = find_blocks(model)
    kinds = ["embedding", *["other"] * (family == "bloom"), "layer", "layer", "layer", "other", "head"]
    assert [block.kind for block in structure.blocks] == kinds
    assert [(name, id(parameter)) for name, parameter in structure.rest] == []
    named = dict(model.named_parameters())
    assert sorted(name for name, _ in structure.tensors) == sorted(named)
    assert all(named[name] is parameter for name, parameter in structure.tensors)
    for block in structure.blocks:
        assert model.get_submodule(block.name) is block.module
        assert [id(structure.tensors[i][1]) for i in block.tensors] == [id(p) for p in block.module.parameters()]


@pytest.mark.parametrize("family", models.FAMILIES)
def test_order_is_the_order_of_calls(family: str) -> None:
    model = models.build(family)
    blocks = find_blocks(model).blocks
    called: list[str] = []
    for block in blocks:
        block.module.register_forward_pre_hook(lambda module, args, name=block.name: called.append(name))
    model(**models.batch(model))
    assert called == [block.name for block in blocks]


def test_blocks_as_they_are_called() -> None:
    class Out(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.layers = nn.LayerNorm(4), nn.ModuleList(nn.Linear(4, 4) for _ in range(3))
            self.embed, self.unused = nn.Embedding(9, 4), nn.Linear(5, 5)

    model = Out()
    structure = find_blocks(model)
    assert [b.name for b in structure.blocks] == ["embed", "norm", "layers.0", "layers.1", "layers.2", "unused"]
    called = as_called(model, [structure.blocks[at] for at in (0, 2, 4, 3, 1)])
    assert [block.kind for block in called.blocks] == ["embedding", "layer", "layer", "layer", "other"]
    assert [name for name, _ in called.tensors[3:5]] == ["layers.2.weight", "layers.2.bias"]
    assert [name for name, _ in called.rest] == ["unused.weight", "unused.bias"]


def test_layers_are_of_the_class_that_the_outermost_model_names() -> None:
    class Tower(nn.Module):
        _no_split_modules = ("Bilinear",)

        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.Bilinear(9, 9, 9) for _ in range(3))

    class Whole(nn.Module):
        _no_split_modules = ("Linear",)

        def __init__(self) -> None:
            super().__init__()
            self.tower, self.layers = Tower(), nn.ModuleList(nn.Linear(4, 4) for _ in range(2))

    names = [block.name for block in find_blocks(Wrapper(Whole())).blocks]
    assert names == ["model.tower", "model.layers.0", "model.layers.1"]


def test_other_owners_of_a_weight_that_travels_are_blocks_too() -> None:
    model = nn.Module()
    model.inputs = nn.Sequential(nn.Embedding(9, 4), nn.LayerNorm(4))
    model.body = nn.Module()
    model.body.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))
    model.body.head = nn.Linear(4, 9, bias=False)
    model.body.head.weight = model.inputs[0].weight
    structure = find_blocks(model)
    assert [block.name for block in structure.blocks] == ["inputs.0", "body.layers.0", "body.layers.1", "body.head"]
    assert [name for name, _ in structure.rest] == ["inputs.1.weight", "inputs.1.bias"]


def test_modules_without_hugging_face_attributes() -> None:
    class Plain(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(10, 8)
            self.small = nn.ModuleList(nn.Linear(8, 1) for _ in range(4))
            self.stack = nn.ModuleList(nn.TransformerEncoderLayer(8, 2, 16) for _ in range(2))
            self.out = nn.Linear(8, 10)

    structure = find_blocks(Plain())
    assert [block.name for block in structure.blocks] == ["embed", "stack.0", "stack.1", "out"]
    assert structure.blocks[-1].kind == "head"
    assert len(structure.rest) == 8, "a list that is not the layers' is not called itself"
    assert [block.name for block in find_blocks(Plain(), "small").blocks][1:5] == [f"small.{i}" for i in range(4)]


def test_a_sequential_is_a_block_sequence_where_there_is_no_list() -> None:
    parts = [part for _ in range(3) for part in (nn.Sequential(nn.Linear(4, 4), nn.GELU()), nn.ReLU())]
    structure = find_blocks(nn.Sequential(nn.Linear(2, 4), *parts, nn.Linear(4, 1)))
    assert [(block.name, block.kind) for block in structure.blocks] == [
        ("0", "other"),
        ("1", "layer"),
        ("3", "layer"),
        ("5", "layer"),
        ("7", "head"),
    ]
    wrapped = find_blocks(Wrapper(nn.Sequential(nn.Embedding(5, 4), nn.Sequential(*parts), nn.Linear(4, 5))))
    names = ["model.0", "model.1.0", "model.1.2", "model.1.4", "model.2"]
    assert [block.name for block in wrapped.blocks] == names
    assert [block.kind for block in wrapped.blocks] == ["embedding", "layer", "layer", "layer", "head"]


class Named(nn.Module):
    """Containers within containers, as in GPTs that people write."""

    def __init__(self) -> None:
        super().__init__()
        layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))
        self.body = nn.ModuleDict({"wte": nn.Embedding(9, 4), "h": layers, "ln_f": nn.LayerNorm(4)})
        self.lm_head = nn.Linear(4, 9, bias=False)
        self.extra = nn.ModuleDict({"h": nn.ModuleList(nn.Linear(40, 40) for _ in range(2))})


def test_layers_by_name() -> None:
    model = Named()
    structure = find_blocks(model, "body.h")
    assert [block.name for block in structure.blocks] == ["body.wte", "body.h.0", "body.h.1", "body.ln_f", "lm_head"]
    assert [name for name, _ in structure.rest] == [n for n, _ in model.named_parameters() if n.startswith("extra")]
    assert find_blocks(model).blocks[-1].name == "extra.h.1", "by structure the largest list is taken"
    ambiguous = r"blocks='h': 2 of these are called so in Named: extra\.h \(2 of Linear\), body\.h \(2 of Linear\)"
    with pytest.raises(ModelError, match=ambiguous):
        find_blocks(model, "h")
    with pytest.raises(ModelError, match=r"blocks='layers': none of these is called so .* extra\.h .* body\.h"):
        find_blocks(model, "layers")


def test_members_of_dictionaries_beside_the_layers_are_blocks() -> None:
    model = Wrapper(nn.ModuleList(nn.Linear(4, 4) for _ in range(2)))
    model.ends = nn.ModuleDict({"2-1": nn.Linear(4, 4), "more": nn.ModuleList([nn.Linear(2, 1)])})  # as Z-Image's
    assert [block.name for block in find_blocks(model).blocks] == ["model.0", "model.1", "ends.2-1"]


@pytest.mark.parametrize(
    ("model", "named"),
    [
        (Wrapper(nn.Linear(4, 4)), "Wrapper has no block sequence.*none at all"),
        (nn.Sequential(nn.Linear(4, 4), nn.ReLU()), r"found: the model \(2 of Linear, ReLU\)"),
        (Wrapper(nn.Sequential(nn.ModuleList([nn.Linear(4, 4), nn.ReLU()]))), r"model\.0 \(2 of Linear, ReLU\)"),
        (Wrapper(nn.ModuleList([nn.Linear(4, 4)])), r"model \(1 of Linear\)"),
    ],
)
def test_models_without_a_block_sequence_are_refused(model: nn.Module, named: str) -> None:
    with pytest.raises(ModelError, match=named):
        find_blocks(model)
