"""The Lightning module: a causal language model, its loss, optimizer and schedule. Works with any strategy."""

from __future__ import annotations

import logging
import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from functools import wraps
from typing import TYPE_CHECKING, Any, Literal

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.types import OptimizerLRScheduler
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

from lt_offload.compat.lightning import adds_up, trainer_of
from lt_offload.errors import ConfigError
from lt_offload.finetune import kernels as layers
from lt_offload.finetune import load
from lt_offload.finetune.adapters import LoraArgs, SavedAdapters, add_lora, check_adapters, choose_trained
from lt_offload.finetune.data.batches import REFERENCE, TOKENS
from lt_offload.finetune.data.formats import IGNORED
from lt_offload.finetune.data.sequences import check_packing
from lt_offload.finetune.generation import continuation
from lt_offload.finetune.kernels import Kernels
from lt_offload.finetune.optimizers import (
    WITH_BETAS,
    LossAverage,
    OptimizerName,
    Schedule,
    check_precision,
    lr_factor,
    mean_over,
    undivided,
)
from lt_offload.finetune.preferences import BETA, METRICS, check_pairs, pair_loss, reference_log_probs, with_references
from lt_offload.finetune.processes import is_first, mean, several, total
from lt_offload.finetune.quantize import Quantize, check_quantize, check_stored, quantized
from lt_offload.finetune.unused import as_written, refuse_unused
from lt_offload.finetune.weights.left_out import Description, frozen_base, leave_out, take_up
from lt_offload.finetune.weights.vocabulary import check_rows, check_tokens, has_grown, names_of_embeddings, resize
from lt_offload.model.compiled import kernels_of
from lt_offload.optim import AdamW

if TYPE_CHECKING:
    from lt_offload.schema.profile import HardwareProfile

_log = logging.getLogger(__name__)
_log.addFilter(is_first)

_OWN = "transformers' own"
_OF_FSDP = "_fsdp_wrapped_module."
"""FSDP's prefix in names of parameters, whose pieces are all vectors there."""
_OPTIMIZER = "optimizer_settings"
"""The key of the optimizer's settings in a checkpoint."""
_KERNELS = "kernels"
"""The key of the kernels of layers, where they were not transformers' own."""

NO_STORED_DORA = (
    "model.quantize={} is not offered with DoRA, which reads the norms of the weights under the adapters in every "
    "forward, for which they would be opened twice; set model.lora.dora=false, or model.quantize=null"
)


class FineTune(LightningModule):
    """A Hugging Face causal language model to fine-tune.

    Args:
        name: name on the hub, model folder, GGUF file, or ``smollm2-135m-instruct``.
        architecture: JSON file with a model configuration, or the name of a shipped one: what is planned without a
            download, and what ``init: random`` builds.
        init: ``pretrained`` weights, or ``random`` ones (for trying a recipe).
        dtype: of weights, gradients and optimizer states: ``float32`` or ``bfloat16``.
        attention: implementation of attention: ``sdpa``, ``eager``, ``flash_attention_2`` or ``flex_attention``; null:
            the fastest that the architecture has.
        dropout: replaces every dropout probability of the model; null leaves them as they are.
        compile_blocks: compile every layer by itself with ``torch.compile``: faster, with the numbers of the compiled
            model; the first steps take a minute or more.
        kernels: ``liger`` lets norms and gated MLPs compute with the Triton kernels of Liger Kernel, on a GPU, which
            save less for the backward: the numbers of the model that has them; ``auto``: if they are installed, and
            there are some for the model and the GPU; null: as transformers computes.
        lora: adapters to train instead of the model; null trains everything.
        quantize: keeps the weights under the adapters in fewer bits, opened to ``dtype`` where they compute: ``nf4``
            (four bits, QLoRA, with bitsandbytes), ``mxfp4`` (four bits, as gpt-oss is stored), ``fp8`` (eight bits by
            squares, as DeepSeek and Qwen are), ``int8`` (a scale per row) or ``lossless`` (bfloat16 in 11.3 bits, with
            the same numbers); null keeps them in ``dtype``.
        adapter: folder with adapters in peft's format to train on, instead of new ones (``lora``).
        freeze: parameters that are not trained: names of parameters or of modules that they are in, with ``*`` for
            anything, or regular expressions that whole names match.
        train_only: the only parameters that are trained, in the same form.
        new_tokens: tokens that the tokenizer gets beside its own; the embeddings grow by as many rows.
        resize_vocab: let the embeddings grow by as many random rows as the tokenizer has tokens that the model does not
            know, beside ``new_tokens``; if false, such a tokenizer is an error.
        tokenizer: name or folder of the tokenizer, if not the model's; set by the recipe's ``data.tokenizer``.
        loss_average: what the loss of an update of several batches (``trainer.accumulate_grad_batches``, and those of
            all processes) is a mean of: ``tokens``, all those with a loss, as in one large batch, or ``batches``, their
            means, in which the tokens of a batch with few of them count for more; null: ``tokens``, but ``batches``
            with loaders of one's own, which do not say how many tokens an update has, and with a ``training_step`` that
            does not call this one.
        dpo_beta: with ``data.format: preference``, how closely the model stays to what it was, as TRL's ``beta``.
        optimizer: what updates the weights: ``adamw``, ``adamw8bit`` (moments in eight bits, by bitsandbytes'
            definition: 2 bytes per weight), ``adam``, ``sgd`` (with momentum 0.9) or ``adafactor``.
        state_dtype: ``bfloat16`` keeps the moments of ``adamw`` in that beside float32 weights, ``master_weights`` or
            ``stochastic_rounding`` (4 bytes per weight instead of 8); null: as the weights are updated.
        master_weights: for bfloat16 weights and ``adamw`` or ``adamw8bit``: update fp32 copies of them, with fp32
            moments if these are not to have fewer bits, so that small steps are not rounded away. They stay where
            updates run (16 instead of 8 bytes per weight in all), and bfloat16 is all that travels.
        stochastic_rounding: for bfloat16 weights and ``adamw`` or ``adamw8bit``, instead of ``master_weights``: compute
            updates in fp32 and round them at random, so that small steps count on average (12 bytes per weight in all).
        lr: learning rate after the warm-up.
        weight_decay: of matrices; vectors (norms, biases) have none.
        betas: decay rates of Adam's moments (``adamw`` and ``adam``).
        schedule: of the learning rate after the warm-up.
        warmup_steps: steps over which the learning rate rises to ``lr``; below 1: the share of all steps, as in the HF
            Trainer.
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
        kernels: Kernels | None = None,
        lora: LoraArgs | None = None,
        quantize: Quantize | None = None,
        adapter: str | None = None,
        freeze: list[str] | None = None,
        train_only: list[str] | None = None,
        new_tokens: list[str] | None = None,
        resize_vocab: bool = False,
        tokenizer: str | None = None,
        loss_average: LossAverage | None = None,
        dpo_beta: float = BETA,
        optimizer: OptimizerName = "adamw",
        state_dtype: Literal["bfloat16"] | None = None,
        master_weights: bool = False,
        stochastic_rounding: bool = False,
        lr: float = 1e-5,
        weight_decay: float = 0.0,
        betas: tuple[float, float] = (0.9, 0.999),
        schedule: Schedule = "cosine",
        warmup_steps: float = 0,
        min_lr_ratio: float = 0.0,
    ) -> None:
        super().__init__()
        if optimizer not in WITH_BETAS:
            beside = f"model.optimizer={optimizer}, which has no such moments"
            refuse_unused(FineTune, "model.", {"betas": betas}, beside, instead="use adamw or adam")
        if dropout is not None and not 0 <= dropout < 1:
            raise ConfigError(f"model.dropout={dropout} is no probability below 1; set it to 0 or 0.1")
        check_adapters(lora, adapter, {"freeze": freeze, "train_only": train_only})
        check_tokens(new_tokens or ())
        if quantize is not None and lora is not None and lora.dora:
            raise ConfigError(NO_STORED_DORA.format(quantize))
        check_quantize(quantize, lora=adapter if lora is None else lora, compiled=compile_blocks, dtype=dtype)
        layers.check_kernels(kernels, compiled=compile_blocks)
        self.name = name
        self.architecture = architecture
        self.init = init
        self.model_dtype: load.Dtype = dtype
        self.attention = attention
        self.dropout = dropout
        self.compile_blocks = compile_blocks
        self.kernels: Kernels | None = kernels
        self.lora = lora
        self.quantize: Quantize | None = quantize
        self.adapter = adapter
        self.frozen = tuple(freeze or ())
        self.train_only = tuple(train_only or ())
        self.new_tokens = tuple(new_tokens or ())
        self.resize_vocab = resize_vocab
        self.tokenizer = tokenizer
        self.loss_average: LossAverage | None = loss_average
        self.dpo_beta = dpo_beta
        self.optimizer: OptimizerName = optimizer
        self.state_dtype: Literal["bfloat16"] | None = state_dtype
        self.master_weights = master_weights
        self.stochastic_rounding = stochastic_rounding
        self.lr = lr
        self.weight_decay = weight_decay
        self.betas = betas
        self.schedule: Schedule = schedule
        self.warmup_steps = warmup_steps
        self.min_lr_ratio = min_lr_ratio
        check_precision(self)
        self._check_optimization()
        self.model: nn.Module | None = None
        self._matrices: frozenset[str] = frozenset()
        """Names of the parameters that are matrices, before a strategy cuts them into pieces."""
        self._base: dict[str, Description] = {}
        """Frozen tensors that checkpoints leave out, as they are loaded from ``name``."""
        self.vocabulary: int | None = None
        """Number of tokens of the data's tokenizer; None: not known yet."""
        self._losses: list[list[Tensor]] = []
        """Losses of the batches of the present update so far, of pairs with their ``METRICS``."""
        self._tokens: Tensor | None = None
        """Tokens of the present update, the divisor of its losses."""
        self._untold: Tensor | None = None
        """Tokens of the present update, kept from the batch of a subclass's step for a call of this class's."""
        self._optimizer_settings: dict[str, Any] | None = None
        """Settings of the optimizer; None: there is none yet, or a subclass has made another."""

    def _check_optimization(self) -> None:
        """Raise ``ConfigError`` for settings of loss or updates that cannot be, or would change nothing."""
        for name, value, usual in (("lr", self.lr, "1e-5"), ("dpo_beta", self.dpo_beta, "0.1")):
            if not 0 < value < math.inf:
                raise ConfigError(f"model.{name}={value} is not positive and finite; choose a number such as {usual}")
        if not 0 <= self.weight_decay < math.inf:
            raise ConfigError(f"model.weight_decay={self.weight_decay} is not 0 or a positive number; choose 0 to 0.1")
        if not all(0 <= beta < 1 for beta in self.betas):
            raise ConfigError(
                f"model.betas={list(self.betas)} are no two shares below 1; choose numbers such as [0.9, 0.999]"
            )
        if not 0 <= self.warmup_steps < math.inf:
            raise ConfigError(f"model.warmup_steps={self.warmup_steps} is no number of steps; it must be at least 0")
        if self.warmup_steps > 1 and self.warmup_steps != int(self.warmup_steps):
            raise ConfigError(
                f"model.warmup_steps={self.warmup_steps} is no whole number of steps; a share of all steps is below 1"
            )
        if not 0 <= self.min_lr_ratio <= 1:
            raise ConfigError(f"model.min_lr_ratio={self.min_lr_ratio} is not a share; choose a number from 0 to 1")
        if self.min_lr_ratio and self.schedule == "constant":
            raise ConfigError(
                f"model.min_lr_ratio={self.min_lr_ratio} changes nothing with model.schedule=constant; set it to 0, or "
                "choose cosine or linear"
            )

    def setup(self, stage: str) -> None:
        """Check the data against the model, before its weights are loaded.

        Raises ``ConfigError`` if sequences are longer than the model's context, the tokenizer lacks a new token or is
        another model's, or the model cannot keep packed documents apart.
        """
        data = getattr(self.trainer, "datamodule", None)
        if data is None or self.model is not None:
            return
        config = load.load_config(self.name, self.architecture if self.init == "random" else None)
        self.vocabulary = len(data.tokenizer)
        self._check_rows(config.get_text_config().vocab_size, self.init)
        self.check_data(config, data, self.trainer.strategy)
        absent = [token for token in self.new_tokens if token not in data.tokenizer.get_vocab()]
        if absent:
            raise ConfigError(
                f"model.new_tokens={list(self.new_tokens)!r}: the data's tokenizer does not know {absent[0]!r}; give "
                "FineTuneData the same new_tokens"
            )

    def check_data(self, config: Any, data: Any, strategy: Any = None) -> None:
        """Raise ``ConfigError`` if the data do not suit the settings, or a model of ``config``."""
        check_pairs(self, data, config, strategy)
        longest = getattr(config, "max_position_embeddings", None)
        if longest is not None and data.max_length > longest:
            raise ConfigError(
                f"data.max_length={data.max_length} is longer than the model's context; set it to {longest} or less"
            )
        if data.pack is True:
            check_packing(config, max_length=data.max_length, attention=self.attention, batch_size=data.batch_size)

    def configure_model(self) -> None:
        """Load the model; once, although Lightning calls this for each of its verbs."""
        if self.model is None:
            self.model = self.build()
            # Now, while they are whole: FSDP makes vectors of the pieces into which it cuts them.
            self._matrices = frozenset(name for name, p in self.named_parameters() if p.ndim > 1)
            if self.init == "pretrained" and (self.lora is not None or self.adapter is not None):
                self._base = frozen_base(self.model)

    def build(self, *, init: load.Init | None = None) -> nn.Module:
        """Return the model as it is trained, in training mode; ``init`` instead of the setting."""
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
            quantize=self.quantize,
        )
        self._grow(model, init)
        trainer = trainer_of(self)
        device = None if trainer is None else trainer.strategy.root_device
        if self.kernels == "liger":
            layers.use_functions(model, layers.liger_functions(None if device is None else device.type))
        elif self.kernels == "auto" and not self.compile_blocks:
            functions = layers.available(model.config, device)
            if functions is not None:
                layers.use_functions(model, functions)
        if self.quantize is not None:
            model = quantized(model, getattr(torch, self.model_dtype), self.quantize)
        model = self._adapt(model)
        if self.compile_blocks:
            layers.compile_layers(model)
        return model

    def prepare(self, model: nn.Module, machine: HardwareProfile | None = None) -> nn.Module:
        """Return ``model``, which is on meta, with the settings' vocabulary, adapters and frozen parts, to plan it.

        With ``kernels="auto"`` it has those that a run on ``machine`` would have with the packages of this one.
        """
        self._grow(model, self.init)
        automatic = self.kernels == "auto" and not self.compile_blocks
        if self.kernels == "liger" or (automatic and layers.expected(model.config, machine)):
            layers.use_functions(model, layers.PLANNED)
        return self._adapt(model)

    def _grow(self, model: Any, init: load.Init) -> None:
        tokens = self.count_tokens()
        if tokens is not None:
            self._check_rows(model.get_input_embeddings().weight.shape[0], init)
            resize(model, tokens)

    def _check_rows(self, rows: int, init: load.Init) -> None:
        if init == "pretrained" and not self.resize_vocab:
            tokens, where = self.count_tokens() or 0, self.tokenizer or self.name
            check_rows(rows, tokens, added=len(self.new_tokens), tokenizer=where)

    def _adapt(self, model: nn.Module) -> nn.Module:
        if self.lora is not None:
            self._tell_untrained(model, self.lora.modules_to_save, "set")
            model = add_lora(model, self.lora)
        if self.adapter is not None:
            saved = SavedAdapters.read(self.adapter)
            if self.quantize is not None and saved.config.use_dora:
                raise ConfigError(NO_STORED_DORA.format(self.quantize))
            held = [name for name in names_of_embeddings(model) if saved.holds(name)]
            self._tell_untrained(
                model, held, f"model.adapter={self.adapter!r} brings none; make new adapters instead, with"
            )
            model = saved.add(model)
        if self.frozen or self.train_only:
            choose_trained(model, freeze=self.frozen, train_only=self.train_only)
        return model.train()

    def count_tokens(self) -> int | None:
        """Return the number of tokens of the tokenizer, None if it is the model's own."""
        if self.vocabulary is None and (self.new_tokens or self.tokenizer is not None):
            self.vocabulary = len(load.load_tokenizer(self.tokenizer or self.name, self.new_tokens))
        return self.vocabulary

    def _tell_untrained(self, model: Any, held: Sequence[str] | None, advice: str) -> None:
        """Warn of embeddings of new tokens that stay as they were drawn, as adapters do not hold them."""
        names = names_of_embeddings(model)
        absent = [name for name in names if name not in (held or ())]
        if has_grown(model) and absent and is_first():
            warnings.warn(
                f"the tokens that the model did not have keep random embeddings: adapters leave {', '.join(absent)} "
                f"as it is; {advice} model.lora.modules_to_save=[{', '.join(names)}]",
                stacklevel=2,
            )

    @with_references
    def on_train_start(self) -> None:
        """Warn if the learning rate never rises to ``lr``."""
        total = self.trainer.estimated_stepping_batches
        if 0 < self.warmup_steps >= total:
            _log.warning(
                "model.warmup_steps=%g are not over when training ends after %d steps: the learning rate stays below "
                "model.lr=%g", self.warmup_steps, total, self.lr,
            )  # fmt: skip

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        wrappers: dict[str, Callable[..., Any]] = {"training_step": _untold, "on_train_start": with_references}
        for name, wrap in wrappers.items():
            owner = next(base for base in cls.__mro__ if name in vars(base))
            if owner is cls or not issubclass(owner, FineTune):  # of a mixin
                setattr(cls, name, wrap(getattr(cls, name)))

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        """Return the mean loss per token, scaled so that Lightning's mean over batches is that of the update.

        Raises:
            ConfigError: if ``loss_average`` is ``tokens``, and the batch lacks the number of tokens of its update.
        """
        count: int = 1 if trainer_of(self) is None else trainer_of(self).accumulate_grad_batches
        if batch_idx % count == 0:
            self._losses = []  # as gradients are forgotten that have led to no update
        batch = dict(batch)
        tokens, self._untold = batch.pop(TOKENS, self._untold), None
        if self.loss_average == "batches" or REFERENCE in batch:
            tokens = None
        elif tokens is None and (count > 1 or several(trainer_of(self))) and self.loss_average == "tokens":
            raise ConfigError(
                f"model.loss_average=tokens: the batches have no {TOKENS!r}, the number of trained tokens in all "
                f"{count} of an update (accumulate_grad_batches), which FineTuneData adds; add it, or set "
                "model.loss_average=batches"
            )
        if tokens is None:
            loss, *figures = self._means(batch)
        else:
            assert self.model is not None
            if not self._losses:
                # Strategies take the mean of the processes' gradients: what each divides by is a mean, too.
                self._tokens = mean(self.trainer, tokens) if several(trainer_of(self)) else tokens
            assert self._tokens is not None
            with mean_over(self.model, self._tokens):
                loss, *figures = self._means(batch)
        self._losses.append([loss.detach(), *figures])
        if trainer_of(self) is None or not adds_up(trainer_of(self)):
            for name, (first, *others) in zip(("train_loss", *METRICS), zip(*self._losses, strict=True), strict=False):
                whole = sum(others, start=first)
                whole = whole if tokens is not None else whole / len(self._losses)
                self.log(name, whole, prog_bar=name == "train_loss", batch_size=1, sync_dist=True)
            self._losses = []
        # Lightning is going to divide by the number of batches, which has no part in a mean over all tokens.
        return loss if tokens is None or count == 1 else undivided(loss, count)

    def validation_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        """Log the mean loss per token, or pair; batches count by their tokens or pairs, those of all processes."""
        trained = batch["labels"][:, 1:] != IGNORED
        count = int(trained.sum()) if REFERENCE not in batch else int(trained.any(1).sum()) // 2
        means = [*self._means(batch)]
        if several(trainer_of(self)):
            # A batch that only fills a process's turn has no labels, and its mean is no number.
            sums = [mean * count if count else torch.zeros_like(mean) for mean in means]
            *sums, divisor = total(self.trainer, torch.stack([*sums, torch.full_like(sums[0], count)]).double())
            means, count = [each / divisor for each in sums], int(divisor)
        for name, whole in zip(("loss", *METRICS), means, strict=False):
            settings: dict[str, Any] = {"prog_bar": name == "loss", "on_epoch": True, "on_step": False}
            self.log(f"val_{name}", whole, batch_size=count, sync_dist=True, **settings)

    def predict_step(self, batch: dict[str, Any], batch_idx: int = 0) -> list[int] | Tensor:
        """Return what follows ``input_ids``, by the other arguments of ``continuation``; of pairs their reference."""
        if REFERENCE in batch:
            return reference_log_probs(self.model, batch)
        options = {name: value for name, value in batch.items() if name != "input_ids"}
        return continuation(self.model, batch["input_ids"], **options)

    def configure_optimizers(self) -> OptimizerLRScheduler:
        """Return the optimizer over trainable tensors, matrices with weight decay, and its schedule per step."""
        groups: list[dict[str, Any]] = [
            {"params": [], "weight_decay": self.weight_decay},
            {"params": [], "weight_decay": 0.0},
        ]
        for name, parameter in self.named_parameters():
            if parameter.requires_grad:
                matrix = parameter.ndim > 1 or name.replace(_OF_FSDP, "") in self._matrices
                groups[0 if matrix else 1]["params"].append(parameter)
        groups = [group for group in groups if group["params"]]
        pairs = getattr(getattr(trainer_of(self), "datamodule", None), "pairs", False)
        self._optimizer_settings = self._settings_of_optimizer(form=pairs)
        optimizer = self.make_optimizer(groups)
        total = self.trainer.estimated_stepping_batches
        if math.isinf(total) and self.schedule != "constant":
            raise ConfigError(
                f"model.schedule={self.schedule!r} needs an end; set trainer.max_steps or trainer.max_epochs, "
                "or model.schedule=constant"
            )
        if math.isinf(total) and 0 < self.warmup_steps < 1:
            raise ConfigError(
                f"model.warmup_steps={self.warmup_steps} is a share of all steps, and there is no last one; set "
                "trainer.max_steps or trainer.max_epochs, or a number of steps such as model.warmup_steps=100"
            )
        warmup = math.ceil(self.warmup_steps * total) if self.warmup_steps < 1 else int(self.warmup_steps)
        factor = lr_factor(self.schedule, warmup=warmup, total=total, floor=self.min_lr_ratio)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": _Schedule(optimizer, factor), "interval": "step"}}

    def make_optimizer(self, params: Any) -> Optimizer:
        """Return the optimizer of the settings over ``params``; fused where there is such a kernel: the fast one."""
        name, lr, betas, state_dtype = self.optimizer, self.lr, self.betas, self.state_dtype
        if name == "adamw8bit" or state_dtype is not None or self.master_weights or self.stochastic_rounding:
            state = "8bit" if name == "adamw8bit" else state_dtype
            rounding = self.stochastic_rounding
            return AdamW(params, lr=lr, betas=betas, stochastic_rounding=rounding, state_dtype=state)
        if name == "adafactor":
            return torch.optim.Adafactor(params, lr=lr)
        if name == "sgd":
            return torch.optim.SGD(params, lr=lr, momentum=0.9, fused=True)
        adam = torch.optim.AdamW if name == "adamw" else torch.optim.Adam
        return adam(params, lr=lr, betas=betas, fused=True)

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Add the settings of the optimizer, and leave out the frozen model under adapters."""
        # Not what its groups say now: schedules and callbacks may have changed that since.
        if self._optimizer_settings is not None:
            checkpoint[_OPTIMIZER] = self._optimizer_settings
        if kernels := kernels_of(self):
            checkpoint[_KERNELS] = kernels
        # Strategies that cut the weights into pieces read their files themselves and want all of them.
        if self._base and trainer_of(self) is not None and not self.trainer.strategy.restore_checkpoint_after_setup:
            assert self.model is not None
            leave_out(checkpoint, self.model, self._base, name=self.name, optimizers=self.trainer.optimizers)

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Take the left-out tensors from the model; refuse other settings of the optimizer than the checkpoint's."""
        # Loading the states of an optimizer replaces its settings without a word.
        if trainer_of(self) is not None and self.trainer.state.fn == TrainerFn.FITTING:
            lr_of_run = self.check_continues(checkpoint)
            if lr_of_run is not None:
                _log.warning(
                    "model.lr=%g from step %d on, with the schedule and the moments of the run, which had %g until "
                    "then", self.lr, checkpoint["global_step"], lr_of_run,
                )  # fmt: skip
            before, now = checkpoint.get(_KERNELS, ""), kernels_of(self)
            if before != now and is_first():
                warnings.warn(
                    f"training goes on with other kernels than the checkpoint's, and with other last bits: they were "
                    f"{before or _OWN}, now they are {now or _OWN}; model.kernels={as_written(self.kernels)}",
                    stacklevel=2,
                )
        if self.model is not None:
            checkpoint["state_dict"] = take_up(checkpoint, self.model, name=self.name)

    def check_continues(self, checkpoint: Mapping[str, Any]) -> float | None:
        """Return the learning rate of the optimizer of ``checkpoint``, if it is another one; None if it is the same.

        Raises ``ConfigError`` if other settings differ, which cannot change within a run. The optimizer of a subclass
        that configures its own is not compared. A checkpoint without such settings still has the learning rate with
        which its schedule began.
        """
        if type(self).configure_optimizers is not FineTune.configure_optimizers:
            return None
        settings = self._settings_of_optimizer(form=True)
        before = checkpoint.get(_OPTIMIZER)
        if not before:
            states = checkpoint.get("optimizer_states") or [{}]
            groups = states[0].get("param_groups") if isinstance(states[0], Mapping) else None
            before = {"lr": groups[0]["initial_lr"]} if groups and "initial_lr" in groups[0] else {}
        for name, value in before.items():
            if name != "lr" and settings.get(name) != value:
                raise ConfigError(
                    f"model.{name}={as_written(settings.get(name))} cannot take effect where training goes on from a "
                    f"checkpoint, whose run had {as_written(value)}; set it to that (the folder of the run, given as "
                    "the recipe, has all its settings), or export the model and begin a new run with it as model.name"
                )
        return before["lr"] if before.get("lr", settings["lr"]) != settings["lr"] else None

    def _settings_of_optimizer(self, *, form: bool) -> dict[str, Any]:
        names = ["optimizer", "lr", "weight_decay", "master_weights", "stochastic_rounding"]
        # One that is newer than some checkpoints is in those only that were trained with it.
        names += ["state_dtype"] if self.state_dtype is not None else []
        settings = {name: getattr(self, name) for name in names}
        settings |= {"dtype": self.model_dtype, "quantize": self.quantize} if form else {}  # references are of it
        return settings | ({"betas": [*self.betas]} if self.optimizer in WITH_BETAS else {})

    def _means(self, batch: dict[str, Tensor]) -> Sequence[Tensor]:
        """Return the loss, and of pairs their ``METRICS``."""
        assert self.model is not None, "configure_model() comes first"
        if REFERENCE in batch:
            return pair_loss(self.model, batch, self.dpo_beta)
        return [self.model(**batch, use_cache=False).loss]


def _untold(step: Callable[..., Any]) -> Callable[..., Any]:
    """Return ``step``, a ``training_step`` of a subclass, without the tokens of an update in its batches.

    FineTune's own, if it calls that, gets them all the same. A model would divide by their number, and Lightning again
    by that of the batches.
    """

    @wraps(step)
    def untold(self: FineTune, batch: Any, *args: Any, **kwargs: Any) -> Any:
        if getattr(getattr(trainer_of(self), "datamodule", None), "counts_tokens", False) and TOKENS in batch:
            self._untold = batch[TOKENS]
            batch = {key: value for key, value in batch.items() if key != TOKENS}
        output = step(self, batch, *args, **kwargs)
        unused, self._untold = self._untold, None
        if unused is not None and self.loss_average == "tokens":
            raise ConfigError(
                f"model.loss_average=tokens: {type(self).__name__}.training_step does not call that of FineTune, which "
                "takes the mean over all tokens of an update; call it, or set model.loss_average=batches"
            )
        return output

    return untold


class _Schedule(LambdaLR):
    """A schedule that keeps the learning rate that it was made with where a run goes on with another one."""

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        own = self.base_lrs
        super().load_state_dict(state_dict)
        if self.base_lrs != own:
            self.base_lrs = own
            for group, lr, factor in zip(self.optimizer.param_groups, own, self.lr_lambdas, strict=True):
                group["initial_lr"], group["lr"] = lr, lr * factor(self.last_epoch)
