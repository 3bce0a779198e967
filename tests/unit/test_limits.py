"""Each row of the table is triggered by the setting that a user would write, and by nothing else."""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch import callbacks as pl_callbacks
from lightning.pytorch.plugins import MixedPrecision, Precision
from torch import Tensor, nn

import lt_offload
from lt_offload import limits
from lt_offload.errors import UnsupportedError
from lt_offload.limits import LIMITS, Setup, check
from scripts.tables import refusals
from tests.support import models


class Module(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.ModuleList([nn.Linear(3, 3), nn.Linear(3, 3)])

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self.net[1](self.net[0](batch)).sum()


def trainer(module: LightningModule | None = None, **settings: Any) -> Trainer:
    settings = {"accelerator": "cpu", "logger": False, "enable_checkpointing": False, "max_steps": 1} | settings
    made = Trainer(strategy="offmate", **settings)
    made.strategy._lightning_module = module or Module()
    return made


def message(scope: Any, run: Setup, **options: Any) -> str:
    with pytest.raises(UnsupportedError) as caught:
        check(scope, run, **options)
    return str(caught.value)


# -- trainer ----------------------------------------------------------------------------------------------------------


def test_an_ordinary_trainer_passes() -> None:
    extra = [pl_callbacks.LearningRateMonitor(), pl_callbacks.ModelCheckpoint(), pl_callbacks.EarlyStopping("loss")]
    for precision in ("32-true", "bf16-true", "bf16-mixed"):
        check("trainer", Setup(trainer=trainer(precision=precision, enable_checkpointing=True, callbacks=extra)))


def test_a_precision_plugin_of_lightnings_passes() -> None:
    check("trainer", Setup(trainer=trainer(plugins=[MixedPrecision("bf16-mixed", "cpu")])))
    check("trainer", Setup(trainer=trainer(plugins=[MixedPrecision("16-mixed", "cpu")])))


def test_no_clipping_is_not_clipping() -> None:
    for value in (None, 0, 0.0):
        check("trainer", Setup(trainer=trainer(gradient_clip_val=value)))


class Seeing(Callback):
    def on_after_backward(self, trainer: Trainer, pl_module: LightningModule) -> None: ...


class Norms(Module):
    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None: ...


class WarmUp(Module):
    def optimizer_step(self, *args: Any, **kwargs: Any) -> None: ...


class ZeroGrad(Module):
    def optimizer_zero_grad(self, *args: Any, **kwargs: Any) -> None: ...


class OwnPrecision(MixedPrecision):
    pass


class PlainPrecision(Precision):
    pass


class Stored(Module):
    def __init__(self) -> None:
        super().__init__()
        lt_offload.store_weights(self.net, "int8")


class Manual(Module):
    automatic_optimization = False


class Normed(Module):
    """Normalizes by statistics of a batch, which it keeps, or by those of this batch alone."""

    def __init__(self, *, tracks: bool = True) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(3, track_running_stats=tracks)


TRAINERS: dict[str, tuple[Callable[[], Trainer], str]] = {
    "somebody else's precision": (
        lambda: trainer(plugins=[OwnPrecision("bf16-mixed", "cpu")]),
        "Trainer(plugins=[OwnPrecision(...)])",
    ),
    "plain precision of somebody else": (
        lambda: trainer(plugins=[PlainPrecision()]),
        "Trainer(plugins=[PlainPrecision(...)])",
    ),
    "16-true": (lambda: trainer(precision="16-true"), "Trainer(precision='16-true')"),
    "64-true": (lambda: trainer(precision="64-true"), "Trainer(precision='64-true')"),
    "sync_batchnorm": (lambda: trainer(sync_batchnorm=True), "Trainer(sync_batchnorm=True)"),
    "batch norm": (lambda: trainer(Normed(), devices=2), "BatchNorm1d norm with devices=2"),
    "anomaly": (lambda: trainer(detect_anomaly=True), "Trainer(detect_anomaly=True)"),
    "manual": (lambda: trainer(Manual()), "Manual.automatic_optimization=False"),
    "optimizer_step": (lambda: trainer(WarmUp()), "WarmUp.optimizer_step"),
    "optimizer_zero_grad": (lambda: trainer(ZeroGrad()), "ZeroGrad.optimizer_zero_grad"),
    "averaging": (
        lambda: trainer(callbacks=[pl_callbacks.StochasticWeightAveraging(1e-3, device="cuda")]),
        "StochasticWeightAveraging(device='cuda')",
    ),
    "average of bytes": (
        lambda: trainer(Stored(), callbacks=[pl_callbacks.EMAWeightAveraging()]),
        "callback EMAWeightAveraging",
    ),
    "finder": (lambda: trainer(callbacks=[pl_callbacks.BatchSizeFinder()]), "callback BatchSizeFinder"),
    "pruning": (lambda: trainer(callbacks=[pl_callbacks.ModelPruning("l1_unstructured")]), "callback ModelPruning"),
}


class Clipping(Module):
    def configure_gradient_clipping(self, *args: Any, **kwargs: Any) -> None: ...


def test_hooks_that_look_at_gradients_and_callbacks_that_change_weights_pass() -> None:
    extra = [
        Seeing(),
        pl_callbacks.LambdaCallback(on_before_optimizer_step=print),
        pl_callbacks.StochasticWeightAveraging(1e-3),
        pl_callbacks.EMAWeightAveraging(device="cpu"),
        pl_callbacks.BackboneFinetuning(),
    ]
    for module in (Norms(), Clipping()):
        check("trainer", Setup(trainer=trainer(module, callbacks=extra)))


@pytest.mark.parametrize("name", TRAINERS)
def test_trainer_settings(name: str) -> None:
    make, setting = TRAINERS[name]
    assert f"- {setting}: " in message("trainer", Setup(trainer=make()))


def test_a_mean_of_stored_weights_passes() -> None:
    """Of equal bytes it is the same byte."""
    means = [pl_callbacks.WeightAveraging(), pl_callbacks.StochasticWeightAveraging(1e-3)]
    check("trainer", Setup(trainer=trainer(Stored(), callbacks=means)))


def test_batch_norm_passes_on_one_device_and_where_it_keeps_nothing() -> None:
    check("trainer", Setup(trainer=trainer(Normed())))
    check("trainer", Setup(trainer=trainer(Normed(tracks=False), devices=2)))


def test_float16_weights_that_do_not_train_pass() -> None:
    check("model", Setup(model=nn.Linear(2, 2).half().requires_grad_(False)))


def test_an_accelerator_that_is_neither_cuda_nor_cpu() -> None:
    made = trainer()
    made.strategy.parallel_devices = [torch.device("mps")]
    assert "Trainer(accelerator='mps')" in message("trainer", Setup(trainer=made))


def test_all_problems_come_in_one_error() -> None:
    text = message("trainer", Setup(trainer=trainer(detect_anomaly=True, sync_batchnorm=True)))
    assert text.count("\n- ") == 2


def test_validation_refuses_only_what_concerns_it() -> None:
    check("trainer", Setup(trainer=trainer(detect_anomaly=True)), training=False)
    assert "'64-true'" in message("trainer", Setup(trainer=trainer(precision="64-true")), training=False)


# -- model ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", models.FAMILIES)
def test_ordinary_models_pass(family: str) -> None:
    check("model", Setup(model=models.build(family)))


def test_a_peft_model_passes() -> None:
    check("model", Setup(model=models.build(lora=True)))


def collecting(setting: str) -> nn.Module:
    model = models.build(attn_implementation="eager")
    setattr(model.config, setting, True)
    return model


def on_meta() -> nn.Module:
    with torch.device("meta"):
        return nn.Linear(2, 2)


def quantized(kind: str, **attributes: Any) -> nn.Module:
    model = nn.Linear(2, 2)
    model.weight = type(kind, (nn.Parameter,), attributes)(model.weight.data)
    return model


def with_sparse_buffer() -> nn.Module:
    model = nn.Linear(2, 2)
    model.register_buffer("mask", torch.eye(2).to_sparse())
    return model


def offloaded_by_accelerate() -> nn.Module:
    from accelerate import cpu_offload

    made: nn.Module = cpu_offload(nn.Sequential(nn.Linear(2, 2)), torch.device("cpu"))
    return made


MODELS: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "compile": (
        lambda: torch.compile(nn.Linear(2, 2)),
        "torch.compile of OptimizedModule, which is no block by itself",
    ),
    "compiled part": (
        lambda: nn.Sequential(torch.compile(nn.Linear(2, 2))),
        "torch.compile of 0, which is no block by itself",
    ),
    "hidden states": (
        lambda: collecting("output_hidden_states"),
        "config.output_hidden_states=True of LlamaForCausalLM",
    ),
    "attentions": (lambda: collecting("output_attentions"), "config.output_attentions=True of LlamaForCausalLM"),
    "half": (lambda: nn.Linear(2, 2).half(), "parameter weight of dtype float16"),
    "8 bits": (lambda: quantized("Int8Params"), "parameter weight of 8 bits (Int8Params)"),
    "4 bits to be": (
        lambda: quantized("Params4bit", quant_state=None),
        "parameter weight (Params4bit), which no .to(device) has quantized yet",
    ),
    "4 bits, packed again": (
        lambda: quantized("Params4bit", quant_state=types.SimpleNamespace(packing_format_for_cpu=True)),
        "parameter weight (Params4bit), which a call in evaluation mode has packed for CPUs",
    ),
    "offloaded by accelerate": (
        offloaded_by_accelerate,
        "0 with a hook of accelerate's that offloads its weights",
    ),
    "meta": (on_meta, "parameter weight on the meta device"),
    "sparse": (lambda: nn.Sequential(nn.Embedding(4, 2, sparse=True)), "0 with sparse=True"),
    "sparse buffer": (with_sparse_buffer, "buffer mask of layout sparse_coo"),
    "max_norm": (lambda: nn.Sequential(nn.Embedding(4, 2, max_norm=1.0)), "0 with max_norm=1.0"),
}


@pytest.mark.parametrize("name", MODELS)
def test_model_settings(name: str) -> None:
    make, setting = MODELS[name]
    assert f"- {setting}: " in message("model", Setup(model=make()))


def test_compiled_blocks_pass() -> None:
    model = models.build()
    for layer in model.model.layers:
        layer.compile()
    check("model", Setup(model=model))


COMPILED: dict[str, tuple[Callable[[nn.Module], object], str]] = {
    "part of a block": (
        lambda model: model.model.layers[1].mlp.compile(),
        "model.layers.1.mlp, which is no block by itself",
    ),
    "more than blocks": (lambda model: model.model.compile(), "model, which is no block by itself"),
    "all": (lambda model: model.compile(), "LlamaForCausalLM, which is no block by itself"),
    "replaced": (
        lambda model: setattr(model.model, "norm", torch.compile(model.model.norm)),
        "model.norm, which is no block by itself",
    ),
    "CUDA graphs": (
        lambda model: model.model.layers[0].compile(mode="reduce-overhead"),
        "model.layers.0 with triton.cudagraphs",
    ),
    "autotuning": (
        lambda model: model.model.layers[0].compile(mode="max-autotune-no-cudagraphs"),
        "model.layers.0 with max_autotune",
    ),
    "other backend": (
        lambda model: model.model.layers[0].compile(backend="cudagraphs"),
        "model.layers.0 with a backend other than inductor",
    ),
}


@pytest.mark.parametrize("name", COMPILED)
def test_compiled_in_other_ways(name: str) -> None:
    compile_it, setting = COMPILED[name]
    model = models.build()
    compile_it(model)
    found = message("model", Setup(model=model))
    assert f"- torch.compile of {setting}: " in found
    assert "layer.compile()" in found


def test_weights_that_share_memory() -> None:
    model = Module()
    model.net[1].weight = nn.Parameter(model.net[0].weight.data)
    found = message("model", Setup(model=model))
    assert "- net.0.weight and net.1.weight, which share memory: " in found
    assert "one and the same Parameter" in found
    check("model", Setup(model=model), training=False)
    model.requires_grad_(False)
    check("model", Setup(model=model))
    model.net[1].weight = model.net[0].weight.requires_grad_()
    check("model", Setup(model=model))
    model.net[0].register_buffer("seen", model.net[0].weight.data[1:])
    assert "net.0.weight and net.0.seen" in message("model", Setup(model=model))


def test_weights_beside_each_other_in_one_storage() -> None:
    model = Module()
    flat = torch.zeros(2, 9)
    for layer, row in zip(model.net, flat, strict=True):
        layer.weight = nn.Parameter(row.view(3, 3))
    check("model", Setup(model=model))


# -- optimizer --------------------------------------------------------------------------------------------------------

FINE = [
    lt_offload.AdamW,
    torch.optim.AdamW,
    torch.optim.Adam,
    torch.optim.SGD,
    torch.optim.Adafactor,
    torch.optim.RMSprop,
]


@pytest.mark.parametrize("cls", FINE)
def test_ordinary_optimizers_pass(cls: type[torch.optim.Optimizer]) -> None:
    model = Module()
    optimizer = cls(model.parameters(), lr=0.1)  # type: ignore[call-arg]
    check("optimizer", Setup(model=model, optimizers=[optimizer]))
    assert not limits.unknown_optimizer(optimizer)


def test_frozen_parameters_need_no_optimizer() -> None:
    model = Module()
    model.net[0].requires_grad_(False)
    check("optimizer", Setup(model=model, optimizers=[torch.optim.SGD(model.net[1].parameters(), lr=0.1)]))


def test_optimizers() -> None:
    model = Module()
    params = list(model.parameters())
    sgd = torch.optim.SGD(params, lr=0.1)

    class Prodigy(torch.optim.SGD): ...

    assert "- 2 optimizers" in message("optimizer", Setup(model=model, optimizers=[sgd, sgd]))
    assert "- 0 optimizers" in message("optimizer", Setup(model=nn.Module()))
    assert "- optimizer LBFGS: " in message("optimizer", Setup(model=model, optimizers=[torch.optim.LBFGS(params)]))
    assert "- optimizer Prodigy: " in message("optimizer", Setup(model=model, optimizers=[Prodigy(params, lr=0.1)]))
    part = torch.optim.SGD(params[1:], lr=0.1)
    assert "- trainable parameter net.0.weight that" in message("optimizer", Setup(model=model, optimizers=[part]))


class Lion(torch.optim.Optimizer):
    """Updates each tensor on its own."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                average = self.state[p].setdefault("average", torch.zeros_like(p))
                average.lerp_(p.grad, 0.1)
                p.sub_(average.sign(), alpha=group["lr"])


class ClippedAdamW(torch.optim.AdamW):
    def step(self, closure: Any = None) -> Any:
        nn.utils.clip_grad_norm_([p for group in self.param_groups for p in group["params"]], 1.0)
        return super().step(closure)


class Noisy(torch.optim.SGD):
    """Draws from the global generator, tensor by tensor."""

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for p in group["params"]:
                p.grad += torch.randn_like(p)
        return super().step(closure)


class OwnNoise(Lion):
    def __init__(self, params: Any) -> None:
        super().__init__(params)
        self.own = torch.Generator().manual_seed(1)

    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            group["lr"] = float(torch.rand((), generator=self.own))
        super().step()


class Closure(Lion):
    def step(self, closure: Any) -> None:
        closure()
        super().step()


def groups() -> list[dict[str, Any]]:
    model = Module()
    return [{"params": list(model.net[0].parameters())}, {"params": [model.net[1].weight], "lr": 0.2}]


def tried(optimizer: torch.optim.Optimizer) -> str | None:
    try:
        check("optimizer", Setup(model=nn.Module(), optimizers=[optimizer]))
    except UnsupportedError as error:
        return str(error)
    return None


@pytest.mark.parametrize("cls", [ClippedAdamW, Noisy, OwnNoise])
def test_foreign_optimizers_that_look_across_tensors_are_refused(cls: type[torch.optim.Optimizer]) -> None:
    for parameters in (groups(), list(Module().parameters())):
        optimizer = cls(parameters)
        state = torch.random.get_rng_state()
        found = tried(optimizer)
        assert found is not None
        reason = "a trial on small tensors gave other numbers" if cls is ClippedAdamW else "each tensor is updated when"
        assert f"- optimizer {cls.__name__}: {reason}" in found
        assert torch.equal(torch.random.get_rng_state(), state)
        assert not optimizer.state
        if isinstance(optimizer, OwnNoise):
            assert torch.equal(optimizer.own.get_state(), torch.Generator().manual_seed(1).get_state())


def test_foreign_optimizers_that_take_each_tensor_alone_pass_without_a_warning() -> None:
    optimizer = Lion(groups())
    assert tried(optimizer) is None
    assert not limits.unknown_optimizer(optimizer)


def test_foreign_optimizers_that_cannot_be_tried_are_unknown() -> None:
    optimizer = Closure(groups())
    assert tried(optimizer) is None
    assert limits.unknown_optimizer(optimizer)


def test_a_replaced_step() -> None:
    optimizer = torch.optim.SGD(groups(), lr=0.1)
    torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
    assert tried(optimizer) is None
    optimizer = torch.optim.SGD(groups(), lr=0.1)
    optimizer.step = types.MethodType(lambda self, closure=None: None, optimizer)  # type: ignore[method-assign]
    assert "- SGD.step of the instance: tensors are updated by the step of its class" in str(tried(optimizer))
    torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
    assert "- SGD.step of the instance" in str(tried(optimizer))


# -- the table itself -------------------------------------------------------------------------------------------------


def test_every_row_is_complete_and_printed() -> None:
    table = refusals()
    rows = [line for line in table.splitlines() if line.startswith("| ") and not line.startswith("| not supported |")]
    assert len({limit.name for limit in LIMITS}) == len(LIMITS) == len(rows)
    for limit in LIMITS:
        assert f"| {limit.name} | {limit.instead} |" in table
        for text in (limit.name, limit.why, limit.instead):
            assert text
            assert not text.endswith(".")
            assert "|" not in text
