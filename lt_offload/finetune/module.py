"""The Lightning module: a causal language model, its loss, optimizer and schedule. Works with any strategy."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.utilities.types import OptimizerLRScheduler
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

from lt_offload.errors import ConfigError
from lt_offload.finetune import load
from lt_offload.finetune.data.batches.attention import check_packing
from lt_offload.finetune.data.formats import IGNORED
from lt_offload.finetune.generation import continuation
from lt_offload.finetune.quantize import Quantize, check_quantize, check_stored, quantized
from lt_offload.model.blocks import find_blocks
from lt_offload.optim import AdamW

OptimizerName = Literal["adamw", "adam", "sgd", "adafactor"]
Schedule = Literal["cosine", "linear", "constant"]


@dataclass(frozen=True, kw_only=True, slots=True)
class LoraArgs:
    """Train low-rank adapters and leave the model itself as it is.

    Args:
        r: rank of the adapters.
        alpha: their scale is ``alpha / r``.
        dropout: probability of dropping an adapter's input.
        target_modules: names of the layers that get one; ``all-linear`` is every one but the output projection.
    """

    r: int = 8
    alpha: int = 16
    dropout: float = 0.0
    target_modules: list[str] | str = "all-linear"

    def peft(self) -> dict[str, Any]:
        """Return the arguments of ``peft.LoraConfig``."""
        return {
            "r": self.r,
            "lora_alpha": self.alpha,
            "lora_dropout": self.dropout,
            "target_modules": self.target_modules,
            "task_type": "CAUSAL_LM",
        }


class FineTune(LightningModule):
    """A Hugging Face causal language model to fine-tune.

    Args:
        name: name on the hub, model folder, or ``smollm2-135m-instruct``.
        architecture: JSON file with a model configuration, or the name of a shipped one: what is planned without a
            download, and what ``init: random`` builds.
        init: ``pretrained`` weights, or ``random`` ones (for trying a recipe).
        dtype: of weights, gradients and optimizer states: ``float32`` or ``bfloat16``.
        attention: implementation of attention; null: the fastest that the architecture has.
        dropout: replaces every dropout probability of the model; null leaves them as they are.
        compile_blocks: compile every layer by itself with ``torch.compile``.
        lora: adapters to train instead of the model; null trains everything.
        quantize: ``nf4`` keeps the layers under the adapters in four bits (QLoRA, with bitsandbytes), unpacked to
            ``dtype`` where they compute; null keeps them in ``dtype``.
        optimizer: which one.
        master_weights: for bfloat16 weights and ``adamw``: update fp32 copies of them, with fp32 states, so that small
            steps are not rounded away. They stay where updates run (16 instead of 8 bytes per weight in all), and
            bfloat16 is all that travels.
        stochastic_rounding: for bfloat16 weights and ``adamw``, instead of ``master_weights``: compute updates in fp32
            and round them at random, so that small steps count on average (12 bytes per weight in all).
        lr: learning rate after the warm-up.
        weight_decay: of matrices; vectors (norms, biases) have none.
        betas: decay rates of Adam's moments.
        schedule: of the learning rate after the warm-up.
        warmup_steps: steps over which the learning rate rises to ``lr``.
        min_lr_ratio: where the schedule ends, as a share of ``lr``.
    """

    def __init__(
        self,
        name: str,
        *,
        architecture: str | None = None,
        init: load.Init = "pretrained",
        dtype: load.Dtype = "float32",
        attention: load.Attention | None = None,
        dropout: float | None = None,
        compile_blocks: bool = False,
        lora: LoraArgs | None = None,
        quantize: Quantize | None = None,
        optimizer: OptimizerName = "adamw",
        master_weights: bool = False,
        stochastic_rounding: bool = False,
        lr: float = 1e-5,
        weight_decay: float = 0.0,
        betas: tuple[float, float] = (0.9, 0.999),
        schedule: Schedule = "cosine",
        warmup_steps: int = 0,
        min_lr_ratio: float = 0.0,
    ) -> None:
        super().__init__()
        if not 0 < lr < math.inf:
            raise ConfigError(f"model.lr={lr} is not positive and finite; choose a number such as 1e-5")
        if lora is not None and lora.r < 1:
            raise ConfigError(f"model.lora.r={lora.r} is too small; it must be at least 1")
        check_quantize(quantize, lora=lora, compiled=compile_blocks)
        if master_weights and stochastic_rounding:
            raise ConfigError(
                "model.stochastic_rounding=true does without the copies that model.master_weights=true keeps; set one "
                "of them to false"
            )
        for flag, value in (("master_weights", master_weights), ("stochastic_rounding", stochastic_rounding)):
            if value:
                check_low_precision(flag, dtype, optimizer, lora)
        self.name = name
        self.architecture = architecture
        self.init = init
        self.model_dtype: load.Dtype = dtype
        self.attention = attention
        self.dropout = dropout
        self.compile_blocks = compile_blocks
        self.lora = lora
        self.quantize: Quantize | None = quantize
        self.optimizer: OptimizerName = optimizer
        self.master_weights = master_weights
        self.stochastic_rounding = stochastic_rounding
        self.lr = lr
        self.weight_decay = weight_decay
        self.betas = betas
        self.schedule: Schedule = schedule
        self.warmup_steps = warmup_steps
        self.min_lr_ratio = min_lr_ratio
        self.model: nn.Module | None = None

    def setup(self, stage: str) -> None:
        """Check the data against the model, before its weights are loaded.

        Raises:
            ConfigError: if sequences are longer, or the vocabulary is larger, than the model's, or if it cannot keep
                packed documents apart.
        """
        data = getattr(self.trainer, "datamodule", None)
        if data is None or self.model is not None:
            return
        config = load.load_config(self.name, self.architecture if self.init == "random" else None)
        check_data(config, max_length=data.max_length, vocabulary=len(data.tokenizer))
        self.check_packing(config, data)

    def check_packing(self, config: Any, data: Any) -> None:
        """Raise ``ConfigError`` if ``data`` are packed and a model of ``config`` cannot keep documents apart."""
        if data.pack is True:
            check_packing(config, max_length=data.max_length, attention=self.attention, batch_size=data.batch_size)

    def configure_model(self) -> None:
        """Load the model; once, although Lightning calls this for each of its verbs."""
        if self.model is None:
            self.model = self.build()

    def build(self, *, init: load.Init | None = None) -> nn.Module:
        """Return the model with its adapters and compiled blocks, in training mode; ``init`` instead of the setting."""
        architecture, init = self.architecture if init in (None, self.init) else None, init or self.init
        if init == "pretrained":
            check_stored(load.load_config(self.name), self.quantize)
        model: nn.Module = load.load_model(
            self.name,
            architecture=architecture,
            init=init,
            dtype=self.model_dtype,
            attention=self.attention,
            dropout=self.dropout,
            as_stored=self.quantize is not None,
        )
        if self.quantize is not None:
            model = quantized(model, getattr(torch, self.model_dtype))
        if self.lora is not None:
            model = add_lora(model, self.lora)
        if self.compile_blocks:
            for block in find_blocks(model).blocks:
                if block.kind == "layer":
                    block.module.compile()
        return model

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        """Return the mean loss per token."""
        loss = self._loss(batch)
        self.log("train_loss", loss.detach(), prog_bar=True, batch_size=batch["input_ids"].shape[0])
        return loss

    def validation_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        """Log the mean loss per token; batches count by their tokens."""
        tokens = int((batch["labels"][:, 1:] != IGNORED).sum())
        self.log("val_loss", self._loss(batch), prog_bar=True, on_epoch=True, on_step=False, batch_size=tokens)

    def predict_step(self, batch: dict[str, Any], batch_idx: int = 0) -> list[int]:
        """Return the tokens that follow ``input_ids``; the rest of ``batch`` are arguments of ``continuation``."""
        options = {name: value for name, value in batch.items() if name != "input_ids"}
        return continuation(self.model, batch["input_ids"], **options)

    def configure_optimizers(self) -> OptimizerLRScheduler:
        """Return the optimizer over trainable tensors, matrices with weight decay, and its schedule per step."""
        trainable = [p for p in self.parameters() if p.requires_grad]
        groups = [
            {"params": [p for p in trainable if p.ndim > 1], "weight_decay": self.weight_decay},
            {"params": [p for p in trainable if p.ndim <= 1], "weight_decay": 0.0},
        ]
        groups = [group for group in groups if group["params"]]
        optimizer = make_optimizer(
            self.optimizer,
            groups,
            lr=self.lr,
            betas=self.betas,
            master_weights=self.master_weights,
            stochastic_rounding=self.stochastic_rounding,
        )
        total = self.trainer.estimated_stepping_batches
        if math.isinf(total) and self.schedule != "constant":
            raise ConfigError(
                f"model.schedule={self.schedule!r} needs an end; set trainer.max_steps or trainer.max_epochs, "
                "or model.schedule=constant"
            )
        factor = lr_factor(self.schedule, warmup=self.warmup_steps, total=total, floor=self.min_lr_ratio)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": LambdaLR(optimizer, factor), "interval": "step"}}

    def _loss(self, batch: dict[str, Tensor]) -> Tensor:
        assert self.model is not None, "configure_model() comes first"
        loss: Tensor = self.model(**batch, use_cache=False).loss
        return loss


def check_data(config: Any, *, max_length: int, vocabulary: int | None = None) -> None:
    """Compare data settings with the model they are for.

    Raises:
        ConfigError: if sequences are longer, or the vocabulary is larger, than the model's.
    """
    longest = getattr(config, "max_position_embeddings", None)
    if longest is not None and max_length > longest:
        raise ConfigError(
            f"data.max_length={max_length} is longer than the model's context; set it to {longest} or less"
        )
    if vocabulary is not None and vocabulary > config.vocab_size:
        raise ConfigError(
            f"the tokenizer has {vocabulary} tokens, the model {config.vocab_size}; leave out data.tokenizer to "
            "use the model's own"
        )


def check_low_precision(flag: str, dtype: load.Dtype, optimizer: OptimizerName, lora: LoraArgs | None) -> None:
    """Raise ``ConfigError`` where another update of bfloat16 weights would change nothing, or nobody would do it."""
    if dtype != "bfloat16":
        raise ConfigError(
            f"model.{flag}=true changes nothing with model.dtype={dtype}; set it to false, or set model.dtype=bfloat16"
        )
    if lora is not None:
        raise ConfigError(
            f"model.{flag}=true changes nothing with model.lora, whose adapters are float32 in any case; set it "
            "to false"
        )
    if optimizer != "adamw":
        raise ConfigError(f"model.{flag}=true is not offered with model.optimizer={optimizer}; use adamw")


def add_lora(model: nn.Module, args: LoraArgs) -> nn.Module:
    """Return ``model`` with adapters, everything else frozen.

    Raises:
        ConfigError: if peft is not installed, or no layer has one of the names.
    """
    try:
        from peft import LoraConfig, get_peft_model
    except ImportError:
        raise ConfigError("model.lora needs the package peft: pip install 'lt-offload[lora]'") from None
    try:
        with warnings.catch_warnings():  # peft asks transformers with a name that is going away
            warnings.simplefilter("ignore", FutureWarning)
            adapted: nn.Module = get_peft_model(model, LoraConfig(**args.peft()))
    except ValueError as error:
        raise ConfigError(f"model.lora.target_modules={args.target_modules!r}: {error}") from error
    return adapted.train()


def make_optimizer(
    name: OptimizerName,
    groups: list[dict[str, Any]],
    *,
    lr: float,
    betas: tuple[float, float],
    master_weights: bool = False,
    stochastic_rounding: bool = False,
) -> Optimizer:
    """Return the optimizer called ``name``; fused where there is such a kernel: the fast one on host and device."""
    if master_weights or stochastic_rounding:
        assert name == "adamw"
        return AdamW(groups, lr=lr, betas=betas, stochastic_rounding=stochastic_rounding)
    if name == "adamw":
        return torch.optim.AdamW(groups, lr=lr, betas=betas, fused=True)
    if name == "adam":
        return torch.optim.Adam(groups, lr=lr, betas=betas, fused=True)
    if name == "sgd":
        return torch.optim.SGD(groups, lr=lr, momentum=0.9, fused=True)
    return torch.optim.Adafactor(groups, lr=lr)


def lr_factor(schedule: Schedule, *, warmup: int, total: float, floor: float) -> Callable[[int], float]:
    """Return the factor on the learning rate as a function of the step."""

    def factor(step: int) -> float:
        if step < warmup:
            return (step + 1) / (warmup + 1)
        if schedule == "constant":
            return 1.0
        progress = min(1.0, (step - warmup) / max(1.0, total - warmup))
        remaining = 1 - progress if schedule == "linear" else (1 + math.cos(math.pi * progress)) / 2
        return floor + (1 - floor) * remaining

    return factor
