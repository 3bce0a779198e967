"""Storage forms: their definitions, with every value of a code, and the products that open them."""

from __future__ import annotations

import copy
import pickle
from pathlib import Path
from typing import Any

import accelerate
import pytest
import torch
from torch import nn

import lt_offload
from lt_offload.errors import ConfigError
from lt_offload.finetune.module import LoraArgs, add_lora
from lt_offload.model.forms import FORMS, open_weights, store_weights
from lt_offload.model.forms.fp8 import FP8
from lt_offload.model.forms.int8 import Int8
from lt_offload.model.forms.layer import StoredLinear
from lt_offload.model.forms.mxfp4 import MXFP4
from lt_offload.model.forms.nf4 import NF4, bitsandbytes
from tests.parity.models import quantized
from tests.support import models

DTYPES = [torch.float32, torch.bfloat16]
SHAPES = [(128, 256), (96, 256), (96, 160), (7, 130), (33, 31)]
TAKEN = [(torch.bfloat16, shape) for shape in SHAPES[:3]]


@pytest.mark.parametrize("device", [None, {"": "cpu"}], ids=["whole", "mapped"])
@pytest.mark.parametrize("form", ["int8", "fp8", "nf4"])
def test_accelerate_loads_no_stored_weights_into_plain_ones_nor_plain_ones_into_stored(
    form: str, device: Any, tmp_path: Path
) -> None:
    plain, stored = (nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64)).bfloat16() for _ in range(2))
    store_weights(stored, form)
    for model, other in ((plain, stored), (stored, plain)):
        folder = tmp_path / type(model[0]).__name__
        accelerate.Accelerator(cpu=True).save_model(model, folder)
        before = {name: tensor.clone() for name, tensor in other.state_dict().items()}
        with pytest.raises((RuntimeError, ValueError), match="size mismatch for 0.weight|set a tensor of shape"):
            accelerate.load_checkpoint_in_model(other, folder, device_map=device)
        matrices = [name for name in before if "weight" in name]
        assert all(torch.equal(other.state_dict()[name], before[name]) for name in matrices)


@pytest.mark.parametrize("name", FORMS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_pieces_are_of_the_layout_and_open_to_nearly_the_same(
    name: str, shape: tuple[int, int], dtype: torch.dtype
) -> None:
    form = FORMS[name]
    if form.refuses(shape, dtype):
        assert (name == "mxfp4" and shape[-1] % 32) or (name == "lossless" and (dtype, shape) not in TAKEN)
        return
    weight = torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(dtype)
    pieces = form.close(weight)
    assert tuple((tuple(piece.shape), piece.dtype) for piece in pieces) == form.layout(shape)
    assert not any(piece.is_floating_point() for piece in pieces)
    assert pieces[0].shape != weight.shape, "nothing loads one for the other"
    assert all(piece.untyped_storage().nbytes() == piece.nbytes for piece in pieces), "they keep no other memory"
    assert sum(piece.nbytes for piece in pieces) == form.bytes(shape, dtype)
    opened = form.open(pieces, shape, dtype)
    assert opened.dtype == dtype
    if name == "lossless":
        assert torch.equal(opened, weight)
        return
    most = {"nf4": 0.2, "int8": 1 / 200, "fp8": 1 / 20, "mxfp4": 0.3}[name]
    assert float((opened - weight).abs().max() / weight.abs().max()) < most
    # Closing what was opened changes nothing more, but for the rounding of scales.
    if name in ("mxfp4", "int8") and dtype == torch.float32:
        assert all(torch.equal(a, b) for a, b in zip(form.close(opened), pieces, strict=True))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("nested", [True, False])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_nf4_is_that_of_bitsandbytes(shape: tuple[int, int], nested: bool, dtype: torch.dtype) -> None:
    functions = bitsandbytes().functional
    weight = torch.randn(shape, generator=torch.Generator().manual_seed(1)).to(dtype)
    packed, state = functions.quantize_4bit(weight, blocksize=64, compress_statistics=nested, quant_type="nf4")
    form = NF4(scales=256 if nested else 0)
    state.shape = torch.Size([weight.numel()])  # its kernel for CPUs reads rows that are no whole blocks wrongly
    expected = functions.dequantize_4bit(packed, state).view(shape)
    assert torch.equal(form.open(form.close(weight), shape, dtype), expected)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_byte_of_mxfp4_under_every_exponent_is_what_transformers_reads(dtype: torch.dtype) -> None:
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    blocks = torch.arange(256, dtype=torch.uint8).view(1, 16, 16).expand(255, 16, 16).contiguous()
    exponents = torch.arange(255, dtype=torch.uint8).view(255, 1).expand(255, 16).contiguous()
    expected = convert_moe_packed_tensors(blocks[None], exponents[None], dtype=dtype)[0].t()
    assert torch.equal(MXFP4().open((blocks, exponents), (255, 512), dtype), expected)


def test_mxfp4_rounds_to_the_nearest_number_and_halves_to_even_codes() -> None:
    row = [6.0, 0.25, 0.26, 0.74, 0.75, 1.25, 1.26, 1.75, 2.5, 2.6, 3.5, 5.0, 5.1, -0.1, -6.0, -2.5]
    near = [6.0, 0.0, 0.5, 0.5, 1.0, 1.0, 1.5, 2.0, 2.0, 3.0, 4.0, 4.0, 6.0, -0.0, -6.0, -2.0]
    weight = torch.tensor([row + [0.0] * 16])
    assert MXFP4().open(MXFP4().close(weight), (1, 32), torch.float32)[0, :16].tolist() == near
    zeros = torch.zeros(2, 32)
    assert torch.equal(MXFP4().open(MXFP4().close(zeros), (2, 32), torch.float32), zeros)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_byte_of_fp8_is_torchs_number_times_its_scale(dtype: torch.dtype) -> None:
    codes = torch.arange(256, dtype=torch.uint8).repeat(2, 1)
    scales = torch.tensor([[0.5, 3.1]])
    expected = codes.view(torch.float8_e4m3fn).float() * scales.repeat_interleave(128, 1)
    found = FP8().open((codes, scales.view(torch.uint8)), (2, 256), dtype)
    assert torch.equal(found.nan_to_num(), expected.to(dtype).nan_to_num())
    squares = torch.arange(256, dtype=torch.uint8).repeat(128, 1)
    assert torch.equal(
        FP8().open((squares, scales.view(torch.uint8)), (128, 256), dtype)[:2].nan_to_num(), found.nan_to_num()
    )


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_byte_of_int8_is_a_multiple_of_the_scale_of_its_row(dtype: torch.dtype) -> None:
    codes = torch.arange(-128, 128).to(torch.int8).repeat(2, 1)
    scales = torch.tensor([0.3, 7.0])
    expected = (codes.float() * scales[:, None]).to(dtype)
    assert torch.equal(Int8().open((codes, scales.view(torch.uint8)), (2, 256), dtype), expected)


@pytest.mark.parametrize("name", FORMS)
@pytest.mark.parametrize("autocast", [False, True])
def test_a_layer_is_an_ordinary_one_with_opened_numbers(name: str, autocast: bool) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 96), nn.Tanh(), nn.Linear(96, 64, bias=False))
    if name == "lossless":
        model = model.bfloat16()
    first, called = model[0], list[int]()
    first.register_forward_hook(lambda *_: called.append(1))
    names = store_weights(model, name)
    assert names == ("0.weight", "2.weight")
    assert model[0] is first
    plain = open_weights(copy.deepcopy(model))
    assert isinstance(model[0], StoredLinear)
    assert type(plain[0]) is nn.Linear  # type: ignore[index]
    assert f"form={name}" in repr(model)
    results = []
    for one in (model, plain):
        x = torch.randn(3, 5, 64, generator=torch.Generator().manual_seed(1))
        x = x.to(torch.bfloat16 if name == "lossless" else torch.float32).requires_grad_()
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
            out = one(x)
        out.float().square().sum().backward()
        assert x.grad is not None
        results.append((out, x.grad))
    assert called == [1, 1]
    (out, grad), (plain_out, plain_grad) = results
    assert out.dtype == plain_out.dtype
    assert torch.equal(out, plain_out)
    assert torch.equal(grad, plain_grad)


@pytest.mark.parametrize("family", quantized.EXPERTS)
def test_experts_are_those_of_transformers_with_opened_numbers(family: str) -> None:
    model: Any = quantized.base(family=family, form="int8")
    plain: Any = open_weights(copy.deepcopy(model))
    assert {type(module) for module in plain.modules()} >= {type(model.model.layers[0].mlp.experts)}
    batch = models.batch(model)
    assert model.model.layers[0].mlp.experts.gate_up_proj.dtype == torch.int8
    torch.testing.assert_close(model(**batch).logits, plain(**batch).logits)
    again = copy.deepcopy(model)
    assert torch.equal(again(**batch).logits, model(**batch).logits)


@pytest.mark.parametrize("family", quantized.EXPERTS)
def test_adapters_of_experts_are_those_of_peft(family: str) -> None:
    """peft itself adds the product of both matrices to the weights of all experts, which has other last bits."""
    model: Any = quantized.adapted(family=family, targets=quantized.TARGETS)
    plain: Any = quantized.adapted(family=family, targets=quantized.TARGETS)
    open_weights(plain)
    batch = models.batch(model)
    for one in (model, plain):
        one(**batch).loss.backward()
    expected = dict(plain.named_parameters())
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            torch.testing.assert_close(parameter.grad, expected[name].grad, rtol=1e-3, atol=1e-6)
    merged = plain.merge_and_unload()
    torch.testing.assert_close(merged(**batch).logits, model(**batch).logits, rtol=1e-3, atol=1e-5)
    with model.disable_adapter():
        assert not torch.equal(model(**batch).logits, merged(**batch).logits)


@pytest.mark.parametrize("form", ["nf4", "int8"])
def test_a_weight_of_two_layers_is_stored_once(form: str) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 64))
    model[2].weight = model[0].weight  # type: ignore[assignment]
    x, before = torch.randn(3, 64), len([*model.parameters()])
    assert store_weights(model, form) == ("0.weight", "2.weight")
    pieces = [*FORMS[form].layout((64, 64))]
    assert len([*model.parameters()]) == before - 1 + len(pieces)
    out = model(x)
    assert torch.equal(open_weights(model)(x), out)
    assert model[0].weight is model[2].weight


def test_the_public_name_says_what_it_cannot_do() -> None:
    with pytest.raises(ConfigError, match=r"form='nf5' is not known; use nf4"):
        lt_offload.store_weights(nn.Linear(4, 4), "nf5")
    with pytest.raises(ConfigError, match="form=nf4: most weights of Conv1d are neither"):
        lt_offload.store_weights(nn.Conv1d(4, 4, 3), "nf4")
    with pytest.raises(ConfigError, match=r"not of bfloat16\); leave the model as it is, load it in bfloat16"):
        lt_offload.store_weights(models.build(layers=1), "lossless")


@pytest.mark.parametrize("form", FORMS)
def test_adapters_do_not_take_bytes_for_numbers(form: Any) -> None:
    dtype, dora = torch.bfloat16, LoraArgs(r=2, dora=True)
    model: Any = quantized.adapted(form=form, dtype=dtype)
    with pytest.raises(ConfigError, match=r"cannot be merged into stored weights: call lt_offload.open_weights"):
        model.merge_and_unload()
    experts: Any = quantized.adapted(family="qwen3_moe", form=form, dtype=dtype, targets=quantized.TARGETS)
    with pytest.raises(ConfigError, match="cannot be merged into stored weights"):
        experts.merge_and_unload()
    with pytest.raises(ConfigError, match="use_dora=True needs weights that are not stored"):
        add_lora(quantized.base(form=form, dtype=dtype), dora)
    plain: Any = add_lora(models.build(layers=1), dora)
    plain.merge_and_unload()


@pytest.mark.parametrize("way", ["loftq", "pissa", "olora", "orthogonal"])
def test_adapters_do_not_start_from_bytes(way: Any) -> None:
    import peft

    base: Any = quantized.base(form="int8")
    of_loftq: Any = {"loftq_config": peft.LoftQConfig(loftq_bits=4)} if way == "loftq" else {}
    with pytest.raises(ConfigError, match=f"init_lora_weights='{way}' needs weights that are not stored: set it to"):
        peft.get_peft_model(base, peft.LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=way, **of_loftq))


def test_files_do_not_hold_bytes_for_numbers(tmp_path: Path) -> None:
    model: Any = quantized.base(form="int8")
    with pytest.raises(
        ConfigError, match=r"save_pretrained\(\) would write the pieces .* lt_offload.open_weights\(model\) fi"
    ):
        model.save_pretrained(tmp_path)
    assert not [*tmp_path.iterdir()]
    adapted: Any = quantized.adapted(form="int8")
    adapted.save_pretrained(tmp_path)
    assert sorted(path.suffix for path in tmp_path.iterdir()) == [".json", ".md", ".safetensors"]
    opened: Any = open_weights(model)
    opened.save_pretrained(tmp_path / "opened")
    again = type(opened).from_pretrained(tmp_path / "opened")
    assert all(torch.equal(p, again.get_parameter(name)) for name, p in opened.named_parameters())


@pytest.mark.parametrize("stored", [True, False])
def test_a_model_with_adapters_of_experts_can_be_pickled(stored: bool) -> None:
    model: Any = quantized.adapted(family="qwen3_moe", form="int8", targets=quantized.TARGETS)
    model = model if stored else open_weights(model)
    again, batch = pickle.loads(pickle.dumps(model)), models.batch(model)
    assert torch.equal(again(**batch).logits, model(**batch).logits)


def test_adapters_come_after_stored_weights() -> None:
    adapted = add_lora(models.build(layers=1), LoraArgs(r=4))
    with pytest.raises(ConfigError, match=r"form=int8: PeftModel\w* has adapters of peft already"):
        store_weights(adapted, "int8")
    assert any(parameter.requires_grad for parameter in adapted.parameters())
